//! Tests of the `local` format with a document and rank files that contradict each other.
//!
//! `format::local::tests` covers documents that are invalid by themselves.

use std::fs;
use std::path::PathBuf;

use crate::common::env::TestEnv;
use crate::corrupt::{dtshard, edit, fixture, replace};

/// Returns a test environment with the fixture `fsdp4` converted to two ranks, and the folder of the result.
fn valid_source() -> (TestEnv, PathBuf) {
    let env = TestEnv::new();
    let source = env.path("src");
    let args: [&dyn AsRef<std::ffi::OsStr>; 7] =
        [&"reshard", &fixture("fsdp4/ranks"), &source, &"--to", &"local", &"--mesh", &"dp=2"];
    dtshard(&args).assert_succeeded();
    (env, source)
}

/// Replaces a text in one of the files, and asserts that the source is refused.
fn assert_bad_after_replacing(file: &str, from: &str, to: &str) {
    let (env, source) = valid_source();
    edit(&source.join(file), |bytes| replace(bytes, from.as_bytes(), to.as_bytes()));
    env.assert_bad_input(&source);
}

const EMBED: &str = "\"model.embed.weight\": {\"dtype\": \"f32\", \"shape\": [10, 3]";

#[test]
fn layout_document_that_differs_from_the_files_is_refused() {
    let assert_bad_with_embedding = |to: &str| {
        let (env, source) = valid_source();
        edit(&source.join("layout.json"), |bytes| replace(bytes, EMBED.as_bytes(), to.as_bytes()));
        env.assert_bad_input(&source);
    };
    assert_bad_with_embedding(&EMBED.replace("f32", "i32"));
    assert_bad_with_embedding(&EMBED.replace("10", "12"));
    assert_bad_with_embedding(&EMBED.replace("[10, 3]", "[3, 10]"));
    assert_bad_with_embedding(&EMBED.replace("[10, 3]", "[10, 3, 0]"));
    let placements = "\"class\": \"dtensor\", \"mesh\": 0, \"placements\": \"S(0)\"}";
    let embed = format!("{EMBED}, {placements}");
    for text in ["S(1)", "R", "P(sum)", "_S(0,4)"] {
        let (env, source) = valid_source();
        let to = embed.replace("S(0)", text);
        edit(&source.join("layout.json"), |bytes| replace(bytes, embed.as_bytes(), to.as_bytes()));
        env.assert_bad_input(&source);
    }
    // The sizes of the split do not add up to the size of the dim.
    let (env, source) = valid_source();
    let to = embed.replace("\"S(0)\"", "\"S(0)\", \"splits\": [\"5+6\"]");
    edit(&source.join("layout.json"), |bytes| replace(bytes, embed.as_bytes(), to.as_bytes()));
    env.assert_bad_input(&source);
}

#[test]
fn rank_files_that_differ_from_the_document_are_refused() {
    let other = "\"model.embed.weighs\"";
    assert_bad_after_replacing("rank-00001.safetensors", "\"model.embed.weight\"", other);
    assert_bad_after_replacing("rank-00000.safetensors", "[5,3]", "[3,5]");
    assert_bad_after_replacing("rank-00000.safetensors", "\"F32\"", "\"I32\"");
    let (env, source) = valid_source();
    fs::copy(source.join("rank-00000.safetensors"), source.join("rank-00002.safetensors")).unwrap();
    env.assert_bad_input(&source);
    let (env, source) = valid_source();
    edit(&source.join("layout.json"), |bytes| {
        let text = String::from_utf8(std::mem::take(bytes)).unwrap();
        let kept = text.lines().filter(|line| !line.contains("\"model.freqs\""));
        *bytes = kept.collect::<Vec<_>>().join("\n").into_bytes();
    });
    env.assert_bad_input(&source);
    let (env, source) = valid_source();
    edit(&source.join("rank-00001.safetensors"), |bytes| bytes.truncate(bytes.len() - 1));
    env.assert_bad_input(&source);
    let (env, source) = valid_source();
    edit(&source.join("rank-00001.safetensors"), Vec::clear);
    env.assert_bad_input(&source);
}

#[test]
fn differing_plain_tensors_are_refused() {
    let (env, source) = valid_source();
    edit(&source.join("rank-00001.safetensors"), |bytes| {
        let header = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
        // The widest dtype comes first in the file, and only one tensor has it.
        bytes[8 + header] ^= 1;
    });
    env.assert_bad_input(&source);
}

#[test]
fn malformed_documents_are_refused() {
    for text in ["", "[]", "{}", "{\"version\": 1}", "nul", &"[".repeat(100_000), &"{\"a\":".repeat(100_000)] {
        let (env, source) = valid_source();
        fs::write(source.join("layout.json"), text).unwrap();
        env.assert_bad_input(&source);
    }
    assert_bad_after_replacing("layout.json", "\"world_size\": 2", "\"world_size\": 1");
    assert_bad_after_replacing("layout.json", "\"dp\",2", "\"dp\",16777216");
    assert_bad_after_replacing("layout.json", "\"model.freqs\": {\"dtype\"", "\"../../x\": {\"dtype\"");
    let (env, source) = valid_source();
    edit(&source.join("layout.json"), |bytes| replace(bytes, b"\"version\": 1,\n", b"\"version\": 9,\n"));
    env.assert_unsupported_input(&source);
}

#[test]
fn four_billion_missing_ranks_cost_no_memory() {
    let (env, source) = valid_source();
    edit(&source.join("layout.json"), |bytes| replace(bytes, b"\"world_size\": 2", b"\"world_size\": 4294967295"));
    env.assert_bad_input(&source);
    fs::remove_file(source.join("rank-00000.safetensors")).unwrap();
    dtshard(&[&"verify", &source, &"--allow-missing"]).assert_no_crash().assert_mentions(&["gap"]);
}

#[test]
fn unsafe_objects_in_a_document_are_refused() {
    for (how, class) in [("call", ["os", "system"]), ("call", ["builtins", "eval"]), ("new", ["posix", "system"])] {
        let (env, source) = valid_source();
        let object =
            format!(r#""state": {{"evil": {{"$object": {{"how": "{how}", "class": {class:?}, "args": ["id"]}}}},"#);
        edit(&source.join("layout.json"), |bytes| replace(bytes, b"\"state\": {", object.as_bytes()));
        env.assert_bad_input(&source);
    }
}
