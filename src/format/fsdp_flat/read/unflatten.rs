//! Replaces each flat parameter in a state dict by the parameters that it contains, with their names and shapes.
//!
//! Only views change, and no data is copied. The elements that a rank has of a parameter of `n` dims are a range, which
//! becomes at most `2n-1` boxes of the parameter. Each box is a view of the flat parameter's storage. Unit of lengths
//! and offsets: elements. If the files record the order of modules, the new entries are in the order of the state dict
//! of the model without FSDP.

use std::collections::HashMap;
use std::ops::Range;

use super::survey::FlatState;
use crate::catalog::flat::{FlatLayout, FlatParam, FlatUnit, flat_module};
use crate::catalog::modules::module_of;
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Dtype, Fqn, TensorId, Value, permuted_stride};
use crate::format::torch::RankFile;
use crate::format::torch::{ProcessGroup, TensorNode, View};
use crate::layout::Region;
use crate::layout::flat::{FlatContent, FlatParameter};

/// One rank's shard of a unit.
pub struct UnitShard<'a> {
    pub unit: &'a FlatUnit,
    pub flat: &'a FlatParameter,
    pub shard: u64,
    pub group: ProcessGroup,
}

impl UnitShard<'_> {
    /// Returns a tensor for each parameter of the unit, with the boxes of the parameter that the rank has. `shard` is
    /// the view that stores the rank's shard; if it is `None`, the tensors have no boxes.
    pub fn parameters(&self, dtype: Dtype, shard: Option<&View>) -> Vec<TensorNode> {
        let mut local: Vec<Vec<_>> = vec![Vec::new(); self.unit.params.len()];
        if let Some(view) = shard {
            let stride = element_stride(view);
            for piece in self.flat.pieces(self.shard) {
                if let FlatContent::Parameter { index, elements } = piece.content {
                    local[index] = boxes(&self.unit.params[index], elements, view, view.offset + piece.offset * stride);
                }
            }
        }
        self.unit.params.iter().zip(local).map(|(param, local)| self.sharded(param, dtype, local)).collect()
    }

    /// Returns a parameter as a ShardedTensor of which this rank has the boxes `local`. Under `NO_SHARD` the rank has the
    /// whole parameter, which is a plain tensor.
    pub fn sharded(&self, param: &FlatParam, dtype: Dtype, local: Vec<(Region, View)>) -> TensorNode {
        let is_no_shard = self.group.sizes.is_some_and(|(shards, _)| shards == 1);
        if let ([(region, view)], true) = (local.as_slice(), is_no_shard)
            && region.sizes == param.shape
        {
            return TensorNode::Plain(view.clone());
        }
        let all = local.iter().map(|(region, _)| region.clone()).collect();
        let stride = param.stride.as_ref().and_then(|stride| permuted_stride(&param.shape, stride));
        TensorNode::Sharded { dtype, shape: param.shape.clone(), stride, group: self.group, local, all }
    }
}

/// Returns the distance between neighboring elements of a 1-d view, in elements of the storage. Returns 1 for a view
/// with one element, because the stride of such a view has no meaning.
fn element_stride(view: &View) -> u64 {
    if view.sizes[0] > 1 { view.strides[0] } else { 1 }
}

/// Splits a range of a parameter's elements into boxes. The first element of the range is element `at` of the storage
/// of `view`.
pub fn boxes(param: &FlatParam, elements: Range<u64>, view: &View, mut at: u64) -> Vec<(Region, View)> {
    let order = param.order().expect("a layout that was checked");
    let step = element_stride(view);
    let boxes = order.cut(&param.shape, elements).into_iter().map(|(region, strides)| {
        let view = View {
            offset: at,
            sizes: region.sizes.clone(),
            strides: strides.iter().map(|stride| stride * step).collect(),
            ..view.clone()
        };
        at += region.numel() * step;
        (region, view)
    });
    boxes.collect()
}

/// Returns the positions of parameters and shards in the flat parameter of each unit.
pub fn flat_parameters(layout: &FlatLayout) -> Vec<FlatParameter> {
    layout.units.iter().map(|unit| layout.flat(unit)).collect()
}

/// Replaces the flat parameters of a state dict by parameters. The function `check` must have accepted this state dict
/// with this layout.
pub fn unflatten(files: &mut [RankFile], state: &FlatState, layout: &FlatLayout) {
    let flat_params = flat_parameters(layout);
    for rank in &state.ranks {
        let contents = &mut files[rank.file_index].contents;
        let mut ids: HashMap<&Fqn, TensorId> = HashMap::new();
        let shard = layout.shard_of(rank.rank);
        let group = ProcessGroup { rank: rank.rank, sizes: Some((layout.shard_group_size, layout.world_size)) };
        for (unit, flat) in layout.units.iter().zip(&flat_params) {
            let Some(part) = rank.flat_parts.get(&unit.module) else { continue };
            let unit_shard = UnitShard { unit, flat, shard, group };
            let found = unit_shard.parameters(part.dtype, part.shard.as_ref().map(|(_, view)| view));
            for (param, found) in unit.params.iter().zip(found) {
                ids.insert(&param.fqn, contents.push(found));
            }
        }
        for shared in layout.units.iter().flat_map(|unit| &unit.shared) {
            if let Some(&id) = ids.get(&shared.with) {
                ids.insert(&shared.fqn, id);
            }
        }
        if let Some(Value::Dict(dict)) = state.path.find_mut(&mut contents.value) {
            let entries = std::mem::take(&mut dict.entries);
            dict.entries =
                entries.into_iter().flat_map(|(key, value)| replace_entry(key, value, layout, &ids)).collect();
            if let Some(registered) = &state.module_positions {
                // The entries are sorted, because modules of other units may come between the modules of this unit.
                dict.entries.sort_by_cached_key(|(key, _)| {
                    let name = clean_name(key.as_str().unwrap_or_default());
                    registered.get(module_of(&name)).copied().unwrap_or(usize::MAX)
                });
            }
        }
    }
}

/// Returns the entries that replace the entry `(key, value)` of the state dict. A flat parameter becomes the parameters
/// of its unit; with `use_orig_params` the flat parameter is removed, because the state dict also has the parameters. A
/// view becomes its parameter. Any other entry stays.
fn replace_entry(key: Value, value: Value, layout: &FlatLayout, ids: &HashMap<&Fqn, TensorId>) -> Vec<(Value, Value)> {
    let Some(name) = key.as_str() else { return vec![(key, value)] };
    if let Some(module) = flat_module(name)
        && let Some(unit) = layout.units.iter().find(|unit| unit.module == module)
    {
        if layout.use_orig_params {
            return Vec::new();
        }
        let names = unit.params.iter().map(|param| &param.fqn).chain(unit.shared.iter().map(|shared| &shared.fqn));
        let names = names.filter_map(|name| Some((name, *ids.get(name)?)));
        return names.map(|(name, id)| (Value::Str(name.into()), Value::Tensor(id))).collect();
    }
    let clean = clean_name(name);
    match ids.get(&Fqn::from(clean.as_str())) {
        Some(&id) => vec![(Value::Str(clean.into()), Value::Tensor(id))],
        None => vec![(key, value)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::unravel;

    /// For each element of a flat parameter, checks that the new views of the shards have the element at the right
    /// position.
    #[test]
    fn unflattened_views_keep_every_element() {
        let param = |fqn: &str, shape: &[u64], stride: Option<&[u64]>| FlatParam {
            fqn: fqn.into(),
            shape: shape.into(),
            stride: stride.map(Into::into),
        };
        let params = vec![
            param("scalar", &[], None),
            param("matrix", &[3, 5], None),
            param("empty", &[0, 4], None),
            param("image", &[2, 3, 2, 2], Some(&[12, 1, 6, 3])),
        ];
        let unit = FlatUnit { params, ..FlatUnit::new("", None) };
        let numels: Vec<u64> = unit.params.iter().map(FlatParam::numel).collect();
        for (shards, align) in (1..6).flat_map(|shards| [(shards, None), (shards, Some(4))]) {
            let flat = FlatParameter::new(&numels, align, shards).unwrap();
            let mut seen = 0;
            for shard in 0..shards {
                let group = ProcessGroup { rank: 0, sizes: None };
                let unit_shard = UnitShard { unit: &unit, flat: &flat, shard, group };
                let range = flat.shard(shard);
                // The view starts at an offset, and its elements have gaps between them.
                let (base, gap) = (7, 3);
                let sizes = [range.end - range.start].as_slice().into();
                let strides = [gap].as_slice().into();
                let view = View { dtype: Dtype::F32, key: "0".into(), storage_bytes: 0, offset: base, sizes, strides };
                for (index, found) in unit_shard.parameters(Dtype::F32, Some(&view)).into_iter().enumerate() {
                    let TensorNode::Sharded { local, shape, .. } = found else { panic!("a ShardedTensor") };
                    assert!(local.len() < 2 * shape.len().max(1));
                    let strides = unit.params[index].stride.clone();
                    let strides = strides.unwrap_or_else(|| crate::catalog::contiguous_strides(&shape));
                    let step = if range.end - range.start > 1 { gap } else { 1 };
                    for (region, view) in local {
                        for element in 0..region.numel() {
                            let within = unravel(element, &region.sizes);
                            let at: u64 = within.iter().zip(&view.strides).map(|(at, stride)| at * stride).sum();
                            let whole = within.iter().zip(&region.offsets).map(|(at, offset)| at + offset);
                            let position: u64 = whole.zip(&strides).map(|(at, stride)| at * stride).sum();
                            let expected = flat.params()[index].start + position - range.start;
                            assert_eq!(view.offset + at, base + expected * step);
                            seen += 1;
                        }
                    }
                }
            }
            assert_eq!(seen, numels.iter().sum::<u64>());
        }
    }
}
