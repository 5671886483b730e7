//! `--like`: where another checkpoint has its tensors.
//!
//! A tensor lies as the one of its name there; state of an optimizer that has no entry of its own there lies as its
//! parameter, where it has the shape of that.

use std::path::Path as FilePath;

use crate::catalog::{Catalog, Fqn, Path, TensorEntry, TensorId, model};
use crate::convert::names::{NameMatch, Names, of_all_ranks};
use crate::error::{CatalogError, Error, Result};
use crate::format::Checkpoint;
use crate::name_list::{FEW, short_list};
use crate::select::Wrappers;

pub struct LikeLayout<'a> {
    root: &'a FilePath,
    pub catalog: &'a Catalog,
    names: Names,
    /// Tensors that are not there, with their names in the model.
    missing: Vec<(Path, Option<String>)>,
}

impl<'a> LikeLayout<'a> {
    pub fn new(checkpoint: &'a Checkpoint, wrappers: Wrappers) -> Self {
        let names = Names::new(&checkpoint.catalog.state, wrappers);
        Self { root: &checkpoint.root, catalog: &checkpoint.catalog, names, missing: Vec::new() }
    }

    /// The entry to follow: that of the tensor itself, else that of the parameter it is state of.
    ///
    /// # Errors
    /// `Conflict` where the tensor itself has another number of dims there.
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
                detail: format!("{:?} and {:?}", entry.shape, own.shape),
                hint: Some(String::from("options::placements 'PATTERN=LIST' says how it is to lie")),
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

    /// Remember a tensor that is to be found and is not.
    pub fn miss(&mut self, path: &Path, in_model: Option<&Fqn>) {
        self.missing.push((path.clone(), in_model.map(Fqn::to_string)));
    }

    /// # Errors
    /// `Usage` where tensors were missed.
    pub fn finish(self) -> Result<()> {
        let Some((path, in_model)) = self.missing.first() else { return Ok(()) };
        let names: Vec<String> = self.missing.iter().map(|(path, _)| path.to_string()).collect();
        Err(Error::usage(
            format!("{}: options::like {} has no tensor of this name", short_list(&names, FEW), self.root.display()),
            format!(
                "{}; options::placements '{path}=LIST' says how it is to lie, a bare LIST how all of them are",
                self.names.nearest(path, in_model.as_deref())
            ),
        )
        .naming(&names))
    }
}

/// Whether a tensor that --like lacks is whole on every rank without being asked about: there is nothing to cut, or
/// each rank has its own.
pub fn is_whole_anyway(path: &Path, entry: &TensorEntry) -> bool {
    entry.shape.is_empty() || model::is_random_state(path.fqn().as_str())
}
