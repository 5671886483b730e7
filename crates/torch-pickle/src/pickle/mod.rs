//! Reads pickles as data and writes pickles of protocol 2.
//!
//! Reason for a separate reader: a pickle is a program, and running it runs any code that its author wrote. This module
//! turns a pickle into a graph of nodes, and a call is only a node in this graph. Nothing that a pickle names is
//! imported or called; [`decode()`] turns the graph into a [`Value`](crate::Value) only if every name in it is on the
//! list in [`symbols`].
//!
//! ```text
//! bytes --opcode--> Op --machine--> Pickle (arena) --view--> Ref --decode--> Value --write--> bytes
//!                          |  ^
//!                          v  | Row row
//!                         Visitor: known objects go straight into columns
//! ```
//!
//! Invariants: the length of the input bounds every allocation. No walk over a pickle recurses, except for decoding,
//! which counts its depth. No input makes this module panic.
//!
//! Source of the rules: CPython `Lib/pickle.py` and `Lib/pickletools.py` (protocols 2 to 5 are read), and
//! `torch/_weights_only_unpickler.py` (which loads the written pickles if their content is allowed).

#![expect(
    clippy::cast_possible_truncation,
    reason = "inputs of 4 GiB and more are refused, so positions and counts fit 32 bits"
)]

mod alike;
mod arena;
mod bit_set;
mod calls;
mod decode;
mod decode_error;
mod fields;
mod items;
mod known;
mod long;
mod machine;
mod memo;
mod opcode;
mod path;
mod record;
mod slab;
pub mod symbols;
#[cfg(test)]
mod tests;
mod verdict;
mod view;
mod visitor;
mod write;
mod write_value;

use thiserror::Error;

pub use arena::{NodeId, Pickle};
pub use decode::{Decoded, Dropped, Tensors, Unknown, Unknowns, decode, decode_replacing, decode_with};
pub use decode_error::DecodeError;
pub use fields::{Field, Fields, Record};
pub use items::{Entries, Items};
pub use view::{Call, Instance, Ref};
pub use visitor::{NoVisitor, Row, Visitor};
pub use write::{Writer, append_all, set_all};
pub use write_value::{WriteError, WriteLeaves};

/// The maximum length of a pickle in bytes. Positions in pickles have 32 bits.
pub const MAX_BYTES: u64 = u32::MAX as u64;

/// Parses the pickle at the start of `bytes`. Returns the parsed pickle, and its length in bytes, including STOP.
pub fn parse<'a, F: Visitor + ?Sized>(bytes: &'a [u8], visitor: &mut F) -> Result<(Pickle<'a>, usize), PickleError> {
    parse_with(bytes, visitor, Limits::for_input(bytes.len()))
}

/// Parses a pickle like [`parse`], but with limits that the caller chooses.
pub fn parse_with<'a, F: Visitor + ?Sized>(
    bytes: &'a [u8],
    visitor: &mut F,
    limits: Limits,
) -> Result<(Pickle<'a>, usize), PickleError> {
    machine::Machine::new(bytes, limits)?.run(visitor)
}

/// Limits on the memory and the work that an input may cause. Lengths and memo indices need no limit here, because the
/// length of the input bounds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The maximum nesting of a decoded value. The limit prevents stack overflows in recursive functions over a value.
    pub max_depth: usize,
    /// The maximum number of nodes in memory while a pickle is read. A node takes 16 to 64 bytes.
    pub max_nodes: u32,
    /// The maximum work of one [`decode()`]: a visited node counts as one, and eight copied bytes count as one. The limit
    /// is needed because a small graph of shared nodes can be an exponentially large tree ("billion laughs").
    pub max_visits: u64,
}

impl Limits {
    /// Returns limits that no real pickle of `len` bytes reaches. In real pickles, the decoded tree is only a little
    /// larger than the graph of nodes. The limit of four visits per byte allows hundreds of visits for each object that
    /// CPython writes.
    pub fn for_input(len: usize) -> Self {
        Self {
            max_depth: 256,
            max_nodes: u32::try_from(len).unwrap_or(u32::MAX).min(1 << 28),
            max_visits: 1_000_000 + 4 * len as u64,
        }
    }
}

/// An error of reading a pickle.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("byte {at}: {found}")]
#[non_exhaustive]
pub struct PickleError {
    /// The kind of error.
    pub kind: PickleErrorKind,
    /// The position of the error in the pickle, in bytes.
    pub at: u64,
    /// The description of the input at that position.
    pub found: String,
}

/// The kinds of errors of a pickle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PickleErrorKind {
    /// The input ends before STOP.
    Truncated,
    /// The input is not a pickle, or not a pickle that CPython would write.
    Malformed,
    /// The input exceeds one of the [`Limits`], or a limit of the node format.
    Limit,
    /// The caller's [`Visitor`] refused an object.
    Rejected,
}

impl PickleError {
    /// Returns a description of the input that the reader expected at the position of the error.
    pub fn expected(&self) -> &'static str {
        match self.kind {
            PickleErrorKind::Truncated => "a complete pickle",
            PickleErrorKind::Limit => "a pickle within the limits of dtshard",
            PickleErrorKind::Malformed | PickleErrorKind::Rejected => "a well-formed pickle",
        }
    }

    fn new(kind: PickleErrorKind, at: usize, found: impl Into<String>) -> Self {
        Self { kind, at: at as u64, found: found.into() }
    }

    fn truncated(at: usize) -> Self {
        Self::new(PickleErrorKind::Truncated, at, "the end of the data")
    }

    fn malformed(at: usize, what: impl Into<String>) -> Self {
        Self::new(PickleErrorKind::Malformed, at, what)
    }

    fn limit(at: usize, what: impl Into<String>) -> Self {
        Self::new(PickleErrorKind::Limit, at, what)
    }

    fn rejected(at: usize, what: String) -> Self {
        Self::new(PickleErrorKind::Rejected, at, what)
    }
}
