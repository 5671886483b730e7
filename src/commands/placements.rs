//! Placements as they are said on the command line, of a target (`--placements`) or of a source (`--src-placements`).

use crate::error::{Error, Result};
use crate::layout::rules::{Lies, Rule};
use crate::layout::{Pattern, PlacementSpec, parse_placements};

/// `None` for what is neither.
fn lies(list: &str) -> Option<Lies> {
    match list.trim() {
        "plain" => Some(Lies::Plain),
        list => parse_placements(list).ok().map(|list| Lies::Shared(list.into())),
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
                rules.push(Rule { pattern: Pattern::parse(pattern.trim())?, lies, said: format!("{option} {text}") });
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
