//! Conversions that tests interrupt, and the files that an uninterrupted run writes.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::outcome::{Outcome, command};
pub use crate::tree::{Tree, names, tree};

/// The number of rows of each tensor. It is so large that a run with the small windows of tests fills several windows,
/// and that a part ends within a window.
const ROWS: u64 = 96;
const COLUMNS: u64 = 160;
const TENSORS: usize = 24;

/// Returns the value of an element of a test tensor. Some values do not fit f16.
fn value(tensor: usize, at: u64) -> f32 {
    let mixed = (tensor as u64 * 7919 + at).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    f32::from(u16::try_from(mixed & 0xffff).unwrap()) * 2.0 - 60_000.0
}

/// Writes a checkpoint with one safetensors file and two sidecar files.
fn write_source(folder: &Path) {
    let len = ROWS * COLUMNS * 4;
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for tensor in 0..TENSORS {
        let at = data.len() as u64;
        let about = json!({ "dtype": "F32", "shape": [ROWS, COLUMNS], "data_offsets": [at, at + len] });
        header.insert(format!("layers.{tensor:02}.weight"), about);
        (0..ROWS * COLUMNS).for_each(|index| data.extend(value(tensor, index).to_le_bytes()));
    }
    let mut header = serde_json::to_vec(&header).unwrap();
    header.resize(header.len().next_multiple_of(8), b' ');
    let content = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("model.safetensors"), content).unwrap();
    fs::write(folder.join("config.json"), r#"{"model_type": "none"}"#).unwrap();
    fs::write(folder.join("tokenizer.json"), "{}").unwrap();
}

/// Prints that a test is skipped.
#[expect(clippy::print_stderr, reason = "nobody is to take it for passed")]
pub fn skip(why: &str) {
    eprintln!("skipped: {why}");
}

/// A kind of conversion that tests interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    verb: &'static str,
    /// The options of the conversion that makes the source from the safetensors checkpoint; `None` if the safetensors
    /// checkpoint is the source.
    source: Option<&'static str>,
    target: &'static str,
    options: &'static str,
}

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {}", self.verb, self.options)
    }
}

impl Kind {
    /// Returns the name of the destination.
    pub fn target(&self) -> &'static str {
        self.target
    }
}

/// A conversion from files with checksums to one file with checksums.
pub const FILE: Kind =
    Kind { verb: "unshard", source: Some("--to torch-ranks --mesh fsdp=3"), target: "out.pt", options: "" };
/// A conversion from a DCP directory to a folder of safetensors files.
pub const FOLDER: Kind =
    Kind { verb: "consolidate", source: Some("--to dcp --mesh fsdp=4"), target: "out", options: "" };
pub const RANKS: Kind = Kind {
    verb: "reshard",
    source: None,
    target: "out",
    options: "--to torch-ranks --mesh dp=2,tp=2 --placements R,S(1)",
};
pub const DCP: Kind = Kind {
    verb: "reshard",
    source: Some("--to torch-ranks --mesh fsdp=3"),
    target: "out",
    options: "--to dcp --mesh fsdp=4 --placements S(1)",
};
pub const CAST: Kind = Kind { verb: "consolidate", source: None, target: "out", options: "--dtype f16" };
pub const KINDS: [Kind; 5] = [FILE, FOLDER, RANKS, DCP, CAST];

/// A conversion, and the output that it has without interruption.
pub struct Job {
    pub kind: Kind,
    folder: TempDir,
    source: PathBuf,
    before: Tree,
    pub expected: Tree,
    /// The JSON document of the run that was not interrupted.
    pub document: Json,
}

impl Job {
    pub fn new(kind: Kind) -> Self {
        // The tests have thousands of runs that sync their output. In memory, syncing takes no time.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let mut source = folder.path().join("source");
        write_source(&source);
        if let Some(options) = kind.source {
            let made = folder.path().join("made");
            let options: Vec<&str> = options.split(' ').chain(["--no-sync"]).collect();
            run(&["reshard".as_ref(), source.as_os_str(), made.as_os_str()], &options, None).assert_succeeded();
            fs::remove_dir_all(&source).unwrap();
            source = made;
        }
        fs::create_dir(folder.path().join("results")).unwrap();
        let before = tree(&source);
        let mut job = Self { kind, folder, source, before, expected: Tree::new(), document: Json::Null };
        job.document = serde_json::from_str(&job.run("--json", None).assert_succeeded().out).unwrap();
        job.expected = tree(&job.target());
        job.clear();
        job
    }

    /// Returns the folder that contains only the destination and the work files beside it.
    pub fn dst_folder(&self) -> PathBuf {
        self.folder.path().join("results")
    }

    pub fn source(&self) -> &Path {
        &self.source
    }

    pub fn target(&self) -> PathBuf {
        self.dst_folder().join(self.kind.target)
    }

    pub fn partial(&self) -> PathBuf {
        self.dst_folder().join(format!(".{}.dtshard-partial", self.kind.target))
    }

    /// Returns the folder inside the partial folder that contains the output files and journals.
    pub fn work(&self) -> PathBuf {
        let found = names(&self.partial()).into_iter().find(|name| name.starts_with("work-"));
        self.partial().join(found.expect("a partial folder has one"))
    }

    /// Returns the paths of the leases or journals in the partial folder. `suffix` is `.lease` or `.journal`.
    pub fn files_in_partial(&self, suffix: &str) -> Vec<PathBuf> {
        let folder = if suffix == ".journal" { self.work() } else { self.partial() };
        names(&folder).iter().filter(|name| name.ends_with(suffix)).map(|name| folder.join(name)).collect()
    }

    pub fn clear(&self) {
        fs::remove_dir_all(self.dst_folder()).unwrap();
        fs::create_dir(self.dst_folder()).unwrap();
    }

    pub fn command(&self, more: &str, fault: Option<&str>) -> Command {
        self.command_at(&self.target(), more, fault)
    }

    /// Returns the command of this job for another destination.
    pub fn command_at(&self, target: &Path, more: &str, fault: Option<&str>) -> Command {
        let options: Vec<&str> = self.kind.options.split_whitespace().chain(more.split_whitespace()).collect();
        dtshard(&[self.kind.verb.as_ref(), self.source.as_os_str(), target.as_os_str()], &options, fault)
    }

    /// Runs the job with the additional options `more`. `fault` is the crash point (a position in the code) at which
    /// the run is killed; with `none`, the run is not killed, but it also uses small windows and records each step.
    pub fn run(&self, more: &str, fault: Option<&str>) -> Outcome {
        self.command(more, fault).output().unwrap().into()
    }

    /// Runs `of` parts one after the other, and asserts that each succeeds. No part waits for the others.
    pub fn run_parts(&self, of: u32, more: &str, fault: Option<&str>) {
        for index in 0..of {
            let parts = if of == 1 { String::new() } else { format!("--parts {of} --part {index} --no-wait") };
            self.run(&format!("{parts} {more}"), fault).assert_succeeded();
        }
    }

    /// Asserts that the files of the source are unchanged.
    #[track_caller]
    pub fn assert_source_unchanged(&self, at: &str) {
        assert!(tree(&self.source) == self.before, "{at}: the source has changed");
    }

    /// Asserts that the destination has the files of an uninterrupted run, that no other files remain, and that the
    /// source is unchanged.
    #[track_caller]
    pub fn assert_done(&self, at: &str) {
        assert_eq!(names(&self.dst_folder()), [self.kind.target], "{at}");
        self.assert_result(at);
        self.assert_source_unchanged(at);
    }

    #[track_caller]
    pub fn assert_result(&self, at: &str) {
        let found = tree(&self.target());
        let differing: Vec<_> =
            self.expected.keys().filter(|name| found.get(*name) != self.expected.get(*name)).collect();
        assert!(found == self.expected, "{at}: {differing:?} differ");
    }
}

fn dtshard(paths: &[&OsStr], options: &[&str], fault: Option<&str>) -> Command {
    let args: Vec<&dyn AsRef<OsStr>> = paths
        .iter()
        .map(|path| path as &dyn AsRef<OsStr>)
        .chain(options.iter().map(|option| option as &dyn AsRef<OsStr>))
        .collect();
    let mut command = command(&args);
    if let Some(fault) = fault {
        command.env("DTSHARD_FAULT", fault);
    }
    command
}

fn run(paths: &[&OsStr], options: &[&str], fault: Option<&str>) -> Outcome {
    dtshard(paths, options, fault).output().unwrap().into()
}
