//! Filling reserved files: the executor behind `reshard`, `unshard` and `consolidate`.
//!
//! Work goes in windows of some hundred MiB of output. For each window every tensor is proven and planned and its
//! chunks are located, in parallel; then the window's strips are filled in parallel, in file order. So memory follows
//! the window and the strips in flight, not the model.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::output::Outputs;
use super::passing::Passing;
use super::strips::{Content, Cutter, Payload, Strip};
use super::{Input, Locations, Options, Prepared, Reporter, Stop};
use crate::catalog::{Reservation, Reserved};
use crate::error::Result;
use crate::plan::Source;

/// Output planned and located at a time.
const WINDOW_BYTES: u64 = 256 << 20;

/// Tiles planned and located at a time, where they are small.
const WINDOW_TILES: usize = 1 << 14;

/// Counts of what a copy moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of tensor data taken from the source.
    pub bytes_read: u64,
    /// Contiguous runs they come in.
    pub runs: u64,
}

impl Stats {
    fn count(&mut self, tiles: &[Prepared]) {
        for tile in tiles {
            tile.pieces(|piece| {
                self.runs += piece.runs();
                self.bytes_read += piece.len_bytes();
            });
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
    let outputs = Outputs::create(folder, &reservation.files)?;
    let mut cutter = Cutter::new(&reservation.files, options.strip_bytes);
    let sums = Sums::new(reservation);
    let passing = Passing::default();
    let mut stats = Stats::default();
    for window in windows(&reservation.tensors) {
        stop.check()?;
        let (slots, payloads) = prepare(input, window)?;
        let strips = cutter.cut(payloads);
        let filler = Filler { input, reservation, slots: &slots, outputs: &outputs, sums: &sums, passing: &passing };
        filler.fill(&strips, options, reporter, stop)?;
        passing.settle(input.files)?;
        stats.count(&slots);
    }
    let rest = cutter.finish();
    let filler = Filler { input, reservation, slots: &[], outputs: &outputs, sums: &sums, passing: &passing };
    filler.fill(&rest, options, reporter, stop)?;
    sums.patch(reservation, &outputs)?;
    input.files.check_unchanged()?;
    if options.sync {
        let files = u32::try_from(outputs.len()).expect("fewer than 2^32 files");
        (0..files).into_par_iter().try_for_each(|file| outputs.sync(file, stop))?;
    }
    Ok(stats)
}

/// What [`copy`] would move, without moving it. Chunks are located, so what cannot be read is found here.
///
/// # Errors
/// As [`copy`], but for writing.
pub fn dry_run(input: Input<'_>, reservation: &Reservation, stop: &Stop) -> Result<Stats> {
    let mut stats = Stats::default();
    for window in windows(&reservation.tensors) {
        stop.check()?;
        stats.count(&prepare(input, window)?.0);
    }
    Ok(stats)
}

/// Cut the target's tensors into windows of bounded output and number of tiles.
fn windows(tensors: &[Reserved]) -> impl Iterator<Item = &[Reserved]> {
    let mut rest = tensors;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (mut bytes, mut tiles, mut count) = (0, 0, 0);
        while let Some(tensor) = rest.get(count) {
            bytes += tensor.payload_bytes();
            tiles += tensor.entry.chunks.len();
            count += 1;
            if bytes >= WINDOW_BYTES || tiles >= WINDOW_TILES {
                break;
            }
        }
        let (window, after) = rest.split_at(count);
        rest = after;
        Some(window)
    })
}

/// Prove, plan and locate the tensors of a window.
fn prepare(input: Input<'_>, window: &[Reserved]) -> Result<(Vec<Prepared>, Vec<Payload>)> {
    let per_tensor: Vec<Vec<(Prepared, Payload)>> = window
        .par_iter()
        .map(|tensor| {
            let source = Source::new(input.catalog.tensor(tensor.source))?;
            let mut known = Locations::default();
            let mut tiles = Vec::with_capacity(tensor.entry.chunks.len());
            for index in 0..tensor.entry.chunks.len() {
                let Some((file, offset)) = tensor.place(index) else { continue };
                let prepared = Prepared::new(input, &source, &tensor.entry.chunks.tile(index), &mut known)?;
                let itemsize = tensor.dtype().itemsize();
                let payload = Payload { file, offset, len: tensor.chunk_bytes(index), slot: 0, itemsize };
                tiles.push((prepared, payload));
            }
            Ok(tiles)
        })
        .collect::<Result<_>>()?;
    let mut slots = Vec::new();
    let mut payloads = Vec::new();
    for (prepared, mut payload) in per_tensor.into_iter().flatten() {
        payload.slot = slots.len();
        slots.push(prepared);
        payloads.push(payload);
    }
    Ok((slots, payloads))
}

/// Everything a worker needs to fill strips.
struct Filler<'a> {
    input: Input<'a>,
    reservation: &'a Reservation,
    slots: &'a [Prepared],
    outputs: &'a Outputs,
    sums: &'a Sums,
    passing: &'a Passing,
}

impl Filler<'_> {
    /// Fill and write the strips. Workers take them one by one in order, so files are written front to back.
    fn fill(&self, strips: &[Strip], options: &Options, reporter: &dyn Reporter, stop: &Stop) -> Result<()> {
        let next = AtomicUsize::new(0);
        let work = |_worker: usize| -> Result<()> {
            let mut buffer = Vec::new();
            let mut scratch = Vec::new();
            while let Some(strip) = strips.get(next.fetch_add(1, Ordering::Relaxed)) {
                stop.check()?;
                if let Err(error) = self.fill_one(strip, &mut buffer, &mut scratch) {
                    // The others need not go on.
                    next.store(strips.len(), Ordering::Relaxed);
                    return Err(error);
                }
                reporter.advance(strip.range.end - strip.range.start);
            }
            Ok(())
        };
        (0..options.threads.min(strips.len())).into_par_iter().with_max_len(1).map(work).collect()
    }

    fn fill_one(&self, strip: &Strip, buffer: &mut Vec<u8>, scratch: &mut Vec<u8>) -> Result<()> {
        let len = usize::try_from(strip.range.end - strip.range.start).expect("a strip fits memory");
        // Every byte is overwritten below; only growing costs a fill.
        buffer.resize(len.max(buffer.len()), 0);
        let buffer = &mut buffer[..len];
        let file = &self.reservation.files[strip.file as usize];
        for part in &strip.parts {
            let start = usize::try_from(part.offset - strip.range.start).expect("a strip fits memory");
            let end = start + usize::try_from(part.len()).expect("a strip fits memory");
            let target = &mut buffer[start..end];
            match &part.content {
                Content::Literal { literal, bytes } => {
                    let range = usize::try_from(bytes.start).expect("literals fit memory")
                        ..usize::try_from(bytes.end).expect("literals fit memory");
                    target.copy_from_slice(&file.literals[*literal].bytes[range]);
                }
                Content::Payload { slot, bytes } => {
                    let prepared = &self.slots[*slot];
                    let first = bytes.start / prepared.itemsize();
                    prepared.read_summing(self.input, first, target, scratch, Some(self.passing))?;
                    self.sums.add(strip.file, part.offset, target);
                }
            }
        }
        self.outputs.write(strip.file, strip.range.start, buffer)
    }
}

/// CRC-32s of strips on their way to becoming those of whole spans.
struct Sums {
    /// For each file, whether it wants any.
    wanted: Vec<bool>,
    /// By file and offset: length and state of each stretch.
    parts: Mutex<BTreeMap<(u32, u64), crc32fast::Hasher>>,
}

impl Sums {
    fn new(reservation: &Reservation) -> Self {
        let wanted = reservation.files.iter().map(|file| !file.sums.is_empty()).collect();
        Self { wanted, parts: Mutex::default() }
    }

    fn add(&self, file: u32, offset: u64, bytes: &[u8]) {
        if self.wanted[file as usize] {
            let mut hasher = crc32fast::Hasher::new();
            hasher.update(bytes);
            self.parts.lock().expect("no panic while the lock is held").insert((file, offset), hasher);
        }
    }

    /// Combine the strips of every span in order and write the result where the format wants it.
    fn patch(&self, reservation: &Reservation, outputs: &Outputs) -> Result<()> {
        let parts = self.parts.lock().expect("no panic while the lock is held");
        for (index, file) in (0_u32..).zip(&reservation.files) {
            for sum in &file.sums {
                let mut whole = crc32fast::Hasher::new();
                for (_, part) in parts.range((index, sum.range.start)..(index, sum.range.end)) {
                    whole.combine(part);
                }
                let value = whole.finalize().to_le_bytes();
                for &site in &sum.sites {
                    outputs.write(index, site, &value)?;
                }
            }
        }
        Ok(())
    }
}
