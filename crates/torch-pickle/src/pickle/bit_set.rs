//! A set of small numbers, stored as bits.

use std::iter::zip;
use std::ops::Range;

/// A growing set of small numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct BitSet {
    pub words: Vec<u64>,
}

impl BitSet {
    /// Adds the number `index`. Returns true if the set did not contain this number.
    pub fn insert(&mut self, index: u32) -> bool {
        let (word, bit) = place(index);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        new
    }

    /// Returns the union of two sets.
    pub fn union(self, other: Self) -> Self {
        let (mut long, short) = if self.words.len() < other.words.len() { (other, self) } else { (self, other) };
        zip(&mut long.words, short.words).for_each(|(word, more)| *word |= more);
        long
    }

    /// Returns whether the set contains a number.
    pub fn contains(&self, index: u32) -> bool {
        let (word, bit) = place(index);
        self.words.get(word).is_some_and(|&bits| bits & bit != 0)
    }

    /// Returns whether the set contains a number of a range.
    pub fn contains_any(&self, range: Range<u32>) -> bool {
        let ((first, from), (last, to)) = (place(range.start), place(range.end));
        let bits = |word: usize| self.words.get(word).copied().unwrap_or(0);
        // `from` has all bits of its word from the start of the range on, and `to` all bits below the end of the range.
        let (from, to) = (from.wrapping_neg(), to - 1);
        if first == last {
            return bits(first) & from & to != 0;
        }
        bits(first) & from != 0 || bits(last) & to != 0 || (first + 1..last).any(|word| bits(word) != 0)
    }
}

/// Returns the index of the word that contains the bit of the number `index`, and a word in which only this bit is set.
pub(super) fn place(index: u32) -> (usize, u64) {
    ((index / 64) as usize, 1 << (index % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_query_equals_queries_of_its_numbers() {
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
