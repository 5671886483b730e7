//! Fills the reserved output files: the executor behind `reshard`, `flatten`, `unshard` and `consolidate`.
//!
//! Work proceeds in windows, groups of tensors with at most about 1 GiB of output, or one larger tensor. For each
//! window, the tensors are planned and their chunks located, and the tiles are cut into write blocks. Worker threads
//! fill and write these blocks in parallel: one worker fills the blocks of a row group one after the other, and all
//! other blocks are written in file order. So memory depends on the window and on the blocks in progress, not on the
//! model. Header bytes after the last tensor data, and checksums of byte ranges that several write blocks share, are
//! written last.
//!
//! A process may have to write only some of the output: its own share, or the bytes that an earlier run did not finish.
//! Tensors without such bytes are not planned. Finished work is [logged](WorkLog) after each window, once the source
//! has been checked.
//!
//! All sizes and offsets are in bytes of the output. Invariant: each byte that is to be written is written once, from
//! one write block.

use std::collections::BTreeMap;
use std::iter::zip;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::cast::{DtypePair, LossCounts};
use super::checksums::{BlockChecksums, Checksums};
use super::cut_blocks::{BlockCutter, Segment, SegmentContent, WriteBlock, sort_into_row_groups};
use super::digest::Digest;
use super::finished_ranges::{CastLosses, ChecksumPart, FinishedRange, WorkLog};
use super::global_totals::GlobalTotals;
use super::output::Outputs;
use super::row_groups::OutputRange;
use super::source_block::WantedRanges;
use super::source_crc::{CrcRecorder, SourceCrcs};
use super::window::{CastCounter, PlannedTile, WindowPace, Windows, prepare_window};
use super::{Extents, Input, Options, Phase, Reporter, Scratch, Stop};
use crate::catalog::{CRC_BYTES, Reservation};
use crate::comm::Traffic;
use crate::error::Result;
use crate::storage::AnchoredPath;
use crate::storage::direct::Buffer;

/// The memory in bytes of a planned tile until the tile is in a write block. The factor 4 covers a second copy of the
/// tile, the tile's segment of a write block, and unused capacity of the lists that contain them.
const PLANNED_BYTES: u64 = 4 * (size_of::<PlannedTile>() + size_of::<OutputRange>()) as u64;

/// The counters of a copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// The number of bytes of tensor data read from the source.
    pub bytes_read: u64,
    /// The number of bytes of output that earlier runs had written.
    pub bytes_already_written: u64,
    /// The number of contiguous byte runs that are read from the source files.
    pub runs: u64,
    /// The memory in bytes of the plans of the largest window. Only the plans of one window exist at a time.
    pub planned_bytes: u64,
    /// The number of bytes of values that NCCL reduced.
    pub nccl_reduced_bytes: u64,
    /// The numbers of bytes that this process has sent and received when processes exchange source data.
    pub traffic: Traffic,
    /// The totals over all processes. The totals are computed when all processes are done.
    pub global_totals: GlobalTotals,
    /// For each pair of source dtype and target dtype: the number of tensors that are cast, and the numbers of their
    /// elements that overflow or are NaN.
    pub casts: BTreeMap<DtypePair, CastCount>,
}

/// The number of tensors that were cast, and the numbers of their elements that overflowed or are NaN. An element with
/// several replicas counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CastCount {
    /// The number of tensors that were cast.
    pub tensors: u64,
    /// The number of overflows; see [`LossCounts`].
    pub overflows: u64,
    /// The number of NaNs; see [`LossCounts`].
    pub nans: u64,
}

impl Stats {
    /// Returns the counters at the start of a copy. At that time, only the number of tensors to cast is known.
    pub(crate) fn for_reservation(input: Input<'_>, reservation: &Reservation) -> Self {
        let mut stats = Self::default();
        for tensor in &reservation.tensors {
            let pair = (input.catalog.tensor(tensor.source).dtype, tensor.dtype());
            if pair.0 != pair.1 {
                stats.casts.entry(pair).or_default().tensors += 1;
            }
        }
        stats
    }

    /// Returns the runs and the bytes that are to be read for these tiles, and the memory of their plans. Reads nothing.
    pub(crate) fn for_tiles(tiles: &[PlannedTile]) -> Self {
        let tile_stats = |planned: &PlannedTile| {
            let mut stats = Self { planned_bytes: PLANNED_BYTES + planned.tile.heap_bytes(), ..Self::default() };
            planned.tile.pieces(|piece| {
                // The sum saturates, because each rank may read all partial values.
                stats.runs = stats.runs.saturating_add(piece.runs());
                stats.bytes_read = stats.bytes_read.saturating_add(piece.len_bytes());
            });
            stats
        };
        let sum = |one: Self, other: Self| Self {
            runs: one.runs.saturating_add(other.runs),
            bytes_read: one.bytes_read.saturating_add(other.bytes_read),
            planned_bytes: one.planned_bytes + other.planned_bytes,
            ..one
        };
        tiles.par_iter().map(tile_stats).reduce(Self::default, sum)
    }

    fn add_batch(&mut self, batch: &Self) {
        self.runs = self.runs.saturating_add(batch.runs);
        self.bytes_read = self.bytes_read.saturating_add(batch.bytes_read);
        self.nccl_reduced_bytes += batch.nccl_reduced_bytes;
        self.planned_bytes = self.planned_bytes.max(batch.planned_bytes);
    }

    /// Replaces the counts of overflows and NaNs in casts by the counts in `lost`.
    pub fn set_cast_losses(&mut self, lost: &CastLosses) {
        for (pair, counts) in lost {
            let cast = self.casts.entry(*pair).or_default();
            (cast.overflows, cast.nans) = (counts.overflows, counts.nans);
        }
    }
}

/// The inputs of a copy except the source: the files to write, the settings, and the receivers of progress.
#[derive(Clone, Copy)]
pub struct WriteContext<'a> {
    /// The layout of the output files.
    pub reservation: &'a Reservation,
    /// The folder of the output files.
    pub folder: &'a AnchoredPath,
    /// The log that has the byte ranges to write, and that records the finished ranges.
    pub log: &'a dyn WorkLog,
    /// The settings of the copy.
    pub options: &'a Options,
    /// The receiver of progress.
    pub reporter: &'a dyn Reporter,
    /// The flag that interrupts the run.
    pub stop: &'a Stop,
}

impl WriteContext<'_> {
    /// Creates the output files at their full size.
    ///
    /// # Errors
    /// Errors of `Outputs::create`.
    pub fn create_files(&self) -> Result<Outputs> {
        self.reporter.phase(Phase::Allocating);
        let made = Outputs::create(self.folder, &self.reservation.files, self.log.todo(), self.options.sync);
        self.reporter.phase(Phase::Copying);
        made
    }
}

/// Writes the byte ranges that the log lists as unwritten, with tensor data from the files of the source.
///
/// # Errors
/// The first error of any worker; `Stopped` on a signal. The output files are then incomplete, and the log has the
/// finished ranges.
pub fn copy(input: Input<'_>, context: WriteContext<'_>) -> Result<Stats> {
    let WriteContext { reservation, log, .. } = context;
    let mut tile_source = FileTiles {
        input,
        todo: log.todo(),
        windows: Windows::new(input, &reservation.tensors, log.todo()),
        pace: WindowPace::start(),
        window_bytes: 0,
        first: None,
    };
    // One thread creates a single file, so the other threads can plan at the same time.
    let (outputs, ()) = rayon::join(|| context.create_files(), || tile_source.plan_ahead());
    write(input, outputs?, tile_source, context)
}

/// A source of the tiles that fill write blocks.
pub trait TileSource {
    /// Replaces the content of `tiles` by the next tiles, and returns their batch, or `None` after the last tiles. The
    /// caller has already written the previous tiles.
    ///
    /// # Errors
    /// Errors of planning, reading or receiving the tiles.
    fn next(&mut self, tiles: &mut Vec<PlannedTile>) -> Result<Option<TileBatch>>;
}

/// A batch of tiles that are written together. [`TileSource::next`] stores the tiles themselves in a separate list.
pub struct TileBatch {
    /// The position of each tile in the output files.
    pub output_ranges: Vec<OutputRange>,
    /// The counters of reading the tiles of this batch, without the counts of casts.
    pub read_stats: Stats,
    /// True if all source data of this batch and of all earlier batches has been checked against the checksums in the
    /// source files. Only then may the batch be recorded as finished.
    pub is_checked: bool,
}

/// Tiles that are read from source files just before they are written, window by window. A window is a group of tensors
/// that are planned together.
struct FileTiles<'a> {
    input: Input<'a>,
    todo: &'a Extents,
    windows: Windows<'a>,
    pace: WindowPace,
    /// The number of output bytes of the current window (a group of tensors that are planned together).
    window_bytes: u64,
    /// The first window. It is planned before the first call of `next`, while the output files are created.
    first: Option<Result<Option<PlannedBatch>>>,
}

/// The tiles of a window, and the batch that describes them.
type PlannedBatch = (Vec<PlannedTile>, TileBatch);

impl FileTiles<'_> {
    fn plan_ahead(&mut self) {
        let mut tiles = Vec::new();
        let batch = self.next(&mut tiles);
        self.first = Some(batch.map(|batch| Some((tiles, batch?))));
    }
}

impl TileSource for FileTiles<'_> {
    fn next(&mut self, tiles: &mut Vec<PlannedTile>) -> Result<Option<TileBatch>> {
        if let Some(first) = self.first.take() {
            let Some((planned, batch)) = first? else { return Ok(None) };
            *tiles = planned;
            return Ok(Some(batch));
        }
        if self.window_bytes > 0 {
            self.pace.finish_window(self.window_bytes);
        }
        let Some(window) = self.windows.next(self.pace.next()) else { return Ok(None) };
        let output_ranges = prepare_window(self.input, &window, self.todo, tiles)?;
        self.window_bytes = output_ranges.iter().map(|range| range.len).sum();
        Ok(Some(TileBatch { output_ranges, read_stats: Stats::for_tiles(tiles), is_checked: true }))
    }
}

/// Writes as [`copy`] does, with tensor data from `tile_source`. The output files must exist.
///
/// # Errors
/// Errors of [`copy`].
pub fn write(
    input: Input<'_>,
    outputs: Outputs,
    mut tile_source: impl TileSource,
    context: WriteContext<'_>,
) -> Result<Stats> {
    let WriteContext { reservation, log, options, reporter, stop, .. } = context;
    let mut cutter =
        BlockCutter::new(&reservation.files, log.todo(), options.write_block_bytes, options.transposed_block_bytes);
    let checksums = Checksums::new(reservation, log.covers_everything());
    let source_crcs = SourceCrcs::default();
    let worker_buffers = Mutex::default();
    let writer = BlockWriter {
        input,
        reservation,
        tiles: &[],
        outputs: &outputs,
        checksums: &checksums,
        source_crcs: &source_crcs,
        worker_buffers: &worker_buffers,
        log,
        threads: options.threads,
        reporter,
        stop,
    };
    let mut stats = Stats::for_reservation(input, reservation);
    let mut tiles = Vec::new();
    let written = (|| {
        while let Some(TileBatch { output_ranges, read_stats, is_checked }) = tile_source.next(&mut tiles)? {
            stop.check()?;
            let mut blocks = cutter.cut(output_ranges);
            BlockWriter { tiles: &tiles, ..writer }.write_blocks(&mut blocks)?;
            source_crcs.check_complete(input.files)?;
            stats.add_batch(&read_stats);
            if is_checked {
                log.advance(&outputs, &|| input.files.check_unchanged())?;
            }
        }
        // The blocks of spans are written first, because other blocks may contain their checksums.
        let (mut in_spans, mut others) =
            cutter.finish().into_iter().partition::<Vec<_>, _>(|block| checksums.is_checksummed(block));
        writer.write_blocks(&mut in_spans)?;
        if log.covers_everything() {
            checksums.combine_all(log.checksum_parts());
        }
        writer.write_blocks(&mut others)?;
        checksums.write_deferred(&outputs)?;
        input.files.check_unchanged()
    })();
    if options.sync && written.is_ok() {
        reporter.phase(Phase::Syncing);
    }
    if let Err(error) = written.and_then(|()| log.finish(&outputs, stop)) {
        // Finished work is recorded before the error is returned, unless the source may have changed during the run.
        if input.files.check_unchanged().is_ok() {
            log.stop(&outputs);
        }
        return Err(error);
    }
    stats.set_cast_losses(&log.cast_losses());
    Ok(stats)
}

/// Returns the counters that [`copy`] would return, and copies nothing. Chunks are located, so a chunk that cannot be
/// read is an error. Overflows and NaNs in casts are not counted, because no data is read.
///
/// # Errors
/// Errors of [`copy`], except errors of writing.
pub fn dry_run(input: Input<'_>, reservation: &Reservation, stop: &Stop) -> Result<Stats> {
    let mut stats = Stats::for_reservation(input, reservation);
    let todo = Extents::of_files(&reservation.files);
    let mut windows = Windows::new(input, &reservation.tensors, &todo);
    let mut tiles = Vec::new();
    while let Some(window) = windows.next(WindowPace::max_bytes()) {
        stop.check()?;
        prepare_window(input, &window, &todo, &mut tiles)?;
        stats.add_batch(&Stats::for_tiles(&tiles));
    }
    Ok(stats)
}

/// The buffers of a worker. The workers of the next window reuse them, because allocating buffers again would take too
/// long for windows of small tensors.
#[derive(Default)]
struct WorkerBuffers {
    buffer: Buffer,
    scratch: Scratch,
}

/// The data that a worker needs to fill and write blocks.
#[derive(Clone, Copy)]
struct BlockWriter<'a> {
    input: Input<'a>,
    reservation: &'a Reservation,
    tiles: &'a [PlannedTile],
    outputs: &'a Outputs,
    checksums: &'a Checksums<'a>,
    source_crcs: &'a SourceCrcs,
    /// Buffers that no worker uses at the moment.
    worker_buffers: &'a Mutex<Vec<WorkerBuffers>>,
    log: &'a dyn WorkLog,
    threads: usize,
    reporter: &'a dyn Reporter,
    stop: &'a Stop,
}

impl BlockWriter<'_> {
    /// Fills and writes the blocks on several threads. A worker takes the next row group with all its blocks, or the
    /// next block that is in no row group.
    fn write_blocks(&self, blocks: &mut [WriteBlock]) -> Result<()> {
        let row_groups = sort_into_row_groups(blocks);
        let next = AtomicUsize::new(0);
        let work = |_worker: usize| -> Result<()> {
            let unused = || self.worker_buffers.lock().expect("no panic while the lock is held").pop();
            let mut own_buffers = unused().unwrap_or_default();
            while let Some(row_group) = row_groups.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(error) = self.write_row_group(row_group, &mut own_buffers.buffer, &mut own_buffers.scratch) {
                    // Makes the other workers stop after their current row group.
                    next.store(row_groups.len(), Ordering::Relaxed);
                    return Err(error);
                }
            }
            self.worker_buffers.lock().expect("no panic while the lock is held").push(own_buffers);
            Ok(())
        };
        (0..self.threads.min(row_groups.len())).into_par_iter().with_max_len(1).map(work).collect()
    }

    /// Fills and writes the blocks of one row group, or a single block that is in no row group.
    fn write_row_group(&self, row_group: &[WriteBlock], buffer: &mut Buffer, scratch: &mut Scratch) -> Result<()> {
        let copies: Vec<&[WriteBlock]> = row_group.chunk_by(|one, other| self.have_same_data(one, other)).collect();
        if copies.len() > 1 {
            let mut wanted = WantedRanges::default();
            for segment in row_group.iter().flat_map(|block| &block.segments) {
                if let SegmentContent::Tile { index, bytes } = &segment.content {
                    let tile = &self.tiles[*index].tile;
                    tile.add_short_runs(bytes.start / tile.itemsize(), segment.len() / tile.itemsize(), &mut wanted);
                }
            }
            scratch.block.load(self.input, wanted)?;
        }
        copies.into_iter().try_for_each(|copies| self.write_copies(copies, buffer, scratch))
    }

    /// Gathers the data of the first block in `copies` once, and writes this data to all blocks in `copies`, which have
    /// equal tensor data.
    fn write_copies(&self, copies: &[WriteBlock], buffer: &mut Buffer, scratch: &mut Scratch) -> Result<()> {
        let longest = copies.iter().map(WriteBlock::len).max().unwrap_or(0);
        let mut before = None;
        // The values that casts lost, for each block in `copies`.
        let mut lost = vec![CastLosses::new(); copies.len()];
        // The CRCs that were computed while reading, by their offset in the file of the current block.
        let mut read = Vec::new();
        for (nth, block) in copies.iter().enumerate() {
            self.stop.check()?;
            let at = block.range.start;
            let filled = match before.replace(at) {
                // The buffer must be large enough for the longest block in `copies`.
                None => {
                    let bytes_of_block = &mut buffer.prepare(at, longest)[..block.len()];
                    self.fill_block(block, bytes_of_block, |segment, target| {
                        self.gather(copies, segment, target, scratch, (&mut lost, &mut read))
                    })?;
                    read.sort_unstable_by_key(|part| part.offset);
                    bytes_of_block
                }
                Some(before) => {
                    read.iter_mut().for_each(|part| part.offset = part.offset - before + at);
                    let bytes_of_block = buffer.move_to(before, at, block.len());
                    self.fill_block(block, bytes_of_block, |_, _| Ok(()))?;
                    bytes_of_block
                }
            };
            for range in self.log.todo().within(block.file, block.range.clone()) {
                self.write(block, range, filled, std::mem::take(&mut lost[nth]), &read)?;
            }
            self.reporter.advance(block.range.end - block.range.start);
        }
        Ok(())
    }

    /// Returns whether two write blocks hold the same tensor data at the same offsets within the block.
    fn have_same_data(&self, one: &WriteBlock, other: &WriteBlock) -> bool {
        let is_same = |(this, that): (&Segment, &Segment)| match (&this.content, &that.content) {
            (
                SegmentContent::Tile { index, bytes },
                SegmentContent::Tile { index: other_index, bytes: other_bytes },
            ) => {
                let copies = self.tiles[*index].copy_group;
                copies.is_some()
                    && copies == self.tiles[*other_index].copy_group
                    && bytes == other_bytes
                    && this.offset - one.range.start == that.offset - other.range.start
            }
            (SegmentContent::HeaderBytes { .. }, SegmentContent::HeaderBytes { .. }) => true,
            _ => false,
        };
        one.segments.len() == other.segments.len() && zip(&one.segments, &other.segments).all(is_same)
    }

    /// Fills a write block with its header bytes. Calls `gather` to fill each segment of tensor data.
    fn fill_block(
        &self,
        block: &WriteBlock,
        buffer: &mut [u8],
        mut gather: impl FnMut(usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let headers = &self.reservation.files[block.file as usize].header_bytes;
        for (number, segment) in block.segments.iter().enumerate() {
            let target = &mut buffer[block.buffer_range(&segment.range())];
            match &segment.content {
                SegmentContent::HeaderBytes { index, bytes } => {
                    let range = usize::try_from(bytes.start).expect("header bytes fit memory")
                        ..usize::try_from(bytes.end).expect("header bytes fit memory");
                    target.copy_from_slice(&headers[*index].bytes[range]);
                }
                SegmentContent::Tile { .. } => gather(number, target)?,
            }
        }
        Ok(())
    }

    /// Computes the checksums and the digest of `range`, a byte range of a filled block, and writes the range to the
    /// file. `lost` has the counts of overflows and NaNs in the casts of the block. `read` has the CRCs that were
    /// computed while reading, so that they are not computed again.
    fn write(
        &self,
        block: &WriteBlock,
        range: Range<u64>,
        buffer: &mut [u8],
        lost: CastLosses,
        read: &[ChecksumPart],
    ) -> Result<()> {
        let file = &self.reservation.files[block.file as usize];
        let mut summed = BlockChecksums::default();
        if self.checksums.has_checksums(block.file) {
            for segment in &block.segments {
                let place = segment.range();
                let place = place.start.max(range.start)..place.end.min(range.end);
                // Header bytes between the tensor data of one span are part of the span.
                if !place.is_empty() && file.is_checksummed(place.start) {
                    summed.add(&place, &buffer[block.buffer_range(&place)], read);
                }
            }
        }
        let known = if self.checksums.has_checksums(block.file) { summed.parts() } else { read };
        let digest = Digest::of_bytes(file, &range, &buffer[block.buffer_range(&range)], known);
        let left = self.checksums.fill_sites(block.file, &range, &mut buffer[block.buffer_range(&range)], summed);
        let mut from = range.start;
        for site in &left.sites {
            self.outputs.write(block.file, from, &buffer[block.buffer_range(&(from..from.max(*site)))])?;
            from = (site + CRC_BYTES).min(range.end);
        }
        self.outputs.write(block.file, from, &buffer[block.buffer_range(&(from..range.end))])?;
        self.log.add(FinishedRange { file: block.file, range, digest, checksum_parts: left.parts, cast_losses: lost });
        Ok(())
    }

    /// Gathers the tensor data of one segment: the segment with the index `segment` in the first block of `copies`. All
    /// blocks in `copies` have this data, but only one of them counts the overflows and NaNs of the cast; the counts
    /// are added to the item of `lost` for this block. Adds to `read` the CRCs that were computed while reading.
    fn gather(
        &self,
        copies: &[WriteBlock],
        segment: usize,
        target: &mut [u8],
        scratch: &mut Scratch,
        (lost, read): (&mut [CastLosses], &mut Vec<ChecksumPart>),
    ) -> Result<()> {
        let Segment { offset, content } = &copies[0].segments[segment];
        let SegmentContent::Tile { index, bytes } = content else { return Ok(()) };
        let tile = &self.tiles[*index].tile;
        let first = bytes.start / tile.itemsize();
        let mut parts = Vec::new();
        let recorder = CrcRecorder { source_crcs: self.source_crcs, parts: &mut parts };
        let counts = tile.read_with_checksums(self.input, first, target, scratch, Some(recorder))?;
        read.extend(parts.into_iter().map(|part| ChecksumPart { offset: offset + part.offset, ..part }));
        let cast_counter = |copy: &WriteBlock| match copy.segments[segment].content {
            SegmentContent::Tile { index, .. } => self.tiles[index].cast_counter.as_ref(),
            SegmentContent::HeaderBytes { .. } => None,
        };
        // Only one of the blocks in `copies` counts the values that the cast lost.
        let mut counters = zip(lost, copies).filter_map(|(lost, copy)| Some((lost, copy, cast_counter(copy)?)));
        match counters.next() {
            None => {}
            Some((lost, copy, CastCounter::WhileWriting(pair))) => {
                let at = copy.segments[segment].offset;
                // If two runs write parts of one element, the run that has to write the first byte of the element
                // counts it.
                let elsewhere = if self.log.todo().overlaps(copy.file, &(at..at + 1)) {
                    LossCounts::default()
                } else {
                    let element = usize::try_from(tile.itemsize()).expect("a few bytes");
                    tile.read_with_checksums(self.input, first, &mut target[..element], scratch, None)?
                };
                lost.entry(*pair).or_default().add(counts.without(elsewhere));
            }
            Some((lost, _, CastCounter::Counted(pair, met))) => {
                let elements = first..bytes.end / tile.itemsize();
                let met = met.iter().filter(|(element, _)| elements.contains(element));
                met.for_each(|(_, counts)| lost.entry(*pair).or_default().add(*counts));
            }
        }
        Ok(())
    }
}
