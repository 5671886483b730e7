//! The assignment of named tensors to files, for an output folder that has the same file names as the source folder.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::catalog::{Catalog, Fqn, TensorId, state_dict};
use crate::storage::Files;

/// The file name of each tensor in a folder, by the name of the tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placing(BTreeMap<Fqn, PathBuf>);

impl Placing {
    /// Returns the name of the file that stores each tensor of a checkpoint; `None` if one file stores all tensors.
    pub fn of(catalog: &Catalog, files: &Files) -> Option<Self> {
        let file_of = |id: TensorId| {
            let places = catalog.tensor(id).chunks.iter().find_map(|chunk| chunk.location.file());
            places.and_then(|file| files.path(file).file_name()).map(PathBuf::from)
        };
        let named = state_dict::all_tensors(&catalog.state).into_iter();
        let placing: BTreeMap<Fqn, PathBuf> = named.filter_map(|(fqn, id)| Some((fqn, file_of(id)?))).collect();
        let distinct: BTreeSet<&PathBuf> = placing.values().collect();
        (distinct.len() > 1).then_some(Self(placing))
    }

    /// Returns whether a file is assigned to the tensor.
    pub fn has(&self, fqn: &Fqn) -> bool {
        self.0.contains_key(fqn)
    }

    /// Divides tensors among the files. In each file, the tensors keep their order. A tensor to which no file is
    /// assigned goes to the file of the preceding tensor. Such tensors at the start of the list go to the file of the
    /// first tensor to which a file is assigned.
    pub fn groups<T: Clone>(&self, tensors: &[(Fqn, T)]) -> Vec<(PathBuf, Vec<(Fqn, T)>)> {
        let first = self.0.values().min().cloned().unwrap_or_default();
        let mut at = tensors.iter().find_map(|(fqn, _)| self.0.get(fqn)).unwrap_or(&first);
        let mut groups: BTreeMap<&PathBuf, Vec<(Fqn, T)>> = BTreeMap::new();
        for tensor in tensors {
            at = self.0.get(&tensor.0).unwrap_or(at);
            groups.entry(at).or_default().push(tensor.clone());
        }
        groups.into_iter().map(|(name, tensors)| (name.clone(), tensors)).collect()
    }
}
