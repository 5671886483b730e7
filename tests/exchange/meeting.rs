//! Tests of the work folder in which the processes of `--source per-rank` find each other: the files that they leave in
//! it, and the files that they do not change.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::nodes::{Nodes, Spread, assert_succeeded, names, tree, wait_all};
use crate::outcome::{Outcome, command, fixture};

const WORDS: &str = "consolidate out --bucket-size 300";

fn nodes() -> Nodes {
    Nodes::new("fsdp4/ranks", 2, Spread::One)
}

/// Two jobs with the same DST run at the same time. One job is refused, and both jobs remove their files.
#[test]
fn second_run_at_one_destination_is_refused_and_both_clean_up() {
    let nodes = Nodes::new("accelerate_llama", 2, Spread::One);
    let (expected, _) = nodes.run_alone("consolidate out");
    let mut published = 0;
    for _ in 0..4 {
        nodes.clear();
        let start = |run: &str| {
            let of = |rank: u32| {
                let task = [("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_STEP_ID", "0"), ("SLURM_JOB_ID", run)];
                nodes.command(rank, WORDS).envs(task).env("SLURM_PROCID", rank.to_string()).spawn().unwrap()
            };
            [of(0), of(1)]
        };
        let runs = [start("1"), start("2")].map(wait_all);
        for run in &runs {
            let codes: Vec<_> = run.iter().map(|outcome| outcome.code).collect();
            assert!(codes == [Some(0); 2] || codes == [Some(2); 2], "{run:?}");
            published += usize::from(codes == [Some(0); 2]);
        }
        if names(&nodes.dst_folder()) == ["out"] {
            assert!(tree(&nodes.dst_folder().join("out")) == expected);
        } else {
            assert!(names(&nodes.dst_folder()).iter().all(|name| name == ".out.dtshard-partial"), "{runs:?}");
        }
    }
    assert!(published > 0);
}

#[test]
fn destination_in_the_source_is_refused_and_source_unchanged() {
    let nodes = nodes();
    let before = |node| (names(&nodes.source(node)), fs::metadata(nodes.source(node)).unwrap().ctime_nsec());
    let untouched = [before(0), before(1)];
    for more in [&[][..], &["--dry-run"]] {
        let outcomes = wait_all((0..2).map(|rank| {
            let (source, part) = (nodes.source(rank), rank.to_string());
            let mut command = command(&[&"consolidate", &source, &source.join("sub/out"), &"--source=per-rank"]);
            command.args(["--part", &part, "--parts", "2"]).args(more).env("DTSHARD_FAULT", "none").spawn().unwrap()
        }));
        outcomes.iter().for_each(|outcome| {
            outcome.assert_refused(&[
                "sub/out is inside the source",
                "hint: choose another destination: dtshard never changes the source",
            ]);
        });
        assert_eq!([before(0), before(1)], untouched);
    }
}

#[test]
fn dry_run_leaves_no_folders() {
    let nodes = nodes();
    for outcome in nodes.run_together("consolidate a/b/out --dry-run") {
        outcome.assert_succeeded();
    }
    assert_eq!(names(&nodes.dst_folder()), [""; 0]);
}

/// Process 0 is killed after it has renamed the output to DST. The other process succeeds, and removes the remaining
/// files.
#[test]
fn processes_succeed_after_the_first_dies_past_publishing() {
    for point in ["commit-renamed", "commit-synced-parent", "commit-removed-old", "commit-left"] {
        let nodes = Nodes::new("accelerate_llama", 2, Spread::One);
        let (expected, _) = nodes.run_alone("consolidate out");
        let start = |rank| {
            let fault = if rank == 0 { point } else { "none" };
            nodes.command(rank, WORDS).env("DTSHARD_FAULT", fault).spawn().unwrap()
        };
        let outcomes = wait_all((0..2).map(start));
        assert!(outcomes[0].signal.is_some(), "{outcomes:?}");
        outcomes[1].assert_succeeded();
        assert!(tree(&nodes.dst_folder().join("out")) == expected);
        assert_eq!(names(&nodes.dst_folder()), ["out"], "{point}");
    }
}

/// DST is a node-local folder that has the same name on both nodes, so the processes do not find each other.
#[test]
fn unshared_destination_is_refused() {
    let nodes = nodes();
    let outcomes = nodes.run_each(|rank| {
        fs::create_dir_all(nodes.dst_folder().join(format!("disk{rank}"))).unwrap();
        format!("consolidate disk{rank}/out")
    });
    for (outcome, other) in outcomes.iter().zip([1, 0]) {
        outcome.assert_refused(&[
            &format!("process {other} of 2: meet: did not connect within 10 s"),
            "hint: start all processes at the same time, with the same DST on a shared file system",
        ]);
    }
    for rank in 0..2 {
        assert_eq!(names(&nodes.dst_folder().join(format!("disk{rank}"))), [""; 0]);
    }
}

/// A waiting process prints for which process it waits, unless `--quiet` is given.
#[test]
fn waiting_processes_print_the_missing_processes() {
    let nodes = Nodes::new("fsdp4/ranks", 4, Spread::One);
    let outcomes =
        wait_all((0..3).map(|rank| nodes.start(rank, &format!("{WORDS}{}", ["", "", " --quiet"][rank as usize]))));
    for (rank, outcome) in outcomes.iter().enumerate() {
        outcome.assert_refused(&["error: process 3 of 4: meet: did not connect within 10 s"]);
        let expected_line = format!("[{rank}/4] waiting for process {} (", [3, 0, 0][rank]);
        let is_expected = |line: &str| line.starts_with(&expected_line) && line.ends_with(" of at most 10 s)");
        assert_eq!(outcome.err.lines().any(is_expected), rank < 2, "{outcome:?}");
        assert_eq!(outcome.err.contains("waiting for"), rank < 2, "{outcome:?}");
    }
    assert_eq!(names(&nodes.dst_folder()), [""; 0]);
}

#[test]
fn part_that_is_given_twice_is_an_error() {
    let nodes = Nodes::new("fsdp4/ranks", 3, Spread::One);
    let outcomes = wait_all([0, 1, 1].into_iter().map(|rank| nodes.start(rank, WORDS)));
    outcomes[0].assert_refused(&["process 2 of 3: meet: did not connect within 10 s"]);
    let blocked = outcomes[1..].iter().filter(|outcome| outcome.err.contains("still has this part"));
    assert_eq!(blocked.count(), 1, "{outcomes:?}");
    for outcome in &outcomes[1..] {
        outcome.assert_refused(&["hint: start all processes"]);
    }
}

/// Process 0 of a run is killed. The next run succeeds, with another number of processes or with a single process.
#[test]
fn work_folder_of_a_killed_first_process_does_not_block_other_runs() {
    for is_alone in [false, true] {
        let nodes = nodes();
        let work = nodes.dst_folder().join(".out.dtshard-work");
        let mut first = nodes.command_of(0, 3, WORDS).spawn().unwrap();
        let begun = Instant::now();
        while !work.exists() {
            assert!(begun.elapsed() < Duration::from_secs(9), "no work folder");
            sleep(Duration::from_millis(5));
        }
        sleep(Duration::from_millis(50));
        first.kill().unwrap();
        first.wait().unwrap();
        assert_eq!(names(&nodes.dst_folder()), [".out.dtshard-work"]);
        if is_alone {
            assert_succeeded(&nodes.command_alone(WORDS).output().unwrap().into());
        } else {
            nodes.run_together(WORDS).iter().for_each(assert_succeeded);
        }
        assert_eq!(names(&nodes.dst_folder()), ["out"]);
    }
}

/// The path of SRC is only a file name. The file system of the current folder decides whether the file is mapped.
#[test]
fn source_without_a_folder_in_its_path_is_read() {
    let nodes = Nodes::new("safetensors/sharded", 2, Spread::One);
    let name = "model.safetensors.index.json";
    (0..2).for_each(|node| drop(fs::copy(fixture("safetensors/sharded").join(name), nodes.source(node).join(name))));
    let outcomes: Vec<Outcome> = wait_all((0..2).map(|rank| {
        let part = rank.to_string();
        let mut command =
            command(&[&"consolidate", &name, &nodes.dst_folder().join("out"), &"--source=per-rank", &"-v"]);
        command.args(["--part", &part, "--parts", "2"]).env("DTSHARD_FAULT", "none").current_dir(nodes.source(rank));
        command.spawn().unwrap()
    }));
    outcomes.iter().for_each(|outcome| {
        outcome.assert_succeeded().assert_mentions(&["reading with mmap"]);
    });
}
