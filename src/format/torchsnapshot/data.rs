//! Locates the data of manifest entries in the files of a snapshot, and reads objects.

use std::path::Path;

use super::manifest::{Encoding, StoredData, StoredShard};
use crate::catalog::{Catalog, Dtype, FileLocation, Fqn, RankValue, TensorId, Value, checked_len_bytes};
use crate::error::{Error, FormatError, Result};
use crate::format::torch::{ObjectPlace, read_object};
use crate::layout::Rank;
use crate::storage::{FileId, FileRange, Files};
use torch_pickle::pickle::Unknown;

/// The hint for a bf16 tensor without its last element.
const LOST_ELEMENT: &str = "torchsnapshot does not store the last element of a bf16 tensor with an odd number of elements, so the \
                            snapshot lacks this element; save such tensors again in another dtype";

/// The files of a snapshot.
pub struct DataFiles<'a> {
    pub files: &'a Files,
    /// The path of the manifest.
    pub manifest: &'a Path,
    /// The opened files, in the order of the manifest's list of files.
    pub ids: Vec<FileId>,
    pub unknown: Unknown,
}

impl DataFiles<'_> {
    /// Returns the byte range of an entry's data, and checks that the range is inside the file.
    ///
    /// # Errors
    /// `Malformed` that names the file and the tensor or object.
    pub fn range(&self, fqn: &Fqn, data: StoredData) -> Result<FileRange> {
        let file = self.ids[data.file];
        let len = self.files.len_bytes(file);
        match data.byte_range {
            None => Ok(self.files.whole(file)),
            Some((start, end)) if end <= len => Ok(FileRange { file, offset: start, len: end - start }),
            Some((_, end)) => {
                let name = self.manifest.file_name().unwrap_or_default().display();
                let expected =
                    format!("a file of at least {end} bytes, because {name} puts the end of this data at that byte");
                Err(Error::malformed(self.files.path(file), fqn.as_str(), expected, format!("a file of {len} bytes")))
            }
        }
    }

    /// Returns the location of a shard. If the shard is stored as raw bytes, checks that they have the length of the
    /// shard's elements.
    ///
    /// # Errors
    /// `Malformed` that names the file and the tensor.
    pub fn location(&self, fqn: &Fqn, shard: &StoredShard) -> Result<FileLocation> {
        let range = self.range(fqn, shard.data)?;
        if shard.region.is_empty() {
            return Ok(FileLocation::Empty);
        }
        if shard.encoding == Encoding::Archive {
            return Ok(FileLocation::Item(range));
        }
        let sizes = &shard.region.sizes;
        let expected = checked_len_bytes(sizes, shard.dtype).expect("a shape that the manifest reader has checked");
        if range.len != expected {
            // `_tensor_as_memoryview_via_untyped_storage` views the bytes of a bf16 tensor as floats of four bytes.
            let is_cut = shard.dtype == Dtype::Bf16 && expected % 4 == 2 && range.len == expected - 2;
            let hint = is_cut.then(|| LOST_ELEMENT.into());
            let expected = format!("{expected} bytes for {} {:?}", shard.dtype, sizes.as_slice());
            let found = match shard.data.byte_range {
                Some((start, end)) => format!("{} bytes (byte_range {start} to {end})", range.len),
                None => format!("a file of {} bytes", range.len),
            };
            let (path, at) = (self.files.path(range.file).to_path_buf(), fqn.to_string());
            return Err(FormatError::Malformed { path, at, expected, found, hint }.into());
        }
        Ok(FileLocation::Bytes { file: range.file, offset: range.offset })
    }

    /// Reads an object. Tensors inside the object become entries of the catalog. `rank` is the rank that stores the
    /// object; `None` if the object is the same on all ranks. Returns `None` if the object is left out, because its
    /// class is unknown.
    ///
    /// # Errors
    /// The errors of reading a `torch.save` archive.
    pub fn object(
        &self,
        fqn: &Fqn,
        data: StoredData,
        rank: Option<Rank>,
        catalog: &mut Catalog,
    ) -> Result<Option<Value>> {
        let place = ObjectPlace { range: self.range(fqn, data)?, fqn, rank };
        read_object(self.files, place, self.unknown, catalog)
    }
}

/// Adds the value of one rank to `by_rank`. If `by_rank` already has an equal value, only adds the rank to that value.
/// Two values count as equal if they differ only in the data of tensors with equal dtypes and shapes; these tensors
/// become replicas, which are compared when they are read. `start` is the number of tensors in the catalog before the
/// value was read.
pub fn add_value(catalog: &mut Catalog, by_rank: &mut Vec<RankValue>, value: Value, rank: Rank, start: usize) {
    let known = by_rank.iter().position(|known| may_be_equal(catalog, &known.value, &value));
    let Some(known) = known else {
        by_rank.push(RankValue { value, ranks: vec![rank] });
        return;
    };
    by_rank[known].ranks.push(rank);
    for (into, from) in by_rank[known].value.tensor_ids().into_iter().zip(value.tensor_ids()) {
        let chunks = catalog.tensor(from).chunks.clone();
        let entry = &mut catalog.tensors[into.0 as usize];
        for chunk in chunks.iter() {
            if entry.chunks.iter().all(|known| known.location != chunk.location) {
                entry.chunks.push(chunk);
            }
        }
    }
    catalog.tensors.truncate(start);
}

/// Returns whether two values differ at most in the data of tensors. The tensors must have equal dtypes and shapes.
fn may_be_equal(catalog: &Catalog, left: &Value, right: &Value) -> bool {
    let shape = |id: TensorId| (catalog.tensor(id).dtype, &catalog.tensor(id).shape);
    left.same_but_tensors(right)
        && left.tensor_ids().into_iter().map(shape).eq(right.tensor_ids().into_iter().map(shape))
}
