//! Checkpoints of DeepSpeed jobs with several model-parallel ranks (`tests/fixtures/trainers/deepspeed`): every verb gives the
//! whole tensors of the live engines, and damaged checkpoints are refused by the name of the file.

use std::fs;
use std::path::{Path, PathBuf};

use dtshard::catalog::Value;
use safetensors::SafeTensors;

use crate::common::corrupt::{dtshard, edit_entries, edit_pickle, find, replace};
use crate::common::env::TestEnv;
use crate::common::{assert_same, below, expect, fixture, read_safetensors, succeed};
use crate::deepspeed::{Damaged, TAG, at, case, set_element, set_number, state, tensors, truth};

/// The cases that are read completely.
pub const CASES: [&str; 11] = [
    "pipe_fp32",
    "pipe_bf16",
    "autotp_zero1",
    "autotp_zero3",
    "tp_zero2",
    "pipe_tp",
    "moe_zero2",
    "moe_tied",
    "moe_zero0",
    "moe_zero0_bf16",
    "moe_zero0_plain",
];

#[test]
fn whole_tensors_equal_those_of_the_live_engines() {
    let env = TestEnv::new();
    for name in CASES {
        let expected = truth(name);
        let made = env.make("consolidate", case(name), &format!("{name}_model"), "--assets none");
        assert_same(&read_safetensors(&made.path), &below("model.", &expected), name);
        assert_same(&tensors(&case(name)), &expected, name);
    }
}

#[test]
fn resharded_cases_equal_the_live_engines() {
    let env = TestEnv::new();
    for (name, options) in [
        ("pipe_fp32", "--mesh dp=3 --to dcp"),
        ("pipe_bf16", "--mesh dp=2,tp=2 --placements S(0),S(1) --to torch-ranks"),
        ("autotp_zero1", "--mesh dp=3 --to dcp"),
        ("autotp_zero3", "--mesh dp=2,tp=2 --placements S(0),S(1) --to torch-ranks"),
        ("tp_zero2", "--mesh dp=4 --to local"),
        ("pipe_tp", "--mesh dp=2 --to dcp"),
        ("moe_zero2", "--mesh dp=3 --to dcp"),
        ("moe_tied", "--mesh dp=2,tp=2 --placements S(0),S(1) --to torch-ranks"),
        ("moe_zero0", "--mesh dp=3 --to dcp"),
        ("moe_zero0_bf16", "--mesh dp=2,tp=2 --placements S(0),S(1) --to torch-ranks"),
        ("moe_zero0_plain", "--mesh dp=2 --to dcp"),
    ] {
        let made = env.make("reshard", case(name), name, &format!("{options} --verify"));
        assert_same(&tensors(&made.path), &truth(name), name);
        succeed("verify", &[&case(name), &made.path], "");
        succeed("verify", &[&case(name)], "");
    }
}

#[test]
fn experts_of_another_release_equal_the_live_engines() {
    let name = "v0.18.9/moe_zero0";
    assert_same(&tensors(&case(name)), &truth(name), name);
    let env = TestEnv::new();
    let made = env.make("reshard", case(name), "out", "--mesh dp=3 --to dcp --verify");
    assert_same(&tensors(&made.path), &truth(name), name);
}

/// The module of each rank has shards of the rounded master weights.
#[test]
fn verify_compares_master_weights_with_the_module_of_each_rank() {
    let env = TestEnv::new();
    for (name, file, len) in [
        ("pipe_fp32", "layer_01-model_states.pt", 4 * 7),
        ("pipe_bf16", "layer_01-model_states.pt", 2 * 7),
        ("autotp_zero1", "mp_rank_01_model_states.pt", 0),
        ("tp_zero2", "mp_rank_01_model_states.pt", 0),
        ("pipe_tp", "layer_01-model_01-model_states.pt", 0),
    ] {
        let folder = env.copy(&format!("trainers/deepspeed/{name}")).join(TAG);
        succeed("verify", &[&folder], "");
        let longest = longest_storage(&folder.join(file));
        let is_it = |data: &[u8]| (data.len() == if len == 0 { longest } else { len }).then_some(0);
        set_element(&folder.join(file), is_it, 0.75);
        let run = expect(1, "verify", &[&folder], "");
        // The module has copies of parameters that are not cut, and they are compared first.
        let words =
            if name == "autotp_zero1" { "the ranks have copies of it" } else { "are not the parameters of the module" };
        assert!(run.stdout.contains(words), "{name}: {}", run.stdout);
        fs::remove_dir_all(folder).unwrap();
    }
}

fn longest_storage(path: &Path) -> usize {
    let mut longest = 0;
    edit_entries(path, |entries| {
        let storages = entries.iter().filter(|entry| entry.name.contains("/data/"));
        longest = storages.map(|entry| entry.data.len()).max().unwrap();
    });
    longest
}

/// DeepSpeed records the tied names of the first stage only. A clone of a later stage has the rounded values of its parameter.
#[test]
fn tied_parameters_that_no_file_lists_are_warned_of() {
    let name = "pipe_tied";
    let mut expected = truth(name);
    let mut found = tensors(&case(name));
    let warning = "2 names of the pipeline have the rounded values of a trained parameter";
    for tensors in [&mut found, &mut expected] {
        tensors.retain(|name, _| !name.starts_with("model.6."));
    }
    assert_same(&found, &expected, name);
    let env = TestEnv::new();
    let made = env.make("consolidate", case(name), "out", "--assets none");
    let names = "(6.weight of 5.weight, 6.bias of 5.bias)";
    assert!(made.run.stderr.contains(&format!("{warning} {names}")), "{}", made.run.stderr);
    // The weights of the module are not rounded any more.
    let made = env.make("consolidate", case(name), "module", "--assets none --weights module");
    assert!(!made.run.stderr.contains(warning), "{}", made.run.stderr);
}

/// Returns the names in a parameter group.
fn group(state: &Value, index: usize) -> Vec<String> {
    let Value::List(groups) = at(state, &["optimizer", "param_groups"]) else { panic!("a list") };
    let Some(Value::List(names)) = groups[index].as_dict().unwrap().get("params") else { panic!("a list of names") };
    names.iter().map(|name| name.as_str().unwrap().to_owned()).collect()
}

#[test]
fn parameter_groups_have_the_names_of_all_stages() {
    let state = state("pipe_fp32");
    let weights = ["tied_modules.emb.weight", "1.up.weight", "1.down.weight", "3.up.weight", "3.down.weight"];
    assert_eq!(group(&state, 0), weights);
    assert_eq!(group(&state, 1), ["1.up.bias", "3.up.bias", "5.weight", "5.bias"]);
    let names: Vec<&str> =
        at(&state, &["model"]).as_dict().unwrap().entries.iter().map(|(name, _)| name.as_str().unwrap()).collect();
    assert_eq!(names[..3], ["tied_modules.emb.weight", "1.gain", "1.up.weight"]);
    assert_eq!(at(&state, &["note"]).as_str(), Some("client state"));
}

// ------------------------------------------------------------------------------------------------- damaged checkpoints

fn model(rank: u32) -> String {
    format!("mp_rank_{rank:02}_model_states.pt")
}

fn optim(partition: u32, rank: u32) -> String {
    format!("zero_pp_rank_{partition}_mp_rank_{rank:02}_optim_states.pt")
}

fn layer(number: u32) -> String {
    format!("layer_{number:02}-model_states.pt")
}

fn remove(names: Vec<String>) -> impl FnOnce(&Path) {
    move |folder| names.iter().for_each(|name| fs::remove_file(folder.join(name)).unwrap())
}

fn copy(from: String, to: String) -> impl FnOnce(&Path) {
    move |folder| _ = fs::copy(folder.join(from), folder.join(to)).unwrap()
}

#[test]
fn missing_and_doubled_ranks_are_errors() {
    let damaged = Damaged::new("pipe_fp32");
    damaged.refuse(&["missing", &model(1)], remove(vec![model(1)]));
    damaged.refuse(&["missing", &optim(1, 1)], remove(vec![optim(1, 1)]));
    damaged.refuse(&["missing", &optim(0, 1)], remove(vec![optim(0, 1), optim(1, 1)]));
    let all = |rank: u32| vec![model(rank), optim(0, rank), optim(1, rank)];
    damaged.refuse(&["missing", &model(1), "mp_world_size in mp_rank_00"], remove(all(1)));
    damaged.refuse(&["missing", &model(0)], remove(all(0)));
    damaged.refuse(&["missing", &layer(1), "1.up.weight"], remove(vec![layer(1)]));
    damaged
        .refuse(&["files of one run", "mp_rank_1_model_states.pt"], copy(model(1), "mp_rank_1_model_states.pt".into()));
    damaged.refuse(&["files of one run", "layer_1-model_states.pt"], copy(layer(1), "layer_1-model_states.pt".into()));
    damaged.refuse(&["missing", "layer_00-model_00-model_states.pt"], |folder| {
        for number in [0, 1, 2, 3, 4, 5] {
            let name = format!("layer_{number:02}-model_01-model_states.pt");
            fs::rename(folder.join(layer(number)), folder.join(name)).unwrap();
        }
    });
    damaged.refuse(&[&model(2), "mp_world_size", "ranks 0 to 1"], |folder| {
        for (from, to) in all(1).into_iter().zip(all(2)) {
            copy(from, to)(folder);
        }
    });
    // The number of a rank is untrusted, too.
    damaged.refuse(&["missing"], copy(model(1), "mp_rank_4294967295_model_states.pt".into()));
    damaged.refuse(&["missing"], |folder| {
        for number in [0, 1, 2, 3, 4, 5] {
            let name = format!("layer_{number:02}-model_4294967295-model_states.pt");
            fs::rename(folder.join(layer(number)), folder.join(name)).unwrap();
        }
    });
}

/// Changes an element of a vector of f32 numbers in an optimizer file. `nth` counts the vectors of this length: the moments,
/// then the master weights.
fn set_in_vector(path: &Path, len: usize, nth: usize, element: usize) {
    let vectors = std::cell::Cell::new(0);
    let is_it =
        |data: &[u8]| (data.len() == len * 4 && vectors.replace(vectors.get() + 1) == nth).then_some(element * 4);
    set_element(path, is_it, 7.5);
}

#[test]
fn shards_that_contradict_each_other_are_errors() {
    let damaged = Damaged::new("autotp_zero1");
    let bf16 = |partition, rank| format!("bf16_{}", optim(partition, rank));
    let second = vec![model(1), bf16(0, 1), bf16(1, 1)];
    damaged.refuse(&["missing", &model(1), "mp_world_size"], remove(second));
    damaged.refuse(&["missing", &bf16(1, 1)], remove(vec![bf16(1, 1)]));
    // The shapes of the first rank are not those of the second.
    damaged.refuse(&["elements in partition 0"], copy(model(0), model(1)));
    damaged.refuse(&["up.weight", "the shape [4, 6] of rank 1", "found [3, 6]"], |folder| {
        for (from, to) in [(model(0), model(1)), (bf16(0, 0), bf16(0, 1)), (bf16(1, 0), bf16(1, 1))] {
            copy(from, to)(folder);
        }
    });
    damaged.refuse(&[&model(1), "universal_checkpoint_info", "the layout in mp_rank_00"], |folder| {
        edit_pickle(&folder.join(model(1)), |pickle| replace(pickle, b"K\x0cK\x06e", b"K\x0dK\x06e"));
    });
    damaged.refuse(&["universal_checkpoint_info", "with affine_map of version 2"], |folder| {
        for rank in [0, 1] {
            edit_pickle(&folder.join(model(rank)), |pickle| {
                let key = find(pickle, b"affine_map").unwrap();
                let number = key + find(&pickle[key..], b"K\x01").unwrap();
                pickle[number + 1] = 2;
            });
        }
    });
    // The partitions of the two ranks end at other elements of the replicated parameters.
    for (nth, state) in ["exp_avg of", "exp_avg_sq of", "the weights of"].into_iter().enumerate() {
        for (element, name) in [(53, "emb.weight"), (54, "norm.weight"), (65, "norm.bias")] {
            let file = bf16(0, 1);
            damaged.refuse(&[&file, name, state, "copies"], |folder| {
                set_in_vector(&folder.join(&file), 110, nth, element);
            });
        }
    }
    damaged.refuse(&[&bf16(1, 1), "down.bias", "copies"], |folder| {
        set_in_vector(&folder.join(bf16(1, 1)), 110, 1, 50);
    });
    let frozen = "zero_pp_rank_1_mp_rank_01_model_states.pt";
    Damaged::new("autotp_zero3").refuse(&[frozen, "frozen.weight", "copies"], |folder| {
        let is_it = |data: &[u8]| (data == [0x80, 0x3F, 0x80, 0x3F, 0x80, 0x3F]).then_some(0);
        set_element(&folder.join(frozen), is_it, 7.5);
    });
    Damaged::new("tp_zero2").refuse(&[&optim(0, 1), "layer.norm2.weight", "takes the mean"], |folder| {
        set_in_vector(&folder.join(optim(0, 1)), 106, 0, 44);
    });
    let pipeline = Damaged::new("pipe_tp");
    let layer = |number: u32| format!("layer_{number:02}-model_01-model_states.pt");
    pipeline.refuse(&["missing", &layer(2)], remove(vec![layer(2)]));
    pipeline.refuse(&["tp_degree", "found 2"], remove(vec![layer(0), layer(1), layer(2)]));
    pipeline.refuse(&[&optim(0, 3), "tied_modules.words.weight", "copies"], |folder| {
        set_in_vector(&folder.join(optim(0, 3)), 210, 0, 23);
    });
}

#[test]
fn experts_that_are_missing_or_have_other_numbers_are_errors() {
    let damaged = Damaged::new("moe_zero2");
    let expert = |layer: u32, number: u32| format!("layer_{layer}_expert_{number}_mp_rank_00_model_states.pt");
    damaged.refuse(&["missing", &expert(1, 2), "num_experts"], remove(vec![expert(1, 2)]));
    damaged.refuse(&["missing", &optim(3, 0)], remove(vec![optim(3, 0)]));
    damaged.refuse(&["num_experts", &expert(1, 4), "4 experts"], copy(expert(1, 3), expert(1, 4)));
    damaged.refuse(&[&expert(0, 1), "deepspeed_experts.1.", "experts.0."], copy(expert(0, 0), expert(0, 1)));
    damaged.refuse(&["files of one run"], copy(expert(0, 0), "layer_00_expert_0_mp_rank_00_model_states.pt".into()));
    damaged.refuse(&["experts"], copy(expert(0, 0), "expert_0_mp_rank_00_model_states.pt".into()));
    let counts = |partitions: std::ops::Range<u32>, to: [u8; 2]| {
        move |folder: &Path| {
            for partition in partitions {
                edit_pickle(&folder.join(optim(partition, 0)), |pickle| {
                    let key = find(pickle, b"partition_count").unwrap();
                    let numbers = key + find(&pickle[key..], b"K\x04K\x02").unwrap();
                    (pickle[numbers + 1], pickle[numbers + 3]) = (to[0], to[1]);
                });
            }
        }
    };
    damaged.refuse(&[&optim(2, 0), "partition_count", "[4, 2] as in partition 0", "[4, 4]"], counts(2..3, [4, 4]));
    damaged.refuse(&[&optim(0, 0), "partition_count", "a divisor of 4", "3 in [4, 3]"], counts(0..4, [4, 3]));
    damaged.refuse(&["single_partition_of_fp32_groups[1]", "elements in partition 0"], counts(0..4, [4, 4]));
    damaged.refuse(&["param_shapes", "one of 4 ranks", "experts.1."], counts(0..4, [4, 1]));
    // The dense group has no names of experts.
    damaged.refuse(&["param_shapes", "emb.weight", "expert"], counts(0..4, [2, 4]));
    let is_step = |data: &[u8]| (data.len() == 4 && data == 2_f32.to_le_bytes()).then_some(0);
    damaged.refuse(&[&optim(3, 0), "param_slice_mappings[1]", "experts.0.up.weighT"], |folder| {
        edit_pickle(&folder.join(optim(3, 0)), |pickle| {
            let name = find(pickle, b"experts.0.up.weight").unwrap();
            pickle[name + 18] = b'T';
        });
    });
    damaged.refuse(&[&optim(3, 0), "step"], |folder| set_element(&folder.join(optim(3, 0)), is_step, 3.0));
    // Two layers have exchanged the files of their first expert.
    for case in ["moe_zero2", "moe_zero0", "moe_zero0_plain"] {
        let [first, second] = [0, 1].map(|layer| format!("layer_{layer}_expert_0_mp_rank_00_model_states.pt"));
        Damaged::new(case).refuse(&["layer_0_expert_1", "other files of the layer", "mix"], |folder| {
            copy(first.clone(), "moved".into())(folder);
            copy(second.clone(), first.clone())(folder);
            fs::rename(folder.join("moved"), folder.join(&second)).unwrap();
        });
    }
}

/// Copies a case, and takes the description of the layout out of all model files.
fn without_layout(env: &TestEnv, name: &str) -> PathBuf {
    let root = env.copy(&format!("trainers/deepspeed/{name}"));
    let files = fs::read_dir(root.join(TAG)).unwrap().map(|entry| entry.unwrap().path());
    for file in files.filter(|path| path.to_str().unwrap().ends_with("_model_states.pt")) {
        edit_pickle(&file, |pickle| {
            // The pickles of layers have no description.
            if let Some(at) = find(pickle, b"universal_checkpoint_info") {
                pickle[at] = b'x';
            }
        });
    }
    root
}

/// The layout of the megatron layers on 2 ranks; that of `qkv`, whose three parts have different sizes, cannot be declared.
const MEGATRON: &str = "--src-mesh tp=2 --src-placements **.words.weight=S(0) --src-placements **.qkv.weight=S(0) \
                        --src-placements **.glu.weight=_S(0,2) --src-placements **.proj.weight=S(1) \
                        --src-placements **.down.weight=S(1)";
const AUTOTP: &str = "--src-mesh tp=2 --src-placements **.qkv.*=_S(0,3) --src-placements **.up.*=S(0) \
                      --src-placements **.proj.weight=S(1) --src-placements **.down.weight=S(1)";

/// Returns the name of the optimizer file of an expert-parallel rank at stage 0.
fn expert_rank(rank: u32) -> String {
    format!("expp_rank_{rank}_mp_rank_00_optim_states.pt")
}

#[test]
fn missing_doubled_and_foreign_files_of_expert_ranks_are_errors() {
    for case in ["moe_zero0", "moe_zero0_bf16", "moe_zero0_plain"] {
        let damaged = Damaged::new(case);
        damaged.refuse(&["missing", &expert_rank(0)], remove(vec![expert_rank(0)]));
        damaged.refuse(&["missing", &expert_rank(0), "experts"], remove(vec![expert_rank(0), expert_rank(1)]));
        let name = "expp_rank_00_mp_rank_00_optim_states.pt";
        damaged.refuse(&["files of one run", name], copy(expert_rank(0), name.into()));
        damaged.refuse(&["missing"], copy(expert_rank(1), expert_rank(u32::MAX - 1)));
        let name = "expp_rank_0_mp_rank_01_optim_states.pt";
        damaged.refuse(&["with experts", name, "tensor or pipeline parallelism"], copy(expert_rank(0), name.into()));
        // The state of experts belongs to the rank of the file.
        damaged.refuse(&[&expert_rank(1)], copy(expert_rank(0), expert_rank(1)));
        damaged.refuse(&[&expert_rank(0)], |folder| {
            copy(expert_rank(1), "moved".into())(folder);
            copy(expert_rank(0), expert_rank(1))(folder);
            fs::rename(folder.join("moved"), folder.join(expert_rank(0))).unwrap();
        });
        // A file of another save has other moments, and another number of steps. With 16-bit parameters, DeepSpeed begins with
        // a step without gradients.
        let steps: f32 = if case == "moe_zero0_bf16" { 3.0 } else { 2.0 };
        let is_step = |data: &[u8]| (data == steps.to_le_bytes()).then_some(0);
        for rank in 0..2 {
            damaged.refuse(&["step of `emb.weight`", "expp_rank_", "copies"], |folder| {
                set_element(&folder.join(expert_rank(rank)), is_step, 5.0);
            });
            for (nth, key) in [(0, "exp_avg of"), (1, "exp_avg_sq of")] {
                damaged.refuse(&[key, "`emb.weight`", "copies"], |folder| {
                    set_in_vector(&folder.join(expert_rank(rank)), 45, nth, 20);
                });
            }
        }
        damaged.refuse(&[&expert_rank(1), "param_groups", "other options"], |folder| {
            edit_pickle(&folder.join(expert_rank(1)), |pickle| replace(pickle, b"amsgrad", b"AMSGRAD"));
        });
        damaged.refuse(&[&expert_rank(1), "optimizer", "none"], |folder| {
            edit_pickle(&folder.join(expert_rank(1)), |pickle| replace(pickle, b"optimizer", b"OPTIMIZER"));
        });
    }
    for case in ["moe_zero0", "moe_zero0_bf16"] {
        let damaged = Damaged::new(case);
        damaged.refuse(&["missing", &expert_rank(1), "ep_size_2 in expp_rank_0"], remove(vec![expert_rank(1)]));
        damaged.refuse(&[&expert_rank(2), "ranks 0 to 1", "ep_size_2"], |folder| {
            copy(expert_rank(1), expert_rank(2))(folder);
            copy(expert_rank(1), expert_rank(3))(folder);
        });
    }
    let damaged = Damaged::new("moe_zero0_plain");
    damaged.refuse(&["whose optimizer states have no names"], remove(vec![expert_rank(1)]));
    damaged.refuse(&["different `ep_size`"], copy(expert_rank(1), expert_rank(2)));
    Damaged::new("zero0_fp32").refuse(&[&expert_rank(0), "num_experts"], |folder| {
        fs::copy(case("moe_zero0").join(TAG).join(expert_rank(0)), folder.join(expert_rank(0))).unwrap();
    });
    Damaged::new("moe_zero2").refuse(&["with experts", &expert_rank(0), "ZeRO"], |folder| {
        fs::copy(case("moe_zero0").join(TAG).join(expert_rank(0)), folder.join(expert_rank(0))).unwrap();
    });
}

#[test]
fn unknown_names_in_the_optimizer_are_refused_and_the_module_is_read() {
    let damaged = Damaged::new("moe_zero0");
    let words = ["whose optimizer states have no names", "1 tensor", "emb.weight, head.weight", "--weights module"];
    damaged.refuse(&words, |folder| {
        edit_pickle(&folder.join(expert_rank(0)), |pickle| replace(pickle, b"K\0K\x01K\x02K\x03e", b"K\0K\x01K\x02e"));
    });
    let env = TestEnv::new();
    for name in ["moe_zero0", "moe_zero0_plain"] {
        let folder = env.copy(&format!("trainers/deepspeed/{name}")).join(TAG);
        let made = env.make("unshard", &folder, &format!("{name}.pt"), "--weights module");
        let mut expected = truth(name);
        expected.retain(|key, _| key.starts_with("model."));
        assert_same(&tensors(&made.path), &expected, name);
        remove(vec![expert_rank(0), expert_rank(1)])(&folder);
        let made = env.make("unshard", &folder, &format!("{name}_2.pt"), "--weights module");
        assert_same(&tensors(&made.path), &expected, name);
    }
}

#[test]
fn shards_without_a_layout_are_refused() {
    let env = TestEnv::new();
    let (source, out) = (case("tp_unknown"), env.path("out"));
    let words = ["2 tensor-parallel ranks", "words.weight", "universal_checkpoint_info", "--src-placements"];
    dtshard(&[&"consolidate", &source, &out]).assert_refused(&words);
    dtshard(&[&"reshard", &source, &out, &"--mesh", &"dp=2", &"--to", &"dcp"]).assert_refused(&words);
    dtshard(&[&"verify", &source]).assert_refused(&words);
    Damaged::new("tp_unknown").refuse(&[&model(0), "layer.proj.weight", "found [6, 3], [18]"], |folder| {
        edit_pickle(&folder.join(model(1)), |pickle| {
            let key = find(pickle, b"param_shapes").unwrap();
            let shape = key + find(&pickle[key..], b"K\x06K\x03\x86").unwrap();
            pickle.splice(shape..shape + 5, *b"K\x12\x85");
        });
    });
    let shown = succeed("inspect", &[&source], "--all").stdout;
    assert!(shown.contains("model.layer.qkv.weight") && shown.contains("[12, 6]  unknown"), "{shown}");
}

#[test]
fn shards_with_a_declared_layout_equal_the_live_engines() {
    let env = TestEnv::new();
    for (name, options, other) in [
        ("autotp_zero1", AUTOTP, [].as_slice()),
        ("autotp_zero3", AUTOTP, &[]),
        ("tp_unknown", MEGATRON, &["words.weight", "qkv.weight"]),
        ("tp_zero2", MEGATRON, &["words.weight", "qkv.weight"]),
        ("pipe_tp", MEGATRON, &["words.weight", "qkv.weight"]),
    ] {
        let source = without_layout(&env, name);
        let is_declared = |name: &String| !other.iter().any(|part| name.contains(part));
        let mut expected = truth(name);
        let all = expected.len();
        expected.retain(|name, _| is_declared(name));
        for (number, target) in
            ["--mesh dp=3 --to dcp", "--mesh dp=2,tp=2 --placements S(0),S(1) --to torch-ranks"].iter().enumerate()
        {
            let made =
                env.make("reshard", &source, &format!("{name}_{number}"), &format!("{options} {target} --verify"));
            let mut found = tensors(&made.path);
            assert_eq!(found.len(), all, "{name}");
            found.retain(|name, _| is_declared(name));
            assert_same(&found, &expected, name);
        }
        succeed("verify", &[&source], options);
        succeed("inspect", &[&source], options);
    }
}

/// A weight map puts sub parameters of different sizes in order, and leaves out the rows that pad a vocabulary.
#[test]
fn shards_that_no_placement_describes_are_put_in_order_by_a_map() {
    let env = TestEnv::new();
    let page = fs::read_to_string(fixture("../../docs/reference/formats/deepspeed.md")).unwrap();
    let map = env.path("fix.toml");
    fs::write(&map, page.split("```toml").nth(1).unwrap().split("```").next().unwrap()).unwrap();
    for name in ["tp_unknown", "tp_zero2"] {
        let options = format!("{MEGATRON} --map {}:ds:whole --set q=6 --set k=3 --set v=3", map.display());
        let made = env.make("reshard", without_layout(&env, name), name, &format!("{options} --mesh dp=3 --to dcp"));
        assert_same(&tensors(&made.path), &truth(name), name);
    }
}

/// In the module, a tied layer of a pipeline has another name, and the layout that is declared for its tie.
#[test]
fn weights_of_the_module_have_the_declared_layout() {
    let env = TestEnv::new();
    for (name, options, other) in [("autotp_zero1", AUTOTP, [].as_slice()), ("pipe_tp", MEGATRON, &["qkv.weight"])] {
        let convert = |source: PathBuf, options: &str| {
            let made = env.make("consolidate", source, &format!("{name}{}", options.len()), options);
            let mut found = read_safetensors(&made.path);
            found.retain(|name, _| !other.iter().any(|part| name.contains(part)));
            found
        };
        let found = convert(without_layout(&env, name), &format!("{options} --weights module --assets none"));
        let mut expected = convert(case(name), "--weights module --assets none");
        if name == "pipe_tp" {
            // The declared layout has the rows that pad the vocabulary.
            assert_eq!(found["0.weight"].shape, [10, 6]);
            expected.insert(String::from("0.weight"), found["0.weight"].clone());
        }
        assert_same(&found, &expected, name);
    }
}

/// Replaces the shape and the strides of a frozen parameter, which are (6,) and (1,), on all tensor-parallel ranks.
fn with_strides(env: &TestEnv, shape: [u8; 2], strides: [u8; 2]) -> PathBuf {
    let root = without_layout(env, "autotp_zero1");
    for rank in [0, 1] {
        edit_pickle(&root.join(TAG).join(model(rank)), |pickle| {
            let name = find(pickle, b"frozen.weight").unwrap();
            let mut rest = pickle.split_off(name);
            for (old, new) in [(6, shape), (1, strides)] {
                // BININT1 and TUPLE1 become twice BININT1 and TUPLE2.
                let at = find(&rest, &[b'K', old, 0x85]).unwrap();
                rest.splice(at..at + 3, [b'K', new[0], b'K', new[1], 0x86]);
            }
            pickle.extend(rest);
        });
    }
    root
}

#[test]
fn strides_of_frozen_shards_are_row_major_or_refused() {
    let env = TestEnv::new();
    let param = "model.frozen.weight";
    let expected = fs::read(fixture("trainers/deepspeed/autotp_zero1.truth.safetensors")).unwrap();
    // The stride of a dim of size 1 has no effect.
    for (name, options) in [("master", ""), ("module", "--weights module")] {
        let source = with_strides(&env, [6, 1], [1, 9]);
        let made = env.make("consolidate", &source, name, &format!("{AUTOTP} {options} --assets none"));
        let found = fs::read(made.path.join("model.safetensors")).unwrap();
        let found = SafeTensors::deserialize(&found).unwrap().tensor("frozen.weight").unwrap();
        assert_eq!(found.shape(), [6, 1]);
        assert_eq!(found.data(), SafeTensors::deserialize(&expected).unwrap().tensor(param).unwrap().data());
        fs::remove_dir_all(source).unwrap();
    }
    let transposed = with_strides(&env, [2, 3], [1, 2]);
    let run = env.refuse("consolidate", &transposed, "out", AUTOTP);
    for words in ["mp_rank_00", "frozen.weight", "strides [1, 2]", "not in row-major order", "contiguous"] {
        assert!(run.stderr.contains(words), "{words}: {}", run.stderr);
    }
}

#[test]
fn verify_compares_the_module_by_the_declared_layout() {
    let env = TestEnv::new();
    for (name, options, file) in [
        ("autotp_zero1", AUTOTP, "mp_rank_01_model_states.pt"),
        ("tp_unknown", MEGATRON, "mp_rank_01_model_states.pt"),
        ("tp_zero2", MEGATRON, "mp_rank_00_model_states.pt"),
        ("pipe_tp", MEGATRON, "layer_01-model_01-model_states.pt"),
    ] {
        let root = without_layout(&env, name);
        let path = root.join(TAG).join(file);
        let longest = longest_storage(&path);
        set_element(&path, |data: &[u8]| (data.len() == longest).then_some(0), 0.75);
        let run = expect(1, "verify", &[&root], options);
        let words =
            if name == "autotp_zero1" { "the ranks have copies of it" } else { "are not the parameters of the module" };
        assert!(run.stdout.contains(words), "{name}: {}", run.stdout);
        fs::remove_dir_all(root).unwrap();
    }
    // Each rank has the optimizer file of the other one.
    let root = without_layout(&env, "tp_unknown");
    let folder = root.join(TAG);
    copy(optim(0, 0), "moved".into())(&folder);
    copy(optim(0, 1), optim(0, 0))(&folder);
    fs::rename(folder.join("moved"), folder.join(optim(0, 1))).unwrap();
    let run = expect(1, "verify", &[&root], MEGATRON);
    assert!(run.stdout.contains("are not the parameters of the module"), "{}", run.stdout);
}

#[test]
fn declared_layout_that_does_not_fit_is_an_error() {
    let env = TestEnv::new();
    let refuse_case = |source: &Path, options: &str, words: &[&str]| {
        let run = env.refuse("consolidate", source, "out", options);
        assert!(words.iter().all(|word| run.stderr.contains(word)), "{words:?}: {}", run.stderr);
    };
    let refuse = |options: &str, words: &[&str]| refuse_case(&case("tp_unknown"), options, words);
    refuse("--src-mesh tp=3 --src-placements S(0)", &["tp=3", "2 ranks"]);
    refuse("--src-mesh tp=2 --src-placements **.other=S(0)", &["**.other=S(0)", "layer.down.weight"]);
    refuse("--src-mesh tp=2 --src-placements **.proj.weight=S(2)", &["layer.proj.weight", "S(2)"]);
    // The ranks have different values, so they have no copies.
    let words = ["words.weight", "mp_rank_01", "copies", "hint: without a rule, ", "'words.weight=LIST'"];
    refuse("--src-mesh tp=2 --src-placements **.proj.weight=S(1)", &words);
    refuse("--src-mesh tp=2 --reduce tp", &["partial values"]);
    refuse(&format!("--src-placements **.proj.weight.exp_avg=S(0) {MEGATRON}"), &["state of layer.proj.weight"]);
    let uneven = without_layout(&env, "autotp_zero1");
    refuse_case(&uneven, "--src-mesh tp=2 --src-placements **.up.weight=S(1)", &["up.weight", "[4, 6]", "[3, 6]"]);
    // The files describe the layout, so nothing is to be declared.
    let words = ["--src-placements", "rank files"];
    refuse_case(&case("tp_zero2"), "--src-mesh tp=2 --src-placements S(0)", &words);
}

#[test]
fn copies_that_differ_are_errors() {
    // The last stage has a copy of the embedding, in partitions of 24 and 24 elements, of which the last 3 are padding.
    let damaged = Damaged::new("pipe_fp32");
    for partition in [0, 1] {
        for nth in 0..3 {
            let file = optim(partition, 1);
            let words = [file.as_str(), "tied_modules.emb.weight", "copies", "mp_rank_00_optim_states.pt"];
            damaged.refuse(&words, |folder| set_in_vector(&folder.join(&file), 24, nth, 20));
        }
    }
    damaged.refuse(&[&model(1), "tied_modules.emb.weight", "[9, 5] as in"], |folder| {
        edit_pickle(&folder.join(model(1)), |pickle| {
            let key = find(pickle, b"param_shapes").unwrap();
            let shape = key + find(&pickle[key..], b"K\x09K\x05").unwrap();
            (pickle[shape + 1], pickle[shape + 3]) = (5, 9);
        });
    });
}

#[test]
fn ranks_of_other_saves_are_errors() {
    let damaged = Damaged::new("pipe_fp32");
    damaged.refuse(&[&model(1), "global_steps", "2 as in mp_rank_00", "found 3"], |folder| {
        edit_pickle(&folder.join(model(1)), |pickle| set_number(pickle, b"global_steps", 3));
    });
    let is_step = |data: &[u8]| (data.len() == 4 && data == 2_f32.to_le_bytes()).then_some(0);
    damaged.refuse(&[&optim(0, 1), "step", "expected 2 as in zero_pp_rank_0_mp_rank_00", "found 3"], |folder| {
        set_element(&folder.join(optim(0, 1)), is_step, 3.0);
    });
    damaged.refuse(&["partition_count", &optim(1, 1)], |folder| {
        edit_pickle(&folder.join(optim(1, 1)), |pickle| {
            let key = find(pickle, b"partition_count").unwrap();
            let numbers = key + find(&pickle[key..], b"K\x02K\x02").unwrap();
            (pickle[numbers + 1], pickle[numbers + 3]) = (1, 1);
        });
    });
    damaged.refuse(&[&optim(0, 1), "param_groups", "2 groups"], |folder| {
        // The options of the last stage only.
        for partition in [0, 1] {
            edit_pickle(&folder.join(optim(partition, 1)), |pickle| replace(pickle, b"amsgrad", b"AMSGRAD"));
        }
    });
}
