//! Tests of Lightning's sharded checkpoints: folders such as `epoch=0-step=3.ckpt`, which are DCP directories with
//! `meta.pt`.

use std::fs;
use std::path::Path;

use serde_json::json;

use super::copy_tree;
use crate::common::env::TestEnv;
use crate::common::{Truth, assert_same, below, expect, fixture, inspect, succeed};

const CHECKPOINT: &str = "lightning_fsdp/lightning_logs/version_0/checkpoints/epoch=0-step=3.ckpt";

#[test]
fn checkpoint_is_found_from_parent_folders() {
    let found = inspect(&fixture(CHECKPOINT), "");
    assert_eq!(found["format"], "dcp");
    for above in ["checkpoints", "version_0", "lightning_logs", "lightning_fsdp"] {
        let path = fixture(&CHECKPOINT[..CHECKPOINT.find(above).unwrap() + above.len()]);
        assert_eq!(inspect(&path, ""), found, "{above}");
    }
    let env = TestEnv::new();
    let root = env.path("run");
    copy_tree(&fixture("lightning_fsdp/lightning_logs/version_0"), &root);
    let checkpoints = root.join("checkpoints");
    // A second checkpoint beside the first one, as a folder or a file, makes the path ambiguous.
    let first = checkpoints.join("epoch=0-step=3.ckpt");
    let second = checkpoints.join("last.ckpt");
    copy_tree(&first, &second);
    let error = expect(2, "inspect", &[&root], "--json").json()["error"].clone();
    assert_eq!(error["kind"], "usage");
    assert!(["epoch=0-step=3.ckpt", "last.ckpt"].iter().all(|name| error.to_string().contains(name)), "{error}");
    fs::remove_dir_all(&second).unwrap();
    // A link to the first checkpoint is not a second checkpoint.
    std::os::unix::fs::symlink("epoch=0-step=3.ckpt", &second).unwrap();
    assert_eq!(inspect(&root, ""), found);
    fs::remove_file(&second).unwrap();
    fs::copy(fixture("torch_file/trainer.pt"), &second).unwrap();
    assert_eq!(expect(2, "inspect", &[&root], "--json").json()["error"]["kind"], "usage");
    fs::remove_dir_all(&first).unwrap();
    assert_eq!(inspect(&checkpoints, "")["format"], "torch");
    // A model in the parent folder takes precedence.
    fs::copy(fixture("torch_file/model.pt"), root.join("model.pt")).unwrap();
    assert_eq!(inspect(&root, "--brief"), inspect(&fixture("torch_file/model.pt"), "--brief"));
}

#[test]
fn numbered_optimizer_is_optimizer_state() {
    let truth = Truth::load("lightning_fsdp.truth").tensors;
    let source = fixture(CHECKPOINT);
    let summary = succeed("inspect", &[&source], "--brief").stdout;
    let line = |what: &str| summary.lines().find(|line| line.starts_with(what)).map(str::to_owned).unwrap_or_default();
    assert!(line("optimizer").contains("12 tensors"), "{summary}");
    assert!(line("model").contains("4 tensors") && line("other").is_empty(), "{summary}");
    let env = TestEnv::new();
    let made = env.make("consolidate", CHECKPOINT, "hf", "--assets none");
    assert_same(&made.tensors(), &below("state_dict.", &truth), "the model");
    // Optimizer state has the placements of its parameter.
    let made = env.make("reshard", CHECKPOINT, "out", "--mesh tp=2 --placements net.0.weight=S(1)");
    assert_same(&made.tensors(), &truth, "resharded");
    let found = inspect(&made.path, "");
    for name in ["state_dict.net.0.weight", "optimizer_0.state.net.0.weight.exp_avg"] {
        let chunks = found["tensors"][name]["chunks"].as_array().unwrap();
        let offsets: Vec<_> = chunks.iter().map(|chunk| chunk["offsets"].clone()).collect();
        assert_eq!(offsets, [json!([0, 0]), json!([0, 2])], "{name}");
    }
    succeed("verify", &[&source, &made.path], "");
}

/// A rule for a weight sets the placements of its moments, also if the names in the optimizer lack a prefix.
#[test]
fn placement_rule_reaches_the_optimizer_state() {
    let folder = tempfile::tempdir().unwrap();
    // Fabric's users choose the key of the model.
    let renamed = folder.path().join("renamed.pt");
    succeed("unshard", &[&fixture("trainers/fabric"), &renamed], "--rename ^model=net");
    let cases = [
        (fixture("trainers/lightning_fsdp1"), "model.", "net.0.weight", "optimizer_0.state.net.0.weight"),
        (fixture("lightning_fsdp"), "state_dict.", "net.0.weight", "optimizer_0.state.net.0.weight"),
        (fixture("trainers/fabric"), "model.", "0.weight", "optimizer.state.0.weight"),
        (renamed, "", "net.0.weight", "optimizer.state.0.weight"),
    ];
    for (case, (source, prefix, name, state)) in cases.iter().enumerate() {
        let full = format!("{prefix}{name}");
        for (to, placements) in [("dcp", json!(null)), ("torch-ranks", json!("S(1),R"))] {
            for (number, pattern) in [name, full.as_str(), "**.0.weight"].into_iter().enumerate() {
                let options = format!("--mesh a=2,b=2 --to {to} --placements {pattern}=S(1),R --placements R,R");
                let out = folder.path().join(format!("{case}-{number}-{to}"));
                succeed("reshard", &[source, &out], &options);
                let found = inspect(&out, "");
                let offsets = |name: &str| {
                    let chunks = found["tensors"][name]["chunks"].as_array().unwrap();
                    chunks.iter().map(|chunk| chunk["offsets"].clone()).collect::<Vec<_>>()
                };
                assert!(offsets(&full).contains(&json!([0, 2])), "{found}");
                for moment in ["exp_avg", "exp_avg_sq"] {
                    let moment = format!("{state}.{moment}");
                    assert_eq!(offsets(&moment), offsets(&full), "{moment} {to} {pattern}");
                    if to == "torch-ranks" {
                        assert_eq!(found["tensors"][&moment]["placements"], placements);
                    }
                }
            }
        }
    }
}

#[test]
fn meta_file_is_copied() {
    let env = TestEnv::new();
    let made = env.make("reshard", "lightning_fsdp", "epoch=0-step=3.ckpt", "--mesh data_parallel=3 --to dcp");
    let same = fs::read(made.path.join("meta.pt")).unwrap() == fs::read(fixture(CHECKPOINT).join("meta.pt")).unwrap();
    assert!(same);
    let run = succeed("reshard", &[&fixture("trainers/fabric"), &made.path], "--mesh a=2 --to torch-ranks --overwrite");
    let meta = |folder: &Path| fs::read(folder.join("meta.pt")).unwrap();
    assert!(meta(&made.path) == meta(&fixture("trainers/fabric/out/step-30")), "{}", run.stderr);
    succeed("reshard", &[&fixture("lightning_fsdp"), &made.path], "--mesh data_parallel=3 --to dcp --overwrite");
    // The output has the same names as the source, and is found below the same parent folder.
    assert_eq!(inspect(&env.path(""), "--brief"), inspect(&made.path, "--brief"));
}
