//! Tests of conversions of every fixture, compared with the ground truth bit by bit.

mod layouts;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{
    Kind, Source, Tensors, Truth, assert_same, below, bytes_of, case, compat, copy_folder, expect, file, files,
    fixture, inspect, read, read_safetensors, sharded, succeed,
};
use dtshard::catalog::{Value, path as names};
use dtshard::format::{Checkpoint, ReadOptions};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value as Json, json};
use tempfile::TempDir;

fn temporary_folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

// ---------------------------------------------------------------------------------------------------------------
// Every fixture to every layout and format, and back
// ---------------------------------------------------------------------------------------------------------------

/// A mesh and its placements, as options on the command line.
type Layout = (&'static str, &'static str);

const LAYOUTS: [Layout; 10] = [
    ("dp=4", "S(0)"),
    ("dp=3", "S(0)"),
    ("dp=4", "S(1)"),
    ("dp=2,tp=2", "S(0),S(1)"),
    ("dp=2,tp=2", "_S(0,2),S(0)"),
    ("dp=2,tp=3", "S(0),S(0)"),
    ("dp=2,tp=3", "S(0),S(1)"),
    ("dp=2,tp=3", "R,S(0)"),
    ("dp=2,tp=3", "_S(0,3),S(0)"),
    ("dp=2,tp=3", "S(-1),R"),
];

/// Reshards each source to each layout, and from there to a mesh of four ranks. Asserts that both results have the
/// values of the source.
fn reshard_there_and_back(sources: &[Source], layouts: &[Layout]) {
    assert!(!sources.is_empty());
    for source in sources {
        let expected = source.named();
        for (index, (mesh, placements)) in layouts.iter().enumerate() {
            let folder = temporary_folder();
            let (there, back) = (folder.path().join("there"), folder.path().join("back"));
            let what = format!("{} to {mesh} {placements}", source.path.display());
            let options = format!("--to dcp --mesh {mesh} --placements {placements}");
            let verify = if index % 4 == 0 { " --verify" } else { "" };
            succeed("reshard", &[&source.path, &there], &format!("{options}{verify}"));
            assert_same(&read(&there), &expected, &what);
            succeed("reshard", &[&there, &back], "--mesh dp=4 --placements S(0)");
            assert_same(&read(&back), &expected, &format!("{what} and back"));
        }
    }
}

#[test]
fn dcp_directories_resharded_to_every_layout_keep_values() {
    reshard_there_and_back(&sharded(Kind::Dcp), &LAYOUTS);
}

#[test]
fn rank_files_resharded_to_every_layout_keep_values() {
    reshard_there_and_back(&sharded(Kind::Ranks), &LAYOUTS);
}

#[test]
fn whole_files_resharded_to_every_layout_keep_values() {
    reshard_there_and_back(&files(), &LAYOUTS);
}

#[test]
fn checkpoints_of_other_torch_versions_resharded_keep_values() {
    reshard_there_and_back(&compat(), &[("dp=3", "S(0)"), ("dp=2,tp=3", "_S(0,3),S(0)")]);
}

/// Converts each source to safetensors and torch files with whole tensors, directly and through DCP shards. Asserts
/// that the values are unchanged, and that `verify` accepts the outputs.
fn to_whole_files(sources: &[Source]) {
    assert!(!sources.is_empty());
    for source in sources {
        let folder = temporary_folder();
        let at = |name: &str| folder.path().join(name);
        let (merged, whole, shards) = (at("merged"), at("whole.pt"), at("shards"));
        let (expected, what) = (source.expected(), source.path.display().to_string());

        succeed("unshard", &[&source.path, &whole], "--series all --verify");
        assert_same(&read(&whole), &expected, &what);
        succeed("verify", &[&source.path, &whole], "");

        succeed("reshard", &[&source.path, &shards], "--to dcp --mesh dp=2,tp=3 --placements S(0),S(1)");
        succeed("verify", &[&source.path, &shards], "");
        if source.fits_safetensors() {
            succeed("consolidate", &[&source.path, &merged], "--series all --everything --verify");
            assert_same(&read_safetensors(&merged), &expected, &what);
            succeed("verify", &[&source.path, &merged], "");

            let (from_whole, from_shards) = (at("from_whole"), at("from_shards.safetensors"));
            succeed("consolidate", &[&whole, &from_whole], "--everything --to safetensors");
            assert_same(&read_safetensors(&from_whole), &expected, &what);
            succeed("consolidate", &[&shards, &from_shards], "--everything");
            assert_same(&read_safetensors(&from_shards), &source.named(), &what);
        } else {
            let outcome = expect(2, "consolidate", &[&source.path, &merged], "--everything");
            assert!(outcome.stderr.contains("safetensors cannot store c32"), "{outcome:?}");
            assert!(!merged.exists());
        }
    }
}

#[test]
fn dcp_directories_unsharded_keep_values() {
    to_whole_files(&sharded(Kind::Dcp));
}

#[test]
fn rank_files_unsharded_keep_values() {
    to_whole_files(&sharded(Kind::Ranks));
}

#[test]
fn whole_files_rewritten_keep_values() {
    to_whole_files(&files());
}

#[test]
fn checkpoints_of_other_torch_versions_unsharded_keep_values() {
    to_whole_files(&compat());
}

#[test]
fn partial_tensors_are_reduced() {
    let (source, folder) = (fixture("partial2/ranks"), temporary_folder());
    let expected = below("model.", &Truth::load("partial2/truth").tensors);
    assert_same(&read(&source), &expected, "as they are");
    for (verb, options) in [("consolidate", ""), ("unshard", ""), ("reshard", "--to dcp --mesh dp=3"), ("reshard", "")]
    {
        let target = folder.path().join(format!("{verb}{}", options.len()));
        let outcome = succeed(verb, &[&source, &target], &format!("{options} --verify"));
        let note =
            "5 tensors are reduced: 1 with P(avg) on dp; 1 with P(max) on dp; 1 with P(min) on dp; 2 with P(sum) on dp";
        assert_eq!(outcome.stderr.contains(note), verb != "reshard" || !options.is_empty(), "{outcome:?}");
        assert_eq!(
            outcome.stderr.contains("reduced values are written, with R instead of Partial"),
            options.contains("dcp"),
            "{outcome:?}"
        );
        assert_same(&read(&target), &expected, verb);
        succeed("verify", &[&source, &target], "");
    }
}

#[test]
fn division_of_partial_values_gives_a_note() {
    let folder = temporary_folder();
    let stderr_of = |mesh: &str| {
        let target = folder.path().join(mesh);
        let options = format!("--mesh {mesh} --placements **.weight=P(sum),R --placements R,R");
        succeed("reshard", &[&fixture("tp2/ranks"), &target], &options).stderr
    };
    assert!(
        stderr_of("dp=3,tp=2")
            .contains("24 tensors with P(sum) are computed from whole values, which are divided by 3 and rounded")
    );
    assert!(!stderr_of("dp=4,tp=2").contains("divided"));
}

// ---------------------------------------------------------------------------------------------------------------
// Selected tensors
// ---------------------------------------------------------------------------------------------------------------

#[test]
fn consolidate_writes_the_model() {
    for source in [sharded(Kind::Dcp), sharded(Kind::Ranks), files()].concat() {
        if !source.fits_safetensors() {
            continue;
        }
        let folder = temporary_folder();
        let merged = folder.path().join("merged");
        let outcome = succeed("consolidate", &[&source.path, &merged], "");
        let (expected, all) = (source.expected_model(), source.expected());
        assert_same(&read_safetensors(&merged), &expected, &source.path.display().to_string());

        let closing = outcome.stderr.lines().last().unwrap();
        assert!(closing.contains(&format!(", {} tensors, ", expected.len())), "{closing}");
        // Only the rank files of the model are opened, so no tensor of another series is listed as left out.
        let in_reach = source.kind != Kind::Ranks;
        for (top, tensors) in [("optim", "optim."), ("optimizer", "optimizer."), ("nested", "nested.")] {
            let number = below(tensors, &all).len();
            let note = format!("{number} tensor{} ({top})", if number == 1 { "" } else { "s" });
            let left = number > 0 && in_reach && all.len() > expected.len();
            assert_eq!(closing.contains(&note), left, "{closing}");
            assert!(left || !closing.contains(&format!("({top})")), "{closing}");
        }
    }
}

#[test]
fn consolidate_lists_excluded_tensors_and_objects() {
    let (source, folder) = (fixture("fsdp4/dcp"), temporary_folder());
    let outcome = succeed("consolidate", &[&source, &folder.path().join("text")], "");
    let expected = "; left out: 1 tensor (nested), 51 tensors (optim), 21 objects\n";
    assert!(outcome.stderr.ends_with(expected), "{}", outcome.stderr);

    let document = succeed("consolidate", &[&source, &folder.path().join("json")], "--json").json();
    let left_out: BTreeSet<&str> = document["left_out"].as_array().unwrap().iter().filter_map(Json::as_str).collect();
    for name in Truth::load("fsdp4/truth").json["objects"].as_object().unwrap().keys() {
        assert!(left_out.contains(name.as_str()), "{name} is not in {left_out:?}");
    }
}

#[test]
fn consolidate_writes_the_subtree_of_root() {
    let (source, folder) = (&case("fsdp4")[0], temporary_folder());
    for root in ["optim.state", "nested.a", "model"] {
        let merged = folder.path().join(root);
        succeed("consolidate", &[&source.path, &merged], &format!("--root {root}"));
        assert_same(&read_safetensors(&merged), &below(&format!("{root}."), &source.expected()), root);
    }
}

#[test]
fn unshard_writes_the_model_series_of_rank_files() {
    for source in sharded(Kind::Ranks) {
        let folder = temporary_folder();
        let whole = folder.path().join("whole.pt");
        succeed("unshard", &[&source.path, &whole], "");
        assert_same(&read(&whole), &source.expected_model(), &source.path.display().to_string());
    }
}

#[test]
fn assets_are_copied_with_the_model() {
    let (source, folder) = (fixture("llama_tiny/ranks"), temporary_folder());
    let (with, without) = (folder.path().join("with"), folder.path().join("without"));
    succeed("consolidate", &[&source, &with], "");
    let config = fs::read(source.join("huggingface/config.json")).unwrap();
    assert_eq!(fs::read(with.join("config.json")).unwrap(), config);
    succeed("consolidate", &[&source, &without], "--assets none");
    assert!(!without.join("config.json").exists());
}

// ---------------------------------------------------------------------------------------------------------------
// Identical output of every way to run
// ---------------------------------------------------------------------------------------------------------------

/// Conversions to several formats: the verb, the name of the output, and the options.
const RUNS: [(&str, &str, &str); 4] = [
    ("reshard", "out", "--to dcp --mesh dp=2,tp=3 --placements _S(0,3),S(0)"),
    ("unshard", "out.pt", "--series all"),
    ("consolidate", "out", "--series all --everything --max-shard-size 400"),
    ("consolidate", "out.safetensors", ""),
];

#[test]
fn repeated_command_writes_identical_bytes() {
    for source in ["fsdp4/dcp", "fsdp_tp6/ranks", "odd4/ranks", "torch_file/objects.pt", "safetensors/sharded"] {
        let source = fixture(source);
        for (verb, name, options) in RUNS {
            let (first, second) = (temporary_folder(), temporary_folder());
            let (first, second) = (first.path().join(name), second.path().join(name));
            succeed(verb, &[&source, &first], options);
            succeed(verb, &[&source, &second], options);
            assert!(bytes_of(&first) == bytes_of(&second), "{verb} {} {options}", source.display());
        }
    }
}

#[test]
fn io_threads_and_memory_options_change_no_byte() {
    let ways =
        ["--io mmap", "--threads 1", "--threads 3", "--threads 1 --max-memory 40MB", "--verify --progress never"];
    for source in ["fsdp_tp/ranks", "odd4/dcp", "llama_tiny/dcp"] {
        let source = fixture(source);
        for (verb, name, options) in RUNS {
            let folder = temporary_folder();
            let usual = folder.path().join(name);
            succeed(verb, &[&source, &usual], &format!("{options} --io read"));
            for way in ways {
                let folder = temporary_folder();
                let other = folder.path().join(name);
                succeed(verb, &[&source, &other], &format!("{options} {way}"));
                assert!(bytes_of(&usual) == bytes_of(&other), "{verb} {} {options} {way}", source.display());
            }
        }
    }
}

/// Returns the digest of each tensor by name, as `inspect` prints it.
fn digests(path: &Path) -> Tensors {
    let document = inspect(path, "--brief --digest");
    let tensors = document["tensors"].as_object().unwrap().iter().map(|(name, tensor)| {
        let digest = tensor["digest"].as_str().unwrap().to_owned();
        let shape = serde_json::from_value(tensor["shape"].clone()).unwrap();
        (name.clone(), crate::common::Tensor { dtype: tensor["dtype"].as_str().unwrap().to_owned(), shape, digest })
    });
    tensors.collect()
}

#[test]
fn digests_do_not_depend_on_layout_or_format() {
    for source in [case("fsdp4"), case("fsdp3"), case("hsdp"), case("odd4"), files()].concat() {
        assert_same(&digests(&source.path), &source.expected(), &source.path.display().to_string());
    }
    let (four, three) = (fixture("fsdp4"), fixture("fsdp3"));
    assert_same(&digests(&four.join("dcp")), &digests(&three.join("dcp")), "4 and 3 ranks");
    assert_same(&digests(&four.join("ranks")), &digests(&three.join("ranks")), "4 and 3 ranks");
    let folder = temporary_folder();
    let merged = folder.path().join("merged");
    succeed("consolidate", &[&four.join("ranks"), &merged], "");
    for other in ["dcp", "ranks"] {
        assert_same(&below("model.", &digests(&four.join(other))), &digests(&merged), other);
    }
}

#[test]
fn dry_run_reports_the_numbers_of_the_run() {
    for source in ["fsdp4/dcp", "fsdp_tp6/ranks", "odd4/ranks", "torch_file/trainer.pt"] {
        let source = fixture(source);
        for (verb, name, options) in RUNS {
            let folder = temporary_folder();
            let target = folder.path().join(name);
            let mut planned = succeed(verb, &[&source, &target], &format!("{options} --dry-run --json")).json();
            assert!(!target.exists());
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
            let mut done = succeed(verb, &[&source, &target], &format!("{options} --json")).json();
            // The program reads the memory that is already in use from the kernel. It differs by a page or so between
            // runs.
            let peaks = [&mut planned, &mut done].map(|document| document["peak_bytes"].take().as_u64().unwrap());
            assert!(peaks[0].abs_diff(peaks[1]) < 2 << 20, "{peaks:?}");
            assert_eq!(planned, done, "{verb} {} {options}", source.display());
            let lengths = |document: &Json| -> u64 {
                document["files"].as_array().unwrap().iter().map(|file| file["bytes"].as_u64().unwrap()).sum()
            };
            let written = bytes_of(&target);
            assert_eq!(lengths(&done), written.values().map(|content| content.len() as u64).sum::<u64>());
            assert_eq!(done["bytes_written"], lengths(&done));
            assert_eq!(done["files"].as_array().unwrap().len(), written.len());
        }
    }
    // The dry run has no destination.
    succeed("consolidate", &[&fixture("fsdp4/dcp")], "--dry-run");
}

#[test]
fn large_model_is_split_into_files_with_an_index() {
    let (source, folder) = (&case("llama_tiny")[0], temporary_folder());
    let split = folder.path().join("split");
    const LIMIT: u64 = 10_000;
    succeed("consolidate", &[&source.path, &split], "--max-shard-size 10kB");
    let expected = source.expected_model();
    assert_same(&read_safetensors(&split), &expected, "split");

    let index: Json = serde_json::from_slice(&bytes_of(&split)[Path::new("model.safetensors.index.json")]).unwrap();
    let shards: BTreeSet<PathBuf> =
        bytes_of(&split).into_keys().filter(|name| name.extension().is_some_and(|ext| ext == "safetensors")).collect();
    assert!(shards.len() > 2);
    let (mut total, mut listed) = (0, BTreeSet::new());
    for (number, shard) in shards.iter().enumerate() {
        assert_eq!(*shard, PathBuf::from(format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len())));
        let content = fs::read(split.join(shard)).unwrap();
        let held = SafeTensors::deserialize(&content).unwrap();
        let bytes: usize = held.tensors().iter().map(|(_, view)| view.data().len()).sum();
        assert!(bytes as u64 <= LIMIT || held.len() == 1, "{}: {bytes}", shard.display());
        total += bytes;
        for name in held.names() {
            assert_eq!(index["weight_map"][name], json!(shard), "{name}");
            listed.insert(name.to_owned());
        }
    }
    assert_eq!(index["metadata"]["total_size"], total);
    assert_eq!(index["weight_map"].as_object().unwrap().len(), listed.len());
    assert_eq!(listed, expected.into_keys().collect());
    succeed("verify", &[&source.path, &split], "--root model");
}

// ---------------------------------------------------------------------------------------------------------------
// verify
// ---------------------------------------------------------------------------------------------------------------

#[test]
fn verify_accepts_other_layouts_of_the_same_values() {
    let same = |src: &str, other: &str, options: &str| succeed("verify", &[&fixture(src), &fixture(other)], options);
    same("fsdp4/dcp", "fsdp3/dcp", "");
    same("fsdp4/ranks", "fsdp3/ranks", "");
    for case in ["fsdp4", "hsdp", "fsdp_tp", "fsdp_tp6", "tp2", "fsdp1_sharded", "replicated_plain", "llama_tiny"] {
        same(&format!("{case}/dcp"), &format!("{case}/ranks"), "--root model --series model");
    }
}

/// Changes one byte of the first row of the embedding, in the file that stores this row.
fn flip(folder: &Path) {
    let content = fs::read(fixture("fsdp4/truth.safetensors")).unwrap();
    let truth = SafeTensors::deserialize(&content).unwrap();
    let row = &truth.tensor("model.embed.weight").unwrap().data()[..12];
    for (name, mut content) in bytes_of(folder) {
        if let Some(at) = content.windows(row.len()).position(|window| window == row) {
            content[at + 5] ^= 1;
            fs::write(folder.join(name), content).unwrap();
            return;
        }
    }
    panic!("no embedding in {}", folder.display());
}

#[test]
fn verify_finds_a_flipped_byte() {
    let folder = temporary_folder();
    let merged = folder.path().join("merged");
    succeed("consolidate", &[&fixture("fsdp4/dcp"), &merged], "--everything");
    for (name, intact) in [("dcp", fixture("fsdp4/dcp")), ("ranks", fixture("fsdp4/ranks")), ("hf", merged)] {
        let damaged = folder.path().join(name);
        copy_folder(&intact, &damaged);
        succeed("verify", &[&damaged, &intact], "");
        flip(&damaged);
        let found = expect(1, "verify", &[&damaged, &intact], "--json").json();
        assert_eq!(found["same"], false);
        let wrong = found["different"].as_array().unwrap();
        let of_embed = |finding: &&Json| finding["fqn"] == "model.embed.weight" && finding["kind"] == "differing";
        let values = wrong.iter().find(of_embed).expect("it is named");
        let detail = "first difference at index [0, 1], 1 of 30 elements differ, max abs difference 32";
        assert_eq!(values["detail"], detail, "{found}");
        // Zip archives have checksums; safetensors does not.
        expect(i32::from(name != "hf"), "verify", &[&damaged], "");
    }
}

/// A tensor of a safetensors file: dtype, shape and bytes.
type Stored = (safetensors::Dtype, Vec<usize>, Vec<u8>);

#[test]
fn verify_finds_changed_tensors() {
    let (folder, source) = (temporary_folder(), fixture("fsdp4/dcp"));
    let same = folder.path().join("same.safetensors");
    succeed("consolidate", &[&source, &same], "");
    let content = fs::read(&same).unwrap();
    let stored = SafeTensors::deserialize(&content).unwrap();
    let write = |name: &str, change: &dyn Fn(&str, TensorView<'_>) -> Option<Stored>| {
        let changed: Vec<_> = stored
            .tensors()
            .into_iter()
            .filter_map(|(name, view)| Some((name.clone(), change(&name, view)?)))
            .collect();
        let views = changed
            .iter()
            .map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
        let path = folder.path().join(name);
        fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
        path
    };
    let as_is = |view: &TensorView<'_>| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    let chosen = "norm.weight";

    let value = write("value.safetensors", &|name, view| {
        let (dtype, shape, mut data) = as_is(&view);
        if name == chosen {
            data[11] ^= 0x80;
        }
        Some((dtype, shape, data))
    });
    let missing = write("missing.safetensors", &|name, view| (name != chosen).then(|| as_is(&view)));
    let retyped = write("dtype.safetensors", &|name, view| {
        let (dtype, shape, data) = as_is(&view);
        Some((if name == chosen { safetensors::Dtype::I32 } else { dtype }, shape, data))
    });
    let reshaped = write("shape.safetensors", &|name, view| {
        let (dtype, shape, data) = as_is(&view);
        Some((dtype, if name == chosen { vec![1, 3] } else { shape }, data))
    });

    succeed("verify", &[&source, &same], "--root model");
    let found = |other: &Path| expect(1, "verify", &[&source, other], "--root model --json").json();
    for (other, kind, detail) in [
        (&value, "differing", "first difference at index [2], 1 of 3 elements differ, max abs difference 7999492"),
        (&retyped, "retyped", "f32 in SRC, i32 in OTHER"),
        (&reshaped, "reshaped", "[3] in SRC, [1, 3] in OTHER"),
    ] {
        let different = found(other)["different"].clone();
        assert_eq!(different.as_array().unwrap().len(), 1);
        let finding = ["fqn", "kind", "detail"].map(|field| &different[0][field]);
        assert_eq!(finding, [&json!(chosen), &json!(kind), &json!(detail)]);
        // The sign of one of three elements was changed.
        assert_eq!(different[0]["changed_share"].as_f64(), (kind == "differing").then_some(1.0 / 3.0));
    }
    let no_cast = expect(1, "verify", &[&source, &retyped], "--root model").stderr;
    assert!(!no_cast.contains("--dtype"), "{no_cast}");
    assert_eq!(found(&missing)["only_in_src"], json!([chosen]));
    let added = expect(1, "verify", &[&missing, &same], "--json").json();
    assert_eq!(added["only_in_other"], json!([chosen]));

    // A torch file with another value is different, even if its checksums are correct.
    let (whole, edited) = (folder.path().join("same.pt"), folder.path().join("value.pt"));
    succeed("unshard", &[&same, &whole], "");
    succeed("unshard", &[&value, &edited], "");
    succeed("verify", &[&edited], "");
    expect(1, "verify", &[&whole, &edited], "");
    expect(2, "verify", &[&whole, &folder.path().join("nothing.pt")], "");
}

// ---------------------------------------------------------------------------------------------------------------
// Objects
// ---------------------------------------------------------------------------------------------------------------

/// Returns a value of `truth.json` in the form in which `inspect` shows it: its Python type, and the value as JSON or,
/// for a tuple, its Python repr.
fn inspect_form(value: &Json) -> Json {
    fn python(value: &Json) -> String {
        match value {
            Json::Null => String::from("None"),
            Json::Bool(true) => String::from("True"),
            Json::Bool(false) => String::from("False"),
            Json::String(text) => format!("'{text}'"),
            Json::Array(items) => format!("[{}]", items.iter().map(python).collect::<Vec<_>>().join(", ")),
            other => other.to_string(),
        }
    }
    let kind = match value {
        Json::Null => "NoneType",
        Json::Bool(_) => "bool",
        Json::Number(number) if number.is_f64() => "float",
        Json::Number(_) => "int",
        Json::String(_) => "str",
        Json::Array(_) => "list",
        Json::Object(object) => {
            let items: Vec<String> = object["$tuple"].as_array().expect("a tuple").iter().map(python).collect();
            return json!({ "type": "tuple", "value": format!("({})", items.join(", ")) });
        }
    };
    json!({ "type": kind, "value": value })
}

/// Adds the leaves of a tree of `truth.json` to `found`, by name. Dicts and lists of dicts are not leaves.
fn leaves(name: &str, value: &Json, found: &mut serde_json::Map<String, Json>) {
    match value {
        Json::Object(entries) if !entries.keys().any(|key| key.starts_with('$')) => {
            entries.iter().for_each(|(key, inner)| leaves(&format!("{name}.{key}"), inner, found));
        }
        Json::Array(items) if items.iter().any(Json::is_object) => {
            items.iter().enumerate().for_each(|(index, inner)| leaves(&format!("{name}.{index}"), inner, found));
        }
        other => {
            found.insert(name.to_owned(), inspect_form(other));
        }
    }
}

#[test]
fn objects_survive_conversions() {
    for source in [sharded(Kind::Dcp), sharded(Kind::Ranks)].concat() {
        let truth = source.truth().json;
        let mut expected = serde_json::Map::new();
        if source.kind == Kind::Dcp {
            let objects = truth["objects"].as_object().unwrap().iter();
            expected.extend(objects.map(|(name, value)| (name.clone(), inspect_form(value))));
        } else {
            let series = truth.get("ranks_objects").and_then(Json::as_object).into_iter().flatten();
            series.for_each(|(name, tree)| leaves(name, tree, &mut expected));
        }
        let mut expected = Json::Object(expected);
        let folder = temporary_folder();
        let at = |name: &str| folder.path().join(name);
        let (first, second, whole) = (at("first"), at("second"), at("whole.pt"));
        let objects = |path: &Path| inspect(path, "--brief")["objects"].clone();
        assert_eq!(objects(&source.path), expected, "{}", source.path.display());
        succeed("reshard", &[&source.path, &first], "--to dcp --mesh dp=3 --placements S(0)");
        if source.kind == Kind::Ranks
            && let Some(list) = expected.get_mut("optim.param_groups.0.params")
            && list["value"][0].is_number()
        {
            list["value"] = source.parameters().into();
        }
        succeed("reshard", &[&first, &second], "--mesh dp=2,tp=2 --placements S(0),S(1)");
        succeed("unshard", &[&second, &whole], "");
        for result in [&first, &second, &whole] {
            assert_eq!(objects(result), expected, "{} of {}", result.display(), source.path.display());
        }
    }
}

fn state(path: &Path) -> Value {
    Checkpoint::open(path, &ReadOptions::default()).unwrap().catalog.state
}

#[test]
fn nested_dicts_survive_conversions() {
    let folder = temporary_folder();
    let (shards, whole) = (folder.path().join("shards"), folder.path().join("whole.pt"));
    succeed("reshard", &[&fixture("fsdp4/dcp"), &shards], "--mesh dp=3");
    succeed("unshard", &[&shards, &whole], "");
    for path in [fixture("fsdp4/dcp"), shards, whole] {
        let state = state(&path);
        let nested = state.as_dict().unwrap().get("nested").unwrap().as_dict().unwrap();
        let Some(Value::List(items)) = nested.get("a") else { panic!("a list in {}", path.display()) };
        let [Value::Int(1), Value::Int(2), Value::Dict(inner)] = items.as_slice() else { panic!("{items:?}") };
        assert!(matches!(inner.get("b"), Some(Value::Tensor(_))));
        assert_eq!(nested.get("tuple"), Some(&Value::Tuple(vec![Value::Int(1), Value::Str("a".into())])));
        assert_eq!(nested.get("none"), Some(&Value::None));
        assert_eq!(nested.get("empty"), Some(&Value::List(Vec::new())));
    }
}

#[test]
fn torch_file_keeps_its_whole_tree() {
    for name in ["objects.pt", "trainer.pt", "model.pt"] {
        let (source, folder) = (fixture("torch_file").join(name), temporary_folder());
        let (whole, again) = (folder.path().join("whole.pt"), folder.path().join("again.pt"));
        succeed("unshard", &[&source, &whole], "");
        assert!(state(&whole) == state(&source), "{name}");
        succeed("unshard", &[&whole, &again], "");
        assert!(state(&again) == state(&source), "{name}");
        assert!(!names::leaves(&state(&whole)).is_empty());
    }
}

#[test]
fn tied_tensors_stay_tied() {
    let source = file("torch_file/model.pt", "torch_file/model.truth");
    let (folder, tensors) = (temporary_folder(), source.expected().len());
    let whole = folder.path().join("whole.pt");
    succeed("unshard", &[&source.path, &whole], "");
    // The name of a record is stored before the record and in the directory of the archive.
    let content = fs::read(&whole).unwrap();
    let records = content.windows(6).filter(|window| window == b"/data/").count();
    // Embedding and head are tied, and so are `same.a` and `same.b`, so there are two records fewer than tensors.
    assert_eq!(records, 2 * (tensors - 2));
    let found = state(&whole);
    let dict = found.as_dict().unwrap();
    assert_eq!(dict.get("embed.weight"), dict.get("head.weight"));
    assert_eq!(dict.get("same.a"), dict.get("same.b"));
    assert_ne!(dict.get("views.top"), dict.get("views.rest"));
}
