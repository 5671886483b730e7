//! The files of a source checkpoint: positional reads whose errors name the file.
//!
//! All sizes and offsets are in bytes. A file is opened on first use. If too many files are open, a file is closed
//! again, so that a checkpoint of 16,384 rank files can be read with a limit of 1,024 descriptors. The identity of a
//! file (device, inode, size, modification time) is recorded when the file is added, and checked again before a result
//! is published.

mod anchored;
pub mod direct;
pub(crate) mod error;
pub mod filesystem;
pub mod fresh_lookup;
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
pub use local_content::{LocalContent, LocalFile, MirroredFiles, Ranges};
pub use lookup::regular_file;
pub use mapping::catch_lost_pages;
pub use open_file::OpenFile;
pub use open_files::Opened;

use crate::error::{Error, Result, StorageError};
use local_content::{ReadCheck, ReadLog};
use open_files::OpenFiles;

/// The index of a file in [`Files`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// A range of bytes of a file: `[offset, offset + len)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileRange {
    /// The file that contains the range.
    pub file: FileId,
    /// The offset of the first byte.
    pub offset: u64,
    /// The length of the range in bytes.
    pub len: u64,
}

/// The identity of a file. The identity changes if the file is replaced or modified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

impl Identity {
    fn from_metadata(metadata: &std::fs::Metadata) -> Self {
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
    /// The bytes of the file that the metadata mirror has, and the processes that see the file. `None` if the file is not
    /// in the mirror.
    mirror: Option<LocalContent>,
    /// The path that this process reads instead of the original file: the file in the metadata mirror, or a complete copy.
    mirror_path: Option<PathBuf>,
    /// True for a computed file, which cannot be opened (see [`Files::add_computed`]).
    is_computed: bool,
}

/// The files of one checkpoint, in the order in which they were added.
#[derive(Debug)]
pub struct Files {
    entries: Vec<FileEntry>,
    io: IoMode,
    open: OpenFiles,
    bytes_read: Arc<AtomicU64>,
    /// All files of the metadata mirror. A file of the mirror is used only after it was added to this list.
    mirrors: Arc<MirroredFiles>,
    read_log: Option<ReadLog>,
}

/// A clone has the same files and the same recorded identities, but its own descriptors.
impl Clone for Files {
    fn clone(&self) -> Self {
        let mut files = Self { entries: self.entries.clone(), ..self.without_entries() };
        files.grow_open_files();
        files
    }
}

impl Files {
    /// Returns an empty list of files, which are read as `io` specifies.
    #[must_use]
    pub fn new(io: IoMode) -> Self {
        Self {
            entries: Vec::new(),
            io,
            open: OpenFiles::default(),
            bytes_read: Arc::default(),
            mirrors: Arc::default(),
            read_log: None,
        }
    }

    /// Limits reads of files in the metadata mirror to the bytes that the mirror contains.
    #[must_use]
    pub fn with_mirrored_files(self, mirrors: Arc<MirroredFiles>) -> Self {
        Self { mirrors, ..self }
    }

    /// Makes reads record their ranges. [`Files::recorded_reads`] returns the recorded ranges.
    #[must_use]
    pub fn recording_reads(self) -> Self {
        Self { read_log: Some(Arc::default()), ..self }
    }

    /// Returns an empty list of files with the settings of this list.
    #[must_use]
    pub fn without_entries(&self) -> Self {
        Self { read_log: self.read_log.clone(), ..Self::new(self.io).with_mirrored_files(Arc::clone(&self.mirrors)) }
    }

    /// Returns the ranges that were read from a file. [`Files::recording_reads`] must have been called before the
    /// reads.
    pub fn recorded_reads(&self, id: FileId) -> Ranges {
        let read_log = self.read_log.as_ref().map(|read_log| read_log.lock().expect("no panic while the lock is held"));
        let own = read_log.iter().flat_map(|read_log| read_log.iter()).filter(|range| range.file == id);
        let len = self.len_bytes(id);
        own.map(|range| range.offset.min(len)..range.offset.saturating_add(range.len).min(len)).collect()
    }

    /// Replaces files of the metadata mirror by the original files that this process sees; other files are still read
    /// from the mirror. From then on, messages contain the user's paths for all files. `local` returns the original file
    /// for a path in the mirror, even if this process does not see that file, and `None` for any other path.
    ///
    /// # Errors
    /// `Io` if a file that this process saw earlier is gone or has changed.
    pub fn use_local_files(&mut self, io: IoMode, local: &dyn Fn(&Path) -> Option<LocalFile>) -> Result<()> {
        for entry in &mut self.entries {
            let Some(LocalFile { path, own_modified: seen }) = local(&entry.path) else { continue };
            let mirror_path = std::mem::replace(&mut entry.path, path);
            entry.mirror_path = seen.is_none().then_some(mirror_path);
            match seen {
                None => {}
                Some(modified) => {
                    let identity = Identity::from_metadata(&regular_file(&entry.path)?);
                    if (identity.len, identity.modified) != (entry.identity.len, modified) {
                        return Err(changed(&entry.path));
                    }
                    entry.identity = identity;
                }
            }
        }
        (self.io, self.mirrors, self.open) = (io, Arc::default(), OpenFiles::default());
        self.grow_open_files();
        Ok(())
    }

    /// Makes this process read a file from a complete copy, if this process does not see the file.
    ///
    /// # Errors
    /// `Io` if the copy cannot be inspected, or if its length is not the length of the file.
    pub fn read_copy(&mut self, id: FileId, copy: &Path) -> Result<()> {
        let entry = &mut self.entries[id.0 as usize];
        let (Some(_), Some(mirror)) = (&entry.mirror_path, &mut entry.mirror) else { return Ok(()) };
        let identity = Identity::from_metadata(&regular_file(copy)?);
        if identity.len != entry.identity.len {
            return Err(changed(copy));
        }
        mirror.available = Arc::new(std::iter::once(0..identity.len).filter(|range| !range.is_empty()).collect());
        (entry.identity, entry.mirror_path) = (identity, Some(copy.to_path_buf()));
        // If the two file systems prefer different ways to read, positional reads are correct for both.
        if self.io == IoMode::Mmap && filesystem::preferred_io(copy.parent().unwrap_or(Path::new(".")))? != self.io {
            self.io = IoMode::Read;
        }
        self.open = OpenFiles::default();
        self.grow_open_files();
        Ok(())
    }

    /// Returns the numbers of the dtshard processes that see a file, ascending. Returns `None` if the file is not in a
    /// metadata mirror, which means that all processes see the file.
    pub fn seen_by(&self, id: FileId) -> Option<&[u32]> {
        self.entries[id.0 as usize].mirror.as_ref().map(|mirror| &*mirror.seen_by)
    }

    /// Adds a file and records its identity.
    ///
    /// # Errors
    /// `Io` if the file cannot be inspected or is not a regular file.
    pub fn add(&mut self, path: impl Into<PathBuf>) -> Result<FileId> {
        let path = path.into();
        let metadata = regular_file(&path)?;
        let id = FileId(u32::try_from(self.entries.len()).expect("fewer than 2^32 files"));
        let mirror = self.mirrors.get(&path).cloned();
        let mirror_path = mirror.as_ref().map(|_| path.clone());
        let identity = Identity::from_metadata(&metadata);
        self.entries.push(FileEntry { path, identity, mirror, mirror_path, is_computed: false });
        self.grow_open_files();
        Ok(id)
    }

    /// Adds a computed file of `len` bytes, which is stored nowhere. Its path and its time are those of the file `like`, from
    /// which its bytes are computed.
    ///
    /// # Panics
    /// Panics if there are more than 2^32 files.
    pub fn add_computed(&mut self, like: FileId, len: u64) -> FileId {
        let id = FileId(u32::try_from(self.entries.len()).expect("fewer than 2^32 files"));
        let mut entry = self.entries[like.0 as usize].clone();
        (entry.identity.len, entry.is_computed) = (len, true);
        self.entries.push(entry);
        id
    }

    /// Appends the files of another checkpoint. Returns the number that must be added to the file ids of that checkpoint.
    /// If the two checkpoints use different methods for reading, both then use positional reads, which are correct for
    /// every file system.
    ///
    /// # Panics
    /// Panics if there are more than 2^32 files.
    pub fn append(&mut self, other: Self) -> u32 {
        let shift = u32::try_from(self.entries.len()).expect("fewer than 2^32 files");
        self.entries.extend(other.entries);
        if self.io != other.io {
            self.io = IoMode::Read;
        }
        self.grow_open_files();
        shift
    }

    /// Returns the path of a file.
    pub fn path(&self, id: FileId) -> &Path {
        &self.entries[id.0 as usize].path
    }

    /// Returns the recorded length of a file.
    pub fn len_bytes(&self, id: FileId) -> u64 {
        self.entries[id.0 as usize].identity.len
    }

    /// Returns the time of the last change of a file, in seconds and nanoseconds since 1970. For a file in the metadata
    /// mirror, this is the latest time that any process reports.
    pub fn modified(&self, id: FileId) -> (i64, i64) {
        let FileEntry { identity, mirror, .. } = &self.entries[id.0 as usize];
        mirror.as_ref().map_or(identity.modified, |mirror| mirror.modified)
    }

    /// Returns the range of all bytes of a file.
    pub fn whole(&self, id: FileId) -> FileRange {
        FileRange { file: id, offset: 0, len: self.len_bytes(id) }
    }

    /// Returns the ids of all files, computed files included.
    pub fn ids(&self) -> impl Iterator<Item = FileId> + use<> {
        (0..u32::try_from(self.entries.len()).expect("fewer than 2^32 files")).map(FileId)
    }

    /// Returns whether a file is computed from other files.
    pub fn is_computed(&self, id: FileId) -> bool {
        self.entries[id.0 as usize].is_computed
    }

    /// Returns the number of bytes that were read from the files. Bytes copied from a mapping do not count.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Returns the method by which the files are read.
    pub fn io(&self) -> IoMode {
        self.io
    }

    /// Returns the open file, and opens it if it is not open.
    ///
    /// # Errors
    /// `Io` if the file cannot be opened or its identity has changed.
    ///
    /// # Panics
    /// Panics if the file is computed.
    pub fn open(&self, id: FileId) -> Result<Opened<'_>> {
        self.open.get(id, self.descriptors(), || self.open_now(id))
    }

    fn open_now(&self, id: FileId) -> Result<OpenFile> {
        let entry = &self.entries[id.0 as usize];
        assert!(!entry.is_computed, "a computed file is not stored");
        let at = entry.mirror_path.as_ref().unwrap_or(&entry.path);
        let file = File::open(at).map_err(lookup::refused("open", &entry.path))?;
        let metadata = file.metadata().map_err(Error::io("stat", &entry.path))?;
        if Identity::from_metadata(&metadata) != entry.identity {
            return Err(changed(&entry.path));
        }
        let direct = (self.io == IoMode::Direct).then(|| direct::open(at, OpenOptions::new().read(true))).flatten();
        let watch = match (&self.read_log, &entry.mirror, &entry.mirror_path) {
            (Some(read_log), ..) => Some(ReadCheck::Record(id, Arc::clone(read_log))),
            (None, Some(mirror), Some(_)) => Some(ReadCheck::Limit(mirror.clone())),
            _ => None,
        };
        Ok(OpenFile {
            path: entry.path.clone(),
            file,
            direct,
            len: entry.identity.len,
            map: std::sync::OnceLock::new(),
            bytes_read: Arc::clone(&self.bytes_read),
            read_check: watch,
        })
    }

    /// Returns the number of descriptors that one open file uses: one or two.
    fn descriptors(&self) -> usize {
        if self.io == IoMode::Direct { 2 } else { 1 }
    }

    /// Adapts the table of open files to the current number of files.
    fn grow_open_files(&mut self) {
        self.open.grow(self.entries.len(), self.descriptors());
    }

    /// Reads `len` bytes at `offset`. Compares the length with the file before it allocates memory.
    ///
    /// # Errors
    /// The errors of [`OpenFile::read_exact_at`].
    pub fn read(&self, id: FileId, offset: u64, len: u64) -> Result<Vec<u8>> {
        let file = self.open(id)?;
        if offset.checked_add(len).is_none_or(|end| end > file.len) {
            return Err(file.too_short(offset, len));
        }
        let mut buffer = zeroed(len).map_err(Error::io("read", file.path()))?;
        file.read_exact_at(&mut buffer, offset)?;
        Ok(buffer)
    }

    /// Checks that the identity of every file is unchanged. If this process does not see a file, other processes check
    /// the file.
    ///
    /// # Errors
    /// `Io` naming the first file that has changed.
    pub fn check_unchanged(&self) -> Result<()> {
        for entry in self.entries.iter().filter(|entry| entry.mirror_path.is_none() && !entry.is_computed) {
            let metadata = std::fs::metadata(&entry.path).map_err(lookup::refused("stat", &entry.path))?;
            if Identity::from_metadata(&metadata) != entry.identity {
                return Err(changed(&entry.path));
            }
        }
        Ok(())
    }
}

/// Returns a zeroed buffer of `len` bytes.
///
/// # Errors
/// `OutOfMemory` if there is not enough memory.
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
