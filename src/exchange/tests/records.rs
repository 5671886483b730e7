//! Records do what every communicator does with words, and processes that were killed are in nobody's way.

use std::convert::Infallible;
use std::thread;
use std::time::Duration;

use crate::catalog::{Catalog, Reservation};
use crate::comm::tests::conformance::{Fleet, PATIENCE, conforms_in_words};
use crate::comm::{Communicator, Part, WaitNotices};
use crate::error::{CommError, Error, Result};
use crate::exchange::records::Records;
use crate::exchange::source_copy::SourceCopy;
use crate::exec::Stop;
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
        self.meet(rank, size, PATIENCE).unwrap()
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
    assert_eq!((rank, detail.as_str()), (1, "did not come within 0 s, nor did process 2"));
    let (rank, _) = self::detail(shared.meet(1, 3, Duration::from_millis(200)).map(drop).unwrap_err());
    assert_eq!(rank, 0);
}

#[test]
fn process_that_waits_reports_whom_it_waits_for() {
    let shared = Shared::new();
    let said = std::sync::Mutex::new(Vec::new());
    let tell = |words: &str| said.lock().unwrap().push(words.to_owned());
    let soon = Duration::from_millis(20);
    let patience =
        WaitNotices { limit: Duration::from_secs(2), first: soon, again: Duration::from_secs(9), tell: &tell };
    Records::meet(&shared.folder(), Part { index: 0, of: 2 }, patience, &Stop::default()).map(drop).unwrap_err();
    assert_eq!(*said.lock().unwrap(), ["waiting for process 1 (0 of at most 2 s)"]);
}

/// The lease of a process that was killed is there, and no process writes it.
#[test]
fn lease_of_an_earlier_run_is_in_nobodys_way() {
    let shared = Shared::new();
    let ranks = [0, 1].map(|index| {
        let folder = shared.folder();
        thread::spawn(move || {
            Records::meet(&folder, Part { index, of: 2 }, WaitNotices::silent(PATIENCE), &Stop::default()).unwrap()
        })
    });
    let [first, second] = ranks.map(|rank| rank.join().unwrap());
    // Process 1 lives on for a while, and has met another process 0.
    drop(first);
    let late = thread::spawn(move || {
        thread::sleep(Duration::from_millis(300));
        drop(second);
    });
    let again = [0, 1].map(|index| {
        let folder = shared.folder();
        thread::spawn(move || {
            let met = Records::meet(&folder, Part { index, of: 2 }, WaitNotices::silent(PATIENCE), &Stop::default());
            met.unwrap().gather(&[7]).unwrap()
        })
    });
    for rank in again {
        assert_eq!(rank.join().unwrap(), [[7], [7]]);
    }
    late.join().unwrap();
}

#[test]
fn failure_while_others_are_waited_for_is_told() {
    let shared = Shared::new();
    std::fs::create_dir_all(shared.folder().path()).unwrap();
    let waiting = {
        let folder = shared.folder();
        thread::spawn(move || {
            let part = Part { index: 0, of: 3 };
            Records::meet(&folder, part, WaitNotices::silent(PATIENCE), &Stop::default()).map(drop).unwrap_err()
        })
    };
    let one = Presence::take(&shared.folder(), Part { index: 2, of: 3 }, 0).unwrap().unwrap();
    thread::sleep(Duration::from_millis(300));
    one.fail("no space");
    assert_eq!(detail(waiting.join().unwrap()), (2, String::from("failed: no space")));
}

#[test]
fn copy_of_a_live_run_is_left_alone() {
    let shared = Shared::new();
    let (files, catalog, reservation) = (Files::new(IoMode::Read), Catalog::empty(), Reservation::default());
    let plan = || SourceCopy::plan(shared.folder(), shared.0.path(), &files, (&catalog, &reservation), 2);
    let lease = plan().begin(false).unwrap();
    let error = plan().begin(false).map(drop).unwrap_err().to_string();
    assert!(error.starts_with("another run") && error.contains("copies files to"), "{error}");
    drop(lease);
    plan().begin(true).unwrap();
}
