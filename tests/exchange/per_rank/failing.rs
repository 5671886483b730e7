//! Runs of which one process fails, is killed or never comes: all end soon with a message that names it, nothing half-written
//! is published, nothing is left where they met, and the next run makes the same bytes.

use std::fs;
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::nodes::{Nodes, Spread, ended, names, succeeds, tree};
use crate::outcome::{Outcome, fixture};

const WORDS: &str = "reshard out --mesh fsdp=3 --bucket-size 300";

/// DST is not there, and nobody is at the meeting place.
#[track_caller]
fn is_left_clean(nodes: &Nodes) {
    let left = names(&nodes.desk());
    assert!(left.iter().all(|name| name == ".out.dtshard-partial"), "{left:?}");
}

/// All but one end well, as all is published, or with words that name that one.
#[track_caller]
fn others_end(nodes: &Nodes, outcomes: &[Outcome], gone: usize) {
    let is_published = nodes.desk().join("out").exists();
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
fn one_that_never_comes() {
    for absent in [0, 2] {
        let nodes = nodes();
        let begun = Instant::now();
        let outcomes = ended((0..3).filter(|rank| *rank != absent).map(|rank| nodes.start(rank, WORDS)));
        assert!(begun.elapsed() < Duration::from_secs(25), "{:?}", begun.elapsed());
        for outcome in outcomes {
            outcome.refused(&[
                &format!("process {absent} of 3: "),
                "did not come within 10 s",
                "hint: start all processes",
            ]);
        }
        assert_eq!(names(&nodes.desk()), [""; 0]);
    }
}

/// While the others wait for the last one.
#[test]
fn one_that_is_killed_before_all_have_met() {
    let nodes = Nodes::new("fsdp4/ranks", 4, Spread::One);
    let early = [0, 2].map(|rank| nodes.start(rank, WORDS));
    let mut killed = nodes.start(1, WORDS);
    sleep(Duration::from_millis(500));
    killed.kill().unwrap();
    killed.wait().unwrap();
    for outcome in ended(early) {
        outcome.refused(&["error: process 1 of 4: meet: its process ended, while others were waited for"]);
    }
    assert_eq!(names(&nodes.desk()), [""; 0]);
}

/// At every point that a process of a run comes by.
#[test]
fn one_that_is_killed() {
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
            let outcomes = ended(processes);
            if outcomes[gone as usize].signal.is_none() {
                // It has nothing of this kind to do.
                continue;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "{point}: {:?}", begun.elapsed());
            others_end(&nodes, &outcomes, gone as usize);
            let (wanted, _) = nodes.alone("consolidate out");
            nodes.together("consolidate out --resume").iter().for_each(succeeds);
            nodes.has_made(&wanted, "consolidate out");
        }
    }
}

/// A run that goes on copies only what is not copied yet.
#[test]
fn copy_goes_on_with_resume() {
    let nodes = Nodes::new("fsdp4/ranks", 3, Spread::One);
    let (wanted, _) = nodes.alone("consolidate out");
    let copied = |outcome: &Outcome| {
        let line = outcome.err.lines().find(|line| line.contains("] copying ")).unwrap_or_default().to_owned();
        let (left, all) =
            line.split_once("copying ").unwrap().1.split_once(" in ").unwrap().0.split_once(" of ").unwrap();
        (left.to_owned(), all.to_owned())
    };
    let processes = (0..3).map(|rank| {
        let mut command = nodes.command(rank, "consolidate out --resume");
        command.env("DTSHARD_FAULT", if rank == 1 { "source-recorded" } else { "none" }).spawn().unwrap()
    });
    let outcomes = ended(processes);
    assert_eq!(outcomes[1].signal, Some(9));
    let (left, all) = copied(&outcomes[0]);
    assert_eq!(left, all);
    assert!(nodes.desk().join(".out.dtshard-work/copy/done").exists(), "{:?}", names(&nodes.desk()));
    let outcomes = nodes.together("consolidate out --resume");
    outcomes.iter().for_each(succeeds);
    let (left, all) = copied(&outcomes[0]);
    assert_ne!(left, all);
    nodes.has_made(&wanted, "consolidate out");
}

/// Killed when nobody expects it.
#[test]
fn one_that_is_killed_at_some_time() {
    let nodes = nodes();
    let (wanted, _) = nodes.alone("reshard out --mesh fsdp=3");
    for number in 0..12_u64 {
        nodes.clear();
        let mut processes: Vec<Child> = (0..3).map(|rank| nodes.start(rank, WORDS)).collect();
        sleep(Duration::from_millis(10 + 25 * number));
        let gone = usize::try_from(number % 3).unwrap();
        processes[gone].kill().unwrap();
        let outcomes = ended(processes);
        let others = outcomes.iter().enumerate().filter(|(rank, _)| *rank != gone);
        for (rank, outcome) in others {
            // A process that came late has not seen the one that was killed.
            assert!(matches!(outcome.code, Some(0 | 2)) && !outcome.err.contains("panicked"), "{rank} {outcome:?}");
        }
        if nodes.desk().join("out").exists() {
            assert!(tree(&nodes.desk().join("out")) == wanted);
        } else {
            assert!(outcomes.iter().all(|outcome| outcome.code != Some(0)), "{outcomes:?}");
        }
        nodes.together(&format!("{WORDS} --resume")).iter().for_each(succeeds);
        nodes.has_made(&wanted, WORDS);
    }
}

/// One gets TERM; all can be started again.
#[test]
fn one_that_is_stopped() {
    let nodes = Nodes::new("titan/step-1000", 3, Spread::One);
    let (wanted, _) = nodes.alone("reshard out --mesh fsdp=3");
    let mut stopped = 0;
    for number in 0..8_u64 {
        nodes.clear();
        let processes: Vec<Child> = (0..3).map(|rank| nodes.start(rank, WORDS)).collect();
        let partial = nodes.desk().join(".out.dtshard-partial");
        let begun = Instant::now();
        while !partial.join("plan.json").exists() && begun.elapsed() < Duration::from_secs(10) {
            sleep(Duration::from_millis(1));
        }
        sleep(Duration::from_millis(3 * number));
        let told = usize::try_from(number % 3).unwrap();
        let pid = processes[told].id().to_string();
        Command::new("kill").args(["-s", "TERM", &pid]).status().unwrap();
        let outcomes = ended(processes);
        if nodes.desk().join("out").exists() {
            continue;
        }
        stopped += 1;
        let stopped_one = &outcomes[told];
        assert!(matches!(stopped_one.code, Some(75 | 143)), "{stopped_one:?}");
        stopped_one.says(&["stopped by TERM; "]);
        if stopped_one.code == Some(75) {
            let of_part = format!(" of part {told} of 3, --resume goes on from there");
            stopped_one.says(&[".out.dtshard-partial keeps ", " of the ", &of_part]);
        }
        for (rank, outcome) in outcomes.iter().enumerate().filter(|(rank, _)| *rank != told) {
            let is_stopped = outcome.err.contains(&format!("stopped by TERM at process {told} of 3"));
            let is_without = outcome.err.contains(&format!("part {told} of 3 stopped"));
            let is_right = match outcome.code {
                Some(75 | 143) => is_stopped,
                Some(2) => is_without || outcome.err.contains(&format!("process {told} of 3")),
                _ => false,
            };
            assert!(is_right, "{rank} {outcome:?}");
        }
        is_left_clean(&nodes);
        nodes.together(&format!("{WORDS} --resume")).iter().for_each(succeeds);
        nodes.has_made(&wanted, WORDS);
    }
    assert!(stopped > 0);
}

#[test]
fn other_options() {
    let nodes = nodes();
    let outcomes = nodes.each(|rank| if rank == 1 { format!("{WORDS} --dtype bf16") } else { WORDS.to_owned() });
    for outcome in &outcomes {
        outcome.refused(&[
            "process 1 of 3 (",
            "): plan: it makes something else than process 0 does: --dtype: bf16; at process 0: it is not given",
            "hint: start all processes with the same",
        ]);
    }
    assert_eq!(names(&nodes.desk()), [""; 0]);
    let outcomes = nodes.each(|rank| if rank == 2 { format!("{WORDS} --include nothing") } else { WORDS.to_owned() });
    for outcome in &outcomes {
        outcome.refused(&["process 2 of 3", "--include: nothing"]);
    }
    assert_eq!(names(&nodes.desk()), [""; 0]);
}

/// Of one name and length, and of other metadata.
#[test]
fn another_source() {
    let nodes = Nodes::new("fsdp4/ranks", 3, Spread::Two);
    let name = "model_world_size_4_rank_1.pt";
    let other = &nodes.copies(name)[0];
    fs::copy(fixture("fsdp4/ranks/model_world_size_4_rank_2.pt"), other).unwrap();
    for outcome in nodes.together(WORDS) {
        outcome.refused(&[name, "differs between process", "hint: "]);
    }
    assert_eq!(names(&nodes.desk()), [""; 0]);
}

#[test]
fn no_source() {
    let nodes = nodes();
    (0..3).for_each(|node| fs::remove_dir_all(nodes.source(node)).unwrap());
    for outcome in nodes.together(WORDS) {
        outcome.refused(&[
            "expected files that at least one process sees",
            "at processes 0, 1, 2",
            "hint: check the path",
        ]);
    }
    assert_eq!(names(&nodes.desk()), [""; 0]);
}

/// One process sees nothing at all, and helps.
#[test]
fn no_source_on_one_node() {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let (wanted, _) = nodes.alone("consolidate out");
    let words = "consolidate out";
    let outcomes = ended((0..3).map(|rank| {
        let mut command = nodes.command_of(rank, 3, words);
        command.spawn().unwrap()
    }));
    outcomes.iter().for_each(succeeds);
    nodes.has_made(&wanted, words);
}

/// Nobody has a file that is needed.
#[test]
fn a_file_that_no_node_has() {
    let nodes = nodes();
    let name = "model_world_size_4_rank_2.pt";
    fs::remove_file(&nodes.copies(name)[0]).unwrap();
    for outcome in nodes.together(WORDS) {
        outcome.refused(&["rank 2"]);
    }
    assert_eq!(names(&nodes.desk()), [""; 0]);
}

#[test]
fn a_second_run() {
    let nodes = nodes();
    let (wanted, _) = nodes.alone("reshard out --mesh fsdp=3");
    let first: Vec<Child> = (0..3).map(|rank| nodes.start(rank, WORDS)).collect();
    let second = nodes.together(WORDS);
    let first = ended(first);
    for outcome in first.iter().chain(&second) {
        assert!(matches!(outcome.code, Some(0 | 2)), "{outcome:?}");
        assert!(!outcome.err.contains("panicked"), "{outcome:?}");
    }
    if nodes.desk().join("out").exists() {
        nodes.has_made(&wanted, WORDS);
    } else {
        // Neither was complete, as they met across.
        let left = names(&nodes.desk());
        assert!(left.iter().all(|name| [".out.dtshard-partial", ".out.dtshard-work"].contains(&&**name)), "{left:?}");
    }
}

/// What a killed run has left is in nobody's way.
#[test]
fn a_work_folder_that_was_left() {
    let nodes = nodes();
    let (wanted, _) = nodes.alone("reshard out --mesh fsdp=3");
    let mut killed: Vec<Child> = [0, 1].map(|rank| nodes.start(rank, WORDS)).into();
    let work = nodes.desk().join(".out.dtshard-work");
    let begun = Instant::now();
    while !work.exists() && begun.elapsed() < Duration::from_secs(10) {
        sleep(Duration::from_millis(5));
    }
    sleep(Duration::from_millis(200));
    for process in &mut killed {
        process.kill().unwrap();
    }
    ended(killed);
    assert!(work.exists());
    nodes.together(WORDS).iter().for_each(succeeds);
    nodes.has_made(&wanted, WORDS);
}

#[test]
fn all_that_are_killed() {
    let nodes = nodes();
    let mut processes: Vec<Child> = (0..3).map(|rank| nodes.start(rank, WORDS)).collect();
    sleep(Duration::from_millis(40));
    processes.iter_mut().for_each(|process| process.kill().unwrap());
    assert!(processes.iter_mut().all(|process| process.wait().is_ok()));
    let (wanted, _) = nodes.alone("reshard out --mesh fsdp=3");
    nodes.together(&format!("{WORDS} --resume")).iter().for_each(succeeds);
    nodes.has_made(&wanted, WORDS);
}
