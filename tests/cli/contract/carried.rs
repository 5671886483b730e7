//! Tests that files beside a checkpoint are copied unchanged, with a warning about empty files, and about files whose content
//! depends on the ranks.

use std::fs;

use crate::common::corrupt::copy_all;
use crate::common::env::TestEnv;
use crate::common::{copy_folder, fixture, succeed};
use crate::contract::assert_contains;

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

#[test]
fn empty_file_is_copied_with_a_warning() {
    let env = TestEnv::new();
    for (checkpoint, file, verb, options) in [
        ("verl/global_step_10/actor", "fsdp_config.json", "reshard", "--mesh fsdp=2"),
        ("verl/global_step_10/actor", "huggingface/config.json", "flatten", "--world-size 2 --wrap model.layers.*"),
        ("accelerate_llama", "config.json", "reshard", "--mesh fsdp=2"),
        ("accelerate_llama", "config.json", "consolidate", ""),
        ("trainers/fabric/out/step-30", "meta.pt", "reshard", "--mesh fsdp=2"),
    ] {
        let name = format!("{verb}_{}", file.replace(['/', '.'], "_"));
        let (source, target) = (env.path(&format!("{name}_source")), env.path(&name));
        copy_all(&fixture(checkpoint), &source);
        for marker in [source.join(file), source.join("DONE")] {
            fs::write(marker, "").unwrap();
        }
        let run = succeed(verb, &[&source, &target], &format!("{options} --json"));
        let warning = format!("{} is empty", source.join(file).display());
        assert_contains(&run.stderr, &[&warning]);
        assert!(run.json()["warnings"].to_string().contains(&warning), "{run:?}");
        assert_eq!(run.stderr.matches("is empty").count(), 1, "{run:?}");
        assert_eq!(fs::read(target.join(file)).unwrap(), b"");
    }
}
