//! Builds the state dict of the result: inserts leaves at their new keys, with the same kinds of containers as in the
//! source.
//!
//! A container (dict or list) is created when its first leaf is inserted, so containers without leaves disappear, and
//! leaves keep their order. A container has the kind of the container in the source. A list keeps its length, with
//! `None` for removed items, because positions have a meaning. If a new name is not a position of the list, the list
//! becomes a dict.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::split_name::{self, KeyRef, Step};
use super::survey::{Leaf, Survey};
use crate::catalog::{Dict, Value};
use crate::error::{Error, Result};

/// The maximum number of list items that the result may have in addition to the number of list items of the source. The
/// limit exists because renames can multiply lists.
const MAX_PADDING: usize = 1 << 16;

/// Returns the new name of a module. Both names end in a dot, unless they are empty. The result is `None` if the new state
/// dict does not have the module.
pub(super) type NewModuleName<'f> = dyn Fn(&str) -> Option<String> + 'f;

/// The state dict of the result while it is built.
pub(super) struct Rebuild<'a> {
    survey: &'a Survey<'a>,
    nodes: Vec<RebuiltNode<'a>>,
    /// The node index of each child of each container. A key of the map has three values: the node index of the
    /// container, the text of the child's key, and true if the child's key is a text in the source.
    children: HashMap<(u32, Box<str>, bool), u32>,
    /// The leaves by their new names. The boolean is true if the leaf has another name in the source.
    names: HashMap<String, (Leaf, bool)>,
}

struct RebuiltNode<'a> {
    content: RebuiltContent<'a>,
    /// The container of the source that determines whether this node becomes a dict, an `OrderedDict` or a list; `None`
    /// if the node is new.
    source: Option<u32>,
    /// The container of the source whose attributes this node gets: the first with attributes, if leaves of several
    /// containers are joined in this node.
    attributes: Option<u32>,
    /// True if at least one descendant has another name below this node than it has below the container of the source.
    renamed: bool,
}

enum RebuiltContent<'a> {
    Leaf(Value, Leaf),
    Dict(Vec<(Option<KeyRef<'a>>, Box<str>, u32)>),
    List(BTreeMap<usize, u32>),
}

impl<'a> Rebuild<'a> {
    /// Makes an empty state dict.
    pub fn new(survey: &'a Survey<'a>) -> Self {
        Self { survey, nodes: Vec::new(), children: HashMap::new(), names: HashMap::new() }
    }

    /// Inserts a leaf at the path that the keys `steps` form.
    ///
    /// # Errors
    /// `Usage` with both names if another leaf has the same name.
    pub fn insert(&mut self, leaf: Leaf, value: Value, steps: &[Step<'a>]) -> Result<()> {
        let is_container = matches!(&value, Value::Dict(dict) if dict.entries.is_empty());
        if !is_container {
            self.claim_name(leaf, steps)?;
        }
        let mut content = Some(match &value {
            Value::Dict(dict) if dict.entries.is_empty() => RebuiltContent::Dict(Vec::new()),
            _ => RebuiltContent::Leaf(value, leaf),
        });
        // The keys after the last new key are all keys of the source.
        let intact = steps.iter().rposition(|step| step.key.is_none()).map_or(0, |last| last + 1);
        let mut at = None;
        for depth in 0..=steps.len() {
            let from = depth.checked_sub(1).map(|above| &steps[above]);
            let next = steps.get(depth);
            let known = match (at, from) {
                (None, _) => (!self.nodes.is_empty()).then_some(0),
                (Some(parent), Some(step)) => self.child(parent, step),
                (Some(_), None) => None,
            };
            let node = match known {
                Some(node) if next.is_some() || is_container => {
                    if let RebuiltContent::Leaf(_, other) = self.nodes[node as usize].content {
                        return Err(self.collision_error(leaf, other, &steps[..depth]));
                    }
                    node
                }
                Some(node) => {
                    let other = self.any_leaf(node);
                    return Err(self.collision_error(leaf, other.unwrap_or(leaf), &steps[..depth]));
                }
                None => {
                    let fresh = match next {
                        Some(next) if self.position(next).is_some() => RebuiltContent::List(BTreeMap::new()),
                        Some(_) => RebuiltContent::Dict(Vec::new()),
                        None => content.take().expect("the last step is taken once"),
                    };
                    self.add(at, from, fresh)
                }
            };
            let source = match next {
                Some(step) => step.container,
                None => is_container.then_some(leaf.node),
            };
            self.record_source(node, source, depth < intact);
            at = Some(node);
        }
        Ok(())
    }

    /// Records a container of the source whose leaves are inserted below a node.
    fn record_source(&mut self, node: u32, source: Option<u32>, renamed: bool) {
        let Some(source) = source else { return };
        let has_attributes =
            matches!(self.survey.nodes[source as usize].value, Value::Dict(Dict { attributes: Some(_), .. }));
        let node = &mut self.nodes[node as usize];
        node.source = node.source.or(Some(source));
        node.attributes = node.attributes.or(has_attributes.then_some(source));
        node.renamed |= renamed;
    }

    /// Registers the new name of a leaf. Two leaves with equal names are an error only if at least one of the two was
    /// renamed, because the source itself may have two leaves with equal names.
    fn claim_name(&mut self, leaf: Leaf, steps: &[Step<'_>]) -> Result<()> {
        let name = split_name::join(steps);
        let renamed = name != self.survey.raw_name(leaf);
        match self.names.get(&name) {
            Some((other, other_renamed)) if renamed || *other_renamed => Err(self.collision_error(leaf, *other, steps)),
            Some(_) => Ok(()),
            None => {
                self.names.insert(name, (leaf, renamed));
                Ok(())
            }
        }
    }

    fn collision_error(&self, leaf: Leaf, other: Leaf, steps: &[Step<'_>]) -> Error {
        let (first, second) = (self.survey.raw_name(other), self.survey.raw_name(leaf));
        Error::usage(
            format!("`{first}` and `{second}` would both be named `{}`", split_name::join(steps)),
            "change options::rename, options::strip_prefix or options::root, leave one of the two names out with \
             options::exclude, or keep wrapper prefixes with options::keep_names",
        )
    }

    fn any_leaf(&self, mut node: u32) -> Option<Leaf> {
        loop {
            node = match &self.nodes[node as usize].content {
                RebuiltContent::Leaf(_, leaf) => return Some(*leaf),
                RebuiltContent::Dict(entries) => entries.first()?.2,
                RebuiltContent::List(items) => *items.first_key_value()?.1,
            };
        }
    }

    /// Returns the position that a key has in the list of the source that contains the key.
    fn position(&self, step: &Step<'_>) -> Option<usize> {
        let Value::List(items) = self.survey.nodes[step.container? as usize].value else { return None };
        // Only the text that `str(int)` gives is a position: `007` is a name.
        step.text.parse::<usize>().ok().filter(|index| *index < items.len() && index.to_string() == step.text)
    }

    fn child(&mut self, parent: u32, step: &Step<'a>) -> Option<u32> {
        if let RebuiltContent::List(items) = &self.nodes[parent as usize].content {
            match self.position(step) {
                Some(index) => return items.get(&index).copied(),
                None => self.list_to_dict(parent),
            }
        }
        self.children.get(&(parent, step.text.as_ref().into(), is_text(step))).copied()
    }

    fn add(&mut self, parent: Option<u32>, step: Option<&Step<'a>>, content: RebuiltContent<'a>) -> u32 {
        let id = u32::try_from(self.nodes.len()).expect("fewer than 2^32 values");
        self.nodes.push(RebuiltNode { content, source: None, attributes: None, renamed: false });
        let (Some(parent), Some(step)) = (parent, step) else { return id };
        let position = self.position(step);
        match (&mut self.nodes[parent as usize].content, position) {
            (RebuiltContent::List(items), Some(index)) => drop(items.insert(index, id)),
            (RebuiltContent::Dict(entries), _) => {
                let text: Box<str> = step.text.as_ref().into();
                entries.push((step.key, text.clone(), id));
                self.children.insert((parent, text, is_text(step)), id);
            }
            _ => unreachable!("a list is made a dict before a name is looked up in it"),
        }
        id
    }

    fn list_to_dict(&mut self, node: u32) {
        let content = &mut self.nodes[node as usize].content;
        let RebuiltContent::List(items) = content else { return };
        let items = std::mem::take(items);
        let entries: Vec<(_, Box<str>, _)> =
            items.into_iter().map(|(index, child)| (None, index.to_string().into(), child)).collect();
        for (_, text, child) in &entries {
            self.children.insert((node, text.clone(), true), *child);
        }
        *content = RebuiltContent::Dict(entries);
    }

    /// Builds and returns the state dict. `module` returns the new name of a module, or `None` if the result does not have the
    /// module.
    ///
    /// # Errors
    /// `Usage` if renames make the lists much larger than the lists of the source.
    pub fn finish(mut self, module: &NewModuleName<'_>) -> Result<Value> {
        if self.nodes.is_empty() {
            let kind = self.survey.nodes[0].value.as_dict().map(|dict| dict.kind).unwrap_or_default();
            return Ok(Value::Dict(Dict { kind, ..Dict::default() }));
        }
        self.children = HashMap::new();
        self.names = HashMap::new();
        let mut remaining = self.survey.list_items.saturating_add(MAX_PADDING);
        self.value(0, &mut Vec::new(), module, &mut remaining)
    }

    fn value(
        &mut self,
        node: u32,
        path: &mut Vec<Box<str>>,
        module: &NewModuleName<'_>,
        remaining: &mut usize,
    ) -> Result<Value> {
        let content = std::mem::replace(&mut self.nodes[node as usize].content, RebuiltContent::Dict(Vec::new()));
        let source = self.nodes[node as usize].source.map(|source| self.survey.nodes[source as usize].value);
        Ok(match content {
            RebuiltContent::Leaf(value, _) => value,
            RebuiltContent::List(items) => {
                let len = match source {
                    Some(Value::List(items)) => items.len(),
                    _ => 0,
                };
                let len = len.max(items.last_key_value().map_or(0, |(last, _)| last + 1));
                *remaining = remaining.checked_sub(len).ok_or_else(|| {
                    Error::usage(
                        format!("{}: options::rename splits this list into too many lists", path.join(".")),
                        "rename the complete list, or leave the list out of options::rename",
                    )
                })?;
                let mut values = vec![Value::None; len];
                for (index, child) in items {
                    path.push(index.to_string().into());
                    values[index] = self.value(child, path, module, remaining)?;
                    path.pop();
                }
                Value::List(values)
            }
            RebuiltContent::Dict(entries) => {
                let attributes = self.attributes(node, path, module);
                let mut dict = Dict { entries: Vec::with_capacity(entries.len()), attributes, ..Dict::default() };
                if let Some(Value::Dict(source)) = source {
                    dict.kind = source.kind;
                }
                for (key, text, child) in entries {
                    let key = match key {
                        Some(KeyRef::Entry(key)) => key.clone(),
                        _ => Value::Str(text.as_ref().into()),
                    };
                    path.push(text);
                    dict.entries.push((key, self.value(child, path, module, remaining)?));
                    path.pop();
                }
                Value::Dict(dict)
            }
        })
    }

    /// Returns the attributes of a dict. In the attributes, torch stores the versions of modules; the names of these
    /// modules are relative to the dict. If leaves below the dict are renamed, the names of the modules change with
    /// them.
    fn attributes(&self, node: u32, path: &[Box<str>], module: &NewModuleName<'_>) -> Option<Box<Value>> {
        let node = &self.nodes[node as usize];
        let source = node.attributes?;
        let Value::Dict(Dict { attributes: Some(attributes), .. }) = self.survey.nodes[source as usize].value else {
            return None;
        };
        let mut attributes = attributes.clone();
        if !node.renamed {
            return Some(attributes);
        }
        let Value::Dict(named) = attributes.as_mut() else { return Some(attributes) };
        for (key, value) in &mut named.entries {
            if let (Some("_metadata"), Value::Dict(modules)) = (key.as_str(), value) {
                self.rename_modules(&mut modules.entries, source, path, module);
            }
        }
        Some(attributes)
    }

    fn rename_modules(
        &self,
        modules: &mut Vec<(Value, Value)>,
        source: u32,
        path: &[Box<str>],
        module: &NewModuleName<'_>,
    ) {
        let with_dot = |name: &str| if name.is_empty() { String::new() } else { format!("{name}.") };
        let old = with_dot(&self.survey.container_name(source));
        let new = with_dot(&path.join("."));
        let mut seen = HashSet::new();
        modules.retain_mut(|(key, _)| {
            let Value::Str(name) = key else { return true };
            let Some(renamed) = module(&format!("{old}{}", with_dot(&self.survey.clean(name)))) else {
                return false;
            };
            let Some(relative) = renamed.strip_prefix(&new) else { return false };
            *name = relative.strip_suffix('.').unwrap_or(relative).into();
            seen.insert(name.clone())
        });
    }
}

fn is_text(step: &Step<'_>) -> bool {
    !matches!(step.key, Some(KeyRef::Entry(key)) if key.as_str().is_none())
}
