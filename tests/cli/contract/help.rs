//! Tests of the help of each verb, of errors about flat layouts, and of the tables of `inspect`.

use dtshard::Format;

use crate::common::env::TestEnv;
use crate::common::{expect, fixture, run, succeed};

/// Returns the formats that the help of a verb lists for `--to`.
fn formats(verb: &str) -> Vec<String> {
    let help = run([verb, "--help"]).stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, to) = help.split_once("--to <FORMAT>").unwrap();
    let (_, values) = to.split_once("[possible values: ").unwrap();
    values.split_once(']').unwrap().0.split(", ").map(String::from).collect()
}

#[test]
fn help_of_a_verb_shows_the_formats_that_it_writes() {
    for verb in ["reshard", "unshard", "consolidate", "flatten"] {
        let written = Format::ALL.iter().filter(|format| format.writing_verbs().contains(&verb));
        assert_eq!(formats(verb), written.map(|format| format.name()).collect::<Vec<_>>(), "{verb}");
    }
    assert_eq!(formats("flatten"), ["fsdp-flat"]);
    let env = TestEnv::new();
    // A format that another verb writes is an error that names that verb.
    let outcome = expect(2, "unshard", &[&fixture("fsdp4/dcp"), &env.path("out")], "--to dcp --json");
    assert_eq!(outcome.json()["error"]["kind"], "usage");
    assert!(outcome.stderr.contains("dtshard reshard"), "{}", outcome.stderr);
}

#[test]
fn help_of_a_verb_begins_with_its_arguments() {
    for verb in ["reshard", "unshard", "flatten", "consolidate", "verify", "inspect"] {
        let help = run([verb, "--help"]).stdout;
        let heading = help.lines().find(|line| line.ends_with(':') && !line.starts_with(' ')).unwrap();
        assert_eq!(heading, "Arguments:", "{verb}");
    }
}

#[test]
fn error_about_flat_parameters_is_short_and_names_a_page() {
    let env = TestEnv::new();
    let outcome = expect(2, "consolidate", &[&fixture("flat2/flat"), &env.path("out")], "");
    assert_eq!(outcome.stderr.lines().count(), 3, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("docs/how-to/fsdp1.md"), "{}", outcome.stderr);
}

#[test]
fn inspect_shows_boxes_of_dcp_as_shards() {
    let env = TestEnv::new();
    let source = env.vectors("a.safetensors", &[("w", 16), ("b", 5)]);
    let sharded = env.make("reshard", &source, "dcp", "--mesh dp=8").path;
    let outcome = succeed("inspect", &[&sharded], "");
    let placements = |name: &str| outcome.stdout.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(placements("w ").contains("S(0) x 8"), "{}", outcome.stdout);
    let document = succeed("inspect", &[&sharded], "--json").json();
    assert!(document["tensors"]["w"]["placements"].is_null());
}

#[test]
fn digest_of_all_tensors_is_the_same_in_every_layout_and_format() {
    let env = TestEnv::new();
    let source = fixture("llama_tiny/dcp");
    let digest = |path: &std::path::Path| {
        let shown = succeed("inspect", &[path], "--digest --brief").stdout;
        let line = shown.lines().find(|line| line.starts_with("digest ")).unwrap().to_owned();
        let document = succeed("inspect", &[path], "--digest --json").json();
        let digest = document["digest"].as_str().unwrap().to_owned();
        assert!(line.ends_with(&digest));
        let mut listed: Vec<(String, String)> = document["tensors"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, tensor)| (name.clone(), tensor["digest"].as_str().unwrap().to_owned()))
            .collect();
        listed.sort();
        let mut hasher = blake3::Hasher::new();
        listed.iter().for_each(|(name, digest)| {
            hasher.update(format!("{digest} {}\n", serde_json::to_string(name).unwrap()).as_bytes());
        });
        assert_eq!(digest, format!("blake3:{}", hasher.finalize().to_hex()));
        digest
    };
    let whole = env.make("consolidate", &source, "whole.safetensors", "--everything").path;
    let resharded = env.make("reshard", &source, "resharded", "--mesh dp=3").path;
    let torch = env.make("unshard", &source, "whole.pt", "").path;
    let expected = digest(&source);
    for path in [&whole, &resharded, &torch] {
        assert_eq!(digest(path), expected, "{}", path.display());
    }
    let model = env.make("consolidate", &source, "model.safetensors", "").path;
    assert_ne!(digest(&model), expected);
}
