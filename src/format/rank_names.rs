//! Names of files that belong together by their numbers: `model_world_size_8_rank_3.pt`, `model-00001-of-00002.bin`.
//!
//! A name is text with two numbers in it, the rank and, where it has one, the world size. Taken apart it says which
//! series the file belongs to; with other numbers put in, how files for another world size are called, in the style
//! of the ones that were read.

use std::path::Path;

/// Characters between the words of a name.
const SEPARATORS: [char; 3] = ['_', '-', '.'];

/// What the name of one file tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankName {
    pub series: String,
    pub rank: u32,
    pub world_size: Option<u32>,
    pub numbering: Numbering,
    pub names: RankNames,
}

/// How a name says its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbering {
    /// As `rank_3` or `shard3`: a rank, counted from 0.
    Rank,
    /// As `00001-of-00002` alone: a rank where it counts from 0; from 1, it is a file of a set, as Hugging Face
    /// writes them.
    OfTotal,
}

/// A file name with its numbers left open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankNames(Vec<NamePiece>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum NamePiece {
    Text(String),
    Rank { width: usize },
    WorldSize { width: usize },
}

/// A number in a name: where its word begins, and its digits.
#[derive(Clone, Copy, Debug)]
struct NumberField {
    start: usize,
    digits: (usize, usize),
}

impl RankName {
    /// Take the name of a file apart; `None` where there is no rank in it. Words may be in upper case.
    #[must_use]
    pub fn parse(path: &Path) -> Option<Self> {
        let (whole_stem, name) = (path.file_stem()?.to_str()?, path.file_name()?.to_str()?);
        let stem = &*whole_stem.to_ascii_lowercase();
        let marked = marked(stem, "rank").or_else(|| marked(stem, "shard"));
        let (numbering, rank, world_size) = match marked {
            Some(rank) => {
                let after = of_total(stem, rank.digits.1).filter(|field| value(stem, *field).is_some());
                let size = self::marked(stem, "world_size").filter(|field| value(stem, *field).is_some());
                (Numbering::Rank, rank, size.or(after))
            }
            None => {
                let (rank, size) = numbered(stem)?;
                (Numbering::OfTotal, rank, Some(size))
            }
        };
        let number = value(stem, rank)?;
        let mut fields = vec![(rank, true)];
        fields.extend(world_size.map(|field| (field, false)));
        fields.sort_by_key(|(field, _)| field.start);
        let (first, last) = (fields[0].0, fields[fields.len() - 1].0);
        let around =
            [&whole_stem[..first.start], &whole_stem[last.digits.1..]].map(|text| text.trim_matches(SEPARATORS));
        let series: Vec<&str> = around.into_iter().filter(|text| !text.is_empty()).collect();
        let mut pieces = Vec::new();
        let mut at = 0;
        for (NumberField { digits: (start, end), .. }, is_rank) in fields {
            pieces.push(NamePiece::Text(name[at..start].to_owned()));
            // A number without leading zeros is as wide as it is by chance.
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
            names: RankNames(pieces),
        })
    }
}

impl RankNames {
    /// The names of a series that no file was read of: `NAME_world_size_N_rank_R.pt`.
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

    /// The name of one rank's file.
    #[must_use]
    pub fn render(&self, rank: u32, world_size: u32) -> String {
        let text = |piece: &NamePiece| match piece {
            NamePiece::Text(text) => text.clone(),
            NamePiece::Rank { width } => format!("{rank:0width$}"),
            NamePiece::WorldSize { width } => format!("{world_size:0width$}"),
        };
        self.0.iter().map(text).collect()
    }

    /// Take over the zeros that another name of the series is padded with: `rank_10` does not show them.
    pub fn widen(&mut self, other: &Self) {
        for (own, other) in self.0.iter_mut().zip(&other.0) {
            if let (NamePiece::Rank { width }, NamePiece::Rank { width: more })
            | (NamePiece::WorldSize { width }, NamePiece::WorldSize { width: more }) = (own, other)
            {
                *width = (*width).max(*more);
            }
        }
    }
}

/// The last place where `word` is followed by a number and is not the end of a longer word.
fn marked(stem: &str, word: &str) -> Option<NumberField> {
    stem.rmatch_indices(word)
        .filter(|(start, _)| !stem[..*start].ends_with(char::is_alphabetic))
        .find_map(|(start, _)| Some(NumberField { start, digits: digits_after(stem, start + word.len())? }))
}

fn after_separator(stem: &str, at: usize) -> usize {
    if stem[at..].starts_with(SEPARATORS) { at + 1 } else { at }
}

/// The digits after at most one separator.
fn digits_after(stem: &str, at: usize) -> Option<(usize, usize)> {
    let start = after_separator(stem, at);
    let len = stem[start..].find(|c: char| !c.is_ascii_digit()).unwrap_or(stem.len() - start);
    (len > 0).then_some((start, start + len))
}

/// `_of_8`, `.of.8` or `of8` at this place.
fn of_total(stem: &str, at: usize) -> Option<NumberField> {
    let word = after_separator(stem, at);
    let digits = stem[word..].starts_with("of").then(|| digits_after(stem, word + 2))??;
    Some(NumberField { start: at, digits })
}

/// The last `00001-of-00002` in a name. Words may follow it, as in the variants of diffusers: `00001-of-00002.fp16`.
fn numbered(stem: &str) -> Option<(NumberField, NumberField)> {
    let is_separator = |c: char| c == ' ' || SEPARATORS.contains(&c);
    stem.rmatch_indices("of").find_map(|(of, word)| {
        let before = &stem[..of];
        let rank_end = before.strip_suffix(is_separator).unwrap_or(before).len();
        let rank_start = stem[..rank_end].trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let after = of + word.len();
        let size = digits_after(stem, after + usize::from(stem[after..].starts_with(' ')))?;
        let is_number = rank_start < rank_end && !stem[size.1..].starts_with(char::is_alphanumeric);
        let rank = NumberField { start: rank_start, digits: (rank_start, rank_end) };
        is_number.then_some((rank, NumberField { start: rank_end, digits: size }))
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
    fn ranks_are_found_in_common_names() {
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
        ] {
            assert_eq!(parse(name), Some((series.into(), rank, world_size)), "{name}");
        }
        for name in
            ["model.pt", "frank.pt", "frank3.pt", "__3_0.pt", "sharded.pt", "model-of-8.pt", "proof3.pt", "1-of-7b.pt"]
        {
            assert_eq!(parse(name), None, "{name}");
        }
        assert_eq!(parse("model_world_size_99999999999_rank_99999999999.pt"), None);
        let numbering = |name: &str| RankName::parse(Path::new(name)).unwrap().numbering;
        assert_eq!(numbering("model-00003-of-00008.pt"), Numbering::OfTotal);
        assert_eq!(numbering("model-rank-3-of-8.pt"), Numbering::Rank);
    }

    proptest::proptest! {
        /// Whatever the name, it is what its own numbers give.
        #[test]
        fn names_are_what_their_numbers_give(
            name in "(ü|model|rank|RANK|shard|world_size|of|Of|[0-9]{1,4}|[_.-]|[a-z]){0,8}(\\.pt)?",
        ) {
            if let Some(parsed) = RankName::parse(Path::new(&name)) {
                let rendered = parsed.names.render(parsed.rank, parsed.world_size.unwrap_or(0));
                proptest::prop_assert_eq!(rendered, name);
            }
        }
    }

    #[test]
    fn names_keep_their_style() {
        for (name, rendered) in [
            ("model_world_size_8_rank_3.pt", "model_world_size_16_rank_11.pt"),
            ("model_rank_3.bin", "model_rank_11.bin"),
            ("rank-00003.pt", "rank-00011.pt"),
            ("model.rank03.of.08.pt", "model.rank11.of.16.pt"),
            ("shard_3_of_8.pth", "shard_11_of_16.pth"),
            ("model-00003-of-00008.pt", "model-00011-of-00016.pt"),
            ("rank_3_optim.pt", "rank_11_optim.pt"),
        ] {
            let names = RankName::parse(Path::new(name)).unwrap().names;
            assert_eq!(names.render(11, 16), rendered);
        }
        let names = RankNames::new_series("model");
        assert_eq!(names.render(3, 8), "model_world_size_8_rank_3.pt");
        assert_eq!(RankNames::new_series("").render(3, 8), "world_size_8_rank_3.pt");
        let names = |name: &str| RankName::parse(Path::new(name)).unwrap().names;
        let mut ten = names("rank_10.pt");
        ten.widen(&names("rank_03.pt"));
        assert_eq!(ten.render(4, 16), "rank_04.pt");
        assert_eq!(names("rank_0.pt").render(12, 16), "rank_12.pt");
    }
}
