//! `.DST.dtshard-meeting`: a folder beside DST, where the processes of a run find each other, and make their twin.
//!
//! Each run has a folder of its own in it, of a random name, and beside that a note of the process that made it. So two
//! with one DST do not take each other's files; all but one are refused once they look at DST. Invariants: what is there
//! is nobody's result; who goes takes away what is his. Who has published DST also takes away what is left of others:
//! folders whose process has ended, as far as can be told from here, or began a day ago. Whoever lives as long works on
//! DST, and nobody else has published it.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::comm::{self, Communicator, Part, Patience, Process, Wait};
use crate::error::{Error, Peer, Result};

pub struct MeetingPlace {
    folder: PathBuf,
    destination: PathBuf,
    /// Whether DST was there when this process came.
    was_there: bool,
    /// What was not there of the folders above it, the innermost first.
    made: Vec<PathBuf>,
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
        let (destination, was_there) = (destination.to_path_buf(), destination.exists());
        let mut place =
            Self { folder, destination, was_there, made: Vec::new(), of_run: None, is_first, end: End::Failed };
        // Others wait for what the first puts there.
        if is_first {
            let above = place.folder.ancestors().skip(1);
            let missing = above.take_while(|above| !above.as_os_str().is_empty() && !above.exists());
            place.made = missing.map(Path::to_path_buf).collect();
            fs::create_dir_all(&place.folder).map_err(Error::io("create", &place.folder))?;
        }
        Ok(place)
    }

    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Agree on a folder that no other run has, which the first makes, and all see in time. Collective.
    ///
    /// # Errors
    /// `Io`, and as [`Communicator::gather`]; `Comm` naming one that does not see it.
    pub fn of_run(&mut self, communicator: &impl Communicator, patience: Patience<'_>) -> Result<PathBuf> {
        let number = communicator.settle(
            getrandom::u64().map_err(|error| Error::io("draw a random number in", &self.folder)(error.into())),
        )?;
        let said = communicator.gather(&number.to_le_bytes())?;
        let name = blake3::hash(&said[0]).to_hex();
        let folder = self.of_run.insert(self.folder.join(&name[..16])).clone();
        communicator.settle(if self.is_first { make(&folder) } else { Ok(()) })?;
        let is_seen = see(&folder, communicator, patience)?;
        let sight = communicator.gather(&[u8::from(is_seen)])?;
        match (0..).zip(&sight).find(|(_, is_seen)| **is_seen != [1]) {
            None => Ok(folder),
            Some((rank, _)) => Err(Error::Comm {
                rank: Peer::from(rank),
                op: "meet",
                detail: format!("it does not see {}, which process 0 has made", folder.display()),
                hint: Some(String::from("the folder of DST has to be on a file system that all processes share")),
            }),
        }
    }

    /// All are done.
    pub fn leave(&mut self, has_published: bool) {
        self.end = if has_published { End::Published } else { End::Left };
    }
}

/// The note is there for as long as the folder is.
fn make(folder: &Path) -> Result<()> {
    let note = note_of(folder);
    let process = serde_json::to_vec(&Process::this()).expect("strings and numbers are JSON");
    fs::write(&note, process).map_err(Error::io("write", &note))?;
    fs::create_dir(folder).map_err(Error::io("create", folder))
}

fn note_of(folder: &Path) -> PathBuf {
    folder.with_extension("json")
}

fn remove(folder: &Path) {
    let _ = fs::remove_dir_all(folder);
    let _ = fs::remove_file(note_of(folder));
}

/// Whether a folder shows in time.
fn see(folder: &Path, communicator: &impl Communicator, patience: Patience<'_>) -> Result<bool> {
    let wait = Wait::begin(patience);
    loop {
        // A network file system looks anew for what was not there once the folder above is listed.
        let mut entries = folder.parent().and_then(|above| fs::read_dir(above).ok()).into_iter().flatten().flatten();
        if entries.any(|entry| Some(&*entry.file_name()) == folder.file_name()) {
            return Ok(true);
        }
        if wait.is_over() {
            return Ok(false);
        }
        if wait.is_due() {
            wait.say(&format!("waiting to see {}, which process 0 has made", folder.display()), None);
        }
        communicator.check()?;
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Take away what runs have left in a meeting place that are not any more.
fn sweep(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && !is_in_use(&path) {
            remove(&path);
        }
    }
    comm::sweep(place);
}

fn is_in_use(folder: &Path) -> bool {
    const DAY: Duration = Duration::from_hours(24);
    let note = note_of(folder);
    let Ok(text) = fs::read(&note) else { return false };
    let has_ended = serde_json::from_slice::<Process>(&text).is_ok_and(|process| process.has_ended());
    let modified = fs::metadata(&note).and_then(|metadata| metadata.modified());
    let is_old = modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > DAY));
    !has_ended && !is_old
}

impl Drop for MeetingPlace {
    fn drop(&mut self) {
        if !self.is_first && self.end != End::Failed {
            return;
        }
        self.of_run.iter().for_each(|folder| remove(folder));
        // By this run or, meanwhile, by another one: who has not come need not hear any more that he is late.
        let is_published = !self.was_there && self.destination.exists();
        if self.end == End::Published {
            sweep(&self.folder);
        } else if is_published {
            comm::sweep(&self.folder);
        }
        // Unless another run is there, or has made something.
        let mut folders = [&self.folder].into_iter().chain(&self.made);
        let _ = folders.try_for_each(fs::remove_dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_of_others_goes_unless_they_live() {
        let place = tempfile::tempdir().unwrap();
        let note = |name: &str, process: &Process| {
            fs::create_dir_all(place.path().join(name).join("twin")).unwrap();
            let path = place.path().join(format!("{name}.json"));
            fs::write(&path, serde_json::to_vec(process).unwrap()).unwrap();
            fs::File::options().append(true).open(path).unwrap()
        };
        let here = Process::this();
        note("alive", &here);
        note("killed", &Process { start: here.start + 1, ..here.clone() });
        let elsewhere = Process { boot: "another".into(), ..here };
        note("elsewhere", &elsewhere);
        let long_ago = std::time::SystemTime::now() - Duration::from_hours(25);
        note("forgotten", &elsewhere).set_modified(long_ago).unwrap();
        fs::create_dir(place.path().join("nobody")).unwrap();
        sweep(place.path());
        let left = fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut left: Vec<String> = left.collect();
        left.sort();
        assert_eq!(left, ["alive", "alive.json", "elsewhere", "elsewhere.json"]);
    }

    #[test]
    fn folders_that_were_made_go_unless_something_is_in_them() {
        let root = tempfile::tempdir().unwrap();
        let first = Part { index: 0, of: 2 };
        let destination = root.path().join("a/b/out");
        drop(MeetingPlace::beside(&destination, first).unwrap());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
        let place = MeetingPlace::beside(&destination, first).unwrap();
        fs::write(root.path().join("a/notes"), "").unwrap();
        drop(place);
        assert!(root.path().join("a/notes").exists() && !root.path().join("a/b").exists());
        // One of another run, or of DST's own.
        let [one, other] = [(); 2].map(|()| MeetingPlace::beside(&destination, first).unwrap());
        fs::write(other.folder().join("rendezvous-1.json"), "").unwrap();
        drop(one);
        assert!(other.folder().join("rendezvous-1.json").exists());
    }
}
