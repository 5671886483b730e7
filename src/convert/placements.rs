//! Parser of placements from the command line, for a target (`--placements`, `--layout`) or a source
//! (`--src-placements`, `--src-layout`).

use std::path::Path;

use crate::error::{Error, Result};
use crate::format::layout_file;
use crate::layout::file::LayoutFile;
use crate::layout::rules::{PlacementChoice, Rule};
use crate::layout::{Pattern, PlacementSpec, Split, parse_placements};

/// Parses `plain` or a list of placements. Returns `None` for any other text.
fn parse_choice(list: &str) -> Option<PlacementChoice> {
    match list.trim() {
        "plain" => Some(PlacementChoice::Plain),
        list => parse_placements(list).ok().map(|list| PlacementChoice::Shared(list.into())),
    }
}

/// Parses placement options into rules and fallback placements. A list without a pattern is the fallback: it applies to
/// every tensor that no rule matches. `PATTERN=LIST` is a rule, and `PATTERN=plain` is a rule for tensors that every
/// rank stores whole, as plain tensors. `option` is the name of the option in errors.
///
/// # Errors
/// `Layout` for an invalid list or pattern, `Usage` for a second fallback.
pub fn read(option: &str, texts: &[String]) -> Result<(Vec<Rule>, Option<Vec<PlacementSpec>>)> {
    let mut rules = Vec::new();
    let mut fallback = None;
    for text in texts {
        match text.rsplit_once('=').and_then(|(pattern, list)| Some((pattern, parse_choice(list)?))) {
            Some((pattern, choice)) if parse_placements(text).is_err() => {
                rules.push(Rule {
                    pattern: Pattern::parse(pattern.trim())?,
                    choice,
                    origin: format!("{option} {text}"),
                });
            }
            _ => {
                if fallback.replace(parse_placements(text)?).is_some() {
                    return Err(Error::usage(
                        format!("{option} {text}: expected one list for all tensors, found a second one"),
                        "use one list for all tensors, and PATTERN=LIST for the exceptions",
                    ));
                }
            }
        }
    }
    Ok((rules, fallback))
}

/// Reads the layout file that an option names. If `split` is given, it replaces the split rule of the file.
///
/// # Errors
/// Errors from reading the file, and `Usage` with the hint `flat_alone` if the file has only a layout of flat
/// parameters.
pub fn file(option: &str, path: &Path, split: Option<Split>, flat_alone: &str) -> Result<LayoutFile> {
    let mut file = layout_file::read(path)?;
    if file.has_only_flat() {
        return Err(Error::usage(
            format!("{option} {}: the file has only [flat], which is for flat parameters", path.display()),
            flat_alone,
        ));
    }
    file.split = split.or(file.split);
    Ok(file)
}
