//! Simulates nodes that each have some files of a checkpoint: each node is a folder, which is the SRC of one process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::outcome::{Outcome, command, files_of, fixture};
pub use crate::tree::{Tree, names, tree};

/// The number of nodes on which each file exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    One,
    Two,
}

/// The time in which all processes must end, also on a loaded machine. A process waits at most 10 seconds for a missing
/// process.
pub const DEADLINE: Duration = Duration::from_mins(1);

/// Folders for several nodes, and a folder for the output.
pub struct Nodes {
    folder: TempDir,
    pub of: u32,
    whole: PathBuf,
    name: &'static str,
}

impl Nodes {
    /// Divides the files of a fixture among `of` nodes in turn, in the order of the file names.
    pub fn new(source: &'static str, of: u32, spread: Spread) -> Self {
        Self::divided(source, of, spread)
    }

    fn divided(source: &'static str, of: u32, spread: Spread) -> Self {
        // Runs of several processes sync their output. In memory, syncing takes no time.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let name = source.rsplit('/').next().unwrap();
        let nodes = Self { folder, of, whole: fixture(source), name };
        fs::create_dir(nodes.dst_folder()).unwrap();
        (0..of).for_each(|node| fs::create_dir(nodes.node(node)).unwrap());
        let files = if nodes.whole.is_file() { vec![nodes.whole.clone()] } else { files_of(&nodes.whole) };
        for (number, file) in (0..).zip(files.iter().filter(|file| file.is_file())) {
            let has_two = spread == Spread::Two && of > 1;
            for node in [number % of].into_iter().chain(has_two.then_some((number + 1) % of)) {
                nodes.copy(file, node);
            }
        }
        nodes
    }

    /// Copies a file of the fixture to a node.
    pub fn copy(&self, file: &Path, node: u32) {
        let below = file.strip_prefix(&self.whole).unwrap();
        let to = if below.as_os_str().is_empty() { self.source(node) } else { self.source(node).join(below) };
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(file, &to).unwrap();
        // The copy gets the modification time of the file, because a resumed run may see another copy of the file.
        let copied = fs::File::options().write(true).open(&to).unwrap();
        copied.set_modified(file.metadata().unwrap().modified().unwrap()).unwrap();
    }

    fn node(&self, node: u32) -> PathBuf {
        self.folder.path().join(format!("node{node}"))
    }

    /// Returns the path that the process on a node gets as SRC.
    pub fn source(&self, node: u32) -> PathBuf {
        self.node(node).join(self.name)
    }

    /// Returns the paths of a file on all nodes that have it.
    pub fn copies(&self, name: &str) -> Vec<PathBuf> {
        (0..self.of).map(|node| self.source(node).join(name)).filter(|path| path.exists()).collect()
    }

    /// Returns the first node that has a file.
    pub fn node_of(&self, name: &str) -> u32 {
        (0..self.of).find(|node| self.source(*node).join(name).exists()).expect("some node has it")
    }

    /// Returns the folder for the output, which contains only DST and the work files beside it.
    pub fn dst_folder(&self) -> PathBuf {
        self.folder.path().join("results")
    }

    pub fn clear(&self) {
        fs::remove_dir_all(self.dst_folder()).unwrap();
        fs::create_dir(self.dst_folder()).unwrap();
    }

    /// Returns the command of process `rank`. `words` has the verb, the name of DST and options.
    pub fn command(&self, rank: u32, words: &str) -> Command {
        self.command_of(rank, self.of, words)
    }

    pub fn command_of(&self, rank: u32, of: u32, words: &str) -> Command {
        let more = format!("--source per-rank --part {rank} --parts {of}");
        let mut command = run(&self.source(rank), &self.dst_folder(), &format!("{words} {more}"));
        command.env("DTSHARD_FAULT", "none");
        command
    }

    /// Returns the command of a single process that sees all files. Its DST is in the folder of
    /// [`dst_folder`](Self::dst_folder).
    pub fn command_alone(&self, words: &str) -> Command {
        let mut command = run(&self.whole, &self.dst_folder(), &format!("{words} --parts 1"));
        command.env("DTSHARD_FAULT", "none");
        command
    }

    pub fn start(&self, rank: u32, words: &str) -> Child {
        self.command(rank, words).spawn().unwrap()
    }

    /// Runs all processes with the same `words`, and waits for them.
    pub fn run_together(&self, words: &str) -> Vec<Outcome> {
        self.run_each(|_| words.to_owned())
    }

    /// Runs all processes, each with the words that `words` returns for its number, and waits for them.
    pub fn run_each(&self, words: impl Fn(u32) -> String) -> Vec<Outcome> {
        wait_all((0..self.of).map(|rank| self.start(rank, &words(rank))))
    }

    /// Runs a single process that sees all files. Returns its output files and its outcome.
    pub fn run_alone(&self, words: &str) -> (Tree, Outcome) {
        let folder = tempfile::tempdir_in(self.folder.path()).unwrap();
        let outcome: Outcome =
            run(&self.whole, folder.path(), &format!("{words} --no-sync --parts 1")).output().unwrap().into();
        let made = names(folder.path());
        (made.first().map_or_else(Tree::new, |name| tree(&folder.path().join(name))), outcome)
    }

    /// Asserts that all processes together, with the additional options `more`, write the output that a single process
    /// writes, and leave no other files.
    #[track_caller]
    pub fn assert_equals_one_process(&self, words: &str, more: &str) {
        let (expected, outcome) = self.run_alone(words);
        outcome.assert_succeeded();
        assert!(!expected.is_empty());
        for outcome in self.run_together(&format!("{words} {more}")) {
            outcome.assert_succeeded();
        }
        self.assert_made(&expected, words);
    }

    #[track_caller]
    pub fn assert_made(&self, expected: &Tree, words: &str) {
        let dst = words.split(' ').nth(1).unwrap();
        assert_eq!(names(&self.dst_folder()), [dst], "{words}");
        let found = tree(&self.dst_folder().join(dst));
        let differing: Vec<_> = expected.keys().filter(|name| found.get(*name) != expected.get(*name)).collect();
        assert!(found == *expected, "{words}: {differing:?} of {:?} differ", found.keys());
    }
}

/// Returns a command. `words` has the verb, the name of DST and options. In options, `@` stands for the folder of the
/// fixtures. DST is in `folder`.
fn run(source: &Path, folder: &Path, words: &str) -> Command {
    let mut words = words.split_whitespace();
    let (verb, dst) = (words.next().unwrap(), words.next().unwrap());
    let mut command = command(&[&verb, &source, &folder.join(dst)]);
    command.args(words.map(|word| word.replace('@', fixture("").to_str().unwrap())));
    command
}

/// Waits for all processes, and asserts that they end within [`DEADLINE`].
#[track_caller]
pub fn wait_all(processes: impl IntoIterator<Item = Child>) -> Vec<Outcome> {
    let mut processes: Vec<Child> = processes.into_iter().collect();
    let until = Instant::now() + DEADLINE;
    let mut late = Vec::new();
    for (rank, process) in processes.iter_mut().enumerate() {
        while process.try_wait().unwrap().is_none() {
            if Instant::now() > until {
                late.push(rank);
                process.kill().unwrap();
                process.wait().unwrap();
            }
            sleep(Duration::from_millis(5));
        }
    }
    let outcomes: Vec<Outcome> =
        processes.into_iter().map(|process| process.wait_with_output().unwrap().into()).collect();
    assert!(late.is_empty(), "{late:?} did not end within {} s: {outcomes:?}", DEADLINE.as_secs());
    outcomes
}

#[track_caller]
pub fn assert_succeeded(outcome: &Outcome) {
    outcome.assert_succeeded();
}

#[track_caller]
pub fn assert_refused(outcome: &Outcome, words: &[&str]) {
    outcome.assert_refused(words);
}
