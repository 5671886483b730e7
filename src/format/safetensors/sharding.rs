//! Shards of DCP's Hugging Face storage: safetensors files that record the offsets of each box in its tensor.
//!
//! PyTorch can consolidate such shards to N files of whole tensors. A file `shard-RRRRR-model-FFFFF-of-NNNNN.safetensors`
//! contains the boxes that rank R (counted from 1) has of the tensors in file F. `DCP_SHARDING_INFO` in the
//! `__metadata__` of the shard file gives the offsets of each box in the whole tensor. The shape of the whole tensor is
//! not stored. As in PyTorch's reader, a tensor is assumed to end at the end of the last box. So a box that is missing
//! in the middle of a tensor is detected, but a box that is missing at the end is not.
//!
//! Source: `torch/distributed/checkpoint/hf_storage.py` and `_hf_utils.py` (2.15).

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use super::{INDEX_NAME, StoredTensor};
use crate::catalog::{Chunk, FileLocation, Fqn, TensorEntry, checked_len_bytes};
use crate::error::{Error, Result};
use crate::json_text;
use crate::layout::{Dims, Rank, Region, Tile};
use crate::storage::{FileId, lookup};

/// The metadata key for the offsets of the boxes in a file.
pub const SHARDING_INFO: &str = "DCP_SHARDING_INFO";

/// The numbers in the file name of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardName {
    /// The number after `shard-` in the file name, counted from 1. dtshard reads it as the rank plus one.
    pub shard: u32,
    /// The number F in `model-F-of-N`, counted from 1: after consolidation, the tensors of this shard are in file F.
    pub file: u32,
    /// The number N in `model-F-of-N`: the number of files after consolidation.
    pub files: u32,
}

impl ShardName {
    /// Parses a name such as `shard-00002-model-00001-of-00003.safetensors`.
    pub fn parse(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_prefix("shard-")?.strip_suffix(".safetensors")?;
        let (shard, rest) = name.split_once("-model-")?;
        let (file, files) = rest.split_once("-of-")?;
        let number = |text: &str| text.parse::<u32>().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
        let (shard, file, files) = (number(shard)?, number(file)?, number(files)?);
        (shard > 0 && file > 0).then_some(Self { shard, file, files })
    }
}

impl fmt::Display for ShardName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shard, file, files } = self;
        write!(formatter, "shard-{shard:05}-model-{file:05}-of-{files:05}.safetensors")
    }
}

/// Returns a warning that a missing last box of a tensor is not detected. Returns `None` if a file near the shards may
/// give the shapes of whole tensors: a config, or a file from consolidation, which PyTorch writes into the folder above
/// `sharded`.
///
/// # Errors
/// `Io` if the file system cannot report whether such a file exists.
pub fn warning_of_unknown_shapes(shard: &Path) -> Result<Option<String>> {
    let Some(folder) = shard.parent() else { return Ok(None) };
    let above = folder.parent().filter(|_| folder.file_name().is_some_and(|name| name == "sharded"));
    for folder in [Some(folder), above].into_iter().flatten() {
        for name in ["config.json", INDEX_NAME, "model.safetensors"] {
            if lookup::is_file(&folder.join(name))? {
                return Ok(None);
            }
        }
    }
    Ok(Some(format!(
        "{}: shards do not store the shapes of whole tensors, so a missing last shard is not detected; compare the \
         shapes with the model's config",
        folder.display()
    )))
}

/// Parses the offsets that a file records for its tensors.
///
/// # Errors
/// `Malformed` if the text does not have the structure that PyTorch writes.
pub fn sharding_info(path: &Path, text: &str) -> Result<BTreeMap<String, Dims>> {
    #[derive(Deserialize)]
    struct ShardingEntry {
        saved_offsets: Vec<u64>,
    }
    let entries: BTreeMap<String, ShardingEntry> = serde_json::from_str(text)
        .map_err(|error| json_text::malformed_part(path, SHARDING_INFO, &error, "saved_offsets for each tensor"))?;
    Ok(entries.into_iter().map(|(name, entry)| (name, entry.saved_offsets.as_slice().into())).collect())
}

/// The box of a tensor that one file contains.
#[derive(Debug)]
pub struct TensorShard {
    /// The name of the tensor.
    pub name: Arc<str>,
    /// The path of the file.
    pub path: Arc<Path>,
    /// The id of the file among the opened files.
    pub file: FileId,
    /// The location, the dtype and the shape of the box in the file.
    pub stored: StoredTensor,
    /// The offsets of the box in the whole tensor; `None` if the file does not record them.
    pub offsets: Option<Box<Dims>>,
}

/// Joins the boxes of one tensor. Each item of `shards` is a box from one file; all boxes have the same tensor name.
///
/// # Errors
/// `Conflict` if the boxes differ in dtype or number of dims, `Malformed` if the offsets of a box do not fit its shape.
pub fn tensor(shards: &[TensorShard]) -> Result<TensorEntry> {
    let first = &shards[0];
    let fqn = Fqn::from(first.name.clone());
    let dtype = first.stored.dtype;
    let mut shape: Dims = Dims::from_elem(0, first.stored.shape.len());
    let mut regions = Vec::with_capacity(shards.len());
    for shard in shards {
        let sizes = &shard.stored.shape;
        if (shard.stored.dtype, sizes.len()) != (dtype, shape.len()) {
            let between = format!("{} and {}", first.path.display(), shard.path.display());
            let detail = format!(
                "{dtype} of {} dims and {} of {} dims",
                first.stored.shape.len(),
                shard.stored.dtype,
                sizes.len()
            );
            return Err(fqn.disagreement("dtype or number of dims", between, detail));
        }
        let offsets = match &shard.offsets {
            Some(offsets) => Dims::clone(offsets),
            None => Dims::from_elem(0, sizes.len()),
        };
        if offsets.len() != sizes.len() {
            let found = format!("{:?}", offsets.as_slice());
            return Err(Error::malformed(
                &shard.path,
                fqn.as_str(),
                format!("saved_offsets of {} dims", sizes.len()),
                found,
            ));
        }
        for ((whole, &offset), &size) in shape.iter_mut().zip(&offsets).zip(sizes) {
            let Some(end) = offset.checked_add(size) else {
                let found = format!("{:?}", offsets.as_slice());
                return Err(Error::malformed(&shard.path, fqn.as_str(), "offsets inside a tensor", found));
            };
            *whole = end.max(*whole);
        }
        regions.push(Region::new(offsets, sizes.clone()));
    }
    if checked_len_bytes(&shape, dtype).is_none() {
        return Err(Error::malformed(
            &first.path,
            fqn.as_str(),
            "a shape that fits memory",
            format!("{:?}", shape.as_slice()),
        ));
    }
    let mut entry = TensorEntry::new(fqn, dtype, shape);
    for (shard, region) in shards.iter().zip(regions) {
        let place = FileLocation::Bytes { file: shard.file, offset: shard.stored.offset };
        let location = if region.is_empty() { FileLocation::Empty } else { place };
        let rank = ShardName::parse(&shard.path).map(|name| Rank(name.shard - 1));
        entry.chunks.push(Chunk { tile: Tile::from_region(&region), location, strides: None, rank, view: None });
    }
    Ok(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_shard_names_are_parsed() {
        let parse = |name: &str| ShardName::parse(Path::new(name)).map(|name| (name.shard, name.file, name.files));
        assert_eq!(parse("shard-00002-model-00001-of-00003.safetensors"), Some((2, 1, 3)));
        for name in [
            "shard-00000-model-00001-of-00001.safetensors",
            "shard-00001-model-00000-of-00001.safetensors",
            "model-00001-of-00003.safetensors",
            "shard-x-model-00001-of-00003.safetensors",
            "shard-00002-model-00001-of-00003.pt",
            "shard-+2-model-1-of-1.safetensors",
        ] {
            assert_eq!(parse(name), None, "{name}");
        }
    }

    fn shard(offsets: &[u64], sizes: &[u64]) -> TensorShard {
        let stored = StoredTensor { dtype: crate::catalog::Dtype::F32, shape: sizes.into(), offset: 0 };
        TensorShard {
            name: "w".into(),
            path: Path::new("f").into(),
            file: FileId(0),
            stored,
            offsets: Some(Box::new(offsets.into())),
        }
    }

    #[test]
    fn whole_tensor_ends_where_its_shards_end() {
        let entry = tensor(&[shard(&[3, 0], &[2, 4]), shard(&[0, 0], &[3, 4])]).unwrap();
        assert_eq!(entry.shape.as_slice(), [5, 4]);
        assert!(entry.tilings().is_ok());
        assert!(tensor(&[shard(&[3, 0], &[2, 4])]).unwrap().tilings().is_err());
        assert!(tensor(&[shard(&[u64::MAX], &[2])]).is_err());
        assert!(tensor(&[shard(&[1 << 62], &[2])]).is_err());
        assert!(tensor(&[shard(&[0], &[2, 2])]).is_err());
        assert!(tensor(&[shard(&[0], &[2]), shard(&[0, 0], &[2, 2])]).is_err());
    }
}
