//! Tests of `--backend nccl` in which one process fails or gets other options: it reports the reason, and the other
//! processes name it and repeat the reason.

use std::fs;

use crate::gpus::job::{Job, RANKS, VISIBILITIES, Visibility, assert_others_name};
use crate::nodes::{assert_refused, assert_succeeded, names, wait_all};
use crate::outcome::fixture;

/// Runs all processes once for each process, which then has the fault. If the fault happens, asserts that the errors of
/// all processes contain `words`, that no files except `leaves` remain, and that a new run succeeds.
#[track_caller]
fn assert_named_when_failed(job: &Job, fault: &str, words: &[&str], leaves: &[&str]) {
    let mut is_hit = false;
    for odd in 0..RANKS {
        let outcomes = job.run_with_one_different(odd, "", &[("GPU_STAND_IN_FAULT", fault)]);
        // A process may not reach the crash point; then all processes succeed.
        if outcomes[odd as usize].code == Some(0) {
            outcomes.iter().for_each(assert_succeeded);
            job.assert_made();
            continue;
        }
        is_hit = true;
        outcomes[odd as usize].assert_refused(words);
        assert_others_name(&outcomes, odd, words);
        // Files remain only if a process had already recorded work.
        let left = names(&job.nodes.dst_folder());
        assert!(left.iter().all(|name| leaves.contains(&name.as_str())), "{fault}: {left:?}");
        job.assert_done_with(if leaves.is_empty() { "" } else { "--resume" });
    }
    assert!(is_hit, "{fault}: nobody came by");
}

#[test]
fn failed_device_allocation_is_named_by_all() {
    for visibility in VISIBILITIES {
        let job = Job::new(visibility);
        for fault in ["refuses-memory", "refuses-memory:2", "refuses-memory:4"] {
            assert_named_when_failed(
                &job,
                fault,
                &["GPU: allocate memory: ", "out of memory", " free"],
                &[".out.dtshard-partial"],
            );
        }
    }
}

#[test]
fn failed_pinned_allocation_is_named_by_all() {
    for visibility in VISIBILITIES {
        let job = Job::new(visibility);
        for fault in ["refuses-pinned", "refuses-pinned:2", "refuses-pinned:3"] {
            let words = ["GPU: allocate memory: ", "for pinned memory: out of memory"];
            assert_named_when_failed(&job, fault, &words, &[".out.dtshard-partial"]);
        }
    }
}

/// A call of NCCL fails in one process, although all processes are alive.
#[test]
fn failed_nccl_call_is_named_by_all() {
    for visibility in VISIBILITIES {
        let job = Job::new(visibility);
        assert_named_when_failed(&job, "fails-meeting", &["meet by NCCL: ", "injected network failure"], &[]);
        for group in [1, visibility.group_of_a_round()] {
            let words = ["GPU: ", "(ncclSystemError)", "injected network failure"];
            assert_named_when_failed(&job, &format!("fails-in-group:{group}"), &words, &[".out.dtshard-partial"]);
        }
    }
}

#[test]
fn different_options_of_one_process_are_refused() {
    for visibility in VISIBILITIES {
        let job = Job::new(visibility);
        let outcomes = job.run_each(|rank| (if rank == 1 { "--dtype bf16" } else { "" }.to_owned(), &[]));
        for outcome in &outcomes {
            outcome.assert_refused(&[
                "process 1 of 3 (",
                "): plan: it differs from the plan of process 0",
                "hint: start all processes",
            ]);
        }
        job.assert_can_start_again();
        let outcomes = job.run_each(|rank| (if rank == 1 { "--bucket-size 400" } else { "" }.to_owned(), &[]));
        for outcome in &outcomes {
            outcome.assert_refused(&[
                "--bucket-size differs between processes: process 1 of 3: 400; process 0: 300",
                "hint: start all processes",
            ]);
        }
        job.assert_can_start_again();
        let outcomes = job.run_each(|rank| (if rank == 2 { "--include nothing" } else { "" }.to_owned(), &[]));
        outcomes[2].assert_refused(&["nothing"]);
        assert_others_name(&outcomes, 2, &["nothing"]);
        job.assert_can_start_again();
    }
}

/// After a failed run, all processes may resume with another bucket size, which changes the size of rounds.
#[test]
fn resume_with_another_bucket_size_succeeds() {
    for visibility in VISIBILITIES {
        let job = Job::new(visibility);
        let fault = format!("fails-in-group:{}", visibility.group_of_a_round());
        let outcomes = job.run_with_one_different(1, "", &[("GPU_STAND_IN_FAULT", &fault)]);
        assert_others_name(&outcomes, 1, &["injected network failure"]);
        job.assert_done_with("--resume --bucket-size 500");
    }
}

/// The SRC of one process has the name of the right source, but other tensors.
#[test]
fn different_source_of_one_process_is_refused() {
    let job = Job::new(Visibility::All);
    let others = fixture("fsdp4/dcp");
    let outcomes = wait_all((0..3).map(|rank| {
        let command = if rank == 1 { job.command_of(rank, &others, "", &[]) } else { job.command(rank, "", &[]) };
        { command }.spawn().unwrap()
    }));
    for outcome in &outcomes {
        outcome.assert_refused(&["process 1 of 3 (", "): plan: it differs from the plan of process 0"]);
    }
    // A process that receives the failure of another process before it compares the plans itself prints no hint. At least
    // one process prints the hint.
    assert!(outcomes.iter().any(|outcome| outcome.err.contains("hint: start all processes")), "{outcomes:?}");
    job.assert_can_start_again();
}

#[test]
fn missing_process_is_named_by_the_others() {
    for visibility in VISIBILITIES {
        let job = Job::new(visibility);
        let outcomes = wait_all((0..2).map(|rank| job.command(rank, "", &[]).spawn().unwrap()));
        for outcome in outcomes {
            outcome.assert_refused(&["process 2 of 3: ", "did not connect within 10 s", "hint: start all processes"]);
        }
        // The messages that were written for the missing process remain in the work folder, and do not block the next
        // run.
        job.assert_done_with("");
    }
}

#[test]
fn truncated_file_is_named_by_all() {
    let job = Job::new(Visibility::PerProcess);
    let name = job.nodes.source(1).read_dir().unwrap().flatten().map(|entry| entry.path());
    let data = name.into_iter().find(|path| path.extension().is_some_and(|suffix| suffix == "distcp")).unwrap();
    let whole = fs::read(&data).unwrap();
    fs::write(&data, &whole[..whole.len() / 2]).unwrap();
    let outcomes = job.run_each(|_| (String::new(), &[]));
    let name = data.file_name().unwrap().to_str().unwrap();
    outcomes.iter().for_each(|outcome| assert_refused(outcome, &[name]));
    fs::write(&data, whole).unwrap();
    job.assert_can_start_again();
}
