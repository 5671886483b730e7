//! Tests of the target layout of `reshard`: meshes and placements.
//!
//! Tested in other modules:
//!
//! - Rules take precedence over the fallback, and the first matching rule applies:
//!   `conversions::rules_override_the_default_placement`.
//! - `--mesh` without placements: `conversions::{mesh_alone_keeps_placements_by_dim_name,
//!   mesh_alone_without_common_dim_names_gives_defaults}`.
//! - A pattern that does not fit, and the default that becomes replicate:
//!   `conversions::placements_that_do_not_fit_are_refused`.
//! - Invalid meshes and placement lists: `bad_input::arguments::{invalid_meshes_are_refused,
//!   invalid_placements_are_refused}`.
//! - Optimizer state follows its parameter: `conversions::optimizer_state_gets_the_placement_of_its_parameter`.
//! - Values after resharding to every layout and back: `conversions::*_resharded_to_every_layout_keep_values`.

use std::path::Path;

use dtshard::format::{ReadOptions, torch};
use serde_json::Value as Json;

use crate::common::env::TestEnv;
use crate::common::succeed;
use crate::common::{assert_same, below, expect, fixture, inspect, read};
use crate::contract::assert_contains;

/// Returns one text `rank: offsets+sizes` for each chunk of a tensor, in the order of ranks.
fn by_rank(document: &Json, name: &str) -> Vec<String> {
    let chunks = document["tensors"][name]["chunks"].as_array().unwrap_or_else(|| panic!("no {name}"));
    let mut found: Vec<String> =
        chunks.iter().map(|chunk| format!("{}: {}+{}", chunk["rank"], chunk["offsets"], chunk["sizes"])).collect();
    found.sort();
    found
}

/// Reshards `fsdp4/ranks` and returns the output of `inspect`.
fn laid_out(options: &str) -> Json {
    let env = TestEnv::new();
    inspect(&env.make("reshard", "fsdp4/ranks", "out", options).path, "")
}

const EMBED: &str = "model.embed.weight";

#[test]
fn mesh_has_named_dims_and_row_major_ranks() {
    let found = laid_out("--mesh dp=2,tp=2 --placements S(0),S(1)");
    assert_eq!(found["mesh"], serde_json::json!([["dp", 2], ["tp", 2]]));
    assert_eq!(found["tensors"][EMBED]["placements"], "S(0),S(1)");
    assert_eq!(by_rank(&found, EMBED), ["0: [0,0]+[5,2]", "1: [0,2]+[5,1]", "2: [5,0]+[5,2]", "3: [5,2]+[5,1]"]);
}

#[test]
fn mesh_ranks_set_another_order() {
    let found = laid_out("--mesh dp=2,tp=2 --placements S(0),S(1) --mesh-ranks 0,2,1,3");
    assert_eq!(by_rank(&found, EMBED), ["0: [0,0]+[5,2]", "1: [5,0]+[5,2]", "2: [0,2]+[5,1]", "3: [5,2]+[5,1]"]);
}

#[test]
fn placements_apply_one_per_mesh_dim() {
    for (placements, expected) in [
        ("S(0),R", ["0: [0,0]+[5,3]", "1: [0,0]+[5,3]", "2: [5,0]+[5,3]", "3: [5,0]+[5,3]"]),
        ("R,S(-1)", ["0: [0,0]+[10,2]", "1: [0,2]+[10,1]", "2: [0,0]+[10,2]", "3: [0,2]+[10,1]"]),
        ("S(-2),R", ["0: [0,0]+[5,3]", "1: [0,0]+[5,3]", "2: [5,0]+[5,3]", "3: [5,0]+[5,3]"]),
        // The placement is strided: tp cuts first, then dp cuts each part of tp.
        ("_S(0,2),S(0)", ["0: [0,0]+[3,3]", "1: [5,0]+[3,3]", "2: [3,0]+[2,3]", "3: [8,0]+[2,3]"]),
    ] {
        assert_eq!(
            by_rank(&laid_out(&format!("--mesh dp=2,tp=2 --placements {placements}")), EMBED),
            expected,
            "{placements}"
        );
    }
}

#[test]
fn default_placement_that_does_not_fit_becomes_replicate_with_a_note() {
    let env = TestEnv::new();
    let made = env.make("reshard", "fsdp4/dcp", "out", "--mesh dp=2 --placements S(1) --json");
    let warnings = made.run.json()["warnings"].to_string();
    let note = made.run.stderr.lines().find(|line| line.contains("where the placement does not fit")).expect("a note");
    assert_contains(&warnings, &[note.strip_prefix("note: ").expect("a label")]);
    let found = inspect(&made.path, "");
    assert_eq!(found["tensors"]["model.norm.weight"]["chunks"].as_array().unwrap().len(), 1, "a 1-d tensor");
    assert_eq!(found["tensors"]["model.seen"]["chunks"].as_array().unwrap().len(), 1, "a 0-d tensor");
    assert_eq!(found["tensors"][EMBED]["chunks"].as_array().unwrap().len(), 2);
    // A rule that does not fit is an error.
    env.refuse("reshard", "fsdp4/dcp", "x", "--mesh dp=2 --placements S(0) --placements model.norm.weight=S(1)");
}

#[test]
fn buffers_and_0_d_state_without_a_rule_are_replicated() {
    let found = laid_out("--mesh dp=2");
    for name in ["model.freqs", "model.seen", "optim.state.0.step"] {
        let chunks = found["tensors"][name]["chunks"].as_array().unwrap();
        assert!(chunks.iter().all(|chunk| chunk["sizes"] == found["tensors"][name]["shape"]), "{name}: {chunks:?}");
    }
}

#[test]
fn numbered_optimizer_state_gets_the_placements_of_its_parameter() {
    let env = TestEnv::new();
    let made = env.make("reshard", "verl", "out", "--mesh fsdp=2 --placements S(0) --placements **.q_proj=S(1)");
    let found = inspect(&made.path, "--brief");
    let placements = |name: &str| found["tensors"][name]["placements"].clone();
    assert_eq!(placements("model.model.layers.0.self_attn.q_proj.weight"), "S(1)");
    assert_eq!(placements("optim.state.1.exp_avg"), "S(1)", "the state of layer 0's q_proj");
    assert_eq!(placements("optim.state.0.exp_avg"), "S(0)", "the state of the embedding");
    // Without the model, the parameters of optimizer state are unknown. The state keeps its names, and a note says so.
    let options =
        "--mesh dp=2 --to torch-ranks --include optimizer --placements R --placements optimizer.state.1.exp_avg=S(0)";
    let alone = env.make("reshard", "torch_file/trainer.pt", "alone", options);
    assert_contains(&alone.run.stderr, &["8 tensors of optimizer state have parameter indices instead of names"]);
    let expected = read(&fixture("torch_file/trainer.pt"));
    assert_same(&below("optimizer.", &alone.tensors()), &below("optimizer.", &expected), "kept");
}

#[test]
fn mesh_alone_that_would_replicate_everything_is_refused() {
    let env = TestEnv::new();
    env.refuse("reshard", "fsdp4/ranks", "x", "--mesh a=2,b=2");
    env.refuse("reshard", "fsdp4/dcp", "x", "--mesh a=2,b=2");
    env.refuse("reshard", "torch_file/trainer.pt", "x", "--mesh a=2,b=2");
    // On a mesh with one dim, the default placement is S(0).
    let made = env.make("reshard", "safetensors/sharded", "one", "--mesh any=2 --to torch-ranks");
    assert_eq!(inspect(&made.path, "--brief")["tensors"]["lm_head.weight"]["placements"], "S(0)");
    assert_same(&made.tensors(), &read(&fixture("safetensors/sharded")), "S(0)");
}

/// A rule that matches only tensors that the filters leave out is not treated as a misspelled rule.
#[test]
fn rules_for_tensors_that_are_left_out_are_accepted() {
    let env = TestEnv::new();
    let rules = "--mesh a=2,b=2 --placements optim=R,R --placements S(0),R";
    let made = env.make("reshard", "fsdp4/dcp", "made", &format!("{rules} --exclude optim"));
    succeed("verify", &[&fixture("fsdp4/dcp"), &made.path], "--exclude optim");
    env.refuse("reshard", "fsdp4/dcp", "x", &format!("{rules} --exclude optim --placements optimizer=R,R"));
}

#[test]
fn rules_for_every_tensor_need_no_default() {
    let env = TestEnv::new();
    let mesh = "--mesh a=2,b=2";
    for (source, to) in [("fsdp4/dcp", "dcp"), ("safetensors/sharded", "torch-ranks"), ("fsdp4/ranks", "torch-ranks")] {
        let made = env.make("reshard", source, source, &format!("{mesh} --placements **=R,R --to {to}"));
        succeed("verify", &[&fixture(source), &made.path], "");
    }
    // A 0-d tensor needs no rule, and neither does a tensor that is not selected.
    let options = format!("{mesh} --placements **.weight=S(0),R");
    env.make("reshard", "safetensors/sharded", "weights", &format!("{options} --to torch-ranks"));
    env.make("reshard", "fsdp4/ranks", "selected", &format!("{options} --include model.**.weight"));
    env.refuse("reshard", "fsdp4/ranks", "out", &options);
}

#[test]
fn rank_files_and_dcp_get_the_same_layout_from_the_same_options() {
    let env = TestEnv::new();
    let options = "--mesh dp=2,tp=2 --placements S(0),R --placements **.w1=S(1),S(0)";
    let ranks = inspect(&env.make("reshard", "fsdp4/ranks", "ranks", options).path, "");
    let dcp = inspect(&env.make("reshard", "fsdp4/ranks", "dcp", &format!("{options} --to dcp")).path, "");
    let boxes = |found: &Json, name: &str| {
        let mut boxes: Vec<String> =
            by_rank(found, name).iter().map(|text| text[text.find('[').unwrap()..].to_owned()).collect();
        boxes.sort();
        boxes.dedup();
        boxes
    };
    for name in [EMBED, "model.blocks.0.w1.weight", "model.norm.weight"] {
        assert_eq!(boxes(&ranks, name), boxes(&dcp, name), "{name}");
    }
}

#[test]
fn mesh_defaults_to_the_mesh_of_the_source() {
    let env = TestEnv::new();
    let made = env.make("reshard", "fsdp_tp/ranks", "out", "");
    assert_eq!(inspect(&made.path, "")["mesh"], serde_json::json!([["dp", 2], ["tp", 2]]));
    let (source, two) = (fixture("fsdp_tp/ranks"), env.path("two"));
    let message = expect(2, "reshard", &[&source, &two], "--mesh dp=2 --mesh tp=2").stderr;
    assert!(message.contains("two meshes") && message.contains("--mesh dp=2,tp=2"), "{message}");
    let message = expect(2, "reshard", &[&fixture("fsdp4/dcp"), &two], "").stderr;
    assert!(message.contains("no --mesh is given") && message.contains("--mesh fsdp=8"), "{message}");
}

#[test]
fn renamed_mesh_dims_give_a_note() {
    let env = TestEnv::new();
    let stderr_of = |mesh: &str, out: &str| env.make("reshard", "verl/global_step_10/actor", out, mesh).run.stderr;
    assert!(
        stderr_of("--mesh dp=2", "a")
            .contains("the mesh of DST has the dims `dp`, the mesh of SRC has `fsdp`; PyTorch")
    );
    assert!(!stderr_of("--mesh fsdp=2", "b").contains("the mesh of DST has the dims"));
}

#[test]
fn ranks_outside_the_mesh_have_no_shards() {
    let env = TestEnv::new();
    let made = env.make("reshard", "outside4/ranks", "same", "");
    assert_same(&made.tensors(), &read(&fixture("outside4/ranks")), "the same mesh");
    let files = |path: &Path| std::fs::read_dir(path).unwrap().count();
    assert_eq!(files(&made.path), 4, "ranks 1 and 3 have a file, too");
    let found = inspect(&made.path, "");
    assert_eq!(by_rank(&found, "w"), ["0: [3,0]+[2,2]", "2: [0,0]+[3,2]"]);
    let found = env.make("reshard", "outside4/ranks", "others", "--mesh dp=3 --mesh-ranks 1,4,2");
    assert_eq!(files(&found.path), 5);
    assert_eq!(by_rank(&inspect(&found.path, ""), "w"), ["1: [0,0]+[2,2]", "2: [4,0]+[1,2]", "4: [2,0]+[2,2]"]);
    let found = env.make("reshard", "outside4/ranks", "dcp", "--mesh dp=3 --mesh-ranks 1,4,2 --to dcp");
    assert_same(&found.tensors(), &read(&fixture("outside4/ranks")), "dcp");
    let options = "--mesh dp=2 --mesh-ranks 0,2 --tensor-class sharded-tensor";
    let message = expect(2, "reshard", &[&fixture("fsdp4/ranks"), &env.path("no")], options).stderr;
    assert!(message.contains("rank 1 is not in the mesh") && message.contains("--tensor-class dtensor"), "{message}");
}

#[test]
fn mesh_named_tp_without_placements_gives_a_note_about_plans() {
    let env = TestEnv::new();
    let note = "every tensor without a rule gets S(0), because no placements are given; --plan shards modules";
    let stderr_of =
        |options: &str| expect(0, "reshard", &[&fixture("llama_tiny/dcp")], &format!("{options} --dry-run")).stderr;
    assert!(stderr_of("--mesh tp=4").contains(note));
    for fine in ["--mesh fsdp=4", "--mesh tp=4 --placements S(0)", "--mesh tp=4 --plan llama"] {
        assert!(!stderr_of(fine).contains(note), "{fine}");
    }
    env.refuse("reshard", "llama_tiny/dcp", "x", "--mesh dp=2,tp=2");
}

#[test]
fn torch_version_selects_the_format_of_rank_files() {
    let env = TestEnv::new();
    let release = |options: &str, out: &str| {
        let made = env.make("reshard", "fsdp4/ranks", out, options);
        let checkpoint = dtshard::format::Checkpoint::open(&made.path, &ReadOptions::default()).unwrap();
        let first = checkpoint.files.ids().next().unwrap();
        torch::DTensorStyle::from_file(&checkpoint.files, first).unwrap().unwrap().release
    };
    assert_eq!(release("--mesh dp=2", "own"), torch::Release::V2_13);
    assert_eq!(release("--mesh dp=2 --torch-version v2.9.0+cu124", "old"), torch::Release::V2_5);
    assert_eq!(release("--torch-version 2.10.0+cpu", "middle"), torch::Release::V2_10);
    assert_eq!(release("--torch-version 2.12", "later"), torch::Release::V2_11);
    let stderr_of = |options: &str| expect(2, "reshard", &[&fixture("fsdp4/ranks"), &env.path("no")], options).stderr;
    let ranks = stderr_of("--mesh dp=2,tp=2 --mesh-ranks 4,5,6");
    assert_contains(&ranks, &["found 3 ranks", "hint: list one rank for each cell of the mesh"]);
    assert_contains(&stderr_of("--mesh dp=4 --mesh-ranks 4-7"), &["'4-7'", "expected ranks separated by commas"]);
    let refused = stderr_of("--torch-version 2.4.1");
    assert!(refused.contains("--torch-version 2.4.1: expected a version from 2.5 on"), "{refused}");
    assert!(stderr_of("--torch-version new").contains("--torch-version new: expected a version"));
    assert!(
        stderr_of("--torch-version 2.9 --to dcp")
            .contains("applies only to DTensors in rank files, but DST has format dcp")
    );
}

#[test]
fn rule_after_a_wider_rule_gives_a_warning() {
    let env = TestEnv::new();
    let stderr_of = |options: &str, out: &str| env.make("reshard", "fsdp4/dcp", out, options).run.stderr;
    let wide = stderr_of("--mesh dp=2 --placements **.weight=S(0) --placements **.w1=S(1) --placements R", "wide");
    let words = "--placements **.w1=S(1): this rule has no effect, because earlier rules match the same tensors";
    assert!(wide.contains(words), "{wide}");
    let narrow = stderr_of("--mesh dp=2 --placements **.w1=S(1) --placements **.weight=S(0) --placements R", "narrow");
    assert!(!narrow.contains("without effect"), "{narrow}");
}
