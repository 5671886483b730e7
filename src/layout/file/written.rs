//! Rules as they are written, and what they mean on a mesh: names of dims become dims, sizes become splits.

use super::fields::{FilePosition, did_you_mean};
use crate::layout::rules::{PlacementChoice, PlacementList, Rule};
use crate::layout::strided::follow;
use crate::layout::{DeviceMesh, LayoutError, MeshDim, Pattern, PlacementSpec, Split};

#[derive(Clone, Debug)]
pub struct WrittenLayout {
    pub line: usize,
    /// `rules "**.norm.weight"`
    pub what: String,
    pub pattern: Pattern,
    pub lies: WrittenPlacements,
}

#[derive(Clone, Debug)]
pub enum WrittenPlacements {
    Plain,
    Shared(WrittenSpec),
}

/// With the lines of what may not fit a mesh.
#[derive(Clone, Debug)]
pub struct WrittenSpec {
    pub placements: Vec<PlacementSpec>,
    pub slice: Option<(usize, Vec<String>)>,
    /// One for all mesh dims, or one each.
    pub split: Option<(usize, Vec<Split>)>,
    /// Names of mesh dims, and a size for each of their coordinates.
    pub sizes: Vec<(usize, String, Vec<u64>)>,
}

impl WrittenLayout {
    /// On a mesh, which takes the place of the file's `own`. Tensors without a split of their own have that of the layout.
    pub fn on(
        &self,
        name: &str,
        own: &DeviceMesh,
        mesh: &DeviceMesh,
        split: Option<&Split>,
    ) -> Result<Rule, LayoutError> {
        let at = FilePosition { name, line: self.line, what: &self.what };
        let lies = match &self.lies {
            WrittenPlacements::Plain => PlacementChoice::Plain,
            WrittenPlacements::Shared(spec) => {
                let mut spec = spec.on(at, mesh, split)?;
                spec.placements = follow(&spec.placements, own, mesh);
                PlacementChoice::Shared(spec)
            }
        };
        Ok(Rule { pattern: self.pattern.clone(), lies, said: at.said() })
    }
}

impl WrittenSpec {
    fn on(&self, at: FilePosition<'_>, mesh: &DeviceMesh, split: Option<&Split>) -> Result<PlacementList, LayoutError> {
        let slice = self.slice.as_ref().map(|(line, names)| slice(at.on(*line), names, mesh)).transpose()?;
        let spec = PlacementList { placements: self.placements.clone(), splits: self.splits(at, mesh, split)?, slice };
        check(at, &spec, mesh)?;
        for (line, name, sizes) in &self.sizes {
            let dim = dim(at.on(*line), name, mesh)?;
            let placement = spec.placements[dim.0];
            if !matches!(placement, PlacementSpec::Shard(_) | PlacementSpec::StridedShard { .. }) {
                let problem = format!("sizes {sizes:?} for {name}, on which it is {placement}: nothing is cut");
                return Err(at.on(*line).wrong(problem, None));
            }
        }
        // A slice of all dims is the mesh itself.
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
                return Err(at.on(*line).wrong(problem, None));
            }
            Some((_, splits)) => splits.clone(),
        };
        for (line, name, sizes) in &self.sizes {
            let (at, dim) = (at.on(*line), dim(at.on(*line), name, mesh)?);
            if sizes.len() as u64 != mesh.shape()[dim.0] {
                let problem =
                    format!("sizes {sizes:?} for {name}: expected {} on the mesh {mesh}", mesh.shape()[dim.0]);
                return Err(at.wrong(problem, None));
            }
            splits[dim.0] = Split::Sizes(sizes.as_slice().into());
        }
        Ok(splits)
    }
}

pub fn check(at: FilePosition<'_>, spec: &PlacementList, mesh: &DeviceMesh) -> Result<(), LayoutError> {
    spec.check(mesh).map_err(at.within())
}

fn slice(at: FilePosition<'_>, names: &[String], mesh: &DeviceMesh) -> Result<Vec<MeshDim>, LayoutError> {
    let dims: Vec<MeshDim> = names.iter().map(|name| dim(at, name, mesh)).collect::<Result<_, _>>()?;
    if dims.windows(2).all(|pair| pair[0] < pair[1]) {
        return Ok(dims);
    }
    let problem = format!("slice `{}`: expected dims in the order of the mesh {mesh}, each once", names.join(","));
    Err(at.wrong(problem, None))
}

pub fn dim(at: FilePosition<'_>, name: &str, mesh: &DeviceMesh) -> Result<MeshDim, LayoutError> {
    mesh.dim_by_name(name).ok_or_else(|| {
        let names: Vec<&str> = mesh.names().unwrap_or_default().iter().map(String::as_str).collect();
        let hint = match names.as_slice() {
            [] => String::from("name its dims: mesh = \"dp=2,tp=2\""),
            names => did_you_mean(name, names),
        };
        at.wrong(format!("the mesh {mesh} has no dim `{name}`"), Some(hint))
    })
}
