//! Tests of safetensors files that violate the format.

use std::fs;

use crate::common::env::TestEnv;
use crate::corrupt::dtshard;

/// Returns a file with this header and this many bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 7);
    bytes
}

fn entry(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
}

fn header_of_one(dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#"{{"w":{}}}"#, entry(dtype, shape, offsets))
}

fn header_of_two(first: &str, second: &str) -> String {
    let (a, b) = (entry("F32", "[4]", first), entry("F32", "[4]", second));
    format!(r#"{{"a":{a},"b":{b}}}"#)
}

fn assert_bad_file(bytes: &[u8]) {
    let env = TestEnv::new();
    let source = env.write("w.safetensors", bytes);
    env.assert_bad_input(&source);
}

#[test]
fn invalid_header_lengths_are_refused() {
    for len in [0, 1 << 60, u64::MAX, u64::MAX - 7, 100_000_001, 200] {
        let mut bytes = file("{}", 0);
        bytes[..8].copy_from_slice(&len.to_le_bytes());
        assert_bad_file(&bytes);
    }
    assert_bad_file(b"");
    assert_bad_file(b"1234567");
}

#[test]
fn headers_other_than_an_object_are_refused() {
    for text in ["[]", "1", "nul", "", "{", "{}x", "\u{0}", "{\"a\":", "[[1]]"] {
        let padded = format!("{text:8}");
        assert_bad_file(&file(&padded, 0));
    }
    assert_bad_file(&file(&format!("{}{}", "[".repeat(100_000), "]".repeat(100_000)), 0));
    assert_bad_file(&file(&format!("{{\"w\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000)), 0));
    assert_bad_file(&file(&format!("{{\"w\":{}1{}}}", "{\"a\":".repeat(50_000), "}".repeat(50_000)), 0));
    let mut not_utf8 = file(r#"{"w":"...."}"#, 0);
    not_utf8[14] = 0xFF;
    assert_bad_file(&not_utf8);
}

#[test]
fn duplicate_keys_are_refused() {
    let header = format!(r#"{{"w":{0},"w":{0}}}"#, entry("F32", "[4]", "[0,16]"));
    assert_bad_file(&file(&header, 16));
}

#[test]
fn malformed_entries_are_refused() {
    for entry in ["1", "null", "[]", "{}", r#"{"dtype":"F32","shape":[1]}"#] {
        assert_bad_file(&file(&format!(r#"{{"w":{entry}}}"#), 4));
    }
    for shape in ["[-1]", "[1.5]", "[\"4\"]", "[18446744073709551616]", "[1e400]", "4"] {
        assert_bad_file(&file(&header_of_one("F32", shape, "[0,4]"), 4));
    }
    for offsets in ["[0]", "[0,4,8]", "[-4,0]", "[0,18446744073709551616]"] {
        assert_bad_file(&file(&header_of_one("F32", "[1]", offsets), 4));
    }
    assert_bad_file(&file(r#"{"__metadata__":{"a":1}}"#, 0));
}

#[test]
fn unknown_dtypes_are_unsupported() {
    let env = TestEnv::new();
    for tag in ["F33", "f32", "", "F6_E2M3"] {
        let source = env.write("w.safetensors", file(&header_of_one(tag, "[1]", "[0,4]"), 4));
        env.assert_unsupported_input(&source);
    }
}

#[test]
fn overflowing_shapes_are_refused() {
    for shape in
        ["[18446744073709551615]", "[4294967296,4294967296]", "[4611686018427387904,4]", "[9223372036854775808]"]
    {
        assert_bad_file(&file(&header_of_one("F32", shape, "[0,4]"), 4));
        assert_bad_file(&file(&header_of_one("F32", shape, "[0,0]"), 0));
    }
    // A shape with a dim of size 0 has no elements, so it may be valid.
    let env = TestEnv::new();
    let source = env.write("w.safetensors", file(&header_of_one("F32", "[4294967296,4294967296,0]", "[0,0]"), 0));
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_no_crash();
    let source = env.write("w.safetensors", file(&header_of_one("F32", "[4294967296,0]", "[0,0]"), 0));
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_succeeded();
}

#[test]
fn overlapping_tensors_and_gaps_are_refused() {
    assert_bad_file(&file(&header_of_two("[0,16]", "[8,24]"), 24));
    assert_bad_file(&file(&header_of_two("[0,16]", "[0,16]"), 16));
    assert_bad_file(&file(&header_of_two("[0,16]", "[20,36]"), 36));
    assert_bad_file(&file(&header_of_two("[4,20]", "[20,36]"), 36));
    assert_bad_file(&file(&header_of_two("[0,16]", "[16,32]"), 40));
    assert_bad_file(&file(&header_of_two("[0,16]", "[16,32]"), 31));
    assert_bad_file(&file("{}", 1));
}

#[test]
fn overflowing_offsets_are_refused() {
    for offsets in [
        "[16,0]",
        "[0,18446744073709551615]",
        "[18446744073709551612,0]",
        "[18446744073709551600,18446744073709551604]",
        "[9223372036854775808,9223372036854775812]",
    ] {
        assert_bad_file(&file(&header_of_one("F32", "[1]", offsets), 4));
    }
}

#[test]
fn index_that_contradicts_its_files_is_refused() {
    let map = |text: &str| format!(r#"{{"metadata":{{}},"weight_map":{text}}}"#);
    let name = "model.safetensors.index.json";
    let weights = || file(&header_of_one("F32", "[1]", "[0,4]"), 4);
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
        env.assert_bad_input(&env.path("src"));
        env.assert_bad_input(&index);
    }
    let env = TestEnv::new();
    env.write("src/a.safetensors", weights());
    env.write(&format!("src/{name}"), map(r#"{"w":"b.safetensors"}"#));
    dtshard(&[&"unshard", &env.path("src"), &env.path("out.pt")]).assert_refused(&["b.safetensors"]);
    // Two files hold the same tensor.
    let both = map(r#"{"w":"a.safetensors","v":"b.safetensors"}"#);
    fs::write(env.path("src").join(name), both).unwrap();
    env.write("src/b.safetensors", weights());
    env.assert_bad_input(&env.path("src"));
}

#[test]
fn names_that_become_equal_are_refused() {
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
        dtshard(&[&"consolidate", &source, &env.path(target)]).assert_refused(&["a.b", "this name"]);
    }
    assert_eq!(env.names(), before);
    // Nested dicts keep the two names distinct.
    dtshard(&[&"unshard", &source, &env.path("o.pt")]).assert_succeeded();
    // The reserved key of the metadata cannot be the name of a tensor.
    let pickle = crate::corrupt::dict_of("__metadata__", |writer| view("0").write(writer));
    let source = env.write("m.pt", torch_file(pickle, &[("0", b"1111")]));
    dtshard(&[&"consolidate", &source, &env.path("m.safetensors")]).assert_refused(&["__metadata__"]);
}

/// Writes shards as DCP's Hugging Face storage writes them. Each has one f32 tensor `w` of the given shape and the
/// given DCP_SHARDING_INFO.
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

fn saved_offsets(offsets: &str) -> String {
    format!(r#"{{"w":{{"saved_offsets":{offsets}}}}}"#)
}

#[test]
fn invalid_sharding_info_is_refused() {
    let (env, source) = shards(&[("[4]", &saved_offsets("[0]")), ("[4]", &saved_offsets("[4]"))]);
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_succeeded();
    for files in [
        [("[4]", saved_offsets("[0]")), ("[4]", saved_offsets("[5]"))],
        [("[4]", saved_offsets("[0]")), ("[4]", saved_offsets("[3]"))],
        [("[4]", saved_offsets("[1]")), ("[4]", saved_offsets("[5]"))],
        [("[4]", saved_offsets("[0]")), ("[4]", saved_offsets("[4000]"))],
        [("[4]", saved_offsets("[0]")), ("[4]", saved_offsets("[18446744073709551615]"))],
        [("[4]", saved_offsets("[0]")), ("[4]", saved_offsets("[4611686018427387904]"))],
        [("[4]", saved_offsets("[0]")), ("[4]", saved_offsets("[4,0]"))],
        [("[4]", saved_offsets("[0]")), ("[2,2]", saved_offsets("[4,0]"))],
        [("[4]", saved_offsets("[0]")), ("[4]", saved_offsets("[-4]"))],
        [("[4]", saved_offsets("[0]")), ("[4]", String::from("{"))],
        [("[4]", saved_offsets("[0]")), ("[4]", String::from("[1]"))],
        [("[4]", saved_offsets("[0]")), ("[4]", String::from(r#"{"w":{}}"#))],
        [("[4]", saved_offsets("[0]")), ("[4]", saved_offsets("[4]").replace('w', "v"))],
        // A file without recorded offsets is not a shard.
        [("[4]", saved_offsets("[0]")), ("[4]", String::from("{}"))],
    ] {
        let (env, source) = shards(&files.each_ref().map(|(shape, info)| (*shape, info.as_str())));
        env.assert_bad_input(&source);
    }
}

/// The tensors of the missing file are in no other header, so `--allow-missing` reads the set without them.
#[test]
fn file_missing_in_every_shard_is_read_with_allow_missing() {
    let env = TestEnv::new();
    let source = env.copy("dcp_hf/mapped");
    let lost = env.names().into_iter().filter(|name| name.contains("-model-00002-of-00002"));
    for file in lost {
        fs::remove_file(env.path(&file)).unwrap();
    }
    env.assert_bad_input(&source);
    let target = env.path("out");
    dtshard(&[&"consolidate", &source, &target, &"--allow-missing"])
        .assert_succeeded()
        .assert_mentions(&["read without file 2"]);
}
