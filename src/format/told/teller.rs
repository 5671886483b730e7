//! Each plain tensor gets the sharding that it is told to have.
//!
//! Rules know a tensor by the names that rules for a target know it by. State and gradients follow their parameter where
//! every rank holds of both the same shape. State of another shape (a step, a factored moment) is not meant by what is
//! said of parameters: it is whole on every rank, unless a rule is for that state itself.

use std::collections::HashMap;
use std::path::{Path as FilePath, PathBuf};

use super::reduce::Reductions;
use super::refuse::{self, Refused};
use super::{Reading, Told};
use crate::catalog::owner::{Owner, Owners};
use crate::catalog::path::{clean_name, tensors};
use crate::catalog::{
    Catalog, Chunk, ChunkTable, Class, MeshId, Path, Sharding, Summands, TensorEntry, TensorId, checked_len_bytes,
    model,
};
use crate::error::{Error, Result};
use crate::layout::partial::{Reduction, summand};
use crate::layout::rules::{Chosen, Fallback, Layout, Shared};
use crate::layout::whole::{Held, PartError, whole};
use crate::layout::{Dims, LayoutError, Placement, PlacementSpec, Rank, Tile};
use crate::nearest;

/// What tensors without a rule are, where nothing is said of them.
const UNSAID: &str = "what is not said of it (whole on every rank)";

pub struct Teller<'a> {
    told: &'a Told,
    layout: &'a Layout,
    mesh: MeshId,
    catalog: &'a Catalog,
    root: &'a FilePath,
    reading: &'a Reading<'a>,
    owners: Owners<'a>,
    /// Where each tensor stands, by number; nowhere where only ranks that disagree have it.
    paths: Vec<Vec<Path>>,
    reductions: Reductions,
    /// By rule.
    used: Vec<bool>,
    /// Names seen, for saying what a pattern came near to.
    names: Vec<String>,
}

/// By what a rule may know a tensor.
struct Known {
    names: Vec<String>,
    /// It belongs to a parameter of other shapes, which goes by these names.
    stray: Option<Vec<String>>,
    /// The parameter it belongs to is not there.
    is_orphan: bool,
    is_nameless: bool,
}

impl<'a> Teller<'a> {
    pub fn new(
        told: &'a Told,
        layout: &'a Layout,
        mesh: MeshId,
        catalog: &'a Catalog,
        root: &'a FilePath,
        reading: &'a Reading<'a>,
        reductions: Reductions,
    ) -> Self {
        let mut paths = vec![Vec::new(); catalog.tensors.len()];
        tensors(&catalog.state, &Path::default(), &mut |path, id| paths[id.0 as usize].push(path.clone()));
        Self {
            told,
            layout,
            mesh,
            catalog,
            root,
            reading,
            owners: Owners::new(catalog),
            paths,
            reductions,
            used: vec![false; layout.rules.len()],
            names: Vec::new(),
        }
    }

    /// The entries that change, and what to tell.
    pub fn tell(mut self) -> Result<(Vec<(TensorId, TensorEntry)>, Vec<String>)> {
        let mut changed = Vec::new();
        for (id, entry) in (0..).map(TensorId).zip(&self.catalog.tensors) {
            if entry.class != Class::Tensor || entry.sharding.is_some() {
                continue;
            }
            let paths = &self.paths[id.0 as usize];
            let is_own = paths.iter().any(|path| model::is_random_state(path.fqn().as_str()));
            if paths.is_empty() || is_own {
                self.same_shapes(entry)?;
            } else {
                changed.push((id, self.entry(id, entry)?));
            }
        }
        if let Some(unused) = self.used.iter().position(|used| !used) {
            let rule = &self.layout.rules[unused];
            return Err(Error::usage(
                format!("{}: no plain tensor has a name like that", rule.said),
                nearest::hint(rule.pattern.as_str(), &self.names),
            ));
        }
        let notes = self.reductions.finish()?.into_iter().collect();
        Ok((changed, notes))
    }

    fn entry(&mut self, id: TensorId, entry: &TensorEntry) -> Result<TensorEntry> {
        let known = self.known(id);
        let (mut shared, said) = self.choose(entry, &known)?;
        let path = self.paths[id.0 as usize][0].clone();
        self.names.push(path.to_string());
        self.reductions.apply(&path, entry.dtype, &mut shared.placements);
        let held = held(entry);
        let mesh = &self.layout.mesh;
        let is_missing = |rank: Rank| !self.reading.ranks.contains(&rank);
        let found = whole(mesh, &shared, &held, &is_missing).map_err(|error| {
            let file = self.file(entry, rank_of(&error));
            let name = known.names.last().map_or(entry.fqn.as_str(), String::as_str);
            Refused { entry, name, shared: &shared, said: &said, held: &held, mesh }.error(error, &file)
        })?;
        if checked_len_bytes(&found.shape, entry.dtype).is_none() {
            return Err(refuse::too_large(
                &self.file(entry, held.first().map(|part| part.rank)),
                &entry.fqn,
                &found.shape,
            ));
        }
        let tiles: HashMap<Rank, Tile> = held.iter().map(|part| part.rank).zip(found.tiles).collect();
        let mut chunks = ChunkTable::new(found.shape.len());
        for chunk in entry.chunks.iter() {
            let tile = chunk.rank.and_then(|rank| tiles.get(&rank)).cloned().unwrap_or(chunk.tile);
            chunks.push(Chunk { tile, ..chunk });
        }
        let summands = Reduction::of(mesh.shape(), &shared.placements)?.map(|reduction| {
            let at = |chunk: Chunk| chunk.rank.and_then(|rank| mesh.coordinate(rank)).unwrap_or_default();
            let number = |chunk| summand(mesh.shape(), &shared.placements, &at(chunk));
            Summands { reduction, of_chunk: chunks.iter().map(number).collect() }
        });
        let stride = entry.stride.clone().filter(|_| found.shape == entry.shape);
        let Shared { placements, splits, slice } = shared;
        // One element is nothing to share; whoever has none is a plain tensor in any job.
        let is_scalar = found.shape.is_empty() && summands.is_none();
        let sharding = (!is_scalar).then_some(Sharding { mesh: self.mesh, placements, splits, slice });
        Ok(TensorEntry { shape: found.shape, sharding, stride, summands, chunks, ..entry.clone() })
    }

    fn choose(&mut self, entry: &TensorEntry, known: &Known) -> Result<(Shared, String)> {
        let names: Vec<&str> = known.names.iter().map(String::as_str).collect();
        for (used, rule) in self.used.iter_mut().zip(&self.layout.rules) {
            *used |= names.iter().any(|name| rule.pattern.covers(name));
        }
        let (layout, given) = match &known.stray {
            None => (self.layout.clone(), &self.told.fallback),
            Some(parameter) => (self.beyond(parameter), &None),
        };
        let chosen = match layout.choose(&names, &entry.shape, None) {
            Err(LayoutError::RuleMisfit { .. }) if known.is_orphan || known.stray.is_some() => {
                layout.choose(&[], &entry.shape, None)
            }
            chosen => chosen,
        };
        let Chosen { shared, rule, .. } = chosen?;
        let whole = || Shared::from(vec![Placement::Replicate; layout.mesh.ndim()]);
        let shared = shared.unwrap_or_else(whole);
        let is_all = shared.placements.iter().all(|placement| *placement == Placement::Replicate);
        let nothing_said = self.layout.rules.is_empty() && is_all;
        if known.is_nameless && rule.is_none() && !entry.shape.is_empty() && !nothing_said {
            return Err(refuse::unknown_number(&entry.fqn));
        }
        let of_fallback = || given.as_ref().map_or_else(|| UNSAID.to_owned(), |(_, said)| said.clone());
        Ok((shared, rule.map_or_else(of_fallback, |rule| layout.rules[rule].said.clone())))
    }

    /// What is said of state, not of the parameter that it belongs to.
    fn beyond(&self, parameter: &[String]) -> Layout {
        let mut layout = self.layout.clone();
        layout.rules.retain(|rule| !parameter.iter().any(|name| rule.pattern.covers(name)));
        layout.fallback = Fallback::Placements(vec![PlacementSpec::Replicate; layout.mesh.ndim()]);
        layout
    }

    fn known(&mut self, id: TensorId) -> Known {
        let mut known = Known { names: Vec::new(), stray: None, is_orphan: false, is_nameless: false };
        for path in self.paths[id.0 as usize].clone() {
            let owner = self.owners.of(&path);
            let parameter = owner.as_ref().and_then(|owner| owner.id);
            let follows = parameter.filter(|parameter| self.lie_alike(*parameter, id));
            let is_stray = parameter.is_some() && follows.is_none();
            known.names.extend(self.owners.rule_names(&path, owner.as_ref(), is_stray));
            for own in parameter.iter().flat_map(|parameter| &self.paths[parameter.0 as usize]) {
                let names = model::rule_names(own, &self.owners.model_root);
                if is_stray {
                    known.stray.get_or_insert_default().extend(names);
                } else {
                    known.names.extend(names);
                }
            }
            known.is_orphan |= owner.is_some() && parameter.is_none();
            known.is_nameless |= matches!(owner, Some(Owner { by_number: true, name: None, .. }));
        }
        if !self.told.keep_names {
            with_clean(&mut known.names);
            known.stray.iter_mut().for_each(with_clean);
        }
        known
    }

    /// Whether every rank holds of both the same shape.
    fn lie_alike(&self, left: TensorId, right: TensorId) -> bool {
        let (left, right) = (held(self.catalog.tensor(left)), held(self.catalog.tensor(right)));
        left == right
    }

    /// What nothing is said of is the same everywhere, its values apart.
    fn same_shapes(&self, entry: &TensorEntry) -> Result<()> {
        let other = entry.chunks.iter().find(|chunk| chunk.tile.sizes() != entry.shape);
        let Some(other) = other else { return Ok(()) };
        let between = format!("{} and {}", entry.chunk_name(0), list_rank(&other));
        let detail = format!("{:?} and {:?}", entry.shape.as_slice(), other.tile.sizes().as_slice());
        Err(entry.fqn.disagreement("shape", between, detail))
    }

    /// The file of a rank, where it has a chunk that is anywhere.
    fn file(&self, entry: &TensorEntry, rank: Option<Rank>) -> PathBuf {
        let own = entry.chunks.iter().filter(|chunk| rank.is_none() || chunk.rank == rank);
        let file = own.filter_map(|chunk| chunk.place.file()).next();
        file.map_or_else(|| self.root.to_path_buf(), |file| self.reading.files.path(file).to_path_buf())
    }
}

/// What ranks hold of it; a tensor that is tied on some ranks may be there twice.
fn held(entry: &TensorEntry) -> Vec<Held> {
    let mut known: HashMap<Rank, Dims> = HashMap::with_capacity(entry.chunks.len());
    let mut held = Vec::with_capacity(entry.chunks.len());
    for chunk in entry.chunks.iter() {
        let Some(rank) = chunk.rank else { continue };
        let sizes = chunk.tile.sizes();
        if known.insert(rank, sizes.clone()).as_ref() != Some(&sizes) {
            held.push(Held { rank, sizes });
        }
    }
    held
}

fn list_rank(chunk: &Chunk) -> String {
    chunk.rank.map_or_else(|| String::from("another"), |rank| format!("rank {rank}"))
}

fn rank_of(error: &PartError) -> Option<Rank> {
    match error {
        PartError::Sizes { rank, .. } | PartError::Absent { rank } | PartError::Outside { rank } => Some(*rank),
        PartError::Overflow { .. } | PartError::Layout { .. } => None,
    }
}

/// Names without the prefixes of wrappers, too.
fn with_clean(names: &mut Vec<String>) {
    let clean: Vec<String> = names.iter().map(|name| clean_name(name)).collect();
    names.extend(clean);
}
