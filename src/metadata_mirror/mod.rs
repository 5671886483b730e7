//! Twins: one catalog for processes of which none sees all of SRC.
//!
//! Where shards lie on disks of nodes, each process sees its own. Together they make a twin of SRC on a file system that
//! all see: every file of each of them at its true length, holding what is not tensor data ([`metadata`]), sparse else.
//! Reading the twin is reading SRC, by the same code, so all have the same catalog. Then each process turns to its own
//! files where it sees them; of the others it can read what the twin holds, and knows who sees them.
//!
//! Counts bytes. Invariants: files of one name on several ranks have one length and one metadata, where
//! they can be part of a checkpoint, and else the lowest rank's is taken; what the ranks read does
//! not depend on where the twin is, nor on who wrote which file of it; a hole is never taken for data; no path leads out
//! of the twin.

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

/// A twin, as one process knows it.
#[derive(Debug)]
pub struct MetadataMirror {
    /// The twin's folder, and the one of this process's SRC: that, or the one that its file is in.
    folder: PathBuf,
    own: PathBuf,
    kind: SourceKind,
    /// By their paths below the folder.
    files: BTreeMap<PathBuf, ReportedFile>,
    /// Who sees nothing at its SRC, by that path: in the end it may be mistyped.
    blind: BTreeMap<String, Vec<u32>>,
    written: u64,
}

/// What SRC is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum SourceKind {
    Folder,
    /// Of this name.
    File(String),
}

/// Make a twin of what the ranks see at `own`, each its own, in the folder `twin`, which all see; what is there is
/// replaced. A rank that sees nothing there has none of the files, if others have some. Collective.
///
/// # Errors
/// `Missing` where nobody sees anything, `Conflict` where ranks see different files under one name, and `Comm` naming the
/// rank that cannot read its files, or write the twin.
pub fn make(communicator: &impl Communicator, own: &Path, twin: &AnchoredPath) -> Result<MetadataMirror> {
    let walked = communicator.settle(FileInventory::of(own))?;
    let (kind, blind) = agree_on_kind(communicator, own, walked.kind.as_ref())?;
    let mut making = MirrorMaker { communicator, walked: &walked, twin, written: 0 };
    communicator.settle(if communicator.rank() == 0 { write::begin(twin) } else { Ok(()) })?;
    let mut files = making.round(|path| !is_data_file(path), &|path| metadata_ranges(&walked.folder.join(path)))?;
    let objects = communicator.settle(objects(&walked, twin.path()))?;
    files.extend(making.round(is_data_file, &|path| {
        let (folder, name) = (path.parent().unwrap_or(Path::new("")), path.file_name().unwrap_or_default());
        let own = objects.get(folder).and_then(|objects| objects.get(Path::new(name)));
        metadata_ranges_of_items(&walked.folder.join(path), own.map_or(&[], Vec::as_slice))
    })?);
    let written = making.written;
    let (folder, own) = (twin.path().to_path_buf(), walked.folder);
    Ok(MetadataMirror { folder, own, kind, files, blind, written })
}

/// Where objects lie in this process's data files, by folder: metadata tells it, which another rank may have.
fn objects(walked: &FileInventory, twin: &Path) -> Result<BTreeMap<PathBuf, Objects>> {
    let data_files = walked.files.iter().filter(|path| is_data_file(path));
    let folders: BTreeSet<&Path> = data_files.filter_map(|path| path.parent()).collect();
    let found = folders.into_iter().map(|folder| match format::objects(&twin.join(folder)) {
        Ok(objects) => Ok((folder.to_path_buf(), objects)),
        Err(error @ Error::Storage(StorageError::Io { .. })) => Err(error),
        // What is wrong with it is said when the twin is read.
        Err(_) => Ok((folder.to_path_buf(), Objects::new())),
    });
    found.collect()
}

/// What all ranks do together.
struct MirrorMaker<'a, C> {
    communicator: &'a C,
    walked: &'a FileInventory,
    twin: &'a AnchoredPath,
    written: u64,
}

impl<C: Communicator> MirrorMaker<'_, C> {
    /// Look at some of the files, hear of those of the others, and write those that no lower rank has.
    fn round(
        &mut self,
        wanted: impl Fn(&Path) -> bool,
        metadata_ranges: &(dyn Fn(&Path) -> Result<Ranges> + Sync),
    ) -> Result<BTreeMap<PathBuf, ReportedFile>> {
        let Self { communicator, walked, twin, .. } = *self;
        let own = communicator.settle(file_report::look(walked, &wanted, metadata_ranges))?;
        let heard: Vec<Vec<FileReport>> = tell(communicator, &own)?;
        let seen = file_report::merge(&walked.folder, communicator.rank(), heard)?;
        // One process makes the folders, so that no other looks for them before they are there.
        communicator.settle(if communicator.rank() == 0 { write::folders(twin, seen.keys()) } else { Ok(()) })?;
        let own = seen.iter().filter(|(_, seen)| seen.writer == communicator.rank());
        self.written += communicator.settle(write::files(&walked.folder, twin, own))?;
        communicator.settle(write::wait_for(twin, &seen))?;
        Ok(seen)
    }
}

impl MetadataMirror {
    /// How many bytes this process wrote into it.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written
    }

    /// What is given to be read as SRC: it holds no tensor data.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.place_of_src(&self.folder)
    }

    /// The ranks that see a file that is at this path in the twin, or in SRC.
    #[must_use]
    pub fn seen_by(&self, path: &Path) -> &[u32] {
        self.seen(path).map_or(&[], |seen| &seen.by)
    }

    /// Whether all of a file is in the twin, so that every process can read it there.
    #[must_use]
    pub fn holds_whole(&self, path: &Path) -> bool {
        self.seen(path).is_none_or(|seen| seen.len.is_none_or(|len| seen.held.contains(&(0..len))))
    }

    /// Whether all of its files are there. One that is not whole is being taken away, as another process has failed, and
    /// what is found there is no fault of SRC.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.files.keys().all(|path| self.folder.join(path).symlink_metadata().is_ok())
    }

    /// The folder of SRC, as this process has it.
    #[must_use]
    pub fn own(&self) -> &Path {
        &self.own
    }

    /// Whether a rank sees nothing at its SRC.
    #[must_use]
    pub fn is_blind(&self, rank: u32) -> bool {
        self.blind.values().flatten().any(|blind| *blind == rank)
    }

    fn seen(&self, path: &Path) -> Option<&ReportedFile> {
        let below = |folder: &Path| path.strip_prefix(folder).ok().and_then(|path| self.files.get(path));
        below(&self.folder).or_else(|| below(&self.own))
    }

    fn place_of_src(&self, folder: &Path) -> PathBuf {
        match &self.kind {
            SourceKind::Folder => folder.to_path_buf(),
            SourceKind::File(name) => folder.join(name),
        }
    }
}

/// SRC must be of one kind for all that have it, and some must. With it: who has none, by where it looked.
fn agree_on_kind(
    communicator: &impl Communicator,
    own: &Path,
    kind: Option<&SourceKind>,
) -> Result<(SourceKind, BTreeMap<String, Vec<u32>>)> {
    let place = || std::path::absolute(own).unwrap_or_else(|_| own.to_path_buf()).display().to_string();
    let kinds: Vec<Result<SourceKind, String>> = tell(communicator, &kind.ok_or_else(place))?;
    let mut blind: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    let mut found: Option<(u32, &SourceKind)> = None;
    for (rank, kind) in (0..).zip(&kinds) {
        let kind = match kind {
            Ok(kind) => kind,
            Err(place) => {
                blind.entry(place.clone()).or_default().push(rank);
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
                what: "what it is",
                between: format!("processes {first} and {rank}"),
                detail: format!("{} and {}", text(known), text(kind)),
                hint: Some(String::from("give the same folder, or the same file, to all processes")),
            }));
        }
    }
    found.map(|(_, kind)| (kind.clone(), blind)).ok_or_else(|| {
        Error::Format(FormatError::Missing {
            path: own.to_path_buf(),
            at: String::from("files"),
            expected: String::from("some that one of the processes sees"),
            missing: format!("all of them, at {}", name_processes(&(0..communicator.size()).collect::<Vec<_>>())),
            hint: Some(String::from(
                "check the path on the nodes that have the files; a relative one starts at the \
                                 current folder",
            )),
        })
    })
}

/// Tell all ranks, and hear them.
fn tell<T: Serialize, H: for<'a> Deserialize<'a>>(communicator: &impl Communicator, said: &T) -> Result<Vec<H>> {
    let words = serde_json::to_vec(said).expect("numbers and text serialise");
    let heard = communicator.gather(&words)?;
    let heard = (0..).zip(heard).map(|(rank, words)| {
        serde_json::from_slice(&words).map_err(|error| Error::comm(rank, "tell of files", error.to_string()))
    });
    heard.collect()
}
