//! Finds the layout of flat parameters: a flat layout that the user gives, a flat layout in the folder of the rank
//! files, or a flat layout that is computed from the rank files and the shapes in another checkpoint of the model.

use std::path::{Path, PathBuf};

use super::like::LikeModel;
use super::recover::{ShapeSource, recover};
use super::survey::FlatState;
use crate::catalog::flat::FlatLayout;
use crate::error::{Error, Result};
use crate::format::FlatKnowledge;
use crate::format::fsdp_flat::document;
use crate::format::fsdp_flat::unknown_layout_error;
use crate::storage::lookup;

/// The source of the information that rank files lack about their model: the units, and the order and shapes of
/// parameters.
#[derive(Debug)]
pub enum ModelKnowledge {
    /// A flat layout file. A file in the folder of the rank files describes exactly these rank files. A file that the
    /// user gives (`given` is true) describes the model, but may have been made for another number of ranks.
    Document {
        path: PathBuf,
        layout: FlatLayout,
        given: bool,
    },
    Like(LikeModel),
    Unknown,
}

impl ModelKnowledge {
    /// Looks for a flat layout or another checkpoint of the model.
    ///
    /// # Errors
    ///
    /// The errors of reading a flat layout or a checkpoint.
    pub fn find(folder: &Path, knowledge: &FlatKnowledge, states: &[&FlatState]) -> Result<Self> {
        let document_path = folder.join(document::FILE_NAME);
        let path = match &knowledge.layout {
            Some(given) => Some(given.clone()),
            None => lookup::is_file(&document_path)?.then_some(document_path),
        };
        if let Some(path) = path {
            let layout = document::read(&path)?;
            return Ok(Self::Document { path, layout, given: knowledge.layout.is_some() });
        }
        match &knowledge.like {
            Some(path) if !states.is_empty() => Ok(Self::Like(LikeModel::open(path)?)),
            _ => Ok(Self::Unknown),
        }
    }

    /// Returns the flat layout that all of `states` have. If the shapes of the parameters are unknown and `raw` is
    /// true, the layout describes each parameter (or, without `use_orig_params`, each flat parameter) as a 1-d tensor.
    ///
    /// # Errors
    /// `Unsupported` if the layout is unknown, or if the state dicts have different layouts; the errors of [`recover`].
    pub fn layout(&self, states: &[&FlatState], raw: bool) -> Result<FlatLayout> {
        let shapes = match self {
            Self::Document { layout, given: true, .. } => return adapt_to_files(layout, states),
            Self::Document { layout, .. } => return Ok(layout.clone()),
            Self::Like(like) => ShapeSource::Like(like),
            Self::Unknown if raw => ShapeSource::Raw,
            Self::Unknown => {
                let (state, at) = (states[0], &states[0].ranks[0].file_path);
                let lacking = if state.has_views() { "the shapes" } else { "the names, order and shapes" };
                let what = format!(
                    "{}: the files hold FSDP1 flat parameters, but not {lacking} of the original parameters",
                    at.display()
                );
                return Err(unknown_layout_error(what));
            }
        };
        let mut layout: Option<FlatLayout> = None;
        for state in states {
            let own = recover(state, shapes)?;
            if layout.get_or_insert_with(|| own.clone()) != &own {
                let at = state.ranks[0].file_path.display();
                return Err(unknown_layout_error(format!(
                    "{at}: the state dicts `{}` and `{}` have different flat parameters",
                    states[0].path, state.path
                )));
            }
        }
        Ok(layout.expect("a state dict with flat parameters"))
    }

    /// Returns the path of the flat layout file; `None` if the layout does not come from such a file.
    pub fn document(&self) -> Option<&Path> {
        match self {
            Self::Document { path, .. } => Some(path),
            Self::Like(_) | Self::Unknown => None,
        }
    }

    /// Returns the origin of the layout, for messages.
    pub fn describe(&self) -> String {
        match self {
            Self::Document { path, .. } => path.display().to_string(),
            Self::Like(like) => format!("{} and the other files", like.path.display()),
            Self::Unknown => String::from("the other files"),
        }
    }
}

/// Returns the layout, but with the number of ranks, the size of a shard group and the value of `use_orig_params` that
/// the rank files have.
fn adapt_to_files(layout: &FlatLayout, states: &[&FlatState]) -> Result<FlatLayout> {
    let mut layout = layout.clone();
    let Some(state) = states.first() else { return Ok(layout) };
    let mut parts = state.ranks.iter().flat_map(|rank| rank.flat_parts.values());
    if let Some((group, world)) = parts.find_map(|part| part.group_sizes) {
        (layout.shard_group_size, layout.world_size) = (group, world);
    }
    if layout.use_orig_params != state.has_views() {
        layout.use_orig_params = !layout.use_orig_params;
        // With `use_orig_params` an optimizer numbers parameters; without it, an optimizer numbers flat parameters.
        layout.optimizer = None;
    }
    match layout.check() {
        Ok(()) => Ok(layout),
        Err(wrong) => Err(Error::malformed(&state.ranks[0].file_path, wrong.at, wrong.expected, wrong.found)),
    }
}
