//! Tests of casts in copies and comparisons, against casts of whole tensors.

use super::*;
use crate::catalog::{ChecksumSpan, ChecksummedRange, OutputFile, Reserved, StridedLocation, TensorId};
use crate::error::{Error, FormatError};
use crate::exec::cast::{Cast, LossCounts};
use crate::exec::compare::{Difference, digest, first_difference, measured_difference};
use crate::exec::copy::{CastCount, dry_run};
use crate::exec::{SCRATCH_BYTES, Silent};
use crate::storage::FileId;

/// Returns a value of any magnitude. Some values overflow and some are NaN.
fn value(index: u64) -> f64 {
    if index % 97 == 13 {
        return f64::NAN;
    }
    #[expect(clippy::cast_possible_truncation, reason = "below 40")]
    let exponent = (index.wrapping_mul(0x9E37_79B9) >> 7) as i32 % 40;
    let size = f64::from(u32::try_from(index % 4093 + 1).unwrap()) * f64::powi(2.0, exponent.abs() - 24);
    if index.is_multiple_of(2) { size } else { -size }
}

/// Returns the bytes of element `index`, cast from f64 to a dtype.
pub(crate) fn element_of(dtype: Dtype, index: u64) -> Vec<u8> {
    cast(Dtype::F64, dtype, &value(index).to_le_bytes()).0
}

/// Casts elements; copies them if the dtypes are equal.
pub(crate) fn cast(from: Dtype, to: Dtype, source: &[u8]) -> (Vec<u8>, LossCounts) {
    let Some(cast) = Cast::new(from, to) else { return (source.to_vec(), LossCounts::default()) };
    let mut target = vec![0; source.len() / bytes(from.itemsize()) * bytes(to.itemsize())];
    let counts = cast.convert(source, &mut target);
    (target, counts)
}

fn bytes(len: u64) -> usize {
    usize::try_from(len).unwrap()
}

/// A source tensor in a file of its own.
struct Source {
    _folder: tempfile::TempDir,
    files: Files,
    catalog: Catalog,
}

impl Source {
    fn new(shape: &[u64], dtype: Dtype, layout: &Layout, transpose: bool, io: IoMode) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        let values = |index| element_of(dtype, index);
        let (files, entry) = store_values(shape, dtype, layout, transpose, io, &path, &values);
        Self { _folder: folder, files, catalog: Catalog { tensors: vec![entry], ..Catalog::empty() } }
    }

    fn input(&self) -> Input<'_> {
        Input { files: &self.files, catalog: &self.catalog, resolve: &resolve }
    }

    fn entry(&self) -> &TensorEntry {
        &self.catalog.tensors[0]
    }
}

/// Reserves one file: a header, and then each tile of the layouts, followed by the 4-byte checksum of the tile.
fn reserve(source: &Source, to: Dtype, layouts: &[&Layout]) -> Reservation {
    let mut reservation = Reservation::default();
    let mut file = OutputFile::new("out");
    file.push_header(vec![0xAA; 11]);
    let shape = source.entry().shape.clone();
    for layout in layouts {
        let mut chunks = ChunkTable::new(shape.len());
        for tile in layout.tiles(&shape) {
            let len = tile.numel() * to.itemsize();
            let offset = file.push_payload(len);
            let location = if len == 0 { FileLocation::Empty } else { FileLocation::Bytes { file: FileId(0), offset } };
            if len > 0 {
                file.checksums
                    .push(ChecksumSpan { range: offset..offset + len, crc_offsets: [file.len].into_iter().collect() });
            }
            file.push_header(vec![0; 4]);
            chunks.push(Chunk { tile, location, strides: None, rank: None, view: None });
        }
        let entry = TensorEntry { chunks, ..TensorEntry::new("t".into(), to, shape.clone()) };
        reservation.tensors.push(Reserved::new(TensorId(0), entry));
    }
    reservation.files.push(file);
    reservation
}

fn options(threads: usize, block_bytes: u64) -> Options {
    Options { threads, write_block_bytes: block_bytes, transposed_block_bytes: block_bytes, sync: false }
}

fn fill(input: Input<'_>, reservation: &Reservation, folder: &Path, options: &Options) -> Result<Stats> {
    copy(input, reservation, folder, options, &Silent, &Stop::default())
}

/// Returns the written file as source files.
fn written(folder: &Path) -> Files {
    let mut files = Files::new(IoMode::Read);
    files.add(folder.join("out")).unwrap();
    files
}

/// Checks every tile and every checksum of the written file.
fn check(source: &Source, reservation: &Reservation, folder: &Path) {
    let found = fs::read(folder.join("out")).unwrap();
    let from = source.entry().dtype;
    for Reserved { entry, .. } in &reservation.tensors {
        for chunk in entry.chunks.iter() {
            let FileLocation::Bytes { offset, .. } = chunk.location else { continue };
            let indices = linear_indices(&entry.shape, &chunk.tile);
            let stored: Vec<u8> = indices.iter().flat_map(|index| element_of(from, *index)).collect();
            let expected = cast(from, entry.dtype, &stored).0;
            let end = bytes(offset) + expected.len();
            assert!(found[bytes(offset)..end] == expected, "tile {} to {}", chunk.tile, entry.dtype);
            assert_eq!(found[end..end + 4], crc32fast::hash(&expected).to_le_bytes());
        }
    }
}

fn whole() -> Layout {
    Layout { mesh: vec![1], placements: vec![Placement::Replicate] }
}

fn sharded(dim: usize, ranks: u64) -> Layout {
    Layout { mesh: vec![ranks], placements: vec![Placement::Shard(TensorDim(dim))] }
}

/// Returns a layout on a (dp, tp, replicate) mesh. The rows are in a strided shard over dp and a shard over tp, and
/// each tile has two replicas.
fn interleaved() -> Layout {
    let strided = Placement::StridedShard { dim: TensorDim(0), split_factor: 2 };
    let placements = vec![strided, Placement::Shard(TensorDim(0)), Placement::Replicate];
    Layout { mesh: vec![2, 2, 2], placements }
}

#[test]
pub(crate) fn casts_do_not_depend_on_layouts_or_blocks() {
    let shape = [37, 23];
    let pairs =
        [(Dtype::F32, Dtype::Bf16), (Dtype::Bf16, Dtype::F32), (Dtype::F64, Dtype::F16), (Dtype::F32, Dtype::F8E4m3fn)];
    for (from, to) in pairs {
        for (layout, transpose) in
            [(whole(), false), (sharded(0, 3), true), (sharded(1, 4), true), (interleaved(), false)]
        {
            let io = if transpose { IoMode::Mmap } else { IoMode::Read };
            let source = Source::new(&shape, from, &layout, transpose, io);
            for (threads, block_bytes) in [(1, 1), (2, 7), (1, 64), (2, 1001), (1, 4 << 20)] {
                let reservation = reserve(&source, to, &[&interleaved(), &sharded(1, 5)]);
                let folder = tempfile::tempdir().unwrap();
                fill(source.input(), &reservation, folder.path(), &options(threads, block_bytes)).unwrap();
                check(&source, &reservation, folder.path());
            }
        }
    }
}

#[test]
fn lost_values_are_counted_once_for_any_replicas_and_blocks() {
    let source = Source::new(&[37, 23], Dtype::F32, &sharded(0, 3), false, IoMode::Read);
    let all: Vec<u8> = (0..37 * 23).flat_map(|index| element_of(Dtype::F32, index)).collect();
    let lost = cast(Dtype::F32, Dtype::F16, &all).1;
    assert!(lost.overflows > 0 && lost.nans > 0, "{lost:?}");
    let pair = (Dtype::F32, Dtype::F16);
    for block_bytes in [10, 4 << 20] {
        let reservation = reserve(&source, Dtype::F16, &[&interleaved(), &sharded(1, 5)]);
        let folder = tempfile::tempdir().unwrap();
        let stats = fill(source.input(), &reservation, folder.path(), &options(2, block_bytes)).unwrap();
        let (overflows, nans) = (2 * lost.overflows, 2 * lost.nans);
        assert_eq!(stats.casts, [(pair, CastCount { tensors: 2, overflows, nans })].into());
        // Four bytes per element for each of two copies of the first layout and one of the second.
        assert_eq!(stats.bytes_read, 3 * 37 * 23 * 4);
        let dry = dry_run(source.input(), &reservation, &Stop::default()).unwrap();
        assert_eq!(dry.casts, [(pair, CastCount { tensors: 2, overflows: 0, nans: 0 })].into());
        assert_eq!((dry.bytes_read, dry.runs), (stats.bytes_read, stats.runs));
    }
    let same = reserve(&source, Dtype::F32, &[&whole()]);
    assert!(dry_run(source.input(), &same, &Stop::default()).unwrap().casts.is_empty());
}

#[test]
pub(crate) fn casts_work_across_windows() {
    // Each tensor has as many tiles as a window, so there are three windows.
    let source = Source::new(&[1 << 14], Dtype::F32, &sharded(0, 2), false, IoMode::Read);
    let reservation = reserve(&source, Dtype::Bf16, &[&sharded(0, 1 << 14), &sharded(0, 1 << 14), &whole()]);
    let folder = tempfile::tempdir().unwrap();
    let stats = fill(source.input(), &reservation, folder.path(), &options(2, 5000)).unwrap();
    assert_eq!(stats.casts[&(Dtype::F32, Dtype::Bf16)].tensors, 3);
    check(&source, &reservation, folder.path());
}

#[test]
fn scratch_memory_of_a_long_cast_is_bounded() {
    let shape = [700, 1000];
    let expected: Vec<u8> = (0..700_000).flat_map(|index| element_of(Dtype::Bf16, index)).collect();
    for (transpose, io) in [(false, IoMode::Read), (true, IoMode::Read), (true, IoMode::Mmap)] {
        let source = Source::new(&shape, Dtype::F32, &sharded(0, 2), transpose, io);
        let plan = crate::plan::SourceTensor::new(source.entry()).unwrap();
        let tile = &whole().tiles(&shape)[0];
        let prepared = PreparedTile::new(source.input(), &plan, tile, &mut Locations::default()).unwrap();
        let prepared = prepared.cast_to(Dtype::Bf16).unwrap();
        assert_eq!(prepared.itemsize(), 2);
        let mut buffer = vec![0x55; expected.len() - 6];
        let mut scratch = Scratch::default();
        prepared.read(source.input(), 3, &mut buffer, &mut scratch).unwrap();
        assert!(buffer == expected[6..]);
        assert!(scratch.capacity() as u64 <= SCRATCH_BYTES);
    }
}

#[test]
fn records_that_are_cast_are_checked_against_their_crc() {
    let source = Source::new(&[300, 1000], Dtype::F32, &whole(), false, IoMode::Read);
    let FileLocation::Bytes { offset: start, .. } = source.entry().chunks.location(0) else { unreachable!() };
    let data: Vec<u8> = (0..300_000).flat_map(|index| element_of(Dtype::F32, index)).collect();
    let (len, crc) = (data.len() as u64, crc32fast::hash(&data));
    for (crc, sound) in [(crc, true), (crc ^ 1, false)] {
        let resolve = move |files: &Files, entry: &TensorEntry, chunk: u32| -> Result<StridedLocation> {
            Ok(StridedLocation {
                checksum: Some(ChecksummedRange { start, len, crc }),
                ..resolve(files, entry, chunk)?
            })
        };
        let input = Input { resolve: &resolve, ..source.input() };
        for block_bytes in [100_000, 4 << 20] {
            let reservation = reserve(&source, Dtype::Bf16, &[&sharded(0, 2)]);
            let folder = tempfile::tempdir().unwrap();
            match fill(input, &reservation, folder.path(), &options(2, block_bytes)) {
                Ok(_) => {
                    assert!(sound);
                    check(&source, &reservation, folder.path());
                }
                Err(error) => {
                    assert!(!sound, "{error}");
                    assert!(matches!(error, Error::Format(FormatError::Malformed { .. })), "{error}");
                }
            }
        }
    }
}

#[test]
fn uncastable_dtype_is_an_error_that_names_the_tensor() {
    let mut source = Source::new(&[4], Dtype::F32, &whole(), false, IoMode::Read);
    source.catalog.tensors[0].dtype = Dtype::I32;
    let error = dry_run(source.input(), &reserve(&source, Dtype::Bf16, &[&whole()]), &Stop::default()).unwrap_err();
    assert!(matches!(error, Error::Format(FormatError::Unsupported { .. })), "{error}");
    assert_eq!(error.to_string(), "t: i32 cannot be cast to bf16");
}

#[test]
fn cast_copy_equals_its_source_and_a_flipped_bit_is_found() {
    let source = Source::new(&[37, 23], Dtype::F32, &sharded(0, 3), true, IoMode::Read);
    let reservation = reserve(&source, Dtype::Bf16, &[&sharded(1, 5)]);
    let folder = tempfile::tempdir().unwrap();
    fill(source.input(), &reservation, folder.path(), &options(2, 100)).unwrap();
    let target = &reservation.tensors[0].entry;
    let catalog = Catalog::empty();
    let compared = |files: &Files, options: &Options| {
        let right = Input { files, catalog: &catalog, resolve: &resolve };
        let (left, right) = ((source.input(), source.entry()), (right, target));
        first_difference(left, right, Dtype::Bf16, options, &Silent, &Stop::default()).unwrap()
    };
    for block_bytes in [1, 50, 4 << 20] {
        assert_eq!(compared(&written(folder.path()), &options(2, block_bytes)), None);
    }
    let digest = |input, entry| digest(input, entry, Dtype::Bf16, &options(1, 64), &Silent, &Stop::default()).unwrap();
    let files = written(folder.path());
    let right = Input { files: &files, catalog: &catalog, resolve: &resolve };
    assert_eq!(digest(source.input(), source.entry()), digest(right, target));

    let path = folder.path().join("out");
    let mut bytes = fs::read(&path).unwrap();
    let FileLocation::Bytes { offset, .. } = target.chunks.location(1) else { unreachable!() };
    // Flips the sign of element 5 of the chunk, which is row 1, column 5 of the tensor.
    bytes[super::casting::bytes(offset) + 5 * 2 + 1] ^= 0x80;
    fs::write(&path, &bytes).unwrap();
    let found = compared(&written(folder.path()), &options(2, 50)).unwrap();
    assert_eq!((found.element, found.differing), (23 + 5, 1));
    assert_eq!(found.max_abs, Some(2.0 * value_of(Dtype::Bf16, 28).abs()));
}

/// Returns the value of element `index` after a cast from f64 to `dtype` and back.
fn value_of(dtype: Dtype, index: u64) -> f64 {
    f64::from_le_bytes(cast(dtype, Dtype::F64, &element_of(dtype, index)).0.try_into().unwrap())
}

#[test]
fn differences_do_not_depend_on_threads_or_blocks() {
    let shape = [61, 41];
    let left = Source::new(&shape, Dtype::F32, &sharded(0, 3), false, IoMode::Read);
    let right = Source::new(&shape, Dtype::Bf16, &sharded(1, 2), true, IoMode::Mmap);
    let mut expected: Option<(u64, f64, u64)> = None;
    let (mut distances, mut norm) = (0.0, 0.0);
    for index in 0..61 * 41 {
        let (ours, theirs) =
            (element_of(Dtype::F32, index), cast(Dtype::Bf16, Dtype::F32, &element_of(Dtype::Bf16, index)).0);
        if ours != theirs {
            let distance = (value_of(Dtype::F32, index) - value_of(Dtype::Bf16, index)).abs();
            let (element, most, differing) = expected.unwrap_or((index, 0.0, 0));
            expected = Some((element, most.max(distance), differing + 1));
            // Two NaNs have no distance.
            distances += if distance.is_nan() { 0.0 } else { distance * distance };
        }
        let value = value_of(Dtype::F32, index);
        norm += if value.is_finite() { value * value } else { 0.0 };
    }
    let expected = expected.unwrap();
    assert!(expected.2 > 100, "{expected:?}");
    let relative = f64::sqrt(distances / norm);
    for threads in [1, 2, 5] {
        for block_bytes in [1, 90, 4 << 20] {
            let sides = ((left.input(), left.entry()), (right.input(), right.entry()));
            let options = options(threads, block_bytes);
            let found = measured_difference(sides.0, sides.1, Dtype::F32, &options, &Silent, &Stop::default());
            let found = found.unwrap().unwrap();
            let Difference { element, max_abs, differing, .. } = found.difference;
            assert_eq!((element, max_abs.unwrap(), differing), expected);
            let found = found.relative_l2().unwrap();
            assert!((found / relative - 1.0).abs() < 1e-5, "{found}, expected {relative}");
            let as_bf16 = first_difference(sides.0, sides.1, Dtype::Bf16, &options, &Silent, &Stop::default());
            assert_eq!(as_bf16.unwrap(), None, "equal once both are bf16");
        }
    }
}
