//! Flat parameters of FSDP1: read from rank files and compared with the ground truth bit for bit.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{Tensors, Truth, assert_same, copy_folder, expect, fixture, inspect, read, read_safetensors, succeed};
use common::{below, tensors_of};
use dtshard::catalog::flat::FlatLayout;
use dtshard::error::Error;
use dtshard::format::fsdp_flat::document;
use dtshard::format::{Checkpoint, FlatKnowledge, Format, ReadOptions};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

const SHARDED: [&str; 6] = ["flat2", "flat3", "flat4", "flat_mixed", "flat_bf16", "flat_hybrid"];

/// The folders of flat parameters of a case.
fn folders(case: &str) -> Vec<&'static str> {
    ["views", "flat", "groups", "one_file"].into_iter().filter(|name| fixture(case).join(name).is_dir()).collect()
}

/// A copy of a fixture's folder.
struct Copy {
    folder: TempDir,
    truth: Truth,
    layout: Json,
}

impl Copy {
    fn new(case: &str, name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        copy_folder(&fixture(case).join(name), &folder.path().join("src"));
        let truth = Truth::load(&format!("{case}/truth"));
        let layout = truth.json["flat_layout"][name].clone();
        Self { folder, truth, layout }
    }

    /// With its flat layout beside the files.
    fn with_layout(case: &str, name: &str) -> Self {
        let copy = Self::new(case, name);
        copy.write_layout(&copy.layout);
        copy
    }

    fn path(&self) -> PathBuf {
        self.at("src")
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write_layout(&self, layout: &Json) {
        fs::write(self.path().join("flat_layout.json"), layout.to_string()).unwrap();
    }

    /// Every tensor of a model and its optimizer.
    fn expected(&self) -> Tensors {
        self.truth.tensors.clone()
    }

    fn model(&self) -> Tensors {
        below("model.", &self.truth.tensors)
    }

    fn opened(&self, like: Option<&Path>) -> dtshard::error::Result<Checkpoint> {
        let flat = FlatKnowledge { like: like.map(Path::to_path_buf), ..FlatKnowledge::default() };
        Checkpoint::open(&self.path(), &ReadOptions { flat, ..ReadOptions::default() })
    }

    #[track_caller]
    fn refused(&self) -> Error {
        self.opened(None).expect_err("a refusal")
    }
}

fn layout_of(json: &Json) -> FlatLayout {
    document::parse(Path::new("truth"), json.to_string().as_bytes()).unwrap()
}

// ---------------------------------------------------------------------------------------------------------------
// What is read is the truth
// ---------------------------------------------------------------------------------------------------------------

#[test]
fn with_a_flat_layout_every_folder_is_the_truth() {
    for case in SHARDED {
        for name in folders(case) {
            let copy = Copy::with_layout(case, name);
            let checkpoint = copy.opened(None).unwrap();
            assert_eq!(checkpoint.format, Format::FsdpFlat);
            assert_same(&tensors_of(&checkpoint), &copy.expected(), &format!("{case}/{name}"));
            assert_eq!(checkpoint.catalog.flat, Some(layout_of(&copy.layout)), "{case}/{name}");
            assert!(checkpoint.catalog.warnings.is_empty(), "{:?}", checkpoint.catalog.warnings);
            assert!(checkpoint.catalog.conflicts().is_empty());
        }
    }
}

/// Views tell everything but shapes; a torch file tells those, with strides.
#[test]
fn with_a_model_like_it_views_are_the_truth() {
    let full = fixture("flat2/full/model.pt");
    for case in ["flat2", "flat3", "flat4", "flat_mixed", "flat_bf16", "flat_hybrid"] {
        let copy = Copy::new(case, "views");
        let checkpoint = copy.opened(Some(&full)).unwrap();
        assert_same(&tensors_of(&checkpoint), &copy.expected(), case);
        assert_eq!(checkpoint.catalog.flat, Some(layout_of(&copy.layout)), "{case}");
    }
}

/// Without views, order and ties come from the other checkpoint: another fixture's flat parameters have both.
#[test]
fn with_an_ordered_model_like_it_flat_parameters_are_the_truth() {
    for case in SHARDED {
        let like = Copy::with_layout(case, "views");
        let copy = Copy::new(case, "flat");
        let checkpoint = copy.opened(Some(&like.path())).unwrap();
        assert_same(&tensors_of(&checkpoint), &copy.expected(), case);
        assert_eq!(checkpoint.catalog.flat, Some(layout_of(&copy.layout)), "{case}");
    }
}

/// A full state dict has a copy of a tied weight under each of its names.
#[test]
fn tied_weights_that_are_counted_twice_are_named() {
    let error = Copy::new("flat2", "flat").opened(Some(&fixture("flat2/full/model.pt"))).unwrap_err().to_string();
    assert!(error.contains("the root unit: expected a flat parameter of"), "{error}");
    assert!(error.contains("as if emb.weight and head.weight were tied, and one"), "{error}");
}

/// Loaders and other wrappings rely on it: parameters in the order of `named_parameters()`, buffers behind those of
/// their module.
#[test]
fn names_come_in_the_order_of_the_model() {
    for name in ["views", "flat"] {
        let copy = Copy::with_layout("flat2", name);
        let state = dtshard::catalog::model::model(&copy.opened(None).unwrap().catalog.state);
        let found: Vec<String> = state.tensors.iter().map(|(name, _)| name.to_string()).collect();
        let buffers = ["freqs", "seen", "layers.0.scale", "layers.1.scale", "head.weight"];
        let parameters: Vec<&String> = found.iter().filter(|name| !buffers.contains(&name.as_str())).collect();
        let views = Copy::new("flat2", "views").layout;
        let optimizer: Vec<String> = serde_json::from_value(views["optimizer"][0].clone()).unwrap();
        assert_eq!(parameters, optimizer.iter().collect::<Vec<_>>(), "{name}");
        assert_eq!(found.last().map(String::as_str), Some("head.weight"), "{found:?}");
        assert_eq!(
            found.iter().position(|name| name == "layers.0.scale"),
            found.iter().position(|name| name == "layers.0.wq.weight").map(|at| at - 1),
            "{found:?}"
        );
    }
}
