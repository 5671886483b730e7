//! Tests of the formats that are read and written, of the names of their files, and of the defaults without options.
//!
//! Tested in other modules:
//!
//! - A folder with checkpoints of two formats is an error that names both:
//!   `bad_input::arguments::folder_with_two_formats_is_refused_without_from`.
//! - Parent folders (`latest`, `global_step_N`, `iter_N`, `actor`, `pytorch_model_fsdp_0`), and candidates that are
//!   listed: `folders::checkpoint_is_found_in_subfolders`, `several_candidates_are_refused_with_a_list`.
//! - DeepSpeed, Megatron, TorchScript, legacy torch, `s3://` and the like are refused by name:
//!   `bad_input::arguments::{sources_without_a_checkpoint_are_refused, other_frameworks_are_refused_by_name}`.
//! - All verbs but `inspect` refuse the file of one rank, and say that it is one of several:
//!   `bad_input::ranks::one_rank_file_of_several_is_refused`.
//! - Files of two world sizes in one series are refused: `folders::files_of_two_world_sizes_are_refused`.
//! - dcp-hf is read: `folders::shards_of_dcps_hugging_face_storage_are_read`; the written files equal those of PyTorch's
//!   writer: `tests/interop/test_dcp_hf.py`.

use std::fs;

use serde_json::{Value as Json, json};

use crate::common::env::TestEnv;
use crate::common::{Truth, assert_same, below, expect, file, fixture, inspect, read, read_safetensors, run, succeed};
use crate::contract::{assert_contains, contents, copy_tree, names_below};

#[test]
fn dcp_output_is_one_distcp_file_per_rank_and_metadata() {
    let env = TestEnv::new();
    let made = env.make("reshard", "fsdp4/dcp", "out", "--mesh dp=3");
    assert_eq!(names_below(&made.path), [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]);
    assert_same(&made.tensors(), &read(&fixture("fsdp4/dcp")), "resharded");
}

#[test]
fn dcp_hf_output_is_one_safetensors_file_per_rank() {
    let env = TestEnv::new();
    let made = env.make("reshard", "fsdp4/dcp", "out", "--mesh dp=2,tp=2 --placements S(0),S(1) --to dcp-hf --verify");
    let name = |shard: u32| format!("shard-{shard:05}-model-00001-of-00001.safetensors");
    assert_eq!(names_below(&made.path), [name(1), name(2), name(3), name(4)]);
    assert_eq!(inspect(&made.path, "--brief")["format"], "dcp-hf");
    assert_same(&made.tensors(), &read(&fixture("fsdp4/dcp")), "all tensors, those of the optimizer too");
    assert!(made.closing_line().ends_with("; left out: 21 objects"), "{}", made.closing_line());
    let back = env.path("back");
    succeed("reshard", &[&made.path, &back], "--mesh dp=3 --to dcp");
    assert_same(&read(&back), &read(&fixture("fsdp4/dcp")), "there and back");
}

#[test]
fn dcp_hf_numbers_ranks_with_a_file_consecutively() {
    let env = TestEnv::new();
    let options = "--mesh dp=2 --mesh-ranks 4,7 --to dcp-hf";
    let made = env.make("reshard", "dcp_hf/shards", "out", options);
    let name = |shard: u32| format!("shard-{shard:05}-model-00001-of-00001.safetensors");
    assert_eq!(names_below(&made.path), [name(1), name(2)]);
    assert_same(&made.tensors(), &read(&fixture("dcp_hf/shards")), "on ranks 4 and 7");
    // The tensor has two rows, so 7 of the 9 ranks have none. One of them writes the empty chunk; the others have no file.
    let made = env.make("reshard", "dcp_hf/shards", "few", "--mesh dp=9 --include model.few.weight --to dcp-hf");
    assert_eq!(names_below(&made.path), [name(1), name(2), name(3)]);
    let document = inspect(&made.path, "");
    let chunks = document["tensors"]["model.few.weight"]["chunks"].as_array().unwrap();
    let box_of = |at: usize| (chunks[at]["offsets"].clone(), chunks[at]["sizes"].clone());
    assert_eq!([0, 1, 2].map(box_of), [0, 1, 2].map(|at| (json!([at, 0]), json!([u32::from(at < 2), 3]))));
}

#[test]
fn dcp_hf_with_several_boxes_of_a_tensor_is_refused() {
    let env = TestEnv::new();
    let options = "--mesh dp=2,tp=3 --placements _S(0,3),S(1) --to dcp-hf";
    env.refuse("reshard", "fsdp4/dcp", "x", options);
}

#[test]
fn safetensors_output_is_a_file_or_folder_by_the_suffix_of_dst() {
    let env = TestEnv::new();
    let file = env.make("consolidate", "fsdp4/dcp", "x.safetensors", "");
    assert!(file.path.is_file());
    let folder = env.make("consolidate", "fsdp4/dcp", "folder", "");
    assert_eq!(names_below(&folder.path), ["model.safetensors"]);
    let split = env.make("consolidate", "fsdp4/dcp", "split", "--max-shard-size 500");
    assert_eq!(
        names_below(&split.path),
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    );
    let expected = below("model.", &Truth::load("fsdp4/truth").tensors);
    for made in [&file, &folder, &split] {
        assert_same(&read_safetensors(&made.path), &expected, &made.path.display().to_string());
    }
    let index: Json = serde_json::from_slice(&contents(&split.path)["model.safetensors.index.json"]).unwrap();
    assert_eq!(index["metadata"], json!({ "total_size": 868 }));
}

#[test]
fn torch_output_is_the_file_dst() {
    let env = TestEnv::new();
    for name in ["whole", "deep/er/whole.pt"] {
        let made = env.make("unshard", "fsdp4/dcp", name, "");
        assert!(made.path.is_file(), "{name}");
        assert_same(&made.tensors(), &read(&fixture("fsdp4/dcp")), name);
    }
    assert_eq!(env.names(), ["deep", "deep/er", "deep/er/whole.pt", "whole"]);
}

#[test]
fn pytorch_model_bin_index_json_sets_are_read() {
    let env = TestEnv::new();
    let names: Vec<String> = read(&fixture("safetensors/sharded")).into_keys().collect();
    let mut map = serde_json::Map::new();
    for (number, part) in [(1, &names[..2]), (2, &names[2..])] {
        let file = format!("pytorch_model-0000{number}-of-00002.bin");
        let include = format!("--include {}", part.join(" --include "));
        env.make("unshard", "safetensors/sharded", &format!("set/{file}"), &include);
        map.extend(part.iter().map(|name| (name.clone(), json!(file))));
    }
    let index = json!({ "metadata": { "total_size": 304 }, "weight_map": map });
    let index = env.write("set/pytorch_model.bin.index.json", index.to_string());
    for source in [env.path("set"), index] {
        assert_eq!(inspect(&source, "--brief")["format"], "torch");
        succeed("verify", &[&source, &fixture("safetensors/sharded")], "");
    }
}

#[test]
fn torch_ranks_output_has_the_series_of_the_input() {
    let env = TestEnv::new();
    let made = env.make("reshard", "verl", "out", "--mesh fsdp=2");
    let names: Vec<String> = names_below(&made.path)
        .into_iter()
        .filter(|name| std::path::Path::new(name).extension() == Some("pt".as_ref()))
        .collect();
    let expected = ["extra_state", "model", "optim"]
        .iter()
        .flat_map(|series| (0..2).map(move |rank| format!("{series}_world_size_2_rank_{rank}.pt")));
    assert_eq!(names, expected.collect::<Vec<_>>());
    // A source without series is written as the series of the model.
    let plain = env.make("reshard", "safetensors/sharded", "plain", "--mesh dp=2 --to torch-ranks");
    let names: Vec<String> = names_below(&plain.path).into_iter().filter(|name| name.contains("rank")).collect();
    assert_eq!(names, ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"]);
    assert_same(&plain.tensors(), &read(&fixture("safetensors/sharded")), "plain");
}

#[test]
fn source_format_is_detected() {
    for (source, format) in [
        ("fsdp4/dcp", "dcp"),
        ("dcp_trainer", "dcp"),
        ("safetensors/single", "safetensors"),
        ("safetensors/single/model.safetensors", "safetensors"),
        ("safetensors/sharded", "safetensors"),
        ("dcp_hf/shards", "dcp-hf"),
        ("torch_file/model.pt", "torch"),
        ("fsdp4/ranks", "torch-ranks"),
        ("verl", "torch-ranks"),
    ] {
        assert_eq!(inspect(&fixture(source), "--brief")["format"], format, "{source}");
        assert_eq!(inspect(&fixture(source), &format!("--brief --from {format}"))["format"], format, "{source}");
    }
}

#[test]
fn target_format_follows_the_suffix_of_dst() {
    let env = TestEnv::new();
    for (suffix, format) in
        [("safetensors", "safetensors"), ("pt", "torch"), ("pth", "torch"), ("bin", "torch"), ("ckpt", "torch")]
    {
        for verb in ["consolidate", "unshard"] {
            let made = env.make(verb, "fsdp4/dcp", &format!("{verb}.{suffix}"), "--json");
            assert_eq!(made.run.json()["target"]["format"], format, "{verb} {suffix}");
            assert!(made.path.is_file());
            assert_eq!(inspect(&made.path, "--brief")["format"], format);
        }
    }
    // `--to` takes precedence, and a verb that writes shards cannot write such a file.
    let made = env.make("unshard", "fsdp4/dcp", "x.safetensors.d", "--to safetensors --json");
    assert_eq!(made.run.json()["target"]["format"], "safetensors");
    env.refuse("reshard", "fsdp4/dcp", "y.pt", "--mesh dp=2");
}

#[test]
fn target_format_without_suffix_is_the_default_of_the_verb() {
    let env = TestEnv::new();
    for (verb, options, format) in
        [("unshard", "", "torch"), ("consolidate", "", "safetensors"), ("reshard", "--mesh dp=2", "dcp")]
    {
        let made = env.make(verb, "fsdp4/dcp", verb, &format!("{options} --json"));
        assert_eq!(made.run.json()["target"]["format"], format, "{verb}");
        assert_eq!(inspect(&made.path, "--brief")["format"], format, "{verb}");
    }
}

#[test]
fn unsupported_target_format_is_refused_with_the_supported_formats() {
    let env = TestEnv::new();
    for verb in ["consolidate", "unshard"] {
        for to in ["dcp", "dcp-hf", "torch-ranks"] {
            env.refuse(verb, "fsdp4/dcp", "x", &format!("--to {to}"));
        }
    }
    for to in ["torch", "safetensors"] {
        env.refuse("reshard", "fsdp4/dcp", "x", &format!("--mesh dp=2 --to {to}"));
    }
}

#[test]
fn reshard_keeps_the_format_of_src_or_writes_dcp_from_a_single_file() {
    let env = TestEnv::new();
    for (source, format) in [
        ("fsdp4/dcp", "dcp"),
        ("fsdp4/ranks", "torch-ranks"),
        ("dcp_hf/shards", "dcp-hf"),
        ("torch_file/trainer.pt", "dcp"),
        ("safetensors/single/model.safetensors", "dcp"),
        ("safetensors/sharded", "dcp"),
    ] {
        let name = source.replace(['/', '.'], "_");
        let made = env.make("reshard", source, &name, "--mesh dp=2");
        assert_eq!(inspect(&made.path, "--brief")["format"], format, "{source}");
        let mut expected = read(&fixture(source));
        if source.ends_with("trainer.pt") {
            expected = file(source, "torch_file/trainer.truth").named();
        }
        assert_same(&made.tensors(), &expected, source);
    }
}

#[test]
fn reshard_writes_model_and_optimizer_into_sibling_folders() {
    let env = TestEnv::new();
    let made = env.make("reshard", "accelerate_llama", "out", "--mesh dp=3");
    for name in ["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata", "optimizer_0/__2_0.distcp"] {
        assert!(made.path.join(name).is_file(), "{name} of {:?}", names_below(&made.path));
    }
    // Other files beside the checkpoint are copied.
    for name in ["config.json", "scheduler.bin", "random_states_1.pkl"] {
        let same = fs::read(made.path.join(name)).unwrap() == fs::read(fixture("accelerate_llama").join(name)).unwrap();
        assert!(same, "{name}");
    }
    assert_same(&made.tensors(), &read(&fixture("accelerate_llama")), "both folders");
    assert!(made.tensor_names().iter().any(|name| name.starts_with("optimizer.state.")));
}

#[test]
fn required_format_in_a_subfolder_is_named_in_the_hint() {
    let env = TestEnv::new();
    let folder = env.path("saved");
    copy_tree(&fixture("accelerate_llama"), &folder);
    fs::copy(fixture("safetensors/truth.safetensors"), folder.join("model.safetensors")).unwrap();
    let refused = expect(2, "inspect", &[&folder], "--from dcp");
    assert_contains(&refused.stderr, &["saved/optimizer_0, ", "saved/pytorch_model_fsdp_0, or remove --from"]);
    fs::remove_dir_all(folder.join("optimizer_0")).unwrap();
    let refused = expect(2, "inspect", &[&folder], "--from dcp");
    assert_contains(&refused.stderr, &["give the folder ", "saved/pytorch_model_fsdp_0, or remove --from"]);
    succeed("inspect", &[&folder.join("pytorch_model_fsdp_0")], "--from dcp");
}

#[test]
fn consolidate_reads_the_model_of_sibling_folders() {
    let env = TestEnv::new();
    let made = env.make("consolidate", "accelerate_llama", "out", "");
    assert!(made.tensor_names().iter().all(|name| !name.contains("exp_avg") && !name.contains("optimizer")));
}

#[test]
fn inspect_shows_one_rank_file_and_lists_the_other_ranks() {
    let source = fixture("fsdp4/ranks/model_world_size_4_rank_2.pt");
    let outcome = succeed("inspect", &[&source], "");
    assert!(outcome.stdout.contains("embed.weight"), "{}", outcome.stdout);
    assert_contains(&outcome.stderr, &["1 of 4", "model_world_size_4_rank_0.pt", "model_world_size_4_rank_3.pt"]);
    for (verb, options) in [("consolidate", ""), ("unshard", ""), ("reshard", "--mesh dp=2"), ("verify", "")] {
        let env = TestEnv::new();
        let target = env.path("out");
        let outcome = expect(2, verb, &[&source, &target], options);
        assert_contains(&outcome.stderr, &["1 of 4", "give the folder"]);
        assert!(env.names().is_empty());
    }
}

#[test]
fn reshard_converts_every_series_and_other_verbs_the_model() {
    let env = TestEnv::new();
    let all = env.make("reshard", "fsdp4/ranks", "all", "--mesh dp=2 --json");
    assert_eq!(inspect(&all.path, "--brief")["series"], json!(["model", "extra_state", "optim"]));
    assert_eq!(all.run.json()["left_out"], json!([]));
    let model = below("model.", &read(&fixture("fsdp4/ranks")));
    for verb in ["unshard", "consolidate"] {
        let made = env.make(verb, "fsdp4/ranks", verb, "");
        assert_same(&made.tensors(), &model, verb);
        assert!(
            made.closing_line().ends_with("; left out: series extra_state, series optim"),
            "{}",
            made.closing_line()
        );
    }
}

#[test]
fn several_selected_series_are_top_level_subtrees() {
    let env = TestEnv::new();
    let all = read(&fixture("fsdp4/ranks"));
    let tops = |names: &[String]| {
        let mut tops: Vec<String> = names.iter().map(|name| name.split('.').next().unwrap().to_owned()).collect();
        tops.dedup();
        tops
    };
    let optim = env.make("unshard", "fsdp4/ranks", "optim.pt", "--series optim");
    assert_same(&optim.tensors(), &below("optim.", &all), "one series has no subtree");
    let two = env.make("unshard", "fsdp4/ranks", "two.pt", "--series model,optim");
    assert_eq!(tops(&two.tensor_names()), ["model", "optim"]);
    let every = env.make("unshard", "fsdp4/ranks", "every.pt", "--series all");
    assert_same(&every.tensors(), &all, "all");
    assert!(
        inspect(&every.path, "--brief")["objects"]
            .as_object()
            .unwrap()
            .keys()
            .any(|name| name.starts_with("extra_state."))
    );
    let resharded = env.make("reshard", "fsdp4/ranks", "model", "--mesh dp=2 --series model");
    assert_eq!(names_below(&resharded.path), ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"]);
    env.refuse("unshard", "fsdp4/ranks", "x.pt", "--series modle");
    env.refuse("unshard", "fsdp4/dcp", "x.pt", "--series model");
}

#[test]
fn two_world_sizes_of_a_series_are_refused_by_every_verb() {
    let env = TestEnv::new();
    copy_tree(&fixture("fsdp3/ranks"), &env.path("src"));
    copy_tree(&fixture("fsdp4/ranks"), &env.path("src"));
    for (verb, options) in [("consolidate", ""), ("unshard", ""), ("reshard", "--mesh dp=2")] {
        env.refuse(verb, env.path("src"), "out", options);
    }
    let document = run(["inspect", "--json", env.path("src").to_str().unwrap()]).json();
    assert_contains(document["error"]["found"].as_str().unwrap(), &["files of 3 and 4"]);
}
