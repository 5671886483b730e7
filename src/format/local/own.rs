//! Values of each rank, dealt out to the ranks of the target.
//!
//! Where they differ in nothing but the content of tensors (the state of a random number generator), they become one
//! value with a tensor of which every rank has its own. Where they differ in more, each stands with its ranks.

use std::collections::BTreeMap;

use crate::catalog::path::{self, LeafAction};
use crate::catalog::{Catalog, RankValue, TensorId, Value};
use crate::layout::Rank;

/// Tensors of which each rank has its own, numbered behind those of the source.
#[derive(Debug)]
pub struct OwnTensors {
    first: usize,
    /// Of each, which of the source's each rank gets.
    by_rank: Vec<BTreeMap<Rank, TensorId>>,
}

impl OwnTensors {
    /// What each rank gets; `None` for a tensor of the source.
    #[must_use]
    pub fn get(&self, id: TensorId) -> Option<&BTreeMap<Rank, TensorId>> {
        self.by_rank.get((id.0 as usize).checked_sub(self.first)?)
    }

    fn push(&mut self, by_rank: BTreeMap<Rank, TensorId>) -> TensorId {
        self.by_rank.push(by_rank);
        TensorId(u32::try_from(self.first + self.by_rank.len() - 1).expect("fewer than 2^32 tensors"))
    }
}

/// The state as so many ranks are to have it.
#[must_use]
pub fn spread(source: &Catalog, state: &Value, world_size: u32) -> (Value, OwnTensors) {
    let mut state = state.clone();
    let mut own = OwnTensors { first: source.tensors.len(), by_rank: Vec::new() };
    path::edit_leaves(&mut state, &mut |_, leaf| {
        let Value::Other(holdings) = leaf else { return LeafAction::Keep };
        let mut groups: Vec<Vec<(Rank, &Value)>> = Vec::new();
        for rank in (0..world_size).map(Rank) {
            let Some(value) = RankValue::value_for(holdings, rank) else { return LeafAction::Remove };
            match groups.iter_mut().find(|group| alike(source, group[0].1, value)) {
                Some(group) => group.push((rank, value)),
                None => groups.push(vec![(rank, value)]),
            }
        }
        let mut holdings: Vec<RankValue> = groups.iter().map(|group| merged(group, &mut own)).collect();
        *leaf = if holdings.len() == 1 { holdings.remove(0).value } else { Value::Other(holdings) };
        LeafAction::Keep
    });
    (state, own)
}

/// Equal but for the content of tensors.
fn alike(source: &Catalog, one: &Value, other: &Value) -> bool {
    let kinds = |value: &Value| -> Vec<_> {
        let kind = |id| (source.tensor(id).dtype, source.tensor(id).shape.clone());
        value.tensor_ids().into_iter().map(kind).collect()
    };
    one.same_but_tensors(other) && kinds(one) == kinds(other)
}

fn merged(group: &[(Rank, &Value)], own: &mut OwnTensors) -> RankValue {
    let ids: Vec<(Rank, Vec<TensorId>)> = group.iter().map(|(rank, value)| (*rank, value.tensor_ids())).collect();
    let mut value = group[0].1.clone();
    let mut at = 0;
    value.map_tensors(&mut |_| {
        at += 1;
        own.push(ids.iter().map(|(rank, ids)| (*rank, ids[at - 1])).collect())
    });
    RankValue { value, ranks: group.iter().map(|(rank, _)| *rank).collect() }
}
