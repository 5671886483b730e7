//! What is refused before anybody waits, with what can be done, and leaves nothing behind.

use crate::nodes::{Nodes, Spread, ended, names};
use crate::outcome::{Outcome, command};

fn one(words: &str, environment: &[(&str, &str)]) -> Outcome {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let (source, destination) = (nodes.source(0), nodes.desk().join("out"));
    let mut command = command(&[&"consolidate", &source, &destination]);
    command.args(words.split_whitespace()).args(["--source", "per-rank"]).envs(environment.iter().copied());
    let outcome = command.output().unwrap().into();
    assert_eq!(names(&nodes.desk()), [""; 0]);
    outcome
}

#[test]
fn runs_that_nobody_joins() {
    one("", &[])
        .refused(&["--source per-rank: this is the only process", "hint: start one where each part of SRC lies"]);
    one("--parts 1", &[]).refused(&["this is the only process"]);
    one("--part 0 --parts 2 --no-wait", &[]).refused(&[
        "processes have to run at the same time, and with --no-wait they may not",
        "hint: start them by srun, torchrun or mpirun",
    ]);
    one("--parts 2", &[("SLURM_ARRAY_TASK_ID", "1")]).refused(&["and elements of an array may not"]);
}

#[test]
fn options_that_need_all_of_src() {
    one("--part 0 --parts 2 --verify", &[]).refused(&["--verify reads all of SRC again", "hint: leave it out"]);
}

#[test]
fn rendezvous_names_what_replaced_it() {
    one("--part 0 --parts 2 --rendezvous tcp://node1:29500", &[]).refused(&[
        "--rendezvous was removed: processes meet in a folder beside DST, or by MPI",
        "hint: leave it out; to exchange over a network, start the processes under MPI or srun",
    ]);
}

#[test]
fn a_dry_run_without_a_place_to_meet() {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let words = ["--dry-run", "--source", "per-rank", "--part", "0", "--parts", "2"];
    let outcome: Outcome = command(&[&"consolidate", &nodes.source(0)]).args(words).output().unwrap().into();
    outcome.refused(&["processes meet beside DST, which is not given", "hint: say DST with --dry-run, too"]);
}

#[test]
fn too_little_memory() {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    for outcome in nodes.together("consolidate out --max-memory 64MB --bucket-size 64MB") {
        outcome.refused(&["--max-memory", "--bucket-size"]);
    }
    assert_eq!(names(&nodes.desk()), [""; 0]);
    nodes.agree("consolidate out --max-memory 96MB", "--bucket-size 1MB");
}

/// Rounds follow from it, on all alike. A run may go on with another one.
#[test]
fn another_bucket_size() {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let outcomes = ended((0..2).map(|rank| {
        let size = ["1MB", "2MB"][rank as usize];
        nodes.command(rank, &format!("consolidate out --bucket-size {size}")).spawn().unwrap()
    }));
    for outcome in outcomes {
        outcome.refused(&[
            "process 1 of 2: --bucket-size: 2000000; at process 0: 1000000",
            "hint: start all processes with",
        ]);
    }
    assert_eq!(names(&nodes.desk()), [""; 0]);
}
