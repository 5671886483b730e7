//! Divides the destination into parts in the same way as the source: several series of rank files, or several folders.
//! Sidecar files are copied with each part.

use std::path::PathBuf;
use std::sync::Arc;

use regex::bytes::Regex;

use super::source::ConversionSource;
use crate::catalog::path::key_text;
use crate::catalog::{Dict, Key, OutputFile, Path, Reservation, Value};
use crate::error::{Error, Result};
use crate::exec::sidecar_files::SidecarFile;
use crate::format::{Checkpoint, CheckpointPart, Format, PartContent, RankName, RankNamePattern};
use crate::progress::Progress;
use crate::quantity::{count, human_bytes};

/// Returns the checkpoint from which details of the output format are copied: the checkpoint of `--like`, otherwise the
/// source.
pub fn example_of(source: &ConversionSource) -> &Checkpoint {
    source.like.as_ref().unwrap_or(&source.checkpoint)
}

/// Part of the destination: a subtree of the state dict that has its own folder or its own series of rank files.
pub struct PartTarget {
    pub folder: PathBuf,
    pub state: Value,
    /// Path of the part's root in the state dict of the whole checkpoint.
    pub at: Path,
    /// Names of the part's rank files; `None` for a DCP directory, whose file names are fixed.
    pub names: Option<RankNamePattern>,
}

impl PartTarget {
    /// Converts a path in this part into a path in the state dict of the whole checkpoint.
    pub fn whole_path(&self, path: &Path) -> Path {
        Path([self.at.0.as_slice(), &path.0].concat())
    }
}

/// Returns the parts of the destination. For rank files, each top-level key of the state dict becomes a series, unless
/// the source has all keys in one series. For other formats, each folder of the source becomes a folder. A state dict
/// that cannot be divided in this way is one part.
pub fn parts(source: &ConversionSource, to: Format) -> Vec<PartTarget> {
    let state = &source.selection.catalog.state;
    // A file without ranks provides no names for rank files.
    let example = Some(example_of(source)).filter(|example| example.format.has_rank_files() || !to.has_rank_files());
    let parts = &example.unwrap_or(&source.checkpoint).parts;
    let whole = |names| PartTarget { folder: PathBuf::new(), state: state.clone(), at: Path::default(), names };
    if to.has_rank_files() {
        if let [CheckpointPart { content: PartContent::Whole, name_pattern: Some(names), .. }] =
            source.checkpoint.parts.as_slice()
            && *parts == source.checkpoint.parts
        {
            return vec![whole(Some(names.clone()))];
        }
        let known: Vec<(&str, RankNamePattern)> = parts
            .iter()
            .filter_map(|part| match (&part.content, &part.name_pattern) {
                (PartContent::Subtree(key), Some(names)) => Some((key.as_str(), names.clone())),
                _ => None,
            })
            .collect();
        let names_of = |key: &str| {
            let own = known.iter().find(|(name, _)| *name == key).map(|(_, names)| names.clone());
            own.unwrap_or_else(|| RankNamePattern::new_series(key))
        };
        return match series(state) {
            Some(series) => series
                .into_iter()
                .map(|(key, state)| PartTarget {
                    folder: PathBuf::new(),
                    state: state.clone(),
                    names: Some(names_of(&key)),
                    at: Path(vec![Key::Name(key)]),
                })
                .collect(),
            None => {
                let only = || parts.first().filter(|_| parts.len() == 1).and_then(|part| part.name_pattern.clone());
                let model = || source.like.is_some().then(|| names_of("model"));
                vec![whole(only().or_else(model).or_else(|| Some(RankNamePattern::new_series("model"))))]
            }
        };
    }
    folders(source).unwrap_or_else(|| vec![whole(None)])
}

/// Returns the top-level keys of a state dict as series of rank files. Returns `None` unless there are at least two
/// keys, one of them is the model, and each key is a valid series whose value is a dict.
///
/// Keys come from a file and become file names. A key that cannot be read back from its file name (`../model`, or
/// `model_` beside `model`) is not a valid series.
fn series(state: &Value) -> Option<Vec<(Arc<str>, &Value)>> {
    let dict = state.as_dict()?;
    let names_series = |key: &str| {
        let file = PathBuf::from(RankNamePattern::new_series(key).render(0, 1));
        RankName::parse(&file).is_some_and(|name| name.series == key)
    };
    let is_series = |(key, value): &(Value, Value)| key.as_str().is_some_and(names_series) && value.as_dict().is_some();
    let has_model = dict.entries.len() > 1 && dict.get("model").is_some();
    (has_model && dict.entries.iter().all(is_series))
        .then(|| dict.entries.iter().map(|(key, value)| (key_text(key), value)).collect())
}

/// Returns one part for each folder of the source. Returns `None` if the source has only one folder, or if an entry of
/// the state dict belongs to no folder.
fn folders(source: &ConversionSource) -> Option<Vec<PartTarget>> {
    let parts = &source.checkpoint.parts;
    let dict = source.selection.catalog.state.as_dict()?;
    if parts.len() < 2 {
        return None;
    }
    let mut targets = Vec::new();
    let mut taken = 0;
    for part in parts {
        let PartContent::Keys(keys) = &part.content else { return None };
        let own = |(key, _): &&(Value, Value)| keys.iter().any(|name| *name == *key_text(key));
        let entries: Vec<_> = dict.entries.iter().filter(own).cloned().collect();
        taken += entries.len();
        if !entries.is_empty() {
            let state = Value::Dict(Dict { entries, ..Dict::default() });
            targets.push(PartTarget { folder: part.folder.clone(), state, at: Path::default(), names: None });
        }
    }
    (taken == dict.entries.len()).then_some(targets)
}

/// The values that `fsdp_config.json` gets for the job that loads the result.
#[derive(Clone, Copy)]
pub struct NewJob {
    pub world_size: u32,
    /// The version of FSDP in the new job. `None` if `fsdp_config.json` keeps the version of the old job.
    pub fsdp_version: Option<u32>,
}

/// Returns the sidecar files to copy. If the target has one file for each rank, `fsdp_config.json` is not copied, but
/// added to `reservation` with the values of the new job.
pub fn carry_along(
    source: &ConversionSource,
    to: Format,
    job: NewJob,
    reservation: &mut Reservation,
) -> Result<Vec<SidecarFile>> {
    let root = &source.checkpoint.root;
    let mut carried = Vec::new();
    for to_path in &source.checkpoint.beside {
        let own = root.join(to_path);
        let mut file = carried_file(&source.checkpoint, source.checkpoint.place(&own), to_path.clone())?;
        if to.is_by_rank() && to_path.ends_with(FSDP_CONFIG) && (1..1 << 20).contains(&file.len) {
            let text = std::fs::read(&file.read_path).map_err(Error::io("read", &file.from))?;
            let mut file = OutputFile::new(to_path);
            file.push_header(for_new_job(&text, job));
            reservation.files.push(file);
        } else {
            if let Some(peers) = &source.peers {
                file.seen_by = peers.carriers(&own);
            }
            if !file.seen_by.is_empty() {
                file.read_path = own;
            }
            carried.push(file);
        }
    }
    Ok(carried)
}

/// Warns about empty files, and about optimizer files that trainers saved beside the checkpoint. They are copied unchanged,
/// so optimizer files match only the ranks of SRC.
pub fn warn_of_carried(carried: &[SidecarFile], source: &mut ConversionSource, progress: &dyn Progress) {
    let name = |path: &std::path::Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let is_optimizer = |file: &&SidecarFile| {
        let suffix = file.to.extension().and_then(|suffix| suffix.to_str()).unwrap_or_default();
        let is_torch = Format::from_suffix(suffix) == Some(Format::Torch);
        is_torch && name(&file.to).is_some_and(|name| name.starts_with("optim"))
    };
    let optimizers = carried.iter().filter(is_optimizer).map(|file| {
        format!("{} is copied unchanged and not resharded, because it is not part of the checkpoint", file.to.display())
    });
    for warning in empty_files(carried).chain(optimizers) {
        progress.warning(&warning);
        source.checkpoint.catalog.warnings.push(warning);
    }
}

/// Warns about empty files that are copied beside the weights.
pub fn warn_of_empty(carried: &[SidecarFile], source: &mut ConversionSource, progress: &dyn Progress) {
    for warning in empty_files(carried) {
        progress.warning(&warning);
        source.checkpoint.catalog.warnings.push(warning);
    }
}

/// Returns a warning for each empty file of a format in which no valid file is empty. Empty files of other formats may be
/// markers.
fn empty_files(carried: &[SidecarFile]) -> impl Iterator<Item = String> {
    let is_damaged = |file: &&SidecarFile| {
        let suffix = file.to.extension().and_then(|suffix| suffix.to_str()).unwrap_or_default();
        file.len == 0 && (matches!(suffix, "json" | "model" | "pkl") || Format::from_suffix(suffix).is_some())
    };
    carried.iter().filter(is_damaged).map(|file| {
        format!("{} is empty; it is copied, but a program that loads DST may need its content", file.from.display())
    })
}

/// Returns a sidecar file that is read from `place` and copied to `to` in the destination. If `place` is a copy of a
/// file of SRC, the result has the path and modification time of the original file, so that all processes identify the
/// file by equal values.
///
/// # Errors
/// `Io` if the path cannot be examined or is not a file.
pub fn carried_file(checkpoint: &Checkpoint, place: PathBuf, to: PathBuf) -> Result<SidecarFile> {
    let file = SidecarFile::new(place, to)?;
    Ok(match checkpoint.original(&file.read_path) {
        Some((from, modified)) => SidecarFile { from, modified, ..file },
        None => file,
    })
}

/// Name of the file in which trainers (verl) record the number of ranks that saved the checkpoint, and the version of FSDP.
const FSDP_CONFIG: &str = "fsdp_config.json";

/// Returns the version of FSDP in `fsdp_config.json`, if the checkpoint has this file.
pub fn fsdp_version(checkpoint: &Checkpoint) -> Option<u64> {
    let file = checkpoint.beside.iter().find(|path| path.ends_with(FSDP_CONFIG))?;
    let text = std::fs::read(checkpoint.place(&checkpoint.root.join(file))).ok()?;
    serde_json::from_slice::<serde_json::Value>(&text).ok()?.get("FSDP_version")?.as_u64()
}

fn for_new_job(text: &[u8], job: NewJob) -> Vec<u8> {
    let set = |text: &[u8], key: &str, value: u32| {
        let number = Regex::new(&format!(r#"("{key}"\s*:\s*)\d+"#)).expect("a regular expression");
        number.replace(text, format!("${{1}}{value}").as_bytes()).into_owned()
    };
    let text = set(text, "world_size", job.world_size);
    match job.fsdp_version {
        Some(version) => set(&text, "FSDP_version", version),
        None => text,
    }
}

/// Checks that the headers of all rank files fit into memory. Every rank file names every tensor, and all headers are
/// laid out before the first byte is written. `more` are bytes that the headers need in addition to the names.
///
/// # Errors
/// `Usage` if the headers need more memory than the limit.
pub fn check_room(ranks: u64, tensors: usize, more: u64, max_memory: u64) -> Result<()> {
    /// Minimum size in bytes of the pickle of one tensor, without the bytes that all ranks share.
    const TENSOR_BYTES: u64 = 128;
    let names = ranks.saturating_mul(tensors as u64).saturating_mul(TENSOR_BYTES);
    let needed = names.saturating_add(more);
    if needed <= max_memory {
        return Ok(());
    }
    Err(Error::usage(
        format!(
            "options::max_memory is too low: the headers of {ranks} rank files with {} each need at least {}",
            count(tensors, "tensor"),
            human_bytes(needed)
        ),
        "allow more memory, or write a DCP directory (reshard, options::to dcp), which names each tensor once",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fsdp_config_gets_the_values_of_the_new_job() {
        let text = b"{\n    \"FSDP_version\": 1,\n    \"world_size\": 4\n}";
        let job = NewJob { world_size: 16, fsdp_version: None };
        assert_eq!(for_new_job(text, job), b"{\n    \"FSDP_version\": 1,\n    \"world_size\": 16\n}");
        let job = NewJob { fsdp_version: Some(2), ..job };
        assert_eq!(for_new_job(text, job), b"{\n    \"FSDP_version\": 2,\n    \"world_size\": 16\n}");
        assert_eq!(for_new_job(b"{}", job), b"{}");
    }

    #[test]
    fn state_without_model_or_with_other_values_has_no_series() {
        let dict = |keys: &[&str], value: &Value| {
            let entries = keys.iter().map(|key| (Value::Str((*key).into()), value.clone())).collect();
            Value::Dict(Dict { entries, ..Dict::default() })
        };
        let empty = dict(&[], &Value::None);
        assert_eq!(series(&dict(&["model", "optim"], &empty)).unwrap().len(), 2);
        assert!(series(&dict(&["model"], &empty)).is_none());
        assert!(series(&dict(&["weights", "optim"], &empty)).is_none());
        assert!(series(&dict(&["model", "step"], &Value::Int(1))).is_none());
    }

    #[test]
    fn keys_that_are_invalid_file_names_are_not_series() {
        let empty = || Value::Dict(Dict::default());
        let with_model = |key: &str| {
            let entries = vec![(Value::Str("model".into()), empty()), (Value::Str(key.into()), empty())];
            Value::Dict(Dict { entries, ..Dict::default() })
        };
        for key in ["extra_state", "ema.0", "a_rank_3", "b_world_size_2"] {
            assert!(series(&with_model(key)).is_some(), "{key}");
        }
        for key in ["../evil", "/tmp/evil", "a/b", "..", ".", "model_", "_model", ".hidden"] {
            assert!(series(&with_model(key)).is_none(), "{key}");
        }
    }
}
