//! Filters the leaves of a state dict (the tensors and objects) by `options::include` and `options::exclude`.
//!
//! A pattern is matched with all names of a leaf: its own name, its name in the model, and, if the leaf is optimizer
//! state, the names of its parameter. So excluding a parameter also excludes the parameter's optimizer state.
//! Invariant: a pattern that matches nothing is an error.

use std::collections::HashSet;

use super::survey::{Leaf, LeafKind, Named, Survey, is_number};
use super::{MatchedNames, NameOptions};
use crate::catalog::state_dict;
use crate::error::Error;
use crate::layout::Pattern;
use crate::nearest;

/// Patterns, and for each pattern whether it has matched a leaf.
struct UsedPatterns<'o> {
    patterns: &'o [Pattern],
    used: Vec<bool>,
}

impl<'o> UsedPatterns<'o> {
    fn new(patterns: &'o [Pattern]) -> Self {
        Self { patterns, used: vec![false; patterns.len()] }
    }

    /// Returns whether any pattern covers any of the names. If `is_leaf` is true, also marks the patterns that cover a
    /// name as used (an empty dict is no leaf). After the first match, compares only the patterns that are not marked
    /// yet.
    fn cover(&mut self, names: &[&str], is_leaf: bool) -> bool {
        let mut covered = false;
        for (pattern, used) in self.patterns.iter().zip(&mut self.used) {
            if (!covered || !*used) && names.iter().any(|name| pattern.covers(name)) {
                covered = true;
                *used |= is_leaf;
            }
        }
        covered
    }

    fn unused(&self) -> impl Iterator<Item = &Pattern> {
        self.patterns.iter().zip(&self.used).filter(|(_, used)| !**used).map(|(pattern, _)| pattern)
    }
}

/// The leaves that the filters keep, and the patterns that match no leaf.
pub(super) struct Kept {
    /// For each leaf of the state dict, whether it is kept.
    pub leaves: Vec<bool>,
    /// The leaves that the patterns select; `None` if there are no patterns.
    pub by_patterns: Option<SelectedByPatterns>,
    /// The option and the text of each pattern that matches no leaf.
    pub unused: Vec<(&'static str, String)>,
}

impl Kept {
    /// Returns the kept leaves for the case that there are no patterns.
    pub fn of(leaves: Vec<bool>) -> Self {
        Self { leaves, by_patterns: None, unused: Vec::new() }
    }
}

/// The leaves that the patterns themselves select. Parameter groups that are kept only because optimizer state is kept
/// are not included.
pub(super) struct SelectedByPatterns {
    /// For each leaf, whether a pattern includes it and none excludes it.
    pub selected: Vec<bool>,
    /// For each leaf, whether a pattern excludes it.
    pub excluded: Vec<bool>,
}

/// Returns the error about a pattern that matches no leaf.
pub(super) fn unused_error(survey: &Survey<'_>, (option, pattern): &(&str, String), matched: MatchedNames) -> Error {
    let leaves = survey.leaves.iter().filter(|leaf| leaf.kind != LeafKind::EmptyDict);
    Error::usage(
        format!("{option} {pattern}: no tensor or object matches this pattern"),
        matched.hint(option, nearest_names(pattern, leaves, survey)),
    )
}

/// Returns a hint with the names that are nearest to a pattern that matches nothing.
pub(super) fn nearest_names<'s>(pattern: &str, leaves: impl Iterator<Item = &'s Leaf>, survey: &Survey<'_>) -> String {
    let names: Vec<String> = leaves.map(|leaf| survey.named(*leaf).name).collect();
    nearest::pattern_hint(pattern, &names)
}

/// Applies the filters to the leaves of the state dict. If state of an optimizer is kept, the parameter groups of this
/// optimizer are also kept, unless a pattern excludes them.
pub(super) fn keep(survey: &Survey<'_>, options: &NameOptions) -> Kept {
    let is_gradient = |leaf: &Leaf| state_dict::GRADIENTS.contains(&survey.top_key(*leaf).as_str());
    let mut kept: Vec<bool> =
        survey.leaves.iter().map(|leaf| !(options.without_gradients && is_gradient(leaf))).collect();
    if options.include.is_empty() && options.exclude.is_empty() {
        return Kept::of(kept);
    }
    let (mut include, mut exclude) = (UsedPatterns::new(&options.include), UsedPatterns::new(&options.exclude));
    let mut in_use: HashSet<u32> = HashSet::new();
    let mut excluded = vec![false; survey.leaves.len()];
    for (index, leaf) in survey.leaves.iter().enumerate() {
        let named = survey.named(*leaf);
        let names = names(survey, &named);
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let is_leaf = leaf.kind != LeafKind::EmptyDict;
        let included = include.cover(&names, is_leaf) || options.include.is_empty();
        excluded[index] = exclude.cover(&names, is_leaf);
        kept[index] &= included && !excluded[index];
        if let Some((number, _)) = leaf.optimizer.filter(|_| kept[index] && leaf.in_state()) {
            in_use.insert(number);
        }
    }
    let selected = kept.clone();
    let of_option = |option, patterns: &UsedPatterns<'_>| {
        patterns.unused().map(|pattern| (option, pattern.as_str().to_owned())).collect::<Vec<_>>()
    };
    let unused = [of_option("options::include", &include), of_option("options::exclude", &exclude)].concat();
    for (index, leaf) in survey.leaves.iter().enumerate() {
        let of_used = leaf.in_groups() && leaf.optimizer.is_some_and(|(number, _)| in_use.contains(&number));
        if of_used && !excluded[index] && !belongs_to_left_out(survey, *leaf, &kept) {
            kept[index] = true;
        }
    }
    Kept { leaves: kept, by_patterns: Some(SelectedByPatterns { selected, excluded }), unused }
}

/// Returns whether a leaf in flattened parameter groups (`param_groups.FQN.lr`) belongs to a parameter that is left
/// out.
fn belongs_to_left_out(survey: &Survey<'_>, leaf: Leaf, kept: &[bool]) -> bool {
    let named = survey.named(leaf);
    let parameter = named.parameter().and_then(|parameter| survey.parameters.get(parameter));
    parameter.is_some_and(|index| !kept[*index as usize])
}

fn names(survey: &Survey<'_>, named: &Named<'_>) -> Vec<String> {
    let mut names = vec![named.name.clone()];
    names.extend(survey.in_model(&named.name).map(str::to_owned));
    if let Some(parameter) = named.parameter().filter(|parameter| !is_number(parameter)) {
        if !survey.model_root.is_empty() {
            names.push(format!("{}.{parameter}", survey.model_root));
        }
        names.push(parameter.to_owned());
    }
    survey.for_patterns(names)
}

/// Returns a note if parameters are left out, but all optimizer state whose keys are parameter ids (numbers) is kept. A
/// parameter id does not show which parameter the state belongs to.
pub(super) fn notes(survey: &Survey<'_>, options: &NameOptions, kept: &[bool]) -> Vec<String> {
    if options.include.is_empty() && options.exclude.is_empty() {
        return Vec::new();
    }
    let leaves = || survey.leaves.iter().zip(kept);
    let is_incomplete = leaves().any(|(leaf, kept)| leaf.is_parameter() && !kept);
    let by_number = |leaf: &Leaf| {
        leaf.in_state() && leaf.kind == LeafKind::Tensor && survey.named(*leaf).parameter().is_some_and(is_number)
    };
    let numbered = if is_incomplete { leaves().filter(|(leaf, kept)| **kept && by_number(leaf)).count() } else { 0 };
    if numbered == 0 {
        return Vec::new();
    }
    let tensors = if numbered == 1 { "tensor" } else { "tensors" };
    vec![format!(
        "kept all {numbered} {tensors} of optimizer state, although parameters are left out: the state is stored by \
         parameter index, so the parameter of each tensor is unknown"
    )]
}
