//! safetensors files that break the rules.

use std::fs;

use crate::corrupt::{Sandbox, dtshard};

/// A file with this header and this many bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 7);
    bytes
}

fn entry(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
}

fn one(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"w":{}}}"#, entry(dtype, shape, offsets))
}

fn two(first: &str, second: &str) -> String {
    let (a, b) = (entry("F32", "[4]", first), entry("F32", "[4]", second));
    format!(r#"{{"a":{a},"b":{b}}}"#)
}

/// The message has to have all the words.
fn bad(bytes: &[u8], words: &[&str]) {
    let sandbox = Sandbox::new();
    let source = sandbox.write("w.safetensors", bytes);
    sandbox.is_bad(&source, &[&["w.safetensors"], words].concat());
}

#[test]
fn header_lengths() {
    for len in [0, 1 << 60, u64::MAX, u64::MAX - 7, 100_000_001, 200] {
        let mut bytes = file("{}", 0);
        bytes[..8].copy_from_slice(&len.to_le_bytes());
        bad(&bytes, &["header length", &len.to_string()]);
    }
    bad(b"", &["8-byte header length", "0 bytes"]);
    bad(b"1234567", &["8-byte header length", "7 bytes"]);
}

#[test]
fn headers_that_are_no_object() {
    for text in ["[]", "1", "nul", "", "{", "{}x", "\u{0}", "{\"a\":", "[[1]]"] {
        let padded = format!("{text:8}");
        bad(&file(&padded, 0), &["header", "a JSON object"]);
    }
    bad(&file(&format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)), 0), &["header"]);
    bad(
        &file(&format!("{{\"w\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000)), 0),
        &["w: expected dtype, shape and data_offsets"],
    );
    bad(&file(&format!("{{\"w\":{}1{}}}", "{\"a\":".repeat(50_000), "}".repeat(50_000)), 0), &["w: expected"]);
    let mut not_utf8 = file(r#"{"w":"...."}"#, 0);
    not_utf8[14] = 0xFF;
    bad(&not_utf8, &["header"]);
}

#[test]
fn duplicate_keys() {
    let header = format!(r#"{{"w":{0},"w":{0}}}"#, entry("F32", "[4]", "[0,16]"));
    bad(&file(&header, 16), &["`w` twice"]);
}

#[test]
fn entries_that_are_none() {
    for entry in ["1", "null", "[]", "{}", r#"{"dtype":"F32","shape":[1]}"#] {
        bad(&file(&format!(r#"{{"w":{entry}}}"#), 4), &["w: expected dtype, shape and data_offsets"]);
    }
    for shape in ["[-1]", "[1.5]", "[\"4\"]", "[18446744073709551616]", "[1e400]", "4"] {
        bad(&file(&one("F32", shape, "[0,4]"), 4), &[]);
    }
    for offsets in ["[0]", "[0,4,8]", "[-4,0]", "[0,18446744073709551616]"] {
        bad(&file(&one("F32", "[1]", offsets), 4), &[]);
    }
    bad(&file(r#"{"__metadata__":{"a":1}}"#, 0), &["__metadata__", "a map of strings"]);
}

#[test]
fn unknown_dtypes() {
    let sandbox = Sandbox::new();
    for tag in ["F33", "f32", "", "F6_E2M3"] {
        let source = sandbox.write("w.safetensors", file(&one(tag, "[1]", "[0,4]"), 4));
        sandbox.is_unsupported(&source, &["w.safetensors", "w: dtype", tag]);
    }
}

#[test]
fn shapes_that_overflow() {
    for shape in
        ["[18446744073709551615]", "[4294967296,4294967296]", "[4611686018427387904,4]", "[9223372036854775808]"]
    {
        bad(&file(&one("F32", shape, "[0,4]"), 4), &["w: ", "data_offsets [0, 4]"]);
        bad(&file(&one("F32", shape, "[0,0]"), 0), &["w: "]);
    }
    // A dim of 0 makes most shapes harmless.
    let sandbox = Sandbox::new();
    let source = sandbox.write("w.safetensors", file(&one("F32", "[4294967296,4294967296,0]", "[0,0]"), 0));
    dtshard(&[&"unshard", &source, &sandbox.path("out.pt")]).did_not_crash();
    let source = sandbox.write("w.safetensors", file(&one("F32", "[4294967296,0]", "[0,0]"), 0));
    dtshard(&[&"unshard", &source, &sandbox.path("out.pt")]).succeeded();
}

#[test]
fn data_that_is_not_tiled() {
    bad(&file(&two("[0,16]", "[8,24]"), 24), &["b: expected data at 16, found data at 8"]);
    bad(&file(&two("[0,16]", "[0,16]"), 16), &["data at"]);
    bad(&file(&two("[0,16]", "[20,36]"), 36), &["b: expected data at 16, found data at 20"]);
    bad(&file(&two("[4,20]", "[20,36]"), 36), &["a: expected data at 0"]);
    bad(&file(&two("[0,16]", "[16,32]"), 40), &["32 bytes of data", "40 bytes"]);
    bad(&file(&two("[0,16]", "[16,32]"), 31), &["32 bytes of data", "31 bytes"]);
    bad(&file("{}", 1), &["0 bytes of data"]);
}

#[test]
fn offsets_that_overflow() {
    for offsets in [
        "[16,0]",
        "[0,18446744073709551615]",
        "[18446744073709551612,0]",
        "[18446744073709551600,18446744073709551604]",
        "[9223372036854775808,9223372036854775812]",
    ] {
        bad(&file(&one("F32", "[1]", offsets), 4), &["w: "]);
    }
}

#[test]
fn an_index_that_disagrees() {
    let map = |text: &str| format!(r#"{{"metadata":{{}},"weight_map":{text}}}"#);
    let name = "model.safetensors.index.json";
    let weights = || file(&one("F32", "[1]", "[0,4]"), 4);
    for (text, words) in [
        (map(r#"{"w":"../outside.safetensors"}"#), &["`../outside.safetensors`", "inside the checkpoint's folder"][..]),
        (map(r#"{"w":"/etc/passwd"}"#), &["`/etc/passwd`", "inside the checkpoint's folder"]),
        (map(r#"{"w":""}"#), &["inside the checkpoint's folder"]),
        (map(r#"{"w":"a/../../x"}"#), &["inside the checkpoint's folder"]),
        (map(r#"{"w":"a.safetensors","v":"a.safetensors"}"#), &["v: expected the tensor in a.safetensors", "no such"]),
        (map(r#"{"v":"a.safetensors"}"#), &["v: expected the tensor in a.safetensors"]),
        (map(r#"{"w":1}"#), &["a JSON object with weight_map"]),
        (map("[]"), &["a JSON object with weight_map"]),
        (String::from("{}"), &["a JSON object with weight_map"]),
        (String::from("[]"), &["a JSON object with weight_map"]),
        (String::new(), &["a JSON object with weight_map"]),
        ("[".repeat(200_000), &["a JSON object with weight_map"]),
    ] {
        let sandbox = Sandbox::new();
        sandbox.write("outside.safetensors", weights());
        sandbox.write("src/a.safetensors", weights());
        let index = sandbox.write(&format!("src/{name}"), text);
        sandbox.is_bad(&sandbox.path("src"), &[&[name], words].concat());
        sandbox.is_bad(&index, words);
    }
    let sandbox = Sandbox::new();
    sandbox.write("src/a.safetensors", weights());
    sandbox.write(&format!("src/{name}"), map(r#"{"w":"b.safetensors"}"#));
    dtshard(&[&"unshard", &sandbox.path("src"), &sandbox.path("out.pt")]).refused(&["b.safetensors"]);
    // The same tensor in two files.
    let both = map(r#"{"w":"a.safetensors","v":"b.safetensors"}"#);
    fs::write(sandbox.path("src").join(name), both).unwrap();
    sandbox.write("src/b.safetensors", weights());
    sandbox.is_bad(&sandbox.path("src"), &["w", "a.safetensors", "b.safetensors"]);
}

#[test]
fn two_names_that_become_one_are_refused() {
    use crate::corrupt::{View, torch_file};
    let mut writer = torch_pickle::pickle::Writer::new();
    let view = |key| View { key, numel: 1, offset: 0, sizes: &[1], strides: &[1] };
    writer.empty_dict().string("a").empty_dict().string("b");
    view("0").write(&mut writer);
    writer.setitem().setitem().string("a.b");
    view("1").write(&mut writer);
    writer.setitem();
    let sandbox = Sandbox::new();
    let bytes = torch_file(writer.finish(), &[("0", b"1111"), ("1", b"2222")]);
    let source = sandbox.write("c.pt", bytes);
    let before = sandbox.names();
    for target in ["o.safetensors", "folder", "o.bin"] {
        dtshard(&[&"consolidate", &source, &sandbox.path(target)]).refused(&["a.b", "this name"]);
    }
    assert_eq!(sandbox.names(), before);
    // Nested, they stay apart.
    dtshard(&[&"unshard", &source, &sandbox.path("o.pt")]).succeeded();
    // The key of the metadata is no name for a tensor.
    let pickle = crate::corrupt::dict_of("__metadata__", |writer| view("0").write(writer));
    let source = sandbox.write("m.pt", torch_file(pickle, &[("0", b"1111")]));
    dtshard(&[&"consolidate", &source, &sandbox.path("m.safetensors")]).refused(&["__metadata__"]);
}

/// Shards of DCP's Hugging Face storage: one f32 tensor `w` of `shape` in each, with this DCP_SHARDING_INFO.
fn shards(files: &[(&str, &str)]) -> (Sandbox, std::path::PathBuf) {
    let sandbox = Sandbox::new();
    for (index, (shape, info)) in files.iter().enumerate() {
        let info = serde_json::to_string(info).unwrap();
        let tensor = entry("F32", shape, "[0,16]");
        let header = format!(r#"{{"__metadata__":{{"DCP_SHARDING_INFO":{info}}},"w":{tensor}}}"#);
        let name = format!("src/shard-{:05}-model-00001-of-00001.safetensors", index + 1);
        sandbox.write(&name, file(&header, 16));
    }
    let source = sandbox.path("src");
    (sandbox, source)
}

fn at(offsets: &str) -> String {
    format!(r#"{{"w":{{"saved_offsets":{offsets}}}}}"#)
}

#[test]
fn sharding_info_that_lies() {
    let (sandbox, source) = shards(&[("[4]", &at("[0]")), ("[4]", &at("[4]"))]);
    dtshard(&[&"unshard", &source, &sandbox.path("out.pt")]).succeeded();
    for (files, words) in [
        ([("[4]", at("[0]")), ("[4]", at("[5]"))], "gap"),
        ([("[4]", at("[0]")), ("[4]", at("[3]"))], "overlap"),
        ([("[4]", at("[1]")), ("[4]", at("[5]"))], "gap"),
        ([("[4]", at("[0]")), ("[4]", at("[4000]"))], "gap"),
        ([("[4]", at("[0]")), ("[4]", at("[18446744073709551615]"))], "offsets inside a tensor"),
        ([("[4]", at("[0]")), ("[4]", at("[4611686018427387904]"))], "a shape that fits memory"),
        ([("[4]", at("[0]")), ("[4]", at("[4,0]"))], "saved_offsets of 1 dims"),
        ([("[4]", at("[0]")), ("[2,2]", at("[4,0]"))], "dtype or number of dims differs"),
        ([("[4]", at("[0]")), ("[4]", at("[-4]"))], "saved_offsets for each tensor"),
        ([("[4]", at("[0]")), ("[4]", String::from("{"))], "saved_offsets for each tensor"),
        ([("[4]", at("[0]")), ("[4]", String::from("[1]"))], "saved_offsets for each tensor"),
        ([("[4]", at("[0]")), ("[4]", String::from(r#"{"w":{}}"#))], "saved_offsets for each tensor"),
        ([("[4]", at("[0]")), ("[4]", at("[4]").replace('w', "v"))], "the tensor v in the same file"),
        // A shard that does not say where it lies is no shard.
        ([("[4]", at("[0]")), ("[4]", String::from("{}"))], "a tensor in one file only"),
    ] {
        let (sandbox, source) = shards(&files.each_ref().map(|(shape, info)| (*shape, info.as_str())));
        sandbox.is_bad(&source, &[words]);
    }
}

/// No header tells of the tensors in it.
#[test]
fn a_lost_file_of_all_shards() {
    let sandbox = Sandbox::new();
    let source = sandbox.copy("dcp_hf/mapped");
    let lost = sandbox.names().into_iter().filter(|name| name.to_string_lossy().contains("-model-00002-of-00002"));
    for file in lost {
        fs::remove_file(file).unwrap();
    }
    sandbox.is_bad(&source, &["a shard of each of 2 files", "file 2"]);
    let target = sandbox.path("out");
    dtshard(&[&"consolidate", &source, &target, &"--allow-missing"]).succeeded().says(&["read without file 2"]);
}
