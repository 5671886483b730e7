//! `--json` and `--help` as scripts and people see them, each in a file that a person has looked at. What depends on
//! the machine is masked.

use std::fs;
use std::path::Path;

use serde_json::Value as Json;

use crate::common::{expect, fixture, run};
use crate::contract::{Desk, copy_tree};
use crate::snapshot::assert_snapshot;

/// Without the places of this machine and of this run.
fn portable(desk: &Desk, text: &str) -> String {
    text.replace(&desk.path("").display().to_string(), "desk/").replace(&fixture("").display().to_string(), "fixtures/")
}

/// The document of a run, with what depends on the machine masked.
#[track_caller]
fn document(name: &str, desk: &Desk, code: i32, verb: &str, paths: &[&Path], options: &str) {
    let outcome = expect(code, verb, paths, &format!("{options} --json"));
    let mut document = outcome.json();
    if let Some(peak) = document.get_mut("peak_bytes") {
        *peak = Json::from("masked");
    }
    let text = serde_json::to_string_pretty(&document).unwrap() + "\n";
    assert_snapshot(&format!("contract/{name}.json"), &portable(desk, &text));
}

#[test]
fn every_verb_has_its_help() {
    for verb in ["reshard", "unshard", "flatten", "consolidate", "verify", "completions", "man"] {
        assert_snapshot(&format!("help_{verb}.txt"), &run([verb, "--help"]).stdout);
    }
}

#[test]
fn every_verb_has_its_document() {
    let desk = Desk::new();
    let source = fixture("replicated_plain/ranks");
    let shards = desk.path("shards");
    document("reshard", &desk, 0, "reshard", &[&source, &shards], "--mesh dp=2");
    document("unshard", &desk, 0, "unshard", &[&source, &desk.path("whole.pt")], "");
    document("consolidate", &desk, 0, "consolidate", &[&fixture("dcp_trainer"), &desk.path("model")], "--dtype bf16");
    let tied = fixture("torch_file/model.pt");
    let options = "--include embed --include head --tied drop";
    document("consolidate_tied", &desk, 0, "consolidate", &[&tied, &desk.path("tied.safetensors")], options);
    document("dry_run", &desk, 0, "reshard", &[&source], "--mesh dp=2 --to dcp --dry-run");
    document("verify_same", &desk, 0, "verify", &[&source, &shards], "");
    document("verify_different", &desk, 1, "verify", &[&source, &shards], "--dtype bf16 --exclude model.mask");
    document("inspect", &desk, 0, "inspect", &[&source], "--digest");
}

/// What is said of an error and its document.
#[track_caller]
fn error(kind: &str, desk: &Desk, verb: &str, paths: &[&Path], options: &str) {
    let text = expect(2, verb, paths, options);
    assert_eq!(text.stdout, "", "{kind}");
    assert_snapshot(&format!("contract/error_{kind}.txt"), &portable(desk, &text.stderr));
    let outcome = expect(2, verb, paths, &format!("{options} --json"));
    let document = outcome.json();
    assert_eq!(document["error"]["kind"], kind);
    for key in ["kind", "message", "file", "fqn", "expected", "found", "hint"] {
        assert!(document["error"].get(key).is_some(), "{kind}: {key}");
    }
    let shown = serde_json::to_string_pretty(&document).unwrap() + "\n";
    assert_snapshot(&format!("contract/error_{kind}.json"), &portable(desk, &shown));
    assert!(!desk.path("out").exists());
}

#[test]
fn every_kind_of_error_says_what_where_and_what_to_do() {
    let desk = Desk::new();
    let out = desk.path("out");
    error("io", &desk, "consolidate", &[&desk.path("nowhere"), &out], "");

    let cut = desk.path("cut.safetensors");
    let whole = fs::read(fixture("safetensors/single/model.safetensors")).unwrap();
    fs::write(&cut, &whole[..whole.len() - 4]).unwrap();
    error("malformed", &desk, "consolidate", &[&cut, &out], "");

    let missing = desk.path("missing");
    copy_tree(&fixture("fsdp4/ranks"), &missing);
    fs::remove_file(missing.join("model_world_size_4_rank_2.pt")).unwrap();
    error("missing", &desk, "consolidate", &[&missing, &out], "");
    error("coverage", &desk, "consolidate", &[&missing, &out], "--allow-missing");

    error("unsupported", &desk, "unshard", &[&fixture("torch_file/legacy.pt"), &out], "");
    error("conflict", &desk, "unshard", &[&fixture("conflict/tensor"), &out], "");
    let rule = "--mesh dp=2 --placements S(0) --placements model.w=S(2)";
    error("layout", &desk, "reshard", &[&fixture("replicated_plain/dcp"), &out], rule);
    error("usage", &desk, "consolidate", &[&fixture("dcp_trainer"), &out], "--root modle");
}
