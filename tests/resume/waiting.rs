//! Tests of parts that do not start, are killed or fail. The waiting parts end with an error that names the missing
//! part and keep the finished work, or they complete without the part if all its work is recorded.

use std::fs;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value as Json;

use crate::job::{DCP, FILE, FOLDER, Job, Kind, names};
use crate::outcome::Outcome;

/// Starts a process as srun starts task `index` of `of` tasks: with the environment variables of Slurm.
fn task(job: &Job, index: u32, of: u32, more: &str, fault: &str) -> Child {
    let mut command = job.command(more, Some(fault));
    command.env("SLURM_JOB_ID", "7").env("SLURM_STEP_ID", "0").env("SLURM_STEP_NUM_TASKS", of.to_string());
    command.env("SLURM_PROCID", index.to_string()).spawn().unwrap()
}

fn wait(task: Child) -> Outcome {
    task.wait_with_output().unwrap().into()
}

#[track_caller]
fn assert_all_succeed(tasks: impl IntoIterator<Item = Child>) {
    for task in tasks {
        wait(task).assert_succeeded();
    }
}

/// Runs `of` tasks at the same time, and asserts that they succeed.
fn assert_all_tasks_succeed(job: &Job, of: u32, more: &str) {
    let tasks: Vec<Child> = (0..of).map(|index| task(job, index, of, more, "none")).collect();
    assert_all_succeed(tasks);
}

fn bytes_recorded_before(job: &Job, more: &str) -> u64 {
    let document: Json =
        serde_json::from_str(&job.run(&format!("{more} --json"), Some("none")).assert_succeeded().out).unwrap();
    job.document["bytes_read"].as_u64().unwrap() - document["bytes_read"].as_u64().unwrap()
}

/// Runs two of three tasks of a new job, and asserts that both end with an error about the third task. Returns the job.
fn run_without_the_third(kind: Kind) -> Job {
    let job = Job::new(kind);
    let begun = Instant::now();
    let tasks = [0, 1].map(|index| task(&job, index, 3, "", "none"));
    for (index, task) in tasks.into_iter().enumerate() {
        let ended = wait(task);
        let name = format!("[{index}/3] error: part 2 of 3 has not started to write ");
        ended.assert_refused(&[
            &name,
            "hint: start the missing parts; the completed work is kept in ",
            ".dtshard-partial",
        ]);
        ended.assert_mentions(&[
            "the same command with --resume to continue",
            "use --part 0 --parts 1 to do all of the work in one",
        ]);
        // Only one of the tasks prints which part it waits for.
        let line = "[0/3] note: waiting for part 2 (not started); the run has 3 parts according to srun";
        assert_eq!(ended.err.contains("waiting for"), index == 0, "{ended:?}");
        assert_eq!(ended.err.contains(line), index == 0, "{ended:?}");
    }
    assert!(begun.elapsed().as_secs() >= 9, "they have waited");
    assert!(!job.target().exists() && job.partial().exists());
    job.assert_source_unchanged("without the third");
    job
}

#[test]
fn missing_part_ends_the_others_and_resume_completes() {
    let job = run_without_the_third(FOLDER);
    assert_all_tasks_succeed(&job, 3, "--resume");
    job.assert_done("three tasks again");
}

/// The third part starts after the others have ended with an error. It completes the run, because their work is
/// recorded.
#[test]
fn late_part_completes_alone_after_the_others_ended() {
    let job = run_without_the_third(DCP);
    let saved = bytes_recorded_before(&job, "--parts 3 --part 2 --no-wait --resume");
    assert!(saved > job.document["bytes_read"].as_u64().unwrap() / 2, "{saved}");
    job.assert_done("the late one");
}

#[test]
fn late_part_is_waited_for() {
    let job = Job::new(FILE);
    let early = [0, 2].map(|index| task(&job, index, 3, "", "none"));
    let begun = Instant::now();
    while !job.partial().exists() || job.files_in_partial(".lease").len() < 2 {
        assert!(begun.elapsed().as_secs() < 10);
    }
    let late = task(&job, 1, 3, "", "none");
    assert_all_succeed(early.into_iter().chain([late]));
    job.assert_done("late");
}

/// The work of the missing part is recorded. The other parts wait for it for a while, because it may still start, and
/// then complete without it.
#[test]
fn missing_part_with_recorded_work_is_not_needed() {
    let job = Job::new(FOLDER);
    job.run("--parts 3 --part 1 --no-wait --resume", Some("none")).assert_succeeded();
    let tasks = [0, 2].map(|index| task(&job, index, 3, "--resume", "none"));
    assert_all_succeed(tasks);
    job.assert_done("two of three");
}

/// Part 0 would discard the work of an earlier run. It does not start, so nothing is discarded.
#[test]
fn restart_without_the_first_part_is_refused() {
    let job = Job::new(FILE);
    assert_eq!(job.run("--resume", Some("record-after")).signal, Some(9));
    let before = names(&job.dst_folder());
    for task in [1, 2].map(|index| task(&job, index, 3, "--restart", "none")) {
        let words = ["error: part 0 of 3 has not started to write ", "hint: start part 0, because with --restart"];
        wait(task).assert_refused(&words);
    }
    assert_eq!(names(&job.dst_folder()), before);
    assert_all_tasks_succeed(&job, 3, "--restart");
    job.assert_done("all of them");
}

#[test]
fn killed_part_ends_the_others_and_resume_completes() {
    let job = Job::new(FILE);
    let tasks = [(0, "none"), (1, "record-before")].map(|(index, fault)| task(&job, index, 2, "", fault));
    let [waiting, dying] = tasks.map(wait);
    assert_eq!(dying.signal, Some(9));
    // If the part was killed before the other part started, the other part only sees that it has not started.
    let has_seen_it = !waiting.err.contains("has not started to write");
    let died =
        ["[0/2] error: part 1 of 2 stopped: its process is gone", "out.pt is not complete", "hint: the completed work"];
    waiting.assert_refused(if has_seen_it { &died } else { &["hint: start the missing parts; the completed work"] });
    waiting.assert_mentions(&["is kept in ", "with --resume to continue"]);
    assert!(!job.target().exists());
    assert_all_tasks_succeed(&job, 2, "--resume");
    job.assert_done("both again");
}

/// The part is killed after its only window was recorded, but before it could report that it is done.
#[test]
fn part_killed_after_its_work_is_recorded_is_not_needed() {
    const OF: u32 = 12;
    let job = Job::new(FILE);
    let fault = |index| if index == 5 { "record-after" } else { "none" };
    let tasks: Vec<Child> = (0..OF).map(|index| task(&job, index, OF, "", fault(index))).collect();
    for (index, task) in (0..OF).zip(tasks) {
        let ended = wait(task);
        assert!(if index == 5 { ended.signal == Some(9) } else { ended.code == Some(0) }, "{index}: {ended:?}");
    }
    job.assert_done("eleven of twelve");
}

/// Runs one of two tasks before the other task starts. It finds a wrong byte in the source and fails.
fn run_failing_task(job: &Job, start: impl Fn() -> Child) {
    let path = job.source().join("model_world_size_3_rank_0.pt");
    let modified = path.metadata().unwrap().modified().unwrap();
    let right = fs::read(&path).unwrap();
    let mut wrong = right.clone();
    wrong[right.len() * 3 / 4] ^= 1;
    // The byte is different as on a node with faulty memory, so the size and modification time of the file stay the
    // same.
    let write = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
    };
    write(&wrong);
    wait(start()).assert_refused(&["CRC-32"]);
    write(&right);
}

/// Within one launch, no launcher starts a failed part again. So the other part ends with the error of the failed part.
#[test]
fn failed_part_ends_a_later_part_with_its_error() {
    let job = Job::new(FILE);
    run_failing_task(&job, || task(&job, 1, 2, "--check-crc --resume", "none"));
    let words = ["[0/2] error: part 1 of 2 failed: ", "CRC-32", "out.pt is not complete", "with --resume to continue"];
    let other = wait(task(&job, 0, 2, "--check-crc --resume", "none"));
    other.assert_refused(&words);
    assert!(!other.err.contains("waiting for"), "{other:?}");
    // Slurm requeues the job and starts the tasks again, which is another launch.
    let again = |index| {
        let mut command = job.command("--resume", Some("none"));
        command.envs([("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "2")]);
        command.envs([("SLURM_PROCID", index), ("SLURM_RESTART_COUNT", "1")]).spawn().unwrap()
    };
    let first = again("0");
    sleep(Duration::from_secs(4));
    assert_all_succeed([first, again("1")]);
    job.assert_done("queued again");
}

/// If parts are started by hand, the user may start a failed part again. So the other part waits for it, and prints why
/// the part is missing.
#[test]
fn failed_part_that_starts_again_is_waited_for() {
    let job = Job::new(FILE);
    let start =
        |index, more: &str| job.command(&format!("--parts 2 --part {index} {more}"), Some("none")).spawn().unwrap();
    run_failing_task(&job, || start(1, "--check-crc"));
    wait(start(0, "")).assert_refused(&["error: part 1 of 2 failed: ", "CRC-32"]);
    let first = start(0, "--resume");
    sleep(Duration::from_secs(7));
    wait(start(1, "--resume")).assert_succeeded();
    wait(first).assert_succeeded().assert_mentions(&["waiting for part 1 (not started since it failed: ", "CRC-32"]);
    job.assert_done("by hand");
}
