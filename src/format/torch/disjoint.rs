//! Joins several torch.save files into one flat state dict. `save_pretrained` writes such files: it divides the tensors
//! of a large model among several files.
//!
//! Invariant: every name is in exactly one file.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::rank_file::RankFile;
use super::ranks::single;
use crate::catalog::path::key_text;
use crate::catalog::{Catalog, Dict, Fqn, Value, shift_tensors};
use crate::error::{Error, Result};

/// Returns one catalog with the tensors of all files.
///
/// # Errors
/// `Conflict` if two files have the same tensor name, `Malformed` if a file does not contain a dict.
pub fn join_disjoint(files: &[RankFile]) -> Result<Catalog> {
    let mut catalog = Catalog::empty();
    let mut entries: Vec<(Value, Value)> = Vec::new();
    let mut owners: HashMap<Arc<str>, PathBuf> = HashMap::new();
    for file in files {
        let own = single(file)?;
        let Value::Dict(dict) = own.state else {
            let found = own.state.type_name().into_owned();
            return Err(Error::malformed(&file.path, "the pickled object", "a state dict", found));
        };
        let shift = u32::try_from(catalog.tensors.len()).expect("fewer than 2^32 tensors");
        catalog.tensors.extend(own.tensors);
        catalog.archives.extend(own.archives);
        for (key, mut value) in dict.entries {
            let name = key_text(&key);
            if let Some(other) = owners.insert(name.clone(), file.path.clone()) {
                let between = format!("{} and {}", other.display(), file.path.display());
                return Err(Fqn::from(name).disagreement(
                    "the content",
                    between,
                    "both files have this name, but a name may be in one file of the set only",
                ));
            }
            shift_tensors(&mut value, shift);
            entries.push((key, value));
        }
    }
    catalog.state = Value::Dict(Dict { entries, ..Dict::default() });
    Ok(catalog)
}
