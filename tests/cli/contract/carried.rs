//! Tests that files beside a checkpoint are copied unchanged, with a warning about files whose content depends on the
//! ranks.

use std::fs;

use crate::common::env::TestEnv;
use crate::common::{copy_folder, fixture, succeed};

#[test]
fn separate_optimizer_file_is_copied_with_a_warning() {
    let env = TestEnv::new();
    let folder = |name: &str| {
        let path = env.path(name);
        fs::create_dir(&path).unwrap();
        for name in ["optimizer.bin", "optimizer_1.bin", "scheduler.bin", "config.json"] {
            fs::copy(fixture("accelerate/scheduler.bin"), path.join(name)).unwrap();
        }
        path
    };
    let (safetensors, torch) = (folder("safetensors"), folder("torch"));
    copy_folder(&fixture("safetensors/sharded"), &safetensors);
    succeed("unshard", &[&fixture("llama_tiny/ranks"), &torch.join("pytorch_model.bin")], "");
    for (verb, source, options) in
        [("reshard", safetensors, "--mesh dp=2 --to dcp"), ("flatten", torch, "--world-size 2 --wrap model.layers.*")]
    {
        let target = env.path(verb);
        let run = succeed(verb, &[&source, &target], &format!("{options} --json"));
        let warnings = run.json()["warnings"].to_string();
        for name in ["optimizer.bin", "optimizer_1.bin"] {
            assert!(warnings.contains(name), "{verb}: {warnings}");
            assert!(run.stderr.lines().any(|line| line.starts_with("warning") && line.contains(name)), "{run:?}");
            assert_eq!(fs::read(source.join(name)).unwrap(), fs::read(target.join(name)).unwrap());
        }
        assert!(!warnings.contains("scheduler") && !warnings.contains("config.json"), "{warnings}");
        assert!(target.join("scheduler.bin").is_file());
    }
    // An optimizer that is part of the checkpoint is resharded, without a warning.
    let run = succeed("reshard", &[&fixture("accelerate_llama"), &env.path("out")], "--mesh dp=3 --json");
    assert!(!run.json()["warnings"].to_string().contains("optimizer"), "{run:?}");
}
