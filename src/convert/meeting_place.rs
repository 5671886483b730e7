//! `.DST.dtshard-meeting`: a folder beside DST, where the processes of a run find each other, and make their twin.
//!
//! Each run has a folder of its own in it, of a random name, and beside that a note of the process that makes it. So two
//! with one DST do not take each other's files; all but one are refused once they look at DST. Invariants: what is there
//! is nobody's result; who goes takes away what is his; the note is there for as long as its process is, so that nobody
//! who goes finds the place empty, and removes it under a run that lives. Who has published DST also takes away what is
//! left of others: folders whose process has ended, as far as can be told from here, or began a day ago. Whoever lives as
//! long works on DST, and nobody else has published it.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::comm::{self, Communicator, Part, Patience, Process, Wait};
use crate::error::{Error, Peer, Result};
use crate::storage::{AnchoredPath, lookup};

/// Of the folder of a run.
const NAME_LEN: usize = 16;

pub struct MeetingPlace {
    folder: AnchoredPath,
    destination: PathBuf,
    /// Whether DST was there when this process came.
    was_there: bool,
    /// What was not there of the folders above it, the innermost first.
    made: Vec<PathBuf>,
    /// What the first has drawn, and has a note of.
    number: Option<[u8; 8]>,
    /// That of this run, once it is agreed on.
    of_run: Option<AnchoredPath>,
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
    /// `Usage` where DST has no name, or where a link or a folder of another user is in the way; `Io`.
    pub fn beside(destination: &Path, part: Part) -> Result<Self> {
        let name = destination.file_name().ok_or_else(|| {
            Error::usage(
                format!("{} cannot be a destination", destination.display()),
                "give the destination a name of its own",
            )
        })?;
        let folder = beside(destination, name);
        folder.own_metadata().map_err(Error::io("meet in", &folder))?;
        let is_first = part.index == 0;
        let was_there = lookup::metadata_of(destination)?.is_some();
        let destination = destination.to_path_buf();
        let (made, number, of_run) = (Vec::new(), None, None);
        let mut place = Self { folder, destination, was_there, made, number, of_run, is_first, end: End::Failed };
        // Others wait for what the first puts there.
        if is_first {
            let above = place.folder.path().ancestors().skip(1);
            let missing = above
                .take_while(|above| !above.as_os_str().is_empty() && matches!(lookup::metadata_of(above), Ok(None)));
            place.made = missing.map(Path::to_path_buf).collect();
            let number = getrandom::u64()
                .map_err(|error| Error::io("draw a random number in", &place.folder)(error.into()))?
                .to_le_bytes();
            let of_run = place.of_run.insert(folder_of(&place.folder, &number));
            announce(of_run).map_err(Error::io("create", &place.folder))?;
            place.number = Some(number);
        }
        Ok(place)
    }

    #[must_use]
    pub fn folder(&self) -> &AnchoredPath {
        &self.folder
    }

    /// Agree on a folder that no other run has, which the first makes, and all see in time. Collective.
    ///
    /// # Errors
    /// `Io`, and as [`Communicator::gather`]; `Comm` naming one that does not see it.
    pub fn of_run(&mut self, communicator: &impl Communicator, patience: Patience<'_>) -> Result<AnchoredPath> {
        let said = communicator.gather(self.number.as_ref().map_or(&[], |number| &number[..]))?;
        let folder = self.of_run.insert(folder_of(&self.folder, &said[0])).clone();
        let make = || folder.create_folder().map_err(Error::io("create", &folder));
        communicator.settle(if self.is_first { make() } else { Ok(()) })?;
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

/// The place beside a destination of this name.
fn beside(destination: &Path, name: &OsStr) -> AnchoredPath {
    let hidden: OsString = [".".as_ref(), name, ".dtshard-meeting".as_ref()].into_iter().collect();
    AnchoredPath::new(destination.parent().unwrap_or(Path::new(""))).join(hidden)
}

/// Take away what runs have left beside DST that are not any more. For who has published it, and has met nobody.
pub fn clear_beside(destination: &Path) {
    if let Some(name) = destination.file_name() {
        let place = beside(destination, name);
        if place.is_own() {
            sweep(&place);
            // Unless another run is there.
            let _ = place.remove_folder();
        }
    }
}

/// Of the run whose first process has drawn this.
fn folder_of(place: &AnchoredPath, number: &[u8]) -> AnchoredPath {
    place.join(&blake3::hash(number).to_hex()[..NAME_LEN])
}

fn is_of_run(name: &OsStr) -> bool {
    name.len() == NAME_LEN && name.as_encoded_bytes().iter().all(u8::is_ascii_hexdigit)
}

/// Put the note of a run into the place, which is made, as often as somebody who goes finds it empty before that.
fn announce(of_run: &AnchoredPath) -> io::Result<()> {
    const TRIES: usize = 100;
    let process = serde_json::to_vec(&Process::this())?;
    let announce = || {
        // Another process may have deleted and created the folders above.
        let note = note_of(&of_run.reopened());
        let place = note.folder();
        fs::create_dir_all(place.path().parent().unwrap_or(Path::new("")))?;
        match place.create_folder() {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        note.create_new(0o666)?.write_all(&process)
    };
    let is_taken_away = |done: &io::Result<()>| done.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound);
    let mut tries = (0..TRIES).map(|_| announce());
    tries.find(|done| !is_taken_away(done)).unwrap_or_else(announce)
}

fn note_of(folder: &AnchoredPath) -> AnchoredPath {
    folder.with_file_name(Path::new(folder.file_name()).with_extension("json"))
}

fn remove(folder: &AnchoredPath) {
    let _ = folder.remove_all();
    let _ = note_of(folder).remove_file();
}

/// Whether a folder shows in time.
fn see(folder: &AnchoredPath, communicator: &impl Communicator, patience: Patience<'_>) -> Result<bool> {
    let wait = Wait::begin(patience);
    loop {
        // A network file system looks anew for what was not there once the folder above is listed.
        let names = folder.folder().names().unwrap_or_default();
        if names.iter().any(|name| name == folder.file_name()) {
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
fn sweep(place: &AnchoredPath) {
    let is_folder = |path: &AnchoredPath| path.metadata().is_ok_and(|found| found.is_dir());
    for name in place.names().unwrap_or_default() {
        let path = place.join(&name);
        // Of one that had not met the others, there is no more than a note.
        let of_run =
            if is_folder(&path) { path.clone() } else { path.with_file_name(Path::new(&name).with_extension("")) };
        let is_ones = is_folder(&of_run) || is_of_run(of_run.file_name());
        if is_ones && path.is_own() && !is_in_use(&of_run) {
            remove(&of_run);
        }
    }
    comm::sweep(place);
}

fn is_in_use(folder: &AnchoredPath) -> bool {
    const DAY: Duration = Duration::from_hours(24);
    let Ok(note) = note_of(folder).open() else { return false };
    let mut text = Vec::new();
    if (&note).take(1 << 16).read_to_end(&mut text).is_err() {
        return false;
    }
    let has_ended = serde_json::from_slice::<Process>(&text).is_ok_and(|process| process.has_ended());
    let modified = note.metadata().and_then(|metadata| metadata.modified());
    let is_old = modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > DAY));
    !has_ended && !is_old
}

impl Drop for MeetingPlace {
    fn drop(&mut self) {
        if !self.is_first && self.end != End::Failed {
            return;
        }
        self.of_run.iter().for_each(remove);
        // By this run or, meanwhile, by another one: who has not come need not hear any more that he is late.
        let is_published = !self.was_there && matches!(lookup::metadata_of(&self.destination), Ok(Some(_)));
        if self.end == End::Published {
            sweep(&self.folder);
        } else if is_published {
            comm::sweep(&self.folder);
        }
        // Unless another run is there, or has made something.
        let _ = self.folder.remove_folder().and_then(|()| self.made.iter().try_for_each(fs::remove_dir));
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
        let gone = Process { start: here.start + 1, ..here.clone() };
        note("killed", &gone);
        let elsewhere = Process { boot: "another".into(), ..here.clone() };
        note("elsewhere", &elsewhere);
        let long_ago = std::time::SystemTime::now() - Duration::from_hours(25);
        note("forgotten", &elsewhere).set_modified(long_ago).unwrap();
        fs::create_dir(place.path().join("nobody")).unwrap();
        // One that was killed before it had met the others, and one that waits for them.
        for (name, process) in [("0123456789abcdef.json", &gone), ("fedcba9876543210.json", &here)] {
            fs::write(place.path().join(name), serde_json::to_vec(process).unwrap()).unwrap();
        }
        sweep(&AnchoredPath::new(place.path()));
        let left = fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut left: Vec<String> = left.collect();
        left.sort();
        assert_eq!(left, ["alive", "alive.json", "elsewhere", "elsewhere.json", "fedcba9876543210.json"]);
    }

    /// As one that is turned away, between the moment that all have found the sheet and the one that they see their folder.
    #[test]
    fn who_goes_leaves_the_place_of_a_run_that_lives() {
        let root = tempfile::tempdir().unwrap();
        let beside = |index| MeetingPlace::beside(&root.path().join("out"), Part { index, of: 2 }).unwrap();
        let first = beside(0);
        drop(beside(1));
        drop(beside(0));
        assert!(first.folder().exists());
        clear_beside(&root.path().join("out"));
        assert!(first.folder().exists());
        drop(first);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
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
        fs::write(other.folder().path().join("rendezvous-1.json"), "").unwrap();
        drop(one);
        assert!(other.folder().path().join("rendezvous-1.json").exists());
    }
}
