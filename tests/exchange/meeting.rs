//! Where the processes of `--source per-rank` meet: what they leave there, and what they do not touch.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::nodes::{Nodes, Spread, ended, names, succeeds, tree};
use crate::outcome::{Outcome, command, fixture};

const WORDS: &str = "consolidate out --bucket-size 300";

fn nodes() -> Nodes {
    Nodes::new("fsdp4/ranks", 2, Spread::One)
}

/// Two runs, of which the launchers tell them apart, at one DST: one is refused, and both take away what is theirs.
#[test]
fn two_runs_at_one_destination() {
    let nodes = Nodes::new("accelerate_llama", 2, Spread::One);
    let (wanted, _) = nodes.alone("consolidate out");
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
        let runs = [start("1"), start("2")].map(ended);
        for run in &runs {
            let codes: Vec<_> = run.iter().map(|outcome| outcome.code).collect();
            assert!(codes == [Some(0); 2] || codes == [Some(2); 2], "{run:?}");
            published += usize::from(codes == [Some(0); 2]);
        }
        if names(&nodes.desk()) == ["out"] {
            assert!(tree(&nodes.desk().join("out")) == wanted);
        } else {
            assert!(names(&nodes.desk()).iter().all(|name| name == ".out.dtshard-partial"), "{runs:?}");
        }
    }
    assert!(published > 0);
}

#[test]
fn a_destination_in_the_source_leaves_it_alone() {
    let nodes = nodes();
    let before = |node| (names(&nodes.source(node)), fs::metadata(nodes.source(node)).unwrap().ctime_nsec());
    let untouched = [before(0), before(1)];
    for more in [&[][..], &["--dry-run"]] {
        let outcomes = ended((0..2).map(|rank| {
            let (source, part) = (nodes.source(rank), rank.to_string());
            let mut command = command(&[&"consolidate", &source, &source.join("sub/out"), &"--source=per-rank"]);
            command.args(["--part", &part, "--parts", "2"]).args(more).env("DTSHARD_FAULT", "none").spawn().unwrap()
        }));
        outcomes.iter().for_each(|outcome| {
            outcome.refused(&["sub/out lies inside the source", "hint: choose a destination beside the source"]);
        });
        assert_eq!([before(0), before(1)], untouched);
    }
}

#[test]
fn a_dry_run_leaves_no_folders() {
    let nodes = nodes();
    for outcome in nodes.together("consolidate a/b/out --dry-run") {
        outcome.succeeded();
    }
    assert_eq!(names(&nodes.desk()), [""; 0]);
}

/// Rank 0 dies behind the rename: DST is there, and whoever is left says so, and takes away the rest.
#[test]
fn published_is_published() {
    for point in ["commit-renamed", "commit-synced-parent", "commit-removed-old", "commit-left"] {
        let nodes = Nodes::new("accelerate_llama", 2, Spread::One);
        let (wanted, _) = nodes.alone("consolidate out");
        let start = |rank| {
            let fault = if rank == 0 { point } else { "none" };
            nodes.command(rank, WORDS).env("DTSHARD_FAULT", fault).spawn().unwrap()
        };
        let outcomes = ended((0..2).map(start));
        assert!(outcomes[0].signal.is_some(), "{outcomes:?}");
        outcomes[1].succeeded();
        assert!(tree(&nodes.desk().join("out")) == wanted);
        assert_eq!(names(&nodes.desk()), ["out"], "{point}");
    }
}

/// Folders of one name on two nodes, and a file to meet by.
#[test]
fn a_destination_that_is_not_shared() {
    let nodes = nodes();
    fs::create_dir(nodes.desk().join("meet")).unwrap();
    let by_file = format!("--rendezvous file://{}", nodes.desk().join("meet").display());
    let apart = |more: &str| {
        nodes.each(|rank| {
            fs::create_dir_all(nodes.desk().join(format!("disk{rank}"))).unwrap();
            format!("consolidate disk{rank}/out {more}")
        })
    };
    for outcome in apart(&by_file) {
        outcome.refused(&[
            "error: process 1 of 2 (",
            "): meet: it does not see ",
            ", which process 0 has made\n",
            "hint: the folder of DST",
        ]);
    }
    for outcome in apart("") {
        outcome
            .refused(&["did not come within 10 s", "the folder of DST has to be on a file system that all processes"]);
    }
    // Word for the one that did not come, which never sees it.
    assert_eq!(names(&nodes.desk().join("disk0")), [".out.dtshard-meeting"]);
    assert_eq!(names(&nodes.desk().join("disk1")), [""; 0]);
}

/// What a process says on stderr until it says this.
fn hear(process: &mut Child, words: &str) -> String {
    let (stderr, mut said) = (process.stderr.as_mut().unwrap(), String::new());
    while !said.contains(words) {
        let mut more = [0; 4096];
        let read = stderr.read(&mut more).unwrap();
        assert!(read > 0, "no `{words}` in {said}");
        said += &String::from_utf8_lossy(&more[..read]);
    }
    said
}

/// By all that wait, unless they are to be quiet. Who comes late by hand may be the first of the next run.
#[test]
fn whom_processes_wait_for() {
    let nodes = Nodes::new("fsdp4/ranks", 4, Spread::One);
    let outcomes =
        ended((0..3).map(|rank| nodes.start(rank, &format!("{WORDS}{}", ["", "", " --quiet"][rank as usize]))));
    for (rank, outcome) in outcomes.iter().enumerate() {
        outcome.refused(&["error: process 3 of 4: rendezvous: did not come within 10 s"]);
        let said = format!("[{rank}/4] waiting for process 3 of 4 (");
        let is_said = |line: &str| line.starts_with(&said) && line.ends_with(" of at most 10 s)");
        assert_eq!(outcome.err.lines().any(is_said), rank < 2, "{outcome:?}");
        assert_eq!(outcome.err.contains("waiting for"), rank < 2, "{outcome:?}");
    }
    let mut late = nodes.start(3, WORDS);
    let said = hear(&mut late, "waiting for process 0 at file://");
    for words in [
        "[3/4] an earlier meeting here has failed: process 3: did not come within 10 s; ",
        "; waiting for process 0 of another run",
    ] {
        assert!(said.contains(words), "{said}");
    }
    let others = ended((0..3).map(|rank| nodes.start(rank, WORDS)));
    others.iter().for_each(succeeds);
    let [late] = &ended([late])[..] else { unreachable!("one process") };
    late.succeeded();
    assert_eq!(names(&nodes.desk()), ["out"]);
}

/// Of a run that has a name there is no other.
#[test]
fn a_task_that_comes_late() {
    let nodes = nodes();
    let task = |rank: u32| {
        let task = [("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_STEP_ID", "0"), ("SLURM_JOB_ID", "9")];
        nodes.command(rank, WORDS).envs(task).env("SLURM_PROCID", rank.to_string()).spawn().unwrap()
    };
    ended([task(0)])[0].refused(&["process 1 of 2: rendezvous: did not come within 10 s"]);
    let begun = Instant::now();
    ended([task(1)])[0]
        .refused(&["process 1 of 2: rendezvous: did not come within 10 s; ", ", as process 0, called the meeting off"]);
    assert!(begun.elapsed() < Duration::from_secs(9), "{:?}", begun.elapsed());
    assert_eq!(names(&nodes.desk()), [""; 0]);
}

#[test]
fn a_part_that_is_given_twice() {
    let nodes = Nodes::new("fsdp4/ranks", 4, Spread::One);
    let processes: Vec<_> = [0, 1, 1, 3].into_iter().map(|rank| nodes.start(rank, WORDS)).collect();
    let both = [1, 2].map(|number: usize| format!(", pid {}", processes[number].id()));
    for outcome in ended(processes) {
        outcome.refused(&["two take themselves for it: ", &both[0], &both[1], "hint: start all processes"]);
        // Nor is the one waited for until all give up that never comes.
        assert!(outcome.err.contains("process 1") && !outcome.err.contains("did not come within"), "{outcome:?}");
    }
}

/// As where a whole run has one process too many: who is turned away does not take the place away, between the moment
/// that all have met and the one that they see their folder in it.
#[test]
fn one_too_many_harms_nobody() {
    let nodes = nodes();
    for _ in 0..8 {
        nodes.clear();
        let outcomes = ended([0, 1, 1].map(|rank| nodes.start(rank, WORDS)));
        succeeds(&outcomes[0]);
        assert_eq!(outcomes.iter().filter(|outcome| outcome.code == Some(0)).count(), 2, "{outcomes:?}");
    }
}

/// The next run may have another number of parts.
#[test]
fn a_first_process_that_was_killed() {
    let nodes = nodes();
    let place = nodes.desk().join(".out.dtshard-meeting");
    let mut first = nodes.command_of(0, 3, WORDS).spawn().unwrap();
    let begun = Instant::now();
    while !names_in(&place).iter().any(|name| name.starts_with("rendezvous-") && !name.ends_with("tmp")) {
        assert!(begun.elapsed() < Duration::from_secs(9), "no address");
        sleep(Duration::from_millis(5));
    }
    first.kill().unwrap();
    first.wait().unwrap();
    assert_eq!(names(&nodes.desk()), [".out.dtshard-meeting"]);
    // One that meets nobody takes it away as well.
    let alone = copied(&place);
    nodes.together(WORDS).iter().for_each(succeeds);
    assert_eq!(names(&nodes.desk()), ["out"]);
    nodes.clear();
    alone(&place);
    succeeds(&nodes.command_alone(WORDS).output().unwrap().into());
    assert_eq!(names(&nodes.desk()), ["out"]);
}

/// What puts files of a folder back, elsewhere or when it is gone.
fn copied(folder: &Path) -> impl Fn(&Path) {
    let files: Vec<_> =
        names_in(folder).into_iter().map(|name| (fs::read(folder.join(&name)).unwrap(), name)).collect();
    move |to| {
        fs::create_dir_all(to).unwrap();
        files.iter().for_each(|(bytes, name)| fs::write(to.join(name), bytes).unwrap());
    }
}

/// Of a folder that may not be there.
fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn others_hear_why_one_ends() {
    let nodes = nodes();
    let outcomes = nodes.each(|rank| format!("{WORDS}{}", if rank == 1 { " --include nothing" } else { "" }));
    outcomes[0].refused(&["error: process 1 of 2", "failed: ", "nothing"]);
    assert_eq!(names(&nodes.desk()), [""; 0]);
}

/// As of the folder that it is in, it is mapped where that is on a local disk.
#[test]
fn a_source_that_is_a_bare_name() {
    let nodes = Nodes::new("safetensors/sharded", 2, Spread::One);
    let name = "model.safetensors.index.json";
    (0..2).for_each(|node| drop(fs::copy(fixture("safetensors/sharded").join(name), nodes.source(node).join(name))));
    let outcomes: Vec<Outcome> = ended((0..2).map(|rank| {
        let part = rank.to_string();
        let mut command = command(&[&"consolidate", &name, &nodes.desk().join("out"), &"--source=per-rank", &"-v"]);
        command.args(["--part", &part, "--parts", "2"]).env("DTSHARD_FAULT", "none").current_dir(nodes.source(rank));
        command.spawn().unwrap()
    }));
    outcomes.iter().for_each(|outcome| {
        outcome.succeeded().says(&["reading from mappings"]);
    });
}
