//! From the name of a leaf in the source to its name in the result: root, strip, renames, prefix, nest.
//!
//! Optimizer state is named after its parameter, so the parameter's part of such a name is opaque: a rename sees a
//! placeholder there, and what comes out gets the name that the parameter itself got. Without this, `^model\.=` would
//! rename a parameter and leave its state behind.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashMap;

use super::steps::{self, Step, rekey};
use super::survey::{Leaf, Named, Survey, is_number};
use super::{NameOptions, Root};
use crate::error::{Error, Result};
use crate::nearest::nearest;

/// Stands for a parameter while renames are applied; from Unicode's private use area.
const OPAQUE: char = '\u{E0F0}';

/// Bytes of a name that a rename made: each can double it, so that a few dozen would fill any memory.
const MAX_RENAMED: usize = 1 << 16;

/// Values are at most this deep (see [`crate::catalog::value`]).
const MAX_KEYS: usize = 256;

pub(super) struct Naming<'a, 'o> {
    survey: &'a Survey<'a>,
    options: &'o NameOptions,
    /// The root with its dot; empty where it is the top.
    root: String,
    strips_used: Vec<Cell<bool>>,
    renames_used: Vec<Cell<bool>>,
    /// The first rename that made a name too long; nothing is renamed after that.
    overlong: Cell<Option<usize>>,
    /// New names of the parameters, relative to the new place of the model, by their old ones.
    parameters: HashMap<String, String>,
}

impl<'a, 'o> Naming<'a, 'o> {
    /// # Errors
    /// `Usage` for a root without tensors.
    pub fn new(survey: &'a Survey<'a>, options: &'o NameOptions) -> Result<Self> {
        let root = match &options.root {
            Root::Whole => String::new(),
            Root::Model if survey.model_root.is_empty() => String::new(),
            Root::Model => format!("{}.", survey.model_root),
            Root::At(path) => format!("{}.", path.trim_end_matches('.')),
        };
        let unused = |len: usize| (0..len).map(|_| Cell::new(false)).collect();
        let naming = Self {
            survey,
            options,
            root,
            strips_used: unused(options.strip_prefixes.len()),
            renames_used: unused(options.renames.len()),
            overlong: Cell::new(None),
            parameters: HashMap::new(),
        };
        if let Root::At(path) = &options.root {
            naming.check_root(path)?;
        }
        Ok(naming)
    }

    fn check_root(&self, path: &str) -> Result<()> {
        const SHOWN: usize = 12;
        let holds_tensor = |leaf: &&Leaf| self.survey.value(**leaf).contains_tensor();
        let mut tensors = self.survey.leaves.iter().filter(holds_tensor);
        if tensors.any(|leaf| self.survey.named(*leaf).name.starts_with(&self.root)) {
            return Ok(());
        }
        let mut tops: Vec<String> = Vec::new();
        for leaf in &self.survey.leaves {
            let top = self.survey.top(*leaf);
            if tops.len() <= SHOWN && !tops.contains(&top) {
                tops.push(top);
            }
        }
        if tops.len() > SHOWN {
            tops[SHOWN] = String::from("...");
        }
        let near = self.nearest_heads(path);
        let near = if near.is_empty() { near } else { format!("; the nearest paths are {near}") };
        Err(Error::usage(
            format!("options::root {path}: there are no tensors under that path"),
            format!("the top of the state dict has {}{near}", tops.join(", ")),
        ))
    }

    /// Paths of as many parts as `text` that are nearest to it.
    fn nearest_heads(&self, text: &str) -> String {
        let parts = text.trim_end_matches('.').split('.').count();
        let mut heads: Vec<String> = Vec::new();
        for leaf in &self.survey.leaves {
            let name = self.survey.named(*leaf).name;
            let relative = name.strip_prefix(&self.root).unwrap_or(&name);
            let end = relative.match_indices('.').nth(parts - 1).map_or(relative.len(), |(at, _)| at);
            // Neighbours have equal heads, so this keeps few.
            if heads.last().is_none_or(|last| *last != relative[..end]) {
                heads.push(relative[..end].to_owned());
            }
        }
        heads.sort_unstable();
        heads.dedup();
        nearest(text.trim_end_matches('.'), &heads).join(", ")
    }

    /// Learn what parameters will be called, which their optimizer state follows.
    pub fn learn_parameters(&mut self, kept: &[bool]) {
        let root = &self.survey.model_root;
        let place = self.place(&if root.is_empty() { String::new() } else { format!("{root}.") }).unwrap_or_default();
        let learnt = self.survey.parameters.iter().filter(|(_, index)| kept[**index as usize]);
        let learnt = learnt.filter_map(|(name, index)| {
            let leaf = self.survey.leaves[*index as usize];
            // One without a name is an error when its turn comes.
            let steps = self.steps(leaf).ok().flatten().filter(|_| self.is_under_root(leaf))?;
            let new = steps::join(&steps);
            Some((name.clone(), new.strip_prefix(&place).map(str::to_owned).unwrap_or(new)))
        });
        self.parameters = learnt.collect();
    }

    fn is_under_root(&self, leaf: Leaf) -> bool {
        !matches!(self.options.root, Root::Model) || leaf.in_model
    }

    /// The keys of a leaf in the result; `None` where it is not under the root.
    ///
    /// # Errors
    /// `Usage` where nothing is left of its name, or too much is made of it.
    pub fn path(&self, leaf: Leaf) -> Result<Option<Vec<Step<'a>>>> {
        if !self.is_under_root(leaf) {
            return Ok(None);
        }
        let Some(mut steps) = self.steps(leaf)? else { return Ok(None) };
        if let Some(prefix) = &self.options.add_prefix {
            match steps.first_mut() {
                Some(first) => (first.text, first.key) = (Cow::Owned(format!("{prefix}{}", first.text)), None),
                None => steps.push(Step::new(prefix.clone(), None)),
            }
        }
        if let Some(path) = &self.options.nest {
            steps.splice(0..0, path.split('.').map(|part| Step::new(part.to_owned(), None)));
        }
        if steps.len() > MAX_KEYS && steps.len() > self.survey.named(leaf).steps.len() {
            return Err(Error::usage(
                format!("{}: its new name has {} parts, more than {MAX_KEYS}", self.survey.raw_name(leaf), steps.len()),
                "state dicts that are nested deeper cannot be loaded",
            ));
        }
        Ok(Some(steps))
    }

    fn steps(&self, leaf: Leaf) -> Result<Option<Vec<Step<'a>>>> {
        let mut named = self.survey.named(leaf);
        if !named.name.starts_with(&self.root) {
            return Ok(None);
        }
        if !self.root.is_empty() {
            steps::cut_front(&mut named.steps, self.root.len());
            named.name.drain(..self.root.len());
            if named.tail > named.name.len() {
                // The root is within the parameter's name.
                (named.tail, named.parameter) = (0, 0);
            }
        }
        if named.name.is_empty() {
            return Ok(Some(named.steps));
        }
        let steps = match self.following(&named) {
            Some(steps) => steps,
            None => self.rename(named.steps),
        };
        self.check_lengths()?;
        if steps.is_empty() || steps.iter().all(|step| step.text.is_empty()) {
            return Err(Error::usage(
                format!("{}: nothing is left of its name", self.survey.raw_name(leaf)),
                "strip or rename less of it, or leave it out with options::exclude",
            ));
        }
        Ok(Some(steps))
    }

    /// The new keys of what is named after a parameter; `None` where that is not known, or is lost on the way.
    fn following(&self, named: &Named<'a>) -> Option<Vec<Step<'a>>> {
        let old = named.parameter()?;
        let new = match self.parameters.get(old) {
            Some(new) => new.as_str(),
            None if is_number(old) => old,
            None => return None,
        };
        if new == old && self.options.strip_prefixes.is_empty() && self.options.renames.is_empty() {
            return Some(named.steps.clone());
        }
        if named.name.contains(OPAQUE) {
            return None;
        }
        let start = named.name.len() - named.tail;
        let (masked, inner) = mask(&named.steps, start, start + named.parameter)?;
        let renamed = self.rename(masked);
        if renamed.iter().map(|step| step.text.matches(OPAQUE).count()).sum::<usize>() != 1 {
            return None;
        }
        let mut steps = Vec::with_capacity(renamed.len());
        for mut step in renamed {
            if !step.text.contains(OPAQUE) {
                steps.push(step);
            } else if step.text.chars().eq([OPAQUE]) && !inner.is_empty() {
                steps.extend(match inner.as_slice() {
                    _ if new == old => inner.clone(),
                    [one] => vec![Step::new(new.to_owned(), one.container)],
                    several => rekey(several, new, &|node| self.is_flat(node)),
                });
            } else {
                step.text = Cow::Owned(step.text.replace(OPAQUE, new));
                let unchanged = named.steps.iter().find(|old| old.text == step.text && old.container == step.container);
                step.key = unchanged.and_then(|old| old.key);
                steps.push(step);
            }
        }
        Some(steps)
    }

    fn is_flat(&self, node: u32) -> bool {
        self.survey.nodes[node as usize].flat
    }

    fn rename(&self, mut steps: Vec<Step<'a>>) -> Vec<Step<'a>> {
        if self.options.strip_prefixes.is_empty() && self.options.renames.is_empty() {
            return steps;
        }
        let mut name = steps::join(&steps);
        for (prefix, used) in self.options.strip_prefixes.iter().zip(&self.strips_used) {
            let cut = strip_len(&name, prefix);
            if cut > 0 {
                used.set(true);
                steps::cut_front(&mut steps, cut);
                name.drain(..cut);
            }
        }
        // Keys are found anew after each rename: several at once have less in common with the old name.
        for (index, used) in self.renames_used.iter().enumerate() {
            if let Some(renamed) = self.apply(index, &name) {
                used.set(true);
                if renamed != name {
                    steps = rekey(&steps, &renamed, &|node| self.is_flat(node));
                    name = renamed;
                }
            }
        }
        steps
    }

    /// The name that a rename makes of this one, where it has a match.
    fn apply(&self, index: usize, name: &str) -> Option<String> {
        if self.overlong.get().is_some() {
            return None;
        }
        let renamed = self.options.renames[index].apply(name)?;
        if renamed.len() > MAX_RENAMED && renamed.len() > name.len() {
            self.overlong.set(Some(index));
        }
        Some(renamed)
    }

    /// # Errors
    /// `Usage` for a rename that made a name too long.
    fn check_lengths(&self) -> Result<()> {
        let Some(index) = self.overlong.get() else { return Ok(()) };
        Err(Error::usage(
            format!(
                "options::rename {}: it makes a name of more than {MAX_RENAMED} bytes",
                self.options.renames[index].as_str()
            ),
            "every match is replaced, by every options::rename in turn: leave out what repeats the name",
        ))
    }

    /// Where `model.layers.` goes, without prefix and nest: a module has no leaf whose name would tell.
    fn place(&self, module: &str) -> Option<String> {
        let mut text = module.strip_prefix(&self.root)?.to_owned();
        for prefix in &self.options.strip_prefixes {
            text.drain(..strip_len(&text, prefix));
        }
        for index in (0..self.options.renames.len()).filter(|_| !module.is_empty()) {
            text = self.apply(index, &text).unwrap_or(text);
        }
        Some(text)
    }

    /// The new name of a module, both with a dot at the end where there is anything before it.
    pub fn module(&self, module: &str) -> Option<String> {
        let place = self.place(module)?;
        let nest = self.options.nest.as_deref().map(|path| format!("{path}.")).unwrap_or_default();
        let prefix = self.options.add_prefix.as_deref().unwrap_or_default();
        Some(format!("{nest}{prefix}{place}"))
    }

    /// What a list of parameters calls this one, where `head` is the name of the state of that optimizer.
    pub fn parameter<'n>(&'n self, old: &'n str, head: &str) -> Cow<'n, str> {
        if let Some(new) = self.parameters.get(old) {
            return Cow::Borrowed(new);
        }
        if is_number(old) {
            return Cow::Borrowed(old);
        }
        let places = self.place(head).zip(self.place(&format!("{head}{old}.")));
        let new = places.and_then(|(head, whole)| Some(whole.strip_prefix(&head)?.strip_suffix('.')?.to_owned()));
        new.filter(|new| !new.is_empty()).map_or(Cow::Borrowed(old), Cow::Owned)
    }

    /// # Errors
    /// `Usage` for a prefix that no name has, and for a rename without a match.
    pub fn check_used(&self) -> Result<()> {
        let unused = |used: &[Cell<bool>]| used.iter().position(|used| !used.get());
        if let Some(index) = unused(&self.strips_used) {
            let prefix = &self.options.strip_prefixes[index];
            return Err(Error::usage(
                format!("options::strip_prefix {prefix}: no name begins with that"),
                format!("the nearest beginnings are {}", self.nearest_heads(prefix)),
            ));
        }
        if let Some(index) = unused(&self.renames_used) {
            let rename = &self.options.renames[index];
            let names: Vec<String> = self.survey.leaves.iter().map(|leaf| self.survey.named(*leaf).name).collect();
            return Err(Error::usage(
                format!("options::rename {}: no name has a match", rename.as_str()),
                format!("the nearest names are {}", nearest(&rename.likeness(), &names).join(", ")),
            ));
        }
        Ok(())
    }
}

/// How much of the name goes. A prefix given without its dot, `model` of `model.w`, takes the dot along.
fn strip_len(name: &str, prefix: &str) -> usize {
    match name.strip_prefix(prefix) {
        Some(rest) if rest.starts_with('.') && !prefix.is_empty() => prefix.len() + 1,
        Some(_) => prefix.len(),
        None => 0,
    }
}

/// Put the placeholder in place of bytes `start..end` of the name, and give the keys that were there whole. `None`
/// where the bytes begin or end within different keys.
fn mask<'a>(steps: &[Step<'a>], start: usize, end: usize) -> Option<(Vec<Step<'a>>, Vec<Step<'a>>)> {
    let mut masked = Vec::with_capacity(steps.len());
    let mut inner: Vec<Step<'a>> = Vec::new();
    let mut at = 0;
    for step in steps {
        let (from, to) = (at, at + step.text.len());
        at = to + 1;
        if to <= start && to < end || from >= end {
            masked.push(step.clone());
        } else if from >= start && to <= end {
            if inner.is_empty() {
                masked.push(Step::new(OPAQUE.to_string(), step.container));
            }
            inner.push(step.clone());
        } else if from <= start && end <= to {
            let mut text = step.text.to_string();
            text.replace_range(start - from..end - from, OPAQUE.encode_utf8(&mut [0; 4]));
            masked.push(Step::new(text, step.container));
        } else {
            return None;
        }
    }
    Some((masked, inner))
}
