//! Tests of names in messages: long lists are shortened, control characters are escaped, and the hint is printed before
//! long lists.

use std::fs;

use crate::common::env::TestEnv;
use crate::common::{Run, expect, fixture, succeed};
use crate::contract::copy_tree;

/// Returns the complete list of names in the JSON document of a failed run.
#[track_caller]
fn listed(run: &Run) -> Vec<String> {
    serde_json::from_value(run.json()["error"]["names"].clone()).unwrap()
}

#[test]
fn thousand_missing_files_are_a_range_in_the_message_and_listed_in_json() {
    let env = TestEnv::new();
    let whole = env.vectors("whole.safetensors", &[("w", 1000)]);
    let sharded = env.make("reshard", &whole, "sharded", "--mesh dp=1000 --to dcp").path;
    for entry in fs::read_dir(&sharded).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "distcp") {
            fs::remove_file(path).unwrap();
        }
    }
    let run = expect(2, "consolidate", &[&sharded, &env.path("out")], "--json");
    assert!(run.stderr.contains("__0_0.distcp .. __999_0.distcp"), "{}", run.stderr);
    let findings = expect(1, "verify", &[&sharded], "--json").json();
    assert_eq!(findings["different"][0]["names"].as_array().unwrap().len(), 1000);
    assert!(run.stderr.lines().all(|line| line.len() < 400), "{}", run.stderr);
    assert_eq!(run.json()["error"]["kind"], "missing");
    let mut expected: Vec<String> = (0..1000).map(|rank| format!("__{rank}_0.distcp")).collect();
    let mut names = listed(&run);
    names.sort();
    expected.sort();
    assert_eq!(names, expected);
}

#[test]
fn missing_ranks_are_listed_as_ranges() {
    let env = TestEnv::new();
    let source = env.path("ranks");
    fs::create_dir(&source).unwrap();
    let own = fixture("fsdp4/ranks/model_world_size_4_rank_1.pt");
    fs::copy(own, source.join("model_world_size_4000000000_rank_1.pt")).unwrap();
    let run = expect(2, "consolidate", &[&source, &env.path("out")], "--json");
    assert_eq!(run.json()["error"]["kind"], "missing");
    assert_eq!(listed(&run), ["rank 0", "ranks 2 .. 3999999999"]);
}

/// A name with characters that control a terminal, change the direction of text or are invisible.
const HOSTILE: &str = "w\u{202e}\u{200b}\u{7f}\u{9b}2J\u{2066}\u{ad}\u{feff}\u{e0041}\nb: sound";

fn is_hostile(c: char) -> bool {
    c != '\n' && (c.is_control() || HOSTILE.chars().any(|other| other == c && !c.is_ascii()))
}

#[test]
fn invisible_characters_of_names_are_escaped_in_every_output() {
    let env = TestEnv::new();
    let (first, other) = (env.vectors("a.safetensors", &[(HOSTILE, 4)]), env.vectors("b.safetensors", &[("w", 4)]));
    let out = env.path("out.safetensors");
    let shown = [
        succeed("inspect", &[&first], ""),
        succeed("inspect", &[&first], "--json"),
        succeed("inspect", &[&first], "--draw --tensor **"),
        expect(1, "verify", &[&first, &other], ""),
        expect(1, "verify", &[&first, &other], "--json"),
        expect(2, "consolidate", &[&first, &out], "--include nothing"),
        expect(2, "consolidate", &[&first, &out], "--include nothing --json"),
    ];
    for run in &shown {
        assert!(!run.stdout.chars().chain(run.stderr.chars()).any(is_hostile), "{run:?}");
        // No line that the program prints begins with a part of a name after a line break.
        assert!(!run.stdout.lines().chain(run.stderr.lines()).any(|line| line.starts_with("b: sound")), "{run:?}");
    }
    assert!(shown[1].json()["tensors"].get(HOSTILE).is_some(), "JSON has the name as it is");
}

#[test]
fn hint_of_verify_precedes_a_shortened_list_of_names() {
    let env = TestEnv::new();
    let source = fixture("llama_tiny/dcp");
    let model = env.make("consolidate", &source, "model.safetensors", "").path;
    let run = expect(1, "verify", &[&source, &model], "");
    let lines: Vec<&str> = run.stderr.lines().collect();
    let at = |word: &str| lines.iter().position(|line| line.contains(word)).unwrap();
    assert!(at("--root model") < at("findings"), "{}", run.stderr);
    assert!(run.stdout.lines().count() < 20, "{}", run.stdout);
    let all = expect(1, "verify", &[&source, &model], "-v");
    assert!(all.stdout.lines().count() > 60, "{}", all.stdout);
}

#[test]
fn difference_has_its_index() {
    let env = TestEnv::new();
    let (left, right) = (env.path("left.safetensors"), env.path("right.safetensors"));
    let header = r#"{"w":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}   "#;
    let mut bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 48]].concat();
    fs::write(&left, &bytes).unwrap();
    *bytes.last_mut().unwrap() = 1;
    fs::write(&right, &bytes).unwrap();
    let different = expect(1, "verify", &[&left, &right], "--json").json()["different"].clone();
    assert_eq!(different.as_array().unwrap().len(), 1);
    assert!(different[0]["detail"].as_str().unwrap().contains("[2, 3]"), "{different}");
}

#[test]
fn damage_found_by_several_checks_is_one_finding() {
    let env = TestEnv::new();
    let (source, whole) = (fixture("fsdp4/dcp"), env.path("damaged"));
    copy_tree(&source, &whole);
    let file = whole.join("__0_0.distcp");
    // The first item of the data file is no longer an archive.
    let mut bytes = fs::read(&file).unwrap();
    bytes[..4].fill(0);
    fs::write(&file, bytes).unwrap();
    let run = expect(1, "verify", &[&whole, &source], "--json");
    let mut found: Vec<String> = run.json()["different"]
        .as_array()
        .unwrap()
        .iter()
        .map(|finding| format!("{} {}", finding["kind"], finding["detail"]))
        .collect();
    let number = found.len();
    found.dedup();
    assert!(number > 0);
    assert_eq!(found.len(), number, "{found:?}");
}

#[test]
fn verify_hint_names_the_differing_prefix() {
    let env = TestEnv::new();
    let (plain, below) = (env.path("plain.safetensors"), env.path("below.safetensors"));
    env.vectors("plain.safetensors", &[("a.w", 2), ("b.w", 3)]);
    env.vectors("below.safetensors", &[("model.a.w", 2), ("model.b.w", 3)]);
    for (source, other, option) in [(&below, &plain, "--root model"), (&plain, &below, "--add-prefix model.")] {
        let run = expect(1, "verify", &[source, other], "");
        assert!(run.stderr.contains(option), "{}", run.stderr);
        succeed("verify", &[source, other], option);
    }
}
