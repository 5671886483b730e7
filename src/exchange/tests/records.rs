//! Runs the tests of the communicator for small messages with message files. Also tests that killed processes do not
//! block later runs.

use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::catalog::{Catalog, Reservation};
use crate::comm::tests::conformance::{Fleet, WAIT_LIMIT, conforms_in_words};
use crate::comm::{Communicator, Process, WaitNotices, WaitReporter};
use crate::error::{CommError, Error, FormatError, Result, Stopped};
use crate::exchange::records::Records;
use crate::exchange::source_copy::SourceCopy;
use crate::exec::Stop;
use crate::launch::Part;
use crate::publish::presence::Presence;
use crate::storage::{AnchoredPath, Files, IoMode};

struct Shared(tempfile::TempDir);

impl Shared {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn folder(&self) -> AnchoredPath {
        AnchoredPath::new(self.0.path()).join("run")
    }

    fn meet(&self, index: u32, of: u32, limit: Duration) -> Result<Records> {
        Records::meet(&self.folder(), Part { index, of }, WaitNotices::silent(limit), &Stop::default())
    }
}

impl Fleet for Shared {
    type Rank = Records;

    fn rank(&self, rank: u32, size: u32) -> Records {
        self.meet(rank, size, WAIT_LIMIT).unwrap()
    }

    fn memory(&self, _: &Records, _: &[u8]) -> Infallible {
        unreachable!("records move no bytes of tensors")
    }

    fn bytes(&self, _: &Records, memory: &Infallible) -> Vec<u8> {
        match *memory {}
    }
}

#[test]
fn records_conform_in_words() {
    conforms_in_words(Shared::new());
}

#[test]
fn link_in_place_of_a_folder_is_refused() {
    for (link, folder) in [("run", "run"), ("work", "work/run")] {
        let shared = Shared::new();
        let (root, victim) = (shared.0.path(), shared.0.path().join("victim"));
        std::fs::create_dir(&victim).unwrap();
        std::os::unix::fs::symlink(&victim, root.join(link)).unwrap();
        let folder = AnchoredPath::new(root).join(folder);
        for index in [0, 1] {
            let notices = WaitNotices::silent(Duration::from_secs(5));
            let met = Records::meet(&folder, Part { index, of: 2 }, notices, &Stop::default());
            let error = met.map(drop).unwrap_err();
            assert!(matches!(error, Error::Storage(_)) && error.hint().is_some(), "{error:?}");
            let expected =
                format!("{} is a link to {}, which is not followed", root.join(link).display(), victim.display());
            assert_eq!(error.to_string(), expected);
        }
        assert_eq!(std::fs::read_dir(&victim).unwrap().count(), 0);
    }
}

/// A thread deletes the work folder and its parents again and again, as the last process of an earlier run does. Both
/// processes of the new run still connect.
#[test]
fn folders_that_an_earlier_run_removes_are_created_again() {
    let shared = Shared::new();
    let above = shared.0.path().join("above");
    let folder = || AnchoredPath::new(&above).join("work/run");
    let started = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            while started.elapsed() < Duration::from_millis(500) {
                for name in ["work/run", "work", ""] {
                    let _ = std::fs::remove_dir(above.join(name));
                }
            }
        });
        let ranks = [0, 1].map(|index| {
            scope.spawn(move || {
                thread::sleep(Duration::from_millis(200 * u64::from(index)));
                let part = Part { index, of: 2 };
                Records::meet(&folder(), part, WaitNotices::silent(WAIT_LIMIT), &Stop::default())
                    .unwrap()
                    .gather(&[7])
                    .unwrap()
            })
        });
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), [[7], [7]]);
        }
    });
}

#[test]
fn hostile_session_file_is_malformed() {
    let long = format!("{{\"members\":[0{}]}}", ",0".repeat(500));
    for (text, at, expected, found) in [
        ("{\"members\":[0]}", "members", "2 generations, one for each process", "1"),
        ("{\"members\":[0,0,0]}", "members", "2 generations, one for each process", "3"),
        ("{\"members\":[7,0]}", "members[0]", "0, as the name of the file has it", "7"),
        ("{\"members\":[0,4294967295]}", "members[1]", "a generation below 4294967295", "4294967295"),
        ("{\"members\":[0,-1]}", "session", "JSON of the generations of 2 leases", "invalid value: integer `-1`"),
        ("{\"members\":", "session", "JSON of the generations of 2 leases", "EOF while parsing"),
        (&long, "session", "JSON of the generations of 2 leases", "more than 86 bytes"),
    ] {
        let shared = Shared::new();
        std::fs::create_dir_all(shared.folder().path()).unwrap();
        let path = shared.folder().path().join("session-2.0.json");
        std::fs::write(&path, text).unwrap();
        let _first = Presence::take(&shared.folder(), Part { index: 0, of: 2 }, 0).unwrap().unwrap();
        let error = shared.meet(1, 2, Duration::from_secs(5)).map(drop).unwrap_err();
        let words = format!("{}: {at}: expected {expected}, found {found}", path.display());
        assert!(
            matches!(error, Error::Format(FormatError::Malformed { hint: Some(_), .. }))
                && error.to_string().starts_with(&words),
            "{error}"
        );
    }
}

/// Generation numbers may be large, so no loop may count from 0 up to a generation number.
#[test]
fn large_generation_of_an_earlier_lease_costs_no_time() {
    let shared = Shared::new();
    std::fs::create_dir_all(shared.folder().path()).unwrap();
    drop(Presence::take(&shared.folder(), Part { index: 0, of: 2 }, u32::MAX - 2).unwrap().unwrap());
    let other = thread::spawn({
        let folder = shared.folder();
        move || {
            let met =
                Records::meet(&folder, Part { index: 1, of: 2 }, WaitNotices::silent(WAIT_LIMIT), &Stop::default());
            met.unwrap().gather(&[1]).unwrap()
        }
    });
    assert_eq!(shared.meet(0, 2, WAIT_LIMIT).unwrap().gather(&[0]).unwrap(), [[0], [1]]);
    other.join().unwrap();
}

fn detail(error: Error) -> (u32, String) {
    match error {
        Error::Comm(CommError { rank, detail, .. }) => (rank.index, detail),
        other => panic!("{other}"),
    }
}

#[test]
fn process_that_never_comes_is_named() {
    let shared = Shared::new();
    let met = shared.meet(0, 3, Duration::from_millis(200)).map(drop);
    let (rank, detail) = detail(met.unwrap_err());
    assert_eq!((rank, detail.as_str()), (1, "did not connect within 0 s, nor did process 2"));
    let (rank, _) = self::detail(shared.meet(1, 3, Duration::from_millis(200)).map(drop).unwrap_err());
    assert_eq!(rank, 0);
}

#[test]
fn waiting_process_names_the_missing_processes() {
    let shared = Shared::new();
    let said = Mutex::new(Vec::new());
    let print = |words: &str| said.lock().unwrap().push(words.to_owned());
    let soon = Duration::from_millis(20);
    let notices =
        WaitNotices { limit: Duration::from_secs(2), first: soon, again: Duration::from_secs(9), print: &print };
    Records::meet(&shared.folder(), Part { index: 0, of: 2 }, notices, &Stop::default()).map(drop).unwrap_err();
    assert_eq!(*said.lock().unwrap(), ["waiting for process 1 (0 of at most 2 s)"]);
}

/// Process 1 is alive, but begins the second operation when process 0 has reported twice that it waits. Asserts that the
/// reports have the number and the node of process 1.
#[test]
fn long_wait_for_a_live_process_reports_where_it_runs() {
    let shared = Shared::new();
    let said = Arc::new(Mutex::new(Vec::new()));
    let print = {
        let said = Arc::clone(&said);
        Arc::new(move |words: &str| said.lock().unwrap().push(words.to_owned()))
    };
    let other = thread::spawn({
        let (folder, said) = (shared.folder(), Arc::clone(&said));
        move || {
            let part = Part { index: 1, of: 2 };
            let rank = Records::meet(&folder, part, WaitNotices::silent(WAIT_LIMIT), &Stop::default()).unwrap();
            rank.gather(&[]).unwrap();
            let is_of_second = |words: &&String| words.contains("copying files of SRC");
            while said.lock().unwrap().iter().filter(is_of_second).count() < 2 {
                thread::sleep(Duration::from_millis(10));
            }
            rank.gather(&[]).unwrap();
        }
    });
    let (first, again) = (Duration::from_millis(100), Duration::from_millis(300));
    let rank = shared.meet(0, 2, WAIT_LIMIT).unwrap().reporting(WaitReporter { first, again, print });
    rank.gather(&[]).unwrap();
    said.lock().unwrap().clear(); // the first operation may have waited, too
    rank.begin("copying files of SRC");
    rank.gather(&[]).unwrap();
    let whom = format!("waiting for process 1 of 2 ({}) while copying files of SRC (", Process::this());
    let why = " s): it is alive; its disk or network may be slow";
    let said = said.lock().unwrap();
    assert!(said.len() >= 2 && said.iter().all(|words| words.starts_with(&whom) && words.ends_with(why)), "{said:?}");
    other.join().unwrap();
}

/// A new process 0 and a new process 1 connect, although the old process 1 is alive for 300 ms and holds its lease.
#[test]
fn lease_of_an_earlier_run_is_in_nobodys_way() {
    let shared = Shared::new();
    let ranks = [0, 1].map(|index| {
        let folder = shared.folder();
        thread::spawn(move || {
            Records::meet(&folder, Part { index, of: 2 }, WaitNotices::silent(WAIT_LIMIT), &Stop::default()).unwrap()
        })
    });
    let [first, second] = ranks.map(|rank| rank.join().unwrap());
    // Process 1 stays alive for a while, in a session with another process 0.
    drop(first);
    let late = thread::spawn(move || {
        thread::sleep(Duration::from_millis(300));
        drop(second);
    });
    let again = [0, 1].map(|index| {
        let folder = shared.folder();
        thread::spawn(move || {
            let met = Records::meet(&folder, Part { index, of: 2 }, WaitNotices::silent(WAIT_LIMIT), &Stop::default());
            met.unwrap().gather(&[7]).unwrap()
        })
    });
    for rank in again {
        assert_eq!(rank.join().unwrap(), [[7], [7]]);
    }
    late.join().unwrap();
}

#[test]
fn failure_while_waiting_for_others_is_reported() {
    let shared = Shared::new();
    std::fs::create_dir_all(shared.folder().path()).unwrap();
    let waiting = {
        let folder = shared.folder();
        thread::spawn(move || {
            let part = Part { index: 0, of: 3 };
            Records::meet(&folder, part, WaitNotices::silent(WAIT_LIMIT), &Stop::default()).map(drop).unwrap_err()
        })
    };
    let one = Presence::take(&shared.folder(), Part { index: 2, of: 3 }, 0).unwrap().unwrap();
    thread::sleep(Duration::from_millis(300));
    one.fail(&Error::usage("no space", ""));
    assert_eq!(detail(waiting.join().unwrap()), (2, String::from("failed: no space")));
}

#[test]
fn copy_of_a_live_run_is_left_alone() {
    let shared = Shared::new();
    let (files, catalog, reservation) = (Files::new(IoMode::Read), Catalog::empty(), Reservation::default());
    let plan = || SourceCopy::plan(shared.folder(), shared.0.path(), &files, (&catalog, &reservation), 2);
    let begin = |goes_on| plan().begin(goes_on, &Stop::default());
    let lease = begin(false).unwrap();
    let error = begin(false).map(drop).unwrap_err().to_string();
    assert!(error.starts_with("another run") && error.contains("copies files to"), "{error}");
    drop(lease);
    begin(true).unwrap();
}

/// A lease file without a valid record is watched for 20 seconds, like the lease of a process on another node. Asserts
/// that SIGTERM ends this wait within a second.
#[test]
fn signal_ends_the_wait_for_a_copy_of_another_node() {
    let shared = Shared::new();
    std::fs::create_dir_all(shared.folder().path()).unwrap();
    std::fs::write(shared.folder().path().join("part-0-of-1.0.lease"), "").unwrap();
    let stop = Stop::default();
    let waiting = {
        let (folder, stop) = (shared.folder(), stop.clone());
        thread::spawn(move || {
            let (files, catalog, reservation) = (Files::new(IoMode::Read), Catalog::empty(), Reservation::default());
            let source = (&catalog, &reservation);
            SourceCopy::plan(folder, Path::new("/"), &files, source, 2).begin(false, &stop).map(drop)
        })
    };
    thread::sleep(Duration::from_millis(300));
    assert!(!waiting.is_finished());
    let raised = Instant::now();
    stop.raise(signal_hook::consts::SIGTERM);
    let error = waiting.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::Stopped(Stopped { signal: "TERM", .. })), "{error}");
    assert!(raised.elapsed() < Duration::from_secs(1), "{:?}", raised.elapsed());
}
