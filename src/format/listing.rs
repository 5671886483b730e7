//! Folder listings, and the files that formats detect in them. A folder is listed once, and all formats examine this
//! list of names.

use std::path::{Path, PathBuf};

use super::series::SeriesSet;
use super::{Format, list};
use crate::error::Result;
use crate::storage::lookup::{self, FileKind};

/// The names in a folder, listed once.
#[derive(Debug)]
pub struct FolderListing<'a> {
    /// The folder.
    pub folder: &'a Path,
    /// The names in the folder.
    pub names: Vec<String>,
    /// The format that the user requires with `--from`.
    pub from: Option<Format>,
}

impl<'a> FolderListing<'a> {
    /// Lists a folder.
    ///
    /// # Errors
    /// `Io`.
    pub fn of(folder: &'a Path, from: Option<Format>) -> Result<Self> {
        Ok(Self { folder, names: list(folder)?, from })
    }

    /// Returns the paths of the files that have a suffix of `format` and are not hidden.
    ///
    /// # Errors
    /// `Io`.
    pub fn files_of(&self, format: Format) -> Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for path in self.names.iter().filter(|name| has_suffix(name, format)).map(|name| self.folder.join(name)) {
            // Lightning's sharded checkpoints are folders called `epoch=0-step=3.ckpt`. Composer makes links to folders,
            // called `latest-rank0.pt`.
            let is_latest = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"latest"));
            let may_be_folder = is_latest || path.extension().is_some_and(|suffix| suffix == "ckpt");
            if !may_be_folder || lookup::kind_of(&path)? != Some(FileKind::Folder) {
                found.push(path);
            }
        }
        Ok(found)
    }
}

/// Returns whether a file name has a suffix of a format and is not hidden.
fn has_suffix(name: &str, format: Format) -> bool {
    let suffix = name.rsplit_once('.').map(|(_, suffix)| suffix);
    !name.starts_with('.') && suffix.is_some_and(|suffix| format.entry().suffixes.contains(&suffix))
}

/// Returns whether the name of a file shows a data file: a file whose tensors and objects are listed in another file,
/// such as `.metadata`.
pub fn is_data_file(path: &Path) -> bool {
    format_of_data(path).is_some()
}

/// Returns the format of a data file (a file whose tensors and objects are listed in another file), as shown by its
/// name. Returns `None` if the file is not a data file.
pub fn format_of_data(path: &Path) -> Option<Format> {
    let suffix = path.extension()?.to_str()?;
    Format::ALL.iter().copied().find(|format| format.entry().data_suffixes.contains(&suffix))
}

/// Returns whether the name of a file shows that the file has metadata and no tensor data.
pub fn is_metadata_file(name: &str) -> bool {
    let Some((_, suffix)) = name.rsplit_once('.') else { return false };
    Format::ALL.iter().any(|format| format.entry().metadata_suffixes.contains(&suffix))
}

/// The certainty with which detected files are a checkpoint of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Match {
    /// The file names or the first bytes occur only in this format.
    Certain,
    /// Other formats use such file names as well.
    Likely,
    /// In a folder, files with this certainty count only beside files that are a certain or likely match. A file that
    /// the user gives as SRC counts in any case.
    Possible,
}

/// The files of a checkpoint, as detected by a format.
#[derive(Debug)]
pub struct DetectedFiles {
    /// The format that detected the files.
    pub format: Format,
    /// The certainty of the detection.
    pub certainty: Match,
    /// The paths of the files.
    pub paths: Vec<PathBuf>,
    /// The index file, which names the files in `paths`; `None` without an index.
    pub index: Option<PathBuf>,
    /// The rank files, grouped by series (`model_...`, `optim_...`); `None` for formats without rank files.
    pub series: Option<SeriesSet>,
}

impl DetectedFiles {
    /// Returns detected files that have no index and form no series.
    pub fn new(format: Format, certainty: Match, paths: Vec<PathBuf>) -> Self {
        Self { format, certainty, paths, index: None, series: None }
    }

    /// Returns detected files that an index names. The certainty is [`Match::Certain`].
    pub fn indexed(format: Format, paths: Vec<PathBuf>, index: PathBuf) -> Self {
        Self { index: Some(index), ..Self::new(format, Match::Certain, paths) }
    }
}

/// A file given as SRC: its path, its name and its first bytes.
#[derive(Debug)]
pub struct FileStart<'a> {
    /// The path of the file.
    pub path: &'a Path,
    /// The name of the file.
    pub name: String,
    /// The first bytes of the file.
    pub head: Vec<u8>,
}

impl FileStart<'_> {
    /// Returns whether the file is a ZIP archive.
    pub fn is_zip(&self) -> bool {
        self.head.starts_with(b"PK\x03\x04")
    }

    /// Returns this file as the only file of a detected checkpoint.
    pub fn found(&self, format: Format, certainty: Match) -> DetectedFiles {
        DetectedFiles::new(format, certainty, vec![self.path.to_path_buf()])
    }
}
