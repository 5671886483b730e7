//! Detects formats of other frameworks and addresses that are not paths, and refuses them with an error that names the
//! format and a way to convert it.
//!
//! Only names and the first bytes of files are examined. This module must never refuse a file that this crate can read.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::shortfall::Shortfall;
use super::{Format, deepspeed, list};
use crate::error::{Error, Result};
use crate::storage::{lookup, regular_file};

fn refuse(path: &Path, what: &str, hint: &str) -> Error {
    Error::unsupported(format!("{} is {what}", path.display()), hint)
}

/// Returns the error for a file in a format of another framework.
fn refuse_format(path: &Path, what: &str, hint: &str) -> Error {
    refuse(path, &format!("{what}, which dtshard does not read"), hint)
}

/// Refuses a path that is an address, such as `s3://bucket/checkpoint`.
///
/// # Errors
/// `Unsupported` naming the kind of address.
pub fn refuse_address(path: &Path) -> Result<()> {
    let Some((scheme, _)) = path.to_str().and_then(|text| text.split_once("://")) else { return Ok(()) };
    let is_scheme = !scheme.is_empty() && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    if !is_scheme || lookup::exists(path)? {
        return Ok(());
    }
    let (what, hint) = match scheme {
        "s3" | "s3a" | "gs" | "gcs" | "az" | "abfs" | "abfss" | "r2" | "oss" => {
            ("object storage", "copy the checkpoint to a local disk first, or mount the bucket")
        }
        "hf" => ("a Hugging Face repository", "download it first: `hf download REPO --local-dir DIR`"),
        "file" => ("an address of a local file", "give the path itself, without file://"),
        _ => ("an address, not a path", "copy the checkpoint to a local disk first"),
    };
    Err(refuse(path, &format!("{what} ({scheme}://), and dtshard reads only files and folders"), hint))
}

/// A format of another framework that is a folder.
struct ForeignFolder {
    what: &'static str,
    hint: &'static str,
    matches: fn(&FolderNames<'_>) -> Result<bool>,
}

/// A folder, the names of its files, and the format that the user requires.
struct FolderNames<'a> {
    folder: &'a Path,
    names: &'a [String],
    from: Option<Format>,
}

impl FolderNames<'_> {
    fn any_name(&self, test: impl Fn(&str) -> bool) -> bool {
        self.names.iter().any(|name| test(name))
    }
}

/// The formats of other frameworks that are folders, in the order of the checks.
const FOLDERS: [ForeignFolder; 4] = [
    ForeignFolder {
        what: "one rank's folder of a Megatron-LM checkpoint, which dtshard does not read",
        hint: MEGATRON,
        matches: |folder| {
            let is_named_so = || folder.from.is_none() && is_folder_of_rank(folder.folder);
            Ok(folder.any_name(|name| name == MEGATRON_FILE) || is_named_so())
        },
    },
    ForeignFolder {
        what: MEGATRON_LM,
        hint: MEGATRON,
        matches: |folder| Ok(folder.any_name(|name| name.starts_with("mp_rank_") && !deepspeed::is_states(name))),
    },
    ForeignFolder {
        what: "a Megatron-LM checkpoint (torch_dist), which dtshard reads only with options::from dcp",
        hint: "read its tensors under Megatron's names with options::from dcp, or export Hugging Face names with \
               Megatron-Bridge",
        matches: |folder| {
            let may_be_one = folder.any_name(|name| name == "metadata.json") && folder.from != Some(Format::Dcp);
            Ok(may_be_one && is_torch_dist(&folder.folder.join("metadata.json"))?)
        },
    },
    ForeignFolder {
        what: "a JAX checkpoint (Orbax), which dtshard does not read",
        hint: "load it with orbax and save its arrays with safetensors.numpy",
        matches: |folder| Ok(folder.any_name(|name| ["_CHECKPOINT_METADATA", "manifest.ocdbt"].contains(&name))),
    },
];

/// Returns an error if the names of the files in a folder show that the folder has a format of another framework.
///
/// # Errors
/// `Unsupported` naming the format.
pub fn refuse_folder(folder: &Path, names: &[String], from: Option<Format>) -> Result<()> {
    let listed = FolderNames { folder, names, from };
    for row in &FOLDERS {
        if (row.matches)(&listed)? {
            return Err(refuse(folder, row.what, row.hint));
        }
    }
    Ok(())
}

/// Returns a shortfall (the missing files of a set) if a torch file is one rank's file of another framework, such as
/// `mp_rank_00_model_states.pt` of DeepSpeed. The shortfall lists the files of the other ranks.
///
/// # Errors
/// `Io` if the folder of the files cannot be listed.
pub fn rank_file(path: &Path) -> Result<Option<Shortfall>> {
    let absolute = std::path::absolute(path).map_err(Error::io("find", path))?;
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let folder = absolute.parent().unwrap_or(Path::new("/"));
    let (own, own_folder) = (name(&absolute), name(folder));
    let others = |folder: &Path, own: &str, is_part: &dyn Fn(&str) -> bool| -> Result<Vec<String>> {
        Ok(list(folder)?.into_iter().filter(|name| name != own && is_part(name)).collect())
    };
    let (missing, what, hint) = if deepspeed::is_states(&own) {
        (
            others(folder, &own, &deepspeed::is_states)?,
            "one rank's file of a DeepSpeed checkpoint, so it has only a part of the tensors",
            DEEPSPEED,
        )
    } else if is_megatron_rank(&own_folder) || own == MEGATRON_FILE {
        let beside = folder.parent().filter(|_| is_megatron_rank(&own_folder));
        let folders = beside.map_or(Ok(Vec::new()), |above| others(above, &own_folder, &is_megatron_rank))?;
        (folders, "one rank's file of a Megatron-LM checkpoint, so it has only a part of the tensors", MEGATRON)
    } else {
        return Ok(None);
    };
    Ok(Some(Shortfall { missing, error: refuse(path, what, hint), allowed: None, is_one_file: false }))
}

const DEEPSPEED: &str = "give the folder that contains the files of all ranks";
const MEGATRON: &str = "in Megatron-LM, save it with --ckpt-format torch_dist, or export it with Megatron's own tools";

/// The name that Megatron-LM gives to the file of every rank.
const MEGATRON_FILE: &str = "model_optim_rng.pt";

/// Returns whether `name` is a name that Megatron-LM gives to the folder of a rank: `mp_rank_00`, `mp_rank_00_000`.
fn is_megatron_rank(name: &str) -> bool {
    let numbers = name.strip_prefix("mp_rank_").map(|rest| rest.split('_'));
    numbers.is_some_and(|mut parts| parts.all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit())))
}

fn is_folder_of_rank(folder: &Path) -> bool {
    let absolute = std::path::absolute(folder).ok();
    let name = absolute.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
    name.is_some_and(is_megatron_rank)
}

const MEGATRON_LM: &str = "a Megatron-LM checkpoint, which dtshard does not read";

/// Returns the error for a Megatron-LM checkpoint.
pub fn megatron_error(folder: &Path) -> Error {
    refuse(folder, MEGATRON_LM, MEGATRON)
}

/// Returns whether the file at `path` is a `metadata.json` as Megatron's `dist_checkpointing` writes it.
fn is_torch_dist(path: &Path) -> Result<bool> {
    const LIMIT: u64 = 1 << 20;
    if !lookup::is_file(path)? {
        return Ok(false);
    }
    let mut text = Vec::new();
    let file = File::open(path).map_err(lookup::refused("open", path))?;
    file.take(LIMIT).read_to_end(&mut text).map_err(Error::io("read", path))?;
    let json = serde_json::from_slice::<serde_json::Value>(&text);
    Ok(json.is_ok_and(|json| json.get("sharded_backend").is_some()))
}

/// Returns the first bytes of a file, by which formats are distinguished.
///
/// # Errors
/// `Io` if the path is not a regular file or cannot be read.
pub fn first_bytes(path: &Path) -> Result<Vec<u8>> {
    let mut head = Vec::new();
    regular_file(path)?;
    let file = File::open(path).map_err(lookup::refused("open", path))?;
    file.take(512).read_to_end(&mut head).map_err(Error::io("read", path))?;
    Ok(head)
}

/// A format of another framework that is a single file.
struct ForeignFile {
    what: &'static str,
    hint: &'static str,
    /// The bytes that identify the format: their offset in the file, and their value. `None` if no bytes identify the
    /// format.
    start: Option<(usize, &'static [u8])>,
    /// Parts of file names that identify the format. A file name must end with the text, or contain the text if the
    /// text ends in a hyphen.
    suffixes: &'static [&'static str],
}

const FILES: [ForeignFile; 8] = [
    ForeignFile {
        what: "a legacy torch file (before PyTorch 1.6, or saved with _use_new_zipfile_serialization=False)",
        hint: "load it with torch and save it again",
        start: Some((0, &[0x80, 2, 0x8A, 0x0A, 0x6C, 0xFC, 0x9C, 0x46, 0xF9, 0x20, 0x6A, 0xA8, 0x50, 0x19, 0x2E])),
        suffixes: &[],
    },
    ForeignFile {
        what: "a tar file in PyTorch's earliest format",
        hint: "load it with torch and save it again",
        start: Some((257, b"ustar")),
        suffixes: &[],
    },
    ForeignFile {
        what: "a GGUF file",
        hint: "use the original checkpoint, because the tensors of a GGUF file have the quantization of llama.cpp",
        start: Some((0, b"GGUF")),
        suffixes: &[".gguf"],
    },
    ForeignFile {
        what: "an HDF5 file (Keras)",
        hint: "load it with Keras and save its weights with safetensors",
        start: Some((0, b"\x89HDF\r\n\x1a\n")),
        suffixes: &[".h5", ".hdf5", ".keras"],
    },
    ForeignFile {
        what: "a NumPy file",
        hint: "load it with numpy and save its arrays with safetensors.numpy.save_file",
        start: Some((0, b"\x93NUMPY")),
        suffixes: &[".npz", ".npy"],
    },
    ForeignFile {
        what: "an ONNX graph",
        hint: "use the PyTorch checkpoint from which the ONNX graph was exported",
        start: None,
        suffixes: &[".onnx"],
    },
    ForeignFile {
        what: "a Flax checkpoint (msgpack)",
        hint: "load it with flax.serialization and save its arrays with safetensors.numpy",
        start: None,
        suffixes: &[".msgpack"],
    },
    ForeignFile {
        what: "a TensorFlow checkpoint",
        hint: "load it with TensorFlow and save its variables with safetensors",
        start: None,
        suffixes: &[".ckpt.data-", ".ckpt.index", ".ckpt.meta"],
    },
];

impl ForeignFile {
    fn matches_start(&self, head: &[u8]) -> bool {
        self.start.is_some_and(|(offset, bytes)| head.get(offset..).is_some_and(|rest| rest.starts_with(bytes)))
    }

    fn matches_name(&self, name: &str) -> bool {
        let is_end =
            |suffix: &&str| if suffix.ends_with('-') { name.contains(*suffix) } else { name.ends_with(*suffix) };
        self.suffixes.iter().any(is_end)
    }
}

/// Returns an error if the first bytes or the name of a file show a format of another framework.
///
/// # Errors
/// `Unsupported` naming the format.
pub fn refuse_file(path: &Path, head: &[u8]) -> Result<()> {
    match FILES.iter().find(|row| row.matches_start(head)) {
        Some(row) => Err(refuse_format(path, row.what, row.hint)),
        None => refuse_by_name(path).map_or(Ok(()), Err),
    }
}

/// Returns the error for a file whose name belongs to another framework's format.
pub fn refuse_by_name(path: &Path) -> Option<Error> {
    let name = path.file_name()?.to_str()?;
    let row = FILES.iter().find(|row| row.matches_name(name))?;
    Some(refuse_format(path, row.what, row.hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_format_is_named() {
        let named = |name: &str, head: &[u8]| refuse_file(Path::new(name), head).map_err(|error| error.to_string());
        for (name, head, word) in [
            ("model.gguf", &b"GGUF\x03"[..], "GGUF"),
            ("model", b"GGUF\x03", "GGUF"),
            ("model.bin", b"\x89HDF\r\n\x1a\n", "HDF5"),
            ("weights.h5", b"", "HDF5"),
            ("arrays.npz", b"PK\x03\x04", "NumPy"),
            ("array", b"\x93NUMPY\x01", "NumPy"),
            ("model.onnx", b"\x08", "ONNX"),
            ("flax_model.msgpack", b"\x81", "Flax"),
            ("model.ckpt.data-00000-of-00001", b"", "TensorFlow"),
            ("model.ckpt.index", b"", "TensorFlow"),
        ] {
            assert!(named(name, head).unwrap_err().contains(word), "{name}");
        }
        assert!(named("model.ckpt", b"PK\x03\x04").is_ok());
        assert!(named("model.pt", b"PK\x03\x04").is_ok());
    }

    #[test]
    fn address_is_an_error() {
        for (path, word) in [
            ("s3://bucket/x", "object storage"),
            ("gs://bucket/x", "object storage"),
            ("hf://org/model", "Hugging Face"),
            ("https://example.org/x.pt", "an address"),
            ("file:///x", "local file"),
        ] {
            assert!(refuse_address(Path::new(path)).unwrap_err().to_string().contains(word), "{path}");
        }
        for path in ["/data/x", "x", "a b://x", "://x"] {
            assert!(refuse_address(Path::new(path)).is_ok(), "{path}");
        }
    }
}
