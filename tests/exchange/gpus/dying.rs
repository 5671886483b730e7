//! A process is killed: before there is anything of NCCL, where ranks meet by it, in a round, and before the commit. The
//! others hear of it by its lease in the work folder, whether NCCL tells them or not.

use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::gpus::job::{Job, RANKS, SIGHTS, Settings, Sight, ended, others_name};
use crate::nodes::{names, succeeds, tree};

const STAND_IN: &str = "GPU_STAND_IN_FAULT";
const PROGRAM: &str = "DTSHARD_FAULT";
/// As over NVLink and shared memory.
const SILENT: Settings<'static> = &[("GPU_STAND_IN_LOST_PEERS", "silent")];

/// Each of these ranks in turn is killed there, where it comes by.
#[track_caller]
fn killed(job: &Job, fault: (&str, &str), ranks: &[u32], leaves: &[&str]) {
    let mut is_hit = false;
    for &gone in ranks {
        let outcomes = job.but(gone, "", &[fault]);
        if outcomes[gone as usize].signal.is_none() {
            outcomes.iter().for_each(succeeds);
            job.has_made();
            continue;
        }
        is_hit = true;
        assert_eq!(outcomes[gone as usize].signal, Some(9), "{fault:?} {outcomes:?}");
        others_name(&outcomes, gone, &["its process ended"]);
        // Nothing, too, where nobody had recorded anything.
        let left = names(&job.nodes.desk());
        assert!(left.iter().all(|name| leaves.contains(&name.as_str())), "{fault:?}: {left:?}");
        job.is_done_by(if leaves.is_empty() { "" } else { "--resume" });
    }
    assert!(is_hit, "{fault:?}: nobody came by");
}

#[test]
fn before_it_opens_nccl_stand_in() {
    SIGHTS.iter().for_each(|sight| killed(&Job::new(*sight), (STAND_IN, "dies-loading"), &[0, 2], &[]));
}

#[test]
fn while_it_meets_the_others_by_nccl_stand_in() {
    SIGHTS.iter().for_each(|sight| killed(&Job::new(*sight), (STAND_IN, "dies-meeting"), &[0, 1], &[]));
}

#[test]
fn in_the_middle_of_a_round_stand_in() {
    for settings in [&[], SILENT] {
        for sight in SIGHTS {
            let job = Job::with(sight, settings);
            for group in [1, sight.group_of_a_round()] {
                killed(&job, (STAND_IN, &format!("dies-in-group:{group}")), &[0, 1, 2], &[".out.dtshard-partial"]);
            }
        }
    }
}

#[test]
fn after_something_was_recorded_stand_in() {
    SIGHTS
        .iter()
        .for_each(|sight| killed(&Job::new(*sight), (PROGRAM, "record-after"), &[0, 2], &[".out.dtshard-partial"]));
}

/// Rank 0 publishes for all.
#[test]
fn before_the_commit_stand_in() {
    for sight in SIGHTS {
        let job = Job::new(sight);
        for point in ["seal-leased", "seal-summed", "commit-marked", "commit-synced"] {
            killed(&job, (PROGRAM, point), &[0], &[".out.dtshard-partial"]);
        }
    }
}

/// What was at DST is what is there.
#[test]
fn while_something_is_at_dst_stand_in() {
    let job = Job::new(Sight::Apart);
    let in_a_round = format!("dies-in-group:{}", Sight::Apart.group_of_a_round());
    for (fault, gone) in [((STAND_IN, "dies-meeting"), 1), ((STAND_IN, &*in_a_round), 2), ((PROGRAM, "seal-summed"), 0)]
    {
        let old = job.put_old();
        let outcomes = job.but(gone, "--overwrite", &[fault]);
        others_name(&outcomes, gone, &["its process ended"]);
        assert!(tree(&job.nodes.desk().join("out")) == old, "{fault:?}");
        job.each(|_| ("--overwrite --resume".to_owned(), &[])).iter().for_each(succeeds);
        job.has_made();
    }
}

/// Killed when nobody expects it.
#[test]
fn at_some_time_stand_in() {
    for (number, sight) in (0..16_u64).zip(SIGHTS.into_iter().cycle()) {
        let settings: Settings<'static> = if number % 4 < 2 { &[] } else { SILENT };
        let job = Job::with(sight, settings);
        let mut processes: Vec<Child> = (0..RANKS).map(|rank| job.command(rank, "", &[]).spawn().unwrap()).collect();
        sleep(Duration::from_millis(20 + 13 * number));
        let gone = u32::try_from(number).unwrap() % RANKS;
        processes[gone as usize].kill().unwrap();
        let outcomes = ended(processes);
        if job.nodes.desk().join("out").exists() {
            // It was published; who comes to know of the death in time says so.
            let others = (0..).zip(&outcomes).filter(|(rank, _)| *rank != gone);
            others.for_each(|(_, outcome)| assert!(matches!(outcome.code, Some(0 | 2)), "{outcome:?}"));
            // Rank 0 may have been the last one, and left something: the next run finds DST done, and takes that away.
            job.each(|_| ("--resume".to_owned(), &[])).iter().for_each(succeeds);
            job.has_made();
        } else {
            others_name(&outcomes, gone, &[]);
            job.is_done_by("--resume");
        }
    }
}

/// One gets TERM; all can be started again.
#[test]
fn stopped_stand_in() {
    let mut stopped = 0;
    for (number, sight) in (0..8_u64).zip(SIGHTS.into_iter().cycle()) {
        let job = Job::new(sight);
        let processes: Vec<Child> = (0..RANKS).map(|rank| job.command(rank, "", &[]).spawn().unwrap()).collect();
        let plan = job.nodes.desk().join(".out.dtshard-partial/plan.json");
        let begun = Instant::now();
        while !plan.exists() && begun.elapsed() < Duration::from_secs(10) {
            sleep(Duration::from_millis(1));
        }
        sleep(Duration::from_millis(4 * number));
        let told = usize::try_from(number % 3).unwrap();
        Command::new("kill").args(["-s", "TERM", &processes[told].id().to_string()]).status().unwrap();
        let outcomes = ended(processes);
        if job.nodes.desk().join("out").exists() {
            continue;
        }
        stopped += 1;
        for (rank, outcome) in outcomes.iter().enumerate() {
            // One that had not come to DST yet knows of nothing that is kept.
            assert!(matches!(outcome.code, Some(75 | 143)), "{rank} {outcome:?}");
            let whose = if rank == told {
                "stopped by TERM; ".to_owned()
            } else {
                format!("stopped by TERM at process {told} of 3")
            };
            outcome.says(&[&whose]);
        }
        job.is_done_by("--resume");
    }
    assert!(stopped > 0);
}

/// One does not answer any more, and is not dead: a node that is lost looks like that.
#[test]
fn hanging_stand_in() {
    let job = Job::new(Sight::Apart);
    let mut processes: Vec<Child> = (0..RANKS).map(|rank| job.command(rank, "", &[]).spawn().unwrap()).collect();
    let partial = job.nodes.desk().join(".out.dtshard-partial");
    let begun = Instant::now();
    while !partial.exists() && begun.elapsed() < Duration::from_secs(10) {
        sleep(Duration::from_millis(1));
    }
    let mut hung = processes.remove(1);
    Command::new("kill").args(["-s", "STOP", &hung.id().to_string()]).status().unwrap();
    let outcomes = ended(processes);
    hung.kill().unwrap();
    hung.wait().unwrap();
    for outcome in &outcomes {
        outcome.refused(&["error: process 1 of 3 (", "has not moved for 15 s"]);
    }
    job.is_done_by("--resume");
}
