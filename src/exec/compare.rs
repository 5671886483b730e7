//! Reads tensors without writing: computes digests, compares tensors across layouts, and compares replicas. Sizes and
//! offsets are in bytes, or in elements if the name contains `element`.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rayon::prelude::*;

use super::difference::sum_of_squares;
pub use super::difference::{Difference, number_text};
pub use super::squares::SumOfSquares;
use super::{Input, Locations, Options, PreparedTile, Reporter, Scratch, Stop};
use crate::catalog::{Dtype, Reserved, TensorEntry, TensorId};
use crate::error::{Error, FormatError, Result};
use crate::layout::{Dims, Region, Tile};
use crate::plan::SourceTensor;

/// Returns the digests of tensors, each for a given dtype. Several tensors are read in parallel.
///
/// # Errors
/// Errors of [`digest`].
pub fn digests(
    input: Input<'_>,
    entries: &[(TensorId, &TensorEntry, Dtype)],
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<BTreeMap<TensorId, String>> {
    let digest = |entry, dtype| digest(input, entry, dtype, options, reporter, stop);
    entries.par_iter().map(|(id, entry, dtype)| Ok((*id, digest(entry, *dtype)?))).collect()
}

/// Returns the BLAKE3 hash of a tensor's values as text: `blake3:` and 64 hex digits. Values of another dtype are cast
/// to `dtype` first. The hash does not depend on the tensor's layout or format.
///
/// The hash covers the text `DTYPE [D0,D1,...]\n` (`bf16 [4,3]\n`, `f32 []\n`) and then the elements, row-major,
/// little-endian.
///
/// # Errors
/// Errors of reading (`Coverage`, `Malformed`, `Io`), `Stopped`; `Unsupported` if there is no such cast.
pub fn digest(
    input: Input<'_>,
    entry: &TensorEntry,
    dtype: Dtype,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<String> {
    let values = Values::whole(input, entry, dtype)?;
    let dims: Vec<String> = entry.shape.iter().map(ToString::to_string).collect();
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{dtype} [{}]\n", dims.join(",")).as_bytes());
    let (mut buffer, mut scratch) = (Vec::new(), Scratch::default());
    for (first, len) in values.blocks(options.write_block_bytes) {
        stop.check()?;
        values.read(first, len, &mut buffer, &mut scratch)?;
        hasher.update(&buffer);
        reporter.advance(len);
    }
    Ok(format!("blake3:{}", hasher.finalize().to_hex()))
}

/// The differences between two tensors, compared with the size of the first tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredDifference {
    pub difference: Difference,
    /// The squares of all finite elements of the first tensor.
    pub left: SumOfSquares,
}

impl MeasuredDifference {
    /// Returns the L2 norm of the difference divided by the L2 norm of the first tensor, rounded to six digits. NaN if, for
    /// some pair of elements, one element is NaN and the other is not. `None` if the dtype has no distance.
    pub fn relative_l2(&self) -> Option<f64> {
        self.difference.max_abs?;
        let ratio = self.difference.distances.root_ratio(self.left);
        // The last digits depend on the sizes of the blocks that threads compared.
        format!("{ratio:.5e}").parse().ok()
    }
}

/// Measures the differences between two tensors of equal shape. Returns `None` if the tensors are equal bit for bit; they
/// are then read once. The two tensors are compared as `dtype`; a tensor with another dtype is cast first.
///
/// # Errors
/// Errors of [`digest`].
pub fn measured_difference(
    left: (Input<'_>, &TensorEntry),
    right: (Input<'_>, &TensorEntry),
    dtype: Dtype,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Option<MeasuredDifference>> {
    let (left, right) = (Values::whole(left.0, left.1, dtype)?, Values::whole(right.0, right.1, dtype)?);
    let is_different = AtomicBool::new(false);
    // The blocks that were equal before the first difference was found. Their norms are computed only if there is one.
    let equal_blocks = Mutex::new(Vec::new());
    let norms = Mutex::new(Vec::new());
    let found = compare_blocks(&left, &right, CompareMode::Full, options, reporter, stop, &|block, differs| {
        if differs {
            is_different.store(true, Ordering::Relaxed);
        }
        if is_different.load(Ordering::Relaxed) {
            let norm = sum_of_squares(dtype, block.left);
            norms.lock().expect("no panic while the lock is held").push((block.first, norm));
        } else {
            equal_blocks.lock().expect("no panic while the lock is held").push((block.first, block.left.len() as u64));
        }
    })?;
    let Some(difference) = found else { return Ok(None) };
    let mut norms = norms.into_inner().expect("no panic while the lock is held");
    let equal_blocks = equal_blocks.into_inner().expect("no panic while the lock is held");
    let norm = |(buffer, scratch): &mut (Vec<u8>, Scratch), (first, len): &(u64, u64)| -> Result<_> {
        stop.check()?;
        left.read(*first, *len, buffer, scratch)?;
        Ok((*first, sum_of_squares(dtype, buffer)))
    };
    norms.extend(equal_blocks.par_iter().map_init(Default::default, norm).collect::<Result<Vec<_>>>()?);
    // Sums are rounded, so their order matters.
    norms.sort_unstable_by_key(|(first, _)| *first);
    let left = norms.into_iter().filter_map(|(_, norm)| norm).fold(SumOfSquares::default(), SumOfSquares::join);
    Ok(Some(MeasuredDifference { difference, left }))
}

/// Returns the first difference between two tensors of equal shape, or `None` if they are equal bit for bit. The two
/// tensors are compared as `dtype`; a tensor with another dtype is cast first.
///
/// # Errors
/// Errors of [`digest`].
pub fn first_difference(
    left: (Input<'_>, &TensorEntry),
    right: (Input<'_>, &TensorEntry),
    dtype: Dtype,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Option<Difference>> {
    let (left, right) = (Values::whole(left.0, left.1, dtype)?, Values::whole(right.0, right.1, dtype)?);
    compare_blocks(&left, &right, CompareMode::Full, options, reporter, stop, &|_, _| {})
}

/// Locates every stored chunk, replicas included, without reading its data.
///
/// # Errors
/// `Malformed` if a chunk does not match the catalog.
pub fn check_locations(input: Input<'_>, entry: &TensorEntry) -> Result<()> {
    let chunks = u32::try_from(entry.chunks.len()).expect("fewer than 2^32 chunks a tensor");
    let mut stored = (0..chunks).filter(|chunk| !entry.chunks.tile(*chunk as usize).is_empty());
    stored.try_for_each(|chunk| PreparedTile::chunk(input, entry, chunk).map(drop))
}

/// Two stored replicas that differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaDifference {
    /// The index, in the tensor's chunk table, of the replica that conversions read.
    pub first: u32,
    /// The index, in the tensor's chunk table, of the replica that differs from `first`.
    pub second: u32,
    /// The row-major index, within the chunk, of the first element that differs.
    pub element: u64,
}

impl ReplicaDifference {
    /// Returns the index in the global tensor of the first element that differs.
    pub fn index(&self, entry: &TensorEntry) -> Dims {
        entry.chunks.tile(self.first as usize).global_index(self.element)
    }
}

/// Compares the replicas of each chunk with the replica that conversions read. Returns the first replica that differs,
/// or `None` if there is none.
///
/// # Errors
/// Errors of [`digest`].
pub fn replica_difference(
    input: Input<'_>,
    entry: &TensorEntry,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Option<ReplicaDifference>> {
    let tilings = entry.tilings()?;
    for holders in tilings.iter().flat_map(|tiling| &tiling.holders) {
        let [first, others @ ..] = holders.as_slice() else { continue };
        if others.is_empty() {
            continue;
        }
        let reference = Values::chunk(input, entry, *first)?;
        for second in others {
            let other = Values::chunk(input, entry, *second)?;
            let found =
                compare_blocks(&reference, &other, CompareMode::FirstDifference, options, reporter, stop, &|_, _| {})?;
            if let Some(Difference { element, .. }) = found {
                return Ok(Some(ReplicaDifference { first: *first, second: *second, element }));
            }
        }
    }
    Ok(None)
}

/// Returns the index of the first chunk of a written tensor that has other values than the source gives for this chunk.
/// The source gives the chunk's share of the partial values, reduced and cast. `None` if no chunk differs.
///
/// # Errors
/// Errors of [`digest`].
pub fn share_difference(
    source: (Input<'_>, &TensorEntry),
    written: Input<'_>,
    tensor: &Reserved,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Option<u32>> {
    let (input, plan, mut known) = (source.0, SourceTensor::new(source.1)?, Locations::for_tiles(tensor.shares.len()));
    for (chunk, share) in (0..).zip(&tensor.shares) {
        if tensor.file_offset(chunk as usize).is_none() {
            continue;
        }
        let tile = tensor.entry.chunks.tile(chunk as usize);
        let prepared =
            PreparedTile::with_share(input, &plan, &tile, Some(share), &mut known)?.cast_to(tensor.dtype())?;
        let left = Values { input, prepared, dtype: tensor.dtype() };
        let right = Values::chunk(written, &tensor.entry, chunk)?;
        if compare_blocks(&left, &right, CompareMode::FirstDifference, options, reporter, stop, &|_, _| {})?.is_some() {
            return Ok(Some(chunk));
        }
    }
    Ok(None)
}

/// The amount of data to compare: everything, or up to the first difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CompareMode {
    /// Compares all values, so the number and the size of the differences are complete.
    Full,
    /// Compares values only up to the first difference. The number and the size of the differences are then incomplete.
    FirstDifference,
}

/// A block of values of the first of two tensors that are compared.
struct Block<'a> {
    /// The position of the first byte in the tensor.
    first: u64,
    left: &'a [u8],
}

/// Compares two lists of values with the same dtype and the same length. Threads compare blocks in parallel. Passes each
/// compared block to `each`, and whether it differs.
fn compare_blocks(
    left: &Values<'_>,
    right: &Values<'_>,
    mode: CompareMode,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
    each: &(dyn Fn(Block<'_>, bool) + Sync),
) -> Result<Option<Difference>> {
    // The end of the bytes that still have to be compared. Workers take the blocks in order, so after a difference all
    // later blocks are irrelevant.
    let end = AtomicU64::new(u64::MAX);
    let found = Mutex::new(Vec::<(u64, Difference)>::new());
    // Each thread has two buffers, which together are as large as one write block.
    let blocks = left.blocks(options.write_block_bytes / 2);
    let workers = options.threads.min(blocks.len());
    let blocks = Mutex::new(blocks);
    let work = |_worker: usize| -> Result<()> {
        let (mut buffers, mut scratch) = ((Vec::new(), Vec::new()), Scratch::default());
        loop {
            let next = blocks.lock().expect("no panic while the lock is held").next();
            let Some((first, len)) = next.filter(|(first, _)| *first < end.load(Ordering::Relaxed)) else {
                return Ok(());
            };
            stop.check()?;
            left.read(first, len, &mut buffers.0, &mut scratch)?;
            right.read(first, len, &mut buffers.1, &mut scratch)?;
            let element = first / left.prepared.itemsize();
            let difference = Difference::between(left.dtype, element, &buffers.0, &buffers.1);
            each(Block { first, left: &buffers.0 }, difference.is_some());
            if let Some(difference) = difference {
                found.lock().expect("no panic while the lock is held").push((first, difference));
                if mode == CompareMode::FirstDifference {
                    end.fetch_min(first, Ordering::Relaxed);
                }
            }
            reporter.advance(len);
        }
    };
    // Waking other threads takes longer than comparing a tensor that is one block.
    if workers <= 1 {
        work(0)?;
    } else {
        (0..workers).into_par_iter().with_max_len(1).try_for_each(work)?;
    }
    let mut found = found.into_inner().expect("no panic while the lock is held");
    // Sums of squares are rounded, so their order matters.
    found.sort_unstable_by_key(|(first, _)| *first);
    Ok(found.into_iter().map(|(_, difference)| difference).reduce(Difference::join))
}

/// The values of a tensor, or of one stored chunk, which are read in row-major order.
pub(crate) struct Values<'a> {
    input: Input<'a>,
    prepared: PreparedTile,
    /// The dtype in which the values are read, after any cast.
    dtype: Dtype,
}

impl<'a> Values<'a> {
    fn whole(input: Input<'a>, entry: &TensorEntry, dtype: Dtype) -> Result<Self> {
        let source = SourceTensor::new(entry)?;
        let tile = Tile::from_region(&Region::whole(&entry.shape));
        let prepared = PreparedTile::new(input, &source, &tile, &mut Locations::default())?.cast_to(dtype)?;
        Ok(Self { input, prepared, dtype })
    }

    /// Prepares to read one stored chunk without its replicas.
    pub(crate) fn chunk(input: Input<'a>, entry: &TensorEntry, chunk: u32) -> Result<Self> {
        Ok(Self { input, prepared: PreparedTile::chunk(input, entry, chunk)?, dtype: entry.dtype })
    }

    /// Reads `len` bytes into `buffer`, starting at byte `first` of the values.
    pub(crate) fn read(&self, first: u64, len: u64, buffer: &mut Vec<u8>, scratch: &mut Scratch) -> Result<()> {
        buffer.resize(usize::try_from(len).expect("a block fits memory"), 0);
        self.prepared.read(self.input, first / self.prepared.itemsize(), buffer, scratch)
    }

    /// Returns the first byte and the length of each block of the values. Blocks never split an element.
    pub(crate) fn blocks(&self, block_bytes: u64) -> impl ExactSizeIterator<Item = (u64, u64)> + use<> {
        let itemsize = self.prepared.itemsize();
        let total = self.prepared.numel() * itemsize;
        let step = (block_bytes - block_bytes % itemsize).max(itemsize);
        let count = usize::try_from(total.div_ceil(step)).expect("fewer blocks than bytes of memory");
        (0..count).map(move |index| (index as u64 * step, step.min(total - index as u64 * step)))
    }
}

/// Returns true if the tensors cannot be compared, because the partial values of one of them cannot be reduced: the
/// dtype does not support the op, or the result overflows. This is so if the error is `Unsupported` and one of the
/// tensors has partial values.
pub fn has_no_value(error: &Error, entries: &[&TensorEntry]) -> bool {
    matches!(error, Error::Format(FormatError::Unsupported { .. }))
        && entries.iter().any(|entry| entry.partial_values.is_some())
}
