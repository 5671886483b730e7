//! Checkpoints that the code of trainers wrote (`tests/fixtures/trainers`): `consolidate` without options gives the
//! values and names of the model.

use crate::common::{Truth, assert_same, below, expect, fixture, read_safetensors, succeed};
use crate::contract::assert_contains;

/// Each checkpoint, the stem of its truth, and the prefix of the model's names in the truth.
const CHECKPOINTS: [(&str, &str, &str); 8] = [
    ("accelerate_ddp/checkpoint_0", "accelerate_ddp", ""),
    ("composer/run/ep0-ba2-rank0.pt", "composer", "state.model."),
    ("composer_ddp/run/ep0-ba2-rank0.pt", "composer_ddp", "state.model."),
    ("composer_fsdp/run/ep0-ba2", "composer_fsdp", "state.model."),
    ("fabric/out/step-30", "fabric", "model."),
    ("hf_trainer/checkpoint-2", "hf_trainer", ""),
    ("lightning_file", "lightning_file", "state_dict."),
    ("lightning_fsdp1", "lightning_fsdp1", "model."),
];

#[test]
fn checkpoint_of_each_trainer_consolidates_to_the_model() {
    let folder = tempfile::tempdir().unwrap();
    for (checkpoint, stem, prefix) in CHECKPOINTS {
        let made = folder.path().join(stem);
        succeed("consolidate", &[&fixture(&format!("trainers/{checkpoint}")), &made], "");
        let mut expected = below(prefix, &Truth::load(&format!("trainers/{stem}.truth")).tensors);
        expected.retain(|name, _| !is_optimizer_state(name));
        assert_same(&read_safetensors(&made), &expected, checkpoint);
    }
}

/// Composer's optimizer state keeps its names and `TorchVersion` objects, so that the trainer can load them again.
#[test]
fn composer_checkpoint_resharded_keeps_its_state_dict() {
    let folder = tempfile::tempdir().unwrap();
    for (checkpoint, to) in [("composer/run/ep0-ba2-rank0.pt", "torch-ranks"), ("composer_fsdp/run/ep0-ba2", "dcp")] {
        let (source, made) = (fixture(&format!("trainers/{checkpoint}")), folder.path().join(to));
        succeed("reshard", &[&source, &made], &format!("--mesh dp=3 --to {to}"));
        succeed("verify", &[&source, &made], "");
        let listed = succeed("inspect", &[&made], "--json").stdout;
        assert!(listed.contains("torch_version"), "{listed}");
    }
}

/// Tensors that dtshard cannot read are refused by name. Without them, the rest of the file is read.
#[test]
fn unreadable_tensors_are_refused_and_can_be_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let mut truth = Truth::load("trainers/not_dense.truth").tensors;
    truth.retain(|name, _| !name.starts_with("odd:"));
    let kinds = [
        ("sparse_coo", "a sparse tensor"),
        ("sparse_coo_hybrid", "a sparse tensor"),
        ("sparse_csr", "a sparse tensor"),
        ("sparse_csc", "a sparse tensor"),
        ("sparse_bsr", "a sparse tensor"),
        ("quantized", "a quantized tensor"),
        ("quantized_channels", "a quantized tensor"),
        ("meta", "a tensor on the meta device"),
        ("nested", "a nested tensor"),
        ("nested_jagged", "a tensor of class `torch.nested._internal.nested_tensor.NestedTensor`"),
    ];
    for (name, kind) in kinds {
        let (source, made) = (fixture(&format!("trainers/not_dense/{name}.pt")), folder.path().join(name));
        for verb in ["consolidate", "unshard"] {
            let refused = expect(2, verb, &[&source, &made.with_extension("pt")], "").stderr;
            assert_contains(&refused, &[&format!("{name}.pt: `{name}` is {kind}"), "with --exclude"]);
        }
        succeed("consolidate", &[&source, &made], &format!("--exclude {name}"));
        assert_same(&read_safetensors(&made), &truth, name);
        let listed = succeed("inspect", &[&source], "--json").json();
        assert!(listed["tensors"][name]["unreadable"].as_str().unwrap().starts_with(kind), "{listed}");
        let verified = succeed("verify", &[&source], &format!("--exclude {name}")).stdout;
        assert_contains(&verified, &[&format!("{name}, {kind}"), "not compared"]);
    }
    let all = fixture("trainers/not_dense/all.pt");
    let listing = folder.path().join("digests.json");
    std::fs::write(&listing, succeed("inspect", &[&all], "--digest --json").stdout).unwrap();
    let left_out = kinds.map(|(name, _)| format!("--exclude {name}")).join(" ");
    let verified = succeed("verify", &[&all, &listing], &format!("--common {left_out}")).stderr;
    assert_contains(&verified, &["the same: 2 tensors"]);
    succeed("reshard", &[&all, &folder.path().join("ranks")], &format!("--mesh dp=2 {left_out}"));
    succeed("consolidate", &[&folder.path().join("ranks"), &folder.path().join("all")], "");
    assert_same(&read_safetensors(&folder.path().join("all")), &truth, "all");
}

/// The optimizer state of torchao is of a tensor subclass. The model beside it is read.
#[test]
fn unreadable_optimizer_state_does_not_hinder_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("trainers/torchao_adamw8bit/checkpoint.pt");
    let made = folder.path().join("model");
    succeed("consolidate", &[&source, &made], "");
    let mut expected = below("model.", &Truth::load("trainers/torchao_adamw8bit.truth").tensors);
    expected.retain(|name, _| !is_optimizer_state(name));
    assert_same(&read_safetensors(&made), &expected, "torchao_adamw8bit");
    let refused = expect(2, "reshard", &[&source, &folder.path().join("ranks")], "--mesh dp=2").stderr;
    assert_contains(&refused, &["exp_avg", "is a tensor of class `torchao.", "with --exclude"]);
}

/// An object of an unknown class is refused if it is selected; the model beside it is read.
#[test]
fn unknown_object_does_not_hinder_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let truth = below("model.", &Truth::load("foreign_objects/truth").tensors);
    for source in ["foreign_objects/dcp", "foreign_objects/foreign.pt"] {
        let (source, made) = (fixture(source), folder.path().join(source.replace(['/', '.'], "_")));
        assert_contains(&succeed("consolidate", &[&source, &made], "").stderr, &["left out: 5 objects"]);
        assert_same(&read_safetensors(&made), &truth, "model");
        let whole = made.with_extension("pt");
        assert_contains(&expect(2, "unshard", &[&source, &whole], "").stderr, &["`own` needs the Python object"]);
        succeed("unshard", &[&source, &whole], "--exclude own --exclude state");
        let listed = succeed("inspect", &[&source], "--json").json();
        assert_eq!(listed["objects"]["own"]["unreadable"], "an object of `their_trainer.Foreign`");
        assert!(listed["tensors"].get("own").is_none());
    }
}

fn is_optimizer_state(name: &str) -> bool {
    let parts: Vec<&str> = name.split('.').collect();
    parts.iter().any(|part| ["optimizer", "optim", "optimizers", "optimizer_states"].contains(part))
        || matches!(parts.last(), Some(&("exp_avg" | "exp_avg_sq" | "step")))
}
