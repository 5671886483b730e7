//! Tests of makani's rank files that contradict each other, and of other plain tensors whose layout is unknown.

use std::path::PathBuf;

use torch_pickle::pickle::Writer;

use crate::common::env::TestEnv;
use crate::corrupt::{View, ZipEntry, dtshard, find, torch_file, unzip, zip};

/// A process group in makani's `comm_grid`: its name, its size, and the position of the saving rank in it.
type CommGroup = (&'static str, i64, i64);

const STORAGE: [u8; 72] = [7; 72];

/// The makani file of one of two ranks. The model has one tensor `w`: a part of a tensor of shape `[4, 3]`, sharded
/// over the group `h`.
#[derive(Clone)]
struct MakaniFile {
    /// The value of `sharded_dims_mp`, in Python's notation; `None` if the tensor has no such attribute.
    dims: Option<&'static [&'static str]>,
    sizes: [i64; 2],
    /// The offset of the tensor in its storage, in elements.
    offset: i64,
    grid: Vec<CommGroup>,
    has_tensor: bool,
}

impl MakaniFile {
    fn of_rank(rank: i64) -> Self {
        let grid = vec![("model", 2, rank), ("spatial", 2, rank), ("w", 1, 0), ("h", 2, rank)];
        Self { dims: Some(&["h", "None"]), sizes: [2, 3], offset: 0, grid, has_tensor: true }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        writer.empty_dict().mark().string("model_state").empty_dict();
        if self.has_tensor {
            writer.string("w");
            self.write_tensor(&mut writer);
            writer.setitem();
        }
        if !self.grid.is_empty() {
            writer.string("comm_grid").empty_dict().mark();
            for (name, size, position) in &self.grid {
                writer.string(name).empty_dict().mark();
                writer.string("size").int(*size).string("rank").int(*position).setitems();
            }
            writer.setitems();
        }
        writer.setitems();
        torch_file(writer.finish(), &[("0", &STORAGE)])
    }

    fn write_tensor(&self, writer: &mut Writer) {
        let view = View { key: "0", numel: 18, offset: self.offset, sizes: &self.sizes, strides: &[self.sizes[1], 1] };
        let Some(dims) = self.dims else { return view.write(writer) };
        writer.global("torch._utils", "_rebuild_parameter_with_state").mark();
        view.write(writer);
        writer.boolean(true).global("collections", "OrderedDict").empty_tuple().reduce();
        writer.empty_dict().string("sharded_dims_mp").empty_list().mark();
        for name in dims {
            match *name {
                "None" => writer.none(),
                "7" => writer.int(7),
                name => writer.string(name),
            };
        }
        writer.appends().setitem().tuple(4).reduce();
    }
}

fn write(files: &[MakaniFile]) -> (TestEnv, PathBuf) {
    let env = TestEnv::new();
    for (rank, file) in files.iter().enumerate() {
        env.write(&format!("src/ckpt_mp{rank}_v0.tar"), file.bytes());
    }
    let source = env.path("src");
    (env, source)
}

fn two_ranks() -> [MakaniFile; 2] {
    [0, 1].map(MakaniFile::of_rank)
}

#[test]
fn valid_grid_is_read() {
    let (env, source) = write(&two_ranks());
    let found = dtshard(&[&"inspect", &source]);
    found.assert_succeeded().assert_mentions(&["[4, 3]", "S(0)", "h=2 (2 ranks)"]);
    dtshard(&[&"consolidate", &source, &env.path("out")]).assert_succeeded();
}

#[test]
fn contradictions_in_makani_files_are_refused() {
    type Change = fn(&mut [MakaniFile; 2]);
    let cases: [(&str, Change, &[&str]); 15] = [
        ("one dim in the list", |files| files[0].dims = Some(&["h"]), &["each of 2 dims", "found 1 item"]),
        ("a number in the list", |files| files[1].dims = Some(&["h", "7"]), &["each of 2 dims", "found other items"]),
        ("another list", |files| files[1].dims = Some(&["None", "h"]), &["[h, None]", "[None, h]", "rank 1"]),
        ("no list", |files| files[1].dims = None, &["rank 1 has none"]),
        ("no such group", |files| files.iter_mut().for_each(|file| file.dims = Some(&["q", "None"])), &["w", "`q`"]),
        ("a group twice", |files| files.iter_mut().for_each(|file| file.dims = Some(&["h", "h"])), &["`h` twice"]),
        ("another width", |files| files[1].sizes = [2, 2], &["ckpt_mp1", "[2, 3]", "found [2, 2]"]),
        ("no tensor", |files| files[1].has_tensor = false, &["ckpt_mp1", "w", "found none"]),
        ("no grid", |files| files.iter_mut().for_each(|file| file.grid.clear()), &["has no `comm_grid`", "--src-mesh"]),
        ("a file without grid", |files| files[1].grid.clear(), &["ckpt_mp1", "comm_grid", "found none"]),
        ("another size", |files| files[1].grid[2].1 = 2, &["grid of ranks differs", "w=1", "w=2"]),
        ("position 2 of 2", |files| files[1].grid[3].2 = 2, &["ckpt_mp1", "h", "below 2"]),
        (
            "equal positions",
            |files| files[1].grid[1..].iter_mut().for_each(|group| group.2 = 0),
            &["2 ranks a different position"],
        ),
        ("swapped ranks", |files| files.swap(0, 1), &["the file of rank 0", "saved by rank 1"]),
        (
            "a grid of 3 ranks",
            |files| files.iter_mut().for_each(|file| file.grid.iter_mut().for_each(|group| group.1 += 1)),
            &["the files of 3 ranks", "missing: rank 2"],
        ),
    ];
    for (case, change, words) in cases {
        let mut files = two_ranks();
        change(&mut files);
        let (env, source) = write(&files);
        let before = env.names();
        let refused = dtshard(&[&"consolidate", &source, &env.path("out")]);
        assert_eq!((case, refused.code), (case, Some(2)), "{refused:?}");
        refused.assert_refused(words);
        assert_eq!(env.names(), before, "{case}");
        dtshard(&[&"inspect", &source]).assert_no_crash();
    }
}

#[test]
fn huge_numbers_in_a_grid_are_refused() {
    for size in [0, -1, i64::MAX] {
        let mut files = two_ranks();
        files.iter_mut().for_each(|file| file.grid[3].1 = size);
        let (env, source) = write(&files);
        dtshard(&[&"consolidate", &source, &env.path("out")]).assert_refused(&["comm_grid"]);
    }
    let mut files = two_ranks();
    let names = ["a", "b", "c", "d", "e", "f", "g", "i", "j", "k", "l", "m"];
    files.iter_mut().for_each(|file| file.grid.extend(names.map(|name| (name, 2, 0))));
    let (env, source) = write(&files);
    dtshard(&[&"consolidate", &source, &env.path("out")])
        .assert_refused(&["comm_grid", "2 ranks a different position"]);
}

/// dtshard compares the replicas, because makani itself never does.
#[test]
fn replicas_that_differ_are_refused() {
    let (env, source) = write(&two_ranks().map(|file| MakaniFile { dims: Some(&["None", "None"]), ..file }));
    dtshard(&[&"consolidate", &source, &env.path("same")]).assert_succeeded();
    let mut bytes = two_ranks().map(|file| MakaniFile { dims: Some(&["None", "None"]), ..file })[1].bytes();
    let at = find(&bytes, &STORAGE).unwrap();
    bytes[at + 4] = 8;
    let mut entries = unzip(&bytes);
    for entry in &mut entries {
        *entry = ZipEntry::new(&entry.name, std::mem::take(&mut entry.data));
    }
    env.write("src/ckpt_mp1_v0.tar", zip(&entries));
    let refused = dtshard(&[&"consolidate", &source, &env.path("out")]);
    refused.assert_refused(&["a plain tensor differs", "rank 0 and rank 1", "record that these ranks hold replicas"]);
}

/// Returns a file with a model and an optimizer. The parameter `w` is sharded over `h`. The tensor `a` is plain, and
/// has the shape of the local part of `w`, so the optimizer state with number 0 may belong to `a` or to `w`.
fn with_numbered_state(rank: i64) -> Vec<u8> {
    let file = MakaniFile::of_rank(rank);
    let plain = |offset| MakaniFile { dims: None, offset, ..file.clone() };
    let mut writer = Writer::new();
    writer.empty_dict().mark().string("model_state").empty_dict().mark().string("a");
    plain(6).write_tensor(&mut writer);
    writer.string("w");
    file.write_tensor(&mut writer);
    writer.setitems().string("comm_grid").empty_dict().mark();
    for (name, size, position) in &file.grid {
        writer.string(name).empty_dict().mark();
        writer.string("size").int(*size).string("rank").int(*position).setitems();
    }
    writer.setitems().string("optimizer_state_dict").empty_dict().mark();
    writer.string("state").empty_dict().int(0).empty_dict().string("exp_avg");
    plain(12).write_tensor(&mut writer);
    writer.setitem().setitem();
    writer.string("param_groups").empty_list().empty_dict().string("params").empty_list().int(0).append();
    writer.setitem().append().setitems().setitems();
    torch_file(writer.finish(), &[("0", &STORAGE)])
}

/// The shards of the state have equal values, so a comparison of ranks would wrongly take them for replicas.
#[test]
fn numbered_state_of_unknown_layout_is_refused_if_selected() {
    let env = TestEnv::new();
    for rank in 0..2 {
        env.write(&format!("src/ckpt_mp{rank}_v0.tar"), with_numbered_state(rank));
    }
    let source = env.path("src");
    let words = ["optimizer_state_dict.state.0.exp_avg", "the parameter with this index is unknown"];
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_refused(&words);
    dtshard(&[&"reshard", &source, &env.path("out"), &"--mesh", &"h=4"]).assert_refused(&words);
    dtshard(&[&"inspect", &source]).assert_succeeded().assert_mentions(&["exp_avg  f32    [2, 3]  unknown"]);
    dtshard(&[&"verify", &source]).assert_succeeded().assert_mentions(&["a tensor of unknown layout"]);
    dtshard(&[&"consolidate", &source, &env.path("model")]).assert_succeeded();
    let declared: [&dyn AsRef<std::ffi::OsStr>; 5] =
        [&"unshard", &source, &env.path("all.pt"), &"--src-placements", &"optimizer_state_dict.state.0=S(0)"];
    dtshard(&declared).assert_succeeded();
    dtshard(&[&"inspect", &env.path("all.pt")]).assert_mentions(&["exp_avg  f32    [4, 3]"]);
}
