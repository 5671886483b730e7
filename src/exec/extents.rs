//! A set of bytes of the output files, such as the finished bytes or the bytes that a process has to write.
//!
//! Finished work is recorded as bytes, not as tensors or write blocks, so the record stays valid when the next run
//! divides the work differently.
//!
//! All sizes and offsets are in bytes. Invariant: the ranges of a file are in ascending order, no range is empty, and
//! no two ranges overlap or touch. So equal sets have equal representations. A file without ranges is not listed.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::catalog::OutputFile;

/// A set of byte ranges of output files. Files are identified by their number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extents {
    files: BTreeMap<u32, Vec<Range<u64>>>,
}

impl Extents {
    /// Returns a set without bytes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns all bytes of all files.
    #[must_use]
    pub fn of_files(files: &[OutputFile]) -> Self {
        let mut all = Self::new();
        (0_u32..).zip(files).for_each(|(index, file)| all.insert(index, 0..file.len));
        all
    }

    /// Adds a range and merges it with ranges that it overlaps or touches. This is fast if the range comes after all
    /// other ranges of the file.
    pub fn insert(&mut self, file: u32, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let known = self.files.entry(file).or_default();
        match known.last_mut() {
            Some(last) if last.end == range.start => return last.end = range.end,
            Some(last) if last.end > range.start => {}
            _ => return known.push(range),
        }
        let first = known.partition_point(|other| other.end < range.start);
        let met = known[first..].partition_point(|other| other.start <= range.end);
        let joined = known[first..first + met]
            .iter()
            .fold(range, |joined, range| joined.start.min(range.start)..joined.end.max(range.end));
        known.splice(first..first + met, [joined]);
    }

    /// Returns whether some byte of the range is in the set.
    pub fn overlaps(&self, file: u32, range: &Range<u64>) -> bool {
        self.within(file, range.clone()).next().is_some()
    }

    /// Returns the subranges of a range that are in the set, in ascending order.
    pub fn within(&self, file: u32, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let here = self.from(file, range.start).iter().take_while(move |known| known.start < range.end);
        here.map(move |known| known.start.max(range.start)..known.end.min(range.end)).filter(|range| !range.is_empty())
    }

    /// Returns the ranges of a file that end after the byte `at`.
    fn from(&self, file: u32, at: u64) -> &[Range<u64>] {
        let known = self.files.get(&file).map_or(&[][..], Vec::as_slice);
        &known[known.partition_point(|range| range.end <= at)..]
    }

    /// Returns the bytes that are in this set and not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let mut left = Self::new();
        for (file, range) in self.iter() {
            let mut at = range.start;
            for taken in other.within(file, range.clone()) {
                left.insert(file, at..taken.start);
                at = taken.end;
            }
            left.insert(file, at..range.end);
        }
        left
    }

    /// Returns the set without the files for which `is_out` returns true.
    #[must_use]
    pub fn without_files(&self, is_out: impl Fn(u32) -> bool) -> Self {
        let files = self.files.iter().filter(|(file, _)| !is_out(**file));
        Self { files: files.map(|(file, ranges)| (*file, ranges.clone())).collect() }
    }

    /// Returns the number of bytes in the set.
    pub fn len_bytes(&self) -> u64 {
        self.iter().map(|(_, range)| range.end - range.start).sum()
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Returns whether the set contains bytes of the file.
    pub fn has_file(&self, file: u32) -> bool {
        self.files.contains_key(&file)
    }

    /// Returns the files with bytes in the set, in ascending order.
    pub fn files(&self) -> impl Iterator<Item = u32> + '_ {
        self.files.keys().copied()
    }

    /// Returns all ranges with their files, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, Range<u64>)> + '_ {
        self.files.iter().flat_map(|(file, ranges)| ranges.iter().map(|range| (*file, range.clone())))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    type Bytes = BTreeSet<(u32, u64)>;

    fn ranges() -> impl Strategy<Value = Vec<(u32, Range<u64>)>> {
        let range = (0_u64..40, 0_u64..9).prop_map(|(start, len)| start..start + len);
        proptest::collection::vec((0_u32..3, range), 0..30)
    }

    fn extents(ranges: &[(u32, Range<u64>)]) -> (Extents, Bytes) {
        let mut extents = Extents::new();
        ranges.iter().for_each(|(file, range)| extents.insert(*file, range.clone()));
        (extents, bytes(ranges.iter().cloned()))
    }

    fn bytes(ranges: impl IntoIterator<Item = (u32, Range<u64>)>) -> Bytes {
        ranges.into_iter().flat_map(|(file, range)| range.map(move |at| (file, at))).collect()
    }

    /// Checks that the set has the expected bytes, and that its representation is the only valid one.
    fn assert_equals(extents: &Extents, expected: &Bytes) -> Result<(), TestCaseError> {
        prop_assert_eq!(&bytes(extents.iter()), expected);
        prop_assert_eq!(extents.len_bytes(), expected.len() as u64);
        prop_assert_eq!(extents.is_empty(), expected.is_empty());
        let files: BTreeSet<u32> = expected.iter().map(|(file, _)| *file).collect();
        prop_assert_eq!(extents.files().collect::<BTreeSet<_>>(), files);
        for ranges in extents.files.values() {
            prop_assert!(ranges.iter().all(|range| !range.is_empty()));
            prop_assert!(ranges.is_sorted_by(|one, next| one.end < next.start));
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn extents_are_sets_of_bytes(ours in ranges(), theirs in ranges(), asked in ranges()) {
            let (ours, our_bytes) = extents(&ours);
            let (theirs, their_bytes) = extents(&theirs);
            assert_equals(&ours, &our_bytes)?;
            assert_equals(&ours.without(&theirs), &our_bytes.difference(&their_bytes).copied().collect())?;
            for (file, range) in asked {
                let expected: Bytes = bytes([(file, range.clone())]);
                let here: Bytes = expected.intersection(&our_bytes).copied().collect();
                prop_assert_eq!(ours.overlaps(file, &range), !here.is_empty());
                let within: Vec<_> = ours.within(file, range).map(|range| (file, range)).collect();
                let len: u64 = within.iter().map(|(_, range)| range.end - range.start).sum();
                prop_assert_eq!(len, here.len() as u64);
                prop_assert_eq!(bytes(within), here);
            }
        }
    }

    #[test]
    fn empty_file_is_not_in_the_set_of_all_files() {
        let mut file = OutputFile::new("f");
        file.push_payload(10);
        let all = Extents::of_files(&[file, OutputFile::new("empty")]);
        assert_eq!(all.iter().collect::<Vec<_>>(), [(0, 0..10)]);
        assert!(all.has_file(0) && !all.has_file(1));
    }
}
