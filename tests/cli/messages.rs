//! Snapshots of all messages of the program: help, errors, hints, notes, warnings, progress and closing lines.
//!
//! `tests/messages/AREA.txt` holds scenarios. A scenario begins with a heading, and its commands share one folder:
//!
//! ```text
//! # A file of a rank is missing
//! $ cp -r fixtures/fsdp4/ranks src
//! $ rm src/model_world_size_4_rank_2.pt
//! $ dtshard consolidate src out
//! ? 2
//! error: ...
//! > standard output has this prefix
//! ```
//!
//! A shell runs the commands. `fixtures` is a link to `tests/fixtures`, and [`tool`] lists commands for making files.
//! `? N` is the exit code if it is not 0. `UPDATE_SNAPSHOTS=1` replaces the expected output in the files.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Map, json};

use crate::common::in_parallel;
use crate::common::transcript::{difference, portable};
use crate::corrupt::{edit, edit_pickle, fixture, replace};

/// Makes one test for each area, and a test that finds files without an area.
macro_rules! areas {
    ($($area:ident)*) => {
        $(#[test]
        fn $area() {
            check_area(stringify!($area));
        })*

        #[test]
        fn every_file_of_messages_belongs_to_an_area() {
            let areas = [$(stringify!($area)),*];
            for entry in fs::read_dir(folder()).unwrap() {
                let path = entry.unwrap().path();
                let stem = path.file_stem().unwrap().to_str().unwrap();
                assert!(path.is_dir() || areas.contains(&stem), "{} is in no area", path.display());
            }
        }
    };
}

areas!(declared_layout environment flat_layout folders help interrupted layout_file local options verbs);

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/messages")
}

fn check_area(area: &str) {
    let path = folder().join(area).with_extension("txt");
    let expected = fs::read_to_string(&path).unwrap();
    let scenarios = split_scenarios(&expected);
    let found: Vec<String> = in_parallel(&scenarios, |scenario| replay(scenario));
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        fs::write(&path, found.join("\n")).unwrap();
        return;
    }
    let changed: Vec<String> = (scenarios.iter().zip(&found))
        .filter(|(expected, found)| expected.trim_end() != found.trim_end())
        .map(|(expected, found)| difference(expected, found))
        .collect();
    assert!(
        changed.is_empty(),
        "{} of {} scenarios of {} differ; UPDATE_SNAPSHOTS=1 writes them anew\n\n{}",
        changed.len(),
        scenarios.len(),
        path.display(),
        changed.join("\n")
    );
}

fn split_scenarios(text: &str) -> Vec<String> {
    let mut scenarios: Vec<String> = Vec::new();
    for line in text.lines() {
        if line.starts_with("# ") {
            scenarios.push(String::new());
        }
        let scenario = scenarios.last_mut().expect("a file of messages begins with a heading");
        scenario.push_str(line);
        scenario.push('\n');
    }
    scenarios
}

/// Runs the commands of a scenario. Returns the scenario with the output that the commands print now.
fn replay(scenario: &str) -> String {
    let sandbox = tempfile::tempdir().unwrap();
    let root = sandbox.path().canonicalize().unwrap();
    symlink(fixture(""), root.join("fixtures")).unwrap();
    let mut text = String::new();
    for line in scenario.lines().filter(|line| line.starts_with("# ") || line.starts_with("$ ")) {
        writeln!(text, "{line}").unwrap();
        if let Some(command) = line.strip_prefix("$ ") {
            text.push_str(&portable(&run(command, &root), std::slice::from_ref(&root)));
        }
    }
    text
}

fn run(line: &str, folder: &Path) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    if tool(folder, &words) {
        return String::new();
    }
    let programs = Path::new(env!("CARGO_BIN_EXE_dtshard")).parent().unwrap().display().to_string();
    let path = format!("{programs}:{}", std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-c", line]).current_dir(folder).env_clear();
    shell.envs([("PATH", path.as_str()), ("LC_ALL", "C"), ("RUST_BACKTRACE", "0")]).env("HOME", folder);
    let output = shell.output().unwrap();
    let code = output.status.code().unwrap_or_else(|| 128 + output.status.signal().unwrap());
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(!err.contains("panicked at"), "{line}\n{err}");
    assert!(line.contains("dtshard") || code == 0, "{line}\n{err}");
    let mut text = String::new();
    if code != 0 {
        writeln!(text, "? {code}").unwrap();
    }
    for line in err.lines() {
        assert!(!["# ", "$ ", "> "].iter().any(|prefix| line.starts_with(prefix)), "{line}");
        writeln!(text, "{line}").unwrap();
    }
    for line in out.lines() {
        text.push_str(format!("> {line}").trim_end());
        text.push('\n');
    }
    text
}

/// Makes or changes a file, and returns whether the words are a command for that:
///
/// - `safetensors FILE NAME=DTYPE[SIZE,..] ...` writes tensors of bytes that count from 0;
/// - `patch FILE FROM TO` replaces bytes; FROM and TO are text, in which `\xNN` is one byte;
/// - `patch-pickle FILE FROM TO` replaces bytes in the pickle of a torch file, and corrects its checksums.
fn tool(folder: &Path, words: &[&str]) -> bool {
    match words {
        ["safetensors", file, tensors @ ..] => {
            let mut header = Map::new();
            let mut end = 0;
            for tensor in tensors {
                let (name, kind) = tensor.split_once('=').unwrap();
                let (dtype, sizes) = kind.trim_end_matches(']').split_once('[').unwrap();
                let shape: Vec<usize> =
                    sizes.split(',').filter(|size| !size.is_empty()).map(|size| size.parse().unwrap()).collect();
                let digits = dtype.trim_start_matches(char::is_alphabetic).split('_').next().unwrap();
                let width = if dtype == "BOOL" { 1 } else { digits.parse::<usize>().unwrap() / 8 };
                let start = end;
                end += shape.iter().product::<usize>() * width;
                header.insert((*name).into(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] }));
            }
            let header = serde_json::to_vec(&header).unwrap();
            let data: Vec<u8> = (0..end).map(|index| u8::try_from(index % 64).unwrap()).collect();
            let path = folder.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, [&(header.len() as u64).to_le_bytes(), &header[..], &data].concat()).unwrap();
        }
        ["patch", file, from, to] => {
            edit(&folder.join(file), |bytes| replace(bytes, &unescaped(from), &unescaped(to)));
        }
        ["patch-pickle", file, from, to] => {
            edit_pickle(&folder.join(file), |bytes| replace(bytes, &unescaped(from), &unescaped(to)));
        }
        _ => return false,
    }
    true
}

fn unescaped(text: &str) -> Vec<u8> {
    let mut parts = text.split("\\x");
    let mut bytes = parts.next().unwrap().as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(&part[..2], 16).unwrap());
        bytes.extend(part[2..].bytes());
    }
    bytes
}
