//! What process 0 leaves in the folder where a run meets: a sheet that says where it is, and, where it gave the others up,
//! a notice for each that had not come.
//!
//! A sheet is named by the run, so that what an earlier one left behind is not taken; where a run has no name, a new sheet
//! replaces the old one. A notice is for one rank, which takes it away as it reads it: it is told once, and comes to the
//! meeting of the next run as if nothing had been. Invariant: notices are there before the sheet is gone, and go as another
//! one comes, so that a sheet is news and a notice is not: nobody looks for a notice who sees a sheet.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::address::Address;
use super::hello::{MOST_WORDS, Token};
use super::{Part, Process};
use crate::error::{Error, Result};
use crate::storage::AnchoredPath;

/// How the names of sheets and notices begin.
const SHEET: &str = "rendezvous-";
/// Older than anybody waits.
const OLD: Duration = Duration::from_hours(1);
/// How often process 0 looks whether its sheet is still its own.
const LOOK: Duration = Duration::from_secs(1);

/// The file that says where process 0 is. Dropping it removes it, unless another run has put its own there.
#[derive(Debug)]
pub(super) struct Sheet {
    name: Name,
    token: Token,
    looked: Cell<Instant>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Words {
    pub address: Address,
    pub token: Token,
    /// That of process 0.
    pub process: Process,
}

/// That a meeting was given up.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Notice {
    /// Who was the reason, and why.
    pub rank: u32,
    pub why: String,
    /// Of process 0's sheet.
    pub token: Token,
    process: Process,
    /// In seconds, by the clock of process 0's node.
    at: u64,
}

/// What the files of one run in a folder are called.
#[derive(Clone, Debug)]
pub(super) struct Name {
    folder: AnchoredPath,
    stem: String,
}

impl Name {
    pub fn new(folder: AnchoredPath, run: Option<&str>, of: u32) -> Self {
        // What a run is called may hold anything.
        let name = blake3::hash(format!("{of} {}", run.unwrap_or_default()).as_bytes());
        Self { folder, stem: format!("{SHEET}{}", &name.to_hex()[..16]) }
    }

    fn sheet(&self) -> AnchoredPath {
        self.folder.join(format!("{}.json", self.stem))
    }

    fn notice(&self, rank: u32) -> AnchoredPath {
        self.folder.join(format!("{}-{rank}.json", self.stem))
    }

    /// Whom to call, or why there is nobody yet.
    pub fn words(&self) -> Result<Words, String> {
        // Another process may have deleted and created the folder above since the last look. A network file system asks
        // its server for a missing name again after the folder of that name is opened.
        let path = Self { folder: self.folder.reopened(), ..self.clone() }.sheet();
        let _ = path.folder().folder().open_folder();
        if let Err(error) = path.folder().open_folder()
            && error.kind() == io::ErrorKind::NotFound
        {
            return Err(format!("the folder {} is not there", self.folder.display()));
        }
        read(&path).map_err(|error| format!("it has not written {} ({error})", path.display()))
    }

    /// What is left for this rank by a run that gave it up. It is taken away.
    pub fn take_notice(&self, part: Part) -> Option<Notice> {
        let path = self.notice(part.index);
        let mut notice: Notice = read(&path).ok()?;
        notice.why.truncate(notice.why.floor_char_boundary(MOST_WORDS));
        // Whoever takes it away is who it is for.
        let is_taken = path.remove_file().is_ok();
        (is_taken && notice.rank < part.of).then_some(notice)
    }

    /// Take away notices of this run, and those that are older than anybody comes late.
    fn remove_notices(&self) {
        let own = format!("{}-", self.stem);
        for name in self.folder.names().unwrap_or_default() {
            let path = self.folder.join(&name);
            let name = name.to_string_lossy();
            let is_notice = name.strip_prefix(SHEET).is_some_and(|rest| rest.contains('-'));
            let is_gone = || name.starts_with(&own) || is_notice && is_old(&path);
            if is_gone() && path.is_own() {
                let _ = path.remove_file();
            }
        }
    }
}

impl Sheet {
    /// In place of one that an earlier run has left. It appears complete, and only its owner reads it.
    pub fn post(name: Name, listener: &TcpListener, token: Token) -> Result<Self> {
        let path = name.sheet();
        let draft = path.with_file_name(format!("{}.{}.tmp", name.stem, std::process::id()));
        let write = || -> io::Result<()> {
            let words = Words { address: Address::of(listener)?, token, process: Process::this() };
            // Another node may see the name before the bytes.
            write(&draft, &words)?.sync_all()?;
            path.own_entry()?;
            // A folder of that name would not be replaced. It goes unless there is something in it.
            let _ = path.remove_folder();
            draft.rename(&path)
        };
        write().inspect_err(|_| drop(draft.remove_file())).map_err(Error::io("write", &path))?;
        // Whoever leaves one from now on sees this sheet when that is done.
        name.remove_notices();
        Ok(Self { name, token, looked: Cell::new(Instant::now()) })
    }

    /// From time to time: that no other process has taken this one's place, which nobody would come to any more.
    ///
    /// # Errors
    /// `Comm` naming both.
    pub fn check(&self, op: &'static str) -> Result<()> {
        if self.looked.get().elapsed() < LOOK {
            return Ok(());
        }
        self.looked.set(Instant::now());
        let Some(rival) = self.rival() else { return Ok(()) };
        let this = Process::this();
        let words = format!("two take themselves for it: {this} and {rival}, which others call from now on");
        Err(Error::comm(0, op, words))
    }

    /// Whose sheet is in its place, if somebody's is.
    pub fn rival(&self) -> Option<Process> {
        let words: Words = read(&self.name.sheet()).ok()?;
        (words.token != self.token).then_some(words.process)
    }

    /// Tell these, should they still come, that nobody waits for them any more, and why.
    pub fn call_off(&self, missing: &[u32], (rank, why): (u32, &str)) {
        let notice = Notice { rank, why: why.to_owned(), token: self.token, process: Process::this(), at: now() };
        let paths = || missing.iter().map(|rank| self.name.notice(*rank));
        if self.rival().is_none() {
            // Who does not find it waits for as long as the others did.
            paths().for_each(|path| drop(write(&path, &notice)));
        }
        // Another run may have come meanwhile, and have taken away what was there by then.
        if self.rival().is_some() {
            let is_own = |path: &AnchoredPath| read(path).is_ok_and(|left: Notice| left.token == self.token);
            paths().filter(is_own).for_each(|path| drop(path.remove_file()));
        }
    }
}

impl Drop for Sheet {
    fn drop(&mut self) {
        if read(&self.name.sheet()).is_ok_and(|words: Words| words.token == self.token) {
            let _ = self.name.sheet().remove_file();
        }
    }
}

impl Notice {
    /// Whose meeting it was, and how long ago that was.
    pub fn origin(&self) -> String {
        format!("{}, as process 0, called the meeting off {} s ago", self.process, self.age().as_secs())
    }

    /// As far as the clocks of two nodes agree.
    pub fn age(&self) -> Duration {
        Duration::from_secs(now().saturating_sub(self.at))
    }
}

/// In seconds.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn write(path: &AnchoredPath, what: &impl Serialize) -> io::Result<File> {
    let mut file = path.replace_with_new(0o600)?;
    file.write_all(&serde_json::to_vec(what)?)?;
    Ok(file)
}

fn read<T: DeserializeOwned>(path: &AnchoredPath) -> io::Result<T> {
    let mut bytes = Vec::new();
    path.open()?.take(1 << 16).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

/// Take away what is left of runs that are not any more: notices, sheets that say nothing, those of processes that have
/// ended, as far as can be told from here, and those that are older than anybody waits.
pub fn sweep(folder: &AnchoredPath) {
    for name in folder.names().unwrap_or_default() {
        let path = folder.join(&name);
        let name = name.to_string_lossy();
        if !name.starts_with(SHEET) || !path.is_own() {
            continue;
        }
        // It appears complete.
        let is_left = || match read::<Words>(&path) {
            Ok(words) => words.process.has_ended(),
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        };
        if name.ends_with(".json") && is_left() || is_old(&path) {
            let _ = path.remove_file();
        }
    }
}

fn is_old(path: &AnchoredPath) -> bool {
    let modified = path.metadata().and_then(|data| data.modified());
    modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > OLD))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::super::address::listen;
    use super::*;

    fn name_in(folder: &Path, of: u32) -> Name {
        Name::new(AnchoredPath::new(folder), None, of)
    }

    fn post(name: &Name, token: Token) -> Sheet {
        Sheet::post(name.clone(), &listen(&[0]).unwrap(), token).unwrap()
    }

    fn left(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn a_notice_says_no_more_than_it_should() {
        let folder = tempfile::tempdir().unwrap();
        let name = name_in(folder.path(), 3);
        let sheet = post(&name, [1; 32]);
        let part = |index| Part { index, of: 3 };
        sheet.call_off(&[1, 2], (2, &"é".repeat(MOST_WORDS)));
        let notice = name.take_notice(part(1)).unwrap();
        assert_eq!((notice.rank, notice.why.len()), (2, MOST_WORDS));
        assert!(name.take_notice(part(1)).is_none() && name.take_notice(part(2)).is_some());
        // Of a process that there is not.
        sheet.call_off(&[1], (3, "it is gone"));
        assert!(name.take_notice(part(1)).is_none());
        drop(sheet);
        assert_eq!(left(folder.path()), 0);
    }

    #[test]
    fn who_is_replaced_leaves_no_notice() {
        let folder = tempfile::tempdir().unwrap();
        let name = name_in(folder.path(), 4);
        let (first, why) = (post(&name, [1; 32]), (1, "it is gone"));
        first.call_off(&[1, 2], why);
        let notice = fs::read(name.notice(1).path()).unwrap();
        let second = post(&name, [2; 32]);
        assert_eq!(left(folder.path()), 1, "the sheet");
        second.call_off(&[3], why);
        // As if it had looked before the other one came.
        fs::write(name.notice(1).path(), notice).unwrap();
        first.call_off(&[1, 2, 3], why);
        assert!(!name.notice(1).exists() && name.notice(3).exists());
    }

    /// Else one could be left between that and the sheet.
    #[test]
    fn notices_go_once_the_sheet_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let name = name_in(folder.path(), 2);
        post(&name, [1; 32]).call_off(&[1], (1, "it is gone"));
        fs::create_dir_all(name.sheet().path().join("something")).unwrap();
        Sheet::post(name.clone(), &listen(&[0]).unwrap(), [2; 32]).unwrap_err();
        assert!(name.notice(1).exists());
    }

    /// A pipe has nobody at its other end, and a link may lead anywhere.
    #[test]
    fn what_is_no_file_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let name = name_in(folder.path(), 3);
        let part = |index| Part { index, of: 3 };
        for path in [name.sheet(), name.notice(1)] {
            let made = std::process::Command::new("mkfifo").arg(path.path()).status();
            assert!(made.unwrap().success());
        }
        let why = name.words().unwrap_err();
        assert!(why.contains("not a regular file"), "{why}");
        assert!(name.take_notice(part(1)).is_none());
        let sheet = post(&name, [1; 32]);
        let other = folder.path().join("other");
        fs::write(&other, "mine").unwrap();
        std::os::unix::fs::symlink(&other, name.notice(2).path()).unwrap();
        sheet.call_off(&[1, 2], (1, "it is gone"));
        assert_eq!(fs::read(&other).unwrap(), b"mine");
        assert!(name.take_notice(part(1)).is_some() && name.take_notice(part(2)).is_some());
    }

    #[test]
    fn an_empty_folder_in_place_of_the_sheet_gives_way() {
        let folder = tempfile::tempdir().unwrap();
        let name = name_in(folder.path(), 2);
        fs::create_dir(name.sheet().path()).unwrap();
        let _sheet = post(&name, [1; 32]);
        assert!(name.words().is_ok());
    }
}
