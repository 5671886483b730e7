//! Ranks that are processes, and how they die. Each is this test binary again, running [`rank`].

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::conformance::PATIENCE;
use crate::comm::{Communicator, Liveness, Meeting, Mesh, Part, Patience, Place, meet};
use crate::error::Result;

const VARIABLE: &str = "DTSHARD_TEST_RANK";
const LIVENESS: Liveness = Liveness { beat: Duration::from_millis(200), dead_after: Duration::from_secs(4) };

/// What all ranks do until they are stopped.
const WORK: [&str; 6] = ["connect", "exchange", "all-gather", "gather", "barrier", "nothing"];

/// One rank: `RANK SIZE WORK FOLDER` in a variable. Nothing where that is not set.
#[test]
fn rank() {
    let Ok(told) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = told.splitn(4, ' ').collect();
    let part = Part { index: words[0].parse().unwrap(), of: words[1].parse().unwrap() };
    match work(part, words[2], Path::new(words[3])) {
        Ok(()) => say("done"),
        Err(error) => say(&error.to_string()),
    }
}

/// To the one who has started this process, between what the test harness prints.
fn say(words: &str) {
    writeln!(std::io::stdout().lock(), "\nsays: {words}").unwrap();
}

fn work(part: Part, work: &str, folder: &Path) -> Result<()> {
    let meeting = Meeting {
        part,
        run: Some("1"),
        place: &Place::Folder(folder.into()),
        patience: Patience::silent(PATIENCE),
        calls_off: true,
        shared: None,
        liveness: LIVENESS,
        going: Arc::new(|| Ok(())),
    };
    let control = meet(&meeting)?;
    if work == "connect" {
        say("working");
        if part.index == 1 {
            thread::sleep(PATIENCE);
        }
    }
    let mesh = Mesh::connect(control, Patience::silent(PATIENCE))?;
    say("working");
    if work == "late" && part.index == 1 {
        thread::sleep(PATIENCE);
    }
    if work == "late" {
        return mesh.leave();
    }
    if work == "leave" {
        mesh.barrier()?;
        return mesh.leave();
    }
    let (mut memory, range) = (vec![0; 2 << 20], 0..1 << 20);
    let ranges: Vec<_> = (0..part.of).map(|rank| if rank == part.index { 0..0 } else { range.clone() }).collect();
    let shared: Vec<_> = (0..part.of as usize).map(|rank| rank << 18..(rank + 1) << 18).collect();
    let outgoing = memory.clone();
    loop {
        match work {
            "exchange" => mesh.exchange(&outgoing, &ranges, &mut memory, &ranges)?,
            "all-gather" => mesh.all_gather(&mut memory, &shared)?,
            "gather" => drop(mesh.gather(&[1; 5000])?),
            "barrier" => mesh.barrier()?,
            // Long work of its own.
            _ => {
                thread::sleep(Duration::from_millis(5));
                mesh.check()?;
            }
        }
    }
}

struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    fn start(rank: u32, size: u32, work: &str, folder: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["comm::tests::processes::rank", "--exact", "--nocapture", "--test-threads=1"])
            .env(VARIABLE, format!("{rank} {size} {work} {}", folder.display()))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let reader = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in reader.lines().map_while(Result::ok) {
                let _ = line.strip_prefix("says: ").map(|line| sender.send(line.to_owned()));
            }
        });
        Self { child, lines }
    }

    fn says(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("a process says nothing")
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(work: &str, folder: &Path) -> Vec<Process> {
    (0..3).map(|rank| Process::start(rank, 3, work, folder)).collect()
}

/// The others name this rank, soon.
fn all_name(victim: usize, processes: &[Process], within: Duration, work: &str) {
    let begun = Instant::now();
    for (rank, process) in processes.iter().enumerate().filter(|(rank, _)| *rank != victim) {
        let mut said = process.says();
        while said == "working" {
            said = process.says();
        }
        assert!(
            said.starts_with(&format!("process {victim}: ")),
            "{work}, rank {victim} gone, rank {rank} says: {said}"
        );
        assert!(begun.elapsed() < within, "{work}: {:?}", begun.elapsed());
    }
}

#[test]
fn processes_meet_and_leave() {
    let folder = TempDir::new().unwrap();
    for process in start("leave", folder.path()) {
        assert_eq!([process.says(), process.says()], ["working", "done"]);
    }
}

#[test]
fn who_is_killed_is_named_at_once_whatever_is_going_on() {
    for work in WORK {
        let victims = if work == "connect" { 1..2 } else { 0..3 };
        for victim in victims {
            let folder = TempDir::new().unwrap();
            let processes = start(work, folder.path());
            processes.iter().for_each(|process| assert_eq!(process.says(), "working"));
            thread::sleep(Duration::from_millis(30));
            processes[victim].signal(Signal::KILL);
            all_name(victim, &processes, LIVENESS.dead_after, work);
        }
    }
}

#[test]
fn who_is_killed_while_others_are_awaited_is_named() {
    let folder = TempDir::new().unwrap();
    let processes = [0, 1].map(|rank| Process::start(rank, 3, "nothing", folder.path()));
    thread::sleep(Duration::from_millis(1500));
    processes[1].signal(Signal::KILL);
    let late = Process::start(2, 3, "nothing", folder.path());
    for process in [&processes[0], &late] {
        assert_eq!(process.says(), "process 1: rendezvous: its process ended, while others were waited for");
    }
    // And where it is the one that others call.
    let processes = [0, 1].map(|rank| Process::start(rank, 3, "nothing", folder.path()));
    thread::sleep(Duration::from_millis(1500));
    processes[0].signal(Signal::KILL);
    let said = processes[1].says();
    assert!(said.starts_with("process 0: rendezvous: it closed the connection"), "{said}");
}

#[test]
fn rank_0_that_has_left_names_who_is_killed_before_leaving() {
    let folder = TempDir::new().unwrap();
    let processes = start("late", folder.path());
    processes.iter().for_each(|process| assert_eq!(process.says(), "working"));
    assert_eq!(processes[2].says(), "done");
    processes[1].signal(Signal::KILL);
    assert_eq!(processes[0].says(), "process 1: leave: its process ended");
}

#[test]
fn who_hangs_is_named_after_a_while() {
    for (work, victim) in [("exchange", 0), ("nothing", 2)] {
        let folder = TempDir::new().unwrap();
        let processes = start(work, folder.path());
        processes.iter().for_each(|process| assert_eq!(process.says(), "working"));
        thread::sleep(Duration::from_millis(50));
        processes[victim].signal(Signal::STOP);
        all_name(victim, &processes, LIVENESS.dead_after * 4, work);
    }
}
