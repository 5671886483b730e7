//! `--fast-reduce`: NCCL reduces where each process has a summand. A stand-in takes the place of driver and NCCL, which
//! adds in another order, and rounds at each step: of two summands it makes what one process does.

use std::os::unix::fs::symlink;

use serde_json::Value as Json;
use tempfile::TempDir;

use crate::nodes::{Nodes, Spread, ended, names, succeeds};
use crate::outcome::Outcome;

/// Rank files of which each of two processes has one, and a folder where the loader finds the stand-in.
struct Desk {
    nodes: Nodes,
    libraries: TempDir,
}

impl Desk {
    fn new() -> Self {
        let libraries = tempfile::tempdir().unwrap();
        let stand_in = std::env::current_exe().unwrap().with_file_name("libgpu_stand_in.so");
        for name in ["libcuda.so", "libnccl.so.2"] {
            symlink(&stand_in, libraries.path().join(name)).unwrap();
        }
        Self { nodes: Nodes::new("partial2/ranks", 2, Spread::One), libraries }
    }

    fn each(&self, words: impl Fn(u32) -> String) -> Vec<Outcome> {
        self.start(|rank| (words(rank), "none"))
    }

    /// Each with words and a fault of its own.
    fn start(&self, how: impl Fn(u32) -> (String, &'static str)) -> Vec<Outcome> {
        ended((0..2).map(|rank| {
            let (words, fault) = how(rank);
            let mut process = self.nodes.command(rank, &words);
            process.env("DTSHARD_FAULT", fault);
            process.env("LD_LIBRARY_PATH", self.libraries.path()).env("GPU_STAND_IN_DEVICES", "2");
            process.spawn().unwrap()
        }))
    }

    fn together(&self, words: &str) -> Vec<Outcome> {
        self.each(|_| words.to_owned())
    }
}

/// Sums, averages, maxima and minima of floats are NCCL's; those of integers are beside them, and a tensor of shards.
#[test]
fn floats_are_reduced_by_nccl_stand_in() {
    let desk = Desk::new();
    for placements in ["R", "S(0)"] {
        let words = format!("reshard out --to torch-ranks --mesh dp=2 --placements {placements}");
        let (wanted, alone) = desk.nodes.alone(&words);
        alone.succeeded();
        for (backend, bucket) in [("nccl", "64MB"), ("auto", "100")] {
            let more = format!("{words} --fast-reduce --backend {backend} --bucket-size {bucket} -v");
            for outcome in desk.together(&more) {
                let said = &outcome.succeeded().err;
                assert!(said.contains("--fast-reduce: ") && said.contains(" were reduced by NCCL"), "{said}");
            }
            desk.nodes.has_made(&wanted, &words);
            desk.nodes.clear();
        }
    }
}

/// Sums are counted as if each process handed its own on to the next.
#[test]
fn what_goes_by_nccl_is_what_was_foreseen_stand_in() {
    let desk = Desk::new();
    for (placements, more) in [("R", "--fast-reduce"), ("S(0)", "--fast-reduce"), ("R", ""), ("S(0)", "")] {
        let words = format!("reshard out --to torch-ranks --mesh dp=2 --placements {placements} --backend nccl {more}");
        let documents = |words: &str| -> Vec<Json> {
            let outcomes = desk.together(&format!("{words} --json"));
            outcomes.iter().map(|outcome| serde_json::from_str(&outcome.succeeded().out).unwrap()).collect()
        };
        let foreseen = documents(&format!("{words} --dry-run"));
        for (rank, done) in documents(&words).iter().enumerate() {
            let foreseen = &foreseen[0]["ranks"][rank];
            assert_eq!(done["bytes_sent"], foreseen["sent"], "{words}");
            assert_eq!(done["bytes_received"], foreseen["received"], "{words}");
            assert!(done["bytes_sent"].as_u64().unwrap() > 0, "{words}");
        }
        desk.nodes.clear();
    }
}

#[test]
fn without_gpus_all_is_reduced_in_the_order_of_ranks() {
    let nodes = Nodes::new("partial2/ranks", 2, Spread::One);
    let words = "consolidate out";
    let (wanted, _) = nodes.alone(words);
    for outcome in nodes.together(&format!("{words} --fast-reduce -v")) {
        let warning = "warning: --fast-reduce has no effect: bytes do not go by NCCL, so all is reduced in rank order";
        assert!(outcome.succeeded().err.contains(warning), "{outcome:?}");
    }
    nodes.has_made(&wanted, words);
}

/// Nothing is Partial, or is reduced in a way that NCCL has not.
#[test]
fn what_nccl_does_not_reduce_is_warned_of_stand_in() {
    let mut desk = Desk::new();
    let words = "reshard out --to torch-ranks --mesh dp=2 --placements R --fast-reduce --backend nccl";
    let said = desk.together(&format!("{words} --include sum.i64"));
    let one = said[0].succeeded();
    assert!(one.err.contains("warning: --fast-reduce had no effect: there is no tensor of which"), "{one:?}");
    assert!(said[1].succeeded().err.is_empty(), "{said:?}");
    desk.nodes.clear();
    desk.together(words)
        .iter()
        .for_each(|outcome| assert!(!outcome.succeeded().err.contains("no effect"), "{outcome:?}"));
    desk.nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let said = desk.together("consolidate out --fast-reduce --backend nccl --json");
    let document: Json = serde_json::from_str(&said[0].succeeded().out).unwrap();
    let warning = "--fast-reduce has no effect: SRC has no Partial tensors, so nothing is reduced";
    assert!(document["warnings"].as_array().unwrap().contains(&Json::from(warning)), "{document}");
    assert!(said[0].err.contains(&format!("warning: {warning}")), "{said:?}");
}

#[test]
fn it_is_refused_where_it_makes_no_sense() {
    let desk = Desk::new();
    for outcome in desk.together("consolidate out --fast-reduce --backend cpu") {
        outcome.refused(&["--fast-reduce lets NCCL reduce", "hint: leave one of them out, or use --backend nccl"]);
    }
    for outcome in desk.together("consolidate out --fast-reduce --verify") {
        outcome.refused(&["--verify reduces all again in the order of ranks", "hint: leave one of them out"]);
    }
    let one = |rank: u32| format!("consolidate out {}", if rank == 1 { "--fast-reduce" } else { "" });
    for outcome in desk.each(one) {
        outcome.refused(&[
            "process 1 of 2 (",
            "): plan: it makes something else than process 0 does: --fast-reduce: it is ",
        ]);
    }
    assert_eq!(names(&desk.nodes.desk()), [""; 0]);
}

/// One of both is killed; copies of what is missing are made again with it, and nobody goes on in another way.
#[test]
fn a_run_goes_on_as_it_began_stand_in() {
    let desk = Desk::new();
    let words = "reshard out --to torch-ranks --mesh dp=2 --placements R";
    let (wanted, _) = desk.nodes.alone(words);
    let begun = format!("{words} --bucket-size 40");
    let killed = desk.start(|rank| (format!("{begun} --fast-reduce"), if rank == 1 { "record-after" } else { "none" }));
    assert_eq!(killed[1].signal, Some(9));
    for outcome in desk.together(&format!("{begun} --resume")) {
        outcome.refused(&["--fast-reduce was by NCCL, now not given"]);
    }
    for outcome in desk.nodes.together(&format!("{begun} --resume --fast-reduce")) {
        outcome.refused(&["--fast-reduce was by NCCL, now in rank order"]);
    }
    desk.together(&format!("{begun} --resume --fast-reduce")).iter().for_each(succeeds);
    desk.nodes.has_made(&wanted, words);
}
