//! Metadata mirror: a sparse copy of SRC. From the mirror, all processes read an equal catalog, although no process
//! sees all files of SRC.
//!
//! If each node saved its shards to its local disk, each process sees only its own files. Together the processes write
//! a mirror of SRC to a file system that all of them see. The mirror has a sparse copy of every file of SRC, with
//! the length of the file. A copy contains all bytes that are not tensor data ([`metadata_ranges`]). Every process
//! opens the mirror with the code that opens SRC, so all processes get equal catalogs. Then each process reads tensor
//! data of the files that it sees from its own disk. Of all other files, a process can read only the mirrored bytes,
//! and it knows which processes see these files.
//!
//! All sizes and offsets are in bytes. Invariants: if several processes have a file with one path, and the file may be
//! part of a checkpoint, these files have equal lengths and equal metadata. For any other file, the file of the lowest
//! process is used. The catalog does not depend on the path of the mirror, or on the process that wrote a file of the
//! mirror. A hole is never read as data. No path points outside the mirror.

mod file_inventory;
mod file_report;
mod opened;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::comm::Communicator;
use crate::error::{CatalogError, Error, Result, StorageError};
use crate::format::{self, Objects, is_data_file, metadata_ranges, metadata_ranges_of_items};
use crate::name_list::name_processes;
use crate::storage::{AnchoredPath, Ranges};
use file_inventory::FileInventory;
use file_report::{FileReport, ReportedFile};

/// A metadata mirror, as one process uses it.
#[derive(Debug)]
pub struct MetadataMirror {
    /// The path of the mirror, which is a folder.
    folder: PathBuf,
    /// The folder of SRC on this process: SRC itself, or the folder that contains SRC if SRC is a file.
    own: PathBuf,
    kind: SourceKind,
    /// The files of SRC. The keys are paths relative to the folder of SRC.
    files: BTreeMap<PathBuf, ReportedFile>,
    /// The processes that see neither a file nor a folder at SRC, grouped by the path of SRC that each process was
    /// given. They are listed in messages, because the path may be mistyped.
    ranks_without_files: BTreeMap<String, Vec<u32>>,
    /// The number of bytes that this process has written to the mirror.
    written: u64,
}

/// The kind of SRC: a folder or a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum SourceKind {
    Folder,
    /// SRC is a single file with this name.
    File(String),
}

/// Creates a mirror of the files that the processes see, in the folder `mirror`, which all processes see. `own` is the
/// path of SRC on this process. The old content of `mirror` is replaced. There may be nothing at `own`, if another
/// process sees files of SRC. Collective.
///
/// # Errors
/// `Missing` if no process sees a file or folder at SRC, or if a file of the mirror does not appear; `Conflict` if
/// processes see different checkpoint files under one path, or a file and a folder; `Comm` naming the process that
/// cannot read its files or write to the mirror.
pub fn create(communicator: &impl Communicator, own: &Path, mirror: &AnchoredPath) -> Result<MetadataMirror> {
    let inventory = communicator.all_ok(FileInventory::scan(own))?;
    let (kind, ranks_without_files) = agree_on_kind(communicator, own, inventory.kind.as_ref())?;
    let mut maker = MirrorMaker { communicator, inventory: &inventory, mirror, written: 0 };
    communicator.all_ok(if communicator.rank() == 0 { write::create_folder(mirror) } else { Ok(()) })?;
    let mut files =
        maker.mirror_files(|path| !is_data_file(path), &|path| metadata_ranges(&inventory.folder.join(path)))?;
    let objects = communicator.all_ok(objects(&inventory, mirror.path()))?;
    files.extend(maker.mirror_files(is_data_file, &|path| {
        let (folder, name) = (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or_default());
        let own = objects.get(folder).and_then(|objects| objects.get(Path::new(name)));
        metadata_ranges_of_items(&inventory.folder.join(path), own.map_or(&[], Vec::as_slice))
    })?);
    let written = maker.written;
    let (folder, own) = (mirror.path().to_path_buf(), inventory.folder);
    Ok(MetadataMirror { folder, own, kind, files, ranks_without_files, written })
}

/// Returns the positions of objects in the data files that this process sees, for each folder. Objects are metadata, so
/// their bytes are mirrored. The positions are read from the mirror, because the metadata file of a folder may be on
/// the disk of another node.
fn objects(inventory: &FileInventory, mirror: &Path) -> Result<BTreeMap<PathBuf, Objects>> {
    let data_files = inventory.files.iter().filter(|path| is_data_file(path));
    let folders: BTreeSet<&Path> = data_files.filter_map(|path| path.parent()).collect();
    let found = folders.into_iter().map(|folder| match format::objects(&mirror.join(folder)) {
        Ok(objects) => Ok((folder.to_path_buf(), objects)),
        Err(error @ Error::Storage(StorageError::Io { .. })) => Err(error),
        // This error is reported later, when the mirror is read.
        Err(_) => Ok((folder.to_path_buf(), Objects::new())),
    });
    found.collect()
}

/// The state while all processes create a mirror together.
struct MirrorMaker<'a, C> {
    communicator: &'a C,
    inventory: &'a FileInventory,
    mirror: &'a AnchoredPath,
    written: u64,
}

impl<C: Communicator> MirrorMaker<'_, C> {
    /// Sends the reports about the selected files of this process to all processes, and merges the reports of all
    /// processes. Then writes files of this process into the mirror; if several processes have a file, only the lowest
    /// of them writes it. Returns all selected files of SRC. Collective.
    fn mirror_files(
        &mut self,
        is_selected: impl Fn(&Path) -> bool,
        metadata_ranges: &(dyn Fn(&Path) -> Result<Ranges> + Sync),
    ) -> Result<BTreeMap<PathBuf, ReportedFile>> {
        let Self { communicator, inventory, mirror, .. } = *self;
        let own = communicator.all_ok(file_report::report_files(inventory, &is_selected, metadata_ranges))?;
        let reports: Vec<Vec<FileReport>> = gather_json(communicator, &own)?;
        let seen = file_report::merge_reports(&inventory.folder, communicator.rank(), reports)?;
        // One process creates the folders, so that no process uses them before they exist.
        communicator.all_ok(if communicator.rank() == 0 {
            write::create_parent_folders(mirror, seen.keys())
        } else {
            Ok(())
        })?;
        let own = seen.iter().filter(|(_, seen)| seen.writer == communicator.rank());
        self.written += communicator.all_ok(write::write_files(&inventory.folder, mirror, own))?;
        communicator.all_ok(write::wait_until_visible(mirror, &seen))?;
        Ok(seen)
    }
}

impl MetadataMirror {
    /// Returns the number of bytes that this process has written to the mirror.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Returns the path of the mirror. The mirror is read like SRC, but it contains no tensor data.
    pub fn root(&self) -> PathBuf {
        self.path_of_src(&self.folder)
    }

    /// Returns the processes that see a file. `path` is the path of the file in the mirror or in SRC.
    pub fn seen_by(&self, path: &Path) -> &[u32] {
        self.seen(path).map_or(&[], |seen| &seen.seen_by)
    }

    /// Returns whether the mirror contains all bytes of a file, so that every process can read the file in the mirror.
    pub fn holds_all_of(&self, path: &Path) -> bool {
        self.seen(path).is_none_or(|seen| seen.len.is_none_or(|len| seen.mirrored.contains(&(0..len))))
    }

    /// Returns whether all files of the mirror exist. If a file does not exist, another process has failed and is
    /// deleting the mirror. In this case an error of reading the mirror does not mean that SRC is damaged.
    pub fn is_whole(&self) -> bool {
        self.files.keys().all(|path| self.folder.join(path).symlink_metadata().is_ok())
    }

    /// Returns the folder of SRC on this process.
    pub fn own(&self) -> &Path {
        &self.own
    }

    /// Returns whether the process `rank` sees neither a file nor a folder at its path of SRC.
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

/// Checks that at least one process sees SRC, and that SRC is a folder for all processes that see it, or a file for all
/// of them. Returns the kind of SRC, and the processes that see nothing at SRC, grouped by the path of SRC that each
/// process was given.
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
        Error::missing(
            own,
            "files",
            "files that at least one process sees",
            format!("every file, at {}", name_processes(&(0..communicator.size()).collect::<Vec<_>>())),
        )
        .missing_hint(
            "check the path on the nodes that have the files; a relative path starts at the \
                                 current folder",
        )
    })
}

/// Sends `value` as JSON to all processes, and returns the values of all processes. Collective.
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
