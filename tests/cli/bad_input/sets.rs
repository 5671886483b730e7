//! Tests of incomplete file sets: some files of a checkpoint are missing, or its files contradict each other.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use crate::common::env::TestEnv;
use crate::corrupt::{View, dict_of, dtshard, torch_file};

fn json_of(text: &str) -> Json {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Asserts that every converting verb fails with exit code 2 and an error of this kind and leaves nothing behind, and
/// that `verify` reports the same kind.
#[track_caller]
fn assert_refused(env: &TestEnv, source: &Path, kind: &str) {
    let before = env.names();
    let out = env.path("out");
    for verb in ["unshard", "consolidate", "reshard"] {
        let mut arguments: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&verb, &source, &out, &"--json"];
        arguments.extend(if verb == "reshard" { [&"--mesh" as &dyn AsRef<_>, &"dp=2"].as_slice() } else { &[] });
        let run = dtshard(&arguments);
        assert_eq!(run.code, Some(2), "{verb}: {run:?}");
        let error = json_of(&run.out)["error"].clone();
        assert_eq!(error["kind"], kind, "{verb}: {error}");
        assert_eq!(env.names(), before, "{verb} left something behind");
    }
    let run = dtshard(&[&"verify", &source, &"--json"]);
    let document = json_of(&run.out);
    if ["missing", "malformed", "conflict"].contains(&kind) {
        assert_eq!((run.code, &document["different"][0]["kind"]), (Some(1), &json!(kind)), "verify: {run:?}");
    } else {
        assert_eq!((run.code, &document["error"]["kind"]), (Some(2), &json!(kind)), "verify: {run:?}");
    }
}

/// Asserts that `inspect` shows the tensors that exist and lists the missing names, as text and as JSON.
#[track_caller]
fn assert_inspected(source: &Path, tensors: usize, missing: &[&str]) {
    let run = dtshard(&[&"inspect", &source, &"--json"]);
    run.assert_succeeded();
    let document = json_of(&run.out);
    assert_eq!(document["missing"], json!(missing), "{run:?}");
    assert_eq!(document["tensors"].as_object().unwrap().len(), tensors, "{run:?}");
    let run = dtshard(&[&"inspect", &source]);
    run.assert_succeeded().assert_mentions(&["warning"]);
    missing.first().iter().for_each(|name| assert!(run.out.contains(**name), "{run:?}"));
}

/// `inspect` shows the tensors of a DCP directory and of rank files that lack a file. All other verbs refuse them.
#[test]
fn inspect_shows_what_exists_of_dcp_and_rank_files() {
    for (checkpoint, file, tensors) in [
        ("fsdp4/dcp", "__1_0.distcp", 71),
        ("fsdp4/ranks", "model_world_size_4_rank_2.pt", 70),
        ("llama_tiny/ranks", "model_world_size_4_rank_0.pt", 21),
        ("accelerate_llama", "optimizer_0/__1_0.distcp", 48),
        ("trainers/verl_fsdp1_orig/global_step_2/actor", "model_world_size_2_rank_1.pt", 85),
    ] {
        let env = TestEnv::new();
        let source = env.copy(checkpoint);
        fs::remove_file(source.join(file)).unwrap();
        let name = file.rsplit('/').next().unwrap();
        assert_inspected(&source, tensors, &[name]);
        let options = ["--layout", "--brief", "--tensor=**.weight"];
        for option in options {
            dtshard(&[&"inspect", &source, &option]).assert_no_crash();
        }
        dtshard(&[&"inspect", &source, &"--tensor=**.weight", &"--draw"]).assert_no_crash();
        assert!(dtshard(&[&"verify", &source]).code != Some(0), "{file}");
        let made = env.path("out.pt");
        dtshard(&[&"unshard", &source, &made, &"--series=all"]).assert_refused(&["missing: "]);
    }
    let env = TestEnv::new();
    let (ranks, local) = (env.copy("fsdp4/ranks"), env.path("local"));
    dtshard(&[&"reshard", &ranks, &local, &"--to=local"]).assert_succeeded();
    fs::remove_file(local.join("rank-00001.safetensors")).unwrap();
    assert_inspected(&local, 70, &["rank-00001.safetensors"]);
}

fn warnings(source: &Path) -> String {
    let env = TestEnv::new();
    let run = dtshard(&[&"consolidate", &source, &env.path("out"), &"--json"]);
    run.assert_succeeded();
    json_of(&run.out)["warnings"].to_string()
}

fn tensors_in(path: &Path) -> usize {
    let run = dtshard(&[&"inspect", &path, &"--json"]);
    json_of(&run.out)["tensors"].as_object().unwrap().len()
}

const INDEX: &str = "model.safetensors.index.json";

fn file(number: u32) -> String {
    format!("model-0000{number}-of-00003.safetensors")
}

/// Returns a Hugging Face folder of three files.
fn safetensors_set() -> (TestEnv, PathBuf) {
    let env = TestEnv::new();
    let source = env.copy("safetensors/sharded");
    (env, source)
}

fn edit_index(source: &Path, change: impl FnOnce(&mut Json)) {
    let path = source.join(INDEX);
    let mut index = json_of(&fs::read_to_string(&path).unwrap());
    change(&mut index);
    fs::write(path, index.to_string()).unwrap();
}

// -------------------------------------------------------------------------------------------------- safetensors

#[test]
fn one_file_of_a_safetensors_set_is_refused() {
    let (env, source) = safetensors_set();
    let one = source.join(file(1));
    assert_refused(&env, &one, "usage");
    let tensors = tensors_in(&one);
    assert_inspected(&one, tensors, &[&file(2), &file(3)]);
    // The index and the other files are missing, so only the name of the file shows that it is one of three.
    for name in [INDEX.to_owned(), file(2), file(3)] {
        fs::remove_file(source.join(name)).unwrap();
    }
    assert_refused(&env, &one, "usage");
    assert_inspected(&one, tensors, &[&file(2), &file(3)]);
    // A renamed file without an index is read as a complete checkpoint. With an index that names it, it is one file of
    // a set.
    let renamed = source.join("weights.safetensors");
    fs::rename(one, &renamed).unwrap();
    dtshard(&[&"verify", &renamed]).assert_succeeded();
    fs::write(source.join(INDEX), r#"{"weight_map":{"a":"weights.safetensors","b":"more.safetensors"}}"#).unwrap();
    assert_refused(&env, &renamed, "usage");
    assert_inspected(&renamed, tensors, &["more.safetensors"]);
}

#[test]
fn incomplete_safetensors_set_without_index_is_refused() {
    let (env, source) = safetensors_set();
    fs::remove_file(source.join(INDEX)).unwrap();
    dtshard(&[&"verify", &source]).assert_succeeded();
    fs::remove_file(source.join(file(3))).unwrap();
    assert_refused(&env, &source, "missing");
    let shown = [1, 2].map(|number| tensors_in(&source.join(file(number)))).iter().sum();
    assert_inspected(&source, shown, &[&file(3)]);
    fs::remove_file(source.join(file(1))).unwrap();
    assert_refused(&env, &source, "missing");
    // The incomplete set is also refused as OTHER and as `--like`.
    let whole = crate::corrupt::fixture("safetensors/sharded");
    assert_eq!(dtshard(&[&"verify", &whole, &source]).code, Some(1));
    let like = dtshard(&[&"consolidate", &whole, &env.path("out"), &"--like", &source]);
    assert_eq!(like.code, Some(2), "{like:?}");
}

/// Variants in diffusers, second downloads, and file systems that change upper and lower case give files other names.
#[test]
fn file_sets_are_recognised_under_other_names() {
    let names: [fn(u32) -> String; 6] = [
        |number| format!("model-0000{number}-of-00003.fp16.safetensors"),
        |number| format!("model.fp16-0000{number}-of-00003.safetensors"),
        |number| format!("MODEL-0000{number}-OF-00003.safetensors"),
        |number| format!("model-0000{number}-of-00003 (1).safetensors"),
        |number| format!("model-0000{number}of00003.safetensors"),
        |number| format!("model (0000{number} of 00003).safetensors"),
    ];
    for name in names {
        let (env, source) = safetensors_set();
        let tensors = tensors_in(&source);
        fs::remove_file(source.join(INDEX)).unwrap();
        (1..=3).for_each(|number| fs::rename(source.join(file(number)), source.join(name(number))).unwrap());
        dtshard(&[&"verify", &source]).assert_succeeded();
        assert_eq!(tensors_in(&source), tensors);
        assert_refused(&env, &source.join(name(1)), "usage");
        fs::remove_file(source.join(name(2))).unwrap();
        assert_refused(&env, &source, "missing");
    }
    // One of the three files has a name that browsers give to a second download.
    let (env, source) = safetensors_set();
    fs::remove_file(source.join(INDEX)).unwrap();
    fs::rename(source.join(file(2)), source.join("model-00002-of-00003 (1).safetensors")).unwrap();
    assert_refused(&env, &source, "missing");
}

#[test]
fn index_of_a_variant_is_used_without_the_main_index() {
    let (env, source) = safetensors_set();
    let variant = "model.safetensors.index.fp16.json";
    // The index that loaders read takes precedence over the index of a variant.
    fs::copy(source.join(INDEX), source.join(variant)).unwrap();
    edit_index(&source, |index| index["weight_map"]["model.lost.weight"] = json!(file(2)));
    assert_refused(&env, &source, "malformed");
    fs::remove_file(source.join(INDEX)).unwrap();
    dtshard(&[&"verify", &source]).assert_succeeded();
    fs::remove_file(source.join(file(2))).unwrap();
    for source in [&source, &source.join(variant)] {
        assert_refused(&env, source, "missing");
    }
    fs::rename(source.join(file(1)), source.join("renamed.safetensors")).unwrap();
    let map = r#"{"weight_map":{"a":"renamed.safetensors","b":"more.safetensors"}}"#;
    fs::write(source.join(variant), map).unwrap();
    assert_refused(&env, &source.join("renamed.safetensors"), "usage");
}

/// Converting the index gives the same files as converting its folder.
#[test]
fn index_as_source_gives_the_output_of_its_folder() {
    let (env, source) = safetensors_set();
    edit_index(&source, |index| {
        for file in index["weight_map"].as_object_mut().unwrap().values_mut() {
            *file = json!(format!("./{}", file.as_str().unwrap()));
        }
    });
    fs::write(source.join("config.json"), "{}").unwrap();
    let of_folder = env.path("of_folder");
    dtshard(&[&"consolidate", &source, &of_folder]).assert_succeeded();
    let of_index = env.path("of_index");
    dtshard(&[&"consolidate", &source.join(INDEX), &of_index]).assert_succeeded();
    assert_eq!(crate::corrupt::files_of(&of_folder).len(), crate::corrupt::files_of(&of_index).len());
    assert!(of_index.join("config.json").is_file());
    dtshard(&[&"verify", &of_folder, &of_index]).assert_succeeded();
}

#[test]
fn hub_cache_is_refused_with_a_hint_at_its_snapshots() {
    let env = TestEnv::new();
    for folder in ["blobs", "refs", "snapshots/abc"] {
        fs::create_dir_all(env.path("models--a--b").join(folder)).unwrap();
    }
    dtshard(&[&"inspect", &env.path("models--a--b")]).assert_refused(&["snapshots"]);
}

#[test]
fn link_to_one_file_of_a_set_is_refused() {
    let (env, source) = safetensors_set();
    let link = env.path("weights.safetensors");
    std::os::unix::fs::symlink(source.join(file(1)), &link).unwrap();
    assert_refused(&env, &link, "usage");
    // A folder with such a link is incomplete as well.
    fs::create_dir(env.path("linked")).unwrap();
    std::os::unix::fs::symlink(source.join(file(1)), env.path("linked/model.safetensors")).unwrap();
    assert_refused(&env, &env.path("linked"), "usage");
    // In a hub cache, the link has the name of the checkpoint file, and the name of the blob is its digest.
    let blob = env.path("5d41402abc4b2a76b9719d911017c592");
    fs::rename(source.join(file(1)), &blob).unwrap();
    std::os::unix::fs::symlink(&blob, source.join(file(1))).unwrap();
    dtshard(&[&"verify", &source]).assert_succeeded();
    assert_refused(&env, &source.join(file(1)), "usage");
}

#[test]
fn file_name_with_four_billion_files_is_refused_in_little_memory() {
    let (env, source) = safetensors_set();
    for name in [INDEX.to_owned(), file(2), file(3)] {
        fs::remove_file(source.join(name)).unwrap();
    }
    fs::rename(source.join(file(1)), source.join("model-1-of-4294967295.safetensors")).unwrap();
    assert_refused(&env, &source, "missing");
    assert_refused(&env, &source.join("model-1-of-4294967295.safetensors"), "usage");
}

#[test]
fn file_missing_from_the_index_set_is_refused() {
    let (env, source) = safetensors_set();
    fs::remove_file(source.join(file(2))).unwrap();
    assert_refused(&env, &source, "missing");
    assert_refused(&env, &source.join(INDEX), "missing");
    let shown = [1, 3].map(|number| tensors_in(&source.join(file(number)))).iter().sum();
    assert_inspected(&source, shown, &[&file(2)]);
}

#[test]
fn tensor_of_the_index_missing_from_the_files_is_refused() {
    let (env, source) = safetensors_set();
    let tensors = tensors_in(&source);
    edit_index(&source, |index| index["weight_map"]["model.lost.weight"] = json!(file(2)));
    assert_refused(&env, &source, "malformed");
    assert_inspected(&source, tensors, &["model.lost.weight"]);
}

#[test]
fn tensor_missing_from_the_index_is_refused() {
    let (env, source) = safetensors_set();
    let tensors = tensors_in(&source);
    let mut name = String::new();
    edit_index(&source, |index| {
        let map = index["weight_map"].as_object_mut().unwrap();
        name = map.keys().next().unwrap().clone();
        map.remove(&name);
    });
    assert_refused(&env, &source, "malformed");
    assert_inspected(&source, tensors, &[]);
}

#[test]
fn file_of_another_set_is_refused() {
    let (env, source) = safetensors_set();
    let tensors = tensors_in(&source);
    let left = "model-00001-of-00005.safetensors";
    fs::copy(source.join(file(1)), source.join(left)).unwrap();
    assert_refused(&env, &source, "malformed");
    assert_inspected(&source, tensors, &[left]);
}

#[test]
fn empty_index_beside_tensors_is_refused() {
    let (env, source) = safetensors_set();
    edit_index(&source, |index| index["weight_map"] = json!({}));
    assert_refused(&env, &source, "malformed");
    assert_inspected(&source, 0, &[&file(1), &file(2), &file(3)]);
}

#[test]
fn other_files_and_wrong_sizes_beside_an_index_give_warnings() {
    let (env, source) = safetensors_set();
    assert_eq!(warnings(&source).matches(INDEX).count(), 0);
    env.copy("safetensors/single/model.safetensors");
    fs::rename(env.path("src/model.safetensors"), source.join("consolidated.safetensors")).unwrap();
    assert!(warnings(&source).contains("consolidated.safetensors"));
    // If the set that loaders read is incomplete, another set in the folder is not read instead.
    fs::write(
        source.join("consolidated.safetensors.index.json"),
        r#"{"metadata":{"total_size":1},"weight_map":{"w":"consolidated.safetensors"}}"#,
    )
    .unwrap();
    assert!(warnings(&source).contains("consolidated.safetensors"));
    assert_eq!(tensors_in(&source), tensors_in(&crate::corrupt::fixture("safetensors/sharded")));
    edit_index(&source, |index| index["metadata"]["total_size"] = json!(7));
    assert!(warnings(&source).contains("total_size is 7"));
    edit_index(&source, |index| _ = index.as_object_mut().unwrap().remove("metadata"));
    assert!(warnings(&source).contains("no total_size"));
    dtshard(&[&"verify", &source]).assert_succeeded();
    // The index names only two of the three numbered files.
    let lost = file(3);
    edit_index(&source, |index| {
        index["weight_map"].as_object_mut().unwrap().retain(|_, file| *file != json!(lost));
    });
    fs::remove_file(source.join(file(3))).unwrap();
    assert!(warnings(&source).contains(&file(3)));
}

// -------------------------------------------------------------------------------------------------------- torch

const TORCH_INDEX: &str = "pytorch_model.bin.index.json";

fn torch_bytes(name: &str) -> Vec<u8> {
    let view = View { key: "0", numel: 2, offset: 0, sizes: &[2], strides: &[1] };
    torch_file(dict_of(name, |writer| view.write(writer)), &[("0", b"12345678")])
}

fn bin_name(number: u32) -> String {
    format!("pytorch_model-0000{number}-of-00003.bin")
}

/// Writes three torch files of one tensor each, `t1` to `t3`, and their index.
fn torch_set() -> (TestEnv, PathBuf) {
    let env = TestEnv::new();
    let mut map = json!({});
    for number in 1..=3 {
        env.write(&format!("src/{}", bin_name(number)), torch_bytes(&format!("t{number}")));
        map[format!("t{number}")] = json!(bin_name(number));
    }
    let index = json!({"metadata": {"total_size": 24}, "weight_map": map});
    env.write(&format!("src/{TORCH_INDEX}"), index.to_string());
    let source = env.path("src");
    (env, source)
}

#[test]
fn one_file_of_a_torch_set_is_refused() {
    let (env, source) = torch_set();
    dtshard(&[&"verify", &source]).assert_succeeded();
    assert_refused(&env, &source.join(bin_name(1)), "usage");
    assert_inspected(&source.join(bin_name(1)), 1, &[&bin_name(2), &bin_name(3)]);
    for name in [TORCH_INDEX.to_owned(), bin_name(2), bin_name(3)] {
        fs::remove_file(source.join(name)).unwrap();
    }
    assert_refused(&env, &source.join(bin_name(1)), "usage");
    assert_refused(&env, &source, "missing");
    assert_inspected(&source, 1, &[&bin_name(2), &bin_name(3)]);
}

#[test]
fn torch_index_that_contradicts_its_files_is_refused() {
    let (env, source) = torch_set();
    let rewrite = |map: Json| {
        let index = json!({"metadata": {"total_size": 24}, "weight_map": map});
        fs::write(source.join(TORCH_INDEX), index.to_string()).unwrap();
    };
    rewrite(json!({"t1": bin_name(1), "t2": bin_name(2), "t3": bin_name(3), "lost": bin_name(3)}));
    assert_refused(&env, &source, "malformed");
    assert_inspected(&source, 3, &["lost"]);
    rewrite(json!({"t1": bin_name(1), "t2": bin_name(2), "t3": bin_name(2)}));
    assert_refused(&env, &source, "malformed");
    rewrite(json!({"t1": bin_name(1), "t2": bin_name(2)}));
    assert_refused(&env, &source, "malformed");
    assert_inspected(&source, 2, &[&bin_name(3)]);
    rewrite(json!({}));
    assert_refused(&env, &source, "malformed");
    assert_inspected(&source, 0, &[&bin_name(1), &bin_name(2), &bin_name(3)]);
    rewrite(json!({"t1": bin_name(2), "t2": bin_name(1), "t3": bin_name(3)}));
    assert_refused(&env, &source, "malformed");
    rewrite(json!({"t1": bin_name(1), "t2": bin_name(2), "t3": bin_name(3)}));
    fs::remove_file(source.join(bin_name(2))).unwrap();
    assert_refused(&env, &source, "missing");
    assert_inspected(&source, 2, &[&bin_name(2)]);
}

// ----------------------------------------------------------------------------------------- ranks of other frameworks

#[test]
fn file_of_one_deepspeed_rank_is_refused() {
    let env = TestEnv::new();
    let files = [
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "mp_rank_00_model_states.pt",
        "layer_00-model_states.pt",
    ];
    for name in files {
        let path = env.write(&format!("global_step10/{name}"), torch_bytes("w"));
        assert_refused(&env, &path, "unsupported");
        assert_inspected(&path, 1, &[]);
        fs::remove_file(path).unwrap();
    }
    let [first, second] = [0, 1].map(|rank| format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"));
    let path = env.write(&format!("global_step10/{first}"), torch_bytes("w"));
    env.write(&format!("global_step10/{second}"), torch_bytes("w"));
    assert_inspected(&path, 1, &[&second]);
}

#[test]
fn file_or_folder_of_one_megatron_rank_is_refused() {
    let env = TestEnv::new();
    for folder in ["mp_rank_00", "mp_rank_00_000", "mp_rank_01_000_001"] {
        for name in ["model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt"] {
            let path = env.write(&format!("iter_0000100/{folder}/{name}"), torch_bytes("w"));
            assert_refused(&env, &path, "unsupported");
            assert_inspected(&path, 1, &[]);
            let folder = path.parent().unwrap().to_path_buf();
            assert_refused(&env, &folder, "unsupported");
            fs::remove_dir_all(folder).unwrap();
        }
    }
    let path = env.write("iter_0000100/mp_rank_00/model_optim_rng.pt", torch_bytes("w"));
    env.write("iter_0000100/mp_rank_01/model_optim_rng.pt", torch_bytes("w"));
    assert_inspected(&path, 1, &["mp_rank_01"]);
    // Only the name of the file shows that it is a file of Megatron-LM.
    let path = env.write("copied/model_optim_rng.pt", torch_bytes("w"));
    assert_refused(&env, &path, "unsupported");
}

// ------------------------------------------------------------------------------------------------------------ dcp-hf

#[test]
fn missing_shard_of_one_rank_is_refused() {
    let env = TestEnv::new();
    let source = env.copy("dcp_hf/mapped");
    let lost = "shard-00003-model-00002-of-00002.safetensors";
    fs::remove_file(source.join(lost)).unwrap();
    assert_refused(&env, &source, "missing");
    let run = dtshard(&[&"inspect", &source, &"--json"]);
    assert_eq!(json_of(&run.assert_succeeded().out)["missing"], json!([lost]));
    let allowed = dtshard(&[&"inspect", &source, &"--allow-missing", &"--json"]);
    allowed.assert_succeeded().assert_mentions(&["warning", lost]);
}
