//! Universal checkpoints of DeepSpeed: those that `ds_to_universal.py` made (`tests/fixtures/trainers/deepspeed`) give the values of
//! the live engines, those that dtshard writes give the values of SRC, and damaged ones are refused.

use std::fs;
use std::path::{Path, PathBuf};

use dtshard::catalog::Value;
use dtshard::format::{Checkpoint, Format, ReadOptions};

use crate::common::corrupt::{dtshard, edit_entries, edit_pickle, find, replace, with_each_number_hostile};
use crate::common::env::TestEnv;
use crate::common::{Tensors, Truth, assert_same, below, fixture, inspect, read_safetensors, succeed};
use crate::deepspeed::{self, Damaged, at, case, set_number, tensors, truth};

/// The fixtures that `ds_to_universal.py` made.
pub const CASES: [&str; 6] = [
    "universal1_bf16",
    "universal3_fp32",
    "universal_autotp1",
    "universal_autotp3",
    "universal_tp2",
    "universal_pipe_tp",
];
pub const TAG: &str = "global_step2_universal";
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

/// Returns a copy of the checkpoint of a pipeline, with the files of layers of the same job, which `ds_to_universal.py` does not
/// copy.
fn pipeline_with_layers(env: &TestEnv) -> PathBuf {
    let root = env.copy("trainers/deepspeed/universal_pipe");
    let plain = case("pipe_fp32").join("global_step2");
    for name in (0..6).map(|layer| format!("layer_{layer:02}-model_states.pt")) {
        fs::copy(plain.join(&name), root.join(TAG).join(&name)).unwrap();
    }
    root
}

#[test]
fn model_parallel_jobs_equal_their_own_form() {
    let env = TestEnv::new();
    for (name, plain) in
        [("universal_autotp1", "autotp_zero1"), ("universal_autotp3", "autotp_zero3"), ("universal_tp2", "tp_zero2")]
    {
        succeed("verify", &[&case(plain), &case(name)], "");
        assert_eq!(groups(&state(&case(name))), groups(&deepspeed::state(plain)), "{name}");
    }
    let pipeline = pipeline_with_layers(&env);
    succeed("verify", &[&case("pipe_fp32"), &pipeline], "");
    assert_same(&tensors(&pipeline), &truth("universal_pipe"), "pipeline");
    let found = state(&pipeline);
    assert_eq!(groups(&found), groups(&deepspeed::state("pipe_fp32")));
    let names = |state: &Value| {
        let model = at(state, &["model"]).as_dict().unwrap().clone();
        model.entries.iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names(&found), names(&deepspeed::state("pipe_fp32")));
    let weights = "--weights module";
    let made = env.make("reshard", &pipeline, "module", &format!("--mesh dp=2 {weights}"));
    let plain = env.make("reshard", case("pipe_fp32"), "plain", &format!("--mesh dp=2 {weights}"));
    assert_same(&tensors(&made.path), &tensors(&plain.path), weights);
}

/// Returns the names in all parameter groups.
fn groups(state: &Value) -> Vec<String> {
    let Value::List(groups) = at(state, &["optimizer", "param_groups"]) else { panic!("a list") };
    groups.iter().map(|group| at(group, &["params"]).to_string()).collect()
}

#[test]
fn pipeline_without_files_of_layers_lacks_only_buffers_and_frozen_parameters() {
    let env = TestEnv::new();
    let out = env.path("out.pt");
    let words = ["1.gain", "layer_*-model_states.pt"];
    dtshard(&[&"unshard", &case("universal_pipe"), &out, &"--no-sync"]).assert_refused(&words);
    let options = "--mesh dp=2 --exclude model.*.gain";
    let made = env.make("reshard", case("universal_pipe"), "without", options);
    assert!(made.run.stderr.contains("does not copy the files of layers"), "{}", made.run.stderr);
    let mut expected = truth("universal_pipe");
    for name in ["model.1.gain", "model.3.gain", "model.2.weight"] {
        expected.remove(name).unwrap();
    }
    assert_same(&tensors(&made.path), &expected, "without files of layers");

    // A pipeline with several tensor-parallel ranks; releases before 0.19.7 do not record their number.
    let root = env.copy("trainers/deepspeed/universal_pipe_tp");
    let folder = root.join(TAG);
    for name in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
        if name.file_name().unwrap().to_str().unwrap().starts_with("layer_") {
            fs::remove_file(name).unwrap();
        }
    }
    assert_same(&tensors(&root), &truth("universal_pipe_tp"), "without files of layers");
    for rank in 0..4 {
        edit_pickle(&folder.join(model(rank)), |pickle| replace(pickle, b"tp_degree", b"tp_Degree"));
    }
    assert_same(&tensors(&root), &truth("universal_pipe_tp"), "without the number of ranks");
}

fn model(rank: u32) -> String {
    format!("mp_rank_{rank:02}_model_states.pt")
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
    damaged.refuse(&["model-parallel ranks 0 to 0", "mp_world_size"], |folder| {
        fs::copy(folder.join(MODEL), folder.join(model(1))).unwrap();
    });
    let second = "zero_pp_rank_1_mp_rank_00_model_states.pt";
    copy_of("universal3_fp32").refuse(&["missing", second, "dp_world_size"], |folder| {
        fs::remove_file(folder.join(second)).unwrap();
    });
}

#[test]
fn damaged_files_of_model_parallel_ranks_are_errors() {
    for name in ["universal_autotp1", "universal_tp2", "universal_pipe", "universal_pipe_tp"] {
        let damaged = copy_of(name);
        for rank in 0..2 {
            damaged.refuse(&["missing", &model(rank)], |folder| fs::remove_file(folder.join(model(rank))).unwrap());
        }
        // The file of another save.
        let words = [&model(1), "skipped_steps", "0 as in mp_rank_00_model_states.pt"];
        damaged.refuse(&words, |folder| {
            edit_pickle(&folder.join(model(1)), |pickle| set_number(pickle, b"skipped_steps", 1));
        });
    }
    let damaged = copy_of("universal_tp2");
    damaged.refuse(&["missing", "words.weight/fp32.pt"], |folder| {
        fs::remove_dir_all(folder.join("zero/words.weight")).unwrap();
    });
    // A norm that was put together like a parameter that is cut, or one that was not put together.
    let words = ["zero/layer.norm.weight/fp32.pt", "shape [6]", "2 tensor-parallel ranks", "[24, 6]"];
    damaged.refuse(&words, |folder| {
        fs::copy(folder.join("zero/layer.qkv.weight/fp32.pt"), folder.join("zero/layer.norm.weight/fp32.pt")).unwrap();
    });
    let words = ["zero/words.weight/fp32.pt", "shape [9, 6]", "2 tensor-parallel ranks", "[16, 6]"];
    damaged.refuse(&words, |folder| {
        fs::copy(folder.join("zero/layer.glu.weight/fp32.pt"), folder.join("zero/words.weight/fp32.pt")).unwrap();
    });
    damaged.refuse(&["words.weight", "universal_checkpoint_info"], |folder| {
        for rank in 0..2 {
            edit_pickle(&folder.join(model(rank)), |pickle| {
                replace(pickle, b"universal_checkpoint_info", b"universal_checkpoint_inf0");
            });
        }
    });
    damaged.refuse(&["param_shapes", "a shard of `words.weight` as in mp_rank_00"], |folder| {
        edit_pickle(&folder.join(model(1)), |pickle| replace(pickle, b"words.weight", b"wordz.weight"));
    });
    let damaged = copy_of("universal_pipe");
    damaged.refuse(&["missing", "tied_modules.emb.weight/exp_avg.pt"], |folder| {
        fs::remove_file(folder.join("zero/tied_modules.emb.weight/exp_avg.pt")).unwrap();
    });
    let damaged = copy_of("universal_pipe_tp");
    damaged.refuse(&["missing", &model(3), "mp_world_size"], |folder| {
        fs::remove_file(folder.join(model(3))).unwrap();
    });
    damaged.refuse(&["missing", "layer_01-model_01-model_states.pt"], |folder| {
        fs::remove_file(folder.join("layer_01-model_01-model_states.pt")).unwrap();
    });
    damaged.refuse(&["missing", "layer_01-model_states.pt"], |folder| {
        for rank in 0..2 {
            fs::remove_file(folder.join(format!("layer_01-model_{rank:02}-model_states.pt"))).unwrap();
        }
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
    // Nobody trains a frozen parameter, so it has no optimizer state.
    damaged.refuse(&["zero/frozen.bias/exp_avg.pt", "no optimizer state", "param_shapes"], |folder| {
        fs::copy(folder.join("zero/layers.0.up.bias/exp_avg.pt"), folder.join("zero/frozen.bias/exp_avg.pt")).unwrap();
    });
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
    for (name, file) in [
        ("universal1_bf16", "zero/scale/fp32.pt"),
        ("universal1_bf16", "zero/scale/step.pt"),
        ("universal1_bf16", "zero/optimizer_state.pt"),
        ("universal1_bf16", MODEL),
        ("universal_pipe_tp", MODEL),
        ("universal_pipe_tp", "zero/tied_modules.words.weight/fp32.pt"),
        ("universal_pipe_tp", "layer_00-model_01-model_states.pt"),
    ] {
        let root = env.copy(&format!("trainers/deepspeed/{name}"));
        let path = root.join(TAG).join(file);
        // The result does not matter: it must not be a panic.
        with_each_number_hostile(&path, 200, |_| 0, || _ = Checkpoint::open(&root, &ReadOptions::default()));
        fs::remove_dir_all(root).unwrap();
    }
}
