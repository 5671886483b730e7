//! Joins the shards in files of several ranks that do not record their layout, such as Meta's `consolidated.NN.pth`: the side of a
//! weight map declares how the ranks cut each tensor.

use crate::catalog::Catalog;
use crate::error::{Error, Result};
use crate::format::{Checkpoint, DeclaredLayout};
use crate::layout::DeviceMesh;
use crate::layout::rules::{PlacementChoice, Rule};
use crate::maps::{CutRule, CutTensor, Sizes, WeightMap};
use crate::select::mapped;

/// The side of a map that declares how ranks cut tensors.
#[derive(Debug)]
pub struct ShardedSide<'m> {
    pub map: &'m WeightMap,
    /// The index of the side.
    pub side: usize,
    /// The sizes that are known without the tensors.
    pub sizes: &'m Sizes,
}

/// Returns the placements of the tensors of a checkpoint as a side declares them. `model` is the catalog of the selected tensors.
///
/// # Errors
/// `Usage` if the shapes do not fit the sizes of the model, as when files of the last ranks are missing.
pub fn cut_rules(checkpoint: &Checkpoint, model: &Catalog, side: &ShardedSide<'_>) -> Result<Vec<CutRule>> {
    let tensors: Vec<CutTensor> = mapped::model_tensors(model)
        .into_iter()
        .map(|(name, id)| {
            let entry = checkpoint.catalog.tensor(id);
            let mut parts: Vec<Vec<u64>> = entry.local_shapes().iter().map(|part| part.sizes.to_vec()).collect();
            if parts.is_empty() {
                // The file of a single rank does not say its rank.
                parts.push(entry.shape.to_vec());
            }
            CutTensor { name, parts }
        })
        .collect();
    side.map.cut_rules(side.side, &tensors, side.sizes).map_err(|error| {
        let hint = error.hint();
        Error::usage(format!("{}: {error}", checkpoint.root.display()), hint)
    })
}

/// Joins the shards of a checkpoint as a side declares. `model` is the catalog of the selected tensors. Returns a note.
///
/// # Errors
/// `Usage` if the file of a rank is missing, or if the side does not declare how tensors are cut; errors of [`cut_rules`].
pub fn join_shards(checkpoint: &mut Checkpoint, model: &Catalog, side: &ShardedSide<'_>) -> Result<String> {
    let of_map = &side.map.sides[side.side];
    let name = format!("{}:{}", side.map.family, of_map.name);
    let ranks = checkpoint.ranks.all.len();
    if let Some((missing, _)) = (0..).zip(&checkpoint.ranks.all).find(|(number, rank)| rank.0 != *number) {
        return Err(Error::usage(
            format!("{}: rank {missing} has no file, and the other files have shards", checkpoint.root.display()),
            "give a folder with the files of all ranks",
        ));
    }
    if of_map.cut.is_empty() {
        return Err(Error::usage(
            format!(
                "{}: the tensors may be shards of {ranks} ranks, and the side {name} does not declare how they are cut",
                checkpoint.root.display()
            ),
            "choose a side that declares it (llama:meta), or declare the layout with options::src_mesh and options::src_placements",
        ));
    }
    let rules = cut_rules(checkpoint, model, side)?;
    let chosen = rules.iter().filter(|rule| rule.is_chosen);
    let chosen: Vec<String> = chosen.map(|rule| format!("{} is {}", rule.pattern, rule.placement)).collect();
    let rule = |rule: CutRule| Rule {
        pattern: rule.pattern,
        choice: PlacementChoice::Shared(vec![rule.placement].into()),
        origin: format!("the side {name}: {}", rule.placement),
    };
    checkpoint.declare_layout(&DeclaredLayout {
        mesh: Some(DeviceMesh::parse(&format!("tp={ranks}"))?),
        rules: rules.into_iter().map(rule).collect(),
        ..DeclaredLayout::default()
    })?;
    let chosen =
        if chosen.is_empty() { String::new() } else { format!("; the shapes show that {}", chosen.join(", ")) };
    Ok(format!("the shards of {ranks} ranks are joined as the side {name} declares{chosen}"))
}
