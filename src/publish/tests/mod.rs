//! Tests of publishing: live processes are threads, killed processes are child processes.

mod commits;
mod deaths;
mod decisions;
mod leaving;
mod parts;
mod single;
mod waiting;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::lease::{LeaseName, LeasePhase, LeaseRecord, LeaseRole};
use super::*;
use crate::comm::Process;
use crate::error::Error;

/// The time limits of a real run, shortened for tests.
const FAST: Pace = Pace {
    beat: Duration::from_millis(10),
    dead_after: Duration::from_millis(300),
    start_within: Duration::from_millis(500),
    seal_after: Duration::from_millis(50),
    stopped_after: Duration::from_millis(30),
    stuck_after: Duration::from_mins(10),
    cached_for: Duration::from_secs(2),
    look: (Duration::from_millis(5), Duration::from_millis(10)),
};

/// A folder with a destination, and the claim of a process that writes it.
struct TestEnv {
    root: tempfile::TempDir,
    shape: DestinationKind,
    claim: Claim,
    fingerprint: Fingerprint,
    version: &'static str,
    about: PlanDescription,
}

impl TestEnv {
    fn new(shape: DestinationKind) -> Self {
        Self {
            root: tempfile::tempdir().unwrap(),
            shape,
            claim: claim(),
            fingerprint: Fingerprint([7; 32]),
            version: "1",
            about: PlanDescription::default(),
        }
    }

    fn out(&self) -> PathBuf {
        self.root.path().join("out")
    }

    fn partial(&self) -> PathBuf {
        self.root.path().join(".out.dtshard-partial")
    }

    /// Returns the only folder `work-ID` in the partial folder.
    fn work(&self) -> PathBuf {
        let names = fs::read_dir(self.partial()).into_iter().flatten().map(|entry| entry.unwrap().file_name());
        let work = names.map(|name| name.into_string().unwrap()).find(|name| name.starts_with("work-"));
        self.partial().join(work.unwrap_or_default())
    }

    fn data(&self) -> PathBuf {
        self.work().join("data")
    }

    fn begin_as(&self, claim: &Claim) -> Result<Beginning> {
        self.begin_with(claim, &Stop::default())
    }

    fn begin_with(&self, claim: &Claim, stop: &Stop) -> Result<Beginning> {
        let plan = WorkPlan { fingerprint: self.fingerprint, version: self.version, about: &self.about };
        acquire::acquire(&self.out(), self.shape, claim, &plan, FAST, stop)
    }

    fn begin(&self) -> Result<Staging> {
        self.begin_as(&self.claim).map(work)
    }

    fn part(&self, index: u32, of: u32) -> Result<Staging> {
        self.part_that_stops(index, of, &Stop::default())
    }

    fn part_that_stops(&self, index: u32, of: u32, stop: &Stop) -> Result<Staging> {
        self.begin_with(&Claim { part: Part { index, of }, ..self.claim.clone() }, stop).map(work)
    }

    fn refused(&self, words: &[&str]) {
        says(&self.begin().unwrap_err(), words);
    }

    fn names(&self) -> Vec<String> {
        names(self.root.path())
    }

    /// Creates a lease whose process is on another node and does not rewrite it.
    fn foreign_lease(&self, name: LeaseName, phase: LeasePhase) {
        let process = Process { boot: "another".into(), host: "n9".into(), ..Process::this() };
        let record = LeaseRecord { process, beat: 3, phase, done_bytes: 5, failure: None, gone: None };
        let draft = self.partial().join("draft");
        fs::write(&draft, record.to_bytes()).unwrap();
        fs::rename(draft, self.partial().join(format!("{name}.lease"))).unwrap();
    }

    /// Creates a partial folder with half of the output, and the released lease of `part`, as a process leaves it that
    /// can be resumed.
    fn leave_behind(&self, part: Part) {
        let claim = Claim { resume: true, part, ..self.claim.clone() };
        let staging = work(self.begin_as(&claim).unwrap());
        let name = if self.shape == DestinationKind::File { "out" } else { "a" };
        write(&staging.folder().path().join(name), "half");
    }

    /// Runs an action in a child process, which is killed at a fault point if `point` is set.
    fn in_child(&self, what: &str, point: &str) -> std::process::Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "publish::tests::deaths::the_child"])
            .env("STAGING_TEST", format!("{what}\n{}\n{:?}", self.root.path().display(), self.shape))
            .env("DTSHARD_FAULT", point)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    }
}

fn claim() -> Claim {
    Claim {
        overwrite: false,
        replace_check: ReplaceCheck::new(|_| Ok(())),
        restart: false,
        resume: false,
        part: Part::alone(),
        run: None,
        sync: false,
        parts_wait: true,
        reporter: WaitReporter::silent(),
    }
}

fn work(begun: Beginning) -> Staging {
    match begun {
        Beginning::Work(staging) => staging,
        Beginning::Done => panic!("there is work to do"),
    }
}

fn lease_of(index: u32, of: u32, generation: u32) -> LeaseName {
    LeaseName { role: LeaseRole::Part(Part { index, of }), generation }
}

fn publish(staging: &Staging) {
    staging.finish().unwrap();
    loop {
        if let Some(seal) = staging.try_seal(&Stop::default()).unwrap() {
            return seal.publish(true).unwrap();
        }
        if staging.wait_published(&Stop::default(), &mut |_| ()).unwrap() == Waited::Published {
            return;
        }
    }
}

/// Repeats `look` until it returns a value. The value appears with a later heartbeat of a lease.
fn in_time<T>(look: impl Fn() -> Option<T>) -> T {
    let begun = std::time::Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "in vain");
        std::thread::sleep(FAST.beat);
    }
}

fn says(error: &Error, words: &[&str]) {
    let text = format!("{error}\nhint: {}", error.hint().unwrap_or_default());
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text}");
    }
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
