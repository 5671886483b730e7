//! Tests of `--tied write`, which writes the tied name that a checkpoint leaves out.

use std::fs;
use std::path::PathBuf;

use serde_json::Value as Json;

use crate::common::env::TestEnv;
use crate::common::{expect, succeed};

const TIED: &str = r#"{"model_type": "llama", "tie_word_embeddings": true}"#;

/// Writes a model as `save_pretrained` does: with an embedding, and without the output layer that is tied to it.
fn saved(env: &TestEnv, name: &str, config: &str, tensors: &[(&str, usize)]) -> PathBuf {
    env.write(&format!("{name}/config.json"), config);
    env.vectors(&format!("{name}/model.safetensors"), tensors);
    env.path(name)
}

const MODEL: [(&str, usize); 2] = [("model.embed_tokens.weight", 8), ("model.norm.weight", 4)];

/// Returns the names of tensors and their digests.
fn digests(path: &std::path::Path) -> serde_json::Map<String, Json> {
    let document = succeed("inspect", &[path], "--digest --json").json();
    let tensors = document["tensors"].as_object().unwrap();
    tensors.iter().map(|(name, tensor)| (name.clone(), tensor["digest"].clone())).collect()
}

#[test]
fn missing_tied_name_is_written_in_every_format() {
    let env = TestEnv::new();
    let source = saved(&env, "source", TIED, &MODEL);
    let all = [
        env.make("reshard", &source, "dcp", "--mesh dp=2 --to dcp --tied write"),
        env.make("reshard", &source, "ranks", "--mesh dp=2 --to torch-ranks --tied write"),
        env.make("reshard", &source, "local", "--mesh dp=2 --to local --tied write"),
        env.make("unshard", &source, "whole.pt", "--tied write"),
        env.make("unshard", &source, "whole.safetensors", "--tied write"),
        env.make("consolidate", &source, "model", "--tied write"),
        env.make("consolidate", &source, "model.bin", "--tied write"),
    ];
    for made in &all {
        let found = digests(&made.path);
        assert_eq!(found.len(), 3, "{found:?}");
        assert_eq!(found["lm_head.weight"], found["model.embed_tokens.weight"], "{}", made.path.display());
    }
}

#[test]
fn tied_name_of_a_nested_model_is_written_and_renamed() {
    let env = TestEnv::new();
    let source = saved(&env, "source", TIED, &MODEL);
    let nested = env.make("unshard", &source, "nested/model.pt", "--nest model").path;
    env.write("nested/config.json", TIED);
    let made = env.make("consolidate", nested.parent().unwrap(), "out.safetensors", "--tied write --add-prefix my.");
    assert!(digests(&made.path).contains_key("my.lm_head.weight"));
}

#[test]
fn verify_hint_names_common_for_the_tied_layer() {
    let env = TestEnv::new();
    let source = saved(&env, "source", TIED, &MODEL);
    let made = env.make("reshard", &source, "dcp", "--mesh dp=2 --to dcp --tied write");
    for (left, right) in [(&source, &made.path), (&made.path, &source)] {
        let run = expect(1, "verify", &[left, right], "");
        assert!(run.stderr.contains("--common") && run.stderr.contains("lm_head.weight"), "{}", run.stderr);
        succeed("verify", &[left, right], "--common");
    }
    // A model with its own output layer is not tied.
    let head = env.path("head");
    fs::create_dir(&head).unwrap();
    env.vectors("head/model.safetensors", &[MODEL[0], MODEL[1], ("lm_head.weight", 9)]);
    let run = expect(1, "verify", &[&head, &source], "");
    assert!(!run.stderr.contains("--common"), "{}", run.stderr);
}

/// A quantised output layer has other tensor names than an ordinary output layer, so it must be recognised as present.
#[test]
fn quantised_output_layer_is_not_tied() {
    let env = TestEnv::new();
    let source = saved(&env, "source", TIED, &[MODEL[0], MODEL[1], ("lm_head.qweight", 3)]);
    let made = env.make("reshard", &source, "dcp", "--mesh dp=2 --to dcp --tied write");
    assert!(!digests(&made.path).contains_key("lm_head.weight"));
}

#[test]
fn recorded_alias_is_written() {
    let env = TestEnv::new();
    let source = saved(&env, "source", TIED, &MODEL);
    let both = env.make("unshard", &source, "both.pt", "--tied write").path;
    let recorded = env.make("unshard", &both, "recorded.safetensors", "--tied drop").path;
    let written = env.make("unshard", &recorded, "written.safetensors", "--tied write").path;
    let bytes = fs::read(&written).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(
        stored.tensor("lm_head.weight").unwrap().data(),
        stored.tensor("model.embed_tokens.weight").unwrap().data()
    );
}

#[test]
fn stored_output_layer_is_kept() {
    let env = TestEnv::new();
    let tensors = [("lm_head.weight", 8), MODEL[0], MODEL[1]];
    let source = saved(&env, "source", TIED, &tensors);
    let made = env.make("reshard", &source, "dcp", "--mesh dp=2 --to dcp --tied write");
    let found = digests(&made.path);
    assert_ne!(found["lm_head.weight"], found["model.embed_tokens.weight"]);
}

#[test]
fn unknown_ties_are_an_error() {
    let env = TestEnv::new();
    let untied = saved(&env, "untied", r#"{"tie_word_embeddings": false}"#, &MODEL);
    let unknown = saved(&env, "unknown", TIED, &[("my_embedding.weight", 8)]);
    let several = [("a.model.embed_tokens.weight", 8), ("b.model.embed_tokens.weight", 8)];
    let several = saved(&env, "several", TIED, &several);
    for source in [untied, unknown, several] {
        let out = env.path("out");
        let run = expect(2, "reshard", &[&source, &out], "--mesh dp=2 --to dcp --tied write --json");
        assert_eq!(run.json()["error"]["kind"], "usage");
        assert!(!out.exists());
    }
}

#[test]
fn tied_model_in_dcp_gives_a_note_unless_all_names_are_written() {
    let env = TestEnv::new();
    let source = saved(&env, "source", TIED, &MODEL);
    let notes = |out: &str, options: &str| {
        let run = succeed("reshard", &[&source, &env.path(out)], &format!("--mesh dp=2 --to dcp --json {options}"));
        run.json()["warnings"].to_string()
    };
    assert!(notes("plain", "").contains("allow_partial_load"));
    assert!(!notes("written", "--tied write").contains("allow_partial_load"));
}

/// The flat layout records the tied name beside the name of its parameter, whether the units come from SRC or from
/// another checkpoint without the tied name.
#[test]
fn tied_name_is_shared_in_flat_parameters() {
    let env = TestEnv::new();
    let source = env.make("reshard", "llama_tiny/ranks", "source", "--mesh fsdp=2 --exclude **.lm_head").path;
    env.write("source/huggingface/config.json", TIED);
    for like in [String::new(), format!("--like {}", source.display())] {
        let options = format!("--world-size 2 --wrap model.layers.* --tied write --overwrite {like}");
        let made = env.make("flatten", &source, "flat", &options).path;
        let summary = succeed("inspect", &[&made], "--brief").stdout;
        assert!(summary.contains("model.embed_tokens.weight = model.lm_head.weight"), "{like}: {summary}");
    }
}
