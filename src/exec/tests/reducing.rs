//! Tests of partial values in copies, comparisons and casts, against sums of whole tensors.

use std::sync::Arc;

use super::*;
use crate::catalog::{ChecksummedRange, OutputFile, PartialValues, Reserved, StridedLocation, TensorId};
use crate::exec::compare::{digest, first_difference, replica_difference, share_difference};
use crate::exec::{SCRATCH_BYTES, Silent};
use crate::layout::ReduceOp;
use crate::layout::partial::{PartialReduction, Share};
use crate::storage::FileId;

const SHAPE: [u64; 2] = [300, 700];
const PARTIAL_VALUES: u64 = 3;

/// Returns a number; sums of three such numbers are not exact in f32.
fn element_of(number: u64, index: u64) -> f32 {
    let scrambled = index.wrapping_mul(0x9E37_79B9).wrapping_add(number * 7919) % 100_003;
    (f32::from(u16::try_from(scrambled % 60_000).unwrap()) - 30_000.0) / 7.0
}

/// A tensor with three partial values, each in its own file. All have the same layout.
struct Source {
    folder: tempfile::TempDir,
    files: Files,
    catalog: Catalog,
}

impl Source {
    fn new(layout: &Layout, transpose: bool, io: IoMode) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut files = Files::new(io);
        let mut entry = TensorEntry::new("t".into(), Dtype::F32, SHAPE.as_slice().into());
        let reduction = PartialReduction::new(&[PARTIAL_VALUES], &[Placement::Partial(ReduceOp::Sum)])
            .unwrap()
            .expect("it is Partial");
        let mut of_chunk = Vec::new();
        for number in 0..PARTIAL_VALUES {
            let path = folder.path().join(format!("value{number}"));
            let value = |index| element_of(number, index).to_le_bytes().to_vec();
            let (_, stored) = store_values(&SHAPE, Dtype::F32, layout, transpose, io, &path, &value);
            let file = files.add(&path).unwrap();
            for mut chunk in stored.chunks.iter() {
                if let FileLocation::Bytes { file: own, .. } = &mut chunk.location {
                    *own = file;
                }
                entry.chunks.push(chunk);
                of_chunk.push(number);
            }
        }
        entry.partial_values = Some(Box::new(PartialValues { reduction, by_chunk: of_chunk }));
        Self { folder, files, catalog: Catalog { tensors: vec![entry], ..Catalog::empty() } }
    }

    fn input(&self) -> Input<'_> {
        Input { files: &self.files, catalog: &self.catalog, resolve: &resolve }
    }

    fn entry(&self) -> &TensorEntry {
        &self.catalog.tensors[0]
    }
}

fn layout(placement: Placement, ranks: u64) -> Layout {
    Layout { mesh: vec![ranks], placements: vec![placement] }
}

/// Returns the sum of some partial values, computed in f64, then divided and rounded once.
fn reduced(partial_values: &[u64], divisor: f64, index: u64) -> f32 {
    let sum: f64 = partial_values.iter().map(|number| f64::from(element_of(*number, index))).sum();
    #[expect(clippy::cast_possible_truncation, reason = "the sum is rounded on purpose")]
    let single = (sum / divisor) as f32;
    single
}

/// Reserves a file with the tiles of a layout. Each tile has its share of the partial values.
fn reserve(layout: &Layout, shares: Vec<Arc<Share>>) -> Reservation {
    let mut file = OutputFile::new("out");
    let mut entry = TensorEntry::new("t".into(), Dtype::F32, SHAPE.as_slice().into());
    for tile in layout.tiles(&SHAPE) {
        let offset = file.push_payload(tile.numel() * 4);
        let location =
            if tile.is_empty() { FileLocation::Empty } else { FileLocation::Bytes { file: FileId(0), offset } };
        entry.chunks.push(Chunk { tile, location, strides: None, rank: None, view: None });
    }
    let tensor = Reserved { shares, ..Reserved::new(TensorId(0), entry) };
    Reservation { files: vec![file], tensors: vec![tensor], ..Reservation::default() }
}

fn fill(source: &Source, reservation: &Reservation, folder: &Path, block_bytes: u64) -> Stats {
    let options =
        Options { threads: 2, write_block_bytes: block_bytes, transposed_block_bytes: block_bytes, sync: false };
    copy(source.input(), reservation, folder, &options, &Silent, &Stop::default()).unwrap()
}

#[test]
fn reduced_values_do_not_depend_on_layouts_blocks_or_io() {
    let rows = layout(Placement::Shard(TensorDim(0)), 4);
    let columns = layout(Placement::Shard(TensorDim(1)), 3);
    let strided = layout(Placement::StridedShard { dim: TensorDim(0), split_factor: 7 }, 2);
    for (from, to, transpose, io, block_bytes) in [
        (&rows, &columns, false, IoMode::Read, 4 << 20),
        (&columns, &rows, true, IoMode::Mmap, 1001),
        (&strided, &strided, true, IoMode::Read, 100_000),
    ] {
        let source = Source::new(from, transpose, io);
        let reservation = reserve(to, Vec::new());
        let target = tempfile::tempdir().unwrap();
        let stats = fill(&source, &reservation, target.path(), block_bytes);
        assert_eq!(stats.bytes_read, PARTIAL_VALUES * 300 * 700 * 4);
        let found = fs::read(target.path().join("out")).unwrap();
        let tiles = to.tiles(&SHAPE);
        let indices = tiles.iter().flat_map(|tile| linear_indices(&SHAPE, tile));
        let expected: Vec<u8> = indices.flat_map(|index| reduced(&[0, 1, 2], 1.0, index).to_le_bytes()).collect();
        assert!(found == expected, "{from:?} to {to:?}");

        let mut files = Files::new(io);
        files.add(target.path().join("out")).unwrap();
        let written = Input { files: &files, ..source.input() };
        let options = Options { threads: 2, write_block_bytes: 70_001, transposed_block_bytes: 70_001, sync: false };
        let (stop, entry) = (Stop::default(), &reservation.tensors[0].entry);
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let sides = ((source.input(), source.entry()), (written, entry));
            assert_eq!(first_difference(sides.0, sides.1, dtype, &options, &Silent, &stop).unwrap(), None);
            let digest = |(input, entry)| digest(input, entry, dtype, &options, &Silent, &stop).unwrap();
            assert_eq!(digest(sides.0), digest(sides.1), "{dtype}");
        }
        let replicas = replica_difference(source.input(), source.entry(), &options, &Silent, &stop);
        assert_eq!(replicas.unwrap(), None, "partial values are not replicas");
    }
}

#[test]
fn chunks_contain_their_shares() {
    let source = Source::new(&layout(Placement::Shard(TensorDim(0)), 4), false, IoMode::Read);
    let copies = layout(Placement::Replicate, 3);
    let left = Tile::from_region(&crate::layout::Region::new([0, 0].as_slice(), [300, 350].as_slice()));
    let share = |partial_values: &[u64], divisor, within| {
        Arc::new(Share { partial_values: partial_values.to_vec(), divisor, within })
    };
    let shares = vec![share(&[1], 1, None), share(&[0, 2], 4, None), share(&[2], 1, Some(left))];
    let reservation = reserve(&copies, shares);
    let target = tempfile::tempdir().unwrap();
    fill(&source, &reservation, target.path(), 65_536);
    let found = fs::read(target.path().join("out")).unwrap();
    let inside = |index: u64| if index % 700 < 350 { element_of(2, index) } else { 0.0 };
    let expected: Vec<u8> = (0..210_000)
        .map(|index| element_of(1, index))
        .chain((0..210_000).map(|index| reduced(&[0, 2], 4.0, index)))
        .chain((0..210_000).map(inside))
        .flat_map(f32::to_le_bytes)
        .collect();
    assert!(found == expected);

    let check = |path: &Path| {
        let mut files = Files::new(IoMode::Read);
        files.add(path).unwrap();
        let written = Input { files: &files, ..source.input() };
        let options = Options { threads: 1, write_block_bytes: 4096, transposed_block_bytes: 4096, sync: false };
        let sides = ((source.input(), source.entry()), written);
        share_difference(sides.0, sides.1, &reservation.tensors[0], &options, &Silent, &Stop::default()).unwrap()
    };
    assert_eq!(check(&target.path().join("out")), None);
    let mut damaged = found;
    damaged[210_000 * 4 + 5] ^= 1;
    let path = source.folder.path().join("damaged");
    fs::write(&path, damaged).unwrap();
    assert_eq!(check(&path), Some(1));
}

#[test]
fn reduction_memory_is_bounded_and_records_are_checked() {
    let source = Source::new(&layout(Placement::Replicate, 1), false, IoMode::Read);
    let plan = crate::plan::SourceTensor::new(source.entry()).unwrap();
    let tile = Tile::from_region(&crate::layout::Region::whole(&SHAPE));
    let prepared = PreparedTile::new(source.input(), &plan, &tile, &mut Locations::default()).unwrap();
    let prepared = prepared.cast_to(Dtype::Bf16).unwrap();
    let mut scratch = Scratch::default();
    prepared.read(source.input(), 0, &mut vec![0; 300 * 700 * 2], &mut scratch).unwrap();
    assert!(scratch.capacity() as u64 <= SCRATCH_BYTES);

    // Every file is one zip record; the CRC of the last one is wrong.
    let len = 300 * 700 * 4;
    let sums: Vec<u32> = (0..3)
        .map(|number| {
            let bytes = fs::read(source.folder.path().join(format!("value{number}"))).unwrap();
            crc32fast::hash(&bytes[13..]) ^ u32::from(number == 2)
        })
        .collect();
    let summed = move |files: &Files, entry: &TensorEntry, chunk: u32| -> crate::error::Result<StridedLocation> {
        let crc = sums[chunk as usize];
        Ok(StridedLocation {
            checksum: Some(ChecksummedRange { start: 13, len, crc }),
            ..resolve(files, entry, chunk)?
        })
    };
    let input = Input { resolve: &summed, ..source.input() };
    let target = tempfile::tempdir().unwrap();
    let reservation = reserve(&layout(Placement::Replicate, 1), Vec::new());
    let options = Options { threads: 1, write_block_bytes: 4 << 20, transposed_block_bytes: 4 << 20, sync: false };
    let error = copy(input, &reservation, target.path(), &options, &Silent, &Stop::default()).unwrap_err();
    assert!(error.to_string().contains("value2") && error.to_string().contains("CRC-32"), "{error}");
}
