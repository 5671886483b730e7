//! State dicts with flat parameters become what they are of: parameters in their shapes, under their names.
//!
//! Only where things lie changes: a rank's stretch of a parameter becomes the boxes of the parameter that it is, at most
//! `2n - 1` of `n` dims, as views of the storage that the flat parameter is in. Names come in the order of the state dict
//! that the model had without FSDP, where the files know the order of its modules.

use std::collections::HashMap;
use std::ops::Range;

use super::survey::{FlatState, flat_module};
use crate::catalog::flat::{FlatLayout, FlatParam, FlatUnit};
use crate::catalog::modules::module_of;
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Dtype, Fqn, TensorId, Value, permuted_stride};
use crate::format::torch::ranks::RankFile;
use crate::format::torch::{ProcessGroup, TensorNode, View};
use crate::layout::Region;
use crate::layout::flat::{FlatContent, FlatParameter};

/// What one rank holds of the parameters of a unit.
pub struct UnitShard<'a> {
    pub unit: &'a FlatUnit,
    pub flat: &'a FlatParameter,
    pub shard: u64,
    pub group: ProcessGroup,
}

impl UnitShard<'_> {
    /// Each parameter, of a tensor that holds the rank's shard.
    pub fn parameters(&self, dtype: Dtype, shard: Option<&View>) -> Vec<TensorNode> {
        let mut local: Vec<Vec<_>> = vec![Vec::new(); self.unit.params.len()];
        if let Some(view) = shard {
            let stride = step(view);
            for piece in self.flat.pieces(self.shard) {
                if let FlatContent::Parameter { index, elements } = piece.content {
                    local[index] = boxes(&self.unit.params[index], elements, view, view.offset + piece.offset * stride);
                }
            }
        }
        self.unit.params.iter().zip(local).map(|(param, local)| self.sharded(param, dtype, local)).collect()
    }

    /// A parameter of which the rank holds these boxes.
    pub fn sharded(&self, param: &FlatParam, dtype: Dtype, local: Vec<(Region, View)>) -> TensorNode {
        let all = local.iter().map(|(region, _)| region.clone()).collect();
        let stride = param.stride.as_ref().and_then(|stride| permuted_stride(&param.shape, stride));
        TensorNode::Sharded { dtype, shape: param.shape.clone(), stride, group: self.group, local, all }
    }
}

/// From an element of a 1-d view to the next; where there is one element, the stride says nothing.
fn step(view: &View) -> u64 {
    if view.sizes[0] > 1 { view.strides[0] } else { 1 }
}

/// The boxes that a stretch of a parameter is, which lies in `view` from element `at` of its storage on.
pub fn boxes(param: &FlatParam, elements: Range<u64>, view: &View, mut at: u64) -> Vec<(Region, View)> {
    let order = param.order().expect("a layout that was checked");
    let step = step(view);
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

/// The flat parameter of each unit.
pub fn flat_parameters(layout: &FlatLayout) -> Vec<FlatParameter> {
    layout.units.iter().map(|unit| layout.flat(unit)).collect()
}

/// Put the parameters of a state dict, which has been checked with the layout, in the place of its flat parameters.
pub fn unflatten(files: &mut [RankFile], state: &FlatState, layout: &FlatLayout) {
    let flats = flat_parameters(layout);
    for rank in &state.ranks {
        let contents = &mut files[rank.file].contents;
        let mut ids: HashMap<&Fqn, TensorId> = HashMap::new();
        let shard = layout.shard_of(rank.rank);
        let group = ProcessGroup { rank: rank.rank, sizes: Some((layout.shard_group_size, layout.world_size)) };
        for (unit, flat) in layout.units.iter().zip(&flats) {
            let Some(part) = rank.flats.get(&unit.module) else { continue };
            let held = UnitShard { unit, flat, shard, group };
            let found = held.parameters(part.dtype, part.stretch.as_ref().map(|(_, view)| view));
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
            dict.entries = entries.into_iter().flat_map(|(key, value)| replaced(key, value, layout, &ids)).collect();
            if let Some(registered) = &state.registered {
                // What a unit holds is spread over modules with other units between them.
                dict.entries.sort_by_cached_key(|(key, _)| {
                    let name = clean_name(key.as_str().unwrap_or_default());
                    registered.get(module_of(&name)).copied().unwrap_or(usize::MAX)
                });
            }
        }
    }
}

/// What an entry of the state dict becomes.
fn replaced(key: Value, value: Value, layout: &FlatLayout, ids: &HashMap<&Fqn, TensorId>) -> Vec<(Value, Value)> {
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

    /// Elements of a flat parameter at their places in the parameters, from the views that are made of its shards.
    #[test]
    fn every_element_is_where_it_was() {
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
                let held = UnitShard { unit: &unit, flat: &flat, shard, group };
                let range = flat.shard(shard);
                // Storages begin somewhere, and elements may be apart.
                let (base, apart) = (7, 3);
                let sizes = [range.end - range.start].as_slice().into();
                let strides = [apart].as_slice().into();
                let view = View { dtype: Dtype::F32, key: "0".into(), storage_bytes: 0, offset: base, sizes, strides };
                for (index, found) in held.parameters(Dtype::F32, Some(&view)).into_iter().enumerate() {
                    let TensorNode::Sharded { local, shape, .. } = found else { panic!("a ShardedTensor") };
                    assert!(local.len() < 2 * shape.len().max(1));
                    let strides = unit.params[index].stride.clone();
                    let strides = strides.unwrap_or_else(|| crate::catalog::contiguous_strides(&shape));
                    let step = if range.end - range.start > 1 { apart } else { 1 };
                    for (region, view) in local {
                        for element in 0..region.numel() {
                            let within = unravel(element, &region.sizes);
                            let at: u64 = within.iter().zip(&view.strides).map(|(at, stride)| at * stride).sum();
                            let whole = within.iter().zip(&region.offsets).map(|(at, offset)| at + offset);
                            let lies: u64 = whole.zip(&strides).map(|(at, stride)| at * stride).sum();
                            let expected = flat.params()[index].start + lies - range.start;
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
