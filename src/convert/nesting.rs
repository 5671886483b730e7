//! Check that DST does not overlap with a checkpoint that is read.

use std::path::{Component, Path, PathBuf};

use crate::error::{Error, Result};
use crate::storage::lookup;

/// Refuses a destination that is the source, is inside the source or contains the source, because writing would change
/// files that dtshard reads. `name` is the name of the source in the error.
///
/// # Errors
/// `Usage` if source and destination overlap.
pub fn refuse_nesting(name: &str, source: &Path, destination: &Path) -> Result<()> {
    let (source, target) = (resolve_missing(source)?, resolve_missing(destination)?);
    let relation = if target == source {
        format!("is {name} itself")
    } else if target.starts_with(&source) {
        format!("is inside {name}")
    } else if source.starts_with(&target) {
        format!("contains {name}")
    } else {
        return Ok(());
    };
    Err(Error::usage(
        format!("the destination {} {relation}", destination.display()),
        format!("choose another destination: dtshard never changes {name}"),
    ))
}

/// Returns the resolved path of a file that may not exist yet. Existing links are followed; missing components count as
/// plain folders that will be created.
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
