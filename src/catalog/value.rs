//! The Python values of a checkpoint, apart from tensor data.
//!
//! Values are independent of formats: pickle readers make them, and writers of any format take them. A tensor in a
//! value is a reference to an entry of the catalog. A value is a tree: if several Python containers share an object,
//! the value contains the object several times.
//!
//! Invariant: a value is nested at most 256 deep (the limit of the pickle reader), so comparing, printing and dropping
//! it may recurse. Code that builds values must keep this limit.

use std::fmt;

pub use torch_pickle::{Construct, DictKind, Symbol};

use super::TensorEntry;
use super::path::{Key, Path, key_text};
use crate::layout::Rank;

/// A Python value. [`Value::Other`] is a value that differs between ranks; only checkpoints of several ranks have such
/// values.
pub type Value = torch_pickle::Value<TensorId, Vec<RankValue>>;

/// A dict in insertion order.
pub type Dict = torch_pickle::Dict<TensorId, Vec<RankValue>>;

/// An object of a known class, stored as the call that creates the object, and the state of the object.
pub type Object = torch_pickle::Object<TensorId, Vec<RankValue>>;

/// The index of a tensor in the catalog.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId(pub u32);

impl fmt::Display for TensorId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "tensor {}", self.0)
    }
}

/// One value of an object for which ranks stored different values, and the ranks that stored this value, in ascending
/// order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankValue {
    pub value: Value,
    pub ranks: Vec<Rank>,
}

impl RankValue {
    /// Returns the value for rank `r` of the target. If rank `r` of the source stored a value, returns that value.
    /// Otherwise the `n` source ranks that stored a value are numbered from 0, and the function returns the value of
    /// number `r mod n`.
    pub fn value_for(rank_values: &[Self], rank: Rank) -> Option<&Value> {
        if let Some(own) = rank_values.iter().find(|rank_value| rank_value.ranks.contains(&rank)) {
            return Some(&own.value);
        }
        let mut stored: Vec<(Rank, &Value)> = rank_values
            .iter()
            .flat_map(|rank_value| rank_value.ranks.iter().map(|rank| (*rank, &rank_value.value)))
            .collect();
        stored.sort_unstable_by_key(|(rank, _)| *rank);
        let turn = (rank.0 as usize).checked_rem(stored.len())?;
        Some(stored[turn].1)
    }
}

impl torch_pickle::Extension<TensorId> for Vec<RankValue> {
    fn values(&self) -> Vec<&Value> {
        self.iter().map(|rank_value| &rank_value.value).collect()
    }

    fn values_mut(&mut self) -> Vec<&mut Value> {
        self.iter_mut().map(|rank_value| &mut rank_value.value).collect()
    }

    fn type_name(&self) -> &'static str {
        "per rank"
    }

    fn show(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        for (index, rank_value) in self.iter().enumerate() {
            let before = if index == 0 { "<" } else { ", " };
            write!(out, "{before}{}: {:.65535}", super::list_ranks(&rank_value.ranks), rank_value.value)?;
        }
        out.write_str(">")
    }
}

/// Formats a value for messages, in at most `limit` characters. A tensor is shown with its dtype and shape, such as
/// `<f32 [2, 3]>`. `tensors` are the tensors of the catalog.
pub fn describe(value: &Value, tensors: &[TensorEntry], limit: usize) -> String {
    let mut shown = value.clone();
    shown.replace_tensors(&mut |id| {
        let TensorEntry { dtype, shape, .. } = &tensors[id.0 as usize];
        let name = format!("<{dtype} {:?}>", shape.as_slice());
        // A name of the module `builtins` is printed without its module.
        Value::Symbol(Symbol { module: "builtins".into(), name: name.into() })
    });
    format!("{shown:.limit$}")
}

/// Adds `by` to every tensor id in a value. This is needed if the tensors of the value were appended to a list that
/// already had `by` tensors.
pub fn shift_tensors(value: &mut Value, by: u32) {
    value.map_tensors(&mut |id| TensorId(id.0 + by));
}

impl Path {
    /// Returns the value at this path.
    pub fn find<'v>(&self, state: &'v Value) -> Option<&'v Value> {
        self.0.iter().try_fold(state, |value, key| match (value, key) {
            (Value::Dict(dict), Key::Name(name)) => {
                dict.entries.iter().find(|(own, _)| key_text(own) == *name).map(|(_, value)| value)
            }
            (Value::List(items), Key::Index(index)) => items.get(usize::try_from(*index).ok()?),
            _ => None,
        })
    }

    /// Returns a mutable reference to the value at this path.
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
