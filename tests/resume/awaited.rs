//! Parts that are waited for and do not come, or do not come back: who waits ends, names them and keeps what was done,
//! or does without them where all that they had to do is recorded.

use std::fs;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value as Json;

use crate::job::{DCP, FILE, FOLDER, Job, Kind, names};
use crate::outcome::Outcome;

/// A task as srun starts it, one of `of`.
fn task(job: &Job, index: u32, of: u32, more: &str, fault: &str) -> Child {
    let mut command = job.command(more, Some(fault));
    command.env("SLURM_JOB_ID", "7").env("SLURM_STEP_ID", "0").env("SLURM_STEP_NUM_TASKS", of.to_string());
    command.env("SLURM_PROCID", index.to_string()).spawn().unwrap()
}

fn ended(task: Child) -> Outcome {
    task.wait_with_output().unwrap().into()
}

#[track_caller]
fn all_succeed(tasks: impl IntoIterator<Item = Child>) {
    for task in tasks {
        ended(task).succeeded();
    }
}

/// As many tasks as there should be, to the end.
fn all_tasks(job: &Job, of: u32, more: &str) {
    let tasks: Vec<Child> = (0..of).map(|index| task(job, index, of, more, "none")).collect();
    all_succeed(tasks);
}

fn written_before(job: &Job, more: &str) -> u64 {
    let said: Json = serde_json::from_str(&job.run(&format!("{more} --json"), Some("none")).succeeded().out).unwrap();
    job.said["bytes_read"].as_u64().unwrap() - said["bytes_read"].as_u64().unwrap()
}

/// Two of three tasks start.
fn without_the_third(kind: Kind) -> Job {
    let job = Job::new(kind);
    let begun = Instant::now();
    let tasks = [0, 1].map(|index| task(&job, index, 3, "", "none"));
    for (index, task) in tasks.into_iter().enumerate() {
        let ended = ended(task);
        let name = format!("[{index}/3] error: part 2 of 3 has not started to write ");
        ended.refused(&[&name, "hint: start what is missing; what was done is kept in ", ".dtshard-partial"]);
        ended.says(&[
            "the same command with --resume goes on",
            "--part 0 --parts 1 does all of the work in one process",
        ]);
        // One says who is waited for while it waits.
        let line = "[0/3] waiting for part 2 (not started); there are 3 parts, as srun has it";
        assert_eq!(ended.err.contains("waiting for"), index == 0, "{ended:?}");
        assert_eq!(ended.err.contains(line), index == 0, "{ended:?}");
    }
    assert!(begun.elapsed().as_secs() >= 9, "they have waited");
    assert!(!job.target().exists() && job.partial().exists());
    job.source_is_whole("without the third");
    job
}

#[test]
fn a_part_that_never_starts() {
    let job = without_the_third(FOLDER);
    all_tasks(&job, 3, "--resume");
    job.is_done("three tasks again");
}

/// The late one has nobody to wait for: all that the others had to do is recorded.
#[test]
fn a_part_that_comes_when_the_others_have_left() {
    let job = without_the_third(DCP);
    let saved = written_before(&job, "--parts 3 --part 2 --no-wait --resume");
    assert!(saved > job.said["bytes_read"].as_u64().unwrap() / 2, "{saved}");
    job.is_done("the late one");
}

#[test]
fn a_part_that_comes_while_it_is_waited_for() {
    let job = Job::new(FILE);
    let early = [0, 2].map(|index| task(&job, index, 3, "", "none"));
    let begun = Instant::now();
    while !job.partial().exists() || job.of_partial(".lease").len() < 2 {
        assert!(begun.elapsed().as_secs() < 10);
    }
    let late = task(&job, 1, 3, "", "none");
    all_succeed(early.into_iter().chain([late]));
    job.is_done("late");
}

/// It may come and have nothing to do, so it is waited for; then the others do without.
#[test]
fn a_part_that_never_starts_and_was_done_before() {
    let job = Job::new(FOLDER);
    job.run("--parts 3 --part 1 --no-wait --resume", Some("none")).succeeded();
    let tasks = [0, 2].map(|index| task(&job, index, 3, "--resume", "none"));
    all_succeed(tasks);
    job.is_done("two of three");
}

/// Who would throw away what is there does not come, so nobody does.
#[test]
fn a_first_part_that_never_starts_again() {
    let job = Job::new(FILE);
    assert_eq!(job.run("--resume", Some("record-after")).signal, Some(9));
    let before = names(&job.desk());
    for task in [1, 2].map(|index| task(&job, index, 3, "--restart", "none")) {
        let words = ["error: part 0 of 3 has not started to write ", "hint: with --restart the others wait for part 0"];
        ended(task).refused(&words);
    }
    assert_eq!(names(&job.desk()), before);
    all_tasks(&job, 3, "--restart");
    job.is_done("all of them");
}

#[test]
fn a_part_that_dies_over_its_work() {
    let job = Job::new(FILE);
    let tasks = [(0, "none"), (1, "record-before")].map(|(index, fault)| task(&job, index, 2, "", fault));
    let [waiting, dying] = tasks.map(ended);
    assert_eq!(dying.signal, Some(9));
    // One that died before the other came has not started, as far as that can see.
    let has_seen_it = !waiting.err.contains("has not started to write");
    let died =
        ["[0/2] error: part 1 of 2 stopped: its process is gone", "out.pt is not complete", "hint: what was done"];
    waiting.refused(if has_seen_it { &died } else { &["hint: start what is missing; what was done"] });
    waiting.says(&["is kept in ", "with --resume goes on"]);
    assert!(!job.target().exists());
    all_tasks(&job, 2, "--resume");
    job.is_done("both again");
}

/// Its one window is recorded, and it could not say any more that it is done.
#[test]
fn a_part_that_dies_when_all_is_recorded() {
    const OF: u32 = 12;
    let job = Job::new(FILE);
    let fault = |index| if index == 5 { "record-after" } else { "none" };
    let tasks: Vec<Child> = (0..OF).map(|index| task(&job, index, OF, "", fault(index))).collect();
    for (index, task) in (0..OF).zip(tasks) {
        let ended = ended(task);
        assert!(if index == 5 { ended.signal == Some(9) } else { ended.code == Some(0) }, "{index}: {ended:?}");
    }
    job.is_done("eleven of twelve");
}

/// A task of two that finds a byte wrong, before the other one comes.
fn failed_at_once(job: &Job, start: impl Fn() -> Child) {
    let path = job.source().join("model_world_size_3_rank_0.pt");
    let modified = path.metadata().unwrap().modified().unwrap();
    let right = fs::read(&path).unwrap();
    let mut wrong = right.clone();
    wrong[right.len() * 3 / 4] ^= 1;
    // As of a node whose memory holds another byte: nothing else tells.
    let write = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
    };
    write(&wrong);
    ended(start()).refused(&["CRC-32"]);
    write(&right);
}

/// Nobody starts it again within one launch, so the other one ends with it, and says why.
#[test]
fn a_part_that_failed_before_the_other_came() {
    let job = Job::new(FILE);
    failed_at_once(&job, || task(&job, 1, 2, "--check-crc --resume", "none"));
    let words = ["[0/2] error: part 1 of 2 failed: ", "CRC-32", "out.pt is not complete", "with --resume goes on"];
    let other = ended(task(&job, 0, 2, "--check-crc --resume", "none"));
    other.refused(&words);
    assert!(!other.err.contains("waiting for"), "{other:?}");
    // As Slurm starts it again: of another launch.
    let again = |index| {
        let mut command = job.command("--resume", Some("none"));
        command.envs([("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "2")]);
        command.envs([("SLURM_PROCID", index), ("SLURM_RESTART_COUNT", "1")]).spawn().unwrap()
    };
    let first = again("0");
    sleep(Duration::from_secs(4));
    all_succeed([first, again("1")]);
    job.is_done("queued again");
}

/// Started by hand it may be started again, as the whole run was: it is waited for, and who waits says why it is not there.
#[test]
fn a_part_that_failed_and_comes_again() {
    let job = Job::new(FILE);
    let start =
        |index, more: &str| job.command(&format!("--parts 2 --part {index} {more}"), Some("none")).spawn().unwrap();
    failed_at_once(&job, || start(1, "--check-crc"));
    ended(start(0, "")).refused(&["error: part 1 of 2 failed: ", "CRC-32"]);
    let first = start(0, "--resume");
    sleep(Duration::from_secs(7));
    ended(start(1, "--resume")).succeeded();
    ended(first).succeeded().says(&["waiting for part 1 (not started since it failed: ", "CRC-32"]);
    job.is_done("by hand");
}
