//! The memo, which stores only the entries that are fetched later.
//!
//! CPython stores nearly every object in the memo, but fetches few of these entries: a `.metadata` of a million chunks
//! has about twenty million memo entries. A first walk over the opcodes marks the indices that a GET names, and only
//! these indices get a cell. The first walk also shows which nodes may be freed early: a node that is never fetched (and
//! never duplicated by DUP) has exactly one owner. If a visitor replaces an object by a row of its table (see
//! [`super::visitor`]), the nodes that only this object owned are freed.
//!
//! Pickles of protocol 4 and later consist of frames, and each frame contains complete opcodes. So a long pickle is
//! divided into parts at the start of frames, and several threads walk the parts. If every walk ends exactly where the
//! next part starts, the result equals the result of a single walk. Otherwise one thread walks the complete pickle.
//!
//! Invariant: the number of the cell for index `i` is the number of fetched indices below `i`.
//!
//! Source of the rules for memo indices and frames: CPython `Lib/pickle.py`, `load_put`, `load_memoize`, `load_get` and
//! `load_frame`.

use std::iter::zip;

use rayon::prelude::*;

use super::PickleError;
use super::arena::NodeId;
use super::bit_set::{BitSet, place};
use super::opcode::{End, Lexer, frames};

/// The minimum length, in bytes, of a pickle that several threads walk. For a shorter pickle, one thread is faster.
const LONG_BYTES: usize = 2 << 20;

/// Returns the memo indices that the GET opcodes from `start` on fetch. It is an error if the walk does not end as
/// `end` says: at STOP, or at the end of the input.
fn fetched_in(bytes: &[u8], start: usize, end: End) -> Result<BitSet, PickleError> {
    let mut fetched = BitSet::default();
    let mut lexer = Lexer::new(bytes)?;
    lexer.seek(start);
    match lexer.gets(|index| _ = fetched.insert(index))? {
        found if found == end => Ok(fetched),
        _ => Err(PickleError::truncated(lexer.pos())),
    }
}

/// Returns the memo indices that the GET opcodes of a pickle fetch. Several threads walk parts of whole frames; each
/// part except the last has at least `least_bytes` bytes. Returns `None` if the parts cannot be walked alone, for
/// example because an opcode crosses the end of a frame.
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
    /// For each word of `fetched`, the number of fetched indices in the words before it. With this number, the position
    /// of an index in `cells` is computed in constant time.
    before: Vec<u32>,
    cells: Vec<Option<NodeId>>,
    written: Written,
}

/// The memo indices that were written. MEMOIZE writes to the index that equals the number of written entries.
#[derive(Default)]
struct Written {
    /// The lowest index that is not written. All indices below it are written.
    below: u32,
    /// The indices that PUT wrote when they were above `below`. `ahead_len` counts those that are still above `below`.
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
    /// Walks the opcodes up to STOP without running them, and creates a memo with a cell for each fetched index.
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

    /// Records that the entry `index` was written. Returns whether the memo stores the entry. The memo stores only
    /// entries that a GET fetches.
    pub fn put(&mut self, index: u32, node: NodeId) -> bool {
        self.written.insert(index);
        let Some(cell) = self.cell(index) else {
            return false;
        };
        self.cells[cell] = Some(node);
        true
    }

    /// Runs MEMOIZE, which writes the next index. Returns whether the memo stores the entry.
    pub fn push(&mut self, node: NodeId) -> bool {
        self.put(self.len(), node)
    }

    /// Returns the number of entries that were written, including entries that are not stored.
    pub fn len(&self) -> u32 {
        self.written.len()
    }

    /// Returns true if all indices below [`len`](Self::len) were written, and no others.
    pub fn is_in_turn(&self) -> bool {
        self.written.ahead_len == 0
    }

    /// Returns whether a GET of the pickle fetches the entry at `index`.
    pub fn is_fetched(&self, index: u32) -> bool {
        self.fetched.contains(index)
    }

    /// Returns whether a GET of the pickle fetches one of the next `entries` entries that MEMOIZE will write.
    pub fn fetches_next(&self, entries: u32) -> bool {
        let next = self.len();
        self.fetched.contains_any(next..next + entries)
    }

    /// Counts the next `entries` entries as written, without storing them. The caller must store each of these entries
    /// that a GET fetches.
    pub fn skip(&mut self, entries: u32) {
        self.written.below += entries;
    }

    /// Returns the node in the entry at `index`; `None` if the entry was not written or is not stored.
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

    /// Returns a pickle with the given frames. Each item of `frames` has the opcodes of one frame.
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
        // In these inputs, opcodes cross the end of a frame, or bytes follow STOP.
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
