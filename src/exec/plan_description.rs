//! A description of the options and source files of a conversion. Fingerprints show that two plans differ; their
//! descriptions show the differences. `publish` stores a description as `about.json`, and the fingerprint in `plan.json`.
//!
//! The descriptions serve messages only. Two equal descriptions may belong to different plans, for example if a file
//! that an option names has changed. All sizes and offsets are in bytes.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::fingerprint::relative_to_root;
use super::sidecar_files::SidecarFile;
use crate::storage::Files;

/// The maximum number of differences that a message lists.
const MAX_DIFFERENCES: usize = 4;

/// The options and source files of a conversion, as messages describe them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanDescription {
    /// The options that affect the result, by name, with their values as text.
    pub options: BTreeMap<String, String>,
    /// The source files, by their path relative to the source; see [`fingerprint`](super::fingerprint).
    pub sources: BTreeMap<String, SourceFile>,
}

/// The state of a file when the work began: its length in bytes, and the time of its last change in seconds and
/// nanoseconds since 1970.
pub type SourceFile = (u64, i64, i64);

impl PlanDescription {
    /// Describes the options and source files of a conversion. It reads `files`, and copies `sidecar_files` unchanged.
    #[must_use]
    pub fn new(
        options: BTreeMap<String, String>,
        files: &Files,
        sidecar_files: &[SidecarFile],
        roots: &[&Path],
    ) -> Self {
        let name = |path: &Path| relative_to_root(path, roots).1.to_string_lossy().into_owned();
        let state = |len: u64, (seconds, nanoseconds): (i64, i64)| (len, seconds, nanoseconds);
        // The path of a computed file is that of a file from which it is computed.
        let stored = files.ids().filter(|id| !files.is_computed(*id));
        let read = stored.map(|id| (name(files.path(id)), state(files.len_bytes(id), files.modified(id))));
        let sidecar_files = sidecar_files.iter().map(|file| (name(&file.from), state(file.len, file.modified)));
        Self { options, sources: read.chain(sidecar_files).collect() }
    }

    /// Describes how `now` differs from this description: `--dtype was not given, now bf16; a.pt was 5 bytes, now 7`.
    /// Returns `None` if the descriptions are equal.
    pub fn difference(&self, now: &Self) -> Option<String> {
        let mut differences: Vec<String> = Vec::new();
        for (name, was, is) in differing(&self.options, &now.options) {
            let text_of = |value: Option<&String>| match value.map(String::as_str) {
                None => "not given".to_owned(),
                Some("") => "given".to_owned(),
                Some(value) => value.to_owned(),
            };
            differences.push(format!("{name} was {}, now {}", text_of(was), text_of(is)));
        }
        for (name, was, is) in differing(&self.sources, &now.sources) {
            differences.push(match (was, is) {
                (Some(was), Some(is)) if was.0 != is.0 => format!("{name} was {} bytes, now {}", was.0, is.0),
                (Some(was), Some(is)) => {
                    let age = if is < was { "older" } else { "newer" };
                    format!("{name} has changed: same length, {age} modification time")
                }
                (Some(_), None) => format!("the earlier run read {name}, this run does not"),
                (None, _) => format!("this run reads {name}, the earlier run did not"),
            });
        }
        let more = differences.len().saturating_sub(MAX_DIFFERENCES);
        differences.truncate(MAX_DIFFERENCES);
        let more = (more > 0).then(|| format!("and {more} more"));
        let differences: Vec<String> = differences.into_iter().chain(more).collect();
        (!differences.is_empty()).then(|| differences.join("; "))
    }
}

/// Returns the options or files that differ, each with its name, its old value and its new value. The old value is
/// `None` if the option or file is new; the new value is `None` if it no longer exists.
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

    fn about(options: &[(&str, &str)], sources: &[(&str, u64, i64)]) -> PlanDescription {
        PlanDescription {
            options: options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            sources: sources.iter().map(|(name, len, at)| ((*name).to_owned(), (*len, *at, 0))).collect(),
        }
    }

    #[test]
    fn difference_names_option_with_old_and_new_value() {
        let was =
            about(&[("options::dtype", "f16"), ("options::everything", "")], &[("a", 5, 1), ("b", 5, 1), ("c", 5, 1)]);
        assert_eq!(was.difference(&was), None);
        let text = |options: &[(&str, &str)], sources: &[(&str, u64, i64)]| {
            was.difference(&about(options, sources)).unwrap_or_default()
        };
        let all = &[("a", 5, 1), ("b", 5, 1), ("c", 5, 1)];
        assert_eq!(
            text(&[("options::dtype", "bf16"), ("options::everything", "")], all),
            "options::dtype was f16, now bf16"
        );
        assert_eq!(
            text(&[], all),
            "options::dtype was f16, now not given; options::everything was given, now not given"
        );
        let options = &[("options::dtype", "f16"), ("options::everything", ""), ("options::root", "x")];
        assert_eq!(
            text(options, &[("a", 6, 1), ("b", 5, 2), ("d", 5, 1)]),
            "options::root was not given, now x; a was 5 bytes, now 6; b has changed: same length, newer \
             modification time; the earlier run read c, this run does not; and 1 more"
        );
        let json = serde_json::to_string(&was).unwrap();
        assert_eq!(serde_json::from_str::<PlanDescription>(&json).unwrap(), was);
        assert!(json.contains(r#""a":[5,1,0]"#), "{json}");
    }
}
