//! The Python class of sharded tensors in rank files: DTensor, ShardedTensor, or plain `torch.Tensor`. The option
//! `--tensor-class` sets one class for all tensors. Without it, each tensor gets the class that it has in `--like` or
//! SRC.

use crate::catalog::{Catalog, Class};
use crate::convert::options::TensorClass;
use crate::error::{Error, Result};
use crate::format::{Format, TensorStorage};

/// Returns the Python class that all sharded tensors get. Returns `None` if each tensor keeps its class from `--like`
/// or the source.
///
/// # Errors
/// `Usage` if the target format does not store the class.
pub fn tensor_class(given: Option<TensorClass>, to: Format) -> Result<Option<Class>> {
    match given {
        Some(_) if to.tensors() != TensorStorage::Ranks => Err(Error::usage(
            format!("options::tensor_class needs rank files, but the format of DST is {to}"),
            "omit options::tensor_class, or write rank files with options::to torch-ranks",
        )),
        None | Some(TensorClass::Auto) => Ok(None),
        Some(TensorClass::DTensor) => Ok(Some(Class::DTensor)),
        Some(TensorClass::ShardedTensor) => Ok(Some(Class::ShardedTensor)),
        Some(TensorClass::Local) => Ok(Some(Class::Tensor)),
    }
}

/// Returns the class for tensors that are sharded in the target, but not in the source: the class of the source's
/// sharded tensors, or DTensor if the source has no sharded tensors. For model-parallel checkpoints of makani, it is a
/// plain tensor.
pub fn usual_class(catalog: &Catalog) -> Class {
    let has = |class| catalog.tensors.iter().any(|entry| entry.is_shared() && entry.class == class);
    match [Class::DTensor, Class::ShardedTensor, Class::Tensor].map(has) {
        [false, true, _] => Class::ShardedTensor,
        // makani loads only plain tensors.
        [false, false, _] if !catalog.model_parallel_groups.is_empty() => Class::Tensor,
        // All sharded tensors of the source are plain tensors that each hold the shard of one rank.
        [false, false, true] => Class::Tensor,
        _ => Class::DTensor,
    }
}
