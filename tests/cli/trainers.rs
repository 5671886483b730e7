//! Checkpoints that the code of trainers wrote (`tests/fixtures/trainers`): `consolidate` without options gives the
//! values and names of the model.

use crate::common::{Truth, assert_same, below, fixture, read_safetensors, succeed};

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

fn is_optimizer_state(name: &str) -> bool {
    let parts: Vec<&str> = name.split('.').collect();
    parts.iter().any(|part| ["optimizer", "optim", "optimizers", "optimizer_states"].contains(part))
        || matches!(parts.last(), Some(&("exp_avg" | "exp_avg_sq" | "step")))
}
