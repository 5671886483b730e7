//! The Python class that tensors have in rank files: the one that is asked for, else that of each in --like or SRC.

use crate::catalog::{Catalog, Class};
use crate::convert::options::TensorClass;
use crate::error::{Error, Result};
use crate::format::{Format, TensorStorage};

/// The Python class of tensors that ranks share; `None` for that of each in the source.
///
/// # Errors
/// `Usage` where the target does not keep it.
pub fn tensor_class(given: Option<TensorClass>, to: Format) -> Result<Option<Class>> {
    match given {
        Some(_) if to.tensors() != TensorStorage::Ranks => Err(Error::usage(
            format!("options::tensor_class is for rank files, and DST is to be {to}"),
            "leave it out, or write rank files with options::to torch-ranks",
        )),
        None | Some(TensorClass::Auto) => Ok(None),
        Some(TensorClass::DTensor) => Ok(Some(Class::DTensor)),
        Some(TensorClass::ShardedTensor) => Ok(Some(Class::ShardedTensor)),
        Some(TensorClass::Local) => Ok(Some(Class::Tensor)),
    }
}

/// That of tensors that have none in the source.
pub fn usual_class(catalog: &Catalog) -> Class {
    let has = |class| catalog.tensors.iter().any(|entry| entry.is_shared() && entry.class == class);
    match [Class::DTensor, Class::ShardedTensor, Class::Tensor].map(has) {
        [false, true, _] => Class::ShardedTensor,
        // Plain tensors that are parts.
        [false, false, true] => Class::Tensor,
        _ => Class::DTensor,
    }
}
