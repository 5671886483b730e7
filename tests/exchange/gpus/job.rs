//! Conversions by three processes with a device each, of which tests let one fail.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::nodes::{Nodes, Spread, Tree, assert_succeeded, names, tree};
use crate::outcome::{Outcome, command, copy_all, fixture};

/// The source, converted in enough rounds for several to be in flight.
const SOURCE: &str = "fsdp_tp/dcp";
const WORDS: &str = "reshard out --mesh tp=3 --placements S(1)";
const ROUNDS: &str = "--bucket-size 300";

pub const RANKS: u32 = 3;

/// The work folder in which the processes meet.
pub const MEETING: &str = ".out.dtshard-work";

/// The time limit of all processes, also on a loaded machine. Processes that wait for a missing process wait 10
/// seconds.
pub const DEADLINE: Duration = Duration::from_secs(45);

/// Environment variables of one process.
pub type Settings<'a> = &'a [(&'a str, &'a str)];

/// The files of SRC that each process sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visibility {
    All,
    /// Each process sees a third of the files.
    PerProcess,
}

impl Visibility {
    /// Returns the number of an NCCL group in the middle of the rounds, when journals have records. Earlier groups
    /// gather messages.
    pub fn group_of_a_round(self) -> u32 {
        match self {
            Self::All => 12,
            Self::PerProcess => 31,
        }
    }
}

pub const VISIBILITIES: [Visibility; 2] = [Visibility::All, Visibility::PerProcess];

pub struct Job {
    pub nodes: Nodes,
    visibility: Visibility,
    /// The folder where the loader finds the stand-in under the names of the libraries.
    libraries: TempDir,
    /// Environment variables of all processes.
    settings: Settings<'static>,
    /// The output of one process without devices.
    expected: Tree,
}

impl Job {
    pub fn new(visibility: Visibility) -> Self {
        Self::with(visibility, &[])
    }

    pub fn with(visibility: Visibility, settings: Settings<'static>) -> Self {
        let libraries = tempfile::tempdir().unwrap();
        let stand_in = std::env::current_exe().unwrap().with_file_name("libgpu_stand_in.so");
        for name in ["libcuda.so", "libnccl.so.2"] {
            symlink(&stand_in, libraries.path().join(name)).unwrap();
        }
        let nodes = Nodes::new(SOURCE, RANKS, Spread::One);
        let (expected, _) = nodes.run_alone(WORDS);
        Self { nodes, visibility, libraries, settings, expected }
    }

    /// Returns the command of one process, with more options and settings.
    pub fn command(&self, rank: u32, more: &str, settings: Settings<'_>) -> Command {
        let source = match self.visibility {
            Visibility::All => fixture(SOURCE),
            Visibility::PerProcess => self.nodes.source(rank),
        };
        self.command_of(rank, &source, more, settings)
    }

    /// Returns the command of one process with another SRC.
    pub fn command_of(&self, rank: u32, source: &Path, more: &str, settings: Settings<'_>) -> Command {
        let mut words = WORDS.split(' ');
        let (verb, dst) = (words.next().unwrap(), self.nodes.dst_folder().join(words.next().unwrap()));
        let visibility = match self.visibility {
            Visibility::All => "shared",
            Visibility::PerProcess => "per-rank",
        };
        let mut command = command(&[&verb, &source, &dst]);
        command.args(words).args(ROUNDS.split(' ')).args(["--source", visibility]);
        if !more.contains("--backend") {
            command.args(["--backend", "nccl"]);
        }
        command.args(["--part", &rank.to_string(), "--parts", &RANKS.to_string()]).args(more.split_whitespace());
        for name in ["CUDA_VISIBLE_DEVICES", "DTSHARD_NCCL_LIB", "DTSHARD_SHARE_GPU"] {
            command.env_remove(name);
        }
        command.env("LD_LIBRARY_PATH", self.libraries.path()).env("DTSHARD_FAULT", "none");
        command.env("GPU_STAND_IN_DEVICES", RANKS.to_string()).env("GPU_STAND_IN_DELAY_US", "30");
        command.envs(self.settings.iter().chain(settings).copied());
        command
    }

    /// Runs all processes, one of them with its own settings.
    pub fn run_with_one_different(&self, odd: u32, more: &str, settings: Settings<'_>) -> Vec<Outcome> {
        self.run_each(|rank| (more.to_owned(), if rank == odd { settings } else { &[] }))
    }

    pub fn run_each<'s>(&self, of: impl Fn(u32) -> (String, Settings<'s>)) -> Vec<Outcome> {
        wait_all((0..RANKS).map(|rank| {
            let (more, settings) = of(rank);
            self.command(rank, &more, settings).spawn().unwrap()
        }))
    }

    /// Asserts that DST does not exist, and that the run without the fault gives the expected output and leaves nothing
    /// else. Before it, the work folder may exist if the process that removes it was killed.
    #[track_caller]
    pub fn assert_done_with(&self, more: &str) {
        let left = names(&self.nodes.dst_folder());
        assert!(left.iter().all(|name| [".out.dtshard-partial", MEETING].contains(&name.as_str())), "{left:?}");
        self.run_each(|_| (more.to_owned(), &[])).iter().for_each(assert_succeeded);
        self.assert_made();
    }

    /// Asserts that DST has the output of one process, and nothing else is left, and removes it.
    #[track_caller]
    pub fn assert_made(&self) {
        self.nodes.assert_made(&self.expected, WORDS);
        self.nodes.clear();
    }

    /// Asserts that nothing was begun at DST, and that the same command succeeds.
    #[track_caller]
    pub fn assert_can_start_again(&self) {
        assert_eq!(names(&self.nodes.dst_folder()), [""; 0]);
        self.assert_done_with("");
    }

    /// Puts a checkpoint at DST, and returns its files.
    pub fn put_old_checkpoint(&self) -> Tree {
        let dst = self.nodes.dst_folder().join("out");
        copy_all(&fixture("fsdp4/dcp"), &dst);
        tree(&dst)
    }
}

/// Waits for all processes, and asserts that they end in time.
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

/// Asserts that all other processes exit with an error that names this one.
#[track_caller]
pub fn assert_others_name(outcomes: &[Outcome], gone: u32, words: &[&str]) {
    for (_, outcome) in (0..).zip(outcomes).filter(|(rank, _)| *rank != gone) {
        outcome.assert_refused(&[&format!("error: process {gone} of 3")]).assert_refused(words);
    }
}
