//! One walk over the source's state dict: its leaves, and what each of them is part of.
//!
//! Leaves are those of [`crate::catalog::path`], and dicts that are empty, which have no name anybody asks for but
//! are put back where they were. Nodes refer to their parents, so that a million leaves share their containers.
//!
//! An optimizer is a dict with `state` and `param_groups`, or the value of a
//! [key of optimizers](optimizer::is_optimizer_key). A model contains no optimizer. Its state is keyed by parameter: `{"state": {FQN: {"exp_avg": ..}}}` or, flattened as
//! `torch.distributed.checkpoint.state_dict` does on request, `{"state.FQN.exp_avg": ..}`.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use super::Wrappers;
use super::steps::{self, KeyRef, Step};
use crate::catalog::path::{self, is_descended};
use crate::catalog::wrappers::{clean_name, has_wrapper, with_clean};
use crate::catalog::{Catalog, Dict, Path, TensorId, Value, model, optimizer};

#[derive(Debug)]
pub(super) struct SurveyNode<'a> {
    parent: Option<u32>,
    key: Option<KeyRef<'a>>,
    pub value: &'a Value,
    /// A dict whose keys are names with dots, or that holds nothing but leaves at the top of a model: what is put
    /// before one of its keys becomes part of the key.
    pub flat: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeafKind {
    Tensor,
    Object,
    EmptyDict,
}

/// Which part of an optimizer a leaf is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OptimizerSection {
    /// After `head` keys, and the beginning of the next one where it is flattened, follows the parameter.
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

#[derive(Clone, Copy, Debug)]
pub(super) struct Leaf {
    pub node: u32,
    pub kind: LeafKind,
    pub in_model: bool,
    /// Which optimizer, by number, and where in it.
    pub optimizer: Option<(u32, OptimizerSection)>,
}

impl Leaf {
    pub fn is_parameter(self) -> bool {
        self.in_model && self.kind == LeafKind::Tensor
    }

    pub fn in_state(self) -> bool {
        matches!(self.optimizer, Some((_, OptimizerSection::State { .. })))
    }

    pub fn in_groups(self) -> bool {
        matches!(self.optimizer, Some((_, OptimizerSection::Groups { .. })))
    }
}

/// The name of a leaf as its patterns and renames see it.
#[derive(Debug)]
pub(super) struct Named<'a> {
    pub steps: Vec<Step<'a>>,
    pub name: String,
    /// How many bytes at the end of the name are the parameter and what of it, where a parameter's name is there.
    pub tail: usize,
    /// How many bytes of them are the parameter.
    pub parameter: usize,
}

impl Named<'_> {
    pub fn parameter(&self) -> Option<&str> {
        let start = self.name.len() - self.tail;
        (self.parameter > 0).then(|| &self.name[start..start + self.parameter])
    }
}

#[derive(Debug)]
pub(super) struct Survey<'a> {
    pub nodes: Vec<SurveyNode<'a>>,
    pub leaves: Vec<Leaf>,
    /// Dotted; empty where the model is at the top.
    pub model_root: String,
    pub optimizers: u32,
    /// Items of all lists.
    pub list_items: usize,
    /// Parameters of the model by their names in it (clean, where names are cleaned), as indexes of `leaves`.
    pub parameters: HashMap<String, u32>,
    wrappers: Wrappers,
    clean: bool,
    /// Names are cleaned, and there is something to clean.
    pub wrapped: bool,
    root_keys: Vec<Arc<str>>,
}

/// Where the walk is.
#[derive(Clone, Copy)]
struct WalkPosition {
    node: u32,
    depth: usize,
    /// All keys so far are the first ones of the model's root.
    on_root: bool,
    in_model: bool,
    optimizer: Option<(u32, OptimizerSection)>,
}

impl<'a> Survey<'a> {
    pub fn new(catalog: &'a Catalog, wrappers: Wrappers) -> Self {
        let root = model::model_root(&catalog.state);
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
        survey.learn_parameters();
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

    /// A model at the top is everything there that is not known to stand beside one.
    fn begins_model(&self, at: WalkPosition, name: &str, value: &Value) -> bool {
        at.depth == 0 && self.root_keys.is_empty() && at.optimizer.is_none() && !model::is_beside(name, value)
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

    fn learn_parameters(&mut self) {
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

    /// A name relative to the model, where the model is not at the top and this is a name in it.
    pub fn in_model<'n>(&self, name: &'n str) -> Option<&'n str> {
        let below = name.strip_prefix(self.model_root.as_str())?.strip_prefix('.')?;
        (!self.model_root.is_empty()).then_some(below)
    }

    /// The keys from the top to a node.
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

    /// The name in the file, wrappers and all.
    pub fn raw_name(&self, leaf: Leaf) -> String {
        let texts: Vec<Cow<'_, str>> = self.keys(leaf.node).into_iter().map(|(key, _)| key.text()).collect();
        texts.join(".")
    }

    /// The key at the top under which a leaf stands; of a leaf at the top itself, the first part of its name.
    pub fn top(&self, leaf: Leaf) -> String {
        let keys = self.keys(leaf.node);
        let first = keys.first().map(|(key, _)| key.text()).unwrap_or_default();
        let whole = keys.len() > 1 || !first.contains('.');
        if whole { first.into_owned() } else { first.split('.').next().unwrap_or_default().to_owned() }
    }

    /// The last key of a leaf.
    pub fn last_key(&self, leaf: Leaf) -> Option<Cow<'a, str>> {
        self.nodes[leaf.node as usize].key.map(KeyRef::text)
    }

    pub fn value(&self, leaf: Leaf) -> &'a Value {
        self.nodes[leaf.node as usize].value
    }

    /// The tensors in a leaf with their names in the file.
    pub fn tensors(&self, leaf: Leaf, visit: &mut dyn FnMut(String, TensorId)) {
        self.tensors_under(leaf, &self.raw_name(leaf), &mut |name, id| visit(name.to_owned(), id));
    }

    /// The tensors in a leaf with their clean names.
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

    pub fn tensor_ids(&self, leaf: Leaf) -> Vec<TensorId> {
        let mut ids = Vec::new();
        path::tensors(self.value(leaf), &Path::default(), &mut |_, id| ids.push(id));
        ids
    }

    /// The clean name of a node.
    pub fn container_name(&self, node: u32) -> String {
        let texts: Vec<Cow<'_, str>> = self.keys(node).into_iter().map(|(key, _)| key.text()).collect();
        self.clean(&texts.join("."))
    }

    /// The names that patterns are tried on.
    pub fn for_patterns(&self, mut names: Vec<String>) -> Vec<String> {
        if self.wrappers == Wrappers::Match {
            with_clean(&mut names);
        }
        names
    }

    /// The name of a module, without wrappers where they are cleaned.
    pub fn clean(&self, module: &str) -> String {
        if self.clean { clean_name(module) } else { module.to_owned() }
    }

    /// `optim.state.` for what is in that optimizer.
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
        let name = steps::join(&path);
        let mut named = Named { steps: path, name, tail: 0, parameter: 0 };
        if let Some((_, prefix)) = head.filter(|(head, _)| *head < keys.len()) {
            let below = &named.steps[after_head..];
            named.tail = steps::join(below).len().saturating_sub(prefix);
            let keys = if prefix > 0 { None } else { below.first().zip(below.last()) };
            named.parameter = self.parameter_len(&named.name[named.name.len() - named.tail..], keys);
        }
        named
    }

    /// How much of `FQN.exp_avg` is the parameter: a key that is a number; else as much as the model has; else all but
    /// the last part, which is the last key where there are keys.
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

/// Optimizers number parameters that they know no name of.
pub(super) fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}
