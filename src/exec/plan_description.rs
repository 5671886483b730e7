//! What a result is made from, told so that two can be compared: a fingerprint says that they differ, this says in what.
//!
//! Nothing is decided by it. Two that are equal here may differ all the same, in a file that an option names, say.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::fingerprint::below;
use super::sidecar_files::SidecarFile;
use crate::storage::Files;

/// Differences that are told.
const MOST_TOLD: usize = 4;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// What the command line says of the result: each option as it is written, with its values.
    pub options: BTreeMap<String, String>,
    /// By path below the source, see [`fingerprint`](super::fingerprint).
    pub sources: BTreeMap<String, SourceFile>,
}

/// A file as it was when work began: its length, and the time of its last change in seconds and nanoseconds since 1970.
pub type SourceFile = (u64, i64, i64);

impl About {
    /// What is made with these options of `files`, beside which some are carried.
    #[must_use]
    pub fn new(options: BTreeMap<String, String>, files: &Files, carried: &[SidecarFile], roots: &[&Path]) -> Self {
        let name = |path: &Path| below(path, roots).1.to_string_lossy().into_owned();
        let state = |len: u64, (seconds, nanoseconds): (i64, i64)| (len, seconds, nanoseconds);
        let read = files.ids().map(|id| (name(files.path(id)), state(files.len_bytes(id), files.modified(id))));
        let carried = carried.iter().map(|file| (name(&file.from), state(file.len, file.modified)));
        Self { options, sources: read.chain(carried).collect() }
    }

    /// In what `now` is another one, as far as that shows: `--dtype was not given, and is bf16; a.pt was 5 bytes, and is 7`.
    #[must_use]
    pub fn difference(&self, now: &Self) -> Option<String> {
        let mut told: Vec<String> = Vec::new();
        for (name, was, is) in differing(&self.options, &now.options) {
            let told_of = |value: Option<&String>| match value.map(String::as_str) {
                None => "not given".to_owned(),
                Some("") => "given".to_owned(),
                Some(value) => value.to_owned(),
            };
            told.push(format!("{name} was {}, and is {}", told_of(was), told_of(is)));
        }
        for (name, was, is) in differing(&self.sources, &now.sources) {
            told.push(match (was, is) {
                (Some(was), Some(is)) if was.0 != is.0 => format!("{name} was {} bytes, and is {}", was.0, is.0),
                (Some(was), Some(is)) => {
                    let way = if is < was { "older" } else { "newer" };
                    format!("{name} has changed since: it is {way}, and as long")
                }
                (Some(_), None) => format!("{name} was read, and is not"),
                (None, _) => format!("{name} was not read, and is"),
            });
        }
        let more = told.len().saturating_sub(MOST_TOLD);
        told.truncate(MOST_TOLD);
        let more = (more > 0).then(|| format!("and {more} more"));
        let told: Vec<String> = told.into_iter().chain(more).collect();
        (!told.is_empty()).then(|| told.join("; "))
    }
}

/// What is not equal in both.
fn differing<'a, T: PartialEq>(
    was: &'a BTreeMap<String, T>,
    is: &'a BTreeMap<String, T>,
) -> Vec<(&'a str, Option<&'a T>, Option<&'a T>)> {
    let names: std::collections::BTreeSet<&String> = was.keys().chain(is.keys()).collect();
    let both = names.into_iter().map(|name| (name.as_str(), was.get(name), is.get(name)));
    both.filter(|(_, was, is)| was != is).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(options: &[(&str, &str)], sources: &[(&str, u64, i64)]) -> About {
        About {
            options: options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            sources: sources.iter().map(|(name, len, at)| ((*name).to_owned(), (*len, *at, 0))).collect(),
        }
    }

    #[test]
    fn what_differs_is_named_with_what_was_and_what_is() {
        let was =
            about(&[("options::dtype", "f16"), ("options::everything", "")], &[("a", 5, 1), ("b", 5, 1), ("c", 5, 1)]);
        assert_eq!(was.difference(&was), None);
        let text = |options: &[(&str, &str)], sources: &[(&str, u64, i64)]| {
            was.difference(&about(options, sources)).unwrap_or_default()
        };
        let all = &[("a", 5, 1), ("b", 5, 1), ("c", 5, 1)];
        assert_eq!(
            text(&[("options::dtype", "bf16"), ("options::everything", "")], all),
            "options::dtype was f16, and is bf16"
        );
        assert_eq!(
            text(&[], all),
            "options::dtype was f16, and is not given; options::everything was given, and is not given"
        );
        let options = &[("options::dtype", "f16"), ("options::everything", ""), ("options::root", "x")];
        assert_eq!(
            text(options, &[("a", 6, 1), ("b", 5, 2), ("d", 5, 1)]),
            "options::root was not given, and is x; a was 5 bytes, and is 6; b has changed since: it is newer, and as long; \
             c was read, and is not; and 1 more"
        );
        let json = serde_json::to_string(&was).unwrap();
        assert_eq!(serde_json::from_str::<About>(&json).unwrap(), was);
        assert!(json.contains(r#""a":[5,1,0]"#), "{json}");
    }
}
