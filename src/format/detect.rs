//! What a path holds, from names and first bytes.

use std::path::{Path, PathBuf};

use super::foreign::{self, first_bytes};
use super::index::{Index, is_safetensors_index, is_torch_index, main_index};
use super::known_files::is_no_model;
use super::safetensors::INDEX_NAME;
use super::safetensors::sharding::ShardName;
use super::series::{SeriesSet, group};
use super::{Format, dcp, list, local};
use crate::error::{Error, Result};
use crate::name_list::{FEW, short_list};
use crate::storage::lookup::{self, Kind};

/// A format and the files that make it up.
#[derive(Debug)]
pub enum Detected {
    Dcp,
    Safetensors { paths: Vec<PathBuf>, index: Option<PathBuf> },
    DcpHf { paths: Vec<PathBuf> },
    Torch { paths: Vec<PathBuf>, index: Option<PathBuf> },
    TorchRanks(SeriesSet),
    Local { paths: Vec<PathBuf> },
}

impl Detected {
    fn format(&self) -> Format {
        match self {
            Self::Dcp => Format::Dcp,
            Self::Safetensors { .. } => Format::Safetensors,
            Self::DcpHf { .. } => Format::DcpHf,
            Self::Torch { .. } => Format::Torch,
            Self::TorchRanks(_) => Format::TorchRanks,
            Self::Local { .. } => Format::Local,
        }
    }

    /// Whether rank files hold flat parameters shows when they are read.
    fn can_be(&self, format: Format) -> bool {
        self.format() == format || matches!(self, Self::TorchRanks(_)) && format == Format::FsdpFlat
    }
}

const TORCH_INDEX_NAME: &str = "pytorch_model.bin.index.json";

/// Look at `path`; `from` says what it must be.
///
/// # Errors
/// `Unsupported` where it is nothing that is read, with what to do for formats that are known by name; `Usage` where
/// it holds two formats, or not the one of `from`.
pub fn detect(path: &Path, from: Option<Format>) -> Result<Detected> {
    match look(path, from)? {
        Some(found) => Ok(found),
        None => lone_file(path, from),
    }
}

/// As [`detect`]; `None` for a folder that may hold checkpoints in folders of its own: files that say what they are
/// come first, then folders, and a torch file that says nothing of itself last, as verl leaves a `data.pt` above its
/// checkpoints.
///
/// # Errors
/// As [`detect`].
pub fn look(path: &Path, from: Option<Format>) -> Result<Option<Detected>> {
    let metadata = std::fs::metadata(path).map_err(lookup::refused("open", path))?;
    if !metadata.is_dir() && !metadata.is_file() {
        // A pipe would be waited for.
        return Err(Error::unsupported(
            format!("{}: neither a file nor a folder", path.display()),
            "checkpoints are read at random: write it to a file first",
        ));
    }
    let found = if metadata.is_dir() { look_in(path, from)? } else { vec![detect_file(path)?] };
    one_of(path, from, found)
}

fn one_of(path: &Path, from: Option<Format>, mut found: Vec<Detected>) -> Result<Option<Detected>> {
    let any = !found.is_empty();
    if let Some(from) = from {
        found.retain(|found| found.can_be(from));
        if any && found.is_empty() {
            return Err(not_that_format(path, from));
        }
    }
    if found.len() > 1 {
        let names: Vec<&str> = found.iter().map(|found| found.format().name()).collect();
        return Err(Error::usage(
            format!("{} holds two formats: {}", path.display(), names.join(" and ")),
            format!("say which with --from {}", names[0]),
        ));
    }
    Ok(found.pop())
}

pub fn not_that_format(path: &Path, from: Format) -> Error {
    Error::usage(
        format!("{} does not hold the format {from}", path.display()),
        "leave --from out to have the format detected",
    )
}

/// A folder with nothing in it that says what it is: its one torch file, the model before what trainers leave beside
/// one.
///
/// # Errors
/// `Unsupported`, `Usage`.
pub fn lone_file(folder: &Path, from: Option<Format>) -> Result<Detected> {
    let names = list(folder)?;
    let saved = with_suffix(folder, &names, &TORCH_SUFFIXES)?;
    let models: Vec<&PathBuf> = saved.iter().filter(|path| !is_no_model(path)).collect();
    if let ([only], _) | ([], [only]) = (models.as_slice(), saved.iter().collect::<Vec<_>>().as_slice()) {
        let found = one_of(folder, from, vec![detect_file(only)?])?;
        return found.ok_or_else(|| unknown_folder(folder, &names));
    }
    Err(from.map_or_else(|| unknown_folder(folder, &names), |from| not_that_format(folder, from)))
}

fn unknown_folder(path: &Path, names: &[String]) -> Error {
    let what = format!("{} holds no checkpoint of a known format", path.display());
    if let Some(error) = names.iter().find_map(|name| foreign::by_name(&path.join(name))) {
        return error;
    }
    let saved: Vec<&String> = names.iter().filter(|name| has_suffix(name, &TORCH_SUFFIXES)).collect();
    if saved.len() > 1 {
        let own = format!("{} are torch files of their own", short_list(&saved, FEW));
        return Error::unsupported(format!("{what}: {own}"), "give one of them").naming(&saved);
    }
    if ["blobs", "refs", "snapshots"].iter().all(|part| names.iter().any(|name| name == part)) {
        let snapshots = path.join("snapshots");
        return Error::unsupported(what, format!("a hub cache: give a folder in {}", snapshots.display()));
    }
    Error::unsupported(
        if names.is_empty() { format!("{what}: it is empty") } else { what },
        "known are DCP directories (.metadata), rank files (*_rank_N.pt), torch.save files and safetensors; give the \
         folder that holds the files themselves",
    )
}

const TORCH_SUFFIXES: [&str; 4] = [".pt", ".pth", ".bin", ".ckpt"];

fn has_suffix(name: &str, suffixes: &[&str]) -> bool {
    !name.starts_with('.') && suffixes.iter().any(|suffix| name.ends_with(suffix))
}

fn with_suffix(folder: &Path, names: &[String], suffixes: &[&str]) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for path in names.iter().filter(|name| has_suffix(name, suffixes)).map(|name| folder.join(name)) {
        // Lightning's sharded checkpoints are folders called `epoch=0-step=3.ckpt`.
        let may_be_folder = path.extension().is_some_and(|suffix| suffix == "ckpt");
        if !may_be_folder || lookup::kind_of(&path)? != Some(Kind::Folder) {
            found.push(path);
        }
    }
    Ok(found)
}

/// Returns whether a folder has torch files, by their names.
///
/// # Errors
/// `Io`.
pub fn has_torch_files(folder: &Path) -> Result<bool> {
    Ok(!with_suffix(folder, &list(folder)?, &TORCH_SUFFIXES)?.is_empty())
}

fn look_in(folder: &Path, from: Option<Format>) -> Result<Vec<Detected>> {
    let names = list(folder)?;
    foreign::refuse_folder(folder, &names, from)?;
    let mut found = Vec::new();
    if !dcp::metadata_files(folder)?.is_empty() {
        found.push(Detected::Dcp);
    } else if names.iter().any(|name| name.ends_with(".distcp")) && from.is_none() {
        return Err(Error::Missing {
            path: folder.to_path_buf(),
            at: String::from("DCP directory"),
            expected: String::from("the metadata of its .distcp files"),
            missing: String::from(".metadata"),
            hint: None,
        });
    }
    // Hubs keep other sets beside the one that transformers loads: `consolidated.safetensors.index.json`.
    let index = main_index(names.iter().filter(|name| is_safetensors_index(name)), INDEX_NAME);
    let index = index.map(|name| folder.join(name));
    let (shards, mut tensors): (Vec<_>, Vec<_>) =
        with_suffix(folder, &names, &[".safetensors"])?.into_iter().partition(|path| ShardName::parse(path).is_some());
    let local = local_files(&names, from, &mut tensors);
    found.extend(local.map(|paths| Detected::Local { paths }));
    if !shards.is_empty() {
        found.push(Detected::DcpHf { paths: shards });
    }
    if let Some(index) = index {
        let paths = Index::read(&index)?.files()?;
        found.push(Detected::Safetensors { paths, index: Some(index) });
    } else if !tensors.is_empty() {
        found.push(Detected::Safetensors { paths: tensors, index: None });
    }
    if let Some(index) = main_index(names.iter().filter(|name| is_torch_index(name)), TORCH_INDEX_NAME) {
        let index = folder.join(index);
        found.push(Detected::Torch { paths: Index::read(&index)?.files()?, index: Some(index) });
        return Ok(found);
    }
    let mut saved = group(folder, &with_suffix(folder, &names, &TORCH_SUFFIXES)?)?;
    saved.plain.retain(|path| !is_no_model(path));
    let only_set = if saved.sets.len() == 1 { saved.sets.pop() } else { None };
    match (saved.ranks, only_set, saved.plain.as_slice()) {
        (Some(series), ..) => found.push(Detected::TorchRanks(series)),
        (None, Some(set), _) => found.push(Detected::Torch { paths: set.into_paths(), index: None }),
        // Beside nothing else it may be something that a trainer left above its checkpoints: see `lone_file`.
        (None, None, [only]) if saved.sets.is_empty() && !found.is_empty() && is_zip(only)? => {
            found.push(detect_file(only)?);
        }
        _ => {}
    }
    Ok(found)
}

/// The rank files of plain tensors, taken out of the safetensors files of a folder. One alone, with nothing that says
/// what it is a part of, is a file as any other.
fn local_files(names: &[String], from: Option<Format>, tensors: &mut Vec<PathBuf>) -> Option<Vec<PathBuf>> {
    let count = tensors.iter().filter(|path| local::rank_of(path).is_some()).count();
    let has_layout = names.iter().any(|name| name == local::FILE_NAME);
    let is_local = match from {
        Some(Format::Local) => count > 0 || has_layout,
        Some(Format::Safetensors) => false,
        _ => count > 1 || count > 0 && has_layout,
    };
    is_local.then(|| tensors.extract_if(.., |path| local::rank_of(path).is_some()).collect())
}

fn is_zip(path: &Path) -> Result<bool> {
    Ok(first_bytes(path)?.starts_with(b"PK\x03\x04"))
}

fn detect_file(path: &Path) -> Result<Detected> {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let refuse = |what: &str, hint: &str| Err(Error::unsupported(format!("{}: {what}", path.display()), hint));
    if name == ".metadata" || name.ends_with(".distcp") {
        return refuse("one file of a DCP directory", "give the directory");
    }
    if is_safetensors_index(&name) {
        let paths = Index::read(path)?.files()?;
        return Ok(Detected::Safetensors { paths, index: Some(path.to_path_buf()) });
    }
    if is_torch_index(&name) {
        return Ok(Detected::Torch { paths: Index::read(path)?.files()?, index: Some(path.to_path_buf()) });
    }
    let head = first_bytes(path)?;
    foreign::refuse_file(path, &head)?;
    let paths = vec![path.to_path_buf()];
    if head.starts_with(b"PK\x03\x04") {
        return Ok(Detected::Torch { paths, index: None });
    }
    if ShardName::parse(path).is_some() {
        return Ok(Detected::DcpHf { paths });
    }
    if head.get(8) == Some(&b'{') || name.ends_with(".safetensors") {
        return Ok(Detected::Safetensors { paths, index: None });
    }
    refuse(
        "not a checkpoint of a known format",
        "known are torch.save files, safetensors, DCP directories and folders of rank files",
    )
}
