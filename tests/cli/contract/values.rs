//! Tests of values: dtypes, ties, differences between ranks, checksums, limits of formats, and identical bytes.
//!
//! Tested in other modules:
//!
//! - Without `--dtype` no bit changes: `conversions::*_keep_values`.
//! - Casts between all pairs of dtypes equal those of PyTorch: `exec::cast::tests` (library), with `fixtures/cast`.
//! - Missing ranks and replicas that cover them: `folders::{missing_ranks_are_an_error_unless_replicas_cover_them,
//!   missing_rank_0_is_covered_by_replicas}`, `bad_input::damage::missing_files_are_all_listed`.
//! - The index of a split model: `conversions::large_model_is_split_into_files_with_an_index`.
//! - Unknown objects in rank files: `folders::unknown_objects_are_left_out_on_request`.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::{Value as Json, json};

use crate::common::env::TestEnv;
use crate::common::{
    Tensors, Truth, assert_same, below, bytes_of, expect, fixture, inspect, read, read_safetensors, succeed,
};
use crate::contract::{assert_contains, contents, copy_tree, names_below};

fn dtypes(tensors: &Tensors) -> Vec<(String, String)> {
    tensors.iter().map(|(name, tensor)| (name.clone(), tensor.dtype.clone())).collect()
}

// ------------------------------------------------------------------------------------------------------------- dtypes

#[test]
fn dtype_casts_floats_except_0_d_and_optimizer_state() {
    let env = TestEnv::new();
    let made = env.make("unshard", "fsdp4/dcp", "x.pt", "--dtype bf16 --json");
    let source = read(&fixture("fsdp4/dcp"));
    for ((name, found), known) in made.tensors().iter().zip(source.values()) {
        let is_cast = !name.starts_with("optim.") && !known.shape.is_empty() && known.dtype == "f32";
        assert_eq!(found.dtype, if is_cast { "bf16" } else { known.dtype.as_str() }, "{name}");
        assert!(is_cast || found == known, "{name}");
    }
    let document = made.run.json();
    assert_eq!(document["cast"], json!({ "f32->bf16": { "tensors": 19, "overflows": 0, "nans": 0 } }));
    let note = "--dtype does not cast 17 tensors (0-d), 34 tensors (optimizer state)";
    assert_contains(
        &document["warnings"].to_string(),
        &["--dtype does not cast ", "0-d", "(optimizer state)", "(not float)"],
    );
    let again = env.make("unshard", "fsdp4/dcp", "y.pt", "--dtype bf16");
    assert!(again.closing_line().ends_with("; cast 19 f32->bf16"), "{}", again.closing_line());
    assert!(again.run.stderr.starts_with(&format!("note: {}", &note[..27])), "{}", again.run.stderr);
    succeed("verify", &[&fixture("fsdp4/dcp"), &made.path], "--dtype bf16");
}

#[test]
fn f64_and_optimizer_state_are_cast_by_pattern_only() {
    let env = TestEnv::new();
    let plain = env.make("consolidate", "safetensors/single", "a.safetensors", "--dtype f32");
    assert_eq!(plain.tensors()["dtype.f64"], read(&fixture("safetensors/single"))["dtype.f64"]);
    let by_name = env.make("consolidate", "safetensors/single", "b.safetensors", "--dtype dtype.f64=f32 --json");
    assert_eq!(by_name.tensors()["dtype.f64"].dtype, "f32");
    assert_eq!(by_name.run.json()["cast"]["f64->f32"]["tensors"], 1);
    // The pattern with the name of a parameter does not cast its optimizer state; a pattern with the name of the state
    // does.
    let made = env.make("unshard", "fsdp4/dcp", "c.pt", "--dtype model.embed.weight=bf16");
    assert_eq!(made.tensors()["model.embed.weight"].dtype, "bf16");
    assert_eq!(made.tensors()["optim.state.embed.weight.exp_avg"].dtype, "f32");
    let made = env.make("unshard", "fsdp4/dcp", "d.pt", "--dtype **.exp_avg=bf16");
    assert_eq!(made.tensors()["optim.state.embed.weight.exp_avg"].dtype, "bf16");
    assert_eq!(made.tensors()["model.embed.weight"].dtype, "f32");
}

/// Writes a checkpoint with a quantised FP8 weight, its scale and its bias, and with the scale of a norm.
fn with_fp8_weight(env: &TestEnv) -> PathBuf {
    use safetensors::Dtype::{F8_E4M3, F32};
    use safetensors::tensor::TensorView;
    let floats: Vec<u8> = [0.123_456_79_f32, 1.000_000_1].into_iter().flat_map(f32::to_le_bytes).collect();
    let view = |dtype, shape: &[usize], data| TensorView::new(dtype, shape.to_vec(), data).unwrap();
    let tensors = [
        ("model.layers.0.mlp.weight", view(F8_E4M3, &[2, 2], b"abcd".as_slice())),
        ("model.layers.0.mlp.weight_scale_inv", view(F32, &[2, 1], &floats)),
        ("model.layers.0.mlp.bias", view(F32, &[2], &floats)),
        ("model.layers.0.norm.scale", view(F32, &[2], &floats)),
    ];
    let path = env.path("fp8.safetensors");
    fs::write(&path, safetensors::serialize(tensors, None).unwrap()).unwrap();
    path
}

#[test]
fn dtype_without_pattern_keeps_scales_of_quantised_tensors() {
    let env = TestEnv::new();
    let source = with_fp8_weight(&env);
    let known = read(&source);
    let (scale, others) = ("model.layers.0.mlp.weight_scale_inv", ["mlp.bias", "norm.scale"]);
    for (verb, name, options) in [
        ("consolidate", "a.safetensors", "--dtype bf16"),
        ("unshard", "a.pt", "--dtype bf16"),
        ("reshard", "dcp", "--dtype bf16 --to dcp --mesh dp=2"),
        ("reshard", "local", "--dtype bf16 --to local --mesh dp=2"),
        ("unshard", "b.pt", "--dtype bf16 --rename weight_scale_inv=other"),
    ] {
        let made = env.make(verb, &source, name, &format!("{options} --json"));
        let document = made.run.json();
        assert_eq!(document["cast"]["f32->bf16"]["tensors"], 2, "{document}");
        assert!(document["warnings"].to_string().contains("1 tensor (scales of quantised tensors)"), "{document}");
        let found = made.tensors();
        assert_eq!(
            found[&scale.replace("weight_scale_inv", if name == "b.pt" { "other" } else { "weight_scale_inv" })],
            known[scale]
        );
        for other in others {
            assert_eq!(found[&format!("model.layers.0.{other}")].dtype, "bf16");
        }
        succeed("verify", &[&source, &made.path], options.split(" --to").next().unwrap());
    }
    let made = env.make("consolidate", &source, "c.safetensors", "--dtype bf16 --dtype **.weight_scale_inv=f16");
    assert_eq!(made.tensors()[scale].dtype, "f16");
}

#[test]
fn first_matching_dtype_pattern_applies_before_the_default() {
    let env = TestEnv::new();
    let options = "--dtype f16 --dtype layers.0=bf16 --dtype layers=f32 --dtype norm=f8_e4m3fn";
    let source = env.vectors("m.safetensors", &[("layers.0.w", 2), ("layers.1.w", 2), ("norm.w", 2), ("z.w", 2)]);
    let made = env.make("unshard", source, "x.pt", options);
    let expected = [("layers.0.w", "bf16"), ("layers.1.w", "f32"), ("norm.w", "f8_e4m3fn"), ("z.w", "f16")];
    assert_eq!(dtypes(&made.tensors()), expected.map(|(name, dtype)| (name.into(), dtype.into())));
    assert!(
        made.closing_line().ends_with("; cast 1 f32->f16, 1 f32->bf16, 1 f32->f8_e4m3fn"),
        "{}",
        made.closing_line()
    );
    env.refuse("unshard", "fsdp4/dcp", "y.pt", "--dtype f16 --dtype bf16");
}

#[test]
fn dtype_names_of_torch_and_short_names_are_accepted() {
    let env = TestEnv::new();
    for (names, dtype) in [
        (&["bf16", "bfloat16", "torch.bfloat16"][..], "bf16"),
        (&["f16", "half", "float16", "fp16", "torch.float16", "torch.half"], "f16"),
        (&["f32", "float32", "torch.float32", "float"], "f32"),
        (&["f64", "float64", "double"], "f64"),
        (&["f8_e4m3fn", "float8_e4m3fn", "torch.float8_e4m3fn"], "f8_e4m3fn"),
        (&["f8_e5m2"], "f8_e5m2"),
        (&["f8_e4m3fnuz"], "f8_e4m3fnuz"),
        (&["f8_e5m2fnuz"], "f8_e5m2fnuz"),
    ] {
        for name in names {
            let made =
                env.make("unshard", "tp2/dcp", &format!("{name}.pt"), &format!("--include model.head --dtype {name}"));
            assert_eq!(made.tensors()["model.head.weight"].dtype, dtype, "{name}");
        }
    }
    env.refuse("unshard", "tp2/dcp", "x.pt", "--dtype bf17");
    env.refuse("unshard", "tp2/dcp", "x.pt", "--dtype i64");
}

#[test]
fn casts_round_like_pytorch_and_count_overflows_and_nans() {
    let source = fixture("cast/cases.safetensors");
    let expected = read_safetensors(&source);
    for (from, to) in [
        ("f32", "bf16"),
        ("f32", "f16"),
        ("f16", "f32"),
        ("bf16", "f16"),
        ("f64", "f32"),
        ("f64", "bf16"),
        ("f32", "f8_e4m3fn"),
    ] {
        let env = TestEnv::new();
        let made =
            env.make("consolidate", &source, "x.safetensors", &format!("--include {from} --dtype {from}={to} --json"));
        assert_eq!(read_safetensors(&made.path)[from], expected[&format!("{from}.{to}")], "{from} to {to}");
        let document = made.run.json();
        let counts = &document["cast"][format!("{from}->{to}")];
        assert!(counts["nans"].as_u64().unwrap() > 0, "{from} to {to}: {counts}");
        if (from, to) == ("f32", "f16") {
            assert!(counts["overflows"].as_u64().unwrap() > 0, "{counts}");
            assert_contains(
                &document["warnings"].to_string(),
                &["overflowed in the cast from f32 to f16", "are NaN after the cast"],
            );
            assert_contains(&made.run.stderr, &["overflowed in the cast from f32 to f16"]);
        }
        succeed("verify", &[&source, &made.path], &format!("--include {from} --dtype {from}={to}"));
    }
}

// --------------------------------------------------------------------------------------------------------------- ties

const TIED: &str = "torch_file/model.pt";

fn header(path: &Path) -> Json {
    let bytes = fs::read(path).unwrap();
    let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    serde_json::from_slice(&bytes[8..8 + len]).unwrap()
}

#[test]
fn tied_tensors_are_written_under_every_name() {
    let env = TestEnv::new();
    for options in ["", "--tied keep"] {
        let made = env.make(
            "consolidate",
            TIED,
            &format!("x{}.safetensors", options.len()),
            &format!("--exclude dtype --json {options}"),
        );
        let found = read_safetensors(&made.path);
        assert_eq!(found["embed.weight"], found["head.weight"]);
        assert_eq!(found["same.a"], found["same.b"]);
        assert_eq!(header(&made.path)["__metadata__"], json!({ "format": "pt" }));
        assert_eq!(made.run.json()["tied"], json!({}));
    }
}

#[test]
fn tied_drop_writes_one_name_and_records_the_others() {
    let env = TestEnv::new();
    let tied = json!({ "head.weight": "embed.weight", "same.b": "same.a" });
    for (verb, name) in [("consolidate", "a.safetensors"), ("unshard", "b.safetensors"), ("consolidate", "folder")] {
        let made = env.make(verb, TIED, name, "--exclude dtype --tied drop --json");
        assert_eq!(made.run.json()["tied"], tied, "{verb} {name}");
        let file = if made.path.is_dir() { made.path.join("model.safetensors") } else { made.path.clone() };
        let mut metadata = header(&file)["__metadata__"].clone();
        assert_eq!(metadata.as_object_mut().unwrap().remove("format"), Some(json!("pt")));
        assert_eq!(metadata, tied);
        assert!(!read_safetensors(&made.path).contains_key("head.weight"));
        // `verify` reads the names that the file records for tied tensors, so no tensor is missing.
        succeed("verify", &[&fixture(TIED), &made.path], "--exclude dtype");
        succeed("verify", &[&made.path, &made.path], "");
        assert_eq!(made.tensors()["head.weight"], read(&fixture(TIED))["head.weight"]);
        let again = env.make("unshard", &made.path, &format!("{name}.again.pt"), "");
        assert!(again.tensor_names().contains(&"head.weight".into()));
    }
    for (verb, name, options) in
        [("unshard", "x.pt", ""), ("consolidate", "x.bin", ""), ("reshard", "x", "--mesh dp=2")]
    {
        env.refuse(verb, TIED, name, &format!("--tied drop {options}"));
    }
}

#[test]
fn views_of_one_storage_are_not_tied() {
    let env = TestEnv::new();
    let made = env.make("consolidate", TIED, "x.safetensors", "--exclude dtype --tied drop");
    let found = read_safetensors(&made.path);
    assert!(["views.top", "views.rest", "views.column"].iter().all(|name| found.contains_key(*name)));
}

// --------------------------------------------------------------------------------------- ranks that do not agree

#[test]
fn differing_rank_values_are_an_error_with_on_conflict_hint() {
    for (case, options) in [("conflict/tensor", ""), ("conflict/object", "--series all")] {
        for (verb, name, more) in [
            ("unshard", "x.pt", options),
            ("unshard", "x.safetensors", options),
            ("reshard", "x", "--mesh dp=2"),
            ("reshard", "x", "--mesh dp=2 --to dcp"),
        ] {
            let env = TestEnv::new();
            let outcome = env.refuse(verb, case, name, more);
            assert_contains(&outcome.stderr, &["--on-conflict", "rank0", "per-rank", "drop"]);
        }
    }
}

/// Conversions to each kind of target to which `--on-conflict` applies: the verb, the name of the output, and the
/// options.
const TARGETS: [(&str, &str, &str); 4] = [
    ("reshard", "ranks", "--mesh dp=2 --placements R"),
    ("reshard", "dcp", "--mesh dp=2 --to dcp"),
    ("unshard", "whole.pt", "--series all"),
    ("unshard", "whole.safetensors", "--series all"),
];

/// Returns the tensor that differs between ranks, as rank 0 has it and as rank 1 has it.
fn of_ranks() -> [crate::common::Tensor; 2] {
    [0, 1].map(|rank| {
        let file = fixture(&format!("conflict/tensor/model_world_size_2_rank_{rank}.pt"));
        read(&file)["differs"].clone()
    })
}

#[test]
fn on_conflict_selects_a_value_of_plain_tensors() {
    let [first, second] = of_ranks();
    assert_ne!(first, second);
    for (verb, name, options) in TARGETS {
        let env = TestEnv::new();
        let make = |choice: &str| {
            env.make(verb, "conflict/tensor", &format!("{choice}_{name}"), &format!("{options} --on-conflict {choice}"))
        };

        let rank0 = make("rank0");
        assert_eq!(rank0.tensors()["differs"], first, "{name}");
        assert_contains(
            &rank0.run.stderr,
            &["1 value differs between ranks (`differs`), so the value of the lowest rank is used"],
        );
        succeed("verify", &[&rank0.path], "");

        let drop = make("drop");
        assert_eq!(drop.tensor_names(), ["same"], "{name}");
        assert_contains(drop.closing_line(), &["; left out: 1 tensor (differing)"]);

        let each = make("per-rank");
        if name == "ranks" {
            for (rank, expected) in [&first, &second].into_iter().enumerate() {
                let file = each.path.join(format!("model_world_size_2_rank_{rank}.pt"));
                assert_eq!(read(&file)["differs"], *expected, "rank {rank}");
            }
        } else {
            assert_eq!(each.tensor_names(), ["differs.rank_0", "differs.rank_1", "same"], "{name}");
            assert_eq!(each.tensors()["differs.rank_0"], first);
            assert_eq!(each.tensors()["differs.rank_1"], second);
        }
        assert_contains(
            &each.run.stderr,
            &[
                "1 value differs between ranks (`differs`), so each rank keeps its own value (SRC has the values of ranks 0, 1)",
            ],
        );
    }
}

#[test]
fn on_conflict_selects_a_value_of_objects() {
    let seven = json!({ "type": "int", "value": 7 });
    for (verb, name, options) in TARGETS {
        let env = TestEnv::new();
        let make = |choice: &str| {
            env.make(verb, "conflict/object", &format!("{choice}_{name}"), &format!("{options} --on-conflict {choice}"))
        };
        let objects = |path: &PathBuf| inspect(path, "--brief")["objects"].clone();
        let (rank0, drop, each) = (make("rank0"), make("drop"), make("per-rank"));
        if name.ends_with("safetensors") {
            assert!(rank0.closing_line().ends_with("; left out: 2 objects"), "{}", rank0.closing_line());
            assert!(drop.closing_line().ends_with("; left out: 2 objects"), "{}", drop.closing_line());
            assert!(each.closing_line().ends_with("; left out: 3 objects"), "{}", each.closing_line());
            continue;
        }
        assert_eq!(objects(&rank0.path)["extra_state.step"], seven, "{name}");
        assert_eq!(objects(&drop.path).as_object().unwrap().keys().collect::<Vec<_>>(), ["extra_state.name"]);
        assert!(drop.closing_line().ends_with("; left out: 1 object"), "{}", drop.closing_line());
        let found = objects(&each.path);
        if name == "ranks" {
            for (rank, value) in [(0, 7), (1, 8)] {
                let file = each.path.join(format!("extra_state_world_size_2_rank_{rank}.pt"));
                assert_eq!(objects(&file)["step"]["value"], value, "rank {rank}");
            }
        } else {
            assert_eq!(found["extra_state.step.rank_0"], seven, "{name}");
            assert_eq!(found["extra_state.step.rank_1"]["value"], 8, "{name}");
        }
    }
}

#[test]
fn note_names_random_state_that_all_ranks_get_from_one_rank() {
    let env = TestEnv::new();
    for source in ["verl", "trainers/verl_fsdp1"] {
        let name = source.replace('/', "_");
        let one = env.make("reshard", source, &format!("{name}_one"), "--mesh fsdp=1").path;
        let target = |ranks: u32| env.path(&format!("{name}_{ranks}"));
        let run = succeed("reshard", &[&one, &target(2)], "--mesh fsdp=2");
        assert_contains(
            &run.stderr,
            &["all 2 ranks of the new job get its random number state (`extra_state.rng.cpu` and 2 more)"],
        );
        for (ranks, options) in [(1, "--mesh fsdp=1"), (3, "--mesh fsdp=3 --series model")] {
            let run = succeed("reshard", &[&one, &target(ranks)], options);
            assert!(!run.stderr.contains("SRC has one rank"), "{}", run.stderr);
        }
    }
}

#[test]
fn differing_random_state_is_kept_for_every_rank() {
    let env = TestEnv::new();
    let made = env.make("reshard", "verl", "out", "--mesh fsdp=2");
    for rank in 0..2 {
        let file =
            |folder: &Path, size: u32| read(&folder.join(format!("extra_state_world_size_{size}_rank_{rank}.pt")));
        assert_same(&file(&made.path, 2), &file(&fixture("verl/global_step_10/actor"), 4), "random state");
    }
    assert_contains(
        &made.run.stderr,
        &["differ between ranks (`extra_state.rng.cpu` and 2 more), so each rank keeps its own value"],
    );
}

#[test]
fn check_replicas_compares_dtensors() {
    for (verb, name, more) in [("unshard", "x.pt", ""), ("consolidate", "x", ""), ("reshard", "y", "--mesh dp=2")] {
        let env = TestEnv::new();
        env.make(verb, "conflict/replica", &format!("unchecked_{name}"), more);
        let outcome = env.refuse(verb, "conflict/replica", name, &format!("--check-replicas {more}"));
        assert!(!outcome.stderr.contains("per-rank"), "a DTensor has no place for every rank's: {}", outcome.stderr);
        let taken = env.make(verb, "conflict/replica", name, &format!("--check-replicas --on-conflict rank0 {more}"));
        succeed("verify", &[&taken.path], "");
    }
}

// ------------------------------------------------------------------------------------------------------------ checks

/// Writes a torch file of two vectors, the second of which has a flipped byte.
fn damaged(env: &TestEnv) -> PathBuf {
    let source = env.vectors("m.safetensors", &[("sound.weight", 16), ("damaged.weight", 16)]);
    let whole = env.make("unshard", source, "damaged.pt", "").path;
    let mut bytes = fs::read(&whole).unwrap();
    let first = 2.0_f32.to_le_bytes();
    let second = (2.0_f32 + 1.0 / 4096.0).to_le_bytes();
    let at = bytes.windows(8).position(|window| window == [first, second].concat()).unwrap();
    bytes[at + 5] ^= 1;
    fs::write(&whole, bytes).unwrap();
    whole
}

#[test]
fn checksums_of_copied_records_are_checked_and_of_all_with_check_crc() {
    let env = TestEnv::new();
    let source = damaged(&env);
    // The record is copied completely, so its checksum is checked.
    let outcome = env.refuse("unshard", &source, "x.pt", "");
    assert_contains(&outcome.stderr, &["CRC-32"]);
    // The record is not copied, so its checksum is not checked.
    env.make("unshard", &source, "good.pt", "--exclude damaged.weight");
    env.refuse("unshard", &source, "x.pt", "--exclude damaged.weight --check-crc");
    // The record is copied in parts, so its checksum is not checked.
    let parts = "--mesh dp=2 --include damaged.weight";
    env.refuse("reshard", &source, "x", &format!("{parts} --check-crc"));
    // verify always checks.
    assert_contains(&expect(1, "verify", &[&source], "").stdout, &["CRC-32"]);
    expect(1, "verify", &[&source, &source], "--exclude damaged.weight");
}

// ------------------------------------------------------------------------------- what is missing or cannot be held

#[test]
fn values_that_a_format_cannot_hold_are_listed_and_counted() {
    let env = TestEnv::new();
    let objects = inspect(&fixture("fsdp4/dcp"), "--brief")["objects"].as_object().unwrap().clone();
    for (verb, options) in [("unshard", ""), ("consolidate", "--everything")] {
        let made = env.make(verb, "fsdp4/dcp", &format!("{verb}.safetensors"), options);
        assert!(made.closing_line().ends_with("; left out: 21 objects"), "{}", made.closing_line());
        let document =
            env.make(verb, "fsdp4/dcp", &format!("{verb}2.safetensors"), &format!("{options} --json")).run.json();
        let left = document["left_out"].as_array().unwrap();
        assert_eq!(left[0], "21 objects");
        assert!(objects.keys().all(|name| left.contains(&json!(name))), "{left:?}");
    }
}

#[test]
fn missing_rank_is_an_error_unless_replicas_cover_it() {
    let env = TestEnv::new();
    copy_tree(&fixture("hsdp/ranks"), &env.path("src"));
    for rank in [0, 3] {
        fs::remove_file(env.path(&format!("src/model_world_size_4_rank_{rank}.pt"))).unwrap();
    }
    let source = env.path("src");
    env.refuse("consolidate", &source, "x", "");
    let made = env.make("consolidate", &source, "x", "--allow-missing");
    assert_same(&made.tensors(), &below("model.", &read(&fixture("hsdp/ranks"))), "without ranks 0 and 3");
    assert_contains(&made.run.stderr, &["read without ranks 0, 3"]);
    // Without replicas `--allow-missing` fails as well.
    let env = TestEnv::new();
    copy_tree(&fixture("fsdp4/ranks"), &env.path("src"));
    fs::remove_file(env.path("src/model_world_size_4_rank_2.pt")).unwrap();
    let outcome = env.refuse("consolidate", env.path("src"), "x", "");
    assert!(!outcome.stderr.contains("--allow-missing"), "{}", outcome.stderr);
    env.refuse("consolidate", env.path("src"), "x", "--allow-missing");
}

#[test]
fn unknown_object_is_an_error_unless_dropped() {
    for source in ["foreign_objects/dcp", "foreign_objects/foreign.pt"] {
        let env = TestEnv::new();
        let words = ["`their_trainer.Foreign`", "own", "--drop-unknown"];
        env.refuse("unshard", source, "x.pt", "");
        assert_contains(&expect(2, "verify", &[&fixture(source)], "").stderr, &words);
        let made = env.make("unshard", source, "x.pt", "--drop-unknown --json");
        assert_same(&made.tensors(), &Truth::load("foreign_objects/truth").tensors, source);
        assert_contains(&made.run.json()["left_out"].to_string(), &["own (their_trainer.Foreign)", "state.sampler"]);
        let again = env.make("unshard", source, "y.pt", "--drop-unknown");
        assert!(again.closing_line().ends_with("; left out: 3 objects"), "{}", again.closing_line());
        assert_eq!(inspect(&made.path, "")["objects"]["state.step"]["value"], 3);
    }
}

// -------------------------------------------------------------------------------------------------------- safetensors

#[test]
fn safetensors_output_has_format_pt_and_natural_order() {
    let env = TestEnv::new();
    let names = ["z.layers.10.w", "z.layers.2.w", "z.layers.1.w", "a.w", "z.layers.2.b"];
    let source = env.vectors("m.safetensors", &names.map(|name| (name, 2)));
    let made = env.make("consolidate", &source, "out.safetensors", "");
    let header = header(&made.path);
    assert_eq!(header["__metadata__"], json!({ "format": "pt" }));
    let mut found: Vec<(u64, &str)> = (header.as_object().unwrap().iter())
        .filter_map(|(name, about)| Some((about["data_offsets"][0].as_u64()?, name.as_str())))
        .collect();
    found.sort_unstable();
    let order: Vec<&str> = found.into_iter().map(|(_, name)| name).collect();
    assert_eq!(order, ["a.w", "z.layers.1.w", "z.layers.2.b", "z.layers.2.w", "z.layers.10.w"]);
    // Files are filled with tensors in that order.
    let made = env.make("consolidate", &source, "split", "--max-shard-size 16");
    let index: Json = serde_json::from_slice(&contents(&made.path)["model.safetensors.index.json"]).unwrap();
    let file = |number: u32| format!("model-0000{number}-of-00003.safetensors");
    assert_eq!(
        index["weight_map"],
        json!({
            "a.w": file(1), "z.layers.1.w": file(1), "z.layers.2.b": file(2), "z.layers.2.w": file(2),
            "z.layers.10.w": file(3),
        })
    );
    assert_eq!(index["metadata"]["total_size"], 40);
}

#[test]
fn max_shard_size_splits_by_tensor_bytes() {
    let env = TestEnv::new();
    let source = env.vectors("m.safetensors", &[("a", 128), ("b", 128)]);
    for (size, files) in
        [("1kB", 2), ("1KiB", 1), ("1KB", 2), ("0.001MB", 2), ("1024", 1), ("1023", 2), ("5GB", 1), ("5GiB", 1)]
    {
        let made = env.make("consolidate", &source, size, &format!("--max-shard-size {size}"));
        let found = names_below(&made.path).into_iter().filter(|name| name.ends_with(".safetensors")).count();
        assert_eq!(found, files, "{size}");
    }
    let source = env.vectors("n.safetensors", &[("a", 2), ("b", 400), ("c", 2), ("d", 2)]);
    let made = env.make("unshard", &source, "own", "--to safetensors --max-shard-size 100");
    let names_in = |file: &str| -> Vec<String> {
        let bytes = fs::read(made.path.join(file)).unwrap();
        SafeTensors::deserialize(&bytes).unwrap().names().into_iter().map(str::to_owned).collect()
    };
    assert_eq!(names_in("model-00001-of-00003.safetensors"), ["a"]);
    assert_eq!(names_in("model-00002-of-00003.safetensors"), ["b"]);
    assert_eq!(names_in("model-00003-of-00003.safetensors").len(), 2);
    for size in ["0", "x", "5XB", "-1"] {
        env.refuse("consolidate", &source, "bad", &format!("--max-shard-size={size}"));
    }
}

// --------------------------------------------------------------------------------------------------------- same bytes

#[test]
fn same_input_and_options_give_identical_bytes_in_every_format() {
    for source in ["fsdp_tp/ranks", "fsdp4/dcp", "verl", "torch_file/trainer.pt", "dcp_trainer"] {
        for (verb, name, options) in [
            ("reshard", "ranks", "--to torch-ranks --mesh dp=2,tp=3 --placements S(0),R"),
            ("reshard", "dcp", "--to dcp --mesh dp=2,tp=3 --placements S(0),R"),
            ("unshard", "whole.pt", "--series all"),
            ("consolidate", "split", "--max-shard-size 2kB"),
            ("consolidate", "one.safetensors", "--everything --dtype bf16"),
            ("consolidate", "flat.bin", ""),
        ] {
            let series = if source.contains("ranks") || source == "verl" {
                options
            } else {
                options.trim_start_matches("--series all")
            };
            let (first, second) = (TestEnv::new(), TestEnv::new());
            let one = first.make(verb, source, name, &format!("{series} --threads 1"));
            let found = tree(&one.path);
            let again = second.make(verb, source, name, &format!("{series} --threads 3 --io read"));
            assert!(found == tree(&again.path), "{verb} {source} {name}");
        }
    }
}

fn tree(path: &Path) -> std::collections::BTreeMap<String, Vec<u8>> {
    if path.is_dir() {
        contents(path)
    } else {
        bytes_of(path).into_values().map(|bytes| (String::new(), bytes)).collect()
    }
}

#[test]
fn like_keeps_the_file_division_of_safetensors() {
    let env = TestEnv::new();
    let example = env.make("consolidate", "fsdp4/dcp", "example", "--max-shard-size 500");
    let names = names_below;
    let index = |folder: &Path| std::fs::read_to_string(folder.join("model.safetensors.index.json")).unwrap();
    for (verb, source, options) in [
        ("consolidate", "fsdp4/ranks", ""),
        ("unshard", "fsdp4/ranks", "--to safetensors"),
        ("unshard", "fsdp4/dcp", "--to safetensors --root model"),
    ] {
        let options = format!("{options} --like {}", example.path.display());
        let made = env.make(verb, source, &format!("{verb}-{}", source.replace('/', "-")), &options);
        assert_eq!(
            (names(&made.path), index(&made.path)),
            (names(&example.path), index(&example.path)),
            "{verb} {source}"
        );
        assert_same(&made.tensors(), &example.tensors(), verb);
    }
    // A tensor that the example does not have goes to the file of its neighbour. An excluded tensor leaves no empty
    // file.
    let like = format!("--like {}", example.path.display());
    let made = env.make("consolidate", "fsdp4/ranks", "renamed", &format!("{like} --rename head=tail"));
    assert!(made.run.stderr.contains("--like lacks `tail.weight`, which"), "{}", made.run.stderr);
    let made = env.make("consolidate", "fsdp4/ranks", "few", &format!("{like} --include **.embed"));
    assert!(names(&made.path).len() < names(&example.path).len());
    // Only a folder of several files divides tensors among files, so another checkpoint is refused.
    let one = env.make("consolidate", "fsdp4/dcp", "one", "").path;
    env.refuse("consolidate", "fsdp4/ranks", "no", &format!("--like {}", one.display()));
}
