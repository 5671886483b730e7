//! Snapshots that torchsnapshot wrote (`tests/fixtures/trainers/torchsnapshot*`): every verb gives the values of the
//! truth, and damaged snapshots are refused.

use std::fs;
use std::path::{Path, PathBuf};

use dtshard::catalog::Value;
use dtshard::format::{Checkpoint, ReadOptions};
use serde_json::{Value as Json, json};

use crate::common::corrupt::dtshard;
use crate::common::env::TestEnv;
use crate::common::{Tensors, Truth, assert_same, below, fixture, read_safetensors, succeed};

const SNAPSHOTS: [&str; 3] = ["torchsnapshot", "torchsnapshot_files", "torchsnapshot_dtensor"];
const MANIFEST: &str = ".snapshot_metadata";

fn snapshot(name: &str) -> PathBuf {
    fixture(&format!("trainers/{name}/snapshot"))
}

/// Returns the tensors of the truth under dtshard's names: `local.value.rank_1` for `rank 1: local/value`.
fn truth(name: &str) -> Tensors {
    let renamed = |name: String| match name.strip_prefix("rank ").and_then(|rest| rest.split_once(": ")) {
        Some((rank, path)) => format!("{}.rank_{rank}", path.replace('/', ".")),
        None => name.replace('/', "."),
    };
    let tensors = Truth::load(&format!("trainers/{name}.truth")).tensors;
    tensors.into_iter().map(|(name, tensor)| (renamed(name), tensor)).collect()
}

fn shared_tensors(name: &str) -> Tensors {
    let mut tensors = truth(name);
    tensors.retain(|name, _| !name.starts_with("local."));
    tensors
}

#[test]
fn each_snapshot_consolidates_to_its_truth() {
    let env = TestEnv::new();
    for name in SNAPSHOTS {
        let source = snapshot(name);
        let made = env.make("consolidate", &source, &format!("{name}_model"), "--assets none");
        assert_same(&read_safetensors(&made.path), &below("model.", &truth(name)), name);
        let all = "--everything --on-conflict per-rank --assets none --verify";
        let made = env.make("consolidate", &source, &format!("{name}_all"), all);
        assert_same(&read_safetensors(&made.path), &truth(name), name);
    }
}

#[test]
fn resharded_snapshots_consolidate_to_their_truth() {
    let env = TestEnv::new();
    for name in SNAPSHOTS {
        let source = snapshot(name);
        let dcp = env.make("reshard", &source, &format!("{name}_dcp"), "--mesh dp=3 --on-conflict per-rank --verify");
        let made = env.make("consolidate", &dcp.path, &format!("{name}_all"), "--everything --assets none");
        assert_same(&read_safetensors(&made.path), &truth(name), name);
        let options = "--mesh dp=2,tp=2 --placements S(0),R --to torch-ranks --exclude local.** --verify";
        let ranks = env.make("reshard", &source, &format!("{name}_ranks"), options);
        let made =
            env.make("consolidate", &ranks.path, &format!("{name}_shared"), "--series all --everything --assets none");
        assert_same(&read_safetensors(&made.path), &shared_tensors(name), name);
        succeed("verify", &[&source, &ranks.path], "--exclude local.**");
    }
}

#[test]
fn verify_reports_only_values_of_single_ranks() {
    for name in SNAPSHOTS {
        let found = dtshard(&[&"verify", &snapshot(name)]);
        assert_eq!(found.code, Some(1), "{found:?}");
        let names: Vec<&str> =
            found.out.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name).collect();
        assert_eq!(names, ["local.value", "local.number", "local.noncontiguous"], "{found:?}");
    }
}

fn state(folder: &Path) -> Value {
    Checkpoint::open(folder, &ReadOptions::default()).unwrap().catalog.state
}

#[test]
fn objects_have_their_types_and_values() {
    for name in SNAPSHOTS {
        let state = state(&snapshot(name));
        let at = |keys: &[&str]| keys.iter().fold(&state, |value, key| value.as_dict().unwrap().get(key).unwrap());
        assert_eq!(
            format!("{:.1000}", at(&["progress"])),
            "{'step': 30, 'lr': 0.001, 'name': 'x: y', 'flag': True, 'data': b'\\x00\\xff', 'none': None, 'list': [1, [2.5, 'a']], \
             'slash/and%': 1099511627776, 'tuple': (1, 'a'), '7': 'integer key', 'nan': nan}"
        );
        let groups = format!("{:.1000}", at(&["optim", "param_groups"]));
        assert!(groups.starts_with("[{'lr': 0.0, 'betas': (0.9, 0.999), 'eps': 1e-8,"), "{groups}");
        assert!(groups.ends_with("'params': [0, 1, 2, 3]}]"), "{groups}");
        let optimizer = at(&["optim", "state"]).as_dict().unwrap();
        assert_eq!(optimizer.entries[2].0, Value::Int(2));
        let number = at(&["local", "number"]).to_string();
        assert!(number.starts_with("<rank 0: 10, rank 1: 11"), "{number}");
        assert_eq!(at(&["model"]).type_name(), "OrderedDict");
    }
}

#[test]
fn yaml_manifest_is_read_like_the_json_manifest() {
    let env = TestEnv::new();
    let copy = env.copy("trainers/torchsnapshot/snapshot");
    fs::copy(fixture("trainers/torchsnapshot.snapshot_metadata.yaml"), copy.join(MANIFEST)).unwrap();
    assert_eq!(state(&copy), state(&snapshot("torchsnapshot")));
    let made = env.make("consolidate", &copy, "all", "--everything --on-conflict per-rank --assets none");
    assert_same(&read_safetensors(&made.path), &truth("torchsnapshot"), "yaml");
}

// ---------------------------------------------------------------------------------------------------- damaged snapshots

/// A snapshot without values of single ranks, whose manifest a test changes.
struct Damaged {
    env: TestEnv,
    folder: PathBuf,
}

impl Damaged {
    fn new() -> Self {
        let env = TestEnv::new();
        let folder = env.copy("trainers/torchsnapshot_dtensor/snapshot");
        let damaged = Self { env, folder };
        damaged.edit(|_| {});
        let verified = dtshard(&[&"verify", &damaged.folder]);
        assert_eq!(verified.code, Some(0), "{verified:?}");
        damaged
    }

    fn edit(&self, change: impl FnOnce(&mut Json)) {
        let path = snapshot("torchsnapshot_dtensor").join(MANIFEST);
        let mut manifest: Json = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        manifest["manifest"].as_object_mut().unwrap().retain(|key, _| !key.contains("/local"));
        change(&mut manifest);
        fs::write(self.folder.join(MANIFEST), serde_json::to_vec(&manifest).unwrap()).unwrap();
    }

    /// Asserts that conversions refuse the snapshot with a message that contains all of `words`, and that `verify` finds
    /// the fault.
    #[track_caller]
    fn assert_refused(&self, words: &[&str]) {
        let out = self.env.path("out.pt");
        dtshard(&[&"unshard", &self.folder, &out, &"--no-sync"]).assert_refused(words);
        assert!(!out.exists());
        let verified = dtshard(&[&"verify", &self.folder]);
        assert_eq!(verified.code, Some(1), "{verified:?}");
        dtshard(&[&"inspect", &self.folder]).assert_no_crash();
    }

    /// Changes one value of the manifest, and asserts that the snapshot is refused.
    #[track_caller]
    fn refuse(&self, entry: &str, pointer: &str, value: Json, words: &[&str]) {
        self.edit(|manifest| *manifest["manifest"][entry].pointer_mut(pointer).unwrap() = value);
        self.assert_refused(words);
    }
}

const CHUNKED: &str = "0/model/fc.weight";
const TENSOR: &str = "0/model/fc.bias";
const SHARDED: &str = "3/tables/s0_s1";

#[test]
fn locations_outside_the_folder_or_the_file_are_errors() {
    let damaged = Damaged::new();
    for path in ["../outside", "/etc/passwd", "0/../../x", "", "nul\0"] {
        damaged.refuse(TENSOR, "/location", json!(path), &["a file inside the checkpoint's folder"]);
    }
    damaged.refuse(TENSOR, "/location", json!("replicated/none"), &["missing: replicated/none"]);
    damaged.refuse(
        TENSOR,
        "/location",
        json!("replicated/model/fc.weight_0_0"),
        &["model.fc.bias", "28 bytes", "48 bytes"],
    );
    damaged.refuse(TENSOR, "/byte_range", json!([0, 27]), &["model.fc.bias", "expected 28 bytes for f32 [7]"]);
    damaged.refuse(TENSOR, "/byte_range", json!([4, 32]), &["a file of at least 32 bytes", "a file of 28 bytes"]);
    damaged.refuse(TENSOR, "/byte_range", json!([28, 0]), &["ends after its start"]);
    damaged.refuse(TENSOR, "/byte_range", json!([u64::MAX - 28, u64::MAX]), &["a file of 28 bytes"]);
    damaged.refuse(
        "0/progress/none",
        "/location",
        json!("replicated/model/fc.bias"),
        &["fc.bias", "a torch.save archive"],
    );
}

#[test]
fn short_and_missing_files_are_errors() {
    let damaged = Damaged::new();
    let file = damaged.folder.join("replicated/model/fc.bias");
    fs::write(&file, [0; 27]).unwrap();
    damaged.assert_refused(&["model.fc.bias", "28 bytes", "27 bytes"]);
    fs::remove_file(&file).unwrap();
    let refused = dtshard(&[&"verify", &damaged.folder]);
    assert_eq!(refused.code, Some(1));
    refused.assert_mentions(&["missing: replicated/model/fc.bias"]);
    // torchsnapshot itself writes two bytes too few for a bf16 tensor with an odd number of elements.
    let damaged = Damaged::new();
    fs::write(damaged.folder.join("replicated/model/norm.weight"), [0; 4]).unwrap();
    damaged.refuse("0/model/norm.weight", "/shape", json!([3]), &["does not store the last element of a bf16 tensor"]);
}

#[test]
fn impossible_shapes_and_boxes_are_errors() {
    let damaged = Damaged::new();
    let huge = u64::MAX;
    damaged.refuse(TENSOR, "/shape", json!([huge, huge]), &["a shape that fits memory"]);
    damaged.refuse(TENSOR, "/shape", json!([7, -1]), &["-1"]);
    damaged.refuse(TENSOR, "/shape", json!(vec![1; 300]), &["at most 255 dims"]);
    damaged.refuse(CHUNKED, "/shape", json!([7, huge]), &["a shape that fits memory"]);
    damaged.refuse(CHUNKED, "/shape", json!([8, 3]), &["gap at [7:8, 0:3]"]);
    damaged.refuse(CHUNKED, "/shape", json!([6, 3]), &["out of bounds"]);
    damaged.refuse(CHUNKED, "/shape", json!([7]), &["chunks of 1 dims"]);
    damaged.refuse(CHUNKED, "/chunks/1/offsets", json!([3, 0]), &["overlap"]);
    damaged.refuse(CHUNKED, "/chunks/1/offsets", json!([huge, huge]), &["out of bounds"]);
    damaged.refuse(CHUNKED, "/chunks/1/offsets", json!([4]), &["offsets and sizes that fit the shape"]);
    damaged.refuse(CHUNKED, "/chunks/1/sizes", json!([3, 4]), &["offsets and sizes that fit the shape"]);
    damaged.refuse(CHUNKED, "/chunks/1/tensor/dtype", json!("torch.int32"), &["chunks of dtype f32"]);
    damaged.refuse(CHUNKED, "/chunks", json!([]), &["gap"]);
    damaged.refuse(SHARDED, "/shards/0/offsets", json!([huge, 1]), &["a shard that fits memory"]);
    damaged.refuse(SHARDED, "/shards/0/offsets", json!([4, 4]), &["elements from rank 2, whose shard is"]);
    damaged.refuse(SHARDED, "/shards/0/tensor/dtype", json!("torch.int32"), &["tables.s0_s1", "shards of dtype f32"]);
}

#[test]
fn lost_shard_of_a_dtensor_is_an_error() {
    let damaged = Damaged::new();
    damaged.edit(|manifest| {
        manifest["manifest"].as_object_mut().unwrap().remove(SHARDED);
    });
    damaged.assert_refused(&["tables.s0_s1: expected every shard of the mesh, found no shard of rank 3"]);
    damaged.refuse(SHARDED, "/mesh", json!([[0, 1], [2]]), &["lists of different lengths"]);
    damaged.refuse(SHARDED, "/mesh", json!([[0, 1], [2, 2]]), &["a valid mesh"]);
    damaged.refuse(SHARDED, "/mesh", json!([[0, 1], [3, 2]]), &["one mesh and dim_map on all ranks"]);
    damaged.refuse(SHARDED, "/dim_map", json!([[0], [7]]), &["distinct mesh dims below 2"]);
}

#[test]
fn entries_that_contradict_each_other_are_errors() {
    let damaged = Damaged::new();
    damaged.edit(|manifest| {
        for rank in 0..4 {
            manifest["manifest"][format!("{rank}/model")]["keys"] = json!(["fc.weight"]);
        }
    });
    damaged.assert_refused(&["model: expected a dict that lists all its keys"]);
    damaged.refuse("0/tables", "/keys/0", json!("absent"), &["tables: expected an entry `tables/absent`"]);
    damaged.refuse("0/model", "/keys/0", json!("fc.bias"), &["the key `fc.bias` twice"]);
    damaged.refuse("0/model", "/type", json!("list"), &["kind of value"]);
    damaged.refuse(TENSOR, "/type", json!("Tensor2"), &["Tensor2"]);
    damaged.refuse("0/progress/step", "/serialized_value", json!("0x30"), &["progress/step", "a value of type int"]);
    damaged.refuse("0/progress/lr", "/serialized_value", json!("AAAA"), &["a value of type float"]);
    for (old, new, words) in [
        ("0/progress/list/0", "0/progress/list/5", "an item at position 0"),
        ("0/progress/list/0", "0/progress/list/x", "item numbers"),
        ("0/optim/state", "0/optim/other", "a dict that lists all its keys"),
        ("0/model/fc.bias", "00/model/fc.bias", "RANK below 4"),
        ("0/model/fc.bias", "4/model/fc.bias", "RANK below 4"),
        ("0/model/fc.bias", "0/model/fc.bias/w", "an entry"),
    ] {
        damaged.edit(|manifest| {
            let entries = manifest["manifest"].as_object_mut().unwrap();
            let entry = entries.remove(old).unwrap();
            entries.insert(new.into(), entry);
        });
        damaged.assert_refused(&[words]);
    }
    let deep = format!("0/{}", vec!["a"; 100_000].join("/"));
    damaged.edit(|manifest| manifest["manifest"][deep] = json!({"type": "list"}));
    damaged.assert_refused(&["at most 128 keys in PATH"]);
}

/// Asserts that a snapshot with these entries is refused. Each of the files `f0` and `f1` has two floats.
#[track_caller]
fn refuse_entries(entries: Json, world_size: u32, words: &[&str]) {
    let env = TestEnv::new();
    let folder = env.path("snapshot");
    fs::create_dir(&folder).unwrap();
    for (file, values) in [("f0", [1_f32, 2.0]), ("f1", [3.0, 4.0])] {
        fs::write(folder.join(file), values.map(f32::to_le_bytes).concat()).unwrap();
    }
    let manifest = json!({"version": "0.1.0", "world_size": world_size, "manifest": entries});
    fs::write(folder.join(MANIFEST), serde_json::to_vec(&manifest).unwrap()).unwrap();
    dtshard(&[&"unshard", &folder, &env.path("out.pt"), &"--no-sync"]).assert_refused(words);
    assert_eq!(dtshard(&[&"verify", &folder]).code, Some(1));
}

fn tensor_entry(file: &str, is_replicated: bool) -> Json {
    json!({"type": "Tensor", "location": file, "serializer": "buffer_protocol", "dtype": "torch.float32", "shape": [2],
           "replicated": is_replicated, "byte_range": null})
}

fn shard(offset: u64, file: &str) -> Json {
    json!({"offsets": [offset], "sizes": [2], "tensor": tensor_entry(file, false)})
}

/// The shape of a sharded tensor follows from its shards, so a lost shard must not give a shorter tensor.
#[test]
fn lost_shard_of_a_rank_is_an_error() {
    let dict = json!({"type": "dict", "keys": ["w"]});
    let sharded = json!({"type": "ShardedTensor", "shards": [shard(0, "f0")]});
    let entries = json!({"0/m": dict, "1/m": dict, "0/m/w": sharded});
    refuse_entries(entries, 2, &["m: expected an entry `m/w` of rank 1", "entries of other ranks only"]);
    let list = json!({"type": "list"});
    let entries = json!({"0/m": dict, "1/m": dict, "0/m/w": list, "1/m/w": list, "0/m/w/0": sharded});
    refuse_entries(entries, 2, &["m.w: the length of a list differs between rank 0 and rank 1"]);
    let dtensor = |shards: Json| json!({"type": "DTensor", "shards": shards, "mesh": [0, 1], "dim_map": [[0]]});
    for other in [json!([]), json!([shard(0, "f0")])] {
        let entries =
            json!({"0/m": dict, "1/m": dict, "0/m/w": dtensor(json!([shard(0, "f0")])), "1/m/w": dtensor(other)});
        refuse_entries(entries, 2, &["m.w: expected shards of rank 0 within [0:1], found [0:2]"]);
    }
}

#[test]
fn rank_without_entries_is_an_error() {
    for world_size in [5, u32::MAX] {
        let damaged = Damaged::new();
        damaged.edit(|manifest| manifest["world_size"] = json!(world_size));
        damaged.assert_refused(&[&format!("entries of all {world_size} ranks"), "no entry of rank 4"]);
    }
    let dict = json!({"type": "dict", "keys": ["w"]});
    let entries = json!({"1/m": dict, "1/m/w": tensor_entry("f0", false)});
    refuse_entries(entries, 2, &["no entry of rank 0"]);
}

#[test]
fn chunks_at_other_places_on_another_rank_differ() {
    let dict = json!({"type": "dict", "keys": ["a"]});
    let chunked = |files: [&str; 2]| {
        json!({"type": "ChunkedTensor", "dtype": "torch.float32", "shape": [4], "replicated": false,
               "chunks": [shard(0, files[0]), shard(2, files[1])]})
    };
    let entries = json!({"0/m": dict, "1/m": dict, "0/m/a": chunked(["f0", "f1"]), "1/m/a": chunked(["f1", "f0"])});
    refuse_entries(entries, 2, &["m.a: a plain tensor differs between rank 0 and rank 1"]);
}

#[test]
fn two_keys_of_one_name_are_refused() {
    let entries = json!({"0/aA": tensor_entry("f0", false), "0/a%41": tensor_entry("f1", false)});
    refuse_entries(entries, 1, &["keys with different names", "`aA` again"]);
}

#[test]
fn missing_item_of_a_nested_list_is_an_error() {
    let int = |value: u32| json!({"type": "int", "serialized_value": value.to_string(), "readable": null, "replicated": true});
    let (dict, list) = (json!({"type": "dict", "keys": ["w", "l"]}), json!({"type": "list"}));
    let entries = |second: &str| {
        json!({"0/m": dict, "1/m": dict, "0/m/w": tensor_entry("f0", true), "0/m/l": list, "1/m/l": list, "0/m/l/0": list,
               "1/m/l/0": list, "0/m/l/0/0": int(1), second: int(3)})
    };
    let expected = "expected an item at position 1 of this list, because position 2 has one";
    refuse_entries(entries("0/m/l/0/2"), 2, &[expected]);
    refuse_entries(entries("0/m/l/0/x"), 2, &["item numbers"]);
    refuse_entries(entries("0/m/l/0/0/7"), 2, &["entries below it exist"]);
}

#[test]
fn text_that_is_no_manifest_is_an_error() {
    let damaged = Damaged::new();
    for text in [
        "",
        "{",
        "[]",
        "{}",
        "world_size: 1\n",
        "\u{0}",
        "a: &x [1]\nb: *x\n",
        "{\"world_size\": 1, \"manifest\": {\"0/a\": 1}}",
    ] {
        fs::write(damaged.folder.join(MANIFEST), text).unwrap();
        damaged.assert_refused(&["expected"]);
    }
}

#[test]
fn tensors_that_dtshard_cannot_read_are_refused_by_name() {
    let damaged = Damaged::new();
    damaged.edit(|manifest| manifest["manifest"][TENSOR]["serializer"] = json!("per_tensor_qtensor"));
    damaged.env.assert_unsupported_input(&damaged.folder);
    let made = damaged.env.path("out");
    let refused = dtshard(&[&"consolidate", &damaged.folder, &made, &"--no-sync"]);
    refused.assert_refused(&["model.fc.bias", "the serializer `per_tensor_qtensor`", "with --exclude"]);
    succeed("consolidate", &[&damaged.folder, &made], "--assets none --exclude fc.bias");
    let mut rest = below("model.", &truth("torchsnapshot_dtensor"));
    rest.remove("fc.bias");
    assert_same(&read_safetensors(&made), &rest, "the rest");
    damaged.edit(|manifest| manifest["manifest"][TENSOR]["dtype"] = json!("torch.qint8"));
    damaged.env.assert_unsupported_input(&damaged.folder);
    damaged.edit(|manifest| manifest["manifest"][TENSOR]["dtype"] = json!("torch.complex64"));
    damaged.assert_refused(&["expected 56 bytes for c64 [7]"]);
}
