//! The format of a destination, chosen by `--to` or by the suffix of DST.

use std::path::Path;

use super::options::DestinationOptions;
use crate::error::{Error, Result};
use crate::format::{Format, WriteShards};
use crate::storage::lookup;

/// Returns the format to write: `--to`, otherwise the format of DST's suffix, otherwise `default`.
///
/// # Errors
/// `Usage` if dtshard cannot write the format, if `--torch-version` has no effect, or if the suffix belongs to an
/// unsupported file format or looks misspelt. Without the error about the suffix, DST would become a folder.
pub fn target_format(args: &DestinationOptions, destination: Option<&Path>, default: Format) -> Result<Format> {
    let to = named_format(args, destination, default)?;
    match &args.torch_version {
        Some(version) if !to.entry().writers.shards.is_some_and(WriteShards::depends_on_torch_version) => {
            Err(Error::usage(
                format!(
                    "options::torch_version {version} applies only to DTensors in rank files, but DST has format {to}"
                ),
                "omit options::torch_version: all supported versions of PyTorch load the same files",
            ))
        }
        _ => Ok(to),
    }
}

fn named_format(args: &DestinationOptions, destination: Option<&Path>, default: Format) -> Result<Format> {
    const OTHERS: [&str; 10] = ["gguf", "ggml", "h5", "npz", "npy", "onnx", "msgpack", "pkl", "zip", "json"];
    match args.to {
        Some(to) if to.writing_verbs().is_empty() => {
            let written = Format::ALL.iter().filter(|format| !format.writing_verbs().is_empty());
            return Err(Error::usage(
                format!("options::to {to}: dtshard reads this format, but does not write it"),
                format!("omit options::to, or name one of {}", join(written.map(Format::to_string), "or")),
            ));
        }
        Some(to) => return Ok(to),
        None => {}
    }
    let suffix = destination.and_then(Path::extension).and_then(|suffix| suffix.to_str());
    let (Some(destination), Some(suffix)) = (destination, suffix) else { return Ok(default) };
    if lookup::is_folder(destination)? {
        return Ok(default);
    }
    if let Some(format) = Format::from_suffix(suffix) {
        return Ok(format);
    }
    let mut known = suffixes();
    let is_misspelt = suffix.len() > 4 && known.any(|known| strsim::levenshtein(known, suffix) <= 2);
    if !OTHERS.contains(&suffix) && !is_misspelt {
        return Ok(default);
    }
    Err(Error::usage(
        format!("DST ends in .{suffix}, which is not an output format"),
        format!(
            "use a file name that ends in {}, or name the format with options::to",
            join(suffixes().map(|suffix| format!(".{suffix}")), "or")
        ),
    ))
}

/// Returns the file suffixes that select a format.
fn suffixes() -> impl Iterator<Item = &'static str> {
    Format::ALL.iter().flat_map(|format| format.entry().suffixes).copied()
}

/// Returns the error of a verb that writes whole tensors, if the format `to` stores only shards.
pub fn holds_shards(verb: &str, to: Format) -> Error {
    let is_whole = |format: &&Format| format.entry().writers.whole.is_some();
    let mut formats: Vec<&Format> = Format::ALL.iter().filter(is_whole).collect();
    // In the hint, formats that also store objects come first.
    formats.sort_by_key(|format| !format.holds_objects());
    let formats = join(formats.into_iter().map(Format::to_string), "or");
    let hint = match to.entry().writers.state {
        Some(_) => format!("use `dtshard reshard` with options::to {to}"),
        None => String::from("use `dtshard reshard` with options::mesh to write shards"),
    };
    Error::usage(format!("{verb} writes whole tensors, in format {formats}, not {to}"), hint)
}

/// Returns the error of a verb that writes shards, if the format `to` stores only whole tensors.
pub fn holds_whole_tensors(to: Format) -> Error {
    let is_sharded = |format: &&Format| format.entry().writers.shards.is_some();
    let shards = Format::ALL.iter().filter(is_sharded).map(|format| format!("options::to {format}"));
    Error::usage(
        format!("{to} stores whole tensors, which have no mesh"),
        format!(
            "{} write shards; `dtshard unshard` and `dtshard consolidate` write whole tensors",
            join(shards, "and")
        ),
    )
}

/// Joins words with commas, and the last two words with a conjunction.
fn join(words: impl Iterator<Item = String>, conjunction: &str) -> String {
    let words: Vec<String> = words.collect();
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} {conjunction} {last}", rest.join(", ")),
        _ => words.concat(),
    }
}
