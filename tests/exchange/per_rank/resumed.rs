//! Tests of resuming after a process was killed: with more processes, with fewer processes, or with one process that
//! sees all files.

use std::process::Command;

use serde_json::Value as Json;

use crate::nodes::{Nodes, Spread, assert_refused, assert_succeeded, names, tree, wait_all};

/// A fixture whose conversion writes several records to the journal.
const SOURCE: &str = "titan/step-1000";
const WORDS: &str = "reshard out --mesh fsdp=3 --bucket-size 2KB";

/// Runs three processes, and kills one of them after its first record.
fn interrupted(nodes: &Nodes) {
    let outcomes = wait_all((0..3).map(|rank| {
        let mut command = nodes.command_of(rank, 3, WORDS);
        command.env("DTSHARD_FAULT", if rank == 1 { "record-after" } else { "none" }).spawn().unwrap()
    }));
    assert_eq!(outcomes[1].signal, Some(9));
    assert!(nodes.dst_folder().join(".out.dtshard-partial").exists());
}

#[test]
fn resume_with_more_processes_reads_the_remaining_bytes() {
    // The resumed run has at least three processes, so that every node with files takes part.
    for of in [3, 4, 5] {
        let nodes = Nodes::new(SOURCE, 3, Spread::One);
        let (expected, alone) = nodes.run_alone(&format!("{} --json", "reshard out --mesh fsdp=3"));
        let alone: Json = serde_json::from_str(&alone.assert_succeeded().out).unwrap();
        interrupted(&nodes);
        let processes =
            (0..of).map(|rank| nodes.command_of(rank, of, &format!("{WORDS} --resume --json")).spawn().unwrap());
        let mut read = 0;
        for outcome in wait_all(processes) {
            let document: Json = serde_json::from_str(&outcome.assert_succeeded().out).unwrap();
            read += document["bytes_read"].as_u64().unwrap();
        }
        nodes.assert_made(&expected, WORDS);
        assert!(read < alone["bytes_read"].as_u64().unwrap(), "{of}: {read} bytes were read again");
    }
}

#[test]
fn resume_with_fewer_processes_succeeds() {
    let nodes = Nodes::new(SOURCE, 3, Spread::Two);
    let (expected, _) = nodes.run_alone("reshard out --mesh fsdp=3");
    interrupted(&nodes);
    // Each file is on two of the three nodes, so any two nodes have all files.
    let processes = (0..2).map(|rank| nodes.command_of(rank, 2, &format!("{WORDS} --resume")).spawn().unwrap());
    wait_all(processes).iter().for_each(assert_succeeded);
    nodes.assert_made(&expected, WORDS);
}

/// One process that sees all files resumes the work of two processes that see some files, and two such processes resume
/// the work of one. Some of the sources have sidecar files.
#[test]
fn resume_with_other_source_visibility_succeeds() {
    for (source, words) in [
        ("accelerate_llama", "consolidate out"),
        ("verl/global_step_10/actor", "consolidate out"),
        ("verl/global_step_10/actor", "reshard out --mesh fsdp=3"),
        ("dcp_trainer", "reshard out --mesh fsdp=3"),
    ] {
        let nodes = Nodes::new(source, 2, Spread::One);
        let words = format!("{words} --resume");
        let (expected, _) = nodes.run_alone(&words);
        let start = |mut command: Command, fault| command.env("DTSHARD_FAULT", fault).spawn().unwrap();

        let apart = format!("{words} --bucket-size 2KB");
        let faults = (0..).zip(["none", "record-after"]);
        let outcomes = wait_all(faults.map(|(rank, fault)| start(nodes.command(rank, &apart), fault)));
        assert_eq!(outcomes[1].signal, Some(9), "{source}: {outcomes:?}");
        wait_all([start(nodes.command_alone(&words), "none")]).iter().for_each(assert_succeeded);
        nodes.assert_made(&expected, &words);

        nodes.clear();
        let outcomes = wait_all([start(nodes.command_alone(&words), "record-after")]);
        assert_eq!(outcomes[0].signal, Some(9), "{source}: {outcomes:?}");
        nodes.run_together(&apart).iter().for_each(assert_succeeded);
        nodes.assert_made(&expected, &words);
    }
}

/// A resumed run may have rounds of another size, because the size of rounds does not change the output.
#[test]
fn resume_with_other_rounds_keeps_the_work() {
    let nodes = Nodes::new(SOURCE, 3, Spread::One);
    let (expected, alone) = nodes.run_alone("reshard out --mesh fsdp=3 --json");
    let alone: Json = serde_json::from_str(&alone.assert_succeeded().out).unwrap();
    interrupted(&nodes);
    let words = "reshard out --mesh fsdp=3 --bucket-size 300";
    for outcome in nodes.run_together(&format!("{words} --dtype bf16 --resume")) {
        outcome.assert_refused(&["cannot be resumed: --dtype was not given, now bf16\n"]);
    }
    let mut read = 0;
    for outcome in nodes.run_together(&format!("{words} --resume --json")) {
        let document: Json = serde_json::from_str(&outcome.assert_succeeded().out).unwrap();
        read += document["bytes_read"].as_u64().unwrap();
    }
    nodes.assert_made(&expected, words);
    assert!(read < alone["bytes_read"].as_u64().unwrap(), "{read} bytes were read again");
}

/// A run is refused before it copies a byte of SRC, and files that an earlier run has copied remain.
#[test]
fn refused_run_copies_nothing() {
    let nodes = Nodes::new(SOURCE, 3, Spread::One);
    let is_refused = |words: &str, expected: &str, left: &[&str]| {
        for (rank, outcome) in nodes.run_together(words).iter().enumerate() {
            assert_refused(outcome, &[expected]);
            assert!(!outcome.err.contains("copying "), "{words}, {rank}: {outcome:?}");
        }
        assert_eq!(names(&nodes.dst_folder()), left, "{words}");
    };
    interrupted(&nodes);
    let partial = [".out.dtshard-partial"];
    assert_eq!(names(&nodes.dst_folder()), partial);
    let unlike = format!("{WORDS} --resume --dtype bf16");
    is_refused(&unlike, "exists, and cannot be resumed", &partial);
    is_refused(WORDS, "an earlier run did not finish", &partial);
    is_refused(&format!("{WORDS} --resume --max-memory 33MB"), "--max-memory", &partial);

    // A run with `--resume` that is killed leaves the files that it has copied.
    let stopped = (0..3).map(|rank| {
        let mut command = nodes.command(rank, &format!("{WORDS} --resume"));
        command.env("DTSHARD_FAULT", if rank == 1 { "source-recorded" } else { "none" }).spawn().unwrap()
    });
    assert_eq!(wait_all(stopped)[1].signal, Some(9));
    let kept = [".out.dtshard-partial", ".out.dtshard-work"];
    let copied = || tree(&nodes.dst_folder().join(".out.dtshard-work/copy"));
    let before = copied();
    assert!(before.keys().any(|name| name.starts_with("done/")), "{:?}", before.keys());
    is_refused(&unlike, "exists, and cannot be resumed", &kept);
    is_refused(WORDS, "an earlier run did not finish", &kept);
    assert!(copied() == before);

    // DST is complete, and the next runs have the same options or other options.
    let (expected, _) = nodes.run_alone("reshard out --mesh fsdp=3");
    nodes.run_together(&format!("{WORDS} --resume")).iter().for_each(assert_succeeded);
    nodes.assert_made(&expected, WORDS);
    is_refused(WORDS, "exists", &["out"]);
    is_refused(&unlike, "exists and is complete, but was made from another source or with other options", &["out"]);
    nodes.assert_made(&expected, WORDS);
}

#[test]
fn resume_of_a_complete_destination_succeeds() {
    let nodes = Nodes::new(SOURCE, 2, Spread::One);
    let (expected, _) = nodes.run_alone("reshard out --mesh fsdp=3");
    nodes.run_together(WORDS).iter().for_each(assert_succeeded);
    for outcome in nodes.run_together(&format!("{WORDS} --resume")) {
        outcome.assert_succeeded();
    }
    nodes.assert_made(&expected, WORDS);
    nodes.run_together(WORDS).iter().for_each(|outcome| assert_refused(outcome, &["out", "exists"]));
    nodes.run_together(&format!("{WORDS} --overwrite")).iter().for_each(assert_succeeded);
    nodes.assert_made(&expected, WORDS);
}
