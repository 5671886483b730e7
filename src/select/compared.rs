//! Selects the names of two checkpoints that are compared.
//!
//! The options for names and casts apply to SRC alone. The filters (`--include`, `--exclude`) leave out tensors and
//! objects of both checkpoints. If the filters leave out a tensor of SRC, they also leave out the tensor of OTHER that
//! has the same name after the names of SRC are changed.

use std::collections::HashSet;

use super::filter::Kept;
use super::survey::{Leaf, Survey};
use super::{NameOptions, Root, Selected, filter, reject_unsupported, select, select_kept};
use crate::catalog::path;
use crate::catalog::{Catalog, Value};
use crate::error::Result;

/// Selects the names of SRC like [`select`], and selects the names of OTHER that the filters keep.
///
/// # Errors
/// The errors of [`select`], with one exception: a pattern that matches no name of SRC is no error if the pattern is
/// also applied to OTHER and matches a name there. If the names of SRC are changed, the patterns of `--include` are not
/// applied to OTHER.
pub fn select_both(source: &Catalog, other: &Catalog, options: &NameOptions) -> Result<(Selected, Selected)> {
    if !has_filters(options) {
        return Ok((select(source, options)?, select(other, &unfiltered(options))?));
    }
    let survey = Survey::new(source, options.wrappers);
    let kept = filter::keep(&survey, options);
    // OTHER is filtered as well. If SRC is renamed, only `--exclude` is applied to OTHER, because the patterns of
    // `--include` are for old names of SRC, which OTHER need not have.
    let include = if is_renamed(options) { Vec::new() } else { options.include.clone() };
    let filters = NameOptions { include, exclude: options.exclude.clone(), ..unfiltered(options) };
    let other_survey = Survey::new(other, options.wrappers);
    let other_kept = filter::keep(&other_survey, &filters);
    let is_unused_by_other = |unused: &&(&str, String)| {
        let is_applied = unused.0 == "options::exclude" || !is_renamed(options);
        !is_applied || other_kept.unused.contains(unused)
    };
    if let Some(unused) = kept.unused.iter().find(is_unused_by_other) {
        return Err(filter::unused_error(&survey, unused, options.matched));
    }
    let ours = select_kept(source, options, &survey, kept)?;
    let left_out = left_out_names(source, &survey, options, &ours)?;
    let chosen = names(&ours.catalog.state);
    let is_kept = |(leaf, kept): (&Leaf, bool)| {
        let name = other_survey.named(*leaf).name;
        !left_out.contains(&name) && (kept || chosen.contains(&name))
    };
    let leaves = other_survey.leaves.iter().zip(other_kept.leaves).map(is_kept).collect();
    let kept_of_other = Kept { leaves, by_patterns: other_kept.by_patterns, unused: Vec::new() };
    let theirs = select_kept(other, &unfiltered(options), &other_survey, kept_of_other)?;
    reject_unsupported(source, &ours.catalog.state, options)?;
    reject_unsupported(other, &theirs.catalog.state, options)?;
    Ok((ours, theirs))
}

/// Selects the names of a checkpoint that is compared with a list of names. Also returns the names that the filters
/// leave out.
///
/// # Errors
/// The errors of [`select`].
pub fn select_and_list_left_out(source: &Catalog, options: &NameOptions) -> Result<(Selected, HashSet<String>)> {
    let selected = select(source, options)?;
    if !has_filters(options) {
        return Ok((selected, HashSet::new()));
    }
    let left_out = left_out_names(source, &Survey::new(source, options.wrappers), options, &selected)?;
    Ok((selected, left_out))
}

/// Returns, for each leaf that the filters leave out, the name that the leaf would have in the result.
fn left_out_names(
    source: &Catalog,
    survey: &Survey<'_>,
    options: &NameOptions,
    selected: &Selected,
) -> Result<HashSet<String>> {
    let without_filters = NameOptions { include: Vec::new(), exclude: Vec::new(), ..options.clone() };
    let every = filter::keep(survey, &without_filters);
    let mut all = names(&select_kept(source, &without_filters, survey, every)?.catalog.state);
    for name in names(&selected.catalog.state) {
        all.remove(&name);
    }
    Ok(all)
}

fn has_filters(options: &NameOptions) -> bool {
    !options.include.is_empty() || !options.exclude.is_empty()
}

/// Returns whether the options change names of SRC, apart from wrapper components.
fn is_renamed(options: &NameOptions) -> bool {
    options.root != Root::Whole
        || !options.strip_prefixes.is_empty()
        || !options.renames.is_empty()
        || options.add_prefix.is_some()
        || options.nest.is_some()
}

/// Returns options that keep all names, apart from wrapper components.
fn unfiltered(options: &NameOptions) -> NameOptions {
    NameOptions { wrappers: options.wrappers, ..NameOptions::default() }
}

fn names(state: &Value) -> HashSet<String> {
    path::leaves(state).into_iter().map(|(path, _)| path.to_string()).collect()
}
