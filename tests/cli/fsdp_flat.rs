//! Tests of reading flat parameters of FSDP1 from rank files, compared with the ground truth bit by bit.

use std::collections::BTreeMap;
use std::fs;
use std::path::{self, PathBuf};

use crate::common::flat;
use crate::common::transcript::Transcript;
use crate::common::{
    Run, Tensors, Truth, assert_same, copy_folder, expect, fixture, inspect, read, read_safetensors, succeed,
};
use crate::common::{below, tensors_of};
use crate::contract::assert_contains;
use dtshard::catalog::flat::FlatLayout;
use dtshard::catalog::{Key, Path, Value, state_dict};
use dtshard::format::fsdp_flat::document;
use dtshard::format::{Checkpoint, FlatKnowledge, Format, ReadOptions};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

const SHARDED: [&str; 6] = ["flat2", "flat3", "flat4", "flat_mixed", "flat_bf16", "flat_hybrid"];

/// Returns the names of the folders with flat parameters in the fixture `case`.
fn folders(case: &str) -> Vec<&'static str> {
    ["views", "flat", "groups", "one_file"].into_iter().filter(|name| fixture(case).join(name).is_dir()).collect()
}

/// A copy of a fixture's folder, which tests may change.
struct Copy {
    folder: TempDir,
    _transcript: Transcript,
    truth: Truth,
    layout: Json,
}

impl Copy {
    fn new(case: &str, name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let transcript = Transcript::begin(folder.path());
        copy_folder(&fixture(case).join(name), &folder.path().join("src"));
        let truth = Truth::load(&format!("{case}/truth"));
        let layout = flat::layout(case, name);
        Self { folder, _transcript: transcript, truth, layout }
    }

    /// Copies the folder of a fixture, and its flat layout into the same folder.
    fn with_layout(case: &str, name: &str) -> Self {
        let copy = Self::new(case, name);
        copy.write_layout(&copy.layout);
        copy
    }

    fn path(&self) -> PathBuf {
        self.at("src")
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write_layout(&self, layout: &Json) {
        fs::write(self.path().join("flat_layout.json"), layout.to_string()).unwrap();
    }

    /// Returns every tensor that the model and its optimizer are expected to have.
    fn expected(&self) -> Tensors {
        self.truth.tensors.clone()
    }

    fn model(&self) -> Tensors {
        below("model.", &self.truth.tensors)
    }

    fn opened(&self, like: Option<&path::Path>) -> dtshard::error::Result<Checkpoint> {
        let flat = FlatKnowledge { like: like.map(path::Path::to_path_buf), ..FlatKnowledge::default() };
        Checkpoint::open(&self.path(), &ReadOptions { flat, ..ReadOptions::default() })
    }

    #[track_caller]
    fn assert_refused(&self) -> Run {
        expect(2, "unshard", &[&self.path(), &self.at("refused.pt")], "--series all")
    }

    #[track_caller]
    fn refused_like(&self, like: &path::Path) -> Run {
        let options = format!("--like {}", like.display());
        expect(2, "unshard", &[&self.path(), &self.at("refused.pt")], &options)
    }
}

fn layout_of(json: &Json) -> FlatLayout {
    document::parse(path::Path::new("truth"), json.to_string().as_bytes()).unwrap()
}

// ---------------------------------------------------------------------------------------------------------------
// Reading
// ---------------------------------------------------------------------------------------------------------------

#[test]
fn flat_parameters_with_their_layout_equal_the_truth() {
    for case in SHARDED {
        for name in folders(case) {
            let copy = Copy::with_layout(case, name);
            let checkpoint = copy.opened(None).unwrap();
            assert_eq!(checkpoint.format, Format::FsdpFlat);
            assert_same(&tensors_of(&checkpoint), &copy.expected(), &format!("{case}/{name}"));
            assert_eq!(checkpoint.catalog.flat, Some(layout_of(&copy.layout)), "{case}/{name}");
            assert!(checkpoint.catalog.warnings.is_empty(), "{:?}", checkpoint.catalog.warnings);
            assert!(checkpoint.catalog.conflicts().is_empty());
        }
    }
}

/// Files with `use_orig_params` (views) record everything except shapes. A torch file given as `--like` provides shapes
/// and strides.
#[test]
fn views_with_like_equal_the_truth() {
    let full = fixture("flat2/full/model.pt");
    for case in ["flat2", "flat3", "flat4", "flat_mixed", "flat_bf16", "flat_hybrid"] {
        let copy = Copy::new(case, "views");
        let checkpoint = copy.opened(Some(&full)).unwrap();
        assert_same(&tensors_of(&checkpoint), &copy.expected(), case);
        assert_eq!(checkpoint.catalog.flat, Some(layout_of(&copy.layout)), "{case}");
    }
}

/// Without views, order and ties come from the checkpoint given as `--like`. Here it is the flat parameters of another
/// fixture.
#[test]
fn flat_parameters_with_an_ordered_like_equal_the_truth() {
    for case in SHARDED {
        let like = Copy::with_layout(case, "views");
        let copy = Copy::new(case, "flat");
        let checkpoint = copy.opened(Some(&like.path())).unwrap();
        assert_same(&tensors_of(&checkpoint), &copy.expected(), case);
        assert_eq!(checkpoint.catalog.flat, Some(layout_of(&copy.layout)), "{case}");
    }
}

/// A full state dict has a copy of a tied weight under each of its names.
#[test]
fn tied_weights_of_a_full_state_dict_are_found() {
    let full = fixture("flat2/full/model.pt");
    for case in ["flat2", "flat4", "flat_hybrid"] {
        let copy = Copy::new(case, "flat");
        let checkpoint = copy.opened(Some(&full)).unwrap();
        assert_same(&tensors_of(&checkpoint), &copy.expected(), case);
        assert_eq!(checkpoint.catalog.flat, Some(layout_of(&copy.layout)), "{case}");
        let warnings = &checkpoint.catalog.warnings;
        assert!(warnings.len() == 1 && warnings[0].contains("`head.weight` is assumed to be tied to `emb.weight`"));
    }
    let (src, out) = (Copy::new("flat3", "flat"), Copy::new("flat3", "flat"));
    let options = format!("--like {}", full.display());
    succeed("consolidate", &[&src.path(), &out.at("model")], &options);
    assert_same(&read_safetensors(&out.at("model")), &src.model(), "--like");
}

/// Loaders and other wrappings rely on this order: parameters as in `named_parameters()`, and buffers after the
/// parameters of their module.
#[test]
fn names_have_the_order_of_the_model() {
    for name in ["views", "flat"] {
        let copy = Copy::with_layout("flat2", name);
        let state = state_dict::model(&copy.opened(None).unwrap().catalog.state);
        let found: Vec<String> = state.tensors.iter().map(|(name, _)| name.to_string()).collect();
        let buffers = ["freqs", "seen", "layers.0.scale", "layers.1.scale", "head.weight"];
        let parameters: Vec<&String> = found.iter().filter(|name| !buffers.contains(&name.as_str())).collect();
        let views = Copy::new("flat2", "views").layout;
        let optimizer: Vec<String> = serde_json::from_value(views["optimizer"][0].clone()).unwrap();
        assert_eq!(parameters, optimizer.iter().collect::<Vec<_>>(), "{name}");
        assert_eq!(found.last().map(String::as_str), Some("head.weight"), "{found:?}");
        assert_eq!(
            found.iter().position(|name| name == "layers.0.scale"),
            found.iter().position(|name| name == "layers.0.wq.weight").map(|at| at - 1),
            "{found:?}"
        );
    }
}

/// A flat layout given by the user describes the model. The number of ranks and `use_orig_params` come from the files.
#[test]
fn flat_layout_of_another_world_size_is_accepted() {
    for (case, name, other) in [("flat2", "flat", "views"), ("flat3", "views", "flat"), ("flat_hybrid", "flat", "flat")]
    {
        let (copy, given) = (Copy::new(case, name), Copy::with_layout("flat4", other));
        let whole = copy.at("whole.pt");
        let options = format!("--series all --flat-layout {}", given.path().join("flat_layout.json").display());
        succeed("unshard", &[&copy.path(), &whole], &options);
        assert_same(&read(&whole), &copy.expected(), case);
    }
}

/// With NO_SHARD, files hold complete parameters. A flat layout is still needed for the optimizer: for its parameter
/// numbers, and without `use_orig_params` for its state.
#[test]
fn no_shard_parameters_are_whole() {
    for name in ["views", "flat"] {
        let bare = Copy::new("flat_none", name);
        if name == "flat" {
            let error = bare.opened(None).unwrap_err().to_string();
            assert_contains(
                &error,
                &["the optimizer has 5 parameters", "does not match the 5 units with 25 parameters"],
            );
        } else {
            let checkpoint = bare.opened(None).unwrap();
            assert_eq!((checkpoint.format, checkpoint.catalog.flat.is_none()), (Format::TorchRanks, true));
        }
        let copy = Copy::with_layout("flat_none", name);
        let checkpoint = copy.opened(None).unwrap();
        assert_eq!(checkpoint.format, Format::TorchRanks);
        assert_same(&tensors_of(&checkpoint), &copy.expected(), name);
        assert_eq!(checkpoint.catalog.flat, Some(layout_of(&copy.layout)));
        assert!(checkpoint.catalog.conflicts().is_empty());
    }
}

/// Optimizer state that PyTorch saved with names as keys is read without a flat layout.
#[test]
fn named_optimizer_state_is_read_without_a_layout() {
    for name in ["sharded", "full/optim.pt"] {
        let expected = below("optim.", &Truth::load("flat2/truth").tensors);
        let found = read(&fixture("flat2").join(name));
        let found = if name == "sharded" { below("optim.", &found) } else { found };
        assert_same(&found, &expected, name);
    }
}

#[test]
fn optimizer_series_is_read_alone() {
    for name in ["views", "flat"] {
        let copy = Copy::with_layout("flat4", name);
        let expected = below("optim.", &copy.truth.tensors);
        let whole = copy.at("optim.pt");
        succeed("unshard", &[&copy.path(), &whole], "--series optim");
        assert_same(&read(&whole), &expected, name);
        // The model beside the optimizer, or `--like`, gives the flat layout.
        let like = Copy::with_layout("flat4", "views");
        fs::remove_file(copy.path().join("flat_layout.json")).unwrap();
        let flat = FlatKnowledge { like: Some(like.path()), ..FlatKnowledge::default() };
        let series = dtshard::format::SeriesChoice::Named(vec!["optim".into()]);
        let options = ReadOptions { flat, series, ..ReadOptions::default() };
        let checkpoint = Checkpoint::open(&copy.path(), &options).unwrap();
        assert_same(&tensors_of(&checkpoint), &expected, name);
        assert_eq!(checkpoint.format, Format::FsdpFlat);
    }
}

/// Parameter groups contain names, with the order and the hyperparameters that the files have.
#[test]
fn parameter_groups_have_names() {
    for (case, name) in [("flat2", "groups"), ("flat2", "flat"), ("flat_none", "flat")] {
        let copy = Copy::with_layout(case, name);
        let checkpoint = copy.opened(None).unwrap();
        let layout = layout_of(&copy.layout);
        let state = &checkpoint.catalog.state;
        let names = |index: usize| {
            let name = |name: &str| Key::Name(name.into());
            let group = Path(vec![name("optim"), name("param_groups"), Key::Index(index as u64), name("params")]);
            let Some(Value::List(names)) = group.find(state) else { panic!("{group}") };
            names.iter().map(|name| name.as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        for (index, group) in layout.optimizer.clone().unwrap().iter().enumerate() {
            let expected = group.iter().flat_map(|name| {
                let unit = layout.units.iter().find(|unit| unit.key() == *name);
                unit.map_or(vec![name.clone()], |unit| unit.params.iter().map(|param| param.fqn.clone()).collect())
            });
            assert_eq!(names(index), expected.map(|name| name.to_string()).collect::<Vec<_>>(), "{case}/{name}");
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Every verb
// ---------------------------------------------------------------------------------------------------------------

#[test]
fn every_verb_reads_flat_parameters() {
    for case in ["flat3", "flat_hybrid", "flat_bf16"] {
        for name in folders(case) {
            let copy = Copy::with_layout(case, name);
            let (src, what) = (copy.path(), format!("{case}/{name}"));
            let (model, whole, dcp) = (copy.at("model"), copy.at("whole.pt"), copy.at("dcp"));
            succeed("consolidate", &[&src, &model], "--verify");
            assert_same(&read_safetensors(&model), &copy.model(), &what);
            assert!(!model.join("flat_layout.json").exists());
            succeed("unshard", &[&src, &whole], "--series all --verify --check-replicas");
            assert_same(&read(&whole), &copy.expected(), &what);
            succeed("reshard", &[&src, &dcp], "--to dcp --mesh dp=2,tp=3 --placements S(0),S(1) --verify");
            assert_same(&read(&dcp), &copy.expected(), &what);
            succeed("verify", &[&src], "");
            succeed("verify", &[&src, &dcp], "");
        }
    }
}

#[test]
fn from_selects_the_kind_of_rank_files() {
    let copy = Copy::with_layout("flat2", "flat");
    for format in ["fsdp-flat", "torch-ranks"] {
        assert_eq!(inspect(&copy.path(), &format!("--brief --from {format}"))["format"], "fsdp-flat");
    }
    let outcome = expect(2, "inspect", &[&fixture("fsdp4/ranks")], "--from fsdp-flat");
    assert!(outcome.stderr.contains("contains no checkpoint of format fsdp-flat"), "{outcome:?}");
}

#[test]
fn replicas_cover_a_missing_rank() {
    for name in ["views", "flat"] {
        let copy = Copy::with_layout("flat_hybrid", name);
        for series in ["model", "optim"] {
            fs::remove_file(copy.path().join(format!("{series}_world_size_4_rank_2.pt"))).unwrap();
        }
        let _ = fs::remove_file(copy.path().join("extra_state_world_size_4_rank_2.pt"));
        let outcome = expect(2, "consolidate", &[&copy.path(), &copy.at("out")], "");
        assert!(outcome.stderr.contains("use --allow-missing to continue without these files"), "{outcome:?}");
        let whole = copy.at("whole.pt");
        succeed("unshard", &[&copy.path(), &whole], "--series all --allow-missing");
        assert_same(&read(&whole), &copy.expected(), name);
    }
    let copy = Copy::with_layout("flat4", "flat");
    fs::remove_file(copy.path().join("model_world_size_4_rank_1.pt")).unwrap();
    let outcome = expect(2, "consolidate", &[&copy.path(), &copy.at("out")], "");
    assert!(outcome.stderr.contains("missing: rank 1") && !outcome.stderr.contains("--allow-missing"), "{outcome:?}");
    let outcome = expect(2, "consolidate", &[&copy.path(), &copy.at("out")], "--allow-missing");
    assert!(outcome.stderr.contains("gap at"), "{outcome:?}");
    assert!(!copy.at("out").exists());
}

// ---------------------------------------------------------------------------------------------------------------
// Refusals
// ---------------------------------------------------------------------------------------------------------------

/// A case of a refused layout: the folder, a change of its flat layout, and the expected message.
type Change = (&'static str, fn(&mut Json), &'static str);

fn units(layout: &mut Json) -> &mut Vec<Json> {
    layout["units"].as_array_mut().unwrap()
}

fn params(layout: &mut Json, unit: usize) -> &mut Vec<Json> {
    layout["units"][unit]["params"].as_array_mut().unwrap()
}

const CHANGES: [Change; 15] = [
    (
        "flat",
        |layout| drop(units(layout).pop()),
        "expected exactly the flat parameters of the layout, found also `tiny._flat_param`",
    ),
    (
        "flat",
        |layout| {
            let mut unit = units(layout)[4].clone();
            unit["module"] = json!("more");
            unit["params"] = json!([{"fqn": "more.weight", "shape": [2]}]);
            units(layout).push(unit);
        },
        "expected exactly the flat parameters of the layout, found no `more._flat_param`",
    ),
    (
        "flat",
        |layout| drop(params(layout, 1).pop()),
        "expected a flat parameter of 84 elements for its 4 parameters, found 90 elements; the job may have other units",
    ),
    (
        "flat",
        |layout| params(layout, 1).swap(0, 3),
        "expected layers.0.wq.bias before layers.0.norm.weight, as in the module order of its _metadata",
    ),
    ("flat", |layout| params(layout, 0).retain(|param| param["shared_with"].is_null()), ""),
    (
        "flat",
        |layout| {
            params(layout, 0).retain(|param| param["shared_with"].is_null());
            params(layout, 0).push(json!({"fqn": "head.weight", "shape": [11, 6]}));
        },
        "found 336 elements; this length would fit if `emb.weight` and `head.weight` were tied",
    ),
    (
        "flat",
        |layout| layout["use_orig_params"] = json!(true),
        "expected original parameters beside flat parameters (use_orig_params is true), found only flat parameters",
    ),
    (
        "views",
        |layout| layout["use_orig_params"] = json!(false),
        "expected only flat parameters (use_orig_params is false), found original parameters beside flat parameters",
    ),
    (
        "views",
        |layout| units(layout)[1]["align_numel"] = json!(1),
        "found 94 elements, the number that align_numel 4 gives",
    ),
    ("views", |layout| params(layout, 1).swap(3, 4), "layers.0.norm.bias: the flat layout differs"),
    (
        "views",
        |layout| params(layout, 0).retain(|param| param["fqn"] != "conv.weight"),
        "the root unit: the flat layout differs between",
    ),
    ("views", |layout| params(layout, 0)[5]["fqn"] = json!("norm.tilt"), "norm.tilt: the flat layout differs"),
    ("flat", |layout| layout["world_size"] = json!(4), "series `model`: expected the files of 4 ranks"),
    ("flat", |layout| layout["shard_group_size"] = json!(1), "expected shards over 1 of 2 ranks"),
    ("flat", |layout| units(layout)[0]["dtype"] = json!("bf16"), "expected bf16, found f32"),
];

#[test]
fn layout_that_does_not_fit_is_refused() {
    for (name, change, expected) in CHANGES {
        let copy = Copy::new("flat2", name);
        let mut layout = copy.layout.clone();
        change(&mut layout);
        copy.write_layout(&layout);
        let out = copy.at("out");
        let expected = expected.replace("{layout}", &copy.at("src/flat_layout.json").display().to_string());
        let outcome = expect(if expected.is_empty() { 0 } else { 2 }, "consolidate", &[&copy.path(), &out], "");
        assert!(outcome.stderr.contains(&expected), "expected {expected}, found {}", outcome.stderr);
        assert_eq!(out.exists(), expected.is_empty());
    }
}

#[test]
fn flat_parameters_without_a_layout_are_refused() {
    for (name, lacking) in [("views", "but not the shapes"), ("flat", "but not the names, order and shapes")] {
        let copy = Copy::new("flat2", name);
        for verb in ["consolidate", "unshard", "reshard"] {
            let outcome = expect(2, verb, &[&copy.path(), &copy.at("out")], "");
            assert!(outcome.stderr.contains(lacking), "{outcome:?}");
            assert!(outcome.stderr.contains("docs/how-to/fsdp1.md"), "{outcome:?}");
            assert!(!copy.at("out").exists());
        }
        // `inspect` shows the flat parameters, with a warning.
        let outcome = succeed("verify", &[&copy.path()], "");
        assert!(outcome.stderr.contains("give --flat-layout FILE or --like CKPT to see the "), "{outcome:?}");
    }
    // A format that records no order of parameters gives neither a layout of flat parameters nor strides.
    let like = tempfile::tempdir().unwrap();
    let like = like.path().join("like");
    succeed("consolidate", &[&Copy::with_layout("flat2", "views").path(), &like], "");
    for (name, expected) in [("flat", "does not record their order"), ("views", "may be row-major or channels_last")] {
        let error = Copy::new("flat2", name).refused_like(&like).stderr;
        assert!(error.contains(expected), "{error}");
    }
    // Each parameter group has its own order of parameters.
    let copy = Copy::with_layout("flat2", "groups");
    let mut layout = copy.layout.clone();
    layout.as_object_mut().unwrap().remove("optimizer");
    copy.write_layout(&layout);
    assert!(copy.assert_refused().stderr.contains("the parameters of its 2 groups are unknown"));
}

/// A torch file that was made from sorted names does not record the order of registration.
#[test]
fn sorted_names_are_refused_as_order() {
    let copy = Copy::with_layout("flat2", "views");
    let (whole, sorted) = (copy.at("model.safetensors"), copy.at("sorted.pt"));
    succeed("consolidate", &[&copy.path(), &whole], "");
    succeed("unshard", &[&whole, &sorted], "");
    let error = Copy::new("flat2", "flat").refused_like(&sorted).stderr;
    assert!(error.contains("(torch, sorted by name) does not record their order"), "{error}");
    let outcome = expect(2, "flatten", &[&sorted, &copy.at("out")], "--world-size 2 --wrap layers.*");
    assert!(outcome.stderr.contains("the names in the state dict are sorted"), "{outcome:?}");
}

/// Returns the strides of those tensors of a torch file that are not row-major.
fn strides(path: &path::Path) -> BTreeMap<String, Vec<u64>> {
    let checkpoint = Checkpoint::open(path, &ReadOptions::default()).unwrap();
    let permuted = checkpoint.catalog.tensors.iter().filter_map(|entry| {
        let stride = entry.chunks.get(0).strides?;
        Some((entry.fqn.to_string(), stride.to_vec()))
    });
    permuted.collect()
}

/// Unsharded tensors have the strides of the module's parameters, so they can be flattened again and used with
/// `--like`.
#[test]
fn unsharded_parameters_keep_their_strides() {
    let channels_last = |name: &str| (name.to_owned(), vec![8, 1, 4, 2]);
    for (case, name) in [("flat2", "flat"), ("flat2", "views"), ("flat3", "flat"), ("flat_hybrid", "flat")] {
        let copy = Copy::with_layout(case, name);
        let (whole, state) = (copy.at("whole.pt"), copy.at("optim.pt"));
        succeed("unshard", &[&copy.path(), &whole], "");
        assert_eq!(strides(&whole), BTreeMap::from([channels_last("conv.weight")]), "{case}/{name}");
        assert_same(&read(&whole), &copy.model(), case);
        succeed("unshard", &[&copy.path(), &state], "--series optim --dtype f64");
        let expected = ["exp_avg", "exp_avg_sq"].map(|key| channels_last(&format!("state.conv.weight.{key}")));
        assert_eq!(strides(&state), BTreeMap::from(expected), "{case}/{name}");

        let again = Copy::new(case, name);
        let outcome =
            succeed("unshard", &[&again.path(), &again.at("again.pt")], &format!("--like {}", whole.display()));
        assert!(!outcome.stderr.contains("row-major"), "{outcome:?}");
        assert_same(&read(&again.at("again.pt")), &copy.model(), case);
    }
    let copy = Copy::with_layout("flat2", "flat");
    let (whole, out) = (copy.at("whole.pt"), copy.at("out"));
    succeed("unshard", &[&copy.path(), &whole], "");
    let options = "--world-size 2 --wrap layers.* --wrap layers.1.inner --wrap tiny --buffers freqs --buffers **.scale";
    succeed("flatten", &[&whole, &out], options);
    let written: Json = serde_json::from_slice(&fs::read(out.join("flat_layout.json")).unwrap()).unwrap();
    assert_eq!(written["units"], copy.layout["units"]);
}

/// Tensors of a torch file keep their strides if their elements fill a contiguous range of memory. Expanded tensors and
/// tensors with gaps do not keep them.
#[test]
fn torch_file_keeps_strides() {
    let folder = tempfile::tempdir().unwrap();
    let (source, whole, cast) =
        (fixture("torch_file/model.pt"), folder.path().join("a.pt"), folder.path().join("b.pt"));
    succeed("unshard", &[&source, &whole], "");
    let expected = [("stride.transposed", vec![1, 4]), ("stride.channels_last", vec![12, 1, 6, 3])];
    let expected = BTreeMap::from(expected.map(|(name, stride)| (name.to_owned(), stride)));
    assert_eq!(strides(&whole), expected);
    assert_same(&read(&whole), &read(&source), "torch_file");
    succeed("verify", &[&source, &whole], "");
    succeed("consolidate", &[&source, &cast], "--to torch --dtype bf16 --verify");
    assert_eq!(strides(&cast), expected);
}

/// The parameter numbers of the optimizer follow the order of units in the files, whatever the order of units in the
/// flat layout.
#[test]
fn optimizer_numbers_follow_the_order_of_the_files() {
    let copy = Copy::with_layout("flat2", "flat");
    let mut layout = copy.layout.clone();
    layout.as_object_mut().unwrap().remove("optimizer");
    // A unit without parameters has no parameter number.
    units(&mut layout).push(json!({"module": "act", "params": []}));
    units(&mut layout).reverse();
    copy.write_layout(&layout);
    assert_same(&tensors_of(&copy.opened(None).unwrap()), &copy.expected(), "units in another order");
}

/// A tied name in the flat layout that is the name of a buffer is refused, because it would replace the buffer.
#[test]
fn tied_name_of_another_tensor_is_refused() {
    for name in ["views", "flat"] {
        let copy = Copy::new("flat2", name);
        let mut layout = copy.layout.clone();
        params(&mut layout, 0).push(json!({"fqn": "freqs", "shared_with": "norm.bias"}));
        copy.write_layout(&layout);
        assert!(copy.assert_refused().stderr.contains("freqs: the flat layout differs"), "{name}");
    }
}

#[test]
fn damaged_file_is_refused() {
    let copy = Copy::with_layout("flat2", "flat");
    let path = copy.path().join("model_world_size_2_rank_1.pt");
    let content = fs::read(&path).unwrap();
    fs::write(&path, &content[..content.len() / 2]).unwrap();
    let outcome = expect(2, "consolidate", &[&copy.path(), &copy.at("out")], "");
    assert!(outcome.stderr.contains("model_world_size_2_rank_1.pt"), "{outcome:?}");
    assert!(!copy.at("out").exists());
    // The file is a copy of another rank's file.
    fs::copy(copy.path().join("model_world_size_2_rank_0.pt"), &path).unwrap();
    assert!(copy.assert_refused().stderr.contains("a ShardedTensor saved by rank 0"));
    let copy = Copy::new("flat2", "flat");
    fs::write(copy.path().join("flat_layout.json"), "{").unwrap();
    assert!(copy.assert_refused().stderr.contains("flat_layout.json: line 1, column "));
}
