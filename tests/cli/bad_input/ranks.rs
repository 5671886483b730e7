//! Tests of rank files that contradict each other.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::env::TestEnv;
use crate::corrupt::{
    View, ZipEntry, copy_all, dict_of, dtshard, edit_entries, edit_pickle, find, fixture, replace, torch_file,
};

fn rank(source: &Path, world_size: u32, rank: u32) -> PathBuf {
    source.join(format!("model_world_size_{world_size}_rank_{rank}.pt"))
}

/// Writes the files of rank 0 and rank 1 with these pickles, each with a storage of 16 bytes.
fn two_rank_files(first: Vec<u8>, second: Vec<u8>) -> (TestEnv, PathBuf) {
    let env = TestEnv::new();
    for (index, pickle) in [first, second].into_iter().enumerate() {
        let bytes = torch_file(pickle, &[("0", b"0123456789abcdef")]);
        env.write(&format!("src/model_world_size_2_rank_{index}.pt"), bytes);
    }
    let source = env.path("src");
    (env, source)
}

const VIEW: View<'static> = View { key: "0", numel: 4, offset: 0, sizes: &[4], strides: &[1] };

#[test]
fn differing_values_and_shapes_of_ranks_are_refused() {
    for (case, series, words) in [
        ("conflict/tensor", "model", ["differs: a plain tensor differs", "rank 0 and rank 1", "[2, 1]"]),
        ("conflict/object", "extra_state", ["step: an object differs", "rank 0 has 7", "rank 1 has 8"]),
        ("conflict/shape", "model", ["differs: shape differs", "rank 0 has [3, 3]", "rank 1 has [4, 3]"]),
    ] {
        let env = TestEnv::new();
        let source = env.copy(case);
        let before = env.names();
        let target = env.path("out.pt");
        let refused = dtshard(&[&"unshard", &source, &target, &"--series", &series]);
        refused.assert_refused(&[&words[..], &["hint: "]].concat());
        assert_eq!(env.names(), before);
        let found = dtshard(&[&"verify", &source]);
        assert_eq!(found.code, Some(1), "{case}: {found:?}");
        found.assert_mentions(&["rank 0", "rank 1"]);
    }
    // `verify` compares replicas of a DTensor.
    let found = dtshard(&[&"verify", &fixture("conflict/replica")]);
    assert_eq!(found.code, Some(1), "{found:?}");
    found.assert_mentions(&["differs: replica", "rank 0 and rank 1", "[2, 1]"]);
}

#[test]
fn differing_kinds_and_dtypes_of_ranks_are_refused() {
    let dict = |view: &View<'_>| dict_of("w", |writer| view.write(writer));
    let plain = dict(&VIEW);
    let mut ints = plain.clone();
    replace(&mut ints, b"FloatStorage", b"IntStorage");
    let (env, source) = two_rank_files(plain.clone(), ints);
    env.assert_bad_input(&source);
    let (env, source) = two_rank_files(plain.clone(), dict_of("w", |writer| _ = writer.int(3)));
    env.assert_bad_input(&source);
    let (env, source) = two_rank_files(plain.clone(), torch_list());
    env.assert_bad_input(&source);
    let (env, source) = two_rank_files(plain, dict(&View { sizes: &[2, 2], strides: &[2, 1], ..VIEW }));
    env.assert_bad_input(&source);
}

/// Messages show the dtype and the shape of a tensor in an object, and list the ranks once.
#[test]
fn differing_objects_of_many_ranks_are_refused() {
    let values_of = |value: fn(i64) -> i64| {
        let env = TestEnv::new();
        for rank in 0..6 {
            let pickle = dict_of("pair", |writer| {
                VIEW.write(writer);
                writer.int(value(rank)).tuple(2);
            });
            let file = torch_file(pickle, &[("0", b"0123456789abcdef")]);
            env.write(&format!("src/model_world_size_6_rank_{rank}.pt"), file);
        }
        let refused = dtshard(&[&"unshard", &env.path("src"), &env.path("out.pt")]);
        refused.assert_refused(&["pair: an object differs between ranks "]);
        refused.err
    };
    let message = values_of(|rank| rank % 2);
    assert!(message.contains("ranks 0, 2, 4 have (<f32 [4]>, 0); ranks 1, 3, 5 have (<f32 [4]>, 1)\n"), "{message}");
    let message = values_of(|rank| rank);
    assert!(message.contains("between ranks 0, 1, 2, 3, 4, 5: rank 0 has (<f32 [4]>, 0); rank 1 has "), "{message}");
    assert!(message.contains("and 2 more values"), "{message}");
}

fn torch_list() -> Vec<u8> {
    let mut writer = torch_pickle::pickle::Writer::new();
    writer.empty_list();
    VIEW.write(&mut writer);
    writer.append();
    writer.finish()
}

/// One rank has two tied names. The other rank has only one of the names, or has both names untied.
#[test]
fn ties_of_some_ranks_are_read_where_values_agree() {
    let names = |names: &[&str], tied: bool| {
        let mut writer = torch_pickle::pickle::Writer::new();
        writer.empty_dict();
        for (index, name) in (0..).zip(names) {
            writer.string(name);
            View { offset: if tied { 0 } else { index }, sizes: &[2], ..VIEW }.write(&mut writer);
            writer.setitem();
        }
        writer.finish()
    };
    let (env, source) = two_rank_files(names(&["a"], true), names(&["a", "b"], true));
    dtshard(&[&"verify", &source]).assert_succeeded();
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_succeeded();
    let (env, source) = two_rank_files(names(&["a", "b"], true), names(&["b"], true));
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_succeeded();
    let (env, source) = two_rank_files(names(&["a", "b"], true), names(&["a", "b"], false));
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_refused(&["a plain tensor differs"]);
    let (env, source) = two_rank_files(names(&["a", "b"], false), names(&["a", "b"], true));
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_refused(&["b: a plain tensor differs"]);
}

#[test]
fn file_of_another_rank_is_refused() {
    let env = TestEnv::new();
    let source = env.copy("fsdp3/ranks");
    fs::copy(rank(&source, 3, 1), rank(&source, 3, 0)).unwrap();
    env.assert_bad_input(&source);

    let env = TestEnv::new();
    let source = env.copy("fsdp1_sharded/ranks");
    fs::rename(rank(&source, 4, 0), env.path("kept")).unwrap();
    fs::rename(rank(&source, 4, 2), rank(&source, 4, 0)).unwrap();
    fs::rename(env.path("kept"), rank(&source, 4, 2)).unwrap();
    env.assert_bad_input(&source);
}

#[test]
fn contradicting_world_sizes_are_refused() {
    let env = TestEnv::new();
    let source = env.copy("fsdp3/ranks");
    copy_all(&fixture("fsdp4/ranks"), &source);
    env.assert_bad_input(&source);

    for name in [
        "model_world_size_4294967295_rank_0.pt",
        "model_rank_4294967295.pt",
        "model_world_size_0_rank_0.pt",
        "model_world_size_3_rank_3.pt",
    ] {
        let env = TestEnv::new();
        let only = fixture("conflict/missing/model_world_size_2_rank_0.pt");
        let source = env.path("src");
        fs::create_dir(&source).unwrap();
        fs::copy(only, source.join(name)).unwrap();
        env.assert_bad_input(&source);
    }
    // Files whose numbers exceed every valid rank do not count as rank files.
    let env = TestEnv::new();
    let name = "src/model_world_size_99999999999_rank_99999999999.pt";
    env.write(name, torch_file(dict_of("w", |writer| VIEW.write(writer)), &[("0", b"0123456789abcdef")]));
    dtshard(&[&"inspect", &env.path("src")]).assert_no_crash();
    // Two files have the same rank.
    let env = TestEnv::new();
    let source = env.copy("fsdp3/ranks");
    fs::copy(rank(&source, 3, 1), source.join("model_world_size_3_rank_01.pt")).unwrap();
    env.assert_bad_input(&source);
}

/// Copies a fixture, and changes the pickle in the model file of each rank in `ranks`.
fn with_pickles(case: &str, ranks: &[u32], world_size: u32, change: impl Fn(&mut Vec<u8>)) -> (TestEnv, PathBuf) {
    let env = TestEnv::new();
    let source = env.copy(case);
    for &index in ranks {
        edit_pickle(&rank(&source, world_size, index), &change);
    }
    (env, source)
}

const SHARD: &[u8] = b"placement_types\nShard\n";
const REPLICATE: &[u8] = b"placement_types\nReplicate\n";

#[test]
fn placements_that_contradict_the_local_shape_are_refused() {
    let (env, source) = with_pickles("fsdp3/ranks", &[0, 1, 2], 3, |pickle| replace(pickle, SHARD, REPLICATE));
    env.assert_bad_input(&source);
    // The dim of every shard is out of range.
    let (env, source) = with_pickles("fsdp3/ranks", &[0, 1, 2], 3, |pickle| {
        let at = find(pickle, b"X\x03\0\0\0dim").expect("a Shard with its dim") + 8;
        let value = at + pickle[at..at + 8].iter().position(|byte| *byte == b'K').unwrap() + 1;
        pickle[value] = 200;
    });
    env.assert_bad_input(&source);
    let (env, source) = with_pickles("fsdp3/ranks", &[1], 3, |pickle| replace(pickle, SHARD, REPLICATE));
    env.assert_bad_input(&source);
}

/// Both ranks hold the complete tensor, but one rank records it as a partial value.
#[test]
fn placements_that_differ_between_ranks_are_refused() {
    for (changed, words) in [(0, ["P(sum)", "rank 0"]), (1, ["P(sum)", "rank 1"])] {
        let (env, source) = with_pickles("conflict/replica", &[changed], 2, |pickle| {
            replace(pickle, REPLICATE, b"placement_types\nPartial\n");
            // The pickle state of a Replicate is empty, and the state of a Partial has its reduce op.
            let at = find(pickle, b"placement_types\nPartial\n").unwrap() + b"placement_types\nPartial\n".len();
            let made = at + pickle[at..].iter().position(|byte| *byte == 0x81).expect("NEWOBJ") + 1;
            let inside = made + b"q.}q.".len();
            let state = b"X\x09\0\0\0reduce_opX\x03\0\0\0sums";
            pickle.splice(inside..inside, state.iter().copied());
        });
        dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_refused(&["layout differs", words[0], words[1]]);
    }
}

#[test]
fn mesh_without_the_rank_is_refused() {
    let ranks: Vec<u8> = (0..3_i32).flat_map(i32::to_le_bytes).collect();
    for others in [[7, 8, 9], [0, 0, 0], [-1, -2, -3]] {
        let env = TestEnv::new();
        let source = env.copy("fsdp3/ranks");
        for index in 0..3 {
            edit_entries(&rank(&source, 3, index), |entries| {
                let mut found = false;
                for entry in entries.iter_mut().filter(|entry| entry.data == ranks) {
                    let bytes: Vec<u8> = others.iter().flat_map(|rank: &i32| rank.to_le_bytes()).collect();
                    *entry = ZipEntry::new(&entry.name, bytes);
                    found = true;
                }
                assert!(found, "a record with the ranks of the mesh");
            });
        }
        env.assert_bad_input(&source);
    }
}

/// The error names the file and the tensor, and says why this private placement of PyTorch cannot be converted.
#[test]
fn private_partial_placements_are_refused_with_the_reason() {
    for (class, why) in
        [("_MaskPartial", "whose mask is not saved"), ("_NormPartial", "an intermediate value of a norm")]
    {
        let (env, source) = with_pickles("partial2/ranks", &[0, 1], 2, |pickle| {
            replace(pickle, b"placement_types\nPartial\n", format!("placement_types\n{class}\n").as_bytes());
        });
        dtshard(&[&"inspect", &source]).assert_succeeded().assert_mentions(&["unreadable  sum.f32 (", class, why]);
        dtshard(&[&"verify", &source]).assert_refused(&["rank_0.pt", "sum.f32", class, why]);
        dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_refused(&["rank_0.pt", "sum.f32", class, why]);
    }
}

/// The placement has a reduce op that is not defined for the dtype (`bor` of f32). `verify` and digests accept this,
/// because they do not need the reduced value.
#[test]
fn undefined_reduction_is_an_error_of_unshard_only() {
    let (env, source) = with_pickles("partial2/ranks", &[0, 1], 2, |pickle| {
        let at = find(pickle, b"X\x03\0\0\0avg").expect("a reduce op") + 5;
        pickle[at - 4] = 3;
        pickle.splice(at..at + 3, *b"bor");
    });
    dtshard(&[&"inspect", &source, &"--digest"])
        .assert_succeeded()
        .assert_mentions(&["P(bor)", "the reduce op bor is not defined for f32"]);
    dtshard(&[&"unshard", &source, &env.path("out.pt")])
        .assert_refused(&["avg.f32: the reduce op bor is not defined for f32", "hint: "]);
    dtshard(&[&"verify", &source]).assert_succeeded();
}

#[test]
fn one_rank_file_of_several_is_refused() {
    let env = TestEnv::new();
    let source = rank(&env.copy("fsdp4/ranks"), 4, 2);
    dtshard(&[&"inspect", &source]).assert_succeeded().assert_mentions(&["1 of 4"]);
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_refused(&["1 of 4", "give the folder"]);
    dtshard(&[&"verify", &source]).assert_refused(&["1 of 4"]);
}

/// A tensor in a tuple has no name of its own, so options address the tuple.
#[test]
fn on_conflict_applies_to_the_tuple_of_a_differing_tensor() {
    let env = TestEnv::new();
    let pickle = dict_of("pair", |writer| {
        VIEW.write(writer);
        writer.int(1).tuple(2);
    });
    for (index, data) in [b"0123456789abcdef", b"0123456789ABCDEF"].into_iter().enumerate() {
        env.write(&format!("src/model_world_size_2_rank_{index}.pt"), torch_file(pickle.clone(), &[("0", &data[..])]));
    }
    let source = env.path("src");
    let reshard = |target: &str, choice: &str| {
        let target = env.path(target);
        dtshard(&[&"reshard", &source, &target, &"--mesh=dp=2", &"--to=dcp", &"--on-conflict", &choice])
    };
    reshard("dropped", "drop").assert_succeeded().assert_mentions(&["left out: 1 tensor (differing)"]);
    reshard("each", "per-rank")
        .assert_succeeded()
        .assert_mentions(&["1 value differs between ranks (`pair`), so each rank keeps its own value"]);
    dtshard(&[&"inspect", &env.path("each")]).assert_succeeded().assert_mentions(&["pair.rank_0.0", "pair.rank_1.0"]);
    reshard("first", "rank0")
        .assert_succeeded()
        .assert_mentions(&["1 value differs between ranks (`pair.0`), so the value of the lowest rank is used"]);
}

#[test]
fn value_of_some_ranks_only_is_refused() {
    let (with, without) =
        (|value: i64| dict_of("a", move |writer| _ = writer.int(value)), dict_of("b", |writer| _ = writer.int(0)));
    let env = TestEnv::new();
    for (index, pickle) in [without, with(1), with(2)].into_iter().enumerate() {
        env.write(&format!("src/model_world_size_3_rank_{index}.pt"), torch_file(pickle, &[]));
    }
    env.assert_bad_input(&env.path("src"));
}

/// A Python dict may have the keys `0` and `"0"` at the same time.
#[test]
fn int_key_and_string_key_of_equal_digits_are_distinct() {
    let pickle = |number_first: bool| {
        let mut writer = torch_pickle::pickle::Writer::new();
        writer.empty_dict();
        for is_number in [number_first, !number_first] {
            if is_number {
                writer.int(0).int(1).setitem()
            } else {
                writer.string("0").int(2).setitem()
            };
        }
        writer.finish()
    };
    let (_env, source) = two_rank_files(pickle(true), pickle(false));
    dtshard(&[&"verify", &source]).assert_succeeded();
}

/// A key from a file must not become a path outside the destination.
#[test]
fn series_name_with_path_stays_in_the_destination() {
    let env = TestEnv::new();
    let mut writer = torch_pickle::pickle::Writer::new();
    writer.empty_dict();
    for key in ["model", "../../evil"] {
        writer.string(key).empty_dict().string("w");
        VIEW.write(&mut writer);
        writer.setitem().setitem();
    }
    let source = env.write("src/a.pt", torch_file(writer.finish(), &[("0", b"0123456789abcdef")]));
    let target = env.path("deep/out");
    dtshard(&[&"reshard", &source, &target, &"--mesh=dp=2", &"--to=torch-ranks"]).assert_succeeded();
    let written = env.names().into_iter().filter(|name| env.path(name).is_file() && !name.starts_with("deep/out"));
    assert_eq!(written.collect::<Vec<_>>(), ["src/a.pt"]);
}

/// The tensor differs between ranks. If it were sharded, each rank would keep only a shard of its own value, and the
/// other elements would be lost.
#[test]
fn per_rank_tensor_is_kept_whole() {
    let env = TestEnv::new();
    let data = [b"0123456789abcdef", b"0123456789ABCDEF"];
    for (index, data) in data.into_iter().enumerate() {
        let pickle = dict_of("own", |writer| VIEW.write(writer));
        env.write(&format!("src/model_world_size_2_rank_{index}.pt"), torch_file(pickle, &[("0", &data[..])]));
    }
    let (source, target) = (env.path("src"), env.path("out"));
    dtshard(&[&"reshard", &source, &target, &"--mesh=dp=2", &"--placements=S(0)", &"--on-conflict=per-rank"])
        .assert_succeeded();
    for (index, data) in data.into_iter().enumerate() {
        let bytes = fs::read(rank(&target, 2, u32::try_from(index).unwrap())).unwrap();
        assert!(find(&bytes, data).is_some(), "rank {index} lost its own");
    }
}
