//! Tests of `--fast-reduce`, with which NCCL reduces values if each process has one partial value. The `gpu-stand-in`
//! library replaces the CUDA driver and NCCL. It adds in another order than dtshard and rounds at each step. With two
//! partial values, the result is still equal to the result of one process.

use std::os::unix::fs::symlink;

use serde_json::Value as Json;
use tempfile::TempDir;

use crate::nodes::{Nodes, Spread, assert_succeeded, names, wait_all};
use crate::outcome::Outcome;

/// Two nodes with the rank files of SRC, one for each process, and a folder in which the loader finds the
/// `gpu-stand-in` library.
struct GpuEnv {
    nodes: Nodes,
    libraries: TempDir,
}

impl GpuEnv {
    fn new() -> Self {
        let libraries = tempfile::tempdir().unwrap();
        let stand_in = std::env::current_exe().unwrap().with_file_name("libgpu_stand_in.so");
        for name in ["libcuda.so", "libnccl.so.2"] {
            symlink(&stand_in, libraries.path().join(name)).unwrap();
        }
        Self { nodes: Nodes::new("partial2/ranks", 2, Spread::One), libraries }
    }

    fn run_each(&self, words: impl Fn(u32) -> String) -> Vec<Outcome> {
        self.start(|rank| (words(rank), "none"))
    }

    /// Runs both processes. `how` returns the verb with the options, and the crash point, for the number of a process.
    fn start(&self, how: impl Fn(u32) -> (String, &'static str)) -> Vec<Outcome> {
        wait_all((0..2).map(|rank| {
            let (words, fault) = how(rank);
            let mut process = self.nodes.command(rank, &words);
            process.env("DTSHARD_FAULT", fault);
            process.env("LD_LIBRARY_PATH", self.libraries.path()).env("GPU_STAND_IN_DEVICES", "2");
            process.spawn().unwrap()
        }))
    }

    fn run_together(&self, words: &str) -> Vec<Outcome> {
        self.run_each(|_| words.to_owned())
    }
}

/// NCCL reduces sums, averages, maxima and minima of floats. In the same run, integers and a sharded tensor are
/// converted without NCCL.
#[test]
fn fast_reduce_reduces_floats_by_nccl() {
    let env = GpuEnv::new();
    for placements in ["R", "S(0)"] {
        let words = format!("reshard out --to torch-ranks --mesh dp=2 --placements {placements}");
        let (expected, alone) = env.nodes.run_alone(&words);
        alone.assert_succeeded();
        for (backend, bucket) in [("nccl", "64MB"), ("auto", "100")] {
            let more = format!("{words} --fast-reduce --backend {backend} --bucket-size {bucket} -v");
            for outcome in env.run_together(&more) {
                let stderr = &outcome.assert_succeeded().err;
                assert!(stderr.contains("--fast-reduce: ") && stderr.contains(" were reduced by NCCL"), "{stderr}");
            }
            env.nodes.assert_made(&expected, &words);
            env.nodes.clear();
        }
    }
}

/// The bytes that a sum sends are counted as if each process sent its value to the next process.
#[test]
fn dry_run_reports_the_bytes_sent_by_nccl() {
    let env = GpuEnv::new();
    for (placements, more) in [("R", "--fast-reduce"), ("S(0)", "--fast-reduce"), ("R", ""), ("S(0)", "")] {
        let words = format!("reshard out --to torch-ranks --mesh dp=2 --placements {placements} --backend nccl {more}");
        let documents = |words: &str| -> Vec<Json> {
            let outcomes = env.run_together(&format!("{words} --json"));
            outcomes.iter().map(|outcome| serde_json::from_str(&outcome.assert_succeeded().out).unwrap()).collect()
        };
        let planned = documents(&format!("{words} --dry-run"));
        for (rank, done) in documents(&words).iter().enumerate() {
            let planned = &planned[0]["ranks"][rank];
            assert_eq!(done["bytes_sent"], planned["sent"], "{words}");
            assert_eq!(done["bytes_received"], planned["received"], "{words}");
            assert!(done["bytes_sent"].as_u64().unwrap() > 0, "{words}");
        }
        env.nodes.clear();
    }
}

#[test]
fn fast_reduce_without_gpus_has_no_effect_and_a_warning() {
    let nodes = Nodes::new("partial2/ranks", 2, Spread::One);
    let words = "consolidate out";
    let (expected, _) = nodes.run_alone(words);
    for outcome in nodes.run_together(&format!("{words} --fast-reduce -v")) {
        let warning =
            "warning: --fast-reduce has no effect, because NCCL is not used, so all values are reduced in rank order";
        assert!(outcome.assert_succeeded().err.contains(warning), "{outcome:?}");
    }
    nodes.assert_made(&expected, words);
}

/// No tensor has a Partial placement, or NCCL does not support its reduce op.
#[test]
fn fast_reduce_without_reducible_tensors_gives_a_warning() {
    let mut env = GpuEnv::new();
    let words = "reshard out --to torch-ranks --mesh dp=2 --placements R --fast-reduce --backend nccl";
    let outcomes = env.run_together(&format!("{words} --include sum.i64"));
    let one = outcomes[0].assert_succeeded();
    assert!(one.err.contains("warning: --fast-reduce had no effect, and all values were reduced"), "{one:?}");
    assert!(outcomes[1].assert_succeeded().err.is_empty(), "{outcomes:?}");
    env.nodes.clear();
    env.run_together(words)
        .iter()
        .for_each(|outcome| assert!(!outcome.assert_succeeded().err.contains("no effect"), "{outcome:?}"));
    env.nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let outcomes = env.run_together("consolidate out --fast-reduce --backend nccl --json");
    let document: Json = serde_json::from_str(&outcomes[0].assert_succeeded().out).unwrap();
    let warning = "--fast-reduce has no effect, because SRC has no Partial tensors, so nothing is reduced";
    assert!(document["warnings"].as_array().unwrap().contains(&Json::from(warning)), "{document}");
    assert!(outcomes[0].err.contains(&format!("warning: {warning}")), "{outcomes:?}");
}

#[test]
fn fast_reduce_with_contradicting_options_is_refused() {
    let env = GpuEnv::new();
    for outcome in env.run_together("consolidate out --fast-reduce --backend cpu") {
        outcome.assert_refused(&[
            "--fast-reduce reduces with NCCL, so it cannot be used with --backend cpu or mpi",
            "hint: omit --fast-reduce, or use --backend nccl",
        ]);
    }
    for outcome in env.run_together("consolidate out --fast-reduce --verify") {
        outcome.assert_refused(&["--verify cannot be used with --fast-reduce", "hint: omit --verify or --fast-reduce"]);
    }
    let one = |rank: u32| format!("consolidate out {}", if rank == 1 { "--fast-reduce" } else { "" });
    for outcome in env.run_each(one) {
        outcome.assert_refused(&[
            "process 1 of 2 (",
            "): plan: it differs from the plan of process 0: --fast-reduce: given; at process 0: not given",
        ]);
    }
    assert_eq!(names(&env.nodes.dst_folder()), [""; 0]);
}

/// One of two processes of a run with `--fast-reduce` is killed. The run can be resumed only with `--fast-reduce` and
/// NCCL.
#[test]
fn resume_with_other_fast_reduce_is_refused() {
    let env = GpuEnv::new();
    let words = "reshard out --to torch-ranks --mesh dp=2 --placements R";
    let (expected, _) = env.nodes.run_alone(words);
    let begun = format!("{words} --bucket-size 40");
    let killed = env.start(|rank| (format!("{begun} --fast-reduce"), if rank == 1 { "record-after" } else { "none" }));
    assert_eq!(killed[1].signal, Some(9));
    for outcome in env.run_together(&format!("{begun} --resume")) {
        outcome.assert_refused(&["--fast-reduce was by NCCL, now not given"]);
    }
    for outcome in env.nodes.run_together(&format!("{begun} --resume --fast-reduce")) {
        outcome.assert_refused(&["--fast-reduce was by NCCL, now in rank order"]);
    }
    env.run_together(&format!("{begun} --resume --fast-reduce")).iter().for_each(assert_succeeded);
    env.nodes.assert_made(&expected, words);
}
