//! The memo, holding only what is fetched again.
//!
//! CPython memoizes nearly every object it pickles and fetches few of them: a `.metadata` of a million
//! chunks has some twenty million memo entries. A first walk over the opcodes marks the indices that a
//! GET names; only those get a cell. Knowing them also tells which nodes have exactly one owner, and so
//! may be freed once folded (see [`super::fold`]).
//!
//! Unit: memo indices. Invariant: the cell of index `i` is the number of fetched indices below `i`.
//!
//! Source of the rule: CPython `Lib/pickle.py`, `load_put`, `load_memoize` and `load_get`.

use super::PickleError;
use super::arena::NodeId;
use super::opcode::Lexer;

/// A growing set of small numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct BitSet {
    words: Vec<u64>,
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

    pub fn contains(&self, index: u32) -> bool {
        let (word, bit) = place(index);
        self.words.get(word).is_some_and(|&bits| bits & bit != 0)
    }
}

fn place(index: u32) -> (usize, u64) {
    ((index / 64) as usize, 1 << (index % 64))
}

pub(super) struct Memo {
    fetched: BitSet,
    /// Fetched indices before each word of `fetched`, so that a cell is found in constant time.
    before: Vec<u32>,
    cells: Vec<Option<NodeId>>,
    /// Indices ever written. MEMOIZE takes the next one, which is their count.
    written: BitSet,
    len: u32,
}

impl Memo {
    /// Walks the opcodes up to STOP without running them.
    pub fn survey(bytes: &[u8]) -> Result<Self, PickleError> {
        let mut fetched = BitSet::default();
        let mut lexer = Lexer::new(bytes)?;
        while let Some(index) = lexer.next_get()? {
            fetched.insert(index);
        }
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
        Ok(Self { fetched, before, cells, written: BitSet::default(), len: 0 })
    }

    /// Writes `index`; says whether it is kept, which is whether something fetches it.
    pub fn put(&mut self, index: u32, node: NodeId) -> bool {
        self.len += u32::from(self.written.insert(index));
        let Some(cell) = self.cell(index) else {
            return false;
        };
        self.cells[cell] = Some(node);
        true
    }

    /// MEMOIZE: the index is implied.
    pub fn push(&mut self, node: NodeId) -> bool {
        self.put(self.len, node)
    }

    /// How many entries there are.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether the entry that MEMOIZE makes after `skipped` others is fetched; `None` where a PUT was there before.
    pub fn fetches_next(&self, skipped: u32) -> Option<bool> {
        let index = self.len.checked_add(skipped)?;
        (!self.written.contains(index)).then(|| self.fetched.contains(index))
    }

    /// Makes the next entries, which are filled later or not fetched.
    pub fn skip(&mut self, entries: u32) {
        for _ in 0..entries {
            self.len += u32::from(self.written.insert(self.len));
        }
    }

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
