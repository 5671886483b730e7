//! The checks that read data: the counters of steps, and the padding of partitions. Only a few elements of each file are
//! read.

use std::ops::Range;

use super::folder::leftover;
use super::optimizer::{OptimizerStates, StateValue};
use crate::catalog::{Dtype, FileLocation};
use crate::error::Result;
use crate::format::archive;
use crate::format::torch::{RankFile, View};
use crate::storage::Files;

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

/// Checks that the padding of all vectors is zero.
///
/// # Errors
/// `Malformed` that names the file, the vector and the element; `Io`.
pub fn check_padding(files: &Files, own: &[RankFile], states: &OptimizerStates<'_>) -> Result<()> {
    for (index, group) in states.groups.iter().enumerate() {
        for (partition, file) in own.iter().enumerate() {
            let zeros = group.partitioned.zeros(partition as u64);
            if zeros.is_empty() {
                continue;
            }
            let moments = group.state.iter().filter_map(|(key, value)| match value {
                StateValue::Vectors(views) => Some((*key, views[partition])),
                _ => None,
            });
            for (name, view) in std::iter::once(("the master weights", group.masters[partition])).chain(moments) {
                for gap in &zeros {
                    let gap = gap.start.min(stored(view))..gap.end.min(stored(view));
                    let bytes = if gap.is_empty() { Vec::new() } else { read(files, file, view, gap.clone())? };
                    let Some(at) = bytes.iter().position(|byte| *byte != 0) else { continue };
                    let element = gap.start + at as u64 / view.dtype.itemsize();
                    let at = format!("group {index}, {name}");
                    let expected = format!("zeros as padding in elements {} to {}", gap.start, gap.end);
                    return Err(leftover(&file.path, &at, expected, format!("another value in element {element}")));
                }
            }
        }
    }
    Ok(())
}

/// Checks that all partitions and groups have equal counters. Returns the number of steps of the optimizer, if the files
/// record it.
///
/// # Errors
/// `Malformed` that names the file and both numbers; `Io`.
pub fn check_steps(files: &Files, own: &[RankFile], states: &OptimizerStates<'_>) -> Result<Option<f64>> {
    let mut steps: Option<Vec<u8>> = None;
    for (index, group) in states.groups.iter().enumerate() {
        let scalars = group.state.iter().filter_map(|(key, value)| match value {
            StateValue::Scalars(views) => Some((*key, views)),
            _ => None,
        });
        for (key, views) in scalars {
            let mut first: Option<Vec<u8>> = steps.clone().filter(|_| key == "step");
            for (file, view) in own.iter().zip(views) {
                let bytes = read(files, file, view, 0..1)?;
                if let Some(first) = first.as_ref().filter(|first| **first != bytes) {
                    let show = |bytes: &[u8]| {
                        number(view.dtype, bytes)
                            .map_or_else(|| String::from("another value"), |number| number.to_string())
                    };
                    let name = own[0].path.file_name().unwrap_or_default().display();
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
    let dtype = states.groups.iter().flat_map(|group| &group.state).find_map(|(key, value)| match value {
        StateValue::Scalars(views) if *key == "step" => Some(views[0].dtype),
        _ => None,
    });
    Ok(steps.zip(dtype).and_then(|(bytes, dtype)| number(dtype, &bytes)))
}

/// Returns the number in the bytes of one element; `None` for dtypes that no optimizer uses for a counter.
fn number(dtype: Dtype, bytes: &[u8]) -> Option<f64> {
    Some(match dtype {
        Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().ok()?)),
        Dtype::F64 => f64::from_le_bytes(bytes.try_into().ok()?),
        #[allow(clippy::cast_precision_loss, reason = "no job makes 2^53 steps")]
        Dtype::I64 => i64::from_le_bytes(bytes.try_into().ok()?) as f64,
        Dtype::I32 => f64::from(i32::from_le_bytes(bytes.try_into().ok()?)),
        _ => return None,
    })
}
