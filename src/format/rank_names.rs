//! Parses and renders the numbered names of rank files: `model_world_size_8_rank_3.pt`, `model-00001-of-00002.bin`,
//! `ckpt_mp3_v0.tar`, `consolidated.03.pth`.
//!
//! A name is text with up to two numbers in it, the rank and optionally the world size. The text without the numbers is
//! the series of the file. With other numbers, the text becomes the name of the file for another rank or another world
//! size. Invariant: if a parsed name is rendered with its own numbers, the result is the parsed name.

use std::path::Path;

/// Characters that separate the words of a name.
const SEPARATORS: [char; 3] = ['_', '-', '.'];

/// The suffix of the torch files that makani writes. In other files, `mp` may have another meaning.
const MODEL_PARALLEL_SUFFIX: &str = "tar";

/// The text before the rank in the names of the files in which Meta publishes Llama, and their suffix.
const CONSOLIDATED: (&str, &str) = ("consolidated", "pth");

/// A file name of a rank file, divided into its series and its numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankName {
    pub series: String,
    pub rank: u32,
    pub world_size: Option<u32>,
    pub numbering: Numbering,
    pub pattern: RankNamePattern,
}

/// The meaning of the number that [`RankName::rank`] takes from a file name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbering {
    /// A rank counted from 0, as in `rank_3` or `shard3`.
    Rank,
    /// The first number of a pair such as `00001-of-00002`. If the numbers of a series start at 0, they are ranks. If
    /// the numbers start at 1, they count the files of a set (files that form one checkpoint together, as Hugging Face
    /// writes).
    OfTotal,
    /// The model-parallel rank, as in makani's `ckpt_mp3_v0.tar`. Each series of such files is a complete checkpoint,
    /// such as version 0.
    ModelParallel,
    /// The tensor-parallel rank, as in Meta's `consolidated.03.pth`. If there are several files, they have shards as plain
    /// tensors, and no file records the layout.
    TensorParallel,
}

/// A file name in which the rank and the world size are placeholders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankNamePattern(Vec<NamePiece>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum NamePiece {
    Text(String),
    Rank { width: usize },
    WorldSize { width: usize },
}

/// The position of a number in a file name, in bytes: the offset at which the text that belongs to the number starts
/// (the word `rank` or the separator before `of`), and the start and the end of the digits.
#[derive(Clone, Copy, Debug)]
struct NumberField {
    word_start: usize,
    digits: (usize, usize),
}

impl RankName {
    /// Parses the name of a file; returns `None` if the name contains no rank. Words may be in upper case.
    pub fn parse(path: &Path) -> Option<Self> {
        let (whole_stem, name) = (path.file_stem()?.to_str()?, path.file_name()?.to_str()?);
        let stem = &*whole_stem.to_ascii_lowercase();
        let marked = number_after_word(stem, "rank").or_else(|| number_after_word(stem, "shard"));
        let is_tar = || path.extension().is_some_and(|suffix| suffix == MODEL_PARALLEL_SUFFIX);
        let model_parallel = || Some((Numbering::ModelParallel, is_tar().then(|| number_after_word(stem, "mp"))??));
        let tensor_parallel = || {
            let (word, suffix) = CONSOLIDATED;
            let is_pth = path.extension().is_some_and(|own| own == suffix);
            let after = stem.strip_prefix(word).filter(|after| is_pth && after.starts_with('.'))?;
            let digits = digits_after(stem, stem.len() - after.len()).filter(|(_, end)| *end == stem.len())?;
            Some((Numbering::TensorParallel, NumberField { word_start: word.len(), digits }))
        };
        let (numbering, rank, world_size) = match (marked, model_parallel().or_else(tensor_parallel)) {
            (Some(rank), _) => {
                let after = total_after(stem, rank.digits.1).filter(|field| value(stem, *field).is_some());
                let size = self::number_after_word(stem, "world_size").filter(|field| value(stem, *field).is_some());
                (Numbering::Rank, rank, size.or(after))
            }
            (None, Some((numbering, rank))) => (numbering, rank, None),
            (None, None) => {
                let (rank, size) = rank_of_total(stem)?;
                (Numbering::OfTotal, rank, Some(size))
            }
        };
        let number = value(stem, rank)?;
        let mut fields = vec![(rank, true)];
        fields.extend(world_size.map(|field| (field, false)));
        fields.sort_by_key(|(field, _)| field.word_start);
        let (first, last) = (fields[0].0, fields[fields.len() - 1].0);
        let around =
            [&whole_stem[..first.word_start], &whole_stem[last.digits.1..]].map(|text| text.trim_matches(SEPARATORS));
        let series: Vec<&str> = around.into_iter().filter(|text| !text.is_empty()).collect();
        let mut pieces = Vec::new();
        let mut at = 0;
        for (NumberField { digits: (start, end), .. }, is_rank) in fields {
            pieces.push(NamePiece::Text(name[at..start].to_owned()));
            // A number without leading zeros does not show that all numbers of the series have its width.
            let width = if name[start..end].starts_with('0') { end - start } else { 1 };
            pieces.push(if is_rank { NamePiece::Rank { width } } else { NamePiece::WorldSize { width } });
            at = end;
        }
        pieces.push(NamePiece::Text(name[at..].to_owned()));
        Some(Self {
            series: series.join("_"),
            rank: number,
            world_size: world_size.and_then(|field| value(stem, field)),
            numbering,
            pattern: RankNamePattern(pieces),
        })
    }
}

impl RankNamePattern {
    /// Returns the pattern for the file names of a new series: `NAME_world_size_N_rank_R.pt`.
    #[must_use]
    pub fn new_series(name: &str) -> Self {
        let prefix = if name.is_empty() { String::new() } else { format!("{name}_") };
        Self(vec![
            NamePiece::Text(format!("{prefix}world_size_")),
            NamePiece::WorldSize { width: 1 },
            NamePiece::Text(String::from("_rank_")),
            NamePiece::Rank { width: 1 },
            NamePiece::Text(String::from(".pt")),
        ])
    }

    /// Returns the name of one rank's file.
    pub fn render(&self, rank: u32, world_size: u32) -> String {
        let text = |piece: &NamePiece| match piece {
            NamePiece::Text(text) => text.clone(),
            NamePiece::Rank { width } => format!("{rank:0width$}"),
            NamePiece::WorldSize { width } => format!("{world_size:0width$}"),
        };
        self.0.iter().map(text).collect()
    }

    /// Returns whether the names show that the files have shards as plain tensors.
    pub fn has_shards(&self) -> bool {
        RankName::parse(Path::new(&self.render(0, 1))).is_some_and(|name| name.numbering == Numbering::TensorParallel)
    }

    /// Compares the width (number of digits) of each number with another name of the series, and uses the larger width.
    /// This is needed because a name such as `rank_10` does not show whether numbers are padded with zeros.
    pub fn widen_padding(&mut self, other: &Self) {
        for (own, other) in self.0.iter_mut().zip(&other.0) {
            if let (NamePiece::Rank { width }, NamePiece::Rank { width: more })
            | (NamePiece::WorldSize { width }, NamePiece::WorldSize { width: more }) = (own, other)
            {
                *width = (*width).max(*more);
            }
        }
    }
}

/// Returns whether Composer gives this name to the folder of a sharded checkpoint, or to the series of its rank files:
/// `ep1-ba500`, for epoch 1 and batch 500.
///
/// Source: `CheckpointSaver` in `composer/callbacks/checkpoint_saver.py` (0.32).
pub fn is_composer_step(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers = name.strip_prefix("ep").and_then(|rest| rest.split_once("-ba"));
    numbers.is_some_and(|(epoch, batch)| is_number(epoch) && is_number(batch))
}

/// Returns the last number that follows `word`, directly or after one separator. A longer word that only ends in `word`
/// is not accepted.
fn number_after_word(stem: &str, word: &str) -> Option<NumberField> {
    stem.rmatch_indices(word)
        .filter(|(start, _)| !stem[..*start].ends_with(char::is_alphabetic))
        .find_map(|(start, _)| Some(NumberField { word_start: start, digits: digits_after(stem, start + word.len())? }))
}

fn after_separator(stem: &str, at: usize) -> usize {
    if stem[at..].starts_with(SEPARATORS) { at + 1 } else { at }
}

/// Returns the range, in bytes, of the digits that begin at the offset `at`, or after one separator at `at`.
fn digits_after(stem: &str, at: usize) -> Option<(usize, usize)> {
    let start = after_separator(stem, at);
    let len = stem[start..].find(|c: char| !c.is_ascii_digit()).unwrap_or(stem.len() - start);
    (len > 0).then_some((start, start + len))
}

/// Returns the number in `_of_8`, `.of.8` or `of8` at the offset `at`.
fn total_after(stem: &str, at: usize) -> Option<NumberField> {
    let word = after_separator(stem, at);
    let digits = stem[word..].starts_with("of").then(|| digits_after(stem, word + 2))??;
    Some(NumberField { word_start: at, digits })
}

/// Returns the two numbers of the last pair such as `00001-of-00002` in a name. Words may follow the pair, as in the
/// variants of diffusers: `00001-of-00002.fp16`.
fn rank_of_total(stem: &str) -> Option<(NumberField, NumberField)> {
    let is_separator = |c: char| c == ' ' || SEPARATORS.contains(&c);
    stem.rmatch_indices("of").find_map(|(of, word)| {
        let before = &stem[..of];
        let rank_end = before.strip_suffix(is_separator).unwrap_or(before).len();
        let rank_start = stem[..rank_end].trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let after = of + word.len();
        let size = digits_after(stem, after + usize::from(stem[after..].starts_with(' ')))?;
        let is_number = rank_start < rank_end && !stem[size.1..].starts_with(char::is_alphanumeric);
        let rank = NumberField { word_start: rank_start, digits: (rank_start, rank_end) };
        is_number.then_some((rank, NumberField { word_start: rank_end, digits: size }))
    })
}

fn value(stem: &str, field: NumberField) -> Option<u32> {
    stem[field.digits.0..field.digits.1].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str) -> Option<(String, u32, Option<u32>)> {
        RankName::parse(Path::new(name)).map(|name| (name.series, name.rank, name.world_size))
    }

    #[test]
    fn step_of_composer_needs_epoch_and_batch() {
        for (name, expected) in [("ep0-ba2", true), ("ep12-ba500", true), ("ep-ba2", false), ("ep1-ba", false)] {
            assert_eq!(is_composer_step(name), expected, "{name}");
        }
        assert!(!is_composer_step("ep1-ba2-hf") && !is_composer_step("latest"));
    }

    #[test]
    fn common_names_give_series_rank_and_size() {
        for (name, series, rank, world_size) in [
            ("model_world_size_8_rank_3.pt", "model", 3, Some(8)),
            ("extra_state_world_size_2_rank_0.pt", "extra_state", 0, Some(2)),
            ("rank_12.pt", "", 12, None),
            ("optim-rank7.pt", "optim", 7, None),
            ("model_rank_1_of_4.pt", "model", 1, Some(4)),
            ("model_rank_3.pt", "model", 3, None),
            ("rank3.pt", "", 3, None),
            ("rank-00003.pt", "", 3, None),
            ("model.rank3.of.8.pt", "model", 3, Some(8)),
            ("shard_3_of_8.pt", "", 3, Some(8)),
            ("model_part-0-shard3.pt", "model_part-0", 3, None),
            ("rank_3_optim.pt", "optim", 3, None),
            ("pytorch_model_rank0.bin", "pytorch_model", 0, None),
            ("model-00003-of-00008.pt", "model", 3, Some(8)),
            ("00003_of_00008.pt", "", 3, Some(8)),
            ("model-00003-of-00008.fp16.safetensors", "model_fp16", 3, Some(8)),
            ("model.fp16-00003-of-00008.safetensors", "model.fp16", 3, Some(8)),
            ("model-00003-of-00008 (1).safetensors", "model_ (1)", 3, Some(8)),
            ("Model-00003-OF-00008.pt", "Model", 3, Some(8)),
            ("model-00003of00008.pt", "model", 3, Some(8)),
            ("model (3 of 8).pt", "model (_)", 3, Some(8)),
            ("Model_Rank_3.pt", "Model", 3, None),
            ("ckpt_mp3_v0.tar", "ckpt_v0", 3, None),
            ("best_ckpt_mp12.tar", "best_ckpt", 12, None),
            ("consolidated.03.pth", "consolidated", 3, None),
        ] {
            assert_eq!(parse(name), Some((series.into(), rank, world_size)), "{name}");
        }
        for name in [
            "model.pt",
            "frank.pt",
            "frank3.pt",
            "__3_0.pt",
            "sharded.pt",
            "model-of-8.pt",
            "proof3.pt",
            "1-of-7b.pt",
            "ckpt_mp3_v0.pt",
            "camp3.tar",
            "ckpt_mp.tar",
            "consolidated.pth",
            "consolidated.00.pt",
            "consolidated.00.model.pth",
            "consolidated00.pth",
            "consolidatedü.pth",
            "unconsolidated.00.pth",
        ] {
            assert_eq!(parse(name), None, "{name}");
        }
        assert_eq!(parse("model_world_size_99999999999_rank_99999999999.pt"), None);
        let numbering = |name: &str| RankName::parse(Path::new(name)).unwrap().numbering;
        assert_eq!(numbering("model-00003-of-00008.pt"), Numbering::OfTotal);
        assert_eq!(numbering("model-rank-3-of-8.pt"), Numbering::Rank);
        assert_eq!(numbering("ckpt_mp3_v0.tar"), Numbering::ModelParallel);
        assert_eq!(numbering("consolidated.03.pth"), Numbering::TensorParallel);
    }

    proptest::proptest! {
        /// Asserts that a name that can be parsed is rendered back as the same text.
        #[test]
        fn parsed_name_renders_back_equal(
            name in "(ü|model|rank|RANK|shard|world_size|of|Of|mp|consolidated|[0-9]{1,4}|[_.-]|[a-z]){0,8}(\\.pt|\\.tar|\\.pth)?",
        ) {
            if let Some(parsed) = RankName::parse(Path::new(&name)) {
                let rendered = parsed.pattern.render(parsed.rank, parsed.world_size.unwrap_or(0));
                proptest::prop_assert_eq!(rendered, name);
            }
        }
    }

    #[test]
    fn rendered_name_keeps_the_style() {
        for (name, rendered) in [
            ("model_world_size_8_rank_3.pt", "model_world_size_16_rank_11.pt"),
            ("model_rank_3.bin", "model_rank_11.bin"),
            ("rank-00003.pt", "rank-00011.pt"),
            ("model.rank03.of.08.pt", "model.rank11.of.16.pt"),
            ("shard_3_of_8.pth", "shard_11_of_16.pth"),
            ("model-00003-of-00008.pt", "model-00011-of-00016.pt"),
            ("rank_3_optim.pt", "rank_11_optim.pt"),
            ("ckpt_mp3_v0.tar", "ckpt_mp11_v0.tar"),
            ("consolidated.03.pth", "consolidated.11.pth"),
        ] {
            let names = RankName::parse(Path::new(name)).unwrap().pattern;
            assert_eq!(names.render(11, 16), rendered);
        }
        let names = RankNamePattern::new_series("model");
        assert_eq!(names.render(3, 8), "model_world_size_8_rank_3.pt");
        assert_eq!(RankNamePattern::new_series("").render(3, 8), "world_size_8_rank_3.pt");
        let names = |name: &str| RankName::parse(Path::new(name)).unwrap().pattern;
        let mut ten = names("rank_10.pt");
        ten.widen_padding(&names("rank_03.pt"));
        assert_eq!(ten.render(4, 16), "rank_04.pt");
        assert_eq!(names("rank_0.pt").render(12, 16), "rank_12.pt");
    }
}
