//! Going on in the middle: what is recorded is not done again, whoever did it and whoever goes on.

use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};

use crate::job::{CAST, DCP, FILE, FOLDER, Job, KINDS, RANKS};

/// Be killed after the first record of each run until one comes through. Gives the document of that one, and how many
/// were killed.
fn kill_until_done(job: &Job, more: impl Fn(usize) -> String) -> (Json, usize) {
    for round in 0..100 {
        let more = more(round);
        let ended = job.run(&format!("{more} --resume --json --no-sync"), Some("record-after"));
        match ended.signal {
            Some(9) => assert!(!job.target().exists(), "{round}"),
            _ => return (serde_json::from_str(&ended.succeeded().out).unwrap(), round),
        }
    }
    panic!("no end of {}", job.kind);
}

fn read(said: &Json) -> u64 {
    said["bytes_read"].as_u64().unwrap()
}

/// Each run does one window, and the last has nothing to do but what comes after them.
#[test]
fn window_by_window() {
    for kind in KINDS {
        let job = Job::new(kind);
        let (last, killed) = kill_until_done(&job, |_| String::new());
        assert!(killed >= 3, "{kind}: {killed}");
        // What the last one read is not much more than the last window.
        assert!(read(&last) < read(&job.said) / 3, "{kind}: {} of {}", read(&last), read(&job.said));
        assert_eq!(last["cast"], job.said["cast"], "{kind}");
        job.is_done(&kind.to_string());
    }
}

/// What the killed run recorded and what the next one reads are everything, and little is in both.
#[test]
fn nothing_is_done_twice() {
    let job = Job::new(FOLDER);
    assert_eq!(job.run("--resume", Some("record-after")).signal, Some(9));
    let left: Json = serde_json::from_str(&job.run("--resume --json", Some("none")).succeeded().out).unwrap();
    let first_window = 256 << 10;
    let saved = read(&job.said) - read(&left);
    assert!((first_window..2 * first_window).contains(&saved), "{saved}");
    job.is_done("one window");
}

/// What may be in the memory of the node only is no part of a result that is to last.
#[test]
fn what_was_not_synced_is_done_again_where_it_is_to_be() {
    let job = Job::new(FOLDER);
    for _ in 0..3 {
        assert_eq!(job.run("--resume --no-sync", Some("record-after")).signal, Some(9));
    }
    let said: Json = serde_json::from_str(&job.run("--resume --json", Some("none")).succeeded().out).unwrap();
    assert_eq!(read(&said), read(&job.said));
    job.is_done("synced");
}

/// Another number of parts, of threads, other strips, other ways of reading: what was done stays done.
#[test]
fn on_other_numbers_of_everything() {
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
            // A part of which all is done is not killed.
            assert!(ended.signal == Some(9) || ended.code == Some(0), "{kind} {way}: {ended:?}");
            assert!(!job.target().exists());
        }
        let said = job.run("--resume --json --verify --threads 2", Some("none"));
        let said: Json = serde_json::from_str(&said.succeeded().out).unwrap();
        assert!(read(&said) < read(&job.said), "{kind}");
        assert_eq!(said["cast"], job.said["cast"], "{kind}");
        job.is_done(&kind.to_string());
    }
}

/// 3, then 2, then 1, all of them killed but the last.
#[test]
fn on_fewer_and_fewer() {
    for kind in [FILE, DCP, CAST] {
        let job = Job::new(kind);
        for of in [3, 2] {
            for index in 0..of {
                let parts = format!("--parts {of} --part {index} --no-wait --resume");
                let ended = job.run(&parts, Some("record-after"));
                assert!(ended.signal == Some(9) || of == 2 && ended.code == Some(0), "{kind} {parts}: {ended:?}");
            }
        }
        job.run("--resume", Some("none")).succeeded();
        job.is_done(&kind.to_string());
    }
}

/// Counts of casts are those of an undisturbed run, whoever met them.
#[test]
fn what_casts_met() {
    let job = Job::new(CAST);
    assert!(job.said["cast"]["f32->f16"]["overflows"].as_u64().unwrap() > 100, "{}", job.said["cast"]);
    for index in [2, 0, 1] {
        let part = format!("--parts 3 --part {index} --no-wait --resume");
        assert_eq!(job.run(&part, Some("record-after")).signal, Some(9));
    }
    let mut published = Json::Null;
    for index in [2, 0, 1].into_iter().cycle().take_while(|_| !job.target().exists()) {
        let ended = job.run(&format!("--parts 3 --part {index} --no-wait --resume --json"), Some("none"));
        published = serde_json::from_str(&ended.succeeded().out).unwrap();
    }
    assert_eq!(published["cast"], job.said["cast"]);
    job.is_done("three parts");
    // Cut where an element is not cut: each is counted once.
    job.clear();
    job.run_parts(16, "", None);
    job.is_done("16 parts");
}

/// Parts in any order, at their own pace, and one of them twice.
#[test]
fn parts_that_do_not_wait() {
    for kind in [FILE, FOLDER] {
        let job = Job::new(kind);
        for order in [[0, 1, 2], [1, 2, 0], [2, 1, 0]] {
            job.clear();
            for index in order {
                assert!(!job.target().exists());
                job.run(&format!("--parts 3 --part {index} --no-wait"), None).succeeded();
                if !job.target().exists() {
                    let again = job.run(&format!("--parts 3 --part {index} --no-wait"), None);
                    again.refused(&["an earlier run did not finish", "--resume goes on", "all parts start again"]);
                    job.run(&format!("--parts 3 --part {index} --no-wait --resume"), None).succeeded();
                }
            }
            job.is_done(&format!("{kind} {order:?}"));
        }
    }
}

/// All at once, each a process that waits for the others.
#[test]
fn parts_that_wait() {
    for kind in [FILE, DCP] {
        let job = Job::new(kind);
        for fault in [None, Some("none")] {
            job.clear();
            let run = |index| job.command(&format!("--parts 3 --part {index}"), fault).spawn().unwrap();
            let parts: Vec<_> = (0..3).map(run).collect();
            for part in parts {
                let ended: crate::outcome::Outcome = part.wait_with_output().unwrap().into();
                ended.succeeded();
            }
            job.is_done(&kind.to_string());
        }
    }
}

/// Parts that are started together and killed together, then together again.
#[test]
fn parts_that_wait_and_are_killed() {
    let job = Job::new(FILE);
    let run_all = |more: &str, fault: &str| -> Vec<crate::outcome::Outcome> {
        let start = |index| job.command(&format!("--parts 3 --part {index} {more}"), Some(fault)).spawn().unwrap();
        let parts: Vec<_> = (0..3).map(start).collect();
        parts.into_iter().map(|part| part.wait_with_output().unwrap().into()).collect()
    };
    assert!(run_all("", "record-after").iter().all(|ended| ended.signal == Some(9)));
    assert!(!job.target().exists());
    // Whoever seals is killed: the others find that out, and one of them does it.
    for ended in run_all("--resume", "seal-summed") {
        assert!(ended.signal == Some(9) || ended.code == Some(2), "{ended:?}");
    }
    assert!(!job.target().exists());
    for ended in run_all("--resume", "none") {
        ended.succeeded();
    }
    job.is_done("together");
}

/// Done is done: nothing is written again, and nothing is left.
#[test]
fn where_it_is_complete() {
    let job = Job::new(FOLDER);
    job.run("--resume", None).succeeded();
    let said = job.run("--resume", None);
    said.succeeded().says(&["is there already, from the same source and options"]);
    let said: Json = serde_json::from_str(&job.run("--resume --json", None).succeeded().out).unwrap();
    assert_eq!(said["bytes_read"], json!(0));
    job.run("--resume --overwrite", None).succeeded().says(&["is there already"]);
    job.run("--resume --dtype bf16", None).refused(&["desk/out exists", "--overwrite"]);
    job.is_done("refused");
    job.run("--resume --overwrite --dtype bf16", None).succeeded();
    assert!(crate::job::tree(&job.target()) != job.wanted);
    job.run("--resume --overwrite", None).succeeded();
    job.is_done("replaced");
}

/// What a sibling did before this one came is of this run, and what an earlier run did is not.
#[test]
fn what_was_before() {
    let job = Job::new(FILE);
    for is_resumed in [false, true] {
        job.clear();
        if is_resumed {
            assert_eq!(job.run("--resume --threads 1", Some("record-after")).signal, Some(9));
        }
        let number = if is_resumed { 2 } else { 1 };
        let start = |index| job.command(&format!("--parts 2 --part {index} --resume"), None).spawn().unwrap();
        // Done with its own half, it waits for the other one.
        let early = start(1);
        let begun = Instant::now();
        while !job.partial().exists() || job.of_partial(".journal").len() < number {
            assert!(begun.elapsed() < Duration::from_secs(20));
        }
        sleep(Duration::from_millis(100));
        let late: crate::outcome::Outcome = start(0).wait_with_output().unwrap().into();
        let early: crate::outcome::Outcome = early.wait_with_output().unwrap().into();
        early.succeeded();
        let line = late.succeeded().err.lines().find(|line| line.contains("wrote ")).unwrap().to_owned();
        let before = line.split_once(" kB of it before").map(|(text, _)| text.rsplit_once(", ").unwrap().1);
        assert_eq!(before.is_some(), is_resumed, "{line}");
        // A window, and not half of everything with it.
        assert!(before.is_none_or(|much| much.parse::<f64>().unwrap() < 600.0), "{line}");
        job.is_done(&line);
    }
}

/// One of all says that it has published.
#[test]
fn who_publishes() {
    let job = Job::new(FILE);
    for more in ["", "--no-wait"] {
        job.clear();
        let start =
            |index| job.command(&format!("--parts 3 --part {index} --json {more} --resume"), None).spawn().unwrap();
        let parts: Vec<_> = (0..3).map(start).collect();
        let said = parts.into_iter().map(|part| -> Json {
            let ended: crate::outcome::Outcome = part.wait_with_output().unwrap().into();
            serde_json::from_str(&ended.succeeded().out).unwrap()
        });
        let said: Vec<Json> = said.collect();
        let count = |what: &str| said.iter().filter(|document| document["part"][what] == true).count();
        assert_eq!(count("publisher"), 1, "{more}: {said:?}");
        assert!(more == "--no-wait" || count("published") == 3, "{said:?}");
        job.is_done(more);
    }
}

/// Whoever is stopped says how much is kept.
#[test]
fn what_a_signal_keeps() {
    let job = Job::new(FILE);
    // Done with its own half, it waits for the other one.
    let child = job.command("--parts 2 --part 0", None).spawn().unwrap();
    let begun = Instant::now();
    while !job.partial().exists() || job.of_partial(".journal").is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    sleep(Duration::from_millis(300));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let ended: crate::outcome::Outcome = child.wait_with_output().unwrap().into();
    assert_eq!(ended.code, Some(75), "{ended:?}");
    ended.says(&[
        "stopped by TERM; ",
        ".out.pt.dtshard-partial keeps 7",
        " kB of the 7",
        " kB of part 0 of 2, --resume goes on from there",
    ]);
    job.run("--resume", None).succeeded();
    job.is_done("after TERM");
}
