//! Rules of a layout file, and their application to a mesh: names of mesh dims become indices, and sizes become splits.
//!
//! Unit of sizes: elements. Invariant: a rule that was applied to a mesh has one placement for each mesh dim.

use super::within;
use crate::document::{FilePosition, did_you_mean};
use crate::layout::rules::{PlacementChoice, PlacementList, Rule};
use crate::layout::strided::adapt_split_factors;
use crate::layout::{DeviceMesh, LayoutError, MeshDim, Pattern, PlacementSpec, Split};

/// A rule of a layout file, before it is applied to a mesh.
#[derive(Clone, Debug)]
pub struct WrittenRule {
    pub line: usize,
    /// The name of the rule in messages: `rules "**.norm.weight"`.
    pub section: String,
    pub pattern: Pattern,
    pub placements: WrittenPlacements,
}

/// The placements of a rule.
#[derive(Clone, Debug)]
pub enum WrittenPlacements {
    Plain,
    /// A DTensor with these placements.
    Shared(WrittenSpec),
}

/// The placements that a rule gives to a DTensor, with the line of each key that may not fit a mesh.
#[derive(Clone, Debug)]
pub struct WrittenSpec {
    pub placements: Vec<PlacementSpec>,
    /// The line of the key `slice`, and the names of the mesh dims of the slice.
    pub slice: Option<(usize, Vec<String>)>,
    /// The line of the key `split`, and the value of the key: one split rule for all mesh dims, or one for each mesh
    /// dim.
    pub split: Option<(usize, Vec<Split>)>,
    /// For each entry of the key `sizes`: the line of the entry, the name of the mesh dim, and one size for each
    /// coordinate of this mesh dim.
    pub sizes: Vec<(usize, String, Vec<u64>)>,
}

impl WrittenRule {
    /// Applies the rule to `mesh`, the mesh in use. `own` is the mesh in the file, for which the rule was written. If
    /// the rule has sizes but no split rule, `split` (the default of the layout) applies to the mesh dims without
    /// sizes.
    pub fn resolve(
        &self,
        name: &str,
        own: &DeviceMesh,
        mesh: &DeviceMesh,
        split: Option<&Split>,
    ) -> Result<Rule, LayoutError> {
        let at = FilePosition { name, line: self.line, section: &self.section };
        let choice = match &self.placements {
            WrittenPlacements::Plain => PlacementChoice::Plain,
            WrittenPlacements::Shared(spec) => {
                let mut spec = spec.resolve(at, mesh, split)?;
                spec.placements = adapt_split_factors(&spec.placements, own, mesh);
                PlacementChoice::Shared(spec)
            }
        };
        Ok(Rule { pattern: self.pattern.clone(), choice, origin: at.describe() })
    }
}

impl WrittenSpec {
    fn resolve(
        &self,
        at: FilePosition<'_>,
        mesh: &DeviceMesh,
        split: Option<&Split>,
    ) -> Result<PlacementList, LayoutError> {
        let slice = self.slice.as_ref().map(|(line, names)| slice(at.at_line(*line), names, mesh)).transpose()?;
        let spec = PlacementList { placements: self.placements.clone(), splits: self.splits(at, mesh, split)?, slice };
        check(at, &spec, mesh)?;
        for (line, name, sizes) in &self.sizes {
            let dim = dim(at.at_line(*line), name, mesh)?;
            let placement = spec.placements[dim.0];
            if !matches!(placement, PlacementSpec::Shard(_) | PlacementSpec::StridedShard { .. }) {
                let problem =
                    format!("sizes {sizes:?} for {name}: expected S or _S on this mesh dim, found {placement}");
                return Err(at.at_line(*line).error(problem, None));
            }
        }
        // A slice that has all mesh dims is the mesh itself, so it is stored as no slice.
        let slice = spec.slice.filter(|dims| dims.len() < mesh.ndim());
        Ok(PlacementList { slice, ..spec })
    }

    fn splits(
        &self,
        at: FilePosition<'_>,
        mesh: &DeviceMesh,
        of_all: Option<&Split>,
    ) -> Result<Vec<Split>, LayoutError> {
        let mut splits = match &self.split {
            None if self.sizes.is_empty() => return Ok(Vec::new()),
            None => vec![of_all.cloned().unwrap_or_default(); mesh.ndim()],
            Some((_, splits)) if splits.len() == 1 => vec![splits[0].clone(); mesh.ndim()],
            Some((line, splits)) if splits.len() != mesh.ndim() => {
                let problem =
                    format!("expected one split, or one for each dim of the mesh {mesh}, found {}", splits.len());
                return Err(at.at_line(*line).error(problem, None));
            }
            Some((_, splits)) => splits.clone(),
        };
        for (line, name, sizes) in &self.sizes {
            let (at, dim) = (at.at_line(*line), dim(at.at_line(*line), name, mesh)?);
            if sizes.len() as u64 != mesh.shape()[dim.0] {
                let problem =
                    format!("sizes {sizes:?} for {name}: expected {} sizes on the mesh {mesh}", mesh.shape()[dim.0]);
                return Err(at.error(problem, None));
            }
            splits[dim.0] = Split::Sizes(sizes.as_slice().into());
        }
        Ok(splits)
    }
}

/// Checks that there is one placement for each mesh dim, and that the placement is R on each mesh dim outside the slice.
pub fn check(at: FilePosition<'_>, spec: &PlacementList, mesh: &DeviceMesh) -> Result<(), LayoutError> {
    spec.check(mesh).map_err(within(at))
}

fn slice(at: FilePosition<'_>, names: &[String], mesh: &DeviceMesh) -> Result<Vec<MeshDim>, LayoutError> {
    let dims: Vec<MeshDim> = names.iter().map(|name| dim(at, name, mesh)).collect::<Result<_, _>>()?;
    if dims.windows(2).all(|pair| pair[0] < pair[1]) {
        return Ok(dims);
    }
    let problem = format!("slice `{}`: expected dims in the order of the mesh {mesh}, each once", names.join(","));
    Err(at.error(problem, None))
}

/// Returns the mesh dim with this name.
pub fn dim(at: FilePosition<'_>, name: &str, mesh: &DeviceMesh) -> Result<MeshDim, LayoutError> {
    mesh.dim_by_name(name).ok_or_else(|| {
        let names: Vec<&str> = mesh.names().unwrap_or_default().iter().map(String::as_str).collect();
        let hint = match names.as_slice() {
            [] => String::from("name the mesh dims: mesh = \"dp=2,tp=2\""),
            names => did_you_mean(name, names),
        };
        at.error(format!("the mesh {mesh} has no dim `{name}`"), Some(hint))
    })
}
