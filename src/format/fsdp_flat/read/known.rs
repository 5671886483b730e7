//! Where the layout of flat parameters comes from: a flat layout that is given, one that lies beside the files, the files
//! themselves with shapes from another checkpoint of the model.

use std::path::{Path, PathBuf};

use super::like::LikeModel;
use super::recover::{ShapeSource, recover};
use super::survey::FlatState;
use crate::catalog::flat::FlatLayout;
use crate::error::{Error, Result};
use crate::format::FlatKnowledge;
use crate::format::fsdp_flat::document;
use crate::format::fsdp_flat::refuse;
use crate::storage::lookup;

/// What is known of a model beyond its files.
#[derive(Debug)]
pub enum ModelKnowledge {
    /// A flat layout: one that lay beside the files is that of the files, one that is given that of the model, in
    /// whatever job it was made.
    Document {
        path: PathBuf,
        layout: FlatLayout,
        given: bool,
    },
    Like(LikeModel),
    Nothing,
}

impl ModelKnowledge {
    /// # Errors
    /// As reading a flat layout or a checkpoint.
    pub fn find(folder: &Path, knowledge: &FlatKnowledge, states: &[&FlatState]) -> Result<Self> {
        let beside = folder.join(document::FILE_NAME);
        let path = match &knowledge.layout {
            Some(given) => Some(given.clone()),
            None => lookup::is_file(&beside)?.then_some(beside),
        };
        if let Some(path) = path {
            let layout = document::read(&path)?;
            return Ok(Self::Document { path, layout, given: knowledge.layout.is_some() });
        }
        match &knowledge.like {
            Some(path) if !states.is_empty() => Ok(Self::Like(LikeModel::open(path)?)),
            _ => Ok(Self::Nothing),
        }
    }

    /// The layout of all these state dicts.
    ///
    /// # Errors
    /// `Unsupported` where it would be a guess, or where they have several; as recovering.
    pub fn layout(&self, states: &[&FlatState], raw: bool) -> Result<FlatLayout> {
        let shapes = match self {
            Self::Document { layout, given: true, .. } => return of_these_files(layout, states),
            Self::Document { layout, .. } => return Ok(layout.clone()),
            Self::Like(like) => ShapeSource::Like(like),
            Self::Nothing if raw => ShapeSource::Raw,
            Self::Nothing => {
                let (state, at) = (states[0], &states[0].ranks[0].at);
                let lacking = if state.has_views() { "the shapes" } else { "the names, order and shapes" };
                let what = format!(
                    "{}: flat parameters of FSDP1, and nothing tells {lacking} of what they hold",
                    at.display()
                );
                return Err(refuse(what));
            }
        };
        let mut layout: Option<FlatLayout> = None;
        for state in states {
            let own = recover(state, shapes)?;
            if layout.get_or_insert_with(|| own.clone()) != &own {
                let at = state.ranks[0].at.display();
                return Err(refuse(format!(
                    "{at}: `{}` and `{}` have different flat parameters",
                    states[0].path, state.path
                )));
            }
        }
        Ok(layout.expect("a state dict with flat parameters"))
    }

    /// For messages.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Document { path, .. } => path.display().to_string(),
            Self::Like(like) => format!("{} and the other files", like.path.display()),
            Self::Nothing => String::from("the other files"),
        }
    }
}

/// The layout of a model, for the ranks and the `use_orig_params` that files tell of.
fn of_these_files(layout: &FlatLayout, states: &[&FlatState]) -> Result<FlatLayout> {
    let mut layout = layout.clone();
    let Some(state) = states.first() else { return Ok(layout) };
    let mut parts = state.ranks.iter().flat_map(|rank| rank.flats.values());
    if let Some((group, world)) = parts.find_map(|part| part.sizes) {
        (layout.shard_group_size, layout.world_size) = (group, world);
    }
    if layout.use_orig_params != state.has_views() {
        layout.use_orig_params = !layout.use_orig_params;
        // It numbers something else.
        layout.optimizer = None;
    }
    match layout.check() {
        Ok(()) => Ok(layout),
        Err(wrong) => Err(Error::malformed(&state.ranks[0].at, wrong.at, wrong.expected, wrong.found)),
    }
}
