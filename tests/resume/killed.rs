//! Tests of runs that are killed at every crash point (positions in the code): as the only process and as one of three
//! parts, with and without an existing destination.

use std::collections::BTreeSet;
use std::fs;

use dtshard::fault::POINTS;

use crate::job::{CAST, DCP, FILE, FOLDER, Job, Kind, RANKS, names, tree};

/// The process of a run that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    /// The only process of the run.
    Alone,
    /// The first of three parts. No other part has run before.
    First,
    /// The last of three parts, which seals the output. The other parts have run before.
    Last,
}

impl Victim {
    fn parts(self) -> u32 {
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

/// Writes an old checkpoint to DST. It has the same file names as the output, but other sizes.
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

/// Runs the job once for each crash point, kills `victim` there, checks the files that remain, and resumes the run.
/// Returns the crash points that were reached.
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
                job.run(&format!("--parts 3 --no-wait {part} {overwrite}"), Some("none")).assert_succeeded();
            }
        }
        let ended = job.run(&format!("{} {overwrite}", victim.options()), Some(point));
        if ended.signal == Some(9) {
            hit.insert(point);
        } else {
            ended.assert_succeeded();
        }

        // DST must have the complete old checkpoint or the complete new checkpoint, or must not exist.
        if job.target().exists() {
            let found = tree(&job.target());
            assert!(Some(&found) == old.as_ref() || found == job.expected, "{at}: {:?}", names(&job.dst_folder()));
        } else if let Some(old) = old {
            let aside =
                job.dst_folder().join(format!(".{}.dtshard-old", job.target().file_name().unwrap().to_str().unwrap()));
            assert!(point == "commit-moved-old" && tree(&aside) == old, "{at}: {:?}", names(&job.dst_folder()));
        }
        job.assert_source_unchanged(&at);

        job.run_parts(victim.parts(), &format!("--resume {overwrite}"), Some("none"));
        job.assert_done(&at);
    }
    hit
}

/// Returns the crash points that are not in `hit`.
fn points_not_reached(hit: &BTreeSet<&str>) -> Vec<&'static str> {
    POINTS.into_iter().filter(|point| !hit.contains(point)).collect()
}

const OF_RESTARTS: [&str; 3] = ["restart-created-lease", "restart-examined", "restart-moved"];
const OF_SWAPS: [&str; 2] = ["commit-cleared", "commit-moved-old"];

fn assert_resumes_after_kills(kind: Kind, ways: &[(Victim, bool)]) {
    let job = Job::new(kind);
    let carries = job.expected.keys().any(|name| name.ends_with("config.json"));
    for (victim, overwrites) in ways.iter().copied() {
        let hit = kill_everywhere(&job, victim, overwrites);
        let is_expected = |point: &&str| match *point {
            "invalidated" => true,
            point if OF_RESTARTS.contains(&point) => true,
            point if OF_SWAPS.contains(&point) => !overwrites || victim == Victim::First,
            "carried" => !carries || victim == Victim::Last,
            // A single process has nothing to do at this crash point.
            "seal-summed" => victim != Victim::Last,
            point if point.starts_with("begin-") => victim == Victim::Last,
            point => (point.starts_with("commit-") || point.starts_with("seal-")) && victim == Victim::First,
        };
        let missed: Vec<&str> = points_not_reached(&hit).into_iter().filter(|point| !is_expected(point)).collect();
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
fn file_killed_at_every_point_is_resumed() {
    assert_resumes_after_kills(FILE, &ALL);
}

#[test]
fn folder_with_sidecar_files_killed_at_every_point_is_resumed() {
    assert_resumes_after_kills(FOLDER, &SOME);
}

#[test]
fn rank_files_killed_at_every_point_are_resumed() {
    assert_resumes_after_kills(RANKS, &SOME);
}

#[test]
fn dcp_killed_at_every_point_is_resumed() {
    assert_resumes_after_kills(DCP, &ALL);
}

#[test]
fn cast_killed_at_every_point_is_resumed() {
    assert_resumes_after_kills(CAST, &SOME);
}

/// `--restart` discards the work of an earlier run, even if the run with `--restart` is killed while it does so.
#[test]
fn restart_killed_at_every_point_discards_the_work() {
    for kind in [FILE, FOLDER] {
        let job = Job::new(kind);
        for point in POINTS {
            job.clear();
            let at = format!("{kind:?} {point}");
            assert_eq!(job.run("--resume", Some("record-after")).signal, Some(9), "{at}");
            let ended = job.run("--restart", Some(point));
            let must_be_hit = OF_RESTARTS.contains(&point);
            assert!(ended.signal == Some(9) || !must_be_hit && ended.code == Some(0), "{at}: {ended:?}");
            job.run("--restart --overwrite", Some("none")).assert_succeeded();
            job.assert_done(&at);
        }
    }
}

/// A process was killed after it had created its temporary folder, while other processes worked or after they had
/// published. The next run removes the folder.
#[test]
fn leftover_temporary_folder_is_removed() {
    let job = Job::new(FOLDER);
    let draft = || fs::create_dir(job.dst_folder().join(".out.dtshard-new-1f0c96a2b7d4")).unwrap();
    job.run("--parts 2 --part 0 --no-wait", None).assert_succeeded();
    draft();
    job.run("--parts 2 --part 1 --no-wait", None).assert_succeeded();
    job.assert_done("beside others");
    draft();
    job.run("--resume", None).assert_succeeded();
    job.assert_done("behind others");
}
