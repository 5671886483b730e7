//! Weight maps: conversions between the conventions of one model (`tests/fixtures/maps`) give the files that the projects' own code
//! made, from any layout of the source; maps and sources that do not fit are refused.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::common::corrupt::dtshard;
use crate::common::env::TestEnv;
use crate::common::{assert_same, fixture, in_parallel, read_safetensors, succeed};

/// The folders of the fixtures, with the family of each.
const MODELS: [(&str, &str); 20] = [
    ("bloom", "bloom"),
    ("deepseek-v3", "deepseek-v3"),
    ("falcon", "falcon"),
    ("gpt-neox", "gpt-neox"),
    ("gpt-oss", "gpt-oss"),
    ("gpt2", "gpt2"),
    ("internlm2", "internlm2"),
    ("llama", "llama"),
    ("llama4", "llama4"),
    ("mistral", "llama"),
    ("mistral3", "pixtral"),
    ("mixtral", "mixtral"),
    ("olmo-core", "olmo-core"),
    ("olmo-core-llama", "olmo-core"),
    ("olmo-core-moe", "olmo-core"),
    ("olmo-core-qwen3", "olmo-core"),
    ("phi3", "phi3"),
    ("pixtral", "pixtral"),
    ("qwen3-moe", "qwen3-moe"),
    ("qwen3-vl-moe", "qwen3-vl-moe"),
];

/// A conversion from one convention to another: the folder of the fixture, the family, and the two conventions.
type Pair = (&'static str, &'static str, String, String);

fn pairs() -> Vec<Pair> {
    let mut pairs = Vec::new();
    for (folder, family) in MODELS {
        let mut sides: Vec<String> = fs::read_dir(fixture("maps").join(folder))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|suffix| suffix == "safetensors"))
            .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
            .collect();
        sides.sort();
        for from in &sides {
            let others = sides.iter().filter(|to| *to != from);
            pairs.extend(others.map(|to| (folder, family, from.clone(), to.clone())));
        }
    }
    pairs
}

fn file(folder: &str, side: &str) -> PathBuf {
    fixture("maps").join(folder).join(format!("{side}.safetensors"))
}

/// Returns the option for the configuration of the model, for sources that have no configuration beside them.
fn config(folder: &str) -> String {
    let files = ["config.json", "params.json"].map(|name| fixture("maps").join(folder).join(name));
    files.iter().find(|file| file.exists()).map_or_else(String::new, |file| format!("--config {}", file.display()))
}

#[test]
fn each_convention_becomes_each_other_convention() {
    let env = TestEnv::new();
    let pairs = pairs();
    assert_eq!(pairs.len(), 78);
    in_parallel(&pairs, |(folder, family, from, to)| {
        let name = format!("{folder}-{from}-{to}.safetensors");
        let map = format!("--map {family}:{from}:{to} --assets none");
        let made = env.make("consolidate", file(folder, from), &name, &map);
        assert_same(&read_safetensors(&made.path), &read_safetensors(&file(folder, to)), &name);
        succeed("verify", &[&file(folder, from), &file(folder, to)], &format!("--map {family}:{from}:{to}"));
    });
}

/// Shards that end within heads, blocks and experts: three and five ranks do not divide the dims of the models evenly.
#[test]
fn sharded_sources_become_each_other_convention() {
    let env = TestEnv::new();
    let layouts = [
        ("dcp", "--mesh dp=3 --to dcp"),
        ("ranks", "--mesh dp=2,tp=3 --placements S(0),S(1) --to torch-ranks"),
        ("strided", "--mesh dp=2,tp=2 --placements _S(0,2),S(0) --to torch-ranks"),
        ("hf", "--mesh dp=5 --to dcp-hf"),
    ];
    let mut sources: Vec<(&str, &str, String)> =
        pairs().into_iter().map(|(folder, family, from, _)| (folder, family, from)).collect();
    sources.dedup();
    in_parallel(&sources, |(folder, family, from)| {
        for (layout, options) in layouts {
            let name = format!("{folder}-{from}-{layout}");
            let sharded = env.make("reshard", file(folder, from), &name, options).path;
            for (_, _, _, to) in pairs().iter().filter(|pair| (pair.0, &pair.2) == (*folder, from)) {
                let map = format!("--map {family}:{from}:{to} {}", config(folder));
                let name = format!("{folder}-{from}-{to}-{layout}.safetensors");
                let made = env.make("consolidate", &sharded, &name, &format!("{map} --assets none"));
                assert_same(&read_safetensors(&made.path), &read_safetensors(&file(folder, to)), &name);
            }
        }
    });
}

#[test]
fn resharding_with_a_map_gives_the_other_convention_on_the_new_mesh() {
    let env = TestEnv::new();
    in_parallel(&pairs(), |(folder, family, from, to)| {
        let map = format!("--map {family}:{from}:{to}");
        for (number, options) in
            ["--mesh dp=3 --to dcp", "--mesh dp=2,tp=2 --placements S(1),S(0) --to torch-ranks"].iter().enumerate()
        {
            let name = format!("{folder}-{from}-{to}-{number}");
            let made = env.make("reshard", file(folder, from), &name, &format!("{map} {options} --verify"));
            let whole = env.make("consolidate", &made.path, &format!("{name}.safetensors"), "--assets none");
            assert_same(&read_safetensors(&whole.path), &read_safetensors(&file(folder, to)), &name);
        }
    });
}

/// Three ranks of FSDP2 trained the model in torchtitan's convention with AdamW. Real PyTorch gathered the truth.
#[test]
fn optimizer_state_is_converted_with_its_parameters() {
    let env = TestEnv::new();
    let (source, truth) =
        (fixture("maps/llama-adamw/dcp"), read_safetensors(&fixture("maps/llama-adamw/hf.safetensors")));
    let sizes = "--set h=4 --set k=2";
    let made = env.make(
        "consolidate",
        &source,
        "all.safetensors",
        &format!("--map llama:hf {sizes} --everything --assets none"),
    );
    assert_same(&read_safetensors(&made.path), &truth, "all tensors");
    for (name, options) in [("dcp", "--mesh dp=2 --to dcp"), ("ranks", "--mesh dp=4 --to torch-ranks")] {
        let hf = env.make("reshard", &source, name, &format!("--map llama:hf {sizes} {options} --verify")).path;
        let whole = env.make("consolidate", &hf, &format!("{name}.safetensors"), "--everything --assets none");
        assert_same(&read_safetensors(&whole.path), &truth, name);
        let back = env.make(
            "reshard",
            &hf,
            &format!("{name}-back"),
            &format!("--map llama:titan {sizes} --mesh dp=3 --to dcp"),
        );
        succeed("verify", &[&back.path, &source], "");
    }
}

#[test]
fn configuration_of_the_options_is_put_beside_the_weights() {
    let env = TestEnv::new();
    let config = fixture("maps/llama/config.json");
    let options = format!("--map llama:hf --config {}", config.display());
    let made = env.make("consolidate", fixture("maps/llama-adamw/dcp"), "hf", &options);
    assert_eq!(fs::read(made.path.join("config.json")).unwrap(), fs::read(config).unwrap());
}

#[test]
fn parameter_groups_list_the_new_names() {
    let env = TestEnv::new();
    let made = env.make(
        "reshard",
        fixture("maps/llama-adamw/dcp"),
        "ranks",
        "--map llama:hf --set h=4 --set k=2 --mesh dp=2 --to torch-ranks",
    );
    let shown = succeed("inspect", &[&made.path], "--json").stdout;
    assert!(shown.contains("optimizer.param_groups.model.layers.0.self_attn.q_proj.weight.lr"), "{shown}");
    assert!(!shown.contains("attention.qkv_linear"), "{shown}");
}

#[test]
fn placements_of_rank_files_follow_the_map() {
    let env = TestEnv::new();
    let ranks = env.make("reshard", file("qwen3-moe", "hf"), "ranks", "--mesh dp=3 --to torch-ranks").path;
    let made = env.make("reshard", &ranks, "titan", "--map qwen3-moe:hf:titan").path;
    let shown = succeed("inspect", &[&made], "").stdout;
    for (name, placements) in [
        ("layers.0.attention.qkv_linear.wq.weight", "S(0)"),
        ("layers.1.moe.routed_experts.inner_experts.w1_EFD", "S(1)"),
        ("layers.1.moe.routed_experts.inner_experts.w2_EDF", "S(1)"),
    ] {
        let line = shown.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {shown}"));
        assert!(line.contains(&format!(" {placements} ")), "{line}");
    }
    let back = env.make("reshard", &made, "back", "--map qwen3-moe:titan:hf --mesh dp=3").path;
    succeed("verify", &[&back, &ranks], "");
}

#[test]
fn several_processes_divide_a_conversion_with_a_map() {
    let env = TestEnv::new();
    let (source, out) = (file("mixtral", "hf4"), env.path("out"));
    let parts: Vec<_> = (0..2)
        .map(|part| {
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_dtshard"));
            command.arg("reshard").arg(&source).arg(&out);
            command.args([
                "--map",
                "mixtral:hf4:hf5",
                "--mesh",
                "dp=4",
                "--to",
                "dcp",
                "--parts",
                "2",
                "--part",
                &part.to_string(),
            ]);
            command.spawn().unwrap()
        })
        .collect();
    for mut part in parts {
        assert!(part.wait().unwrap().success());
    }
    succeed("verify", &[&out, &file("mixtral", "hf5")], "");
}

#[test]
fn map_between_processes_that_exchange_data_is_refused() {
    let env = TestEnv::new();
    let parts: Vec<_> = (0..2)
        .map(|part| {
            let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_dtshard"));
            command.arg("reshard").arg(file("mixtral", "hf4")).arg(env.path("out"));
            command.args("--map mixtral:hf4:hf5 --mesh dp=4 --to dcp --source per-rank --parts 2 --part".split(' '));
            command.arg(part.to_string()).stderr(std::process::Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for part in parts {
        let output = part.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("--map cannot be used with"), "{output:?}");
    }
    assert!(!env.path("out").exists());
}

/// FSDP1 wrote flat optimizer state beside the model's DTensors.
#[test]
fn flat_optimizer_state_is_converted_with_its_parameters() {
    let env = TestEnv::new();
    let source = fixture("trainers/verl_fsdp1");
    let plain = env.make("reshard", &source, "plain", "--mesh dp=2 --to dcp").path;
    let config = source.join("global_step_2/actor/huggingface/config.json");
    let titan = env.make("reshard", &source, "titan", "--map llama:hf:titan --mesh dp=3 --to dcp").path;
    let shown = succeed("inspect", &[&titan], "").stdout;
    assert!(shown.contains("optim.state.layers.0.attention.qkv_linear.wq.weight.exp_avg "), "{shown}");
    let back = env
        .make(
            "reshard",
            &titan,
            "back",
            &format!("--map llama:titan:hf --config {} --mesh dp=2 --to dcp", config.display()),
        )
        .path;
    succeed("verify", &[&back, &plain], "");
}

#[test]
fn filters_match_names_of_the_source_and_the_other_options_match_new_names() {
    let env = TestEnv::new();
    let made = env.make(
        "consolidate",
        file("llama", "titan"),
        "part.safetensors",
        "--map llama:hf --include layers.1.** --dtype model.layers.1.mlp.**=bf16 --rename ^model\\.=m. --assets none",
    );
    let shown = succeed("inspect", &[&made.path], "").stdout;
    let line = |name: &str| {
        shown.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {shown}")).to_owned()
    };
    assert!(line("m.layers.1.mlp.gate_proj.weight").contains("bf16"));
    assert!(line("m.layers.1.self_attn.q_proj.weight").contains("f32"));
    assert!(!shown.contains("layers.0"), "{shown}");
}

#[test]
fn hints_about_patterns_say_which_names_they_match() {
    let env = TestEnv::new();
    let cases = [
        ("--include model.layers.1.**", "--include matches the names of SRC, before --map changes them; the nearest"),
        ("--exclude **.q_proj.weight", "--exclude matches the names of SRC, before --map changes them; the nearest"),
        (
            "--dtype layers.1.feed_forward.**=bf16",
            "--dtype matches the names after --map; the nearest names are model.",
        ),
        ("--rename ^tok_embeddings=t", "--rename matches the names after --map; the nearest names are"),
        ("--strip-prefix layers", "--strip-prefix matches the names after --map; the nearest prefixes are"),
        ("--keep-names", "leave --keep-names out"),
    ];
    for (options, hint) in cases {
        let options = format!("--map llama:hf {options} --assets none");
        let refused = env.refuse("consolidate", file("llama", "titan"), "out.safetensors", &options);
        assert!(refused.stderr.contains(&format!("hint: {hint}")), "{options}: {}", refused.stderr);
    }
}

#[test]
fn json_documents_have_the_map_that_was_applied() {
    let env = TestEnv::new();
    let (source, target) = (file("llama", "titan"), file("llama", "hf"));
    let made = env.make("consolidate", &source, "out.safetensors", "--map llama:hf --assets none --json");
    let verified = succeed("verify", &[&source, &target], "--map llama:hf --json");
    let inspected = succeed("inspect", &[&source], "--map llama:titan:hf --json --brief");
    for run in [&made.run, &verified, &inspected] {
        let document: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
        let map = &document["map"];
        assert_eq!((&map["family"], &map["from"], &map["to"]), (&json!("llama"), &json!("titan"), &json!("hf")));
        assert_eq!(map["sizes"]["h"], json!({ "value": 4, "origin": "`num_attention_heads` of config.json" }));
        let row = &map["rows"][3];
        assert_eq!(row["from"], json!(["layers.{l}.attention.qkv_linear.wq.{p:weight,bias} [(h j r) ...]"]));
        assert_eq!((&row["sources"], &row["targets"]), (&json!(2), &json!(2)), "{row}");
        assert!(row["pieces"].as_u64().unwrap() > 2, "{row}");
        assert_eq!(map["left_out"], json!([]));
    }
    let plain: serde_json::Value = serde_json::from_str(&succeed("inspect", &[&target], "--json").stdout).unwrap();
    assert_eq!(plain.get("map"), None);
}

#[test]
fn side_of_the_source_is_found_by_its_names() {
    let env = TestEnv::new();
    let made = env.make("consolidate", file("llama", "titan-0.2"), "a.safetensors", "--map llama:hf --assets none");
    assert!(
        made.run.stderr.contains(
            "SRC is read as llama:titan-0.2 and converted to hf; h = 4 by `num_attention_heads` of config.json"
        ),
        "{}",
        made.run.stderr
    );
    let made = env.make("consolidate", file("falcon", "fused"), "b.safetensors", "--map falcon --assets none");
    assert!(made.run.stderr.contains("SRC is read as falcon:fused and converted to split"), "{}", made.run.stderr);
    for (source, words) in [(file("llama", "hf"), "llama:hf"), (file("falcon", "fused"), "falcon:fused")] {
        let to = if words == "llama:hf" { ":titan" } else { "" };
        let name = format!("{}.safetensors", words.replace(':', "-"));
        let made = env.make("consolidate", source, &name, &format!("--map auto{to} --assets none"));
        assert!(made.run.stderr.contains(&format!("SRC is read as {words}")), "{}", made.run.stderr);
    }
    let refused = env.refuse("consolidate", file("gpt2", "conv1d"), "c.safetensors", "--map gpt2:split");
    assert!(refused.stderr.contains("fit gpt2:conv1d and gpt2:linear equally well"), "{}", refused.stderr);
    assert!(refused.stderr.contains("for example --map gpt2:conv1d:split"), "{}", refused.stderr);
}

/// Copies each file of the fixtures to a folder with and without `config.json`, and reads it with `--map auto` and `--map auto:TO`.
/// With the type of the model, only names that several sides of one family share are an error. Without it, no other side is taken
/// for the one of the source.
#[test]
fn auto_finds_the_side_of_the_source_or_names_all_that_fit() {
    let env = TestEnv::new();
    let mut sources: Vec<(&str, &str, String)> =
        pairs().into_iter().map(|(folder, family, from, _)| (folder, family, from)).collect();
    sources.dedup();
    in_parallel(&sources, |(folder, family, side)| {
        let known = fs::read_to_string(fixture("maps").join(folder).join("config.json"));
        let config = known.unwrap_or_else(|_| {
            String::from(match *folder {
                "llama4" => "{\n\"model_type\": \"llama4_text\"\n}",
                "mistral" => "{\n\"model_type\": \"mistral\",\n\"n_heads\": 4,\n\"n_kv_heads\": 2\n}",
                "mistral3" => "{\n\"model_type\": \"mistral3\",\n\"text_config\": {\"head_dim\": 4, \"num_key_value_heads\": 2},\n\"vision_config\": {\"head_dim\": 4}\n}",
                _ => "{\n\"model_type\": \"olmo2\"\n}",
            })
        });
        let lines: Vec<&str> = config.lines().filter(|line| !line.contains("\"model_type\"")).collect();
        let sizes = env.write(&format!("{folder}-{side}.json"), lines.join("\n"));
        for is_typed in [true, false] {
            let source = env.path(&format!("{folder}-{side}-{is_typed}"));
            fs::create_dir(&source).unwrap();
            fs::copy(file(folder, side), source.join("model.safetensors")).unwrap();
            if is_typed {
                fs::write(source.join("config.json"), &config).unwrap();
            }
            let targets = pairs().into_iter().filter(|pair| pair.0 == *folder && pair.2 == *side).map(|pair| pair.3);
            for to in targets.chain([String::new(), side.clone()]) {
                let map = if to.is_empty() { String::from("auto") } else { format!("auto:{to}") };
                let run = if is_typed {
                    dtshard(&[&"inspect", &source, &"--map", &map])
                } else {
                    dtshard(&[&"inspect", &source, &"--map", &map, &"--config", &sizes])
                };
                let found = sides_found(&run.err);
                let own = format!("{family}:{side}");
                let case = format!("{own} {map}, with the type {is_typed}: {}", run.err);
                let shares_names = match (*folder, side.as_str()) {
                    ("gpt2", "conv1d" | "linear") | ("qwen3-vl-moe", _) => true,
                    ("llama", "hf") | ("olmo-core-llama", "llama") | ("olmo-core-qwen3", "qwen3") => {
                        to.is_empty() || !is_typed
                    }
                    _ => !is_typed,
                };
                match found.as_slice() {
                    // A side has exactly the names of a side of another family.
                    [one] if to == *side => assert!(one.ends_with(&format!(":{side}")), "{case}"),
                    // The two sides have the same tensors.
                    [one] if own == "llama:meta" && one == "llama:titan-0.2" => {}
                    [one] if own == "phi3:fused" && one == "qwen3-moe:vllm" => {}
                    [one] => assert_eq!(*one, own, "{case}"),
                    several => {
                        assert!(shares_names && several.len() > 1, "{case}");
                        // olmo2 has the cells of flex_olmo, llama those of qwen3, and titan-0.2 those of meta; the rows of other families match more names than
                        // those of phi3:split.
                        let is_hidden = ["llama:meta", "olmo-core:flex_olmo", "olmo-core:qwen3", "phi3:split"]
                            .contains(&own.as_str());
                        assert!(is_hidden || several.contains(&own), "{case}");
                    }
                }
                assert_eq!(run.err.contains("SRC already has"), to == *side && found.len() == 1, "{case}");
            }
        }
    });
}

/// Returns the sides that a message names as those of SRC.
fn sides_found(message: &str) -> Vec<String> {
    let between = |start: &str, end: &str| Some(message.split_once(start)?.1.split_once(end)?.0.to_owned());
    if let Some(sides) = between("the names of SRC fit ", " equally well") {
        return sides.replace(" and ", ", ").split(", ").map(str::to_owned).collect();
    }
    let without_target = || {
        let side = between("SRC fits the side ", ", and the side")?;
        side.split_once(" of ").map(|(side, family)| format!("{family}:{side}"))
    };
    let read_as = || between("SRC is read as ", " and converted");
    between("SRC already has the names of ", "\n").or_else(read_as).or_else(without_target).into_iter().collect()
}

#[test]
fn side_of_another_model_type_loses_against_one_that_fits_the_type() {
    let env = TestEnv::new();
    let source = file("olmo-core", "olmo2");
    let map = "--map olmo-core:core --assets none";
    let refused = env.refuse("consolidate", &source, "core.safetensors", map);
    assert!(refused.stderr.contains("fit olmo-core:olmo2 and olmo-core:gemma3 equally well"), "{}", refused.stderr);
    let config = env.write("config.json", "{\"model_type\": \"olmo2\"}");
    let made = env.make("consolidate", &source, "core.safetensors", &format!("{map} --config {}", config.display()));
    assert_same(&read_safetensors(&made.path), &read_safetensors(&file("olmo-core", "core")), "core");
}

/// Options and sources that do not fit, with the words of the error.
#[test]
fn maps_that_do_not_fit_are_refused_with_the_cause() {
    let env = TestEnv::new();
    let titan = file("llama", "titan");
    let copy = env.path("alone.safetensors");
    fs::copy(&titan, &copy).unwrap();
    let own = env.path("own.toml");
    fs::write(&own, "family = \"own\"\n[sides]\na = {}\nb = {}\n[[map]]\nrows = [{ a = \"w [(h j]\", b = \"v\" }]\n")
        .unwrap();
    let own_map = format!("--map {}:b", own.display());
    let cases: [(&Path, &str, &[&str]); 14] = [
        (
            &titan,
            "--map qwen3-moe:hf",
            &[
                "the map qwen3-moe is for models of the type qwen3_moe, qwen3",
                "found the model_type llama in config.json",
            ],
        ),
        (&titan, "--map lama:hf", &["expected a map family, a map file or `auto`, found lama", "llama"]),
        (&titan, "--map llama:hff", &["the map llama has no side `hff`", "hf, titan, titan-0.2, meta"]),
        (&titan, "--map llama:titan", &["SRC already has the names of llama:titan"]),
        (
            &copy,
            "--map gpt2:conv1d:linear",
            &["no side fits the names of the model", "the first name is layers.0.attention"],
        ),
        (
            &titan,
            "--map llama:hf:meta",
            &["SRC does not have the names of llama:hf, but those of llama:titan", "--map llama:titan:meta"],
        ),
        (
            &copy,
            "--map llama:hf --set h=8 --set k=2",
            &["the sizes of its axes give 4", "j is 1 by the shape of layers.0.attention.qkv_linear.wq.weight"],
        ),
        (&titan, "--map llama", &["the side to convert to is not given", "--map llama:TO"]),
        (
            &copy,
            "--map llama:hf",
            &["layers.0.attention.qkv_linear.wq.weight", "does not give h and j in `(h j r)`", "--set h=N"],
        ),
        (&copy, "--map llama:hf --set h=5 --set k=2", &["`(h j r)` is 16", "not divisible by 10", "h is 5 by --set"]),
        (&titan, "--map llama:hf --set x=3", &["no row of the map llama has the axis x"]),
        (&titan, "--map llama:hf --set h=0", &["expected an axis and a number of at least 1"]),
        (&titan, "--map llama:hf --set h=8", &["the size h is 8 by --set, and 4 by `num_attention_heads`"]),
        (&titan, &own_map, &["own.toml line 6", "a: expected"]),
    ];
    for (source, options, words) in cases {
        let refused = env.refuse("consolidate", source, "out.safetensors", &format!("{options} --assets none"));
        for word in words {
            assert!(refused.stderr.contains(word), "{options}: {word}: {}", refused.stderr);
        }
        assert!(refused.stderr.contains("\nhint: "), "{options}: {}", refused.stderr);
    }
}

#[test]
fn hints_about_a_map_file_name_its_path() {
    let env = TestEnv::new();
    let own = env.write("own.toml", succeed("maps", &[Path::new("gpt2")], "").stdout);
    let source = file("gpt2", "conv1d");
    let refused = env.refuse("consolidate", &source, "out.safetensors", &format!("--map {}:split", own.display()));
    let map = format!("--map {}:conv1d:split", own.display());
    assert!(refused.stderr.contains(&format!("for example {map}\n")), "{}", refused.stderr);
    let made = env.make("consolidate", &source, "out.safetensors", &format!("{map} --assets none"));
    assert_same(&read_safetensors(&made.path), &read_safetensors(&file("gpt2", "split")), "split");
    let refused =
        env.refuse("consolidate", file("gpt2", "split"), "b.safetensors", &format!("--map {}", own.display()));
    assert!(
        refused.stderr.contains(&format!("give --map {}:TO, where TO is one of", own.display())),
        "{}",
        refused.stderr
    );
}

#[test]
fn product_of_sizes_is_refused() {
    let env = TestEnv::new();
    let text = "family = \"own\"\n[sides]\na = {}\nb = {}\n[sizes]\nh = 2\nk = 3\np = \"h * k\"\n[[map]]\nrows = [{ a = \"w [p]\", b = \"v [p]\" }]\n";
    let own = env.write("own.toml", text);
    let refused = dtshard(&[&"maps", &own]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("expected a size or a key of the configuration, found `h * k`"), "{}", refused.err);
    assert!(refused.err.contains("own.toml line 8"), "{}", refused.err);
}

#[test]
fn tensor_without_a_row_is_refused_and_can_be_left_out() {
    let env = TestEnv::new();
    let more = env
        .make("consolidate", file("llama", "titan"), "more.safetensors", "--rename ^norm=layers.0.norms --assets none")
        .path;
    let sizes = "--set h=4 --set k=2 --assets none";
    let refused = env.refuse("consolidate", &more, "out.safetensors", &format!("--map llama:titan:hf {sizes}"));
    for word in ["layers.0.norms.weight", "has no row for this name on the side titan", "--exclude"] {
        assert!(refused.stderr.contains(word), "{word}: {}", refused.stderr);
    }
    env.make(
        "consolidate",
        &more,
        "out.safetensors",
        &format!("--map llama:titan:hf --exclude layers.0.norms.** {sizes}"),
    );
}

#[test]
fn missing_expert_is_refused_by_name() {
    let env = TestEnv::new();
    let part = env
        .make("consolidate", file("mixtral", "hf4"), "part.safetensors", "--exclude **.experts.1.w3.** --assets none")
        .path;
    let refused = env.refuse("consolidate", &part, "out.safetensors", "--map mixtral:hf4:hf5 --assets none");
    for word in ["model.layers.0.block_sparse_moe.experts.1.w3.weight", "expected 6 tensors", "found 5"] {
        assert!(refused.stderr.contains(word), "{word}: {}", refused.stderr);
    }
}

#[test]
fn experts_that_contradict_the_router_are_refused() {
    let env = TestEnv::new();
    let options = "--exclude **.experts.2.** --assets none";
    let part = env.make("consolidate", file("mixtral", "hf4"), "part.safetensors", options).path;
    let refused = env.refuse("consolidate", &part, "out.safetensors", "--map mixtral:hf4:hf5 --assets none");
    for word in ["experts.2.w1.weight", "expected 6 tensors", "found 4"] {
        assert!(refused.stderr.contains(word), "{word}: {}", refused.stderr);
    }
}

#[test]
fn scales_of_quantised_weights_are_refused_with_the_cause() {
    let env = TestEnv::new();
    let options = "--rename ^norm.weight=layers.0.attention.qkv_linear.wq.weight_scale_inv --assets none";
    let scaled = env.make("consolidate", file("llama", "titan"), "scaled.safetensors", options).path;
    let refused =
        env.refuse("consolidate", &scaled, "out.safetensors", "--map llama:titan:hf --set h=4 --set k=2 --assets none");
    assert!(refused.stderr.contains("hint: SRC is quantised"), "{}", refused.stderr);
}

#[test]
fn row_that_the_way_back_would_not_apply_is_refused() {
    let env = TestEnv::new();
    let map = "family = \"own\"\n[sides]\na = {}\nb = {}\n[[map]]\nrows = [{ a = \"model.**\", b = \"**\" }, { a = \"lm_head.weight\", b = \"head.weight\" }]\n";
    fs::write(env.path("own.toml"), map).unwrap();
    let own = format!("--map {}:a:b --assets none", env.path("own.toml").display());
    let refused = env.refuse("consolidate", file("llama", "hf"), "out.safetensors", &own);
    assert!(refused.stderr.contains("takes its name on the way back"), "{}", refused.stderr);
}

#[test]
fn family_that_names_alone_do_not_tell_gets_a_note() {
    let env = TestEnv::new();
    let copy = env.path("alone.safetensors");
    fs::copy(file("llama", "titan"), &copy).unwrap();
    let made = env.make("consolidate", &copy, "out.safetensors", "--map qwen3-moe:hf --assets none");
    assert!(made.run.stderr.contains("the names of SRC also fit llama:titan"), "{}", made.run.stderr);
}

#[test]
fn parts_of_different_dtypes_are_refused() {
    let env = TestEnv::new();
    let mixed = env
        .make("consolidate", file("phi3", "split"), "mixed.safetensors", "--dtype **.k_proj.**=bf16 --assets none")
        .path;
    let refused = env.refuse(
        "consolidate",
        &mixed,
        "out.safetensors",
        "--map phi3:split:fused --set h=4 --set k=2 --assets none",
    );
    for word in ["model.layers.0.self_attn.qkv_proj.weight", "q_proj.weight (f32)", "k_proj.weight (bf16)"] {
        assert!(refused.stderr.contains(word), "{word}: {}", refused.stderr);
    }
}

#[test]
fn tied_head_that_the_source_leaves_out_is_written_where_the_target_needs_it() {
    let env = TestEnv::new();
    let tied =
        env.make("consolidate", file("llama", "hf"), "tied.safetensors", "--exclude lm_head.weight --assets none").path;
    let made = env
        .make("consolidate", &tied, "titan.safetensors", "--map llama:hf:titan --set h=4 --set k=2 --assets none")
        .path;
    let tensors = read_safetensors(&made);
    assert_eq!(tensors["lm_head.weight"], tensors["tok_embeddings.weight"]);
    let back = env
        .make("consolidate", &tied, "gpt2.safetensors", "--map llama:hf:titan-0.2 --set h=4 --set k=2 --assets none")
        .path;
    assert!(read_safetensors(&back).contains_key("output.weight"));
}

/// OLMo-core stores the norms of Gemma 3 plus 1. Its own code made the truth of both directions, in bf16.
#[test]
fn numbers_are_added_to_norms_as_torch_adds_them() {
    let env = TestEnv::new();
    let folder = "olmo-core-gemma3";
    let back = fixture("maps").join(folder).join("back/gemma3.safetensors");
    let directions =
        [("gemma3:core", file(folder, "gemma3"), file(folder, "core")), ("core:gemma3", file(folder, "core"), back)];
    in_parallel(&directions, |(sides, source, truth)| {
        let truth = read_safetensors(truth);
        let map = format!("--map olmo-core:{sides} {}", config(folder));
        let name = sides.replace(':', "-");
        let made = env.make("consolidate", source, &format!("{name}.safetensors"), &format!("{map} --assets none"));
        assert_same(&read_safetensors(&made.path), &truth, sides);
        for (number, layout) in
            ["--mesh dp=3 --to dcp", "--mesh dp=2,tp=2 --placements S(0),S(0) --to torch-ranks"].iter().enumerate()
        {
            let sharded = env.make("reshard", source, &format!("{name}-{number}"), layout).path;
            let mapped = format!("{name}-{number}-mapped");
            let made = env.make("reshard", &sharded, &mapped, &format!("{map} --mesh dp=2 --to torch-ranks --verify"));
            let whole = env.make("consolidate", &made.path, &format!("{mapped}.safetensors"), "--assets none");
            assert_same(&read_safetensors(&whole.path), &truth, &mapped);
        }
    });
}

/// PyTorch rounds the number to the dtype of the tensor, and then the sum. Padding is zero, whatever is added.
#[test]
fn number_is_rounded_before_it_is_added_and_padding_is_not_changed() {
    let env = TestEnv::new();
    let map = "family = \"own\"\n[sides]\na = {}\nb = {}\n[sizes]\np = 3\n[[map]]\nrows = [\n\
               { a = \"model.embed_tokens.weight [v d]\", b = \"w [(v + _p) d]\", add = { b = 3.7 } },\n{ a = \"**\", b = \"**\" }]\n";
    let path = env.write("own.toml", map);
    let options = format!("--map {}:a:b --assets none", path.display());
    let made = env.make("consolidate", file("olmo-core-gemma3", "gemma3"), "made.safetensors", &options).path;
    let read = |path: &Path, name: &str| -> Vec<u16> {
        let bytes = fs::read(path).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let data = tensors.tensor(name).unwrap();
        data.data().as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect()
    };
    let single = |bits: u16| f32::from_bits(u32::from(bits) << 16);
    let round = |value: f32| {
        let bits = value.to_bits();
        u16::try_from((bits + 0x7fff + ((bits >> 16) & 1)) >> 16).unwrap()
    };
    let before = read(&file("olmo-core-gemma3", "gemma3"), "model.embed_tokens.weight");
    let after = read(&made, "w");
    let number = single(round(3.7));
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(*after, round(single(*before) + number));
    }
    assert_eq!(after.len(), before.len() + 3 * 16);
    assert!(after[before.len()..].iter().all(|bits| *bits == 0));
}

#[test]
fn first_of_two_files_of_meta_is_not_taken_for_the_model() {
    let env = TestEnv::new();
    let source = env.copy("maps/llama-meta/2-llama2");
    fs::remove_file(source.join("consolidated.01.pth")).unwrap();
    let refused = env.refuse("consolidate", &source, "out", "--map llama:hf");
    assert!(refused.stderr.contains("the shards do not form the tensor"), "{}", refused.stderr);
}

#[test]
fn experts_in_the_order_of_another_side_are_refused() {
    let env = TestEnv::new();
    let decoded = env.make("consolidate", fixture("maps/gpt-oss/packed"), "decoded", "--dequantize bf16");
    assert!(decoded.run.stderr.contains("--map gpt-oss:hf gives this order"), "{}", decoded.run.stderr);
    let refused = env.refuse("consolidate", &decoded.path, "titan", "--map gpt-oss:titan");
    assert!(refused.stderr.contains("d is 32"), "{}", refused.stderr);
}

/// Megatron stores the key heads of a model once for each of several ranks, if there are more ranks than heads.
#[test]
fn copies_are_written_and_compared() {
    let env = TestEnv::new();
    let map = "family = \"own\"\n[sides]\nhf = {}\nmany = {}\n[sizes]\nk = 2\nc = 3\n[[map]]\nrows = [\n\
               { hf = \"model.layers.{l}.self_attn.k_proj.weight [(k r) d]\", many = \"k.{l} [(k =c r) d]\" },\n\
               { hf = \"**\", many = \"**\" }]\n";
    let path = env.write("own.toml", map);
    let [there, back] = ["hf:many", "many:hf"].map(|sides| format!("--map {}:{sides} --assets none", path.display()));
    let hf = file("llama", "hf");
    let many = env.make("consolidate", &hf, "many.safetensors", &there).path;
    let bytes = fs::read(&many).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let copied = tensors.tensor("k.1").unwrap();
    assert_eq!(copied.shape(), [24, 16]);
    // Two heads of four rows, each three times.
    let rows: Vec<&[u8]> = copied.data().chunks(16 * 4).collect();
    assert_eq!((rows[0], rows[3], rows[12]), (rows[8], rows[7], rows[20]));
    assert_ne!(rows[0], rows[12]);
    let sharded = env.make("reshard", &many, "sharded", "--mesh dp=5 --to dcp").path;
    let made = env.make("consolidate", &sharded, "back.safetensors", &back).path;
    assert_same(&read_safetensors(&made), &read_safetensors(&hf), "back");
    let at = rows[20].as_ptr().addr() - bytes.as_ptr().addr();
    let mut damaged = bytes.clone();
    damaged[at] ^= 1;
    let damaged = env.write("damaged.safetensors", damaged);
    let refused = env.refuse("consolidate", &damaged, "out.safetensors", &back);
    for word in ["model.layers.1.self_attn.k_proj.weight: ", "(copy 2 in SRC) differs from the first copy", "[4, 0]"] {
        assert!(refused.stderr.contains(word), "{word}: {}", refused.stderr);
    }
}

#[test]
fn padding_of_the_target_is_zeros() {
    let env = TestEnv::new();
    let map = "family = \"own\"\n[sides]\nhf = {}\npadded = {}\n[sizes]\nk = 2\np = \"\"\n[[map]]\nrows = [\n\
               { hf = \"model.embed_tokens.weight [v d]\", padded = \"embed.weight [(v + _p) d]\" },\n\
               { hf = \"model.layers.{l}.self_attn.k_proj.weight [(k r) d]\", padded = \"k.{l} [d (k (r + _p))]\" },\n\
               { hf = \"**\", padded = \"**\" }]\n";
    let path = env.write("own.toml", map);
    let to = format!("--map {}:hf:padded --set p=3 --assets none", path.display());
    let source = env.make("reshard", file("llama", "hf"), "dcp", "--mesh dp=3 --to dcp").path;
    let made = env.make("consolidate", &source, "padded.safetensors", &to).path;
    let bytes = fs::read(&made).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let singles = |name: &str| -> Vec<f32> {
        let data = tensors.tensor(name).unwrap();
        data.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    assert_eq!(tensors.tensor("embed.weight").unwrap().shape(), [12, 16]);
    assert!(singles("embed.weight")[9 * 16..].iter().all(|value| value.to_bits() == 0));
    // Two groups of four columns, each followed by three columns of zeros.
    assert_eq!(tensors.tensor("k.0").unwrap().shape(), [16, 14]);
    for row in singles("k.0").chunks(14) {
        for (column, value) in row.iter().enumerate() {
            assert_eq!(*value == 0.0, column % 7 >= 4, "{row:?}");
        }
    }
    let back = format!("--map {}:padded:hf --set p=3 --assets none", path.display());
    let back = env.make("consolidate", &made, "back.safetensors", &back).path;
    assert_same(&read_safetensors(&back), &read_safetensors(&file("llama", "hf")), "back");
}

#[test]
fn maps_are_listed_and_compared_with_a_checkpoint() {
    let listed = dtshard(&[&"maps"]);
    listed.assert_succeeded().assert_mentions(&[]);
    for (_, family) in MODELS {
        assert!(listed.out.lines().any(|line| line.starts_with(family)), "{}", listed.out);
    }
    let fits = dtshard(&[&"maps", &file("llama", "titan-0.2")]);
    assert!(
        fits.out.lines().nth(1).is_some_and(|line| line.starts_with("llama") && line.contains("titan-0.2")),
        "{}",
        fits.out
    );
    let printed = dtshard(&[&"maps", &"llama"]);
    assert!(printed.out.contains("[[map]]"), "{}", printed.out);
    let env = TestEnv::new();
    fs::write(env.path("mine.toml"), &printed.out).unwrap();
    let mine = format!("--map {}:titan:hf --assets none", env.path("mine.toml").display());
    let made = env.make("consolidate", file("llama", "titan"), "mine.safetensors", &mine);
    assert_same(&read_safetensors(&made.path), &read_safetensors(&file("llama", "hf")), "printed map");
}

#[test]
fn map_file_is_checked_and_compared_with_a_checkpoint() {
    let env = TestEnv::new();
    let rows = "{ fused = \"h.{l}.qkv [(h d + k d + k d) i]\", split = [\"h.{l}.q [(h d) i]\", \"h.{l}.k [(k d) i]\", \"h.{l}.v [(k d) i]\"] },\n\
                { fused = \"h.{l}.norm\", add = { fused = 1 } }";
    let text = |rows: &str| {
        let sides =
            "[sides]\nfused = {}\nsplit = { like = \"fused\", model_type = \"mine\" }\n[sizes]\nk = \"kv_heads | h\"";
        format!("family = \"mine\"\n{sides}\n[[map]]\nrows = [\n{rows}\n]\n")
    };
    let map = env.write("mine.toml", text(rows));
    let listed = dtshard(&[&"maps", &map]);
    listed.assert_succeeded().assert_mentions(&[]);
    assert_eq!(
        listed.out,
        "family  sides         model_type  sizes\n\
         mine    fused, split  mine        k = kv_heads | h\n\
         \n\
         line  sides         tensors\n\
         9     fused         h.{l}.qkv [(h d + k d + k d) i]\n\
         9     split         h.{l}.q [(h d) i], h.{l}.k [(k d) i], h.{l}.v [(k d) i]\n\
         10    fused, split  h.{l}.norm plus 1\n"
    );
    let as_json = dtshard(&[&"maps", &map, &"--json"]);
    let document: serde_json::Value = serde_json::from_str(&as_json.out).unwrap();
    assert_eq!(document["rows"][0]["cells"]["split"][2], "h.{l}.v [(k d) i]");
    let damaged = env.write("damaged.toml", text(&rows.replace("(k d) i]\"]", "(k d i]\"]")));
    dtshard(&[&"maps", &damaged]).assert_refused(&["damaged.toml line 9: row: split: expected `)`, found the end"]);

    let source = file("phi3", "split");
    let other = dtshard(&[&"maps", &map, &source]);
    assert!(other.out.contains("no side fits; names without a row on the side fused: lm_head.weight"), "{}", other.out);
    assert!(
        other.out.contains("the map is for models of the type mine, and SRC has the model_type phi3"),
        "{}",
        other.out
    );
    let phi = env.write("phi.toml", dtshard(&[&"maps", &"phi3"]).out);
    for named in [Path::new("phi3"), &phi] {
        let fits = dtshard(&[&"maps", &named, &source]);
        assert!(fits.out.ends_with("split to fused: fits, 21 tensors to 15\n"), "{}", fits.out);
    }
    let alone = env.path("alone.safetensors");
    fs::copy(file("llama", "hf"), &alone).unwrap();
    let faults = dtshard(&[&"maps", &"llama", &alone]);
    assert!(faults.out.contains("hf to titan: model.layers.0.self_attn.q_proj.weight: the shape"), "{}", faults.out);
    dtshard(&[&"maps", &"nope", &source]).assert_refused(&["nope: expected a map family or a map file"]);
}

#[test]
fn options_of_maps_need_a_map() {
    for option in [["--config", "x"], ["--set", "h=1"], ["--map-state", "drop"]] {
        let source = file("llama", "titan");
        dtshard(&[&"inspect", &source, &option[0], &option[1]]).assert_refused(&["--map"]);
    }
}

/// The model has no parameter of the name `layers.0.extra.weight`, of which the optimizer has state.
#[test]
fn state_of_a_parameter_that_the_model_lacks_is_refused_or_left_out() {
    let env = TestEnv::new();
    let source = fixture("maps/llama-adamw/dcp");
    let less = env.make("reshard", &source, "less", "--mesh dp=2 --to dcp --rename ^norm.weight$=other.weight").path;
    let options = "--map llama:titan:hf --set h=4 --exclude other.weight --mesh dp=2 --to dcp";
    // Excluding a parameter excludes its state, so nothing is left to refuse.
    env.make("reshard", &less, "out", options);
    let lone = env.make("unshard", &source, "lone.pt", "--include optimizer").path;
    let refused = env.refuse("unshard", &lone, "out.pt", "--map llama:titan:hf --set h=4 --root optimizer");
    assert!(
        refused.stderr.contains("no side fits") || refused.stderr.contains("the model has no parameter"),
        "{}",
        refused.stderr
    );
}

#[test]
fn parameters_that_a_map_joins_get_one_step() {
    let env = TestEnv::new();
    let map = env.path("fuse.toml");
    let rows = "{ a = [\"layers.0.feed_forward.w1.weight [f d]\", \"layers.0.feed_forward.w3.weight [g d]\"], \
                b = \"fused.weight [(f + g) d]\" }, { a = \"**\", b = \"**\" }";
    fs::write(&map, format!("family = \"own\"\n[sides]\na = {{}}\nb = {{}}\n[[map]]\nrows = [{rows}]\n")).unwrap();
    let source = fixture("maps/llama-adamw/dcp");
    let fuse = format!("--map {}:a:b", map.display());
    // The truth has one step for all parameters.
    let made = env.make("consolidate", &source, "fused.safetensors", &format!("{fuse} --everything --assets none"));
    let tensors = read_safetensors(&made.path);
    let truth = read_safetensors(&fixture("maps/llama-adamw/hf.safetensors"));
    let [step, expected] = ["fused.weight", "model.norm.weight"].map(|name| format!("optimizer.state.{name}.step"));
    assert_eq!(tensors[&step], truth[&expected]);
}

/// Meta's files. The script of transformers joined and converted each of these folders, and its results were equal.
#[test]
fn files_that_meta_publishes_are_joined_as_the_side_declares() {
    let env = TestEnv::new();
    let truth = read_safetensors(&fixture("maps/llama-meta/hf.safetensors"));
    let folders = ["1-llama2", "2-llama2", "2-llama3", "4-llama2", "4-llama3"];
    in_parallel(&folders, |folder| {
        let source = fixture("maps/llama-meta").join(folder);
        for map in ["llama:meta:hf", "llama:hf", "auto:hf"] {
            let name = format!("{folder}-{}.safetensors", map.replace(':', "-"));
            let made = env.make("consolidate", &source, &name, &format!("--map {map} --assets none"));
            assert_same(&read_safetensors(&made.path), &truth, &name);
        }
        succeed("verify", &[&source, &fixture("maps/llama-meta/hf.safetensors")], "--map llama:meta:hf");
        let titan = env.make("reshard", &source, &format!("{folder}-titan"), "--map llama:titan --mesh dp=3 --to dcp");
        let options = format!("--map llama:titan:hf --config {} --assets none", source.join("params.json").display());
        let made = env.make("consolidate", &titan.path, &format!("{folder}-back.safetensors"), &options);
        assert_same(&read_safetensors(&made.path), &truth, folder);
    });
}

/// Copies a fixture of Meta's files, without those that `is_left_out` names.
fn meta_without(env: &TestEnv, fixture_name: &str, left_out: &[&str]) -> PathBuf {
    let (from, to) =
        (fixture("maps/llama-meta").join(fixture_name), env.path(&format!("{fixture_name}-{}", left_out.len())));
    fs::create_dir(&to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let name = entry.unwrap().file_name();
        if left_out.iter().all(|file| *file != name) {
            let from = fixture("maps/llama-meta").join(fixture_name).join(&name);
            fs::copy(from, to.join(&name)).unwrap();
        }
    }
    to
}

#[test]
fn cut_of_the_embedding_is_found_without_a_configuration() {
    let env = TestEnv::new();
    let truth = read_safetensors(&fixture("maps/llama-meta/hf.safetensors"));
    for folder in ["2-llama2", "4-llama3"] {
        let own = TestEnv::new();
        let source = meta_without(&own, folder, &["params.json"]);
        let options = "--map llama:meta:hf --set h=8 --set k=4 --assets none";
        let made = env.make("consolidate", &source, &format!("{folder}.safetensors"), options);
        assert_same(&read_safetensors(&made.path), &truth, folder);
    }
}

#[test]
fn declared_placements_take_the_place_of_those_of_the_side() {
    let env = TestEnv::new();
    let options = "--map llama:meta:hf --src-mesh tp=2 --src-placements **.{wq,wk,wv,w1,w3}=S(0) \
                   --src-placements **.{wo,w2}=S(1) --src-placements tok_embeddings=S(1) --src-placements output=S(0)";
    let source = fixture("maps/llama-meta/2-llama2");
    let made = env.make("consolidate", &source, "out.safetensors", &format!("{options} --assets none"));
    assert_same(
        &read_safetensors(&made.path),
        &read_safetensors(&fixture("maps/llama-meta/hf.safetensors")),
        "declared",
    );
}

/// The shards of another number of ranks, written from the model of Hugging Face, are those of Meta.
#[test]
fn shards_of_meta_are_written_and_read_again() {
    let env = TestEnv::new();
    let placements = "--placements **.{wq,wk,wv,w1,w3}=S(0) --placements **.{wo,w2}=S(1) \
                      --placements {output,tok_embeddings}=S(0) --placements R";
    let options = "--map llama:hf:meta --set h=8 --set k=4 --mesh tp=4 --to torch-ranks --tensor-class local";
    let hf = fixture("maps/llama-meta/hf.safetensors");
    let made = env.make("reshard", &hf, "made", &format!("{options} {placements}")).path;
    for rank in 0..4 {
        let [from, to] = [format!("model_world_size_4_rank_{rank}.pt"), format!("consolidated.0{rank}.pth")];
        fs::rename(made.join(from), made.join(to)).unwrap();
    }
    let back = env.make("consolidate", &made, "back.safetensors", "--map llama:hf --set h=8 --set k=4 --assets none");
    assert_same(&read_safetensors(&back.path), &read_safetensors(&hf), "back");
    let whole = "--map llama:meta:titan-0.2 --set h=8 --set k=4 --assets none";
    let [ours, theirs] = [("ours", made), ("theirs", fixture("maps/llama-meta/4-llama3"))]
        .map(|(name, source)| env.make("consolidate", &source, &format!("{name}.safetensors"), whole).path);
    assert_same(&read_safetensors(&ours), &read_safetensors(&theirs), "shards");
}

#[test]
fn shards_of_an_unknown_layout_are_refused_with_the_cause() {
    let env = TestEnv::new();
    let source = fixture("maps/llama-meta/4-llama3");
    let no_last = meta_without(&env, "4-llama3", &["consolidated.03.pth"]);
    let no_last_of_llama2 = meta_without(&env, "4-llama2", &["consolidated.02.pth", "consolidated.03.pth"]);
    let no_second = meta_without(&env, "4-llama3", &["consolidated.01.pth", "none"]);
    let unknown = meta_without(&env, "2-llama3", &["params.json"]);
    let copied_heads = meta_without(&env, "4-llama3", &[]);
    let params = fs::read_to_string(copied_heads.join("params.json")).unwrap();
    fs::write(copied_heads.join("params.json"), params.replace("\"n_kv_heads\": 4", "\"n_kv_heads\": 2")).unwrap();
    let cases: [(&Path, &str, &[&str]); 7] = [
        (&source, "", &["may be a shard", "hint: name the side of a weight map"]),
        (
            &source,
            "--map llama:titan-0.2:hf --exclude rope.freqs",
            &["shards of 4 ranks", "the side llama:titan-0.2 does not declare how they are cut"],
        ),
        (
            &no_last,
            "--map llama:meta:hf",
            &["tok_embeddings.weight: the shards do not form", "S(0) gives [18, 32]", "v is 24 by `vocab_size`"],
        ),
        (
            &no_last_of_llama2,
            "--map llama:meta:hf",
            &["tok_embeddings.weight: the shards do not form", "S(1) gives [24, 16]", "d is 32 by `dim`"],
        ),
        (&no_second, "--map llama:meta:hf", &["missing", "rank 1"]),
        (
            &unknown,
            "--map llama:meta:hf --set h=8 --set k=4 --exclude norm.weight --exclude **.wo.weight --exclude **.w2.weight",
            &["tok_embeddings.weight: the shapes do not tell how the ranks cut the tensor", "--set v=N"],
        ),
        (
            &copied_heads,
            "--map llama:meta:hf",
            &["layers.0.attention.wk.weight", "`(k j r)` is 16", "k is 2 by `n_kv_heads`"],
        ),
    ];
    for (source, options, words) in cases {
        let refused = env.refuse("consolidate", source, "out.safetensors", &format!("{options} --assets none"));
        for word in words {
            assert!(refused.stderr.contains(word), "{options}: {word}: {}", refused.stderr);
        }
    }
    let verified = dtshard(&[&"verify", &source]);
    assert_eq!(verified.code, Some(2));
    assert!(
        verified.err.contains("the tensor may be a shard, and the files do not record its layout"),
        "{}",
        verified.err
    );
    succeed("verify", &[&source], "--map llama:meta:hf");
    let shown = succeed("inspect", &[&source], "");
    assert!(shown.stderr.contains("--map llama:meta:hf"), "{}", shown.stderr);
    assert!(shown.stdout.contains("unknown"), "{}", shown.stdout);
    let shown = succeed("inspect", &[&source], "--map llama:hf");
    assert!(shown.stdout.contains("model.embed_tokens.weight"), "{}", shown.stdout);
}

/// The two sides of the map have the same names.
#[test]
fn experts_that_are_transposed_already_are_refused() {
    let env = TestEnv::new();
    let options = "--map qwen3-vl-moe:hf5:hf4 --assets none";
    let refused = env.refuse("consolidate", file("qwen3-vl-moe", "hf4"), "out.safetensors", options);
    assert!(refused.stderr.contains(".experts.") && refused.stderr.contains("d is "), "{}", refused.stderr);
}

#[test]
fn names_of_files_tell_the_convention() {
    let env = TestEnv::new();
    let folder = env.path("mistral");
    fs::create_dir(&folder).unwrap();
    fs::copy(file("mistral", "meta"), folder.join("consolidated.safetensors")).unwrap();
    fs::copy(fixture("maps/mistral/params.json"), folder.join("params.json")).unwrap();
    let made = env.make("consolidate", &folder, "out.safetensors", "--map auto:hf --assets none");
    assert!(made.run.stderr.contains("SRC is read as llama:meta"), "{}", made.run.stderr);
    assert_same(&read_safetensors(&made.path), &read_safetensors(&file("mistral", "hf")), "Mistral");
    let fits = dtshard(&[&"maps", &folder]);
    assert!(fits.out.lines().nth(1).is_some_and(|line| line.contains("meta")), "{}", fits.out);
}
