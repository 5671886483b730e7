//! Visitors: a known object becomes a row of the caller's columns at once, not a tree.
//!
//! Why: a `.metadata` costs 68 opcodes a chunk, and a generic tree of a million chunks is over a
//! gigabyte. A [`Visitor`] sees each object the moment it is whole, keeps what it needs in columns of its
//! own, and leaves a [`Row`] row number behind. Whatever the object alone owned is freed for the next
//! one, so memory follows what is retained.
//!
//! Invariant: an object is shown whole or not at all. One with list items, dict entries or keyword
//! arguments of its own is never shown, because a row would lose them.

use super::{Record, Ref};

/// The row of a table of the caller's that an object became.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// Which table the row is in, as the caller numbers them.
    pub kind: u32,
    /// Index of the row.
    pub index: u32,
}

/// Recognises objects while the pickle is being read. `Ok(None)` leaves the object as it is; an `Err`
/// ends the reading with that message.
pub trait Visitor {
    /// Whether objects of `class` are shown as records; asked once a class.
    fn keeps(&self, _class: (&str, &str)) -> bool {
        false
    }

    /// An object of a kept `class`, without arguments, whose state is plain; of several that are written alike perhaps
    /// one. One that is not plain is shown to [`build`](Self::build), and so is one for which this is `None`.
    fn record(&mut self, _class: (&str, &str), _record: &Record<'_, '_>) -> Result<Option<Row>, String> {
        Ok(None)
    }

    /// BUILD: an object of `class` made from the tuple `args` was given `state`.
    fn build(&mut self, _class: (&str, &str), _args: Ref<'_>, _state: Ref<'_>) -> Result<Option<Row>, String> {
        Ok(None)
    }

    /// REDUCE: `callee` was called with the tuple `args`. Take only calls that nothing is added to
    /// later: a BUILD, APPENDS or SETITEMS on a row is an error.
    fn reduce(&mut self, _callee: (&str, &str), _args: Ref<'_>) -> Result<Option<Row>, String> {
        Ok(None)
    }
}

/// Makes no rows.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoVisitor;

impl Visitor for NoVisitor {}
