//! Changes which tensors an open checkpoint shows, and under which names: selection, weight maps, names of optimizer state.
//! Only the catalog changes; no file is written.

use std::sync::{Arc, OnceLock};

use super::Checkpoint;
use crate::convert::options::{MapOptions, SelectOptions};
use crate::convert::weight_map::{self, AppliedMap};
use crate::convert::{self, Defaults, select_options};
use crate::error::{Error, Result};
use crate::select::{self, NameOptions, Wrappers};

impl Checkpoint {
    /// Converts the names, shapes and chunks of the checkpoint to another convention, by the weight map of the options. The
    /// tensors can then be inspected and read under their new names. Does nothing if the options name no map.
    ///
    /// # Errors
    /// `Usage` for a map that does not exist or does not fit the checkpoint.
    pub fn map(&mut self, options: &MapOptions) -> Result<()> {
        let names = NameOptions { wrappers: Wrappers::Cut, ..NameOptions::default() };
        self.apply_map(options, &names).map(drop)
    }

    /// Keeps only the tensors and objects that the options select, under the names that the options give, and applies the
    /// weight map of the options. The tensors can then be read under their new names. Names lose wrapper prefixes
    /// (`_orig_mod.`), unless [`SelectOptions::keep_names`] is set.
    ///
    /// # Errors
    /// `Usage` for a pattern, prefix or rename that matches nothing, for a map that does not fit, if tensors that the map
    /// joins are not equal, and for [`SelectOptions::dtype`], because tensors are read in the dtype in which they are stored.
    pub fn select(&mut self, options: &SelectOptions) -> Result<()> {
        if !options.dtype.is_empty() {
            return Err(Error::usage(
                "options::dtype has no effect on reading: a tensor is read in the dtype in which it is stored",
                "leave options::dtype out, and cast the tensor after reading",
            ));
        }
        let names = select_options(options, Defaults { wrappers: Wrappers::Cut, ..Defaults::everything() })?;
        let map = self.apply_map(&options.map, &names)?;
        if let Some(map) = &map {
            self.engine.work(&self.progress, |run| weight_map::check_joined(&self.inner, map, run))?;
        }
        let names = map.map_or(names, |map| map.options);
        let names = NameOptions { allow_unreadable: true, ..names };
        // On the threads of this checkpoint: the threads that all users of rayon share do not exist in a forked process.
        let selected = self.engine.workers.install(|| select::select(&self.inner.catalog, &names))?;
        self.left_out = [selected.left_out.tensors, selected.left_out.objects].concat();
        self.inner.catalog.state = selected.catalog.state;
        self.by_name = OnceLock::new();
        Ok(())
    }

    /// Returns the names, as the files have them, of the tensors and objects that [`Checkpoint::select`] has left out.
    #[must_use]
    pub fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// Replaces parameter ids, which are the keys of optimizer state in `optimizer.state_dict()`, by parameter names, as
    /// `get_optimizer_state_dict` has them. An optimizer whose parameter names the checkpoint does not tell keeps its ids.
    pub fn name_optimizer_state(&mut self) {
        convert::name_optimizers(&mut self.inner.catalog);
        self.by_name = OnceLock::new();
    }

    /// Applies a weight map, and returns it; returns `None` if the options name no map.
    fn apply_map(&mut self, options: &MapOptions, names: &NameOptions) -> Result<Option<AppliedMap>> {
        let (engine, inner) = (Arc::clone(&self.engine), &mut self.inner);
        let map = engine.workers.install(|| weight_map::apply(inner, options, names))?;
        if let Some(map) = &map {
            map.notes.iter().for_each(|note| self.progress.note(note));
            map.details.iter().for_each(|line| self.progress.detail(line));
            self.by_name = OnceLock::new();
            self.applied_map.clone_from(&map.document);
        }
        Ok(map)
    }
}
