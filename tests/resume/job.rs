//! Conversions that are disturbed, with what they write where nobody does so.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::outcome::{Outcome, command};
pub use crate::tree::{Tree, names, tree};

/// So much of each tensor that a window of a hurried run is full after a few, and a part ends within one.
const ROWS: u64 = 96;
const COLUMNS: u64 = 160;
const TENSORS: usize = 24;

/// Values of which some do not fit f16.
fn value(tensor: usize, at: u64) -> f32 {
    let mixed = (tensor as u64 * 7919 + at).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    f32::from(u16::try_from(mixed & 0xffff).unwrap()) * 2.0 - 60_000.0
}

/// A safetensors checkpoint of one file, beside what goes along with it.
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

/// Say that a test cannot be done here.
#[expect(clippy::print_stderr, reason = "nobody is to take it for passed")]
pub fn skip(why: &str) {
    eprintln!("skipped: {why}");
}

/// A kind of conversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    verb: &'static str,
    /// Made of the safetensors checkpoint first, where that is not the source itself.
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
    /// The name of the destination.
    pub fn target(&self) -> &'static str {
        self.target
    }
}

/// One file with sums all over it, from files with such.
pub const FILE: Kind =
    Kind { verb: "unshard", source: Some("--to torch-ranks --mesh fsdp=3"), target: "out.pt", options: "" };
/// A folder with files that go along.
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

/// A conversion, and what it writes when it is left alone.
pub struct Job {
    pub kind: Kind,
    folder: TempDir,
    source: PathBuf,
    before: Tree,
    pub wanted: Tree,
    /// The document of that run.
    pub said: Json,
}

impl Job {
    pub fn new(kind: Kind) -> Self {
        // Thousands of runs sync, which takes no time where nothing has to go to a disk.
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let mut source = folder.path().join("source");
        write_source(&source);
        if let Some(options) = kind.source {
            let made = folder.path().join("made");
            let options: Vec<&str> = options.split(' ').chain(["--no-sync"]).collect();
            run(&["reshard".as_ref(), source.as_os_str(), made.as_os_str()], &options, None).succeeded();
            fs::remove_dir_all(&source).unwrap();
            source = made;
        }
        fs::create_dir(folder.path().join("desk")).unwrap();
        let before = tree(&source);
        let mut job = Self { kind, folder, source, before, wanted: Tree::new(), said: Json::Null };
        job.said = serde_json::from_str(&job.run("--json", None).succeeded().out).unwrap();
        job.wanted = tree(&job.target());
        job.clear();
        job
    }

    /// The folder with the destination, and nothing else.
    pub fn desk(&self) -> PathBuf {
        self.folder.path().join("desk")
    }

    pub fn source(&self) -> &Path {
        &self.source
    }

    pub fn target(&self) -> PathBuf {
        self.desk().join(self.kind.target)
    }

    pub fn partial(&self) -> PathBuf {
        self.desk().join(format!(".{}.dtshard-partial", self.kind.target))
    }

    /// The folder in the partial folder that has its output and its journals.
    pub fn work(&self) -> PathBuf {
        let found = names(&self.partial()).into_iter().find(|name| name.starts_with("work-"));
        self.partial().join(found.expect("a partial folder has one"))
    }

    /// The leases or journals of the partial folder, by their suffix.
    pub fn of_partial(&self, suffix: &str) -> Vec<PathBuf> {
        let folder = if suffix == ".journal" { self.work() } else { self.partial() };
        names(&folder).iter().filter(|name| name.ends_with(suffix)).map(|name| folder.join(name)).collect()
    }

    pub fn clear(&self) {
        fs::remove_dir_all(self.desk()).unwrap();
        fs::create_dir(self.desk()).unwrap();
    }

    pub fn command(&self, more: &str, fault: Option<&str>) -> Command {
        self.command_at(&self.target(), more, fault)
    }

    /// Returns this job with another destination.
    pub fn command_at(&self, target: &Path, more: &str, fault: Option<&str>) -> Command {
        let options: Vec<&str> = self.kind.options.split_whitespace().chain(more.split_whitespace()).collect();
        dtshard(&[self.kind.verb.as_ref(), self.source.as_os_str(), target.as_os_str()], &options, fault)
    }

    /// Run it, with further options, and be killed at a point or, at `none`, record every step.
    pub fn run(&self, more: &str, fault: Option<&str>) -> Outcome {
        self.command(more, fault).output().unwrap().into()
    }

    /// Run it once for each of several parts, none of which waits.
    pub fn run_parts(&self, of: u32, more: &str, fault: Option<&str>) {
        for index in 0..of {
            let parts = if of == 1 { String::new() } else { format!("--parts {of} --part {index} --no-wait") };
            self.run(&format!("{parts} {more}"), fault).succeeded();
        }
    }

    /// The source is what it was.
    #[track_caller]
    pub fn source_is_whole(&self, at: &str) {
        assert!(tree(&self.source) == self.before, "{at}: the source has changed");
    }

    /// The destination is what an undisturbed run writes, and nothing else is left.
    #[track_caller]
    pub fn is_done(&self, at: &str) {
        assert_eq!(names(&self.desk()), [self.kind.target], "{at}");
        self.is_right(at);
        self.source_is_whole(at);
    }

    #[track_caller]
    pub fn is_right(&self, at: &str) {
        let found = tree(&self.target());
        let differing: Vec<_> = self.wanted.keys().filter(|name| found.get(*name) != self.wanted.get(*name)).collect();
        assert!(found == self.wanted, "{at}: {differing:?} differ");
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
