//! Finds the byte ranges of the objects in the data files of a DCP directory. The metadata mirror (a sparse copy of the
//! metadata of all files) copies these byte ranges, because dtshard reads objects together with the metadata. The byte
//! ranges of tensor items are not copied.

use std::path::Path;

use memchr::memmem;

use super::metadata::{DcpMetadata, EntryKind, MetadataEntry, StoredItem};
use super::read::metadata_files;
use crate::error::Result;
use crate::format::json::read_document;
use crate::format::torch::reader;
use crate::format::traits::{Object, Objects};
use crate::storage::{FileId, FileRange, Files};
use torch_pickle::pickle::{self, Unknown};

/// The Python class that describes an object in `.metadata`. If a `.metadata` file lists an object, the bytes of the
/// file contain this name.
const OBJECT_CLASS: &str = "BytesStorageMetadata";

/// Returns the objects that the metadata files of a folder list. Does not read data files.
///
/// # Errors
/// The errors of reading a metadata file, and of decoding a metadata file that lists objects.
pub fn objects(folder: &Path) -> Result<Objects> {
    let mut found = Objects::new();
    for (_, path) in metadata_files(folder)? {
        let bytes = read_document(&path, pickle::MAX_BYTES)?;
        // Metadata without objects is not decoded by this function, because it can be long and the reader of the folder
        // decodes it later.
        if memmem::find(&bytes, OBJECT_CLASS.as_bytes()).is_none() {
            continue;
        }
        let metadata = DcpMetadata::decode(&path, &bytes)?;
        let files: Vec<String> = metadata.files().into_iter().map(String::from).collect();
        metadata.entries(Ok, |MetadataEntry { fqn, kind, .. }| {
            if let EntryKind::Bytes(Some(StoredItem { path, offset, len })) = kind {
                found.entry(files[path as usize].as_str().into()).or_default().push(Object { fqn, offset, len });
            }
            Ok(())
        })?;
    }
    Ok(found)
}

/// Reads objects from a data file. `files` records the byte ranges that are read, and the metadata mirror (a sparse
/// copy of the metadata of all files) copies these byte ranges. The objects themselves are not used. Damage is ignored,
/// because the reader of DCP directories reports it later.
pub fn look_at(files: &Files, file: FileId, objects: &[Object]) {
    let whole = files.len_bytes(file);
    for Object { fqn, offset, len } in objects {
        if offset.checked_add(*len).is_some_and(|end| end <= whole) {
            let stretch = FileRange { file, offset: *offset, len: *len };
            let _ = reader::read(files, stretch, fqn.as_str(), Unknown::Drop);
        }
    }
}
