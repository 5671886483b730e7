//! Tests of the `local` format: plain tensors of each rank, and a document that describes the complete tensors.
//!
//! Tested in other modules:
//!
//! - Valid and invalid documents: `format::local::tests`; damaged files: `bad_input::local`.
//! - Each rank's tensors equal those of PyTorch's `to_local`, and `from_local` combines them: `tests/interop/test_local.py`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::{Value as Json, json};

use crate::common::env::TestEnv;
use crate::common::{CASES, Kind, Tensors, assert_same, case, fixture, inspect, read, read_safetensors, succeed};
use crate::contract::{assert_contains, contents, names_below};

fn layout(folder: &Path) -> Json {
    serde_json::from_slice(&fs::read(folder.join("layout.json")).unwrap()).unwrap()
}

fn rank(folder: &Path, rank: u32) -> Tensors {
    read_safetensors(&folder.join(format!("rank-{rank:05}.safetensors")))
}

/// Returns the output of `inspect` without the positions of bytes in files.
fn document_without_locations(path: &Path) -> Json {
    let mut document = inspect(path, "--digest");
    for tensor in document["tensors"].as_object_mut().unwrap().values_mut() {
        tensor["chunks"].as_array_mut().unwrap().iter_mut().for_each(|chunk| chunk["file"] = Json::Null);
    }
    for key in ["format", "series"] {
        document[key] = Json::Null;
    }
    document
}

#[test]
fn local_output_is_one_safetensors_file_per_rank_and_layout_json() {
    let env = TestEnv::new();
    let made = env.make("reshard", "fsdp4/ranks", "out", "--to local --mesh dp=2,tp=2 --placements S(0),S(1)");
    assert_eq!(
        names_below(&made.path),
        [
            "layout.json",
            "rank-00000.safetensors",
            "rank-00001.safetensors",
            "rank-00002.safetensors",
            "rank-00003.safetensors"
        ]
    );
    let document = layout(&made.path);
    assert_eq!(document["version"], 1);
    assert_eq!(document["world_size"], 4);
    assert_eq!(document["meshes"], json!([{"dims": [["dp", 2], ["tp", 2]]}]));
    let embed = json!({"dtype": "f32", "shape": [10, 3], "class": "dtensor", "mesh": 0, "placements": "S(0),S(1)"});
    assert_eq!(document["tensors"]["model.embed.weight"], embed);
    assert_eq!(document["tensors"]["model.freqs"], json!({"dtype": "f32", "shape": [4]}));
    // The document has one line for each tensor, so that diff and grep are useful.
    let text = fs::read_to_string(made.path.join("layout.json")).unwrap();
    let lines = text.lines().filter(|line| line.trim_start().starts_with("\"model.embed.weight\": {\"dtype\""));
    assert_eq!(lines.count(), 1);
    let found = inspect(&made.path, "");
    assert_eq!((&found["format"], &found["mesh"]), (&json!("local"), &json!([["dp", 2], ["tp", 2]])));
    // The file of every rank has every key. Plain tensors are complete in every file.
    let shapes = |number| {
        let tensors = rank(&made.path, number);
        [tensors["model.embed.weight"].shape.clone(), tensors["model.freqs"].shape.clone()]
    };
    assert_eq!([0, 1, 2, 3].map(shapes), [[5, 2], [5, 1], [5, 2], [5, 1]].map(|embed| [embed.to_vec(), vec![4]]));
    let keys = |number| rank(&made.path, number).into_keys().collect::<Vec<_>>();
    assert!((1..4).all(|number| keys(number) == keys(0)));
}

#[test]
fn rank_files_converted_to_local_and_back_are_identical() {
    for name in CASES {
        for source in case(name).into_iter().filter(|source| source.kind == Kind::Ranks) {
            let env = TestEnv::new();
            let has_own_mesh = !["odd4", "replicated_plain"].contains(&name);
            let mesh = if has_own_mesh { "" } else { "--mesh dp=4" };
            let direct = env.make("reshard", &source.path, "direct", &format!("--to torch-ranks {mesh}"));
            let local = env.make("reshard", &source.path, "local", &format!("--to local {mesh}"));
            assert_eq!(document_without_locations(&local.path), document_without_locations(&direct.path), "{name}");
            let back = env.make("reshard", &local.path, "back", &format!("--to torch-ranks {mesh}"));
            assert!(contents(&direct.path) == contents(&back.path), "{name}");
            let again = env.make("reshard", &back.path, "again", &format!("--to local {mesh}"));
            assert!(contents(&local.path) == contents(&again.path), "{name}");
            succeed("verify", &[&source.path, &local.path], "");
        }
    }
}

#[test]
fn trainer_folders_converted_to_local_and_back_are_identical() {
    let env = TestEnv::new();
    let actor = fixture("verl/global_step_10/actor");
    let direct = env.make("reshard", &actor, "direct", "");
    let local = env.make("reshard", &actor, "local", "--to local");
    let back = env.make("reshard", &local.path, "back", "--to torch-ranks");
    assert!(contents(&direct.path) == contents(&back.path));
    // Values that differ between ranks are in the files of their ranks.
    assert!(names_below(&local.path).contains(&String::from("huggingface")));
    let titan = env.make("reshard", "titan", "titan", "--to local --mesh dp=2,tp=2 --placements S(0),R");
    assert_same(&titan.tensors(), &read(&fixture("titan")), "titan");
}

#[test]
fn random_state_is_kept_for_each_rank() {
    let env = TestEnv::new();
    let actor = fixture("verl/global_step_10/actor");
    let local = env.make("reshard", &actor, "local", "--to local");
    let key = "extra_state.rng.cpu";
    let states = |folder: &Path, ranks| -> Vec<String> {
        (0..ranks).map(|number| rank(folder, number).remove(key).unwrap().digest).collect()
    };
    let own = states(&local.path, 4);
    assert_eq!(own.iter().collect::<BTreeSet<_>>().len(), 4);
    assert_contains(&local.run.stderr, &["so each rank keeps its own value"]);
    // Objects are kept for each rank as well.
    let text = fs::read_to_string(local.path.join("layout.json")).unwrap();
    assert_contains(&text, &["\"numpy\": {\n          \"$ranks\""]);
    // If the target has more ranks than the source, rank `r` of the additional ranks gets the state of rank `r mod 4`.
    let more = env.make("reshard", &local.path, "more", "--mesh fsdp=6");
    assert_eq!(states(&more.path, 6), [&own[..], &own[..2]].concat());
    let direct = env.make("reshard", &actor, "direct", "--mesh fsdp=6");
    let back = env.make("reshard", &more.path, "back", "--to torch-ranks");
    assert_eq!(document_without_locations(&direct.path), document_without_locations(&back.path));
}

#[test]
fn local_files_are_resharded_between_all_meshes() {
    let env = TestEnv::new();
    let expected = read(&fixture("fsdp_tp/ranks"));
    let first = env.make("reshard", "fsdp_tp/ranks", "first", "--to local").path;
    let mut last = first.clone();
    let targets = [
        "--mesh dp=3",
        "--mesh dp=7 --placements S(-1)",
        "--mesh rep=2,dp=3 --placements R,S(0)",
        "--mesh dp=2,tp=3 --placements _S(0,3),S(0)",
        "--mesh tp=1",
        "--mesh a=2,b=2 --placements S(1),S(0)",
        "--mesh a=2,b=2 --placements S(0),R --mesh-ranks 3,0,2,1",
    ];
    for (index, options) in (1..).zip(targets) {
        let made = env.make("reshard", &last, &index.to_string(), options);
        assert_same(&made.tensors(), &expected, options);
        let (direct, again) = (format!("direct {index}"), format!("again {index}"));
        let direct = env.make("reshard", "fsdp_tp/ranks", &direct, &format!("--to local {options}"));
        let again = env.make("reshard", &first, &again, options);
        assert!(contents(&direct.path) == contents(&again.path), "{options}");
        last = made.path;
    }
    let dcp = env.make("reshard", &last, "dcp", "--to dcp");
    let named = case("fsdp_tp").into_iter().find(|source| source.kind == Kind::Ranks).unwrap().named();
    assert_same(&dcp.tensors(), &named, "dcp");
    let whole = env.make("unshard", &last, "whole.pt", "");
    assert_same(&whole.tensors(), &expected, "whole");
    let shipped = env.make("consolidate", &last, "shipped", "");
    assert_same(&read_safetensors(&shipped.path), &crate::common::below("model.", &expected), "shipped");
}

#[test]
fn ranks_outside_the_mesh_have_no_shards() {
    let env = TestEnv::new();
    let made = env.make("reshard", "fsdp4/ranks", "out", "--to local --mesh dp=2 --mesh-ranks 3,1");
    assert_eq!(layout(&made.path)["meshes"], json!([{"dims": [["dp", 2]], "ranks": [3, 1]}]));
    assert_eq!(
        rank(&made.path, 0).into_keys().filter(|name| name.starts_with("model.")).collect::<Vec<_>>(),
        ["model.freqs", "model.seen"]
    );
    assert_eq!(rank(&made.path, 3)["model.embed.weight"].shape, [5, 3]);
    assert_same(&made.tensors(), &read(&fixture("fsdp4/ranks")), "two of four");
    let again = env.make("reshard", &made.path, "again", "");
    assert!(contents(&made.path) == contents(&again.path));
}

#[test]
fn empty_shards_are_written() {
    let env = TestEnv::new();
    let made = env.make("reshard", "fsdp4/ranks", "out", "--to local --mesh dp=7");
    let shapes: Vec<_> = (0..7).map(|number| rank(&made.path, number)["model.embed.weight"].shape[0]).collect();
    assert_eq!(shapes, [2, 2, 2, 2, 2, 0, 0]);
    assert_same(&made.tensors(), &read(&fixture("fsdp4/ranks")), "seven");
}

#[test]
fn balanced_splits_are_kept() {
    let env = TestEnv::new();
    let made = env.make("reshard", "fsdp4/ranks", "out", "--to local --mesh dp=4 --split balanced");
    let embed = &layout(&made.path)["tensors"]["model.embed.weight"];
    assert_eq!((&embed["class"], &embed["splits"]), (&json!("dtensor"), &json!(["balanced"])));
    let shapes: Vec<_> = (0..4).map(|number| rank(&made.path, number)["model.embed.weight"].shape[0]).collect();
    assert_eq!(shapes, [3, 3, 2, 2]);
    assert_same(&made.tensors(), &read(&fixture("fsdp4/ranks")), "balanced");
    let again = env.make("reshard", &made.path, "again", "");
    assert!(contents(&made.path) == contents(&again.path));
    env.refuse("reshard", &made.path, "x", "--to torch-ranks");
    let plain = env.make("reshard", &made.path, "plain", "--to torch-ranks --split chunk");
    assert_same(&plain.tensors(), &read(&fixture("fsdp4/ranks")), "chunks");
}

#[test]
fn partial_values_are_kept_and_reduced() {
    let env = TestEnv::new();
    let local = env.make("reshard", "partial2/ranks", "local", "--to local");
    assert_eq!(layout(&local.path)["tensors"]["avg.f32"]["placements"], "P(avg)");
    assert_ne!(rank(&local.path, 0)["sum.f32"].digest, rank(&local.path, 1)["sum.f32"].digest);
    let direct = env.make("reshard", "partial2/ranks", "direct", "");
    let back = env.make("reshard", &local.path, "back", "--to torch-ranks");
    assert!(contents(&direct.path) == contents(&back.path));
    let (whole, truth) =
        (env.make("unshard", &local.path, "a.pt", ""), env.make("unshard", "partial2/ranks", "b.pt", ""));
    assert_same(&whole.tensors(), &truth.tensors(), "reduced");
}

#[test]
fn tied_tensors_are_written_under_both_names_and_stay_tied() {
    let env = TestEnv::new();
    let made = env.make("reshard", "torch_file/model.pt", "out", "--to local --mesh dp=2 --exclude dtype.c*");
    let document = layout(&made.path);
    let ties: BTreeMap<&String, &Json> = document["tensors"]
        .as_object()
        .unwrap()
        .iter()
        .filter_map(|(name, tensor)| Some((name, tensor.get("tied_to")?)))
        .collect();
    assert!(!ties.is_empty());
    for (alias, kept) in ties {
        let tensors = rank(&made.path, 1);
        assert_eq!(tensors[alias], tensors[kept.as_str().unwrap()], "{alias}");
    }
    let back = env.make("unshard", &made.path, "a.pt", "");
    let direct = env.make("unshard", "torch_file/model.pt", "b.pt", "--exclude dtype.c*");
    assert_same(&back.tensors(), &direct.tensors(), "tied");
    assert_eq!(fs::metadata(back.path).unwrap().len(), fs::metadata(direct.path).unwrap().len());
}

#[test]
fn objects_and_tensor_classes_are_kept() {
    let env = TestEnv::new();
    let made = env.make("reshard", "torch_file/objects.pt", "out", "--to local --mesh dp=2");
    succeed("verify", &[&fixture("torch_file/objects.pt"), &made.path], "");
    let of = |options: &str, name: &str| {
        let made = env.make("reshard", "fsdp4/ranks", name, &format!("--to local {options}"));
        layout(&made.path)["tensors"]["model.embed.weight"]["class"].clone()
    };
    assert_eq!(of("--tensor-class local", "a"), "tensor");
    assert_eq!(of("--tensor-class sharded-tensor", "b"), "sharded-tensor");
    assert_eq!(of("", "c"), "dtensor");
}

#[test]
fn tensors_that_safetensors_cannot_hold_are_refused() {
    let env = TestEnv::new();
    env.refuse("reshard", "torch_file/model.pt", "x", "--to local --mesh dp=2");
    env.refuse("reshard", "fsdp4/ranks", "x", "--to local --max-memory 34MB --mesh dp=100000");
    env.refuse("unshard", "fsdp4/ranks", "x", "--to local");
}

#[test]
fn single_rank_file_is_refused_and_folder_without_document_needs_src_mesh() {
    let env = TestEnv::new();
    let made = env.make("reshard", "fsdp4/ranks", "run/step-1/local", "--to local --mesh dp=2 --include model.embed");
    let one = made.path.join("rank-00001.safetensors");
    env.refuse("unshard", &one, "x.pt", "");
    succeed("verify", &[&made.path, &made.path], "--from local");
    // Without the document the layout is unknown.
    fs::rename(made.path.join("layout.json"), env.path("layout.json")).unwrap();
    env.refuse("unshard", &made.path, "x.pt", "");
    let declared = env.make("unshard", &made.path, "declared.pt", "--src-mesh dp=2 --src-placements S(0)");
    assert_same(
        &declared.tensors(),
        &read(&fixture("fsdp4/ranks")).into_iter().filter(|(name, _)| name == "model.embed.weight").collect(),
        "declared",
    );
    fs::rename(env.path("layout.json"), made.path.join("layout.json")).unwrap();
    env.refuse("unshard", &made.path, "x.pt", "--src-mesh dp=2 --src-placements S(0)");
}

#[test]
fn missing_rank_is_an_error_unless_replicas_cover_it() {
    let env = TestEnv::new();
    let made = env.make("reshard", "fsdp4/ranks", "out", "--to local --mesh rep=2,dp=2 --placements R,S(0)");
    fs::remove_file(made.path.join("rank-00001.safetensors")).unwrap();
    env.refuse("unshard", &made.path, "x.pt", "");
    let whole = env.make("unshard", &made.path, "whole.pt", "--allow-missing --series all");
    assert_same(&whole.tensors(), &read(&fixture("fsdp4/ranks")), "without one");
    assert_contains(&whole.run.stderr, &["read without rank 1"]);
    fs::remove_file(made.path.join("rank-00003.safetensors")).unwrap();
    let run = env.refuse("unshard", &made.path, "x.pt", "");
    assert!(!run.stderr.contains("--allow-missing"));
    env.refuse("unshard", &made.path, "x.pt", "--allow-missing");
}
