//! A checkpoint whose files lie on several nodes: folders of which each process is given one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use tempfile::TempDir;

use crate::outcome::{Outcome, command, files_of, fixture};
pub use crate::tree::{Tree, names, tree};

/// How many nodes have each file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    One,
    Two,
}

/// Nodes, and a desk for what is made.
pub struct Nodes {
    folder: TempDir,
    pub of: u32,
    whole: PathBuf,
    name: &'static str,
}

impl Nodes {
    /// The files of a fixture, dealt out in the order of their names.
    pub fn new(source: &'static str, of: u32, spread: Spread) -> Self {
        Self::dealt(source, of, spread)
    }

    fn dealt(source: &'static str, of: u32, spread: Spread) -> Self {
        // Runs of several processes sync, which takes no time where nothing has to go to a disk.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let name = source.rsplit('/').next().unwrap();
        let nodes = Self { folder, of, whole: fixture(source), name };
        fs::create_dir(nodes.desk()).unwrap();
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

    /// Put a file of the whole checkpoint on a node.
    pub fn copy(&self, file: &Path, node: u32) {
        let below = file.strip_prefix(&self.whole).unwrap();
        let to = if below.as_os_str().is_empty() { self.source(node) } else { self.source(node).join(below) };
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(file, &to).unwrap();
        // As of a copy that keeps the time: whoever goes on may see another one.
        let copied = fs::File::options().write(true).open(&to).unwrap();
        copied.set_modified(file.metadata().unwrap().modified().unwrap()).unwrap();
    }

    fn node(&self, node: u32) -> PathBuf {
        self.folder.path().join(format!("node{node}"))
    }

    /// SRC of the process on a node.
    pub fn source(&self, node: u32) -> PathBuf {
        self.node(node).join(self.name)
    }

    /// Every copy of a file.
    pub fn copies(&self, name: &str) -> Vec<PathBuf> {
        (0..self.of).map(|node| self.source(node).join(name)).filter(|path| path.exists()).collect()
    }

    /// The node that has a file.
    pub fn home(&self, name: &str) -> u32 {
        (0..self.of).find(|node| self.source(*node).join(name).exists()).expect("some node has it")
    }

    /// The folder with the destination, and nothing else.
    pub fn desk(&self) -> PathBuf {
        self.folder.path().join("desk")
    }

    pub fn clear(&self) {
        fs::remove_dir_all(self.desk()).unwrap();
        fs::create_dir(self.desk()).unwrap();
    }

    /// The command of one process. `words` are the verb, DST's name and options.
    pub fn command(&self, rank: u32, words: &str) -> Command {
        self.command_of(rank, self.of, words)
    }

    pub fn command_of(&self, rank: u32, of: u32, words: &str) -> Command {
        let more = format!("--source per-rank --part {rank} --parts {of}");
        let mut command = run(&self.source(rank), &self.desk(), &format!("{words} {more}"));
        command.env("DTSHARD_FAULT", "none");
        command
    }

    /// The command of one process that sees everything, for the same destination.
    pub fn command_alone(&self, words: &str) -> Command {
        let mut command = run(&self.whole, &self.desk(), &format!("{words} --parts 1"));
        command.env("DTSHARD_FAULT", "none");
        command
    }

    pub fn start(&self, rank: u32, words: &str) -> Child {
        self.command(rank, words).spawn().unwrap()
    }

    /// All of them, to the end.
    pub fn together(&self, words: &str) -> Vec<Outcome> {
        self.each(|_| words.to_owned())
    }

    /// All of them, each with words of its own.
    pub fn each(&self, words: impl Fn(u32) -> String) -> Vec<Outcome> {
        ended((0..self.of).map(|rank| self.start(rank, &words(rank))))
    }

    /// What one process does that sees everything: what it writes, and how it ends.
    pub fn alone(&self, words: &str) -> (Tree, Outcome) {
        let desk = tempfile::tempdir_in(self.folder.path()).unwrap();
        let outcome: Outcome =
            run(&self.whole, desk.path(), &format!("{words} --no-sync --parts 1")).output().unwrap().into();
        let made = names(desk.path());
        (made.first().map_or_else(Tree::new, |name| tree(&desk.path().join(name))), outcome)
    }

    /// All processes together make what one makes, and leave nothing else.
    #[track_caller]
    pub fn agree(&self, words: &str, more: &str) {
        let (wanted, outcome) = self.alone(words);
        outcome.succeeded();
        assert!(!wanted.is_empty());
        for outcome in self.together(&format!("{words} {more}")) {
            outcome.succeeded();
        }
        self.has_made(&wanted, words);
    }

    #[track_caller]
    pub fn has_made(&self, wanted: &Tree, words: &str) {
        let dst = words.split(' ').nth(1).unwrap();
        assert_eq!(names(&self.desk()), [dst], "{words}");
        let found = tree(&self.desk().join(dst));
        let differing: Vec<_> = wanted.keys().filter(|name| found.get(*name) != wanted.get(*name)).collect();
        assert!(found == *wanted, "{words}: {differing:?} of {:?} differ", found.keys());
    }
}

/// `words` are the verb, the name of DST, and options, in which `@` stands for the folder of fixtures.
fn run(source: &Path, desk: &Path, words: &str) -> Command {
    let mut words = words.split_whitespace();
    let (verb, dst) = (words.next().unwrap(), words.next().unwrap());
    let mut command = command(&[&verb, &source, &desk.join(dst)]);
    command.args(words.map(|word| word.replace('@', fixture("").to_str().unwrap())));
    command
}

pub fn ended(processes: impl IntoIterator<Item = Child>) -> Vec<Outcome> {
    let processes: Vec<Child> = processes.into_iter().collect();
    processes.into_iter().map(|process| process.wait_with_output().unwrap().into()).collect()
}

#[track_caller]
pub fn succeeds(outcome: &Outcome) {
    outcome.succeeded();
}

#[track_caller]
pub fn refuses(outcome: &Outcome, words: &[&str]) {
    outcome.refused(words);
}
