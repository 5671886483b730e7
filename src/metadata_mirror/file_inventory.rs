//! An inventory of the files in SRC that one process sees.
//!
//! A link to a file counts as a file, even if the file is outside SRC. A link to a folder is followed if its name may
//! be the name of a folder with a checkpoint; circular links are not followed. A dangling link is listed separately,
//! because this link may point to a file on the node of another process.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::SourceKind;
use crate::error::{Error, Result};
use crate::format::{companions, may_lead_on, refuse_address};
use crate::storage::lookup;

/// The files in SRC that one process sees.
#[derive(Debug)]
pub struct FileInventory {
    /// SRC, or its folder if SRC is a file.
    pub folder: PathBuf,
    /// The kind of SRC; `None` if this process sees no file or folder at SRC.
    pub kind: Option<SourceKind>,
    /// The paths of the files, relative to the folder of SRC, sorted.
    pub files: Vec<PathBuf>,
    /// The paths of dangling links, relative to the folder of SRC.
    pub dangling: Vec<PathBuf>,
}

/// The maximum depth of nested folders in SRC; deeper folders are an error. Folders in real checkpoints are three
/// levels deep.
const MAX_DEPTH: usize = 16;

/// The maximum number of files and folders in SRC; more are an error. Checkpoints of the largest clusters have some ten
/// thousand files.
const MAX_ENTRIES: usize = 1_000_000;

impl FileInventory {
    /// Lists the files that this process sees at `src`.
    ///
    /// # Errors
    /// `Io`; `Usage` if there are more files, or more nested folders, than a checkpoint can have; `Unsupported` for
    /// names that are not UTF-8, and if `src` is neither a file nor a folder.
    pub fn scan(src: &Path) -> Result<Self> {
        let nothing = Self { folder: src.to_path_buf(), kind: None, files: Vec::new(), dangling: Vec::new() };
        let Some(metadata) = lookup::metadata_of(src)? else { return refuse_address(src).map(|()| nothing) };
        let mut inventory = nothing;
        if metadata.is_dir() {
            let ancestors = vec![(metadata.dev(), metadata.ino())];
            inventory.scan_folder(Path::new(""), &ancestors, &mut 0)?;
            inventory.kind =
                (!inventory.files.is_empty() || !inventory.dangling.is_empty()).then_some(SourceKind::Folder);
        } else if metadata.is_file() {
            let Some(name) = src.file_name() else { return Err(not_utf8(src)) };
            inventory.folder = src.parent().unwrap_or(Path::new("")).to_path_buf();
            inventory.kind = Some(SourceKind::File(name.to_str().ok_or_else(|| not_utf8(src))?.to_owned()));
            let others = companions(src)?.into_iter().filter_map(|path| path.file_name().map(PathBuf::from));
            inventory.files = others.chain([PathBuf::from(name)]).collect();
        } else {
            return Err(Error::unsupported(
                format!("{} is neither a file nor a folder", src.display()),
                "write the data to a file first, because checkpoints need random access",
            ));
        }
        inventory.files.sort();
        Ok(inventory)
    }

    fn scan_folder(&mut self, below: &Path, ancestors: &[(u64, u64)], entries: &mut usize) -> Result<()> {
        let folder = self.folder.join(below);
        for entry in lookup::list(&folder)? {
            *entries += 1;
            if *entries > MAX_ENTRIES || ancestors.len() > MAX_DEPTH {
                return Err(Error::usage(
                    format!(
                        "{}: more than {MAX_ENTRIES} files and folders, or more than {MAX_DEPTH} nested folders",
                        self.folder.display()
                    ),
                    "give the folder that directly contains the files",
                ));
            }
            let path = below.join(&entry.name);
            let name = entry.name.to_str().ok_or_else(|| not_utf8(&folder.join(&path)))?;
            let is_link = entry.is_link()?;
            let Some(metadata) = lookup::metadata_of(&entry.path)? else {
                self.dangling.push(path);
                continue;
            };
            let identity = (metadata.dev(), metadata.ino());
            if metadata.is_file() {
                self.files.push(path);
            } else if metadata.is_dir() && !ancestors.contains(&identity) && (!is_link || may_lead_on(name)) {
                self.scan_folder(&path, &[ancestors, &[identity]].concat(), entries)?;
            }
        }
        Ok(())
    }
}

fn not_utf8(path: &Path) -> Error {
    Error::unsupported(
        format!("{}: the name is not UTF-8, so it cannot be sent to other processes", path.display()),
        "rename the file, or move it out of SRC",
    )
}
