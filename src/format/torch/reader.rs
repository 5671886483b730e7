//! One torch.save file: its archive, its pickle, its tensors.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;

use super::context::{Reader, View};
use super::release::DTensorStyle;
use super::tensor::{TensorNode, recognise};
use crate::catalog::{ChecksummedRange, FileLocation, StridedLocation, TensorId, Value};
use crate::error::{Error, Result};
use crate::format::archive::{ArchiveSource, torch_script};
use crate::storage::{FileId, FileRange, Files};
use torch_pickle::pickle::{self, DecodeError, Dropped, NoVisitor, NodeId, PickleError, Unknown};
use torch_pickle::zip::{Archive, Frame};

/// What a file (or an item of a DCP data file) holds.
#[derive(Debug)]
pub struct ArchiveContents {
    /// Tensors in it refer to `tensors`.
    pub value: Value,
    pub tensors: Vec<TensorNode>,
    /// Objects that were left out because their classes are not known.
    pub dropped: Vec<Dropped>,
    archive: Archive,
    stretch: FileRange,
}

const PICKLE: &str = "data.pkl";
const BYTE_ORDER: &str = "byteorder";

impl ArchiveContents {
    /// Add a tensor and give the reference to it.
    pub fn push(&mut self, found: TensorNode) -> TensorId {
        let id = TensorId(u32::try_from(self.tensors.len()).expect("fewer than 2^32 tensors"));
        self.tensors.push(found);
        id
    }

    /// What was read.
    #[must_use]
    pub fn stretch(&self) -> FileRange {
        self.stretch
    }

    /// Where the view's element 0 lies. The record was checked to hold the storage.
    #[must_use]
    pub fn place(&self, view: &View) -> FileLocation {
        match self.archive.get(&format!("data/{}", view.key)) {
            Some(record) if !view.sizes.contains(&0) => {
                FileLocation::Record { file: self.stretch.file, record, within: view.offset * view.dtype.itemsize() }
            }
            _ => FileLocation::Empty,
        }
    }

    /// The archive without what plays no part in finding the view, where that is little.
    ///
    /// # Errors
    /// `Io`.
    pub fn frame(&self, files: &Files, view: &View) -> Result<Option<Frame>> {
        // All records that `read` looks into.
        let FileRange { file, offset, len } = self.stretch;
        let (source, located) = (ArchiveSource::new(files, file), format!("data/{}", view.key));
        Frame::of(&source, offset..offset + len, &self.archive, &[PICKLE, BYTE_ORDER], &located)
            .map_err(|error| source.error(error))
    }

    /// As [`Contents::place`], down to the byte.
    ///
    /// # Errors
    /// `Malformed` where the record's local header is damaged.
    pub fn locate(&self, files: &Files, view: &View) -> Result<StridedLocation> {
        let name = format!("data/{}", view.key);
        let source = ArchiveSource::new(files, self.stretch.file);
        let located = self.archive.locate(&source, &name).map_err(|error| source.error(error))?;
        let Some((data, record)) = located else {
            return Err(Error::malformed(files.path(self.stretch.file), name, "a record of the archive", "none"));
        };
        let offset = data + view.offset * view.dtype.itemsize();
        Ok(StridedLocation {
            file: self.stretch.file,
            offset,
            strides: view.strides.clone(),
            checksum: ChecksummedRange::of_record(record, data),
        })
    }
}

/// `little` or `big`.
const MAX_BYTE_ORDER_BYTES: u64 = 64;

/// Read the archive that fills a stretch. `name` is what its content is called, for messages; empty for a file of
/// its own.
///
/// # Errors
/// `Malformed`, `Unsupported`, `Io`.
pub fn read(files: &Files, stretch: FileRange, name: &str, unknown: Unknown) -> Result<ArchiveContents> {
    let file = stretch.file;
    let path = files.path(file);
    let source = ArchiveSource::new(files, file);
    let archive = source.archive(stretch)?;
    check_kind(source, path, &archive)?;
    let content = archive.content(&source, PICKLE, pickle::MAX_BYTES).map_err(|error| source.error(error))?;
    let Some(bytes) = content else {
        return Err(Error::malformed(path, "zip directory", "an entry data.pkl", "an archive without one"));
    };
    let (pickle, _) = pickle::parse(&bytes, &mut NoVisitor).map_err(|error| pickle_error(path, PICKLE, &error))?;
    let mut reader = Reader {
        source,
        archive: &archive,
        meshes: HashMap::new(),
        depth: 0,
        shards_left: bytes.len(),
        unsupported: RefCell::default(),
        unread: RefCell::default(),
    };
    let mut tensors = Vec::new();
    // Views that are the same view of the same storage are one tensor under several names.
    let mut known: HashMap<View, TensorId> = HashMap::new();
    let mut by_node: HashMap<NodeId, TensorId> = HashMap::new();
    let decoded = pickle::decode_with(pickle.root(), unknown, &mut |node| {
        if let Some(id) = by_node.get(&node.id()).filter(|_| node.is_shared()) {
            return Ok(Some(*id));
        }
        let Some(found) = recognise(&mut reader, node)? else { return Ok(None) };
        let next = TensorId(u32::try_from(tensors.len()).expect("fewer than 2^32 tensors"));
        let id = match &found {
            TensorNode::Plain(view) => {
                reader.check_storage(view)?;
                *known.entry(view.clone()).or_insert(next)
            }
            TensorNode::Distributed { local, .. } => {
                reader.check_storage(local)?;
                next
            }
            TensorNode::Sharded { local, .. } => {
                local.iter().try_for_each(|(_, view)| reader.check_storage(view))?;
                next
            }
        };
        if id == next {
            tensors.push(found);
        }
        by_node.insert(node.id(), id);
        Ok(Some(id))
    });
    let (unsupported, unread) = (reader.unsupported.into_inner(), reader.unread.into_inner());
    if let Some(error) = unread {
        return Err(error);
    }
    let decoded = decoded.map_err(|error| decode_error(path, &error.under(name), unsupported))?;
    Ok(ArchiveContents { value: decoded.value, tensors, dropped: decoded.dropped, archive, stretch })
}

impl DTensorStyle {
    /// Returns the style of the DTensors in a torch.save file; `None` if it has no DTensor.
    ///
    /// # Errors
    /// As reading the file.
    pub fn of_file(files: &Files, file: FileId) -> Result<Option<Self>> {
        let contents = read(files, files.whole(file), "", Unknown::Drop)?;
        Ok(contents.tensors.iter().find_map(|found| match found {
            TensorNode::Distributed { mesh, .. } => Some(mesh.style.clone()),
            TensorNode::Plain(_) | TensorNode::Sharded { .. } => None,
        }))
    }
}

fn check_kind(source: ArchiveSource<'_>, path: &Path, archive: &Archive) -> Result<()> {
    if archive.get("constants.pkl").is_some() {
        return Err(torch_script(path));
    }
    let order = archive.content(&source, BYTE_ORDER, MAX_BYTE_ORDER_BYTES).map_err(|error| source.error(error))?;
    match order.as_deref() {
        None | Some(b"little") => Ok(()),
        Some(b"big") => Err(Error::unsupported(
            format!("{}: saved on a big-endian machine", path.display()),
            "load it with torch and save it again on a little-endian machine",
        )),
        Some(other) => {
            let found = String::from_utf8_lossy(&other[..other.len().min(16)]).into_owned();
            Err(Error::malformed(path, BYTE_ORDER, "little or big", found))
        }
    }
}

/// A pickle that cannot be read, as the error of its file.
pub fn pickle_error(path: &Path, what: &str, error: &PickleError) -> Error {
    Error::malformed(path, format!("{what}, byte {}", error.at), error.expected(), error.found.clone())
}

/// A value that cannot be used, as the error of its file.
pub fn decode_error(path: &Path, error: &DecodeError, unsupported: Option<String>) -> Error {
    let at = if error.path().is_empty() { "the pickled object" } else { error.path() };
    match (error, unsupported) {
        (DecodeError::Forbidden { symbol, .. }, _) => Error::unsupported(
            format!("{}: {at} needs the Python object `{symbol}`, which is not known to be plain data", path.display()),
            "nothing named in a pickle is ever run; remove that object from the checkpoint and save it again, or go \
             on without such objects with options::drop_unknown",
        ),
        (_, Some(what)) => Error::unsupported(
            format!("{}: {at} is {what}", path.display()),
            "convert it to a dense tensor before saving, or leave it out of the checkpoint",
        ),
        (DecodeError::Limit { what, .. }, None) => Error::malformed(path, at, "a value within bounds", what.clone()),
        (DecodeError::Malformed { what, .. }, None) => {
            Error::malformed(path, at, "plain data and dense tensors", what.clone())
        }
        (other, None) => Error::malformed(path, at, "plain data and dense tensors", other.to_string()),
    }
}
