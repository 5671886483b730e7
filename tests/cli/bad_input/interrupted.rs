//! Tests of runs that are stopped or killed, of runs that compete for one destination, and of sources that change
//! during the run.

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

/// Writes a sparse safetensors file with `LARGE` bytes of data.
fn large(env: &TestEnv) -> PathBuf {
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{LARGE}],"data_offsets":[0,{LARGE}]}}}}"#);
    let path = env.path("large.safetensors");
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + LARGE).unwrap();
    path
}

fn partial_folder(target: &Path) -> PathBuf {
    let name = format!(".{}.dtshard-partial", target.file_name().unwrap().to_str().unwrap());
    target.with_file_name(name)
}

/// Starts a slow `unshard` of the large file, and waits until its lease exists, so that it is about to write.
fn start(source: &Path, target: &Path, more: &[&str]) -> Child {
    let mut all: Vec<&dyn AsRef<OsStr>> = vec![&"unshard", &source, &target, &"--threads=1", &"--max-memory=40MB"];
    all.extend(more.iter().map(|arg| arg as &dyn AsRef<OsStr>));
    let mut child = command(&all).spawn().unwrap();
    let begun = Instant::now();
    while !partial_folder(target).join("part-0-of-1.0.lease").exists() {
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
fn signal_stops_a_run_within_a_second_and_leaves_nothing() {
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
        outcome.assert_mentions(&["stopped by", name]);
        assert_eq!(env.names(), before);
    }
}

/// Slurm sends several signals when it cancels a step. The cleanup that begins with the first TERM continues after the
/// second TERM.
#[test]
fn repeated_signals_leave_nothing() {
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
        outcome.assert_mentions(&["stopped by", name]);
        assert_eq!(env.names(), before);
    }
}

/// The test does not read the output at first, so the program blocks in the middle of the dry run until the signal.
#[test]
fn signal_stops_a_dry_run() {
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
    // The program prints more messages than the buffer of the pipe holds.
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("left out: ") {
        line.clear();
        assert!(stderr.read_line(&mut line).unwrap() > 0, "it ended too early");
    }
    signal(&child, "TERM");
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert_eq!(wait(child).code, Some(143));
    assert!(rest.contains("error: stopped by TERM"));
}

#[test]
fn leftovers_of_a_killed_run_are_refused_without_restart() {
    let env = TestEnv::new();
    let source = large(&env);
    let target = env.path("out.pt");
    let child = start(&source, &target, &[]);
    signal(&child, "KILL");
    assert_eq!(wait(child).signal, Some(9));
    assert!(partial_folder(&target).exists() && !target.exists());
    let small = fixture("torch_file/trainer.pt");
    dtshard(&[&"unshard", &small, &target]).assert_refused(&[
        "did not finish",
        "out.pt.dtshard-partial",
        "--resume",
        "--restart",
    ]);
    dtshard(&[&"unshard", &small, &target, &"--overwrite"]).assert_refused(&["did not finish", "--restart"]);
    assert!(partial_folder(&target).exists());
    dtshard(&[&"unshard", &small, &target, &"--restart"]).assert_succeeded();
    assert!(!partial_folder(&target).exists() && target.exists());
}

#[test]
fn second_run_into_the_same_destination_is_refused() {
    let env = TestEnv::new();
    let source = large(&env);
    let target = env.path("out.pt");
    let first = start(&source, &target, &["--no-sync"]);
    let small = fixture("torch_file/trainer.pt");
    for more in ["--no-sync", "--restart", "--overwrite"] {
        dtshard(&[&"unshard", &small, &target, &more]).assert_refused(&["another run is writing", "out.pt", "hint: "]);
    }
    wait(first).assert_succeeded();
    assert!(fs::metadata(&target).unwrap().len() > LARGE);
    assert!(!partial_folder(&target).exists());
}

/// Six small runs for one destination start at once. One run succeeds, the others are refused, and the published
/// checkpoint is complete.
#[test]
fn one_of_six_simultaneous_runs_succeeds() {
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
        dtshard(&[&"verify", &target]).assert_succeeded();
        fs::remove_dir_all(&target).unwrap();
    }
}

/// The destination has the old or the new checkpoint after the kill, or at least after the next run has cleaned up.
#[test]
fn overwrite_killed_at_any_time_leaves_old_or_new_checkpoint() {
    let (old, new) = (fixture("safetensors/sharded"), fixture("fsdp3/dcp"));
    let env = TestEnv::new();
    let target = env.path("out");
    dtshard(&[&"consolidate", &old, &target, &"--no-sync"]).assert_succeeded();
    for round in 0..40 {
        let mut child = command(&[&"consolidate", &new, &target, &"--overwrite", &"--restart"]).spawn().unwrap();
        sleep(Duration::from_micros(500 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        if !target.exists() {
            assert!(env.path(".out.dtshard-old").exists(), "{:?}", env.names());
        }
        // The next run is refused, but it cleans up first.
        dtshard(&[&"consolidate", &new, &target]).assert_refused(&[]);
        let same = |source: &Path| {
            let verified = dtshard(&[&"verify", &source, &target, &"--root", &"model"]);
            let whole = dtshard(&[&"verify", &source, &target]);
            verified.code == Some(0) || whole.code == Some(0)
        };
        assert!(same(&old) || same(&new), "round {round}: {:?}", env.names());
    }
    dtshard(&[&"consolidate", &new, &target, &"--overwrite", &"--restart"]).assert_succeeded();
    assert_eq!(fs::read_dir(env.path("")).unwrap().count(), 1, "{:?}", env.names());
    // The messages depend on the moment of the kill.
    transcript::discard();
}

#[test]
fn source_changed_during_the_run_is_an_error() {
    type Change = fn(&Path);
    let cut: Change = |path| File::options().write(true).open(path).unwrap().set_len(1000).unwrap();
    let grown: Change = |path| File::options().append(true).open(path).unwrap().write_all(b"more").unwrap();
    let rewritten: Change = |path| {
        use std::os::unix::fs::FileExt;
        File::options().write(true).open(path).unwrap().write_all_at(b"other", LARGE / 2).unwrap();
    };
    let replaced: Change = |path| {
        let replacement = path.with_extension("aside");
        fs::write(&replacement, "another file").unwrap();
        fs::rename(replacement, path).unwrap();
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
            // Truncating a mapped file ends the process at once. Its partial folder is left for the next run.
            if (what, io) != ("cut", "--io=mmap") {
                outcome.assert_mentions(&["large.safetensors"]);
                assert!(!partial_folder(&target).exists(), "{what} {io}");
            }
        }
    }
}

/// `ulimit -f` limits the length of files. Beyond the limit, the kernel sends a signal that by default kills the
/// process, which would leave partly written files.
#[test]
fn file_size_limit_is_an_error_and_leaves_nothing() {
    let env = TestEnv::new();
    let (source, target) = (fixture("verl/global_step_10/actor"), env.path("out"));
    let limited = Command::new("bash")
        .args(["-c", "ulimit -f 8; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_dtshard"), "reshard"])
        .args([source.as_os_str(), target.as_os_str(), "--mesh=fsdp=2".as_ref()])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&limited.stderr);
    assert_eq!(limited.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("File too large"), "{stderr}");
    assert!(env.names().is_empty(), "{:?}", env.names());
}

/// `ulimit -n` limits the files that a process may have open at the same time. A checkpoint may have more files.
#[test]
fn checkpoint_with_more_files_than_open_file_limit_is_converted() {
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
