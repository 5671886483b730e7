//! Folders of rank files whose document and files do not belong together.
//!
//! What a document may not say by itself: `format::local::tests`.

use std::fs;
use std::path::PathBuf;

use crate::corrupt::{Sandbox, dtshard, edit, fixture, replace};

/// `fsdp4` on two ranks, in a sandbox.
fn sound() -> (Sandbox, PathBuf) {
    let sandbox = Sandbox::new();
    let source = sandbox.path("src");
    let args: [&dyn AsRef<std::ffi::OsStr>; 7] =
        [&"reshard", &fixture("fsdp4/ranks"), &source, &"--to", &"local", &"--mesh", &"dp=2"];
    dtshard(&args).succeeded();
    (sandbox, source)
}

/// Replace a text in one of the files and expect these words.
fn bad(file: &str, from: &str, to: &str, words: &[&str]) {
    let (sandbox, source) = sound();
    edit(&source.join(file), |bytes| replace(bytes, from.as_bytes(), to.as_bytes()));
    sandbox.is_bad(&source, &[&[file], words].concat());
}

const EMBED: &str = "\"model.embed.weight\": {\"dtype\": \"f32\", \"shape\": [10, 3]";

#[test]
fn documents_that_their_files_do_not_bear_out() {
    let file = "rank-00000.safetensors";
    let wrong = |to: &str, words: &[&str]| {
        let (sandbox, source) = sound();
        edit(&source.join("layout.json"), |bytes| replace(bytes, EMBED.as_bytes(), to.as_bytes()));
        sandbox.is_bad(&source, &[&[file, "model.embed.weight"], words].concat());
    };
    wrong(&EMBED.replace("f32", "i32"), &["expected i32 [5, 3] as layout.json says, found f32 [5, 3]"]);
    wrong(&EMBED.replace("10", "12"), &["expected f32 [6, 3] as layout.json says, found f32 [5, 3]"]);
    wrong(&EMBED.replace("[10, 3]", "[3, 10]"), &["expected f32 [2, 10]", "found f32 [5, 3]"]);
    wrong(&EMBED.replace("[10, 3]", "[10, 3, 0]"), &["expected f32 [5, 3, 0]", "found f32 [5, 3]"]);
    let placements = "\"class\": \"dtensor\", \"mesh\": 0, \"placements\": \"S(0)\"}";
    let embed = format!("{EMBED}, {placements}");
    for (text, words) in [
        ("S(1)", ["expected f32 [10, 2]", "found f32 [5, 3]"]),
        ("R", ["expected f32 [10, 3]", "found f32 [5, 3]"]),
        ("P(sum)", ["expected f32 [10, 3]", "found f32 [5, 3]"]),
        ("_S(0,4)", ["expected f32 [7, 3]", "found f32 [5, 3]"]),
    ] {
        let (sandbox, source) = sound();
        let to = embed.replace("S(0)", text);
        edit(&source.join("layout.json"), |bytes| replace(bytes, embed.as_bytes(), to.as_bytes()));
        sandbox.is_bad(&source, &[&[file, "model.embed.weight"], &words[..]].concat());
    }
    // Sizes that are written down and do not add up.
    let (sandbox, source) = sound();
    let to = embed.replace("\"S(0)\"", "\"S(0)\", \"splits\": [\"5+6\"]");
    edit(&source.join("layout.json"), |bytes| replace(bytes, embed.as_bytes(), to.as_bytes()));
    sandbox.is_bad(&source, &[file, "model.embed.weight", "placements that fit", "5+6"]);
}

#[test]
fn files_that_are_not_as_their_document() {
    let other = "\"model.embed.weighs\"";
    bad(
        "rank-00001.safetensors",
        "\"model.embed.weight\"",
        other,
        &["model.embed.weight: expected a tensor f32 [5, 3]", "none"],
    );
    bad("rank-00000.safetensors", "[5,3]", "[3,5]", &["expected f32 [5, 3] as layout.json says, found f32 [3, 5]"]);
    bad("rank-00000.safetensors", "\"F32\"", "\"I32\"", &["as layout.json says, found i32"]);
    let (sandbox, source) = sound();
    fs::copy(source.join("rank-00000.safetensors"), source.join("rank-00002.safetensors")).unwrap();
    sandbox.is_bad(&source, &["rank-00002.safetensors", "ranks below the world size of layout.json, 2"]);
    let (sandbox, source) = sound();
    edit(&source.join("layout.json"), |bytes| {
        let text = String::from_utf8(std::mem::take(bytes)).unwrap();
        let kept = text.lines().filter(|line| !line.contains("\"model.freqs\""));
        *bytes = kept.collect::<Vec<_>>().join("\n").into_bytes();
    });
    sandbox.is_bad(
        &source,
        &["model.freqs: expected only tensors of which layout.json gives rank 0 a part, found one more"],
    );
    let (sandbox, source) = sound();
    edit(&source.join("rank-00001.safetensors"), |bytes| bytes.truncate(bytes.len() - 1));
    sandbox.is_bad(&source, &["rank-00001.safetensors", "bytes of data"]);
    let (sandbox, source) = sound();
    edit(&source.join("rank-00001.safetensors"), Vec::clear);
    sandbox.is_bad(&source, &["rank-00001.safetensors", "8-byte header length"]);
}

#[test]
fn plain_tensors_that_differ() {
    let (sandbox, source) = sound();
    edit(&source.join("rank-00001.safetensors"), |bytes| {
        let header = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
        // The widest dtype comes first, and only one tensor has it.
        bytes[8 + header] ^= 1;
    });
    sandbox.is_bad(&source, &["model.seen", "rank 0 and rank 1"]);
}

#[test]
fn documents_that_are_none() {
    for text in ["", "[]", "{}", "{\"version\": 1}", "nul", &"[".repeat(100_000), &"{\"a\":".repeat(100_000)] {
        let (sandbox, source) = sound();
        fs::write(source.join("layout.json"), text).unwrap();
        sandbox.is_bad(&source, &["layout.json", "expected a layout of rank files"]);
    }
    bad("layout.json", "\"world_size\": 2", "\"world_size\": 1", &["mesh 0: expected no more cells than 1 ranks"]);
    bad("layout.json", "\"dp\",2", "\"dp\",16777216", &["mesh 0: expected no more cells than 2 ranks"]);
    bad("layout.json", "\"model.freqs\": {\"dtype\"", "\"../../x\": {\"dtype\"", &["state model.freqs"]);
    let (sandbox, source) = sound();
    edit(&source.join("layout.json"), |bytes| replace(bytes, b"\"version\": 1,\n", b"\"version\": 9,\n"));
    sandbox.is_unsupported(&source, &["version 9 of the layout"]);
}

#[test]
fn missing_ranks_cost_nothing_however_many() {
    let (sandbox, source) = sound();
    edit(&source.join("layout.json"), |bytes| replace(bytes, b"\"world_size\": 2", b"\"world_size\": 4294967295"));
    sandbox.is_bad(&source, &["the files of 4294967295 ranks, missing: ranks 2 .. 4294967294"]);
    fs::remove_file(source.join("rank-00000.safetensors")).unwrap();
    dtshard(&[&"verify", &source, &"--allow-missing"]).did_not_crash().says(&["gap"]);
}

#[test]
fn objects_are_no_way_in() {
    for (how, class) in [("call", ["os", "system"]), ("call", ["builtins", "eval"]), ("new", ["posix", "system"])] {
        let (sandbox, source) = sound();
        let object =
            format!(r#""state": {{"evil": {{"$object": {{"how": "{how}", "class": {class:?}, "args": ["id"]}}}},"#);
        edit(&source.join("layout.json"), |bytes| replace(bytes, b"\"state\": {", object.as_bytes()));
        sandbox.is_bad(&source, &["layout.json: state evil: expected a Python object that is known to be plain data"]);
    }
}
