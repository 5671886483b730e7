//! Reading without writing: digests, equality across layouts, equality of replicas.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::{Input, Locations, Options, Prepared, Reporter, Stop};
use crate::catalog::{TensorEntry, TensorId};
use crate::error::Result;
use crate::layout::Tile;
use crate::plan::Source;

/// The digests of tensors, several at a time.
///
/// # Errors
/// As [`digest`].
pub fn digests(
    input: Input<'_>,
    entries: &[(TensorId, &TensorEntry)],
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<BTreeMap<TensorId, String>> {
    entries.par_iter().map(|(id, entry)| Ok((*id, digest(input, entry, options, reporter, stop)?))).collect()
}

/// The BLAKE3 hash of a tensor's values, whatever its layout and format.
///
/// Hashed are the text `DTYPE [D0,D1,...]\n` (`bf16 [4,3]\n`, `f32 []\n`) and then the elements, row-major,
/// little-endian.
///
/// # Errors
/// As reading: `Coverage`, `Malformed`, `Io`, `Stopped`.
pub fn digest(
    input: Input<'_>,
    entry: &TensorEntry,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<String> {
    let whole = Whole::new(input, entry)?;
    let dims: Vec<String> = entry.shape.iter().map(ToString::to_string).collect();
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{} [{}]\n", entry.dtype, dims.join(",")).as_bytes());
    let (mut buffer, mut scratch) = (Vec::new(), Vec::new());
    for (first, len) in blocks(entry, options.strip_bytes) {
        stop.check()?;
        whole.read(first, len, &mut buffer, &mut scratch)?;
        hasher.update(&buffer);
        reporter.advance(len);
    }
    Ok(format!("blake3:{}", hasher.finalize().to_hex()))
}

/// The first element in which two tensors of equal dtype and shape differ, in row-major order; `None` where they are
/// equal bit for bit.
///
/// # Errors
/// As [`digest`].
pub fn first_difference(
    left: (Input<'_>, &TensorEntry),
    right: (Input<'_>, &TensorEntry),
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Option<u64>> {
    let left_whole = Whole::new(left.0, left.1)?;
    let right_whole = Whole::new(right.0, right.1)?;
    compare_blocks(left.1, options, reporter, stop, |first, len, buffers, scratch| {
        left_whole.read(first, len, &mut buffers.0, scratch)?;
        right_whole.read(first, len, &mut buffers.1, scratch)
    })
}

/// Find every stored chunk, replicas included, without reading its data.
///
/// # Errors
/// `Malformed` where a chunk is not where, or not what, the catalog says.
pub fn locate(input: Input<'_>, entry: &TensorEntry) -> Result<()> {
    let chunks = u32::try_from(entry.chunks.len()).expect("fewer than 2^32 chunks a tensor");
    let stored = (0..chunks).filter(|chunk| !entry.chunks.tile(*chunk as usize).is_empty());
    stored.into_iter().try_for_each(|chunk| Prepared::chunk(input, entry, chunk).map(drop))
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
    let tiling = entry.tiling()?;
    for holders in &tiling.holders {
        let [first, others @ ..] = holders.as_slice() else { continue };
        if others.is_empty() {
            continue;
        }
        let reference = Prepared::chunk(input, entry, *first)?;
        for second in others {
            let other = Prepared::chunk(input, entry, *second)?;
            let itemsize = entry.dtype.itemsize();
            let part = TensorEntry { shape: [reference.numel()].as_slice().into(), ..without_chunks(entry) };
            let found = compare_blocks(&part, options, reporter, stop, |first, len, buffers, scratch| {
                for (prepared, buffer) in [(&reference, &mut buffers.0), (&other, &mut buffers.1)] {
                    buffer.resize(usize::try_from(len).expect("a block fits memory"), 0);
                    prepared.read(input, first / itemsize, buffer, scratch)?;
                }
                Ok(())
            })?;
            if let Some(element) = found {
                return Ok(Some(ReplicaDifference { first: *first, second: *second, element }));
            }
        }
    }
    Ok(None)
}

fn without_chunks(entry: &TensorEntry) -> TensorEntry {
    TensorEntry {
        fqn: entry.fqn.clone(),
        dtype: entry.dtype,
        shape: entry.shape.clone(),
        sharding: None,
        chunks: crate::catalog::ChunkTable::default(),
    }
}

/// Compare two buffers block by block, blocks in parallel, and give the first element that differs.
fn compare_blocks(
    entry: &TensorEntry,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
    read: impl Fn(u64, u64, &mut (Vec<u8>, Vec<u8>), &mut Vec<u8>) -> Result<()> + Sync,
) -> Result<Option<u64>> {
    let lowest = AtomicU64::new(u64::MAX);
    // Two buffers a thread share what is meant for one.
    let blocks = Mutex::new(blocks(entry, options.strip_bytes / 2));
    let itemsize = entry.dtype.itemsize();
    (0..options.threads).into_par_iter().with_max_len(1).try_for_each(|_| -> Result<()> {
        let (mut buffers, mut scratch) = ((Vec::new(), Vec::new()), Vec::new());
        loop {
            let next = blocks.lock().expect("no panic while the lock is held").next();
            // A difference before this block decides already; blocks come in order.
            let Some((first, len)) = next.filter(|(first, _)| *first < lowest.load(Ordering::Relaxed)) else {
                return Ok(());
            };
            stop.check()?;
            read(first, len, &mut buffers, &mut scratch)?;
            if buffers.0 != buffers.1 {
                let at = buffers.0.iter().zip(&buffers.1).position(|(left, right)| left != right);
                lowest.fetch_min(first + at.unwrap_or(0) as u64, Ordering::Relaxed);
            }
            reporter.advance(len);
        }
    })?;
    let lowest = lowest.into_inner();
    Ok((lowest != u64::MAX).then_some(lowest / itemsize))
}

/// A tensor planned as one whole tile.
struct Whole<'a> {
    input: Input<'a>,
    itemsize: u64,
    prepared: Prepared,
}

impl<'a> Whole<'a> {
    fn new(input: Input<'a>, entry: &TensorEntry) -> Result<Self> {
        let source = Source::new(entry)?;
        let tile = Tile::from_region(&crate::layout::Region::whole(&entry.shape));
        let prepared = Prepared::new(input, &source, &tile, &mut Locations::default())?;
        Ok(Self { input, itemsize: entry.dtype.itemsize(), prepared })
    }

    /// Read `len` bytes from byte `first` of the row-major values.
    fn read(&self, first: u64, len: u64, buffer: &mut Vec<u8>, scratch: &mut Vec<u8>) -> Result<()> {
        buffer.resize(usize::try_from(len).expect("a block fits memory"), 0);
        self.prepared.read(self.input, first / self.itemsize, buffer, scratch)
    }
}

/// The (first byte, length) of each block of a tensor's values; blocks hold whole elements.
fn blocks(entry: &TensorEntry, block_bytes: u64) -> impl Iterator<Item = (u64, u64)> + use<> {
    let total = entry.len_bytes();
    let itemsize = entry.dtype.itemsize();
    let step = (block_bytes - block_bytes % itemsize).max(itemsize);
    (0..total.div_ceil(step)).map(move |index| (index * step, step.min(total - index * step)))
}
