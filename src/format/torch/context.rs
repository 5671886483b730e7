//! The state of reading one archive: its records, and the meshes and limits that tensors in it share.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use super::release::DTensorStyle;
use crate::catalog::Dtype;
use crate::error::Error;
use crate::format::archive::ArchiveSource;
use crate::layout::{DeviceMesh, Dims, Rank};
use torch_pickle::pickle::{DecodeError, NodeId};
use torch_pickle::zip::Archive;

/// Part of a storage, as a strided array. Offset, sizes and strides in elements of `dtype`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct View {
    pub dtype: Dtype,
    /// The storage is the record `data/KEY`.
    pub key: Box<str>,
    pub storage_bytes: u64,
    pub offset: u64,
    pub sizes: Dims,
    pub strides: Dims,
}

/// A mesh as one rank's file tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshSpec {
    /// This rank's slice, where it is one.
    pub mesh: DeviceMesh,
    /// The mesh it is a slice of.
    pub root: Option<DeviceMesh>,
    /// The rank that saved the file, where it is recorded.
    pub rank: Option<Rank>,
    /// False where the saving rank is not in the mesh and holds nothing.
    pub is_member: bool,
    /// How it was written.
    pub style: DTensorStyle,
}

/// The storage of a mesh's ranks: 16 million of 8 bytes.
const MAX_RANKS_BYTES: u64 = 1 << 27;

/// State of reading one archive's pickle.
pub struct Reader<'a> {
    pub source: ArchiveSource<'a>,
    pub archive: &'a Archive,
    /// Meshes are shared objects: each is read once.
    pub meshes: HashMap<NodeId, Arc<MeshSpec>>,
    /// Tensors within tensors that are being read, meshes included.
    pub depth: usize,
    /// Shards that may still be read: a list of them may be shared by many tensors, but not without end.
    pub shards_left: usize,
    /// Why a tensor cannot be converted, where it is sound but not supported.
    pub unsupported: RefCell<Option<String>>,
    /// Why the file could not be read.
    pub unread: RefCell<Option<Error>>,
}

impl Reader<'_> {
    /// An error for something sound that is not converted.
    pub fn unsupported(&self, what: impl Into<String>) -> DecodeError {
        let what = what.into();
        *self.unsupported.borrow_mut() = Some(what.clone());
        DecodeError::malformed(what)
    }

    /// An error of reading the file, which may have nothing to do with what is in it.
    fn unread(&self, error: Error) -> DecodeError {
        let what = DecodeError::malformed(error.to_string());
        if !error.is_about_content() {
            *self.unread.borrow_mut() = Some(error);
        }
        what
    }

    /// Read something inside the tensor or mesh that is being read; real ones are a few deep.
    pub fn inside<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T, DecodeError>) -> Result<T, DecodeError> {
        const MAX_DEPTH: usize = 32;
        if self.depth == MAX_DEPTH {
            return Err(DecodeError::malformed("tensors or meshes within each other without end"));
        }
        self.depth += 1;
        let read = read(self);
        self.depth -= 1;
        read
    }

    pub fn count_shard(&mut self) -> Result<(), DecodeError> {
        let left = self.shards_left.checked_sub(1);
        self.shards_left = left.ok_or_else(|| DecodeError::malformed("lists of shards that are shared without end"))?;
        Ok(())
    }

    /// The values of a small integer tensor, row-major.
    pub fn integers(&self, view: &View) -> Result<Vec<i64>, DecodeError> {
        let (Dtype::I32 | Dtype::I64) = view.dtype else {
            return Err(DecodeError::malformed(format!("ranks of dtype {}", view.dtype)));
        };
        let name = format!("data/{}", view.key);
        let storage = (self.archive.content(&self.source, &name, MAX_RANKS_BYTES))
            .map_err(|error| self.unread(self.source.error(error)))?
            .ok_or_else(|| DecodeError::malformed(format!("a tensor whose storage `{name}` is missing")))?;
        let width = usize::try_from(view.dtype.itemsize()).expect("a small number");
        let count = view.sizes.iter().product::<u64>();
        let mut values = Vec::new();
        for index in 0..count {
            let (mut rest, mut element) = (index, view.offset);
            for (&size, &stride) in view.sizes.iter().zip(&view.strides).rev() {
                element += (rest % size) * stride;
                rest /= size;
            }
            let start = usize::try_from(element).ok().and_then(|element| element.checked_mul(width));
            let bytes = start.and_then(|start| storage.get(start..start + width));
            let bytes = bytes.ok_or_else(|| DecodeError::malformed("ranks beyond the end of their storage"))?;
            values.push(match *bytes {
                [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
                _ => i64::from_le_bytes(bytes.try_into().expect("the width of an i64")),
            });
        }
        Ok(values)
    }

    /// The record of a view's storage must be there and hold exactly the storage.
    pub fn check_storage(&self, view: &View) -> Result<(), DecodeError> {
        let name = format!("data/{}", view.key);
        match self.archive.get(&name) {
            Some(record) if record.len == view.storage_bytes => Ok(()),
            Some(record) => Err(DecodeError::malformed(format!(
                "a storage of {} bytes in the record `{name}` of {}",
                view.storage_bytes, record.len
            ))),
            None if view.storage_bytes == 0 => Ok(()),
            None => Err(DecodeError::malformed(format!("a tensor whose storage `{name}` is missing"))),
        }
    }
}
