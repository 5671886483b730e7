//! Placements as they are said on the command line, of a target (`--placements`, `--layout`) or of a source
//! (`--src-placements`, `--src-layout`).

use std::path::Path;

use crate::error::{Error, Result};
use crate::format::layout_file;
use crate::layout::file::LayoutFile;
use crate::layout::rules::{PlacementChoice, Rule};
use crate::layout::{Pattern, PlacementSpec, Split, parse_placements};

/// `None` for what is neither.
fn lies(list: &str) -> Option<PlacementChoice> {
    match list.trim() {
        "plain" => Some(PlacementChoice::Plain),
        list => parse_placements(list).ok().map(|list| PlacementChoice::Shared(list.into())),
    }
}

/// A bare list is for every tensor, `PATTERN=LIST` a rule, `PATTERN=plain` one for what is whole on every rank.
///
/// # Errors
/// `Layout` for what is no list and no pattern, `Usage` for a second list for every tensor.
pub fn read(option: &str, texts: &[String]) -> Result<(Vec<Rule>, Option<Vec<PlacementSpec>>)> {
    let mut rules = Vec::new();
    let mut fallback = None;
    for text in texts {
        match text.rsplit_once('=').and_then(|(pattern, list)| Some((pattern, lies(list)?))) {
            Some((pattern, lies)) if parse_placements(text).is_err() => {
                rules.push(Rule {
                    pattern: Pattern::parse(pattern.trim())?,
                    choice: lies,
                    origin: format!("{option} {text}"),
                });
            }
            _ => {
                if fallback.replace(parse_placements(text)?).is_some() {
                    return Err(Error::usage(
                        format!("{option} {text}: a second fallback"),
                        "give one list for every tensor, and PATTERN=LIST for the exceptions",
                    ));
                }
            }
        }
    }
    Ok((rules, fallback))
}

/// The layout file of an option; a `split` beside it takes the place of its own.
///
/// # Errors
/// As reading it, and with this hint where nothing in it is for tensors one by one.
pub fn file(option: &str, path: &Path, split: Option<Split>, flat_alone: &str) -> Result<LayoutFile> {
    let mut file = layout_file::read(path)?;
    if file.has_only_flat() {
        return Err(Error::usage(
            format!("{option} {}: it has [flat] alone, which is for flat parameters", path.display()),
            flat_alone,
        ));
    }
    file.split = split.or(file.split);
    Ok(file)
}
