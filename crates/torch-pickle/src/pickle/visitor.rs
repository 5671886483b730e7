//! Visitors: code of the caller that stores recognised objects as rows of numbers, so that these objects do not become
//! a tree of nodes.
//!
//! Reason: a `.metadata` has 68 opcodes per chunk, and a generic tree of a million chunks takes more than a gigabyte. A
//! [`Visitor`] receives each object as soon as the object is complete, and stores the needed values in its own columns.
//! In the tree, a [`Row`] number replaces the object. The nodes that only the object owned are freed and reused for the
//! next object, so memory depends only on the values that the visitor stores.
//!
//! Invariant: a visitor sees an object completely or not at all. An object with list items, dict entries or keyword
//! arguments is never shown to a visitor, because a row has no space for the items, entries and arguments.

use super::{Record, Ref};

/// A number that replaces an object in the tree of nodes. The number refers to a row in a table of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// The number of the table, chosen by the caller.
    pub kind: u32,
    /// The index of the row in the table.
    pub index: u32,
}

/// Recognises objects while the pickle is read, and replaces them by rows. A method returns `Ok(None)` to leave the
/// object unchanged. If a method returns an `Err`, reading ends with an error that has this text.
pub trait Visitor {
    /// Returns whether this visitor receives objects of `class` as object records (by [`record`](Self::record)). The
    /// reader calls this method once per class.
    fn keeps(&self, _class: (&str, &str)) -> bool {
        false
    }

    /// Receives the fields of an object of a `class` that [`keeps`](Self::keeps) accepts, if the object has no
    /// arguments and a plain state. If several objects have equal bytes, the method may be called for only one of them.
    /// All other objects are passed to [`build`](Self::build). If this method returns `None` for an object, the object
    /// is also passed to `build`.
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
