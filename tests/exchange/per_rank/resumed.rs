//! Going on after one was killed, with more processes, fewer, or one that sees everything.

use std::process::Command;

use serde_json::Value as Json;

use crate::nodes::{Nodes, Spread, ended, names, refuses, succeeds, tree};

/// Enough for several records.
const SOURCE: &str = "titan/step-1000";
const WORDS: &str = "reshard out --mesh fsdp=3 --bucket-size 2KB";

/// Three processes, of which one is killed in the middle.
fn interrupted(nodes: &Nodes) {
    let outcomes = ended((0..3).map(|rank| {
        let mut command = nodes.command_of(rank, 3, WORDS);
        command.env("DTSHARD_FAULT", if rank == 1 { "record-after" } else { "none" }).spawn().unwrap()
    }));
    assert_eq!(outcomes[1].signal, Some(9));
    assert!(nodes.desk().join(".out.dtshard-partial").exists());
}

#[test]
fn with_other_processes() {
    // All nodes that have files must be among them.
    for of in [3, 4, 5] {
        let nodes = Nodes::new(SOURCE, 3, Spread::One);
        let (wanted, alone) = nodes.alone(&format!("{} --json", "reshard out --mesh fsdp=3"));
        let alone: Json = serde_json::from_str(&alone.succeeded().out).unwrap();
        interrupted(&nodes);
        let processes =
            (0..of).map(|rank| nodes.command_of(rank, of, &format!("{WORDS} --resume --json")).spawn().unwrap());
        let mut read = 0;
        for outcome in ended(processes) {
            let document: Json = serde_json::from_str(&outcome.succeeded().out).unwrap();
            read += document["bytes_read"].as_u64().unwrap();
        }
        nodes.has_made(&wanted, WORDS);
        assert!(read < alone["bytes_read"].as_u64().unwrap(), "{of}: {read} bytes were read again");
    }
}

#[test]
fn with_fewer_that_see_more() {
    let nodes = Nodes::new(SOURCE, 3, Spread::Two);
    let (wanted, _) = nodes.alone("reshard out --mesh fsdp=3");
    interrupted(&nodes);
    // Of three nodes any two have all files.
    let processes = (0..2).map(|rank| nodes.command_of(rank, 2, &format!("{WORDS} --resume")).spawn().unwrap());
    ended(processes).iter().for_each(succeeds);
    nodes.has_made(&wanted, WORDS);
}

/// Who sees all files goes on with what those did that saw some, and the other way round, also where files go along.
#[test]
fn with_another_sight() {
    for (source, words) in [
        ("accelerate_llama", "consolidate out"),
        ("verl/global_step_10/actor", "consolidate out"),
        ("verl/global_step_10/actor", "reshard out --mesh fsdp=3"),
        ("dcp_trainer", "reshard out --mesh fsdp=3"),
    ] {
        let nodes = Nodes::new(source, 2, Spread::One);
        let words = format!("{words} --resume");
        let (wanted, _) = nodes.alone(&words);
        let start = |mut command: Command, fault| command.env("DTSHARD_FAULT", fault).spawn().unwrap();

        let apart = format!("{words} --bucket-size 2KB");
        let faults = (0..).zip(["none", "record-after"]);
        let outcomes = ended(faults.map(|(rank, fault)| start(nodes.command(rank, &apart), fault)));
        assert_eq!(outcomes[1].signal, Some(9), "{source}: {outcomes:?}");
        ended([start(nodes.command_alone(&words), "none")]).iter().for_each(succeeds);
        nodes.has_made(&wanted, &words);

        nodes.clear();
        let outcomes = ended([start(nodes.command_alone(&words), "record-after")]);
        assert_eq!(outcomes[0].signal, Some(9), "{source}: {outcomes:?}");
        nodes.together(&apart).iter().for_each(succeeds);
        nodes.has_made(&wanted, &words);
    }
}

/// Rounds are how it is done, and not what.
#[test]
fn with_other_rounds() {
    let nodes = Nodes::new(SOURCE, 3, Spread::One);
    let (wanted, alone) = nodes.alone("reshard out --mesh fsdp=3 --json");
    let alone: Json = serde_json::from_str(&alone.succeeded().out).unwrap();
    interrupted(&nodes);
    let words = "reshard out --mesh fsdp=3 --bucket-size 300";
    for outcome in nodes.together(&format!("{words} --dtype bf16 --resume")) {
        outcome.refused(&["cannot be gone on with: --dtype was not given, now bf16\n"]);
    }
    let mut read = 0;
    for outcome in nodes.together(&format!("{words} --resume --json")) {
        let document: Json = serde_json::from_str(&outcome.succeeded().out).unwrap();
        read += document["bytes_read"].as_u64().unwrap();
    }
    nodes.has_made(&wanted, words);
    assert!(read < alone["bytes_read"].as_u64().unwrap(), "{read} bytes were read again");
}

/// The refusal comes before a byte of SRC is copied, and what an earlier run has copied stays.
#[test]
fn refused_run_copies_nothing() {
    let nodes = Nodes::new(SOURCE, 3, Spread::One);
    let is_refused = |words: &str, expected: &str, left: &[&str]| {
        for (rank, outcome) in nodes.together(words).iter().enumerate() {
            refuses(outcome, &[expected]);
            assert!(!outcome.err.contains("copying "), "{words}, {rank}: {outcome:?}");
        }
        assert_eq!(names(&nodes.desk()), left, "{words}");
    };
    interrupted(&nodes);
    let partial = [".out.dtshard-partial"];
    assert_eq!(names(&nodes.desk()), partial);
    let unlike = format!("{WORDS} --resume --dtype bf16");
    is_refused(&unlike, "is in the way, and cannot be gone on with", &partial);
    is_refused(WORDS, "an earlier run did not finish", &partial);
    is_refused(&format!("{WORDS} --resume --max-memory 33MB"), "--max-memory", &partial);

    // A run with --resume keeps what is copied.
    let stopped = (0..3).map(|rank| {
        let mut command = nodes.command(rank, &format!("{WORDS} --resume"));
        command.env("DTSHARD_FAULT", if rank == 1 { "source-recorded" } else { "none" }).spawn().unwrap()
    });
    assert_eq!(ended(stopped)[1].signal, Some(9));
    let kept = [".out.dtshard-partial", ".out.dtshard-work"];
    let copied = || tree(&nodes.desk().join(".out.dtshard-work/copy"));
    let before = copied();
    assert!(before.keys().any(|name| name.starts_with("done/")), "{:?}", before.keys());
    is_refused(&unlike, "is in the way, and cannot be gone on with", &kept);
    is_refused(WORDS, "an earlier run did not finish", &kept);
    assert!(copied() == before);

    // A destination from other options.
    let (wanted, _) = nodes.alone("reshard out --mesh fsdp=3");
    nodes.together(&format!("{WORDS} --resume")).iter().for_each(succeeds);
    nodes.has_made(&wanted, WORDS);
    is_refused(WORDS, "exists", &["out"]);
    is_refused(&unlike, "exists: it is finished, and of another source, or made with other options", &["out"]);
    nodes.has_made(&wanted, WORDS);
}

#[test]
fn again_when_it_is_done() {
    let nodes = Nodes::new(SOURCE, 2, Spread::One);
    let (wanted, _) = nodes.alone("reshard out --mesh fsdp=3");
    nodes.together(WORDS).iter().for_each(succeeds);
    for outcome in nodes.together(&format!("{WORDS} --resume")) {
        outcome.succeeded();
    }
    nodes.has_made(&wanted, WORDS);
    nodes.together(WORDS).iter().for_each(|outcome| refuses(outcome, &["out", "exists"]));
    nodes.together(&format!("{WORDS} --overwrite")).iter().for_each(succeeds);
    nodes.has_made(&wanted, WORDS);
}
