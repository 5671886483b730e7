//! What a path holds, from names and first bytes.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::series::SeriesSet;
use super::{Format, dcp, safetensors};
use crate::error::{Error, Result};
use crate::storage::regular_file;

/// A format and the files that make it up.
#[derive(Debug)]
pub enum Detected {
    Dcp,
    Safetensors { paths: Vec<PathBuf>, index: Option<PathBuf> },
    Torch { paths: Vec<PathBuf> },
    TorchRanks(SeriesSet),
}

impl Detected {
    fn format(&self) -> Format {
        match self {
            Self::Dcp => Format::Dcp,
            Self::Safetensors { .. } => Format::Safetensors,
            Self::Torch { .. } => Format::Torch,
            Self::TorchRanks(_) => Format::TorchRanks,
        }
    }
}

const TORCH_INDEX_NAME: &str = "pytorch_model.bin.index.json";

/// Look at `path`; `from` says what it must be.
///
/// # Errors
/// `Unsupported` where it is nothing that is read, with what to do for formats that are known by name; `Usage` where
/// it holds two formats, or not the one of `from`.
pub fn detect(path: &Path, from: Option<Format>) -> Result<Detected> {
    let metadata = std::fs::metadata(path).map_err(Error::io("open", path))?;
    if !metadata.is_dir() && !metadata.is_file() {
        // A pipe would be waited for.
        return Err(Error::unsupported(
            format!("{}: neither a file nor a folder", path.display()),
            "checkpoints are read at random: write it to a file first",
        ));
    }
    let mut found = if metadata.is_dir() { detect_folder(path, from)? } else { vec![detect_file(path)?] };
    if let Some(from) = from {
        found.retain(|found| found.format() == from);
        if found.is_empty() {
            return Err(Error::usage(
                format!("{} does not hold the format {from}", path.display()),
                "leave --from out to have the format detected",
            ));
        }
    }
    if found.len() > 1 {
        let names: Vec<&str> = found.iter().map(|found| found.format().name()).collect();
        return Err(Error::usage(
            format!("{} holds two formats: {}", path.display(), names.join(" and ")),
            format!("say which with --from {}", names[0]),
        ));
    }
    found.pop().ok_or_else(|| unknown_folder(path))
}

fn unknown_folder(path: &Path) -> Error {
    Error::unsupported(
        format!("{} holds no checkpoint of a known format", path.display()),
        "known are DCP directories (.metadata), rank files (*_rank_N.pt), torch.save files and safetensors; give the \
         folder that holds the files themselves",
    )
}

fn detect_folder(folder: &Path, from: Option<Format>) -> Result<Vec<Detected>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let entry = entry.map_err(Error::io("list", folder))?;
        if let Ok(name) = entry.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort();
    refuse_known(folder, &names)?;
    let with_suffix = |suffixes: &[&str]| -> Vec<PathBuf> {
        let matches = |name: &&String| !name.starts_with('.') && suffixes.iter().any(|suffix| name.ends_with(suffix));
        names.iter().filter(matches).map(|name| folder.join(name)).collect()
    };
    let mut found = Vec::new();
    if !dcp::metadata_files(folder)?.is_empty() {
        found.push(Detected::Dcp);
    } else if names.iter().any(|name| name.ends_with(".distcp")) && from.is_none() {
        return Err(Error::Missing {
            path: folder.to_path_buf(),
            at: String::from("DCP directory"),
            expected: String::from("the metadata of its .distcp files"),
            missing: String::from(".metadata"),
        });
    }
    let index = names.iter().find(|name| name.ends_with(".safetensors.index.json")).map(|name| folder.join(name));
    let tensors = with_suffix(&[".safetensors"]);
    if let Some(index) = index {
        let paths = safetensors::index_files(&index)?;
        found.push(Detected::Safetensors { paths, index: Some(index) });
    } else if !tensors.is_empty() {
        found.push(Detected::Safetensors { paths: tensors, index: None });
    }
    if names.iter().any(|name| name == TORCH_INDEX_NAME) {
        let paths = safetensors::index_files(&folder.join(TORCH_INDEX_NAME))?;
        found.push(Detected::Torch { paths });
    } else {
        let saved = with_suffix(&[".pt", ".pth", ".bin", ".ckpt"]);
        match SeriesSet::group(folder, &saved)? {
            Some(series) => found.push(Detected::TorchRanks(series)),
            None if saved.len() == 1 && is_zip(&saved[0])? => found.push(Detected::Torch { paths: saved }),
            None => {}
        }
    }
    Ok(found)
}

/// Formats of other frameworks, by their file names.
fn refuse_known(folder: &Path, names: &[String]) -> Result<()> {
    let any = |test: &dyn Fn(&str) -> bool| names.iter().any(|name| test(name));
    let refuse = |what: &str, hint: &str| Err(Error::unsupported(format!("{}: {what}", folder.display()), hint));
    if any(&|name| name.ends_with("_optim_states.pt") || name.ends_with("_model_states.pt")) {
        return refuse(
            "a DeepSpeed ZeRO checkpoint",
            "convert it with DeepSpeed's zero_to_fp32.py or ds_to_universal.py first",
        );
    }
    if any(&|name| name == "latest_checkpointed_iteration.txt" || name.starts_with("mp_rank_")) {
        return refuse(
            "a Megatron-LM checkpoint",
            "save it with --ckpt-format torch_dist, or export it with Megatron's own tools",
        );
    }
    if any(&|name| name.starts_with("shard-") && name.contains("-model-") && name.ends_with(".safetensors")) {
        return refuse(
            "shards of DCP's Hugging Face writer",
            "consolidate them with torch.distributed.checkpoint's consolidate_safetensors_files",
        );
    }
    Ok(())
}

fn is_zip(path: &Path) -> Result<bool> {
    Ok(first_bytes(path)?.starts_with(b"PK\x03\x04"))
}

fn first_bytes(path: &Path) -> Result<Vec<u8>> {
    let mut head = Vec::new();
    regular_file(path)?;
    let file = File::open(path).map_err(Error::io("open", path))?;
    file.take(512).read_to_end(&mut head).map_err(Error::io("read", path))?;
    Ok(head)
}

fn detect_file(path: &Path) -> Result<Detected> {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let refuse = |what: &str, hint: &str| Err(Error::unsupported(format!("{}: {what}", path.display()), hint));
    if name == ".metadata" || name.ends_with(".distcp") {
        return refuse("one file of a DCP directory", "give the directory");
    }
    if name.ends_with(".safetensors.index.json") {
        let paths = safetensors::index_files(path)?;
        return Ok(Detected::Safetensors { paths, index: Some(path.to_path_buf()) });
    }
    if name == TORCH_INDEX_NAME {
        return Ok(Detected::Torch { paths: safetensors::index_files(path)? });
    }
    let head = first_bytes(path)?;
    let paths = vec![path.to_path_buf()];
    if head.starts_with(b"PK\x03\x04") {
        return Ok(Detected::Torch { paths });
    }
    if head.starts_with(&[0x80, 2, 0x8A, 0x0A, 0x6C, 0xFC, 0x9C, 0x46, 0xF9, 0x20, 0x6A, 0xA8, 0x50, 0x19, 0x2E]) {
        return refuse(
            "a legacy torch file (before PyTorch 1.6, or saved with _use_new_zipfile_serialization=False)",
            "load it with torch and save it again",
        );
    }
    if head.get(257..262) == Some(b"ustar") {
        return refuse("a tar file of PyTorch's earliest days", "load it with torch and save it again");
    }
    if head.get(8) == Some(&b'{') || name.ends_with(".safetensors") {
        return Ok(Detected::Safetensors { paths, index: None });
    }
    refuse(
        "not a checkpoint of a known format",
        "known are torch.save files, safetensors, DCP directories and folders of rank files",
    )
}
