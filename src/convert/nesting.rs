//! The check that DST lies apart from what is read.

use std::path::{Component, Path, PathBuf};

use crate::error::{Error, Result};
use crate::storage::lookup;

/// A destination inside the source would change what is being read.
///
/// # Errors
/// `Usage`.
pub fn refuse_nesting(name: &str, source: &Path, destination: &Path) -> Result<()> {
    let (source, target) = (resolve_missing(source)?, resolve_missing(destination)?);
    let relation = if target == source {
        format!("is {name} itself")
    } else if target.starts_with(&source) {
        format!("lies inside {name}")
    } else if source.starts_with(&target) {
        format!("contains {name}")
    } else {
        return Ok(());
    };
    Err(Error::usage(
        format!("the destination {} {relation}", destination.display()),
        format!("choose a destination beside {name}, which is never changed"),
    ))
}

/// The path a file would have if it were made now: links are followed where there is something to follow, and what is
/// missing is taken as the plain folders that will be made.
fn resolve_missing(path: &Path) -> Result<PathBuf> {
    let mut resolved = std::env::current_dir().map_err(Error::io("find", "the current folder"))?;
    for part in path.components() {
        match part {
            Component::ParentDir => drop(resolved.pop()),
            part => resolved.push(part),
        }
        if let Some(known) = lookup::resolve(&resolved)? {
            resolved = known;
        }
    }
    Ok(resolved)
}
