//! Traverses the state dict of the source once. Records all leaves (values that are not traversed further), and whether
//! a leaf belongs to the model or to an optimizer.
//!
//! The leaves are those of [`crate::catalog::path`], and empty dicts. An empty dict has no name, but is kept in the
//! result. Each node refers to its parent, so that leaves share the keys of their containers.
//!
//! An optimizer is a dict with `state` and `param_groups`, or the value of an [optimizer
//! key](optimizer::is_optimizer_key). Its state is keyed by parameter: `{"state": {FQN: {"exp_avg": ..}}}`, or
//! `{"state.FQN.exp_avg": ..}` if flattened by `torch.distributed.checkpoint.state_dict`. Invariant: a model contains
//! no optimizer.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use super::Wrappers;
use super::split_name::{self, KeyRef, Step};
use crate::catalog::path::{self, is_descended};
use crate::catalog::wrappers::{clean_name, has_wrapper, with_clean};
use crate::catalog::{Catalog, Dict, Path, TensorId, Value, optimizer, state_dict};

/// A container or leaf of the state dict.
#[derive(Debug)]
pub(super) struct SurveyNode<'a> {
    parent: Option<u32>,
    key: Option<KeyRef<'a>>,
    pub value: &'a Value,
    /// True if the dict is flat: the keys of the dict are dotted names, or the dict is the model itself and has only
    /// leaves. A prefix that is put before a key of a flat dict becomes part of the key instead of a new key.
    pub flat: bool,
}

/// The kind of a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeafKind {
    Tensor,
    Object,
    EmptyDict,
}

/// The section of an optimizer to which a leaf belongs: state or parameter groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OptimizerSection {
    /// The leaf is optimizer state of a parameter. In the path of the leaf, the name of the parameter follows after
    /// `head` keys. If `flat` is true, the state is flattened, and the name follows after the text `state.` in the next
    /// key.
    State {
        head: usize,
        flat: bool,
    },
    Groups {
        head: usize,
        flat: bool,
    },
    Rest,
}

/// A leaf of the state dict, with the section to which it belongs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaf {
    pub node: u32,
    pub kind: LeafKind,
    pub in_model: bool,
    /// If an optimizer contains the leaf, the number of the optimizer, and the section (state or parameter groups) of
    /// the leaf; otherwise `None`.
    pub optimizer: Option<(u32, OptimizerSection)>,
}

impl Leaf {
    /// Returns whether the leaf is a tensor of the model.
    pub fn is_parameter(self) -> bool {
        self.in_model && self.kind == LeafKind::Tensor
    }

    /// Returns whether the leaf is in the state of an optimizer.
    pub fn in_state(self) -> bool {
        matches!(self.optimizer, Some((_, OptimizerSection::State { .. })))
    }

    /// Returns whether the leaf is in the parameter groups of an optimizer.
    pub fn in_groups(self) -> bool {
        matches!(self.optimizer, Some((_, OptimizerSection::Groups { .. })))
    }
}

/// The name of a leaf in the form with which patterns and renames are compared.
#[derive(Debug)]
pub(super) struct Named<'a> {
    pub steps: Vec<Step<'a>>,
    pub name: String,
    /// The length in bytes of the last part of the name: the parameter's name and the text after it, such as
    /// `w1.exp_avg` in `optim.state.w1.exp_avg`. 0 if the name does not contain the name of a parameter.
    pub tail: usize,
    /// The length in bytes of the parameter's name, with which the last `tail` bytes of the name begin. 0 if the name
    /// does not contain the name of a parameter.
    pub parameter: usize,
}

impl Named<'_> {
    /// Returns the name of the parameter, if the leaf belongs to a parameter.
    pub fn parameter(&self) -> Option<&str> {
        let start = self.name.len() - self.tail;
        (self.parameter > 0).then(|| &self.name[start..start + self.parameter])
    }
}

/// The leaves of a state dict, with their containers.
#[derive(Debug)]
pub(super) struct Survey<'a> {
    pub nodes: Vec<SurveyNode<'a>>,
    pub leaves: Vec<Leaf>,
    /// The dotted path of the model; empty if the model is at the top.
    pub model_root: String,
    /// The number of optimizers in the state dict.
    pub optimizers: u32,
    /// The total number of items of all lists.
    pub list_items: usize,
    /// The parameters of the model, as indices of `leaves`, by their names in the model. If wrapper components are
    /// removed from names, these names have no wrapper components.
    pub parameters: HashMap<String, u32>,
    wrappers: Wrappers,
    clean: bool,
    /// True if wrapper components are removed from names, and at least one name has a wrapper component.
    pub wrapped: bool,
    root_keys: Vec<Arc<str>>,
}

/// The current position of the traversal.
#[derive(Clone, Copy)]
struct WalkPosition {
    node: u32,
    depth: usize,
    /// True if the keys from the top level to this position are the first keys of the model's path.
    on_root: bool,
    in_model: bool,
    optimizer: Option<(u32, OptimizerSection)>,
}

impl<'a> Survey<'a> {
    /// Traverses the state dict of a catalog.
    pub fn new(catalog: &'a Catalog, wrappers: Wrappers) -> Self {
        let root = state_dict::model_root(&catalog.state);
        let mut survey = Self {
            nodes: vec![SurveyNode { parent: None, key: None, value: &catalog.state, flat: false }],
            leaves: Vec::with_capacity(catalog.tensors.len()),
            model_root: root.to_string(),
            optimizers: 0,
            list_items: 0,
            parameters: HashMap::new(),
            wrappers,
            clean: wrappers == Wrappers::Cut,
            wrapped: false,
            root_keys: root.0.iter().map(|key| key.to_string().into()).collect(),
        };
        let in_model = false;
        survey.walk(WalkPosition { node: 0, depth: 0, on_root: true, in_model, optimizer: None });
        survey.record_parameters();
        survey
    }

    fn walk(&mut self, mut at: WalkPosition) {
        let value = self.nodes[at.node as usize].value;
        if at.on_root && at.depth == self.root_keys.len() && at.depth > 0 {
            at.in_model = true;
        }
        let kind = match value {
            Value::Dict(dict) if !dict.entries.is_empty() => return self.walk_dict(dict, at),
            Value::List(items) if items.iter().any(is_descended) => {
                self.list_items += items.len();
                for (index, item) in items.iter().enumerate() {
                    let node = self.push(at.node, KeyRef::Item(index as u64), item);
                    self.walk(WalkPosition { node, depth: at.depth + 1, on_root: false, ..at });
                }
                return;
            }
            Value::Dict(_) => LeafKind::EmptyDict,
            Value::Tensor(_) => LeafKind::Tensor,
            _ => LeafKind::Object,
        };
        let Self { leaves, .. } = self;
        leaves.push(Leaf { node: at.node, kind, in_model: at.in_model, optimizer: at.optimizer });
    }

    fn walk_dict(&mut self, dict: &'a Dict, mut at: WalkPosition) {
        let within_root = !self.root_keys.is_empty() && at.in_model;
        if !within_root
            && !matches!(at.optimizer, Some((_, OptimizerSection::State { .. } | OptimizerSection::Groups { .. })))
        {
            let has = |name: &str| dict.entries.iter().any(|(key, _)| key.as_str() == Some(name));
            let state = dict.get("state").is_some_and(|state| matches!(state, Value::Dict(_)));
            if state && (at.optimizer.is_some() || has("param_groups")) {
                at.in_model = false;
                at.optimizer = Some((self.optimizers, OptimizerSection::Rest));
                self.optimizers += 1;
            }
        }
        let holds_leaves =
            dict.entries.iter().all(|(_, value)| !matches!(value, Value::Dict(_) | Value::List(_) | Value::Ints(_)));
        let at_top = at.depth == 0 || at.on_root && at.depth == self.root_keys.len();
        let dotted = dict.entries.iter().any(|(key, _)| key.as_str().is_some_and(|key| key.contains('.')));
        self.nodes[at.node as usize].flat = dotted || holds_leaves && at_top;
        for (key, value) in &dict.entries {
            let node = self.push(at.node, KeyRef::Entry(key), value);
            let name = KeyRef::Entry(key).text();
            self.wrapped |= self.clean && has_wrapper(&name);
            let below = WalkPosition {
                node,
                depth: at.depth + 1,
                on_root: at.on_root && self.root_keys.get(at.depth).is_some_and(|key| **key == *name),
                in_model: at.in_model || self.begins_model(at, &name, value),
                optimizer: self.optimizer_below(at, &name, value),
            };
            self.walk(below);
        }
    }

    /// Returns whether a top-level key belongs to the model, if the tensors of the model are at the top level.
    fn begins_model(&self, at: WalkPosition, name: &str, value: &Value) -> bool {
        at.depth == 0
            && self.root_keys.is_empty()
            && at.optimizer.is_none()
            && !state_dict::is_beside_model(name, value)
    }

    fn optimizer_below(&mut self, at: WalkPosition, name: &str, value: &Value) -> Option<(u32, OptimizerSection)> {
        let container = matches!(value, Value::Dict(_) | Value::List(_) | Value::Ints(_));
        let Some((number, part)) = at.optimizer else {
            let begins = container && !at.in_model && optimizer::is_optimizer_key(name);
            return begins.then(|| {
                self.optimizers += 1;
                (self.optimizers - 1, OptimizerSection::Rest)
            });
        };
        let part = match part {
            OptimizerSection::Rest if name == "state" && container => {
                OptimizerSection::State { head: at.depth + 1, flat: false }
            }
            OptimizerSection::Rest if name == "param_groups" && container => {
                OptimizerSection::Groups { head: at.depth + 1, flat: false }
            }
            OptimizerSection::Rest if name.starts_with("state.") => {
                OptimizerSection::State { head: at.depth, flat: true }
            }
            OptimizerSection::Rest if name.starts_with("param_groups.") => {
                OptimizerSection::Groups { head: at.depth, flat: true }
            }
            part => part,
        };
        Some((number, part))
    }

    fn push(&mut self, parent: u32, key: KeyRef<'a>, value: &'a Value) -> u32 {
        let id = u32::try_from(self.nodes.len()).expect("fewer than 2^32 values");
        self.nodes.push(SurveyNode { parent: Some(parent), key: Some(key), value, flat: false });
        id
    }

    fn record_parameters(&mut self) {
        if self.optimizers == 0 {
            return;
        }
        for index in 0..self.leaves.len() {
            let leaf = self.leaves[index];
            if leaf.is_parameter() {
                let name = self.named(leaf).name;
                let relative = self.in_model(&name).unwrap_or(&name).to_owned();
                let index = u32::try_from(index).expect("fewer leaves than nodes");
                self.parameters.entry(relative).or_insert(index);
            }
        }
    }

    /// Returns the name relative to the model. Returns `None` if the model is at the top level or does not contain the
    /// name.
    pub fn in_model<'n>(&self, name: &'n str) -> Option<&'n str> {
        let below = name.strip_prefix(self.model_root.as_str())?.strip_prefix('.')?;
        (!self.model_root.is_empty()).then_some(below)
    }

    /// Returns the keys from the top level to a node, each with the node of its container.
    fn keys(&self, node: u32) -> Vec<(KeyRef<'a>, u32)> {
        let mut keys = Vec::new();
        let mut at = &self.nodes[node as usize];
        while let (Some(parent), Some(key)) = (at.parent, at.key) {
            keys.push((key, parent));
            at = &self.nodes[parent as usize];
        }
        keys.reverse();
        keys
    }

    /// Returns the name of a leaf as in the file, including wrapper components.
    pub fn raw_name(&self, leaf: Leaf) -> String {
        let texts: Vec<Cow<'_, str>> = self.keys(leaf.node).into_iter().map(|(key, _)| key.text()).collect();
        texts.join(".")
    }

    /// Returns the top-level key of a leaf. If the leaf itself is at the top level, returns the first component of its
    /// name.
    pub fn top_key(&self, leaf: Leaf) -> String {
        let keys = self.keys(leaf.node);
        let first = keys.first().map(|(key, _)| key.text()).unwrap_or_default();
        let whole = keys.len() > 1 || !first.contains('.');
        if whole { first.into_owned() } else { first.split('.').next().unwrap_or_default().to_owned() }
    }

    /// Returns the last key of a leaf.
    pub fn last_key(&self, leaf: Leaf) -> Option<Cow<'a, str>> {
        self.nodes[leaf.node as usize].key.map(KeyRef::text)
    }

    /// Returns the value of a leaf.
    pub fn value(&self, leaf: Leaf) -> &'a Value {
        self.nodes[leaf.node as usize].value
    }

    /// Calls `visit` for the tensors in a leaf, with their names as in the file.
    pub fn tensors(&self, leaf: Leaf, visit: &mut dyn FnMut(String, TensorId)) {
        self.tensors_under(leaf, &self.raw_name(leaf), &mut |name, id| visit(name.to_owned(), id));
    }

    /// Calls `visit` for the tensors in a leaf, with their names. If wrapper components are removed from names, these
    /// names have no wrapper components.
    pub fn clean_tensors(&self, leaf: Leaf, visit: &mut dyn FnMut(&str, TensorId)) {
        self.tensors_under(leaf, &self.named(leaf).name, visit);
    }

    fn tensors_under(&self, leaf: Leaf, name: &str, visit: &mut dyn FnMut(&str, TensorId)) {
        match self.value(leaf) {
            Value::Tensor(id) => visit(name, *id),
            value => path::tensors(value, &Path::default(), &mut |path, id| {
                if path.0.is_empty() {
                    visit(name, id);
                } else {
                    visit(&format!("{name}.{path}"), id);
                }
            }),
        }
    }

    /// Returns the ids of the tensors in a leaf.
    pub fn tensor_ids(&self, leaf: Leaf) -> Vec<TensorId> {
        let mut ids = Vec::new();
        path::tensors(self.value(leaf), &Path::default(), &mut |_, id| ids.push(id));
        ids
    }

    /// Returns the name of a container (dict or list). If wrapper components are removed from names, this name has no
    /// wrapper components.
    pub fn container_name(&self, node: u32) -> String {
        let texts: Vec<Cow<'_, str>> = self.keys(node).into_iter().map(|(key, _)| key.text()).collect();
        self.clean(&texts.join("."))
    }

    /// Returns the names of a leaf that patterns are compared with: the given `names`, and, for [`Wrappers::Match`],
    /// also these names without wrapper components.
    pub fn for_patterns(&self, mut names: Vec<String>) -> Vec<String> {
        if self.wrappers == Wrappers::Match {
            with_clean(&mut names);
        }
        names
    }

    /// Returns the name of a module. If wrapper components are removed from names, the result has no wrapper
    /// components.
    pub fn clean(&self, module: &str) -> String {
        if self.clean { clean_name(module) } else { module.to_owned() }
    }

    /// Returns the prefix of state names in the optimizer that contains the leaf: `optim.state.`. Returns an empty
    /// string if the leaf is not in the state or parameter groups of an optimizer, or if the optimizer is flattened.
    pub fn state_head(&self, leaf: Leaf) -> String {
        let Some((_, OptimizerSection::Groups { head, flat: false } | OptimizerSection::State { head, flat: false })) =
            leaf.optimizer
        else {
            return String::new();
        };
        let texts: Vec<_> = self.keys(leaf.node)[..head - 1].iter().map(|(key, _)| key.text()).collect();
        let above: String = texts.iter().flat_map(|text| [text.as_ref(), "."]).collect();
        self.clean(&above) + "state."
    }

    /// Returns the name of a leaf. If the leaf is in optimizer state or in flattened parameter groups, also returns the
    /// position of the parameter's name in this name.
    pub fn named(&self, leaf: Leaf) -> Named<'a> {
        let keys = self.keys(leaf.node);
        let head = match leaf.optimizer {
            Some((_, OptimizerSection::State { head, flat })) => Some((head, if flat { "state.".len() } else { 0 })),
            Some((_, OptimizerSection::Groups { head, flat: true })) => Some((head, "param_groups.".len())),
            _ => None,
        };
        let mut path = Vec::with_capacity(keys.len());
        let mut after_head = 0;
        for (index, (key, container)) in keys.iter().enumerate() {
            if head.is_some_and(|(head, _)| head == index) {
                after_head = path.len();
            }
            let text = key.text();
            let is_last = index + 1 == keys.len();
            let step = Step { text, key: Some(*key), container: Some(*container) };
            path.extend(if self.clean { step.clean(is_last) } else { Some(step) });
        }
        let name = split_name::join(&path);
        let mut named = Named { steps: path, name, tail: 0, parameter: 0 };
        if let Some((_, prefix)) = head.filter(|(head, _)| *head < keys.len()) {
            let below = &named.steps[after_head..];
            named.tail = split_name::join(below).len().saturating_sub(prefix);
            let keys = if prefix > 0 { None } else { below.first().zip(below.last()) };
            named.parameter = self.parameter_len(&named.name[named.name.len() - named.tail..], keys);
        }
        named
    }

    /// Returns the length in bytes of the parameter's name at the start of `text`, such as `FQN.exp_avg`. `keys` are
    /// the first and the last key of `text`; `None` if the optimizer is flattened. The first rule that applies gives
    /// the name: a first key that is an int (a parameter id); the longest beginning of `text` that is a parameter of
    /// the model; a first key that consists of digits; everything except the last key. Without `keys`, only the second
    /// rule can apply, and otherwise everything except the last component is the name.
    fn parameter_len(&self, text: &str, keys: Option<(&Step<'_>, &Step<'_>)>) -> usize {
        if let Some((first, _)) = keys.filter(|(first, _)| matches!(first.key, Some(KeyRef::Entry(Value::Int(_))))) {
            return first.text.len();
        }
        let mut dots = text.rmatch_indices('.').map(|(at, _)| at);
        let known = dots.find(|at| self.parameters.contains_key(&text[..*at]));
        let unknown = || match keys {
            Some((first, _)) if is_number(&first.text) => first.text.len(),
            Some((_, last)) => text.len().saturating_sub(last.text.len() + 1),
            None => text.rfind('.').unwrap_or(0),
        };
        known.unwrap_or_else(unknown)
    }
}

/// Returns whether the name of a parameter in an optimizer is a parameter id, which is a number, as in
/// `Optimizer.state_dict()`.
pub(super) fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}
