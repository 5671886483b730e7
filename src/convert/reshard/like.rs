//! `--like` names another checkpoint whose layout the result gets. Each tensor gets the placements of the tensor with
//! the same name in that checkpoint. Optimizer state that is not in that checkpoint gets the placements of its
//! parameter if state and parameter have the same shape.

use std::path::Path as FilePath;

use crate::catalog::{Catalog, Fqn, Path, TensorEntry, TensorId, state_dict};
use crate::convert::matching_names::{NameMatch, Names, of_all_ranks};
use crate::error::{CatalogError, Error, Result};
use crate::format::Checkpoint;
use crate::name_list::{FEW, short_list};
use crate::select::Wrappers;

/// The layout of the checkpoint that `--like` names.
pub struct LikeLayout<'a> {
    root: &'a FilePath,
    /// The catalog of the `--like` checkpoint.
    pub catalog: &'a Catalog,
    names: Names,
    /// The tensors that were not found in the `--like` checkpoint, each with its path, and with its name inside the
    /// model if it is part of the model.
    missing: Vec<(Path, Option<String>)>,
}

impl<'a> LikeLayout<'a> {
    /// Indexes the names of the `--like` checkpoint.
    pub fn new(checkpoint: &'a Checkpoint, wrappers: Wrappers) -> Self {
        let names = Names::new(&checkpoint.catalog.state, wrappers);
        Self { root: &checkpoint.root, catalog: &checkpoint.catalog, names, missing: Vec::new() }
    }

    /// Returns the entry of the `--like` checkpoint whose layout a tensor gets: the entry of the same name. If there is
    /// no such entry for optimizer state, returns the entry of its parameter `parameter`, provided that the parameter
    /// has the shape of the state. Returns `None` if the `--like` checkpoint has no layout for the tensor.
    ///
    /// # Errors
    /// `Conflict` if the entry of the same name has another number of dimensions.
    pub fn find(
        &self,
        path: &Path,
        in_model: Option<&Fqn>,
        parameter: Option<&Fqn>,
        entry: &TensorEntry,
    ) -> Result<Option<&'a TensorEntry>> {
        if let Some(own) = self.own(path, in_model) {
            let own = self.catalog.tensor(own);
            if own.shape.len() == entry.shape.len() {
                return Ok(Some(own));
            }
            return Err(Error::Catalog(CatalogError::Conflict {
                fqn: path.to_string(),
                what: "the number of dims",
                between: format!("SRC and {}", self.root.display()),
                detail: format!("SRC has the shape {:?}, options::like has {:?}", entry.shape, own.shape),
                hint: Some(String::from("set the placements of this tensor with options::placements 'PATTERN=LIST'")),
            }));
        }
        let parameter = parameter.and_then(|name| self.names.parameter(name.as_str()));
        let parameter = parameter.map(|id| self.catalog.tensor(id));
        Ok(parameter.filter(|parameter| parameter.shape == entry.shape))
    }

    fn own(&self, path: &Path, in_model: Option<&Fqn>) -> Option<TensorId> {
        let found = match self.names.find(path, in_model.map(Fqn::as_str)) {
            NameMatch::Nothing => self.names.find(&of_all_ranks(path)?, None),
            found => found,
        };
        match found {
            NameMatch::One(id) | NameMatch::Two(id, _) => Some(id),
            NameMatch::Nothing => None,
        }
    }

    /// Records a tensor that the `--like` checkpoint should have but lacks.
    pub fn miss(&mut self, path: &Path, in_model: Option<&Fqn>) {
        self.missing.push((path.clone(), in_model.map(Fqn::to_string)));
    }

    /// Checks that the `--like` checkpoint lacks no tensor that needed a layout.
    ///
    /// # Errors
    /// `Usage` if the `--like` checkpoint lacks tensors.
    pub fn finish(self) -> Result<()> {
        let Some((path, in_model)) = self.missing.first() else { return Ok(()) };
        let names: Vec<String> = self.missing.iter().map(|(path, _)| path.to_string()).collect();
        Err(Error::usage(
            format!("{}: options::like {} has no tensor of this name", short_list(&names, FEW), self.root.display()),
            format!(
                "{}; set its placements with options::placements '{path}=LIST', or those of all tensors with \
                 options::placements LIST",
                self.names.nearest(path, in_model.as_deref())
            ),
        )
        .naming(&names))
    }
}

/// Returns true if a tensor needs no layout from `--like`: a 0-d tensor, which cannot be sharded, or random state, of
/// which each rank has its own value.
pub fn is_whole_anyway(path: &Path, entry: &TensorEntry) -> bool {
    entry.shape.is_empty() || state_dict::is_random_state(path.fqn().as_str())
}
