//! One torch.save file: its archive, its pickle, its tensors.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use super::mesh::MeshSpec;
use super::tensor::{Found, View, recognise};
use crate::catalog::{Dtype, Located, Place, TensorId, Value};
use crate::error::{Error, Result};
use crate::format::pickle::{self, Dropped, LiftError, NoFold, NodeId, PickleError, PickleErrorKind, Unknown};
use crate::format::zip::{Archive, Frame, torch_script};
use crate::storage::{Files, Stretch};

/// What a file (or an item of a DCP data file) holds.
#[derive(Debug)]
pub struct Contents {
    /// Tensors in it refer to `tensors`.
    pub value: Value,
    pub tensors: Vec<Found>,
    /// Objects that were left out because their classes are not known.
    pub dropped: Vec<Dropped>,
    archive: Archive,
    stretch: Stretch,
}

const PICKLE: &str = "data.pkl";
const BYTE_ORDER: &str = "byteorder";

impl Contents {
    /// Add a tensor and give the reference to it.
    pub fn push(&mut self, found: Found) -> TensorId {
        let id = TensorId(u32::try_from(self.tensors.len()).expect("fewer than 2^32 tensors"));
        self.tensors.push(found);
        id
    }

    /// What was read.
    #[must_use]
    pub fn stretch(&self) -> Stretch {
        self.stretch
    }

    /// Where the view's element 0 lies. The record was checked to hold the storage.
    #[must_use]
    pub fn place(&self, view: &View) -> Place {
        match self.archive.get(&format!("data/{}", view.key)) {
            Some(record) if !view.sizes.contains(&0) => {
                Place::Record { file: self.stretch.file, record, within: view.offset * view.dtype.itemsize() }
            }
            _ => Place::Nowhere,
        }
    }

    /// The archive without what plays no part in finding the view, where that is little.
    ///
    /// # Errors
    /// `Io`.
    pub fn frame(&self, files: &Files, view: &View) -> Result<Option<Frame>> {
        // All records that `read` looks into.
        Frame::of(files, self.stretch, &self.archive, &[PICKLE, BYTE_ORDER], &format!("data/{}", view.key))
    }

    /// As [`Contents::place`], down to the byte.
    ///
    /// # Errors
    /// `Malformed` where the record's local header is damaged.
    pub fn locate(&self, files: &Files, view: &View) -> Result<Located> {
        let name = format!("data/{}", view.key);
        let Some((data, record)) = self.archive.locate(files, &name)? else {
            return Err(Error::malformed(files.path(self.stretch.file), name, "a record of the archive", "none"));
        };
        let offset = data + view.offset * view.dtype.itemsize();
        Ok(Located { file: self.stretch.file, offset, strides: view.strides.clone(), summed: record.summed(data) })
    }
}

/// `little` or `big`.
const MAX_BYTE_ORDER_BYTES: u64 = 64;

/// The storage of a mesh's ranks: 16 million of 8 bytes.
const MAX_RANKS_BYTES: u64 = 1 << 27;

/// State of reading one archive's pickle.
pub struct Reader<'a> {
    files: &'a Files,
    archive: &'a Archive,
    /// Meshes are shared objects: each is read once.
    pub meshes: HashMap<NodeId, Arc<MeshSpec>>,
    /// Tensors within tensors that are being read, meshes included.
    pub depth: usize,
    /// Shards that may still be read: a list of them may be shared by many tensors, but not without end.
    pub shards_left: usize,
    /// Why a tensor cannot be converted, where it is sound but not supported.
    unsupported: std::cell::RefCell<Option<String>>,
    /// Why the file could not be read.
    unread: std::cell::RefCell<Option<Error>>,
}

impl Reader<'_> {
    /// An error for something sound that is not converted.
    pub fn unsupported(&self, what: impl Into<String>) -> LiftError {
        let what = what.into();
        *self.unsupported.borrow_mut() = Some(what.clone());
        LiftError::malformed(what)
    }

    /// An error of reading the file, which may have nothing to do with what is in it.
    fn unread(&self, error: Error) -> LiftError {
        let what = LiftError::malformed(error.to_string());
        if !error.is_about_content() {
            *self.unread.borrow_mut() = Some(error);
        }
        what
    }

    /// Read something inside the tensor or mesh that is being read; real ones are a few deep.
    pub fn inside<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T, LiftError>) -> Result<T, LiftError> {
        const MAX_DEPTH: usize = 32;
        if self.depth == MAX_DEPTH {
            return Err(LiftError::malformed("tensors or meshes within each other without end"));
        }
        self.depth += 1;
        let read = read(self);
        self.depth -= 1;
        read
    }

    pub fn count_shard(&mut self) -> Result<(), LiftError> {
        let left = self.shards_left.checked_sub(1);
        self.shards_left = left.ok_or_else(|| LiftError::malformed("lists of shards that are shared without end"))?;
        Ok(())
    }

    /// The values of a small integer tensor, row-major.
    pub fn integers(&self, view: &View) -> Result<Vec<i64>, LiftError> {
        let (Dtype::I32 | Dtype::I64) = view.dtype else {
            return Err(LiftError::malformed(format!("ranks of dtype {}", view.dtype)));
        };
        let name = format!("data/{}", view.key);
        let storage = (self.archive.content(self.files, &name, MAX_RANKS_BYTES))
            .map_err(|error| self.unread(error))?
            .ok_or_else(|| LiftError::malformed(format!("a tensor whose storage `{name}` is missing")))?;
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
            let bytes = bytes.ok_or_else(|| LiftError::malformed("ranks beyond the end of their storage"))?;
            values.push(match *bytes {
                [a, b, c, d] => i64::from(i32::from_le_bytes([a, b, c, d])),
                _ => i64::from_le_bytes(bytes.try_into().expect("the width of an i64")),
            });
        }
        Ok(values)
    }

    /// The record of a view's storage must be there and hold exactly the storage.
    fn check_storage(&self, view: &View) -> Result<(), LiftError> {
        let name = format!("data/{}", view.key);
        match self.archive.get(&name) {
            Some(record) if record.len == view.storage_bytes => Ok(()),
            Some(record) => Err(LiftError::malformed(format!(
                "a storage of {} bytes in the record `{name}` of {}",
                view.storage_bytes, record.len
            ))),
            None if view.storage_bytes == 0 => Ok(()),
            None => Err(LiftError::malformed(format!("a tensor whose storage `{name}` is missing"))),
        }
    }
}

/// Read the archive that fills a stretch. `name` is what its content is called, for messages; empty for a file of
/// its own.
///
/// # Errors
/// `Malformed`, `Unsupported`, `Io`.
pub fn read(files: &Files, stretch: Stretch, name: &str, unknown: Unknown) -> Result<Contents> {
    let file = stretch.file;
    let path = files.path(file);
    let archive = Archive::read(files, stretch)?;
    check_kind(files, path, &archive)?;
    let Some(bytes) = archive.content(files, PICKLE, pickle::MAX_BYTES)? else {
        return Err(Error::malformed(path, "zip directory", "an entry data.pkl", "an archive without one"));
    };
    let (pickle, _) = pickle::decode(&bytes, &mut NoFold).map_err(|error| pickle_error(path, PICKLE, &error))?;
    let mut reader = Reader {
        files,
        archive: &archive,
        meshes: HashMap::new(),
        depth: 0,
        shards_left: bytes.len(),
        unsupported: std::cell::RefCell::default(),
        unread: std::cell::RefCell::default(),
    };
    let mut tensors = Vec::new();
    // Views that are the same view of the same storage are one tensor under several names.
    let mut known: HashMap<View, TensorId> = HashMap::new();
    let mut by_node: HashMap<NodeId, TensorId> = HashMap::new();
    let lifted = pickle::lift_with(pickle.root(), unknown, &mut |node| {
        if let Some(id) = by_node.get(&node.id()).filter(|_| node.is_shared()) {
            return Ok(Some(*id));
        }
        let Some(found) = recognise(&mut reader, node)? else { return Ok(None) };
        let next = TensorId(u32::try_from(tensors.len()).expect("fewer than 2^32 tensors"));
        let id = match &found {
            Found::Plain(view) => {
                reader.check_storage(view)?;
                *known.entry(view.clone()).or_insert(next)
            }
            Found::Distributed { local, .. } => {
                reader.check_storage(local)?;
                next
            }
            Found::Sharded { local, .. } => {
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
    let lifted = lifted.map_err(|error| lift_error(path, &error.under(name), unsupported))?;
    Ok(Contents { value: lifted.value, tensors, dropped: lifted.dropped, archive, stretch })
}

fn check_kind(files: &Files, path: &Path, archive: &Archive) -> Result<()> {
    if archive.get("constants.pkl").is_some() {
        return Err(torch_script(path));
    }
    match archive.content(files, BYTE_ORDER, MAX_BYTE_ORDER_BYTES)?.as_deref() {
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
    let expected = match error.kind {
        PickleErrorKind::Truncated => "a whole pickle",
        PickleErrorKind::Limit => "a pickle within bounds",
        PickleErrorKind::Malformed | PickleErrorKind::Rejected => "a well-formed pickle",
    };
    Error::malformed(path, format!("{what}, byte {}", error.at), expected, error.what.clone())
}

/// A value that cannot be used, as the error of its file.
pub fn lift_error(path: &Path, error: &LiftError, unsupported: Option<String>) -> Error {
    let at = if error.path().is_empty() { "the pickled object" } else { error.path() };
    match (error, unsupported) {
        (LiftError::Forbidden { symbol, .. }, _) => Error::unsupported(
            format!("{}: {at} needs the Python object `{symbol}`, which is not known to be plain data", path.display()),
            "nothing named in a pickle is ever run; remove that object from the checkpoint and save it again, or go \
             on without such objects with --drop-unknown",
        ),
        (_, Some(what)) => Error::unsupported(
            format!("{}: {at} is {what}", path.display()),
            "convert it to a dense tensor before saving, or leave it out of the checkpoint",
        ),
        (LiftError::Limit { what, .. }, None) => Error::malformed(path, at, "a value within bounds", what.clone()),
        (LiftError::Malformed { what, .. }, None) => {
            Error::malformed(path, at, "plain data and dense tensors", what.clone())
        }
    }
}
