//! Conversions by three processes, each with a GPU of the `gpu-stand-in` library, which replaces CUDA and NCCL. Tests
//! let one of the processes fail.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::nodes::{Nodes, Spread, Tree, assert_succeeded, names, tree, wait_all};
use crate::outcome::{Outcome, command, copy_all, fixture};

/// The fixture that is converted. With `ROUNDS`, the conversion takes so many rounds that several of them are in
/// progress at once.
const SOURCE: &str = "fsdp_tp/dcp";
const WORDS: &str = "reshard out --mesh tp=3 --placements S(1)";
const ROUNDS: &str = "--bucket-size 300";

pub const RANKS: u32 = 3;

/// The name of the work folder, in which the processes exchange messages.
pub const MEETING: &str = ".out.dtshard-work";

/// Environment variables of one process.
pub type Settings<'a> = &'a [(&'a str, &'a str)];

/// The files of SRC that a process sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visibility {
    All,
    /// Each process sees one third of the files of SRC.
    PerProcess,
}

impl Visibility {
    /// Returns the number, counted from 1, of an NCCL group call in the middle of the rounds, when journals have
    /// records. Earlier group calls only gather messages.
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
    /// The folder in which the loader finds the `gpu-stand-in` library, under the names of the CUDA and NCCL libraries.
    libraries: TempDir,
    /// Environment variables that all processes get.
    settings: Settings<'static>,
    /// The files that a single process without a GPU writes.
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

    /// Returns the command of process `rank`, with additional options `more` and environment variables `settings`.
    pub fn command(&self, rank: u32, more: &str, settings: Settings<'_>) -> Command {
        let source = match self.visibility {
            Visibility::All => fixture(SOURCE),
            Visibility::PerProcess => self.nodes.source(rank),
        };
        self.command_of(rank, &source, more, settings)
    }

    /// Returns the command of process `rank` like [`Self::command`], but for another SRC.
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

    /// Runs all processes. Only process `odd` gets the environment variables `settings`.
    pub fn run_with_one_different(&self, odd: u32, more: &str, settings: Settings<'_>) -> Vec<Outcome> {
        self.run_each(|rank| (more.to_owned(), if rank == odd { settings } else { &[] }))
    }

    pub fn run_each<'s>(&self, of: impl Fn(u32) -> (String, Settings<'s>)) -> Vec<Outcome> {
        wait_all((0..RANKS).map(|rank| {
            let (more, settings) = of(rank);
            self.command(rank, &more, settings).spawn().unwrap()
        }))
    }

    /// Asserts that a failed run left only its partial folder or work folder, and no DST. Then runs the command without
    /// the fault, and asserts that it gives the expected output and leaves no other files.
    #[track_caller]
    pub fn assert_done_with(&self, more: &str) {
        let mut left = names(&self.nodes.dst_folder());
        // A killed process may have been deleting this folder.
        left.retain(|name| !name.starts_with(".out.dtshard-gone-"));
        assert!(left.iter().all(|name| [".out.dtshard-partial", MEETING].contains(&name.as_str())), "{left:?}");
        self.run_each(|_| (more.to_owned(), &[])).iter().for_each(assert_succeeded);
        self.assert_made();
    }

    /// Asserts that DST has the expected output and that no other files remain. Then removes DST.
    #[track_caller]
    pub fn assert_made(&self) {
        self.nodes.assert_made(&self.expected, WORDS);
        self.nodes.clear();
    }

    /// Asserts that the failed run left no files, and that the same command succeeds without the fault.
    #[track_caller]
    pub fn assert_can_start_again(&self) {
        assert_eq!(names(&self.nodes.dst_folder()), [""; 0]);
        self.assert_done_with("");
    }

    /// Copies an old checkpoint to DST, and returns its files.
    pub fn put_old_checkpoint(&self) -> Tree {
        let dst = self.nodes.dst_folder().join("out");
        copy_all(&fixture("fsdp4/dcp"), &dst);
        tree(&dst)
    }
}

/// Asserts that all processes except `gone` exit with an error that names process `gone`.
#[track_caller]
pub fn assert_others_name(outcomes: &[Outcome], gone: u32, words: &[&str]) {
    for (_, outcome) in (0..).zip(outcomes).filter(|(rank, _)| *rank != gone) {
        outcome.assert_refused(&[&format!("error: process {gone} of 3")]).assert_refused(words);
    }
}
