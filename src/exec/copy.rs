//! Filling reserved files: the executor behind `reshard`, `flatten`, `unshard` and `consolidate`.
//!
//! Work goes in [windows](super::window) of some hundred MiB of output. The tensors of a window are planned and located,
//! its tiles are cut into [strips](super::strips), and those are filled and written in parallel, those of one
//! [band](super::bands) behind each other and everything else in file order. So memory follows the window and the strips
//! in flight, not the model. Literals that no tensor data comes after, and sums of what is spread over strips, come last.
//!
//! Counts bytes of output. Invariant: every byte of a reserved file is in one strip, once.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::bands;
use super::block::Wanted;
use super::cast::Counts;
use super::output::Outputs;
use super::passing::Passing;
use super::strips::{Content, Cutter, Payload, Strip};
use super::sums::{InStrip, Sums};
use super::window::{Slot, prepare, windows};
use super::{Input, Options, Reporter, Scratch, Stop};
use crate::catalog::{Dtype, Reservation, Reserved};
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
    fn count(&mut self, input: Input<'_>, window: &[Reserved], slots: &[Slot]) {
        let mut planned_bytes = 0;
        for slot in slots {
            slot.tile.pieces(|piece| {
                // As many summands as there are may be read for each rank.
                self.runs = self.runs.saturating_add(piece.runs());
                self.bytes_read = self.bytes_read.saturating_add(piece.len_bytes());
            });
            planned_bytes += PLANNED_BYTES + slot.tile.held_bytes();
        }
        self.planned_bytes = self.planned_bytes.max(planned_bytes);
        for tensor in window {
            let pair = (input.catalog.tensor(tensor.source).dtype, tensor.dtype());
            if pair.0 != pair.1 {
                self.casts.entry(pair).or_default().tensors += 1;
            }
        }
    }

    fn count_lost(&mut self, lost: BTreeMap<DtypePair, Counts>) {
        for (pair, counts) in lost {
            let cast = self.casts.entry(pair).or_default();
            cast.overflows += counts.overflows;
            cast.nans += counts.nans;
        }
    }
}

/// Fill the files of `reservation`, which `folder` does not hold yet.
///
/// # Errors
/// The first error of any worker; `Stopped` on a signal. The files are incomplete then.
pub fn copy(
    input: Input<'_>,
    reservation: &Reservation,
    folder: &std::path::Path,
    options: &Options,
    reporter: &dyn Reporter,
    stop: &Stop,
) -> Result<Stats> {
    let outputs = Outputs::create(folder, &reservation.files, options.sync)?;
    let mut cutter = Cutter::new(&reservation.files, options.strip_bytes);
    let sums = Sums::new(reservation);
    let passing = Passing::default();
    let lost = Mutex::default();
    let filler = Filler {
        input,
        reservation,
        slots: &[],
        outputs: &outputs,
        sums: &sums,
        passing: &passing,
        lost: &lost,
        threads: options.threads,
        reporter,
        stop,
    };
    let mut stats = Stats::default();
    for window in windows(input, &reservation.tensors) {
        stop.check()?;
        let (slots, payloads) = prepare(input, window)?;
        let mut strips = cutter.cut(payloads);
        Filler { slots: &slots, ..filler }.fill(&mut strips)?;
        passing.settle(input.files)?;
        stats.count(input, window, &slots);
    }
    // What is summed first: the others may hold the sums.
    let (mut in_spans, mut others) = cutter.finish().into_iter().partition::<Vec<_>, _>(|strip| sums.has_part(strip));
    filler.fill(&mut in_spans)?;
    sums.settle();
    filler.fill(&mut others)?;
    stats.count_lost(lost.into_inner().expect("no panic while the lock is held"));
    sums.patch(&outputs)?;
    input.files.check_unchanged()?;
    if options.sync {
        let files = u32::try_from(outputs.len()).expect("fewer than 2^32 files");
        (0..files).into_par_iter().try_for_each(|file| outputs.sync(file, stop))?;
    }
    Ok(stats)
}

/// What [`copy`] would move, without moving it. Chunks are located, so what cannot be read is found here; what casts
/// would meet is not.
///
/// # Errors
/// As [`copy`], but for writing.
pub fn dry_run(input: Input<'_>, reservation: &Reservation, stop: &Stop) -> Result<Stats> {
    let mut stats = Stats::default();
    for window in windows(input, &reservation.tensors) {
        stop.check()?;
        stats.count(input, window, &prepare(input, window)?.0);
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
    lost: &'a Mutex<BTreeMap<DtypePair, Counts>>,
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
        if band.len() > 1 {
            let mut wanted = Wanted::default();
            for part in band.iter().flat_map(|strip| &strip.parts) {
                if let Content::Payload { slot, bytes } = &part.content {
                    let tile = &self.slots[*slot].tile;
                    tile.short_runs(bytes.start / tile.itemsize(), part.len() / tile.itemsize(), &mut wanted);
                }
            }
            scratch.block.hold(self.input.files, wanted)?;
        }
        for strip in band {
            self.stop.check()?;
            self.fill_one(strip, buffer, scratch)?;
            self.reporter.advance(strip.range.end - strip.range.start);
        }
        Ok(())
    }

    fn fill_one(&self, strip: &Strip, buffer: &mut Buffer, scratch: &mut Scratch) -> Result<()> {
        let len = usize::try_from(strip.range.end - strip.range.start).expect("a strip fits memory");
        let buffer = buffer.room(strip.range.start, len);
        let file = &self.reservation.files[strip.file as usize];
        let (sums, mut summed) = (self.sums.are_wanted(strip.file), InStrip::default());
        for part in &strip.parts {
            let start = usize::try_from(part.offset - strip.range.start).expect("a strip fits memory");
            let end = start + usize::try_from(part.len()).expect("a strip fits memory");
            let target = &mut buffer[start..end];
            match &part.content {
                Content::Literal { literal, bytes } => {
                    let range = usize::try_from(bytes.start).expect("literals fit memory")
                        ..usize::try_from(bytes.end).expect("literals fit memory");
                    target.copy_from_slice(&file.literals[*literal].bytes[range]);
                    // What lies between tensor data of one span is summed with it.
                    if file.sums_at(part.offset) {
                        summed.add(part.offset, target);
                    }
                }
                Content::Payload { slot, bytes } => {
                    let Slot { tile, counted } = &self.slots[*slot];
                    let first = bytes.start / tile.itemsize();
                    let counts = tile.read_summing(self.input, first, target, scratch, Some(self.passing))?;
                    if let Some(pair) = counted {
                        let mut lost = self.lost.lock().expect("no panic while the lock is held");
                        lost.entry(*pair).or_default().add(counts);
                    }
                    if sums {
                        summed.add(part.offset, target);
                    }
                }
            }
        }
        if sums {
            self.sums.close(strip.file, &strip.range, buffer, summed);
        }
        self.outputs.write(strip.file, strip.range.start, buffer)
    }
}
