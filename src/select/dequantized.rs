//! Replaces quantised weights of the model and their scales by [computed tensors](crate::catalog::ComputedTensor) with ordinary
//! floats. No tensor data is read. Unit of shapes: elements.
//!
//! | encoding | tensors | result |
//! |---|---|---|
//! | FP8 with blocks (`FP8Linear` of transformers, DeepSeek-V3) | `NAME` (8-bit floats), `NAME_scale_inv` (a scale for each block of the last two dims) | `NAME`, the same shape |
//! | MXFP4 (`Mxfp4GptOssExperts` of transformers) | `NAME_blocks` (.., G, 16), `NAME_scales` (.., G) | `NAME` (.., G * 32) |
//! | MXFP4 (`Checkpoint` of OpenAI's package gpt-oss) | `NAME.blocks`, `NAME.scales` | as before |
//!
//! Any other quantised weight is refused by name: its values would be wrong without its scales.

use std::collections::{HashMap, HashSet};

use super::Wrappers;
use super::rebuild::Rebuild;
use super::scales::{Quantised, is_small_float};
use super::split_name::rekey;
use super::survey::{Leaf, Survey};
use crate::catalog::{
    Calculation, Catalog, ComputedTensor, Dtype, MXFP4_GROUP, Sharding, TensorEntry, TensorId, Value, checked_len_bytes,
};
use crate::error::{Error, Result};
use crate::layout::{Dims, Placement};
use crate::storage::{FileId, Files};

/// The suffix of the name of block scales, after the name of their weight.
const SCALE_SUFFIX: &str = "_scale_inv";
/// The suffixes of the names of packed MXFP4 elements and of their exponents.
const MXFP4_SUFFIXES: [[&str; 2]; 2] = [["_blocks", "_scales"], [".blocks", ".scales"]];

/// An encoding of quantised weights that can be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// 8-bit floats with a scale for each block.
    ScaledBlocks,
    /// 4-bit floats with an exponent for each group.
    Mxfp4,
}

impl Encoding {
    /// Returns the name of the encoding in map files.
    pub fn name(self) -> &'static str {
        match self {
            Self::ScaledBlocks => "fp8",
            Self::Mxfp4 => "mxfp4",
        }
    }
}

/// The result of [`dequantize`].
#[derive(Debug, Default)]
pub struct Dequantized {
    /// The number of weights that are decoded, for each encoding.
    pub counts: Vec<(Encoding, usize)>,
}

impl Dequantized {
    /// Returns the names of the encodings that are decoded.
    pub fn encodings(&self) -> Vec<&'static str> {
        self.counts.iter().map(|(encoding, _)| encoding.name()).collect()
    }
}

/// Replaces the quantised weights of the model by weights of `dtype`, which is bf16 or f32. `block` is the numbers of rows and
/// columns of a block of FP8, if a configuration gives them.
///
/// # Errors
/// `Usage` if no weight is quantised, if the block is unknown, or if the shape of scales does not fit; `Unsupported` for an
/// encoding that cannot be decoded.
pub fn dequantize(
    catalog: &mut Catalog,
    files: &mut Files,
    dtype: Dtype,
    block: Option<[u64; 2]>,
) -> Result<Dequantized> {
    let survey = Survey::new(catalog, Wrappers::Keep);
    let weights = find(&survey, catalog)?;
    let mut found = Dequantized::default();
    for encoding in [Encoding::ScaledBlocks, Encoding::Mxfp4] {
        let count = weights.iter().filter(|weight| weight.encoding == encoding).count();
        found.counts.extend((count > 0).then_some((encoding, count)));
    }
    if weights.is_empty() {
        return Err(Error::usage(
            format!("options::dequantize {dtype}: the model has no quantised weights"),
            "leave options::dequantize out",
        ));
    }
    let mut places: HashMap<u32, Option<usize>> = HashMap::new();
    // Names of one tensor stay names of one tensor.
    let mut ids: HashMap<TensorId, TensorId> = HashMap::new();
    let (mut added, mut computed) = (Vec::new(), Vec::new());
    for (index, weight) in weights.iter().enumerate() {
        places.insert(weight.leaf.node, Some(index));
        places.extend(weight.scale_leaf.map(|leaf| (leaf.node, None)));
        if ids.contains_key(&weight.ids[0]) {
            continue;
        }
        let (entry, of_entry) = weight.decoded(catalog, files, dtype, block)?;
        let id = TensorId(u32::try_from(catalog.tensors.len() + added.len()).expect("fewer than 2^32 tensors"));
        ids.insert(weight.ids[0], id);
        added.push(entry);
        computed.extend(of_entry);
    }
    let mut rebuild = Rebuild::new(&survey);
    for leaf in &survey.leaves {
        let steps = survey.named(*leaf).steps;
        match places.get(&leaf.node) {
            None => rebuild.insert(*leaf, survey.value(*leaf).clone(), &steps)?,
            Some(None) => {}
            Some(Some(index)) => {
                let weight = &weights[*index];
                let steps = rekey(&steps, &weight.name, &|node| survey.nodes[node as usize].flat);
                rebuild.insert(*leaf, Value::Tensor(ids[&weight.ids[0]]), &steps)?;
            }
        }
    }
    let state = rebuild.finish(&|module| Some(module.to_owned()))?;
    catalog.tensors.extend(added);
    catalog.computed.extend(computed);
    catalog.state = state;
    Ok(found)
}

/// A quantised weight with its scales.
struct QuantisedWeight {
    /// The name after decoding.
    name: String,
    encoding: Encoding,
    /// The leaf of the elements.
    leaf: Leaf,
    /// The leaf of the scales, or `None` for another name of a weight.
    scale_leaf: Option<Leaf>,
    /// The ids of the elements and of the scales.
    ids: [TensorId; 2],
}

/// Finds the quantised weights of the model.
fn find(survey: &Survey<'_>, catalog: &Catalog) -> Result<Vec<QuantisedWeight>> {
    let mut named: HashMap<String, (Leaf, TensorId)> = HashMap::new();
    let mut quantised = Quantised::default();
    let mut names = Vec::new();
    for leaf in survey.leaves.iter().filter(|leaf| leaf.is_parameter()) {
        let Value::Tensor(id) = survey.value(*leaf) else { continue };
        let name = survey.named(*leaf).name;
        if let Some(why) = &catalog.tensor(*id).unreadable {
            return Err(why.error(&name));
        }
        quantised.add(&name, catalog.tensor(*id).dtype);
        named.insert(name.clone(), (*leaf, *id));
        names.push(name);
    }
    let mut found: Vec<QuantisedWeight> = Vec::new();
    let mut scales = HashSet::new();
    let mut aliases = Vec::new();
    for name in &names {
        let (leaf, id) = named[name];
        let packed = other_suffix(name, false).filter(|_| catalog.tensor(id).dtype == Dtype::U8);
        let (encoding, decoded, scale) = match &packed {
            Some((decoded, scale)) => (Encoding::Mxfp4, *decoded, scale.clone()),
            None => (Encoding::ScaledBlocks, name.as_str(), format!("{name}{SCALE_SUFFIX}")),
        };
        let is_packed = packed.is_some() && is_packed(catalog.tensor(id));
        if name.strip_suffix(SCALE_SUFFIX).is_some_and(|weight| !named.contains_key(weight)) {
            return Err(Error::unsupported(
                format!("{name}: the model has these scales, and not the weight that they belong to"),
                "save the checkpoint again, or leave the scales out with options::exclude in a conversion before this one",
            ));
        }
        if !is_packed && (!is_small_float(catalog.tensor(id).dtype) || is_scale_name(name, &named)) {
            continue;
        }
        match named.get(&scale) {
            Some(&(scale_leaf, scale_id)) => {
                scales.insert(scale);
                let (name, ids) = (decoded.to_owned(), [id, scale_id]);
                found.push(QuantisedWeight { name, encoding, leaf, scale_leaf: Some(scale_leaf), ids });
            }
            None => aliases.push((name, decoded, scale, leaf, id)),
        }
    }
    for (name, decoded, scale, leaf, id) in aliases {
        let Some(weight) = found.iter().find(|weight| weight.ids[0] == id) else {
            return Err(Error::unsupported(
                format!("{name}: expected the scales {scale} of this tensor, found none"),
                "options::dequantize decodes FP8 with the scales of blocks, and MXFP4; to leave the tensor out, convert SRC with \
                 options::exclude first",
            ));
        };
        let (encoding, ids) = (weight.encoding, weight.ids);
        found.push(QuantisedWeight { name: decoded.to_owned(), encoding, leaf, scale_leaf: None, ids });
    }
    let is_other = |name: &&String| !scales.contains(name.as_str()) && quantised.is_scale(name);
    match names.iter().find(is_other) {
        None => Ok(found),
        Some(name) => Err(Error::unsupported(
            format!("{name}: this scale belongs to an encoding that dtshard cannot decode"),
            "options::dequantize decodes FP8 with the scales of blocks, and MXFP4",
        )),
    }
}

/// Returns whether a tensor has the shape of packed MXFP4 elements.
fn is_packed(entry: &TensorEntry) -> bool {
    entry.shape.len() > 1 && entry.shape.last() == Some(&(MXFP4_GROUP / 2))
}

/// Returns whether a name is that of the scales of a weight that the model has.
fn is_scale_name(name: &str, named: &HashMap<String, (Leaf, TensorId)>) -> bool {
    name.strip_suffix(SCALE_SUFFIX).is_some_and(|weight| named.contains_key(weight))
        || other_suffix(name, true).is_some_and(|(_, blocks)| named.contains_key(&blocks))
}

/// Returns the name of the decoded weight, and the name of the exponents, for the name of packed MXFP4 elements. With `is_scale`,
/// returns the name of the elements for that of the exponents.
fn other_suffix(name: &str, is_scale: bool) -> Option<(&str, String)> {
    MXFP4_SUFFIXES.iter().find_map(|[blocks, scales]| {
        let (own, other) = if is_scale { (scales, blocks) } else { (blocks, scales) };
        name.strip_suffix(own).map(|decoded| (decoded, format!("{decoded}{other}")))
    })
}

impl QuantisedWeight {
    /// Returns the entry of the decoded weight, and how it is computed, unless it is empty. The entry has the placements of the
    /// elements, if they are placements of the decoded weight, too.
    fn decoded(
        &self,
        catalog: &Catalog,
        files: &mut Files,
        dtype: Dtype,
        block: Option<[u64; 2]>,
    ) -> Result<(TensorEntry, Option<ComputedTensor>)> {
        let (shape, calculation) = self.calculation(catalog, dtype, block)?;
        let elements = catalog.tensor(self.ids[0]);
        let mut entry = TensorEntry::new(self.name.as_str().into(), dtype, shape.clone());
        // A dim of groups has another size than the dim of their elements.
        let is_kept = |sharding: &Sharding| {
            let shared = &sharding.shared;
            let follows = |placement: &Placement| {
                placement.sharded_dim().is_none_or(|dim| dim.0 + 1 < shape.len() || self.encoding != Encoding::Mxfp4)
            };
            shared.splits.is_empty() && shared.placements.iter().all(follows)
        };
        if elements.sharding.as_deref().is_none_or(is_kept) {
            (entry.class, entry.sharding) = (elements.class, elements.sharding.clone());
        }
        let computed = elements
            .first_file()
            .map(|like| ComputedTensor::new(files, like, (dtype, shape.clone()), calculation, &self.ids));
        entry.chunks = match &computed {
            Some(computed) => computed.chunks(),
            None => TensorEntry::whole(entry.fqn.clone(), dtype, shape, FileId(0), 0).chunks,
        };
        Ok((entry, computed))
    }

    /// Returns the shape of the decoded weight, and the calculation.
    fn calculation(&self, catalog: &Catalog, dtype: Dtype, block: Option<[u64; 2]>) -> Result<(Dims, Calculation)> {
        let [elements, scales] = self.ids.map(|id| catalog.tensor(id));
        if let Some(partial) = [elements, scales].into_iter().find(|entry| entry.partial_values.is_some()) {
            return Err(Error::unsupported(
                format!("{}: the tensor has partial values, which cannot be dequantised", partial.fqn),
                "reduce the partial values first, in a conversion without options::dequantize",
            ));
        }
        let (shape, calculation, grid) = match self.encoding {
            Encoding::ScaledBlocks => scaled_blocks(elements, block)?,
            Encoding::Mxfp4 => mxfp4(elements)?,
        };
        let is_scale = match (self.encoding, scales.dtype) {
            (_, Dtype::U8 | Dtype::F8E8m0fnu) => true,
            (Encoding::ScaledBlocks, dtype) => matches!(dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16),
            (Encoding::Mxfp4, _) => false,
        };
        if !is_scale {
            return Err(Error::unsupported(
                format!("{}: expected scales of a float dtype or 8-bit exponents, found {}", scales.fqn, scales.dtype),
                "options::dequantize decodes FP8 with the scales of blocks, and MXFP4",
            ));
        }
        if scales.shape != grid {
            let (name, found) = (&scales.fqn, scales.shape.as_slice());
            let of = elements.shape.as_slice();
            return Err(Error::usage(
                format!(
                    "{name}: expected the shape {:?} for {} {of:?}, found {found:?}",
                    grid.as_slice(),
                    elements.fqn
                ),
                match self.encoding {
                    Encoding::ScaledBlocks => {
                        "the size of blocks is `weight_block_size` of the configuration: check it"
                    }
                    Encoding::Mxfp4 => "save the checkpoint again: blocks and scales are not of one tensor",
                },
            ));
        }
        if checked_len_bytes(&shape, dtype).is_none() {
            return Err(Error::unsupported(
                format!("{}: the dequantised tensor {:?} would be too large", self.name, shape.as_slice()),
                "the shape is damaged; save the checkpoint again",
            ));
        }
        Ok((shape, calculation))
    }
}

/// Returns the shape, the calculation, and the shape of the scales of FP8.
fn scaled_blocks(elements: &TensorEntry, block: Option<[u64; 2]>) -> Result<(Dims, Calculation, Dims)> {
    if !matches!(elements.dtype, Dtype::F8E4m3fn | Dtype::F8E5m2) {
        return Err(Error::unsupported(
            format!("{}: {} cannot be dequantised", elements.fqn, elements.dtype),
            "options::dequantize decodes f8_e4m3fn and f8_e5m2",
        ));
    }
    let Some(block) = block else {
        return Err(Error::usage(
            format!("{}: the size of the blocks that have one scale is unknown", elements.fqn),
            "give the config.json of the model with options::config: it has quantization_config.weight_block_size",
        ));
    };
    let Some((last, leading)) = elements.shape.split_last_chunk::<2>().map(|(leading, last)| (last, leading)) else {
        return Err(Error::unsupported(
            format!("{}: expected at least 2 dims for blocks, found {:?}", elements.fqn, elements.shape.as_slice()),
            "options::dequantize decodes matrices with the scales of blocks",
        ));
    };
    let mut grid = Dims::from_slice(leading);
    grid.extend(last.iter().zip(block).map(|(size, block)| size.div_ceil(block)));
    Ok((elements.shape.clone(), Calculation::ScaledBlocks { block }, grid))
}

/// Returns the shape, the calculation, and the shape of the exponents of MXFP4.
fn mxfp4(elements: &TensorEntry) -> Result<(Dims, Calculation, Dims)> {
    let bytes = MXFP4_GROUP / 2;
    let grid = match elements.shape.split_last() {
        Some((&last, grid)) if last == bytes && !grid.is_empty() => Dims::from_slice(grid),
        _ => {
            let found = elements.shape.as_slice();
            return Err(Error::unsupported(
                format!("{}: expected groups of {bytes} bytes in the last dim, found {found:?}", elements.fqn),
                "options::dequantize decodes MXFP4 as transformers stores it: (.., groups, 16)",
            ));
        }
    };
    let mut shape = grid.clone();
    if let Some(last) = shape.last_mut() {
        *last = last.saturating_mul(MXFP4_GROUP);
    }
    Ok((shape, Calculation::Mxfp4, grid))
}
