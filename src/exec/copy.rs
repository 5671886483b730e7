//! Filling reserved files: the executor behind `reshard`, `flatten`, `unshard` and `consolidate`.
//!
//! Work goes in windows of up to 1 GiB of output. The tensors of a window are planned and located,
//! its tiles are cut into strips, and those are filled and written in parallel, those of one
//! band behind each other and everything else in file order. So memory follows the window and the strips
//! in flight, not the model. Literals that no tensor data comes after, and sums of what is spread over strips, come last.
//!
//! A run may have to do only some of the output: its part of it, or what an earlier one left. Tensors that have nothing to
//! do with that are not planned, and what is finished is [logged](WorkLog) window by window, when the source has been
//! checked.
//!
//! Counts bytes of output. Invariant: every byte of what is to be done is written from one strip, once.

use std::collections::BTreeMap;
use std::iter::zip;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::block::WantedRange;
use super::cast::{DtypePair, LossCounts};
use super::checksums::{BlockChecksums, Checksums};
use super::digest::Digest;
use super::finished::{CastLosses, FinishedRange, SumPart, WorkLog};
use super::global_totals::GlobalTotals;
use super::output::Outputs;
use super::row_groups::OutputRange;
use super::source_crc::{CrcRecorder, SourceCrcs};
use super::window::{CastCounter, PlannedTile, WindowPace, Windows, prepare};
use super::write_blocks::{Cutter, Segment, SegmentContent, WriteBlock, order};
use super::{Extents, Input, Options, Phase, Reporter, Scratch, Stop};
use crate::catalog::{Reservation, SITE_BYTES};
use crate::comm::Traffic;
use crate::error::Result;
use crate::storage::AnchoredPath;
use crate::storage::direct::Buffer;

/// A tile on its way from being planned to being in a strip: as one of its tensor and as one of the window, its payload,
/// and its part of a strip, in lists that have grown to hold it.
const PLANNED_BYTES: u64 = 4 * (size_of::<PlannedTile>() + size_of::<OutputRange>()) as u64;

/// Counts of what a copy moves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of tensor data taken from the source.
    pub bytes_read: u64,
    /// Bytes of output that were done before, by other runs.
    pub bytes_before: u64,
    /// Contiguous runs they come in.
    pub runs: u64,
    /// Memory that the largest plan took: only those of one window exist at a time.
    pub planned_bytes: u64,
    /// Bytes of values that NCCL has reduced.
    pub folded_bytes: u64,
    /// What went between processes, where they exchange what they read.
    pub traffic: Traffic,
    /// The same of all of them, once all are done.
    pub together: GlobalTotals,
    /// By dtype in the source and in the target.
    pub casts: BTreeMap<DtypePair, CastCount>,
}

/// Tensors that were cast, and the elements of them that did not come through; replicas count once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CastCount {
    pub tensors: u64,
    /// See [`Counts`].
    pub overflows: u64,
    pub nans: u64,
}

impl Stats {
    /// Of a copy that has not begun: which casts there will be.
    pub(crate) fn of(input: Input<'_>, reservation: &Reservation) -> Self {
        let mut stats = Self::default();
        for tensor in &reservation.tensors {
            let pair = (input.catalog.tensor(tensor.source).dtype, tensor.dtype());
            if pair.0 != pair.1 {
                stats.casts.entry(pair).or_default().tensors += 1;
            }
        }
        stats
    }

    /// Those of tiles that are planned.
    pub(crate) fn of_slots(slots: &[PlannedTile]) -> Self {
        let of_slot = |slot: &PlannedTile| {
            let mut stats = Self { planned_bytes: PLANNED_BYTES + slot.tile.held_bytes(), ..Self::default() };
            slot.tile.pieces(|piece| {
                // As many summands as there are may be read for each rank.
                stats.runs = stats.runs.saturating_add(piece.runs());
                stats.bytes_read = stats.bytes_read.saturating_add(piece.len_bytes());
            });
            stats
        };
        let both = |one: Self, other: Self| Self {
            runs: one.runs.saturating_add(other.runs),
            bytes_read: one.bytes_read.saturating_add(other.bytes_read),
            planned_bytes: one.planned_bytes + other.planned_bytes,
            ..one
        };
        slots.par_iter().map(of_slot).reduce(Self::default, both)
    }

    fn add_batch(&mut self, batch: &Self) {
        self.runs = self.runs.saturating_add(batch.runs);
        self.bytes_read = self.bytes_read.saturating_add(batch.bytes_read);
        self.folded_bytes += batch.folded_bytes;
        self.planned_bytes = self.planned_bytes.max(batch.planned_bytes);
    }

    /// What casts met, in place of what was known of it.
    pub fn lose(&mut self, lost: &CastLosses) {
        for (pair, counts) in lost {
            let cast = self.casts.entry(*pair).or_default();
            (cast.overflows, cast.nans) = (counts.overflows, counts.nans);
        }
    }
}

/// What is written, how, and who is told.
#[derive(Clone, Copy)]
pub struct Writing<'a> {
    pub reservation: &'a Reservation,
    /// Where its files are.
    pub folder: &'a AnchoredPath,
    /// Has what is to be done of them.
    pub log: &'a dyn WorkLog,
    pub options: &'a Options,
    pub reporter: &'a dyn Reporter,
    pub stop: &'a Stop,
}

impl Writing<'_> {
    /// Make the files.
    ///
    /// # Errors
    /// As those of `Outputs::make`.
    pub fn make(&self) -> Result<Outputs> {
        self.reporter.phase(Phase::Allocating);
        let made = Outputs::make(self.folder, &self.reservation.files, self.log.todo(), self.options.sync);
        self.reporter.phase(Phase::Moving);
        made
    }
}

/// Fill what is to be done of files, from the files of the source.
///
/// # Errors
/// The first error of any worker; `Stopped` on a signal. The files are incomplete then, and the log has what is complete.
pub fn copy(input: Input<'_>, writing: Writing<'_>) -> Result<Stats> {
    let Writing { reservation, log, .. } = writing;
    let mut supply = FromFiles {
        input,
        todo: log.todo(),
        windows: Windows::new(input, &reservation.tensors, log.todo()),
        pace: WindowPace::start(),
        begun: 0,
        first: None,
    };
    // One file is made by one thread.
    let (outputs, ()) = rayon::join(|| writing.make(), || supply.plan_ahead());
    write(input, outputs?, supply, writing)
}

/// Where tiles come from that are put into strips.
pub trait Supply {
    /// The next ones, in place of those in `slots`; `None` after the last. Those before are written by then.
    ///
    /// # Errors
    /// Whatever there is in the way of having them.
    fn next(&mut self, slots: &mut Vec<PlannedTile>) -> Result<Option<Batch>>;
}

/// Tiles that are written in one go; they are in the slots that are given with it.
pub struct Batch {
    pub payloads: Vec<OutputRange>,
    /// What is taken from the source for them; no casts.
    pub taken: Stats,
    /// Whether all that was taken so far is known to be what its writer wrote, once this is written.
    pub is_checked: bool,
}

/// Tiles that are read as they are written, window by window.
struct FromFiles<'a> {
    input: Input<'a>,
    todo: &'a Extents,
    windows: Windows<'a>,
    pace: WindowPace,
    /// Bytes of the window that was begun.
    begun: u64,
    /// What was planned before anybody asked for it.
    first: Option<Result<Option<Planned>>>,
}

/// A batch, and the slots of its tiles.
type Planned = (Vec<PlannedTile>, Batch);

impl FromFiles<'_> {
    fn plan_ahead(&mut self) {
        let mut slots = Vec::new();
        let batch = self.next(&mut slots);
        self.first = Some(batch.map(|batch| Some((slots, batch?))));
    }
}

impl Supply for FromFiles<'_> {
    fn next(&mut self, slots: &mut Vec<PlannedTile>) -> Result<Option<Batch>> {
        if let Some(first) = self.first.take() {
            let Some((tiles, batch)) = first? else { return Ok(None) };
            *slots = tiles;
            return Ok(Some(batch));
        }
        if self.begun > 0 {
            self.pace.done(self.begun);
        }
        let Some(window) = self.windows.next(self.pace.next()) else { return Ok(None) };
        let payloads = prepare(self.input, &window, self.todo, slots)?;
        self.begun = payloads.iter().map(|payload| payload.len).sum();
        Ok(Some(Batch { payloads, taken: Stats::of_slots(slots), is_checked: true }))
    }
}

/// As [`copy`], into files that were made, with tensor data from wherever `supply` has it.
///
/// # Errors
/// As [`copy`].
pub fn write(input: Input<'_>, outputs: Outputs, mut supply: impl Supply, writing: Writing<'_>) -> Result<Stats> {
    let Writing { reservation, log, options, reporter, stop, .. } = writing;
    let mut cutter = Cutter::new(&reservation.files, log.todo(), options.strip_bytes);
    let sums = Checksums::new(reservation, log.is_all());
    let passing = SourceCrcs::default();
    let benches = Mutex::default();
    let filler = Filler {
        input,
        reservation,
        slots: &[],
        outputs: &outputs,
        sums: &sums,
        passing: &passing,
        benches: &benches,
        log,
        threads: options.threads,
        reporter,
        stop,
    };
    let mut stats = Stats::of(input, reservation);
    let mut slots = Vec::new();
    let done = (|| {
        while let Some(Batch { payloads, taken, is_checked }) = supply.next(&mut slots)? {
            stop.check()?;
            let mut strips = cutter.cut(payloads);
            Filler { slots: &slots, ..filler }.fill(&mut strips)?;
            passing.settle(input.files)?;
            stats.add_batch(&taken);
            if is_checked {
                log.advance(&outputs, &|| input.files.check_unchanged())?;
            }
        }
        // What is summed first: the others may hold the sums.
        let (mut in_spans, mut others) =
            cutter.finish().into_iter().partition::<Vec<_>, _>(|strip| sums.has_summed(strip));
        filler.fill(&mut in_spans)?;
        if log.is_all() {
            sums.settle(log.sums());
        }
        filler.fill(&mut others)?;
        sums.patch(&outputs)?;
        input.files.check_unchanged()
    })();
    if options.sync && done.is_ok() {
        reporter.phase(Phase::Syncing);
    }
    if let Err(error) = done.and_then(|()| log.finish(&outputs, stop)) {
        // What has been checked is not lost with the rest, unless it may be of two sources.
        if input.files.check_unchanged().is_ok() {
            log.stop(&outputs);
        }
        return Err(error);
    }
    stats.lose(&log.lost());
    Ok(stats)
}

/// What [`copy`] would move, without moving it. Chunks are located, so what cannot be read is found here; what casts
/// would meet is not.
///
/// # Errors
/// As [`copy`], but for writing.
pub fn dry_run(input: Input<'_>, reservation: &Reservation, stop: &Stop) -> Result<Stats> {
    let mut stats = Stats::of(input, reservation);
    let todo = Extents::of_files(&reservation.files);
    let mut windows = Windows::new(input, &reservation.tensors, &todo);
    let mut slots = Vec::new();
    while let Some(window) = windows.next(WindowPace::at_most()) {
        stop.check()?;
        prepare(input, &window, &todo, &mut slots)?;
        stats.add_batch(&Stats::of_slots(&slots));
    }
    Ok(stats)
}

/// Memory of a worker, which the next window's workers take over: it is not worth making anew for a window of small tensors.
#[derive(Default)]
struct WorkerBuffers {
    buffer: Buffer,
    scratch: Scratch,
}

/// Everything a worker needs to fill strips.
#[derive(Clone, Copy)]
struct Filler<'a> {
    input: Input<'a>,
    reservation: &'a Reservation,
    slots: &'a [PlannedTile],
    outputs: &'a Outputs,
    sums: &'a Checksums<'a>,
    passing: &'a SourceCrcs,
    /// Those that no worker is at.
    benches: &'a Mutex<Vec<WorkerBuffers>>,
    log: &'a dyn WorkLog,
    threads: usize,
    reporter: &'a dyn Reporter,
    stop: &'a Stop,
}

impl Filler<'_> {
    /// Fill and write the strips. Workers take them band by band in order, so files are written front to back.
    fn fill(&self, strips: &mut [WriteBlock]) -> Result<()> {
        let bands = order(strips);
        let next = AtomicUsize::new(0);
        let work = |_worker: usize| -> Result<()> {
            let left = || self.benches.lock().expect("nobody fails with the lock").pop();
            let mut bench = left().unwrap_or_default();
            while let Some(band) = bands.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(error) = self.fill_band(band, &mut bench.buffer, &mut bench.scratch) {
                    // The others need not go on.
                    next.store(bands.len(), Ordering::Relaxed);
                    return Err(error);
                }
            }
            self.benches.lock().expect("nobody fails with the lock").push(bench);
            Ok(())
        };
        (0..self.threads.min(bands.len())).into_par_iter().with_max_len(1).map(work).collect()
    }

    /// Fill and write the strips of a band, or one that is of none.
    fn fill_band(&self, band: &[WriteBlock], buffer: &mut Buffer, scratch: &mut Scratch) -> Result<()> {
        let gathered: Vec<&[WriteBlock]> = band.chunk_by(|one, other| self.are_copies(one, other)).collect();
        if gathered.len() > 1 {
            let mut wanted = WantedRange::default();
            for segment in band.iter().flat_map(|strip| &strip.segments) {
                if let SegmentContent::Payload { slot, bytes } = &segment.content {
                    let tile = &self.slots[*slot].tile;
                    tile.short_runs(bytes.start / tile.itemsize(), segment.len() / tile.itemsize(), &mut wanted);
                }
            }
            scratch.block.hold(self.input.files, wanted)?;
        }
        gathered.into_iter().try_for_each(|copies| self.fill_copies(copies, buffer, scratch))
    }

    /// Gather the first of these strips, and write all of them.
    fn fill_copies(&self, copies: &[WriteBlock], buffer: &mut Buffer, scratch: &mut Scratch) -> Result<()> {
        let longest = copies.iter().map(WriteBlock::len).max().unwrap_or(0);
        let mut before = None;
        // What casts met, for each.
        let mut lost = vec![CastLosses::new(); copies.len()];
        // What was summed as it was read, by where it is in the strip at hand.
        let mut read = Vec::new();
        for (nth, strip) in copies.iter().enumerate() {
            self.stop.check()?;
            let at = strip.range.start;
            let filled = match before.replace(at) {
                // There has to be room for all copies from the first on.
                None => {
                    let room = &mut buffer.room(at, longest)[..strip.len()];
                    self.fill_strip(strip, room, |segment, target| {
                        self.gather(copies, segment, target, scratch, (&mut lost, &mut read))
                    })?;
                    read.sort_unstable_by_key(|part| part.offset);
                    room
                }
                Some(before) => {
                    read.iter_mut().for_each(|part| part.offset = part.offset - before + at);
                    let room = buffer.moved(before, at, strip.len());
                    self.fill_strip(strip, room, |_, _| Ok(()))?;
                    room
                }
            };
            for range in self.log.todo().within(strip.file, strip.range.clone()) {
                self.write(strip, range, filled, std::mem::take(&mut lost[nth]), &read)?;
            }
            self.reporter.advance(strip.range.end - strip.range.start);
        }
        Ok(())
    }

    /// Whether one strip holds the same tensor data at the same places as the other.
    fn are_copies(&self, one: &WriteBlock, other: &WriteBlock) -> bool {
        let is_same = |(this, that): (&Segment, &Segment)| match (&this.content, &that.content) {
            (
                SegmentContent::Payload { slot, bytes },
                SegmentContent::Payload { slot: other_slot, bytes: other_bytes },
            ) => {
                let copies = self.slots[*slot].copies;
                copies.is_some()
                    && copies == self.slots[*other_slot].copies
                    && bytes == other_bytes
                    && this.offset - one.range.start == that.offset - other.range.start
            }
            (SegmentContent::Literal { .. }, SegmentContent::Literal { .. }) => true,
            _ => false,
        };
        one.segments.len() == other.segments.len() && zip(&one.segments, &other.segments).all(is_same)
    }

    /// Fill a strip, its tensor data with what `gather` puts there for each segment.
    fn fill_strip(
        &self,
        strip: &WriteBlock,
        buffer: &mut [u8],
        mut gather: impl FnMut(usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let literals = &self.reservation.files[strip.file as usize].literals;
        for (index, segment) in strip.segments.iter().enumerate() {
            let target = &mut buffer[strip.place(&segment.range())];
            match &segment.content {
                SegmentContent::Literal { literal, bytes } => {
                    let range = usize::try_from(bytes.start).expect("literals fit memory")
                        ..usize::try_from(bytes.end).expect("literals fit memory");
                    target.copy_from_slice(&literals[*literal].bytes[range]);
                }
                SegmentContent::Payload { .. } => gather(index, target)?,
            }
        }
        Ok(())
    }

    /// Sum and write this range of a strip that is filled; casts met `lost` in it, and `read` is what was summed before.
    fn write(
        &self,
        strip: &WriteBlock,
        range: Range<u64>,
        buffer: &mut [u8],
        lost: CastLosses,
        read: &[SumPart],
    ) -> Result<()> {
        let file = &self.reservation.files[strip.file as usize];
        let mut summed = BlockChecksums::default();
        if self.sums.are_wanted(strip.file) {
            for segment in &strip.segments {
                let place = segment.range();
                let place = place.start.max(range.start)..place.end.min(range.end);
                // What lies between tensor data of one span is summed with it.
                if !place.is_empty() && file.sums_at(place.start) {
                    summed.add(&place, &buffer[strip.place(&place)], read);
                }
            }
        }
        let known = if self.sums.are_wanted(strip.file) { summed.parts() } else { read };
        let digest = Digest::of(file, &range, &buffer[strip.place(&range)], known);
        let left = self.sums.close(strip.file, &range, &mut buffer[strip.place(&range)], summed);
        let mut from = range.start;
        for site in &left.sites {
            self.outputs.write(strip.file, from, &buffer[strip.place(&(from..from.max(*site)))])?;
            from = (site + SITE_BYTES).min(range.end);
        }
        self.outputs.write(strip.file, from, &buffer[strip.place(&(from..range.end))])?;
        self.log.add(FinishedRange { file: strip.file, range, digest, sums: left.parts, lost });
        Ok(())
    }

    /// Gather a segment of the first of these strips, for all of them; `lost` has what casts met, by strip, and `read` what
    /// of it was summed.
    fn gather(
        &self,
        copies: &[WriteBlock],
        segment: usize,
        target: &mut [u8],
        scratch: &mut Scratch,
        (lost, read): (&mut [CastLosses], &mut Vec<SumPart>),
    ) -> Result<()> {
        let Segment { offset, content } = &copies[0].segments[segment];
        let SegmentContent::Payload { slot, bytes } = content else { return Ok(()) };
        let tile = &self.slots[*slot].tile;
        let first = bytes.start / tile.itemsize();
        let mut sums = Vec::new();
        let noting = CrcRecorder { passing: self.passing, sums: &mut sums };
        let counts = tile.read_summing(self.input, first, target, scratch, Some(noting))?;
        read.extend(sums.into_iter().map(|part| SumPart { offset: offset + part.offset, ..part }));
        let counted = |copy: &WriteBlock| match copy.segments[segment].content {
            SegmentContent::Payload { slot, .. } => self.slots[slot].counted.as_ref(),
            SegmentContent::Literal { .. } => None,
        };
        // Where the one is that counts.
        let mut counting = zip(lost, copies).filter_map(|(lost, copy)| Some((lost, copy, counted(copy)?)));
        match counting.next() {
            None => {}
            Some((lost, copy, CastCounter::InStrips(pair))) => {
                let at = copy.segments[segment].offset;
                // Of an element that two write, it counts where its first byte is to be done.
                let beyond = if self.log.todo().overlaps(copy.file, &(at..at + 1)) {
                    LossCounts::default()
                } else {
                    let element = usize::try_from(tile.itemsize()).expect("a few bytes");
                    tile.read_summing(self.input, first, &mut target[..element], scratch, None)?
                };
                lost.entry(*pair).or_default().add(counts.without(beyond));
            }
            Some((lost, _, CastCounter::Before(pair, met))) => {
                let elements = first..bytes.end / tile.itemsize();
                let met = met.iter().filter(|(element, _)| elements.contains(element));
                met.for_each(|(_, counts)| lost.entry(*pair).or_default().add(*counts));
            }
        }
        Ok(())
    }
}
