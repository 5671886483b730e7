//! Killed at every point where something is decided, alone and as one of three, on an empty place and on an old one.

use std::collections::BTreeSet;
use std::fs;

use dtshard::fault::POINTS;

use crate::job::{CAST, DCP, FILE, FOLDER, Job, Kind, RANKS, names, tree};

/// Which of the processes is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    /// There is only one.
    Alone,
    /// The first of three: the others have nobody to find.
    First,
    /// The last of three, which seals.
    Last,
}

impl Victim {
    fn of(self) -> u32 {
        if self == Self::Alone { 1 } else { 3 }
    }

    fn options(self) -> &'static str {
        match self {
            Self::Alone => "",
            Self::First => "--parts 3 --part 0 --no-wait",
            Self::Last => "--parts 3 --part 2 --no-wait",
        }
    }
}

/// What the old checkpoint holds: of another size, and the same files.
fn put_old(job: &Job) {
    let old = job.target();
    if job.kind == FILE {
        fs::copy(job.source().join("model_world_size_3_rank_0.pt"), &old).unwrap();
    } else {
        fs::create_dir(&old).unwrap();
        fs::copy(fixture_file(), old.join("model.safetensors")).unwrap();
    }
}

fn fixture_file() -> std::path::PathBuf {
    crate::outcome::fixture("safetensors/single/model.safetensors")
}

/// Kill `victim` at every point, look at what is there, and go on. Gives the points that were come by.
fn kill_everywhere(job: &Job, victim: Victim, overwrites: bool) -> BTreeSet<&'static str> {
    let overwrite = if overwrites { "--overwrite" } else { "" };
    let mut hit = BTreeSet::new();
    for point in POINTS {
        job.clear();
        let at = format!("{:?} {victim:?} {overwrite} {point}", job.kind);
        if overwrites {
            put_old(job);
        }
        let old = overwrites.then(|| tree(&job.target()));
        if victim == Victim::Last {
            for part in ["--part 1", "--part 0"] {
                job.run(&format!("--parts 3 --no-wait {part} {overwrite}"), Some("none")).succeeded();
            }
        }
        let ended = job.run(&format!("{} {overwrite}", victim.options()), Some(point));
        if ended.signal == Some(9) {
            hit.insert(point);
        } else {
            ended.succeeded();
        }

        // Old, nothing or new, and never anything else.
        if job.target().exists() {
            let found = tree(&job.target());
            assert!(Some(&found) == old.as_ref() || found == job.wanted, "{at}: {:?}", names(&job.desk()));
        } else if let Some(old) = old {
            let aside =
                job.desk().join(format!(".{}.dtshard-old", job.target().file_name().unwrap().to_str().unwrap()));
            assert!(point == "commit-moved-old" && tree(&aside) == old, "{at}: {:?}", names(&job.desk()));
        }
        job.source_is_whole(&at);

        job.run_parts(victim.of(), &format!("--resume {overwrite}"), Some("none"));
        job.is_done(&at);
    }
    hit
}

/// Every point but these was come by.
fn missed(hit: &BTreeSet<&str>) -> Vec<&'static str> {
    POINTS.into_iter().filter(|point| !hit.contains(point)).collect()
}

const OF_RESTARTS: [&str; 3] = ["restart-created-lease", "restart-judged", "restart-moved"];
const OF_SWAPS: [&str; 2] = ["commit-cleared", "commit-moved-old"];

fn kill_all(kind: Kind, ways: &[(Victim, bool)]) {
    let job = Job::new(kind);
    let carries = job.wanted.keys().any(|name| name.ends_with("config.json"));
    for (victim, overwrites) in ways.iter().copied() {
        let hit = kill_everywhere(&job, victim, overwrites);
        let is_expected = |point: &&str| match *point {
            "doubted" => true,
            point if OF_RESTARTS.contains(&point) => true,
            point if OF_SWAPS.contains(&point) => !overwrites || victim == Victim::First,
            "carried" => !carries || victim == Victim::Last,
            // Nothing is left for the one who is alone.
            "seal-summed" => victim != Victim::Last,
            point if point.starts_with("begin-") => victim == Victim::Last,
            point => (point.starts_with("commit-") || point.starts_with("seal-")) && victim == Victim::First,
        };
        let missed: Vec<&str> = missed(&hit).into_iter().filter(|point| !is_expected(point)).collect();
        assert!(missed.is_empty(), "{kind:?} {victim:?} {overwrites}: nobody came by {missed:?}");
    }
}

const ALL: [(Victim, bool); 6] = [
    (Victim::Alone, false),
    (Victim::Alone, true),
    (Victim::First, false),
    (Victim::First, true),
    (Victim::Last, false),
    (Victim::Last, true),
];

const SOME: [(Victim, bool); 2] = [(Victim::Alone, true), (Victim::Last, false)];

#[test]
fn a_file() {
    kill_all(FILE, &ALL);
}

#[test]
fn a_folder_with_files_that_go_along() {
    kill_all(FOLDER, &SOME);
}

#[test]
fn files_of_ranks() {
    kill_all(RANKS, &SOME);
}

#[test]
fn a_distributed_checkpoint() {
    kill_all(DCP, &ALL);
}

#[test]
fn a_cast() {
    kill_all(CAST, &SOME);
}

/// What --restart throws away is away, however often it is killed over it.
#[test]
fn throwing_away() {
    for kind in [FILE, FOLDER] {
        let job = Job::new(kind);
        for point in POINTS {
            job.clear();
            let at = format!("{kind:?} {point}");
            assert_eq!(job.run("--resume", Some("record-after")).signal, Some(9), "{at}");
            let ended = job.run("--restart", Some(point));
            let must_be_hit = OF_RESTARTS.contains(&point);
            assert!(ended.signal == Some(9) || !must_be_hit && ended.code == Some(0), "{at}: {ended:?}");
            job.run("--restart --overwrite", Some("none")).succeeded();
            job.is_done(&at);
        }
    }
}

/// One that was killed over its draft, while others were at work or had published, leaves nothing that lasts.
#[test]
fn over_a_draft_that_comes_late() {
    let job = Job::new(FOLDER);
    let draft = || fs::create_dir(job.desk().join(".out.dtshard-new-1f0c96a2b7d4")).unwrap();
    job.run("--parts 2 --part 0 --no-wait", None).succeeded();
    draft();
    job.run("--parts 2 --part 1 --no-wait", None).succeeded();
    job.is_done("beside others");
    draft();
    job.run("--resume", None).succeeded();
    job.is_done("behind others");
}
