//! Universal checkpoints of DeepSpeed: those that `ds_to_universal.py` made (`tests/fixtures/trainers/deepspeed`) give the values of
//! the live engines, those that dtshard writes give the values of SRC, and damaged ones are refused.

use std::fs;
use std::path::Path;

use dtshard::catalog::Value;
use dtshard::format::{Checkpoint, Format, ReadOptions};

use crate::common::corrupt::{dtshard, edit_entries, edit_pickle, find, replace, with_each_number_hostile};
use crate::common::env::TestEnv;
use crate::common::{Tensors, Truth, assert_same, below, fixture, inspect, read_safetensors, succeed};
use crate::deepspeed::{Damaged, at, case, tensors, truth};

/// The fixtures that `ds_to_universal.py` made.
const CASES: [&str; 2] = ["universal1_bf16", "universal3_fp32"];
const TAG: &str = "global_step2_universal";
const MODEL: &str = "mp_rank_00_model_states.pt";
const TO: &str = "--to deepspeed-universal --verify";

fn state(path: &Path) -> Value {
    let checkpoint = Checkpoint::open(path, &ReadOptions::default()).unwrap();
    assert_eq!(checkpoint.format, Format::DeepspeedUniversal);
    checkpoint.catalog.state
}

#[test]
fn converted_checkpoints_equal_the_live_engines() {
    let env = TestEnv::new();
    for name in CASES {
        let expected = truth(name);
        assert_same(&tensors(&case(name)), &expected, name);
        let made = env.make("consolidate", case(name), &format!("{name}_model"), "--assets none");
        assert_same(&read_safetensors(&made.path), &below("model.", &expected), name);
        let made = env.make("reshard", case(name), name, "--mesh dp=2 --verify");
        assert_same(&tensors(&made.path), &expected, name);
        assert!(made.path.join(".metadata").is_file(), "the default is a DCP directory");
        succeed("verify", &[&case(name), &made.path], "");
        let groups = Truth::load(&format!("trainers/deepspeed/{name}.truth")).json["param_groups"].clone();
        let Value::List(found) = at(&state(&case(name)), &["optimizer", "param_groups"]).clone() else {
            panic!("a list")
        };
        assert_eq!(found.len(), groups.as_array().unwrap().len());
        for (group, expected) in found.iter().zip(groups.as_array().unwrap()) {
            let Value::Float(lr) = at(group, &["lr"]) else { panic!("lr") };
            assert_eq!(lr.to_bits(), expected["lr"].as_f64().unwrap().to_bits());
        }
    }
}

#[test]
fn checkpoint_is_found_from_the_folder_above() {
    let env = TestEnv::new();
    for path in [case(CASES[0]), case(CASES[0]).join(TAG), case(CASES[1])] {
        for options in ["", "--from deepspeed-universal"] {
            assert_eq!(inspect(&path, options)["format"], "deepspeed-universal", "{}", path.display());
        }
    }
    dtshard(&[&"inspect", &case(CASES[0]).join(TAG), &"--from", &"deepspeed"])
        .assert_refused(&["Universal", "--from deepspeed-universal"]);
    // The folder of a job has both kinds.
    let folder = env.copy("trainers/deepspeed/universal1_bf16");
    let other = env.copy("trainers/deepspeed/zero1_fp32");
    fs::rename(other.join("global_step2"), folder.join("global_step2")).unwrap();
    fs::write(folder.join("latest"), "global_step2").unwrap();
    assert_eq!(inspect(&folder, "")["format"], "deepspeed");
    assert_eq!(inspect(&folder, "--from deepspeed-universal")["format"], "deepspeed-universal");
    fs::remove_file(folder.join("latest")).unwrap();
    assert_eq!(inspect(&folder, "")["format"], "deepspeed-universal");
    fs::write(folder.join("latest_universal"), "global_step9").unwrap();
    dtshard(&[&"inspect", &folder]).assert_refused(&["latest_universal", "global_step9"]);
    fs::write(folder.join("latest_universal"), "../outside").unwrap();
    dtshard(&[&"inspect", &folder]).assert_refused(&["latest_universal"]);
}

/// Releases up to 0.19.7 write folders for trained parameters only.
#[test]
fn folders_of_other_names_are_not_read() {
    let env = TestEnv::new();
    let folder = env.copy("trainers/deepspeed/universal1_bf16");
    for name in ["frozen.weight", "frozen.bias", "seen", "layers.0.gain", "head.weight"] {
        fs::remove_dir_all(folder.join(TAG).join("zero").join(name)).unwrap();
    }
    assert_same(&tensors(&folder), &truth("universal1_bf16"), "without the folders of 0.19.8");
}

#[test]
fn written_checkpoints_equal_their_sources() {
    let env = TestEnv::new();
    for name in ["zero1_fp32", "zero1_bf16", "zero2_fp16", "zero2_round_robin", "zero2_sgd", "zero3_fp32", "zero3_bf16"]
    {
        let made = env.make("reshard", case(name), name, TO);
        assert_same(&tensors(&made.path), &truth(name), name);
        succeed("verify", &[&case(name), &made.path], "");
        let folder = made.path.join(TAG);
        assert_eq!(fs::read(made.path.join("latest_universal")).unwrap(), TAG.as_bytes());
        for file in
            [MODEL, "zero_pp_rank_0_mp_rank_00_model_states.pt", "zero/optimizer_state.pt", "zero/scale/fp32.pt"]
        {
            assert!(folder.join(file).is_file(), "{name} {file}");
        }
        // Frozen parameters, buffers and further names of tied parameters have no folder.
        for folder in
            ["frozen.weight", "seen", "layers.0.gain", "head.weight"].map(|name| folder.join("zero").join(name))
        {
            assert!(!folder.exists(), "{}", folder.display());
        }
        let found = state(&made.path);
        assert_eq!(at(&found, &["note"]).as_str(), Some("client state"));
        assert_eq!(at(&found, &["lr_scheduler", "last_epoch"]), &Value::Int(2));
    }
}

#[test]
fn dcp_directory_and_flat_optimizer_are_written() {
    let env = TestEnv::new();
    let dcp = env.make("reshard", case("zero1_fp32"), "dcp", "--mesh dp=3");
    let made = env.make("reshard", &dcp.path, "universal", TO);
    assert_same(&tensors(&made.path), &truth("zero1_fp32"), "from DCP");
    // torchtitan flattens the optimizer: `optimizer.state.NAME.exp_avg`.
    let made = env.make("reshard", fixture("titan"), "titan", TO);
    let expected = Truth::load("titan.truth").tensors;
    let found = tensors(&made.path);
    let moments = |tensors: &Tensors| -> Tensors {
        tensors.iter().filter(|(name, _)| name.contains("exp_avg")).map(|(n, t)| (n.clone(), t.clone())).collect()
    };
    assert!(!moments(&found).is_empty());
    assert_same(&moments(&found), &moments(&expected), "titan");
}

#[test]
fn model_without_optimizer_gets_moments_of_zeros() {
    let env = TestEnv::new();
    let made = env.make("reshard", case("zero3_fp32"), "model", &format!("{TO} --exclude optimizer.**"));
    let found = tensors(&made.path);
    assert_same(&below("model.", &found), &below("model.", &truth("zero3_fp32")), "model");
    // Zeros of one shape are equal, and no two moments of a trained model are.
    let moment = |name: &str| found[&format!("optimizer.state.{name}")].clone();
    let first = moment("layers.0.up.weight.exp_avg");
    for name in ["layers.0.up.weight.exp_avg_sq", "layers.1.up.weight.exp_avg", "layers.1.up.weight.exp_avg_sq"] {
        assert_eq!(moment(name).digest, first.digest, "{name}");
    }
    assert_eq!(moment("scale.step").digest, moment("emb.weight.step").digest);
    let len =
        |file: &str| fs::metadata(made.path.join("global_step2_universal/zero/emb.weight").join(file)).unwrap().len();
    assert_eq!(len("fp32.pt") - len("exp_avg.pt"), 128, "a single zero is stored, instead of 45 elements");
}

#[test]
fn options_without_effect_and_unsuitable_sources_are_refused() {
    let env = TestEnv::new();
    let out = env.path("out");
    let refuse = |words: &[&str], verb: &str, source: &Path, options: &[&str]| {
        let mut args: Vec<&dyn AsRef<std::ffi::OsStr>> =
            vec![&verb, &source, &out, &"--no-sync", &"--to", &"deepspeed-universal"];
        args.extend(options.iter().map(|option| option as &dyn AsRef<std::ffi::OsStr>));
        dtshard(&args).assert_refused(words);
        assert!(!out.exists());
    };
    let source = case("zero1_fp32");
    refuse(&["--mesh", "no mesh"], "reshard", &source, &["--mesh", "dp=2"]);
    refuse(&["--placements"], "reshard", &source, &["--placements", "S(0)"]);
    refuse(&["unshard writes whole tensors", "reshard"], "unshard", &source, &[]);
    refuse(&["no model"], "reshard", &source, &["--include", "optimizer.**"]);
    refuse(&["steps for", "DeepSpeed counts the steps"], "reshard", &fixture("fsdp4/dcp"), &[]);
    let options = ["--exclude", "optimizer.**", "--rename", "scale=sc/ale"];
    refuse(&["cannot be the name of a folder"], "reshard", &source, &options);
}

fn copy_of(case: &'static str) -> Damaged {
    Damaged::in_folder(case, TAG)
}

#[test]
fn missing_files_are_errors() {
    let remove = |name: &'static str| move |folder: &Path| fs::remove_file(folder.join(name)).unwrap();
    let damaged = copy_of("universal1_bf16");
    damaged.refuse(&["missing", "scale/fp32.pt"], remove("zero/scale/fp32.pt"));
    damaged.refuse(&["missing", "scale/exp_avg.pt"], remove("zero/scale/exp_avg.pt"));
    damaged.refuse(&["missing", "scale/step.pt"], remove("zero/scale/step.pt"));
    damaged.refuse(&["missing", "optimizer_state.pt"], remove("zero/optimizer_state.pt"));
    damaged.refuse(&["missing", MODEL], remove(MODEL));
    damaged.refuse(&["missing", "emb.weight/fp32.pt"], |folder| {
        fs::remove_dir_all(folder.join("zero/emb.weight")).unwrap();
    });
    damaged.refuse(&["ds_to_universal.py", "tmp"], |folder| fs::create_dir(folder.join("tmp")).unwrap());
    damaged.refuse(&["several model-parallel ranks"], |folder| {
        fs::copy(folder.join(MODEL), folder.join("mp_rank_01_model_states.pt")).unwrap();
    });
    let second = "zero_pp_rank_1_mp_rank_00_model_states.pt";
    copy_of("universal3_fp32").refuse(&["frozen_param_fragments", "expected 25"], |folder| {
        fs::remove_file(folder.join(second)).unwrap();
    });
}

#[test]
fn values_that_contradict_the_model_file_are_errors() {
    for (case, words) in [
        ("universal1_bf16", ["zero/scale/fp32.pt", "shape [2]", "[7]"]),
        ("universal3_fp32", ["zero/scale/fp32.pt", "shape [2]", "[7]"]),
    ] {
        copy_of(case).refuse(&words, |folder| {
            fs::copy(folder.join("zero/layers.0.up.bias/fp32.pt"), folder.join("zero/scale/fp32.pt")).unwrap();
        });
    }
    let damaged = copy_of("universal1_bf16");
    damaged.refuse(&["zero/layers.0.up.bias/step.pt", "expected 2 as for scale", "found 3"], |folder| {
        edit_entries(&folder.join("zero/layers.0.up.bias/step.pt"), |entries| {
            let entry = entries.iter_mut().find(|entry| entry.name.ends_with("/data/0")).unwrap();
            entry.data = 3_f32.to_le_bytes().to_vec();
            entry.crc = crc32fast::hash(&entry.data);
        });
    });
    damaged.refuse(&["zero/scale/exp_avg.pt", "a tensor"], |folder| {
        edit_pickle(&folder.join("zero/scale/exp_avg.pt"), |pickle| replace(pickle, b"param", b"parim"));
    });
    damaged.refuse(&["param_groups", "2 groups"], |folder| {
        edit_pickle(&folder.join(MODEL), |pickle| replace(pickle, b"global_samples", b"global_sampleS"));
        let other = case("zero2_sgd");
        let one = TestEnv::new();
        let made = one.make("reshard", other, "sgd", "--to deepspeed-universal");
        fs::copy(made.path.join(TAG).join("zero/optimizer_state.pt"), folder.join("zero/optimizer_state.pt")).unwrap();
    });
}

#[test]
fn names_that_leave_the_folder_are_errors() {
    let damaged = copy_of("universal1_bf16");
    for name in [&b"../le"[..], b"a/b.c", b"/scal"] {
        damaged.refuse(&["param_shapes"], |folder| {
            edit_pickle(&folder.join(MODEL), |pickle| {
                // `param_shapes` takes the name from the memo.
                let at = find(pickle, b"X\x05\0\0\0scale").unwrap() + 5;
                pickle[at..at + 5].copy_from_slice(name);
            });
        });
    }
}

#[test]
fn hostile_sizes_do_not_crash() {
    let env = TestEnv::new();
    for file in ["zero/scale/fp32.pt", "zero/scale/step.pt", "zero/optimizer_state.pt", MODEL] {
        let root = env.copy("trainers/deepspeed/universal1_bf16");
        let path = root.join(TAG).join(file);
        // The result does not matter: it must not be a panic.
        with_each_number_hostile(&path, 200, |_| 0, || _ = Checkpoint::open(&root, &ReadOptions::default()));
        fs::remove_dir_all(root).unwrap();
    }
}
