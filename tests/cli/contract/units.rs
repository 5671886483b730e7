//! Tests of `flatten` with units and orders that it infers from `--wrap` and from the order of a state dict.

use std::fs;

use serde_json::{Value as Json, json};

use super::flat::{BOTH, check_files, folder, full};
use crate::common::env::TestEnv;
use crate::common::flat::{self, WRAP, layout_file};
use crate::common::{assert_same, expect, fixture, read, succeed};

#[test]
fn inferred_layout_equals_the_layout_of_the_live_model() {
    let folder = tempfile::tempdir().unwrap();
    let [declared, inferred] = ["declared", "concluded"].map(|name| folder.path().join(name));
    // The file stores the strides of channels_last tensors. The copy of the tied weight is not a parameter.
    let source = full();
    let layout = layout_file("flat2", "flat");
    succeed("flatten", &[&source, &declared], &format!("--flat-layout {}", layout.display()));
    succeed("flatten", &[&source, &inferred], &format!("--world-size 2 --exclude head {WRAP}"));
    for rank in 0..2 {
        let [declared, inferred] = [&declared, &inferred]
            .map(|folder| fs::read(folder.join(format!("model_world_size_2_rank_{rank}.pt"))).unwrap());
        assert!(declared == inferred, "rank {rank}");
    }
}

#[test]
fn weight_without_recorded_strides_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [shards, flat] = ["shards", "flat"].map(|name| folder.path().join(name));
    succeed("reshard", &[&full(), &shards], "--to torch-ranks --mesh fsdp=2");
    let outcome = expect(2, "flatten", &[&shards, &flat], &format!("--world-size 2 {WRAP}"));
    assert!(
        outcome.stderr.contains("conv.weight: a tensor of shape [6, 2, 2, 2] may be row-major or channels-last"),
        "{outcome:?}"
    );
}

/// The tensors of a torch file have the strides of the module's parameters, and FSDP1 flattens parameters in the order
/// of their storage.
#[test]
fn inferred_units_of_a_torch_file_equal_the_units_of_the_job() {
    let env = TestEnv::new();
    let made = env.make("flatten", full(), "out", &format!("--world-size 2 {WRAP}"));
    let written = flat::read_layout(&made.path.join("flat_layout.json"));
    let mut expected = flat::layout("flat2", "flat");
    // A full state dict has copies of tied weights.
    let params = expected["units"][0]["params"].as_array_mut().unwrap();
    params.pop();
    params.push(json!({"fqn": "head.weight", "shape": [11, 6]}));
    assert_eq!(written["units"], expected["units"]);
}

/// A state dict in registration order, together with `--wrap`, describes the flat parameters of the job completely,
/// except for ties and strides.
#[test]
fn ordered_state_dict_needs_wrap_only() {
    let env = TestEnv::new();
    let source = folder(&env, "flat3", "views");
    let whole = env.make("unshard", &source, "whole.pt", "--series all").path;
    for (name, more) in [("views", "--use-orig-params"), ("flat", "")] {
        let made = env.make("flatten", &whole, name, &format!("--world-size 2 {WRAP} {more}"));
        let layout = flat::read_layout(&made.path.join("flat_layout.json"));
        let truth = flat::layout("flat2", name);
        let order = |layout: &Json| -> Vec<(Json, Vec<Json>)> {
            let names = |unit: &Json| unit["params"].as_array().unwrap().iter().map(|p| p["fqn"].clone()).collect();
            let units = layout["units"].as_array().unwrap().iter();
            let mut units: Vec<_> = units.map(|unit| (unit["module"].clone(), names(unit))).collect();
            units.sort_by_key(|(module, _)| module.to_string());
            units
        };
        assert_eq!(order(&layout), order(&truth), "{name}");
        assert_same(&read(&made.path), &read(&source), name);
    }
    // With the strides and the unit order of the job, every byte of tensors equals PyTorch's files.
    for name in ["views", "flat"] {
        let layout = layout_file("flat2", name);
        let options = format!("--flat-layout {}", layout.display());
        for (source, series) in [(&whole, &BOTH[..]), (&full(), &BOTH[..1])] {
            let at = format!("{name}-{}", series.len());
            let made = env.make("flatten", source, &at, &options);
            check_files(&made.path, "flat2", name, series);
        }
    }
}

/// Without a flat layout, `--like` with complete tensors gives `reshard` the shapes of the source, but no layout for
/// the output.
#[test]
fn like_of_whole_tensors_gives_shapes_and_no_target_layout() {
    let env = TestEnv::new();
    let source = fixture("flat3/flat");
    let like = format!("--like {}", full().display());
    let whole = env.make("unshard", &source, "whole.pt", &format!("{like} --series all")).path;
    for (name, options) in [("ranks", "--to torch-ranks --mesh fsdp=2"), ("dcp", "--to dcp --mesh fsdp=2")] {
        let made = env.make("reshard", &source, name, &format!("{options} {like}"));
        succeed("verify", &[&made.path, &whole], "");
    }
    let made = env.make("reshard", &source, "flat", &format!("--mesh fsdp=2 {like}"));
    check_files(&made.path, "flat2", "flat", &BOTH);
}

#[test]
fn file_names_are_kept_for_every_source_of_units() {
    let env = TestEnv::new();
    let source = folder(&env, "flat2", "flat");
    for rank in 0..2 {
        let old = source.join(format!("model_world_size_2_rank_{rank}.pt"));
        fs::rename(old, source.join(format!("model-rank{rank}.pt"))).unwrap();
    }
    let made =
        env.make("flatten", &source, "out", &format!("--world-size 3 --series model --like {}", full().display()));
    assert!(made.path.join("model-rank2.pt").is_file(), "{:?}", fs::read_dir(&made.path).unwrap().collect::<Vec<_>>());
}
