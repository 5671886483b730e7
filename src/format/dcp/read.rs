//! Reads a DCP directory into a catalog: the names, shapes and chunks of tensors from the metadata files, and the
//! objects from the data files. Source: `torch/distributed/checkpoint/filesystem.py`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use foldhash::fast::RandomState;

use super::known;
use super::metadata::{DcpMetadata, EntryKind, MetadataEntry, StoredChunk, StoredItem};
use crate::catalog::path::Unflatten;
use crate::catalog::{
    Catalog, Chunk, FileLocation, Fqn, Path as StatePath, RankValue, StridedLocation, TensorEntry, TensorId,
    Unreadable, Value,
};
use crate::error::{CatalogError, Error, Result};
use crate::format::shortfall::Shortfall;
use crate::format::torch::{ObjectPlace, TensorNode, read_object, reader};
use crate::format::{files_beside, relative_to_folder};
use crate::layout::{Rank, Region, Tile};
use crate::storage::{FileId, FileRange, Files, lookup};
use torch_pickle::pickle::{self, Unknown};

/// Returns the metadata files of a directory, each with the rank that wrote it: `.metadata`, which rank 0 writes, or,
/// if the ranks saved without collectives, one `__R.metadata` for each rank R.
///
/// # Errors
/// `Io` if the directory cannot be listed.
pub fn metadata_files(folder: &Path) -> Result<Vec<(Rank, PathBuf)>> {
    let whole = folder.join(".metadata");
    if lookup::is_file(&whole)? {
        return Ok(vec![(Rank(0), whole)]);
    }
    let mut ranks = Vec::new();
    for lookup::FolderEntry { path, .. } in lookup::list(folder)? {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let rank = name.strip_prefix("__").and_then(|rest| rest.strip_suffix(".metadata"));
        if let Some(rank) = rank.and_then(|rank| rank.parse::<u32>().ok()) {
            ranks.push((Rank(rank), path));
        }
    }
    ranks.sort();
    Ok(ranks)
}

/// Checks the length of a metadata file before it is read, because a sparse file can have any length.
///
/// # Errors
/// `Malformed` if the file is longer than [`pickle::MAX_BYTES`].
fn check_len(path: &Path, len: u64) -> Result<u64> {
    if len <= pickle::MAX_BYTES {
        return Ok(len);
    }
    let expected = format!("a pickle of at most {} bytes", pickle::MAX_BYTES);
    Err(Error::malformed(path, "content", expected, format!("{len} bytes")))
}

/// The tensor or object of one FQN, merged from all metadata files of the directory.
enum NamedSlot {
    Tensor(TensorId),
    /// An object, with the byte range of its item. If the ranks saved without collectives, there is one byte range for
    /// each rank.
    Object(Vec<(Rank, FileRange)>),
}

/// Reads a DCP directory. If `show_incomplete` is true, data files may be missing: the catalog then lacks the chunks
/// and objects in these files, and the shortfall lists these files. The shortfall is `None` if no data file is missing.
///
/// # Errors
/// `Malformed`, `Coverage`, `Unsupported`, `Io`.
pub fn read(
    files: &mut Files,
    folder: &Path,
    unknown: Unknown,
    show_incomplete: bool,
) -> Result<(Catalog, Option<Shortfall>)> {
    let mut shortfall = None;
    let mut catalog = Catalog::empty();
    let mut slots: Vec<(Fqn, StatePath, NamedSlot)> = Vec::new();
    // The index in `slots` of each FQN in the metadata files that were already read.
    let mut known: HashMap<Fqn, usize, RandomState> = HashMap::default();
    let mut before = 0;
    for (rank, path) in metadata_files(folder)? {
        known.extend((before..).zip(&slots[before..]).map(|(at, (fqn, ..))| (fqn.clone(), at)));
        before = slots.len();
        let file = files.add(&path)?;
        // The file is not memory-mapped, because decoded text must not change if another process writes the file.
        let len = check_len(&path, files.len_bytes(file))?;
        // The bytes of the file are freed before the catalog is built.
        let metadata = DcpMetadata::decode(&path, &files.read(file, 0, len)?)?;
        let (data_files, lacks) = open_data_files(files, &path, &metadata, show_incomplete)?;
        shortfall = shortfall.or(lacks);
        let source = MetadataFile { data_files, path: &path };
        let make = |MetadataEntry { fqn, path, kind }| {
            let content = source.content(files, &fqn, kind)?;
            Ok((fqn, path, content))
        };
        metadata.entries(make, |(fqn, state_path, content)| {
            let Some(content) = content else { return Ok(()) };
            let Some(at) = known.get(&fqn) else {
                let slot = match content {
                    NameContent::Tensor(entry) => NamedSlot::Tensor(catalog.push_tensor(entry)),
                    NameContent::Object(place) => NamedSlot::Object(vec![(rank, place)]),
                };
                slots.push((fqn, state_path, slot));
                return Ok(());
            };
            // Another rank of a save without collectives has stored a part under the same FQN.
            match (&mut slots[*at].2, content) {
                (NamedSlot::Tensor(id), NameContent::Tensor(more)) => {
                    join(&path, &mut catalog.tensors[id.0 as usize], &more)?;
                }
                (NamedSlot::Object(known), NameContent::Object(place)) => known.push((rank, place)),
                _ => {
                    let found = "a tensor and an object of this name";
                    return Err(Error::malformed(&path, fqn.as_str(), "one kind on all ranks", found));
                }
            }
            Ok(())
        })?;
    }
    catalog.tensors.shrink_to_fit();
    let mut state = Unflatten::default();
    for (fqn, path, slot) in slots {
        let value = match slot {
            NamedSlot::Tensor(id) => Value::Tensor(id),
            NamedSlot::Object(places) => match read_objects(files, &places, &fqn, unknown, &mut catalog)? {
                Some(value) => value,
                None => continue,
            },
        };
        let inserted = state.insert(&path, value);
        inserted.map_err(|found| {
            Error::malformed(folder, fqn.as_str(), "a state dict path that fits the other paths", found)
        })?;
    }
    catalog.state =
        state.finish().map_err(|found| Error::malformed(folder, "planner_data", "lists without large gaps", found))?;
    Ok((catalog, shortfall))
}

/// The tensor or object that one metadata file lists for one FQN.
enum NameContent {
    Tensor(TensorEntry),
    Object(FileRange),
}

/// A metadata file, and the data files that the metadata file names.
struct MetadataFile<'a> {
    path: &'a Path,
    /// The data files; `None` for a file that is missing.
    data_files: Vec<Option<FileId>>,
}

impl MetadataFile<'_> {
    /// Returns the tensor, with the chunks in existing data files, or the object. Returns `None` for an object in a missing
    /// data file.
    fn content(&self, files: &Files, fqn: &Fqn, kind: EntryKind) -> Result<Option<NameContent>> {
        match kind {
            EntryKind::Bytes(None) => {
                Err(Error::malformed(self.path, fqn.as_str(), "a location in storage_data", "none"))
            }
            EntryKind::Bytes(Some(stored)) => Ok(self.stretch(files, fqn, stored)?.map(NameContent::Object)),
            EntryKind::Tensor { dtype, shape, chunks } => {
                let mut entry = TensorEntry::new(fqn.clone(), dtype, shape);
                for chunk in chunks {
                    self.push_chunk(files, &mut entry, chunk)?;
                }
                Ok(Some(NameContent::Tensor(entry)))
            }
        }
    }

    fn push_chunk(&self, files: &Files, entry: &mut TensorEntry, chunk: StoredChunk) -> Result<()> {
        let region = Region::new(chunk.offsets, chunk.sizes);
        if !region.fits(&entry.shape) {
            return Err(CatalogError::chunk_out_of_bounds(entry, &region, "checkpoint", self.path).into());
        }
        let place = match chunk.stored {
            Some(stored) => match self.stretch(files, &entry.fqn, stored)? {
                Some(range) => FileLocation::Item(range),
                None if region.is_empty() => FileLocation::Empty,
                None => return Ok(()),
            },
            None if region.is_empty() => FileLocation::Empty,
            None => {
                let expected = format!("a location in storage_data for the chunk at {region}");
                return Err(Error::malformed(self.path, entry.fqn.as_str(), expected, "none"));
            }
        };
        // An empty chunk may be stored, but it contains nothing to read.
        let location = if region.is_empty() { FileLocation::Empty } else { place };
        entry.chunks.push(Chunk { tile: Tile::from_region(&region), location, strides: None, rank: None, view: None });
        Ok(())
    }

    /// Returns the byte range of an item, and checks that the range is inside the data file. Returns `None` if the data file is
    /// missing.
    fn stretch(&self, files: &Files, fqn: &Fqn, stored: StoredItem) -> Result<Option<FileRange>> {
        let Some(file) = self.data_files[stored.path as usize] else { return Ok(None) };
        let len = files.len_bytes(file);
        match stored.offset.checked_add(stored.len) {
            Some(end) if end <= len => Ok(Some(FileRange { file, offset: stored.offset, len: stored.len })),
            end => {
                let end = end.map_or_else(|| String::from("2^64"), |end| end.to_string());
                let expected =
                    format!("a file of at least {end} bytes, because .metadata puts the end of this data at that byte");
                let found = format!("a file of {len} bytes");
                Err(Error::malformed(files.path(file), fqn.as_str(), expected, found))
            }
        }
    }
}

/// Adds to `files` the data files that a metadata file names. Missing data files are an error, unless `show_incomplete`
/// is true: then the result has `None` for each missing file, and a shortfall that lists these files.
fn open_data_files(
    files: &mut Files,
    metadata_path: &Path,
    metadata: &DcpMetadata<'_>,
    show_incomplete: bool,
) -> Result<(Vec<Option<FileId>>, Option<Shortfall>)> {
    let names = metadata.files();
    let error = match files_beside(metadata_path, "storage_data", &names) {
        Ok(paths) => {
            return Ok((paths.into_iter().map(|path| files.add(path).map(Some)).collect::<Result<_>>()?, None));
        }
        Err(error) => error,
    };
    let Some(missing) = error.names().filter(|_| show_incomplete).map(<[String]>::to_vec) else { return Err(error) };
    let folder = metadata_path.parent().unwrap_or(Path::new("."));
    let mut data_files = Vec::new();
    for name in names {
        let path = relative_to_folder(folder, name, metadata_path)?;
        data_files.push(lookup::is_file(&path)?.then(|| files.add(path)).transpose()?);
    }
    Ok((data_files, Some(Shortfall { missing, error, allowed: None, is_one_file: false })))
}

/// Adds the chunks of `more` to `known`. Both describe one tensor: `more` comes from the metadata file `path` of one
/// rank, and `known` from the metadata files of the ranks before it.
fn join(path: &Path, known: &mut TensorEntry, more: &TensorEntry) -> Result<()> {
    if (known.dtype, &known.shape) != (more.dtype, &more.shape) {
        let expected = format!("{} {:?} as in other ranks' metadata", known.dtype, known.shape.as_slice());
        let found = format!("{} {:?}", more.dtype, more.shape.as_slice());
        return Err(Error::malformed(path, known.fqn.as_str(), expected, found));
    }
    more.chunks.iter().for_each(|chunk| known.chunks.push(chunk));
    Ok(())
}

/// Reads the object `fqn` from every item in `places`, which has one item for each rank that stores the object. If the
/// values differ, returns them as a value that differs between ranks ([`Value::Other`]). Returns `None` if the object
/// is left out, because its class is unknown.
fn read_objects(
    files: &Files,
    places: &[(Rank, FileRange)],
    fqn: &Fqn,
    unknown: Unknown,
    catalog: &mut Catalog,
) -> Result<Option<Value>> {
    let mut holdings: Vec<RankValue> = Vec::new();
    for (rank, place) in places {
        let place = ObjectPlace { range: *place, fqn, rank: None };
        let Some(value) = read_object(files, place, unknown, catalog)? else { continue };
        match holdings.iter_mut().find(|holding| holding.value.same_but_tensors(&value)) {
            Some(holding) => holding.ranks.push(*rank),
            None => holdings.push(RankValue { value, ranks: vec![*rank] }),
        }
    }
    if holdings.len() > 1 {
        return Ok(Some(Value::Other(holdings)));
    }
    Ok(holdings.pop().map(|agreed| agreed.value))
}

/// Finds the offset and strides of the tensor data of a chunk. The data is in an item, which is a small `torch.save`
/// archive in the byte range `stretch`. Reads the ZIP directory and the pickle of the item only if a cache does not
/// give the result.
///
/// # Errors
/// `Malformed` if the item is damaged, or its tensor has another dtype or shape than `.metadata` says; `Unsupported` if
/// dtshard cannot read the tensor; `Io`.
pub fn resolve(files: &Files, entry: &TensorEntry, chunk: u32, stretch: FileRange) -> Result<StridedLocation> {
    let sizes = entry.chunks.stored_shape(chunk as usize);
    if let Some(found) = known::recall(files, stretch, entry.dtype, &sizes)? {
        return Ok(found);
    }
    let contents = reader::read(files, stretch, entry.fqn.as_str(), Unknown::Refuse)?;
    let path = files.path(stretch.file);
    let at = format!("{} (item at byte {})", entry.fqn, stretch.offset);
    let view = match (&contents.value, contents.tensors.as_slice()) {
        (Value::Tensor(_), [TensorNode::Plain(view)]) => view,
        (Value::Tensor(_), [TensorNode::Unreadable(kind)]) => {
            let why = Unreadable { file: path.to_path_buf(), kind: kind.clone() };
            return Err(why.error(entry.fqn.as_str()));
        }
        (value, _) => return Err(Error::malformed(path, at, "one tensor", value.type_name().into_owned())),
    };
    if view.dtype != entry.dtype || view.sizes != sizes {
        let expected = format!("{} {:?}", entry.dtype, sizes.as_slice());
        return Err(Error::malformed(path, at, expected, format!("{} {:?}", view.dtype, view.sizes.as_slice())));
    }
    let found = contents.locate(files, view)?;
    if let Some(frame) = contents.frame(files, view)? {
        known::remember(view, frame);
    }
    Ok(found)
}
