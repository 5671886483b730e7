//! Three processes with a device each, of which one is to go wrong.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::nodes::{Nodes, Spread, Tree, names, succeeds, tree};
use crate::outcome::{Outcome, command, copy_all, fixture};

/// What is converted, in enough rounds for several to be under way.
const SOURCE: &str = "fsdp_tp/dcp";
const WORDS: &str = "reshard out --mesh tp=3 --placements S(1)";
const ROUNDS: &str = "--bucket-size 300";

pub const RANKS: u32 = 3;

/// Where they meet.
pub const MEETING: &str = ".out.dtshard-work";

/// When all have ended, however much else the machine does. Those that wait for one that never comes, wait 10 seconds.
pub const DEADLINE: Duration = Duration::from_secs(45);

/// Variables of one process.
pub type Settings<'a> = &'a [(&'a str, &'a str)];

/// Who sees SRC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    All,
    /// Each a third of the files.
    Apart,
}

impl Sight {
    /// A group of NCCL in the middle of the rounds, when journals have records. The groups before gather words.
    pub fn group_of_a_round(self) -> u32 {
        match self {
            Self::All => 12,
            Self::Apart => 31,
        }
    }
}

pub const SIGHTS: [Sight; 2] = [Sight::All, Sight::Apart];

pub struct Job {
    pub nodes: Nodes,
    sight: Sight,
    /// Where the loader finds the stand-in under the names of the libraries.
    libraries: TempDir,
    /// Of all processes.
    settings: Settings<'static>,
    /// What one process makes, without devices.
    wanted: Tree,
}

impl Job {
    pub fn new(sight: Sight) -> Self {
        Self::with(sight, &[])
    }

    pub fn with(sight: Sight, settings: Settings<'static>) -> Self {
        let libraries = tempfile::tempdir().unwrap();
        let stand_in = std::env::current_exe().unwrap().with_file_name("libgpu_stand_in.so");
        for name in ["libcuda.so", "libnccl.so.2"] {
            symlink(&stand_in, libraries.path().join(name)).unwrap();
        }
        let nodes = Nodes::new(SOURCE, RANKS, Spread::One);
        let (wanted, _) = nodes.alone(WORDS);
        Self { nodes, sight, libraries, settings, wanted }
    }

    /// One process, with more options and settings.
    pub fn command(&self, rank: u32, more: &str, settings: Settings<'_>) -> Command {
        let source = match self.sight {
            Sight::All => fixture(SOURCE),
            Sight::Apart => self.nodes.source(rank),
        };
        self.command_of(rank, &source, more, settings)
    }

    /// With another SRC.
    pub fn command_of(&self, rank: u32, source: &Path, more: &str, settings: Settings<'_>) -> Command {
        let mut words = WORDS.split(' ');
        let (verb, dst) = (words.next().unwrap(), self.nodes.desk().join(words.next().unwrap()));
        let sight = match self.sight {
            Sight::All => "shared",
            Sight::Apart => "per-rank",
        };
        let mut command = command(&[&verb, &source, &dst]);
        command.args(words).args(ROUNDS.split(' ')).args(["--source", sight]);
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

    /// All of them, of which one has settings of its own.
    pub fn but(&self, odd: u32, more: &str, settings: Settings<'_>) -> Vec<Outcome> {
        self.each(|rank| (more.to_owned(), if rank == odd { settings } else { &[] }))
    }

    pub fn each<'s>(&self, of: impl Fn(u32) -> (String, Settings<'s>)) -> Vec<Outcome> {
        ended((0..RANKS).map(|rank| {
            let (more, settings) = of(rank);
            self.command(rank, &more, settings).spawn().unwrap()
        }))
    }

    /// DST is not there, and the same without the fault makes what one process makes and leaves nothing else. Until then
    /// the meeting place may be there, where who looks after it was killed.
    #[track_caller]
    pub fn is_done_by(&self, more: &str) {
        let left = names(&self.nodes.desk());
        assert!(left.iter().all(|name| [".out.dtshard-partial", MEETING].contains(&name.as_str())), "{left:?}");
        self.each(|_| (more.to_owned(), &[])).iter().for_each(succeeds);
        self.has_made();
    }

    /// What one process makes, and nothing else; takes it away.
    #[track_caller]
    pub fn has_made(&self) {
        self.nodes.has_made(&self.wanted, WORDS);
        self.nodes.clear();
    }

    /// Nothing was begun at DST, so the same command can be given again.
    #[track_caller]
    pub fn is_done_anew(&self) {
        assert_eq!(names(&self.nodes.desk()), [""; 0]);
        self.is_done_by("");
    }

    /// Put a checkpoint at DST.
    pub fn put_old(&self) -> Tree {
        let dst = self.nodes.desk().join("out");
        copy_all(&fixture("fsdp4/dcp"), &dst);
        tree(&dst)
    }
}

/// How all end, which they do in time.
#[track_caller]
pub fn ended(processes: impl IntoIterator<Item = Child>) -> Vec<Outcome> {
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

/// All but one are refused, with words that name that one.
#[track_caller]
pub fn others_name(outcomes: &[Outcome], gone: u32, words: &[&str]) {
    for (_, outcome) in (0..).zip(outcomes).filter(|(rank, _)| *rank != gone) {
        outcome.refused(&[&format!("error: process {gone} of 3")]).refused(words);
    }
}
