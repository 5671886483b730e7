//! Finds `_StridedShard` split factors in the user's placements that do not match the mesh dimensions. The likely cause
//! is that the user computed them for another tensor-parallel size.

use indexmap::IndexMap;

use crate::layout::rules::{Fallback, MeshLayout, PlacementChoice};
use crate::layout::strided::{UnknownSplitFactor, find_unknown_split_factor};
use crate::layout::{DeviceMesh, comma_list};
use crate::name_list::short_list;

/// Returns notes about the split factors of `_StridedShard` that do not match the mesh dimensions.
pub fn notes(layout: &MeshLayout) -> Vec<String> {
    let MeshLayout { mesh, rules, fallback, .. } = layout;
    let of_rules = rules.iter().filter_map(|rule| match &rule.choice {
        PlacementChoice::Shared(spec) => Some((spec.placements.as_slice(), rule.origin.clone())),
        PlacementChoice::Plain => None,
    });
    let of_all = match fallback {
        Fallback::Placements(list) => Some((list.as_slice(), format!("placements {}", comma_list(list)))),
        Fallback::Source | Fallback::Missing => None,
    };
    let mut strays: IndexMap<UnknownSplitFactor, Vec<String>> = IndexMap::new();
    for (list, origin) in of_rules.chain(of_all) {
        if let Some(unknown) = find_unknown_split_factor(list, mesh) {
            strays.entry(unknown).or_default().push(origin);
        }
    }
    strays.into_iter().map(|(unknown, origins)| note(&unknown, &origins, mesh)).collect()
}

fn note(unknown: &UnknownSplitFactor, origins: &[String], mesh: &DeviceMesh) -> String {
    let name = |dim: usize| mesh.names().map_or_else(|| format!("mesh dim {dim}"), |names| names[dim].clone());
    let sizes: Vec<String> =
        unknown.inner.iter().map(|&dim| format!("{} is {}", name(dim), mesh.shape()[dim])).collect();
    let UnknownSplitFactor { at, spec, expected: usual, .. } = unknown;
    let (at, origins, sizes) = (name(*at), short_list(origins, 2), sizes.join(", "));
    format!("{origins}: {at} has {spec}, but FSDP2 over tensor parallelism uses {usual} there, because {sizes}")
}
