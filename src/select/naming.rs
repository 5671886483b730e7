//! Computes the name of a leaf in the result: removes the root, strips prefixes, renames, adds the prefix, and nests.
//!
//! Optimizer state is named after its parameter. So before renames are applied to the name of optimizer state, a
//! placeholder replaces the parameter's name; afterwards, the new name of the parameter replaces the placeholder.
//! Without the placeholder, the rename `^model\.=` would rename a parameter but not its optimizer state. Invariant: a
//! prefix or rename without effect is an error.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashMap;

use super::split_name::{self, Step, rekey};
use super::survey::{Leaf, Named, Survey, is_number};
use super::{NameOptions, Root};
use crate::error::{Error, Result};
use crate::nearest::nearest;

/// The character that stands for a parameter's name while renames are applied. The character is from Unicode's private
/// use area.
const OPAQUE: char = '\u{E0F0}';

/// The maximum length of a renamed name in bytes. Each rename can double a name, so a few dozen renames could fill the
/// memory.
const MAX_RENAMED: usize = 1 << 16;

/// The maximum number of keys in the path from the top level to a value (see [`crate::catalog::value`]).
const MAX_KEYS: usize = 256;

/// The mapping of names in the source to names in the result.
pub(super) struct Naming<'a, 'o> {
    survey: &'a Survey<'a>,
    options: &'o NameOptions,
    /// The path of the root with a final dot; empty if the root is the top level.
    root: String,
    prefixes_used: Vec<Cell<bool>>,
    renames_used: Vec<Cell<bool>>,
    /// The index of the first rename that made a name too long. `None` if no name became too long. After the first name
    /// that is too long, renames are not applied any more.
    overlong: Cell<Option<usize>>,
    /// The new names of the parameters by their old names. An old name is relative to the model's path in the source,
    /// and a new name to the model's path in the result.
    parameters: HashMap<String, String>,
}

impl<'a, 'o> Naming<'a, 'o> {
    /// Prepares the mapping.
    ///
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
            prefixes_used: unused(options.strip_prefixes.len()),
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
            let top = self.survey.top_key(*leaf);
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
            format!("options::root {path}: the state dict has no tensors at this path"),
            format!("the top of the state dict has the keys {}{near}", tops.join(", ")),
        ))
    }

    /// Returns the beginnings of names that are most similar to `text`, joined with commas, for hints. Each beginning
    /// has as many components as `text`.
    fn nearest_heads(&self, text: &str) -> String {
        let parts = text.trim_end_matches('.').split('.').count();
        let mut heads: Vec<String> = Vec::new();
        for leaf in &self.survey.leaves {
            let name = self.survey.named(*leaf).name;
            let relative = name.strip_prefix(&self.root).unwrap_or(&name);
            let end = relative.match_indices('.').nth(parts - 1).map_or(relative.len(), |(at, _)| at);
            // Neighbouring leaves often begin with the same components, so this list stays short.
            if heads.last().is_none_or(|last| *last != relative[..end]) {
                heads.push(relative[..end].to_owned());
            }
        }
        heads.sort_unstable();
        heads.dedup();
        nearest(text.trim_end_matches('.'), &heads).join(", ")
    }

    /// Records the new names of parameters, because the new names of optimizer state contain these names.
    pub fn record_parameters(&mut self, kept: &[bool]) {
        let root = &self.survey.model_root;
        let place =
            self.new_prefix(&if root.is_empty() { String::new() } else { format!("{root}.") }).unwrap_or_default();
        let learnt = self.survey.parameters.iter().filter(|(_, index)| kept[**index as usize]);
        let learnt = learnt.filter_map(|(name, index)| {
            let leaf = self.survey.leaves[*index as usize];
            // The empty name of a leaf is reported as an error later.
            let steps = self.steps(leaf).ok().flatten().filter(|_| self.is_under_root(leaf))?;
            let new = split_name::join(&steps);
            Some((name.clone(), new.strip_prefix(&place).map(str::to_owned).unwrap_or(new)))
        });
        self.parameters = learnt.collect();
    }

    fn is_under_root(&self, leaf: Leaf) -> bool {
        !matches!(self.options.root, Root::Model) || leaf.in_model
    }

    /// Returns the keys of a leaf in the result, or `None` if the leaf is outside the root.
    ///
    /// # Errors
    /// `Usage` if the new name is empty or too long.
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
                format!(
                    "{}: expected a new name of at most {MAX_KEYS} parts, found {}",
                    self.survey.raw_name(leaf),
                    steps.len()
                ),
                "change options::rename or options::nest; a state dict that is nested deeper cannot be loaded",
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
            split_name::cut_front(&mut named.steps, self.root.len());
            named.name.drain(..self.root.len());
            if named.tail > named.name.len() {
                // The root ends inside the parameter's name, so the remaining name is treated as a name without a
                // parameter.
                (named.tail, named.parameter) = (0, 0);
            }
        }
        if named.name.is_empty() {
            return Ok(Some(named.steps));
        }
        let steps = match self.named_after_parameter(&named) {
            Some(steps) => steps,
            None => self.rename(named.steps),
        };
        self.check_lengths()?;
        if steps.is_empty() || steps.iter().all(|step| step.text.is_empty()) {
            return Err(Error::usage(
                format!("{}: its new name is empty", self.survey.raw_name(leaf)),
                "change options::strip_prefix or options::rename, or leave this name out with options::exclude",
            ));
        }
        Ok(Some(steps))
    }

    /// Returns the new keys of a leaf whose name contains the name of a parameter. Returns `None` if the parameter is
    /// unknown, or if a rename removes the placeholder.
    fn named_after_parameter(&self, named: &Named<'a>) -> Option<Vec<Step<'a>>> {
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
        let mut name = split_name::join(&steps);
        for (prefix, used) in self.options.strip_prefixes.iter().zip(&self.prefixes_used) {
            let cut = prefix_len(&name, prefix);
            if cut > 0 {
                used.set(true);
                split_name::cut_front(&mut steps, cut);
                name.drain(..cut);
            }
        }
        // Keys are computed after each rename. After several renames, fewer old keys could be recognised in the name.
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

    /// Returns the name after the rename with this index, or `None` if the rename does not match.
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

    /// Checks that no rename has produced a name that is too long.
    ///
    /// # Errors
    /// `Usage` with the rename that produced the name.
    fn check_lengths(&self) -> Result<()> {
        let Some(index) = self.overlong.get() else { return Ok(()) };
        Err(Error::usage(
            format!(
                "options::rename {}: a name would become longer than {MAX_RENAMED} bytes",
                self.options.renames[index].as_str()
            ),
            "remove options::rename options that make names longer: each options::rename replaces every match, also in names that an \
             earlier options::rename has made longer",
        ))
    }

    /// Returns the new name of a module such as `model.layers.`, before prefix and nesting are added. A module is not a
    /// leaf, so its name is computed separately.
    fn new_prefix(&self, module: &str) -> Option<String> {
        let mut text = module.strip_prefix(&self.root)?.to_owned();
        for prefix in &self.options.strip_prefixes {
            text.drain(..prefix_len(&text, prefix));
        }
        for index in (0..self.options.renames.len()).filter(|_| !module.is_empty()) {
            text = self.apply(index, &text).unwrap_or(text);
        }
        Some(text)
    }

    /// Returns the new name of a module, or `None` if the module is outside the root. The given and the returned name
    /// end in a dot, unless they are empty.
    pub fn module(&self, module: &str) -> Option<String> {
        let place = self.new_prefix(module)?;
        let nest = self.options.nest.as_deref().map(|path| format!("{path}.")).unwrap_or_default();
        let prefix = self.options.add_prefix.as_deref().unwrap_or_default();
        Some(format!("{nest}{prefix}{place}"))
    }

    /// Returns the new name of a parameter in a list of parameters. `head` is the prefix of state names in the
    /// optimizer that has the list: `optim.state.`.
    pub fn parameter<'n>(&'n self, old: &'n str, head: &str) -> Cow<'n, str> {
        if let Some(new) = self.parameters.get(old) {
            return Cow::Borrowed(new);
        }
        if is_number(old) {
            return Cow::Borrowed(old);
        }
        let places = self.new_prefix(head).zip(self.new_prefix(&format!("{head}{old}.")));
        let new = places.and_then(|(head, whole)| Some(whole.strip_prefix(&head)?.strip_suffix('.')?.to_owned()));
        new.filter(|new| !new.is_empty()).map_or(Cow::Borrowed(old), Cow::Owned)
    }

    /// Checks that every prefix and rename had an effect.
    ///
    /// # Errors
    /// `Usage` for a prefix that no name has, and for a rename without a match.
    pub fn check_used(&self) -> Result<()> {
        let unused = |used: &[Cell<bool>]| used.iter().position(|used| !used.get());
        if let Some(index) = unused(&self.prefixes_used) {
            let prefix = &self.options.strip_prefixes[index];
            return Err(Error::usage(
                format!("options::strip_prefix {prefix}: no name starts with this prefix"),
                self.options
                    .matched
                    .hint("options::strip_prefix", format!("the nearest prefixes are {}", self.nearest_heads(prefix))),
            ));
        }
        if let Some(index) = unused(&self.renames_used) {
            let rename = &self.options.renames[index];
            let names: Vec<String> = self.survey.leaves.iter().map(|leaf| self.survey.named(*leaf).name).collect();
            let before = if index > 0 {
                "each rename applies to the result of earlier renames; before any rename, "
            } else {
                ""
            };
            return Err(Error::usage(
                format!("options::rename {}: no name matches", rename.as_str()),
                self.options.matched.hint(
                    "options::rename",
                    format!("{before}the nearest names are {}", nearest(&rename.likeness(), &names).join(", ")),
                ),
            ));
        }
        Ok(())
    }
}

/// Returns the number of bytes at the start of `name` that `prefix` strips. If `prefix` ends before a dot of `name`, as
/// `model` for `model.w`, the dot is stripped, too.
fn prefix_len(name: &str, prefix: &str) -> usize {
    match name.strip_prefix(prefix) {
        Some(rest) if rest.starts_with('.') && !prefix.is_empty() => prefix.len() + 1,
        Some(_) => prefix.len(),
        None => 0,
    }
}

/// Replaces the bytes `start..end` of the name by the placeholder. Returns the new keys, and the keys that were
/// replaced. Returns `None` if the bytes start and end inside different keys.
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
