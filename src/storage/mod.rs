//! Files of a source checkpoint: positional reads that name the file in every error.
//!
//! Counts in bytes. A file is opened on first use and closed again when too many are open, so that a checkpoint of
//! 16,384 rank files works under a limit of 1,024 descriptors. What a file was (device, inode, size, modification
//! time) is remembered from the first look and checked again before a result is published.

pub mod afresh;
mod anchored;
pub mod direct;
pub(crate) mod error;
pub mod filesystem;
mod local_content;
pub mod lookup;
mod mapping;
pub mod memory;
mod open_file;
mod open_files;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use anchored::AnchoredPath;
pub use direct::BOUNCE_BYTES;
pub use filesystem::IoMode;
pub use local_content::{Holdings, LocalContent, LocalFile, Ranges};
pub use lookup::regular_file;
pub use mapping::catch_lost_pages;
pub use open_file::OpenFile;
pub use open_files::Opened;

use crate::error::{Error, Result, StorageError};
use local_content::{Notes, ReadCheck};
use open_files::OpenFiles;

/// Index of a file within [`Files`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// A stretch of a file: `[offset, offset + len)`, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileRange {
    pub file: FileId,
    pub offset: u64,
    pub len: u64,
}

/// What tells a file from another one at the same path, or from itself after a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

impl Identity {
    fn of(metadata: &std::fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

#[derive(Clone, Debug)]
struct FileEntry {
    path: PathBuf,
    identity: Identity,
    /// Where it has a twin.
    holding: Option<LocalContent>,
    /// The twin, where that is read in its place.
    twin: Option<PathBuf>,
}

/// The files of one checkpoint, in the order they were added.
#[derive(Debug)]
pub struct Files {
    entries: Vec<FileEntry>,
    io: IoMode,
    open: OpenFiles,
    bytes_read: Arc<AtomicU64>,
    /// Of a twin.
    holdings: Arc<Holdings>,
    notes: Option<Notes>,
}

/// The same files, as they were first seen; those that are open are not shared.
impl Clone for Files {
    fn clone(&self) -> Self {
        let mut files = Self { entries: self.entries.clone(), ..self.without_entries() };
        files.make_room();
        files
    }
}

impl Files {
    #[must_use]
    pub fn new(io: IoMode) -> Self {
        Self {
            entries: Vec::new(),
            io,
            open: OpenFiles::default(),
            bytes_read: Arc::default(),
            holdings: Arc::default(),
            notes: None,
        }
    }

    /// Of files that are among these no more is read than is held.
    #[must_use]
    pub fn holding(self, holdings: Arc<Holdings>) -> Self {
        Self { holdings, ..self }
    }

    /// Files that remember what is read of them: see [`Files::noted`].
    #[must_use]
    pub fn noting(self) -> Self {
        Self { notes: Some(Arc::default()), ..self }
    }

    /// No files yet, to be read as these are.
    #[must_use]
    pub fn without_entries(&self) -> Self {
        Self { notes: self.notes.clone(), ..Self::new(self.io).holding(Arc::clone(&self.holdings)) }
    }

    /// What was read of a file of which that is noted.
    #[must_use]
    pub fn noted(&self, id: FileId) -> Ranges {
        let notes = self.notes.as_ref().map(|notes| notes.lock().expect("no panic while the lock is held"));
        let own = notes.iter().flat_map(|notes| notes.iter()).filter(|stretch| stretch.file == id);
        let len = self.len_bytes(id);
        own.map(|stretch| stretch.offset.min(len)..stretch.offset.saturating_add(stretch.len).min(len)).collect()
    }

    /// Read files of a twin where this process sees them, and call all as the user does. `local` says where one is, from
    /// where it lies in the twin.
    ///
    /// # Errors
    /// `Io` where one that this process saw is gone, or is another one now.
    pub fn localise(&mut self, io: IoMode, local: &dyn Fn(&Path) -> Option<LocalFile>) -> Result<()> {
        for entry in &mut self.entries {
            let Some(LocalFile { path, seen }) = local(&entry.path) else { continue };
            let twin = std::mem::replace(&mut entry.path, path);
            entry.twin = seen.is_none().then_some(twin);
            match seen {
                None => {}
                Some(modified) => {
                    let identity = Identity::of(&regular_file(&entry.path)?);
                    if (identity.len, identity.modified) != (entry.identity.len, modified) {
                        return Err(changed(&entry.path));
                    }
                    entry.identity = identity;
                }
            }
        }
        (self.io, self.holdings, self.open) = (io, Arc::default(), OpenFiles::default());
        self.make_room();
        Ok(())
    }

    /// Reads a file from a copy, all of which is there, where this process does not see the file itself.
    ///
    /// # Errors
    /// `Io` where the copy cannot be looked at, or has another length.
    pub fn read_copy(&mut self, id: FileId, copy: &Path) -> Result<()> {
        let entry = &mut self.entries[id.0 as usize];
        let (Some(_), Some(holding)) = (&entry.twin, &mut entry.holding) else { return Ok(()) };
        let identity = Identity::of(&regular_file(copy)?);
        if identity.len != entry.identity.len {
            return Err(changed(copy));
        }
        holding.held = Arc::new(std::iter::once(0..identity.len).filter(|range| !range.is_empty()).collect());
        (entry.identity, entry.twin) = (identity, Some(copy.to_path_buf()));
        // Where the two file systems are read in different ways, this one is right for both.
        if self.io == IoMode::Mmap && filesystem::preferred_io(copy.parent().unwrap_or(Path::new(".")))? != self.io {
            self.io = IoMode::Read;
        }
        self.open = OpenFiles::default();
        self.make_room();
        Ok(())
    }

    /// The ranks that see a file, ascending; `None` where all do.
    #[must_use]
    pub fn seen_by(&self, id: FileId) -> Option<&[u32]> {
        self.entries[id.0 as usize].holding.as_ref().map(|holding| &*holding.seen_by)
    }

    /// Add a file, remembering what it is now.
    ///
    /// # Errors
    /// `Io` where the file cannot be looked at or is not a regular file.
    pub fn add(&mut self, path: impl Into<PathBuf>) -> Result<FileId> {
        let path = path.into();
        let metadata = regular_file(&path)?;
        let id = FileId(u32::try_from(self.entries.len()).expect("fewer than 2^32 files"));
        let holding = self.holdings.get(&path).cloned();
        let twin = holding.as_ref().map(|_| path.clone());
        self.entries.push(FileEntry { path, identity: Identity::of(&metadata), holding, twin });
        self.make_room();
        Ok(id)
    }

    /// Take in the files of another checkpoint, behind the ones here, and give what is to be added to their numbers.
    /// Where the two would be read in different ways, both are read in the one that is right for every file system.
    ///
    /// # Panics
    /// At 2^32 files.
    pub fn append(&mut self, other: Self) -> u32 {
        let shift = u32::try_from(self.entries.len()).expect("fewer than 2^32 files");
        self.entries.extend(other.entries);
        if self.io != other.io {
            self.io = IoMode::Read;
        }
        self.make_room();
        shift
    }

    #[must_use]
    pub fn path(&self, id: FileId) -> &Path {
        &self.entries[id.0 as usize].path
    }

    #[must_use]
    pub fn len_bytes(&self, id: FileId) -> u64 {
        self.entries[id.0 as usize].identity.len
    }

    /// When a file was last changed, in seconds and nanoseconds since 1970.
    #[must_use]
    pub fn modified(&self, id: FileId) -> (i64, i64) {
        let FileEntry { identity, holding, .. } = &self.entries[id.0 as usize];
        holding.as_ref().map_or(identity.modified, |holding| holding.modified)
    }

    /// All of a file.
    #[must_use]
    pub fn whole(&self, id: FileId) -> FileRange {
        FileRange { file: id, offset: 0, len: self.len_bytes(id) }
    }

    pub fn ids(&self) -> impl Iterator<Item = FileId> + use<> {
        (0..u32::try_from(self.entries.len()).expect("fewer than 2^32 files")).map(FileId)
    }

    /// Bytes that were asked of the files so far. What is copied out of a mapping is not counted.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    #[must_use]
    pub fn io(&self) -> IoMode {
        self.io
    }

    /// The open file; opened now if it is not.
    ///
    /// # Errors
    /// `Io` where it cannot be opened, or where it is no longer the file first seen.
    pub fn open(&self, id: FileId) -> Result<Opened<'_>> {
        self.open.get(id, self.descriptors(), || self.open_now(id))
    }

    fn open_now(&self, id: FileId) -> Result<OpenFile> {
        let entry = &self.entries[id.0 as usize];
        let at = entry.twin.as_ref().unwrap_or(&entry.path);
        let file = File::open(at).map_err(lookup::refused("open", &entry.path))?;
        let metadata = file.metadata().map_err(Error::io("look at", &entry.path))?;
        if Identity::of(&metadata) != entry.identity {
            return Err(changed(&entry.path));
        }
        let direct = (self.io == IoMode::Direct).then(|| direct::open(at, OpenOptions::new().read(true))).flatten();
        let watch = match (&self.notes, &entry.holding, &entry.twin) {
            (Some(notes), ..) => Some(ReadCheck::Note(id, Arc::clone(notes))),
            (None, Some(holding), Some(_)) => Some(ReadCheck::Hold(holding.clone())),
            _ => None,
        };
        Ok(OpenFile {
            path: entry.path.clone(),
            file,
            direct,
            len: entry.identity.len,
            map: std::sync::OnceLock::new(),
            bytes_read: Arc::clone(&self.bytes_read),
            watch,
        })
    }

    /// Of each open file.
    fn descriptors(&self) -> usize {
        if self.io == IoMode::Direct { 2 } else { 1 }
    }

    /// For files that were added.
    fn make_room(&mut self) {
        self.open.grow(self.entries.len(), self.descriptors());
    }

    /// Read `len` bytes at `offset`. The length is checked against the file before anything is allocated.
    ///
    /// # Errors
    /// As [`OpenFile::read_exact_at`].
    pub fn read(&self, id: FileId, offset: u64, len: u64) -> Result<Vec<u8>> {
        let file = self.open(id)?;
        if offset.checked_add(len).is_none_or(|end| end > file.len) {
            return Err(file.too_short(offset, len));
        }
        let mut buffer = zeroed(len).map_err(Error::io("read", file.path()))?;
        file.read_exact_at(&mut buffer, offset)?;
        Ok(buffer)
    }

    /// Check that every file is still the one first seen; those that others see, they check.
    ///
    /// # Errors
    /// `Io` naming the first file that changed.
    pub fn check_unchanged(&self) -> Result<()> {
        for entry in self.entries.iter().filter(|entry| entry.twin.is_none()) {
            let metadata = std::fs::metadata(&entry.path).map_err(lookup::refused("look at", &entry.path))?;
            if Identity::of(&metadata) != entry.identity {
                return Err(changed(&entry.path));
            }
        }
        Ok(())
    }
}

/// A buffer for so many bytes of a file.
///
/// # Errors
/// `OutOfMemory` where there is no room for it.
pub fn zeroed(len: u64) -> io::Result<Vec<u8>> {
    let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(len)?;
    buffer.resize(len, 0);
    Ok(buffer)
}

fn changed(path: &Path) -> Error {
    let source = io::Error::other("the file changed while it was being read");
    StorageError::Io { action: "trust", path: path.to_path_buf(), source }.into()
}
