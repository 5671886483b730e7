//! Source copy: copies files of SRC that only some processes see to a folder that all processes see.
//!
//! Each file is copied once, by the lowest process that sees it. When the copy of a file is complete and synced, a
//! record file is written. A resumed run skips a file if the length and the modification time in its record file are
//! still correct.
//!
//! ```text
//! copy/
//!     part-0-of-1.0.lease      a run uses this folder
//!     files/                   the copies, by their paths relative to SRC
//!     done/1f0c96a2b7d4e35f    the record file of one copied file
//! ```
//!
//! All sizes and offsets are in bytes. Invariant: a copied file is read only after its record file was written and all
//! processes have passed a barrier.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::catalog::{Catalog, Reservation};
use crate::comm::Communicator;
use crate::error::{Error, Result, StorageError};
use crate::exec::{Reporter, Stop};
use crate::fault;
use crate::launch::Part;
use crate::publish::LeaseState;
use crate::publish::presence::{Observer, Presence};
use crate::storage::filesystem::close;
use crate::storage::lookup::refused;
use crate::storage::{AnchoredPath, FileId, Files};

/// The number of bytes that are copied between two checks for a stop request.
const BLOCK_BYTES: u64 = 64 << 20;

/// The maximum time for which a process waits until it sees all copied files on the shared file system.
const SHOWN_WITHIN: Duration = Duration::from_mins(1);

/// The maximum time for which this run waits for another run that is about to release the folder.
const FREE_WITHIN: Duration = Duration::from_secs(3);

/// A file of SRC that is copied.
#[derive(Clone, Debug)]
struct Copied {
    id: FileId,
    from: PathBuf,
    below: PathBuf,
    record: CopyRecord,
    writer: u32,
}

/// The content of the record file, which identifies the source file of a complete copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CopyRecord {
    path: String,
    len: u64,
    modified: (i64, i64),
}

/// The files of SRC that are copied, and the folder into which they are copied.
#[derive(Debug)]
pub struct SourceCopy {
    folder: AnchoredPath,
    files: Vec<Copied>,
}

/// The amount of data of SRC that processes copy because not all of them see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amount {
    pub files: usize,
    pub bytes: u64,
    /// The number of bytes that still have to be copied, because no earlier run has copied them.
    pub left: u64,
}

impl SourceCopy {
    /// Selects the files to copy: files from which `reservation` needs bytes, and that at least one process does not
    /// see. `source` is the folder of SRC, `folder` is the folder for the copies, and `processes` is the number of
    /// processes.
    #[must_use]
    pub fn plan(
        folder: AnchoredPath,
        source: &Path,
        files: &Files,
        (catalog, reservation): (&Catalog, &Reservation),
        processes: u32,
    ) -> Self {
        let mut needed = BTreeSet::new();
        for tensor in &reservation.tensors {
            let chunks = &catalog.tensor(tensor.source).chunks;
            needed.extend((0..chunks.len()).filter_map(|chunk| chunks.location(chunk).file()));
        }
        let copied = needed.into_iter().filter_map(|id| {
            let seen_by = files.seen_by(id).filter(|seen_by| seen_by.len() < processes as usize)?;
            let from = files.path(id).to_path_buf();
            let below = from.strip_prefix(source).ok()?.to_path_buf();
            let path = below.to_string_lossy().into_owned();
            let record = CopyRecord { path, len: files.len_bytes(id), modified: files.modified(id) };
            Some(Copied { id, from, below, record, writer: *seen_by.first()? })
        });
        let files = copied.collect();
        Self { folder, files }
    }

    /// Acquires the folder for this run; only process 0 calls this. If `goes_on` is true, files that an earlier run has
    /// copied are kept; otherwise the content of the folder is deleted. Waits if it is unknown whether the run that
    /// holds the lease is alive.
    ///
    /// # Errors
    /// `Usage` if another run that is alive uses the folder; `Stopped`; `Io`.
    pub fn begin(&self, goes_on: bool, stop: &Stop) -> Result<Presence> {
        let part = Part::alone();
        let mut observer = Observer::new(&self.folder, part.of);
        let begun = Instant::now();
        let lease = loop {
            stop.check()?;
            // Another run that publishes DST deletes the folder if it finds no lease in it. Then this run creates the
            // folder again.
            let created = self.folder.folder().create_folders(Path::new(self.folder.file_name()));
            created.map_err(Error::io("create", &self.folder))?;
            let next = match observer.generations()?.get(&part.index) {
                None => Some(0),
                Some(generation) => match observer.look(part.index, *generation)? {
                    Some(found) if found.state == LeaseState::Alive && begun.elapsed() > FREE_WITHIN => {
                        let who = found.process.map_or_else(String::new, |process| format!(" ({process})"));
                        return Err(Error::usage(
                            format!("another run{who} copies files to {}", self.folder.display()),
                            "wait until that run ends, or stop it",
                        ));
                    }
                    Some(found) if found.state != LeaseState::Dead => None,
                    _ => Some(generation + 1),
                },
            };
            if let Some(lease) = next.map(|next| Presence::take(&self.folder, part, next)).transpose()?.flatten() {
                break lease;
            }
            sleep(Duration::from_millis(50));
        };
        for folder in [self.data(), self.done()] {
            if !goes_on {
                match folder.remove_all() {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(Error::io("clear", &folder)(error));
                    }
                    _ => {}
                }
            }
            let name = PathBuf::from(folder.file_name());
            self.folder.create_folders(&name).map_err(Error::io("create", &folder))?;
        }
        for file in &self.files {
            let above = file.below.parent().unwrap_or(Path::new(""));
            self.data().create_folders(above).map_err(Error::io("create", &self.data().join(above)))?;
        }
        Ok(lease)
    }

    /// Returns the number of files to copy, their total length, and the part of this length that is not yet copied.
    pub fn amount(&self) -> Amount {
        let sum = |files: &mut dyn Iterator<Item = &Copied>| files.map(|file| file.record.len).sum();
        let left = sum(&mut self.files.iter().filter(|file| !self.is_done(file)));
        Amount { files: self.files.len(), bytes: sum(&mut self.files.iter()), left }
    }

    /// Returns the number of bytes that process `rank` still has to copy.
    pub fn share(&self, rank: u32) -> u64 {
        let own = self.files.iter().filter(|file| file.writer == rank && !self.is_done(file));
        own.map(|file| file.record.len).sum()
    }

    /// Copies the files that are assigned to this process, and waits until the other processes have copied their files.
    /// Collective.
    ///
    /// # Errors
    /// `Io` naming a file; `Stopped`; `Comm` naming the process that failed.
    pub fn run(&self, communicator: &impl Communicator, reporter: &dyn Reporter, stop: &Stop) -> Result<()> {
        let own: Vec<&Copied> =
            self.files.iter().filter(|file| file.writer == communicator.rank() && !self.is_done(file)).collect();
        let check = || stop.check().and_then(|()| communicator.check());
        let copied: Result<()> = own.par_iter().try_for_each(|file| self.copy(file, reporter, &check));
        communicator.all_ok(copied)?;
        communicator.all_ok(self.wait_shown(communicator, stop))
    }

    /// Changes `files`, so that this process reads the copies of files that it does not see.
    ///
    /// # Errors
    /// `Io` if a copy is missing.
    pub fn turn(&self, files: &mut Files) -> Result<()> {
        let data = self.data();
        self.files.iter().try_for_each(|file| files.read_copy(file.id, data.join(&file.below).path()))
    }

    fn data(&self) -> AnchoredPath {
        self.folder.join("files")
    }

    fn done(&self) -> AnchoredPath {
        self.folder.join("done")
    }

    fn record_of(&self, file: &Copied) -> AnchoredPath {
        self.done().join(&blake3::hash(file.record.path.as_bytes()).to_hex()[..32])
    }

    fn is_done(&self, file: &Copied) -> bool {
        let len = self.data().join(&file.below).metadata().map(|metadata| metadata.len());
        let mut text = Vec::new();
        let read = self.record_of(file).open().and_then(|mut found| found.read_to_end(&mut text));
        read.is_ok()
            && serde_json::from_slice::<CopyRecord>(&text).is_ok_and(|record| record == file.record)
            && len.is_ok_and(|len| len == file.record.len)
    }

    fn copy(&self, file: &Copied, reporter: &dyn Reporter, check: &dyn Fn() -> Result<()>) -> Result<()> {
        let Copied { from, below, record, .. } = file;
        let to = self.data().join(below);
        let source = File::open(from).map_err(refused("open", from))?;
        // A user who cannot read SRC must not be able to read the copy either.
        let mut target = to.replace_with_new(0o600).map_err(Error::io("create", &to))?;
        let mut len = 0;
        loop {
            check()?;
            let copied = io::copy(&mut (&source).take(BLOCK_BYTES), &mut target).map_err(Error::io("copy", from))?;
            reporter.advance(copied);
            len += copied;
            if copied < BLOCK_BYTES {
                break;
            }
            fault::point("source-copying");
        }
        if len != record.len {
            let source = io::Error::other(format!(
                "the file changed during the copy: expected {} bytes, copied {len}",
                record.len
            ));
            return Err(StorageError::Io { action: "copy", path: from.clone(), source }.into());
        }
        let (seconds, nanoseconds) = record.modified;
        let since = u64::try_from(seconds).ok().zip(u32::try_from(nanoseconds).ok());
        let modified =
            since.and_then(|(seconds, rest)| SystemTime::UNIX_EPOCH.checked_add(Duration::new(seconds, rest)));
        modified.map_or(Ok(()), |modified| target.set_modified(modified)).map_err(Error::io("write", &to))?;
        target.sync_all().map_err(Error::io("sync", &to))?;
        close(target).map_err(Error::io("close", &to))?;
        fault::point("source-copied");
        let at = self.record_of(file);
        let text = serde_json::to_vec(record).expect("text and numbers serialise");
        let written = at.replace_with_new(0o600).and_then(|mut done| io::Write::write_all(&mut done, &text));
        written.map_err(Error::io("write", &at))?;
        fault::point("source-recorded");
        Ok(())
    }

    /// Waits until this process sees all copied files with their full length.
    fn wait_shown(&self, communicator: &impl Communicator, stop: &Stop) -> Result<()> {
        let begun = Instant::now();
        let data = self.data();
        loop {
            let is_there = |file: &&Copied| {
                let metadata = data.join(&file.below).metadata();
                metadata.is_ok_and(|metadata| metadata.len() == file.record.len)
            };
            let Some(missing) = self.files.iter().find(|file| !is_there(file)) else { return Ok(()) };
            if begun.elapsed() > SHOWN_WITHIN {
                return Err(Error::missing(
                    data.path(),
                    "files that other processes have copied",
                    "a folder that all processes see",
                    missing.below.display().to_string(),
                )
                .missing_hint("choose a destination on a file system that all nodes share"));
            }
            stop.check()?;
            communicator.check()?;
            // Listing the folder makes a network file system refresh its cache.
            let _ = data.join(missing.below.parent().unwrap_or(Path::new(""))).names();
            sleep(Duration::from_millis(50));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another run deletes the folder with its lease and ends, while `begin` waits for this lease. `begin` then creates
    /// the folder again and takes generation 0 of the lease.
    #[test]
    fn deleted_folder_is_created_again() {
        let root = tempfile::tempdir().unwrap();
        let folder = AnchoredPath::new(root.path()).join("copy");
        folder.create_folder().unwrap();
        let copy = SourceCopy { folder: folder.clone(), files: Vec::new() };
        let other = Presence::take(&folder, Part::alone(), 0).unwrap().unwrap();
        let lease = std::thread::scope(|scope| {
            let begun = scope.spawn(|| copy.begin(false, &Stop::default()));
            sleep(Duration::from_millis(100));
            folder.remove_all().unwrap();
            drop(other);
            begun.join().unwrap()
        });
        assert_eq!(lease.unwrap().generation(), 0);
        assert!(copy.data().exists() && copy.done().exists());
    }
}
