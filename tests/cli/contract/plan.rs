//! Tests of parallelize plans on the command line.
//!
//! The placements of each parameter of each family are tested in `plans`; styles, pairs and mesh dims in unit tests of
//! `layout::parallelize`.

use serde_json::Value as Json;

use crate::common::env::TestEnv;
use crate::common::{assert_same, fixture, inspect, read, succeed};
use crate::contract::assert_contains;

const VERL: &str = "verl/global_step_10/actor";

fn placements<'a>(document: &'a Json, name: &str) -> &'a str {
    document["tensors"][name]["placements"].as_str().unwrap_or_else(|| panic!("{name} is plain"))
}

#[test]
fn mesh_and_plan_give_all_placements() {
    let env = TestEnv::new();
    let made = env.make("reshard", VERL, "out", "--mesh dp_shard=2,tp=2 --plan llama --to torch-ranks --verify");
    let found = inspect(&made.path, "--brief");
    for (name, expected) in [
        ("model.model.embed_tokens.weight", "_S(0,2),S(0)"),
        ("model.model.layers.0.self_attn.q_proj.weight", "_S(0,2),S(0)"),
        ("model.model.layers.1.self_attn.o_proj.weight", "S(0),S(1)"),
        ("model.model.layers.1.mlp.down_proj.weight", "S(0),S(1)"),
        ("model.model.norm.weight", "S(0),R"),
        ("model.lm_head.weight", "_S(0,2),S(0)"),
        // Numbered optimizer state gets the placements of its parameter.
        ("optim.state.1.exp_avg", "_S(0,2),S(0)"),
    ] {
        assert_eq!(placements(&found, name), expected, "{name}");
    }
    assert_eq!(found["tensors"]["optim.state.1.step"]["placements"], Json::Null, "nothing to cut");
}

#[test]
fn planned_layouts_of_every_format_keep_the_values() {
    let env = TestEnv::new();
    for (case, options) in [
        ("titan/step-1000", "--mesh dp_replicate=2,dp_shard=2,tp=2 --plan llama --to dcp"),
        ("titan/step-1000", "--mesh tp=3,dp=2 --plan llama --to torch-ranks"),
        ("safetensors/sharded", "--mesh tp=2 --plan llama --to dcp"),
        ("llama_tiny/ranks", "--mesh x=2,y=3 --plan llama --tp x --fsdp y"),
        ("fsdp_tp/dcp", "--mesh a=3 --fsdp a"),
    ] {
        let made = env.make("reshard", case, &case.replace('/', "."), &format!("{options} --overwrite"));
        succeed("verify", &[&made.path, &fixture(case)], "");
        assert_same(&made.tensors(), &read(&fixture(case)), options);
    }
}

#[test]
fn fsdp_without_plan_shards_parameters_and_keeps_buffers_plain() {
    let env = TestEnv::new();
    let made = env.make("reshard", "tp2/ranks", "out", "--mesh dp=2 --fsdp dp");
    let found = inspect(&made.path, "--brief");
    for name in ["model.blocks.0.w2.weight", "model.norm.weight", "optim.state.1.exp_avg"] {
        assert_eq!(placements(&found, name), "S(0)", "{name}");
    }
    assert_eq!(found["tensors"]["model.freqs"]["placements"], Json::Null);
    assert_contains(
        &made.run.stderr,
        &["2 tensors (`freqs`, `seen`) are treated as buffers, so every rank stores them whole, as plain tensors"],
    );
}

#[test]
fn gradients_get_the_placements_of_their_parameters() {
    let env = TestEnv::new();
    let known = fixture("flat_grads/views.flat_layout.json");
    let options = format!("--to torch-ranks --mesh a=2,b=2 --replicate a --fsdp b --flat-layout {}", known.display());
    let made = env.make("reshard", "flat_grads/views", "out", &options);
    let found = inspect(&made.path, "--brief");
    for name in ["model.emb.weight", "grads.emb.weight", "grads.norm.bias"] {
        assert_eq!(placements(&found, name), "R,S(0)", "{name}");
    }
    assert_eq!(found["tensors"]["model.layers.0.scale"]["placements"], Json::Null, "no parameter");
}

#[test]
fn integer_tensors_that_the_source_shards_are_not_buffers() {
    let env = TestEnv::new();
    let cut = env.make("reshard", "partial2/ranks", "cut", "--placements S(0)");
    let again = env.make("reshard", &cut.path, "again", "--mesh fsdp=3 --fsdp fsdp");
    assert_eq!(inspect(&again.path, "")["tensors"]["sum.i64"]["placements"], "S(0)");
}

#[test]
fn placements_override_a_plan() {
    let env = TestEnv::new();
    let options = "--mesh dp=2,tp=2 --plan llama --placements **.down_proj=R,R";
    let found = inspect(&env.make("reshard", VERL, "out", options).path, "--brief");
    assert_eq!(placements(&found, "model.model.layers.0.mlp.down_proj.weight"), "R,R");
    assert_eq!(placements(&found, "model.model.layers.0.mlp.up_proj.weight"), "_S(0,2),S(0)");
}

#[test]
fn parameters_without_a_style_give_a_note_with_a_matching_plan() {
    let env = TestEnv::new();
    let source = env.vectors(
        "model.safetensors",
        &[
            ("model.layers.0.self_attn.q_proj.bias", 8),
            ("model.layers.0.self_attn.q_norm.weight", 4),
            ("model.layers.0.self_attn.rotary_emb.inv_freq", 4),
        ],
    );
    let names = "1 tensor (`model.layers.0.self_attn.q_norm.weight`) matches no style of the plan, so";
    let plain = env.make("reshard", &source, "tp", "--mesh tp=2 --plan llama --to torch-ranks");
    assert_contains(
        &plain.run.stderr,
        &[&format!("{names} every rank stores it whole, as a plain tensor; --plan qwen3 matches more names")],
    );
    let sharded = env.make("reshard", &source, "dp", "--mesh dp=2,tp=2 --plan llama --to torch-ranks -v");
    let buffers = "; mark buffers with --placements 'NAME=plain'";
    assert_contains(
        &sharded.run.stderr,
        &[&format!("{names} it is sharded on dp only; --plan qwen3 matches more names{buffers}")],
    );
    let options = "--mesh dp=2,tp=2 --plan llama --to torch-ranks --placements **.q_norm=plain";
    let ruled = env.make("reshard", &source, "ruled", options);
    assert!(!ruled.run.stderr.contains("no style of the plan"), "{}", ruled.run.stderr);
    let found = inspect(&ruled.path, "--brief");
    assert_eq!(found["tensors"]["model.layers.0.self_attn.q_norm.weight"]["placements"], Json::Null, "plain");
    assert_contains(
        &sharded.run.stderr,
        &["inv_freq`) is treated as a buffer", "colwise: 1 tensor", "no style: 1 tensor"],
    );
    let found = inspect(&sharded.path, "--brief");
    assert_eq!(placements(&found, "model.layers.0.self_attn.q_norm.weight"), "S(0),R");
}

#[test]
fn split_attention_heads_give_a_warning() {
    let env = TestEnv::new();
    let stderr_of =
        |mesh: &str| succeed("reshard", &[&fixture(VERL)], &format!("{mesh} --plan llama --dry-run")).stderr;
    assert_contains(
        &stderr_of("--mesh tp=4"),
        &[
            "4 tensors (`model.layers.0.self_attn.k_proj.weight`, ",
            "cut within attention heads, because num_key_value_heads is 2 and tp is 4",
        ],
    );
    assert!(!stderr_of("--mesh dp=2,tp=2").contains("heads"));
    // Without config.json, the number of attention heads is unknown.
    let made = env.make("reshard", VERL, "dcp", "--to dcp --include model");
    std::fs::remove_dir_all(made.path.join("huggingface")).unwrap();
    let run = succeed("reshard", &[&made.path], "--mesh tp=4 --plan llama --dry-run");
    assert!(!run.stderr.contains("heads"), "{}", run.stderr);
}

#[test]
fn invalid_plan_options_are_refused() {
    let env = TestEnv::new();
    for options in [
        "--mesh tp=2 --plan lama",
        "--mesh tp=2 --plan gpt2",
        "--mesh dp=2 --plan llama",
        "--mesh dp=2,tp=2 --plan llama --fsdp pd",
        "--mesh pp=2,tp=2 --plan llama",
        "--mesh dp=2,tp=2 --plan llama --fsdp tp --tp tp",
        "--mesh dp=2,tp=2 --fsdp dp",
        "--mesh fsdp=2 --fsdp fsdp --to fsdp-flat",
    ] {
        env.refuse("reshard", VERL, "out", options);
    }
}

const STYLES: &str = r#"
fsdp = "data"

[styles]
"**.down_proj" = "replicate"
[styles."model.layers.*"]
mlp = "pairwise(gate_proj,up_proj)"
"self_attn.{q,k,v}_proj" = "colwise"
"#;

#[test]
fn styles_of_a_layout_file_override_a_plan() {
    let env = TestEnv::new();
    let file = env.write("styles.toml", STYLES);
    let file = file.display();
    let placements_with = |name: &str, options: &str| {
        let found = inspect(&env.make("reshard", VERL, name, &format!("--mesh data=2,tp=2 {options}")).path, "--brief");
        let names = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj"];
        names.map(|name| placements(&found, &format!("model.model.layers.0.{name}.weight")).to_owned())
    };
    let styled = ["_S(0,2),S(0)", "S(0),S(1)", "S(0),R", "_S(0,2),S(0)", "S(0),R"];
    assert_eq!(placements_with("alone", &format!("--plan {file}")), styled);
    assert_eq!(placements_with("layout", &format!("--layout {file}")), styled);
    let behind = ["_S(0,2),S(0)", "S(0),S(1)", "S(0),R", "_S(0,2),S(0)", "S(0),S(1)"];
    assert_eq!(placements_with("behind", &format!("--layout {file} --plan llama")), behind);
}

#[test]
fn style_none_shards_a_module_by_fsdp_only() {
    let env = TestEnv::new();
    let file = env.write("styles.toml", "[styles]\n\"**.norm\" = \"none\"\n");
    let options = format!("--mesh dp=2,tp=2 --plan llama --layout {} -v", file.display());
    let made = env.make("reshard", VERL, "out", &options);
    let layout = succeed("inspect", &[&made.path], "--layout").stdout;
    assert_contains(&layout, &["tensors = \"model.norm.weight\"\nplacements = \"S(0),R\"\nslice = \"dp\"\n"]);
    assert_eq!(layout.matches("slice").count(), 1, "{layout}");
    assert_contains(&made.run.stderr, &["none: 1 tensor", "sequence: "]);
    assert!(!made.run.stderr.contains("no style of the plan"), "{}", made.run.stderr);
}

/// Each DTensor has the slice `tp` as its mesh, as `parallelize_module` gives it within DDP. Norms are plain tensors.
#[test]
fn plan_within_ddp_uses_the_slice_of_tensor_parallelism() {
    let env = TestEnv::new();
    let file =
        env.write("ddp.toml", "plan = \"llama\"\nddp = \"data\"\n[styles]\n\"**.{norm,*_layernorm}\" = \"none\"\n");
    let by_file = env.make("reshard", VERL, "by_file", &format!("--mesh data=2,tp=2 --layout {}", file.display()));
    let styles = env.write("styles.toml", "[styles]\n\"**.{norm,*_layernorm}\" = \"none\"\n");
    let options = format!("--mesh data=2,tp=2 --ddp data --plan llama --layout {}", styles.display());
    let made = env.make("reshard", VERL, "made", &options);
    succeed("verify", &[&fixture(VERL), &made.path], "");
    let layout = succeed("inspect", &[&made.path], "--layout").stdout;
    assert_eq!(layout, succeed("inspect", &[&by_file.path], "--layout").stdout);
    let found = inspect(&made.path, "--brief");
    assert_eq!(placements(&found, "model.model.layers.0.self_attn.q_proj.weight"), "R,S(0)");
    assert_contains(&layout, &["slice = \"tp\""]);
    assert!(found["tensors"]["model.model.norm.weight"]["placements"].is_null(), "{found}");
    env.refuse("reshard", VERL, "out", "--mesh dp=2,tp=2 --ddp dp --fsdp dp --plan llama");
    env.refuse("reshard", VERL, "out", "--mesh dp=2,tp=2 --ddp data --plan llama");
}

#[test]
fn errors_in_a_plan_file_have_their_line() {
    let env = TestEnv::new();
    let cases = [
        "plan = \"lama\"",
        "tp = \"tp\"\n[styles]\n\"**.q_prj\" = \"colwise\"",
        "[styles]\n\"**.up_proj\" = \"colwise\"\nhead = \"rowwise\"",
        "[styles]\nmodel = \"pairwise\"",
        "[styles]\n\"**.layers.*.mlp\" = \"pairwise\"",
        "[styles]\n\"**.layers.*.mlp\" = \"pairwise(up_proj,down_prj)\"",
        "[styles]\n\"**.layers.*.mlp\" = \"pairwise(up_proj)\"",
        "plan = \"llama\"\nsplit = \"balanced\"",
        "split = \"balanced\"",
    ];
    for text in cases {
        let file = env.write("plan.toml", text);
        let options = format!("--mesh dp=2,tp=2 --plan {}", file.display());
        env.refuse("reshard", VERL, "out", &options);
    }
    // The `local` format records the order of the state dict, but safetensors files have sorted names.
    let file = env.write("plan.toml", "[styles]\n\"**.layers.*.self_attn\" = \"pairwise\"\n\"**.v_proj\" = \"none\"");
    let options = format!("--mesh tp=2 --plan {}", file.display());
    let made = env.make("reshard", VERL, "made", &options);
    let local = env.make("reshard", VERL, "local", "--to local");
    let again = env.make("reshard", &local.path, "again", &format!("{options} --to torch-ranks"));
    let layouts = [made, again].map(|made| inspect(&made.path, "")["tensors"].clone());
    let placements = |at: usize, name: &str| layouts[at][name]["placements"].clone();
    for name in ["q_proj", "k_proj", "o_proj"].map(|own| format!("model.model.layers.0.self_attn.{own}.weight")) {
        assert_eq!(placements(0, &name), placements(1, &name), "{name}");
    }
    let file = env.write("plan.toml", "[styles]\n\"**.layers.*.mlp\" = \"pairwise\"");
    let options = format!("--mesh tp=2 --plan {}", file.display());
    env.refuse("reshard", "safetensors/sharded", "out", &options);
}
