//! `flatten` with the units and orders that it concludes itself, from the order of a state dict and `--wrap`.

use std::fs;

use serde_json::{Value as Json, json};

use super::flat::{BOTH, check_files, folder, full};
use crate::common::env::TestEnv;
use crate::common::flat::{self, WRAP, layout_file};
use crate::common::{assert_same, expect, fixture, read, succeed};

#[test]
fn what_follows_from_a_state_dict_is_what_the_live_model_had() {
    let folder = tempfile::tempdir().unwrap();
    let [told, concluded] = ["told", "concluded"].map(|name| folder.path().join(name));
    // The channels_last weight is so in the file; the copy of the tied one is not a parameter.
    let source = full();
    let layout = layout_file("flat2", "flat");
    succeed("flatten", &[&source, &told], &format!("--flat-layout {}", layout.display()));
    succeed("flatten", &[&source, &concluded], &format!("--world-size 2 --exclude head {WRAP}"));
    for rank in 0..2 {
        let [told, concluded] = [&told, &concluded]
            .map(|folder| fs::read(folder.join(format!("model_world_size_2_rank_{rank}.pt"))).unwrap());
        assert!(told == concluded, "rank {rank}");
    }
}

#[test]
fn a_weight_whose_order_in_memory_is_not_stored_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [shards, flat] = ["shards", "flat"].map(|name| folder.path().join(name));
    succeed("reshard", &[&full(), &shards], "--to torch-ranks --mesh fsdp=2");
    let outcome = expect(2, "flatten", &[&shards, &flat], &format!("--world-size 2 {WRAP}"));
    assert!(outcome.stderr.contains("conv.weight: of shape [6, 2, 2, 2], it may lie by rows"), "{outcome:?}");
}

/// Elements of a torch file's tensors lie as those of the module's parameters do, and FSDP1 flattens them so.
#[test]
fn units_of_a_torch_file_are_those_of_the_job() {
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

/// A state dict in the order of registration and --wrap say as much as the job; only ties and strides lack.
#[test]
fn a_state_dict_in_its_order_needs_the_units_alone() {
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
    // With the strides of the job, and its order of units, every byte of tensors is that of PyTorch's files.
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

/// Without a flat layout, `--like` of whole tensors gives `reshard` the shapes of what it reads, and no layout to write.
#[test]
fn shapes_of_another_checkpoint_are_no_target() {
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
fn files_keep_their_names_whatever_tells_the_units() {
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
