//! The checks that read data: the counters of steps, the padding of partitions, the copies of parameters, and the values of
//! the module. Data is read in blocks.

use std::ops::Range;

use rayon::prelude::*;

use super::folder::leftover;
use super::join::{Param, Shard};
use super::optimizer::{FlatGroup, OptimizerStates, StateValue};
use super::partitions::Placed;
use crate::catalog::{Dtype, FileLocation, Value, contiguous_strides};
use crate::error::{Error, FormatError, Result};
use crate::format::scalar::number;
use crate::format::torch::{RankFile, View};
use crate::format::{archive, name_of};
use crate::layout::{Region, unravel};
use crate::storage::Files;

/// The maximum number of elements that are read at a time.
pub const BLOCK: u64 = 1 << 20;

/// Reads elements of the storage of a view. `elements` counts from the first element of the view, and may go beyond its end,
/// but not beyond the end of its storage.
///
/// # Errors
/// `Io`.
pub fn read(files: &Files, file: &RankFile, view: &View, elements: Range<u64>) -> Result<Vec<u8>> {
    let itemsize = view.dtype.itemsize();
    // The location of a view without elements is empty, although its storage may have padding.
    let first = View { sizes: [1].as_slice().into(), strides: [1].as_slice().into(), ..view.clone() };
    let FileLocation::Record { file, record, within } = file.contents.record_location(&first) else {
        return Ok(Vec::new());
    };
    let start = archive::data_offset(files, file, record)?;
    let offset = start.saturating_add(within).saturating_add(elements.start.saturating_mul(itemsize));
    files.read(file, offset, (elements.end - elements.start).saturating_mul(itemsize))
}

/// Returns the number of elements from the first element of a view to the end of its storage.
fn stored(view: &View) -> u64 {
    (view.storage_bytes / view.dtype.itemsize()).saturating_sub(view.offset)
}

/// The optimizer state that stays zero where the parameter and its gradients are zero, as in the padding. Other state may
/// begin with another value, such as `sum` of Adagrad and `step_size` of Rprop.
const ZERO_STATE: [&str; 8] =
    ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "prev"];

/// Returns whether the padding of optimizer state is zero although that of the master weights has arbitrary values. An optimizer
/// with L2 regularization adds these values to the gradients; AdamW (`decoupled_weight_decay`) does not. The weight decay itself
/// does not show this, because a job can change it.
fn has_decoupled_decay(states: &OptimizerStates<'_>) -> bool {
    let key = "decoupled_weight_decay";
    states.param_groups.iter().all(|(_, options)| options.and_then(|own| own.get(key)) == Some(&Value::Bool(true)))
}

/// Checks that the padding of the vectors is zero, where it has to be.
///
/// # Errors
/// `Malformed` that names the file, the vector and the element; `Io`.
pub fn check_padding(files: &Files, states: &OptimizerStates<'_>, is_stage3: bool) -> Result<()> {
    let is_state_zero = !is_stage3 || has_decoupled_decay(states);
    for (index, group) in states.groups.iter().enumerate() {
        for (partition, file) in group.files.iter().enumerate() {
            let padding = group.partitioned.padding(partition as u64);
            if padding.is_empty() {
                continue;
            }
            let moments = group.state.iter().filter_map(|(key, value)| match value {
                StateValue::Vectors(views) if is_state_zero && ZERO_STATE.contains(key) => {
                    Some((*key, views[partition]))
                }
                _ => None,
            });
            // At stage 3, the padding of master weights has arbitrary values.
            let masters = Some(("the master weights", group.masters[partition])).filter(|_| !is_stage3);
            for (name, view) in masters.into_iter().chain(moments) {
                for gap in &padding {
                    let gap = gap.start.min(stored(view))..gap.end.min(stored(view));
                    let bytes = if gap.is_empty() { Vec::new() } else { read(files, file, view, gap.clone())? };
                    let itemsize = usize::try_from(view.dtype.itemsize()).expect("a few bytes");
                    // With `maximize`, the gradients of the padding are -0.0.
                    let is_zero = |element: &[u8]| {
                        element.iter().all(|byte| *byte == 0) || number(view.dtype, element) == Some(0.0)
                    };
                    let Some(at) = bytes.chunks_exact(itemsize).position(|element| !is_zero(element)) else { continue };
                    let element = gap.start + at as u64;
                    let at = format!("group {index}, {name}");
                    let expected = format!("zeros as padding in elements {} to {}", gap.start, gap.end);
                    return Err(leftover(&file.path, &at, expected, format!("another value in element {element}")));
                }
            }
        }
    }
    Ok(())
}

/// Checks that all partitions and groups of all jobs have equal counters. Returns the number of steps of the optimizer, if
/// the files record it.
///
/// # Errors
/// `Malformed` that names the file and both numbers; `Io`.
pub fn check_steps(files: &Files, all: &[&OptimizerStates<'_>]) -> Result<Option<f64>> {
    let mut steps: Option<Vec<u8>> = None;
    let groups = || all.iter().flat_map(|states| states.groups.iter().enumerate());
    let Some((_, first_group)) = groups().next() else { return Ok(None) };
    for (index, group) in groups() {
        let scalars = group.state.iter().filter_map(|(key, value)| match value {
            StateValue::Scalars(views) => Some((*key, views)),
            _ => None,
        });
        for (key, views) in scalars {
            let mut first: Option<Vec<u8>> = steps.clone().filter(|_| key == "step");
            for (file, view) in group.files.iter().zip(views) {
                let bytes = read(files, file, view, 0..1)?;
                if let Some(first) = first.as_ref().filter(|first| **first != bytes) {
                    let show = |bytes: &[u8]| {
                        number(view.dtype, bytes)
                            .map_or_else(|| String::from("another value"), |number| number.to_string())
                    };
                    let of = if key == "step" { first_group } else { group };
                    let name = name_of(&of.files[0].path);
                    let expected = format!("{} as in {name}", show(first));
                    return Err(leftover(&file.path, &format!("group {index}, {key}"), expected, show(&bytes)));
                }
                first.get_or_insert(bytes);
            }
            if let (true, Some(first)) = (key == "step", first) {
                steps.get_or_insert(first);
            }
        }
    }
    let dtype = groups().flat_map(|(_, group)| &group.state).find_map(|(key, value)| match value {
        StateValue::Scalars(views) if *key == "step" => Some(views[0].dtype),
        _ => None,
    });
    Ok(steps.zip(dtype).and_then(|(bytes, dtype)| number(dtype, &bytes)))
}

/// Checks that all copies of parameters, and of their optimizer state, have equal elements.
///
/// # Errors
/// `Malformed` that names the file, the parameter and the element; `Io`.
pub fn check_copies<'a>(files: &Files, params: &'a [&Param<'a>]) -> Result<()> {
    let check = |param: &&'a Param<'a>| {
        for [(first, box_of_first), (other, box_of_other)] in &param.copies {
            let state = first.group.state.iter().map(|(key, _)| *key);
            let vectors = state.filter_map(|key| Some((key, first.vectors(key)?, other.vectors(key)?)));
            let masters = ("the weights", first.group.masters.as_slice(), other.group.masters.as_slice());
            for (name, own, others) in std::iter::once(masters).chain(vectors) {
                let mut at = format!("{name} of `{}`", param.fqn);
                if param.joined.is_averaged {
                    at.push_str(", of which DeepSpeed's converter takes the mean, and dtshard does not");
                }
                let of = |shard: &Shard<'a>, views, region| {
                    let Shard { group, placed, .. } = *shard;
                    BoxOfShard { group, placed, views, region }
                };
                let compared = compare(files, &at, of(first, own, box_of_first), of(other, others, box_of_other));
                if param.joined.is_declared {
                    compared.map_err(|error| not_a_copy(error, param.fqn.as_str()))?;
                } else {
                    compared?;
                }
            }
        }
        Ok(())
    };
    params.par_iter().map(check).collect::<Vec<Result<()>>>().into_iter().collect()
}

/// Adds a hint to the error about ranks that do not have copies of a parameter, although the declared layout says so.
fn not_a_copy(mut error: Error, fqn: &str) -> Error {
    if let Error::Format(FormatError::Malformed { hint, .. }) = &mut error {
        let text = format!(
            "without a rule, every tensor-parallel rank has a copy of a parameter; if the ranks have cut this one, declare \
             options::src_placements '{fqn}=LIST', such as S(0), S(1) or _S(0,2)"
        );
        *hint = Some(text.into());
    }
    error
}

/// A box of a shard, and the vectors that have its elements.
#[derive(Clone, Copy)]
pub struct BoxOfShard<'a> {
    pub group: &'a FlatGroup<'a>,
    pub placed: &'a Placed,
    pub views: &'a [&'a View],
    pub region: &'a Region,
}

impl<'a> BoxOfShard<'a> {
    /// Returns a box of a tensor. `own` has this tensor as its only parameter.
    pub fn of_tensor(own: &'a FlatGroup<'a>, region: &'a Region) -> Self {
        Self { group: own, placed: &own.partitioned.params[0], views: &own.masters, region }
    }
}

/// Reads two boxes of equal sizes in parts, and calls `is_same` with the bytes of each part and with the number of its first
/// element in each shard. Returns false as soon as a call returns false.
fn all_parts(
    files: &Files,
    first: BoxOfShard<'_>,
    other: BoxOfShard<'_>,
    mut is_same: impl FnMut([(u64, &[u8]); 2]) -> Result<bool>,
) -> Result<bool> {
    let sizes = &first.region.sizes;
    // The elements of the inner dims follow one another in both shards, if the boxes have all of them.
    let is_whole = |dim: usize, own: BoxOfShard<'_>| own.placed.shape[dim] == own.region.sizes[dim];
    let inner = (1..sizes.len()).rev().take_while(|dim| is_whole(*dim, first) && is_whole(*dim, other)).last();
    let outer = inner.unwrap_or(sizes.len()).saturating_sub(1);
    let len: u64 = sizes[outer..].iter().product();
    let rows = if first.region.is_empty() { 0 } else { sizes[..outer].iter().product() };
    let itemsize = first.views[0].dtype.itemsize();
    for row in 0..rows {
        let steps = unravel(row, &sizes[..outer]);
        let start = |own: BoxOfShard<'_>| {
            let strides = contiguous_strides(&own.placed.shape);
            let at = |dim: usize| own.region.offsets[dim] + steps.get(dim).copied().unwrap_or(0);
            (0..strides.len()).map(|dim| at(dim) * strides[dim]).sum::<u64>()
        };
        let starts = [start(first), start(other)];
        let mut done = 0;
        while done < len {
            let [at, other_at] = starts.map(|start| start + done);
            let (most, own) = block(files, first, at, (len - done).min(BLOCK))?;
            let (count, found) = block(files, other, other_at, most)?;
            let own = &own[..own.len().min(usize::try_from(count * itemsize).expect("a part of a block"))];
            if !is_same([(at, own), (other_at, &found)])? {
                return Ok(false);
            }
            done += count;
        }
    }
    Ok(true)
}

/// Compares two boxes of equal sizes.
fn compare(files: &Files, at: &str, first: BoxOfShard<'_>, other: BoxOfShard<'_>) -> Result<()> {
    let itemsize = first.views[0].dtype.itemsize();
    let is_same = |[(start, own), (other_start, found)]: [(u64, &[u8]); 2]| {
        let Some(byte) = own.iter().zip(found).position(|(own, found)| own != found) else { return Ok(true) };
        let name = name_of(&file_of(first, start).path);
        let element = other_start + byte as u64 / itemsize;
        let expected = format!("the values in {name}, because the ranks have copies of it");
        Err(leftover(&file_of(other, other_start).path, at, expected, format!("another value in element {element}")))
    };
    all_parts(files, first, other, is_same).map(|_| ())
}

fn file_of(own: BoxOfShard<'_>, element: u64) -> &RankFile {
    let piece = own.group.partitioned.piece_from(own.placed, element).expect("an element of the shard");
    own.group.files[piece.partition]
}

/// Reads at most `most` elements of a shard, all of one partition, from `element` on. Returns their number and their bytes.
fn block(files: &Files, own: BoxOfShard<'_>, element: u64, most: u64) -> Result<(u64, Vec<u8>)> {
    let piece = own.group.partitioned.piece_from(own.placed, element).expect("an element of the shard");
    let count = (piece.elements.end - element).min(most);
    let at = piece.at..piece.at + count;
    Ok((count, read(files, own.group.files[piece.partition], own.views[piece.partition], at)?))
}

/// Reads the first elements of a box, at most 64 of its first row, and rounds them to a dtype.
///
/// # Errors
/// `Io`.
pub fn first_values(files: &Files, own: BoxOfShard<'_>, to: Dtype) -> Result<Vec<u64>> {
    if own.region.is_empty() {
        return Ok(Vec::new());
    }
    let strides = contiguous_strides(&own.placed.shape);
    let start = own.region.offsets.iter().zip(&strides).map(|(offset, stride)| offset * stride).sum();
    let row = own.region.sizes.last().copied().unwrap_or(1);
    let (_, bytes) = block(files, own, start, row.min(64))?;
    Ok(rounded(&bytes, own.views[0].dtype, to))
}

/// Returns whether a box of the module has the elements of a box of master weights, rounded to the dtype of the module.
///
/// # Errors
/// `Io`.
pub fn is_rounded(files: &Files, master: BoxOfShard<'_>, module: BoxOfShard<'_>) -> Result<bool> {
    let [from, to] = [master, module].map(|own| own.views[0].dtype);
    all_parts(files, master, module, |[(_, own), (_, stored)]| Ok(rounded(own, from, to) == rounded(stored, to, to)))
}

/// Returns the bits of elements, rounded to the dtype `to`: to nearest, ties to even, as PyTorch does. All NaNs have the same
/// bits. Elements of dtypes that are not rounded have the bits of the file.
pub fn rounded(bytes: &[u8], from: Dtype, to: Dtype) -> Vec<u64> {
    let elements = bytes.chunks_exact(usize::try_from(from.itemsize()).expect("a few bytes"));
    let round = |element: &[u8]| {
        let Some(exact) = number(from, element) else {
            return element.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte));
        };
        // PyTorch rounds f64 to f32 first. `from_f64` of `half` ignores the last 32 bits of the significand.
        #[allow(clippy::cast_possible_truncation, reason = "rounds as PyTorch")]
        let single = exact as f32;
        let rounded = match to {
            Dtype::Bf16 => half::bf16::from_f32(single).to_f64(),
            Dtype::F16 => half::f16::from_f32(single).to_f64(),
            _ => exact,
        };
        if rounded.is_nan() { u64::MAX } else { rounded.to_bits() }
    };
    elements.map(round).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the one of the two neighbours in `grid` that is nearest to `exact`, and that with an even number if both are.
    fn nearest(exact: f64, grid: impl Fn(u16) -> f64, start: u16) -> u16 {
        let distance = |bits: &u16| ((grid(*bits) - exact).abs(), bits % 2);
        let around = [start.saturating_sub(1), start, start + 1];
        around.into_iter().min_by(|a, b| distance(a).partial_cmp(&distance(b)).unwrap()).unwrap()
    }

    #[test]
    fn f32_is_rounded_to_nearest_even() {
        // The last bits decide near the middle between two numbers of 16 bits.
        for (high, low) in (0..2000_u32).flat_map(|high| (0..64).map(move |low| (high, low))) {
            let last = [low, 0x1000_u32.wrapping_add(low).wrapping_sub(32), 0x8000_u32.wrapping_add(low) - 32];
            for last in last {
                let bits = 0x3780_0000 + high * 0x0001_2345 + last % 0x1_0000;
                let exact = f32::from_bits(bits);
                if exact.abs() > 60000.0 {
                    continue;
                }
                let [bf16, f16] = [half::bf16::from_f32(exact).to_bits(), half::f16::from_f32(exact).to_bits()];
                let bf16 = nearest(exact.into(), |bits| half::bf16::from_bits(bits).to_f64(), bf16);
                let f16 = nearest(exact.into(), |bits| half::f16::from_bits(bits).to_f64(), f16);
                let bytes = exact.to_le_bytes();
                assert_eq!(
                    rounded(&bytes, Dtype::F32, Dtype::Bf16),
                    rounded(&bf16.to_le_bytes(), Dtype::Bf16, Dtype::Bf16)
                );
                assert_eq!(
                    rounded(&bytes, Dtype::F32, Dtype::F16),
                    rounded(&f16.to_le_bytes(), Dtype::F16, Dtype::F16)
                );
            }
        }
    }
}
