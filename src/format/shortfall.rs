//! The result of a check for complete sets.

use crate::error::Error;

/// The missing parts of a set, or a contradiction in it.
#[derive(Debug)]
pub struct Shortfall {
    /// Files and tensors of the set that are not read.
    pub missing: Vec<String>,
    /// The error of every verb that needs the whole set.
    pub error: Error,
    /// The warning of `--allow-missing`; `None` where the set cannot be read without what is missing.
    pub allowed: Option<String>,
}

impl Shortfall {
    pub fn new(missing: Vec<String>, error: Error) -> Self {
        let error = if missing.is_empty() { error } else { error.naming(&missing) };
        Self { missing, error, allowed: None }
    }
}

/// The names of `count` files that are not there. Totals come from file names and may be any number: of very many names
/// the last entry counts the rest.
#[must_use]
pub fn list_absent(count: u64, names: impl Iterator<Item = String>) -> Vec<String> {
    const LISTED: u64 = 10_000;
    let mut listed: Vec<String> = names.take(usize::try_from(count.min(LISTED)).expect("a small number")).collect();
    if count > LISTED {
        listed.push(format!("{} more", count - LISTED));
    }
    listed
}
