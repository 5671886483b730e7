//! Tests of planning and gathering together. The expected elements are computed by index arithmetic, without the tested
//! code.
//!
//! A tensor whose elements are their own linear indices is stored in a file under one layout, some chunks transposed,
//! and read back tile by tile under another layout.

pub(crate) mod casting;
mod partial_runs;
mod reducing;
mod row_groups;
mod summing;

pub(crate) use std::fs;
pub(crate) use std::path::Path;

pub(crate) use proptest::prelude::*;

pub(crate) use super::copy::{Stats, WriteContext};
pub(crate) use super::{Extents, Input, Locations, Options, PreparedTile, Reporter, Scratch, Stop};
pub(crate) use crate::catalog::{
    Catalog, Chunk, ChunkTable, Dtype, FileLocation, Reservation, TensorEntry, checked_len_bytes, contiguous_strides,
};
pub(crate) use crate::error::Result;
pub(crate) use crate::format::resolve;
pub(crate) use crate::layout::{DeviceMesh, Dims, Placement, Rank, TensorDim, Tile, local_shard};
pub(crate) use crate::plan::SourceTensor;
pub(crate) use crate::publish::work_log::{AtEnd, Log};
pub(crate) use crate::storage::{AnchoredPath, Files, IoMode};

/// Returns the global linear indices of a tile, in the order of its local elements.
pub(crate) fn linear_indices(shape: &[u64], tile: &Tile) -> Vec<u64> {
    let strides = contiguous_strides(shape);
    let mut indices = vec![0];
    for (dim, intervals) in tile.dims().iter().enumerate() {
        let positions: Vec<u64> = intervals.iter().flatten().collect();
        indices = indices
            .iter()
            .flat_map(|index| positions.iter().map(move |position| (index, position)))
            .map(|(index, position)| index + position * strides[dim])
            .collect();
    }
    indices
}

/// Writes all files of a reservation into `folder`.
pub(crate) fn copy(
    input: Input<'_>,
    reservation: &Reservation,
    folder: &Path,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Stats> {
    let todo = Extents::of_files(&reservation.files);
    let folder = &AnchoredPath::new(folder);
    let log = Log::new(&reservation.files, &todo, folder.join("journal"), options.sync, AtEnd::Nothing);
    super::copy::copy(input, WriteContext { reservation, folder, log: &log, options, reporter, stop })
}

/// Returns one element: its linear index, truncated or repeated to the item size.
pub(crate) fn element(index: u64, itemsize: u64) -> Vec<u8> {
    index.to_le_bytes().into_iter().cycle().take(usize::try_from(itemsize).unwrap()).collect()
}

/// A mesh, and placements on it.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) mesh: Vec<u64>,
    pub(crate) placements: Vec<Placement>,
}

impl Layout {
    /// Returns the tile of each rank.
    pub(crate) fn tiles(&self, shape: &[u64]) -> Vec<Tile> {
        let world_size = u32::try_from(self.mesh.iter().product::<u64>()).unwrap();
        let mesh = DeviceMesh::new(&self.mesh[..], (0..world_size).map(Rank).collect(), None).unwrap();
        let tile = |(_, at): (Rank, Dims)| local_shard(shape, &self.mesh, &self.placements, &at).unwrap();
        mesh.coordinates().map(tile).collect()
    }
}

/// Generates layouts for a tensor with `ndim` dims.
pub(crate) fn layout(ndim: usize) -> impl Strategy<Value = Layout> {
    let placement = if ndim == 0 {
        Just(Placement::Replicate).boxed()
    } else {
        prop_oneof![
            1 => Just(Placement::Replicate),
            4 => (0..ndim).prop_map(|dim| Placement::Shard(TensorDim(dim))),
            2 => (0..ndim, 1..4_u64).prop_map(|(dim, split_factor)| Placement::StridedShard {
                dim: TensorDim(dim),
                split_factor,
            }),
        ]
        .boxed()
    };
    prop::collection::vec((1..4_u64, placement), 1..3).prop_map(|dims| {
        let (mesh, placements) = dims.into_iter().unzip();
        Layout { mesh, placements }
    })
}

/// Generates a shape, a dtype, a source layout, a target layout, whether chunks are transposed, and a way to read.
pub(crate) fn case() -> impl Strategy<Value = (Vec<u64>, Dtype, Layout, Layout, bool, IoMode)> {
    let dtype = prop::sample::select(vec![Dtype::U8, Dtype::Bf16, Dtype::F32, Dtype::I64, Dtype::C128]);
    let io = prop::sample::select(vec![IoMode::Mmap, IoMode::Read]);
    prop::collection::vec(0..9_u64, 0..4).prop_flat_map(move |shape| {
        let ndim = shape.len();
        (Just(shape), dtype.clone(), layout(ndim), layout(ndim), any::<bool>(), io.clone())
    })
}

/// Stores a tensor as [`store_values`] does. The value of each element is its own linear index.
pub(crate) fn store(
    shape: &[u64],
    dtype: Dtype,
    layout: &Layout,
    transpose: bool,
    io: IoMode,
    path: &std::path::Path,
) -> (Files, TensorEntry) {
    store_values(shape, dtype, layout, transpose, io, path, &|index| element(index, dtype.itemsize()))
}

/// Writes every tile of a layout into one file. If `transpose` is true, every other tile is stored transposed.
pub(crate) fn store_values(
    shape: &[u64],
    dtype: Dtype,
    layout: &Layout,
    transpose: bool,
    io: IoMode,
    path: &std::path::Path,
    value: &dyn Fn(u64) -> Vec<u8>,
) -> (Files, TensorEntry) {
    let itemsize = dtype.itemsize();
    let mut chunks = ChunkTable::new(shape.len());
    let mut bytes = vec![0xEE; 13];
    let mut rows = Vec::new();
    for (index, tile) in layout.tiles(shape).into_iter().enumerate() {
        let offset = bytes.len() as u64;
        let indices = linear_indices(shape, &tile);
        let sizes = tile.sizes();
        let strides: Dims = if transpose && index % 2 == 1 {
            // In column-major order, the first dim has the smallest stride.
            sizes.iter().scan(1, |step, size| Some(std::mem::replace(step, *step * (*size).max(1)))).collect()
        } else {
            contiguous_strides(&sizes)
        };
        let mut stored = vec![0; indices.len() * usize::try_from(itemsize).unwrap()];
        for (local, index) in indices.iter().enumerate() {
            let mut rest = local as u64;
            let mut at = 0;
            for (size, stride) in sizes.iter().zip(&strides).rev() {
                at += (rest % size) * stride;
                rest /= size;
            }
            let start = usize::try_from(at * itemsize).unwrap();
            let element = value(*index);
            stored[start..start + element.len()].copy_from_slice(&element);
        }
        bytes.extend_from_slice(&stored);
        rows.push((tile, offset, strides));
    }
    fs::write(path, &bytes).unwrap();
    let mut files = Files::new(io);
    let file = files.add(path).unwrap();
    for (tile, offset, strides) in rows {
        let location = if tile.is_empty() { FileLocation::Empty } else { FileLocation::Bytes { file, offset } };
        chunks.push(Chunk { tile, location, strides: Some(strides), rank: None, view: None });
    }
    (files, TensorEntry { chunks, ..TensorEntry::new("t".into(), dtype, shape.into()) })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// For any two layouts, every range of every target tile has the expected elements.
    #[test]
    fn gathering_equals_indexing((shape, dtype, from, to, transpose, io) in case(), cut in 0.0..1.0_f64) {
        prop_assume!(checked_len_bytes(&shape, dtype).is_some());
        let folder = tempfile::tempdir().unwrap();
        let (files, entry) = store(&shape, dtype, &from, transpose, io, &folder.path().join("data"));
        let catalog = Catalog::empty();
        let input = Input { files: &files, catalog: &catalog, resolve: &resolve };
        let source = SourceTensor::new(&entry).unwrap();
        let mut known = Locations::for_tiles(2);
        for tile in to.tiles(&shape) {
            let prepared = PreparedTile::new(input, &source, &tile, &mut known).unwrap();
            let expected = linear_indices(&shape, &tile);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
            let middle = (expected.len() as f64 * cut) as usize;
            for (first, part) in [(0, &expected[..middle]), (middle, &expected[middle..])] {
                let mut buffer = vec![0x55; part.len() * usize::try_from(dtype.itemsize()).unwrap()];
                prepared.read(input, first as u64, &mut buffer, &mut Scratch::default()).unwrap();
                let expected_bytes: Vec<u8> = part.iter().flat_map(|index| element(*index, dtype.itemsize())).collect();
                prop_assert_eq!(&buffer, &expected_bytes);
            }
            let mut moved = 0;
            prepared.pieces(|piece| moved += piece.len_bytes());
            prop_assert_eq!(moved, tile.numel() * dtype.itemsize());
        }
    }
}

#[test]
pub(crate) fn large_strided_tile_is_read_in_blocks() {
    // Reads a column of 16 bytes from 4,096 rows of 8 KiB: 32 MiB of file with 2 MiB of scratch.
    let shape = [4096, 1024_u64];
    let whole = Layout { mesh: vec![1], placements: vec![Placement::Replicate] };
    let columns = Layout { mesh: vec![512], placements: vec![Placement::Shard(TensorDim(1))] };
    let folder = tempfile::tempdir().unwrap();
    for io in [IoMode::Read, IoMode::Mmap] {
        let (files, entry) = store(&shape, Dtype::I64, &whole, false, io, &folder.path().join("data"));
        let catalog = Catalog::empty();
        let input = Input { files: &files, catalog: &catalog, resolve: &resolve };
        let tile = &columns.tiles(&shape)[511];
        let source = SourceTensor::new(&entry).unwrap();
        let prepared = PreparedTile::new(input, &source, tile, &mut Locations::default()).unwrap();
        let mut buffer = vec![0; 4096 * 2 * 8];
        let mut scratch = Scratch::default();
        prepared.read(input, 0, &mut buffer, &mut scratch).unwrap();
        let expected_bytes: Vec<u8> =
            linear_indices(&shape, tile).iter().flat_map(|index| index.to_le_bytes()).collect();
        assert_eq!(buffer, expected_bytes);
        assert!(scratch.capacity() as u64 <= super::BLOCK_BYTES);
    }
}
