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

/// Nothing is written or copied, and the bytes to read are those that a run reads.
#[test]
fn dry_runs() {
    for (source, words) in [
        ("fsdp4/ranks", "reshard out --mesh fsdp=3"),
        ("titan/step-1000", "consolidate out"),
        ("hsdp/ranks", "reshard out --mesh fsdp=2"),
    ] {
        let nodes = Nodes::new(source, 3, Spread::One);
        let words = format!("{words} --json");
        let dry = nodes.together(&format!("{words} --dry-run"));
        assert!(!dry[0].err.contains("copying "), "{dry:?}");
        let dry: Vec<Json> = dry.iter().map(document).collect();
        assert_eq!(names(&nodes.desk()), [""; 0]);
        let (_, alone) = nodes.alone(&words);
        let alone = document(&alone);
        let done: Vec<Json> = nodes.together(&words).iter().map(document).collect();
        let read: u64 = done.iter().map(|done| done["bytes_read"].as_u64().unwrap()).sum();
        for dry in &dry {
            for same in ["bytes_read", "bytes_written", "tensors", "files"] {
                assert_eq!(dry[same], alone[same], "{source}: {same}");
            }
        }
        assert_eq!(alone["bytes_read"], read, "{source}");
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

/// A flipped byte ends all processes, and a process that reads it says where the file is.
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
        let outcomes = nodes.together(words);
        let place = format!(
            "hint: the file is damaged or was not completely written: look at it on the node of process {seer} of 3 ("
        );
        for outcome in &outcomes {
            outcome.refused(&[name, "CRC-32"]);
            assert!(!outcome.err.contains("dtshard verify"), "{outcome:?}");
        }
        assert!(outcomes.iter().any(|outcome| outcome.err.contains(&place)), "{outcomes:?}");
        let left = names(&nodes.desk());
        assert!(left.iter().all(|name| name == ".out.dtshard-partial"), "{words}: {left:?}");
        nodes.clear();
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
