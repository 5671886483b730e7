//! Checkpoints that the package torch_checkpointing wrote (`tests/fixtures/trainers/torch_checkpointing*`): every verb
//! gives the values of the truth, and `metadata.pkl` alone decides how tensors in safetensors files are sharded.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use serde_json::{Value as Json, json};
use torch_pickle::pickle::Writer;

use crate::common::corrupt::{dtshard, edit, replace};
use crate::common::env::TestEnv;
use crate::common::{Truth, assert_same, below, fixture, read_safetensors, succeed};

const CHECKPOINTS: [&str; 2] = ["torch_checkpointing", "torch_checkpointing_tp"];

fn truth(name: &str) -> Truth {
    Truth::load(&format!("trainers/{name}.truth"))
}

/// Returns the tensors of the truth that the files contain: the second checkpoint has no item for the optimizer.
fn stored(name: &str) -> crate::common::Tensors {
    let mut tensors = truth(name).tensors;
    let has_optimizer = name == "torch_checkpointing";
    tensors.retain(|name, _| name.starts_with("model.") || has_optimizer && name.starts_with("optimizer."));
    tensors
}

#[test]
fn each_checkpoint_consolidates_to_its_truth() {
    let env = TestEnv::new();
    for name in CHECKPOINTS {
        // The folder above the checkpoint is found, too.
        let source = fixture(&format!("trainers/{name}"));
        let made = env.make("consolidate", &source, &format!("{name}_model"), "--assets none --verify");
        assert_same(&read_safetensors(&made.path), &below("model.", &truth(name).tensors), name);
        let options = "--series all --everything --assets none";
        let made = env.make("consolidate", &source, &format!("{name}_all"), options);
        assert_same(&read_safetensors(&made.path), &stored(name), name);
    }
}

#[test]
fn resharded_checkpoints_consolidate_to_their_truth() {
    let env = TestEnv::new();
    for name in CHECKPOINTS {
        let source = fixture(&format!("trainers/{name}/step-30"));
        for (to, series) in [("dcp", ""), ("torch-ranks", "--series all"), ("local", "")] {
            let options = format!("--mesh dp=3 --to {to} --verify");
            let made = env.make("reshard", &source, &format!("{name}_{to}"), &options);
            succeed("verify", &[&source, &made.path], "");
            let options = format!("{series} --everything --assets none");
            let whole = env.make("consolidate", &made.path, &format!("{name}_{to}_whole"), &options);
            assert_same(&read_safetensors(&whole.path), &stored(name), to);
        }
        // Without --mesh, the checkpoint keeps its mesh.
        let made = env.make("reshard", &source, &format!("{name}_own"), "--to torch-ranks");
        succeed("verify", &[&source, &made.path], "");
    }
}

#[test]
fn written_checkpoints_are_read_again() {
    let env = TestEnv::new();
    let sources = [
        "trainers/torch_checkpointing/step-30",
        "trainers/torch_checkpointing_tp/step-30",
        "fsdp_tp/ranks",
        "fsdp4/dcp",
    ];
    for (number, source) in sources.iter().enumerate() {
        let source = fixture(source);
        for (mesh, release) in [("dp=3", ""), ("dp=2,tp=2", "--placements S(0),R"), ("dp=2", "--torch-version 2.9")] {
            let name = format!("{number}_{mesh}_{}", release.len());
            let options = format!("--mesh {mesh} {release} --to torch-checkpointing --verify");
            let made = env.make("reshard", &source, &name, &options);
            succeed("verify", &[&source, &made.path], "");
            assert!(made.path.join("model_0.pt").exists() && made.path.join("metadata.pkl").exists());
        }
    }
    // The format and the mesh of SRC are kept without options.
    let source = fixture("trainers/torch_checkpointing_tp/step-30");
    let made = env.make("reshard", &source, "own", "");
    succeed("verify", &[&source, &made.path], "");
    succeed("reshard", &[&source, &made.path], "--overwrite");
}

/// An item is a key of the state dict, also if the checkpoint has no other item.
#[test]
fn checkpoint_with_one_item_keeps_its_key() {
    let env = TestEnv::new();
    // A state dict with the only key `model`, and one folder for each of `model` and `optimizer`.
    for (name, options) in [("fabric", "--exclude optimizer"), ("accelerate_fsdp1", "")] {
        let source = fixture(&format!("trainers/{name}"));
        let to = format!("--mesh dp=2 {options} --to torch-checkpointing --verify");
        let made = env.make("reshard", &source, name, &to);
        succeed("verify", &[&source, &made.path], options);
        let dcp = env.make("reshard", &made.path, &format!("{name}_dcp"), "--to dcp");
        succeed("verify", &[&source, &dcp.path], options);
        let model = env.make("consolidate", &made.path, &format!("{name}_model"), "--assets none");
        assert_same(&read_safetensors(&model.path), &below("model.", &truth(name).tensors), name);
    }
    // The keys of this state dict are no names of items, so dtshard adds an item.
    let flat = env.make("reshard", "trainers/fabric", "flat", "--root model --mesh dp=2 --to torch-checkpointing");
    assert!(flat.path.join("model_0.pt").exists());
    succeed("verify", &[&fixture("trainers/fabric"), &flat.path], "--root model");
    succeed("verify", &[&flat.path, &env.make("reshard", &flat.path, "again", "--mesh dp=3").path], "");
    let inspected = dtshard(&[&"inspect", &flat.path]);
    assert!(inspected.out.contains("\n0.weight "), "{inspected:?}");
    // The package writes no such record: its items are always keys.
    let made = Made::new();
    made.write(&Made::metadata());
    let inspected = dtshard(&[&"inspect", &made.folder]);
    assert!(inspected.out.contains("\nmodel.a.w "), "{inspected:?}");
}

/// `torch.load` in `FakeTensorMode` computes the offsets of storages from the order of their keys in the pickle, and the
/// first key must be 0.
#[test]
fn storages_are_in_the_order_of_the_pickle() {
    let env = TestEnv::new();
    let made = env.make("reshard", "fsdp_tp/ranks", "made", "--to torch-checkpointing");
    for rank in 0..4 {
        let bytes = fs::read(made.path.join(format!("model_{rank}.pt"))).unwrap();
        let mut at = 0;
        for key in 0.. {
            let name = format!("archive/data/{key}");
            let Some(found) = crate::common::corrupt::find(&bytes[at..], name.as_bytes()) else {
                assert!(key > 10, "{key} storages");
                break;
            };
            at += found;
        }
    }
}

#[test]
fn tensors_that_the_format_does_not_store_are_refused() {
    let env = TestEnv::new();
    let to = "--mesh dp=2 --to torch-checkpointing";
    env.refuse("reshard", "fsdp4/dcp", "out", &format!("{to} --tensor-class local"));
    env.refuse("reshard", "fsdp4/dcp", "out", &format!("{to} --tensor-class sharded-tensor"));
    let snapshot = "trainers/torchsnapshot/snapshot";
    env.refuse("reshard", snapshot, "out", &format!("{to} --on-conflict per-rank"));
    env.make("reshard", snapshot, "dropped", &format!("{to} --on-conflict drop"));
    env.refuse("consolidate", "fsdp4/dcp", "out", "--to torch-checkpointing");
}

#[test]
fn sound_checkpoints_are_verified() {
    for name in CHECKPOINTS {
        succeed("verify", &[&fixture(&format!("trainers/{name}/step-30"))], "");
    }
}

#[test]
fn one_file_of_a_checkpoint_is_refused() {
    let env = TestEnv::new();
    for name in CHECKPOINTS {
        let folder = env.copy(&format!("trainers/{name}/step-30"));
        for entry in fs::read_dir(&folder).unwrap() {
            let file = entry.unwrap().path();
            dtshard(&[&"consolidate", &file, &env.path("out"), &"--no-sync"]).assert_refused(&["give the folder"]);
            dtshard(&[&"inspect", &file]).assert_no_crash();
        }
        fs::remove_dir_all(folder).unwrap();
    }
    // Only the metadata states that the file has the parts of one rank.
    let folder = env.copy("trainers/torch_checkpointing_tp/step-30");
    for len in [300, 0] {
        fs::File::options().write(true).open(folder.join("metadata.pkl")).unwrap().set_len(len).unwrap();
        dtshard(&[&"consolidate", &folder.join("model_0.safetensors"), &env.path("out"), &"--no-sync"])
            .assert_refused(&["metadata.pkl", "`model_0.safetensors` has the name of one rank's file"]);
    }
    // A link to such a file is refused as well.
    let target = fixture("trainers/torch_checkpointing_tp/step-30/model_0.safetensors");
    let link = env.path("whole.safetensors");
    std::os::unix::fs::symlink(target, &link).unwrap();
    dtshard(&[&"consolidate", &link, &env.path("out"), &"--no-sync"])
        .assert_refused(&["the checkpoint item `model` has 4 files"]);
}

#[test]
fn missing_files_are_errors() {
    let env = TestEnv::new();
    let folder = env.copy("trainers/torch_checkpointing_tp/step-30");
    fs::remove_file(folder.join("model_2.safetensors")).unwrap();
    env.refuse("consolidate", &folder, "out", "");
    env.refuse("consolidate", &folder, "out", "--allow-missing");
    env.refuse("reshard", &folder, "out", "--mesh dp=2");
    succeed("inspect", &[&folder], "");
    fs::remove_dir_all(&folder).unwrap();
    let folder = env.copy("trainers/torch_checkpointing_tp/step-30");
    fs::remove_file(folder.join("progress_2.pt")).unwrap();
    env.refuse("reshard", &folder, "out", "--mesh dp=2");
    env.make("consolidate", &folder, "model", "--assets none");
    env.make("reshard", &folder, "rest", "--mesh dp=2 --allow-missing");
    for rank in [1, 3] {
        fs::remove_file(folder.join(format!("progress_{rank}.pt"))).unwrap();
    }
    let one = env.make("reshard", &folder, "one", "--mesh dp=2");
    assert!(one.run.stderr.contains("only rank 0 has a file of the checkpoint item `progress`"), "{}", one.run.stderr);
    fs::remove_dir_all(&folder).unwrap();
    // Without metadata, nothing records how the tensors are sharded.
    let folder = env.copy("trainers/torch_checkpointing_tp/step-30");
    fs::remove_file(folder.join("metadata.pkl")).unwrap();
    env.refuse("consolidate", &folder, "out", "");
}

#[test]
fn changed_metadata_of_a_fixture_is_refused() {
    let env = TestEnv::new();
    let folder = env.copy("trainers/torch_checkpointing_tp/step-30");
    let metadata = folder.join("metadata.pkl");
    let original = fs::read(&metadata).unwrap();
    for (from, to) in [
        ("model_0.safetensors", "../x/y/.safetensors"),
        ("model_0.safetensors", "model_1.safetensors"),
        ("torch.float32", "torch.float33"),
        ("torch.float32", "torch.bfloat1"),
        ("StridedShard", "StridedShare"),
        ("global_shape", "global_shapf"),
        ("mesh_data", "mesh_datb"),
        ("DTensorShardingMetadata", "DTensorShardingMetadatb"),
        ("SafetensorsSerialization", "SafetensorsSerializatioo"),
        ("[\"embed.weight\"]", "[\"embed.weighs\"]"),
        ("[\"embed.weight\"]", "(\"embed.weight\")"),
        ("2.0", "9.9"),
        ("K\u{b}K\u{5}", "K\u{c}K\u{5}"),
        ("rank_to_layout_info", "rank_to_layout_inf_"),
    ] {
        fs::write(&metadata, &original).unwrap();
        edit(&metadata, |bytes| replace(bytes, from.as_bytes(), to.as_bytes()));
        dtshard(&[&"unshard", &folder, &env.path("out.pt")]).assert_refused(&[]);
        assert!(!env.path("out.pt").exists());
        dtshard(&[&"inspect", &folder]).assert_no_crash();
    }
}

/// On the mesh dp=2,tp=2, the placements `_S(0,2),S(0)` mean that tp splits the rows first. No later mesh dim splits them into
/// 3 or 7 parts.
#[test]
fn split_factor_that_no_mesh_dim_explains_is_refused() {
    let env = TestEnv::new();
    let folder = env.copy("trainers/torch_checkpointing_tp/step-30");
    let metadata = folder.join("metadata.pkl");
    let original = fs::read(&metadata).unwrap();
    let first = b"split_factor";
    let at = crate::common::corrupt::find(&original, first).unwrap() + first.len();
    let number = at + original[at..].iter().position(|byte| *byte == b'K').unwrap() + 1;
    assert_eq!(original[number], 2);
    for value in [3, 7] {
        let mut changed = original.clone();
        changed[number] = value;
        fs::write(&metadata, changed).unwrap();
        let refused = dtshard(&[&"unshard", &folder, &env.path("out.pt")]);
        refused.assert_refused(&["model.embed.weight", "a split factor that is", "such as _S(0,2)", "on mesh dim 0"]);
        assert_eq!(dtshard(&[&"verify", &folder]).code, Some(1));
    }
    // A checkpoint that could not be read again is not written.
    let strided = |factor| format!("--mesh dp=2,tp=2 --placements _S(0,{factor}),S(0) --to torch-checkpointing");
    env.refuse("reshard", "fsdp4/dcp", "strange", &strided(3));
    let made = env.make("reshard", "fsdp4/dcp", "usual", &strided(2));
    succeed("verify", &[&fixture("fsdp4/dcp"), &made.path], "");
}

// ------------------------------------------------------------------------------------------------- metadata of the tests

/// Returns the pickle of JSON.
fn pickled(json: &Json) -> Vec<u8> {
    fn write(writer: &mut Writer, json: &Json) {
        match json {
            Json::Null => _ = writer.none(),
            Json::String(text) => _ = writer.string(text),
            Json::Number(number) => match number.as_i64() {
                Some(number) => _ = writer.int(number),
                None => _ = writer.uint(number.as_u64().unwrap()),
            },
            Json::Array(items) => {
                writer.empty_list().mark();
                items.iter().for_each(|item| write(writer, item));
                writer.appends();
            }
            Json::Object(entries) => {
                writer.empty_dict().mark();
                for (key, value) in entries {
                    writer.string(key);
                    write(writer, value);
                }
                writer.setitems();
            }
            Json::Bool(_) => panic!("no bools in metadata"),
        }
    }
    let mut writer = Writer::new();
    write(&mut writer, json);
    writer.finish()
}

/// A checkpoint of two ranks: `w` of shape [4, 3] has rows 0 to 1 on rank 0, and `b` is replicated.
struct Made {
    env: TestEnv,
    folder: PathBuf,
}

fn floats(values: std::ops::Range<u16>) -> Vec<u8> {
    values.flat_map(|value| f32::from(value).to_le_bytes()).collect()
}

fn write_rank(path: &Path, tensors: &[(&str, &[usize], Vec<u8>)]) {
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| (*name, TensorView::new(safetensors::Dtype::F32, shape.to_vec(), bytes).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

impl Made {
    fn new() -> Self {
        let env = TestEnv::new();
        let folder = env.path("src");
        fs::create_dir(&folder).unwrap();
        for rank in 0..2 {
            let rows = floats(6 * rank..6 * rank + 6);
            let path = folder.join(format!("model_{rank}.safetensors"));
            write_rank(&path, &[("a.w", &[2, 3], rows), ("b", &[2], floats(100..102))]);
        }
        Self { env, folder }
    }

    fn metadata() -> Json {
        let mesh = json!({"device_type": "cpu", "mesh_shape": [2], "mesh_data": [0, 1], "mesh_dim_names": ["dp"]});
        let on_mesh = |shape: Json, placement: Json| {
            let data = json!({"global_shape": shape, "dtype": "torch.float32", "stride": [1], "mesh_spec": mesh,
                "placements": [placement]});
            json!([{"ranks": [0, 1], "sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}}])
        };
        let layout = |rank: u32| {
            json!({"file_path": format!("model_{rank}.safetensors"),
                "serialization_format": {"type": "SafetensorsSerialization"}})
        };
        json!({"version": "2.0", "world_size": 2, "metadata": {"model": {
            "nested_path_to_metadata": {
                "[\"a\",\"w\"]": on_mesh(json!([4, 3]), json!({"type": "Shard", "dim": 0})),
                "[\"b\"]": on_mesh(json!([2]), json!({"type": "Replicate"})),
            },
            "rank_to_layout_info": {"0": layout(0), "1": layout(1)},
        }}})
    }

    fn write(&self, metadata: &Json) {
        fs::write(self.folder.join("metadata.pkl"), pickled(metadata)).unwrap();
    }

    fn assert_whole(&self, metadata: &Json) {
        self.write(metadata);
        let made = self.env.path("out");
        succeed("consolidate", &[&self.folder, &made], "--assets none");
        let expected = self.env.path("expected.safetensors");
        write_rank(&expected, &[("a.w", &[4, 3], floats(0..12)), ("b", &[2], floats(100..102))]);
        assert_same(&read_safetensors(&made), &read_safetensors(&expected), "consolidated");
        fs::remove_dir_all(made).unwrap();
    }

    /// Changes one value of the metadata, and asserts that the checkpoint is refused.
    #[track_caller]
    fn refuse(&self, pointer: &str, value: Json, words: &[&str]) {
        let mut metadata = Self::metadata();
        let place = metadata.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}"));
        *place = value;
        self.write(&metadata);
        dtshard(&[&"unshard", &self.folder, &self.env.path("out.pt")]).assert_refused(words);
        let verified = dtshard(&[&"verify", &self.folder]);
        assert_ne!(verified.code, Some(0), "{verified:?}");
        dtshard(&[&"inspect", &self.folder]).assert_no_crash();
    }
}

const W: &str = "/metadata/model/nested_path_to_metadata/[\"a\",\"w\"]";

#[test]
fn metadata_of_both_versions_is_read() {
    let made = Made::new();
    let metadata = Made::metadata();
    made.assert_whole(&metadata);
    let item = &metadata["metadata"]["model"];
    let tensors = item["nested_path_to_metadata"].as_object().unwrap();
    let tensors: serde_json::Map<String, Json> =
        tensors.iter().map(|(path, groups)| (path.replacen('[', "[\"model\",", 1), groups.clone())).collect();
    let layouts = &item["rank_to_layout_info"];
    let mappings = json!({"0": {"model": layouts["0"]}, "1": {"model": layouts["1"]}});
    made.assert_whole(&json!({"version": "1.0", "world_size": 2, "metadata": tensors,
        "rank_to_layout_info_mappings": mappings}));
}

#[test]
fn boxes_of_local_tensors_are_read() {
    let made = Made::new();
    let mut metadata = Made::metadata();
    // Each rank has a local tensor of 3 rows and 4 columns, whose inner part has its rows of `w`.
    let group = |rank: u32| {
        let data = json!({"global_shape": [4, 3], "dtype": "torch.float32", "global_offsets": [[2 * rank, 0]],
            "local_offsets": [[1, 1]], "local_sizes": [[2, 3]]});
        json!({"ranks": [rank], "sharding_metadata": {"type": "default_tensor_v1", "data": data}})
    };
    *metadata.pointer_mut(W).unwrap() = json!([group(0), group(1)]);
    for rank in 0..2 {
        let mut local = floats(200..212);
        for row in 0..2 {
            let first = 6 * rank + 3 * row;
            let at = usize::from((row + 1) * 4 + 1) * 4;
            local[at..at + 12].copy_from_slice(&floats(first..first + 3));
        }
        let path = made.folder.join(format!("model_{rank}.safetensors"));
        write_rank(&path, &[("a.w", &[3, 4], local), ("b", &[2], floats(100..102))]);
    }
    made.assert_whole(&metadata);
    let mut outside = metadata.clone();
    outside.pointer_mut(&format!("{W}/0/sharding_metadata/data")).unwrap()["local_offsets"] = json!([[2, 1]]);
    made.write(&outside);
    let refused = dtshard(&[&"unshard", &made.folder, &made.env.path("out.pt")]);
    refused.assert_refused(&["a.w", "a local tensor that contains"]);
    metadata.pointer_mut(&format!("{W}/0/sharding_metadata/data")).unwrap()["global_offsets"] = json!([[u64::MAX, 0]]);
    made.write(&metadata);
    dtshard(&[&"unshard", &made.folder, &made.env.path("out.pt")]).assert_refused(&["shards inside shape [4, 3]"]);
}

#[test]
fn hostile_metadata_is_refused() {
    let made = Made::new();
    let data = format!("{W}/0/sharding_metadata/data");
    let mesh = format!("{data}/mesh_spec");
    for path in ["../x", "/etc/passwd", "", "a/../../x"] {
        made.refuse(
            "/metadata/model/rank_to_layout_info/0/file_path",
            json!(path),
            &["a file inside the checkpoint's folder"],
        );
    }
    made.refuse(
        "/metadata/model/rank_to_layout_info/1/file_path",
        json!("model_0.safetensors"),
        &["a separate file for each"],
    );
    made.refuse("/metadata/model/rank_to_layout_info", json!({"0": null}), &["file layouts of the ranks 0 to 1"]);
    made.refuse("/world_size", json!(u32::MAX), &["file layouts of the ranks"]);
    made.refuse("/world_size", json!(-1), &["a number below 2^32"]);
    made.refuse(&format!("{data}/global_shape"), json!([u64::MAX, 3]), &["a shape that fits memory"]);
    made.refuse(&format!("{data}/global_shape"), json!([5, 3]), &["a.w", "[3, 3]", "[2, 3]"]);
    made.refuse(&format!("{data}/global_shape"), json!([4]), &["a.w"]);
    made.refuse(&format!("{data}/global_shape"), json!(vec![1; 300]), &["up to 128 non-negative integers"]);
    made.refuse(&format!("{data}/dtype"), json!("torch.int32"), &["a.w", "i32 [2, 3]"]);
    made.refuse(&format!("{data}/placements"), json!([{"type": "Shard", "dim": 7}]), &["a dim below 2"]);
    made.refuse(
        &format!("{data}/placements"),
        json!([{"type": "StridedShard", "dim": 0, "split_factor": 0}]),
        &["a.w"],
    );
    made.refuse(&format!("{data}/placements"), json!([{"type": "Partial"}]), &["Shard, StridedShard or Replicate"]);
    made.refuse(&format!("{data}/placements"), json!([]), &["1 placements"]);
    made.refuse(&format!("{data}/placements"), json!([{"type": "Replicate"}]), &["f32 [4, 3]", "f32 [2, 3]"]);
    made.refuse(&format!("{mesh}/mesh_data"), json!([0, 0]), &["a valid mesh"]);
    made.refuse(&format!("{mesh}/mesh_data"), json!([0, 7]), &["a rank below 2"]);
    made.refuse(&format!("{mesh}/mesh_shape"), json!([u64::MAX]), &["a valid mesh"]);
    made.refuse(&format!("{W}/0/ranks"), json!([0]), &["a.w", "metadata.pkl does not list it for rank 1"]);
    made.refuse(W, json!([]), &["model.a.w", "an empty list"]);
    made.refuse("/metadata/model/nested_path_to_metadata", json!({}), &["metadata.pkl does not list it"]);
    let strange = json!({"[\"a\",1.5]": []});
    made.refuse("/metadata/model/nested_path_to_metadata", strange, &["a path of up to 128 strings and ints"]);
    made.refuse(
        "/metadata/model",
        json!({"rank_to_layout_info": {"0": null, "1": null}}),
        &["nested_path_to_metadata"],
    );
}

/// The names of the other files show that torch_checkpointing may have saved them.
#[test]
fn messages_about_lost_metadata_name_metadata_pkl() {
    let env = TestEnv::new();
    let folder = env.copy("trainers/torch_checkpointing/step-30");
    let metadata = folder.join("metadata.pkl");
    let file = folder.join("model_0.pt");
    let out = env.path("out");
    let foreign = json!({"a": 1});
    for content in [Some(vec![]), Some(fs::read(&metadata).unwrap()[..300].to_vec()), Some(pickled(&foreign)), None] {
        fs::remove_file(&metadata).unwrap();
        if let Some(content) = &content {
            fs::write(&metadata, content).unwrap();
        }
        for source in [&folder, &file] {
            dtshard(&[&"consolidate", source, &out, &"--no-sync"])
                .assert_refused(&["metadata.pkl", "rename the files"]);
        }
        dtshard(&[&"inspect", &folder]).assert_refused(&["metadata.pkl"]);
        let from = dtshard(&[&"consolidate", &folder, &out, &"--from", &"torch-checkpointing", &"--no-sync"]);
        from.assert_refused(&["metadata.pkl", "rename the files"]);
        if content.is_none() {
            fs::write(&metadata, "").unwrap();
        }
    }
    // The hint works: torch.save files of DTensors are rank files under other names.
    fs::remove_file(&metadata).unwrap();
    for item in ["model", "optimizer", "progress"] {
        for rank in 0..2 {
            let name = |middle: &str| folder.join(format!("{item}_{middle}{rank}.pt"));
            fs::rename(name(""), name("rank_")).unwrap();
        }
    }
    succeed("verify", &[&folder, &fixture("trainers/torch_checkpointing/step-30")], "");
    fs::remove_dir_all(&folder).unwrap();
    // Safetensors files do not record how their tensors are sharded.
    let folder = env.copy("trainers/torch_checkpointing_tp/step-30");
    fs::remove_file(folder.join("metadata.pkl")).unwrap();
    dtshard(&[&"unshard", &folder, &env.path("out.pt"), &"--no-sync"]).assert_refused(&["copy its metadata.pkl"]);
}
