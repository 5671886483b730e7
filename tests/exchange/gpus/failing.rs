//! A process cannot go on: it says why, and the others say which one it was and why. So do those that are not started as
//! the others are.

use std::fs;

use crate::gpus::job::{Job, RANKS, SIGHTS, Sight, ended, others_name};
use crate::nodes::{names, refuses, succeeds};
use crate::outcome::fixture;

/// One fails so, and what it says the others have from it.
#[track_caller]
fn fails(job: &Job, fault: &str, words: &[&str], leaves: &[&str]) {
    let mut is_hit = false;
    for odd in 0..RANKS {
        let outcomes = job.but(odd, "", &[("GPU_STAND_IN_FAULT", fault)]);
        // It may not come by.
        if outcomes[odd as usize].code == Some(0) {
            outcomes.iter().for_each(succeeds);
            job.has_made();
            continue;
        }
        is_hit = true;
        outcomes[odd as usize].refused(words);
        others_name(&outcomes, odd, words);
        // Nothing, too, where nobody had recorded anything.
        let left = names(&job.nodes.desk());
        assert!(left.iter().all(|name| leaves.contains(&name.as_str())), "{fault}: {left:?}");
        job.is_done_by(if leaves.is_empty() { "" } else { "--resume" });
    }
    assert!(is_hit, "{fault}: nobody came by");
}

#[test]
fn memory_of_a_device_that_is_not_there_stand_in() {
    for sight in SIGHTS {
        let job = Job::new(sight);
        for fault in ["refuses-memory", "refuses-memory:2", "refuses-memory:4"] {
            fails(&job, fault, &["GPU: allocate memory: ", "out of memory", " left"], &[".out.dtshard-partial"]);
        }
    }
}

#[test]
fn pinned_memory_that_is_not_there_stand_in() {
    for sight in SIGHTS {
        let job = Job::new(sight);
        for fault in ["refuses-pinned", "refuses-pinned:2", "refuses-pinned:3"] {
            let words = ["GPU: allocate memory: ", "for pinned memory: out of memory"];
            fails(&job, fault, &words, &[".out.dtshard-partial"]);
        }
    }
}

/// By itself, where no process is gone.
#[test]
fn nccl_that_fails_stand_in() {
    for sight in SIGHTS {
        let job = Job::new(sight);
        fails(&job, "fails-meeting", &["meet by NCCL: ", "the network was told to fail"], &[]);
        for group in [1, sight.group_of_a_round()] {
            let words = ["GPU: ", "(ncclSystemError)", "the network was told to fail"];
            fails(&job, &format!("fails-in-group:{group}"), &words, &[".out.dtshard-partial"]);
        }
    }
}

#[test]
fn another_command_line_stand_in() {
    for sight in SIGHTS {
        let job = Job::new(sight);
        let outcomes = job.each(|rank| (if rank == 1 { "--dtype bf16" } else { "" }.to_owned(), &[]));
        for outcome in &outcomes {
            outcome.refused(&[
                "process 1 of 3 (",
                "): plan: it makes something else than process 0 does",
                "hint: start all processes",
            ]);
        }
        job.is_done_anew();
        let outcomes = job.each(|rank| (if rank == 1 { "--bucket-size 400" } else { "" }.to_owned(), &[]));
        for outcome in &outcomes {
            outcome.refused(&["process 1 of 3: --bucket-size: 400; at process 0: 300", "hint: start all processes"]);
        }
        job.is_done_anew();
        let outcomes = job.each(|rank| (if rank == 2 { "--include nothing" } else { "" }.to_owned(), &[]));
        outcomes[2].refused(&["nothing"]);
        others_name(&outcomes, 2, &["nothing"]);
        job.is_done_anew();
    }
}

/// All of them may, whatever the rounds were that went before.
#[test]
fn a_run_goes_on_in_other_rounds_stand_in() {
    for sight in SIGHTS {
        let job = Job::new(sight);
        let fault = format!("fails-in-group:{}", sight.group_of_a_round());
        let outcomes = job.but(1, "", &[("GPU_STAND_IN_FAULT", &fault)]);
        others_name(&outcomes, 1, &["the network was told to fail"]);
        job.is_done_by("--resume --bucket-size 500");
    }
}

/// Of the same name, and other tensors.
#[test]
fn another_source_stand_in() {
    let job = Job::new(Sight::All);
    let others = fixture("fsdp4/dcp");
    let outcomes = ended((0..3).map(|rank| {
        let command = if rank == 1 { job.command_of(rank, &others, "", &[]) } else { job.command(rank, "", &[]) };
        { command }.spawn().unwrap()
    }));
    for outcome in &outcomes {
        outcome.refused(&[
            "process 1 of 3 (",
            "): plan: it makes something else than process 0 does",
            "hint: start all processes",
        ]);
    }
    job.is_done_anew();
}

#[test]
fn one_that_never_comes_stand_in() {
    for sight in SIGHTS {
        let job = Job::new(sight);
        let outcomes = ended((0..2).map(|rank| job.command(rank, "", &[]).spawn().unwrap()));
        for outcome in outcomes {
            outcome.refused(&["process 2 of 3: ", "did not come within 10 s", "hint: start all processes"]);
        }
        // Word for the one that did not come is there, and in nobody's way.
        job.is_done_by("");
    }
}

#[test]
fn files_that_change_meanwhile_stand_in() {
    let job = Job::new(Sight::Apart);
    let name = job.nodes.source(1).read_dir().unwrap().flatten().map(|entry| entry.path());
    let data = name.into_iter().find(|path| path.extension().is_some_and(|suffix| suffix == "distcp")).unwrap();
    let whole = fs::read(&data).unwrap();
    fs::write(&data, &whole[..whole.len() / 2]).unwrap();
    let outcomes = job.each(|_| (String::new(), &[]));
    let name = data.file_name().unwrap().to_str().unwrap();
    outcomes.iter().for_each(|outcome| refuses(outcome, &[name]));
    fs::write(&data, whole).unwrap();
    job.is_done_anew();
}
