//! Python values of a checkpoint: what it holds beside its tensors.
//!
//! Format-independent: pickle readers make a value, writers of any format take it. A tensor in it is a reference to an
//! entry of the catalog. A value is a tree: objects that Python shared are repeated.
//!
//! Invariant: a value read from a pickle is at most 256 deep (the reader's limit), so that comparing,
//! printing and dropping it may recurse. Code that builds one by hand keeps to that.

use std::fmt;

pub use torch_pickle::{Construct, DictKind, Symbol};

use super::path::{Key, Path, key_text};
use crate::layout::Rank;

/// A value. [`Value::Other`] is one that ranks store differently, which only the state of files of several ranks has.
pub type Value = torch_pickle::Value<TensorId, Vec<RankValue>>;

/// A dict in insertion order.
pub type Dict = torch_pickle::Dict<TensorId, Vec<RankValue>>;

/// An object that is carried by the recipe for making it.
pub type Object = torch_pickle::Object<TensorId, Vec<RankValue>>;

/// A tensor of the catalog, by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId(pub u32);

impl fmt::Display for TensorId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "tensor {}", self.0)
    }
}

/// One of several values, and the ranks that store it, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankValue {
    pub value: Value,
    pub ranks: Vec<Rank>,
}

impl RankValue {
    /// The value a rank gets of those that ranks store differently: its own where a rank of its number stored one; else
    /// the stored values are dealt out in turn, rank `r` getting that of the `r mod n`-th of the `n` ranks that stored one.
    #[must_use]
    pub fn value_for(holdings: &[Self], rank: Rank) -> Option<&Value> {
        if let Some(own) = holdings.iter().find(|holding| holding.ranks.contains(&rank)) {
            return Some(&own.value);
        }
        let mut stored: Vec<(Rank, &Value)> =
            holdings.iter().flat_map(|holding| holding.ranks.iter().map(|rank| (*rank, &holding.value))).collect();
        stored.sort_unstable_by_key(|(rank, _)| *rank);
        let turn = (rank.0 as usize).checked_rem(stored.len())?;
        Some(stored[turn].1)
    }
}

impl torch_pickle::Extension<TensorId> for Vec<RankValue> {
    fn values(&self) -> Vec<&Value> {
        self.iter().map(|holding| &holding.value).collect()
    }

    fn values_mut(&mut self) -> Vec<&mut Value> {
        self.iter_mut().map(|holding| &mut holding.value).collect()
    }

    fn type_name(&self) -> &'static str {
        "per rank"
    }

    fn show(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        for (index, holding) in self.iter().enumerate() {
            let before = if index == 0 { "<" } else { ", " };
            write!(out, "{before}{}: {:.65535}", super::list_ranks(&holding.ranks), holding.value)?;
        }
        out.write_str(">")
    }
}

/// Adds to the number of every tensor of a value: the tensors of a file become part of a longer list.
pub fn shift_tensors(value: &mut Value, by: u32) {
    value.map_tensors(&mut |id| TensorId(id.0 + by));
}

impl Path {
    /// Returns the value at this path.
    #[must_use]
    pub fn find<'v>(&self, state: &'v Value) -> Option<&'v Value> {
        self.0.iter().try_fold(state, |value, key| match (value, key) {
            (Value::Dict(dict), Key::Name(name)) => {
                dict.entries.iter().find(|(own, _)| key_text(own) == *name).map(|(_, value)| value)
            }
            (Value::List(items), Key::Index(index)) => items.get(usize::try_from(*index).ok()?),
            _ => None,
        })
    }

    /// Returns the value at this path, to be changed.
    pub fn find_mut<'v>(&self, state: &'v mut Value) -> Option<&'v mut Value> {
        self.0.iter().try_fold(state, |value, key| match (value, key) {
            (Value::Dict(dict), Key::Name(name)) => {
                dict.entries.iter_mut().find(|(own, _)| key_text(own) == *name).map(|(_, value)| value)
            }
            (Value::List(items), Key::Index(index)) => items.get_mut(usize::try_from(*index).ok()?),
            _ => None,
        })
    }
}
