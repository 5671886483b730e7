//! safetensors files that break the rules.

use std::fs;

use crate::common::env::TestEnv;
use crate::corrupt::dtshard;

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

fn bad(bytes: &[u8]) {
    let env = TestEnv::new();
    let source = env.write("w.safetensors", bytes);
    env.is_bad(&source);
}

#[test]
fn header_lengths() {
    for len in [0, 1 << 60, u64::MAX, u64::MAX - 7, 100_000_001, 200] {
        let mut bytes = file("{}", 0);
        bytes[..8].copy_from_slice(&len.to_le_bytes());
        bad(&bytes);
    }
    bad(b"");
    bad(b"1234567");
}

#[test]
fn headers_that_are_no_object() {
    for text in ["[]", "1", "nul", "", "{", "{}x", "\u{0}", "{\"a\":", "[[1]]"] {
        let padded = format!("{text:8}");
        bad(&file(&padded, 0));
    }
    bad(&file(&format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)), 0));
    bad(&file(&format!("{{\"w\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000)), 0));
    bad(&file(&format!("{{\"w\":{}1{}}}", "{\"a\":".repeat(50_000), "}".repeat(50_000)), 0));
    let mut not_utf8 = file(r#"{"w":"...."}"#, 0);
    not_utf8[14] = 0xFF;
    bad(&not_utf8);
}

#[test]
fn duplicate_keys() {
    let header = format!(r#"{{"w":{0},"w":{0}}}"#, entry("F32", "[4]", "[0,16]"));
    bad(&file(&header, 16));
}

#[test]
fn entries_that_are_none() {
    for entry in ["1", "null", "[]", "{}", r#"{"dtype":"F32","shape":[1]}"#] {
        bad(&file(&format!(r#"{{"w":{entry}}}"#), 4));
    }
    for shape in ["[-1]", "[1.5]", "[\"4\"]", "[18446744073709551616]", "[1e400]", "4"] {
        bad(&file(&one("F32", shape, "[0,4]"), 4));
    }
    for offsets in ["[0]", "[0,4,8]", "[-4,0]", "[0,18446744073709551616]"] {
        bad(&file(&one("F32", "[1]", offsets), 4));
    }
    bad(&file(r#"{"__metadata__":{"a":1}}"#, 0));
}

#[test]
fn unknown_dtypes() {
    let env = TestEnv::new();
    for tag in ["F33", "f32", "", "F6_E2M3"] {
        let source = env.write("w.safetensors", file(&one(tag, "[1]", "[0,4]"), 4));
        env.is_unsupported(&source);
    }
}

#[test]
fn shapes_that_overflow() {
    for shape in
        ["[18446744073709551615]", "[4294967296,4294967296]", "[4611686018427387904,4]", "[9223372036854775808]"]
    {
        bad(&file(&one("F32", shape, "[0,4]"), 4));
        bad(&file(&one("F32", shape, "[0,0]"), 0));
    }
    // A dim of 0 makes most shapes harmless.
    let env = TestEnv::new();
    let source = env.write("w.safetensors", file(&one("F32", "[4294967296,4294967296,0]", "[0,0]"), 0));
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).did_not_crash();
    let source = env.write("w.safetensors", file(&one("F32", "[4294967296,0]", "[0,0]"), 0));
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).succeeded();
}

#[test]
fn data_that_is_not_tiled() {
    bad(&file(&two("[0,16]", "[8,24]"), 24));
    bad(&file(&two("[0,16]", "[0,16]"), 16));
    bad(&file(&two("[0,16]", "[20,36]"), 36));
    bad(&file(&two("[4,20]", "[20,36]"), 36));
    bad(&file(&two("[0,16]", "[16,32]"), 40));
    bad(&file(&two("[0,16]", "[16,32]"), 31));
    bad(&file("{}", 1));
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
        bad(&file(&one("F32", "[1]", offsets), 4));
    }
}

#[test]
fn an_index_that_disagrees() {
    let map = |text: &str| format!(r#"{{"metadata":{{}},"weight_map":{text}}}"#);
    let name = "model.safetensors.index.json";
    let weights = || file(&one("F32", "[1]", "[0,4]"), 4);
    for text in [
        map(r#"{"w":"../outside.safetensors"}"#),
        map(r#"{"w":"/etc/passwd"}"#),
        map(r#"{"w":""}"#),
        map(r#"{"w":"a/../../x"}"#),
        map(r#"{"w":"a.safetensors","v":"a.safetensors"}"#),
        map(r#"{"v":"a.safetensors"}"#),
        map(r#"{"w":1}"#),
        map("[]"),
        String::from("{}"),
        String::from("[]"),
        String::new(),
        "[".repeat(200_000),
    ] {
        let env = TestEnv::new();
        env.write("outside.safetensors", weights());
        env.write("src/a.safetensors", weights());
        let index = env.write(&format!("src/{name}"), text);
        env.is_bad(&env.path("src"));
        env.is_bad(&index);
    }
    let env = TestEnv::new();
    env.write("src/a.safetensors", weights());
    env.write(&format!("src/{name}"), map(r#"{"w":"b.safetensors"}"#));
    dtshard(&[&"unshard", &env.path("src"), &env.path("out.pt")]).refused(&["b.safetensors"]);
    // The same tensor in two files.
    let both = map(r#"{"w":"a.safetensors","v":"b.safetensors"}"#);
    fs::write(env.path("src").join(name), both).unwrap();
    env.write("src/b.safetensors", weights());
    env.is_bad(&env.path("src"));
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
    let env = TestEnv::new();
    let bytes = torch_file(writer.finish(), &[("0", b"1111"), ("1", b"2222")]);
    let source = env.write("c.pt", bytes);
    let before = env.names();
    for target in ["o.safetensors", "folder", "o.bin"] {
        dtshard(&[&"consolidate", &source, &env.path(target)]).refused(&["a.b", "this name"]);
    }
    assert_eq!(env.names(), before);
    // Nested, they stay apart.
    dtshard(&[&"unshard", &source, &env.path("o.pt")]).succeeded();
    // The key of the metadata is no name for a tensor.
    let pickle = crate::corrupt::dict_of("__metadata__", |writer| view("0").write(writer));
    let source = env.write("m.pt", torch_file(pickle, &[("0", b"1111")]));
    dtshard(&[&"consolidate", &source, &env.path("m.safetensors")]).refused(&["__metadata__"]);
}

/// Shards of DCP's Hugging Face storage: one f32 tensor `w` of `shape` in each, with this DCP_SHARDING_INFO.
fn shards(files: &[(&str, &str)]) -> (TestEnv, std::path::PathBuf) {
    let env = TestEnv::new();
    for (index, (shape, info)) in files.iter().enumerate() {
        let info = serde_json::to_string(info).unwrap();
        let tensor = entry("F32", shape, "[0,16]");
        let header = format!(r#"{{"__metadata__":{{"DCP_SHARDING_INFO":{info}}},"w":{tensor}}}"#);
        let name = format!("src/shard-{:05}-model-00001-of-00001.safetensors", index + 1);
        env.write(&name, file(&header, 16));
    }
    let source = env.path("src");
    (env, source)
}

fn at(offsets: &str) -> String {
    format!(r#"{{"w":{{"saved_offsets":{offsets}}}}}"#)
}

#[test]
fn sharding_info_that_lies() {
    let (env, source) = shards(&[("[4]", &at("[0]")), ("[4]", &at("[4]"))]);
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).succeeded();
    for files in [
        [("[4]", at("[0]")), ("[4]", at("[5]"))],
        [("[4]", at("[0]")), ("[4]", at("[3]"))],
        [("[4]", at("[1]")), ("[4]", at("[5]"))],
        [("[4]", at("[0]")), ("[4]", at("[4000]"))],
        [("[4]", at("[0]")), ("[4]", at("[18446744073709551615]"))],
        [("[4]", at("[0]")), ("[4]", at("[4611686018427387904]"))],
        [("[4]", at("[0]")), ("[4]", at("[4,0]"))],
        [("[4]", at("[0]")), ("[2,2]", at("[4,0]"))],
        [("[4]", at("[0]")), ("[4]", at("[-4]"))],
        [("[4]", at("[0]")), ("[4]", String::from("{"))],
        [("[4]", at("[0]")), ("[4]", String::from("[1]"))],
        [("[4]", at("[0]")), ("[4]", String::from(r#"{"w":{}}"#))],
        [("[4]", at("[0]")), ("[4]", at("[4]").replace('w', "v"))],
        // A shard that does not say where it lies is no shard.
        [("[4]", at("[0]")), ("[4]", String::from("{}"))],
    ] {
        let (env, source) = shards(&files.each_ref().map(|(shape, info)| (*shape, info.as_str())));
        env.is_bad(&source);
    }
}

/// No header tells of the tensors in it.
#[test]
fn a_lost_file_of_all_shards() {
    let env = TestEnv::new();
    let source = env.copy("dcp_hf/mapped");
    let lost = env.names().into_iter().filter(|name| name.contains("-model-00002-of-00002"));
    for file in lost {
        fs::remove_file(env.path(&file)).unwrap();
    }
    env.is_bad(&source);
    let target = env.path("out");
    dtshard(&[&"consolidate", &source, &target, &"--allow-missing"]).succeeded().says(&["read without file 2"]);
}
