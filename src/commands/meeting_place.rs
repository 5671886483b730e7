//! `.DST.dtshard-meeting`: a folder beside DST, where the processes of a run find each other, and make their twin.
//!
//! Each run has a folder of its own in it, so that two with one DST do not take each other's files; all but one are
//! refused once they look at DST. Invariant: what is there is nobody's result. Who has published DST has proved that
//! nobody else works on it, and takes away what runs have left that were killed.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::comm::{Communicator, Part};
use crate::error::{Error, Result};

pub struct MeetingPlace {
    folder: PathBuf,
    /// That of this run, once it is agreed on.
    of_run: Option<PathBuf>,
    is_first: bool,
    end: End,
}

/// How this process goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Maybe the others cannot clear up any more.
    Failed,
    /// The first clears up, who leaves last.
    Left,
    Published,
}

impl MeetingPlace {
    /// # Errors
    /// `Usage` where DST has no name, `Io`.
    pub fn beside(destination: &Path, part: Part) -> Result<Self> {
        let name = destination.file_name().ok_or_else(|| {
            Error::usage(
                format!("{} cannot be a destination", destination.display()),
                "give the destination a name of its own",
            )
        })?;
        let hidden = [".".as_ref(), name, ".dtshard-meeting".as_ref()].into_iter().collect::<OsString>();
        let folder = destination.with_file_name(hidden);
        let is_first = part.index == 0;
        // Others wait for what the first puts there.
        if is_first {
            fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
        }
        Ok(Self { folder, of_run: None, is_first, end: End::Failed })
    }

    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Agree on a folder that no other run has. Collective.
    ///
    /// # Errors
    /// As [`Communicator::gather`].
    pub fn of_run(&mut self, communicator: &impl Communicator) -> Result<PathBuf> {
        let number = communicator.settle(
            getrandom::u64().map_err(|error| Error::io("draw a random number in", &self.folder)(error.into())),
        )?;
        let said = communicator.gather(&number.to_le_bytes())?;
        let name = blake3::hash(&said[0]).to_hex();
        Ok(self.of_run.insert(self.folder.join(&name[..16])).clone())
    }

    /// All are done.
    pub fn leave(&mut self, has_published: bool) {
        self.end = if has_published { End::Published } else { End::Left };
    }
}

impl Drop for MeetingPlace {
    fn drop(&mut self) {
        if self.is_first && self.end == End::Published {
            let _ = fs::remove_dir_all(&self.folder);
        } else if self.is_first || self.end == End::Failed {
            self.of_run.iter().for_each(|folder| drop(fs::remove_dir_all(folder)));
            // Unless another run is there.
            let _ = fs::remove_dir(&self.folder);
        }
    }
}
