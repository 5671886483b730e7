//! Digests of ranges of output files, which show whether a range still has the bytes that some process wrote.
//!
//! A digest is a CRC-32 in which the bytes of stored checksums count as zeros. Some checksums are written together with
//! their write block, and others only when all data is written. So without this rule, the digest would depend on the
//! time at which it is computed. [`super::checksums`] verifies the checksums themselves.
//!
//! All sizes and offsets are in bytes.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crc32fast::Hasher;

use super::finished_ranges::ChecksumPart;
use crate::catalog::{CRC_BYTES, OutputFile};
use crate::error::{Error, Result};

/// The maximum number of bytes that are read at a time.
const BLOCK_BYTES: usize = 1 << 20;

/// The length in bytes of the shortest range whose known CRC is worth combining. Computing the CRC of a shorter range
/// again is faster.
pub const MIN_COMBINE_BYTES: u64 = 16 << 10;

/// The state of a digest while it is computed.
pub struct Digest {
    hasher: Hasher,
    at: u64,
    /// The offsets of the stored checksums that [`Digest::update`] has not passed yet, in descending order.
    sites: Vec<u64>,
}

impl Digest {
    /// Starts the digest of a range of a file.
    #[must_use]
    pub fn new(file: &OutputFile, range: &Range<u64>) -> Self {
        let mut sites = file.crc_offsets_in(range);
        sites.reverse();
        Self { hasher: Hasher::new(), at: range.start, sites }
    }

    /// Returns the digest of a range of a file, whose content is `bytes`. `summed` lists known CRCs of some ranges
    /// inside the range, in ascending order.
    pub fn of_bytes(file: &OutputFile, range: &Range<u64>, bytes: &[u8], summed: &[ChecksumPart]) -> u32 {
        Self::new(file, range).combine_with(bytes, summed)
    }

    /// Returns the digest of a range that contains no stored checksum. The arguments are those of [`Digest::of_bytes`].
    pub fn without_sites(range: &Range<u64>, bytes: &[u8], summed: &[ChecksumPart]) -> u32 {
        Self { hasher: Hasher::new(), at: range.start, sites: Vec::new() }.combine_with(bytes, summed)
    }

    fn combine_with(mut self, bytes: &[u8], summed: &[ChecksumPart]) -> u32 {
        let start = self.at;
        let place = |offset: u64| usize::try_from(offset - start).expect("an offset within a buffer");
        let summed = &summed[summed.partition_point(|part| part.offset < start)..];
        let within = summed.iter().take_while(|part| part.offset + part.len <= start + bytes.len() as u64);
        for part in within.filter(|part| part.len >= MIN_COMBINE_BYTES) {
            let end = part.offset + part.len;
            self.update(&bytes[place(self.at)..place(part.offset)]);
            if self.sites.last().is_none_or(|site| *site >= end) {
                self.hasher.combine(&part.hasher());
                self.at = end;
            }
        }
        self.update(&bytes[place(self.at)..]);
        self.finish()
    }

    /// Adds the next bytes of the range.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let site = self.sites.last().copied().unwrap_or(u64::MAX);
            let until = |offset: u64| usize::try_from(offset - self.at).unwrap_or(usize::MAX).min(bytes.len());
            let len = if self.at < site {
                let len = until(site);
                self.hasher.update(&bytes[..len]);
                len
            } else {
                let len = until(site + CRC_BYTES);
                self.hasher.update(&0_u32.to_le_bytes()[..len]);
                len
            };
            self.at += len as u64;
            if self.at >= site.saturating_add(CRC_BYTES) {
                self.sites.pop();
            }
            bytes = &bytes[len..];
        }
    }

    /// Returns the digest of all added bytes.
    pub fn finish(self) -> u32 {
        self.hasher.finalize()
    }
}

/// Calls `take` with the bytes of a range of a file, block by block.
///
/// # Errors
/// `Io` naming the file, and the errors of `take`.
pub fn for_each_block(
    file: &File,
    path: &Path,
    range: &Range<u64>,
    mut take: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let fits = |left: u64| usize::try_from(left).unwrap_or(usize::MAX).min(BLOCK_BYTES);
    let mut block = vec![0; fits(range.end - range.start)];
    let mut at = range.start;
    while at < range.end {
        let block = &mut block[..fits(range.end - at)];
        file.read_exact_at(block, at).map_err(Error::io("read", path))?;
        take(block)?;
        at += block.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::ChecksumSpan;

    #[test]
    fn checksum_sites_count_as_zeros_for_any_split() {
        let mut file = OutputFile::new("f");
        let payload = file.push_payload(40);
        file.push_header(vec![0; 24]);
        let sum = |range: Range<u64>, sites: [u64; 2]| ChecksumSpan { range, crc_offsets: sites.into_iter().collect() };
        file.checksums = vec![sum(payload..20, [40, 50]), sum(20..40, [44, 60])];
        let mut bytes: Vec<u8> = (1..=64).collect();
        let digest = |bytes: &[u8], range: Range<usize>, step: usize| {
            let mut digest = Digest::new(&file, &(range.start as u64..range.end as u64));
            bytes[range].chunks(step).for_each(|chunk| digest.update(chunk));
            digest.finish()
        };
        let before = [0..64, 41..64, 0..42, 50..62].map(|range| digest(&bytes, range, 64));
        [40..48, 50..54, 60..64].into_iter().for_each(|site: Range<usize>| bytes[site].fill(0));
        for (range, before) in [0..64, 41..64, 0..42, 50..62].into_iter().zip(before) {
            assert_eq!(crc32fast::hash(&bytes[range.clone()]), before, "{range:?}");
            (1..9).for_each(|step| assert_eq!(digest(&bytes, range.clone(), step), before, "{range:?} {step}"));
        }
    }

    #[test]
    fn known_crcs_are_combined() {
        let mut file = OutputFile::new("f");
        file.push_header(vec![5; 3]);
        let start = file.push_payload(20_000);
        file.push_header(vec![0; 9]);
        file.checksums =
            vec![ChecksumSpan { range: start..file.len - 9, crc_offsets: smallvec::smallvec![file.len - 8] }];
        let bytes: Vec<u8> = (0..file.len).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let mut whole = Digest::new(&file, &(1..file.len));
        whole.update(&bytes[1..]);
        let part = |range: Range<usize>| ChecksumPart {
            offset: range.start as u64,
            len: range.len() as u64,
            crc: crc32fast::hash(&bytes[range]),
        };
        for summed in [vec![], vec![part(3..20_003)], vec![part(3..2000), part(2000..20_003)]] {
            assert_eq!(Digest::of_bytes(&file, &(1..file.len), &bytes[1..], &summed), whole.hasher.clone().finalize());
        }
        // A known CRC of a range that reaches outside is not used.
        let (range, within) = (4..19_998, &bytes[4..19_998]);
        for summed in [vec![part(3..17_000)], vec![part(5..16_500), part(16_500..20_003)], vec![part(3..20_003)]] {
            assert_eq!(Digest::without_sites(&range, within, &summed), crc32fast::hash(within));
        }
        let wrong = ChecksumPart { crc: 0, ..part(5..16_500) };
        assert_ne!(
            Digest::without_sites(&range, within, &[wrong]),
            crc32fast::hash(within),
            "the known CRC is trusted"
        );
    }
}
