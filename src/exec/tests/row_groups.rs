//! Tests of columns that are cut from rows: the written bytes, and the number of bytes that are read for them.

use std::collections::HashSet;

use super::*;
use crate::catalog::{OutputFile, Reserved, TensorId};
use crate::exec::Silent;
use crate::exec::window::prepare_window;
use crate::storage::FileId;

fn bytes(len: u64) -> usize {
    usize::try_from(len).unwrap()
}

/// Reserves a file for each tile, with the tensors one after the other; headers and the bytes between tensors differ in
/// length from file to file.
fn reserve(entries: &[TensorEntry], layout: &Layout) -> Reservation {
    let mut reservation = Reservation::default();
    for rank in 0..layout.mesh.iter().product::<u64>() {
        let mut file = OutputFile::new(format!("rank{rank}"));
        file.push_header(vec![0xAA; bytes(1000 + rank * 8)]);
        reservation.files.push(file);
    }
    for (index, entry) in (0..).zip(entries) {
        let mut chunks = ChunkTable::new(entry.shape.len());
        for (rank, tile) in (0..).zip(layout.tiles(&entry.shape)) {
            let file = &mut reservation.files[rank as usize];
            let len = tile.numel() * entry.dtype.itemsize();
            let location = if len == 0 {
                FileLocation::Empty
            } else {
                FileLocation::Bytes { file: FileId(rank), offset: file.push_payload(len) }
            };
            file.push_header(vec![0xBB; bytes(entry.dtype.itemsize() * u64::from(rank + 2))]);
            chunks.push(Chunk { tile, location, strides: None, rank: None, view: None });
        }
        let target = TensorEntry { chunks, ..TensorEntry::new(entry.fqn.clone(), entry.dtype, entry.shape.clone()) };
        reservation.tensors.push(Reserved::new(TensorId(index), target));
    }
    reservation
}

/// Copies the tensors and asserts that all written bytes equal bytes computed by index arithmetic. Returns the number
/// of bytes that were read from the source.
fn read_for(files: &Files, entries: Vec<TensorEntry>, to: &Layout, block_bytes: u64) -> u64 {
    let catalog = Catalog { tensors: entries, ..Catalog::empty() };
    let input = Input { files, catalog: &catalog, resolve: &resolve };
    let reservation = reserve(&catalog.tensors, to);
    let folder = tempfile::tempdir().unwrap();
    let options =
        Options { threads: 2, write_block_bytes: block_bytes, transposed_block_bytes: block_bytes, sync: false };
    let before = files.bytes_read();
    copy(input, &reservation, folder.path(), &options, &Silent, &Stop::default()).unwrap();
    let read = files.bytes_read() - before;
    let written: Vec<Vec<u8>> =
        reservation.files.iter().map(|file| fs::read(folder.path().join(&file.path)).unwrap()).collect();
    for (file, content) in reservation.files.iter().zip(&written) {
        for header in &file.header_bytes {
            assert_eq!(content[bytes(header.offset)..][..header.bytes.len()], header.bytes[..]);
        }
    }
    for Reserved { entry, .. } in &reservation.tensors {
        for chunk in entry.chunks.iter() {
            let FileLocation::Bytes { file, offset } = chunk.location else { continue };
            let size = bytes(entry.dtype.itemsize());
            let found = written[file.0 as usize][bytes(offset)..].chunks_exact(size);
            for (index, found) in linear_indices(&entry.shape, &chunk.tile).into_iter().zip(found) {
                assert_eq!(found, &index.to_le_bytes()[..size], "{} {}", entry.fqn, chunk.tile);
            }
        }
    }
    read
}

fn sharded(dim: usize, ranks: u64) -> Layout {
    Layout { mesh: vec![ranks], placements: vec![Placement::Shard(TensorDim(dim))] }
}

#[test]
fn each_source_block_is_read_once_for_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    for (number, shape) in [vec![1024, 520_u64], vec![40, 16_384], vec![4, 300, 400]].into_iter().enumerate() {
        let path = folder.path().join(format!("{number}"));
        let (_, entry) = store(&shape, Dtype::I64, &sharded(0, 4), false, IoMode::Read, &path);
        let len = shape.iter().product::<u64>() * 8;
        let last = shape.len() - 1;
        let grid = |ranks: u64| Layout {
            mesh: vec![2, ranks / 2],
            placements: vec![Placement::Shard(TensorDim(0)), Placement::Shard(TensorDim(last))],
        };
        for io in [IoMode::Mmap, IoMode::Read, IoMode::Direct] {
            for to in [sharded(last, 2), sharded(last, 7), sharded(last, 64), grid(16)] {
                let mut files = Files::new(io);
                files.add(&path).unwrap();
                let read = read_for(&files, vec![entry.clone()], &to, 4 << 20);
                assert!(read * 10 <= len * 11, "{shape:?} to {to:?}, {io:?}: {read} of {len} bytes");
            }
        }
    }
}

#[test]
fn transposed_view_is_not_read_in_row_groups() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data");
    let (files, entry) = store(&[1024, 1024], Dtype::I64, &sharded(0, 1), true, IoMode::Read, &path);
    let read = read_for(&files, vec![entry], &sharded(1, 8), 4 << 20);
    // Each tile is 128 rows of the file. Row groups would read all of these rows for only a few columns at a time.
    assert!(read <= 2 * 1024 * 1024 * 8, "{read}");
}

/// Returns a layout that cuts a tensor along dim 0 into `parts` shards, with `copies` replicas of each shard.
fn replicated(copies: u64, parts: u64) -> Layout {
    Layout { mesh: vec![copies, parts], placements: vec![Placement::Replicate, Placement::Shard(TensorDim(0))] }
}

#[test]
fn copies_are_read_once_for_all_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data");
    // Short tensors are beside tensors that are cut several times. Their lengths are multiples of no block size.
    let shapes = [vec![600, 1300_u64], vec![70], vec![30, 41], vec![200, 1024], vec![100, 500]];
    let mut files = Files::new(IoMode::Read);
    let mut entries = Vec::new();
    let mut len = 0;
    for (number, shape) in shapes.iter().enumerate() {
        let path = path.with_extension(number.to_string());
        let (_, entry) = store(shape, Dtype::I64, &sharded(0, 4), false, IoMode::Read, &path);
        let file = files.add(&path).unwrap();
        let chunks = entry.chunks.iter().fold(ChunkTable::new(shape.len()), |mut chunks, chunk| {
            let FileLocation::Bytes { offset, .. } = chunk.location else { panic!("none is empty") };
            chunks.push(Chunk { location: FileLocation::Bytes { file, offset }, ..chunk.clone() });
            chunks
        });
        entries.push(TensorEntry { chunks, fqn: format!("t{number}").as_str().into(), ..entry });
        len += shape.iter().product::<u64>() * 8;
    }
    for io in [IoMode::Mmap, IoMode::Read, IoMode::Direct] {
        let mut again = Files::new(io);
        for id in files.ids() {
            again.add(files.path(id)).unwrap();
        }
        for (copies, parts) in [(2, 1), (4, 1), (8, 1), (2, 4)] {
            let read = read_for(&again, entries.clone(), &replicated(copies, parts), 4 << 20);
            assert!(read * 10 <= len * 11, "{copies} x {parts}, {io:?}: {read} of {len} bytes");
        }
    }
}

#[test]
fn short_tensors_share_row_groups() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data");
    let (files, entry) = store(&[64, 48], Dtype::I64, &sharded(0, 2), false, IoMode::Read, &path);
    let entries: Vec<TensorEntry> =
        (0..100).map(|n| TensorEntry { fqn: format!("t{n}").as_str().into(), ..entry.clone() }).collect();
    let read = read_for(&files, entries, &sharded(1, 8), 4 << 20);
    // All tiles read the same 24 KiB of the file. A row group reads at most 42 tensors.
    assert!(read <= 3 * 64 * 48 * 8, "{read}");
}

#[test]
fn tensors_do_not_share_tile_groups() {
    let folder = tempfile::tempdir().unwrap();
    let (files, entry) = store(&[64, 48], Dtype::I64, &sharded(0, 2), false, IoMode::Read, &folder.path().join("data"));
    let catalog = Catalog { tensors: vec![entry; 100], ..Catalog::empty() };
    let input = Input { files: &files, catalog: &catalog, resolve: &resolve };
    for to in [sharded(1, 8), replicated(8, 1)] {
        let reservation = reserve(&catalog.tensors, &to);
        let window: Vec<&Reserved> = reservation.tensors.iter().collect();
        let todo = Extents::of_files(&reservation.files);
        // One thread prepares several tensors one after the other.
        let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let output_ranges = alone.install(|| prepare_window(input, &window, &todo, &mut Vec::new())).unwrap();
        let numbers: Vec<usize> = output_ranges.iter().map(|range| range.group.as_ref().unwrap().number).collect();
        let of_each: HashSet<&[usize]> = numbers.chunks(8).collect();
        assert!(of_each.iter().all(|numbers| numbers.iter().all(|number| *number == numbers[0])), "{numbers:?}");
        assert_eq!(of_each.len(), 100, "{numbers:?}");
    }
}

fn small_case() -> impl Strategy<Value = (Vec<u64>, Dtype, Layout, Layout, u64, IoMode)> {
    let dtype = prop::sample::select(vec![Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::I64]);
    let io = prop::sample::select(vec![IoMode::Mmap, IoMode::Read, IoMode::Direct]);
    (2..4_usize).prop_flat_map(move |ndim| {
        let shape = prop::collection::vec(1..60_u64, ndim);
        (shape, dtype.clone(), layout(ndim), layout(ndim), 1..20_000_u64, io.clone())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// The copies have the expected elements for any two layouts and any size of write blocks.
    #[test]
    fn copies_equal_indexing((shape, dtype, from, to, block_bytes, io) in small_case()) {
        let folder = tempfile::tempdir().unwrap();
        let (_, entry) = store(&shape, dtype, &from, true, IoMode::Read, &folder.path().join("data"));
        let mut files = Files::new(io);
        files.add(folder.path().join("data")).unwrap();
        let other = TensorEntry { fqn: "u".into(), ..entry.clone() };
        read_for(&files, vec![entry, other], &to, block_bytes.max(16));
    }
}
