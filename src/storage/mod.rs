//! Files of a source checkpoint: positional reads that name the file in every error.
//!
//! Counts in bytes. A file is opened on first use and closed again when too many are open, so that a checkpoint of
//! 16,384 rank files works under a limit of 1,024 descriptors. What a file was (device, inode, size, modification
//! time) is remembered from the first look and checked again before a result is published.

pub mod direct;
pub mod filesystem;
pub mod memory;
pub mod node;
mod sigbus;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use memmap2::{Advice, Mmap};

pub use direct::BOUNCE_BYTES;
pub use filesystem::IoMode;

use crate::error::{Error, Result};

/// Index of a file within [`Files`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// A stretch of a file: `[offset, offset + len)`, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stretch {
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
struct Entry {
    path: PathBuf,
    identity: Identity,
}

/// One open file; mapped on demand.
#[derive(Debug)]
pub struct OpenFile {
    path: PathBuf,
    file: File,
    /// The same file, to be read past the page cache, where that is asked for and possible.
    direct: Option<File>,
    len: u64,
    map: OnceLock<Mmap>,
    /// See [`Files::bytes_read`].
    bytes_read: Arc<AtomicU64>,
}

impl OpenFile {
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fill `buffer` from `offset`.
    ///
    /// # Errors
    /// `Malformed` where the file ends first, `Io` where the read fails.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        self.bytes_read.fetch_add(buffer.len() as u64, Ordering::Relaxed);
        // A file system may open a file for direct reads and still refuse them.
        let direct = self.direct.as_ref().map(|file| direct::read_exact_at(file, buffer, offset));
        let read = match direct {
            Some(Err(error)) if error.kind() == io::ErrorKind::InvalidInput => None,
            read => read,
        };
        read.unwrap_or_else(|| self.file.read_exact_at(buffer, offset)).map_err(|error| {
            if error.kind() == io::ErrorKind::UnexpectedEof {
                self.too_short(offset, buffer.len() as u64)
            } else {
                Error::Io { action: "read", path: self.path.clone(), source: error }
            }
        })
    }

    /// The bytes `[offset, offset + len)` of the mapped file. Reading them faults pages in; a file that shrinks
    /// meanwhile ends the process with a message (see `sigbus`).
    ///
    /// # Errors
    /// `Malformed` where the file is shorter, `Io` where it cannot be mapped.
    pub fn mapped(&self, offset: u64, len: u64) -> Result<&[u8]> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(self.too_short(offset, len));
        }
        if len == 0 {
            return Ok(&[]);
        }
        let map = match self.map.get() {
            Some(map) => map,
            None => {
                let map = self.map_file()?;
                self.map.get_or_init(|| map)
            }
        };
        let start = usize::try_from(offset).expect("a mapped offset fits the address space");
        let len = usize::try_from(len).expect("a mapped length fits the address space");
        Ok(&map[start..start + len])
    }

    fn map_file(&self) -> Result<Mmap> {
        sigbus::install();
        // SAFETY: the mapping is read-only and private to this process. Another process may still change the file:
        // changed bytes are caught by the identity check before publishing, a shrunk file by the SIGBUS handler.
        #[expect(unsafe_code)]
        let map = unsafe { Mmap::map(&self.file) }.map_err(Error::io("map", &self.path))?;
        // A hint only: strips are read front to back.
        let _ = map.advise(Advice::Sequential);
        Ok(map)
    }

    fn too_short(&self, offset: u64, len: u64) -> Error {
        Error::malformed(
            &self.path,
            format!("byte {offset}"),
            format!("{len} more bytes"),
            format!("a file of {} bytes", self.len),
        )
    }
}

/// The files of one checkpoint, in the order they were added.
#[derive(Debug)]
pub struct Files {
    entries: Vec<Entry>,
    io: IoMode,
    open: Mutex<OpenSet>,
    bytes_read: Arc<AtomicU64>,
}

/// The open files, most recently used last.
#[derive(Debug, Default)]
struct OpenSet {
    files: Vec<Option<Arc<OpenFile>>>,
    recent: std::collections::VecDeque<u32>,
}

/// The same files, as they were first seen; those that are open are not shared.
impl Clone for Files {
    fn clone(&self) -> Self {
        Self { entries: self.entries.clone(), ..Self::new(self.io) }
    }
}

impl Files {
    #[must_use]
    pub fn new(io: IoMode) -> Self {
        Self { entries: Vec::new(), io, open: Mutex::default(), bytes_read: Arc::default() }
    }

    /// Add a file, remembering what it is now.
    ///
    /// # Errors
    /// `Io` where the file cannot be looked at or is not a regular file.
    pub fn add(&mut self, path: impl Into<PathBuf>) -> Result<FileId> {
        let path = path.into();
        let metadata = regular_file(&path)?;
        let id = FileId(u32::try_from(self.entries.len()).expect("fewer than 2^32 files"));
        self.entries.push(Entry { path, identity: Identity::of(&metadata) });
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
        self.entries[id.0 as usize].identity.modified
    }

    /// All of a file.
    #[must_use]
    pub fn whole(&self, id: FileId) -> Stretch {
        Stretch { file: id, offset: 0, len: self.len_bytes(id) }
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
    pub fn open(&self, id: FileId) -> Result<Arc<OpenFile>> {
        let mut set = self.open.lock().expect("no panic while the lock is held");
        if set.files.len() < self.entries.len() {
            set.files.resize(self.entries.len(), None);
        }
        if let Some(file) = &set.files[id.0 as usize] {
            return Ok(Arc::clone(file));
        }
        let entry = &self.entries[id.0 as usize];
        let file = File::open(&entry.path).map_err(Error::io("open", &entry.path))?;
        let metadata = file.metadata().map_err(Error::io("look at", &entry.path))?;
        if Identity::of(&metadata) != entry.identity {
            return Err(changed(&entry.path));
        }
        let direct =
            (self.io == IoMode::Direct).then(|| direct::open(&entry.path, OpenOptions::new().read(true))).flatten();
        let len = entry.identity.len;
        let file = Arc::new(OpenFile {
            path: entry.path.clone(),
            file,
            direct,
            len,
            map: OnceLock::new(),
            bytes_read: Arc::clone(&self.bytes_read),
        });
        // First in, first out: work goes through the files in order, so the oldest one is done with. A file still in
        // use stays open through its other `Arc`.
        let descriptors = if self.io == IoMode::Direct { 2 } else { 1 };
        if set.recent.len() >= filesystem::open_file_budget() / descriptors
            && let Some(oldest) = set.recent.pop_front()
        {
            set.files[oldest as usize] = None;
        }
        set.recent.push_back(id.0);
        set.files[id.0 as usize] = Some(Arc::clone(&file));
        Ok(file)
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
        let mut buffer = vec![0; usize::try_from(len).expect("length checked against a file's")];
        file.read_exact_at(&mut buffer, offset)?;
        Ok(buffer)
    }

    /// Check that every file is still the one first seen.
    ///
    /// # Errors
    /// `Io` naming the first file that changed.
    pub fn check_unchanged(&self) -> Result<()> {
        for entry in &self.entries {
            let metadata = std::fs::metadata(&entry.path).map_err(Error::io("look at", &entry.path))?;
            if Identity::of(&metadata) != entry.identity {
                return Err(changed(&entry.path));
            }
        }
        Ok(())
    }
}

/// What the file is, where it is one that can be read without waiting: opening a pipe would wait for its writer.
///
/// # Errors
/// `Io` where it cannot be looked at or is not a regular file.
pub fn regular_file(path: &Path) -> Result<std::fs::Metadata> {
    let metadata = std::fs::metadata(path).map_err(Error::io("open", path))?;
    if metadata.is_file() {
        return Ok(metadata);
    }
    let source = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
    Err(Error::Io { action: "open", path: path.to_path_buf(), source })
}

fn changed(path: &Path) -> Error {
    let source = io::Error::other("the file changed while it was being read");
    Error::Io { action: "trust", path: path.to_path_buf(), source }
}
