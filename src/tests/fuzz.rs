//! Parsers of files and texts that anybody may have written: mutated fixtures are read or refused, and nothing panics.
//!
//! `cargo test` runs a fixed number of mutations from a fixed seed, which `.cargo/config.toml` sets; docs/ci.md has the
//! variables for longer runs.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::format::pickle::{self, NoFold, Unknown};
use crate::format::{Checkpoint, ReadOptions, layout_file};
use crate::layout::{DeviceMesh, Pattern, parse_placements};
use crate::select::{DtypeRule, Rename};

use super::fixture;
use bolero::{TypeGenerator, check, produce};

/// One change of a file. Positions are taken modulo the length of the file.
#[derive(Clone, Debug, TypeGenerator)]
enum Edit {
    Replace { at: u16, byte: Byte },
    Insert { at: u16, byte: Byte },
    Remove { at: u16, len: u8 },
    Copy { at: u16, len: u8, to: u16 },
}

/// A byte, often one that parsers treat in a special way.
#[derive(Clone, Debug, TypeGenerator)]
enum Byte {
    Any(u8),
    Special(u8),
}

impl Byte {
    fn value(&self) -> u8 {
        const SPECIAL: [u8; 12] = [0, 1, 0x7f, 0x80, 0xff, b'[', b'{', b'"', b'(', b'e', b'.', b'9'];
        match self {
            Self::Any(byte) => *byte,
            Self::Special(index) => SPECIAL[usize::from(*index) % SPECIAL.len()],
        }
    }
}

impl Edit {
    fn apply(&self, bytes: &mut Vec<u8>) {
        const MOST: u8 = 32;
        let len = bytes.len();
        let position = |at: u16| usize::from(at) % len.max(1);
        let range = |at: u16, count: u8| position(at)..(position(at) + usize::from(count % MOST)).min(len);
        match self {
            Self::Replace { at, byte } if len > 0 => bytes[position(*at)] = byte.value(),
            Self::Replace { .. } => {}
            Self::Insert { at, byte } => bytes.insert(position(*at), byte.value()),
            Self::Remove { at, len } => drop(bytes.drain(range(*at, *len))),
            Self::Copy { at, len, to } => {
                let copy = bytes[range(*at, *len)].to_vec();
                let to = position(*to);
                bytes.splice(to..to, copy);
            }
        }
    }
}

/// Gives each of the valid inputs, and mutations of them, to a parser. A macro, since bolero names a target by the
/// function that it is in.
macro_rules! fuzz {
    ($corpus:expr, $mutations:expr, $parse:expr) => {{
        let (corpus, parse): (Vec<Vec<u8>>, _) = ($corpus, $parse);
        corpus.iter().for_each(|bytes| parse(bytes.as_slice()));
        let input = (produce::<u8>(), produce::<Vec<Edit>>().with().len(1..6_usize));
        check!().with_generator(input).with_iterations($mutations).for_each(|(file, edits)| {
            let mut bytes = corpus[usize::from(*file) % corpus.len()].clone();
            edits.iter().for_each(|edit| edit.apply(&mut bytes));
            let start = Instant::now();
            parse(bytes.as_slice());
            assert!(start.elapsed() < Duration::from_secs(20), "slow: {:?}", String::from_utf8_lossy(&bytes));
        });
    }};
}

/// A copy of a checkpoint, of which one file is replaced.
struct Copied {
    folder: tempfile::TempDir,
    name: &'static str,
}

impl Copied {
    fn new(checkpoint: &str, name: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(fixture(checkpoint)).unwrap() {
            let entry = entry.unwrap();
            if entry.path().is_file() {
                fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
            }
        }
        Self { folder, name }
    }

    fn content(&self) -> Vec<u8> {
        fs::read(self.folder.path().join(self.name)).unwrap()
    }

    /// Opens the checkpoint with this content of the file.
    fn open_with(&self, bytes: &[u8]) {
        fs::write(self.folder.path().join(self.name), bytes).unwrap();
        let _ = Checkpoint::open(self.folder.path(), &ReadOptions::default());
    }
}

#[test]
fn pickle() {
    let corpus =
        vec![fs::read(fixture("fsdp4/dcp/.metadata")).unwrap(), b"\x80\x02}X\x01\0\0\0a](K\x01K\x02es.".to_vec()];
    fuzz!(corpus, 1_000, |bytes: &[u8]| {
        let Ok((pickle, _)) = pickle::decode(bytes, &mut NoFold) else { return };
        let _ = pickle::lift_with(pickle.root(), Unknown::Drop, &mut |_| Ok(None));
    });
}

#[test]
fn dcp_metadata() {
    let copy = Copied::new("fsdp4/dcp", ".metadata");
    fuzz!(vec![copy.content()], 150, |bytes: &[u8]| copy.open_with(bytes));
}

#[test]
fn torch_archive() {
    let copy = Copied::new("fsdp4/ranks", "model_world_size_4_rank_0.pt");
    fuzz!(vec![copy.content()], 150, |bytes: &[u8]| copy.open_with(bytes));
}

#[test]
fn safetensors_header() {
    let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}"#;
    fuzz!(vec![header.into()], 20_000, |text: &[u8]| {
        let _ = crate::format::safetensors::parse_header(Path::new("x"), text, 16 + text.len() as u64);
    });
}

#[test]
fn safetensors_index() {
    let copy = Copied::new("safetensors/sharded", "model.safetensors.index.json");
    fuzz!(vec![copy.content()], 300, |bytes: &[u8]| copy.open_with(bytes));
}

#[test]
fn flat_layout() {
    let text = r#"{"version": 1, "world_size": 2, "units": [{"module": "", "dtype": "f32", "params": [{"fqn": "w", "shape": [2, 3]}]}]}"#;
    fuzz!(vec![text.into()], 10_000, |bytes: &[u8]| {
        let _ = crate::format::fsdp_flat::document::parse(Path::new("flat_layout.json"), bytes);
    });
}

#[test]
fn local_document() {
    let text = r#"{"version": 1, "world_size": 2, "meshes": [{"dims": [["dp", 2]]}],
        "tensors": {"w": {"dtype": "f32", "shape": [7, 3], "class": "dtensor", "mesh": 0, "placements": "S(0)"}},
        "state": {"w": {"$tensor": "w"}, "a": {"$tuple": [1, {"$float": "nan"}]}, "b": {"$ranks": [[[0], 1], [[1], 5]]}}}"#;
    fuzz!(vec![text.into()], 10_000, |bytes: &[u8]| {
        let _ = crate::format::local::document::parse(Path::new("layout.json"), bytes);
    });
}

#[test]
fn layout_file_toml() {
    let text = "mesh = { dp = 2, tp = 2 }\n[[rules]]\nmatch = \"**.w\"\nplacements = \"S(0),R\"\n";
    fuzz!(vec![text.into()], 5_000, |bytes: &[u8]| {
        let _ = layout_file::parse(Path::new("x.toml"), bytes);
    });
}

#[test]
fn layout_file_json() {
    let text = r#"{"mesh": {"dp": 2}, "rules": [{"match": "**", "placements": "S(0)"}]}"#;
    fuzz!(vec![text.into()], 5_000, |bytes: &[u8]| {
        let _ = layout_file::parse(Path::new("x.json"), bytes);
    });
}

#[test]
fn texts_of_options() {
    let corpus =
        ["layers.*.{w1,w3}.**", "_S(1,2),R,P(sum)", r"^blocks\.(\d+)\.=layers.\1.", "**.norm=bf16", "dp=2,tp=4"];
    fuzz!(corpus.map(Vec::from).to_vec(), 5_000, |bytes: &[u8]| {
        let Ok(text) = std::str::from_utf8(bytes) else { return };
        let _ = Pattern::parse(text).map(|pattern| pattern.covers("layers.0.w1.weight"));
        let _ = parse_placements(text);
        let _ = DeviceMesh::parse(text);
        let _ = Rename::parse(text);
        let _ = DtypeRule::parse(text);
    });
}
