//! The memo, which stores only the entries that are fetched later.
//!
//! CPython memoizes nearly every object that it pickles and fetches few of them: a `.metadata` of a million chunks has
//! about twenty million memo entries. A first walk over the opcodes marks the indices that a GET names, and only these
//! indices get a cell. The walk also shows which nodes have exactly one owner; such nodes may be freed once they are a
//! row (see [`super::visitor`]).
//!
//! The walk only needs the positions of opcodes. Each frame contains whole opcodes, so several threads walk a long
//! pickle from different frames. If every part ends where the next part starts, the result equals the result of a
//! single walk. Otherwise a single walk is made.
//!
//! Invariant: the cell of index `i` is the number of fetched indices below `i`.
//!
//! Source of the rule: CPython `Lib/pickle.py`, `load_put`, `load_memoize`, `load_get` and
//! `load_frame`.

use std::iter::zip;

use rayon::prelude::*;

use super::PickleError;
use super::arena::NodeId;
use super::bit_set::{BitSet, place};
use super::opcode::{End, Lexer, frames};

/// The minimum length for a parallel walk. A shorter pickle is walked faster by one thread.
const LONG_BYTES: usize = 2 << 20;

/// Returns the indices that opcodes from `start` on fetch, up to an `end` of this kind.
fn fetched_in(bytes: &[u8], start: usize, end: End) -> Result<BitSet, PickleError> {
    let mut fetched = BitSet::default();
    let mut lexer = Lexer::new(bytes)?;
    lexer.seek(start);
    match lexer.gets(|index| _ = fetched.insert(index))? {
        found if found == end => Ok(fetched),
        _ => Err(PickleError::truncated(lexer.pos())),
    }
}

/// Returns the result of a single walk, computed in parts of whole frames. Returns `None` if an opcode
/// crosses the end of a frame.
fn fetched_by_parts(bytes: &[u8], least_bytes: usize) -> Option<BitSet> {
    let mut starts = vec![0];
    for frame in frames(bytes) {
        if frame - starts[starts.len() - 1] >= least_bytes {
            starts.push(frame);
        }
    }
    let ends = starts[1..].iter().map(|next| (*next, End::Input)).chain([(bytes.len(), End::Stop)]);
    let parts: Vec<(usize, (usize, End))> = zip(starts.iter().copied(), ends).collect();
    let walk = |(start, (end, kind)): (usize, (usize, End))| fetched_in(&bytes[..end], start, kind).ok();
    parts.into_par_iter().map(walk).try_reduce(BitSet::default, |one, other| Some(one.union(other)))
}

pub(super) struct Memo {
    fetched: BitSet,
    /// The number of fetched indices before each word of `fetched`, so that a cell is found in constant time.
    before: Vec<u32>,
    cells: Vec<Option<NodeId>>,
    written: Written,
}

/// The indices that were written. MEMOIZE takes the next index, which is the number of entries.
#[derive(Default)]
struct Written {
    /// All indices below this index are written.
    below: u32,
    /// The entries that PUT wrote with non-consecutive indices, and the number of them past the dense range.
    ahead: BitSet,
    ahead_len: u32,
}

impl Written {
    fn insert(&mut self, index: u32) {
        if index > self.below {
            self.ahead_len += u32::from(self.ahead.insert(index));
        } else if index == self.below {
            self.below += 1;
            while self.ahead_len > 0 && self.ahead.contains(self.below) {
                self.ahead_len -= 1;
                self.below += 1;
            }
        }
    }

    fn len(&self) -> u32 {
        self.below + self.ahead_len
    }
}

impl Memo {
    /// Walks the opcodes up to STOP without running them.
    pub fn survey(bytes: &[u8]) -> Result<Self, PickleError> {
        let by_parts = || fetched_by_parts(bytes, bytes.len() / rayon::current_num_threads());
        let fetched = match Some(bytes).filter(|bytes| bytes.len() >= LONG_BYTES).and_then(|_| by_parts()) {
            Some(fetched) => fetched,
            None => fetched_in(bytes, 0, End::Stop)?,
        };
        let mut count = 0;
        let before = fetched
            .words
            .iter()
            .map(|word| {
                let before = count;
                count += word.count_ones();
                before
            })
            .collect();
        let cells = vec![None; count as usize];
        Ok(Self { fetched, before, cells, written: Written::default() })
    }

    /// Writes `index`. Returns whether the entry is stored: it is stored if a GET fetches it.
    pub fn put(&mut self, index: u32, node: NodeId) -> bool {
        self.written.insert(index);
        let Some(cell) = self.cell(index) else {
            return false;
        };
        self.cells[cell] = Some(node);
        true
    }

    /// Runs MEMOIZE, which writes the next index.
    pub fn push(&mut self, node: NodeId) -> bool {
        self.put(self.len(), node)
    }

    /// Returns the number of entries.
    pub fn len(&self) -> u32 {
        self.written.len()
    }

    /// Returns whether all indices so far are consecutive.
    pub fn is_in_turn(&self) -> bool {
        self.written.ahead_len == 0
    }

    /// Returns whether a GET fetches the entry.
    pub fn is_fetched(&self, index: u32) -> bool {
        self.fetched.contains(index)
    }

    /// Returns whether one of the next entries is fetched later.
    pub fn fetches_next(&self, entries: u32) -> bool {
        let next = self.len();
        self.fetched.contains_any(next..next + entries)
    }

    /// Adds the next entries, which are filled later or never fetched.
    pub fn skip(&mut self, entries: u32) {
        self.written.below += entries;
    }

    /// Returns the entry, if it was written.
    pub fn get(&self, index: u32) -> Option<NodeId> {
        self.cells[self.cell(index)?]
    }

    fn cell(&self, index: u32) -> Option<usize> {
        if !self.fetched.contains(index) {
            return None;
        }
        let (word, bit) = place(index);
        let below = (self.fetched.words[word] & (bit - 1)).count_ones();
        Some((self.before[word] + below) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a pickle of frames with these opcodes.
    fn framed(frames: &[&[u8]]) -> Vec<u8> {
        let frame = |opcodes: &&[u8]| [&[0x95], (opcodes.len() as u64).to_le_bytes().as_slice(), opcodes].concat();
        [vec![0x80, 4], frames.iter().flat_map(frame).collect()].concat()
    }

    #[test]
    fn parallel_walk_equals_single_walk() {
        let whole = |bytes: &[u8]| fetched_in(bytes, 0, End::Stop).unwrap().words;
        let bytes = framed(&[b"]\x94h\0", b"N\x940j\x05\0\0\0h\x46", b"Kh0", b"h\x01."]);
        assert_eq!(whole(&bytes), [1 << 0 | 1 << 1 | 1 << 5, 1 << (0x46 - 64)]);
        for least_bytes in [1, 15, 20, 30, bytes.len()] {
            assert_eq!(fetched_by_parts(&bytes, least_bytes).unwrap().words, whole(&bytes), "{least_bytes}");
        }
        // These inputs have opcodes that cross frames, and bytes after STOP.
        for frames in [[b"h\x01K".as_slice(), b"h\x02."], [b"h", b"h\x02."], [b"h\x01.", b"h\x02."]] {
            let bytes = framed(&frames);
            assert!(fetched_by_parts(&bytes, 1).is_none());
            assert_eq!(
                Memo::survey(&bytes).map(|memo| memo.fetched.words).ok(),
                fetched_in(&bytes, 0, End::Stop).map(|it| it.words).ok()
            );
        }
        let bytes = framed(&[b"h\x01", b"h\x02"]);
        assert!(fetched_by_parts(&bytes, 1).is_none(), "without STOP");
        assert!(Memo::survey(&bytes).is_err());
    }
}
