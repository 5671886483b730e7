//! A set of small numbers, as bits.

use std::iter::zip;
use std::ops::Range;

/// A growing set of small numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct BitSet {
    pub words: Vec<u64>,
}

impl BitSet {
    /// Adds `index`; says whether it is new.
    pub fn insert(&mut self, index: u32) -> bool {
        let (word, bit) = place(index);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        new
    }

    pub fn union(self, other: Self) -> Self {
        let (mut long, short) = if self.words.len() < other.words.len() { (other, self) } else { (self, other) };
        zip(&mut long.words, short.words).for_each(|(word, more)| *word |= more);
        long
    }

    pub fn contains(&self, index: u32) -> bool {
        let (word, bit) = place(index);
        self.words.get(word).is_some_and(|&bits| bits & bit != 0)
    }

    pub fn contains_any(&self, range: Range<u32>) -> bool {
        let ((first, from), (last, to)) = (place(range.start), place(range.end));
        let bits = |word: usize| self.words.get(word).copied().unwrap_or(0);
        // All bits from `from` on, and all below `to`.
        let (from, to) = (from.wrapping_neg(), to - 1);
        if first == last {
            return bits(first) & from & to != 0;
        }
        bits(first) & from != 0 || bits(last) & to != 0 || (first + 1..last).any(|word| bits(word) != 0)
    }
}

/// The word of a number, and its bit in that.
pub(super) fn place(index: u32) -> (usize, u64) {
    ((index / 64) as usize, 1 << (index % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_contains_what_its_numbers_do() {
        let mut set = BitSet::default();
        for index in [3, 63, 64, 300] {
            set.insert(index);
        }
        for start in 0..330 {
            for end in start..400 {
                assert_eq!(set.contains_any(start..end), (start..end).any(|it| set.contains(it)), "{start}..{end}");
            }
        }
    }
}
