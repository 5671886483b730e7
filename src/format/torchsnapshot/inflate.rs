//! Rebuilds the state dict from the entries of all ranks, like `inflate` in `torchsnapshot/flatten.py`.
//!
//! The dicts and lists of all ranks are merged key by key. If several ranks store equal values at one path, the result
//! has this value once; if the values differ, the result has a per-rank value. Plain tensors of one name, dtype and
//! shape are replicas, which are compared when they are read.

use std::collections::HashSet;

use foldhash::fast::RandomState;
use indexmap::IndexMap;

use super::data::{DataFiles, add_value};
use super::manifest::{DictKey, EntryContent, ManifestEntry, StoredData, escape, name_of};
use super::tensor::{RankShards, push_chunks, sharded};
use crate::catalog::unreadable::UnreadableKind;
use crate::catalog::{Catalog, Dict, RankValue, TensorEntry, Unreadable, Value};
use crate::error::{Error, Result};
use crate::layout::{Rank, Region};

/// The manifest entries with one path, and the paths directly below it.
#[derive(Default)]
struct Node<'a> {
    /// The entries of the path, sorted by rank.
    entries: Vec<(Rank, &'a EntryContent)>,
    /// The last components of the paths directly below this path.
    children: Vec<&'a str>,
}

/// Rebuilds the state dict. Adds the tensors of the state dict to `catalog`.
///
/// # Errors
/// `Malformed` if entries contradict each other or do not fit their files, `Conflict` if ranks have different kinds of
/// values at one path, `Unsupported` for tensors and objects that dtshard cannot read.
pub fn inflate(data: &DataFiles<'_>, entries: &[ManifestEntry], catalog: &mut Catalog) -> Result<Value> {
    let mut nodes: IndexMap<&str, Node<'_>, RandomState> = IndexMap::default();
    let mut stateful_keys = Vec::new();
    for ManifestEntry { rank, path, content } in entries {
        nodes.entry(path.as_str()).or_default().entries.push((*rank, content));
    }
    let paths: Vec<&str> = nodes.keys().copied().collect();
    for path in paths {
        match path.rsplit_once('/') {
            None => stateful_keys.push(path),
            Some((parent, child)) => match nodes.get_mut(parent) {
                Some(parent) => parent.children.push(child),
                None => {
                    let expected = format!("an entry for the dict or list `{parent}`");
                    return Err(Error::malformed(data.manifest, path, expected, "none"));
                }
            },
        }
    }
    let mut inflater = Inflater { data, nodes, catalog };
    let mut root = Dict::default();
    let mut names = HashSet::new();
    for path in stateful_keys {
        if !names.insert(name_of(path)) {
            return Err(inflater.wrong(path, "keys with different names", format!("`{}` again", name_of(path))));
        }
        if let Some(value) = inflater.value(path)? {
            root.entries.push((Value::Str(name_of(path).as_str().into()), value));
        }
    }
    Ok(Value::Dict(root))
}

struct Inflater<'a> {
    data: &'a DataFiles<'a>,
    nodes: IndexMap<&'a str, Node<'a>, RandomState>,
    catalog: &'a mut Catalog,
}

impl<'a> Inflater<'a> {
    fn wrong(&self, path: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::malformed(self.data.manifest, path, expected, found)
    }

    /// Returns the value at a path; `None` if the value is left out because its class is unknown.
    fn value(&mut self, path: &str) -> Result<Option<Value>> {
        let entries = self.nodes[path].entries.clone();
        let (first, kind) = (entries[0].0, Kind::of(entries[0].1));
        if let Some((other, content)) = entries.iter().find(|(_, content)| Kind::of(content) != kind) {
            return Err(name_of(path).disagreement(
                "the kind of value",
                format!("rank {first} and rank {other}"),
                format!("rank {first} has {}, rank {other} has {}", kind.name(), Kind::of(content).name()),
            ));
        }
        if kind != Kind::Dict && kind != Kind::List && !self.nodes[path].children.is_empty() {
            return Err(self.wrong(path, "a dict or list, because entries below it exist", kind.name()));
        }
        match kind {
            Kind::Dict => self.dict(path, &entries).map(Some),
            Kind::List => self.list(path, &entries).map(Some),
            Kind::Sharded => self.sharded(path, &entries).map(Some),
            Kind::Leaf => self.leaf(path, &entries),
        }
    }

    fn dict(&mut self, path: &str, entries: &[(Rank, &'a EntryContent)]) -> Result<Value> {
        let mut merged = Dict::default();
        let mut keys: IndexMap<String, &DictKey, RandomState> = IndexMap::default();
        for (_, content) in entries {
            if let EntryContent::Dict { kind, keys: own } = content {
                merged.kind = *kind;
                own.iter().for_each(|key| _ = keys.entry(escape(key)).or_insert(key));
            }
        }
        if let Some(child) = self.nodes[path].children.iter().find(|child| !keys.contains_key(**child)) {
            let found = format!("an entry `{path}/{child}`, whose key is not listed");
            return Err(self.wrong(path, "a dict that lists all its keys", found));
        }
        for (rank, content) in entries {
            let EntryContent::Dict { keys: own, .. } = content else { continue };
            let paths = own.iter().map(|key| format!("{path}/{}", escape(key)));
            let is_missing = |child: &String| self.nodes.contains_key(child.as_str()) && !self.has_value(child, *rank);
            if let Some(child) = paths.into_iter().find(is_missing) {
                let expected = format!("an entry `{child}` of rank {rank}, because its dict lists this key");
                return Err(self.wrong(path, expected, "entries of other ranks only"));
            }
        }
        for (child, key) in keys {
            let child = format!("{path}/{child}");
            if !self.nodes.contains_key(child.as_str()) {
                return Err(self.wrong(path, format!("an entry `{child}`, because the dict lists this key"), "none"));
            }
            let key = match key {
                DictKey::Int(number) => Value::Int(*number),
                DictKey::Text(text) => Value::Str(text.as_str().into()),
            };
            if let Some(value) = self.value(&child)? {
                merged.entries.push((key, value));
            }
        }
        Ok(Value::Dict(merged))
    }

    fn list(&mut self, path: &str, entries: &[(Rank, &'a EntryContent)]) -> Result<Value> {
        let children = self.items(path)?;
        let lens: Vec<usize> = entries
            .iter()
            .map(|(rank, _)| children.iter().filter(|child| self.has_value(child, *rank)).count())
            .collect();
        let differing = lens.iter().position(|len| *len != lens[0]);
        let has_containers = children.iter().any(|child| self.has_tensor_or_dict(child));
        if let Some(other) = differing.filter(|_| has_containers) {
            let (first, other_rank) = (entries[0].0, entries[other].0);
            return Err(name_of(path).disagreement(
                "the length of a list",
                format!("rank {first} and rank {other_rank}"),
                format!("rank {first} has {} items, rank {other_rank} has {} items", lens[0], lens[other]),
            ));
        }
        if has_containers || entries.len() == 1 {
            let mut items = Vec::new();
            for child in &children {
                items.push(self.value(child)?.unwrap_or(Value::None));
            }
            return Ok(Value::List(items));
        }
        // A list without tensors and dicts is one value, so it is compared as a whole.
        let mut by_rank: Vec<RankValue> = Vec::new();
        for ((rank, _), len) in entries.iter().zip(lens) {
            let (mut items, start) = (Vec::with_capacity(len), self.catalog.tensors.len());
            for child in &children {
                items.extend(self.value_of_rank(child, *rank)?);
            }
            add_value(self.catalog, &mut by_rank, Value::List(items), *rank, start);
        }
        Ok(one_or_each(by_rank))
    }

    /// Returns the paths of the items of a list, in the order of the list. Checks that the positions of the items are
    /// 0, 1, 2, ... without a gap.
    fn items(&self, path: &str) -> Result<Vec<String>> {
        let mut items: Vec<(u64, String)> = Vec::new();
        for child in &self.nodes[path].children {
            let index = child.parse::<u64>().ok().filter(|index| index.to_string() == **child);
            let index = index.ok_or_else(|| {
                self.wrong(
                    path,
                    "item numbers (0, 1, 2, ...) after this path, because it is a list",
                    format!("`{child}`"),
                )
            })?;
            items.push((index, format!("{path}/{child}")));
        }
        items.sort_unstable();
        if let Some((expected, (found, _))) = (0..).zip(&items).find(|(at, (index, _))| at != index) {
            let expected = format!("an item at position {expected} of this list, because position {found} has one");
            return Err(self.wrong(path, expected, "none"));
        }
        Ok(items.into_iter().map(|(_, item)| item).collect())
    }

    /// Returns whether a rank has a value at a path: its own value, or a value that ranks share.
    fn has_value(&self, path: &str, rank: Rank) -> bool {
        self.nodes[path].entries.iter().any(|(own, content)| *own == rank || is_shared(content))
    }

    /// Returns whether the value at a path is a tensor, a dict, or a list that contains a tensor or a dict.
    fn has_tensor_or_dict(&self, path: &str) -> bool {
        let node = &self.nodes[path];
        node.entries.iter().any(|(_, content)| match content {
            EntryContent::Dict { .. } | EntryContent::Tensor { .. } | EntryContent::Sharded { .. } => true,
            EntryContent::Unsupported(_) => true,
            EntryContent::List => node.children.iter().any(|child| self.has_tensor_or_dict(&format!("{path}/{child}"))),
            EntryContent::Object { .. } | EntryContent::Primitive { .. } => false,
        })
    }

    /// Returns the value that one rank has at a path without tensors and dicts; `None` if the rank has no value there.
    fn value_of_rank(&mut self, path: &str, rank: Rank) -> Result<Option<Value>> {
        let entries = &self.nodes[path].entries;
        let own = entries.iter().find(|(own, _)| *own == rank);
        let entry = own.or_else(|| entries.iter().find(|(_, content)| is_shared(content)));
        let Some((_, content)) = entry.copied() else { return Ok(None) };
        match content {
            EntryContent::List => {
                let mut items = Vec::new();
                for (position, item) in self.items(path)?.into_iter().enumerate() {
                    let value = self.value_of_rank(&item, rank)?;
                    if value.is_some() && items.len() < position {
                        let expected = format!("an item of rank {rank} at position {}", items.len());
                        return Err(self.wrong(path, expected, format!("position {position}")));
                    }
                    items.extend(value);
                }
                Ok(Some(Value::List(items)))
            }
            _ if !self.nodes[path].children.is_empty() => {
                Err(self.wrong(path, "a dict or list, because entries below it exist", Kind::Leaf.name()))
            }
            EntryContent::Primitive { value, .. } => Ok(Some(value.clone())),
            EntryContent::Object { data, is_replicated } => {
                let own = (!is_replicated).then_some(rank);
                Ok(Some(self.data.object(&name_of(path), *data, own, self.catalog)?.unwrap_or(Value::None)))
            }
            _ => unreachable!("a path without tensors and dicts"),
        }
    }

    fn sharded(&mut self, path: &str, entries: &[(Rank, &'a EntryContent)]) -> Result<Value> {
        let shards_of = |(rank, content): &(Rank, &'a EntryContent)| match content {
            EntryContent::Sharded { shards, layout } => Some((*rank, shards.as_slice(), layout.as_ref())),
            _ => None,
        };
        let ranks: Vec<RankShards<'_>> = entries.iter().filter_map(shards_of).collect();
        let entry = sharded(self.data, name_of(path), &ranks)?;
        Ok(Value::Tensor(self.catalog.push_tensor(entry)))
    }

    /// Returns the value of a leaf that is not sharded.
    fn leaf(&mut self, path: &str, entries: &[(Rank, &'a EntryContent)]) -> Result<Option<Value>> {
        let fqn = name_of(path);
        let mut by_rank: Vec<RankValue> = Vec::new();
        // The data of chunks that were added. Several ranks may list the same data.
        let mut known_chunks: HashSet<(&Region, StoredData)> = HashSet::new();
        for (rank, content) in entries {
            match content {
                EntryContent::Primitive { value, .. } => {
                    let start = self.catalog.tensors.len();
                    add_value(self.catalog, &mut by_rank, value.clone(), *rank, start);
                }
                EntryContent::Object { data, is_replicated } => {
                    let start = self.catalog.tensors.len();
                    let own = (!is_replicated).then_some(*rank);
                    if let Some(value) = self.data.object(&fqn, *data, own, self.catalog)? {
                        add_value(self.catalog, &mut by_rank, value, *rank, start);
                    }
                }
                EntryContent::Tensor { dtype, shape, chunks, is_replicated } => {
                    let is_same = |known: &RankValue| match &known.value {
                        Value::Tensor(id) => {
                            let known = self.catalog.tensor(*id);
                            known.dtype == *dtype && known.shape == *shape
                        }
                        _ => false,
                    };
                    let known = by_rank.iter().position(is_same);
                    let known = known.unwrap_or_else(|| {
                        let id = self.catalog.push_tensor(TensorEntry::new(fqn.clone(), *dtype, shape.clone()));
                        by_rank.push(RankValue { value: Value::Tensor(id), ranks: Vec::new() });
                        by_rank.len() - 1
                    });
                    by_rank[known].ranks.push(*rank);
                    let Value::Tensor(id) = by_rank[known].value else { unreachable!("a tensor was found or added") };
                    if !chunks.is_empty()
                        && chunks.iter().all(|chunk| known_chunks.contains(&(&chunk.region, chunk.data)))
                    {
                        continue;
                    }
                    known_chunks.extend(chunks.iter().map(|chunk| (&chunk.region, chunk.data)));
                    let entry = &mut self.catalog.tensors[id.0 as usize];
                    push_chunks(self.data, entry, chunks, (!is_replicated).then_some(*rank))?;
                }
                EntryContent::Unsupported(what) => {
                    let start = self.catalog.tensors.len();
                    let kind = UnreadableKind::Tensor(what.clone());
                    let why = Unreadable { file: self.data.manifest.to_path_buf(), kind };
                    let id = self.catalog.push_tensor(TensorEntry::unreadable(fqn.clone(), why));
                    add_value(self.catalog, &mut by_rank, Value::Tensor(id), *rank, start);
                }
                EntryContent::Dict { .. } | EntryContent::List | EntryContent::Sharded { .. } => {
                    unreachable!("a leaf that is not sharded")
                }
            }
        }
        Ok((!by_rank.is_empty()).then(|| one_or_each(by_rank)))
    }
}

/// Returns whether the entry of one rank also gives the value of the other ranks, as for a replicated value.
fn is_shared(content: &EntryContent) -> bool {
    match content {
        EntryContent::Primitive { is_replicated, .. }
        | EntryContent::Object { is_replicated, .. }
        | EntryContent::Tensor { is_replicated, .. } => *is_replicated,
        // Only one of several replicas of a shard is stored. `tensor::sharded` checks the stored shards against the mesh.
        EntryContent::Sharded { layout, .. } => layout.is_some(),
        // The manifest may state that the tensor is replicated, but this part of the entry was not read.
        EntryContent::Unsupported(_) => true,
        EntryContent::Dict { .. } | EntryContent::List => false,
    }
}

/// Returns the only value in `by_rank` if all ranks have equal values; otherwise returns a per-rank value.
fn one_or_each(mut by_rank: Vec<RankValue>) -> Value {
    if by_rank.len() > 1 {
        return Value::Other(by_rank);
    }
    by_rank.pop().map_or(Value::None, |only| only.value)
}

/// The kinds of entries that may not be mixed at one path.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Dict,
    List,
    Sharded,
    Leaf,
}

impl Kind {
    fn of(content: &EntryContent) -> Self {
        match content {
            EntryContent::Dict { .. } => Self::Dict,
            EntryContent::List => Self::List,
            EntryContent::Sharded { .. } => Self::Sharded,
            _ => Self::Leaf,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Dict => "a dict",
            Self::List => "a list",
            Self::Sharded => "a sharded tensor",
            Self::Leaf => "a tensor or object",
        }
    }
}
