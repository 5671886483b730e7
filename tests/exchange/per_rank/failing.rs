//! Tests of runs of which one process fails, is killed or never starts. All other processes end soon with a message
//! that names the process, nothing incomplete is published, the work folder is empty, and the next run gives the same
//! bytes.

use std::fs;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::nodes::{Nodes, Spread, assert_succeeded, names, tree, wait_all};
use crate::outcome::{Outcome, fixture};

const WORDS: &str = "reshard out --mesh fsdp=3 --bucket-size 300";

/// Asserts that nothing remains, except perhaps the partial folder: neither DST nor the work folder exists.
#[track_caller]
fn assert_left_clean(nodes: &Nodes) {
    let left = names(&nodes.dst_folder());
    assert!(left.iter().all(|name| name == ".out.dtshard-partial"), "{left:?}");
}

/// Asserts that each of the other processes succeeds after DST was published, or ends with an error that names process
/// `gone`.
#[track_caller]
fn assert_others_end(nodes: &Nodes, outcomes: &[Outcome], gone: usize) {
    let is_published = nodes.dst_folder().join("out").exists();
    for (rank, outcome) in outcomes.iter().enumerate().filter(|(rank, _)| *rank != gone) {
        let is_named = ["process", "part"].iter().any(|what| outcome.err.contains(&format!("{what} {gone} of 3")));
        let is_well = outcome.code == Some(0) && is_published;
        assert!(is_well || outcome.code == Some(2) && is_named, "{rank}: {outcome:?}");
        assert!(!outcome.err.contains("panicked"), "{rank}: {outcome:?}");
    }
}

fn nodes() -> Nodes {
    Nodes::new("fsdp4/ranks", 3, Spread::One)
}

#[test]
fn missing_process_is_named_by_the_others() {
    for absent in [0, 2] {
        let nodes = nodes();
        let begun = Instant::now();
        let outcomes = wait_all((0..3).filter(|rank| *rank != absent).map(|rank| nodes.start(rank, WORDS)));
        assert!(begun.elapsed() < Duration::from_secs(25), "{:?}", begun.elapsed());
        for outcome in outcomes {
            outcome.assert_refused(&[
                &format!("process {absent} of 3: "),
                "did not connect within 10 s",
                "hint: start all processes",
            ]);
        }
        assert_eq!(names(&nodes.dst_folder()), [""; 0]);
    }
}

/// One process is killed while the processes wait for the last process, which never starts.
#[test]
fn process_killed_before_all_have_met_is_named_by_the_others() {
    let nodes = Nodes::new("fsdp4/ranks", 4, Spread::One);
    let early = [0, 2].map(|rank| nodes.start(rank, WORDS));
    let mut killed = nodes.start(1, WORDS);
    sleep(Duration::from_millis(500));
    killed.kill().unwrap();
    killed.wait().unwrap();
    for outcome in wait_all(early) {
        outcome
            .assert_refused(&["error: process 1 of 4: meet: its process ended, while this process waited for others"]);
    }
    assert_eq!(names(&nodes.dst_folder()), [""; 0]);
}

/// One process is killed at a crash point (a position in the code), if it reaches the point.
#[test]
fn process_killed_at_any_point_is_named_and_resume_completes() {
    for (point, ranks) in [
        ("source-copied", vec![0, 1]),
        ("source-recorded", vec![0, 2]),
        ("begin-draft", vec![0]),
        ("begin-leased", vec![0, 1, 2]),
        ("carried", vec![0, 1]),
        ("record-before", vec![0, 1, 2]),
        ("record-after", vec![0, 2]),
        ("seal-leased", vec![0]),
        ("commit-marked", vec![0]),
    ] {
        for gone in ranks {
            let nodes = Nodes::new("accelerate_llama", 3, Spread::One);
            let words = "consolidate out";
            let processes = (0..3).map(|rank| {
                let mut command = nodes.command(rank, words);
                command.env("DTSHARD_FAULT", if rank == gone { point } else { "none" }).spawn().unwrap()
            });
            let begun = Instant::now();
            let outcomes = wait_all(processes);
            if outcomes[gone as usize].signal.is_none() {
                // The process does not reach this crash point.
                continue;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "{point}: {:?}", begun.elapsed());
            assert_others_end(&nodes, &outcomes, gone as usize);
            let (expected, _) = nodes.run_alone("consolidate out");
            nodes.run_together("consolidate out --resume").iter().for_each(assert_succeeded);
            nodes.assert_made(&expected, "consolidate out");
        }
    }
}

/// A resumed run copies only the files that an earlier run has not copied.
#[test]
fn resume_copies_remaining_files_only() {
    let nodes = Nodes::new("fsdp4/ranks", 3, Spread::One);
    let (expected, _) = nodes.run_alone("consolidate out");
    let copied = |outcome: &Outcome| {
        let line = outcome.err.lines().find(|line| line.contains("] note: copying ")).unwrap_or_default().to_owned();
        let (left, all) =
            line.split_once("/copy: ").unwrap().1.split_once(", in ").unwrap().0.split_once(" of ").unwrap();
        (left.to_owned(), all.to_owned())
    };
    let processes = (0..3).map(|rank| {
        let mut command = nodes.command(rank, "consolidate out --resume");
        command.env("DTSHARD_FAULT", if rank == 1 { "source-recorded" } else { "none" }).spawn().unwrap()
    });
    let outcomes = wait_all(processes);
    assert_eq!(outcomes[1].signal, Some(9));
    let (left, all) = copied(&outcomes[0]);
    assert_eq!(left, all);
    assert!(nodes.dst_folder().join(".out.dtshard-work/copy/done").exists(), "{:?}", names(&nodes.dst_folder()));
    let outcomes = nodes.run_together("consolidate out --resume");
    outcomes.iter().for_each(assert_succeeded);
    let (left, all) = copied(&outcomes[0]);
    assert_ne!(left, all);
    nodes.assert_made(&expected, "consolidate out");
}

/// One process is killed after a different time in each run.
#[test]
fn process_killed_at_any_time_publishes_all_or_nothing() {
    let nodes = nodes();
    let (expected, _) = nodes.run_alone("reshard out --mesh fsdp=3");
    for number in 0..12_u64 {
        nodes.clear();
        let mut processes: Vec<Child> = (0..3).map(|rank| nodes.start(rank, WORDS)).collect();
        sleep(Duration::from_millis(10 + 25 * number));
        let gone = usize::try_from(number % 3).unwrap();
        processes[gone].kill().unwrap();
        let outcomes = wait_all(processes);
        let others = outcomes.iter().enumerate().filter(|(rank, _)| *rank != gone);
        for (rank, outcome) in others {
            // A process that started late has not noticed the process that was killed.
            assert!(matches!(outcome.code, Some(0 | 2)) && !outcome.err.contains("panicked"), "{rank} {outcome:?}");
        }
        if nodes.dst_folder().join("out").exists() {
            assert!(tree(&nodes.dst_folder().join("out")) == expected);
        } else {
            assert!(outcomes.iter().all(|outcome| outcome.code != Some(0)), "{outcomes:?}");
        }
        nodes.run_together(&format!("{WORDS} --resume")).iter().for_each(assert_succeeded);
        nodes.assert_made(&expected, WORDS);
    }
}

/// One process gets the signal TERM, so all processes stop. They can be started again.
#[test]
fn process_stopped_by_term_ends_all_and_resume_completes() {
    let nodes = Nodes::new("titan/step-1000", 3, Spread::One);
    let (expected, _) = nodes.run_alone("reshard out --mesh fsdp=3");
    let mut stopped = 0;
    for number in 0..8_u64 {
        nodes.clear();
        let processes: Vec<Child> = (0..3).map(|rank| nodes.start(rank, WORDS)).collect();
        let partial = nodes.dst_folder().join(".out.dtshard-partial");
        let begun = Instant::now();
        while !partial.join("plan.json").exists() && begun.elapsed() < Duration::from_secs(10) {
            sleep(Duration::from_millis(1));
        }
        sleep(Duration::from_millis(3 * number));
        let signalled = usize::try_from(number % 3).unwrap();
        let pid = processes[signalled].id().to_string();
        Command::new("kill").args(["-s", "TERM", &pid]).status().unwrap();
        let outcomes = wait_all(processes);
        if nodes.dst_folder().join("out").exists() {
            continue;
        }
        stopped += 1;
        let stopped_one = &outcomes[signalled];
        assert!(matches!(stopped_one.code, Some(75 | 143)), "{stopped_one:?}");
        stopped_one.assert_mentions(&["stopped by TERM; "]);
        if stopped_one.code == Some(75) {
            let of_part = format!(" of part {signalled} of 3; use --resume to continue");
            stopped_one.assert_mentions(&[".out.dtshard-partial keeps ", " of the ", &of_part]);
        }
        for (rank, outcome) in outcomes.iter().enumerate().filter(|(rank, _)| *rank != signalled) {
            let is_stopped = outcome.err.contains(&format!("stopped by TERM at process {signalled} of 3"));
            let is_without = outcome.err.contains(&format!("part {signalled} of 3 stopped"));
            let is_right = match outcome.code {
                Some(75 | 143) => is_stopped,
                Some(2) => is_without || outcome.err.contains(&format!("process {signalled} of 3")),
                _ => false,
            };
            assert!(is_right, "{rank} {outcome:?}");
        }
        assert_left_clean(&nodes);
        nodes.run_together(&format!("{WORDS} --resume")).iter().for_each(assert_succeeded);
        nodes.assert_made(&expected, WORDS);
    }
    assert!(stopped > 0);
}

#[test]
fn different_options_of_one_process_are_refused() {
    let nodes = nodes();
    let outcomes = nodes.run_each(|rank| if rank == 1 { format!("{WORDS} --dtype bf16") } else { WORDS.to_owned() });
    for outcome in &outcomes {
        outcome.assert_refused(&[
            "process 1 of 3 (",
            "): plan: it differs from the plan of process 0: --dtype: bf16; at process 0: not given",
            "hint: start all processes with the same",
        ]);
    }
    assert_eq!(names(&nodes.dst_folder()), [""; 0]);
    let outcomes =
        nodes.run_each(|rank| if rank == 2 { format!("{WORDS} --include nothing") } else { WORDS.to_owned() });
    for outcome in &outcomes {
        outcome.assert_refused(&["process 2 of 3", "--include: nothing"]);
    }
    assert_eq!(names(&nodes.dst_folder()), [""; 0]);
}

/// One process sees another file, which has the name and the length of the right file but other metadata.
#[test]
fn different_source_of_one_process_is_refused() {
    let nodes = Nodes::new("fsdp4/ranks", 3, Spread::Two);
    let name = "model_world_size_4_rank_1.pt";
    let other = &nodes.copies(name)[0];
    fs::copy(fixture("fsdp4/ranks/model_world_size_4_rank_2.pt"), other).unwrap();
    for outcome in nodes.run_together(WORDS) {
        outcome.assert_refused(&[name, "differs between process", "hint: "]);
    }
    assert_eq!(names(&nodes.dst_folder()), [""; 0]);
}

#[test]
fn source_that_no_process_sees_is_refused() {
    let nodes = nodes();
    (0..3).for_each(|node| fs::remove_dir_all(nodes.source(node)).unwrap());
    for outcome in nodes.run_together(WORDS) {
        outcome.assert_refused(&[
            "expected files that at least one process sees",
            "at processes 0, 1, 2",
            "hint: check the path",
        ]);
    }
    assert_eq!(names(&nodes.dst_folder()), [""; 0]);
}

/// One process sees no file of SRC, but takes part in the exchange.
#[test]
fn process_without_source_files_takes_part() {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let (expected, _) = nodes.run_alone("consolidate out");
    let words = "consolidate out";
    let outcomes = wait_all((0..3).map(|rank| {
        let mut command = nodes.command_of(rank, 3, words);
        command.spawn().unwrap()
    }));
    outcomes.iter().for_each(assert_succeeded);
    nodes.assert_made(&expected, words);
}

/// A file that the conversion needs is on no node.
#[test]
fn file_that_no_node_has_is_refused() {
    let nodes = nodes();
    let name = "model_world_size_4_rank_2.pt";
    fs::remove_file(&nodes.copies(name)[0]).unwrap();
    for outcome in nodes.run_together(WORDS) {
        outcome.assert_refused(&["rank 2"]);
    }
    assert_eq!(names(&nodes.dst_folder()), [""; 0]);
}

#[test]
fn second_run_at_the_same_time_is_refused_or_publishes() {
    let nodes = nodes();
    let (expected, _) = nodes.run_alone("reshard out --mesh fsdp=3");
    let first: Vec<Child> = (0..3).map(|rank| nodes.start(rank, WORDS)).collect();
    let second = nodes.run_together(WORDS);
    let first = wait_all(first);
    for outcome in first.iter().chain(&second) {
        assert!(matches!(outcome.code, Some(0 | 2)), "{outcome:?}");
        assert!(!outcome.err.contains("panicked"), "{outcome:?}");
    }
    if nodes.dst_folder().join("out").exists() {
        nodes.assert_made(&expected, WORDS);
    } else {
        // Processes of the two runs exchanged messages with each other, so neither run had all its processes.
        let left = names(&nodes.dst_folder());
        assert!(left.iter().all(|name| [".out.dtshard-partial", ".out.dtshard-work"].contains(&&**name)), "{left:?}");
    }
}

/// A killed run leaves files in the work folder. They do not block the next run.
#[test]
fn work_folder_of_a_killed_run_does_not_block_the_next() {
    let nodes = nodes();
    let (expected, _) = nodes.run_alone("reshard out --mesh fsdp=3");
    let mut killed: Vec<Child> = [0, 1].map(|rank| nodes.start(rank, WORDS)).into();
    let work = nodes.dst_folder().join(".out.dtshard-work");
    let begun = Instant::now();
    while !work.exists() && begun.elapsed() < Duration::from_secs(10) {
        sleep(Duration::from_millis(5));
    }
    sleep(Duration::from_millis(200));
    for process in &mut killed {
        process.kill().unwrap();
    }
    wait_all(killed);
    assert!(work.exists());
    nodes.run_together(WORDS).iter().for_each(assert_succeeded);
    nodes.assert_made(&expected, WORDS);
}

#[test]
fn run_of_which_all_processes_were_killed_is_resumed() {
    let nodes = nodes();
    let mut processes: Vec<Child> = (0..3).map(|rank| nodes.start(rank, WORDS)).collect();
    sleep(Duration::from_millis(40));
    processes.iter_mut().for_each(|process| process.kill().unwrap());
    assert!(processes.iter_mut().all(|process| process.wait().is_ok()));
    let (expected, _) = nodes.run_alone("reshard out --mesh fsdp=3");
    nodes.run_together(&format!("{WORDS} --resume")).iter().for_each(assert_succeeded);
    nodes.assert_made(&expected, WORDS);
}
