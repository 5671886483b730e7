//! The files being written: made at their full size first, so that a full disk is known before any byte moves.
//!
//! What is to be on disk in the end is written past the page cache where the file system is good at that, and put on its
//! way to the disk at once elsewhere. What need not be there goes through the page cache in small calls.
//!
//! Counts bytes. Invariant: only whole blocks go past the page cache, those that strips share when [all of them](super::edges)
//! is there, so no block is written both ways at a time. What is held of the others is written before the file is synced.
//! Once something that was taken did not get to the disk, no file is ever said to be synced.

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

/// What one call writes through the page cache. The kernel allocates memory for a call at once, and has short stretches
/// at hand where it has to look for long ones.
const CALL_BYTES: usize = 256 << 10;

/// Whole blocks that are worth a direct write.
const LEAST_DIRECT_BYTES: usize = 64 << 10;

/// Output files, opened on demand.
#[derive(Debug)]
pub struct Outputs {
    folder: AnchoredPath,
    paths: Vec<AnchoredPath>,
    way: WriteMode,
    open: Mutex<Vec<(u32, Arc<Handle>)>>,
    /// Blocks of files that are written past the page cache, of which some is to come.
    edges: BlockJoiner,
    /// The system tells of what it could not write once, and what was held and could not be written is gone.
    is_broken: AtomicBool,
    /// The first file that could not be closed, and is not reported yet.
    close_error: Arc<Mutex<Option<Error>>>,
}

/// How bytes get to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteMode {
    /// Through the page cache, whenever the kernel sees fit.
    Cache,
    /// Through the page cache, from which they are sent on at once.
    WriteBehind,
    /// Past the page cache.
    Direct,
}

/// An open output file. Closed where it is dropped, which may be by any worker, so an error is kept for [`Outputs::close`].
#[derive(Debug)]
struct Handle {
    /// `None` once it is dropped.
    file: Option<File>,
    /// The same file, to be written past the page cache.
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
    /// Make every file under `folder` that `todo` has something of, with its full size allocated; one that is there
    /// already, from another run, stays as it is. `sync` says that all of it is to be on disk before it is published, see
    /// [`Outputs::sync`].
    ///
    /// # Errors
    /// `Io` naming the file; `StorageFull` where the file system has no room for it.
    pub fn make(folder: &AnchoredPath, files: &[OutputFile], todo: &Extents, sync: bool) -> Result<Self> {
        let outputs = Self::of(folder, files, sync)?;
        let is_touched = |(index, file): &(u32, &OutputFile)| file.len == 0 || todo.has_file(*index);
        let touched: Vec<(u32, &OutputFile)> = (0..).zip(files).filter(is_touched).collect();
        // Each file would open the same folders again.
        let held = folder.hold().map_err(Error::io("open", folder))?;
        for (_, file) in &touched {
            let above = file.path.parent().unwrap_or(Path::new(""));
            held.create_folders(above).map_err(Error::io("create", &held.join(above)))?;
        }
        // Some file systems take as long to allocate a file as to write it.
        let make = |(_, file): &(u32, &OutputFile)| -> Result<()> {
            let path = &held.join(&file.path);
            let made = path.open_to_write(OFlags::CREATE).map_err(Error::io("create", path))?;
            let found = made.metadata().map_err(Error::io("look at", path))?.len();
            if found > file.len {
                made.set_len(file.len).map_err(Error::io("cut", path))?;
            } else if found < file.len {
                allocate(&made, file.len).map_err(Error::io("allocate space for", path))?;
            }
            close(made).map_err(Error::io("close", path))
        };
        let made: Vec<Result<()>> = touched.par_iter().map(make).collect();
        made.into_iter().collect::<Result<()>>()?;
        Ok(outputs)
    }

    /// The files as they are.
    ///
    /// # Errors
    /// `Io` where the file system does not say what it is.
    pub fn of(folder: &AnchoredPath, files: &[OutputFile], sync: bool) -> Result<Self> {
        let way = match sync {
            false => WriteMode::Cache,
            true if suits_direct_writes_in(folder)? => WriteMode::Direct,
            true => WriteMode::WriteBehind,
        };
        let paths = files.iter().map(|file| folder.join(&file.path)).collect();
        let (open, edges) = (Mutex::default(), BlockJoiner::default());
        let (is_broken, close_error) = (false.into(), Arc::default());
        Ok(Self { folder: folder.clone(), paths, way, open, edges, is_broken, close_error })
    }

    fn open(&self, file: u32) -> Result<Arc<Handle>> {
        let mut open = self.open.lock().expect("no panic while the lock is held");
        if let Some((_, handle)) = open.iter().rev().find(|(index, _)| *index == file) {
            return Ok(Arc::clone(handle));
        }
        let path = &self.paths[file as usize];
        let handle = path.open_to_write(OFlags::empty()).map_err(Error::io("open", path))?;
        let direct = (self.way == WriteMode::Direct).then(|| path.open_to_write(OFlags::DIRECT).ok()).flatten();
        let (path, close_error) = (path.path().to_path_buf(), Arc::clone(&self.close_error));
        let handle = Arc::new(Handle { file: Some(handle), direct, path, close_error });
        if open.len() >= open_file_budget() / 4 {
            open.remove(0);
        }
        open.push((file, Arc::clone(&handle)));
        Ok(handle)
    }

    /// Write at `offset`. Only what lies in memory as in the file (see [`direct::Buffer`]) can go past the page cache.
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
            if self.way != WriteMode::Cache {
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
        self.noting(written.map_err(Error::io("write", &self.paths[file as usize])))
    }

    /// Remember a failure to write what others, who have left, believe to be written.
    fn noting(&self, done: Result<()>) -> Result<()> {
        done.inspect_err(|error| {
            if matches!(error, Error::Storage(StorageError::Io { .. })) {
                self.is_broken.store(true, Ordering::Relaxed);
            }
        })
    }

    /// Hold a part of a block that others have the rest of; all of it, where they came before.
    fn join(&self, file: u32, offset: u64, part: &[u8]) -> Result<Option<Box<DirectBlock>>> {
        if part.is_empty() {
            return Ok(None);
        }
        match self.edges.join(file, offset, part) {
            Joined::Waits => Ok(None),
            Joined::Whole(block) => Ok(Some(block)),
            Joined::Instead(rest) => self.write_rest(&rest).map(|()| None),
        }
    }

    fn write_rest(&self, rest: &BlockRemainder) -> Result<()> {
        let write = |handle: Arc<Handle>| {
            let mut parts = rest.parts();
            let written = parts.try_for_each(|(offset, bytes)| write_cached(handle.file(), offset, bytes));
            written.map_err(Error::io("write", &self.paths[rest.file() as usize]))
        };
        self.noting(self.open(rest.file()).and_then(write))
    }

    /// fsync one file. The data goes first, block by block with a look at `stop` in between, since one fsync of many
    /// GB could not be interrupted.
    ///
    /// # Errors
    /// `Io` naming the file, also where something failed before; `Stopped`.
    pub fn sync(&self, file: u32, stop: &Stop) -> Result<()> {
        self.check_whole("sync", self.paths[file as usize].path())?;
        self.noting(self.sync_all_of(file, stop))
    }

    /// Close the files that no worker is at, and see that none was closed with an error.
    ///
    /// # Errors
    /// `Io` naming a file, also where something failed before.
    pub fn close(&self) -> Result<()> {
        // Closed without the lock, as it may take long.
        let open = std::mem::take(&mut *self.open.lock().expect("no panic while the lock is held"));
        drop(open);
        let error = self.close_error.lock().expect("no panic while the lock is held").take();
        self.noting(error.map_or(Ok(()), Err))?;
        self.check_whole("close", self.folder.path())
    }

    fn check_whole(&self, action: &'static str, path: &Path) -> Result<()> {
        if !self.is_broken.load(Ordering::Relaxed) {
            return Ok(());
        }
        let earlier = std::io::Error::other("something could not be written before");
        Err(Error::io(action, path)(earlier))
    }

    fn sync_all_of(&self, file: u32, stop: &Stop) -> Result<()> {
        const BLOCK: u64 = 32 << 20;
        let path = &self.paths[file as usize];
        let held = self.edges.take(file);
        held.iter().try_for_each(|rest| self.write_rest(rest))?;
        let handle = self.open(file)?;
        let handle = handle.file();
        let len = handle.metadata().map_err(Error::io("look at", path))?.len();
        for block in 0..len.div_ceil(BLOCK) {
            stop.check()?;
            write_back(handle, block * BLOCK, BLOCK).map_err(Error::io("sync", path))?;
        }
        handle.sync_all().map_err(Error::io("sync", path))
    }

    /// fsync the folders that the files are in, so that their names last.
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
        // Calls end where pages do, as far as they can: a page is touched once then.
        let ragged = usize::try_from(at % CALL_BYTES as u64).expect("less than a call");
        let (call, after) = rest.split_at(rest.len().min(CALL_BYTES - ragged));
        file.write_all_at(call, at)?;
        at += call.len() as u64;
        rest = after;
    }
    Ok(())
}

/// Write blocks that follow each other, past the page cache where they are enough to be worth it.
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

/// False where not all was written: the file system opens files for direct writes and refuses them, or memory does not lie
/// as it wants it. The page cache finds out what else there may be.
fn write_direct(file: &File, offset: u64, blocks: [&[u8]; 3], len: usize) -> std::io::Result<bool> {
    match rustix::io::pwritev(file, &blocks.map(IoSlice::new), offset) {
        Ok(written) => Ok(written == len),
        Err(Errno::INVAL | Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Reserve `len` bytes for the file. Where the file system cannot reserve, setting the length has to do, and a full
/// disk shows when writing.
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
    fn strips_of_any_size_and_place_arrive_whichever_way_they_go() {
        const LEN: u64 = 1_000_003;
        let content: Vec<u8> = (0..LEN).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect();
        // The working folder is on a disk, which /tmp need not be.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let suited = if suits_direct_writes_in(&AnchoredPath::new(folder.path())).unwrap() {
            WriteMode::Direct
        } else {
            WriteMode::WriteBehind
        };
        for (sync, way) in
            [(true, suited), (true, WriteMode::WriteBehind), (true, WriteMode::Direct), (false, WriteMode::Cache)]
        {
            let mut file = OutputFile::new("f");
            file.push_payload(LEN);
            let files = [file];
            let mut outputs =
                Outputs::make(&AnchoredPath::new(folder.path()), &files, &Extents::of_files(&files), sync).unwrap();
            outputs.way = way;
            let mut buffer = Buffer::new();
            let mut at = 0;
            for len in [10, 5000, 70_000, 300_001, 4085, 8192, 131_072, 65_536].into_iter().cycle() {
                let len = usize::try_from((LEN - at).min(len)).unwrap();
                if len == 0 {
                    break;
                }
                let strip = buffer.room(at, len);
                strip.copy_from_slice(&content[usize::try_from(at).unwrap()..][..len]);
                outputs.write(0, at, strip).unwrap();
                at += len as u64;
            }
            // Patches land in what was written directly, too.
            outputs.write(0, 500_000, &[1, 2, 3, 4]).unwrap();
            outputs.sync(0, &Stop::default()).unwrap();
            let mut wanted = content.clone();
            wanted[500_000..500_004].copy_from_slice(&[1, 2, 3, 4]);
            assert!(std::fs::read(folder.path().join("f")).unwrap() == wanted, "{way:?}");
            std::fs::remove_file(folder.path().join("f")).unwrap();
        }
    }

    #[test]
    fn of_strips_that_share_blocks_only_the_end_of_the_file_is_left_over() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let mut file = OutputFile::new("f");
        file.push_payload(1_000_003);
        let files = [file];
        let outputs =
            Outputs::make(&AnchoredPath::new(folder.path()), &files, &Extents::of_files(&files), true).unwrap();
        let mut buffer = Buffer::new();
        // Every other strip first, as two workers would have it.
        for start in (0..7).step_by(2).chain((1..7).step_by(2)).map(|strip| strip * 150_001) {
            let len = usize::try_from((1_000_003 - start).min(150_001)).unwrap();
            outputs.write(0, start, buffer.room(start, len)).unwrap();
        }
        assert!(outputs.edges.take(0).len() <= 1);
    }

    /// Bytes whose writer has left, which come to a file that cannot be written: no later fsync says that all is there.
    #[test]
    fn what_was_held_and_is_lost_is_not_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = OutputFile::new("f");
        file.push_payload(10_000);
        let files = [file];
        for is_completed in [false, true] {
            let mut outputs =
                Outputs::make(&AnchoredPath::new(folder.path()), &files, &Extents::of_files(&files), true).unwrap();
            outputs.way = WriteMode::Direct;
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
            assert!(error.contains("could not be written before"), "{error}");
        }
    }

    #[test]
    fn the_first_of_several_faults_is_told() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b", "c"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        let files: Vec<OutputFile> = ["a", "b", "c"].map(OutputFile::new).into();
        let error =
            Outputs::make(&AnchoredPath::new(folder.path()), &files, &Extents::new(), false).unwrap_err().to_string();
        assert!(error.contains("/b"), "{error}");
    }
}
