//! Tests of the JSON documents of every verb and of every kind of error. They are compared with reviewed snapshots, in
//! which the parts that depend on the machine are masked.

use std::fs;
use std::path::Path;

use serde_json::Value as Json;

use crate::common::env::TestEnv;
use crate::common::{expect, fixture};
use crate::contract::copy_tree;
use crate::snapshot::assert_snapshot;

/// Returns the text without the paths of this machine and of this run.
fn without_paths(env: &TestEnv, text: &str) -> String {
    text.replace(&env.path("").display().to_string(), "env/").replace(&fixture("").display().to_string(), "fixtures/")
}

/// Compares the JSON document of a run with its snapshot. Parts that depend on the machine are masked.
#[track_caller]
fn assert_document(name: &str, env: &TestEnv, code: i32, verb: &str, paths: &[&Path], options: &str) {
    let outcome = expect(code, verb, paths, &format!("{options} --json"));
    let mut document = outcome.json();
    if let Some(peak) = document.get_mut("peak_bytes") {
        *peak = Json::from("masked");
    }
    let text = serde_json::to_string_pretty(&document).unwrap() + "\n";
    assert_snapshot(&format!("contract/{name}.json"), &without_paths(env, &text));
}

#[test]
fn json_documents_of_every_verb_match_the_snapshots() {
    let env = TestEnv::new();
    let source = fixture("replicated_plain/ranks");
    let shards = env.path("shards");
    assert_document("reshard", &env, 0, "reshard", &[&source, &shards], "--mesh dp=2");
    assert_document("unshard", &env, 0, "unshard", &[&source, &env.path("whole.pt")], "");
    assert_document(
        "consolidate",
        &env,
        0,
        "consolidate",
        &[&fixture("dcp_trainer"), &env.path("model")],
        "--dtype bf16",
    );
    let tied = fixture("torch_file/model.pt");
    let options = "--include embed --include head --tied drop";
    assert_document("consolidate_tied", &env, 0, "consolidate", &[&tied, &env.path("tied.safetensors")], options);
    assert_document("dry_run", &env, 0, "reshard", &[&source], "--mesh dp=2 --to dcp --dry-run");
    assert_document("verify_same", &env, 0, "verify", &[&source, &shards], "");
    assert_document("verify_different", &env, 1, "verify", &[&source, &shards], "--dtype bf16 --rename mask=masks");
    assert_document("inspect", &env, 0, "inspect", &[&source], "--digest");
}

/// Asserts the kind and the keys of an error, and compares its JSON document with the snapshot.
#[track_caller]
fn assert_error_document(kind: &str, env: &TestEnv, verb: &str, paths: &[&Path], options: &str) {
    let text = expect(2, verb, paths, options);
    assert_eq!(text.stdout, "", "{kind}");
    let outcome = expect(2, verb, paths, &format!("{options} --json"));
    let document = outcome.json();
    assert_eq!(document["error"]["kind"], kind);
    for key in ["kind", "message", "file", "fqn", "expected", "found", "hint"] {
        assert!(document["error"].get(key).is_some(), "{kind}: {key}");
    }
    let shown = serde_json::to_string_pretty(&document).unwrap() + "\n";
    assert_snapshot(&format!("contract/error_{kind}.json"), &without_paths(env, &shown));
    assert!(!env.path("out").exists());
}

#[test]
fn errors_of_every_kind_match_the_snapshots() {
    let env = TestEnv::new();
    let out = env.path("out");
    assert_error_document("io", &env, "consolidate", &[&env.path("nowhere"), &out], "");

    let cut = env.path("cut.safetensors");
    let whole = fs::read(fixture("safetensors/single/model.safetensors")).unwrap();
    fs::write(&cut, &whole[..whole.len() - 4]).unwrap();
    assert_error_document("malformed", &env, "consolidate", &[&cut, &out], "");

    let missing = env.path("missing");
    copy_tree(&fixture("fsdp4/ranks"), &missing);
    fs::remove_file(missing.join("model_world_size_4_rank_2.pt")).unwrap();
    assert_error_document("missing", &env, "consolidate", &[&missing, &out], "");
    assert_error_document("coverage", &env, "consolidate", &[&missing, &out], "--allow-missing");

    assert_error_document("unsupported", &env, "unshard", &[&fixture("torch_file/legacy.pt"), &out], "");
    assert_error_document("conflict", &env, "unshard", &[&fixture("conflict/tensor"), &out], "");
    let rule = "--mesh dp=2 --placements S(0) --placements model.w=S(2)";
    assert_error_document("layout", &env, "reshard", &[&fixture("replicated_plain/dcp"), &out], rule);
    assert_error_document("usage", &env, "consolidate", &[&fixture("dcp_trainer"), &out], "--root modle");
}
