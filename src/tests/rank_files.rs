//! Tests that rank files that dtshard writes are read back by dtshard's reader with equal state dicts, meshes,
//! placements and bytes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::catalog::{Catalog, ChunkTable, Fqn, RankValue, Reservation, TensorEntry, TensorId, Value, state_dict};
use crate::exec::{Extents, Input, Options, Silent, Stop, compare, copy};
use crate::format::safetensors::SelectedTensors;
use crate::format::torch::{DTensorStyle, RankLayout, RankTarget, Release, reserve_ranks};
use crate::format::{Checkpoint, ReadOptions, SeriesChoice, dcp, resolve, safetensors, torch};
use crate::layout::{DeviceMesh, MeshDim, Placement, Rank, Tile, local_shard, parse_placements};
use crate::publish::work_log::{AtEnd, Log};

use torch_pickle::pickle::Unknown;

use super::fixture;

const OPTIONS: Options =
    Options { threads: 2, write_block_bytes: 1 << 10, transposed_block_bytes: 1 << 10, sync: false };

fn open(path: &Path) -> Checkpoint {
    let series = SeriesChoice::Named(vec!["model".into()]);
    Checkpoint::open(path, &ReadOptions { series, ..ReadOptions::default() }).unwrap()
}

/// Returns a copy of the catalog in which tensors have no chunks.
fn without_chunks(catalog: &Catalog) -> Catalog {
    let mut without_chunks = catalog.clone();
    for entry in &mut without_chunks.tensors {
        entry.chunks = ChunkTable::new(entry.shape.len());
    }
    without_chunks
}

fn input(checkpoint: &Checkpoint) -> Input<'_> {
    Input { files: &checkpoint.files, catalog: &checkpoint.catalog, resolve: &resolve }
}

fn mesh(names: &str, ranks: &[u32]) -> DeviceMesh {
    let mesh = DeviceMesh::parse(names).unwrap();
    if ranks.is_empty() {
        return mesh;
    }
    let ranks = ranks.iter().copied().map(Rank).collect();
    DeviceMesh::new(mesh.shape(), ranks, mesh.names().map(<[String]>::to_vec)).unwrap()
}

/// Returns one placement for each mesh dim, from a text such as `S(0),R`. A placement that does not fit the tensor
/// becomes Replicate.
fn placements(list: &str, entry: &TensorEntry) -> Vec<Placement> {
    let specs = parse_placements(list).unwrap();
    specs.into_iter().map(|spec| spec.resolve(entry.shape.len()).unwrap_or(Placement::Replicate)).collect()
}

fn reserve(catalog: &Catalog, state: &Value, mesh: &DeviceMesh, list: &str, style: &DTensorStyle) -> Reservation {
    let target = RankTarget {
        mesh,
        world_size: mesh.job_size(),
        style,
        name: &|rank| PathBuf::from(format!("model_world_size_{}_rank_{rank}.pt", mesh.job_size())),
        layout: &mut |_, _, entry| {
            Ok(match entry.sharding {
                None => RankLayout::Plain,
                Some(_) => RankLayout::Distributed { placements: placements(list, entry), slice: None },
            })
        },
    };
    reserve_ranks(&without_chunks(catalog), state, target).unwrap()
}

/// Checks, for every file, that the data of tensors is in the order of the reservation's tensors, and that no two
/// tensors overlap.
fn check_order(reservation: &Reservation) {
    let mut ends: BTreeMap<u32, u64> = BTreeMap::new();
    for tensor in &reservation.tensors {
        for index in 0..tensor.entry.chunks.len() {
            let Some((file, offset)) = tensor.file_offset(index) else { continue };
            let end = ends.insert(file, offset + tensor.chunk_bytes(index)).unwrap_or(0);
            assert!(offset >= end, "{} in file {file}", tensor.entry.fqn);
        }
    }
}

fn check(case: &str, mesh: &DeviceMesh, list: &str, release: Release) {
    let source = open(&fixture(case).join("ranks"));
    let style = DTensorStyle { release, device_type: "cuda".into() };
    let reservation = reserve(&source.catalog, &source.catalog.state, mesh, list, &style);
    check_order(&reservation);
    assert_eq!(reservation.files.len(), mesh.job_size() as usize);
    let folder = tempfile::tempdir().unwrap();
    fill(&source, &reservation, folder.path());

    let written = open(folder.path());
    assert_eq!(written.catalog.state, source.catalog.state, "{case}");
    assert!(written.catalog.warnings.is_empty());
    assert_eq!(written.catalog.tensors.len(), source.catalog.tensors.len());
    for ((found, expected), reserved) in
        written.catalog.tensors.iter().zip(&source.catalog.tensors).zip(&reservation.tensors)
    {
        let name = format!("{case} {}", expected.fqn);
        assert_eq!((&found.fqn, found.dtype, &found.shape), (&expected.fqn, expected.dtype, &expected.shape));
        let list = expected.sharding.as_ref().map(|_| placements(list, expected));
        assert_eq!(found.sharding.as_ref().map(|sharding| written.catalog.mesh(sharding)), list.as_ref().map(|_| mesh));
        assert_eq!(found.sharding.as_ref().map(|sharding| &sharding.shared.placements), list.as_ref(), "{name}");
        let holders = if list.is_some() { mesh.world_size() } else { mesh.job_size() as usize };
        assert_eq!(found.chunks.len(), holders, "{name}");
        for index in 0..found.chunks.len() {
            let rank = found.chunks.rank(index).unwrap();
            let tile = match &list {
                None => Tile::from_region(&crate::layout::Region::whole(&expected.shape)),
                Some(list) => {
                    let at = mesh.coordinate(rank).unwrap();
                    local_shard(&expected.shape, mesh.shape(), list, &at).unwrap()
                }
            };
            // A chunk table stores only the bounds of an empty tile, so two empty tiles may differ.
            let kept = found.chunks.tile(index);
            assert!(kept == tile || kept.is_empty() && tile.is_empty(), "{name} on rank {rank}");
            assert_eq!(found.chunks.tile(index), reserved.entry.chunks.tile(index), "{name} on rank {rank}");
            assert_eq!(reserved.entry.chunks.rank(index), Some(rank));
            let offset = reserved.file_offset(index).map(|(_, offset)| offset);
            let stored = (!tile.is_empty()).then(|| {
                let index = u32::try_from(index).unwrap();
                resolve(&written.files, found, index).unwrap().offset
            });
            assert_eq!(offset, stored, "{name} on rank {rank}");
            if !tile.is_empty() {
                let same = compare::replica_difference(input(&written), found, &OPTIONS, &Silent, &Stop::default());
                assert!(found.sharding.is_some() || same.unwrap().is_none());
            }
        }
        let stop = Stop::default();
        let (left, right) = ((input(&source), expected), (input(&written), found));
        let difference = compare::first_difference(left, right, expected.dtype, &OPTIONS, &Silent, &stop);
        assert_eq!(difference.unwrap(), None, "{name}");
    }
    let own = DTensorStyle::from_file(&written.files, written.files.ids().next().unwrap()).unwrap();
    let sharded = source.catalog.tensors.iter().any(|entry| entry.sharding.is_some());
    assert_eq!(own, sharded.then_some(style), "{case}");
}

fn fill(source: &Checkpoint, reservation: &Reservation, folder: &Path) {
    let todo = Extents::of_files(&reservation.files);
    let folder = &crate::storage::AnchoredPath::new(folder);
    let log = Log::new(&reservation.files, &todo, folder.join("journal"), OPTIONS.sync, AtEnd::Nothing);
    let (log, stop) = (&log, &Stop::default());
    let writing = copy::WriteContext { reservation, folder, log, options: &OPTIONS, reporter: &Silent, stop };
    copy::copy(input(source), writing).unwrap();
}

#[test]
fn written_rank_files_are_read_back() {
    for case in ["fsdp4", "fsdp_tp", "hsdp", "tp2", "odd4", "replicated_plain"] {
        check(case, &mesh("fsdp=6", &[]), "S(0)", Release::V2_13);
        check(case, &mesh("dp=2,tp=3", &[]), "_S(0,3),S(0)", Release::V2_10);
        check(case, &mesh("dp=2,tp=2", &[0, 2, 1, 3]), "S(0),S(1)", Release::V2_5);
        check(case, &mesh("rep=2,fsdp=2", &[3, 1, 0, 2]), "R,S(1)", Release::V2_13);
        check(case, &mesh("a=1,b=2,c=2", &[]), "S(1),_S(0,2),R", Release::V2_11);
        check(case, &mesh("one=1", &[]), "S(0)", Release::V2_13);
    }
}

#[test]
fn meshes_without_names_and_of_one_rank_a_dim() {
    let unnamed = DeviceMesh::new([1_u64, 3].as_slice(), vec![Rank(0), Rank(1), Rank(2)], None).unwrap();
    for release in [Release::V2_5, Release::V2_10, Release::V2_11, Release::V2_13] {
        check("fsdp4", &unnamed, "R,S(0)", release);
    }
}

/// A rank outside the mesh has a rank file, too, with DTensors of which the rank holds no elements.
#[test]
fn ranks_outside_of_the_mesh() {
    for release in [Release::V2_5, Release::V2_10, Release::V2_11, Release::V2_13] {
        check("fsdp4", &mesh("dp=2", &[2, 0]), "S(0)", release);
        check("outside4", &mesh("dp=2,tp=2", &[4, 1, 3, 6]), "_S(0,2),S(0)", release);
    }
    let source = open(&fixture("outside4/ranks"));
    let shape =
        |name: &str| source.catalog.tensors.iter().find(|entry| entry.fqn.as_str() == name).unwrap().shape.clone();
    assert_eq!((shape("w").to_vec(), shape("b").to_vec()), (vec![5, 2], vec![3]));
    let target = RankTarget {
        mesh: &mesh("dp=2", &[0, 2]),
        world_size: 4,
        style: &DTensorStyle::default(),
        name: &|rank| format!("{rank}").into(),
        layout: &mut |_, _, _| Ok(RankLayout::Sharded { dim: MeshDim(0) }),
    };
    let error = reserve_ranks(&source.catalog, &source.catalog.state, target).unwrap_err();
    assert!(
        error.to_string().contains("ShardedTensors on the mesh dp=2 need every rank, but rank 1 is not in the mesh"),
        "{error}"
    );
}

/// If ranks of the source have different values, each rank of the target gets the value of the source rank with the
/// same number. Other ranks of the target get the values of the source ranks in turn: with `n` source ranks, rank `r`
/// gets the value of source rank `r mod n`. The order of the data in a file does not depend on the values.
#[test]
fn ranks_that_differ() {
    let source = open(&fixture("replicated_plain/ranks"));
    let tensor = |id| Value::Tensor(TensorId(id));
    let first = Value::List(vec![tensor(2), Value::Int(7), tensor(0)]);
    let second = Value::List(vec![tensor(2), tensor(0), tensor(1)]);
    let holding = |value, ranks: &[u32]| RankValue { value, ranks: ranks.iter().copied().map(Rank).collect() };
    let state = Value::Other(vec![holding(first, &[0, 2]), holding(second, &[1])]);
    let mesh = mesh("dp=8", &[]);
    let reservation = reserve(&source.catalog, &state, &mesh, "S(0)", &DTensorStyle::default());
    check_order(&reservation);
    let folder = tempfile::tempdir().unwrap();
    fill(&source, &reservation, folder.path());
    // Ranks 0, 1 and 2 get their own values, and ranks 3 to 7 get the values of ranks 0, 1, 2, 0, 1.
    for (rank, is_first) in [true, false, true, true, false, true, true, false].into_iter().enumerate() {
        let name = &reservation.files[rank].path;
        let mut files = crate::storage::Files::new(crate::storage::IoMode::Read);
        let (catalog, _) = torch::read(&mut files, &[folder.path().join(name)], Unknown::Refuse).unwrap();
        let Value::List(items) = &catalog.state else { panic!("a list") };
        assert_eq!(items[1] == Value::Int(7), is_first, "rank {rank}");
    }
}

#[test]
fn writers_look_at_dtypes_and_shapes_only() {
    let source = open(&fixture("fsdp_tp/ranks"));
    let (catalog, without_chunks) = (&source.catalog, without_chunks(&source.catalog));
    let same = |left: Reservation, right: Reservation| assert_eq!(format!("{left:?}"), format!("{right:?}"));

    let whole = |catalog| torch::reserve(catalog, &source.catalog.state, "m.pt".into()).unwrap();
    same(whole(catalog), whole(&without_chunks));

    let tensors = state_dict::all_tensors(&catalog.state);
    let folder = safetensors::FileDivision::Folder { max_shard_bytes: 100 };
    let named = |source: &Catalog| {
        safetensors::reserve(SelectedTensors { source, dtypes: &source.dtypes() }, &tensors, &[], &folder).unwrap()
    };
    same(named(catalog), named(&without_chunks));

    let (mesh, list) = (mesh("dp=2,tp=3", &[]), "_S(0,3),S(0)");
    let sharded = |catalog: &Catalog| {
        let mut shards = |_: &Fqn, _: &crate::catalog::Path, entry: &TensorEntry| {
            let chosen = placements(list, entry);
            let tile = |at: &crate::layout::Dims| local_shard(&entry.shape, mesh.shape(), &chosen, at).unwrap();
            Ok(mesh.coordinates().map(|(rank, at)| (tile(&at), [rank].into_iter().collect())).collect())
        };
        dcp::reserve(catalog, &catalog.state, &mut shards).unwrap()
    };
    same(sharded(catalog), sharded(&without_chunks));

    let style = DTensorStyle::default();
    let twice = || reserve(catalog, &catalog.state, &mesh, list, &style);
    same(twice(), twice());
}

#[test]
fn safetensors_records_ties_where_the_kept_tensor_is() {
    let source = open(&fixture("fsdp4/ranks"));
    let tensors = state_dict::all_tensors(&source.catalog.state);
    let last = tensors.last().unwrap().0.clone();
    let ties = [(Fqn::from("z.alias"), last.clone()), (Fqn::from("a.alias"), last.clone())];
    let shape = safetensors::FileDivision::Folder { max_shard_bytes: 100 };
    let wanted = SelectedTensors { source: &source.catalog, dtypes: &source.catalog.dtypes() };
    let reservation = safetensors::reserve(wanted, &tensors, &ties, &shape).unwrap();
    let text = |file: &crate::catalog::OutputFile| String::from_utf8_lossy(&file.header_bytes[0].bytes).into_owned();
    let (index, files) = reservation.files.split_last().unwrap();
    assert!(files.len() > 2 && !text(index).contains("alias"), "{}", text(index));
    for file in files {
        let header = text(file);
        let holds = header.contains(&format!("\"{last}\":{{"));
        let recorded = format!(r#"{{"__metadata__":{{"format":"pt","z.alias":"{last}","a.alias":"{last}"}},"#);
        assert_eq!(header.contains(&recorded), holds, "{header}");
        assert_eq!(header.contains("alias"), holds);
    }
    for name in ["format", "DCP_SHARDING_INFO", "DCP_VERSION", "total_size"] {
        let own = [(Fqn::from(name), last.clone())];
        assert!(safetensors::reserve(wanted, &tensors, &own, &shape).is_err(), "{name}");
    }
}

#[test]
fn a_slice_of_a_mesh_is_read_and_written() {
    let source = open(&fixture("fsdp_tp/ranks"));
    let norm = |catalog: &Catalog| {
        let is_norm = |entry: &&TensorEntry| entry.fqn.as_str().ends_with("norm.weight");
        catalog.tensors.iter().find(is_norm).expect("a norm").sharding.clone().expect("a DTensor")
    };
    assert_eq!(norm(&source.catalog).shared.slice, Some(vec![MeshDim(0)]));
    let state = source.catalog.state.clone();
    for (release, slice) in
        [(Release::V2_13, Some(vec![MeshDim(0)])), (Release::V2_10, Some(vec![MeshDim(0)])), (Release::V2_5, None)]
    {
        let style = DTensorStyle { release, ..DTensorStyle::default() };
        let target = RankTarget {
            mesh: &mesh("dp=2,tp=3", &[]),
            world_size: 6,
            style: &style,
            name: &|rank| PathBuf::from(format!("model_world_size_6_rank_{rank}.pt")),
            layout: &mut |_, _, entry| {
                Ok(match &entry.sharding {
                    None => RankLayout::Plain,
                    Some(own) => RankLayout::Distributed {
                        placements: placements(if own.shared.slice.is_some() { "S(0),R" } else { "S(0),S(1)" }, entry),
                        slice: own.shared.slice.clone(),
                    },
                })
            },
        };
        let reservation = reserve_ranks(&without_chunks(&source.catalog), &state, target).unwrap();
        let folder = tempfile::tempdir().unwrap();
        fill(&source, &reservation, folder.path());
        let written = Checkpoint::open(folder.path(), &ReadOptions::default()).unwrap();
        let found = norm(&written.catalog);
        assert_eq!((found.shared.slice, found.shared.placements.len()), (slice, 2), "{release:?}");
    }
}
