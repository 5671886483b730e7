//! Tests of `--backend nccl` in which one process is killed: before it opens NCCL, while processes connect, in a round,
//! or before the commit. The other processes detect this by its lease in the work folder, even if NCCL does not report
//! it.

use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::gpus::job::{Job, RANKS, Settings, VISIBILITIES, Visibility, assert_others_name};
use crate::nodes::{assert_succeeded, names, tree, wait_all};

const STAND_IN: &str = "GPU_STAND_IN_FAULT";
const PROGRAM: &str = "DTSHARD_FAULT";
/// Makes the `gpu-stand-in` library behave like NVLink and shared memory, which do not report a lost peer.
const SILENT: Settings<'static> = &[("GPU_STAND_IN_LOST_PEERS", "silent")];

/// For each number in `ranks`, runs all processes and kills the process with this number at a crash point (`fault`).
/// Asserts that the other processes name it, and that no files except `leaves` remain. Then asserts that a new run
/// succeeds.
#[track_caller]
fn assert_named_when_killed(job: &Job, fault: (&str, &str), ranks: &[u32], leaves: &[&str]) {
    let mut is_hit = false;
    for &gone in ranks {
        let outcomes = job.run_with_one_different(gone, "", &[fault]);
        if outcomes[gone as usize].signal.is_none() {
            outcomes.iter().for_each(assert_succeeded);
            job.assert_made();
            continue;
        }
        is_hit = true;
        assert_eq!(outcomes[gone as usize].signal, Some(9), "{fault:?} {outcomes:?}");
        assert_others_name(&outcomes, gone, &["its process ended"]);
        // Files remain only if a process had already recorded work. A folder that the killed process was deleting may
        // also remain.
        let mut left = names(&job.nodes.dst_folder());
        left.retain(|name| !name.starts_with(".out.dtshard-gone-"));
        assert!(left.iter().all(|name| leaves.contains(&name.as_str())), "{fault:?}: {left:?}");
        job.assert_done_with(if leaves.is_empty() { "" } else { "--resume" });
    }
    assert!(is_hit, "{fault:?}: nobody came by");
}

#[test]
fn process_killed_before_opening_nccl_is_named_by_the_others() {
    VISIBILITIES.iter().for_each(|visibility| {
        assert_named_when_killed(&Job::new(*visibility), (STAND_IN, "dies-loading"), &[0, 2], &[]);
    });
}

#[test]
fn process_killed_while_connecting_nccl_is_named_by_the_others() {
    VISIBILITIES.iter().for_each(|visibility| {
        assert_named_when_killed(&Job::new(*visibility), (STAND_IN, "dies-meeting"), &[0, 1], &[]);
    });
}

#[test]
fn process_killed_in_a_round_is_named_by_the_others() {
    for settings in [&[], SILENT] {
        for visibility in VISIBILITIES {
            let job = Job::with(visibility, settings);
            for group in [1, visibility.group_of_a_round()] {
                assert_named_when_killed(
                    &job,
                    (STAND_IN, &format!("dies-in-group:{group}")),
                    &[0, 1, 2],
                    &[".out.dtshard-partial"],
                );
            }
        }
    }
}

#[test]
fn process_killed_after_a_record_is_named_by_the_others() {
    VISIBILITIES.iter().for_each(|visibility| {
        assert_named_when_killed(&Job::new(*visibility), (PROGRAM, "record-after"), &[0, 2], &[".out.dtshard-partial"]);
    });
}

/// Process 0 is killed, because it publishes the output of all processes.
#[test]
fn process_killed_before_the_commit_publishes_nothing() {
    for visibility in VISIBILITIES {
        let job = Job::new(visibility);
        for point in ["seal-leased", "seal-summed", "commit-marked", "commit-synced"] {
            assert_named_when_killed(&job, (PROGRAM, point), &[0], &[".out.dtshard-partial"]);
        }
    }
}

/// A run with `--overwrite` is killed, and DST still has the old checkpoint.
#[test]
fn process_killed_with_overwrite_leaves_the_old_checkpoint() {
    let job = Job::new(Visibility::PerProcess);
    let in_a_round = format!("dies-in-group:{}", Visibility::PerProcess.group_of_a_round());
    for (fault, gone) in [((STAND_IN, "dies-meeting"), 1), ((STAND_IN, &*in_a_round), 2), ((PROGRAM, "seal-summed"), 0)]
    {
        let old = job.put_old_checkpoint();
        let outcomes = job.run_with_one_different(gone, "--overwrite", &[fault]);
        assert_others_name(&outcomes, gone, &["its process ended"]);
        assert!(tree(&job.nodes.dst_folder().join("out")) == old, "{fault:?}");
        job.run_each(|_| ("--overwrite --resume".to_owned(), &[])).iter().for_each(assert_succeeded);
        job.assert_made();
    }
}

/// One process is killed after a different time in each run.
#[test]
fn process_killed_at_any_time_publishes_all_or_nothing() {
    for (number, visibility) in (0..16_u64).zip(VISIBILITIES.into_iter().cycle()) {
        let settings: Settings<'static> = if number % 4 < 2 { &[] } else { SILENT };
        let job = Job::with(visibility, settings);
        let mut processes: Vec<Child> = (0..RANKS).map(|rank| job.command(rank, "", &[]).spawn().unwrap()).collect();
        sleep(Duration::from_millis(20 + 13 * number));
        let gone = u32::try_from(number).unwrap() % RANKS;
        processes[gone as usize].kill().unwrap();
        let outcomes = wait_all(processes);
        if job.nodes.dst_folder().join("out").exists() {
            // The output was published before the kill took effect. A process that detected the kill earlier reports it
            // as an error.
            let others = (0..).zip(&outcomes).filter(|(rank, _)| *rank != gone);
            others.for_each(|(_, outcome)| assert!(matches!(outcome.code, Some(0 | 2)), "{outcome:?}"));
            // If rank 0 was killed as the last process, its files remain. The next run finds that DST is complete, and
            // removes them.
            job.run_each(|_| ("--resume".to_owned(), &[])).iter().for_each(assert_succeeded);
            job.assert_made();
        } else {
            assert_others_name(&outcomes, gone, &[]);
            job.assert_done_with("--resume");
        }
    }
}

/// One process gets the signal TERM, so all processes stop. They can be started again.
#[test]
fn process_stopped_by_term_ends_all_and_resume_completes() {
    let mut stopped = 0;
    for (number, visibility) in (0..8_u64).zip(VISIBILITIES.into_iter().cycle()) {
        let job = Job::new(visibility);
        let processes: Vec<Child> = (0..RANKS).map(|rank| job.command(rank, "", &[]).spawn().unwrap()).collect();
        let plan = job.nodes.dst_folder().join(".out.dtshard-partial/plan.json");
        let begun = Instant::now();
        while !plan.exists() && begun.elapsed() < Duration::from_secs(10) {
            sleep(Duration::from_millis(1));
        }
        sleep(Duration::from_millis(4 * number));
        let signalled = usize::try_from(number % 3).unwrap();
        Command::new("kill").args(["-s", "TERM", &processes[signalled].id().to_string()]).status().unwrap();
        let outcomes = wait_all(processes);
        if job.nodes.dst_folder().join("out").exists() {
            continue;
        }
        stopped += 1;
        for (rank, outcome) in outcomes.iter().enumerate() {
            // A process that has not yet opened the partial folder does not know that work is kept, so its exit code is
            // different.
            assert!(matches!(outcome.code, Some(75 | 143)), "{rank} {outcome:?}");
            let whose = if rank == signalled {
                "stopped by TERM; ".to_owned()
            } else {
                format!("stopped by TERM at process {signalled} of 3")
            };
            outcome.assert_mentions(&[&whose]);
        }
        job.assert_done_with("--resume");
    }
    assert!(stopped > 0);
}

/// One process stops answering but is alive. The process of a lost node looks the same to the other processes.
#[test]
fn hanging_process_is_named_by_the_others() {
    let job = Job::new(Visibility::PerProcess);
    let mut processes: Vec<Child> = (0..RANKS).map(|rank| job.command(rank, "", &[]).spawn().unwrap()).collect();
    let partial = job.nodes.dst_folder().join(".out.dtshard-partial");
    let begun = Instant::now();
    while !partial.exists() && begun.elapsed() < Duration::from_secs(10) {
        sleep(Duration::from_millis(1));
    }
    let mut hung = processes.remove(1);
    Command::new("kill").args(["-s", "STOP", &hung.id().to_string()]).status().unwrap();
    let outcomes = wait_all(processes);
    hung.kill().unwrap();
    hung.wait().unwrap();
    for outcome in &outcomes {
        outcome.assert_refused(&["error: process 1 of 3 (", "has made no progress for 15 s"]);
    }
    job.assert_done_with("--resume");
}
