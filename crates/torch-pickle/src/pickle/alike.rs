//! A cache of recent object records: an object record with the same bytes as an earlier one becomes the same row.
//!
//! Reason: the metadata of a tensor contains only numbers and memo entries, so tensors of one dtype and shape have the
//! same bytes. Most of a `.metadata` consists of such object records. A repeated object record becomes the row of the
//! first one.
//!
//! Invariant: equal bytes mean equal object records, because memo entries do not change. If an entry may have changed,
//! by a PUT or by the BUILD of an object that was fetched before, the cache is cleared. If an object record adds memo
//! entries that are fetched later, it is not cached and matches no cached one.

use std::collections::VecDeque;

use super::memo::Memo;
use super::opcode::Span;
use super::visitor::Row;

/// The number of cached object records: more than the number of shapes in a model.
const KEPT: usize = 16;

/// An object record that was read ahead of the machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead {
    /// The index of the class.
    pub class: u32,
    /// The bytes after NEWOBJ.
    pub span: Span,
    /// The number of memo entries that the object record adds.
    pub entries: u32,
    pub row: Row,
}

/// The cached object records, the most recent first.
#[derive(Default)]
pub(super) struct Alike(VecDeque<Ahead>);

impl Alike {
    /// Adds an object record to the cache.
    pub fn keep(&mut self, record: Ahead) {
        self.0.truncate(KEPT - 1);
        self.0.push_front(record);
    }

    /// Clears the cache.
    pub fn forget(&mut self) {
        self.0.clear();
    }

    /// Returns the cached object record of this class with the same bytes as the input at `start`, if any.
    pub fn find(&self, class: u32, bytes: &[u8], start: usize, memo: &Memo) -> Option<Ahead> {
        let is_alike = |known: &&Ahead| known.class == class && bytes[start..].starts_with(known.span.of(bytes));
        let known = self.0.iter().find(is_alike)?;
        (!memo.fetches_next(known.entries))
            .then_some(Ahead { span: Span { start: start as u32, ..known.span }, ..*known })
    }
}
