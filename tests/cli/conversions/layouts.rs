//! Tests of the layout that `reshard` chooses: rules, the default placement, and a mesh alone.

use std::fs;

use serde_json::Value as Json;

use crate::common::{Truth, expect, fixture, inspect, succeed};
use crate::conversions::temporary_folder;

/// Returns the offsets and sizes of the chunks of a tensor, ascending: `[0, 0]+[2, 3]`.
fn chunks(document: &Json, name: &str) -> Vec<String> {
    let chunks = document["tensors"][name]["chunks"].as_array().unwrap_or_else(|| panic!("no {name}"));
    let mut found: Vec<String> =
        chunks.iter().map(|chunk| format!("{}+{}", chunk["offsets"], chunk["sizes"])).collect();
    found.sort();
    found.dedup();
    found
}

/// Reshards a source to DCP and returns the output of `inspect`.
fn laid_out(source: &str, options: &str) -> Json {
    let folder = temporary_folder();
    let target = folder.path().join("target");
    succeed("reshard", &[&fixture(source), &target], &format!("--to dcp {options}"));
    inspect(&target, "")
}

const Q: &str = "model.model.layers.0.self_attn.q_proj.weight";
const K: &str = "model.model.layers.0.self_attn.k_proj.weight";
const NORM: &str = "model.model.norm.weight";
const Q_MOMENTUM: &str = "optim.state.model.layers.0.self_attn.q_proj.weight.momentum_buffer";

#[test]
fn rules_override_the_default_placement() {
    let found = laid_out(
        "llama_tiny/dcp",
        "--mesh dp=2,tp=2 --placements S(0),R --placements **.q_proj=S(0),S(1) --placements **.{q,k}_proj=R,S(1)",
    );
    assert_eq!(chunks(&found, Q), ["[0,0]+[16,16]", "[0,16]+[16,16]", "[16,0]+[16,16]", "[16,16]+[16,16]"]);
    assert_eq!(chunks(&found, K), ["[0,0]+[16,16]", "[0,16]+[16,16]"]);
    assert_eq!(chunks(&found, NORM), ["[0]+[16]", "[16]+[16]"]);
    assert_eq!(chunks(&found, Q_MOMENTUM), chunks(&found, Q));

    // The first matching rule applies, not the most specific.
    let found = laid_out(
        "llama_tiny/dcp",
        "--mesh dp=2 --placements S(0) --placements model.model.layers=R --placements model.model.layers.0=S(1)",
    );
    assert_eq!(chunks(&found, Q), ["[0,0]+[32,32]"]);
}

#[test]
fn optimizer_state_gets_the_placement_of_its_parameter() {
    // A pattern matches the parameter's name in the checkpoint, its name within the model, or its module.
    for pattern in [Q, "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj"] {
        let found = laid_out("llama_tiny/dcp", &format!("--mesh dp=2 --placements S(0) --placements {pattern}=S(1)"));
        assert_eq!(chunks(&found, Q), ["[0,0]+[32,16]", "[0,16]+[32,16]"], "{pattern}");
        assert_eq!(chunks(&found, Q_MOMENTUM), chunks(&found, Q), "{pattern}");
        assert_eq!(chunks(&found, K), ["[0,0]+[8,32]", "[8,0]+[8,32]"], "{pattern}");
    }
    // AdamW also stores a step for each parameter. A step is a scalar, so rules for the parameter do not apply to it.
    for pattern in ["model.blocks.0.w1.weight", "blocks.0.w1.weight", "**.w1.weight", "**.w1"] {
        let found = laid_out("fsdp4/dcp", &format!("--mesh dp=2 --placements S(0) --placements {pattern}=S(1)"));
        let state = |name: &str| chunks(&found, &format!("optim.state.blocks.0.w1.weight.{name}"));
        assert_eq!(chunks(&found, "model.blocks.0.w1.weight"), ["[0,0]+[7,2]", "[0,2]+[7,1]"], "{pattern}");
        assert_eq!(state("exp_avg"), ["[0,0]+[7,2]", "[0,2]+[7,1]"], "{pattern}");
        assert_eq!(state("exp_avg_sq"), ["[0,0]+[7,2]", "[0,2]+[7,1]"], "{pattern}");
        assert_eq!(state("step"), ["[]+[]"], "{pattern}");
    }
}

#[test]
fn parameter_numbers_do_not_match_module_patterns() {
    // `model.1.weight` is the weight of a module. The state 1 of the optimizer belongs to another parameter, `model.0.bias`.
    let found = laid_out("torch_file/trainer.pt", "--mesh dp=2 --placements R --placements model.1.weight=S(0)");
    assert_eq!(chunks(&found, "model.1.weight"), ["[0,0]+[1,4]", "[1,0]+[1,4]"]);
    let found = laid_out("torch_file/trainer.pt", "--mesh dp=2 --placements R --placements model.1=S(0)");
    assert_eq!(chunks(&found, "model.1.weight"), ["[0,0]+[1,4]", "[1,0]+[1,4]"]);
    assert_eq!(chunks(&found, "optimizer.state.0.bias.exp_avg"), ["[0]+[4]"]);
}

/// Asserts that `reshard` exits with code 2 and leaves nothing behind, and returns its message.
fn refusal_message(source: &str, options: &str) -> String {
    let folder = temporary_folder();
    let target = folder.path().join("target");
    let outcome = expect(2, "reshard", &[&fixture(source), &target], &format!("--to dcp {options}"));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    outcome.stderr
}

#[test]
fn placement_pattern_without_a_match_is_refused() {
    let message =
        refusal_message("fsdp4/dcp", "--mesh dp=2 --placements S(0) --placements model.blocks.0.wqq.weight=S(1)");
    assert!(message.contains("model.blocks.0.wqq.weight") && message.contains("model.blocks.0.wq.weight"), "{message}");
}

#[test]
fn placements_that_do_not_fit_are_refused() {
    let message =
        refusal_message("fsdp4/dcp", "--mesh dp=2 --placements S(0) --placements model.blocks.*.wq.bias=S(1)");
    assert!(
        message.contains("model.blocks.0.wq.bias") && message.contains("[5]") && message.contains("S(1)"),
        "{message}"
    );
    // A default placement that does not fit becomes Replicate, with a note.
    let folder = temporary_folder();
    let options = "--mesh dp=2 --placements S(1)";
    let outcome = succeed("reshard", &[&fixture("replicated_plain/dcp"), &folder.path().join("x")], options);
    let narrow = Truth::load("replicated_plain/truth").tensors.values().filter(|tensor| tensor.shape.len() < 2).count();
    let scalar = "note: 1 scalar is replicated: a 0-d tensor cannot be sharded\n";
    assert!(outcome.stderr.starts_with(scalar), "{}", outcome.stderr);
    let others = format!("note: {} tensors are replicated on a mesh dimension", narrow - 1);
    assert!(outcome.stderr.contains(&others), "{}", outcome.stderr);
}

#[test]
fn placement_lists_that_do_not_fit_the_mesh_are_refused() {
    for placements in ["S(0),S(0)", "S(0),R,R", "P(sum)", "S(0", "X(0)", "**.weight=S(0),R"] {
        refusal_message("fsdp4/dcp", &format!("--mesh dp=2 --placements {placements}"));
    }
    refusal_message("fsdp4/dcp", "--mesh dp=2 --placements S(0) --placements S(1)");
    for mesh in ["dp=0", "dp=2,dp=2", "4", "dp=x", "dp"] {
        refusal_message("fsdp4/dcp", &format!("--mesh {mesh}"));
    }
}

#[test]
fn mesh_alone_keeps_placements_by_dim_name() {
    // The new mesh has the same mesh dims with other sizes and in another order. So `_S(0,2),S(0)` over (dp, tp)
    // becomes `S(0),S(0)` over (tp, dp).
    let found = laid_out("fsdp_tp/ranks", "--mesh tp=2,dp=3");
    let expected = laid_out("fsdp_tp/ranks", "--mesh tp=2,dp=3 --placements S(0),S(0)");
    for name in
        ["model.blocks.0.wq.weight", "model.embed.weight", "model.head.weight", "optim.state.embed.weight.exp_avg"]
    {
        assert_eq!(chunks(&found, name), chunks(&expected, name), "{name}");
    }
    assert_eq!(chunks(&found, "model.blocks.0.wk.weight"), ["[0,0]+[1,5]", "[1,0]+[1,5]", "[2,0]+[1,5]"]);
    let row_wise = ["[0,0]+[2,5]", "[0,5]+[2,4]", "[2,0]+[2,5]", "[2,5]+[2,4]", "[4,0]+[1,5]", "[4,5]+[1,4]"];
    assert_eq!(chunks(&found, "model.blocks.0.w2.weight"), row_wise);
    // Norms are DTensors on dp only, and buffers are plain tensors.
    assert_eq!(chunks(&found, "model.norm.weight"), ["[0]+[2]", "[2]+[2]", "[4]+[1]"]);
    assert_eq!(chunks(&found, "model.freqs"), ["[0]+[4]"]);

    // If the order of the mesh dims stays the same, the split factor follows the size of the inner mesh dim.
    let found = laid_out("fsdp_tp/ranks", "--mesh dp=2,tp=3");
    let expected = laid_out("fsdp_tp/ranks", "--mesh dp=2,tp=3 --placements _S(0,3),S(0)");
    assert_eq!(chunks(&found, "model.blocks.0.wq.weight"), chunks(&expected, "model.blocks.0.wq.weight"));

    // On a mesh dim that the source does not have, tensors are replicated.
    let found = laid_out("tp2/ranks", "--mesh dp=2,tp=2");
    assert_eq!(chunks(&found, "model.embed.weight"), ["[0,0]+[5,5]", "[5,0]+[5,5]"]);
}

#[test]
fn mesh_alone_without_common_dim_names_gives_defaults() {
    for source in ["fsdp4/dcp", "fsdp4/ranks", "fsdp1_sharded/ranks"] {
        let found = laid_out(source, "--mesh other=2");
        assert_eq!(chunks(&found, "model.embed.weight"), ["[0,0]+[5,3]", "[5,0]+[5,3]"], "{source}");
        assert_eq!(chunks(&found, "model.seen"), ["[]+[]"], "{source}");
        let message = refusal_message(source, "--mesh other=2,another=2");
        assert!(message.contains("for example --placements 'S(0),R'"), "{message}");
    }
}
