//! Runs of dtshard and their outcomes, for tests of runs that may fail or be killed.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

pub fn copy_all(from: &Path, to: &Path) {
    if !from.is_dir() {
        fs::copy(from, to).unwrap();
        return;
    }
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        copy_all(&entry.path(), &to.join(entry.file_name()));
    }
}

/// Returns the files and folders below `folder`, sorted.
pub fn files_of(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(files_of(&path));
        }
        found.push(path);
    }
    found.sort();
    found
}

/// The exit code or the signal with which a run ended, and its output.
#[derive(Debug)]
pub struct Outcome {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub out: String,
    pub err: String,
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            signal: output.status.signal(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Outcome {
    pub fn assert_no_crash(&self) -> &Self {
        assert!(matches!(self.code, Some(0..=2)) && !self.err.contains("panicked"), "{self:?}");
        self
    }

    pub fn assert_mentions(&self, words: &[&str]) -> &Self {
        for word in words {
            assert!(self.err.contains(word) || self.out.contains(word), "no `{word}` in {self:?}");
        }
        self
    }

    /// Asserts that the run exited with 2, with an error that contains all of `words`.
    pub fn assert_refused(&self, words: &[&str]) -> &Self {
        assert_eq!(self.code, Some(2), "{self:?}");
        assert!(self.err.contains("error: ") && !self.err.contains("panicked"), "{self:?}");
        self.assert_mentions(words)
    }

    pub fn assert_succeeded(&self) -> &Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }
}

pub fn command(args: &[&dyn AsRef<OsStr>]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dtshard"));
    command.args(args.iter().map(AsRef::as_ref)).stdin(Stdio::null()).env("RUST_BACKTRACE", "0");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}
