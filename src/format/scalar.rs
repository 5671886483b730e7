//! Reads the number in a tensor without dims, such as the counter of an optimizer's steps.

use super::resolve;
use crate::catalog::{Dtype, TensorEntry};
use crate::error::Result;
use crate::storage::Files;

/// Reads the number in a tensor without dims. Returns `None` for a tensor with dims, without a value, or with a dtype
/// that no counter has.
///
/// # Errors
/// `Malformed` and `Io` if the value cannot be read.
pub fn read_scalar(files: &Files, entry: &TensorEntry) -> Result<Option<f64>> {
    if !entry.shape.is_empty() || entry.chunks.is_empty() || entry.unreadable.is_some() {
        return Ok(None);
    }
    let location = resolve(files, entry, 0)?;
    let bytes = files.read(location.file, location.offset, entry.dtype.itemsize())?;
    Ok(number(entry.dtype, &bytes))
}

/// Returns the number in the bytes of one element; `None` for dtypes that neither counters nor parameters
/// have.
pub fn number(dtype: Dtype, bytes: &[u8]) -> Option<f64> {
    Some(match dtype {
        Dtype::Bf16 => half::bf16::from_le_bytes(bytes.try_into().ok()?).to_f64(),
        Dtype::F16 => half::f16::from_le_bytes(bytes.try_into().ok()?).to_f64(),
        Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().ok()?)),
        Dtype::F64 => f64::from_le_bytes(bytes.try_into().ok()?),
        #[allow(clippy::cast_precision_loss, reason = "no job makes 2^53 steps")]
        Dtype::I64 => i64::from_le_bytes(bytes.try_into().ok()?) as f64,
        Dtype::I32 => f64::from(i32::from_le_bytes(bytes.try_into().ok()?)),
        _ => return None,
    })
}
