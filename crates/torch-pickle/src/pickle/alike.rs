//! A cache of recent object records. An object record is an object that is read directly from its opcodes, without
//! nodes; the visitor turns it into a row. If an object record has the same bytes as a cached object record, both
//! become one row.
//!
//! Reason: the metadata of a tensor contains only numbers and memo entries, so tensors with equal dtype and shape have
//! object records with equal bytes. Most of a `.metadata` consists of such object records. A repeated object record is
//! not read again.
//!
//! Invariant: equal bytes mean equal object records, because memo entries do not change. If a memo entry may have
//! changed (by a PUT, or by the BUILD of an object that was fetched from the memo), the cache is cleared. An object
//! record that adds memo entries which are fetched later is always read: it is not cached, and it gets a row of its
//! own.

use std::collections::VecDeque;

use super::memo::Memo;
use super::opcode::Span;
use super::visitor::Row;

/// The maximum number of cached object records. A model has fewer different shapes than this.
const KEPT: usize = 16;

/// An object record (an object that was read directly from its opcodes, without nodes). The machine, which runs
/// opcodes, has not run these opcodes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead {
    /// The index of the object's class among the globals of the pickle.
    pub class: u32,
    /// The bytes from the end of the opcode NEWOBJ to the end of the object record.
    pub span: Span,
    /// The number of memo entries that the object record adds.
    pub entries: u32,
    pub row: Row,
}

/// A cache of object records, the most recently added first.
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

    /// Returns a copy of a cached object record of class `class` whose bytes equal the input from `start` on. The span of
    /// the copy begins at `start`. Returns `None` if the cache has no such object record, or if the pickle later fetches a
    /// memo entry that the object record at `start` adds.
    pub fn find(&self, class: u32, bytes: &[u8], start: usize, memo: &Memo) -> Option<Ahead> {
        let is_alike = |known: &&Ahead| known.class == class && bytes[start..].starts_with(known.span.of(bytes));
        let known = self.0.iter().find(is_alike)?;
        (!memo.fetches_next(known.entries))
            .then_some(Ahead { span: Span { start: start as u32, ..known.span }, ..*known })
    }
}
