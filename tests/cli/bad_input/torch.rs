//! torch.save files that break the rules of their archive or their pickle.

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

fn bad(bytes: &[u8]) {
    let (env, path) = file(bytes);
    env.is_bad(&path);
}

fn unsupported(bytes: &[u8]) {
    let (env, path) = file(bytes);
    env.is_unsupported(&path);
}

fn weights(view: &View<'_>) -> Vec<u8> {
    dict_of("w", |writer| view.write(writer))
}

fn bad_view(view: &View<'_>) {
    bad(&torch_file(weights(view), &[("0", DATA)]));
}

fn bad_pickle(pickle: &[u8]) {
    bad(&torch_file(pickle, &[("0", DATA)]));
}

#[test]
fn the_honest_one_is_read() {
    let (env, path) = file(&torch_file(weights(&VIEW), &[("0", DATA)]));
    dtshard(&[&"verify", &path]).succeeded();
    dtshard(&[&"consolidate", &path, &env.path("out.safetensors")]).succeeded();
}

#[test]
fn nothing_in_a_pickle_runs() {
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
            env.is_unsupported(&path);
            assert!(!mark.exists());
        }
    }
}

#[test]
fn bombs() {
    bad_pickle(&[b"]".repeat(100_000), b"a".repeat(99_999), b".".to_vec()].concat());
    bad_pickle(&[b"(".repeat(100_000), b"t".repeat(100_000), b".".to_vec()].concat());
    let tuples = [b"N".to_vec(), [0x85].repeat(100_000), b".".to_vec()].concat();
    bad_pickle(&tuples);
    let states = b"ccollections\nOrderedDict\n)R".to_vec();
    bad_pickle(&[states.repeat(20_000), vec![b'b'; 19_999], b".".to_vec()].concat());
    // Each list holds the one before twice.
    let mut laughs = b"]q\x00".to_vec();
    for i in 0..60 {
        laughs.extend([b'0', b']', b'(', b'h', i, b'h', i, b'e', b'q', i + 1]);
    }
    laughs.push(b'.');
    bad_pickle(&laughs);
    // Memo indices far apart.
    bad_pickle(b"Nr\xff\xff\xff\xffj\xff\xff\xff\xff.");
    bad_pickle(b"Nr\xff\xff\xff\x7fj\xff\xff\xff\x7f.");
    // A list that holds itself.
    bad_pickle(b"]q\x00h\x00a.");
}

#[test]
fn lengths_beyond_the_pickle() {
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
        bad_pickle(pickle);
    }
    bad_pickle(b"\x80\x02\x8b\xff\xff\xff\xffN.");
    bad_pickle(b"\x80\x02T\xff\xff\xff\xffN.");
}

#[test]
fn negative_sizes() {
    bad_view(&View { sizes: &[-2], ..VIEW });
    bad_view(&View { strides: &[-1], ..VIEW });
    bad_view(&View { offset: -1, ..VIEW });
    bad_view(&View { numel: -2, ..VIEW });
    bad_view(&View { sizes: &[i64::MIN], ..VIEW });
}

#[test]
fn views_out_of_their_storage() {
    bad_view(&View { offset: 1, ..VIEW });
    bad_view(&View { sizes: &[3], ..VIEW });
    bad_view(&View { strides: &[2], ..VIEW });
    bad_view(&View { sizes: &[2, 2], strides: &[1, 1], ..VIEW });
    bad_view(&View { sizes: &[2, 1], ..VIEW });
    bad_view(&View { offset: i64::MAX, ..VIEW });
    // An empty view touches nothing, wherever it is.
    let (env, path) = file(&torch_file(weights(&View { offset: i64::MAX, sizes: &[0], ..VIEW }), &[("0", DATA)]));
    dtshard(&[&"unshard", &path, &env.path("out.pt")]).succeeded();
    for huge in [i64::MAX, 1 << 62, 1 << 32] {
        bad_view(&View { sizes: &[huge], ..VIEW });
        bad_view(&View { strides: &[huge], ..VIEW });
        bad_view(&View { sizes: &[huge, huge], strides: &[huge, huge], ..VIEW });
        bad_view(&View { sizes: &[huge, huge], strides: &[0, 0], ..VIEW });
        bad_view(&View { sizes: &[2, 2, 2], strides: &[huge, huge, huge], ..VIEW });
    }
    bad_view(&View { numel: i64::MAX, ..VIEW });
    bad_view(&View { numel: 3, ..VIEW });
}

/// A stride of 0 claims any size with few bytes; all together must stay a number.
#[test]
fn views_that_repeat_one_element() {
    let (env, _) = file(b"");
    let mut writer = Writer::new();
    writer.empty_dict().mark();
    for name in ["a", "b", "c"] {
        writer.string(name);
        View { sizes: &[1 << 59], strides: &[0], ..VIEW }.write(&mut writer);
    }
    writer.setitems();
    let path = env.write("w.pt", torch_file(writer.finish(), &[("0", DATA)]));
    env.is_bad(&path);
    // One of 2^58 elements is possible, and needs more space than there is.
    let view = View { sizes: &[1 << 58], strides: &[0], ..VIEW };
    let path = env.write("w.pt", torch_file(weights(&view), &[("0", DATA)]));
    dtshard(&[&"inspect", &path]).succeeded();
    // A copy for each of many ranks is not.
    for to in ["--to=torch-ranks", "--to=local"] {
        let target = env.path("out");
        dtshard(&[&"reshard", &path, &target, &to, &"--mesh=dp=64", &"--placements=R"]).refused(&["2^62"]);
    }
    dtshard(&[&"unshard", &path, &env.path("out.pt")]).refused(&["needed", "free"]);
    dtshard(&[&"unshard", &path, &"--dry-run"]).succeeded();
    assert!(!env.path("out.pt").exists());
}

#[test]
fn storages_that_are_not_there() {
    bad(&torch_file(weights(&VIEW), &[]));
    bad(&torch_file(weights(&VIEW), &[("1", DATA)]));
    bad(&torch_file(weights(&VIEW), &[("0", b"1234567")]));
    bad(&torch_file(weights(&View { key: "../../../etc/passwd", ..VIEW }), &[("0", DATA)]));
    bad(&torch_file(weights(&View { key: "", ..VIEW }), &[("0", DATA)]));
}

fn changed(change: impl FnOnce(&mut Vec<ZipEntry>)) -> Vec<u8> {
    let mut entries = torch_entries(weights(&VIEW), &[("0", DATA)]);
    change(&mut entries);
    zip(&entries)
}

#[test]
fn archives_that_break_the_rules() {
    unsupported(&changed(|entries| entries[2].method = 8));
    unsupported(&changed(|entries| entries[0].method = 8));
    bad(&changed(|entries| entries.push(entries[2].clone())));
    bad(&changed(|entries| entries[2].name = "elsewhere/data/0".into()));
    bad(&changed(|entries| entries[2].name = "../data/0".into()));
    bad(&changed(|entries| entries[2].name = "/etc/passwd".into()));
    bad(&changed(|entries| entries[2].name = "data".into()));
    bad(&changed(|entries| entries[2].size = u32::MAX));
    bad(&changed(|entries| entries[2].size = 1 << 30));
    bad(&changed(|entries| entries[2].header = Some(u32::MAX)));
    bad(&changed(|entries| entries[2].header = Some(1 << 30)));
    bad(&changed(|entries| entries[2].header = Some(1)));
    bad(&changed(|entries| _ = entries.remove(0)));
    bad(&changed(|entries| entries[0].crc ^= 1));
    unsupported(&zip(&[]));
    for content in ["", "middle", "\u{0}"] {
        bad(&changed(|entries| entries[1] = ZipEntry::new("archive/byteorder", content)));
    }
    unsupported(&changed(|entries| entries[1] = ZipEntry::new("archive/byteorder", "big")));
}

#[test]
fn zip64_nonsense() {
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
        bad(&sized);
        let placed = changed(|entries| {
            entries[2].header = Some(u32::MAX);
            entries[2].extra = extra(&[huge]);
        });
        bad(&placed);
    }
    // An extra field that ends before its value, or claims to be longer than the entry.
    bad(&changed(|entries| (entries[2].size, entries[2].extra) = (u32::MAX, vec![1, 0, 16, 0, 9])));
    bad(&changed(|entries| (entries[2].size, entries[2].extra) = (u32::MAX, vec![1, 0, 0xFF, 0xFF])));
}

#[test]
fn directories_that_claim_too_much() {
    let entries = torch_entries(weights(&VIEW), &[("0", DATA)]);
    bad(&zip_claiming(&entries, 65_000));
    // A zip64 end record with 2^60 entries, as torch.save's own writer has one.
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
    bad(&bytes);
}

#[test]
fn tensors_that_are_not_carried_are_named() {
    for name in ["legacy.pt", "sparse.pt", "meta.pt"] {
        let env = TestEnv::new();
        let source = env.copy(&format!("torch_file/{name}"));
        env.is_unsupported(&source);
    }
}

#[test]
fn a_pickle_may_not_make_up_tensors() {
    let call = |name: &str, args: &dyn Fn(&mut Writer)| {
        dict_of("w", |writer| {
            writer.global("torch._utils", name);
            args(writer);
            writer.reduce();
        })
    };
    bad_pickle(&call("_rebuild_tensor_v2", &|writer| _ = writer.empty_tuple()));
    bad_pickle(&call("_rebuild_tensor_v2", &|writer| _ = writer.int(1).tuple(1)));
    bad_pickle(&call("_rebuild_parameter", &|writer| _ = writer.empty_tuple()));
    let storage = dict_of("w", |writer| _ = writer.string("storage").binpersid());
    bad_pickle(&storage);
    // Calls within calls do not use up the stack.
    let mut deep = b"\x80\x02".to_vec();
    for _ in 0..50_000 {
        deep.extend(b"ctorch._utils\n_rebuild_parameter\n");
    }
    deep.extend(b"N");
    deep.extend([0x85, b'R'].repeat(50_000));
    deep.push(b'.');
    let (env, path) = file(&torch_file(deep, &[]));
    conversion_fails(&env, &path);
}

fn conversion_fails(env: &TestEnv, path: &Path) {
    dtshard(&[&"unshard", &path, &env.path("out.pt")]).refused(&["w.pt"]);
}

/// `state_dict._metadata` may hold anything.
#[test]
fn tensors_in_the_attributes_of_a_dict() {
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
    dtshard(&[&"unshard", &source, &whole]).succeeded();
    dtshard(&[&"verify", &source, &whole]).succeeded();
    dtshard(&[&"reshard", &source, &ranks, &"--mesh=dp=2", &"--to=torch-ranks"]).succeeded();
    dtshard(&[&"verify", &source, &ranks]).succeeded();
}

#[test]
fn very_long_names() {
    let env = TestEnv::new();
    let view = View { key: "0", numel: 4, offset: 0, sizes: &[4], strides: &[1] };
    let pickle = dict_of(&"k".repeat(70_000), |writer| view.write(writer));
    let source = env.write("src/a.pt", torch_file(pickle, &[("0", b"0123456789abcdef")]));
    dtshard(&[&"inspect", &source]).succeeded();
    dtshard(&[&"inspect", &source, &"--chunks"]).did_not_crash();
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).succeeded();
}

/// One name, two tensors: both are compared.
#[test]
fn a_name_that_two_tensors_have() {
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
    dtshard(&[&"verify", &left, &same]).succeeded().says(&["2 tensors"]);
    assert_eq!(dtshard(&[&"verify", &left, &right]).code, Some(1));
}

/// Blocks that follow the target would be read again for every few elements of it: minutes, where a second is enough.
#[test]
fn transposed_views_are_read_along_the_file() {
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
        dtshard(&[&"unshard", &source, &target, &"--io", &io, &"--threads=1"]).succeeded();
        dtshard(&[&"verify", &source, &target, &"--io=mmap"]).succeeded();
    }
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}
