//! torch.save files that break the rules of their archive or their pickle.

use std::path::{Path, PathBuf};

use torch_pickle::pickle::Writer;

use crate::corrupt::{Sandbox, View, ZipEntry, dict_of, dtshard, torch_entries, torch_file, zip, zip_claiming};

const VIEW: View<'static> = View { key: "0", numel: 2, offset: 0, sizes: &[2], strides: &[1] };
const DATA: &[u8] = b"12345678";

fn file(bytes: &[u8]) -> (Sandbox, PathBuf) {
    let sandbox = Sandbox::new();
    let path = sandbox.write("w.pt", bytes);
    (sandbox, path)
}

fn bad(bytes: &[u8], words: &[&str]) {
    let (sandbox, path) = file(bytes);
    sandbox.is_bad(&path, &[&["w.pt"], words].concat());
}

fn unsupported(bytes: &[u8], words: &[&str]) {
    let (sandbox, path) = file(bytes);
    sandbox.is_unsupported(&path, &[&["w.pt"], words].concat());
}

fn weights(view: &View<'_>) -> Vec<u8> {
    dict_of("w", |writer| view.write(writer))
}

fn bad_view(view: &View<'_>, words: &[&str]) {
    bad(&torch_file(weights(view), &[("0", DATA)]), words);
}

fn bad_pickle(pickle: &[u8], words: &[&str]) {
    bad(&torch_file(pickle, &[("0", DATA)]), words);
}

#[test]
fn the_honest_one_is_read() {
    let (sandbox, path) = file(&torch_file(weights(&VIEW), &[("0", DATA)]));
    dtshard(&[&"verify", &path]).succeeded();
    dtshard(&[&"consolidate", &path, &sandbox.path("out.safetensors")]).succeeded();
}

#[test]
fn nothing_in_a_pickle_runs() {
    let (sandbox, _) = file(b"");
    let mark = sandbox.path("it-ran");
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
            let path = sandbox.write("w.pt", torch_file(pickle, &[]));
            sandbox.is_unsupported(&path, &["w.pt", "w needs", &format!("`{module}.system`"), "ever run"]);
            assert!(!mark.exists());
        }
    }
}

#[test]
fn bombs() {
    bad_pickle(&[b"]".repeat(100_000), b"a".repeat(99_999), b".".to_vec()].concat(), &["nested deeper than"]);
    bad_pickle(&[b"(".repeat(100_000), b"t".repeat(100_000), b".".to_vec()].concat(), &["nested deeper than"]);
    let tuples = [b"N".to_vec(), [0x85].repeat(100_000), b".".to_vec()].concat();
    bad_pickle(&tuples, &["nested deeper than"]);
    let states = b"ccollections\nOrderedDict\n)R".to_vec();
    bad_pickle(&[states.repeat(20_000), vec![b'b'; 19_999], b".".to_vec()].concat(), &[]);
    // Each list holds the one before twice.
    let mut laughs = b"]q\x00".to_vec();
    for i in 0..60 {
        laughs.extend([b'0', b']', b'(', b'h', i, b'h', i, b'e', b'q', i + 1]);
    }
    laughs.push(b'.');
    bad_pickle(&laughs, &["value within bounds"]);
    // Memo indices far apart.
    bad_pickle(b"Nr\xff\xff\xff\xffj\xff\xff\xff\xff.", &["data.pkl"]);
    bad_pickle(b"Nr\xff\xff\xff\x7fj\xff\xff\xff\x7f.", &["data.pkl"]);
    // A list that holds itself.
    bad_pickle(b"]q\x00h\x00a.", &["contains itself"]);
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
        bad_pickle(pickle, &["data.pkl"]);
    }
    bad_pickle(b"\x80\x02\x8b\xff\xff\xff\xffN.", &["negative length"]);
    bad_pickle(b"\x80\x02T\xff\xff\xff\xffN.", &["data.pkl"]);
}

#[test]
fn negative_sizes() {
    bad_view(&View { sizes: &[-2], ..VIEW }, &["w"]);
    bad_view(&View { strides: &[-1], ..VIEW }, &["w"]);
    bad_view(&View { offset: -1, ..VIEW }, &["w"]);
    bad_view(&View { numel: -2, ..VIEW }, &["w"]);
    bad_view(&View { sizes: &[i64::MIN], ..VIEW }, &["w"]);
}

#[test]
fn views_out_of_their_storage() {
    bad_view(&View { offset: 1, ..VIEW }, &["w: ", "at 1 in a storage of 2 elements"]);
    bad_view(&View { sizes: &[3], ..VIEW }, &["w: ", "storage of 2 elements"]);
    bad_view(&View { strides: &[2], ..VIEW }, &["w: ", "strides [2]"]);
    bad_view(&View { sizes: &[2, 2], strides: &[1, 1], ..VIEW }, &["w: ", "storage of 2 elements"]);
    bad_view(&View { sizes: &[2, 1], ..VIEW }, &["2 dims with 1 strides"]);
    bad_view(&View { offset: i64::MAX, ..VIEW }, &["w: "]);
    // An empty view touches nothing, wherever it is.
    let (sandbox, path) = file(&torch_file(weights(&View { offset: i64::MAX, sizes: &[0], ..VIEW }), &[("0", DATA)]));
    dtshard(&[&"unshard", &path, &sandbox.path("out.pt")]).succeeded();
    for huge in [i64::MAX, 1 << 62, 1 << 32] {
        bad_view(&View { sizes: &[huge], ..VIEW }, &["w: "]);
        bad_view(&View { strides: &[huge], ..VIEW }, &["w: "]);
        bad_view(&View { sizes: &[huge, huge], strides: &[huge, huge], ..VIEW }, &["w: "]);
        bad_view(&View { sizes: &[huge, huge], strides: &[0, 0], ..VIEW }, &["w: "]);
        bad_view(&View { sizes: &[2, 2, 2], strides: &[huge, huge, huge], ..VIEW }, &["w: "]);
    }
    bad_view(&View { numel: i64::MAX, ..VIEW }, &["w: "]);
    bad_view(&View { numel: 3, ..VIEW }, &["12 bytes in the record `data/0` of 8"]);
}

/// A stride of 0 claims any size with few bytes; all together must stay a number.
#[test]
fn views_that_repeat_one_element() {
    let (sandbox, _) = file(b"");
    let mut writer = Writer::new();
    writer.empty_dict().mark();
    for name in ["a", "b", "c"] {
        writer.string(name);
        View { sizes: &[1 << 59], strides: &[0], ..VIEW }.write(&mut writer);
    }
    writer.setitems();
    let path = sandbox.write("w.pt", torch_file(writer.finish(), &[("0", DATA)]));
    sandbox.is_bad(&path, &["w.pt", "2^62 bytes"]);
    // One of 2^58 elements is possible, and needs more space than there is.
    let view = View { sizes: &[1 << 58], strides: &[0], ..VIEW };
    let path = sandbox.write("w.pt", torch_file(weights(&view), &[("0", DATA)]));
    dtshard(&[&"inspect", &path]).succeeded();
    // A copy for each of many ranks is not.
    for to in ["--to=torch-ranks", "--to=local"] {
        let target = sandbox.path("out");
        dtshard(&[&"reshard", &path, &target, &to, &"--mesh=dp=64", &"--placements=R"]).refused(&["2^62"]);
    }
    dtshard(&[&"unshard", &path, &sandbox.path("out.pt")]).refused(&["needed", "free"]);
    dtshard(&[&"unshard", &path, &"--dry-run"]).succeeded();
    assert!(!sandbox.path("out.pt").exists());
}

#[test]
fn storages_that_are_not_there() {
    bad(&torch_file(weights(&VIEW), &[]), &["w: ", "`data/0` is missing"]);
    bad(&torch_file(weights(&VIEW), &[("1", DATA)]), &["w: ", "`data/0` is missing"]);
    bad(&torch_file(weights(&VIEW), &[("0", b"1234567")]), &["w: ", "in the record `data/0` of 7"]);
    bad(&torch_file(weights(&View { key: "../../../etc/passwd", ..VIEW }), &[("0", DATA)]), &["is missing"]);
    bad(&torch_file(weights(&View { key: "", ..VIEW }), &[("0", DATA)]), &["is missing"]);
}

fn changed(change: impl FnOnce(&mut Vec<ZipEntry>)) -> Vec<u8> {
    let mut entries = torch_entries(weights(&VIEW), &[("0", DATA)]);
    change(&mut entries);
    zip(&entries)
}

#[test]
fn archives_that_break_the_rules() {
    unsupported(&changed(|entries| entries[2].method = 8), &["archive/data/0", "compressed"]);
    unsupported(&changed(|entries| entries[0].method = 8), &["archive/data.pkl", "compressed"]);
    bad(&changed(|entries| entries.push(entries[2].clone())), &["two entries `archive/data/0`"]);
    bad(&changed(|entries| entries[2].name = "elsewhere/data/0".into()), &["elsewhere/data/0"]);
    bad(&changed(|entries| entries[2].name = "../data/0".into()), &["../data/0"]);
    bad(&changed(|entries| entries[2].name = "/etc/passwd".into()), &["/etc/passwd"]);
    bad(&changed(|entries| entries[2].name = "data".into()), &[]);
    bad(&changed(|entries| entries[2].size = u32::MAX), &[]);
    bad(&changed(|entries| entries[2].size = 1 << 30), &["archive/data/0"]);
    bad(&changed(|entries| entries[2].header = Some(u32::MAX)), &[]);
    bad(&changed(|entries| entries[2].header = Some(1 << 30)), &["archive/data/0"]);
    bad(&changed(|entries| entries[2].header = Some(1)), &["that overlap"]);
    bad(&changed(|entries| _ = entries.remove(0)), &["data.pkl"]);
    bad(&changed(|entries| entries[0].crc ^= 1), &["data.pkl", "CRC-32"]);
    unsupported(&zip(&[]), &["not a checkpoint of a known format"]);
    for content in ["", "middle", "\u{0}"] {
        bad(&changed(|entries| entries[1] = ZipEntry::new("archive/byteorder", content)), &["byteorder"]);
    }
    unsupported(&changed(|entries| entries[1] = ZipEntry::new("archive/byteorder", "big")), &["big-endian"]);
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
        bad(&sized, &[]);
        let placed = changed(|entries| {
            entries[2].header = Some(u32::MAX);
            entries[2].extra = extra(&[huge]);
        });
        bad(&placed, &[]);
    }
    // An extra field that ends before its value, or claims to be longer than the entry.
    bad(&changed(|entries| (entries[2].size, entries[2].extra) = (u32::MAX, vec![1, 0, 16, 0, 9])), &[]);
    bad(&changed(|entries| (entries[2].size, entries[2].extra) = (u32::MAX, vec![1, 0, 0xFF, 0xFF])), &[]);
}

#[test]
fn directories_that_claim_too_much() {
    let entries = torch_entries(weights(&VIEW), &[("0", DATA)]);
    bad(&zip_claiming(&entries, 65_000), &[]);
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
    bad(&bytes, &[]);
}

#[test]
fn tensors_that_are_not_carried_are_named() {
    let words = |name: &str| -> &'static [&'static str] {
        match name {
            "sparse.pt" => &["sparse"],
            "quantized.pt" => &["w.pt"],
            "meta.pt" => &["meta tensor"],
            _ => &["legacy torch file"],
        }
    };
    for name in ["legacy.pt", "sparse.pt", "meta.pt"] {
        let sandbox = Sandbox::new();
        let source = sandbox.copy(&format!("torch_file/{name}"));
        sandbox.is_unsupported(&source, &[&[name], words(name)].concat());
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
    bad_pickle(&call("_rebuild_tensor_v2", &|writer| _ = writer.empty_tuple()), &["w: ", "without argument"]);
    bad_pickle(&call("_rebuild_tensor_v2", &|writer| _ = writer.int(1).tuple(1)), &["w: "]);
    bad_pickle(&call("_rebuild_parameter", &|writer| _ = writer.empty_tuple()), &["w: "]);
    let storage = dict_of("w", |writer| _ = writer.string("storage").binpersid());
    bad_pickle(&storage, &["a storage outside of a tensor"]);
    // Calls within calls do not use up the stack.
    let mut deep = b"\x80\x02".to_vec();
    for _ in 0..50_000 {
        deep.extend(b"ctorch._utils\n_rebuild_parameter\n");
    }
    deep.extend(b"N");
    deep.extend([0x85, b'R'].repeat(50_000));
    deep.push(b'.');
    let (sandbox, path) = file(&torch_file(deep, &[]));
    conversion_fails(&sandbox, &path);
}

fn conversion_fails(sandbox: &Sandbox, path: &Path) {
    dtshard(&[&"unshard", &path, &sandbox.path("out.pt")]).refused(&["w.pt"]);
}

/// `state_dict._metadata` may hold anything.
#[test]
fn tensors_in_the_attributes_of_a_dict() {
    let sandbox = Sandbox::new();
    let view = View { key: "0", numel: 4, offset: 0, sizes: &[4], strides: &[1] };
    let mut writer = Writer::new();
    writer.global("collections", "OrderedDict").empty_tuple().reduce().string("w");
    view.write(&mut writer);
    writer.setitem().empty_dict().string("_metadata");
    view.write(&mut writer);
    writer.setitem().build();
    let source = sandbox.write("src/a.pt", torch_file(writer.finish(), &[("0", b"0123456789abcdef")]));
    let (whole, ranks) = (sandbox.path("out.pt"), sandbox.path("ranks"));
    dtshard(&[&"unshard", &source, &whole]).succeeded();
    dtshard(&[&"verify", &source, &whole]).succeeded();
    dtshard(&[&"reshard", &source, &ranks, &"--mesh=dp=2", &"--to=torch-ranks"]).succeeded();
    dtshard(&[&"verify", &source, &ranks]).succeeded();
}

#[test]
fn very_long_names() {
    let sandbox = Sandbox::new();
    let view = View { key: "0", numel: 4, offset: 0, sizes: &[4], strides: &[1] };
    let pickle = dict_of(&"k".repeat(70_000), |writer| view.write(writer));
    let source = sandbox.write("src/a.pt", torch_file(pickle, &[("0", b"0123456789abcdef")]));
    dtshard(&[&"inspect", &source]).succeeded();
    dtshard(&[&"inspect", &source, &"--chunks"]).did_not_crash();
    dtshard(&[&"unshard", &source, &sandbox.path("out.pt")]).succeeded();
}

/// One name, two tensors: both are compared.
#[test]
fn a_name_that_two_tensors_have() {
    let sandbox = Sandbox::new();
    let pickle = {
        let mut writer = Writer::new();
        writer.empty_dict().string("a.b");
        View { key: "0", ..VIEW }.write(&mut writer);
        writer.setitem().string("a").empty_dict().string("b");
        View { key: "1", ..VIEW }.write(&mut writer);
        writer.setitem().setitem();
        writer.finish()
    };
    let write =
        |name: &str, first: &[u8]| sandbox.write(name, torch_file(pickle.clone(), &[("0", first), ("1", DATA)]));
    let (left, same, right) = (write("l.pt", DATA), write("s.pt", DATA), write("r.pt", b"87654321"));
    dtshard(&[&"verify", &left, &same]).succeeded().says(&["2 tensors"]);
    assert_eq!(dtshard(&[&"verify", &left, &right]).code, Some(1));
}

/// Blocks that follow the target would be read again for every few elements of it: minutes, where a second is enough.
#[test]
fn transposed_views_are_read_along_the_file() {
    let sandbox = Sandbox::new();
    let (rows, columns) = (1000, 2000);
    let numel = rows * columns;
    let view = View { key: "0", numel, offset: 0, sizes: &[columns, rows], strides: &[1, columns] };
    let pickle = dict_of("w", |writer| view.write(writer));
    let data: Vec<u8> = (0..u32::try_from(numel).unwrap()).flat_map(u32::to_le_bytes).collect();
    let source = sandbox.write("src/a.pt", torch_file(pickle, &[("0", &data)]));
    let started = std::time::Instant::now();
    for io in ["read", "direct"] {
        let target = sandbox.path(io).with_extension("pt");
        dtshard(&[&"unshard", &source, &target, &"--io", &io, &"--threads=1"]).succeeded();
        dtshard(&[&"verify", &source, &target, &"--io=mmap"]).succeeded();
    }
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}
