//! CRC-32s of parts of spans on their way to becoming those of whole spans, and from there into the file.
//!
//! Most sums are of tensors that lie within one strip, with the place for the sum behind them: those are put there before
//! the strip is written. What is spread over strips is logged with them. A run that writes everything puts it together when
//! all is done, strips of nothing but literals (such as the directory of a torch file) are filled after that, and what is
//! still open then is written on its own. Where several runs write a checkpoint, whoever seals it has the parts of all
//! ([`patch`]).
//!
//! Counts bytes. Invariant: spans ascend, and so do their first sites, and their second ones (see [`Sum`]).

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, OnceLock};

use crc32fast::Hasher;
use rayon::prelude::*;

use super::Stop;
use super::digest::{Digest, for_each_block};
use super::finished::SumPart;
use super::output::Outputs;
use super::write_blocks::WriteBlock;
use crate::catalog::{ChecksumSpan, OutputFile, Reservation, SITE_BYTES};
use crate::error::{Error, Result};
use crate::storage::AnchoredPath;

pub struct Checksums<'a> {
    files: &'a [OutputFile],
    /// Whether all data comes by, so that all sums will be known.
    settles: bool,
    /// By file: every sum, once all data is there.
    values: OnceLock<Vec<Vec<u32>>>,
    /// Sites that a strip was written over before the sum was known.
    open: Mutex<Vec<OpenChecksum>>,
}

struct OpenChecksum {
    file: u32,
    sum: usize,
    site: u64,
}

/// What is left to be done when a strip is closed.
#[derive(Default)]
pub struct Left {
    /// Parts of spans that are needed beyond the strip.
    pub parts: Vec<SumPart>,
    /// Sites, ascending, whose sum is not known. They are not to be written with the strip: a process that was taken for
    /// dead may come back after another one has sealed.
    pub sites: Vec<u64>,
}

/// What was summed in one strip, in order.
#[derive(Default)]
pub struct BlockChecksums(Vec<SumPart>);

impl BlockChecksums {
    /// Note that `bytes` are at this place of the file, of which some stretches, ascending, are summed already.
    pub fn add(&mut self, place: &Range<u64>, bytes: &[u8], known: &[SumPart]) {
        let crc = Digest::plain(place, bytes, known);
        self.0.push(SumPart { offset: place.start, len: place.end - place.start, crc });
    }

    pub fn parts(&self) -> &[SumPart] {
        &self.0
    }

    /// The sum of a span that lies within the strip.
    fn whole(&self, sum: &ChecksumSpan, strip: &Range<u64>) -> Option<u32> {
        if sum.range.start < strip.start || strip.end < sum.range.end {
            return None;
        }
        let first = self.0.partition_point(|part| part.offset < sum.range.start);
        Some(combined(self.0[first..].iter().take_while(|part| part.offset < sum.range.end)))
    }
}

/// The sum of parts that follow each other.
fn combined<'p>(parts: impl IntoIterator<Item = &'p SumPart>) -> u32 {
    let mut whole = Hasher::new();
    parts.into_iter().for_each(|part| whole.combine(&Hasher::new_with_initial_len(part.crc, part.len)));
    whole.finalize()
}

impl<'a> Checksums<'a> {
    /// `settles` says that all data of the reservation will come by.
    pub fn new(reservation: &'a Reservation, settles: bool) -> Self {
        let files = &reservation.files;
        let site = |sum: &ChecksumSpan, nth: usize| sum.sites.get(nth).copied();
        debug_assert!(files.iter().all(|file| (0..2).all(|nth| file.sums.is_sorted_by_key(|sum| site(sum, nth)))));
        Self { files, settles, values: OnceLock::new(), open: Mutex::default() }
    }

    /// Whether the file has any.
    pub fn are_wanted(&self, file: u32) -> bool {
        !self.files[file as usize].sums.is_empty()
    }

    /// Whether something in the strip is summed.
    pub fn has_summed(&self, strip: &WriteBlock) -> bool {
        strip.segments.iter().any(|segment| self.files[strip.file as usize].sums_at(segment.offset))
    }

    /// Put what is known by now into a strip, which is complete but for that. `parts` are of this strip.
    pub fn close(&self, file: u32, range: &Range<u64>, bytes: &mut [u8], parts: BlockChecksums) -> Left {
        let mut left = Left::default();
        let sums = self.files[file as usize].sums.as_slice();
        let most_sites = sums.first().map_or(0, |sum| sum.sites.len());
        for nth in 0..most_sites {
            let first = sums.partition_point(|sum| sum.sites[nth] + SITE_BYTES <= range.start);
            let here = (first..).zip(&sums[first..]).take_while(|(_, sum)| sum.sites[nth] < range.end);
            for (index, sum) in here {
                let site = sum.sites[nth];
                let value = self.value(file, index).or_else(|| parts.whole(sum, range));
                match value.filter(|_| range.start <= site && site + SITE_BYTES <= range.end) {
                    Some(value) => {
                        let value = value.to_le_bytes();
                        let at = usize::try_from(site - range.start).expect("a strip fits memory");
                        bytes[at..at + value.len()].copy_from_slice(&value);
                    }
                    None => {
                        left.sites.push(site);
                        // Otherwise the strip before has noted it.
                        if self.settles && range.start <= site {
                            let open = OpenChecksum { file, sum: index, site };
                            self.open.lock().expect("no panic while the lock is held").push(open);
                        }
                    }
                }
            }
        }
        left.sites.sort_unstable();
        left.parts = parts.0;
        left.parts.retain(|part| !is_closed(sums, part.offset, range));
        left
    }

    fn value(&self, file: u32, sum: usize) -> Option<u32> {
        self.values.get().map(|values| values[file as usize][sum])
    }

    /// All data is there: put the sums together.
    pub fn settle(&self, mut parts: Vec<(u32, SumPart)>) {
        parts.sort_unstable_by_key(|(file, part)| (*file, part.offset));
        let mut parts = parts.iter().peekable();
        let of_file = |(index, file): (u32, &OutputFile)| {
            let mut value = |sum: &ChecksumSpan| {
                let is_of = |(file, part): &&(u32, SumPart)| (*file, part.offset) < (index, sum.range.end);
                combined(std::iter::from_fn(|| parts.next_if(is_of)).map(|(_, part)| part))
            };
            file.sums.iter().map(&mut value).collect()
        };
        let values = (0_u32..).zip(self.files).map(of_file).collect();
        // Done once.
        let _ = self.values.set(values);
    }

    /// Write what is still open.
    ///
    /// # Errors
    /// `Io`.
    pub fn patch(&self, outputs: &Outputs) -> Result<()> {
        let open = self.open.lock().expect("no panic while the lock is held");
        open.iter().try_for_each(|OpenChecksum { file, sum, site }| {
            let value = self.value(*file, *sum).expect("settled before");
            outputs.write(*file, *site, &value.to_le_bytes())
        })
    }
}

/// Put the sums of spans together of which journals have parts, in ascending order, and write them where they belong.
/// Spans without parts were closed in their strips.
///
/// # Errors
/// `Io`; `Malformed` where parts do not make up their span.
pub fn patch(
    outputs: &Outputs,
    files: &[OutputFile],
    parts: &BTreeMap<u32, Vec<SumPart>>,
    journals: &Path,
) -> Result<()> {
    for (file, parts) in parts {
        for sum in &files[*file as usize].sums {
            let first = parts.partition_point(|part| part.offset < sum.range.start);
            let parts = &parts[first..];
            let parts = &parts[..parts.partition_point(|part| part.offset < sum.range.end)];
            if parts.is_empty() {
                continue;
            }
            let mut end = sum.range.start;
            if !parts.iter().all(|part| std::mem::replace(&mut end, part.offset + part.len) == part.offset)
                || end != sum.range.end
            {
                return Err(Error::malformed(
                    journals,
                    files[*file as usize].path.display().to_string(),
                    format!("sums of all of bytes {} to {}", sum.range.start, sum.range.end),
                    String::from("a part that is missing or there twice"),
                ));
            }
            let value = combined(parts).to_le_bytes();
            sum.sites.iter().try_for_each(|site| outputs.write(*file, *site, &value))?;
        }
    }
    Ok(())
}

/// A sum in a file that is not that of what it is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongSum {
    pub of: Range<u64>,
    pub site: u64,
    pub expected: u32,
    pub found: u32,
}

/// The first sum of a file that is complete, at `path`, that is not that of what is there.
///
/// # Errors
/// `Io`, `Stopped`.
pub fn first_wrong(file: &OutputFile, path: &AnchoredPath, stop: &Stop) -> Result<Option<WrongSum>> {
    if file.sums.is_empty() {
        return Ok(None);
    }
    let open = path.open().map_err(Error::io("open", path))?;
    let look = |sum: &ChecksumSpan| -> Result<Option<WrongSum>> {
        let mut hasher = Hasher::new();
        for_each_block(&open, path.path(), &sum.range, |block| {
            hasher.update(block);
            stop.check()
        })?;
        let expected = hasher.finalize();
        for site in &sum.sites {
            let mut value = [0; size_of::<u32>()];
            open.read_exact_at(&mut value, *site).map_err(Error::io("read", path))?;
            let found = u32::from_le_bytes(value);
            if found != expected {
                return Ok(Some(WrongSum { of: sum.range.clone(), site: *site, expected, found }));
            }
        }
        Ok(None)
    };
    let found: Vec<Result<Option<WrongSum>>> = file.sums.par_iter().map(look).collect();
    found.into_iter().find_map(Result::transpose).transpose()
}

/// Whether the span around `offset` lies within the strip, with all sites of its sum.
fn is_closed(sums: &[ChecksumSpan], offset: u64, strip: &Range<u64>) -> bool {
    let within = |stretch: Range<u64>| strip.start <= stretch.start && stretch.end <= strip.end;
    let sum = sums.get(sums.partition_point(|sum| sum.range.end <= offset));
    sum.is_some_and(|sum| within(sum.range.clone()) && sum.sites.iter().all(|site| within(*site..*site + SITE_BYTES)))
}
