//! The format of a destination, from its name or from what the caller asks for.

use std::path::{Path, PathBuf};

use super::options::DestinationOptions;
use crate::error::{Error, Result};
use crate::format::Format;
use crate::storage::lookup;

/// The format to write: `--to`, else the suffix of DST, else `default`.
///
/// # Errors
/// `Usage` where the suffix is that of a file in another format, or nearly that of one: DST would become a folder.
pub fn target_format(args: &DestinationOptions, destination: Option<&Path>, default: Format) -> Result<Format> {
    let to = named_format(args, destination, default)?;
    match &args.torch_version {
        Some(version) if to != Format::TorchRanks => Err(Error::usage(
            format!("options::torch_version {version} is for DTensors in rank files, and DST is to be {to}"),
            "leave it out: every PyTorch that is supported loads the same",
        )),
        _ => Ok(to),
    }
}

fn named_format(args: &DestinationOptions, destination: Option<&Path>, default: Format) -> Result<Format> {
    const OTHERS: [&str; 10] = ["gguf", "ggml", "h5", "npz", "npy", "onnx", "msgpack", "pkl", "zip", "json"];
    if let Some(to) = args.to {
        return Ok(to);
    }
    let suffix = destination.and_then(Path::extension).and_then(|suffix| suffix.to_str());
    let (Some(destination), Some(suffix)) = (destination, suffix) else { return Ok(default) };
    if lookup::is_folder(destination)? {
        return Ok(default);
    }
    if let Some(format) = Format::from_suffix(suffix) {
        return Ok(format);
    }
    let mut known = Format::ALL.iter().flat_map(|format| format.entry().suffixes);
    let is_misspelt = suffix.len() > 4 && known.any(|known| strsim::levenshtein(known, suffix) <= 2);
    if !OTHERS.contains(&suffix) && !is_misspelt {
        return Ok(default);
    }
    Err(Error::usage(
        format!("DST ends in .{suffix}, which is no format that is written"),
        "files end in .safetensors, .pt, .pth, .bin or .ckpt; options::to says the format of any other name",
    ))
}

/// The error for a verb that writes whole tensors and is asked for a format of shards.
pub fn holds_shards(verb: &str, to: Format) -> Error {
    Error::usage(
        format!("{verb} writes whole tensors, to torch or safetensors, not to {to}"),
        "use `dtshard reshard` with a options::mesh to write shards",
    )
}

/// The name of a single-file destination.
pub fn file_name(destination: Option<&Path>, default: &str) -> PathBuf {
    destination.and_then(Path::file_name).map_or_else(|| PathBuf::from(default), PathBuf::from)
}
