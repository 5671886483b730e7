//! Tests of torch.save files with an invalid archive or pickle.

use std::path::{Path, PathBuf};

use torch_pickle::pickle::Writer;

use crate::common::env::TestEnv;
use crate::corrupt::{View, ZipEntry, dict_of, dtshard, torch_entries, torch_file, zip, zip_claiming};

const VIEW: View<'static> = View { key: "0", numel: 2, offset: 0, sizes: &[2], strides: &[1] };
const DATA: &[u8] = b"12345678";

fn file(bytes: &[u8]) -> (TestEnv, PathBuf) {
    let env = TestEnv::new();
    let path = env.write("w.pt", bytes);
    (env, path)
}

fn assert_bad_file(bytes: &[u8]) {
    let (env, path) = file(bytes);
    env.assert_bad_input(&path);
}

fn assert_unsupported_file(bytes: &[u8]) {
    let (env, path) = file(bytes);
    env.assert_unsupported_input(&path);
}

fn weights(view: &View<'_>) -> Vec<u8> {
    dict_of("w", |writer| view.write(writer))
}

fn assert_bad_view(view: &View<'_>) {
    assert_bad_file(&torch_file(weights(view), &[("0", DATA)]));
}

fn assert_bad_pickle(pickle: &[u8]) {
    assert_bad_file(&torch_file(pickle, &[("0", DATA)]));
}

#[test]
fn valid_file_is_read() {
    let (env, path) = file(&torch_file(weights(&VIEW), &[("0", DATA)]));
    dtshard(&[&"verify", &path]).assert_succeeded();
    dtshard(&[&"consolidate", &path, &env.path("out.safetensors")]).assert_succeeded();
}

#[test]
fn pickle_does_not_run_code() {
    let (env, _) = file(b"");
    let mark = env.path("it-ran");
    for module in ["os", "posix", "subprocess", "builtins"] {
        for how in ["reduce", "newobj", "build"] {
            let pickle = dict_of("w", |writer| {
                writer.global(module, "system").string(&format!("touch {}", mark.display())).tuple(1);
                match how {
                    "reduce" => writer.reduce(),
                    "newobj" => writer.newobj(),
                    _ => writer.reduce().empty_dict().build(),
                };
            });
            let path = env.write("w.pt", torch_file(pickle, &[]));
            env.assert_unsupported_input(&path);
            assert!(!mark.exists());
        }
    }
}

#[test]
fn pickle_bombs_are_refused() {
    assert_bad_pickle(&[b"]".repeat(100_000), b"a".repeat(99_999), b".".to_vec()].concat());
    assert_bad_pickle(&[b"(".repeat(100_000), b"t".repeat(100_000), b".".to_vec()].concat());
    let tuples = [b"N".to_vec(), [0x85].repeat(100_000), b".".to_vec()].concat();
    assert_bad_pickle(&tuples);
    let states = b"ccollections\nOrderedDict\n)R".to_vec();
    assert_bad_pickle(&[states.repeat(20_000), vec![b'b'; 19_999], b".".to_vec()].concat());
    // Each list contains the previous list twice, so the size doubles with each list.
    let mut laughs = b"]q\x00".to_vec();
    for i in 0..60 {
        laughs.extend([b'0', b']', b'(', b'h', i, b'h', i, b'e', b'q', i + 1]);
    }
    laughs.push(b'.');
    assert_bad_pickle(&laughs);
    // The pickle uses memo indices that are far apart.
    assert_bad_pickle(b"Nr\xff\xff\xff\xffj\xff\xff\xff\xff.");
    assert_bad_pickle(b"Nr\xff\xff\xff\x7fj\xff\xff\xff\x7f.");
    // The list contains itself.
    assert_bad_pickle(b"]q\x00h\x00a.");
}

#[test]
fn lengths_beyond_the_pickle_are_refused() {
    for pickle in [
        &b"\x80\x04\x8d\0\0\0\0\0\0\0\x10abc."[..],
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xffabc.",
        b"\x80\x05\x96\0\0\0\0\0\0\0\x10abc.",
        b"\x80\x02X\xff\xff\xff\xffabc.",
        b"\x80\x02T\xff\xff\xff\x7fabc.",
        b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
        b"\x80\x02}q\0",
        b"",
    ] {
        assert_bad_pickle(pickle);
    }
    assert_bad_pickle(b"\x80\x02\x8b\xff\xff\xff\xffN.");
    assert_bad_pickle(b"\x80\x02T\xff\xff\xff\xffN.");
}

#[test]
fn negative_sizes_are_refused() {
    assert_bad_view(&View { sizes: &[-2], ..VIEW });
    assert_bad_view(&View { strides: &[-1], ..VIEW });
    assert_bad_view(&View { offset: -1, ..VIEW });
    assert_bad_view(&View { numel: -2, ..VIEW });
    assert_bad_view(&View { sizes: &[i64::MIN], ..VIEW });
}

#[test]
fn views_beyond_their_storage_are_refused() {
    assert_bad_view(&View { offset: 1, ..VIEW });
    assert_bad_view(&View { sizes: &[3], ..VIEW });
    assert_bad_view(&View { strides: &[2], ..VIEW });
    assert_bad_view(&View { sizes: &[2, 2], strides: &[1, 1], ..VIEW });
    assert_bad_view(&View { sizes: &[2, 1], ..VIEW });
    assert_bad_view(&View { offset: i64::MAX, ..VIEW });
    // A view without elements reads no bytes, so any offset is valid.
    let (env, path) = file(&torch_file(weights(&View { offset: i64::MAX, sizes: &[0], ..VIEW }), &[("0", DATA)]));
    dtshard(&[&"unshard", &path, &env.path("out.pt")]).assert_succeeded();
    for huge in [i64::MAX, 1 << 62, 1 << 32] {
        assert_bad_view(&View { sizes: &[huge], ..VIEW });
        assert_bad_view(&View { strides: &[huge], ..VIEW });
        assert_bad_view(&View { sizes: &[huge, huge], strides: &[huge, huge], ..VIEW });
        assert_bad_view(&View { sizes: &[huge, huge], strides: &[0, 0], ..VIEW });
        assert_bad_view(&View { sizes: &[2, 2, 2], strides: &[huge, huge, huge], ..VIEW });
    }
    assert_bad_view(&View { numel: i64::MAX, ..VIEW });
    assert_bad_view(&View { numel: 3, ..VIEW });
}

/// With a stride of 0, a few bytes give a tensor of any size. The sum of the sizes of such tensors is limited, and must
/// not overflow.
#[test]
fn views_with_stride_0_are_limited_by_their_total_size() {
    let (env, _) = file(b"");
    let mut writer = Writer::new();
    writer.empty_dict().mark();
    for name in ["a", "b", "c"] {
        writer.string(name);
        View { sizes: &[1 << 59], strides: &[0], ..VIEW }.write(&mut writer);
    }
    writer.setitems();
    let path = env.write("w.pt", torch_file(writer.finish(), &[("0", DATA)]));
    env.assert_bad_input(&path);
    // A view of 2^58 elements is valid, but its output needs more disk space than there is.
    let view = View { sizes: &[1 << 58], strides: &[0], ..VIEW };
    let path = env.write("w.pt", torch_file(weights(&view), &[("0", DATA)]));
    dtshard(&[&"inspect", &path]).assert_succeeded();
    // With a copy for each of 64 ranks, the total size overflows.
    for to in ["--to=torch-ranks", "--to=local"] {
        let target = env.path("out");
        dtshard(&[&"reshard", &path, &target, &to, &"--mesh=dp=64", &"--placements=R"]).assert_refused(&["2^62"]);
    }
    dtshard(&[&"unshard", &path, &env.path("out.pt")]).assert_refused(&["needed", "free"]);
    dtshard(&[&"unshard", &path, &"--dry-run"]).assert_succeeded();
    assert!(!env.path("out.pt").exists());
}

#[test]
fn missing_storages_are_refused() {
    assert_bad_file(&torch_file(weights(&VIEW), &[]));
    assert_bad_file(&torch_file(weights(&VIEW), &[("1", DATA)]));
    assert_bad_file(&torch_file(weights(&VIEW), &[("0", b"1234567")]));
    assert_bad_file(&torch_file(weights(&View { key: "../../../etc/passwd", ..VIEW }), &[("0", DATA)]));
    assert_bad_file(&torch_file(weights(&View { key: "", ..VIEW }), &[("0", DATA)]));
}

fn changed(change: impl FnOnce(&mut Vec<ZipEntry>)) -> Vec<u8> {
    let mut entries = torch_entries(weights(&VIEW), &[("0", DATA)]);
    change(&mut entries);
    zip(&entries)
}

#[test]
fn invalid_archives_are_refused() {
    assert_unsupported_file(&changed(|entries| entries[2].method = 8));
    assert_unsupported_file(&changed(|entries| entries[0].method = 8));
    assert_bad_file(&changed(|entries| entries.push(entries[2].clone())));
    assert_bad_file(&changed(|entries| entries[2].name = "elsewhere/data/0".into()));
    assert_bad_file(&changed(|entries| entries[2].name = "../data/0".into()));
    assert_bad_file(&changed(|entries| entries[2].name = "/etc/passwd".into()));
    assert_bad_file(&changed(|entries| entries[2].name = "data".into()));
    assert_bad_file(&changed(|entries| entries[2].size = u32::MAX));
    assert_bad_file(&changed(|entries| entries[2].size = 1 << 30));
    assert_bad_file(&changed(|entries| entries[2].header = Some(u32::MAX)));
    assert_bad_file(&changed(|entries| entries[2].header = Some(1 << 30)));
    assert_bad_file(&changed(|entries| entries[2].header = Some(1)));
    assert_bad_file(&changed(|entries| _ = entries.remove(0)));
    assert_bad_file(&changed(|entries| entries[0].crc ^= 1));
    assert_unsupported_file(&zip(&[]));
    for content in ["", "middle", "\u{0}"] {
        assert_bad_file(&changed(|entries| entries[1] = ZipEntry::new("archive/byteorder", content)));
    }
    assert_unsupported_file(&changed(|entries| entries[1] = ZipEntry::new("archive/byteorder", "big")));
}

#[test]
fn invalid_zip64_fields_are_refused() {
    let extra = |values: &[u64]| {
        let mut extra = vec![1, 0];
        extra.extend(u16::try_from(8 * values.len()).unwrap().to_le_bytes());
        extra.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        extra
    };
    for huge in [u64::MAX, 1 << 63, 1 << 40] {
        let sized = changed(|entries| {
            entries[2].size = u32::MAX;
            entries[2].extra = extra(&[huge, huge]);
        });
        assert_bad_file(&sized);
        let placed = changed(|entries| {
            entries[2].header = Some(u32::MAX);
            entries[2].extra = extra(&[huge]);
        });
        assert_bad_file(&placed);
    }
    // The extra field ends before its value, or declares a length beyond the entry.
    assert_bad_file(&changed(|entries| (entries[2].size, entries[2].extra) = (u32::MAX, vec![1, 0, 16, 0, 9])));
    assert_bad_file(&changed(|entries| (entries[2].size, entries[2].extra) = (u32::MAX, vec![1, 0, 0xFF, 0xFF])));
}

#[test]
fn zip_directory_with_too_many_entries_is_refused() {
    let entries = torch_entries(weights(&VIEW), &[("0", DATA)]);
    assert_bad_file(&zip_claiming(&entries, 65_000));
    // The zip64 end record declares 2^60 entries. torch.save itself writes zip64 end records.
    let mut bytes = zip_claiming(&entries, u16::MAX);
    let end = bytes.len() - 22;
    let mut zip64 = b"PK\x06\x06".to_vec();
    zip64.extend(44_u64.to_le_bytes());
    zip64.extend([45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    zip64.extend((1_u64 << 60).to_le_bytes());
    zip64.extend((1_u64 << 60).to_le_bytes());
    zip64.extend(u64::MAX.to_le_bytes());
    zip64.extend(0_u64.to_le_bytes());
    zip64.extend(b"PK\x06\x07\0\0\0\0");
    zip64.extend((end as u64).to_le_bytes());
    zip64.extend([1, 0, 0, 0]);
    bytes.splice(end..end, zip64);
    assert_bad_file(&bytes);
}

#[test]
fn unsupported_tensors_are_refused() {
    for name in ["legacy.pt", "sparse.pt", "meta.pt"] {
        let env = TestEnv::new();
        let source = env.copy(&format!("torch_file/{name}"));
        env.assert_unsupported_input(&source);
    }
}

#[test]
fn rebuild_calls_with_invalid_arguments_are_refused() {
    let call = |name: &str, args: &dyn Fn(&mut Writer)| {
        dict_of("w", |writer| {
            writer.global("torch._utils", name);
            args(writer);
            writer.reduce();
        })
    };
    assert_bad_pickle(&call("_rebuild_tensor_v2", &|writer| _ = writer.empty_tuple()));
    assert_bad_pickle(&call("_rebuild_tensor_v2", &|writer| _ = writer.int(1).tuple(1)));
    assert_bad_pickle(&call("_rebuild_parameter", &|writer| _ = writer.empty_tuple()));
    let storage = dict_of("w", |writer| _ = writer.string("storage").binpersid());
    assert_bad_pickle(&storage);
    // Nested calls must not overflow the stack.
    let mut deep = b"\x80\x02".to_vec();
    for _ in 0..50_000 {
        deep.extend(b"ctorch._utils\n_rebuild_parameter\n");
    }
    deep.extend(b"N");
    deep.extend([0x85, b'R'].repeat(50_000));
    deep.push(b'.');
    let (env, path) = file(&torch_file(deep, &[]));
    assert_conversion_fails(&env, &path);
}

fn assert_conversion_fails(env: &TestEnv, path: &Path) {
    dtshard(&[&"unshard", &path, &env.path("out.pt")]).assert_refused(&["w.pt"]);
}

/// The attribute `_metadata` of a state dict may have any value, also a tensor.
#[test]
fn tensors_in_attributes_of_a_dict_are_converted() {
    let env = TestEnv::new();
    let view = View { key: "0", numel: 4, offset: 0, sizes: &[4], strides: &[1] };
    let mut writer = Writer::new();
    writer.global("collections", "OrderedDict").empty_tuple().reduce().string("w");
    view.write(&mut writer);
    writer.setitem().empty_dict().string("_metadata");
    view.write(&mut writer);
    writer.setitem().build();
    let source = env.write("src/a.pt", torch_file(writer.finish(), &[("0", b"0123456789abcdef")]));
    let (whole, ranks) = (env.path("out.pt"), env.path("ranks"));
    dtshard(&[&"unshard", &source, &whole]).assert_succeeded();
    dtshard(&[&"verify", &source, &whole]).assert_succeeded();
    dtshard(&[&"reshard", &source, &ranks, &"--mesh=dp=2", &"--to=torch-ranks"]).assert_succeeded();
    dtshard(&[&"verify", &source, &ranks]).assert_succeeded();
}

#[test]
fn name_of_70000_characters_is_read() {
    let env = TestEnv::new();
    let view = View { key: "0", numel: 4, offset: 0, sizes: &[4], strides: &[1] };
    let pickle = dict_of(&"k".repeat(70_000), |writer| view.write(writer));
    let source = env.write("src/a.pt", torch_file(pickle, &[("0", b"0123456789abcdef")]));
    dtshard(&[&"inspect", &source]).assert_succeeded();
    dtshard(&[&"inspect", &source, &"--chunks"]).assert_no_crash();
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_succeeded();
}

/// Two tensors of the file have the same name, and `verify` compares both.
#[test]
fn verify_compares_both_tensors_of_one_name() {
    let env = TestEnv::new();
    let pickle = {
        let mut writer = Writer::new();
        writer.empty_dict().string("a.b");
        View { key: "0", ..VIEW }.write(&mut writer);
        writer.setitem().string("a").empty_dict().string("b");
        View { key: "1", ..VIEW }.write(&mut writer);
        writer.setitem().setitem();
        writer.finish()
    };
    let write = |name: &str, first: &[u8]| env.write(name, torch_file(pickle.clone(), &[("0", first), ("1", DATA)]));
    let (left, same, right) = (write("l.pt", DATA), write("s.pt", DATA), write("r.pt", b"87654321"));
    dtshard(&[&"verify", &left, &same]).assert_succeeded().assert_mentions(&["2 tensors"]);
    assert_eq!(dtshard(&[&"verify", &left, &right]).code, Some(1));
}

/// If a transposed view were read in the order of the target, each block would be read again for every few elements,
/// which takes minutes instead of a second.
#[test]
fn transposed_view_is_read_in_file_order_within_20_seconds() {
    let env = TestEnv::new();
    let (rows, columns) = (1000, 2000);
    let numel = rows * columns;
    let view = View { key: "0", numel, offset: 0, sizes: &[columns, rows], strides: &[1, columns] };
    let pickle = dict_of("w", |writer| view.write(writer));
    let data: Vec<u8> = (0..u32::try_from(numel).unwrap()).flat_map(u32::to_le_bytes).collect();
    let source = env.write("src/a.pt", torch_file(pickle, &[("0", &data)]));
    let started = std::time::Instant::now();
    for io in ["read", "direct"] {
        let target = env.path(io).with_extension("pt");
        dtshard(&[&"unshard", &source, &target, &"--io", &io, &"--threads=1"]).assert_succeeded();
        dtshard(&[&"verify", &source, &target, &"--io=mmap"]).assert_succeeded();
    }
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}
