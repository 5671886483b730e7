//! Reads a pickled object that a file of another format contains: an item of a DCP data file, or an object of a
//! torchsnapshot snapshot.

use super::reader::{self, ArchiveContents};
use super::{TensorNode, chunk};
use crate::catalog::{Catalog, Fqn, TensorEntry, Unreadable, Value, shift_tensors};
use crate::error::{Error, Result};
use crate::layout::{Rank, Region, Tile};
use crate::storage::{FileRange, Files};
use torch_pickle::pickle::{DecodeError, Unknown};

/// The place of a pickled object.
#[derive(Clone, Copy, Debug)]
pub struct ObjectPlace<'a> {
    /// The byte range of the `torch.save` archive with the object.
    pub range: FileRange,
    pub fqn: &'a Fqn,
    /// The rank that stores the object, if other ranks may store other values.
    pub rank: Option<Rank>,
}

/// Reads an object. Tensors inside the object, for example in a tuple, become entries of the catalog. Returns `None` if
/// the object is left out, because its class is unknown.
///
/// # Errors
/// The errors of reading a `torch.save` archive; `Malformed` for a DTensor or ShardedTensor inside the object.
pub fn read_object(
    files: &Files,
    place: ObjectPlace<'_>,
    unknown: Unknown,
    catalog: &mut Catalog,
) -> Result<Option<Value>> {
    let ObjectPlace { range, fqn, .. } = place;
    let mut contents = reader::read(files, range, fqn.as_str(), unknown)?;
    catalog.archives.push(range);
    for dropped in &contents.dropped {
        let text = format!("{} ({})", DecodeError::join(fqn.as_str(), &dropped.path), dropped.symbol);
        if !catalog.dropped.contains(&text) {
            catalog.dropped.push(text);
        }
    }
    if contents.dropped.iter().any(|dropped| dropped.path.is_empty()) {
        return Ok(None);
    }
    let shift = u32::try_from(catalog.tensors.len()).expect("fewer than 2^32 tensors");
    for index in 0..contents.tensors.len() {
        let entry = entry(files, place, &contents, &contents.tensors[index])?;
        catalog.push_tensor(entry);
    }
    shift_tensors(&mut contents.value, shift);
    Ok(Some(contents.value))
}

fn entry(files: &Files, place: ObjectPlace<'_>, contents: &ArchiveContents, found: &TensorNode) -> Result<TensorEntry> {
    let ObjectPlace { range, fqn, rank } = place;
    let path = files.path(range.file);
    match found {
        TensorNode::Plain(view) => {
            let mut entry = TensorEntry::new(fqn.clone(), view.dtype, view.sizes.clone());
            entry.chunks.push(chunk(contents, view, Tile::from_region(&Region::whole(&view.sizes)), rank));
            Ok(entry)
        }
        TensorNode::Unreadable(kind) => {
            let why = Unreadable { file: path.to_path_buf(), kind: kind.clone() };
            Ok(TensorEntry::unreadable(fqn.clone(), why))
        }
        TensorNode::Distributed { .. } | TensorNode::Sharded { .. } => {
            let expected = "plain tensors inside an object";
            Err(Error::malformed(path, fqn.as_str(), expected, "a distributed tensor"))
        }
    }
}
