//! What processes say: one of them for all, in documents, in dry runs and where ranks disagree.

use std::fs;

use serde_json::Value as Json;

use crate::nodes::{Nodes, Spread, names, refuses};
use crate::outcome::Outcome;

fn document(outcome: &Outcome) -> Json {
    serde_json::from_str(&outcome.succeeded().out).unwrap_or_else(|error| panic!("{error}: {outcome:?}"))
}

#[test]
fn documents() {
    let nodes = Nodes::new("fsdp4/ranks", 3, Spread::One);
    let words = "reshard out --mesh fsdp=3 --json";
    let (_, alone) = nodes.alone(words);
    let alone = document(&alone);
    let said: Vec<Json> = nodes.together(&format!("{words} --bucket-size 500")).iter().map(document).collect();
    let read: u64 = said.iter().map(|document| document["bytes_read"].as_u64().unwrap()).sum();
    assert!(read <= alone["bytes_read"].as_u64().unwrap(), "{read}: no byte is read twice");
    for (rank, document) in said.iter().enumerate() {
        assert_eq!(document["part"]["index"], rank);
        assert_eq!(document["part"]["of"], 3);
        assert_eq!(document["part"]["published"], true);
        assert_eq!(document["part"]["publisher"], rank == 0);
        for same in ["tensors", "files", "bytes_written", "format"] {
            assert_eq!(document[same], alone[same], "{same}");
        }
    }
}

#[test]
fn one_speaks_for_all() {
    let nodes = Nodes::new("fsdp4/ranks", 3, Spread::One);
    let outcomes = nodes.together("consolidate out --dtype bf16");
    let lines: Vec<&str> = outcomes.iter().flat_map(|outcome| outcome.err.lines()).collect();
    assert_eq!(lines.iter().filter(|line| line.contains("wrote")).count(), 1, "{lines:?}");
    assert!(outcomes[1].err.is_empty() && outcomes[2].err.is_empty(), "{lines:?}");
}

/// In the closing line what all have received; with `-v` each says its own share.
#[test]
fn bytes_on_the_wire() {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let outcomes = nodes.together("consolidate out -v");
    for outcome in &outcomes {
        assert!(outcome.succeeded().err.contains("] sent "), "{outcome:?}");
    }
    let foreseen = document(&nodes.together("consolidate foreseen --dry-run --json")[0]);
    let ranks = foreseen["ranks"].as_array().unwrap();
    let received: u64 = ranks.iter().map(|rank| rank["received"].as_u64().unwrap()).sum();
    // Less than a kB, which is told to the byte.
    assert!(received > 0 && received < 1000, "{received}");
    let line = outcomes[0].err.lines().find(|line| line.contains("wrote ")).unwrap();
    assert!(line.ends_with(&format!("; on the wire {received} B")), "{line}");
    nodes.clear();
    // One that sees all has nothing to say of it.
    let (_, alone) = nodes.alone("consolidate out --json");
    let alone = document(&alone);
    assert!(alone.get("bytes_sent").is_none() && alone.get("bytes_received").is_none(), "{alone}");
}

/// Nothing is written, and what is foreseen is what is done.
#[test]
fn dry_runs() {
    for (source, words) in [
        ("fsdp4/ranks", "reshard out --mesh fsdp=3"),
        ("titan/step-1000", "consolidate out"),
        ("hsdp/ranks", "reshard out --mesh fsdp=2"),
    ] {
        let nodes = Nodes::new(source, 3, Spread::One);
        let words = format!("{words} --bucket-size 500 --json");
        let foreseen: Vec<Json> = nodes.together(&format!("{words} --dry-run")).iter().map(document).collect();
        assert_eq!(names(&nodes.desk()), [""; 0]);
        let done: Vec<Json> = nodes.together(&words).iter().map(document).collect();
        let ranks = foreseen[0]["ranks"].as_array().unwrap();
        let figure = |rank: &Json, name: &str| rank[name].as_u64().unwrap_or_else(|| panic!("{rank} has no {name}"));
        for ((foreseen, done), rank) in foreseen.iter().zip(&done).zip(ranks) {
            assert_eq!(foreseen["ranks"].as_array(), Some(ranks));
            assert_eq!(figure(rank, "read"), figure(done, "bytes_read"), "{source}");
            assert_eq!(figure(rank, "received"), figure(done, "bytes_received"), "{source}");
        }
        let of_run = |name| done.iter().map(|done| figure(done, name)).sum::<u64>();
        assert_eq!(of_run("bytes_sent"), of_run("bytes_received"), "{source}");
        let sum = |name| ranks.iter().map(|rank| figure(rank, name)).sum::<u64>();
        assert_eq!(foreseen[0]["bytes_read"], sum("read"), "{source}");
        assert!(sum("sent") > 0 && sum("sent") < sum("read") * 3, "{source}: {ranks:?}");
        if !source.starts_with("hsdp") {
            assert_eq!(sum("sent"), sum("received"), "{source}: {ranks:?}");
        }
    }
}

/// Two of eight processes have SRC, and of each byte that goes into the files of four ranks they send one copy or so.
#[test]
fn what_few_have_is_passed_on() {
    const MESH: &str = "--mesh dp=4,fsdp=2 --placements R,S(0)";
    for (source, more) in [("titan/step-1000", "--to torch-ranks"), ("fsdp4/ranks", "--to torch-ranks --dtype bf16")] {
        let nodes = Nodes::held_by(source, 8, 2);
        let words = format!("reshard out {MESH} {more}");
        let foreseen = nodes.together(&format!("{words} --dry-run --json"));
        let ranks = document(&foreseen[0])["ranks"].as_array().unwrap().clone();
        let figures = |name: &str| ranks.iter().map(|rank| rank[name].as_u64().unwrap()).collect::<Vec<_>>();
        let (read, sent, received) = (figures("read"), figures("sent"), figures("received"));
        assert_eq!(read[2..], [0; 6], "{source}");
        assert!(sent.iter().sum::<u64>() <= received.iter().sum(), "{source}: {ranks:?}");
        for rank in 0..2 {
            assert!(sent[rank] < read[rank] * 2, "{source}: {ranks:?}");
        }
        assert!(sent[2..].iter().all(|sent| *sent > 0), "{source}: {ranks:?}");
        nodes.agree(&words, "");
        nodes.clear();
        nodes.agree(&words, "--bucket-size 3KB");
    }
}

/// As one process says it.
#[test]
fn replicas_that_differ() {
    for source in ["conflict/replica", "conflict/tensor"] {
        let nodes = Nodes::new(source, 2, Spread::One);
        let words = "consolidate out --check-replicas";
        let (_, alone) = nodes.alone(words);
        let message = alone.refused(&["differs between"]).err.lines().find(|line| line.starts_with("error: ")).unwrap();
        let what = message.rsplit_once("differs: ").unwrap().1;
        for outcome in nodes.together(words) {
            outcome.refused(&[what]);
            // Whose files they are: no process could `verify` them.
            outcome.refused(&[
                "rank_0.pt is with process ",
                "rank_1.pt is with process ",
                " of 2 (",
                "both; --on-conflict",
            ]);
        }
        // Nothing is in the way of what the hint says.
        assert_eq!(names(&nodes.desk()), [""; 0]);
        nodes.agree("consolidate out --on-conflict rank0", "");
        nodes.clear();
        nodes.agree("unshard out.pt --on-conflict drop", "");
    }
    let nodes = Nodes::new("conflict/object", 2, Spread::One);
    let words = "reshard out --mesh fsdp=3";
    nodes.together(words).iter().for_each(|outcome| refuses(outcome, &["differs between"]));
    nodes.clear();
    nodes.agree(&format!("{words} --on-conflict per-rank"), "");
}

/// A flipped byte is found by who sees it, and the others name that one.
#[test]
fn sums_that_do_not_hold() {
    let nodes = Nodes::new("fsdp4/ranks", 3, Spread::One);
    let name = "model_world_size_4_rank_1.pt";
    let file = &nodes.copies(name)[0];
    let mut bytes = fs::read(file).unwrap();
    // In the data of the first storage that has some.
    let at = bytes.windows(7).position(|seven| seven == b"/data/1").unwrap() + 200;
    bytes[at] ^= 1;
    fs::write(file, bytes).unwrap();
    let seer = nodes.home(name);
    // What is taken whole is held against its sum in any case.
    for words in ["consolidate out --check-crc", "consolidate out"] {
        for (rank, outcome) in (0..).zip(nodes.together(words)) {
            outcome.refused(&[name, "CRC-32"]);
            assert_eq!(outcome.err.contains(&format!("error: process {seer} of 3 (")), rank != seer, "{outcome:?}");
            let place = format!(
                "hint: the file is damaged or was not completely written: look at it on the node of process {seer} of 3 ("
            );
            assert_eq!(outcome.err.contains(&place), rank == seer, "{outcome:?}");
            assert!(!outcome.err.contains("dtshard verify"), "{outcome:?}");
        }
        assert_eq!(names(&nodes.desk()), [""; 0], "{words}");
    }
}

/// What all read of a file, since it is no tensor data, and only one has.
#[test]
fn metadata_that_is_damaged() {
    let nodes = Nodes::new("fsdp4/dcp", 3, Spread::One);
    let file = &nodes.copies(".metadata")[0];
    let mut bytes = fs::read(file).unwrap();
    let half = bytes.len() / 2;
    bytes[half..].fill(0xff);
    fs::write(file, bytes).unwrap();
    let seer = nodes.home(".metadata");
    for outcome in nodes.together("consolidate out") {
        outcome.refused(&[".metadata", &format!("look at it on the node of process {seer} of 3 (")]);
    }
}
