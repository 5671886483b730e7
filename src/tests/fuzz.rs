//! Fuzz tests of the parsers of files and texts that anybody may have written. Fixtures with random changes must be
//! read or refused, without a panic.
//!
//! Fuzz tests of pickles and archives alone are in `crates/torch-pickle/tests/fuzz.rs`.
//!
//! `cargo test` runs a fixed number of mutations from a fixed seed, which `.cargo/config.toml` sets;
//! docs/explanation/reliability.md has the variables for longer runs.

#[macro_use]
#[path = "../../crates/torch-pickle/tests/mutations/mod.rs"]
mod mutations;

use std::fs;
use std::path::Path;

use super::fixture;
use crate::format::{Checkpoint, ReadOptions, layout_file};
use crate::layout::{DeviceMesh, Pattern, parse_placements};
use crate::maps::{Sizes, SourceTensor, WeightMap, families, padding, pieces};
use crate::select::{DtypeRule, Rename};

/// A copy of a checkpoint in which one file, `name`, is replaced.
struct Copied {
    folder: tempfile::TempDir,
    name: &'static str,
}

impl Copied {
    fn new(checkpoint: &str, name: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        copy_all(&fixture(checkpoint), folder.path());
        Self { folder, name }
    }

    fn content(&self) -> Vec<u8> {
        fs::read(self.folder.path().join(self.name)).unwrap()
    }

    /// Writes `bytes` into the file `name`, and opens the checkpoint.
    fn open_with(&self, bytes: &[u8]) {
        fs::write(self.folder.path().join(self.name), bytes).unwrap();
        let _ = Checkpoint::open(self.folder.path(), &ReadOptions::default());
    }
}

fn copy_all(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let copy = to.join(entry.file_name());
        if entry.path().is_dir() {
            fs::create_dir(&copy).unwrap();
            copy_all(&entry.path(), &copy);
        } else {
            fs::copy(entry.path(), copy).unwrap();
        }
    }
}

#[test]
fn dcp_metadata() {
    let copy = Copied::new("fsdp4/dcp", ".metadata");
    fuzz!(vec![copy.content()], 150, |bytes: &[u8]| copy.open_with(bytes));
}

#[test]
fn torch_checkpointing_metadata() {
    for checkpoint in ["torch_checkpointing", "torch_checkpointing_tp"] {
        let copy = Copied::new(&format!("trainers/{checkpoint}/step-30"), "metadata.pkl");
        fuzz!(vec![copy.content()], 150, |bytes: &[u8]| copy.open_with(bytes));
    }
}

#[test]
fn torchsnapshot_manifest() {
    let copy = Copied::new("trainers/torchsnapshot_dtensor/snapshot", ".snapshot_metadata");
    let yaml = fs::read(fixture("trainers/torchsnapshot.snapshot_metadata.yaml")).unwrap();
    fuzz!(vec![copy.content(), yaml], 150, |bytes: &[u8]| copy.open_with(bytes));
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

/// Map files are parsed and applied to the tensors of their model, and each target is divided into pieces.
#[test]
fn map_file() {
    let models =
        [("llama", "hf"), ("phi3", "fused"), ("deepseek-v3", "titan"), ("gpt2", "conv1d"), ("qwen3-moe", "hf")];
    let corpus = families().iter().filter(|family| models.iter().any(|(name, _)| *name == family.name));
    let corpus: Vec<Vec<u8>> = corpus.map(|family| family.text.into()).collect();
    let models = models.map(|(family, side)| {
        let folder = fixture("maps").join(family);
        let model =
            Checkpoint::open(&folder.join(side).with_extension("safetensors"), &ReadOptions::default()).unwrap();
        let tensors = model.catalog.tensors.iter();
        let tensors: Vec<SourceTensor> =
            tensors.map(|entry| SourceTensor { name: entry.fqn.to_string(), shape: entry.shape.to_vec() }).collect();
        let config: serde_json::Value = serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
        (family, tensors, config)
    });
    fuzz!(corpus, 5_000, |bytes: &[u8]| {
        let Ok(text) = std::str::from_utf8(bytes) else { return };
        let Ok(map) = WeightMap::parse("x.toml", text) else { return };
        let own = models.iter().find(|(family, _, _)| *family == map.family).unwrap_or(&models[0]);
        let Ok(sizes) = Sizes::new(&map.sizes, &[], Some(&own.2)) else { return };
        for [from, to] in [[0, 1], [1, 0]] {
            let Ok(mapping) = map.apply([from, to], &own.1, sizes.clone()) else { continue };
            for application in &mapping.applications {
                let cells = [from, to].map(|side| &map.rows[application.row].cells[side]);
                for target in &application.targets {
                    let target = (target.pattern, &target.at);
                    let _ = pieces(cells, target, &application.sizes, &application.rest, 0);
                    let _ = padding(cells[1], target, &application.sizes, &application.rest);
                }
            }
        }
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
