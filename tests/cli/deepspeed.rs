//! Checkpoints that DeepSpeed wrote (`tests/fixtures/trainers/deepspeed`): every verb gives the values of the live engines,
//! and damaged, mixed and unsupported checkpoints are refused.

use std::fs;
use std::path::{Path, PathBuf};

use dtshard::catalog::Value;
use dtshard::format::{Checkpoint, Format, ReadOptions};

use crate::common::corrupt::{dtshard, edit_entries, edit_pickle, find, replace, with_each_number_hostile};
use crate::common::env::TestEnv;
use crate::common::{Tensors, Truth, assert_same, below, expect, fixture, inspect, read, read_safetensors, succeed};

/// The cases that are read completely.
pub const CASES: [&str; 19] = [
    "zero0_fp32",
    "zero0_bf16",
    "zero0_strides",
    "zero0_adafactor",
    "zero1_fp32",
    "zero1_bf16",
    "zero1_aligned",
    "zero2_fp32",
    "zero2_fp16",
    "zero2_skipped",
    "zero2_bf16",
    "zero2_round_robin",
    "zero2_sgd",
    "zero2_adagrad",
    "zero2_elastic",
    "zero3_fp32",
    "zero3_bf16",
    "zero3_hpz",
    "zero3_adam",
];
/// The cases that other releases of DeepSpeed wrote.
pub const RELEASES: [&str; 7] = [
    "v0.14.4/zero2_bf16",
    "v0.14.4/zero3_fp32",
    "v0.16.9/zero1_bf16",
    "v0.17.6/zero1_bf16",
    "v0.17.6/zero3_bf16",
    "v0.18.9/zero3_mics",
    "v0.19.7/zero2_bf16",
];
pub const TAG: &str = "global_step2";
const MODEL: &str = "mp_rank_00_model_states.pt";

pub fn case(name: &str) -> PathBuf {
    fixture(&format!("trainers/deepspeed/{name}"))
}

pub fn truth(name: &str) -> Tensors {
    Truth::load(&format!("trainers/deepspeed/{name}.truth")).tensors
}

/// Returns the tensors of a checkpoint without the table that the training loop saved.
pub fn tensors(path: &Path) -> Tensors {
    let mut found = read(path);
    found.retain(|name, _| !name.starts_with("nested."));
    found
}

/// At stage 0 with f32 parameters, the optimizer has numbers for names.
fn has_names(case: &str) -> bool {
    case != "zero0_fp32"
}

#[test]
fn tensors_of_each_case_equal_those_of_the_live_engines() {
    let env = TestEnv::new();
    for name in CASES {
        let expected = truth(name);
        let made = env.make("consolidate", case(name), &format!("{name}_model"), "--assets none");
        assert_same(&read_safetensors(&made.path), &below("model.", &expected), name);
        if has_names(name) {
            assert_same(&tensors(&case(name)), &expected, name);
            let made = env.make("unshard", case(name), &format!("{name}.pt"), "--verify");
            assert_same(&tensors(&made.path), &expected, name);
        }
    }
}

#[test]
fn tensors_of_other_releases_equal_those_of_the_live_engines() {
    let env = TestEnv::new();
    for name in RELEASES {
        let expected = truth(name);
        let folder = name.replace('/', "_");
        let made = env.make("consolidate", case(name), &folder, "--assets none");
        assert_same(&read_safetensors(&made.path), &below("model.", &expected), name);
        let made = env.make("reshard", case(name), &format!("{folder}_dcp"), "--mesh dp=3 --to dcp --verify");
        assert_same(&tensors(&made.path), &expected, name);
        // A 0-d parameter, which 0.19.8 cannot train.
        let is_scalar = expected["model.scale"].shape.is_empty();
        assert_eq!(is_scalar, name.starts_with("v0.14") || name.starts_with("v0.16"), "{name}");
    }
}

/// DeepSpeed 0.17.6 saves no optimizer files in this case. If another release wrote the model file, they are missing.
#[test]
fn rounded_weights_are_read_only_if_no_master_weights_were_saved() {
    let env = TestEnv::new();
    let folder = env.copy("trainers/deepspeed/v0.17.6/zero1_bf16");
    let run = succeed("inspect", &[&folder], "");
    assert!(run.stderr.contains("DeepSpeed 0.17.6 saves no optimizer"), "{}", run.stderr);
    assert!(run.stderr.contains("rounded to bf16"), "{}", run.stderr);
    edit_pickle(&folder.join(TAG).join(MODEL), |pickle| {
        let at = pickle.windows(6).rposition(|window| window == b"0.17.6").unwrap();
        pickle[at + 5] = b'5';
    });
    dtshard(&[&"inspect", &folder]).assert_refused(&["optimizer files", &optim(0)]);
}

/// MiCS partitions over 2 of the 4 ranks, and `dp_world_size` is 4.
#[test]
fn partitions_of_mics_are_those_of_one_shard_group() {
    let name = "v0.18.9/zero3_mics";
    let files = fs::read_dir(case(name).join(TAG)).unwrap().count();
    assert_eq!(files, 4);
    let damaged = Damaged::new(name);
    damaged.refuse(&["mics_shard_size", "expected 3", "found 2"], |folder| {
        edit_pickle(&folder.join("zero_pp_rank_0_mp_rank_00_model_states.pt"), |pickle| {
            set_number(pickle, b"mics_shard_size", 3);
        });
    });
}

#[test]
fn resharded_cases_equal_the_live_engines() {
    let env = TestEnv::new();
    for (name, options) in [
        ("zero0_fp32", "--mesh dp=2 --to dcp"),
        ("zero0_bf16", "--mesh dp=2 --to dcp"),
        ("zero0_strides", "--mesh dp=3 --to dcp"),
        ("zero0_adafactor", "--mesh dp=2 --to dcp"),
        ("zero1_fp32", "--mesh dp=3 --to dcp"),
        ("zero1_bf16", "--mesh dp=2 --to dcp"),
        ("zero2_bf16", "--mesh dp=2,tp=2 --placements S(0),S(1) --to torch-ranks"),
        ("zero2_fp16", "--mesh dp=4 --to dcp"),
        ("zero3_fp32", "--mesh dp=3 --to local"),
        ("zero3_bf16", "--mesh dp=2,tp=2 --placements S(0),R --to torch-ranks"),
    ] {
        let made = env.make("reshard", case(name), name, &format!("{options} --verify"));
        let found = tensors(&made.path);
        let found: Tensors = if has_names(name) {
            found
        } else {
            below("model.", &found).into_iter().map(|(n, t)| (format!("model.{n}"), t)).collect()
        };
        let mut expected = truth(name);
        expected.retain(|tensor, _| has_names(name) || tensor.starts_with("model."));
        assert_same(&found, &expected, name);
        succeed("verify", &[&case(name), &made.path], "");
    }
}

#[test]
fn checkpoint_is_found_from_the_folder_above() {
    for (path, options) in [
        (case("zero3_fp32"), ""),
        (case("zero3_fp32").join(TAG), ""),
        (case("zero3_fp32").join(TAG), "--from deepspeed"),
        (case("zero0_fp32"), "--from deepspeed"),
        (case("zero1_fp32"), ""),
    ] {
        assert_eq!(inspect(&path, options)["format"], "deepspeed", "{}", path.display());
        succeed("verify", &[&path], options);
    }
    let env = TestEnv::new();
    let folder = env.copy("trainers/deepspeed/zero1_fp32");
    fs::rename(folder.join(TAG), folder.join("any tag")).unwrap();
    fs::write(folder.join("latest"), "any tag").unwrap();
    assert_eq!(inspect(&folder, "")["format"], "deepspeed");
    fs::write(folder.join("latest"), "global_step9").unwrap();
    dtshard(&[&"inspect", &folder]).assert_refused(&["latest", "global_step9"]);
}

pub fn state(name: &str) -> Value {
    let checkpoint = Checkpoint::open(&case(name), &ReadOptions::default()).unwrap();
    assert_eq!(checkpoint.format, Format::Deepspeed);
    checkpoint.catalog.state
}

pub fn at<'a>(state: &'a Value, keys: &[&str]) -> &'a Value {
    keys.iter().fold(state, |value, key| value.as_dict().unwrap().get(key).unwrap())
}

#[test]
fn objects_of_the_training_loop_are_kept() {
    for name in ["zero1_fp32", "zero3_bf16", "zero0_fp32"] {
        let state = state(name);
        let keys: Vec<&str> = state.as_dict().unwrap().entries.iter().map(|(key, _)| key.as_str().unwrap()).collect();
        assert_eq!(keys[..2], ["model", "optimizer"], "{name}");
        let mut others = keys[2..].to_vec();
        others.sort_unstable();
        assert_eq!(
            others,
            ["epoch", "global_samples", "global_steps", "lr_scheduler", "nested", "note", "skipped_steps"],
            "{name}"
        );
        assert_eq!(at(&state, &["global_steps"]), &Value::Int(2));
        assert_eq!(at(&state, &["note"]).as_str(), Some("client state"));
        assert_eq!(at(&state, &["nested", "list"]).to_string(), "[1, 2.5, None]");
        assert_eq!(at(&state, &["lr_scheduler", "last_epoch"]), &Value::Int(2));
        let shown = succeed("inspect", &[&case(name)], "--brief").stdout;
        assert!(shown.contains("\nstep        2\n"), "{shown}");
    }
}

/// With `elastic_checkpoint`, DeepSpeed saves no options.
#[test]
fn parameter_groups_of_elastic_checkpoints_have_names() {
    let state = state("zero2_elastic");
    let Value::List(groups) = at(&state, &["optimizer", "param_groups"]) else { panic!("a list") };
    let [group] = groups.as_slice() else { panic!("one group") };
    let [(key, Value::List(names))] = group.as_dict().unwrap().entries.as_slice() else { panic!("{group}") };
    assert_eq!((key.as_str(), names.len(), names[0].as_str()), (Some("params"), 12, Some("scale")));
    let run = succeed("inspect", &[&case("zero2_elastic")], "--brief");
    assert!(run.stderr.contains("warning") && run.stderr.contains("elastic_checkpoint"), "{}", run.stderr);
}

#[test]
fn parameter_groups_have_names_and_options() {
    for name in ["zero1_fp32", "zero3_fp32"] {
        let state = state(name);
        let Value::List(groups) = at(&state, &["optimizer", "param_groups"]) else { panic!("a list") };
        let names = |group: &Value| match group.as_dict().unwrap().get("params") {
            Some(Value::List(names)) => names.iter().map(|name| name.as_str().unwrap().to_owned()).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        let all: Vec<Vec<String>> = groups.iter().map(names).collect();
        assert_eq!(all.len(), 2);
        assert!(all[0].iter().all(|name| name.ends_with(".weight") && !name.contains("norm")), "{all:?}");
        assert!(all[1].contains(&String::from("scale")) && all[1].contains(&String::from("layers.0.norm.weight")));
        let truth = Truth::load(&format!("trainers/deepspeed/{name}.truth")).json;
        for (group, expected) in groups.iter().zip(truth["param_groups"].as_array().unwrap()) {
            for key in ["lr", "weight_decay", "eps"] {
                let Some(Value::Float(found)) = group.as_dict().unwrap().get(key) else { panic!("{key}") };
                assert_eq!(found.to_bits(), expected[key].as_f64().unwrap().to_bits(), "{name} {key}");
            }
        }
    }
}

/// At stage 3, nothing in the files says which parameter a name belongs to that `shared_params` lacks.
#[test]
fn tie_that_no_file_names_is_an_error_at_stage_3() {
    let env = TestEnv::new();
    let source = case("zero3_fp16");
    let out = env.path("out");
    dtshard(&[&"consolidate", &source, &out, &"--no-sync"]).assert_refused(&["last.0.up.weight", "shared_params"]);
    let made = env.make("consolidate", &source, "known", "--exclude **.last.** --assets none");
    let mut expected = below("model.", &truth("zero3_fp16"));
    expected.retain(|name, _| !name.starts_with("last."));
    assert_same(&read_safetensors(&made.path), &expected, "zero3_fp16");
    // At stages 1 and 2, the tie is found by the elements of the module.
    assert!(truth("zero2_bf16").contains_key("model.last.0.up.weight"));
}

// ------------------------------------------------------------------------------------------- folders of other trainers

/// Writes the folder that the Hugging Face Trainer and accelerate write: the model a second time beside `latest`, in the dtype
/// of training, with its configuration.
fn with_second_model(env: &TestEnv, name: &str) -> PathBuf {
    let folder = env.copy(&format!("trainers/deepspeed/{name}"));
    fs::rename(env.vectors("model.safetensors", &[("emb.weight", 45)]), folder.join("model.safetensors")).unwrap();
    for (name, text) in
        [("config.json", "{\"torch_dtype\": \"float32\"}"), ("tokenizer.json", "{}"), ("zero_to_fp32.py", "x")]
    {
        fs::write(folder.join(name), text).unwrap();
    }
    folder
}

#[test]
fn masters_are_read_and_not_the_second_model() {
    let env = TestEnv::new();
    for name in ["zero3_bf16", "zero1_fp32", "zero0_fp32"] {
        let source = with_second_model(&env, name);
        for options in ["", "--from deepspeed "] {
            let out = env.path("out");
            let run = succeed("consolidate", &[&source, &out], options);
            assert_same(&read_safetensors(&out), &below("model.", &truth(name)), name);
            assert!(run.stderr.contains("model.safetensors beside it is not read"), "{}", run.stderr);
            assert!(out.join("config.json").is_file() && out.join("tokenizer.json").is_file());
            fs::remove_dir_all(out).unwrap();
        }
        assert_eq!(inspect(&source, "")["format"], "deepspeed");
        let second = env.path(&format!("second_{name}"));
        succeed("consolidate", &[&source, &second], "--from safetensors --assets none");
        assert_eq!(read_safetensors(&second).len(), 1);
        // Files of several formats beside the folder do not matter.
        fs::copy(fixture("torch_file/model.pt"), source.join("pytorch_model.bin")).unwrap();
        assert_eq!(inspect(&source, "")["format"], "deepspeed");
        // Without `latest`, the second model is all that is left to find.
        fs::remove_file(source.join("pytorch_model.bin")).unwrap();
        fs::remove_file(source.join("latest")).unwrap();
        assert_eq!(inspect(&source, "")["format"], "safetensors");
        fs::remove_dir_all(source).unwrap();
    }
}

/// Whichever folder the user gives, the checkpoint is that of DeepSpeed, with its masters and the whole optimizer.
#[test]
fn each_folder_of_a_trainer_is_one_checkpoint() {
    let env = TestEnv::new();
    let lightning = "lightning_logs/version_0/checkpoints/epoch=0-step=2.ckpt";
    for (trainer, folder, tag) in [
        ("accelerate_deepspeed", "checkpoint_0", "pytorch_model"),
        ("hf_trainer_deepspeed", "checkpoint-2", "global_step2"),
        ("lightning_deepspeed", lightning, "checkpoint"),
    ] {
        let expected = Truth::load(&format!("trainers/{trainer}.truth")).tensors;
        let root = fixture(&format!("trainers/{trainer}"));
        for (level, source) in [root.clone(), root.join(folder), root.join(folder).join(tag)].iter().enumerate() {
            assert_eq!(inspect(source, "")["format"], "deepspeed", "{}", source.display());
            succeed("verify", &[source], "");
            let made = env.make("unshard", source, &format!("{trainer}_{level}.pt"), "");
            assert_same(&read(&made.path), &expected, trainer);
            let made = env.make("reshard", source, &format!("{trainer}_{level}_dcp"), "--mesh dp=3 --to dcp");
            assert_same(&read(&made.path), &expected, trainer);
            let out = env.path(&format!("{trainer}_{level}"));
            let run = succeed("consolidate", &[source, &out], "");
            assert_same(&read_safetensors(&out), &below("model.", &expected), trainer);
            let has_second_model = trainer.starts_with("hf") && level < 2;
            let note = "the model comes from global_step2, which has the optimizer, too";
            assert_eq!(run.stderr.contains(note), has_second_model, "{}", run.stderr);
            for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
                assert_eq!(out.join(name).is_file(), has_second_model, "{name} of {}", source.display());
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------- the weights of the module

#[test]
fn weights_of_the_module_are_the_rounded_masters() {
    let env = TestEnv::new();
    for (name, dtype) in [
        ("zero0_bf16", "bf16"),
        ("zero1_bf16", "bf16"),
        ("zero1_aligned", "bf16"),
        ("zero2_bf16", "bf16"),
        ("zero2_fp16", "f16"),
    ] {
        let source = case(name);
        let module = env.make("consolidate", &source, &format!("{name}_module"), "--weights module --assets none");
        let masters = env.make("consolidate", &source, &format!("{name}_masters"), "--weights master --assets none");
        let options = format!("--dtype {dtype} --assets none");
        let rounded = env.make("consolidate", &source, &format!("{name}_rounded"), &options);
        let (module, rounded) = (read_safetensors(&module.path), read_safetensors(&rounded.path));
        let masters = read_safetensors(&masters.path);
        assert_same(&masters, &below("model.", &truth(name)), name);
        assert_eq!(module.len(), masters.len());
        for (tensor, found) in &module {
            let buffer_or_rounded = if found.dtype == masters[tensor].dtype { &masters } else { &rounded };
            assert_eq!(found, &buffer_or_rounded[tensor], "{name} {tensor}");
        }
        assert!(module.values().any(|tensor| tensor.dtype != masters["emb.weight"].dtype), "{name}");
    }
    // Optimizer state is read with both.
    let made = env.make("reshard", case("zero2_bf16"), "dcp", "--weights module --mesh dp=2 --to dcp");
    let mut expected = truth("zero2_bf16");
    expected.retain(|name, _| name.starts_with("optimizer."));
    let mut found = tensors(&made.path);
    found.retain(|name, _| name.starts_with("optimizer."));
    assert_same(&found, &expected, "optimizer");
}

#[test]
fn weights_are_said_if_they_differ() {
    for (name, is_said) in [("zero2_bf16", true), ("zero2_fp16", true), ("zero1_fp32", false), ("zero3_bf16", false)] {
        let run = succeed("inspect", &[&case(name)], "--brief");
        assert_eq!(run.stderr.contains("have their master weights (f32)"), is_said, "{name}: {}", run.stderr);
        let run = succeed("inspect", &[&case(name)], "--brief --weights master");
        assert!(!run.stderr.contains("master"), "{name}: {}", run.stderr);
    }
}

/// Stage 3 saves no parameters of the module. The Hugging Face Trainer and accelerate save them beside it.
#[test]
fn weights_of_the_module_at_stage_3_are_in_the_second_model() {
    let env = TestEnv::new();
    for name in ["zero3_bf16", "zero3_fp32"] {
        let out = env.path("out");
        dtshard(&[&"consolidate", &case(name), &out, &"--weights", &"module"]).assert_refused(&[
            "--weights module",
            "stage 3",
            "save_16bit_model",
        ]);
        let source = with_second_model(&env, name);
        let run = succeed("consolidate", &[&source, &out], "--weights module");
        assert!(run.stderr.contains("the model comes from model.safetensors"), "{}", run.stderr);
        assert_eq!(read_safetensors(&out).len(), 1);
        fs::remove_dir_all(out).unwrap();
        fs::remove_dir_all(source).unwrap();
    }
    let source = with_second_model(&env, "zero1_fp32");
    let made = env.make("consolidate", &source, "own", "--weights module");
    assert_same(&read_safetensors(&made.path), &below("model.", &truth("zero1_fp32")), "zero1_fp32");
}

/// DeepSpeed 0.17.6 writes no optimizer files at stage 1 with bf16 and f32 gradients.
#[test]
fn weights_of_the_module_need_no_optimizer_files() {
    let env = TestEnv::new();
    let folder = env.copy("trainers/deepspeed/zero1_fp32").join(TAG);
    (0..2).for_each(|partition| fs::remove_file(folder.join(optim(partition))).unwrap());
    let out = env.path("out");
    dtshard(&[&"consolidate", &folder, &out]).assert_refused(&["missing", &optim(0), "--weights module"]);
    succeed("consolidate", &[&folder, &out], "--weights module");
    assert_same(&read_safetensors(&out), &below("model.", &truth("zero1_fp32")), "zero1_fp32");
}

#[test]
fn weights_of_a_checkpoint_with_one_value_are_an_error() {
    let env = TestEnv::new();
    let source = fixture("llama_tiny/ranks");
    for weights in ["master", "module"] {
        for (verb, out) in [("consolidate", Some(env.path("out"))), ("inspect", None), ("verify", None)] {
            let mut arguments: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&verb, &source];
            arguments.extend(out.as_ref().map(|out| out as &dyn AsRef<std::ffi::OsStr>));
            arguments.extend([&"--weights" as &dyn AsRef<std::ffi::OsStr>, &weights]);
            dtshard(&arguments).assert_refused(&["--weights", weights, "only one value of each parameter"]);
        }
    }
}

/// SGD has no counter of steps, so only the module shows that a partition comes from another save.
#[test]
fn verify_compares_master_weights_with_the_module() {
    let env = TestEnv::new();
    for (name, file, dtype) in [
        ("zero2_sgd", optim(1), "f32"),
        ("zero2_bf16", format!("bf16_{}", optim(0)), "bf16"),
        ("zero2_fp16", optim(2), "f16"),
    ] {
        let folder = env.copy(&format!("trainers/deepspeed/{name}")).join(TAG);
        succeed("verify", &[&folder], "");
        // In the optimizer's files, the vectors of the state come before that of the master weights.
        let before = std::cell::Cell::new(if name == "zero2_sgd" { 1 } else { 2 });
        let is_masters = |data: &[u8]| data.len() > 64 && before.replace(before.get() - 1) == 0;
        set_element(&folder.join(file), |data| is_masters(data).then_some(0), 0.5);
        let run = expect(1, "verify", &[&folder], "");
        assert!(run.stdout.contains(&format!("the master weights, as {dtype}, are not")), "{name}: {}", run.stdout);
        assert_eq!(run.stdout.lines().count(), 1, "{name}: {}", run.stdout);
        succeed("verify", &[&folder], "--weights module");
        fs::remove_dir_all(folder).unwrap();
    }
}

/// At stage 0 with 16-bit parameters, the rounded values of a master weight say to which parameter it belongs.
#[test]
fn master_weights_without_names_need_different_parameters() {
    let env = TestEnv::new();
    let folder = env.copy("trainers/deepspeed/zero0_bf16").join(TAG);
    let out = env.path("out");
    edit_entries(&folder.join(MODEL), |entries| {
        let biases =
            entries.iter_mut().filter(|entry| entry.name.contains("/data/") && [14, 28].contains(&entry.data.len()));
        for bias in biases {
            bias.data.fill(0);
            bias.crc = crc32fast::hash(&bias.data);
        }
    });
    // All are equal, in one group, and in the order of the module.
    succeed("consolidate", &[&folder, &out], "--assets none");
    fs::remove_dir_all(&out).unwrap();
    edit_entries(&folder.join(MODEL), |entries| {
        let is_bias = |data: &[u8]| data.len() == 14;
        let bias = entries.iter_mut().find(|entry| entry.name.contains("/data/") && is_bias(&entry.data)).unwrap();
        bias.data.fill(1);
        bias.crc = crc32fast::hash(&bias.data);
    });
    for verb in ["consolidate", "unshard"] {
        dtshard(&[&verb, &folder, &out]).assert_refused(&[
            "no names",
            "6 tensors could be those of",
            "norm.bias",
            "--weights module",
        ]);
    }
    succeed("consolidate", &[&folder, &out], "--assets none --weights module");
}

#[test]
fn master_weights_without_a_parameter_are_an_error() {
    let damaged = Damaged::new("zero0_bf16");
    damaged.refuse(&[MODEL, "optimizer.fp32_groups[0][1]", "shape [7, 5], and other values"], |folder| {
        set_element(&folder.join(MODEL), |data| (data.len() == 70).then_some(0), 0.25);
    });
}

// ------------------------------------------------------------------------------------------------- damaged checkpoints

/// A copy of a case that a test damages.
pub struct Damaged {
    pub env: TestEnv,
    case: &'static str,
    /// The folder of the checkpoint in the case.
    tag: &'static str,
}

impl Damaged {
    pub fn new(case: &'static str) -> Self {
        Self::in_folder(case, TAG)
    }

    pub fn in_folder(case: &'static str, tag: &'static str) -> Self {
        Self { env: TestEnv::new(), case, tag }
    }

    /// Makes a new copy of the case, changes it, and asserts that conversions refuse it with a message that contains all of
    /// `words`.
    #[track_caller]
    pub fn refuse(&self, words: &[&str], change: impl FnOnce(&Path)) {
        let root = self.env.copy(&format!("trainers/deepspeed/{}", self.case));
        let folder = root.join(self.tag);
        change(&folder);
        let out = self.env.path("out.pt");
        dtshard(&[&"unshard", &folder, &out, &"--no-sync"]).assert_refused(words);
        assert!(!out.exists());
        fs::remove_dir_all(root).unwrap();
    }
}

/// Returns the name of the optimizer file of a partition.
fn optim(partition: u32) -> String {
    format!("zero_pp_rank_{partition}_mp_rank_00_optim_states.pt")
}

#[test]
fn missing_surplus_and_doubled_files_are_errors() {
    let damaged = Damaged::new("zero1_fp32");
    let remove = |name: String| move |folder: &Path| fs::remove_file(folder.join(name)).unwrap();
    damaged.refuse(&[&optim(0), "missing"], remove(optim(0)));
    damaged.refuse(&["missing", &optim(1), "partition_count in zero_pp_rank_0"], remove(optim(1)));
    damaged.refuse(&["missing", MODEL], remove(MODEL.into()));
    damaged.refuse(&["missing", &optim(0)], |folder| {
        fs::remove_file(folder.join(optim(0))).unwrap();
        fs::remove_file(folder.join(optim(1))).unwrap();
    });
    let copy = |from: String, to: String| {
        move |folder: &Path| {
            fs::copy(folder.join(from), folder.join(to)).unwrap();
        }
    };
    damaged.refuse(&["partitions 0 to 1", "partition_count", "partition 2"], copy(optim(0), optim(2)));
    damaged.refuse(&["files of one run", &optim(0)], copy(optim(0), format!("bf16_{}", optim(0))));
    damaged.refuse(&["files of one run"], copy(optim(0), "zero_pp_rank_00_mp_rank_00_optim_states.pt".into()));
    damaged.refuse(&["files of one run"], copy(MODEL.into(), "zero_pp_rank_0_mp_rank_00_model_states.pt".into()));
    let damaged = Damaged::new("zero3_bf16");
    let model = |partition: u32| format!("zero_pp_rank_{partition}_mp_rank_00_model_states.pt");
    damaged.refuse(&["missing", &model(1)], remove(model(1)));
    damaged.refuse(&["missing", &model(2)], remove(model(2)));
}

#[test]
fn kinds_that_are_not_read_are_refused_by_name() {
    let damaged = Damaged::new("zero1_fp32");
    let add = |name: &'static str| move |folder: &Path| fs::write(folder.join(name), "x").unwrap();
    damaged.refuse(&["module", "files of layers", "a dict"], |folder| {
        let name = "layer_00-model_states.pt";
        fs::copy(case("pipe_fp32").join(TAG).join(name), folder.join(name)).unwrap();
    });
    damaged.refuse(&["num_experts", "expected 0 experts", "expert 1"], |folder| {
        let name = "layer_0_expert_1_mp_rank_00_model_states.pt";
        fs::copy(case("moe_zero2").join(TAG).join(name), folder.join(name)).unwrap();
    });
    damaged.refuse(&["experts"], add("expp_rank_0_mp_rank_00_optim_states.pt"));
    damaged.refuse(&["missing", "zero_pp_rank_0_mp_rank_01_optim_states.pt"], add("mp_rank_01_model_states.pt"));
    damaged.refuse(&["NVMe"], |folder| fs::create_dir(folder.join("offloaded_tensors")).unwrap());
    let edited = |from: &'static [u8], to: &'static [u8]| {
        move |folder: &Path| edit_pickle(&folder.join(MODEL), |pickle| replace(pickle, from, to))
    };
    damaged.refuse(&["experts", "num_experts"], edited(b"X\x0c\0\0\0buffer_names", b"X\x0b\0\0\0num_experts"));
    damaged.refuse(&["module", "files of layers", "none"], edited(b"module", b"modulE"));
    damaged.refuse(&["legacy torch file"], |folder| {
        let legacy = [0x80, 2, 0x8A, 0x0A, 0x6C, 0xFC, 0x9C, 0x46, 0xF9, 0x20, 0x6A, 0xA8, 0x50, 0x19, 0x2E];
        fs::write(folder.join(optim(1)), legacy).unwrap();
    });
}

/// Copies a file of a checkpoint of the same kind into the folder.
fn from_other(other: &'static str, name: &str) -> impl FnOnce(&Path) {
    let name = name.to_owned();
    move |folder| {
        fs::copy(case(other).join(TAG).join(&name), folder.join(&name)).unwrap();
    }
}

#[test]
fn files_of_other_saves_are_errors() {
    // The second group of the other case has other options, and its partitions other lengths.
    Damaged::new("zero2_sgd").refuse(&[&optim(1)], from_other("zero2_round_robin", &optim(1)));
    Damaged::new("zero2_round_robin").refuse(&["2 groups"], |folder| {
        (0..2).for_each(|partition| from_other("zero1_fp32", &optim(partition))(folder));
    });
    Damaged::new("zero3_fp32").refuse(&["ZeRO stage 3", "stage 1 or 2"], from_other("zero1_fp32", &optim(0)));
    Damaged::new("zero1_fp32").refuse(&["stage 1 or 2", "stage 3"], from_other("zero3_fp32", &optim(0)));
    let damaged = Damaged::new("zero1_fp32");
    damaged.refuse(&["ds_version", "0.19.8", "0.19.7"], |folder| {
        edit_pickle(&folder.join(optim(1)), |pickle| {
            let last = pickle.windows(6).rposition(|window| window == b"0.19.8").unwrap();
            pickle[last + 5] = b'7';
        });
    });
    damaged.refuse(&["ds_config.zero_optimization.stage", "found 0"], |folder| {
        edit_pickle(&folder.join(MODEL), |pickle| set_number(pickle, b"stage", 0));
    });
    damaged.refuse(&["dp_world_size", "expected 2", "found 3"], |folder| {
        edit_pickle(&folder.join(MODEL), |pickle| set_number(pickle, b"dp_world_size", 3));
    });
    damaged.refuse(&["partition_count"], |folder| {
        edit_pickle(&folder.join(optim(0)), |pickle| {
            let key = find(pickle, b"partition_count").unwrap();
            let number = key + find(&pickle[key..], b"K\x02").unwrap();
            pickle[number + 1] = 1;
        });
    });
    let second = "zero_pp_rank_1_mp_rank_00_model_states.pt";
    Damaged::new("zero3_fp32").refuse(&[second, "global_steps", "2 as in", "found 3"], |folder| {
        edit_pickle(&folder.join(second), |pickle| set_number(pickle, b"global_steps", 3));
    });
    Damaged::new("zero3_fp32").refuse(&[second, "param_shapes"], |folder| {
        edit_pickle(&folder.join(second), |pickle| {
            let key = find(pickle, b"param_shapes").unwrap();
            let number = key + find(&pickle[key..], b"K\x09").unwrap();
            pickle[number + 1] = 8;
        });
    });
}

/// Changes the small number that follows a key in a pickle.
pub fn set_number(pickle: &mut [u8], key: &[u8], number: u8) {
    let at = find(pickle, key).unwrap() + key.len();
    // The number of a memo entry can be the byte K.
    let at = if pickle[at] == b'q' { at + 2 } else { at };
    let at = at + pickle[at..].iter().position(|byte| *byte == b'K').unwrap();
    pickle[at + 1] = number;
}

/// Changes an element of a storage. `is_it` says which storage, by its bytes, and returns the offset of the element.
pub fn set_element(path: &Path, is_it: impl Fn(&[u8]) -> Option<usize>, value: f32) {
    edit_entries(path, |entries| {
        let found = entries.iter_mut().find_map(|entry| {
            let at = if entry.name.contains("/data/") { is_it(&entry.data)? } else { return None };
            Some((entry, at))
        });
        let (entry, at) = found.expect("such a storage");
        entry.data[at..at + 4].copy_from_slice(&value.to_le_bytes());
        entry.crc = crc32fast::hash(&entry.data);
    });
}

#[test]
fn other_steps_and_padding_are_errors() {
    let is_step = |data: &[u8]| (data.len() == 4 && data == 2_f32.to_le_bytes()).then_some(0);
    for (name, file) in [("zero1_fp32", optim(1)), ("zero3_bf16", format!("bf16_{}", optim(2)))] {
        Damaged::new(name).refuse(&[&file, "step", "expected 2", "found 3"], |folder| {
            set_element(&folder.join(&file), is_step, 3.0);
        });
    }
    // 229 trained elements in 3 partitions of 78: the last 5 elements of the last partition are padding.
    let last = optim(2);
    for nth in 0..3 {
        Damaged::new("zero2_fp16").refuse(&[&last, "zeros as padding in elements 73 to 78", "element 77"], |folder| {
            let vectors = std::cell::Cell::new(0);
            let is_it = |data: &[u8]| {
                let is_vector = data.len() == 78 * 4;
                (is_vector && vectors.replace(vectors.get() + 1) == nth).then_some(77 * 4)
            };
            set_element(&folder.join(&last), is_it, 1.0);
        });
    }
}

/// With `maximize`, the gradients of the padding are -0.0, and so are the moments.
#[test]
fn padding_of_negative_zeros_is_read() {
    let env = TestEnv::new();
    let folder = env.copy("trainers/deepspeed/zero2_fp16");
    let is_vector = |data: &[u8]| (data.len() == 78 * 4).then_some(77 * 4);
    set_element(&folder.join(TAG).join(optim(2)), is_vector, -0.0);
    assert_same(&tensors(&folder), &truth("zero2_fp16"), "zero2_fp16");
}

/// At stage 3, the padding of moments is zero, and the padding of master weights is arbitrary.
#[test]
fn padding_of_moments_at_stage_3_is_zero() {
    let env = TestEnv::new();
    let file = format!("bf16_{}", optim(2));
    let mut refused = 0;
    for nth in 0.. {
        let root = env.copy("trainers/deepspeed/zero3_bf16");
        let out = env.path("out.pt");
        let mut vectors = 0;
        edit_entries(&root.join(TAG).join(&file), |entries| {
            for entry in entries.iter_mut().filter(|entry| entry.name.contains("/data/") && entry.data.len() > 4) {
                // The parameter `scale` has 2 elements, so the first element of the third partition of its group is padding.
                let is_chosen = vectors == nth;
                vectors += 1;
                if is_chosen {
                    entry.data[..4].copy_from_slice(&7_f32.to_le_bytes());
                    entry.crc = crc32fast::hash(&entry.data);
                }
            }
        });
        if vectors <= nth {
            break;
        }
        let run = dtshard(&[&"unshard", &root, &out, &"--no-sync"]);
        if run.code == Some(0) {
            fs::remove_file(out).unwrap();
        } else {
            run.assert_refused(&[&file, "zeros as padding", "another value in element 0"]);
            refused += 1;
        }
        fs::remove_dir_all(root).unwrap();
    }
    assert_eq!(refused, 2, "exp_avg and exp_avg_sq");
}

#[test]
fn warning_tells_of_an_optimizer_with_other_steps() {
    let env = TestEnv::new();
    let folder = env.copy("trainers/deepspeed/zero1_fp32").join(TAG);
    edit_pickle(&folder.join(MODEL), |pickle| set_number(pickle, b"global_steps", 7));
    let run = expect(0, "inspect", &[&folder], "--brief");
    assert!(run.stderr.contains("the job made 7 steps") && run.stderr.contains("its optimizer 2"), "{}", run.stderr);
}

#[test]
fn partitions_that_do_not_fit_the_shapes_are_errors() {
    // A parameter of another shape moves all others.
    let damaged = Damaged::new("zero1_fp32");
    let other_shape = |file: &'static str, to: u8| {
        move |folder: &Path| {
            edit_pickle(&folder.join(file), |pickle| {
                let key = find(pickle, b"param_shapes").unwrap();
                let number = key + find(&pickle[key..], b"K\x09").unwrap();
                pickle[number + 1] = to;
            });
        }
    };
    for to in [0, 8, 10, 200] {
        damaged.refuse(
            &[&optim(0), "single_partition_of_fp32_groups[0]", "elements in partition 0"],
            other_shape(MODEL, to),
        );
    }
    let first = "zero_pp_rank_0_mp_rank_00_model_states.pt";
    Damaged::new("zero3_fp32").refuse(&["param_shapes"], other_shape(first, 8));
}

/// Renamed and reordered parameters of equal shapes have equal partitions: only the addresses show them.
#[test]
fn parameters_with_other_addresses_are_errors() {
    for (name, file) in
        [("zero1_fp32", optim(1)), ("zero2_sgd", optim(0)), ("zero1_bf16", format!("bf16_{}", optim(2)))]
    {
        Damaged::new(name).refuse(&[&file, "param_slice_mappings[0]", "elements", "param_shapes"], |folder| {
            edit_pickle(&folder.join(&file), |pickle| {
                let key = find(pickle, b"param_slice_mappings").unwrap();
                let value = key + find(&pickle[key..], b"start").unwrap();
                set_number(&mut pickle[value..], b"start", 200);
            });
        });
    }
    let swap = |folder: &Path| {
        edit_pickle(&folder.join(MODEL), |pickle| {
            let key = find(pickle, b"param_shapes").unwrap();
            let first = key + find(&pickle[key..], b"layers.0.up.bias").unwrap();
            let second = key + find(&pickle[key..], b"layers.1.up.bias").unwrap();
            (pickle[first + 7], pickle[second + 7]) = (b'1', b'0');
        });
    };
    Damaged::new("zero2_sgd")
        .refuse(&[&optim(0), "param_slice_mappings[0][\"layers.0.up.bias\"]", "expected no elements"], swap);
}

#[test]
fn hostile_sizes_do_not_crash() {
    let env = TestEnv::new();
    for (name, file) in [
        ("zero1_fp32", MODEL),
        ("zero1_fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("zero3_bf16", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        ("zero3_bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ] {
        let root = env.copy(&format!("trainers/deepspeed/{name}"));
        let path = root.join(TAG).join(file);
        // The result does not matter: it must not be a panic.
        let open = || _ = Checkpoint::open(&root, &ReadOptions::default());
        with_each_number_hostile(&path, usize::MAX, |round| round % 7, open);
        fs::remove_dir_all(root).unwrap();
    }
}
