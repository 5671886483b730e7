//! Tests of the output of `inspect`, as text and as JSON.
//!
//! Tested in other modules:
//!
//! - Summaries, tables, `--tensor`, `--draw`, `--brief`: the snapshots of `inspect` beside this folder.
//! - Digests are equal for every layout and format: `conversions::digests_do_not_depend_on_layout_or_format`;
//!   `common::Tensor` computes the expected digests from dtype name, shape and bytes.

use serde_json::{Value as Json, json};

use crate::common::env::TestEnv;
use crate::common::{fixture, inspect, read, succeed};
use crate::contract::assert_contains;

fn keys(value: &Json) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn json_document_has_the_documented_keys() {
    let found = inspect(&fixture("fsdp_tp/ranks"), "");
    for key in ["format", "mesh", "meshes", "series", "tensors", "objects", "bytes"] {
        assert!(found.get(key).is_some(), "{key}");
    }
    assert_eq!(found["format"], "torch-ranks");
    assert_eq!(found["mesh"], json!([["dp", 2], ["tp", 2]]));
    assert_eq!(found["series"], json!(["model", "extra_state", "optim"]));
    let tensor = &found["tensors"]["model.blocks.0.wq.weight"];
    assert_eq!((&tensor["dtype"], &tensor["shape"]), (&json!("f32"), &json!([7, 5])));
    assert_eq!(tensor["placements"], "_S(0,2),S(0)");
    assert_eq!(tensor["mesh"], 0);
    assert_eq!(tensor["chunks"].as_array().unwrap().len(), 4);
    for key in ["offsets", "sizes", "rank", "file"] {
        assert!(tensor["chunks"][0].get(key).is_some(), "{key}");
    }
    assert_eq!(tensor["chunks"][0]["rank"], 0);
    assert_eq!(tensor["chunks"][0]["file"], "model_world_size_4_rank_0.pt");

    let found = inspect(&fixture("fsdp4/dcp"), "");
    assert_eq!(found["mesh"], json!(null));
    assert_eq!(found["tensors"]["model.embed.weight"]["placements"], json!(null));
    assert_eq!(found["tensors"]["model.embed.weight"]["chunks"][0]["rank"], json!(null));
    assert_eq!(found["objects"]["step"], json!({ "type": "int", "value": 1000 }));
    let whole: u64 = found["bytes"].as_u64().unwrap();
    assert_eq!(whole, 868 + 24 + 17 * 4 + 2 * (868 - 16 - 8), "elements times their size");
}

#[test]
fn brief_omits_chunks_and_digest_adds_digests() {
    let source = fixture("fsdp_tp/ranks");
    let tensor = |options: &str| inspect(&source, options)["tensors"]["model.embed.weight"].clone();
    assert!(keys(&tensor("")).contains(&"chunks"));
    assert!(!keys(&tensor("--brief")).contains(&"chunks"));
    assert!(!keys(&tensor("")).contains(&"digest"));
    let both = tensor("--brief --digest");
    assert_eq!(both["digest"], json!(read(&source)["model.embed.weight"].digest));
    assert!(both["digest"].as_str().unwrap().starts_with("blake3:"));
    assert_eq!(both["digest"].as_str().unwrap().len(), "blake3:".len() + 64);
}

#[test]
fn text_output_is_a_summary_and_a_table() {
    let text = succeed("inspect", &[&fixture("fsdp4/ranks")], "").stdout;
    let (summary, table) = text.split_once("\n\n").unwrap();
    for word in ["format ", "parameters ", "step ", "mesh ", "dtype ", "series "] {
        assert!(summary.lines().any(|line| line.starts_with(word)), "{word}: {summary}");
    }
    assert!(table.starts_with("tensor "), "{table}");
    let env = TestEnv::new();
    let brief = succeed("inspect", &[&fixture("fsdp4/ranks")], "--brief").stdout;
    assert_eq!(format!("{summary}\n"), brief);
    let drawn = succeed("inspect", &[&fixture("fsdp4/ranks")], "--tensor model.embed.weight --draw").stdout;
    assert_contains(&drawn, &["┌", "S(0) on dp=4", "│     3      │"]);
    assert!(env.names().is_empty());
}

#[test]
fn digest_changes_with_dtype_and_survives_a_lossless_round_trip() {
    let env = TestEnv::new();
    let source = env.vectors("m.safetensors", &[("w", 4)]);
    let digest = |path: &std::path::Path| inspect(path, "--digest")["tensors"]["w"]["digest"].clone();
    let cast = env.make("unshard", &source, "cast.pt", "--dtype f64").path;
    assert_ne!(digest(&source), digest(&env.make("unshard", &source, "bf16.pt", "--dtype bf16").path));
    let back =
        env.make("unshard", &env.make("unshard", &source, "wide.pt", "--dtype w=f64").path, "back.pt", "--dtype w=f32");
    assert_eq!(digest(&source), digest(&back.path), "f64 holds every f32");
    assert!(cast.is_file());
}
