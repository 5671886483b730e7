//! Folders of rank files whose document and files do not belong together.
//!
//! What a document may not say by itself: `format::local::tests`.

use std::fs;
use std::path::PathBuf;

use crate::common::env::TestEnv;
use crate::corrupt::{dtshard, edit, fixture, replace};

/// `fsdp4` on two ranks, in a env.
fn sound() -> (TestEnv, PathBuf) {
    let env = TestEnv::new();
    let source = env.path("src");
    let args: [&dyn AsRef<std::ffi::OsStr>; 7] =
        [&"reshard", &fixture("fsdp4/ranks"), &source, &"--to", &"local", &"--mesh", &"dp=2"];
    dtshard(&args).succeeded();
    (env, source)
}

/// Replaces a text in one of the files.
fn bad(file: &str, from: &str, to: &str) {
    let (env, source) = sound();
    edit(&source.join(file), |bytes| replace(bytes, from.as_bytes(), to.as_bytes()));
    env.is_bad(&source);
}

const EMBED: &str = "\"model.embed.weight\": {\"dtype\": \"f32\", \"shape\": [10, 3]";

#[test]
fn documents_that_their_files_do_not_bear_out() {
    let wrong = |to: &str| {
        let (env, source) = sound();
        edit(&source.join("layout.json"), |bytes| replace(bytes, EMBED.as_bytes(), to.as_bytes()));
        env.is_bad(&source);
    };
    wrong(&EMBED.replace("f32", "i32"));
    wrong(&EMBED.replace("10", "12"));
    wrong(&EMBED.replace("[10, 3]", "[3, 10]"));
    wrong(&EMBED.replace("[10, 3]", "[10, 3, 0]"));
    let placements = "\"class\": \"dtensor\", \"mesh\": 0, \"placements\": \"S(0)\"}";
    let embed = format!("{EMBED}, {placements}");
    for text in ["S(1)", "R", "P(sum)", "_S(0,4)"] {
        let (env, source) = sound();
        let to = embed.replace("S(0)", text);
        edit(&source.join("layout.json"), |bytes| replace(bytes, embed.as_bytes(), to.as_bytes()));
        env.is_bad(&source);
    }
    // Sizes that are written down and do not add up.
    let (env, source) = sound();
    let to = embed.replace("\"S(0)\"", "\"S(0)\", \"splits\": [\"5+6\"]");
    edit(&source.join("layout.json"), |bytes| replace(bytes, embed.as_bytes(), to.as_bytes()));
    env.is_bad(&source);
}

#[test]
fn files_that_are_not_as_their_document() {
    let other = "\"model.embed.weighs\"";
    bad("rank-00001.safetensors", "\"model.embed.weight\"", other);
    bad("rank-00000.safetensors", "[5,3]", "[3,5]");
    bad("rank-00000.safetensors", "\"F32\"", "\"I32\"");
    let (env, source) = sound();
    fs::copy(source.join("rank-00000.safetensors"), source.join("rank-00002.safetensors")).unwrap();
    env.is_bad(&source);
    let (env, source) = sound();
    edit(&source.join("layout.json"), |bytes| {
        let text = String::from_utf8(std::mem::take(bytes)).unwrap();
        let kept = text.lines().filter(|line| !line.contains("\"model.freqs\""));
        *bytes = kept.collect::<Vec<_>>().join("\n").into_bytes();
    });
    env.is_bad(&source);
    let (env, source) = sound();
    edit(&source.join("rank-00001.safetensors"), |bytes| bytes.truncate(bytes.len() - 1));
    env.is_bad(&source);
    let (env, source) = sound();
    edit(&source.join("rank-00001.safetensors"), Vec::clear);
    env.is_bad(&source);
}

#[test]
fn plain_tensors_that_differ() {
    let (env, source) = sound();
    edit(&source.join("rank-00001.safetensors"), |bytes| {
        let header = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
        // The widest dtype comes first, and only one tensor has it.
        bytes[8 + header] ^= 1;
    });
    env.is_bad(&source);
}

#[test]
fn documents_that_are_none() {
    for text in ["", "[]", "{}", "{\"version\": 1}", "nul", &"[".repeat(100_000), &"{\"a\":".repeat(100_000)] {
        let (env, source) = sound();
        fs::write(source.join("layout.json"), text).unwrap();
        env.is_bad(&source);
    }
    bad("layout.json", "\"world_size\": 2", "\"world_size\": 1");
    bad("layout.json", "\"dp\",2", "\"dp\",16777216");
    bad("layout.json", "\"model.freqs\": {\"dtype\"", "\"../../x\": {\"dtype\"");
    let (env, source) = sound();
    edit(&source.join("layout.json"), |bytes| replace(bytes, b"\"version\": 1,\n", b"\"version\": 9,\n"));
    env.is_unsupported(&source);
}

#[test]
fn missing_ranks_cost_nothing_however_many() {
    let (env, source) = sound();
    edit(&source.join("layout.json"), |bytes| replace(bytes, b"\"world_size\": 2", b"\"world_size\": 4294967295"));
    env.is_bad(&source);
    fs::remove_file(source.join("rank-00000.safetensors")).unwrap();
    dtshard(&[&"verify", &source, &"--allow-missing"]).did_not_crash().says(&["gap"]);
}

#[test]
fn objects_are_no_way_in() {
    for (how, class) in [("call", ["os", "system"]), ("call", ["builtins", "eval"]), ("new", ["posix", "system"])] {
        let (env, source) = sound();
        let object =
            format!(r#""state": {{"evil": {{"$object": {{"how": "{how}", "class": {class:?}, "args": ["id"]}}}},"#);
        edit(&source.join("layout.json"), |bytes| replace(bytes, b"\"state\": {", object.as_bytes()));
        env.is_bad(&source);
    }
}
