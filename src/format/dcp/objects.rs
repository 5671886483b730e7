//! Where the objects of a DCP directory lie: what reading it looks at in data files. Items that are tensors are located
//! when their data is wanted.

use std::path::Path;

use memchr::memmem;

use super::metadata::{DcpMetadata, EntryKind, MetadataEntry, StoredItem};
use super::read::metadata_files;
use crate::error::Result;
use crate::format::json::read_document;
use crate::format::registry::{Object, Objects};
use crate::format::torch::reader;
use crate::storage::{FileId, FileRange, Files};
use torch_pickle::pickle::{self, Unknown};

/// The class of what metadata says of an object; a pickle has its name in full, or none.
const OBJECT_CLASS: &str = "BytesStorageMetadata";

/// The objects that the metadata files of a folder tell of. Data files are not looked at.
///
/// # Errors
/// As reading metadata, where it tells of objects.
pub fn objects(folder: &Path) -> Result<Objects> {
    let mut found = Objects::new();
    for (_, path) in metadata_files(folder)? {
        let bytes = read_document(&path, pickle::MAX_BYTES)?;
        // Metadata of many tensors alone is long, and reading the folder decodes it soon enough.
        if memmem::find(&bytes, OBJECT_CLASS.as_bytes()).is_none() {
            continue;
        }
        let metadata = DcpMetadata::decode(&path, &bytes)?;
        let files = metadata.files();
        metadata.entries(Ok, |MetadataEntry { fqn, kind, .. }| {
            if let EntryKind::Bytes(Some(StoredItem { path, offset, len })) = kind {
                found.entry(files[path as usize].into()).or_default().push(Object { fqn, offset, len });
            }
            Ok(())
        })?;
    }
    Ok(found)
}

/// Read objects as reading the directory does. Faults are for whoever reads that.
pub fn look_at(files: &Files, file: FileId, objects: &[Object]) {
    let whole = files.len_bytes(file);
    for Object { fqn, offset, len } in objects {
        if offset.checked_add(*len).is_some_and(|end| end <= whole) {
            let stretch = FileRange { file, offset: *offset, len: *len };
            let _ = reader::read(files, stretch, fqn.as_str(), Unknown::Drop);
        }
    }
}
