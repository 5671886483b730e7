//! Flat parameters of FSDP1: `flatten`, and what the other verbs make of them.
//!
//! - What is read, and which layouts are refused: `fsdp_flat`; what is written, without the command line: `flat_write`.

use std::fs;
use std::path::{Path, PathBuf};

use dtshard::format::torch::{Found, View};
use serde_json::{Value as Json, json};

use crate::common::flat::{self, copy_with_layout, layout_file};
use crate::common::{assert_same, below, bytes_of, copy_folder, expect, fixture, read, succeed};
use crate::contract::{Desk, contents, holds};
use crate::rank_file::{self, Comparison};

/// The model as `FULL_STATE_DICT` saves it.
pub fn full() -> PathBuf {
    fixture("flat2/full/model.pt")
}

/// Files of a fixture with their flat layout.
pub fn folder(desk: &Desk, case: &str, name: &str) -> PathBuf {
    let path = desk.path(&format!("{case}.{name}"));
    copy_with_layout(case, name, &path);
    path
}

/// The optimizer and the model in the files of these ranks are those that PyTorch saved.
#[track_caller]
pub fn check_files(made: &Path, case: &str, name: &str, series: &[&str]) {
    let layout = flat::layout(case, name);
    let ranks = layout["world_size"].as_u64().unwrap();
    let is_sharded = layout["shard_group_size"].as_u64() != Some(1);
    for (series, rank) in series.iter().flat_map(|series| (0..ranks).map(move |rank| (series, rank))) {
        let file = format!("{series}_world_size_{ranks}_rank_{rank}.pt");
        Comparison::run(&made.join(&file), &fixture(case).join(name).join(&file), is_sharded);
    }
}

pub const BOTH: [&str; 2] = ["model", "optim"];

// ---------------------------------------------------------------------------------------------------------------
// flatten
// ---------------------------------------------------------------------------------------------------------------

/// From another world size, in either form: the files are those that a job of PyTorch's saved itself.
#[test]
fn flat_parameters_of_other_ranks_are_as_pytorch_saves_them() {
    let desk = Desk::new();
    let (views, flat) = (folder(&desk, "flat3", "views"), folder(&desk, "flat3", "flat"));
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
            let made = desk.make("flatten", source, &format!("{case}-{from}-{to}"), &options);
            check_files(&made.path, case, to, &BOTH);
            let layout = flat::read_layout(&made.path.join("flat_layout.json"));
            let truth = flat::layout(case, to);
            for key in ["world_size", "shard_group_size", "use_orig_params", "optimizer"] {
                assert_eq!(layout[key], truth[key], "{case}: {key}");
            }
        }
    }
}

/// `NO_SHARD` is where a job of one rank starts from, and the way back from it.
#[test]
fn what_is_not_sharded_is_flattened_again() {
    let desk = Desk::new();
    for name in ["views", "flat"] {
        let source = folder(&desk, "flat_none", name);
        let made = desk.make("flatten", &source, name, "--world-size 4 --strategy full-shard");
        check_files(&made.path, "flat4", name, &BOTH);
        let kept = desk.make("flatten", &source, &format!("{name}-kept"), "--world-size 3");
        let layout = flat::read_layout(&kept.path.join("flat_layout.json"));
        assert_eq!((&layout["world_size"], &layout["shard_group_size"]), (&json!(3), &json!(1)));
    }
}

/// Several groups of parameters stay; one file a rank stays one.
#[test]
fn groups_and_one_file_a_rank_stay() {
    let desk = Desk::new();
    for name in ["groups", "one_file"] {
        let source = folder(&desk, "flat2", name);
        let four = desk.make("flatten", &source, &format!("{name}-4"), "--world-size 4");
        let two = desk.make("flatten", &four.path, &format!("{name}-2"), "--world-size 2");
        let series: &[&str] = if name == "groups" { &BOTH } else { &["checkpoint"] };
        check_files(&two.path, "flat2", name, series);
    }
}

#[test]
fn a_cast_changes_the_alignment() {
    let desk = Desk::new();
    for name in ["views", "flat"] {
        let source = folder(&desk, "flat2", name);
        let made = desk.make("flatten", &source, name, "--dtype bf16 --series model");
        check_files(&made.path, "flat_bf16", name, &["model"]);
        holds(made.closing(), &["; cast ", " f32->bf16"]);
    }
}

/// What has no order takes that of a flat layout, or of flat parameters.
#[test]
fn sharded_tensors_become_flat_parameters() {
    let desk = Desk::new();
    for name in ["views", "flat"] {
        let like = folder(&desk, "flat4", name);
        let layout = like.join("flat_layout.json");
        let ways = [format!("--like {}", like.display()), format!("--flat-layout {}", layout.display())];
        let targets = [
            ("ranks", "--to torch-ranks --mesh dp=2,tp=2 --placements S(0),S(1)"),
            ("dcp", "--to dcp --mesh dp=3"),
            ("sharded", "--to torch-ranks --mesh fsdp=2 --tensor-class sharded-tensor"),
        ];
        for (kind, options) in targets {
            let between = desk.make("reshard", &like, &format!("{name}-{kind}"), options).path;
            for (index, way) in ways.iter().enumerate() {
                let made = desk.make("flatten", &between, &format!("{name}-{kind}-{index}"), way);
                assert_same(&read(&made.path), &read(&like), kind);
                check_data(&made.path, &like);
            }
        }
        let between = desk.make("consolidate", &like, &format!("{name}-model"), "").path;
        let made = desk.make("flatten", &between, &format!("{name}-again"), &ways[0]);
        let expected = below("model.", &read(&like));
        assert_same(&read(&made.path), &expected, "safetensors");
    }
    let sharded = fixture("flat2/sharded");
    let made = desk.make("flatten", &sharded, "own", &format!("--like {}", desk.path("flat4.flat").display()));
    assert_same(&read(&made.path), &read(&sharded), "ShardedTensors");
}

/// The shards of flat parameters and of their state are the same bytes, padding included, whatever stands around them.
#[track_caller]
fn check_data(found: &Path, expected: &Path) {
    for file in bytes_of(expected).into_keys().filter(|name| name.extension().is_some_and(|suffix| suffix == "pt")) {
        let [own, real] = [found, expected].map(|root| rank_file::read(&root.join(&file)));
        let stretches = |(files, contents): &rank_file::Opened| -> Vec<Vec<u8>> {
            let view = |found: &Found| match found {
                Found::Plain(view) => Some(view.clone()),
                Found::Sharded { local, .. } => local.first().map(|(_, view)| view.clone()),
                Found::Distributed { .. } => None,
            };
            let views = contents.tensors.iter().filter_map(view);
            let mut all: Vec<Vec<u8>> = views.map(|view: View| rank_file::storage(files, contents, &view)).collect();
            all.sort();
            all
        };
        assert!(stretches(&own) == stretches(&real), "{}", file.display());
    }
}

/// Most ranks hold nothing of the smaller units.
#[test]
fn there_may_be_more_ranks_than_elements() {
    let desk = Desk::new();
    for name in ["views", "flat"] {
        let source = folder(&desk, "flat3", name);
        let many = desk.make("flatten", &source, &format!("{name}-many"), "--world-size 40 --verify").path;
        assert_same(&read(&many), &read(&source), name);
        let back = desk.make("flatten", &many, &format!("{name}-back"), "--world-size 3").path;
        check_files(&back, "flat3", name, &BOTH);
    }
}

#[test]
fn the_same_flat_files_come_every_time_and_none_with_dry_run() {
    let desk = Desk::new();
    let source = folder(&desk, "flat3", "views");
    let one = desk.make("flatten", &source, "one", "--world-size 4 --threads 1 --verify");
    let dry = succeed("flatten", &[&source, &desk.path("dry")], "--world-size 4 --dry-run --json").json();
    assert!(!desk.path("dry").exists());
    let two = succeed("flatten", &[&source, &desk.path("two")], "--world-size 4 --threads 4 --json").json();
    assert_eq!(contents(&one.path), contents(&desk.path("two")));
    for key in ["files", "tensors", "bytes_written"] {
        assert_eq!(dry[key], two[key], "{key}");
    }
    assert_eq!(two["target"]["format"], "fsdp-flat");
    // What stands is kept, and kept as it is.
    let again = desk.refuse("flatten", &source, "one", "--world-size 2", &["exists", "--overwrite"]);
    assert_eq!(again.code, 2);
    desk.make("flatten", &source, "one", "--world-size 4 --overwrite");
    assert_eq!(contents(&one.path), contents(&desk.path("two")));
}

// ---------------------------------------------------------------------------------------------------------------
// There and back
// ---------------------------------------------------------------------------------------------------------------

#[test]
fn there_and_back_is_the_same_bytes() {
    let desk = Desk::new();
    for name in ["views", "flat"] {
        let source = folder(&desk, "flat3", name);
        let eight = desk.make("reshard", &source, &format!("{name}-8"), "--mesh fsdp=8").path;
        let six = desk.make("reshard", &eight, &format!("{name}-6"), "--mesh fsdp=6").path;
        let again = desk.make("reshard", &six, &format!("{name}-8-again"), "--mesh fsdp=8").path;
        assert_eq!(contents(&again), contents(&eight), "{name}");
        let hybrid = desk.make("reshard", &eight, &format!("{name}-h"), "--mesh replicate=2,shard=4").path;
        let again = desk.make("reshard", &hybrid, &format!("{name}-h-again"), "--mesh fsdp=8").path;
        assert_eq!(contents(&again), contents(&eight), "{name}");
        check_files(&desk.make("reshard", &eight, &format!("{name}-3"), "--mesh fsdp=3").path, "flat3", name, &BOTH);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// What is refused
// ---------------------------------------------------------------------------------------------------------------

#[test]
fn an_order_is_never_guessed() {
    let desk = Desk::new();
    let source = folder(&desk, "flat3", "flat");
    let snippet = "docs/fsdp1.md has the Python snippet";
    let dcp = desk.make("reshard", &source, "dcp", "--to dcp --mesh fsdp=2").path;
    desk.refuse("flatten", &dcp, "x", "--world-size 2 --wrap layers.*", &["is dcp, which does not keep it", snippet]);
    let model = desk.make("consolidate", &source, "model", "").path;
    let options = "--world-size 2 --wrap layers.*";
    desk.refuse("flatten", &model, "x", options, &["is safetensors, which does not keep it", snippet]);
    desk.refuse("flatten", &source, "x", options, &["is flat, and its units would be others", snippet]);
    let like = format!("--world-size 2 --wrap layers.* --like {}", model.display());
    desk.refuse("flatten", &dcp, "x", &like, &["is safetensors, which does not keep it", snippet]);
    let sorted = desk.make("unshard", &model, "sorted.pt", "").path;
    desk.refuse("flatten", &sorted, "x", options, &["the names in the state dict are sorted", snippet]);
}

#[test]
fn what_is_asked_for_must_be_one_thing() {
    let desk = Desk::new();
    let source = folder(&desk, "flat3", "flat");
    let layout = layout_file("flat2", "flat");
    let full = full();
    let refuse =
        |source: &Path, options: &str, words: &[&str]| drop(desk.refuse("flatten", source, "x", options, words));
    let words = ["--wrap blocks.*: no module has a path like that", "the nearest names are"];
    refuse(&full, "--world-size 2 --wrap blocks.*", &words);
    refuse(&full, "--wrap layers.*", &["how many ranks will load the files?", "--world-size N"]);
    refuse(&full, "--world-size 0 --wrap layers.*", &["--world-size 0: no ranks"]);
    refuse(
        &full,
        "--world-size 2 --buffers nope",
        &["--buffers nope: no tensor of the model", "the nearest names are"],
    );
    refuse(&full, "--world-size 2 --forward-dtype i32", &["--forward-dtype i32: no dtype of floats"]);
    refuse(&full, "--world-size 2 --to dcp", &["flatten writes flat parameters, not dcp", "`dtshard reshard`"]);
    let both = format!("--world-size 2 --wrap layers.* --flat-layout {}", layout.display());
    refuse(&full, &both, &["--wrap and a flat layout: both say the units"]);
    refuse(&source, "--world-size 4 --strategy hybrid-shard", &["how many ranks share one copy?"]);
    let words = ["groups of 3 among 4 ranks", "--shard-group-size N"];
    refuse(&source, "--world-size 4 --strategy hybrid-shard --shard-group-size 3", &words);
    let words = ["--shard-group-size is for --strategy hybrid-shard"];
    refuse(&source, "--world-size 4 --strategy full-shard --shard-group-size 2", &words);
    let words = ["--placements S(0): flat parameters have none", "--to torch-ranks"];
    drop(desk.refuse("reshard", &source, "x", "--placements S(0)", &words));
    let words = ["flat parameters are cut once", "one dim, or two for HYBRID_SHARD"];
    drop(desk.refuse("reshard", &source, "x", "--mesh a=2,b=2,c=2", &words));
}

#[test]
fn a_layout_of_another_model_is_refused() {
    let desk = Desk::new();
    let layout = |change: &dyn Fn(&mut Json)| {
        let mut layout = flat::layout("flat2", "flat");
        change(&mut layout);
        let path = desk.write("layout.json", &layout.to_string());
        format!("--flat-layout {}", path.display())
    };
    let (full, whole) = (full(), desk.path("whole.pt"));
    succeed("unshard", &[&folder(&desk, "flat2", "flat"), &whole], "--series all");
    let refuse = |source: &Path, change: &dyn Fn(&mut Json), words: &[&str]| {
        desk.refuse("flatten", source, "x", &layout(change), words);
    };
    refuse(
        &full,
        &|layout| layout["units"][1]["params"][0]["shape"] = json!([5, 6]),
        &["layers.0.wq.weight: expected the shape [5, 6] of the flat layout, found [6, 6]", "that of this very model"],
    );
    refuse(
        &full,
        &|layout| layout["units"][1]["params"][0]["fqn"] = json!("layers.0.wz.weight"),
        &["layers.0.wz.weight", "that of this very model"],
    );
    refuse(&full, &|layout| layout["units"][0]["params"][6]["shared_with"] = json!("proj.bias"), &["head.weight"]);
    // What one unit holds cannot be in two parameter groups, and has one step.
    let groups = folder(&desk, "flat2", "groups");
    let words = ["the root unit", "a flat parameter is in one parameter group", "write with use_orig_params"];
    desk.refuse("flatten", &groups, "x", "--use-orig-params=false", &words);
    desk.refuse("flatten", fixture("fsdp4/ranks"), "x", &layout(&|_| {}), &["of the flat layout, found", "very model"]);
}

#[test]
fn files_that_do_not_fit_are_refused_by_every_verb() {
    let desk = Desk::new();
    let verbs = [("flatten", "--world-size 4"), ("consolidate", ""), ("reshard", "--mesh fsdp=4"), ("unshard", "")];
    let check = |source: &Path, words: &[&str]| {
        for (verb, options) in verbs {
            desk.refuse(verb, source, "x", options, words);
        }
    };
    let wide = folder(&desk, "flat_mixed", "views");
    let mut layout: Json = serde_json::from_slice(&fs::read(wide.join("flat_layout.json")).unwrap()).unwrap();
    layout["units"].as_array_mut().unwrap().iter_mut().for_each(|unit| unit["align_numel"] = json!(4));
    fs::write(wide.join("flat_layout.json"), layout.to_string()).unwrap();
    check(&wide, &["the root unit", "expected a flat parameter of 342 elements", "align_numel 8, as mixed precision"]);
    let missing = folder(&desk, "flat2", "flat");
    fs::remove_file(missing.join("model_world_size_2_rank_1.pt")).unwrap();
    check(&missing, &["series `model`: expected the files of 2 ranks, missing: rank 1"]);
    let short = folder(&desk, "flat3", "flat");
    let file = short.join("model_world_size_3_rank_1.pt");
    let content = fs::read(&file).unwrap();
    fs::write(&file, &content[..content.len() / 2]).unwrap();
    check(&short, &["model_world_size_3_rank_1.pt", "cut short", "hint: "]);
    let other = folder(&desk, "flat4", "flat");
    fs::copy(layout_file("flat3", "flat"), other.join("flat_layout.json")).unwrap();
    check(&other, &["expected the files of 3 ranks, the world_size of", "found 4"]);
    let bare = desk.path("bare");
    copy_folder(&fixture("flat2/flat"), &bare);
    check(&bare, &["nothing tells the names, order and shapes", "--flat-layout FILE, or --like CKPT"]);
    let json = expect(2, "flatten", &[&bare, &desk.path("x")], "--world-size 4 --json").json();
    assert_eq!(json["error"]["kind"], "unsupported");
}

/// DCP keeps no order of registration, so a torch file that was made from it has none either.
#[test]
fn order_of_a_file_that_was_made_from_dcp_is_refused() {
    let desk = Desk::new();
    let saved = desk.make("unshard", "titan", "saved.pt", "").path;
    let words = ["the order of parameters in flat parameters is not known", "--flat-layout"];
    desk.refuse("flatten", &saved, "flat", "--world-size 2", &words);
    let like = format!("--world-size 2 --like {}", saved.display());
    desk.refuse("flatten", fixture("titan"), "flat", &like, &words);
}
