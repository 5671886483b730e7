//! Filling reserved files: the executor behind `reshard`, `flatten`, `unshard` and `consolidate`.
//!
//! Work goes in [windows](super::window) of up to 1 GiB of output. The tensors of a window are planned and located,
//! its tiles are cut into [strips](super::strips), and those are filled and written in parallel, those of one
//! [band](super::bands) behind each other and everything else in file order. So memory follows the window and the strips
//! in flight, not the model. Literals that no tensor data comes after, and sums of what is spread over strips, come last.
//!
//! A run may have to do only some of the output: its part of it, or what an earlier one left. Tensors that have nothing to
//! do with that are not planned, and what is finished is [logged](super::log) window by window, when the source has been
//! checked.
//!
//! Counts bytes of output. Invariant: every byte of what is to be done is written from one strip, once.

use std::collections::BTreeMap;
use std::iter::zip;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::bands;
use super::block::Wanted;
use super::cast::Counts;
use super::log::Log;
use super::output::Outputs;
use super::passing::Passing;
use super::strips::{Content, Cutter, Part, Payload, Strip};
use super::sums::{InStrip, Left, SITE_BYTES, Sums};
use super::window::{Slot, prepare, windows};
use super::{Extents, Input, Options, Reporter, Scratch, Stop};
use crate::catalog::{Dtype, Reservation};
use crate::error::Result;
use crate::storage::direct::Buffer;

/// A tile on its way from being planned to being in a strip: as one of its tensor and as one of the window, its payload,
/// and its part of a strip, in lists that have grown to hold it.
const PLANNED_BYTES: u64 = 4 * (size_of::<Slot>() + size_of::<Payload>()) as u64;

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
    /// By dtype in the source and in the target.
    pub casts: BTreeMap<DtypePair, CastCount>,
}

/// What a tensor is stored as in the source, and in the target.
pub type DtypePair = (Dtype, Dtype);

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
    fn of(input: Input<'_>, reservation: &Reservation) -> Self {
        let mut stats = Self::default();
        for tensor in &reservation.tensors {
            let pair = (input.catalog.tensor(tensor.source).dtype, tensor.dtype());
            if pair.0 != pair.1 {
                stats.casts.entry(pair).or_default().tensors += 1;
            }
        }
        stats
    }

    fn add(&mut self, taken: &Taken) {
        self.bytes_read = self.bytes_read.saturating_add(taken.bytes);
        self.runs = self.runs.saturating_add(taken.runs);
        self.planned_bytes = self.planned_bytes.max(taken.planned_bytes);
    }

    /// What casts met, in place of what was known of it.
    pub fn lose(&mut self, lost: &BTreeMap<DtypePair, Counts>) {
        for (pair, counts) in lost {
            let cast = self.casts.entry(*pair).or_default();
            (cast.overflows, cast.nans) = (counts.overflows, counts.nans);
        }
    }
}

/// Tiles that are ready to be put into strips.
pub struct Batch {
    pub slots: Vec<Slot>,
    pub payloads: Vec<Payload>,
    /// What it takes.
    pub taken: Taken,
    /// Whether what has come so far, up to this batch, is known to be what its writer wrote, once it is written.
    pub is_checked: bool,
}

/// What is taken from the source, and what planning that takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    pub bytes: u64,
    /// Contiguous runs they come in.
    pub runs: u64,
    pub planned_bytes: u64,
}

impl Taken {
    /// By tiles that are read from files.
    fn of(slots: &[Slot]) -> Self {
        let mut taken = Self::default();
        for slot in slots {
            slot.tile.pieces(|piece| {
                // As many summands as there are may be read for each rank.
                taken.runs = taken.runs.saturating_add(piece.runs());
                taken.bytes = taken.bytes.saturating_add(piece.len_bytes());
            });
            taken.planned_bytes += PLANNED_BYTES + slot.tile.held_bytes();
        }
        taken
    }
}

/// Fill what `log` has to be done of the files of `reservation` in `folder`, from the files of the source.
///
/// # Errors
/// The first error of any worker; `Stopped` on a signal. The files are incomplete then, and the log has what is complete.
pub fn copy(
    input: Input<'_>,
    reservation: &Reservation,
    folder: &Path,
    log: &Log<'_>,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Stats> {
    let batches = windows(input, &reservation.tensors, log.todo()).map(|window| {
        let (slots, payloads) = prepare(input, &window, log.todo())?;
        Ok(Batch { taken: Taken::of(&slots), slots, payloads, is_checked: true })
    });
    write(input, batches, reservation, folder, log, options, reporter, stop)
}

/// As [`copy`], with tensor data from wherever `batches` have it.
///
/// # Errors
/// As [`copy`].
#[expect(clippy::too_many_arguments, reason = "those of a copy, and the batches")]
pub fn write(
    input: Input<'_>,
    batches: impl IntoIterator<Item = Result<Batch>>,
    reservation: &Reservation,
    folder: &Path,
    log: &Log<'_>,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Stats> {
    let outputs = Outputs::make(folder, &reservation.files, log.todo(), options.sync)?;
    let mut cutter = Cutter::new(&reservation.files, log.todo(), options.strip_bytes);
    let sums = Sums::new(reservation, log.is_all());
    let passing = Passing::default();
    let filler = Filler {
        input,
        reservation,
        slots: &[],
        outputs: &outputs,
        sums: &sums,
        passing: &passing,
        log,
        threads: options.threads,
        reporter,
        stop,
    };
    let mut stats = Stats::of(input, reservation);
    let done = (|| {
        for batch in batches {
            stop.check()?;
            let Batch { slots, payloads, taken, is_checked } = batch?;
            let mut strips = cutter.cut(payloads);
            Filler { slots: &slots, ..filler }.fill(&mut strips)?;
            passing.settle(input.files)?;
            stats.add(&taken);
            if is_checked {
                log.advance(&outputs, &|| input.files.check_unchanged())?;
            }
        }
        // What is summed first: the others may hold the sums.
        let (mut in_spans, mut others) =
            cutter.finish().into_iter().partition::<Vec<_>, _>(|strip| sums.has_part(strip));
        filler.fill(&mut in_spans)?;
        if log.is_all() {
            sums.settle(log.sums());
        }
        filler.fill(&mut others)?;
        sums.patch(&outputs)?;
        input.files.check_unchanged()
    })();
    match done {
        Ok(()) => log.finish(&outputs, stop)?,
        // What has been checked is not lost with the rest, unless it may be of two sources.
        Err(error) => {
            if input.files.check_unchanged().is_ok() {
                log.stop(&outputs);
            }
            return Err(error);
        }
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
    for window in windows(input, &reservation.tensors, &todo) {
        stop.check()?;
        stats.add(&Taken::of(&prepare(input, &window, &todo)?.0));
    }
    Ok(stats)
}

/// Everything a worker needs to fill strips.
#[derive(Clone, Copy)]
struct Filler<'a> {
    input: Input<'a>,
    reservation: &'a Reservation,
    slots: &'a [Slot],
    outputs: &'a Outputs,
    sums: &'a Sums<'a>,
    passing: &'a Passing,
    log: &'a Log<'a>,
    threads: usize,
    reporter: &'a dyn Reporter,
    stop: &'a Stop,
}

impl Filler<'_> {
    /// Fill and write the strips. Workers take them band by band in order, so files are written front to back.
    fn fill(&self, strips: &mut [Strip]) -> Result<()> {
        let bands = bands::order(strips);
        let next = AtomicUsize::new(0);
        let work = |_worker: usize| -> Result<()> {
            let mut buffer = Buffer::new();
            let mut scratch = Scratch::default();
            while let Some(band) = bands.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(error) = self.fill_band(band, &mut buffer, &mut scratch) {
                    // The others need not go on.
                    next.store(bands.len(), Ordering::Relaxed);
                    return Err(error);
                }
            }
            Ok(())
        };
        (0..self.threads.min(bands.len())).into_par_iter().with_max_len(1).map(work).collect()
    }

    /// Fill and write the strips of a band, or one that is of none.
    fn fill_band(&self, band: &[Strip], buffer: &mut Buffer, scratch: &mut Scratch) -> Result<()> {
        let gathered: Vec<&[Strip]> = band.chunk_by(|one, other| self.are_copies(one, other)).collect();
        if gathered.len() > 1 {
            let mut wanted = Wanted::default();
            for part in band.iter().flat_map(|strip| &strip.parts) {
                if let Content::Payload { slot, bytes } = &part.content {
                    let tile = &self.slots[*slot].tile;
                    tile.short_runs(bytes.start / tile.itemsize(), part.len() / tile.itemsize(), &mut wanted);
                }
            }
            scratch.block.hold(self.input.files, wanted)?;
        }
        gathered.into_iter().try_for_each(|copies| self.fill_copies(copies, buffer, scratch))
    }

    /// Gather the first of these strips, and write all of them.
    fn fill_copies(&self, copies: &[Strip], buffer: &mut Buffer, scratch: &mut Scratch) -> Result<()> {
        let longest = copies.iter().map(Strip::len).max().unwrap_or(0);
        let mut before = None;
        for strip in copies {
            self.stop.check()?;
            let at = strip.range.start;
            match before.replace(at) {
                // There has to be room for all copies from the first on.
                None => self.finish(strip, &mut buffer.room(at, longest)[..strip.len()], |part, target| {
                    self.gather(copies, part, target, scratch)
                })?,
                Some(before) => self.finish(strip, buffer.moved(before, at, strip.len()), |_, _| Ok(()))?,
            }
            self.reporter.advance(strip.range.end - strip.range.start);
        }
        Ok(())
    }

    /// Whether one strip holds the same tensor data at the same places as the other.
    fn are_copies(&self, one: &Strip, other: &Strip) -> bool {
        let is_same = |(one_part, other_part): (&Part, &Part)| match (&one_part.content, &other_part.content) {
            (Content::Payload { slot, bytes }, Content::Payload { slot: other_slot, bytes: other_bytes }) => {
                let copies = self.slots[*slot].copies;
                copies.is_some()
                    && copies == self.slots[*other_slot].copies
                    && bytes == other_bytes
                    && one_part.offset - one.range.start == other_part.offset - other.range.start
            }
            (Content::Literal { .. }, Content::Literal { .. }) => true,
            _ => false,
        };
        one.parts.len() == other.parts.len() && zip(&one.parts, &other.parts).all(is_same)
    }

    /// Fill a strip, its tensor data with what `gather` puts there for each part, and write it.
    fn finish(
        &self,
        strip: &Strip,
        buffer: &mut [u8],
        mut gather: impl FnMut(usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let literals = &self.reservation.files[strip.file as usize].literals;
        for (index, part) in strip.parts.iter().enumerate() {
            let target = &mut buffer[strip.place(&part.range())];
            match &part.content {
                Content::Literal { literal, bytes } => {
                    let range = usize::try_from(bytes.start).expect("literals fit memory")
                        ..usize::try_from(bytes.end).expect("literals fit memory");
                    target.copy_from_slice(&literals[*literal].bytes[range]);
                }
                Content::Payload { .. } => gather(index, target)?,
            }
        }
        for range in self.log.todo().within(strip.file, strip.range.clone()) {
            self.write(strip, range, buffer)?;
        }
        Ok(())
    }

    /// Sum and write this range of a strip that is filled.
    fn write(&self, strip: &Strip, range: Range<u64>, buffer: &mut [u8]) -> Result<()> {
        let file = &self.reservation.files[strip.file as usize];
        let mut left = Left::default();
        if self.sums.are_wanted(strip.file) {
            let mut summed = InStrip::default();
            for part in &strip.parts {
                let part = part.range();
                let part = part.start.max(range.start)..part.end.min(range.end);
                // What lies between tensor data of one span is summed with it.
                if !part.is_empty() && file.sums_at(part.start) {
                    summed.add(part.start, &buffer[strip.place(&part)]);
                }
            }
            left = self.sums.close(strip.file, &range, &mut buffer[strip.place(&range)], summed);
        }
        let mut from = range.start;
        for site in &left.sites {
            self.outputs.write(strip.file, from, &buffer[strip.place(&(from..from.max(*site)))])?;
            from = (site + SITE_BYTES).min(range.end);
        }
        self.outputs.write(strip.file, from, &buffer[strip.place(&(from..range.end))])?;
        self.log.add(strip.file, range, left.parts);
        Ok(())
    }

    /// Gather a part of the first of these strips, for all of them.
    fn gather(&self, copies: &[Strip], part: usize, target: &mut [u8], scratch: &mut Scratch) -> Result<()> {
        let Content::Payload { slot, bytes } = &copies[0].parts[part].content else { return Ok(()) };
        let tile = &self.slots[*slot].tile;
        let first = bytes.start / tile.itemsize();
        let counts = tile.read_summing(self.input, first, target, scratch, Some(self.passing))?;
        let counted = |copy: &Strip| match copy.parts[part].content {
            Content::Payload { slot, .. } => self.slots[slot].counted,
            Content::Literal { .. } => None,
        };
        if let Some(pair) = copies.iter().find_map(counted) {
            self.log.count(pair, counts);
        }
        Ok(())
    }
}
