//! Metadata mirror: gives all processes the same catalog although none of them sees all of SRC.
//!
//! If each node saved its shards to its local disk, each process sees only its own files. Together the processes write
//! a mirror of SRC to a file system that all see: every file at its true length, with all bytes that are not tensor
//! data ([`metadata_ranges`]), and sparse elsewhere. The same code reads SRC and its mirror, so all processes get the
//! same catalog. Then each process reads its own files where it sees them; of the other files it can read the mirrored
//! bytes, and knows which processes see them.
//!
//! Counts bytes. Invariants: files of one name on several ranks have equal length and metadata if they may be part of a
//! checkpoint; of other files the lowest rank's is used. The catalog does not depend on the path of the mirror, nor on
//! which process wrote which file. A hole is never read as data. No path leads out of the mirror.

mod file_inventory;
mod file_report;
mod opened;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::comm::Communicator;
use crate::error::{CatalogError, Error, FormatError, Result, StorageError};
use crate::format::{self, Objects, is_data_file, metadata_ranges, metadata_ranges_of_items};
use crate::name_list::name_processes;
use crate::storage::{AnchoredPath, Ranges};
use file_inventory::FileInventory;
use file_report::{FileReport, ReportedFile};

/// A metadata mirror, from the view of one process.
#[derive(Debug)]
pub struct MetadataMirror {
    /// Folder of the mirror.
    folder: PathBuf,
    /// Folder of SRC on this process: SRC itself, or its folder if SRC is a file.
    own: PathBuf,
    kind: SourceKind,
    /// The files, by their paths relative to the folder.
    files: BTreeMap<PathBuf, ReportedFile>,
    /// Ranks that see no files, by their path of SRC, which may be mistyped.
    ranks_without_files: BTreeMap<String, Vec<u32>>,
    /// Bytes that this process wrote into the mirror.
    written: u64,
}

/// Kind of SRC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum SourceKind {
    Folder,
    /// A file of this name.
    File(String),
}

/// Creates a mirror of the files that the ranks see, each at its own path `own`, in the folder `mirror`, which all
/// ranks see; its old content is replaced. A rank that sees nothing at `own` has none of the files, provided that
/// another rank has some. Collective.
///
/// # Errors
/// `Missing` if no rank sees any file, `Conflict` if ranks see different files under one name, and `Comm` naming the
/// rank that cannot read its files or write the mirror.
pub fn create(communicator: &impl Communicator, own: &Path, mirror: &AnchoredPath) -> Result<MetadataMirror> {
    let inventory = communicator.settle(FileInventory::scan(own))?;
    let (kind, ranks_without_files) = agree_on_kind(communicator, own, inventory.kind.as_ref())?;
    let mut maker = MirrorMaker { communicator, inventory: &inventory, mirror, written: 0 };
    communicator.settle(if communicator.rank() == 0 { write::create_folder(mirror) } else { Ok(()) })?;
    let mut files =
        maker.mirror_files(|path| !is_data_file(path), &|path| metadata_ranges(&inventory.folder.join(path)))?;
    let objects = communicator.settle(objects(&inventory, mirror.path()))?;
    files.extend(maker.mirror_files(is_data_file, &|path| {
        let (folder, name) = (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or_default());
        let own = objects.get(folder).and_then(|objects| objects.get(Path::new(name)));
        metadata_ranges_of_items(&inventory.folder.join(path), own.map_or(&[], Vec::as_slice))
    })?);
    let written = maker.written;
    let (folder, own) = (mirror.path().to_path_buf(), inventory.folder);
    Ok(MetadataMirror { folder, own, kind, files, ranks_without_files, written })
}

/// Returns the positions of objects in this process's data files, by folder. They are in the metadata, which another
/// rank may have.
fn objects(inventory: &FileInventory, mirror: &Path) -> Result<BTreeMap<PathBuf, Objects>> {
    let data_files = inventory.files.iter().filter(|path| is_data_file(path));
    let folders: BTreeSet<&Path> = data_files.filter_map(|path| path.parent()).collect();
    let found = folders.into_iter().map(|folder| match format::objects(&mirror.join(folder)) {
        Ok(objects) => Ok((folder.to_path_buf(), objects)),
        Err(error @ Error::Storage(StorageError::Io { .. })) => Err(error),
        // Reading the mirror later reports the error.
        Err(_) => Ok((folder.to_path_buf(), Objects::new())),
    });
    found.collect()
}

/// State of the collective creation.
struct MirrorMaker<'a, C> {
    communicator: &'a C,
    inventory: &'a FileInventory,
    mirror: &'a AnchoredPath,
    written: u64,
}

impl<C: Communicator> MirrorMaker<'_, C> {
    /// Reports some of the files to all ranks, merges the reports, and writes the files that no lower rank has.
    fn mirror_files(
        &mut self,
        is_selected: impl Fn(&Path) -> bool,
        metadata_ranges: &(dyn Fn(&Path) -> Result<Ranges> + Sync),
    ) -> Result<BTreeMap<PathBuf, ReportedFile>> {
        let Self { communicator, inventory, mirror, .. } = *self;
        let own = communicator.settle(file_report::report_files(inventory, &is_selected, metadata_ranges))?;
        let reports: Vec<Vec<FileReport>> = gather_json(communicator, &own)?;
        let seen = file_report::merge_reports(&inventory.folder, communicator.rank(), reports)?;
        // One process creates the folders, so that no process looks for them too early.
        communicator.settle(if communicator.rank() == 0 {
            write::create_parent_folders(mirror, seen.keys())
        } else {
            Ok(())
        })?;
        let own = seen.iter().filter(|(_, seen)| seen.writer == communicator.rank());
        self.written += communicator.settle(write::write_files(&inventory.folder, mirror, own))?;
        communicator.settle(write::wait_until_visible(mirror, &seen))?;
        Ok(seen)
    }
}

impl MetadataMirror {
    /// Returns the bytes that this process wrote into the mirror.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Returns the path of the mirror, which is read like SRC but has no tensor data.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.path_of_src(&self.folder)
    }

    /// Returns the ranks that see the file at this path in the mirror, or in SRC.
    #[must_use]
    pub fn seen_by(&self, path: &Path) -> &[u32] {
        self.seen(path).map_or(&[], |seen| &seen.seen_by)
    }

    /// Returns whether the mirror has all bytes of a file, so that every process can read it there.
    #[must_use]
    pub fn holds_all_of(&self, path: &Path) -> bool {
        self.seen(path).is_none_or(|seen| seen.len.is_none_or(|len| seen.mirrored.contains(&(0..len))))
    }

    /// Returns whether all of its files exist. If not, another process has failed and is deleting the mirror, and
    /// errors of reading it are not errors of SRC.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.files.keys().all(|path| self.folder.join(path).symlink_metadata().is_ok())
    }

    /// Returns the folder of SRC on this process.
    #[must_use]
    pub fn own(&self) -> &Path {
        &self.own
    }

    /// Returns whether a rank sees no files at its SRC.
    #[must_use]
    pub fn sees_no_files(&self, rank: u32) -> bool {
        self.ranks_without_files.values().flatten().any(|other| *other == rank)
    }

    fn seen(&self, path: &Path) -> Option<&ReportedFile> {
        let below = |folder: &Path| path.strip_prefix(folder).ok().and_then(|path| self.files.get(path));
        below(&self.folder).or_else(|| below(&self.own))
    }

    fn path_of_src(&self, folder: &Path) -> PathBuf {
        match &self.kind {
            SourceKind::Folder => folder.to_path_buf(),
            SourceKind::File(name) => folder.join(name),
        }
    }
}

/// Checks that SRC is of one kind on all ranks that see it, and that some rank sees it. Returns the kind, and the ranks
/// that see nothing, by their path.
fn agree_on_kind(
    communicator: &impl Communicator,
    own: &Path,
    kind: Option<&SourceKind>,
) -> Result<(SourceKind, BTreeMap<String, Vec<u32>>)> {
    let place = || std::path::absolute(own).unwrap_or_else(|_| own.to_path_buf()).display().to_string();
    let kinds: Vec<Result<SourceKind, String>> = gather_json(communicator, &kind.ok_or_else(place))?;
    let mut ranks_without_files: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    let mut found: Option<(u32, &SourceKind)> = None;
    for (rank, kind) in (0..).zip(&kinds) {
        let kind = match kind {
            Ok(kind) => kind,
            Err(place) => {
                ranks_without_files.entry(place.clone()).or_default().push(rank);
                continue;
            }
        };
        let (first, known) = *found.get_or_insert((rank, kind));
        if known != kind {
            let text = |kind: &SourceKind| match kind {
                SourceKind::Folder => String::from("a folder"),
                SourceKind::File(name) => format!("the file {name}"),
            };
            return Err(Error::Catalog(CatalogError::Conflict {
                fqn: own.display().to_string(),
                what: "the kind of entry",
                between: format!("processes {first} and {rank}"),
                detail: format!("{} and {}", text(known), text(kind)),
                hint: Some(String::from("give the same folder or the same file to all processes")),
            }));
        }
    }
    found.map(|(_, kind)| (kind.clone(), ranks_without_files)).ok_or_else(|| {
        Error::Format(FormatError::Missing {
            path: own.to_path_buf(),
            at: String::from("files"),
            expected: String::from("files that at least one process sees"),
            missing: format!("all of them, at {}", name_processes(&(0..communicator.size()).collect::<Vec<_>>())),
            hint: Some(String::from(
                "check the path on the nodes that have the files; a relative path starts at the \
                                 current folder",
            )),
        })
    })
}

/// Sends `value` to all ranks as JSON, and returns the values of all ranks.
fn gather_json<T: Serialize, H: for<'a> Deserialize<'a>>(
    communicator: &impl Communicator,
    value: &T,
) -> Result<Vec<H>> {
    let message = serde_json::to_vec(value).expect("numbers and text serialise");
    let messages = communicator.gather(&message)?;
    let values = (0..).zip(messages).map(|(rank, message)| {
        serde_json::from_slice(&message).map_err(|error| Error::comm(rank, "exchange file reports", error.to_string()))
    });
    values.collect()
}
