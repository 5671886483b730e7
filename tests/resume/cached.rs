//! Tests of two processes on two mounts of one folder. Each mount caches names, as a network file system does. Neither
//! process relies on cached names, even if one of them is killed.
//!
//! With `DTSHARD_TEST_CACHED_RUNS=50`, each case runs 50 times, and the process is killed at other moments.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::job::{FILE, FOLDER, Job, Kind, RANKS, names, skip};
use crate::outcome::Outcome;
use crate::tree::tree;

/// The options with which a mount caches names for 4 seconds. A process considers another process dead after a shorter
/// time.
const CACHES: &str = "entry_timeout=4,attr_timeout=4,negative_timeout=4";

/// Two mounts of one folder. They are unmounted when the value is dropped.
struct Mounts {
    root: TempDir,
    servers: Vec<Child>,
}

impl Mounts {
    /// Creates a folder and mounts it twice. Returns `None` if this machine cannot do it with bindfs (FUSE).
    fn new(options: &str) -> Option<Self> {
        let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let mut mounts = Self { root, servers: Vec::new() };
        fs::create_dir(mounts.folder()).unwrap();
        for node in 0..2 {
            let at = mounts.node(node);
            fs::create_dir(&at).unwrap();
            let mut server = Command::new("bindfs");
            server.args(["-f", "-o", options]).args([&mounts.folder(), &at]);
            mounts.servers.push(server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?);
            let begun = Instant::now();
            while !is_mounted(&at) {
                let has_ended = mounts.servers[node].try_wait().unwrap().is_some();
                if has_ended || begun.elapsed() > Duration::from_secs(10) {
                    return None;
                }
                sleep(Duration::from_millis(10));
            }
        }
        Some(mounts)
    }

    /// Returns the path of the folder itself, without a mount.
    fn folder(&self) -> PathBuf {
        self.root.path().join("folder")
    }

    fn node(&self, node: usize) -> PathBuf {
        self.root.path().join(format!("node{node}"))
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        for (node, server) in self.servers.iter_mut().enumerate() {
            let at = self.root.path().join(format!("node{node}"));
            if is_mounted(&at) {
                let _ = Command::new("umount").arg("--lazy").arg(&at).status();
            }
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

fn is_mounted(at: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts.lines().any(|line| line.split(' ').nth(1).is_some_and(|mounted| Path::new(mounted) == at))
}

/// One conversion by two processes, each of which uses its own mount.
struct Pair {
    job: Job,
    mounts: Mounts,
}

impl Pair {
    fn start(&self, node: usize, more: &str) -> Child {
        let target = self.mounts.node(node).join(self.job.kind.target());
        let more = format!("--part {node} --parts 2 {more}");
        self.job.command_at(&target, &more, Some("none")).spawn().unwrap()
    }

    fn start_both(&self, more: &str) -> [Child; 2] {
        [self.start(0, more), self.start(1, more)]
    }

    fn assert_succeed(&self, processes: [Child; 2], at: &str) {
        let outcomes = processes.map(wait);
        for outcome in &outcomes {
            assert_eq!(outcome.code, Some(0), "{at}: {outcomes:?}");
        }
        let folder = self.mounts.folder();
        assert_eq!(names(&folder), [self.job.kind.target()], "{at}");
        assert!(tree(&folder.join(self.job.kind.target())) == self.job.expected, "{at}: other bytes");
    }

    /// Removes the result directly in the folder, as another node would. Both mounts may still cache the name of the
    /// result.
    fn remove_result(&self) {
        for name in names(&self.mounts.folder()) {
            let path = self.mounts.folder().join(name);
            if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
        }
    }
}

fn wait(process: Child) -> Outcome {
    process.wait_with_output().unwrap().into()
}

fn runs() -> u32 {
    std::env::var("DTSHARD_TEST_CACHED_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(2)
}

fn with_pair(kind: Kind, options: &str, test: impl Fn(&Pair, u32)) {
    let Some(mounts) = Mounts::new(&format!("{CACHES}{options}")) else {
        skip("two mounts of one folder need bindfs and FUSE");
        return;
    };
    let pair = Pair { job: Job::new(kind), mounts };
    (0..runs()).for_each(|run| test(&pair, run));
}

#[test]
fn result_is_found_although_a_mount_caches_it_as_missing() {
    with_pair(FOLDER, "", |pair, run| {
        pair.assert_succeed(pair.start_both(""), &format!("run {run}"));
        pair.remove_result();
    });
}

#[test]
fn result_is_found_with_auto_cache_although_cached_as_missing() {
    with_pair(RANKS, ",auto_cache", |pair, run| {
        pair.assert_succeed(pair.start_both(""), &format!("run {run}"));
        pair.remove_result();
    });
}

/// The result was removed, but the mount of the second process still caches its name.
#[test]
fn removed_result_is_written_again() {
    with_pair(FILE, "", |pair, run| {
        pair.assert_succeed(pair.start_both(""), &format!("run {run}"));
        assert!(pair.mounts.node(1).join(pair.job.kind.target()).exists());
        pair.remove_result();
        pair.assert_succeed(pair.start_both(""), &format!("run {run} again"));
        pair.remove_result();
    });
}

#[test]
fn killed_process_on_a_caching_mount_resumes() {
    for options in ["", ",auto_cache"] {
        with_pair(FOLDER, options, |pair, run| {
            // The process is killed at different moments, from before the first file to after the last file.
            for moment in [0, 40, 80, 160] {
                let (at, dying) = (format!("run {run}, killed after {moment} ms"), run % 2);
                let [mut first, mut second] = pair.start_both("--resume");
                sleep(Duration::from_millis(moment + u64::from(run / 2) % 40));
                let (killed, left) = if dying == 0 { (&mut first, &mut second) } else { (&mut second, &mut first) };
                killed.kill().unwrap();
                // The other process may wait for a part that has not started. It would wait until a launcher ends it,
                // so the test kills it.
                let begun = Instant::now();
                while left.try_wait().unwrap().is_none() && begun.elapsed() < Duration::from_secs(3) {
                    sleep(Duration::from_millis(20));
                }
                left.kill().unwrap();
                for process in [first, second] {
                    let outcome = wait(process);
                    assert!(matches!(outcome.code, None | Some(0 | 2)), "{at}: {outcome:?}");
                }
                let result = pair.mounts.folder().join(pair.job.kind.target());
                assert!(!result.exists() || tree(&result) == pair.job.expected, "{at}: other bytes");
                pair.assert_succeed(pair.start_both("--resume"), &at);
                pair.remove_result();
            }
        });
    }
}
