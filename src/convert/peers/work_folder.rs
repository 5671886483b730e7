//! The work folder `.DST.dtshard-work` beside DST: the processes of a run connect through it, and files of SRC that
//! only some processes see are copied into it.
//!
//! ```text
//! .DST.dtshard-work/
//!     run-1f0c96a2b7d4e35f/    the message files of one launch, and its metadata mirror of SRC
//!     copy/                    files of SRC, kept for --resume
//! ```
//!
//! Invariants: the work folder never contains results. The process of a run that disconnects last removes the files of
//! this run. The next run that publishes DST removes the files of killed runs. Only process 0 creates missing parent
//! folders.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::launch::Part;
#[cfg(any(test, feature = "mpi"))]
use crate::publish::presence::Presence;
use crate::publish::presence::is_in_use;
use crate::storage::{AnchoredPath, lookup};

/// Longest time that process 0 waits for other processes to disconnect before it removes the files of the run.
const LEAVE_WITHIN: Duration = Duration::from_secs(5);

/// Longest time for which this run tries again to create its folder, if the cleanup of another run removes that folder.
#[cfg(any(test, feature = "mpi"))]
const MAKE_WITHIN: Duration = Duration::from_secs(5);

const COPY: &str = "copy";

/// Work folder beside DST that the processes of one launch share.
pub struct WorkFolder {
    folder: AnchoredPath,
    run: AnchoredPath,
    /// Parent folders of DST that process 0 creates because they are missing, the innermost first. The run removes them
    /// again if they are empty at its end. The list is empty on all other processes.
    made: Vec<PathBuf>,
    #[cfg(any(test, feature = "mpi"))]
    held: Option<Presence>,
    is_first: bool,
    keeps_copy: bool,
    is_done: bool,
    is_published: bool,
}

impl WorkFolder {
    /// Returns the work folder beside a destination for the launch named `run`, without creating it.
    ///
    /// # Errors
    /// `Usage` if DST has no name; `Io`, also if a link or another user's folder has the name of the work folder.
    pub fn beside(destination: &Path, part: Part, run: Option<&str>) -> Result<Self> {
        let name = destination.file_name().ok_or_else(|| {
            Error::usage(
                format!("{} cannot be a destination", destination.display()),
                "give the destination a name of its own",
            )
        })?;
        let folder = beside(destination, name);
        folder.own_metadata().map_err(Error::io("meet in", &folder))?;
        let is_first = part.index == 0;
        let above = folder.path().ancestors().skip(1);
        let is_missing =
            |above: &&Path| !above.as_os_str().is_empty() && matches!(lookup::metadata_of(above), Ok(None));
        let made = if is_first { above.take_while(is_missing).map(Path::to_path_buf).collect() } else { Vec::new() };
        let text = format!("{} {}", part.of, run.unwrap_or_default());
        let run = folder.join(format!("run-{}", &blake3::hash(text.as_bytes()).to_hex()[..16]));
        Ok(Self {
            folder,
            run,
            made,
            #[cfg(any(test, feature = "mpi"))]
            held: None,
            is_first,
            keeps_copy: true,
            is_done: false,
            is_published: false,
        })
    }

    /// Creates a folder with a new name for processes that are connected by MPI. Process 0 holds a lease in it, so that
    /// no other run removes it. The folder contains only the metadata mirror, because these processes report failures
    /// by MPI. Collective.
    ///
    /// # Errors
    /// `Io`; `Comm` with the process that fails.
    #[cfg(any(test, feature = "mpi"))]
    pub fn make_for(&mut self, communicator: &impl crate::comm::Communicator) -> Result<()> {
        let made = if self.is_first { self.make_new().map(Some) } else { Ok(None) };
        let (name, held) = communicator.all_ok(made)?.unzip();
        let names = communicator.gather(name.unwrap_or_default().as_bytes())?;
        self.run = self.folder.reopened().join(String::from_utf8_lossy(&names[0]).as_ref());
        self.held = held;
        Ok(())
    }

    /// Creates a folder with an unused name, and acquires a lease in it.
    #[cfg(any(test, feature = "mpi"))]
    fn make_new(&self) -> Result<(String, Presence)> {
        let begun = Instant::now();
        loop {
            let name =
                format!("run-{:016x}", getrandom::u64().map_err(|error| Error::io("name", &self.run)(error.into()))?);
            // Another run may have removed the work folder since this process opened it, so this process opens it
            // again.
            let run = self.folder.reopened().join(&name);
            let taken = match run.create_with_parents() {
                Ok(()) => Presence::take(&run, Part::alone(), 0)?,
                Err(error) if error.kind() == ErrorKind::NotFound && begun.elapsed() < MAKE_WITHIN => None,
                Err(error) => return Err(Error::io("create", &run)(error)),
            };
            match taken {
                Some(held) => return Ok((name, held)),
                // Another run that has published DST removes every folder without a lease, so this folder may be
                // missing.
                None if begun.elapsed() < MAKE_WITHIN => sleep(Duration::from_millis(10)),
                None => return Err(Error::io("create a lease in", &run)(ErrorKind::NotFound.into())),
            }
        }
    }

    /// Returns the folder for the message files and the metadata mirror of this launch.
    pub fn of_run(&self) -> &AnchoredPath {
        &self.run
    }

    /// Returns the folder into which files of SRC are copied.
    pub fn copy(&self) -> AnchoredPath {
        self.folder.join(COPY)
    }

    /// Records that this run copies files of SRC into the work folder. If the run fails before this call, an existing
    /// copy stays. If it fails later, the copy stays only if `keeps_copy` is true.
    pub fn uses_copy(&mut self, keeps_copy: bool) {
        self.keeps_copy = keeps_copy;
    }

    /// Records that this process has finished its work. Other processes may still be connected. `is_published` is true
    /// if DST was published.
    pub fn leave(&mut self, is_published: bool) {
        (self.is_done, self.is_published) = (true, is_published);
    }

    /// Removes the message files and the metadata mirror of this launch, unless another process still uses them. Also
    /// removes the copied files of SRC, unless they are in use or a run with `--resume` may need them. After DST was
    /// published, also removes the files of killed runs in the work folder.
    fn clear(&self) {
        // The result is used for both decisions below: a later check can find a lease whose file another process is
        // deleting, and such a lease counts as in use.
        let mut is_used = is_in_use(&self.run);
        let begun = Instant::now();
        while is_used && self.is_first && self.is_done && begun.elapsed() < LEAVE_WITHIN {
            sleep(Duration::from_millis(10));
            is_used = is_in_use(&self.run);
        }
        // Process 0 has waited for the other processes. After publication, leases of processes that are still connected
        // are ignored.
        if is_used && !(self.is_first && self.is_published) {
            return;
        }
        let _ = self.run.remove_all();
        let copy = self.copy();
        if (self.is_done || !self.keeps_copy) && !is_in_use(&copy) {
            let _ = copy.remove_all();
        }
        if self.is_published {
            sweep(&self.folder);
        }
        // Removing the folder fails if another run uses it. If another process of this run was faster, it is already
        // removed.
        match self.folder.remove_folder() {
            Err(error) if error.kind() != ErrorKind::NotFound => {}
            _ => drop(self.made.iter().try_for_each(fs::remove_dir)),
        }
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        #[cfg(any(test, feature = "mpi"))]
        drop(self.held.take());
        self.clear();
    }
}

/// Returns the work folder beside a destination.
fn beside(destination: &Path, name: &OsStr) -> AnchoredPath {
    let hidden: OsString = [".".as_ref(), name, ".dtshard-work".as_ref()].into_iter().collect();
    AnchoredPath::new(destination.parent().unwrap_or(Path::new(""))).join(hidden)
}

/// Removes the files that killed runs left in the work folder beside DST. Called by a process that published DST
/// without a connection to other processes.
pub fn clear_beside(destination: &Path) {
    if let Some(name) = destination.file_name() {
        let folder = beside(destination, name);
        if folder.is_own() {
            sweep(&folder);
            // This fails if another run uses the folder.
            let _ = folder.remove_folder();
        }
    }
}

/// Removes all files and folders in a work folder, except those that a process uses.
fn sweep(folder: &AnchoredPath) {
    for name in folder.names().unwrap_or_default() {
        let path = folder.join(&name);
        if path.is_own() && !is_in_use(&path) {
            let _ = path.remove_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{Communicator, Local};

    fn place(root: &Path, index: u32, run: &str) -> WorkFolder {
        let mut place = WorkFolder::beside(&root.join("a/out"), Part { index, of: 2 }, Some(run)).unwrap();
        place.uses_copy(false);
        place
    }

    fn present(place: &WorkFolder, index: u32) -> Presence {
        fs::create_dir_all(place.of_run().path()).unwrap();
        Presence::take(place.of_run(), Part { index, of: 2 }, 0).unwrap().unwrap()
    }

    #[test]
    fn last_process_removes_the_files_of_the_run() {
        let root = tempfile::tempdir().unwrap();
        let (first, second) = (place(root.path(), 0, "1"), place(root.path(), 1, "1"));
        let (one, other) = (present(&first, 0), present(&second, 1));
        fs::create_dir_all(first.copy().path()).unwrap();
        drop(other);
        drop(second);
        assert!(first.of_run().exists() && first.copy().exists());
        drop(one);
        drop(first);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_copy_is_kept_for_resume_until_all_is_done() {
        let root = tempfile::tempdir().unwrap();
        let beside = || WorkFolder::beside(&root.path().join("out"), Part { index: 0, of: 2 }, None).unwrap();
        let work = beside();
        fs::create_dir_all(work.copy().path()).unwrap();
        drop(work);
        let mut work = beside();
        assert!(work.copy().exists());
        work.leave(true);
        drop(work);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    /// Starts two runs at the same time, as MPI starts them: without a name of the launch. Checks that each run has one
    /// folder for all its processes, and that the runs have different folders.
    #[test]
    fn runs_that_meet_by_other_means_have_folders_of_their_own() {
        let root = tempfile::tempdir().unwrap();
        let start = || {
            let ranks = Local::fleet(2).into_iter().map(|rank| {
                let destination = root.path().join("a/out");
                std::thread::spawn(move || {
                    let part = Part { index: rank.rank(), of: 2 };
                    let mut work = WorkFolder::beside(&destination, part, None).unwrap();
                    work.make_for(&rank).unwrap();
                    work
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        };
        let (one, other) = (start(), start());
        let paths =
            |works: &[WorkFolder]| works.iter().map(|work| work.of_run().path().to_path_buf()).collect::<Vec<_>>();
        let (first, second) = (paths(&one), paths(&other));
        assert!(first[0] == first[1] && second[0] == second[1] && first[0] != second[0], "{first:?} {second:?}");
        // A third run publishes DST, and does not remove the folders of these two runs.
        clear_beside(&root.path().join("a/out"));
        drop(one);
        assert!(!first[0].exists() && second[0].exists());
        drop(other);
        assert_eq!(fs::read_dir(root.path().join("a")).unwrap().count(), 0);
    }

    #[test]
    fn files_of_killed_runs_are_removed_and_those_of_running_ones_are_kept() {
        let root = tempfile::tempdir().unwrap();
        let (killed, living) = (place(root.path(), 0, "1"), place(root.path(), 0, "2"));
        drop(present(&killed, 0));
        let living_lease = present(&living, 0);
        clear_beside(&root.path().join("a/out"));
        assert!(!killed.of_run().exists() && living.of_run().exists());
        drop(living_lease);
        clear_beside(&root.path().join("a/out"));
        assert_eq!(fs::read_dir(root.path().join("a")).unwrap().count(), 0);
    }
}
