//! Tests of system calls that fail, one at a time. The tests need strace and are skipped where it cannot trace.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bad_input::skip;
use crate::common::env::TestEnv;
use crate::corrupt::{Outcome, files_of, fixture};

/// Runs the program under strace. strace logs the system calls `call` and `openat`. `inject` says which of the calls
/// `call` fails, and with which error. Also returns the log.
fn traced(env: &TestEnv, args: &[&str], call: &str, inject: Option<&str>) -> (Outcome, String) {
    let log = env.path("log");
    let mut command = Command::new("strace");
    command.args(["-f", "-y", "-e", &format!("trace=openat,{call}"), "-o"]).arg(&log);
    if let Some(inject) = inject {
        command.arg("-e").arg(format!("inject={call}:{inject}"));
    }
    let output = command.arg(env!("CARGO_BIN_EXE_dtshard")).args(args).output().unwrap();
    (output.into(), fs::read_to_string(log).unwrap_or_default())
}

/// A call that closes an output file that was open for writing.
struct OutputClosed<'a> {
    line: &'a str,
    /// The number of the call among the `close` calls of its thread, as strace counts them.
    number: usize,
}

fn closes_of_output(log: &str) -> Vec<OutputClosed<'_>> {
    let mut counts = BTreeMap::<&str, usize>::new();
    let mut written = BTreeSet::<&str>::new();
    let mut found = Vec::new();
    for line in log.lines() {
        // The log has lines such as `openat(...) = 5</path>` and `close(5</path>)`.
        if let Some((_, opened)) = line.rsplit_once(" = ").filter(|_| line.contains(" openat(")) {
            let descriptor = opened.split('<').next().unwrap_or_default();
            let is_written = ["O_WRONLY", "O_RDWR"].iter().any(|flag| line.contains(flag));
            if is_written {
                written.insert(descriptor)
            } else {
                written.remove(descriptor)
            };
        }
        let Some((thread, closed)) = line.split_once(" close(") else { continue };
        let number = counts.entry(thread.trim()).or_default();
        *number += 1;
        let is_of_output = line.contains(".dtshard-partial/work-") && line.contains("/data/");
        if is_of_output && written.contains(closed.split('<').next().unwrap_or_default()) {
            found.push(OutputClosed { line, number: *number });
        }
    }
    found
}

fn can_trace() -> bool {
    let traced = Command::new("strace").args(["-o", "/dev/null", "true"]).output();
    traced.is_ok_and(|output| output.status.success())
}

#[test]
fn quota_error_at_close_is_an_error() {
    if !can_trace() {
        return skip("strace cannot trace here");
    }
    let env = TestEnv::new();
    let (dcp, ranks) = (fixture("fsdp3/dcp"), env.copy("fsdp3/ranks"));
    // This file is copied unchanged, as a sidecar file.
    env.write("src/ranks/train.log", "step 1");
    let commands: [(&str, &Path, &str, &str); 5] = [
        ("reshard", &ranks, "out", "--mesh=dp=2"),
        ("reshard", &dcp, "out", "--mesh=dp=2 --to=dcp"),
        ("reshard", &dcp, "out", "--mesh=dp=2 --to=local --placements=S(0)"),
        ("unshard", &dcp, "out.pt", ""),
        ("consolidate", &fixture("llama_tiny/ranks"), "out", ""),
    ];
    for (verb, source, out, options) in commands {
        let target = env.path(out);
        let mut args = vec![verb, source.to_str().unwrap(), target.to_str().unwrap(), "--no-sync", "--threads=1"];
        args.extend(options.split_whitespace());
        let (undisturbed, log) = traced(&env, &args, "close", None);
        undisturbed.assert_succeeded();
        let calls: BTreeSet<usize> = closes_of_output(&log).iter().map(|call| call.number).collect();
        assert!(!calls.is_empty(), "{log}");
        let mut hit = BTreeSet::new();
        for call in calls {
            remove(&target);
            let (outcome, log) = traced(&env, &args, "close", Some(&format!("error=EDQUOT:when={call}")));
            let injected: Vec<&str> = (closes_of_output(&log).iter().map(|call| call.line))
                .filter(|line| line.contains("(INJECTED)"))
                .collect();
            if injected.is_empty() {
                continue;
            }
            outcome.assert_refused(&["hint: "]);
            assert!(!target.exists(), "{verb} {options}: {injected:?}");
            assert_eq!(left_behind(&env), Vec::<PathBuf>::new(), "{verb} {options}: {injected:?}");
            hit.insert(call);
        }
        assert!(!hit.is_empty(), "{verb} {options}: no call was hit");
        remove(&target);
    }
}

/// The plan, the leases and the folders are small files, which are also synced.
#[test]
fn failed_small_write_leaves_nothing() {
    if !can_trace() {
        return skip("strace cannot trace here");
    }
    let env = TestEnv::new();
    let (source, target) = (fixture("fsdp3/dcp"), env.path("out"));
    let args = ["reshard", source.to_str().unwrap(), target.to_str().unwrap(), "--mesh=dp=2", "--threads=1"];
    for call in ["write", "pwrite64", "fsync", "fdatasync", "mkdir", "link"] {
        for number in 1.. {
            remove(&target);
            let (outcome, log) = traced(&env, &args, call, Some(&format!("error=ENOSPC:when={number}")));
            let Some(injected) = log.lines().find(|line| line.contains("(INJECTED)")) else { break };
            // A failed link has a fallback, and a failed write of a message does not change the result of the run.
            assert!(
                matches!(outcome.code, Some(0 | 2)) && !outcome.err.contains("panicked"),
                "{injected}: {outcome:?}"
            );
            assert_eq!(outcome.code == Some(0), target.exists(), "{injected}: {outcome:?}");
            assert_eq!(left_behind(&env), Vec::<PathBuf>::new(), "{injected}: {outcome:?}");
        }
    }
}

/// Returns the hidden files that the program keeps beside the destination during a run.
fn left_behind(env: &TestEnv) -> Vec<PathBuf> {
    let is_hidden = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().contains(".dtshard-");
    files_of(&env.path("")).into_iter().filter(is_hidden).collect()
}

fn remove(target: &Path) {
    let _ = if target.is_dir() { fs::remove_dir_all(target) } else { fs::remove_file(target) };
}
