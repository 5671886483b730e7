//! Divides the output among processes, so that each process knows its bytes without communication. All sizes and
//! offsets are in bytes.
//!
//! All output files are treated as one concatenated range, and each process gets a part of about the same length. A cut
//! between two parts moves to a file boundary if one is near, because complete files are simplest to write. Otherwise
//! the cut moves to a multiple of 64 KiB within its file, which is the largest page size in use: network file systems
//! write complete pages, so no page may have two writers.
//!
//! If processes exchange source data, and the ranks of DST divide evenly among them, each process writes the files of
//! its ranks. Data that stays on its rank is then not sent, as in PyTorch's `DTensor.redistribute`. If one process
//! would then write more than twice an equal part, the bytes are divided as described above.
//!
//! Invariant: the parts cover the output without overlap. A cut is at most a sixteenth of a part, or 64 KiB, away from
//! the cut of equal parts. If each process writes the files of its ranks, a part is at most twice as long as an equal
//! part.

use std::collections::BTreeMap;

use super::extents::Extents;
use crate::catalog::OutputFile;
use crate::launch::Part;

/// The page size in bytes. Two processes never write to the same page.
const PAGE_BYTES: u64 = 64 << 10;

/// The divisor that defines "near": a file boundary is near a cut if its distance is at most 1/16 of an equal part.
const NEAR_FRACTION: u128 = 16;

/// The maximum length of the files that one process writes for its ranks of DST, as a multiple of an equal part. It is
/// not 1, because the sizes of shards are rounded up, so some ranks have longer files.
const MAX_EXCESS: u128 = 2;

/// Returns the byte ranges that the process with the number `part.index` writes. All processes write about equally many
/// bytes.
///
/// # Panics
/// If all files together have 2^64 bytes.
pub fn even_share(files: &[OutputFile], part: Part) -> Extents {
    let files_end_to_end = ConcatenatedFiles::new(files);
    let (start, end) = (files_end_to_end.cut(part.index, part.of), files_end_to_end.cut(part.index + 1, part.of));
    let first = files_end_to_end.ends.partition_point(|file_end| *file_end <= start);
    let mut share = Extents::new();
    for index in first..files.len() {
        let file_start = files_end_to_end.start(index);
        if end <= file_start {
            break;
        }
        let within = start.max(file_start) - file_start..end.min(files_end_to_end.ends[index]) - file_start;
        share.insert(u32::try_from(index).expect("fewer than 2^32 files"), within);
    }
    share
}

/// Returns the byte ranges that the process with the number `part.index` writes if processes exchange source data.
///
/// If the ranks of DST divide evenly among the processes, each process writes the files of consecutive ranks, and process
/// 0 also writes the files without a rank. If the ranks do not divide evenly, or one process would then write much more
/// than the others, the bytes of all files are divided evenly.
///
/// # Panics
/// If all files together have 2^64 bytes.
pub fn own_rank_files(files: &[OutputFile], part: Part) -> Extents {
    let ranks = files.iter().filter_map(|file| file.rank).map(|rank| u64::from(rank.0) + 1).max().unwrap_or(0);
    let of = u64::from(part.of);
    let each = ranks / of;
    if each == 0 || !ranks.is_multiple_of(of) {
        return even_share(files, part);
    }
    let owner = |file: &OutputFile| file.rank.map_or(0, |rank| u64::from(rank.0) / each);
    let mut lens: BTreeMap<u64, u128> = BTreeMap::new();
    files.iter().for_each(|file| *lens.entry(owner(file)).or_default() += u128::from(file.len));
    let (total, longest) = (lens.values().sum::<u128>(), lens.values().max().copied().unwrap_or(0));
    if longest * u128::from(of) > total * MAX_EXCESS {
        return even_share(files, part);
    }
    let mut own = Extents::new();
    for (number, file) in (0..).zip(files).filter(|(_, file)| owner(file) == u64::from(part.index)) {
        own.insert(number, 0..file.len);
    }
    own
}

/// All output files, treated as one concatenated range.
struct ConcatenatedFiles {
    /// The offset of the end of each file in the concatenated range.
    ends: Vec<u64>,
}

impl ConcatenatedFiles {
    fn new(files: &[OutputFile]) -> Self {
        let add = |at: &mut u64, file: &OutputFile| {
            *at = at.checked_add(file.len).expect("fewer than 2^64 bytes in all");
            Some(*at)
        };
        Self { ends: files.iter().scan(0, add).collect() }
    }

    fn start(&self, file: usize) -> u64 {
        file.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    /// Returns the offset at which the first `count` of `of` parts end. The result never decreases if `count` grows: a
    /// cut near the start of a file moves to its start, a cut near the end of a file moves to its end, and any other
    /// cut stays inside the file.
    fn cut(&self, count: u32, of: u32) -> u64 {
        let total = self.ends.last().copied().unwrap_or(0);
        let even = u128::from(total) * u128::from(count) / u128::from(of);
        let even = u64::try_from(even).expect("at most all bytes");
        let file = self.ends.partition_point(|end| *end <= even);
        let Some(end) = self.ends.get(file) else { return total };
        let start = self.start(file);
        let nearest = if even - start <= end - even { start } else { *end };
        if u128::from(nearest.abs_diff(even)) * NEAR_FRACTION * u128::from(of) <= u128::from(total) {
            nearest
        } else {
            even - (even - start) % PAGE_BYTES
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::Rank;

    fn files(lens: &[u64]) -> Vec<OutputFile> {
        let file = |len: &u64| {
            let mut file = OutputFile::new("f");
            file.push_payload(*len);
            file
        };
        lens.iter().map(file).collect()
    }

    fn all(files: &[OutputFile], of: u32) -> Vec<Extents> {
        (0..of).map(|index| even_share(files, Part { index, of })).collect()
    }

    fn lens() -> impl Strategy<Value = Vec<u64>> {
        let len = prop_oneof![Just(0), 0_u64..10, 0_u64..(1 << 17), 0_u64..(1 << 24), 0_u64..(1 << 40)];
        proptest::collection::vec(len, 0..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn parts_tile_all_bytes_in_order_and_evenly(lens in lens(), of in prop_oneof![1_u32..9, 1_u32..300]) {
            let files = files(&lens);
            let total: u64 = lens.iter().sum();
            let mut next = (0, 0);
            for part in all(&files, of) {
                for (file, range) in part.iter() {
                    while lens[next.0] == next.1 {
                        next = (next.0 + 1, 0);
                    }
                    prop_assert_eq!((file as usize, range.start), next);
                    prop_assert!(range.start.is_multiple_of(PAGE_BYTES));
                    prop_assert!(range.end <= lens[next.0]);
                    next.1 = range.end;
                }
                let even = total / u64::from(of);
                prop_assert!(part.len_bytes().abs_diff(even) <= PAGE_BYTES + even / 8 + 2);
            }
            prop_assert!(next.0 >= lens.len() || lens[next.0] == next.1);
            prop_assert!(lens.iter().skip(next.0 + 1).all(|len| *len == 0));
        }

        #[test]
        fn equal_files_are_not_split(each in 1_u32..5, of in 1_u32..40, len in 1_u64..(1 << 40)) {
            let files = files(&vec![len; (each * of) as usize]);
            for (index, part) in (0_u32..).zip(all(&files, of)) {
                let whole = (index * each..(index + 1) * each).map(|file| (file, 0..len));
                prop_assert_eq!(part.iter().collect::<Vec<_>>(), whole.collect::<Vec<_>>());
            }
        }
    }

    fn files_of_ranks(ranks: &[(u32, u64)]) -> Vec<OutputFile> {
        let file = |&(rank, len): &(u32, u64)| {
            let mut file = OutputFile::of_rank(Rank(rank), "f");
            file.push_payload(len);
            file
        };
        ranks.iter().map(file).collect()
    }

    #[test]
    fn exchanging_process_writes_files_of_its_ranks() {
        // Two series of files, in which the last shards are short.
        let mut files = files_of_ranks(&[(0, 30), (1, 30), (2, 30), (3, 10), (0, 60), (1, 60), (2, 60), (3, 20)]);
        files.push(OutputFile::new(".metadata"));
        let of = |of: u32, index: u32| own_rank_files(&files, Part { index, of }).iter().collect::<Vec<_>>();
        assert_eq!(of(4, 1), [(1, 0..30), (5, 0..60)]);
        assert_eq!(of(4, 3), [(3, 0..10), (7, 0..20)]);
        assert_eq!(of(2, 1), [(2, 0..30), (3, 0..10), (6, 0..60), (7, 0..20)]);
        assert_eq!(of(3, 1), even_share(&files, Part { index: 1, of: 3 }).iter().collect::<Vec<_>>());
        assert_eq!(of(1, 0), Extents::of_files(&files).iter().collect::<Vec<_>>());
    }

    #[test]
    fn uneven_rank_files_fall_back_to_even_shares() {
        let files = files_of_ranks(&[(0, 1 << 30), (1, 5), (2, 5)]);
        for part in (0..3).map(|index| Part { index, of: 3 }) {
            assert_eq!(own_rank_files(&files, part), even_share(&files, part));
        }
    }

    #[test]
    fn single_part_has_all_bytes() {
        let files = files(&[5, 0, 1 << 40]);
        assert_eq!(even_share(&files, Part::alone()), Extents::of_files(&files));
        assert!(even_share(&[], Part { index: 3, of: 7 }).is_empty());
    }

    #[test]
    fn cuts_are_at_near_file_boundaries_or_pages() {
        const MIB: u64 = 1 << 20;
        let near = files(&[17 * MIB, 16 * MIB]);
        assert_eq!(all(&near, 2)[0].iter().collect::<Vec<_>>(), [(0, 0..17 * MIB)]);
        let far = files(&[5, 32 * MIB + 7]);
        assert_eq!(all(&far, 2)[0].iter().collect::<Vec<_>>(), [(0, 0..5), (1, 0..16 * MIB)]);
    }

    #[test]
    fn more_parts_than_bytes_gives_empty_parts() {
        let parts = all(&files(&[3]), 10);
        assert_eq!(parts.iter().map(Extents::len_bytes).sum::<u64>(), 3);
        assert_eq!(parts.iter().filter(|part| !part.is_empty()).count(), 1);
    }
}
