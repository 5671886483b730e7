//! Extents: a set of bytes of the output files, such as those that are finished or those that a process has to write.
//!
//! What is finished is told by bytes, not by tensors or strips, so it keeps its meaning when the work is cut in another
//! way the next time.
//!
//! Counts bytes. Invariant: the stretches of a file ascend, none is empty, and no two overlap or touch, so a set has one
//! form; a file without any is not listed.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::catalog::OutputFile;

/// Stretches of output files, which are known by their number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extents {
    files: BTreeMap<u32, Vec<Range<u64>>>,
}

impl Extents {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// All bytes of all files.
    #[must_use]
    pub fn of_files(files: &[OutputFile]) -> Self {
        let mut all = Self::new();
        (0_u32..).zip(files).for_each(|(index, file)| all.insert(index, 0..file.len));
        all
    }

    /// Add a stretch; what it overlaps or touches becomes one with it. Cheap behind all others of the file.
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
        let first = known.partition_point(|stretch| stretch.end < range.start);
        let met = known[first..].partition_point(|stretch| stretch.start <= range.end);
        let joined = known[first..first + met]
            .iter()
            .fold(range, |joined, stretch| joined.start.min(stretch.start)..joined.end.max(stretch.end));
        known.splice(first..first + met, [joined]);
    }

    /// Whether some byte of the range is in the set.
    #[must_use]
    pub fn overlaps(&self, file: u32, range: &Range<u64>) -> bool {
        self.within(file, range.clone()).next().is_some()
    }

    /// What of a range is in the set, in ascending stretches.
    pub fn within(&self, file: u32, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let here = self.from(file, range.start).iter().take_while(move |stretch| stretch.start < range.end);
        here.map(move |stretch| stretch.start.max(range.start)..stretch.end.min(range.end))
            .filter(|stretch| !stretch.is_empty())
    }

    /// The stretches of a file that end behind this byte.
    fn from(&self, file: u32, at: u64) -> &[Range<u64>] {
        let known = self.files.get(&file).map_or(&[][..], Vec::as_slice);
        &known[known.partition_point(|stretch| stretch.end <= at)..]
    }

    /// What is in this set and not in the other.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let mut left = Self::new();
        for (file, stretch) in self.iter() {
            let mut at = stretch.start;
            for taken in other.within(file, stretch.clone()) {
                left.insert(file, at..taken.start);
                at = taken.end;
            }
            left.insert(file, at..stretch.end);
        }
        left
    }

    /// What is in the set of those files that are not left out.
    #[must_use]
    pub fn leaving_out(&self, is_out: impl Fn(u32) -> bool) -> Self {
        let files = self.files.iter().filter(|(file, _)| !is_out(**file));
        Self { files: files.map(|(file, stretches)| (*file, stretches.clone())).collect() }
    }

    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.iter().map(|(_, stretch)| stretch.end - stretch.start).sum()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Whether something of the file is in the set.
    #[must_use]
    pub fn has_file(&self, file: u32) -> bool {
        self.files.contains_key(&file)
    }

    /// The files of which something is in the set, ascending.
    pub fn files(&self) -> impl Iterator<Item = u32> + '_ {
        self.files.keys().copied()
    }

    /// All stretches with their files, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (u32, Range<u64>)> + '_ {
        self.files.iter().flat_map(|(file, stretches)| stretches.iter().map(|stretch| (*file, stretch.clone())))
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

    /// Each in one form, and not a byte twice.
    fn assert_holds(extents: &Extents, wanted: &Bytes) -> Result<(), TestCaseError> {
        prop_assert_eq!(&bytes(extents.iter()), wanted);
        prop_assert_eq!(extents.len_bytes(), wanted.len() as u64);
        prop_assert_eq!(extents.is_empty(), wanted.is_empty());
        let files: BTreeSet<u32> = wanted.iter().map(|(file, _)| *file).collect();
        prop_assert_eq!(extents.files().collect::<BTreeSet<_>>(), files);
        for stretches in extents.files.values() {
            prop_assert!(stretches.iter().all(|stretch| !stretch.is_empty()));
            prop_assert!(stretches.is_sorted_by(|one, next| one.end < next.start));
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn extents_are_sets_of_bytes(ours in ranges(), theirs in ranges(), asked in ranges()) {
            let (ours, our_bytes) = extents(&ours);
            let (theirs, their_bytes) = extents(&theirs);
            assert_holds(&ours, &our_bytes)?;
            assert_holds(&ours.without(&theirs), &our_bytes.difference(&their_bytes).copied().collect())?;
            for (file, range) in asked {
                let wanted: Bytes = bytes([(file, range.clone())]);
                let here: Bytes = wanted.intersection(&our_bytes).copied().collect();
                prop_assert_eq!(ours.overlaps(file, &range), !here.is_empty());
                let within: Vec<_> = ours.within(file, range).map(|stretch| (file, stretch)).collect();
                prop_assert_eq!(within.iter().map(|(_, stretch)| stretch.end - stretch.start).sum::<u64>(), here.len() as u64);
                prop_assert_eq!(bytes(within), here);
            }
        }
    }

    #[test]
    fn all_bytes_of_files_are_all_but_the_empty_ones() {
        let mut file = OutputFile::new("f");
        file.push_payload(10);
        let all = Extents::of_files(&[file, OutputFile::new("empty")]);
        assert_eq!(all.iter().collect::<Vec<_>>(), [(0, 0..10)]);
        assert!(all.has_file(0) && !all.has_file(1));
    }
}
