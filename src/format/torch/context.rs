//! The state of reading one torch.save archive: its zip records, the meshes that its tensors share, and limits. Unit of
//! offsets, sizes and strides: elements.

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

/// A plain tensor as a view: elements of a storage, described by an offset, sizes and strides. Unit of offset, sizes
/// and strides: elements of `dtype`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct View {
    pub dtype: Dtype,
    /// The key of the storage. The zip record `data/KEY` has the data of the storage.
    pub key: Box<str>,
    pub storage_bytes: u64,
    pub offset: u64,
    pub sizes: Dims,
    pub strides: Dims,
}

/// The value of makani's attribute `sharded_dims_mp`: for each tensor dim, the name of the group of ranks that shards
/// the dim; `None` for a dim that is not sharded.
pub type ShardedDims = Box<[Option<Arc<str>>]>;

/// A mesh, as the file of one rank describes this mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshSpec {
    /// The mesh of the tensor. This mesh may be a slice of a larger mesh.
    pub mesh: DeviceMesh,
    /// The mesh of which `mesh` is a slice; `None` if `mesh` is not a slice.
    pub root: Option<DeviceMesh>,
    /// The rank that saved the file, if the file records it.
    pub rank: Option<Rank>,
    /// True if the saving rank is in the mesh. If false, the rank has no part of the tensors on the mesh.
    pub is_member: bool,
    /// The PyTorch release that pickled the mesh, and the device type of the mesh.
    pub style: DTensorStyle,
}

/// The maximum size, in bytes, of the tensor that lists the ranks of a mesh: 16 million ranks of 8 bytes each.
const MAX_RANKS_BYTES: u64 = 1 << 27;

/// The state of reading the pickle of one archive: caches, and limits against hostile files.
pub struct Reader<'a> {
    pub source: ArchiveSource<'a>,
    pub archive: &'a Archive,
    /// The meshes that were already read, by their node in the pickle. If several tensors share a mesh, this mesh is a
    /// single node and is read only once.
    pub meshes: HashMap<NodeId, Arc<MeshSpec>>,
    /// The plain tensors with the attribute `sharded_dims_mp`, and the value of this attribute.
    pub sharded_dims: HashMap<View, ShardedDims>,
    /// True if a plain tensor with the attribute `_st_info` was read as a DTensor.
    pub has_local_dtensors: bool,
    /// The current nesting depth: the number of tensors and meshes around the tensor or mesh that is being read.
    pub depth: usize,
    /// The number of shards that may still be read. Several tensors may share a list of shards, but a hostile file must
    /// not repeat such a list without limit.
    pub shards_left: usize,
    /// The reason why dtshard does not support the tensor that is being read, if the tensor is valid but of an
    /// unsupported kind; otherwise `None`.
    pub unsupported: RefCell<Option<String>>,
    /// The error of the file system; `None` if the file could be read so far.
    pub read_error: RefCell<Option<Error>>,
}

impl Reader<'_> {
    /// Returns the error for a valid tensor that dtshard does not support. Also stores the reason in `unsupported`.
    pub fn unsupported(&self, what: impl Into<String>) -> DecodeError {
        let what = what.into();
        *self.unsupported.borrow_mut() = Some(what.clone());
        DecodeError::malformed(what)
    }

    /// Converts an error of reading the file. If the file system caused the error, also stores it in `read_error`.
    fn read_error(&self, error: Error) -> DecodeError {
        let what = DecodeError::malformed(error.to_string());
        if !error.is_about_content() {
            *self.read_error.borrow_mut() = Some(error);
        }
        what
    }

    /// Reads a tensor or mesh that is inside another tensor or mesh. The nesting is limited; real files nest only a few
    /// levels.
    pub fn read_nested<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T, DecodeError>) -> Result<T, DecodeError> {
        const MAX_DEPTH: usize = 32;
        if self.depth == MAX_DEPTH {
            return Err(DecodeError::malformed("tensors or meshes that are nested too deeply"));
        }
        self.depth += 1;
        let read = read(self);
        self.depth -= 1;
        read
    }

    /// Subtracts one shard from the number of shards that may still be read. Returns an error if no more shards may be
    /// read.
    pub fn count_shard(&mut self) -> Result<(), DecodeError> {
        let left = self.shards_left.checked_sub(1);
        self.shards_left = left.ok_or_else(|| DecodeError::malformed("lists of shards that are repeated too often"))?;
        Ok(())
    }

    /// Returns the values of a small integer tensor (a list of mesh ranks), in row-major order.
    pub fn integers(&self, view: &View) -> Result<Vec<i64>, DecodeError> {
        let (Dtype::I32 | Dtype::I64) = view.dtype else {
            return Err(DecodeError::malformed(format!(
                "expected mesh ranks of dtype i32 or i64, found dtype {}",
                view.dtype
            )));
        };
        let name = format!("data/{}", view.key);
        let storage = (self.archive.content(&self.source, &name, MAX_RANKS_BYTES))
            .map_err(|error| self.read_error(self.source.error(error)))?
            .ok_or_else(|| {
                DecodeError::malformed(format!(
                    "expected the zip record `{name}`, which stores the tensor, found no such record"
                ))
            })?;
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
            let bytes = bytes.ok_or_else(|| DecodeError::malformed("mesh ranks beyond the end of their storage"))?;
            values.push(match *bytes {
                [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
                _ => i64::from_le_bytes(bytes.try_into().expect("the width of an i64")),
            });
        }
        Ok(values)
    }

    /// Checks that the archive has a zip record for the storage of a view, and that the length of the zip record is
    /// exactly the length of the storage.
    pub fn check_storage(&self, view: &View) -> Result<(), DecodeError> {
        let name = format!("data/{}", view.key);
        match self.archive.get(&name) {
            Some(record) if record.len == view.storage_bytes => Ok(()),
            Some(record) => Err(DecodeError::malformed(format!(
                "expected a zip record `{name}` of {} bytes for the storage of this tensor, found a record of {} bytes",
                view.storage_bytes, record.len
            ))),
            None if view.storage_bytes == 0 => Ok(()),
            None => Err(DecodeError::malformed(format!(
                "expected the zip record `{name}`, which stores the tensor, found no such record"
            ))),
        }
    }
}
