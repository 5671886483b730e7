//! Tests that resumed runs do not repeat recorded work, in whichever process the work was done.

use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};

use crate::job::{CAST, DCP, FILE, FOLDER, Job, KINDS, RANKS};

/// Runs the job again and again, and kills each run after its first record, until a run completes. Returns the JSON
/// document of the last run, and the number of killed runs.
fn kill_until_done(job: &Job, more: impl Fn(usize) -> String) -> (Json, usize) {
    for round in 0..100 {
        let more = more(round);
        let ended = job.run(&format!("{more} --resume --json --no-sync"), Some("record-after"));
        match ended.signal {
            Some(9) => assert!(!job.target().exists(), "{round}"),
            _ => return (serde_json::from_str(&ended.assert_succeeded().out).unwrap(), round),
        }
    }
    panic!("no end of {}", job.kind);
}

fn bytes_read(document: &Json) -> u64 {
    document["bytes_read"].as_u64().unwrap()
}

/// Each killed run completes one window. The last run reads little more than one window.
#[test]
fn run_killed_after_every_window_reads_each_window_once() {
    for kind in KINDS {
        let job = Job::new(kind);
        let (last, killed) = kill_until_done(&job, |_| String::new());
        assert!(killed >= 3, "{kind}: {killed}");
        // The last run reads little more than one window.
        assert!(
            bytes_read(&last) < bytes_read(&job.document) / 3,
            "{kind}: {} of {}",
            bytes_read(&last),
            bytes_read(&job.document)
        );
        assert_eq!(last["cast"], job.document["cast"], "{kind}");
        job.assert_done(&kind.to_string());
    }
}

/// The killed run and the resumed run together read all windows, and few bytes are read twice.
#[test]
fn resumed_run_reads_the_remaining_windows_only() {
    let job = Job::new(FOLDER);
    assert_eq!(job.run("--resume", Some("record-after")).signal, Some(9));
    let left: Json = serde_json::from_str(&job.run("--resume --json", Some("none")).assert_succeeded().out).unwrap();
    let first_window = 256 << 10;
    let saved = bytes_read(&job.document) - bytes_read(&left);
    assert!((first_window..2 * first_window).contains(&saved), "{saved}");
    job.assert_done("one window");
}

/// Unsynced work may exist only in the memory of a node. A run with sync does not use such work.
#[test]
fn unsynced_work_is_repeated_by_a_synced_run() {
    let job = Job::new(FOLDER);
    for _ in 0..3 {
        assert_eq!(job.run("--resume --no-sync", Some("record-after")).signal, Some(9));
    }
    let document: Json =
        serde_json::from_str(&job.run("--resume --json", Some("none")).assert_succeeded().out).unwrap();
    assert_eq!(bytes_read(&document), bytes_read(&job.document));
    job.assert_done("synced");
}

/// The resumed runs have other numbers of parts and threads, other write blocks, and another way of reading. Recorded
/// work stays valid.
#[test]
fn resume_with_other_parts_threads_and_memory_keeps_the_work() {
    let ways = [
        "--parts 3 --part 0 --no-wait --threads 2",
        "--parts 3 --part 1 --no-wait --threads 1 --io read",
        "--parts 3 --part 2 --no-wait --max-memory 40MB",
        "--parts 2 --part 1 --no-wait --threads 1 --max-memory 60MB",
        "--parts 2 --part 0 --no-wait --io read",
        "--parts 5 --part 3 --no-wait",
        "--threads 1",
    ];
    for kind in [FILE, FOLDER, RANKS, DCP] {
        let job = Job::new(kind);
        for way in ways {
            let ended = job.run(&format!("{way} --resume"), Some("record-after"));
            // If a part has no work left, it is not killed, because it records nothing.
            assert!(ended.signal == Some(9) || ended.code == Some(0), "{kind} {way}: {ended:?}");
            assert!(!job.target().exists());
        }
        let document = job.run("--resume --json --verify --threads 2", Some("none"));
        let document: Json = serde_json::from_str(&document.assert_succeeded().out).unwrap();
        assert!(bytes_read(&document) < bytes_read(&job.document), "{kind}");
        assert_eq!(document["cast"], job.document["cast"], "{kind}");
        job.assert_done(&kind.to_string());
    }
}

/// The run has three parts, then two parts, then one process. All runs except the last are killed.
#[test]
fn resume_with_fewer_parts_writes_identical_bytes() {
    for kind in [FILE, DCP, CAST] {
        let job = Job::new(kind);
        for of in [3, 2] {
            for index in 0..of {
                let parts = format!("--parts {of} --part {index} --no-wait --resume");
                let ended = job.run(&parts, Some("record-after"));
                assert!(ended.signal == Some(9) || of == 2 && ended.code == Some(0), "{kind} {parts}: {ended:?}");
            }
        }
        job.run("--resume", Some("none")).assert_succeeded();
        job.assert_done(&kind.to_string());
    }
}

/// The counts of casts after several killed runs equal those of an uninterrupted run.
#[test]
fn cast_counts_of_killed_runs_are_kept() {
    let job = Job::new(CAST);
    assert!(job.document["cast"]["f32->f16"]["overflows"].as_u64().unwrap() > 100, "{}", job.document["cast"]);
    for index in [2, 0, 1] {
        let part = format!("--parts 3 --part {index} --no-wait --resume");
        assert_eq!(job.run(&part, Some("record-after")).signal, Some(9));
    }
    let mut published = Json::Null;
    for index in [2, 0, 1].into_iter().cycle().take_while(|_| !job.target().exists()) {
        let ended = job.run(&format!("--parts 3 --part {index} --no-wait --resume --json"), Some("none"));
        published = serde_json::from_str(&ended.assert_succeeded().out).unwrap();
    }
    assert_eq!(published["cast"], job.document["cast"]);
    job.assert_done("three parts");
    // Recorded ranges end between elements, so each element is counted exactly once.
    job.clear();
    job.run_parts(16, "", None);
    job.assert_done("16 parts");
}

/// The parts run one after the other, in an order that is not ascending. One of them runs twice.
#[test]
fn parts_without_waiting_publish_in_any_order() {
    for kind in [FILE, FOLDER] {
        let job = Job::new(kind);
        for order in [[0, 1, 2], [1, 2, 0], [2, 1, 0]] {
            job.clear();
            for index in order {
                assert!(!job.target().exists());
                job.run(&format!("--parts 3 --part {index} --no-wait"), None).assert_succeeded();
                if !job.target().exists() {
                    let again = job.run(&format!("--parts 3 --part {index} --no-wait"), None);
                    again.assert_refused(&[
                        "an earlier run did not finish",
                        "use --resume to continue it",
                        "start all parts again",
                    ]);
                    job.run(&format!("--parts 3 --part {index} --no-wait --resume"), None).assert_succeeded();
                }
            }
            job.assert_done(&format!("{kind} {order:?}"));
        }
    }
}

/// All parts run at the same time, and each part waits for the others.
#[test]
fn parts_that_wait_publish_together() {
    for kind in [FILE, DCP] {
        let job = Job::new(kind);
        for fault in [None, Some("none")] {
            job.clear();
            let run = |index| job.command(&format!("--parts 3 --part {index}"), fault).spawn().unwrap();
            let parts: Vec<_> = (0..3).map(run).collect();
            for part in parts {
                let ended: crate::outcome::Outcome = part.wait_with_output().unwrap().into();
                ended.assert_succeeded();
            }
            job.assert_done(&kind.to_string());
        }
    }
}

/// All parts are started together, killed, and started again.
#[test]
fn killed_parts_that_wait_are_resumed() {
    let job = Job::new(FILE);
    let run_all = |more: &str, fault: &str| -> Vec<crate::outcome::Outcome> {
        let start = |index| job.command(&format!("--parts 3 --part {index} {more}"), Some(fault)).spawn().unwrap();
        let parts: Vec<_> = (0..3).map(start).collect();
        parts.into_iter().map(|part| part.wait_with_output().unwrap().into()).collect()
    };
    assert!(run_all("", "record-after").iter().all(|ended| ended.signal == Some(9)));
    assert!(!job.target().exists());
    // The part that seals the output is killed. The other parts notice this, and another part begins to seal.
    for ended in run_all("--resume", "seal-summed") {
        assert!(ended.signal == Some(9) || ended.code == Some(2), "{ended:?}");
    }
    assert!(!job.target().exists());
    for ended in run_all("--resume", "none") {
        ended.assert_succeeded();
    }
    job.assert_done("together");
}

/// If the destination is complete, `--resume` writes no bytes, and no other files remain.
#[test]
fn resume_of_a_complete_destination_writes_nothing() {
    let job = Job::new(FOLDER);
    job.run("--resume", None).assert_succeeded();
    let document = job.run("--resume", None);
    document.assert_succeeded().assert_mentions(&["exists already, made from the same SRC and options"]);
    let document: Json = serde_json::from_str(&job.run("--resume --json", None).assert_succeeded().out).unwrap();
    assert_eq!(document["bytes_read"], json!(0));
    job.run("--resume --overwrite", None).assert_succeeded().assert_mentions(&["exists already"]);
    job.run("--resume --dtype bf16", None).assert_refused(&["results/out exists", "--overwrite"]);
    job.assert_done("refused");
    job.run("--resume --overwrite --dtype bf16", None).assert_succeeded();
    assert!(crate::job::tree(&job.target()) != job.expected);
    job.run("--resume --overwrite", None).assert_succeeded();
    job.assert_done("replaced");
}

/// The bytes that another part of the same run has written do not count as resumed. The bytes of an earlier run do.
#[test]
fn resumed_bytes_exclude_work_of_this_run() {
    let job = Job::new(FILE);
    for is_resumed in [false, true] {
        job.clear();
        if is_resumed {
            assert_eq!(job.run("--resume --threads 1", Some("record-after")).signal, Some(9));
        }
        let number = if is_resumed { 2 } else { 1 };
        let start = |index| job.command(&format!("--parts 2 --part {index} --resume"), None).spawn().unwrap();
        // Part 1 writes its half, and then waits for part 0.
        let early = start(1);
        let begun = Instant::now();
        while !job.partial().exists() || job.files_in_partial(".journal").len() < number {
            assert!(begun.elapsed() < Duration::from_secs(20));
        }
        sleep(Duration::from_millis(100));
        let late: crate::outcome::Outcome = start(0).wait_with_output().unwrap().into();
        let early: crate::outcome::Outcome = early.wait_with_output().unwrap().into();
        early.assert_succeeded();
        let line = late.assert_succeeded().err.lines().find(|line| line.contains("wrote ")).unwrap().to_owned();
        let before = line.split_once(" kB by an earlier run").map(|(text, _)| text.rsplit_once('(').unwrap().1);
        assert_eq!(before.is_some(), is_resumed, "{line}");
        // The resumed bytes are those of one window, not half of all bytes.
        assert!(before.is_none_or(|much| much.parse::<f64>().unwrap() < 600.0), "{line}");
        job.assert_done(&line);
    }
}

/// Exactly one of the parts of a run reports that it published the output.
#[test]
fn exactly_one_part_reports_that_it_published() {
    let job = Job::new(FILE);
    for more in ["", "--no-wait"] {
        job.clear();
        let start =
            |index| job.command(&format!("--parts 3 --part {index} --json {more} --resume"), None).spawn().unwrap();
        let parts: Vec<_> = (0..3).map(start).collect();
        let document = parts.into_iter().map(|part| -> Json {
            let ended: crate::outcome::Outcome = part.wait_with_output().unwrap().into();
            serde_json::from_str(&ended.assert_succeeded().out).unwrap()
        });
        let document: Vec<Json> = document.collect();
        let count = |what: &str| document.iter().filter(|document| document["part"][what] == true).count();
        assert_eq!(count("publisher"), 1, "{more}: {document:?}");
        assert!(more == "--no-wait" || count("published") == 3, "{document:?}");
        job.assert_done(more);
    }
}

/// A run that is stopped by TERM reports how many bytes of its work are kept.
#[test]
fn stopped_run_reports_how_much_is_kept() {
    let job = Job::new(FILE);
    // Part 0 writes its half, and then waits for part 1.
    let child = job.command("--parts 2 --part 0", None).spawn().unwrap();
    let begun = Instant::now();
    while !job.partial().exists() || job.files_in_partial(".journal").is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    sleep(Duration::from_millis(300));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let ended: crate::outcome::Outcome = child.wait_with_output().unwrap().into();
    assert_eq!(ended.code, Some(75), "{ended:?}");
    ended.assert_mentions(&[
        "stopped by TERM; ",
        ".out.pt.dtshard-partial keeps 7",
        " kB of the 7",
        " kB of part 0 of 2; use --resume to continue",
    ]);
    job.run("--resume", None).assert_succeeded();
    job.assert_done("after TERM");
}
