//! Runs that are stopped, killed, raced or lied to while they work.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::common::env::TestEnv;
use crate::common::transcript;
use crate::corrupt::{Outcome, command, dtshard, fixture};

const LARGE: u64 = 300 << 20;

/// A sparse safetensors file with `LARGE` bytes of data.
fn large(env: &TestEnv) -> PathBuf {
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{LARGE}],"data_offsets":[0,{LARGE}]}}}}"#);
    let path = env.path("large.safetensors");
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + LARGE).unwrap();
    path
}

fn partial(target: &Path) -> PathBuf {
    let name = format!(".{}.dtshard-partial", target.file_name().unwrap().to_str().unwrap());
    target.with_file_name(name)
}

/// Start `unshard` of the large file, slowly, and wait until it writes.
fn start(source: &Path, target: &Path, more: &[&str]) -> Child {
    let mut all: Vec<&dyn AsRef<OsStr>> = vec![&"unshard", &source, &target, &"--threads=1", &"--max-memory=40MB"];
    all.extend(more.iter().map(|arg| arg as &dyn AsRef<OsStr>));
    let mut child = command(&all).spawn().unwrap();
    let begun = Instant::now();
    while !partial(target).join("part-0-of-1.0.lease").exists() {
        assert!(begun.elapsed() < Duration::from_secs(30), "nothing is written");
        if let Some(status) = child.try_wait().unwrap() {
            panic!("ended too early: {status}");
        }
        sleep(Duration::from_millis(1));
    }
    child
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").arg(format!("-{name}")).arg(child.id().to_string()).status().unwrap().success());
}

fn wait(child: Child) -> Outcome {
    child.wait_with_output().unwrap().into()
}

#[test]
fn signals_stop_within_a_second_and_leave_nothing() {
    let env = TestEnv::new();
    let source = large(&env);
    let target = env.path("out.pt");
    let before = env.names();
    let signals = [
        ("INT", 130, "--io=read"),
        ("TERM", 143, "--io=read"),
        ("INT", 130, "--io=mmap"),
        ("USR1", 138, "--io=read"),
        ("USR2", 140, "--io=read"),
    ];
    for (name, code, io) in signals {
        let child = start(&source, &target, &[io]);
        let sent = Instant::now();
        signal(&child, name);
        let outcome = wait(child);
        assert!(sent.elapsed() < Duration::from_secs(1), "{name}: {:?}", sent.elapsed());
        assert_eq!(outcome.code, Some(code), "{outcome:?}");
        outcome.says(&["stopped by", name]);
        assert_eq!(env.names(), before);
    }
}

/// As Slurm cancels a step: what is left to do after the first TERM is still done after the second.
#[test]
fn terminated_twice_is_terminated_once() {
    let env = TestEnv::new();
    let source = large(&env);
    let target = env.path("out.pt");
    let before = env.names();
    for (name, code) in [("TERM", 143), ("USR1", 138)] {
        let child = start(&source, &target, &["--io=read"]);
        for name in [name, "CONT", name, name] {
            signal(&child, name);
        }
        let outcome = wait(child);
        assert_eq!(outcome.code, Some(code), "{outcome:?}");
        outcome.says(&["stopped by", name]);
        assert_eq!(env.names(), before);
    }
}

/// Held up before it begins to count, by somebody who does not read what it says.
#[test]
fn a_dry_run_is_stopped_as_well() {
    let env = TestEnv::new();
    let name = |number: u32| format!("layers.{number:04}.{}.weight", "attention.".repeat(10));
    let mut header: serde_json::Map<String, serde_json::Value> = (0..2000)
        .map(|number| (name(number), json!({ "dtype": "U8", "shape": [0], "data_offsets": [0, 0] })))
        .collect();
    header.insert("w".into(), json!({ "dtype": "U8", "shape": [8], "data_offsets": [0, 8] }));
    let header = serde_json::to_vec(&header).unwrap();
    let source = env.path("many.safetensors");
    fs::write(&source, [&(header.len() as u64).to_le_bytes()[..], &header, &[0; 8]].concat()).unwrap();
    let mut child = command(&[&"unshard", &source, &"--dry-run", &"--include=w", &"-v"]).spawn().unwrap();
    // More lines are to come than a pipe takes.
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("left out: ") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "it ended too early");
    }
    signal(&child, "TERM");
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert_eq!(wait(child).code, Some(143));
    assert!(rest.contains("error: stopped by TERM"));
}

#[test]
fn what_a_killed_run_leaves_is_in_the_way_until_restart() {
    let env = TestEnv::new();
    let source = large(&env);
    let target = env.path("out.pt");
    let child = start(&source, &target, &[]);
    signal(&child, "KILL");
    assert_eq!(wait(child).signal, Some(9));
    assert!(partial(&target).exists() && !target.exists());
    let small = fixture("torch_file/trainer.pt");
    dtshard(&[&"unshard", &small, &target]).refused(&[
        "did not finish",
        "out.pt.dtshard-partial",
        "--resume",
        "--restart",
    ]);
    dtshard(&[&"unshard", &small, &target, &"--overwrite"]).refused(&["did not finish", "--restart"]);
    assert!(partial(&target).exists());
    dtshard(&[&"unshard", &small, &target, &"--restart"]).succeeded();
    assert!(!partial(&target).exists() && target.exists());
}

#[test]
fn of_two_runs_into_one_destination_one_wins() {
    let env = TestEnv::new();
    let source = large(&env);
    let target = env.path("out.pt");
    let first = start(&source, &target, &["--no-sync"]);
    let small = fixture("torch_file/trainer.pt");
    for more in ["--no-sync", "--restart", "--overwrite"] {
        dtshard(&[&"unshard", &small, &target, &more]).refused(&["another run is writing", "out.pt", "hint: "]);
    }
    wait(first).succeeded();
    assert!(fs::metadata(&target).unwrap().len() > LARGE);
    assert!(!partial(&target).exists());
}

/// Many small runs at once: each is refused or done, and what stands in the end is whole.
#[test]
fn a_crowd_into_one_destination() {
    let env = TestEnv::new();
    let source = fixture("fsdp3/dcp");
    let target = env.path("out");
    for round in 0..3 {
        let run = || command(&[&"consolidate", &source, &target, &"--no-sync"]).spawn().unwrap();
        let runs: Vec<Child> = (0..6).map(|_| run()).collect();
        let ended: Vec<Outcome> = runs.into_iter().map(wait).collect();
        for outcome in &ended {
            assert!(matches!(outcome.code, Some(0 | 2)) && !outcome.err.contains("panicked"), "{round}: {outcome:?}");
        }
        assert_eq!(ended.iter().filter(|outcome| outcome.code == Some(0)).count(), 1, "{ended:?}");
        assert_eq!(env.names().len(), 2, "{:?}", env.names());
        dtshard(&[&"verify", &target]).succeeded();
        fs::remove_dir_all(&target).unwrap();
    }
}

/// Killed at any moment, `--overwrite` leaves the old or the new at the destination, at the latest when the next run
/// has tidied up.
#[test]
fn overwriting_is_all_or_nothing() {
    let (old, new) = (fixture("safetensors/sharded"), fixture("fsdp3/dcp"));
    let env = TestEnv::new();
    let target = env.path("out");
    dtshard(&[&"consolidate", &old, &target, &"--no-sync"]).succeeded();
    for round in 0..40 {
        let mut child = command(&[&"consolidate", &new, &target, &"--overwrite", &"--restart"]).spawn().unwrap();
        sleep(Duration::from_micros(500 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        if !target.exists() {
            assert!(env.path(".out.dtshard-old").exists(), "{:?}", env.names());
        }
        // Another run that is refused, and tidies up.
        dtshard(&[&"consolidate", &new, &target]).refused(&[]);
        let same = |source: &Path| {
            let verified = dtshard(&[&"verify", &source, &target, &"--root", &"model"]);
            let whole = dtshard(&[&"verify", &source, &target]);
            verified.code == Some(0) || whole.code == Some(0)
        };
        assert!(same(&old) || same(&new), "round {round}: {:?}", env.names());
    }
    dtshard(&[&"consolidate", &new, &target, &"--overwrite", &"--restart"]).succeeded();
    assert_eq!(fs::read_dir(env.path("")).unwrap().count(), 1, "{:?}", env.names());
    // The moment of a kill decides on the message.
    transcript::discard();
}

#[test]
fn a_source_that_changes_is_noticed() {
    type Change = fn(&Path);
    let cut: Change = |path| File::options().write(true).open(path).unwrap().set_len(1000).unwrap();
    let grown: Change = |path| File::options().append(true).open(path).unwrap().write_all(b"more").unwrap();
    let rewritten: Change = |path| {
        use std::os::unix::fs::FileExt;
        File::options().write(true).open(path).unwrap().write_all_at(b"other", LARGE / 2).unwrap();
    };
    let replaced: Change = |path| {
        let aside = path.with_extension("aside");
        fs::write(&aside, "another file").unwrap();
        fs::rename(aside, path).unwrap();
    };
    for (what, change) in [("cut", cut), ("grown", grown), ("rewritten", rewritten), ("replaced", replaced)] {
        for io in ["--io=read", "--io=mmap"] {
            let env = TestEnv::new();
            let source = large(&env);
            let target = env.path("out.pt");
            let child = start(&source, &target, &[io, "--no-sync"]);
            change(&source);
            let outcome = wait(child);
            assert_eq!(outcome.code, Some(2), "{what} {io}: {outcome:?}");
            assert!(!target.exists(), "{what} {io}");
            // A mapped file that is cut short ends the process at once; the next run finds what it left.
            if (what, io) != ("cut", "--io=mmap") {
                outcome.says(&["large.safetensors"]);
                assert!(!partial(&target).exists(), "{what} {io}");
            }
        }
    }
}

/// `ulimit -f`: the signal for it would leave the half-written work behind.
#[test]
fn a_limit_to_the_size_of_files() {
    let env = TestEnv::new();
    let (source, target) = (fixture("verl/global_step_10/actor"), env.path("out"));
    let limited = Command::new("bash")
        .args(["-c", "ulimit -f 8; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_dtshard"), "reshard"])
        .args([source.as_os_str(), target.as_os_str(), "--mesh=fsdp=2".as_ref()])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&limited.stderr);
    assert_eq!(limited.status.code(), Some(2), "{said}");
    assert!(said.contains("File too large"), "{said}");
    assert!(env.names().is_empty(), "{:?}", env.names());
}

/// `ulimit -n`: how many files a checkpoint has is no matter of how many may be open at once.
#[test]
fn a_limit_to_the_number_of_open_files() {
    let env = TestEnv::new();
    let limited = |args: &[&dyn AsRef<OsStr>]| {
        let run = Command::new("bash")
            .args(["-c", "ulimit -n 64; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_dtshard")])
            .args(args)
            .args(["--threads=2", "--quiet"])
            .output()
            .unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    };
    let [ranks, dcp] = ["ranks", "dcp"].map(|name| env.path(name));
    let mesh = "--mesh=fsdp=70";
    limited(&[&"reshard", &fixture("fsdp4/dcp"), &ranks, &mesh, &"--to=torch-ranks", &"--no-sync"]);
    limited(&[&"reshard", &ranks, &dcp, &mesh, &"--to=dcp", &"--io=direct"]);
    limited(&[&"verify", &ranks, &dcp, &"--io=direct"]);
}
