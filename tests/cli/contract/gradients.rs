//! Tests of gradients beside a model: `reshard` and `flatten` keep them; `unshard` and `consolidate` leave them out
//! unless `--with-grads` is given.
//!
//! The fixture `flat_grads` has gradients as FSDP1 saves them, of flat parameters and of views (`use_orig_params`).

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use crate::common::env::TestEnv;
use crate::common::flat::copy_with_layout;
use crate::common::{Tensors, Truth, assert_same, below, fixture, inspect, read};
use crate::contract::assert_contains;
use crate::rank_file::Comparison;

/// Copies the files of the fixture `flat_grads`, together with their flat layout.
fn folder(env: &TestEnv, name: &str) -> PathBuf {
    let path = env.path(&format!("src-{name}"));
    copy_with_layout("flat_grads", name, &path);
    path
}

fn truth() -> Tensors {
    Truth::load("flat_grads/truth").tensors
}

fn count(prefix: &str) -> usize {
    truth().keys().filter(|name| name.starts_with(prefix)).count()
}

#[test]
fn gradients_are_written_with_grads_and_counted_as_left_out_without() {
    let env = TestEnv::new();
    for (name, left_out) in [("views", "left out: 20 tensors (grads)"), ("flat", "left out: series grads")] {
        let source = folder(&env, name);
        let with = env.make("unshard", &source, &format!("{name}.pt"), "--with-grads --verify");
        assert_same(&with.tensors(), &truth(), name);
        for (verb, to) in [("unshard", "model.pt"), ("consolidate", "model.safetensors")] {
            let without = env.make(verb, &source, &format!("{name}-{to}"), "");
            assert_contains(without.closing_line(), &[left_out]);
            let model = below("model.", &truth());
            let found = without.tensors();
            let found =
                if found.keys().any(|name| name.starts_with("model.")) { below("model.", &found) } else { found };
            assert_same(&found, &model, name);
        }
        let every = env.make("unshard", &source, &format!("{name}-ranks"), "--with-grads --all-ranks");
        assert_same(&every.tensors(), &truth(), name);
    }
    assert_eq!(count("grads."), 20);
}

/// Gradients are converted to other world sizes, and between flat parameters and views.
#[test]
fn flattened_gradients_stay_flat() {
    let env = TestEnv::new();
    for name in ["views", "flat"] {
        let source = folder(&env, name);
        for (to, options) in [
            ("four", "--world-size 4 --verify"),
            ("views", "--world-size 3 --use-orig-params"),
            ("flat", "--world-size 3 --use-orig-params=false"),
            ("none", "--world-size 2 --strategy no-shard"),
            ("hybrid", "--world-size 4 --strategy hybrid-shard --shard-group-size 2"),
        ] {
            let made = env.make("flatten", &source, &format!("{name}-{to}"), options);
            assert_same(&made.tensors(), &truth(), &format!("{name} {to}"));
            assert_eq!(
                made.path.join("model_world_size_3_rank_0.pt").exists(),
                name == "flat" && options.contains('3')
            );
        }
        let many = env.make("flatten", &source, &format!("{name}-many"), "--world-size 40").path;
        let back = env.make("flatten", &many, &format!("{name}-back"), "--world-size 2").path;
        assert_same(&read(&back), &truth(), name);
    }
    // The gradients are a series of their own. Names, padding and bytes equal those of PyTorch.
    for rank in 0..2 {
        for series in ["model", "grads"] {
            let file = format!("{series}_world_size_2_rank_{rank}.pt");
            Comparison::run(&env.path("flat-back").join(&file), &fixture("flat_grads/flat").join(&file), true);
        }
    }
}

/// A flat parameter has a single gradient, so either all or none of its parameters have gradients.
#[test]
fn gradients_of_part_of_a_flat_parameter_are_refused() {
    let env = TestEnv::new();
    for name in ["views", "flat"] {
        let source = folder(&env, name);
        let options = "--world-size 2 --use-orig-params=false --exclude grads.norm.weight";
        env.refuse("flatten", &source, "x", options);
        let made = env.make("flatten", &source, &format!("{name}-none"), "--world-size 3 --exclude grads");
        assert_same(
            &made.tensors(),
            &{ truth().into_iter().filter(|(name, _)| name.starts_with("model.")).collect() },
            name,
        );
        // With `use_orig_params`, each parameter has its own gradient, so gradients of some parameters may be missing.
        let options = "--world-size 3 --use-orig-params --exclude grads.norm.weight";
        let made = env.make("flatten", &source, &format!("{name}-some"), options);
        assert_eq!(made.tensors().len(), truth().len() - 1);
        let options = "--world-size 3 --use-orig-params=false --exclude grads.tiny";
        let made = env.make("flatten", &source, &format!("{name}-units"), options);
        assert_eq!(made.tensors().len(), truth().len() - 2);
    }
}

/// Tests gradients in the files of the model, and gradients in a series of their own.
#[test]
fn gradients_get_the_placements_of_their_parameters() {
    let env = TestEnv::new();
    for name in ["views", "flat"] {
        let source = folder(&env, name);
        let options = "--to torch-ranks --mesh dp=2,tp=2 --placements **.wq.weight=S(1),S(0) --placements S(0),R";
        let made = env.make("reshard", &source, &format!("{name}-ranks"), options);
        assert_same(&made.tensors(), &truth(), "DTensors");
        assert_placements_of_parameters(&made.path);
        // The placements come from the source, from another checkpoint, or from a mesh alone.
        let again = env.make("reshard", &made.path, &format!("{name}-again"), "--mesh dp=3,tp=1");
        assert_same(&again.tensors(), &truth(), "another mesh");
        assert_placements_of_parameters(&again.path);
        let like = format!("--to torch-ranks --like {}", made.path.display());
        assert_placements_of_parameters(&env.make("reshard", &source, &format!("{name}-alike"), &like).path);
        // Gradients are converted back to complete gradients and to flat gradients.
        let whole = env.make("unshard", &made.path, &format!("{name}.pt"), "--with-grads");
        assert_same(&whole.tensors(), &truth(), "--with-grads");
        let options = format!("--like {} --world-size 2", source.display());
        let flat = env.make("flatten", &again.path, &format!("{name}-flat"), &options);
        assert_same(&flat.tensors(), &truth(), "flat again");
        let dcp = env.make("reshard", &source, &format!("{name}-dcp"), "--to dcp --mesh fsdp=3");
        assert_same(&dcp.tensors(), &truth(), "dcp");
    }
}

/// Asserts that every gradient has the placements of its parameter.
fn assert_placements_of_parameters(path: &Path) {
    let found: Json = inspect(path, "--brief");
    let placements = |name: &str| found["tensors"][name]["placements"].clone();
    let mut sharded = 0;
    for name in truth().keys().filter_map(|name| name.strip_prefix("grads.")) {
        assert_eq!(placements(&format!("grads.{name}")), placements(&format!("model.{name}")), "{name}");
        sharded += usize::from(placements(&format!("grads.{name}")).as_str().is_some_and(|text| text.contains('S')));
    }
    assert!(sharded > 10, "{sharded}");
    assert_eq!(placements("grads.layers.0.wq.weight"), "S(1),S(0)");
}

/// Gradients in one file are complete tensors, under the names of their parameters.
#[test]
fn whole_gradients_are_read_unchanged() {
    let env = TestEnv::new();
    let source = folder(&env, "flat");
    let whole = env.make("unshard", &source, "whole.pt", "--with-grads").path;
    let again = env.make("unshard", &whole, "again.pt", "--with-grads");
    assert_same(&again.tensors(), &truth(), "--with-grads");
    let options = format!("--flat-layout {} --world-size 4", source.join("flat_layout.json").display());
    let flat = env.make("flatten", &whole, "flat", &options);
    assert_same(&flat.tensors(), &truth(), "flat");
}

#[test]
fn gradient_of_another_size_is_refused() {
    let env = TestEnv::new();
    let source = folder(&env, "flat");
    // The gradients come from a conversion to another world size.
    let other = env.make("flatten", &source, "three", "--world-size 3").path;
    for rank in 0..2 {
        let name = |size: u32| format!("grads_world_size_{size}_rank_{rank}.pt");
        fs::copy(other.join(name(3)), source.join(name(2))).unwrap();
    }
    env.refuse("unshard", &source, "x", "--with-grads");
}
