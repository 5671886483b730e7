//! Reads one torch.save file: its archive, its pickle and its tensors. Offsets in files are in bytes; offsets in views
//! count elements.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;

use super::context::{Reader, ShardedDims, View};
use super::release::DTensorStyle;
use super::tensor::{TensorNode, read_tensor};
use crate::catalog::unreadable::UnreadableKind;
use crate::catalog::{ChecksummedRange, FileLocation, StridedLocation, TensorId, Value};
use crate::error::{Error, Result, Wrong};
use crate::format::archive::{ArchiveSource, torch_script_error};
use crate::storage::{FileId, FileRange, Files};
use torch_pickle::pickle::{self, DecodeError, Decoded, Dropped, NoVisitor, NodeId, PickleError, Ref, Unknown};
use torch_pickle::zip::{Archive, Frame};

/// The content of a torch.save archive, which is a file or an item of a DCP data file.
#[derive(Debug)]
pub struct ArchiveContents {
    /// The pickled value. Its tensor ids are indices of `tensors`.
    pub value: Value,
    pub tensors: Vec<TensorNode>,
    /// Objects that were dropped because their classes are unknown.
    pub dropped: Vec<Dropped>,
    /// The plain tensors with the attribute `sharded_dims_mp`, and the value of this attribute.
    pub sharded_dims: HashMap<View, ShardedDims>,
    /// True if plain tensors with the attribute `_st_info` were read as DTensors.
    pub has_local_dtensors: bool,
    archive: Archive,
    file_range: FileRange,
}

const PICKLE: &str = "data.pkl";
const BYTE_ORDER: &str = "byteorder";

impl ArchiveContents {
    /// Adds a tensor to `tensors`, and returns its id.
    pub fn push(&mut self, found: TensorNode) -> TensorId {
        let id = TensorId(u32::try_from(self.tensors.len()).expect("fewer than 2^32 tensors"));
        self.tensors.push(found);
        id
    }

    /// Returns whether plain tensors carry a layout as an attribute. If so, other plain tensors, such as optimizer
    /// state, may be shards although they carry no layout.
    pub fn has_layout_attributes(&self) -> bool {
        self.has_local_dtensors || !self.sharded_dims.is_empty()
    }

    /// Returns the byte range that the archive occupies in its file.
    pub fn file_range(&self) -> FileRange {
        self.file_range
    }

    /// Returns the location of the first element of a view, relative to the zip record of its storage. The caller must
    /// have checked the storage with [`Reader::check_storage`].
    pub fn record_location(&self, view: &View) -> FileLocation {
        match self.archive.get(&format!("data/{}", view.key)) {
            Some(record) if !view.sizes.contains(&0) => {
                FileLocation::Record { file: self.file_range.file, record, within: view.offset * view.dtype.itemsize() }
            }
            _ => FileLocation::Empty,
        }
    }

    /// Returns the frame of a view: the bytes of the archive that determine where the data of the view is. In every
    /// archive with an equal frame, the data is at the same place, so a cache can find the place by the frame. Returns
    /// `None` if the frame is too large to cache.
    ///
    /// # Errors
    /// `Io` if the archive cannot be read.
    pub fn frame(&self, files: &Files, view: &View) -> Result<Option<Frame>> {
        // The frame must contain all zip records that `read` uses.
        let FileRange { file, offset, len } = self.file_range;
        let (source, located) = (ArchiveSource::new(files, file), format!("data/{}", view.key));
        Frame::of(&source, offset..offset + len, &self.archive, &[PICKLE, BYTE_ORDER], &located)
            .map_err(|error| source.error(error))
    }

    /// Returns the location of the first element of a view, as an offset in the file.
    ///
    /// # Errors
    /// `Malformed` if the local header of the zip record is damaged.
    pub fn locate(&self, files: &Files, view: &View) -> Result<StridedLocation> {
        let name = format!("data/{}", view.key);
        let source = ArchiveSource::new(files, self.file_range.file);
        let located = self.archive.locate(&source, &name).map_err(|error| source.error(error))?;
        let Some((data, record)) = located else {
            return Err(Error::malformed(files.path(self.file_range.file), name, "a record of the archive", "none"));
        };
        let offset = data + view.offset * view.dtype.itemsize();
        Ok(StridedLocation {
            file: self.file_range.file,
            offset,
            strides: view.strides.clone(),
            checksum: ChecksummedRange::of_record(record, data),
        })
    }
}

/// The maximum length of the zip record `byteorder` in bytes. Its content is `little` or `big`.
const MAX_BYTE_ORDER_BYTES: u64 = 64;

/// Reads the archive that occupies a byte range of a file. Messages use `name` (such as the FQN of an item) to name the
/// archive; `name` is empty if the archive is the complete file.
///
/// A tensor of an unsupported kind becomes a [`TensorNode::Unreadable`], and so does an object of an unknown class
/// unless `unknown` is [`Unknown::Drop`]. Such a tensor or object is an error only in code that needs its value.
///
/// # Errors
/// `Malformed`, `Unsupported` or `Io`, naming the file and the position in it.
pub fn read(files: &Files, file_range: FileRange, name: &str, unknown: Unknown) -> Result<ArchiveContents> {
    let file = file_range.file;
    let path = files.path(file);
    let source = ArchiveSource::new(files, file);
    let archive = source.archive(file_range)?;
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
        sharded_dims: HashMap::new(),
        has_local_dtensors: false,
        depth: 0,
        shards_left: bytes.len(),
        unsupported: RefCell::default(),
        read_error: RefCell::default(),
    };
    let tensors = RefCell::new(Vec::new());
    // Equal views of one storage become one tensor, which then has several names.
    let mut known: HashMap<View, TensorId> = HashMap::new();
    let mut by_node: HashMap<NodeId, TensorId> = HashMap::new();
    let mut find_tensor = |node: Ref<'_>| {
        if let Some(id) = by_node.get(&node.id()).filter(|_| node.is_shared()) {
            return Ok(Some(*id));
        }
        let found = match read_tensor(&mut reader, node) {
            Ok(None) => return Ok(None),
            Ok(Some(found)) => found,
            Err(error) => TensorNode::Unreadable(UnreadableKind::Tensor(reader.unsupported.take().ok_or(error)?)),
        };
        let mut tensors = tensors.borrow_mut();
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
            TensorNode::Unreadable(_) => next,
        };
        if id == next {
            tensors.push(found);
        }
        by_node.insert(node.id(), id);
        Ok(Some(id))
    };
    let mut keep_unknown = |symbol| {
        let mut tensors = tensors.borrow_mut();
        tensors.push(TensorNode::Unreadable(UnreadableKind::Object(symbol)));
        TensorId(u32::try_from(tensors.len() - 1).expect("fewer than 2^32 tensors"))
    };
    let decoded = match unknown {
        Unknown::Refuse => pickle::decode_replacing(pickle.root(), &mut find_tensor, &mut keep_unknown)
            .map(|value| Decoded { value, dropped: Vec::new() }),
        Unknown::Drop => pickle::decode_with(pickle.root(), Unknown::Drop, &mut find_tensor),
    };
    let Reader { sharded_dims, has_local_dtensors, .. } = reader;
    if let Some(error) = reader.read_error.into_inner() {
        return Err(error);
    }
    let decoded = decoded.map_err(|error| decode_error(path, &error.under(name)))?;
    let (value, dropped, tensors) = (decoded.value, decoded.dropped, tensors.into_inner());
    Ok(ArchiveContents { value, tensors, dropped, sharded_dims, has_local_dtensors, archive, file_range })
}

impl DTensorStyle {
    /// Returns the PyTorch release and the device type of the DTensors in a torch.save file; `None` if the file has no
    /// DTensor.
    ///
    /// # Errors
    /// The errors of reading the file.
    pub fn from_file(files: &Files, file: FileId) -> Result<Option<Self>> {
        let contents = read(files, files.whole(file), "", Unknown::Drop)?;
        Ok(contents.tensors.iter().find_map(|found| match found {
            TensorNode::Distributed { mesh, .. } => Some(mesh.style.clone()),
            TensorNode::Plain(_) | TensorNode::Sharded { .. } | TensorNode::Unreadable(_) => None,
        }))
    }
}

fn check_kind(source: ArchiveSource<'_>, path: &Path, archive: &Archive) -> Result<()> {
    if archive.get("constants.pkl").is_some() {
        return Err(torch_script_error(path));
    }
    let order = archive.content(&source, BYTE_ORDER, MAX_BYTE_ORDER_BYTES).map_err(|error| source.error(error))?;
    match order.as_deref() {
        None | Some(b"little") => Ok(()),
        Some(b"big") => Err(Error::unsupported(
            format!("{} was saved on a big-endian machine, which dtshard does not support", path.display()),
            "load it with torch on a little-endian machine and save it again",
        )),
        Some(other) => {
            let found = String::from_utf8_lossy(&other[..other.len().min(16)]).into_owned();
            Err(Error::malformed(path, BYTE_ORDER, "`little` or `big`", format!("`{found}`")))
        }
    }
}

/// Returns the error for a file with a pickle that cannot be parsed. `what` is the name of the pickle.
pub fn pickle_error(path: &Path, what: &str, error: &PickleError) -> Error {
    Error::malformed(path, format!("{what}, byte {}", error.at), error.expected(), error.found.clone())
}

/// Returns the error for a file with a pickled value that cannot be decoded.
pub fn decode_error(path: &Path, error: &DecodeError) -> Error {
    let (at, quoted) = match error.path() {
        "" => ("the pickled object", String::from("the pickled object")),
        // A path in Python's notation, such as `['w']`, has quotes of its own.
        at if at.starts_with('[') => (at, at.to_owned()),
        at => (at, format!("`{at}`")),
    };
    match error {
        DecodeError::Forbidden { symbol, .. } => Error::unsupported(
            format!(
                "{}: {quoted} needs the Python object `{symbol}`, which is not known to be plain data",
                path.display()
            ),
            "remove that object from the checkpoint and save it again, or drop such objects with \
             options::drop_unknown: dtshard never runs code from a pickle",
        ),
        DecodeError::Limit { what, .. } => {
            Error::malformed(path, at, "a value within the limits of dtshard", what.clone())
        }
        DecodeError::Malformed { what, .. } => {
            let what = what.strip_prefix(&format!("{}: ", path.display())).unwrap_or(what);
            Wrong::from_message(at, "an object as torch.save writes it", what).within(path).into()
        }
        other => Error::malformed(path, at, "plain data and dense tensors", other.to_string()),
    }
}
