//! `--json` and `--help` as scripts and people see them, each in a file that a person has looked at. What depends on
//! the machine is masked.

use std::fs;
use std::path::Path;

use serde_json::Value as Json;

use crate::common::env::TestEnv;
use crate::common::{expect, fixture};
use crate::contract::copy_tree;
use crate::snapshot::assert_snapshot;

/// Without the places of this machine and of this run.
fn portable(env: &TestEnv, text: &str) -> String {
    text.replace(&env.path("").display().to_string(), "env/").replace(&fixture("").display().to_string(), "fixtures/")
}

/// The document of a run, with what depends on the machine masked.
#[track_caller]
fn document(name: &str, env: &TestEnv, code: i32, verb: &str, paths: &[&Path], options: &str) {
    let outcome = expect(code, verb, paths, &format!("{options} --json"));
    let mut document = outcome.json();
    if let Some(peak) = document.get_mut("peak_bytes") {
        *peak = Json::from("masked");
    }
    let text = serde_json::to_string_pretty(&document).unwrap() + "\n";
    assert_snapshot(&format!("contract/{name}.json"), &portable(env, &text));
}

#[test]
fn every_verb_has_its_document() {
    let env = TestEnv::new();
    let source = fixture("replicated_plain/ranks");
    let shards = env.path("shards");
    document("reshard", &env, 0, "reshard", &[&source, &shards], "--mesh dp=2");
    document("unshard", &env, 0, "unshard", &[&source, &env.path("whole.pt")], "");
    document("consolidate", &env, 0, "consolidate", &[&fixture("dcp_trainer"), &env.path("model")], "--dtype bf16");
    let tied = fixture("torch_file/model.pt");
    let options = "--include embed --include head --tied drop";
    document("consolidate_tied", &env, 0, "consolidate", &[&tied, &env.path("tied.safetensors")], options);
    document("dry_run", &env, 0, "reshard", &[&source], "--mesh dp=2 --to dcp --dry-run");
    document("verify_same", &env, 0, "verify", &[&source, &shards], "");
    document("verify_different", &env, 1, "verify", &[&source, &shards], "--dtype bf16 --exclude model.mask");
    document("inspect", &env, 0, "inspect", &[&source], "--digest");
}

/// What is said of an error and its document.
#[track_caller]
fn error(kind: &str, env: &TestEnv, verb: &str, paths: &[&Path], options: &str) {
    let text = expect(2, verb, paths, options);
    assert_eq!(text.stdout, "", "{kind}");
    let outcome = expect(2, verb, paths, &format!("{options} --json"));
    let document = outcome.json();
    assert_eq!(document["error"]["kind"], kind);
    for key in ["kind", "message", "file", "fqn", "expected", "found", "hint"] {
        assert!(document["error"].get(key).is_some(), "{kind}: {key}");
    }
    let shown = serde_json::to_string_pretty(&document).unwrap() + "\n";
    assert_snapshot(&format!("contract/error_{kind}.json"), &portable(env, &shown));
    assert!(!env.path("out").exists());
}

#[test]
fn every_kind_of_error_says_what_where_and_what_to_do() {
    let env = TestEnv::new();
    let out = env.path("out");
    error("io", &env, "consolidate", &[&env.path("nowhere"), &out], "");

    let cut = env.path("cut.safetensors");
    let whole = fs::read(fixture("safetensors/single/model.safetensors")).unwrap();
    fs::write(&cut, &whole[..whole.len() - 4]).unwrap();
    error("malformed", &env, "consolidate", &[&cut, &out], "");

    let missing = env.path("missing");
    copy_tree(&fixture("fsdp4/ranks"), &missing);
    fs::remove_file(missing.join("model_world_size_4_rank_2.pt")).unwrap();
    error("missing", &env, "consolidate", &[&missing, &out], "");
    error("coverage", &env, "consolidate", &[&missing, &out], "--allow-missing");

    error("unsupported", &env, "unshard", &[&fixture("torch_file/legacy.pt"), &out], "");
    error("conflict", &env, "unshard", &[&fixture("conflict/tensor"), &out], "");
    let rule = "--mesh dp=2 --placements S(0) --placements model.w=S(2)";
    error("layout", &env, "reshard", &[&fixture("replicated_plain/dcp"), &out], rule);
    error("usage", &env, "consolidate", &[&fixture("dcp_trainer"), &out], "--root modle");
}
