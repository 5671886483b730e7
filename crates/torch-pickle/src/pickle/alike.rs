//! Records that are written as one before them.
//!
//! Why: whatever the metadata of a tensor says is a number or fetched, so that tensors of one dtype and shape have the same
//! bytes, and these are most of a `.metadata`. Such a record is the row that the first of them became.
//!
//! Invariant: equal bytes are an equal record, because entries of the memo do not change. Where one may have, by a PUT or by
//! the BUILD of an object that was fetched before, all is forgotten. A record with entries that are fetched is not kept, and
//! matches none.

use std::collections::VecDeque;

use super::memo::Memo;
use super::opcode::Span;
use super::visitor::Row;

/// Records that are kept: more than the shapes of a model are.
const KEPT: usize = 16;

/// A record that was read ahead.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead {
    /// Index of its class.
    pub class: u32,
    /// What follows NEWOBJ.
    pub span: Span,
    /// How many entries the memo gets.
    pub entries: u32,
    pub row: Row,
}

/// The latest first.
#[derive(Default)]
pub(super) struct Alike(VecDeque<Ahead>);

impl Alike {
    pub fn keep(&mut self, record: Ahead) {
        self.0.truncate(KEPT - 1);
        self.0.push_front(record);
    }

    pub fn forget(&mut self) {
        self.0.clear();
    }

    /// The record of this class that begins there, if it is like one of those that are kept.
    pub fn find(&self, class: u32, bytes: &[u8], start: usize, memo: &Memo) -> Option<Ahead> {
        let is_alike = |known: &&Ahead| known.class == class && bytes[start..].starts_with(known.span.of(bytes));
        let known = self.0.iter().find(is_alike)?;
        (!memo.fetches_next(known.entries))
            .then_some(Ahead { span: Span { start: start as u32, ..known.span }, ..*known })
    }
}
