//! What one process sees of SRC.
//!
//! As reading a folder does, links to files count as files, wherever they lead. Links to folders are entered where a
//! checkpoint may be found in a folder of that name, and never in circles. A link that leads nowhere is told of as well:
//! where it lies on another rank, it may lead somewhere there.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::SourceKind;
use crate::error::{Error, Result};
use crate::format::{companions, may_lead_on, refuse_address};
use crate::storage::lookup;

#[derive(Debug)]
pub struct FileInventory {
    /// SRC, or the folder that it is in where it is a file.
    pub folder: PathBuf,
    /// `None` where nothing is seen.
    pub kind: Option<SourceKind>,
    /// Files, below the folder, sorted.
    pub files: Vec<PathBuf>,
    /// Links that lead nowhere.
    pub dangling: Vec<PathBuf>,
}

/// Folders in folders: real ones are three deep.
const MAX_DEPTH: usize = 16;

/// Files and folders; checkpoints of the largest clusters have some ten thousand.
const MAX_ENTRIES: usize = 1_000_000;

impl FileInventory {
    /// # Errors
    /// `Io`; `Usage` where there is more than a checkpoint has; `Unsupported` for names that cannot be told.
    pub fn of(src: &Path) -> Result<Self> {
        let nothing = Self { folder: src.to_path_buf(), kind: None, files: Vec::new(), dangling: Vec::new() };
        let Some(metadata) = lookup::metadata_of(src)? else { return refuse_address(src).map(|()| nothing) };
        let mut walked = nothing;
        if metadata.is_dir() {
            let ancestors = vec![(metadata.dev(), metadata.ino())];
            walked.enter(Path::new(""), &ancestors, &mut 0)?;
            walked.kind = (!walked.files.is_empty() || !walked.dangling.is_empty()).then_some(SourceKind::Folder);
        } else if metadata.is_file() {
            let Some(name) = src.file_name() else { return Err(not_told(src)) };
            walked.folder = src.parent().unwrap_or(Path::new("")).to_path_buf();
            walked.kind = Some(SourceKind::File(name.to_str().ok_or_else(|| not_told(src))?.to_owned()));
            let others = companions(src)?.into_iter().filter_map(|path| path.file_name().map(PathBuf::from));
            walked.files = others.chain([PathBuf::from(name)]).collect();
        } else {
            return Err(Error::unsupported(
                format!("{}: neither a file nor a folder", src.display()),
                "checkpoints are read at random: write it to a file first",
            ));
        }
        walked.files.sort();
        Ok(walked)
    }

    fn enter(&mut self, below: &Path, ancestors: &[(u64, u64)], entries: &mut usize) -> Result<()> {
        let folder = self.folder.join(below);
        for entry in lookup::list(&folder)? {
            *entries += 1;
            if *entries > MAX_ENTRIES || ancestors.len() > MAX_DEPTH {
                return Err(Error::usage(
                    format!("{}: more files and folders than a checkpoint has", self.folder.display()),
                    "give the folder that holds the files themselves",
                ));
            }
            let path = below.join(&entry.name);
            let name = entry.name.to_str().ok_or_else(|| not_told(&folder.join(&path)))?;
            let is_link = entry.is_link()?;
            let Some(metadata) = lookup::metadata_of(&entry.path)? else {
                self.dangling.push(path);
                continue;
            };
            let identity = (metadata.dev(), metadata.ino());
            if metadata.is_file() {
                self.files.push(path);
            } else if metadata.is_dir() && !ancestors.contains(&identity) && (!is_link || may_lead_on(name)) {
                self.enter(&path, &[ancestors, &[identity]].concat(), entries)?;
            }
        }
        Ok(())
    }
}

fn not_told(path: &Path) -> Error {
    Error::unsupported(
        format!("{}: a name that is not UTF-8 cannot be told to other processes", path.display()),
        "rename the file, or move it out of SRC",
    )
}
