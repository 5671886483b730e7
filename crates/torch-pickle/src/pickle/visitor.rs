//! Visitors: a recognised object immediately becomes a row of the caller's columns instead of a tree.
//!
//! Reason: a `.metadata` has 68 opcodes per chunk, and a generic tree of a million chunks takes more than a gigabyte.
//! A [`Visitor`] receives each object as soon as it is complete, stores the needed values in columns of its own, and
//! leaves a [`Row`] number in the tree. The nodes that only the object owned are freed for the next object, so memory
//! depends on the retained values only.
//!
//! Invariant: an object is shown whole or not at all. An object with list items, dict entries or keyword arguments is
//! never shown, because a row would lose them.

use super::{Record, Ref};

/// The row in a table of the caller that replaces an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// The number of the table, chosen by the caller.
    pub kind: u32,
    /// The index of the row.
    pub index: u32,
}

/// Recognises objects while the pickle is read. `Ok(None)` leaves the object unchanged; an `Err` ends reading with
/// that message.
pub trait Visitor {
    /// Returns whether objects of `class` are shown as object records. Called once per class.
    fn keeps(&self, _class: (&str, &str)) -> bool {
        false
    }

    /// Receives an object of a `class` that [`keeps`](Self::keeps) accepts, if the object has no arguments and a plain
    /// state. Of several objects with equal bytes, possibly only one is shown. All other objects are shown to
    /// [`build`](Self::build), and so is an object for which this method returns `None`.
    fn record(&mut self, _class: (&str, &str), _record: &Record<'_, '_>) -> Result<Option<Row>, String> {
        Ok(None)
    }

    /// Receives an object of `class`, made from the tuple `args`, at the BUILD that sets `state`.
    fn build(&mut self, _class: (&str, &str), _args: Ref<'_>, _state: Ref<'_>) -> Result<Option<Row>, String> {
        Ok(None)
    }

    /// Receives a REDUCE: `callee` was called with the tuple `args`. Return a row only for calls to which nothing is
    /// added later: a BUILD, APPENDS or SETITEMS on a row is an error.
    fn reduce(&mut self, _callee: (&str, &str), _args: Ref<'_>) -> Result<Option<Row>, String> {
        Ok(None)
    }
}

/// A visitor that makes no rows.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoVisitor;

impl Visitor for NoVisitor {}
