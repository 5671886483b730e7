//! Tests of `verify`: one checkpoint is valid, or two checkpoints have the same values.
//!
//! Tested in other modules:
//!
//! - A flipped byte, in every format: `conversions::verify_finds_a_flipped_byte`.
//! - Retyped, reshaped, removed, added and differing tensors: `conversions::verify_finds_changed_tensors`.
//! - Layouts and formats of the same values: `conversions::{verify_accepts_other_layouts_of_the_same_values,
//!   *_unsharded_keep_values}`.
//! - Damage of every kind of file: `bad_input::damage`.

use std::fs;

use serde_json::{Value as Json, json};

use crate::common::env::TestEnv;
use crate::common::{below, expect, fixture, inspect, read, succeed};
use crate::contract::assert_contains;

#[test]
fn verify_exits_with_0_if_equal_1_if_different_and_2_on_error() {
    let env = TestEnv::new();
    let (four, three, other) = (fixture("fsdp4/dcp"), fixture("fsdp3/dcp"), fixture("tp2/dcp"));
    let outcome = succeed("verify", &[&four, &three], "");
    assert_eq!(outcome.stderr, "the same: 71 tensors, 2.65 kB\n");
    assert_eq!(outcome.stdout, "");
    assert_contains(
        &expect(1, "verify", &[&four, &other], "").stdout,
        &["model.embed.weight: reshaped: [10, 3] in SRC, [10, 5] in OTHER"],
    );
    expect(1, "verify", &[&fixture("conflict/tensor")], "");
    for (paths, options) in [
        (vec![four.as_path(), &env.path("nowhere")], ""),
        (vec![four.as_path(), &three], "--root nowhere"),
        (vec![four.as_path(), &three], "--dtype bf17"),
        (vec![four.as_path(), &three], "--from torch"),
        (vec![four.as_path()], "--common"),
    ] {
        expect(2, "verify", &paths, options);
    }
}

#[test]
fn name_options_and_root_apply_to_src() {
    let env = TestEnv::new();
    let source = fixture("fsdp4/dcp");
    for (verb, name, options) in [
        ("consolidate", "model", ""),
        ("unshard", "renamed.pt", "--rename blocks=layers --rename ^model=m --include model"),
        ("unshard", "prefixed.pt", "--root model --add-prefix x."),
        ("unshard", "nested.pt", "--include model --nest a.b"),
        ("unshard", "stripped.pt", "--include model --strip-prefix model."),
        ("unshard", "some.pt", "--include optim.state --exclude **.step"),
    ] {
        let made = env.make(verb, &source, name, options);
        let options = if verb == "consolidate" { "--root model" } else { options };
        let same = succeed("verify", &[&source, &made.path], &format!("{options} --json")).json();
        assert_eq!(same["same"], true, "{name}");
        expect(1, "verify", &[&source, &made.path], "");
        // The options select and rename tensors of SRC only, not of OTHER.
        expect(1, "verify", &[&made.path, &source], "--add-prefix y.");
    }
}

#[test]
fn dtype_is_applied_to_src() {
    let env = TestEnv::new();
    let source = fixture("dcp_trainer");
    let made = env.make("consolidate", &source, "out", "--dtype bf16 --dtype **.norm.weight=f16");
    succeed("verify", &[&source, &made.path], "--root model --dtype bf16 --dtype **.norm.weight=f16");
    let found = expect(1, "verify", &[&source, &made.path], "--root model --json").json();
    assert_eq!(found["different"].as_array().unwrap().len(), 12);
    assert_eq!(found["different"][0]["kind"], "retyped");
    let stderr = expect(1, "verify", &[&source, &made.path], "--root model").stderr;
    assert_contains(
        &stderr,
        &["hint: OTHER has 11 tensors in bf16: add --dtype bf16 to compare SRC as if cast to bf16\n"],
    );
    assert_eq!(stderr.matches("hint: ").count(), 1, "{stderr}");
    let stderr = expect(1, "verify", &[&source, &made.path], "--root model --dtype bf16").stderr;
    assert_contains(
        &stderr,
        &["hint: OTHER has 1 tensor in f16: add --dtype PATTERN=f16 to compare SRC as if cast to f16\n"],
    );
    let found = expect(1, "verify", &[&source, &made.path], "--root model --dtype bf16 --json").json();
    let expected = json!([{ "fqn": "model.norm.weight", "kind": "retyped", "detail": "bf16 in SRC, f16 in OTHER" }]);
    assert_eq!(found["different"], expected);
}

/// A tensor that the filters leave out of SRC is also left out of OTHER, whatever its name is there.
#[test]
fn filters_apply_to_both_checkpoints() {
    let env = TestEnv::new();
    let source = fixture("fsdp4/ranks");
    let all = env.make("reshard", &source, "all", "--mesh dp=2").path;
    let model = env.make("reshard", &source, "model", "--mesh dp=2 --exclude optim").path;
    let merged = env.make("consolidate", &source, "merged", "").path;
    let listing = env.path("digests.json");
    fs::write(&listing, succeed("inspect", &[&source], "--digest --json").stdout).unwrap();
    for (other, options) in [
        (&all, "--exclude optim"),
        (&all, "--include model"),
        (&all, "--include optim.state.3"),
        (&model, "--exclude optim"),
        (&merged, "--root model --exclude optim --exclude model.blocks.0"),
        (&merged, "--root model --include model.blocks"),
        (&listing, "--exclude optim"),
        (&listing, "--include model.blocks"),
    ] {
        let found = succeed("verify", &[&source, other], &format!("{options} --json")).json();
        assert_eq!((&found["only_in_src"], &found["only_in_other"]), (&json!([]), &json!([])), "{options}");
        assert!(found["tensors"].as_u64().unwrap() > 0, "{options}");
    }
    // A pattern must match a name in SRC or in OTHER.
    succeed("verify", &[&model, &all], "--exclude optim");
    expect(2, "verify", &[&model, &all], "--exclude optim --exclude nowhere");
    // Tensors of OTHER that the pattern does not match are still findings.
    let found = expect(1, "verify", &[&model, &all], "--exclude optim.state.3 --json").json();
    let added = found["only_in_other"].as_array().unwrap();
    assert!(added.iter().any(|name| name == "optim.state.4.exp_avg"), "{added:?}");
    assert!(!added.iter().any(|name| name == "optim.state.3.exp_avg"), "{added:?}");
    let found = expect(1, "verify", &[&merged, &source], "--add-prefix model. --include blocks.0 --json").json();
    assert!(!found["only_in_other"].as_array().unwrap().is_empty());
}

#[test]
fn common_compares_tensors_of_both_only() {
    let env = TestEnv::new();
    let source = fixture("fsdp4/dcp");
    let some = env.make("unshard", &source, "some.pt", "--include model");
    let found = expect(1, "verify", &[&source, &some.path], "--json").json();
    assert!(!found["only_in_src"].as_array().unwrap().is_empty());
    let found = succeed("verify", &[&source, &some.path], "--common --json").json();
    assert_eq!(
        (&found["same"], &found["only_in_src"], &found["only_in_other"]),
        (&json!(true), &json!([]), &json!([]))
    );
    assert_eq!(found["tensors"], read(&some.path).len());
    expect(1, "verify", &[&source, &fixture("tp2/dcp")], "--common");
    // Without common tensors `verify` fails.
    let alone = env.vectors("alone.safetensors", &[("nobody.has.this", 2)]);
    let outcome = expect(2, "verify", &[&source, &alone], "--common");
    assert_contains(&outcome.stderr, &["no tensor name in common", "hint: "]);
}

#[test]
fn objects_that_the_other_format_cannot_hold_are_listed_and_not_compared() {
    let env = TestEnv::new();
    let source = fixture("fsdp4/dcp");
    let made = env.make("consolidate", &source, "out.safetensors", "--everything");
    let outcome = succeed("verify", &[&source, &made.path], "");
    assert_contains(&outcome.stdout, &["nested.tuple: not compared"]);
    let found = succeed("verify", &[&source, &made.path], "--json").json();
    assert_eq!(found["not_comparable"].as_array().unwrap().len(), 21);
    // Objects are compared only if both formats can store objects.
    let whole = env.make("unshard", &source, "whole.pt", "--exclude nested.tuple");
    let found = expect(1, "verify", &[&source, &whole.path], "--json").json();
    assert_eq!(found["only_in_src"], json!(["nested.tuple"]));
}

#[test]
fn partial_tensors_are_compared_after_reduction() {
    let (env, source) = (TestEnv::new(), fixture("partial2/ranks"));
    let whole = env.make("unshard", &source, "whole.pt", "").path;
    let found = succeed("verify", &[&source, &whole], "--json").json();
    assert_eq!((&found["same"], &found["tensors"], &found["not_comparable"]), (&json!(true), &json!(6), &json!([])));
    let listing = env.path("digests.json");
    fs::write(&listing, succeed("inspect", &[&whole], "--digest --json").stdout).unwrap();
    succeed("verify", &[&source, &listing], "");
}

#[test]
fn damaged_source_exits_with_1_for_verify_and_2_for_other_verbs() {
    let env = TestEnv::new();
    let missing = env.path("missing");
    crate::contract::copy_tree(&fixture("fsdp4/ranks"), &missing);
    fs::remove_file(missing.join("model_world_size_4_rank_2.pt")).unwrap();
    let cut = env.path("cut.safetensors");
    let whole = fs::read(fixture("safetensors/single/model.safetensors")).unwrap();
    fs::write(&cut, &whole[..whole.len() - 4]).unwrap();
    for source in [missing, cut, fixture("conflict/tensor"), fixture("conflict/shape")] {
        expect(1, "verify", &[&source], "");
        expect(1, "verify", &[&fixture("fsdp4/dcp"), &source], "");
        env.refuse("unshard", &source, "x.pt", "");
    }
}

#[test]
fn differing_objects_exit_with_1() {
    let found =
        expect(1, "verify", &[&fixture("replicated_plain/dcp"), &fixture("replicated_plain/ranks")], "--json").json();
    assert_eq!(found["same"], false);
    let ranks = fixture("conflict/object");
    let found = expect(1, "verify", &[&ranks], "--json").json();
    assert_eq!(found["different"][0]["kind"], "conflict");
    assert_eq!(found["different"][0]["fqn"], "extra_state.step");
}

#[test]
fn differing_tensor_has_its_first_index_and_largest_difference() {
    let env = TestEnv::new();
    let first = env.vectors("a.safetensors", &[("w", 5)]);
    let mut bytes = fs::read(&first).unwrap();
    let start = bytes.len() - 20;
    bytes[start + 8..start + 12].copy_from_slice(&3.5_f32.to_le_bytes());
    let second = env.path("b.safetensors");
    fs::write(&second, bytes).unwrap();
    let found = expect(1, "verify", &[&first, &second], "--json").json();
    let detail = "first difference at index [2], 1 of 5 elements differ, max abs difference 2.49951171875";
    let mut finding = found["different"][0].clone();
    let relative = finding.as_object_mut().unwrap().remove("relative_l2").unwrap();
    assert_eq!(
        finding,
        json!({
            "fqn": "w",
            "kind": "differing",
            "detail": detail,
            "max_abs_difference": 2.499_511_718_75,
            "changed_share": 0.2,
        })
    );
    assert!(relative.as_f64().is_some_and(|relative| relative > 0.0), "{relative}");
}

#[test]
fn saved_digests_are_accepted_as_other() {
    let env = TestEnv::new();
    let source = fixture("fsdp4/dcp");
    let saved = |name: &str, path: &std::path::Path| {
        let text = succeed("inspect", &[path], "--digest --json --brief").stdout;
        env.write(name, &text)
    };
    let list = saved("list.json", &source);
    succeed("verify", &[&source, &list], "");
    succeed("verify", &[&fixture("fsdp3/dcp"), &list], "");
    let made = env.make("consolidate", &source, "out.safetensors", "");
    succeed("verify", &[&source, &saved("model.json", &made.path)], "--root model");
    succeed("verify", &[&made.path, &list], "--add-prefix model. --common");
    let found = expect(1, "verify", &[&made.path, &list], "--add-prefix model. --json").json();
    assert!(found["only_in_other"].as_array().unwrap().iter().any(|name| name == "optim.state.embed.weight.step"));
    // A changed digest is a difference.
    let text = fs::read_to_string(&list).unwrap();
    let mut document: Json = serde_json::from_str(&text).unwrap();
    document["tensors"]["model.norm.weight"]["digest"] = json!(format!("blake3:{}", "0".repeat(64)));
    let changed = env.write("changed.json", document.to_string());
    let found = expect(1, "verify", &[&source, &changed], "--json").json();
    assert_eq!(found["different"].as_array().unwrap().len(), 1);
    assert_eq!(
        (&found["different"][0]["fqn"], &found["different"][0]["kind"]),
        (&json!("model.norm.weight"), &json!("differing"))
    );
}

#[test]
fn hint_names_the_root_that_matches() {
    let env = TestEnv::new();
    let made = env.make("consolidate", "dcp_trainer", "out", "");
    let outcome = expect(1, "verify", &[&fixture("dcp_trainer"), &made.path], "");
    assert_contains(&outcome.stderr, &["hint: ", "--root model"]);
}

#[test]
fn verify_accepts_a_model_after_each_of_several_conversions() {
    let env = TestEnv::new();
    let truth = below("model.", &read(&fixture("dcp_trainer")));
    let merged = env.make("consolidate", "dcp_trainer", "merged", "");
    let shards = env.make("reshard", &merged.path, "shards", "--mesh dp=2,tp=2 --placements S(0),R --to torch-ranks");
    let dcp = env.make("reshard", &shards.path, "dcp", "--mesh dp=3 --to dcp");
    let whole = env.make("unshard", &dcp.path, "whole.bin", "");
    for made in [&merged, &shards, &dcp, &whole] {
        assert_eq!(made.tensors(), truth);
        succeed("verify", &[&fixture("dcp_trainer"), &made.path], "--root model");
        let digests = inspect(&made.path, "--digest --brief");
        for (name, tensor) in &truth {
            assert_eq!(digests["tensors"][name]["digest"], tensor.digest, "{name}");
        }
    }
}

/// If ranks are removed, their per-rank values are in no output file, so `--verify` cannot compare them.
#[test]
fn verify_option_accepts_fewer_ranks() {
    let env = TestEnv::new();
    for (verb, options) in [("reshard", "--mesh fsdp=2 --verify"), ("flatten", "--world-size 2 --verify")] {
        let made = env.make(verb, "verl", verb, options);
        assert!(made.run.stderr.contains("rank"), "{}", made.run.stderr);
    }
}
