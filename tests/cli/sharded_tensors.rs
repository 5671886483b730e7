//! Tests of rank files of ShardedTensors, which are written as FSDP1 writes them and read back.

use std::path::Path;

use crate::common::{Kind, assert_same, case, expect, fixture, read, succeed};
use dtshard::format::torch::{TensorNode, reader};
use dtshard::format::{Checkpoint, ReadOptions};
use dtshard::layout::{Region, chunk};
use dtshard::storage::{Files, IoMode};
use torch_pickle::pickle::Unknown;

const SERIES: [&str; 2] = ["model", "optim"];

/// Returns the tensors in the file of one rank, in the order of the file.
fn tensors_of_file(folder: &Path, series: &str, world_size: u32, rank: u32) -> Vec<TensorNode> {
    let mut files = Files::new(IoMode::Read);
    let file = files.add(folder.join(format!("{series}_world_size_{world_size}_rank_{rank}.pt"))).unwrap();
    reader::read(&files, files.whole(file), "", Unknown::Refuse).unwrap().tensors
}

/// Returns a text with the class, dtype, shape and region of a tensor, without the storage keys.
fn description(found: &TensorNode) -> String {
    match found {
        TensorNode::Plain(view) => format!("{} {:?}", view.dtype, view.sizes),
        TensorNode::Distributed { shape, placements, .. } => format!("DTensor {shape:?} {placements:?}"),
        TensorNode::Sharded { dtype, shape, group, local, all, .. } => {
            let local: Vec<&Region> = local.iter().map(|(region, _)| region).collect();
            format!("ShardedTensor {dtype} {shape:?} of {}: {local:?} of {all:?}", group.rank)
        }
        TensorNode::Unreadable(kind) => panic!("{kind}"),
    }
}

/// Asserts that each rank has its part of `torch.chunk` over the ranks of its group. The position of a rank in its
/// group is `rank % group_size`. Returns the number of ShardedTensors.
fn assert_boxes(folder: &Path, series: &str, world_size: u32, group_size: u32) -> usize {
    let mut sharded = 0;
    for rank in 0..world_size {
        for found in tensors_of_file(folder, series, world_size, rank) {
            let TensorNode::Sharded { dtype, shape, group, local, all, .. } = found else { continue };
            let boxes = (0..u64::from(group_size)).map(|part| {
                let rows = chunk(shape[0], group_size.into(), part);
                let mut region = Region::whole(&shape);
                (region.offsets[0], region.sizes[0]) = (rows.start, rows.end - rows.start);
                region
            });
            let boxes: Vec<Region> = boxes.collect();
            let own = &boxes[(rank % group_size) as usize];
            assert_eq!(all.to_vec(), boxes.iter().filter(|region| !region.is_empty()).cloned().collect::<Vec<_>>());
            assert_eq!(local.len(), usize::from(!own.is_empty()));
            for (region, view) in local {
                assert_eq!((&region, &view.sizes, view.dtype, group.rank), (own, &own.sizes, dtype, rank));
            }
            sharded += 1;
        }
    }
    sharded
}

#[test]
fn sharded_tensors_resharded_to_six_and_back_equal_pytorch() {
    let (original, folder) = (fixture("fsdp1_sharded/ranks"), tempfile::tempdir().unwrap());
    let (six, four) = (folder.path().join("six"), folder.path().join("four"));
    succeed("reshard", &[&original, &six], "--mesh fsdp=6");
    succeed("reshard", &[&six, &four], "--mesh fsdp=4");
    for series in SERIES {
        for rank in 0..4 {
            let own: Vec<String> = tensors_of_file(&four, series, 4, rank).iter().map(description).collect();
            let expected: Vec<String> = tensors_of_file(&original, series, 4, rank).iter().map(description).collect();
            assert_eq!(own, expected, "{series} of rank {rank}");
        }
    }
}

#[test]
fn sharded_tensors_on_any_number_of_ranks_keep_values() {
    let expected = case("fsdp1_sharded").into_iter().find(|source| source.kind == Kind::Ranks).unwrap().expected();
    let original = fixture("fsdp1_sharded/ranks");
    for world_size in [1, 2, 3, 4, 6, 11] {
        let folder = tempfile::tempdir().unwrap();
        let (there, dcp, back) = (folder.path().join("there"), folder.path().join("dcp"), folder.path().join("back"));
        succeed("reshard", &[&original, &there], &format!("--mesh fsdp={world_size} --verify"));
        assert_same(&read(&there), &expected, "there");
        let sharded: usize = SERIES.iter().map(|series| assert_boxes(&there, series, world_size, world_size)).sum();
        // There are 10 parameters with two moments each. On one rank, FSDP1 has plain tensors.
        assert_eq!(sharded, if world_size == 1 { 0 } else { 30 * world_size as usize });

        succeed("reshard", &[&there, &dcp], "--to dcp --mesh fsdp=3");
        succeed("reshard", &[&dcp, &back], "--to torch-ranks --mesh fsdp=4 --tensor-class sharded-tensor");
        assert_same(&read(&back), &expected, "back");
        assert_eq!(SERIES.iter().map(|series| assert_boxes(&back, series, 4, 4)).sum::<usize>(), 30 * 4);
    }
}

#[test]
fn hybrid_sharding_has_one_group_per_replica() {
    let folder = tempfile::tempdir().unwrap();
    let (hybrid, four) = (folder.path().join("hybrid"), folder.path().join("four"));
    let original = fixture("fsdp1_sharded/ranks");
    succeed("reshard", &[&original, &hybrid], "--mesh rep=2,fsdp=3 --placements R,S(0) --verify");
    assert_eq!(assert_boxes(&hybrid, "model", 6, 3), 10 * 6);
    assert_eq!(assert_boxes(&hybrid, "optim", 6, 3), 20 * 6);
    succeed("verify", &[&original, &hybrid], "");
    succeed("reshard", &[&hybrid, &four], "--mesh fsdp=4 --check-replicas");
    assert_boxes(&four, "model", 4, 4);
    succeed("verify", &[&original, &four], "");
}

#[test]
fn uneven_empty_and_scalar_tensors_of_every_dtype_are_written() {
    let (source, folder) = (fixture("odd4/ranks"), tempfile::tempdir().unwrap());
    for world_size in [3, 5, 16] {
        let out = folder.path().join(world_size.to_string());
        let options = format!("--mesh other={world_size} --placements S(0) --tensor-class sharded-tensor");
        succeed("reshard", &[&source, &out], &options);
        succeed("verify", &[&source, &out], "");
        let sharded = assert_boxes(&out, "model", world_size, world_size);
        assert!(sharded > 10 * world_size as usize);
        // These are scalars, and tensors without elements.
        let whole = tensors_of_file(&out, "model", world_size, 0).into_iter().filter(|found| match found {
            TensorNode::Plain(view) => view.sizes.is_empty() || view.sizes.contains(&0),
            _ => false,
        });
        assert!(whole.count() >= 4);
    }
}

#[test]
fn tensor_class_follows_the_source_or_the_option() {
    let folder = tempfile::tempdir().unwrap();
    let embedding = |source: &str, options: &str| {
        let out = folder.path().join(format!("{}{options}", source.replace('/', "-")));
        succeed("reshard", &[&fixture(source), &out], &format!("--to torch-ranks --mesh fsdp=2 {options}"));
        let shared =
            tensors_of_file(&out, "model", 2, 1).iter().map(description).find(|text| text.contains("[10, 3]")).unwrap();
        shared.split(' ').next().unwrap().to_owned()
    };
    for (source, usual) in
        [("fsdp1_sharded/ranks", "ShardedTensor"), ("fsdp1_sharded/dcp", "DTensor"), ("fsdp4/ranks", "DTensor")]
    {
        assert_eq!(embedding(source, ""), usual, "{source}");
        assert_eq!(embedding(source, "--tensor-class auto"), usual, "{source}");
        assert_eq!(embedding(source, "--tensor-class dtensor"), "DTensor", "{source}");
        assert_eq!(embedding(source, "--tensor-class sharded-tensor"), "ShardedTensor", "{source}");
    }
}

#[test]
fn tied_tensors_stay_tied() {
    let (source, folder) = (fixture("torch_file/model.pt"), tempfile::tempdir().unwrap());
    let out = folder.path().join("out");
    succeed("reshard", &[&source, &out], "--to torch-ranks --mesh fsdp=3 --tensor-class sharded-tensor");
    succeed("verify", &[&source, &out], "");
    let tensors = |path: &Path| Checkpoint::open(path, &ReadOptions::default()).unwrap().catalog.tensors.len();
    assert_eq!(tensors(&out), tensors(&source));
    assert!(tensors(&out) < read(&out).len());
}

#[test]
fn sharded_tensors_that_fsdp1_cannot_read_are_refused() {
    let (source, folder) = (fixture("fsdp1_sharded/ranks"), tempfile::tempdir().unwrap());
    let assert_refused = |options: &str, words: &[&str]| {
        let outcome = expect(2, "reshard", &[&source, &folder.path().join("x")], options);
        assert!(words.iter().all(|word| outcome.stderr.contains(word)), "{options}: {}", outcome.stderr);
    };
    let placements = ["model.embed.weight: a ShardedTensor cannot have the placements", "--tensor-class dtensor"];
    assert_refused("--mesh a=2,b=2 --placements S(0),S(1)", &placements);
    assert_refused("--mesh a=2,b=2 --placements S(0),S(0)", &placements);
    assert_refused("--mesh a=4 --placements S(1)", &placements);
    assert_refused("--mesh a=4 --placements _S(0,2)", &placements);
    assert_refused("--mesh a=4 --mesh-ranks 0,2,1,3", &["on ranks 0,2,1,3 in this order"]);
    assert_refused(
        "--mesh a=2,b=2 --placements **.w1=R,S(0) --placements S(0),R",
        &["the ShardedTensors `embed.weight` and `blocks.0.w1.weight` are sharded over different mesh dims"],
    );
    assert_refused("--mesh a=2 --to dcp --tensor-class sharded-tensor", &["--tensor-class needs rank files"]);
    let out = folder.path().join("out");
    succeed("reshard", &[&source, &out], "--mesh a=2,b=1,c=1 --placements S(0),S(1),_S(0,2)");
    assert_eq!(assert_boxes(&out, "model", 2, 2), 10 * 2);
}
