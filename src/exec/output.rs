//! The output files. They are created at their full size first, so that a full disk is an error before any data is
//! copied.
//!
//! Data that must be on disk at the end is written past the page cache (`O_DIRECT`) if the file system does that well.
//! Otherwise such data goes through the page cache, and its write-back starts immediately. Data that need not be on
//! disk goes through the page cache in small calls.
//!
//! All sizes and offsets are in bytes. Invariant: only complete file blocks are written past the page cache. If write
//! blocks share a file block, this file block is written when it is [complete](super::block_joiner), so no file block
//! is written through and past the page cache at the same time. Incomplete blocks are written before the file is
//! synced. If accepted data could not be written to disk, no file is reported as synced afterwards.

use std::fs::File;
use std::io::IoSlice;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rayon::prelude::*;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::block_joiner::{BlockJoiner, BlockRemainder, DirectBlock, Joined};
use super::{Extents, Stop};
use crate::catalog::OutputFile;
use crate::error::{Error, Result, StorageError};
use crate::storage::AnchoredPath;
use crate::storage::direct::{self, ALIGNMENT};
use crate::storage::filesystem::{close, open_file_budget, start_write_back, suits_direct_writes_in, write_back};

/// The maximum number of bytes that one call writes through the page cache. The kernel allocates memory for all bytes
/// of a call, and it finds short free ranges faster than long ones.
const CALL_BYTES: usize = 256 << 10;

/// The minimum number of bytes for which a direct write (`O_DIRECT`) is faster than a write through the page cache.
const LEAST_DIRECT_BYTES: usize = 64 << 10;

/// The output files of a run, opened on demand.
#[derive(Debug)]
pub struct Outputs {
    folder: AnchoredPath,
    paths: Vec<AnchoredPath>,
    mode: WriteMode,
    open: Mutex<Vec<(u32, Arc<Handle>)>>,
    /// The incomplete file blocks of files that are written past the page cache.
    joiner: BlockJoiner,
    /// True once a write has failed. Every later sync must then fail, for two reasons: the system reports a failed
    /// write only once; and file blocks that could not be written are not kept in memory.
    has_failed: AtomicBool,
    /// The first error of closing a file, or `None` if there was no error or the error was already reported.
    close_error: Arc<Mutex<Option<Error>>>,
}

/// The way in which bytes reach the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteMode {
    /// Writes go through the page cache. The kernel chooses when the bytes are written to disk.
    Cache,
    /// Writes go through the page cache, and write-back starts immediately.
    WriteBehind,
    /// Writes go past the page cache (`O_DIRECT`).
    Direct,
}

/// An open output file. Any worker may drop the handle and thereby close the file, so an error of closing is kept for
/// [`Outputs::close`].
#[derive(Debug)]
struct Handle {
    /// The open file; `None` only while the handle is being dropped.
    file: Option<File>,
    /// A second descriptor of the file, for writes past the page cache; `None` if the file is not written in this way.
    direct: Option<File>,
    path: PathBuf,
    close_error: Arc<Mutex<Option<Error>>>,
}

impl Handle {
    fn file(&self) -> &File {
        self.file.as_ref().expect("it is open until it is dropped")
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        for file in self.direct.take().into_iter().chain(self.file.take()) {
            if let Err(error) = close(file) {
                let mut first = self.close_error.lock().expect("no panic while the lock is held");
                first.get_or_insert_with(|| Error::io("close", &self.path)(error));
            }
        }
    }
}

impl Outputs {
    /// Creates every file under `folder` that has bytes in `todo`, and every empty file, with its full size allocated.
    /// A file that another run has created is kept, but gets the full size. `sync` is true if all data must be on disk
    /// before it is published, see [`Outputs::sync`].
    ///
    /// # Errors
    /// `Io` naming the file; its kind is `StorageFull` if the file system has no room for the file.
    pub fn create(folder: &AnchoredPath, files: &[OutputFile], todo: &Extents, sync: bool) -> Result<Self> {
        let outputs = Self::open_existing(folder, files, sync)?;
        let is_touched = |(index, file): &(u32, &OutputFile)| file.len == 0 || todo.has_file(*index);
        let touched: Vec<(u32, &OutputFile)> = (0..).zip(files).filter(is_touched).collect();
        // The folder stays open, so that its path is not resolved again for each file.
        let anchor = folder.as_anchor().map_err(Error::io("open", folder))?;
        for (_, file) in &touched {
            let above = file.path.parent().unwrap_or(Path::new(""));
            anchor.create_folders(above).map_err(Error::io("create", &anchor.join(above)))?;
        }
        // Some file systems take as long to allocate a file as to write it, so threads share the files.
        let make = |(_, file): &(u32, &OutputFile)| -> Result<()> {
            let path = &anchor.join(&file.path);
            let created = path.open_to_write(OFlags::CREATE).map_err(Error::io("create", path))?;
            let found = created.metadata().map_err(Error::io("stat", path))?.len();
            if found > file.len {
                created.set_len(file.len).map_err(Error::io("cut", path))?;
            } else if found < file.len {
                allocate(&created, file.len).map_err(Error::io("allocate space for", path))?;
            }
            close(created).map_err(Error::io("close", path))
        };
        let made: Vec<Result<()>> = touched.par_iter().map(make).collect();
        made.into_iter().collect::<Result<()>>()?;
        Ok(outputs)
    }

    /// Opens existing output files without changing their size.
    ///
    /// # Errors
    /// `Io` if the type of the file system is unknown.
    pub fn open_existing(folder: &AnchoredPath, files: &[OutputFile], sync: bool) -> Result<Self> {
        let mode = match sync {
            false => WriteMode::Cache,
            true if suits_direct_writes_in(folder)? => WriteMode::Direct,
            true => WriteMode::WriteBehind,
        };
        let paths = files.iter().map(|file| folder.join(&file.path)).collect();
        let (open, joiner) = (Mutex::default(), BlockJoiner::default());
        let (has_failed, close_error) = (false.into(), Arc::default());
        Ok(Self { folder: folder.clone(), paths, mode, open, joiner, has_failed, close_error })
    }

    fn open(&self, file: u32) -> Result<Arc<Handle>> {
        let mut open = self.open.lock().expect("no panic while the lock is held");
        if let Some((_, handle)) = open.iter().rev().find(|(index, _)| *index == file) {
            return Ok(Arc::clone(handle));
        }
        let path = &self.paths[file as usize];
        let handle = path.open_to_write(OFlags::empty()).map_err(Error::io("open", path))?;
        let direct = (self.mode == WriteMode::Direct).then(|| path.open_to_write(OFlags::DIRECT).ok()).flatten();
        let (path, close_error) = (path.path().to_path_buf(), Arc::clone(&self.close_error));
        let handle = Arc::new(Handle { file: Some(handle), direct, path, close_error });
        if open.len() >= open_file_budget() / 4 {
            open.remove(0);
        }
        open.push((file, Arc::clone(&handle)));
        Ok(handle)
    }

    /// Writes `bytes` at `offset`. Bytes can be written past the page cache only if their memory address has the same
    /// alignment as their file offset (see [`direct::Buffer`]).
    ///
    /// # Errors
    /// `Io` naming the file.
    pub fn write(&self, file: u32, offset: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let handle = self.open(file)?;
        let Some(direct) = &handle.direct else {
            write_cached(handle.file(), offset, bytes).map_err(Error::io("write", &self.paths[file as usize]))?;
            if self.mode != WriteMode::Cache {
                start_write_back(handle.file(), offset, bytes.len() as u64);
            }
            return Ok(());
        };
        let blocks = direct::whole_blocks(offset, bytes.len());
        let first = self.join(file, offset, &bytes[..blocks.start])?;
        let last = self.join(file, offset + blocks.end as u64, &bytes[blocks.end..])?;
        let start = if first.is_some() { offset / ALIGNMENT * ALIGNMENT } else { offset + blocks.start as u64 };
        let first = first.as_deref().map_or(&[][..], DirectBlock::bytes);
        let last = last.as_deref().map_or(&[][..], DirectBlock::bytes);
        let written = write_blocks(&handle, direct, start, [first, &bytes[blocks], last]);
        self.record_failure(written.map_err(Error::io("write", &self.paths[file as usize])))
    }

    /// Remembers a failed write, because workers that added data assume that the data was written.
    fn record_failure(&self, done: Result<()>) -> Result<()> {
        done.inspect_err(|error| {
            if matches!(error, Error::Storage(StorageError::Io { .. })) {
                self.has_failed.store(true, Ordering::Relaxed);
            }
        })
    }

    /// Adds a part of a file block. Returns the complete file block if this part completes it. If the joiner evicts an
    /// older file block, writes the parts of that file block.
    fn join(&self, file: u32, offset: u64, part: &[u8]) -> Result<Option<Box<DirectBlock>>> {
        if part.is_empty() {
            return Ok(None);
        }
        match self.joiner.add_part(file, offset, part) {
            Joined::Incomplete => Ok(None),
            Joined::Complete(block) => Ok(Some(block)),
            Joined::Evicted(rest) => self.write_remainder(&rest).map(|()| None),
        }
    }

    fn write_remainder(&self, rest: &BlockRemainder) -> Result<()> {
        let write = |handle: Arc<Handle>| {
            let mut parts = rest.parts();
            let written = parts.try_for_each(|(offset, bytes)| write_cached(handle.file(), offset, bytes));
            written.map_err(Error::io("write", &self.paths[rest.file() as usize]))
        };
        self.record_failure(self.open(rest.file()).and_then(write))
    }

    /// Syncs one file to disk (fsync). Its data is written back first, block by block, and `stop` is checked after each
    /// block, because one fsync of many GB cannot be interrupted.
    ///
    /// # Errors
    /// `Io` naming the file, also if an earlier write failed; `Stopped`.
    pub fn sync(&self, file: u32, stop: &Stop) -> Result<()> {
        self.check_no_failure("sync", self.paths[file as usize].path())?;
        self.record_failure(self.write_and_sync(file, stop))
    }

    /// Closes the files that no worker uses, and checks that no file was closed with an error.
    ///
    /// # Errors
    /// `Io` naming a file, also if an earlier write failed.
    pub fn close(&self) -> Result<()> {
        // Closes the files without holding the lock, because closing may take long.
        let open = std::mem::take(&mut *self.open.lock().expect("no panic while the lock is held"));
        drop(open);
        let error = self.close_error.lock().expect("no panic while the lock is held").take();
        self.record_failure(error.map_or(Ok(()), Err))?;
        self.check_no_failure("close", self.folder.path())
    }

    fn check_no_failure(&self, action: &'static str, path: &Path) -> Result<()> {
        if !self.has_failed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let earlier = std::io::Error::other("an earlier write to DST failed");
        Err(Error::io(action, path)(earlier))
    }

    fn write_and_sync(&self, file: u32, stop: &Stop) -> Result<()> {
        const BLOCK: u64 = 32 << 20;
        let path = &self.paths[file as usize];
        let incomplete = self.joiner.take_file(file);
        incomplete.iter().try_for_each(|rest| self.write_remainder(rest))?;
        let handle = self.open(file)?;
        let handle = handle.file();
        let len = handle.metadata().map_err(Error::io("stat", path))?.len();
        for block in 0..len.div_ceil(BLOCK) {
            stop.check()?;
            write_back(handle, block * BLOCK, BLOCK).map_err(Error::io("sync", path))?;
        }
        handle.sync_all().map_err(Error::io("sync", path))
    }

    /// Syncs the folders of the files to disk (fsync), so that the names of the files are durable.
    ///
    /// # Errors
    /// `Io` naming the folder.
    pub fn sync_folders(&self) -> Result<()> {
        self.folder.sync_all().map_err(Error::io("sync", &self.folder))
    }
}

fn write_cached(file: &File, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
    let mut at = offset;
    let mut rest = bytes;
    while !rest.is_empty() {
        // Calls end at page boundaries if possible, so that each page is written by one call.
        let ragged = usize::try_from(at % CALL_BYTES as u64).expect("less than a call");
        let (call, after) = rest.split_at(rest.len().min(CALL_BYTES - ragged));
        file.write_all_at(call, at)?;
        at += call.len() as u64;
        rest = after;
    }
    Ok(())
}

/// Writes consecutive file blocks, past the page cache if they are long enough.
fn write_blocks(handle: &Handle, direct: &File, offset: u64, blocks: [&[u8]; 3]) -> std::io::Result<()> {
    let len: usize = blocks.iter().map(|blocks| blocks.len()).sum();
    if len >= LEAST_DIRECT_BYTES && write_direct(direct, offset, blocks, len)? {
        return Ok(());
    }
    let mut at = offset;
    blocks.into_iter().try_for_each(|blocks| {
        write_cached(handle.file(), at, blocks)?;
        at += blocks.len() as u64;
        Ok(())
    })
}

/// Writes past the page cache. Returns false if not all bytes were written: the memory is not aligned, or the file
/// system refuses direct writes although it opened the file for them. Any other error occurs again when the caller
/// writes the bytes through the page cache.
fn write_direct(file: &File, offset: u64, blocks: [&[u8]; 3], len: usize) -> std::io::Result<bool> {
    match rustix::io::pwritev(file, &blocks.map(IoSlice::new), offset) {
        Ok(written) => Ok(written == len),
        Err(Errno::INVAL | Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Reserves `len` bytes for the file. If the file system cannot reserve space, only the length is set; a full disk is
/// then an error only when data is written.
fn allocate(file: &File, len: u64) -> std::io::Result<()> {
    use rustix::fs::FallocateFlags;

    if len == 0 {
        return Ok(());
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => file.set_len(len),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::direct::Buffer;

    #[test]
    fn blocks_of_any_size_and_offset_are_written_in_every_mode() {
        const LEN: u64 = 1_000_003;
        let content: Vec<u8> = (0..LEN).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect();
        // The working folder is on a disk; /tmp may not be.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let suited = if suits_direct_writes_in(&AnchoredPath::new(folder.path())).unwrap() {
            WriteMode::Direct
        } else {
            WriteMode::WriteBehind
        };
        for (sync, mode) in
            [(true, suited), (true, WriteMode::WriteBehind), (true, WriteMode::Direct), (false, WriteMode::Cache)]
        {
            let mut file = OutputFile::new("f");
            file.push_payload(LEN);
            let files = [file];
            let mut outputs =
                Outputs::create(&AnchoredPath::new(folder.path()), &files, &Extents::of_files(&files), sync).unwrap();
            outputs.mode = mode;
            let mut buffer = Buffer::new();
            let mut at = 0;
            for len in [10, 5000, 70_000, 300_001, 4085, 8192, 131_072, 65_536].into_iter().cycle() {
                let len = usize::try_from((LEN - at).min(len)).unwrap();
                if len == 0 {
                    break;
                }
                let block = buffer.prepare(at, len);
                block.copy_from_slice(&content[usize::try_from(at).unwrap()..][..len]);
                outputs.write(0, at, block).unwrap();
                at += len as u64;
            }
            // Later small writes may change data that was written directly.
            outputs.write(0, 500_000, &[1, 2, 3, 4]).unwrap();
            outputs.sync(0, &Stop::default()).unwrap();
            let mut expected = content.clone();
            expected[500_000..500_004].copy_from_slice(&[1, 2, 3, 4]);
            assert!(std::fs::read(folder.path().join("f")).unwrap() == expected, "{mode:?}");
            std::fs::remove_file(folder.path().join("f")).unwrap();
        }
    }

    #[test]
    fn only_the_last_file_block_stays_incomplete() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let mut file = OutputFile::new("f");
        file.push_payload(1_000_003);
        let files = [file];
        let outputs =
            Outputs::create(&AnchoredPath::new(folder.path()), &files, &Extents::of_files(&files), true).unwrap();
        let mut buffer = Buffer::new();
        // Writes every other write block first, as two workers would do.
        for start in (0..7).step_by(2).chain((1..7).step_by(2)).map(|number| number * 150_001) {
            let len = usize::try_from((1_000_003 - start).min(150_001)).unwrap();
            outputs.write(0, start, buffer.prepare(start, len)).unwrap();
        }
        assert!(outputs.joiner.take_file(0).len() <= 1);
    }

    /// A part of a file block is accepted, but writing it fails because the file handle is broken. The next fsync must
    /// then fail, too.
    #[test]
    fn sync_fails_after_accepted_bytes_could_not_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = OutputFile::new("f");
        file.push_payload(10_000);
        let files = [file];
        for is_completed in [false, true] {
            let mut outputs =
                Outputs::create(&AnchoredPath::new(folder.path()), &files, &Extents::of_files(&files), true).unwrap();
            outputs.mode = WriteMode::Direct;
            let readable = || File::open(folder.path().join("f")).unwrap();
            let (path, close_error) = (folder.path().join("f"), Arc::default());
            let broken = Handle { file: Some(readable()), direct: Some(readable()), path, close_error };
            outputs.open.lock().unwrap().push((0, Arc::new(broken)));
            outputs.write(0, 0, &[1; 50]).unwrap();
            let failed =
                if is_completed { outputs.write(0, 50, &[2; 4046]) } else { outputs.sync(0, &Stop::default()) };
            assert!(failed.is_err());
            outputs.open.lock().unwrap().clear();
            let error = outputs.sync(0, &Stop::default()).unwrap_err().to_string();
            assert!(error.contains("an earlier write to DST failed"), "{error}");
        }
    }

    #[test]
    fn first_of_several_errors_is_returned() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b", "c"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        let files: Vec<OutputFile> = ["a", "b", "c"].map(OutputFile::new).into();
        let error =
            Outputs::create(&AnchoredPath::new(folder.path()), &files, &Extents::new(), false).unwrap_err().to_string();
        assert!(error.contains("/b"), "{error}");
    }
}
