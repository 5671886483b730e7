//! Sets that are not complete: files of one checkpoint of which some are not there, or that contradict each other.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use crate::common::env::TestEnv;
use crate::corrupt::{View, dict_of, dtshard, torch_file};

fn json_of(text: &str) -> Json {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Every verb that converts exits with 2, an error of this kind that has all the words, and leaves nothing behind;
/// `verify` tells of it, too.
#[track_caller]
fn refused(env: &TestEnv, source: &Path, kind: &str) {
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

/// `inspect` shows what is there and names what is missing, for people and for programs.
#[track_caller]
fn inspected(source: &Path, tensors: usize, missing: &[&str]) {
    let run = dtshard(&[&"inspect", &source, &"--json"]);
    run.succeeded();
    let document = json_of(&run.out);
    assert_eq!(document["missing"], json!(missing), "{run:?}");
    assert_eq!(document["tensors"].as_object().unwrap().len(), tensors, "{run:?}");
    let run = dtshard(&[&"inspect", &source]);
    run.succeeded().says(&["warning"]);
    missing.first().iter().for_each(|name| assert!(run.out.contains(**name), "{run:?}"));
}

fn warnings(source: &Path) -> String {
    let env = TestEnv::new();
    let run = dtshard(&[&"consolidate", &source, &env.path("out"), &"--json"]);
    run.succeeded();
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

/// A Hugging Face folder of three files.
fn set() -> (TestEnv, PathBuf) {
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
    let (env, source) = set();
    let one = source.join(file(1));
    refused(&env, &one, "usage");
    let tensors = tensors_in(&one);
    inspected(&one, tensors, &[&file(2), &file(3)]);
    // Without index and others, the name alone says it.
    for name in [INDEX.to_owned(), file(2), file(3)] {
        fs::remove_file(source.join(name)).unwrap();
    }
    refused(&env, &one, "usage");
    inspected(&one, tensors, &[&file(2), &file(3)]);
    // A name of its own says nothing, an index that names it does.
    let renamed = source.join("weights.safetensors");
    fs::rename(one, &renamed).unwrap();
    dtshard(&[&"verify", &renamed]).succeeded();
    fs::write(source.join(INDEX), r#"{"weight_map":{"a":"weights.safetensors","b":"more.safetensors"}}"#).unwrap();
    refused(&env, &renamed, "usage");
    inspected(&renamed, tensors, &["more.safetensors"]);
}

#[test]
fn safetensors_files_without_the_others_of_their_set_are_refused() {
    let (env, source) = set();
    fs::remove_file(source.join(INDEX)).unwrap();
    dtshard(&[&"verify", &source]).succeeded();
    fs::remove_file(source.join(file(3))).unwrap();
    refused(&env, &source, "missing");
    let shown = [1, 2].map(|number| tensors_in(&source.join(file(number)))).iter().sum();
    inspected(&source, shown, &[&file(3)]);
    fs::remove_file(source.join(file(1))).unwrap();
    refused(&env, &source, "missing");
    // Nor does the fault depend on where the set is read as a second checkpoint.
    let whole = crate::corrupt::fixture("safetensors/sharded");
    assert_eq!(dtshard(&[&"verify", &whole, &source]).code, Some(1));
    let like = dtshard(&[&"consolidate", &whole, &env.path("out"), &"--like", &source]);
    assert_eq!(like.code, Some(2), "{like:?}");
}

/// The names of diffusers for a variant, of a second download, and of file systems that change the case.
#[test]
fn sets_of_other_names_are_sets() {
    let names: [fn(u32) -> String; 6] = [
        |number| format!("model-0000{number}-of-00003.fp16.safetensors"),
        |number| format!("model.fp16-0000{number}-of-00003.safetensors"),
        |number| format!("MODEL-0000{number}-OF-00003.safetensors"),
        |number| format!("model-0000{number}-of-00003 (1).safetensors"),
        |number| format!("model-0000{number}of00003.safetensors"),
        |number| format!("model (0000{number} of 00003).safetensors"),
    ];
    for name in names {
        let (env, source) = set();
        let tensors = tensors_in(&source);
        fs::remove_file(source.join(INDEX)).unwrap();
        (1..=3).for_each(|number| fs::rename(source.join(file(number)), source.join(name(number))).unwrap());
        dtshard(&[&"verify", &source]).succeeded();
        assert_eq!(tensors_in(&source), tensors);
        refused(&env, &source.join(name(1)), "usage");
        fs::remove_file(source.join(name(2))).unwrap();
        refused(&env, &source, "missing");
    }
    // One file of three came a second time, under another name.
    let (env, source) = set();
    fs::remove_file(source.join(INDEX)).unwrap();
    fs::rename(source.join(file(2)), source.join("model-00002-of-00003 (1).safetensors")).unwrap();
    refused(&env, &source, "missing");
}

#[test]
fn index_of_a_variant_is_an_index() {
    let (env, source) = set();
    let variant = "model.safetensors.index.fp16.json";
    // Beside the index that loaders read it says nothing.
    fs::copy(source.join(INDEX), source.join(variant)).unwrap();
    edit_index(&source, |index| index["weight_map"]["model.lost.weight"] = json!(file(2)));
    refused(&env, &source, "malformed");
    fs::remove_file(source.join(INDEX)).unwrap();
    dtshard(&[&"verify", &source]).succeeded();
    fs::remove_file(source.join(file(2))).unwrap();
    for source in [&source, &source.join(variant)] {
        refused(&env, source, "missing");
    }
    fs::rename(source.join(file(1)), source.join("renamed.safetensors")).unwrap();
    let map = r#"{"weight_map":{"a":"renamed.safetensors","b":"more.safetensors"}}"#;
    fs::write(source.join(variant), map).unwrap();
    refused(&env, &source.join("renamed.safetensors"), "usage");
}

/// Converting the index of a folder gives the same files as converting the folder.
#[test]
fn index_stands_for_its_folder() {
    let (env, source) = set();
    edit_index(&source, |index| {
        for file in index["weight_map"].as_object_mut().unwrap().values_mut() {
            *file = json!(format!("./{}", file.as_str().unwrap()));
        }
    });
    fs::write(source.join("config.json"), "{}").unwrap();
    let of_folder = env.path("of_folder");
    dtshard(&[&"consolidate", &source, &of_folder]).succeeded();
    let of_index = env.path("of_index");
    dtshard(&[&"consolidate", &source.join(INDEX), &of_index]).succeeded();
    assert_eq!(crate::corrupt::files_of(&of_folder).len(), crate::corrupt::files_of(&of_index).len());
    assert!(of_index.join("config.json").is_file());
    dtshard(&[&"verify", &of_folder, &of_index]).succeeded();
}

#[test]
fn hub_cache_is_refused_with_the_place_of_its_snapshots() {
    let env = TestEnv::new();
    for folder in ["blobs", "refs", "snapshots/abc"] {
        fs::create_dir_all(env.path("models--a--b").join(folder)).unwrap();
    }
    dtshard(&[&"inspect", &env.path("models--a--b")]).refused(&["snapshots"]);
}

#[test]
fn link_to_one_file_of_a_set_is_refused() {
    let (env, source) = set();
    let link = env.path("weights.safetensors");
    std::os::unix::fs::symlink(source.join(file(1)), &link).unwrap();
    refused(&env, &link, "usage");
    // A folder with such a link is no whole checkpoint either.
    fs::create_dir(env.path("linked")).unwrap();
    std::os::unix::fs::symlink(source.join(file(1)), env.path("linked/model.safetensors")).unwrap();
    refused(&env, &env.path("linked"), "usage");
    // A hub cache has the name on the link, and a digest on the file.
    let blob = env.path("5d41402abc4b2a76b9719d911017c592");
    fs::rename(source.join(file(1)), &blob).unwrap();
    std::os::unix::fs::symlink(&blob, source.join(file(1))).unwrap();
    dtshard(&[&"verify", &source]).succeeded();
    refused(&env, &source.join(file(1)), "usage");
}

#[test]
fn total_from_a_file_name_may_be_any_number() {
    let (env, source) = set();
    for name in [INDEX.to_owned(), file(2), file(3)] {
        fs::remove_file(source.join(name)).unwrap();
    }
    fs::rename(source.join(file(1)), source.join("model-1-of-4294967295.safetensors")).unwrap();
    refused(&env, &source, "missing");
    refused(&env, &source.join("model-1-of-4294967295.safetensors"), "usage");
}

#[test]
fn file_that_the_index_names_is_missing() {
    let (env, source) = set();
    fs::remove_file(source.join(file(2))).unwrap();
    refused(&env, &source, "missing");
    refused(&env, &source.join(INDEX), "missing");
    let shown = [1, 3].map(|number| tensors_in(&source.join(file(number)))).iter().sum();
    inspected(&source, shown, &[&file(2)]);
}

#[test]
fn tensor_that_the_index_names_is_missing() {
    let (env, source) = set();
    let tensors = tensors_in(&source);
    edit_index(&source, |index| index["weight_map"]["model.lost.weight"] = json!(file(2)));
    refused(&env, &source, "malformed");
    inspected(&source, tensors, &["model.lost.weight"]);
}

#[test]
fn tensor_that_the_index_does_not_name_is_refused() {
    let (env, source) = set();
    let tensors = tensors_in(&source);
    let mut name = String::new();
    edit_index(&source, |index| {
        let map = index["weight_map"].as_object_mut().unwrap();
        name = map.keys().next().unwrap().clone();
        map.remove(&name);
    });
    refused(&env, &source, "malformed");
    inspected(&source, tensors, &[]);
}

#[test]
fn files_of_a_set_that_the_index_does_not_name_are_refused() {
    let (env, source) = set();
    let tensors = tensors_in(&source);
    let left = "model-00001-of-00005.safetensors";
    fs::copy(source.join(file(1)), source.join(left)).unwrap();
    refused(&env, &source, "malformed");
    inspected(&source, tensors, &[left]);
}

#[test]
fn empty_index_beside_tensors_is_refused() {
    let (env, source) = set();
    edit_index(&source, |index| index["weight_map"] = json!({}));
    refused(&env, &source, "malformed");
    inspected(&source, 0, &[&file(1), &file(2), &file(3)]);
}

#[test]
fn other_files_and_sizes_beside_an_index_are_warned_of() {
    let (env, source) = set();
    assert_eq!(warnings(&source).matches(INDEX).count(), 0);
    env.copy("safetensors/single/model.safetensors");
    fs::rename(env.path("src/model.safetensors"), source.join("consolidated.safetensors")).unwrap();
    assert!(warnings(&source).contains("consolidated.safetensors"));
    // Nor is another set read in the place of the one that loaders take.
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
    dtshard(&[&"verify", &source]).succeeded();
    // An index that never named a file of the numbers in their names.
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

fn bin(number: u32) -> String {
    format!("pytorch_model-0000{number}-of-00003.bin")
}

/// Three torch files of one tensor each, `t1` to `t3`, and their index.
fn torch_set() -> (TestEnv, PathBuf) {
    let env = TestEnv::new();
    let mut map = json!({});
    for number in 1..=3 {
        env.write(&format!("src/{}", bin(number)), torch_bytes(&format!("t{number}")));
        map[format!("t{number}")] = json!(bin(number));
    }
    let index = json!({"metadata": {"total_size": 24}, "weight_map": map});
    env.write(&format!("src/{TORCH_INDEX}"), index.to_string());
    let source = env.path("src");
    (env, source)
}

#[test]
fn one_file_of_a_torch_set_is_refused() {
    let (env, source) = torch_set();
    dtshard(&[&"verify", &source]).succeeded();
    refused(&env, &source.join(bin(1)), "usage");
    inspected(&source.join(bin(1)), 1, &[&bin(2), &bin(3)]);
    for name in [TORCH_INDEX.to_owned(), bin(2), bin(3)] {
        fs::remove_file(source.join(name)).unwrap();
    }
    refused(&env, &source.join(bin(1)), "usage");
    refused(&env, &source, "missing");
    inspected(&source, 1, &[&bin(2), &bin(3)]);
}

#[test]
fn torch_index_must_fit_its_files() {
    let (env, source) = torch_set();
    let rewrite = |map: Json| {
        let index = json!({"metadata": {"total_size": 24}, "weight_map": map});
        fs::write(source.join(TORCH_INDEX), index.to_string()).unwrap();
    };
    rewrite(json!({"t1": bin(1), "t2": bin(2), "t3": bin(3), "lost": bin(3)}));
    refused(&env, &source, "malformed");
    inspected(&source, 3, &["lost"]);
    rewrite(json!({"t1": bin(1), "t2": bin(2), "t3": bin(2)}));
    refused(&env, &source, "malformed");
    rewrite(json!({"t1": bin(1), "t2": bin(2)}));
    refused(&env, &source, "malformed");
    inspected(&source, 2, &[&bin(3)]);
    rewrite(json!({}));
    refused(&env, &source, "malformed");
    inspected(&source, 0, &[&bin(1), &bin(2), &bin(3)]);
    rewrite(json!({"t1": bin(2), "t2": bin(1), "t3": bin(3)}));
    refused(&env, &source, "malformed");
    rewrite(json!({"t1": bin(1), "t2": bin(2), "t3": bin(3)}));
    fs::remove_file(source.join(bin(2))).unwrap();
    refused(&env, &source, "missing");
    inspected(&source, 2, &[&bin(2)]);
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
        refused(&env, &path, "unsupported");
        inspected(&path, 1, &[]);
        fs::remove_file(path).unwrap();
    }
    let [first, second] = [0, 1].map(|rank| format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"));
    let path = env.write(&format!("global_step10/{first}"), torch_bytes("w"));
    env.write(&format!("global_step10/{second}"), torch_bytes("w"));
    inspected(&path, 1, &[&second]);
}

#[test]
fn file_or_folder_of_one_megatron_rank_is_refused() {
    let env = TestEnv::new();
    for folder in ["mp_rank_00", "mp_rank_00_000", "mp_rank_01_000_001"] {
        for name in ["model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt"] {
            let path = env.write(&format!("iter_0000100/{folder}/{name}"), torch_bytes("w"));
            refused(&env, &path, "unsupported");
            inspected(&path, 1, &[]);
            let folder = path.parent().unwrap().to_path_buf();
            refused(&env, &folder, "unsupported");
            fs::remove_dir_all(folder).unwrap();
        }
    }
    let path = env.write("iter_0000100/mp_rank_00/model_optim_rng.pt", torch_bytes("w"));
    env.write("iter_0000100/mp_rank_01/model_optim_rng.pt", torch_bytes("w"));
    inspected(&path, 1, &["mp_rank_01"]);
    // The name of the file says it, too.
    let path = env.write("copied/model_optim_rng.pt", torch_bytes("w"));
    refused(&env, &path, "unsupported");
}

// ------------------------------------------------------------------------------------------------------------ dcp-hf

#[test]
fn shard_of_one_file_of_a_rank_is_missing() {
    let env = TestEnv::new();
    let source = env.copy("dcp_hf/mapped");
    let lost = "shard-00003-model-00002-of-00002.safetensors";
    fs::remove_file(source.join(lost)).unwrap();
    refused(&env, &source, "missing");
    let run = dtshard(&[&"inspect", &source, &"--json"]);
    assert_eq!(json_of(&run.succeeded().out)["missing"], json!([lost]));
    let allowed = dtshard(&[&"inspect", &source, &"--allow-missing", &"--json"]);
    allowed.succeeded().says(&["warning", lost]);
}
