//! Reading without writing: digests, equality across layouts, equality of replicas.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

pub use super::difference::Difference;
use super::{Input, Locations, Options, PreparedTile, Reporter, Scratch, Stop};
use crate::catalog::{Dtype, Reserved, TensorEntry, TensorId};
use crate::error::Result;
use crate::layout::{Dims, Region, Tile};
use crate::plan::SourceTensor;

/// The digests of tensors, each read as a dtype, several at a time.
///
/// # Errors
/// As [`digest`].
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

/// The BLAKE3 hash of a tensor's values, cast to `dtype` where they have another one, whatever its layout and format.
///
/// Hashed are the text `DTYPE [D0,D1,...]\n` (`bf16 [4,3]\n`, `f32 []\n`) and then the elements, row-major,
/// little-endian.
///
/// # Errors
/// As reading: `Coverage`, `Malformed`, `Io`, `Stopped`; `Unsupported` where there is no such cast.
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
    for (first, len) in values.blocks(options.strip_bytes) {
        stop.check()?;
        values.read(first, len, &mut buffer, &mut scratch)?;
        hasher.update(&buffer);
        reporter.advance(len);
    }
    Ok(format!("blake3:{}", hasher.finalize().to_hex()))
}

/// How two tensors of equal shape differ, both read as `dtype` (a cast of the one that has another); `None` where they
/// are equal bit for bit.
///
/// # Errors
/// As [`digest`].
pub fn first_difference(
    left: (Input<'_>, &TensorEntry),
    right: (Input<'_>, &TensorEntry),
    dtype: Dtype,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Option<Difference>> {
    let (left, right) = (Values::whole(left.0, left.1, dtype)?, Values::whole(right.0, right.1, dtype)?);
    compare_blocks(&left, &right, Extent::Whole, options, reporter, stop)
}

/// Find every stored chunk, replicas included, without reading its data.
///
/// # Errors
/// `Malformed` where a chunk is not where, or not what, the catalog says.
pub fn locate(input: Input<'_>, entry: &TensorEntry) -> Result<()> {
    let chunks = u32::try_from(entry.chunks.len()).expect("fewer than 2^32 chunks a tensor");
    let mut stored = (0..chunks).filter(|chunk| !entry.chunks.tile(*chunk as usize).is_empty());
    stored.try_for_each(|chunk| PreparedTile::chunk(input, entry, chunk).map(drop))
}

/// A stored replica that differs from the one that is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaDifference {
    /// Indices into the tensor's chunk table.
    pub first: u32,
    pub second: u32,
    /// Row-major index within the chunk.
    pub element: u64,
}

impl ReplicaDifference {
    /// The index in the tensor of the first element that differs.
    #[must_use]
    pub fn index(&self, entry: &TensorEntry) -> Dims {
        entry.chunks.tile(self.first as usize).index(self.element)
    }
}

/// The first replica of any chunk that differs from the holder that is read.
///
/// # Errors
/// As [`digest`].
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
            let found = compare_blocks(&reference, &other, Extent::UntilOneDiffers, options, reporter, stop)?;
            if let Some(Difference { element, .. }) = found {
                return Ok(Some(ReplicaDifference { first: *first, second: *second, element }));
            }
        }
    }
    Ok(None)
}

/// The first chunk of a written tensor that is not the share of the source's summands that falls to it.
///
/// # Errors
/// As [`digest`].
pub fn share_difference(
    source: (Input<'_>, &TensorEntry),
    written: Input<'_>,
    tensor: &Reserved,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Option<u32>> {
    let (input, plan, mut known) = (source.0, SourceTensor::new(source.1)?, Locations::of_tiles(tensor.shares.len()));
    for (chunk, share) in (0..).zip(&tensor.shares) {
        if tensor.place(chunk as usize).is_none() {
            continue;
        }
        let tile = tensor.entry.chunks.tile(chunk as usize);
        let prepared = PreparedTile::share(input, &plan, &tile, Some(share), &mut known)?.cast_to(tensor.dtype())?;
        let left = Values { input, prepared, dtype: tensor.dtype() };
        let right = Values::chunk(written, &tensor.entry, chunk)?;
        if compare_blocks(&left, &right, Extent::UntilOneDiffers, options, reporter, stop)?.is_some() {
            return Ok(Some(chunk));
        }
    }
    Ok(None)
}

/// How much to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extent {
    /// Everything.
    Whole,
    /// What is needed to know the first element that differs; how many do, and by how much, is then left open.
    UntilOneDiffers,
}

/// Compare values of equal dtype and number block by block, blocks in parallel.
fn compare_blocks(
    left: &Values<'_>,
    right: &Values<'_>,
    extent: Extent,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Option<Difference>> {
    // The byte up to which there is something to do: blocks come in order, so a difference decides for all after it.
    let end = AtomicU64::new(u64::MAX);
    let found = Mutex::new(None::<Difference>);
    // Two buffers a thread share what is meant for one.
    let blocks = left.blocks(options.strip_bytes / 2);
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
            if let Some(difference) = Difference::between(left.dtype, element, &buffers.0, &buffers.1) {
                let mut found = found.lock().expect("no panic while the lock is held");
                *found = Some(found.map_or(difference, |found| found.join(difference)));
                if extent == Extent::UntilOneDiffers {
                    end.fetch_min(first, Ordering::Relaxed);
                }
            }
            reporter.advance(len);
        }
    };
    // Waking others takes longer than a tensor of one block.
    if workers <= 1 {
        work(0)?;
    } else {
        (0..workers).into_par_iter().with_max_len(1).try_for_each(work)?;
    }
    Ok(found.into_inner().expect("no panic while the lock is held"))
}

/// Values to be read in row-major order: a whole tensor, or one stored chunk of it.
pub(crate) struct Values<'a> {
    input: Input<'a>,
    prepared: PreparedTile,
    /// As they are read.
    dtype: Dtype,
}

impl<'a> Values<'a> {
    fn whole(input: Input<'a>, entry: &TensorEntry, dtype: Dtype) -> Result<Self> {
        let source = SourceTensor::new(entry)?;
        let tile = Tile::from_region(&Region::whole(&entry.shape));
        let prepared = PreparedTile::new(input, &source, &tile, &mut Locations::default())?.cast_to(dtype)?;
        Ok(Self { input, prepared, dtype })
    }

    pub(crate) fn chunk(input: Input<'a>, entry: &TensorEntry, chunk: u32) -> Result<Self> {
        Ok(Self { input, prepared: PreparedTile::chunk(input, entry, chunk)?, dtype: entry.dtype })
    }

    /// Read `len` bytes from byte `first`.
    pub(crate) fn read(&self, first: u64, len: u64, buffer: &mut Vec<u8>, scratch: &mut Scratch) -> Result<()> {
        buffer.resize(usize::try_from(len).expect("a block fits memory"), 0);
        self.prepared.read(self.input, first / self.prepared.itemsize(), buffer, scratch)
    }

    /// The (first byte, length) of each block; blocks hold whole elements.
    pub(crate) fn blocks(&self, block_bytes: u64) -> impl ExactSizeIterator<Item = (u64, u64)> + use<> {
        let itemsize = self.prepared.itemsize();
        let total = self.prepared.numel() * itemsize;
        let step = (block_bytes - block_bytes % itemsize).max(itemsize);
        let count = usize::try_from(total.div_ceil(step)).expect("fewer blocks than bytes of memory");
        (0..count).map(move |index| (index as u64 * step, step.min(total - index as u64 * step)))
    }
}
