//! Invalid `.metadata` files of DCP: every verb reports an error.

use std::fs;
use std::path::PathBuf;

use torch_pickle::pickle::Writer;

use crate::common::env::TestEnv;
use crate::corrupt::{View, dtshard, torch_file};

const METADATA: &str = "torch.distributed.checkpoint.metadata";

/// One chunk in `.metadata`: offsets, sizes, and the file, offset and length of its item.
type Chunk<'a> = (&'a [u64], &'a [u64], &'a str, u64, u64);

struct Tensor<'a> {
    name: &'a str,
    shape: &'a [u64],
    chunks: Vec<Chunk<'a>>,
}

/// For each flattened name in the state dict, its path: a list of keys, in which `#3` is position 3 of a list.
type Paths<'a> = &'a [(&'a str, Vec<&'a str>)];

fn size(writer: &mut Writer, values: &[u64]) {
    writer.global("torch", "Size");
    if values.len() > 3 {
        writer.mark();
    }
    for &value in values {
        writer.uint(value);
    }
    writer.tuple(values.len()).tuple(1).reduce();
}

fn instance(writer: &mut Writer, module: &str, class: &str) {
    writer.global(module, class).empty_tuple().newobj().empty_dict().mark();
}

fn metadata(tensors: &[Tensor<'_>], paths: Paths<'_>) -> Vec<u8> {
    let mut w = Writer::new();
    instance(&mut w, METADATA, "Metadata");
    w.string("state_dict_metadata").empty_dict().mark();
    for tensor in tensors {
        w.string(tensor.name);
        instance(&mut w, METADATA, "TensorStorageMetadata");
        w.string("properties").global(METADATA, "TensorProperties").empty_tuple().newobj().mark();
        w.global("torch", "float32").boolean(false).boolean(false).boolean(false).boolean(false).tuple(5).build();
        w.string("size");
        size(&mut w, tensor.shape);
        w.string("chunks").empty_list().mark();
        for (offsets, sizes, ..) in &tensor.chunks {
            instance(&mut w, METADATA, "ChunkStorageMetadata");
            w.string("offsets");
            size(&mut w, offsets);
            w.string("sizes");
            size(&mut w, sizes);
            w.setitems().build();
        }
        w.appends().setitems().build();
    }
    w.setitems().string("planner_data").empty_dict().mark();
    for (name, path) in paths {
        w.string(name).mark();
        for step in path {
            match step.strip_prefix('#') {
                Some(index) => w.uint(index.parse().unwrap()),
                None => w.string(step),
            };
        }
        w.tuple(path.len().max(4));
    }
    w.setitems().string("storage_data").empty_dict().mark();
    for tensor in tensors {
        for (offsets, _, file, offset, len) in &tensor.chunks {
            instance(&mut w, METADATA, "MetadataIndex");
            w.string("fqn").string(tensor.name).string("index").none().string("offset");
            size(&mut w, offsets);
            w.setitems().build();
            instance(&mut w, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
            w.string("relative_path").string(file).string("offset").uint(*offset).string("length").uint(*len);
            w.setitems().build();
        }
    }
    w.setitems().setitems().build();
    w.finish()
}

/// Returns the item of a chunk: a torch.save archive of a tensor of two f32 elements.
fn item() -> Vec<u8> {
    let mut writer = Writer::new();
    View { key: "0", numel: 2, offset: 0, sizes: &[2], strides: &[1] }.write(&mut writer);
    torch_file(writer.finish(), &[("0", b"12345678")])
}

fn len() -> u64 {
    item().len() as u64
}

const FILE: &str = "__0_0.distcp";

/// Writes a DCP directory with two items and the given metadata.
fn directory(env: &TestEnv, metadata: &[u8]) -> PathBuf {
    env.write(&format!("src/{FILE}"), [item(), item()].concat());
    env.write("outside.distcp", item());
    env.write("src/.metadata", metadata);
    env.path("src")
}

fn metadata_of_one_tensor<'a>(shape: &'a [u64], chunks: Vec<Chunk<'a>>) -> Vec<u8> {
    metadata(&[Tensor { name: "model.w", shape, chunks }], &[])
}

fn assert_bad_metadata(metadata: &[u8]) {
    let env = TestEnv::new();
    let source = directory(&env, metadata);
    env.assert_bad_input(&source);
}

#[test]
fn valid_directory_is_read() {
    let env = TestEnv::new();
    let chunks = vec![(&[0][..], &[2][..], FILE, 0, len()), (&[2], &[2], FILE, len(), len())];
    let source = directory(&env, &metadata_of_one_tensor(&[4], chunks));
    dtshard(&[&"verify", &source]).assert_succeeded();
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_succeeded();
}

#[test]
fn paths_outside_the_folder_are_refused() {
    for path in ["../outside.distcp", "/etc/passwd", "", ".", "a/../../outside.distcp", "./../outside.distcp"] {
        assert_bad_metadata(&metadata_of_one_tensor(&[2], vec![(&[0], &[2], path, 0, len())]));
    }
    assert_bad_metadata(&metadata_of_one_tensor(&[2], vec![(&[0], &[2], "nowhere.distcp", 0, len())]));
    let nul = metadata_of_one_tensor(&[2], vec![(&[0], &[2], "nul\0.distcp", 0, len())]);
    assert_bad_metadata(&nul);
    // In this case, a folder has the path of a data file.
    let env = TestEnv::new();
    let source = directory(&env, &metadata_of_one_tensor(&[2], vec![(&[0], &[2], "sub", 0, len())]));
    fs::create_dir(source.join("sub")).unwrap();
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_refused(&["sub", "not a regular file"]);
}

#[test]
fn chunks_that_do_not_tile_the_tensor_are_refused() {
    let overlap = vec![(&[0][..], &[2][..], FILE, 0, len()), (&[1], &[2], FILE, len(), len())];
    assert_bad_metadata(&metadata_of_one_tensor(&[3], overlap));
    assert_bad_metadata(&metadata_of_one_tensor(&[4], vec![(&[0], &[2], FILE, 0, len())]));
    assert_bad_metadata(&metadata_of_one_tensor(&[4], vec![(&[2], &[2], FILE, 0, len())]));
    assert_bad_metadata(&metadata_of_one_tensor(&[4], vec![]));
    assert_bad_metadata(&metadata_of_one_tensor(&[3], vec![(&[2], &[2], FILE, 0, len())]));
    assert_bad_metadata(&metadata_of_one_tensor(&[2], vec![(&[0, 0], &[1, 2], FILE, 0, len())]));
    assert_bad_metadata(&metadata_of_one_tensor(&[2], vec![(&[0], &[1, 2], FILE, 0, len())]));
}

#[test]
fn huge_shapes_and_offsets_are_refused() {
    for huge in [1 << 63, u64::MAX, u64::MAX - 1, i64::MAX as u64] {
        assert_bad_metadata(&metadata_of_one_tensor(&[huge], vec![]));
        assert_bad_metadata(&metadata_of_one_tensor(&[huge, huge], vec![]));
        assert_bad_metadata(&metadata_of_one_tensor(&[huge, 0], vec![(&[0, 0], &[huge, 1], FILE, 0, len())]));
        assert_bad_metadata(&metadata_of_one_tensor(&[2], vec![(&[huge], &[2], FILE, 0, len())]));
        assert_bad_metadata(&metadata_of_one_tensor(&[2], vec![(&[0], &[huge], FILE, 0, len())]));
        assert_bad_metadata(&metadata_of_one_tensor(&[2], vec![(&[0], &[2], FILE, huge, len())]));
        assert_bad_metadata(&metadata_of_one_tensor(&[2], vec![(&[0], &[2], FILE, 0, huge)]));
        assert_bad_metadata(&metadata_of_one_tensor(&[2], vec![(&[0], &[2], FILE, huge, huge)]));
    }
    // The size of each tensor is valid, but the sum of their sizes overflows.
    let many = |name| Tensor { name, shape: &[1 << 60], chunks: vec![] };
    assert_bad_metadata(&metadata(&["a", "b", "c", "d", "e"].map(many), &[]));
}

#[test]
fn items_other_than_the_tensor_are_refused() {
    let whole = |offset, len| metadata_of_one_tensor(&[2], vec![(&[0], &[2], FILE, offset, len)]);
    for (offset, len) in [(0, len() - 1), (1, len()), (0, 0), (3, 10)] {
        assert_bad_metadata(&whole(offset, len));
    }
    let env = TestEnv::new();
    let source = directory(&env, &metadata_of_one_tensor(&[1], vec![(&[0], &[1], FILE, 0, len())]));
    env.assert_bad_input(&source);
    // The item contains another dtype, an object instead of a tensor, or no valid pickle.
    let view = View { key: "0", numel: 2, offset: 0, sizes: &[2], strides: &[1] };
    let mut list = Writer::new();
    list.empty_list();
    view.write(&mut list);
    list.append();
    let mut number = Writer::new();
    number.int(7);
    let mut view_pickle = Writer::new();
    view.write(&mut view_pickle);
    let mut other_dtype = view_pickle.finish();
    crate::corrupt::replace(&mut other_dtype, b"FloatStorage", b"IntStorage");
    for pickle in [list.finish(), number.finish(), other_dtype, b"garbage".to_vec()] {
        let env = TestEnv::new();
        let bytes = torch_file(pickle, &[("0", b"12345678")]);
        let metadata = metadata_of_one_tensor(&[2], vec![(&[0], &[2], FILE, 0, bytes.len() as u64)]);
        let source = directory(&env, &metadata);
        fs::write(source.join(FILE), bytes).unwrap();
        env.assert_bad_input(&source);
    }
}

#[test]
fn contradicting_state_dict_paths_are_refused() {
    let tensor = |name| Tensor { name, shape: &[2], chunks: vec![(&[0], &[2], FILE, 0, len())] };
    let both = [tensor("a"), tensor("b")];
    for (first, second) in [
        (vec!["x"], vec!["x"]),
        (vec!["x"], vec!["x", "y"]),
        (vec!["x", "y"], vec!["x"]),
        (vec!["x", "#0"], vec!["x", "y"]),
        (vec!["x", "y", "#0"], vec!["x", "y", "#0"]),
        (vec!["#0"], vec!["x"]),
    ] {
        assert_bad_metadata(&metadata(&both, &[("a", first), ("b", second)]));
    }
    for index in ["#4294967296", "#18446744073709551615", "#100000"] {
        assert_bad_metadata(&metadata(&both[..1], &[("a", vec!["x", index])]));
    }
    // Each of many lists has one missing position.
    let names: Vec<String> = (0..64).map(|index| format!("t{index}")).collect();
    let tensors: Vec<Tensor<'_>> = names.iter().map(|name| tensor(name)).collect();
    let paths: Vec<(&str, Vec<&str>)> = names.iter().map(|name| (&**name, vec![&**name, "#60000"])).collect();
    assert_bad_metadata(&metadata(&tensors, &paths));
    for depth in [1000, 100_000] {
        assert_bad_metadata(&metadata(&both[..1], &[("a", vec!["k"; depth])]));
    }
}

#[test]
fn malformed_metadata_is_refused() {
    for bytes in [
        &b""[..],
        b".",
        b"\x80\x02.",
        b"\x80\x02N.",
        b"\x80\x02}.",
        b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R.",
        b"PK\x03\x04",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x80\x04\x8d\x00\x00\x00\x00\x00\x00\x00\x10",
    ] {
        assert_bad_metadata(bytes);
    }
    assert_bad_metadata(&[b"(".repeat(200_000), b".".to_vec()].concat());
    assert_bad_metadata(&[b"]".repeat(200_000), b"a".repeat(199_999), b".".to_vec()].concat());
}

/// The program must copy the metadata before it decodes it: another process may change a mapped file after its text was
/// validated.
#[test]
fn metadata_is_not_decoded_from_a_mapping() {
    use dtshard::format::{Checkpoint, ReadOptions};
    use dtshard::storage::IoMode;

    let env = TestEnv::new();
    let source = env.copy("fsdp4/dcp");
    let options = ReadOptions { io: Some(IoMode::Mmap), ..ReadOptions::default() };
    let checkpoint = Checkpoint::open(&source, &options).unwrap();
    let mapped = fs::read_to_string("/proc/self/maps").unwrap();
    let metadata = source.join(".metadata");
    assert!(checkpoint.files.ids().any(|id| checkpoint.files.path(id) == metadata));
    assert!(!mapped.contains(metadata.to_str().unwrap()), "{mapped}");
}
