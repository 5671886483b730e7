//! Parsers of files and texts that anybody may have written: mutated fixtures are read or refused, and nothing panics.
//!
//! Mutations follow from a fixed seed. `FUZZ_SECONDS` runs each target for so long instead of a second or two.

#![allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails")]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dtshard::format::pickle::{self, NoFold, Unknown};
use dtshard::format::{Checkpoint, ReadOptions, layout_file};
use dtshard::layout::{Pattern, parse_placements};
use dtshard::select::{DtypeRule, Rename};

/// A generator of numbers by Marsaglia (xorshift64*).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(number).unwrap() % bound.max(1)
    }

    fn byte(&mut self) -> u8 {
        const EDGES: [u8; 12] = [0, 1, 0x7f, 0x80, 0xff, b'[', b'{', b'"', b'(', b'e', b'.', b'9'];
        if self.below(2) == 0 { EDGES[self.below(EDGES.len())] } else { u8::try_from(self.below(256)).unwrap() }
    }

    /// Changes a few bytes, and repeats, moves or removes a stretch.
    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let (at, len) = (self.below(bytes.len()), self.below(32));
            let end = (at + len).min(bytes.len());
            match self.below(6) {
                0..=2 if !bytes.is_empty() => bytes[at] = self.byte(),
                3 => drop(bytes.drain(at..end)),
                4 => {
                    let copy = bytes[at..end].to_vec();
                    let to = self.below(bytes.len());
                    bytes.splice(to..to, copy);
                }
                _ => {
                    let byte = self.byte();
                    bytes.insert(at, byte);
                }
            }
        }
    }
}

/// Gives mutations of the corpus to a parser, for as long as is asked for.
fn fuzz(corpus: &[Vec<u8>], most: usize, mut parse: impl FnMut(&[u8])) {
    assert!(!corpus.is_empty());
    let seconds = std::env::var("FUZZ_SECONDS").ok().map(|text| text.parse().unwrap());
    let (end, mut numbers) = (seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds)), Numbers(1));
    corpus.iter().for_each(|bytes| parse(bytes));
    let mut count = 0;
    while end.map_or(count < most, |end| Instant::now() < end) {
        let mut bytes = corpus[numbers.below(corpus.len())].clone();
        numbers.mutate(&mut bytes);
        let start = Instant::now();
        parse(&bytes);
        assert!(start.elapsed() < Duration::from_secs(20), "slow: {:?}", String::from_utf8_lossy(&bytes));
        count += 1;
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Mutates one file of a checkpoint in place, and reads all of it.
fn fuzz_file_of(checkpoint: &str, name: &str, most: usize) {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture(checkpoint)).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_file() {
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
    }
    let path = folder.path().join(name);
    let corpus = [fs::read(&path).unwrap()];
    fuzz(&corpus, most, |bytes| {
        fs::write(&path, bytes).unwrap();
        let _ = Checkpoint::open(folder.path(), &ReadOptions::default());
    });
}

#[test]
fn pickle() {
    let corpus = [fs::read(fixture("fsdp4/dcp/.metadata")).unwrap(), b"\x80\x02}X\x01\0\0\0a](K\x01K\x02es.".to_vec()];
    fuzz(&corpus, 1_000, |bytes| {
        let Ok((pickle, _)) = pickle::decode(bytes, &mut NoFold) else { return };
        let _ = pickle::lift_with(pickle.root(), Unknown::Drop, &mut |_| Ok(None));
    });
}

#[test]
fn dcp_metadata() {
    fuzz_file_of("fsdp4/dcp", ".metadata", 150);
}

#[test]
fn torch_archive() {
    fuzz_file_of("fsdp4/ranks", "model_world_size_4_rank_0.pt", 150);
}

#[test]
fn safetensors_header() {
    let corpus: Vec<_> = [r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}"#]
        .map(|text| text.as_bytes().to_vec())
        .into();
    fuzz(&corpus, 20_000, |text| {
        let _ = dtshard::format::safetensors::parse_header(Path::new("x"), text, 16 + text.len() as u64);
    });
}

#[test]
fn safetensors_index() {
    fuzz_file_of("safetensors/sharded", "model.safetensors.index.json", 300);
}

#[test]
fn flat_layout() {
    let text = r#"{"version": 1, "world_size": 2, "units": [{"module": "", "dtype": "f32", "params": [{"fqn": "w", "shape": [2, 3]}]}]}"#;
    fuzz(&[text.as_bytes().to_vec()], 10_000, |bytes| {
        let _ = dtshard::format::fsdp_flat::document::parse(Path::new("flat_layout.json"), bytes);
    });
}

#[test]
fn local_document() {
    let text = r#"{"version": 1, "world_size": 2, "meshes": [{"dims": [["dp", 2]]}],
        "tensors": {"w": {"dtype": "f32", "shape": [7, 3], "class": "dtensor", "mesh": 0, "placements": "S(0)"}},
        "state": {"w": {"$tensor": "w"}, "a": {"$tuple": [1, {"$float": "nan"}]}, "b": {"$ranks": [[[0], 1], [[1], 5]]}}}"#;
    fuzz(&[text.as_bytes().to_vec()], 10_000, |bytes| {
        let _ = dtshard::format::local::document::parse(Path::new("layout.json"), bytes);
    });
}

#[test]
fn layout_file_of_both_kinds() {
    let toml = "mesh = { dp = 2, tp = 2 }\n[[rules]]\nmatch = \"**.w\"\nplacements = \"S(0),R\"\n";
    let json = r#"{"mesh": {"dp": 2}, "rules": [{"match": "**", "placements": "S(0)"}]}"#;
    for (name, text) in [("x.toml", toml), ("x.json", json)] {
        fuzz(&[text.as_bytes().to_vec()], 5_000, |bytes| {
            let _ = layout_file::parse(Path::new(name), bytes);
        });
    }
}

#[test]
fn texts_of_options() {
    let corpus = ["layers.*.{w1,w3}.**", "_S(1,2),R,P(sum)", r"^blocks\.(\d+)\.=layers.\1.", "**.norm=bf16"];
    fuzz(&corpus.map(|text| text.as_bytes().to_vec()), 5_000, |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return };
        let _ = Pattern::parse(text).map(|pattern| pattern.covers("layers.0.w1.weight"));
        let _ = parse_placements(text);
        let _ = Rename::parse(text);
        let _ = DtypeRule::parse(text);
    });
}
