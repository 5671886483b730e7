//! Replaces quantised weights of the model and their scales by [computed tensors](crate::catalog::ComputedTensor) with ordinary
//! floats. No tensor data is read. Unit of shapes: elements.
//!
//! | encoding | tensors | result |
//! |---|---|---|
//! | FP8 with blocks (`FP8Linear` of transformers, DeepSeek-V3) | `NAME` (8-bit floats), `NAME_scale_inv` (a scale for each block of the last two dims) | `NAME`, the same shape |
//! | MXFP4 (`Mxfp4GptOssExperts` of transformers) | `NAME_blocks` (.., G, 16), `NAME_scales` (.., G) | `NAME` (.., G * 32) |
//!
//! Any other quantised weight is refused by name: its values would be wrong without its scales.

use std::collections::HashMap;

use super::Wrappers;
use super::rebuild::Rebuild;
use super::scales::{Quantised, is_small_float};
use super::split_name::rekey;
use super::survey::{Leaf, Survey};
use crate::catalog::{Calculation, Catalog, Dtype, MXFP4_GROUP, TensorEntry, TensorId, Value, checked_len_bytes};
use crate::error::{Error, Result};
use crate::layout::Dims;
use crate::storage::Files;

/// The suffix of the name of block scales, after the name of their weight.
const SCALE_SUFFIX: &str = "_scale_inv";
/// The suffixes of the names of packed MXFP4 elements and of their exponents.
const MXFP4_SUFFIXES: [&str; 2] = ["_blocks", "_scales"];

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
    #[must_use]
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
    #[must_use]
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
    let mut entries = Vec::with_capacity(weights.len());
    for weight in &weights {
        entries.push(weight.decoded(catalog, dtype, block)?);
    }
    let mut places: HashMap<u32, Option<usize>> = HashMap::new();
    for (index, weight) in weights.iter().enumerate() {
        let [first, second] = weight.leaves;
        places.insert(first.node, Some(index));
        places.insert(second.node, None);
    }
    let first_id = catalog.tensors.len();
    let mut rebuild = Rebuild::new(&survey);
    for leaf in &survey.leaves {
        let steps = survey.named(*leaf).steps;
        match places.get(&leaf.node) {
            None => rebuild.insert(*leaf, survey.value(*leaf).clone(), &steps)?,
            Some(None) => {}
            Some(Some(index)) => {
                let name = &weights[*index].name;
                let steps = rekey(&steps, name, &|node| survey.nodes[node as usize].flat);
                let id = TensorId(u32::try_from(first_id + index).expect("fewer than 2^32 tensors"));
                rebuild.insert(*leaf, Value::Tensor(id), &steps)?;
            }
        }
    }
    let state = rebuild.finish(&|module| Some(module.to_owned()))?;
    for (weight, (shape, calculation)) in weights.iter().zip(entries) {
        let like = catalog.tensor(weight.ids[0]).chunks.location(0).file();
        let name = weight.name.as_str().into();
        let entry = match like.filter(|_| !shape.contains(&0)) {
            Some(like) => catalog.add_computed(files, like, name, (dtype, shape), calculation, &weight.ids),
            None => TensorEntry { fqn: name, dtype, shape, ..catalog.tensor(weight.ids[0]).clone() },
        };
        catalog.tensors.push(entry);
    }
    catalog.state = state;
    Ok(found)
}

/// A quantised weight with its scales.
struct QuantisedWeight {
    /// The name after decoding.
    name: String,
    encoding: Encoding,
    /// The leaves of the elements and of the scales.
    leaves: [Leaf; 2],
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
    let mut found = Vec::new();
    let mut scales = Vec::new();
    for name in &names {
        let (leaf, id) = named[name];
        let packed = name.strip_suffix(MXFP4_SUFFIXES[0]).filter(|_| catalog.tensor(id).dtype == Dtype::U8);
        let (encoding, decoded, scale) = match packed {
            Some(decoded) => (Encoding::Mxfp4, decoded, format!("{decoded}{}", MXFP4_SUFFIXES[1])),
            None => (Encoding::ScaledBlocks, name.as_str(), format!("{name}{SCALE_SUFFIX}")),
        };
        let is_packed = packed.is_some() && named.contains_key(&scale);
        if !is_packed && !is_small_float(catalog.tensor(id).dtype) {
            continue;
        }
        let Some(&(scale_leaf, scale_id)) = named.get(&scale) else {
            return Err(Error::unsupported(
                format!("{name}: expected the scales {scale} of this 8-bit tensor, found none"),
                "options::dequantize decodes FP8 with the scales of blocks, and MXFP4; to leave the tensor out, convert SRC with \
                 options::exclude first",
            ));
        };
        scales.push(scale.clone());
        found.push(QuantisedWeight {
            name: decoded.to_owned(),
            encoding,
            leaves: [leaf, scale_leaf],
            ids: [id, scale_id],
        });
    }
    let is_other = |name: &&String| !scales.contains(name) && quantised.is_scale(name);
    match names.iter().find(is_other) {
        None => Ok(found),
        Some(name) => Err(Error::unsupported(
            format!("{name}: this scale belongs to an encoding that dtshard cannot decode"),
            "options::dequantize decodes FP8 with the scales of blocks, and MXFP4",
        )),
    }
}

impl QuantisedWeight {
    /// Returns the shape of the decoded weight, and the calculation.
    fn decoded(&self, catalog: &Catalog, dtype: Dtype, block: Option<[u64; 2]>) -> Result<(Dims, Calculation)> {
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
