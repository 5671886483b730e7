//! Tests of the messages and JSON documents of several processes: one process prints for all processes, and an error
//! names the process that sees the file.

use std::fs;

use serde_json::Value as Json;

use crate::nodes::{Nodes, Spread, assert_refused, names};
use crate::outcome::Outcome;

fn document(outcome: &Outcome) -> Json {
    serde_json::from_str(&outcome.assert_succeeded().out).unwrap_or_else(|error| panic!("{error}: {outcome:?}"))
}

#[test]
fn json_documents_of_all_processes_add_up() {
    let nodes = Nodes::new("fsdp4/ranks", 3, Spread::One);
    let words = "reshard out --mesh fsdp=3 --json";
    let (_, alone) = nodes.run_alone(words);
    let alone = document(&alone);
    let documents: Vec<Json> = nodes.run_together(&format!("{words} --bucket-size 500")).iter().map(document).collect();
    let read: u64 = documents.iter().map(|document| document["bytes_read"].as_u64().unwrap()).sum();
    assert!(read <= alone["bytes_read"].as_u64().unwrap(), "{read}: no byte is read twice");
    for (rank, document) in documents.iter().enumerate() {
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
fn one_process_prints_the_messages() {
    let nodes = Nodes::new("fsdp4/ranks", 3, Spread::One);
    let outcomes = nodes.run_together("consolidate out --dtype bf16");
    let lines: Vec<&str> = outcomes.iter().flat_map(|outcome| outcome.err.lines()).collect();
    assert_eq!(lines.iter().filter(|line| line.contains("wrote")).count(), 1, "{lines:?}");
    assert!(outcomes[1].err.is_empty() && outcomes[2].err.is_empty(), "{lines:?}");
}

/// A dry run writes and copies no files, and reports the number of bytes that a run reads.
#[test]
fn dry_run_reports_the_bytes_that_a_run_reads() {
    for (source, words) in [
        ("fsdp4/ranks", "reshard out --mesh fsdp=3"),
        ("titan/step-1000", "consolidate out"),
        ("hsdp/ranks", "reshard out --mesh fsdp=2"),
    ] {
        let nodes = Nodes::new(source, 3, Spread::One);
        let words = format!("{words} --json");
        let dry = nodes.run_together(&format!("{words} --dry-run"));
        assert!(!dry[0].err.contains("copying "), "{dry:?}");
        let dry: Vec<Json> = dry.iter().map(document).collect();
        assert_eq!(names(&nodes.dst_folder()), [""; 0]);
        let (_, alone) = nodes.run_alone(&words);
        let alone = document(&alone);
        let done: Vec<Json> = nodes.run_together(&words).iter().map(document).collect();
        let read: u64 = done.iter().map(|done| done["bytes_read"].as_u64().unwrap()).sum();
        for dry in &dry {
            for same in ["bytes_read", "bytes_written", "tensors", "files"] {
                assert_eq!(dry[same], alone[same], "{source}: {same}");
            }
        }
        assert_eq!(alone["bytes_read"], read, "{source}");
    }
}

/// If replicas differ, all processes print the message that one process prints.
#[test]
fn differing_replicas_are_refused_with_their_processes() {
    for source in ["conflict/replica", "conflict/tensor"] {
        let nodes = Nodes::new(source, 2, Spread::One);
        let words = "consolidate out --check-replicas";
        let (_, alone) = nodes.run_alone(words);
        let message =
            alone.assert_refused(&["differs between"]).err.lines().find(|line| line.starts_with("error: ")).unwrap();
        let what = message.rsplit_once("differs: ").unwrap().1;
        for outcome in nodes.run_together(words) {
            outcome.assert_refused(&[what]);
            // The message names the processes that see the files, because no single process could `verify` both files.
            outcome.assert_refused(&[
                "rank_0.pt is seen by process ",
                "rank_1.pt is seen by process ",
                " of 2 (",
                "copy both files into one folder, and `dtshard verify` lists all such tensors",
            ]);
        }
        // The user can follow the hint immediately, because no files remain.
        assert_eq!(names(&nodes.dst_folder()), [""; 0]);
        nodes.assert_equals_one_process("consolidate out --on-conflict rank0", "");
        nodes.clear();
        nodes.assert_equals_one_process("unshard out.pt --on-conflict drop", "");
    }
    let nodes = Nodes::new("conflict/object", 2, Spread::One);
    let words = "reshard out --mesh fsdp=3";
    nodes.run_together(words).iter().for_each(|outcome| assert_refused(outcome, &["differs between"]));
    nodes.clear();
    nodes.assert_equals_one_process(&format!("{words} --on-conflict per-rank"), "");
}

/// If a byte of a file is flipped, all processes end, and the process that reads the file names it.
#[test]
fn wrong_checksum_ends_all_with_the_process_of_the_file() {
    let nodes = Nodes::new("fsdp4/ranks", 3, Spread::One);
    let name = "model_world_size_4_rank_1.pt";
    let file = &nodes.copies(name)[0];
    let mut bytes = fs::read(file).unwrap();
    // The flipped byte is in the data of the first storage that is not empty.
    let at = bytes.windows(7).position(|seven| seven == b"/data/1").unwrap() + 200;
    bytes[at] ^= 1;
    fs::write(file, bytes).unwrap();
    let owner = nodes.node_of(name);
    // The CRC-32 of a record that is copied completely is always checked, so `--check-crc` makes no difference.
    for words in ["consolidate out --check-crc", "consolidate out"] {
        let outcomes = nodes.run_together(words);
        let place = format!(
            "hint: the file is damaged or was not completely written: check it on the node of process {owner} of 3 ("
        );
        for outcome in &outcomes {
            outcome.assert_refused(&[name, "CRC-32"]);
            assert!(!outcome.err.contains("dtshard verify"), "{outcome:?}");
        }
        assert!(outcomes.iter().any(|outcome| outcome.err.contains(&place)), "{outcomes:?}");
        let left = names(&nodes.dst_folder());
        assert!(left.iter().all(|name| name == ".out.dtshard-partial"), "{words}: {left:?}");
        nodes.clear();
    }
}

/// One process has the metadata file, and all processes read its content.
#[test]
fn damaged_metadata_is_refused_with_its_process() {
    let nodes = Nodes::new("fsdp4/dcp", 3, Spread::One);
    let file = &nodes.copies(".metadata")[0];
    let mut bytes = fs::read(file).unwrap();
    let half = bytes.len() / 2;
    bytes[half..].fill(0xff);
    fs::write(file, bytes).unwrap();
    let owner = nodes.node_of(".metadata");
    for outcome in nodes.run_together("consolidate out") {
        outcome.assert_refused(&[".metadata", &format!("check it on the node of process {owner} of 3 (")]);
    }
}
