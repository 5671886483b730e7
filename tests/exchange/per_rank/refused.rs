//! Tests of runs that are refused before any process waits. Each error has a hint, and no files remain.

use crate::nodes::{Nodes, Spread, names, wait_all};
use crate::outcome::{Outcome, command};

fn run_one(words: &str, environment: &[(&str, &str)]) -> Outcome {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let (source, destination) = (nodes.source(0), nodes.dst_folder().join("out"));
    let mut command = command(&[&"consolidate", &source, &destination]);
    command.args(words.split_whitespace()).args(["--source", "per-rank"]).envs(environment.iter().copied());
    let outcome = command.output().unwrap().into();
    assert_eq!(names(&nodes.dst_folder()), [""; 0]);
    outcome
}

#[test]
fn run_without_other_processes_is_refused() {
    run_one("", &[]).assert_refused(&[
        "--source per-rank: this is the only process",
        "hint: start one process on each node that stores a part of SRC",
    ]);
    run_one("--parts 1", &[]).assert_refused(&["this is the only process"]);
    run_one("--part 0 --parts 2 --no-wait", &[]).assert_refused(&[
        "processes must run at the same time, but with --no-wait they may start at different times",
        "hint: start the processes with srun, torchrun or mpirun",
    ]);
    run_one("--parts 2", &[("SLURM_ARRAY_TASK_ID", "1")])
        .assert_refused(&["but the tasks of a Slurm array may start at different times"]);
}

#[test]
fn verify_option_is_refused() {
    run_one("--part 0 --parts 2 --verify", &[]).assert_refused(&[
        "--verify cannot be used with --source per-rank: --verify reads all of SRC again",
        "hint: omit --verify",
    ]);
}

#[test]
fn rendezvous_option_names_its_replacement() {
    run_one("--part 0 --parts 2 --rendezvous tcp://node1:29500", &[]).assert_refused(&[
        "--rendezvous was removed: processes meet in a folder beside DST, or by MPI",
        "hint: omit --rendezvous; to exchange tensors over a network, start the processes under MPI or srun",
    ]);
}

#[test]
fn dry_run_without_dst_is_refused() {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let words = ["--dry-run", "--source", "per-rank", "--part", "0", "--parts", "2"];
    let outcome: Outcome = command(&[&"consolidate", &nodes.source(0)]).args(words).output().unwrap().into();
    outcome.assert_refused(&[
        "processes connect through a folder beside DST, but no DST is given",
        "hint: give DST, even with --dry-run",
    ]);
}

#[test]
fn too_little_memory_is_refused() {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    for outcome in nodes.run_together("consolidate out --max-memory 64MB --bucket-size 64MB") {
        outcome.assert_refused(&["--max-memory", "--bucket-size"]);
    }
    assert_eq!(names(&nodes.dst_folder()), [""; 0]);
    nodes.assert_equals_one_process("consolidate out --max-memory 96MB", "--bucket-size 1MB");
}

/// All processes of a run need the same bucket size, because it determines the rounds. A resumed run may have another
/// size.
#[test]
fn different_bucket_sizes_are_refused() {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let outcomes = wait_all((0..2).map(|rank| {
        let size = ["1MB", "2MB"][rank as usize];
        nodes.command(rank, &format!("consolidate out --bucket-size {size}")).spawn().unwrap()
    }));
    for outcome in outcomes {
        outcome.assert_refused(&[
            "--bucket-size differs between processes: process 1 of 2: 2000000; process 0: 1000000",
            "hint: start all processes with",
        ]);
    }
    assert_eq!(names(&nodes.dst_folder()), [""; 0]);
}
