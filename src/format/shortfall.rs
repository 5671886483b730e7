//! The result of checking a set of files or tensors for completeness.

use crate::error::Error;

/// The files or tensors that an incomplete set (files that form one checkpoint together) lacks, or a contradiction
/// between the set and its index.
#[derive(Debug)]
pub struct Shortfall {
    /// The names of files and tensors of the set that are not read.
    pub missing: Vec<String>,
    /// The error that is returned unless an option allows an incomplete set.
    pub error: Error,
    /// The warning that is shown if `options::allow_missing` is set; `None` if the set cannot be read even with this
    /// option.
    pub allowed: Option<String>,
    /// True if SRC is one file of the set.
    pub is_one_file: bool,
}

impl Shortfall {
    /// Returns a shortfall that is an error even with `options::allow_missing`.
    pub fn new(missing: Vec<String>, error: Error) -> Self {
        let error = if missing.is_empty() { error } else { error.naming(&missing) };
        Self { missing, error, allowed: None, is_one_file: false }
    }

    /// Returns this shortfall for a SRC that is one file of the set.
    #[must_use]
    pub fn of_one_file(self) -> Self {
        Self { is_one_file: true, ..self }
    }

    /// Returns the warning that is shown if only the existing files are read.
    pub fn warning(&self) -> String {
        if self.is_one_file {
            return format!("{}; only the tensors in this file are shown", self.error);
        }
        only_found(&self.error)
    }
}

/// Returns the warning about an incomplete set of which only the existing files are shown. `error` names what is
/// missing.
pub fn only_found(error: &Error) -> String {
    format!("{error}; only the tensors that were found are shown")
}

/// Returns the first `count` of `names`, which are the names of missing files. `count` comes from file names, so it may
/// be arbitrarily large: after 10,000 names, the list ends with an entry such as `and 5000 more`.
pub fn list_missing_names(count: u64, names: impl Iterator<Item = String>) -> Vec<String> {
    const MAX_LISTED: u64 = 10_000;
    let mut listed: Vec<String> = names.take(usize::try_from(count.min(MAX_LISTED)).expect("a small number")).collect();
    if count > MAX_LISTED {
        listed.push(format!("and {} more", count - MAX_LISTED));
    }
    listed
}
