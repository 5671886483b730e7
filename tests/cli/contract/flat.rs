//! Tests of the flat parameters of FSDP1: `flatten`, and the other verbs with flat parameters.
//!
//! Reading and refused layouts are tested in `fsdp_flat`, and writing without the command line in `flat_write` (library).

use std::fs;
use std::path::{Path, PathBuf};

use dtshard::format::torch::{TensorNode, View};
use serde_json::{Value as Json, json};

use crate::common::env::TestEnv;
use crate::common::flat::{self, copy_with_layout, layout_file};
use crate::common::{Truth, assert_same, below, bytes_of, copy_folder, expect, fixture, read, succeed};
use crate::contract::{assert_contains, contents};
use crate::rank_file::{self, Comparison};

/// Returns the path of the model that PyTorch saved as `FULL_STATE_DICT`.
pub fn full() -> PathBuf {
    fixture("flat2/full/model.pt")
}

/// Copies the files of a fixture, together with their flat layout.
pub fn folder(env: &TestEnv, case: &str, name: &str) -> PathBuf {
    let path = env.path(&format!("{case}.{name}"));
    copy_with_layout(case, name, &path);
    path
}

/// Asserts that the files of all ranks equal the files that PyTorch saved.
#[track_caller]
pub fn check_files(made: &Path, case: &str, name: &str, series: &[&str]) {
    let layout = flat::layout(case, name);
    let ranks = layout["world_size"].as_u64().unwrap();
    // PyTorch keeps the strides of whole parameters, which `flat_roots` has outside all units.
    let is_sharded = layout["shard_group_size"].as_u64() != Some(1) && case != "flat_roots";
    for (series, rank) in series.iter().flat_map(|series| (0..ranks).map(move |rank| (series, rank))) {
        let file = format!("{series}_world_size_{ranks}_rank_{rank}.pt");
        Comparison::run(&made.join(&file), &fixture(case).join(name).join(&file), is_sharded);
    }
}

pub const BOTH: [&str; 2] = ["model", "optim"];

// ---------------------------------------------------------------------------------------------------------------
// flatten
// ---------------------------------------------------------------------------------------------------------------

/// The sources have another world size, with or without `use_orig_params`. A PyTorch job saved the expected files.
#[test]
fn flatten_to_another_world_size_writes_the_files_of_pytorch() {
    let env = TestEnv::new();
    let (views, flat) = (folder(&env, "flat3", "views"), folder(&env, "flat3", "flat"));
    let targets = [
        ("flat2", "--world-size 2"),
        ("flat4", "--world-size 4"),
        ("flat_mixed", "--world-size 2"),
        ("flat_hybrid", "--world-size 4 --strategy hybrid-shard --shard-group-size 2"),
        ("flat_none", "--world-size 2 --strategy no-shard"),
    ];
    for (case, options) in targets {
        for (source, to, more) in [
            (&views, "views", ""),
            (&views, "flat", "--use-orig-params=false"),
            (&flat, "flat", ""),
            (&flat, "views", "--use-orig-params"),
        ] {
            let from = source.extension().unwrap().display();
            let mixed = if (case, to) == ("flat_mixed", "views") { "--forward-dtype bf16" } else { "" };
            let options = format!("{options} {more} {mixed}");
            let made = env.make("flatten", source, &format!("{case}-{from}-{to}"), &options);
            check_files(&made.path, case, to, &BOTH);
            let layout = flat::read_layout(&made.path.join("flat_layout.json"));
            let truth = flat::layout(case, to);
            for key in ["world_size", "shard_group_size", "use_orig_params", "optimizer"] {
                assert_eq!(layout[key], truth[key], "{case}: {key}");
            }
        }
    }
}

/// With the strategy `NO_SHARD`, every rank holds complete flat parameters. A job of one rank uses it, too.
#[test]
fn no_shard_checkpoint_is_flattened() {
    let env = TestEnv::new();
    for name in ["views", "flat"] {
        let source = folder(&env, "flat_none", name);
        let made = env.make("flatten", &source, name, "--world-size 4 --strategy full-shard");
        check_files(&made.path, "flat4", name, &BOTH);
        let kept = env.make("flatten", &source, &format!("{name}-kept"), "--world-size 3");
        let layout = flat::read_layout(&kept.path.join("flat_layout.json"));
        assert_eq!((&layout["world_size"], &layout["shard_group_size"]), (&json!(3), &json!(1)));
    }
}

/// `reshard` without a mesh writes the files of a job with `NO_SHARD` back: SRC or `--like` consists of such files.
#[test]
fn no_shard_checkpoint_is_written_back() {
    let env = TestEnv::new();
    for name in ["views", "flat"] {
        let job = folder(&env, "flat_none", name);
        let whole = env.make("unshard", &job, &format!("{name}.pt"), "--series all");
        let like = format!("--like {}", job.display());
        for (source, to, options) in
            [(&whole.path, "like", &*like), (&job, "itself", ""), (&job, "ranks", "--to torch-ranks")]
        {
            let made = env.make("reshard", source, &format!("{name}-{to}"), options);
            check_files(&made.path, "flat_none", name, &BOTH);
        }
        // A mesh asks for tensors that are sharded one by one.
        let sharded = env.make("reshard", &job, &format!("{name}-sharded"), "--mesh fsdp=2 --placements S(0)");
        assert!(!sharded.path.join("flat_layout.json").exists());
    }
}

/// Parameters outside all units (`ignored_modules`, or several roots of FSDP1) and their optimizer state stay whole.
#[test]
fn parameters_outside_units_keep_their_state() {
    for case in ["flat_ignored", "flat_roots"] {
        let env = TestEnv::new();
        let tensors = Truth::load(&format!("{case}/truth")).tensors;
        for (name, other, views) in [("views", "flat", "true"), ("flat", "views", "false")] {
            let source = folder(&env, case, name);
            let whole = env.make("unshard", &source, &format!("{name}.pt"), "--series all");
            assert_same(&below("model.", &read(&whole.path)), &below("model.", &tensors), case);
            assert_same(&below("optim.state.", &read(&whole.path)), &below("optim.state.", &tensors), case);
            let three = env.make("flatten", &source, &format!("{name}-3"), "--world-size 3");
            let two = env.make("flatten", &three.path, &format!("{name}-2"), "--world-size 2");
            check_files(&two.path, case, name, &BOTH);
            let to_other = format!("--use-orig-params={}", if views == "true" { "false" } else { "true" });
            check_files(&env.make("flatten", &source, &format!("{name}-{other}"), &to_other).path, case, other, &BOTH);
            let like = format!("--like {}", source.display());
            check_files(&env.make("flatten", &whole.path, &format!("{name}-like"), &like).path, case, name, &BOTH);
            for to in ["dcp", "torch-ranks"] {
                let made = env.make("reshard", &source, &format!("{name}-{to}"), &format!("--mesh fsdp=3 --to {to}"));
                succeed("verify", &[&made.path, &source], "");
            }
        }
    }
}

/// Trained parameters that are plain beside ShardedTensors are outside all units: FSDP1 loads them from plain tensors.
#[test]
fn plain_parameters_beside_sharded_tensors_stay_plain() {
    let env = TestEnv::new();
    for case in ["flat_ignored", "flat_roots"] {
        let source = fixture(case).join("sharded");
        let three = env.make("reshard", &source, &format!("{case}-3"), "--mesh fsdp=3");
        let two = env.make("reshard", &three.path, &format!("{case}-2"), "--mesh fsdp=2");
        let same = env.make("reshard", &source, &format!("{case}-same"), "");
        for made in [&two.path, &same.path] {
            for (series, rank) in BOTH.iter().flat_map(|series| (0..2).map(move |rank| (series, rank))) {
                let file = format!("{series}_world_size_2_rank_{rank}.pt");
                Comparison::run(&made.join(&file), &source.join(&file), false);
            }
        }
        // A rule shards such a parameter on demand.
        env.make("reshard", &source, &format!("{case}-rule"), "--mesh fsdp=2 --placements proj.weight=S(0)");
    }
}

#[test]
fn name_in_the_optimizer_that_no_tensor_has_is_an_error() {
    let env = TestEnv::new();
    for name in ["views", "flat"] {
        let source = folder(&env, "flat_ignored", name);
        let path = source.join("flat_layout.json");
        let mut layout = flat::read_layout(&path);
        let names = layout["optimizer"][0].as_array_mut().unwrap();
        let own = names.iter_mut().find(|name| **name == json!("proj.weight")).unwrap();
        *own = json!("prj.weight");
        fs::write(&path, layout.to_string()).unwrap();
        env.refuse("unshard", &source, "x.pt", "--series all");
    }
}

/// Several parameter groups stay separate; a single series stays single.
#[test]
fn parameter_groups_and_single_series_are_kept() {
    let env = TestEnv::new();
    for name in ["groups", "one_file"] {
        let source = folder(&env, "flat2", name);
        let four = env.make("flatten", &source, &format!("{name}-4"), "--world-size 4");
        let two = env.make("flatten", &four.path, &format!("{name}-2"), "--world-size 2");
        let series: &[&str] = if name == "groups" { &BOTH } else { &["checkpoint"] };
        check_files(&two.path, "flat2", name, series);
    }
}

#[test]
fn cast_changes_the_alignment() {
    let env = TestEnv::new();
    for name in ["views", "flat"] {
        let source = folder(&env, "flat2", name);
        let made = env.make("flatten", &source, name, "--dtype bf16 --series model");
        check_files(&made.path, "flat_bf16", name, &["model"]);
        assert_contains(made.closing_line(), &["; cast ", " f32->bf16"]);
    }
}

/// Checkpoints that do not record the order of parameters take it from a flat layout, or from flat parameters.
/// `torch.compile` adds a component to names. The rank files and their layout keep it, and readers ignore it.
#[test]
fn names_of_a_compiled_model_are_flattened_and_read_back() {
    let env = TestEnv::new();
    let plain = full();
    let compiled = env.make("unshard", &plain, "compiled.pt", "--add-prefix _orig_mod. --keep-names").path;
    for (name, options) in [("views", "--use-orig-params"), ("flat", "")] {
        let made = env.make("flatten", &compiled, name, &format!("--world-size 5 {options}")).path;
        succeed("verify", &[&made, &plain], "");
        let two = env.make("flatten", &made, &format!("{name}-2"), "--world-size 2").path;
        succeed("verify", &[&two, &plain], "");
    }
}

#[test]
fn sharded_tensors_are_flattened_with_like_or_flat_layout() {
    let env = TestEnv::new();
    for name in ["views", "flat"] {
        let like = folder(&env, "flat4", name);
        let layout = like.join("flat_layout.json");
        let ways = [format!("--like {}", like.display()), format!("--flat-layout {}", layout.display())];
        let targets = [
            ("ranks", "--to torch-ranks --mesh dp=2,tp=2 --placements S(0),S(1)"),
            ("dcp", "--to dcp --mesh dp=3"),
            ("sharded", "--to torch-ranks --mesh fsdp=2 --tensor-class sharded-tensor"),
        ];
        for (kind, options) in targets {
            let between = env.make("reshard", &like, &format!("{name}-{kind}"), options).path;
            for (index, way) in ways.iter().enumerate() {
                let made = env.make("flatten", &between, &format!("{name}-{kind}-{index}"), way);
                assert_same(&read(&made.path), &read(&like), kind);
                assert_same_storages(&made.path, &like);
            }
        }
        let between = env.make("consolidate", &like, &format!("{name}-model"), "").path;
        let made = env.make("flatten", &between, &format!("{name}-again"), &ways[0]);
        let expected = below("model.", &read(&like));
        assert_same(&read(&made.path), &expected, "safetensors");
    }
    let sharded = fixture("flat2/sharded");
    let made = env.make("flatten", &sharded, "own", &format!("--like {}", env.path("flat4.flat").display()));
    assert_same(&read(&made.path), &read(&sharded), "ShardedTensors");
}

/// Asserts that the shards of flat parameters and of their optimizer state have the same bytes, including padding.
#[track_caller]
fn assert_same_storages(found: &Path, expected: &Path) {
    for file in bytes_of(expected).into_keys().filter(|name| name.extension().is_some_and(|suffix| suffix == "pt")) {
        let [own, real] = [found, expected].map(|root| rank_file::read(&root.join(&file)));
        let stretches = |(files, contents): &rank_file::Opened| -> Vec<Vec<u8>> {
            let view = |found: &TensorNode| match found {
                TensorNode::Plain(view) => Some(view.clone()),
                TensorNode::Sharded { local, .. } => local.first().map(|(_, view)| view.clone()),
                TensorNode::Distributed { .. } | TensorNode::Unreadable(_) => None,
            };
            let views = contents.tensors.iter().filter_map(view);
            let mut all: Vec<Vec<u8>> = views.map(|view: View| rank_file::storage(files, contents, &view)).collect();
            all.sort();
            all
        };
        assert!(stretches(&own) == stretches(&real), "{}", file.display());
    }
}

/// Most ranks hold no element of the smaller units.
#[test]
fn more_ranks_than_elements_are_written_and_read_back() {
    let env = TestEnv::new();
    for name in ["views", "flat"] {
        let source = folder(&env, "flat3", name);
        let many = env.make("flatten", &source, &format!("{name}-many"), "--world-size 40 --verify").path;
        assert_same(&read(&many), &read(&source), name);
        let back = env.make("flatten", &many, &format!("{name}-back"), "--world-size 3").path;
        check_files(&back, "flat3", name, &BOTH);
    }
}

#[test]
fn flatten_writes_identical_files_and_dry_run_writes_none() {
    let env = TestEnv::new();
    let source = folder(&env, "flat3", "views");
    let one = env.make("flatten", &source, "one", "--world-size 4 --threads 1 --verify");
    let dry = succeed("flatten", &[&source, &env.path("dry")], "--world-size 4 --dry-run --json").json();
    assert!(!env.path("dry").exists());
    let two = succeed("flatten", &[&source, &env.path("two")], "--world-size 4 --threads 4 --json").json();
    assert_eq!(contents(&one.path), contents(&env.path("two")));
    for key in ["files", "tensors", "bytes_written"] {
        assert_eq!(dry[key], two[key], "{key}");
    }
    assert_eq!(two["target"]["format"], "fsdp-flat");
    // A second run does not change an existing destination.
    let again = env.refuse("flatten", &source, "one", "--world-size 2");
    assert_eq!(again.code, 2);
    env.make("flatten", &source, "one", "--world-size 4 --overwrite");
    assert_eq!(contents(&one.path), contents(&env.path("two")));
}

// ---------------------------------------------------------------------------------------------------------------
// Round trips
// ---------------------------------------------------------------------------------------------------------------

#[test]
fn flat_parameters_resharded_and_back_are_identical() {
    let env = TestEnv::new();
    for name in ["views", "flat"] {
        let source = folder(&env, "flat3", name);
        let eight = env.make("reshard", &source, &format!("{name}-8"), "--mesh fsdp=8").path;
        let six = env.make("reshard", &eight, &format!("{name}-6"), "--mesh fsdp=6").path;
        let again = env.make("reshard", &six, &format!("{name}-8-again"), "--mesh fsdp=8").path;
        assert_eq!(contents(&again), contents(&eight), "{name}");
        let hybrid = env.make("reshard", &eight, &format!("{name}-h"), "--mesh replicate=2,shard=4").path;
        let again = env.make("reshard", &hybrid, &format!("{name}-h-again"), "--mesh fsdp=8").path;
        assert_eq!(contents(&again), contents(&eight), "{name}");
        check_files(&env.make("reshard", &eight, &format!("{name}-3"), "--mesh fsdp=3").path, "flat3", name, &BOTH);
    }
}

/// With `--wrap`, a torch file gives the order, and the flat parameters of SRC show which tensors are parameters. The file has
/// a copy of the tied weight for each name, and buffers of floats.
#[test]
fn new_units_of_flat_parameters_have_no_buffers_and_keep_ties() {
    let env = TestEnv::new();
    let like = format!("--like {}", full().display());
    let wrap = "--wrap layers.* --wrap layers.1.inner --wrap tiny";
    for (name, views) in [("views", true), ("flat", false)] {
        let source = folder(&env, "flat3", name);
        let options = format!("--world-size 2 --use-orig-params={views} {like}");
        let same = env.make("flatten", &source, &format!("{name}-same"), &format!("{options} {wrap}"));
        check_files(&same.path, "flat2", name, &BOTH);
        let options = options.replace("=false", "=true");
        let fewer = env.make("flatten", &source, &format!("{name}-fewer"), &format!("{options} --wrap layers.*"));
        let layout = flat::read_layout(&fewer.path.join("flat_layout.json"));
        let names = |unit: usize| -> Vec<String> {
            let params = layout["units"][unit]["params"].as_array().unwrap();
            params.iter().map(|param| param["fqn"].as_str().unwrap().to_owned()).collect()
        };
        let root = ["emb", "conv", "proj", "proj", "norm", "norm", "tiny", "tiny", "head"];
        assert_eq!(names(0).iter().map(|name| name.split('.').next().unwrap()).collect::<Vec<_>>(), root, "{name}");
        assert_eq!(names(1).len(), 5, "{name}");
        assert_eq!(layout["units"][0]["params"][8]["shared_with"], "emb.weight", "{name}");
        assert_eq!(layout["units"][0]["params"][1]["stride"], json!([8, 1, 4, 2]), "{name}");
        succeed("verify", &[&fewer.path, &source], "");
    }
    let source = folder(&env, "flat3", "views");
    let refuse = |options: &str| {
        env.refuse("flatten", &source, "x", &format!("--world-size 2 --use-orig-params {options}"));
    };
    refuse(&format!("--wrap layers.* {like} --buffers head.weight"));
    refuse(&format!("--wrap layers.* --wrap head {like}"));
    let other = fixture("llama_tiny/ranks");
    refuse(&format!("--wrap model.layers.* --like {}", other.display()));
}

/// The optimizer of SRC has the names of all parameters, also if another checkpoint gives the order.
#[test]
fn optimizer_of_the_source_shows_buffers_of_the_ordered_model() {
    let env = TestEnv::new();
    let source = folder(&env, "flat3", "views");
    let dcp = env.make("reshard", &source, "dcp", "--to dcp --mesh fsdp=2").path;
    let options = format!("--world-size 2 --use-orig-params --wrap layers.* --like {}", full().display());
    env.refuse("flatten", &dcp, "x", &options);
    env.refuse("flatten", &dcp, "x", &format!("{options} --buffers freqs --buffers **.scale"));
}

// ---------------------------------------------------------------------------------------------------------------
// Refusals
// ---------------------------------------------------------------------------------------------------------------

#[test]
fn flatten_without_a_known_order_is_refused() {
    let env = TestEnv::new();
    let source = folder(&env, "flat3", "flat");
    let dcp = env.make("reshard", &source, "dcp", "--to dcp --mesh fsdp=2").path;
    env.refuse("flatten", &dcp, "x", "--world-size 2 --wrap layers.*");
    let model = env.make("consolidate", &source, "model", "").path;
    let options = "--world-size 2 --wrap layers.*";
    env.refuse("flatten", &model, "x", options);
    env.refuse("flatten", &source, "x", options);
    let like = format!("--world-size 2 --wrap layers.* --like {}", model.display());
    env.refuse("flatten", &dcp, "x", &like);
    let sorted = env.make("unshard", &model, "sorted.pt", "").path;
    env.refuse("flatten", &sorted, "x", options);
}

#[test]
fn contradicting_options_of_flatten_are_refused() {
    let env = TestEnv::new();
    let source = folder(&env, "flat3", "flat");
    let layout = layout_file("flat2", "flat");
    let full = full();
    let refuse = |source: &Path, options: &str| drop(env.refuse("flatten", source, "x", options));
    refuse(&full, "--world-size 2 --wrap blocks.*");
    refuse(&full, "--wrap layers.*");
    refuse(&full, "--world-size 0 --wrap layers.*");
    refuse(&full, "--world-size 2 --buffers nope");
    refuse(&full, "--world-size 2 --forward-dtype i32");
    refuse(&full, "--world-size 2 --to dcp");
    let both = format!("--world-size 2 --wrap layers.* --flat-layout {}", layout.display());
    refuse(&full, &both);
    refuse(&source, "--world-size 4 --strategy hybrid-shard");
    refuse(&source, "--world-size 4 --strategy hybrid-shard --shard-group-size 3");
    refuse(&source, "--world-size 4 --strategy full-shard --shard-group-size 2");
    drop(env.refuse("reshard", &source, "x", "--placements S(0)"));
    drop(env.refuse("reshard", &source, "x", "--mesh a=2,b=2,c=2"));
}

#[test]
fn layout_of_another_model_is_refused() {
    let env = TestEnv::new();
    let layout = |change: &dyn Fn(&mut Json)| {
        let mut layout = flat::layout("flat2", "flat");
        change(&mut layout);
        let path = env.write("layout.json", layout.to_string());
        format!("--flat-layout {}", path.display())
    };
    let (full, whole) = (full(), env.path("whole.pt"));
    succeed("unshard", &[&folder(&env, "flat2", "flat"), &whole], "--series all");
    let refuse = |source: &Path, change: &dyn Fn(&mut Json)| {
        env.refuse("flatten", source, "x", &layout(change));
    };
    refuse(&full, &|layout| layout["units"][1]["params"][0]["shape"] = json!([5, 6]));
    refuse(&full, &|layout| layout["units"][1]["params"][0]["fqn"] = json!("layers.0.wz.weight"));
    refuse(&full, &|layout| layout["units"][0]["params"][6]["shared_with"] = json!("proj.bias"));
    // A unit cannot be in two parameter groups, because a flat parameter has one optimizer step.
    let groups = folder(&env, "flat2", "groups");
    env.refuse("flatten", &groups, "x", "--use-orig-params=false");
    env.refuse("flatten", fixture("fsdp4/ranks"), "x", &layout(&|_| {}));
}

#[test]
fn files_that_contradict_the_layout_are_refused_by_every_verb() {
    let env = TestEnv::new();
    let verbs = [("flatten", "--world-size 4"), ("consolidate", ""), ("reshard", "--mesh fsdp=4"), ("unshard", "")];
    let check = |source: &Path| {
        for (verb, options) in verbs {
            env.refuse(verb, source, "x", options);
        }
    };
    let wide = folder(&env, "flat_mixed", "views");
    let mut layout: Json = serde_json::from_slice(&fs::read(wide.join("flat_layout.json")).unwrap()).unwrap();
    layout["units"].as_array_mut().unwrap().iter_mut().for_each(|unit| unit["align_numel"] = json!(4));
    fs::write(wide.join("flat_layout.json"), layout.to_string()).unwrap();
    check(&wide);
    let missing = folder(&env, "flat2", "flat");
    fs::remove_file(missing.join("model_world_size_2_rank_1.pt")).unwrap();
    check(&missing);
    let short = folder(&env, "flat3", "flat");
    let file = short.join("model_world_size_3_rank_1.pt");
    let content = fs::read(&file).unwrap();
    fs::write(&file, &content[..content.len() / 2]).unwrap();
    check(&short);
    let other = folder(&env, "flat4", "flat");
    fs::copy(layout_file("flat3", "flat"), other.join("flat_layout.json")).unwrap();
    check(&other);
    let bare = env.path("bare");
    copy_folder(&fixture("flat2/flat"), &bare);
    check(&bare);
    let json = expect(2, "flatten", &[&bare, &env.path("x")], "--world-size 4 --json").json();
    assert_eq!(json["error"]["kind"], "unsupported");
}

/// DCP does not record the order in which parameters are registered, so a torch file that was converted from DCP does
/// not have it either.
#[test]
fn torch_file_converted_from_dcp_is_refused_as_order() {
    let env = TestEnv::new();
    let saved = env.make("unshard", "titan", "saved.pt", "").path;
    env.refuse("flatten", &saved, "flat", "--world-size 2");
    let like = format!("--world-size 2 --like {}", saved.display());
    env.refuse("flatten", fixture("titan"), "flat", &like);
}
