//! Paths in a state dict: traversing a state dict, and building one from paths.
//!
//! The rules follow `torch/distributed/checkpoint/_nested_dict.py` and `_traverse.py`: dicts are always traversed, a
//! list only if it contains (at any depth) a tensor or a dict, and a tuple never. A name is the path joined with dots.
//! In contrast to PyTorch, [`tensors`] also visits tensors in tuples, so that no tensor is missed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use foldhash::fast::RandomState;
use indexmap::IndexMap;

use super::{Dict, Fqn, TensorId, Value};
use crate::layout::Rank;

/// One key of a path.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Key {
    /// A dict key. A key that is not a string appears as Python's `str(key)`.
    Name(Arc<str>),
    /// A position in a list.
    Index(u64),
}

impl fmt::Display for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => formatter.write_str(name),
            Self::Index(index) => write!(formatter, "{index}"),
        }
    }
}

/// The keys from the root of a state dict to a value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Path(pub Vec<Key>);

impl Path {
    /// Returns the name of the value: its keys joined with dots.
    pub fn fqn(&self) -> Fqn {
        match self.0.as_slice() {
            [Key::Name(name)] => Fqn::from(name.clone()),
            _ => Fqn::from(self.to_string()),
        }
    }

    /// Returns the path of a child.
    #[must_use]
    pub fn child(&self, key: Key) -> Self {
        let mut keys = Vec::with_capacity(self.0.len() + 1);
        keys.extend_from_slice(&self.0);
        keys.push(key);
        Self(keys)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, key) in self.0.iter().enumerate() {
            if index > 0 {
                formatter.write_str(".")?;
            }
            write!(formatter, "{key}")?;
        }
        Ok(())
    }
}

/// A leaf of a state dict: a value that is not traversed further.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StateLeaf<'a> {
    Tensor(TensorId),
    /// A leaf that is not a tensor.
    Object(&'a Value),
}

/// Returns the leaves of a state dict, in the order of the state dict. The leaves are the entries that DCP makes when
/// it flattens the state dict.
pub fn leaves(state: &Value) -> Vec<(Path, StateLeaf<'_>)> {
    let mut found = Vec::new();
    visit_leaves(state, &mut Path::default(), &mut |path, leaf| found.push((path.clone(), leaf)));
    found
}

fn visit_leaves<'a>(value: &'a Value, path: &mut Path, visit: &mut dyn FnMut(&Path, StateLeaf<'a>)) {
    match value {
        Value::Tensor(id) => visit(path, StateLeaf::Tensor(*id)),
        Value::Dict(dict) => {
            for (key, child) in &dict.entries {
                path.0.push(Key::Name(key_text(key)));
                visit_leaves(child, path, visit);
                path.0.pop();
            }
        }
        Value::List(items) if items.iter().any(is_descended) => {
            for (index, child) in items.iter().enumerate() {
                path.0.push(Key::Index(index as u64));
                visit_leaves(child, path, visit);
                path.0.pop();
            }
        }
        other => visit(path, StateLeaf::Object(other)),
    }
}

/// Returns whether a list is traversed because of its item `value`. This is the case if `value` is a tensor, a dict, a
/// value that differs between ranks, or a list that contains such a value, directly or in nested lists.
pub fn is_descended(value: &Value) -> bool {
    match value {
        Value::Tensor(_) | Value::Dict(_) | Value::Other(_) => true,
        Value::List(items) => items.iter().any(is_descended),
        _ => false,
    }
}

/// Returns the names of the leaves that are not tensors.
pub fn object_names(state: &Value) -> Vec<String> {
    objects(state).into_iter().map(|(path, _)| path.to_string()).collect()
}

/// The action that the function `visit` requests for a leaf of a state dict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeafAction {
    Keep,
    /// Removes the leaf. In a dict, the key is removed, too; a dict that becomes empty is also removed. In a list,
    /// `None` replaces the leaf.
    Remove,
}

/// Calls `visit` to change or remove each leaf of a state dict, in the order of [`leaves`].
pub fn edit_leaves(state: &mut Value, visit: &mut dyn FnMut(&Path, &mut Value) -> LeafAction) {
    edit_below(state, &mut Path::default(), visit);
}

fn edit_below(
    value: &mut Value,
    path: &mut Path,
    visit: &mut dyn FnMut(&Path, &mut Value) -> LeafAction,
) -> LeafAction {
    match value {
        Value::Dict(dict) => {
            let was_empty = dict.entries.is_empty();
            dict.entries.retain_mut(|(key, child)| {
                path.0.push(Key::Name(key_text(key)));
                let action = edit_below(child, path, visit);
                path.0.pop();
                action == LeafAction::Keep
            });
            if dict.entries.is_empty() && !was_empty { LeafAction::Remove } else { LeafAction::Keep }
        }
        Value::List(items) if items.iter().any(is_descended) => {
            for (index, child) in items.iter_mut().enumerate() {
                path.0.push(Key::Index(index as u64));
                if edit_below(child, path, visit) == LeafAction::Remove {
                    *child = Value::None;
                }
                path.0.pop();
            }
            LeafAction::Keep
        }
        leaf => visit(path, leaf),
    }
}

/// Returns the leaves of a state dict that are not tensors.
pub fn objects(state: &Value) -> Vec<(Path, &Value)> {
    let mut found = Vec::new();
    visit_leaves(state, &mut Path::default(), &mut |path, leaf| {
        if let StateLeaf::Object(value) = leaf {
            found.push((path.clone(), value));
        }
    });
    found
}

/// Returns the key under which a format stores the value of one rank, if the values of ranks differ: `rank_3`.
pub fn rank_key(rank: Rank) -> Key {
    Key::Name(format!("rank_{rank}").into())
}

/// Calls `visit` for every tensor of a value, including tensors in tuples and objects, which [`leaves`] does not visit.
pub fn tensors(value: &Value, path: &Path, visit: &mut dyn FnMut(&Path, TensorId)) {
    tensors_below(value, &mut path.clone(), visit);
}

fn tensors_below(value: &Value, path: &mut Path, visit: &mut dyn FnMut(&Path, TensorId)) {
    let mut step = |key: Key, child: &Value| {
        path.0.push(key);
        tensors_below(child, path, visit);
        path.0.pop();
    };
    match value {
        Value::Tensor(id) => visit(path, *id),
        Value::Dict(dict) => {
            for (key, child) in &dict.entries {
                step(Key::Name(key_text(key)), child);
            }
        }
        Value::List(items) | Value::Tuple(items) | Value::Set(items) | Value::FrozenSet(items) => {
            for (index, child) in items.iter().enumerate() {
                step(Key::Index(index as u64), child);
            }
        }
        Value::Object(object) => {
            for (index, child) in object.args.iter().chain(&object.items).enumerate() {
                step(Key::Index(index as u64), child);
            }
            for (key, child) in object.kwargs.iter().chain(&object.entries) {
                step(Key::Name(key_text(key)), child);
            }
            if let Some(state) = &object.state {
                tensors_below(state, path, visit);
            }
        }
        Value::Other(rank_values) => {
            for rank_value in rank_values {
                step(rank_key(rank_value.ranks[0]), &rank_value.value);
            }
        }
        _ => {}
    }
}

/// Returns the path of the first dict with a tensor in a key. A tensor in a key of a dict has no name, because names
/// refer only to values. So it cannot be selected, cast, compared or written by name.
pub fn dict_with_tensor_key(state: &Value) -> Option<Path> {
    let mut path = Path::default();
    tensor_key_below(state, &mut path).then_some(path)
}

/// Returns whether the value contains a dict with a tensor in a key. If so, `path` becomes the path of this dict.
fn tensor_key_below(value: &Value, path: &mut Path) -> bool {
    let mut step = |key: Key, child: &Value| {
        path.0.push(key);
        let found = tensor_key_below(child, path);
        if !found {
            path.0.pop();
        }
        found
    };
    let has_tensor_key = |entries: &[(Value, Value)]| entries.iter().any(|(key, _)| key.contains_tensor());
    match value {
        Value::Dict(dict) => {
            has_tensor_key(&dict.entries)
                || dict.entries.iter().any(|(key, child)| step(Key::Name(key_text(key)), child))
        }
        Value::List(items) | Value::Tuple(items) | Value::Set(items) | Value::FrozenSet(items) => {
            (0..).zip(items).any(|(index, child)| step(Key::Index(index), child))
        }
        Value::Object(object) => {
            has_tensor_key(&object.kwargs)
                || has_tensor_key(&object.entries)
                || (0..)
                    .zip(object.args.iter().chain(&object.items))
                    .any(|(index, child)| step(Key::Index(index), child))
                || (object.kwargs.iter().chain(&object.entries))
                    .any(|(key, child)| step(Key::Name(key_text(key)), child))
                || object.state.as_ref().is_some_and(|state| tensor_key_below(state, path))
        }
        Value::Other(rank_values) => {
            rank_values.iter().any(|rank_value| step(rank_key(rank_value.ranks[0]), &rank_value.value))
        }
        _ => false,
    }
}

/// Returns Python's `str(key)`, for the kinds of dict keys that occur in state dicts.
pub fn key_text(key: &Value) -> Arc<str> {
    match key {
        Value::Str(text) => text.clone(),
        other => other.to_string().into(),
    }
}

/// A builder of a state dict from flat paths, like `unflatten_state_dict` in
/// `torch/distributed/checkpoint/_nested_dict.py`. A container becomes a list if the next key in the path is a
/// position, otherwise a dict. Lists are padded with `None`.
#[derive(Debug, Default)]
pub struct Unflatten {
    root: IndexMap<Arc<str>, NestedNode, RandomState>,
}

#[derive(Debug)]
enum NestedNode {
    Leaf(Value),
    Dict(IndexMap<Arc<str>, NestedNode, RandomState>),
    List(BTreeMap<u64, NestedNode>),
}

/// The maximum number of list positions without a value, over all lists of one state dict. A state dict with more list
/// positions without a value is damaged.
const MAX_PADDING: u64 = 1 << 16;

impl Unflatten {
    /// Inserts `value` at `path`.
    ///
    /// # Errors
    /// A text that explains why the path contradicts paths that were inserted before.
    pub fn insert(&mut self, path: &Path, value: Value) -> Result<(), String> {
        let Some((last, parents)) = path.0.split_last() else {
            return Err(String::from("an empty path"));
        };
        let Some((first, middle)) = parents.split_first() else {
            return insert_leaf_in_dict(&mut self.root, last, value);
        };
        let Key::Name(name) = first else {
            return Err(format!("{path}: expected a dict at the top of the state dict, found a list"));
        };
        let mut node =
            self.root.entry(name.clone()).or_insert_with(|| NestedNode::for_key(parents.get(1).unwrap_or(last)));
        for (depth, key) in middle.iter().enumerate() {
            let next = parents.get(depth + 2).unwrap_or(last);
            node = match (node, key) {
                (NestedNode::Dict(entries), Key::Name(name)) => {
                    entries.entry(name.clone()).or_insert_with(|| NestedNode::for_key(next))
                }
                (NestedNode::List(items), Key::Index(index)) => {
                    items.entry(*index).or_insert_with(|| NestedNode::for_key(next))
                }
                _ => {
                    return Err(format!(
                        "`{path}`, but another path makes the parent of `{key}` something else (a dict, a list or a \
                         single value)"
                    ));
                }
            };
        }
        match (node, last) {
            (NestedNode::Dict(entries), key @ Key::Name(_)) => insert_leaf_in_dict(entries, key, value),
            (NestedNode::List(items), Key::Index(index)) => match items.insert(*index, NestedNode::Leaf(value)) {
                None => Ok(()),
                Some(_) => Err(format!("`{path}` twice")),
            },
            _ => Err(format!(
                "`{path}`, but another path makes the parent of `{last}` something else (a dict, a list or a single \
                 value)"
            )),
        }
    }

    /// Returns the state dict.
    ///
    /// # Errors
    /// A text that names a list with too many missing positions.
    pub fn finish(self) -> Result<Value, String> {
        NestedNode::Dict(self.root).finish(&mut { MAX_PADDING })
    }
}

fn insert_leaf_in_dict(
    entries: &mut IndexMap<Arc<str>, NestedNode, RandomState>,
    key: &Key,
    value: Value,
) -> Result<(), String> {
    let Key::Name(name) = key else {
        return Err(format!("the list position {key} in a container that another path makes a dict"));
    };
    match entries.insert(name.clone(), NestedNode::Leaf(value)) {
        None => Ok(()),
        Some(_) => Err(format!("`{name}` twice")),
    }
}

impl NestedNode {
    fn for_key(key: &Key) -> Self {
        match key {
            Key::Name(_) => Self::Dict(IndexMap::default()),
            Key::Index(_) => Self::List(BTreeMap::new()),
        }
    }

    fn finish(self, padding: &mut u64) -> Result<Value, String> {
        match self {
            Self::Leaf(value) => Ok(value),
            Self::Dict(entries) => {
                let mut dict = Dict { entries: Vec::with_capacity(entries.len()), ..Dict::default() };
                for (name, node) in entries {
                    dict.entries.push((Value::Str(name), node.finish(padding)?));
                }
                Ok(Value::Dict(dict))
            }
            Self::List(given) => {
                let len = given.last_key_value().map_or(0, |(&index, _)| index.saturating_add(1));
                let Some(rest) = padding.checked_sub(len - given.len() as u64) else {
                    return Err(format!("a list of {len} items, of which only {} are stored", given.len()));
                };
                *padding = rest;
                let mut items = Vec::new();
                for (index, node) in given {
                    while (items.len() as u64) < index {
                        items.push(Value::None);
                    }
                    items.push(node.finish(padding)?);
                }
                Ok(Value::List(items))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(steps: &[&str]) -> Path {
        let key = |step: &&str| match step.strip_prefix('#') {
            Some(index) => Key::Index(index.parse().unwrap()),
            None => Key::Name((*step).into()),
        };
        Path(steps.iter().map(key).collect())
    }

    #[test]
    fn leaves_follow_dcp() {
        let text = |text: &str| Value::Str(text.into());
        let dict = |entries: Vec<(Value, Value)>| Value::Dict(Dict { entries, ..Dict::default() });
        // {'opt': {'state': {0: {'step': t}}, 'param_groups': [{'lr': .1}]}, 'plain': [1, 2], 'x.y': (t,), 'none': {}}
        let tensor = Value::Tensor(TensorId(0));
        let state = dict(vec![
            (
                text("opt"),
                dict(vec![
                    (text("state"), dict(vec![(Value::Int(0), dict(vec![(text("step"), tensor.clone())]))])),
                    (text("param_groups"), Value::List(vec![dict(vec![(text("lr"), Value::Float(0.1))])])),
                ]),
            ),
            (text("plain"), Value::List(vec![Value::Int(1), Value::Int(2)])),
            (text("x.y"), Value::Tuple(vec![tensor])),
            (text("none"), dict(vec![])),
        ]);
        let names: Vec<String> = leaves(&state).iter().map(|(path, _)| path.to_string()).collect();
        assert_eq!(names, ["opt.state.0.step", "opt.param_groups.0.lr", "plain", "x.y"]);

        let mut seen = Vec::new();
        tensors(&state, &Path::default(), &mut |path, _| seen.push(path.to_string()));
        assert_eq!(seen, ["opt.state.0.step", "x.y.0"]);
    }

    #[test]
    fn unflatten_rebuilds_lists_and_dicts() {
        let mut state = Unflatten::default();
        state.insert(&path(&["opt", "groups", "#1", "lr"]), Value::Int(1)).unwrap();
        state.insert(&path(&["step"]), Value::Int(7)).unwrap();
        state.insert(&path(&["opt", "name"]), Value::None).unwrap();
        assert_eq!(
            state.finish().unwrap().to_string(),
            "{'opt': {'groups': [None, {'lr': 1}], 'name': None}, 'step': 7}"
        );
    }

    #[test]
    fn contradicting_paths_are_errors() {
        let mut state = Unflatten::default();
        state.insert(&path(&["a", "b"]), Value::None).unwrap();
        assert!(state.insert(&path(&["a", "b"]), Value::None).is_err());
        assert!(state.insert(&path(&["a", "#0"]), Value::None).is_err());
        assert!(state.insert(&path(&["a", "b", "c"]), Value::None).is_err());
        assert!(state.insert(&path(&["a"]), Value::None).is_err());
        assert!(state.insert(&path(&[]), Value::None).is_err());
        let mut state = Unflatten::default();
        state.insert(&path(&["a", "#1152921504606846976"]), Value::None).unwrap();
        assert!(state.finish().is_err());
    }
}
