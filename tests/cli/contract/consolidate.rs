//! Tests of the tensors that `consolidate` selects, and of two promises to new users: `consolidate` writes a loadable
//! model, and `reshard` writes every file of the trainer.
//!
//! Tested in other modules:
//!
//! - The model of every fixture is found beside `optimizer`, `nested`, ...:
//!   `conversions::consolidate_writes_the_model`.
//! - The closing line lists what was left out: `conversions::consolidate_lists_excluded_tensors_and_objects`.
//! - `--root` chooses another subtree: `conversions::consolidate_writes_the_subtree_of_root`.
//! - transformers loads the written model: `tests/interop/test_ship.py`.
//! - verl opens every file of a resharded actor: `tests/interop/test_verl_reshard.py`.

use std::fs;

use regex::Regex;
use serde_json::json;

use crate::common::env::{Made, TestEnv};
use crate::common::{Truth, assert_same, below, fixture, inspect, read, read_safetensors, succeed};
use crate::contract::{assert_contains, copy_tree, names_below};

/// For each trainer: its folder, the prefix of the names of its model, and the files that `consolidate` writes.
const TRAINERS: [(&str, &str, &[&str]); 4] = [
    (
        "verl",
        "model.",
        &["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"],
    ),
    ("accelerate_llama", "model.", &["config.json", "model.safetensors"]),
    ("titan", "", &["model.safetensors"]),
    ("dcp_trainer", "model.", &["config.json", "model.safetensors"]),
];

/// Returns true if the name of a tensor belongs to the state of an optimizer, a data loader or a random number
/// generator.
fn is_state(name: &str) -> bool {
    ["exp_avg", "optim", "step", "rng", "train_state"].iter().any(|word| name.contains(word))
}

#[test]
fn consolidate_without_options_writes_the_model_of_every_trainer() {
    for (source, prefix, files) in TRAINERS {
        let env = TestEnv::new();
        let made = env.make("consolidate", source, "out", "");
        assert_eq!(names_below(&made.path), files, "{source}");
        let mut expected = below(prefix, &Truth::load(&format!("{source}.truth")).tensors);
        expected.retain(|name, _| !is_state(name));
        assert_same(&read_safetensors(&made.path), &expected, source);
        assert!(expected.contains_key("model.embed_tokens.weight"));
    }
}

#[test]
fn reshard_writes_every_file_that_the_trainer_opens() {
    let env = TestEnv::new();
    let source = fixture("verl/global_step_10/actor");
    let made = env.make("reshard", &source, "actor16", "--mesh fsdp=16");
    let renamed = |name: String| name.replace("world_size_4", "world_size_16");
    let names = names_below(&made.path);
    for name in names_below(&source).into_iter().map(renamed) {
        assert!(names.contains(&name), "{name} of {names:?}");
    }
    assert_eq!(names.iter().filter(|name| name.contains("_rank_")).count(), 3 * 16);
    succeed("verify", &[&source, &made.path], "");
}

#[test]
fn closing_line_has_a_fixed_format() {
    let env = TestEnv::new();
    let time = Regex::new(r" in \d+\.\d s( \([\d.]+ [kMG]?B/s\))?").unwrap();
    let numbers = |line: &str| {
        assert_eq!(time.find_iter(line).count(), 1, "{line}");
        time.replace(line, "").into_owned()
    };
    let made = env.make("consolidate", "dcp_trainer", "out", "--dtype bf16");
    assert_eq!(
        numbers(made.closing_line()),
        "wrote 2 files, 12 tensors, 8.38 kB; left out: 33 tensors (optim), 13 objects; cast 12 f32->bf16"
    );
    let made = env.make("reshard", "accelerate_llama", "out4", "--mesh dp=2");
    let closing = numbers(made.closing_line());
    assert!(closing.starts_with("wrote 10 files, 48 tensors, "), "{closing}");
    assert!(closing.ends_with('B'), "nothing is left out or cast: {closing}");
}

/// Writes a torch file with two tensors whose names begin with `path`.
fn nested(env: &TestEnv, path: &str) -> Made {
    let weights = env.vectors("weights.safetensors", &[("a.weight", 3), ("b.bias", 2)]);
    env.make("unshard", weights, &format!("{path}.pt"), &format!("--nest {path}"))
}

#[test]
fn model_below_a_known_name_is_written_without_that_prefix() {
    for path in [
        "model",
        "module",
        "state_dict",
        "model_state_dict",
        "app.model",
        "app.module",
        "app.state_dict",
        "app.model_state_dict",
    ] {
        let env = TestEnv::new();
        let source = nested(&env, path);
        assert_eq!(source.tensor_names(), [format!("{path}.a.weight"), format!("{path}.b.bias")]);
        let made = env.make("consolidate", &source.path, "out.safetensors", "");
        assert_eq!(made.tensor_names(), ["a.weight", "b.bias"], "{path}");
    }
}

#[test]
fn model_at_the_top_excludes_training_state() {
    let env = TestEnv::new();
    let made = env.make("consolidate", "titan", "out.safetensors", "");
    assert!(made.tensor_names().iter().all(|name| !is_state(name)));
    assert_contains(made.closing_line(), &["36 tensors (optimizer)", "2 tensors (train_state)"]);
}

#[test]
fn dotted_names_of_a_flat_file_are_kept() {
    // The names in a flat Hugging Face file begin with `model.`, and `consolidate` keeps this prefix.
    let env = TestEnv::new();
    let flat = env.make("unshard", "safetensors/sharded", "flat.pt", "");
    let made = env.make("consolidate", &flat.path, "out", "");
    assert_same(&read_safetensors(&made.path), &read(&fixture("safetensors/sharded")), "a flat file");
    // The same tensors are below a key.
    let below_key = env.make("unshard", "safetensors/sharded", "below.pt", "--nest model");
    let made = env.make("consolidate", &below_key.path, "out2", "");
    assert_same(&read_safetensors(&made.path), &read(&fixture("safetensors/sharded")), "below a key");
}

#[test]
fn root_selects_a_subtree_and_everything_selects_all_tensors() {
    let env = TestEnv::new();
    let all = read(&fixture("titan"));
    let root = env.make("consolidate", "titan", "root.safetensors", "--root optimizer.state");
    assert_same(&root.tensors(), &below("optimizer.state.", &all), "--root");
    let everything = env.make("consolidate", "titan", "all.safetensors", "--everything");
    assert_same(&everything.tensors(), &all, "--everything");
    env.refuse("consolidate", "titan", "x.safetensors", "--root optimiser");
    env.refuse("consolidate", "titan", "x.safetensors", "--root model --everything");
}

#[test]
fn unknown_keys_above_the_model_give_a_note_that_names_root() {
    let env = TestEnv::new();
    let expected = below("model.", &Truth::load("trainers/fabric.truth").tensors);
    let nested = env.make("unshard", "trainers/fabric", "nested.pt", "--root model --nest my_state.net");
    let note = "note: all names begin with `my_state.net.`";
    let made = env.make("consolidate", &nested.path, "plain", "");
    assert_contains(&made.run.stderr, &[note, "remove this prefix with --root my_state.net"]);
    assert_same(&below("my_state.net.", &made.tensors()), &expected, "with prefix");
    for (at, options) in [("root", "--root my_state.net"), ("all", "--everything"), ("nest", "--add-prefix x.")] {
        let made = env.make("consolidate", &nested.path, at, options);
        assert!(!made.run.stderr.contains(note), "{}", made.run.stderr);
    }
    let made = env.make("consolidate", "trainers/fabric", "known", "");
    assert!(!made.run.stderr.contains("all names begin"), "{}", made.run.stderr);
}

#[test]
fn consolidated_model_has_no_optimizer_state_unless_selected() {
    for source in
        ["verl", "accelerate_llama", "titan", "dcp_trainer", "fsdp4/dcp", "fsdp4/ranks", "torch_file/trainer.pt"]
    {
        let env = TestEnv::new();
        let made = env.make("consolidate", source, "out", "");
        assert!(made.tensor_names().iter().all(|name| !is_state(name)), "{source}: {:?}", made.tensor_names());
    }
    // Only the names show that the tensors are optimizer state.
    let env = TestEnv::new();
    let flat = env.make("consolidate", "torch_file/trainer.pt", "flat.safetensors", "--everything");
    env.refuse("consolidate", &flat.path, "x.safetensors", "");
    let asked = env.make("consolidate", &flat.path, "y.safetensors", "--root model");
    assert_same(&asked.tensors(), &below("model.", &read(&fixture("torch_file/trainer.pt"))), "--root model");
}

#[test]
fn assets_are_copied_from_src_its_huggingface_folder_or_the_given_folder() {
    let env = TestEnv::new();
    copy_tree(&fixture("dcp_trainer"), &env.path("src"));
    for name in
        ["tokenizer.json", "generation_config.json", "notes.txt", "huggingface/vocab.json", "huggingface/config.json"]
    {
        env.write(&format!("src/{name}"), name);
    }
    let made = env.make("consolidate", env.path("src"), "out", "--json");
    let expected = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "vocab.json"];
    assert_eq!(names_below(&made.path), expected);
    // `huggingface` is the folder for loaders, so it takes precedence.
    assert_eq!(fs::read_to_string(made.path.join("config.json")).unwrap(), "huggingface/config.json");
    let document = made.run.json();
    let bytes: u64 = document["files"].as_array().unwrap().iter().map(|file| file["bytes"].as_u64().unwrap()).sum();
    assert_eq!(document["files"].as_array().unwrap().len(), 5, "{document}");
    assert_eq!(document["bytes_written"], bytes);

    let none = env.make("consolidate", env.path("src"), "none", "--assets none");
    assert_eq!(names_below(&none.path), ["model.safetensors"]);
    env.write("base/config.json", "{}");
    let given = env.make("consolidate", env.path("src"), "given", &format!("--assets {}", env.path("base").display()));
    assert_eq!(names_below(&given.path), ["config.json", "model.safetensors"]);
    assert_eq!(fs::read_to_string(given.path.join("config.json")).unwrap(), "{}");
    env.refuse("consolidate", env.path("src"), "x", "--assets nowhere");
    // If the output is a single file, no files are written beside it.
    let file = env.make("consolidate", env.path("src"), "only/one.safetensors", "");
    assert_eq!(names_below(file.path.parent().unwrap()), ["one.safetensors"]);
    assert_eq!(inspect(&file.path, "--brief")["objects"], json!({}));
}
