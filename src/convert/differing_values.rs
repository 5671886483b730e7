//! Chooses which value is written if ranks store different values (`--on-conflict`).
//!
//! The reader stores objects that differ between ranks as [`Value::Other`]. Whether a plain tensor differs is known
//! only after its data is read. If all ranks keep their own tensors, such a tensor becomes a [`Value::Other`] with one
//! tensor per rank. Random number state is expected to differ between ranks, so every rank keeps its own state, even
//! without `--on-conflict`.

use std::collections::{BTreeMap, HashSet};

use crate::catalog::path::{self, LeafAction, rank_key};
use crate::catalog::{
    self, Catalog, Chunk, ChunkTable, Dict, FileLocation, Key, RankValue, TensorEntry, TensorId, Value, list_ranks,
    state_dict,
};
use crate::convert::options::OnConflict;
use crate::error::Result;
use crate::layout::Rank;
use crate::name_list::quoted_list;
use crate::quantity::count;

/// Whether each rank has a file of its own in the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetFiles {
    /// Each rank has its own file in the target.
    Apart,
    /// All ranks share the files of the target.
    Together,
}

/// Names of the values that differed between ranks, by the way in which they were resolved.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ResolvedConflicts {
    /// Names of objects that are left out because their values differ between ranks.
    pub dropped: Vec<String>,
    /// Names of tensors that are left out because their values differ between ranks.
    pub dropped_tensors: Vec<String>,
    /// Names of values for which every rank keeps its own value.
    pub per_rank: Vec<String>,
    /// The ranks of SRC whose own values are kept, for the names in `per_rank`.
    pub ranks: Vec<Rank>,
    /// Names of values for which all ranks get the value of the lowest rank.
    pub rank0: Vec<String>,
}

/// Replaces a plain tensor, which differs between ranks, by one tensor per rank in the state dict of `selected`. Adds
/// the new tensors to both catalogs. If the tensor is inside a tuple or an object, whose items have no names, each rank
/// gets its own copy of the complete tuple or object.
pub fn split_by_rank(source: &mut Catalog, selected: &mut Catalog, id: TensorId) {
    let entry = source.tensor(id);
    let mut own_tensors: Vec<(TensorId, Option<Rank>)> = Vec::new();
    let copies: Vec<(TensorEntry, Option<Rank>)> = (entry.chunks.iter())
        .map(|chunk| {
            let rank = chunk.rank;
            let mut chunks = ChunkTable::new(entry.shape.len());
            chunks.push(chunk);
            (TensorEntry { chunks, ..entry.clone() }, rank)
        })
        .collect();
    let dtype = selected.tensor(id).dtype;
    for (copy, rank) in copies {
        let own_entry = TensorEntry { dtype, chunks: ChunkTable::new(copy.shape.len()), ..copy.clone() };
        let own = source.push_tensor(copy);
        assert_eq!(own, selected.push_tensor(own_entry), "the selected catalog has the tensors of the source");
        own_tensors.push((own, rank));
    }
    let of_each = |value: &Value, ranks: Option<&[Rank]>| -> Vec<RankValue> {
        let own_tensors = own_tensors.iter().filter(|(_, rank)| match (ranks, rank) {
            (Some(ranks), Some(rank)) => ranks.contains(rank),
            _ => true,
        });
        let holding = |(own, rank): &(TensorId, Option<Rank>)| {
            let mut value = value.clone();
            value.map_tensors(&mut |other| if other == id { *own } else { other });
            RankValue { value, ranks: rank.iter().copied().collect() }
        };
        own_tensors.map(holding).collect()
    };
    path::edit_leaves(&mut selected.state, &mut |_, leaf| {
        if !holds(leaf, id) {
            return LeafAction::Keep;
        }
        let holdings = match &*leaf {
            Value::Other(holdings) => (holdings.iter())
                .flat_map(|known| {
                    if holds(&known.value, id) {
                        of_each(&known.value, Some(&known.ranks))
                    } else {
                        vec![known.clone()]
                    }
                })
                .collect(),
            whole => of_each(whole, None),
        };
        *leaf = Value::Other(holdings);
        LeafAction::Keep
    });
}

/// Returns true if a leaf of the state dict is the tensor `id`, or is an object that contains this tensor.
pub fn holds(leaf: &Value, id: TensorId) -> bool {
    match leaf {
        Value::Tensor(own) => *own == id,
        leaf => leaf.contains_tensor() && leaf.tensor_ids().contains(&id),
    }
}

/// Resolves every value that differs between ranks: keeps the value of the lowest rank, keeps the values of all ranks,
/// or drops the value. If the ranks share the files of the target, the values of all ranks become one dict. Without
/// `choice`, each rank keeps its random number state.
///
/// # Errors
/// `Conflict` if `choice` is `None` and a value differs between ranks that is not random number state.
pub fn resolve(selected: &mut Catalog, choice: Option<OnConflict>, ranks: TargetFiles) -> Result<ResolvedConflicts> {
    let mut resolved = ResolvedConflicts::default();
    let mut refused = None;
    let mut own_values: HashSet<Rank> = HashSet::new();
    let Catalog { state, tensors, .. } = selected;
    path::edit_leaves(state, &mut |path, leaf| {
        let Value::Other(holdings) = leaf else { return LeafAction::Keep };
        let choice = choice.or_else(|| state_dict::is_random_state(path.fqn().as_str()).then_some(OnConflict::PerRank));
        match choice {
            None => {
                refused.get_or_insert_with(|| catalog::conflict_error(path, holdings, tensors));
            }
            Some(OnConflict::Drop) => {
                let mut own_tensors = Vec::new();
                path::tensors(leaf, path, &mut |path, _| own_tensors.push(path.to_string()));
                if own_tensors.is_empty() {
                    resolved.dropped.push(path.to_string());
                }
                resolved.dropped_tensors.append(&mut own_tensors);
                return LeafAction::Remove;
            }
            Some(OnConflict::Rank0) => {
                resolved.rank0.push(path.to_string());
                let lowest = holdings.iter().min_by_key(|holding| holding.ranks.first().copied());
                let value = lowest.map_or(Value::None, |holding| holding.value.clone());
                *leaf = value;
            }
            Some(OnConflict::PerRank) => {
                resolved.per_rank.push(path.to_string());
                own_values.extend(holdings.iter().flat_map(|holding| holding.ranks.iter().copied()));
                if ranks == TargetFiles::Together {
                    *leaf = side_by_side(holdings);
                }
            }
        }
        LeafAction::Keep
    });
    resolved.ranks = own_values.into_iter().collect();
    resolved.ranks.sort_unstable();
    refused.map_or(Ok(resolved), Err)
}

/// Returns a dict with the values of all ranks: `{"rank_0": ..., "rank_1": ...}`.
fn side_by_side(holdings: &[RankValue]) -> Value {
    let by_rank: BTreeMap<Rank, &Value> =
        holdings.iter().flat_map(|holding| holding.ranks.iter().map(|rank| (*rank, &holding.value))).collect();
    let entry = |(rank, value): (Rank, &Value)| {
        let Key::Name(name) = rank_key(rank) else { unreachable!("the key of a rank is a name") };
        (Value::Str(name), value.clone())
    };
    Value::Dict(Dict { entries: by_rank.into_iter().map(entry).collect(), ..Dict::default() })
}

/// Returns true if each chunk is a complete copy of the tensor that one known rank stores, so that each chunk can
/// become the tensor of that rank.
pub fn has_ranks(entry: &TensorEntry) -> bool {
    let is_whole = |chunk: &Chunk| chunk.tile.sizes() == entry.shape && !matches!(chunk.location, FileLocation::Empty);
    entry.chunks.iter().all(|chunk| chunk.rank.is_some() && is_whole(&chunk))
}

/// Returns the first name and the number of further names, for a message: `extra_state.rng.cpu` and 3 more.
pub fn few(names: &[String]) -> String {
    quoted_list(names, 1)
}

/// Returns the start of a note, for example "2 values differ between ranks (`step` and 1 more)".
fn differ_between_ranks(names: &[String]) -> String {
    let differ = if names.len() == 1 { "differs" } else { "differ" };
    format!("{} {differ} between ranks ({})", count(names.len(), "value"), few(names))
}

impl ResolvedConflicts {
    /// Returns the notes about the values that differ between ranks. `target_ranks` is the number of ranks of the new
    /// job. `None` means that no rank loses or gains a value: the target has no rank files, or as many ranks as SRC.
    pub fn notes(&self, target_ranks: Option<u32>) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.per_rank.is_empty() {
            let (differing, ranks) = (differ_between_ranks(&self.per_rank), list_ranks(&self.ranks));
            let mut note = format!("{differing}, so each rank keeps its own value (SRC has the values of {ranks})");
            let source = self.ranks.len();
            if target_ranks.is_some_and(|target| target as usize > source) {
                note.push_str(&format!("; rank r of the new job gets the value of old rank r mod {source}"));
            }
            let beyond = |rank: &&Rank| target_ranks.is_some_and(|target| rank.0 >= target);
            let lost: Vec<Rank> = self.ranks.iter().filter(beyond).copied().collect();
            if !lost.is_empty() {
                note.push_str(&format!(
                    "; the values of {} are left out, because the new job has no such ranks",
                    list_ranks(&lost)
                ));
            }
            notes.push(note);
        }
        if !self.rank0.is_empty() {
            notes.push(format!("{}, so the value of the lowest rank is used", differ_between_ranks(&self.rank0)));
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> Catalog {
        let holding = |value: i64, ranks: &[u32]| RankValue {
            value: Value::Int(value),
            ranks: ranks.iter().copied().map(Rank).collect(),
        };
        let differs = Value::Other(vec![holding(7, &[0, 2]), holding(8, &[1])]);
        let rng = Dict { entries: vec![(Value::Str("cpu".into()), differs.clone())], ..Dict::default() };
        let entries = vec![
            (Value::Str("same".into()), Value::Int(1)),
            (Value::Str("step".into()), differs),
            (Value::Str("rng".into()), Value::Dict(rng)),
        ];
        Catalog { state: Value::Dict(Dict { entries, ..Dict::default() }), ..Catalog::empty() }
    }

    fn shown(catalog: &Catalog) -> String {
        catalog.state.to_string()
    }

    #[test]
    fn without_a_choice_only_random_state_may_differ() {
        let error = resolve(&mut state(), None, TargetFiles::Apart).unwrap_err();
        assert_eq!(
            error.to_string(),
            "step: an object differs between ranks 0, 2 and rank 1: ranks 0, 2 have 7; rank 1 has 8"
        );
        let mut only_rng = state();
        path::edit_leaves(&mut only_rng.state, &mut |path, _| {
            if path.to_string() == "step" { LeafAction::Remove } else { LeafAction::Keep }
        });
        let resolved = resolve(&mut only_rng, None, TargetFiles::Apart).unwrap();
        assert_eq!(resolved.per_rank, ["rng.cpu"]);
        assert_eq!(
            resolved.notes(Some(4)),
            [
                "1 value differs between ranks (`rng.cpu`), so each rank keeps its own value (SRC has the values of ranks 0, \
                 1, 2); rank r of the new job gets the value of old rank r mod 3"
            ]
        );
        assert_eq!(
            resolved.notes(Some(2)),
            [
                "1 value differs between ranks (`rng.cpu`), so each rank keeps its own value (SRC has the values of ranks 0, \
                 1, 2); the values of rank 2 are left out, because the new job has no such ranks"
            ]
        );
    }

    #[test]
    fn each_choice_gives_its_value_or_none() {
        let mut catalog = state();
        let resolved = resolve(&mut catalog, Some(OnConflict::Rank0), TargetFiles::Apart).unwrap();
        assert_eq!(resolved.rank0, ["step", "rng.cpu"]);
        assert_eq!(shown(&catalog), "{'same': 1, 'step': 7, 'rng': {'cpu': 7}}");

        let mut catalog = state();
        let resolved = resolve(&mut catalog, Some(OnConflict::Drop), TargetFiles::Apart).unwrap();
        assert_eq!(resolved.dropped, ["step", "rng.cpu"]);
        assert_eq!(shown(&catalog), "{'same': 1}");

        let mut catalog = state();
        resolve(&mut catalog, Some(OnConflict::PerRank), TargetFiles::Together).unwrap();
        let each = "{'rank_0': 7, 'rank_1': 8, 'rank_2': 7}";
        assert_eq!(shown(&catalog), format!("{{'same': 1, 'step': {each}, 'rng': {{'cpu': {each}}}}}"));
    }
}
