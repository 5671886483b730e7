//! Reads the `.metadata` pickle of a DCP directory into columns of numbers.
//!
//! The pickle of a million chunks has 68 opcodes and 143 bytes per chunk. The pickle of a hundred thousand small
//! tensors has 116 opcodes and 260 bytes per tensor. A tree of Python values would take far more memory than columns of
//! numbers. So the pickle parser passes each object that describes a tensor, a chunk, an index key or a storage
//! location to a visitor, as soon as the object is complete, and the visitor stores the object as a row of numbers. The
//! tensors of a model have few different shapes, so equal offsets or sizes of chunks are stored once. A chunk with its
//! storage location then takes 44 bytes.
//!
//! The last step of decoding lists the FQNs with their paths in the state dict. The listing borrows nothing from the
//! pickle. So the nodes and the bytes of the pickle are freed before [`DcpMetadata::entries`] combines the rows to one
//! entry for each FQN. The pickle contains no meshes and no placements.
//!
//! Offsets and lengths of items are in bytes; offsets and sizes of chunks count elements. Source:
//! `torch/distributed/checkpoint/metadata.py`.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::num::NonZeroU32;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use foldhash::fast::RandomState;
use indexmap::IndexSet;
use rayon::prelude::*;

use crate::catalog::Path as StatePath;
use crate::catalog::{Dtype, Fqn, Key, checked_len_bytes};
use crate::error::{Error, Result};
use crate::format::torch::reader::pickle_error;
use crate::layout::Dims;
use torch_pickle::pickle::{self, Entries, Field, Fields, Record, Ref, Row, Visitor};

/// A decoded `.metadata` file. It borrows nothing from the bytes of the file.
pub struct DcpMetadata<'a> {
    path: &'a Path,
    columns: Columns,
    items: ItemPositions,
    /// The FQNs in the order of the metadata, in parts of [`PART_NAMES`].
    listing: Vec<Vec<ListedName>>,
}

/// An FQN in `state_dict_metadata`.
struct ListedName {
    fqn: Fqn,
    path: StatePath,
    /// The index of the FQN in [`Columns::names`]; `None` if `storage_data` has no item for this FQN.
    name: Option<usize>,
    /// The row number in [`Columns::tensors`]; `None` for an object.
    tensor: Option<u32>,
}

/// The metadata of one FQN: a tensor or an object.
#[derive(Debug)]
pub struct MetadataEntry {
    /// The name of the tensor or object.
    pub fqn: Fqn,
    /// The path of the tensor or object in the state dict.
    pub path: StatePath,
    /// The content: a tensor or an object.
    pub kind: EntryKind,
}

/// The kind of an entry, with its metadata.
#[derive(Debug)]
pub enum EntryKind {
    /// A tensor with its stored chunks.
    Tensor { dtype: Dtype, shape: Dims, chunks: Vec<StoredChunk> },
    /// An object that is not a tensor, with its location if the metadata has one.
    Bytes(Option<StoredItem>),
}

/// A chunk of a tensor.
#[derive(Debug)]
pub struct StoredChunk {
    /// The offsets of the chunk in the tensor, in elements.
    pub offsets: Dims,
    /// The sizes of the chunk, in elements.
    pub sizes: Dims,
    /// The location of the chunk's data; `None` if the metadata has no location.
    pub stored: Option<StoredItem>,
}

/// The byte range of a stored item (a chunk or an object) in a data file.
#[derive(Clone, Copy, Debug)]
pub struct StoredItem {
    /// The index of the data file in [`DcpMetadata::files`].
    pub path: u32,
    /// The offset in the file, in bytes.
    pub offset: u64,
    /// The length in bytes.
    pub len: u64,
}

/// Identifies the table `Columns::chunks`, which has a row for each `ChunkStorageMetadata`: the `kind` of these rows is
/// `CHUNK`. The four constants below identify the tables of the other classes.
const CHUNK: u32 = 0;
const INDEX: u32 = 1;
const INFO: u32 = 2;
const PROPERTIES: u32 = 3;
const TENSOR: u32 = 4;

#[derive(Default)]
struct Columns {
    /// The offsets of chunks, in elements.
    offsets: Interned<Dims>,
    /// The sizes of chunks and the shapes of tensors, in elements.
    sizes: Interned<Dims>,
    /// For each chunk, the id of its offsets, and the index of its sizes in `sizes`.
    chunks: Vec<(OffsetsId, u32)>,
    /// For each `MetadataIndex` row, the index of the FQN in `names`, and the id of the chunk offsets. If the row is for
    /// an object, the id is `None`.
    indexes: Vec<(u32, Option<OffsetsId>)>,
    infos: Vec<StoredItem>,
    /// For each `TensorProperties` row, the index of the dtype in `dtypes`.
    properties: Vec<u32>,
    tensors: Vec<TensorRow>,
    /// The chunks of all tensors, tensor after tensor, as row numbers of `chunks`.
    tensor_chunks: Vec<u32>,
    names: Interned<Arc<str>>,
    paths: Interned<Arc<str>>,
    dtypes: Interned<Arc<str>>,
}

/// The index of a list in [`Columns::offsets`], plus one. The value is never zero, so an `Option` of this type takes only
/// four bytes.
type OffsetsId = NonZeroU32;

struct TensorRow {
    /// The index of the dtype in [`Columns::dtypes`].
    dtype: u32,
    /// The index of the shape in [`Columns::sizes`].
    shape: u32,
    /// The chunks, as a range of [`Columns::tensor_chunks`].
    chunks: Range<usize>,
}

/// Values that are stored once each.
#[derive(Default)]
struct Interned<T> {
    values: IndexSet<T, RandomState>,
    /// The index of the value that was requested last.
    last: usize,
}

impl<T: Hash + Eq> Interned<T> {
    /// Returns the index of a value. If the value is not stored yet, stores it.
    fn index<Q>(&mut self, value: &Q) -> u32
    where
        Q: Hash + Eq + ?Sized,
        T: Borrow<Q> + for<'a> From<&'a Q>,
    {
        let known = self.find(value, self.last);
        self.last = known.unwrap_or_else(|| self.values.insert_full(value.into()).0);
        u32::try_from(self.last).expect("fewer than 2^32 values")
    }

    /// Returns the index of a value; `None` if the value is not stored. The lookup is fast if the index is `near` or
    /// `near + 1`.
    fn find<Q>(&self, value: &Q, near: usize) -> Option<usize>
    where
        Q: Hash + Eq + ?Sized,
        T: Borrow<Q>,
    {
        let is_at = |index: &usize| self.values.get_index(*index).is_some_and(|found| found.borrow() == value);
        [near, near + 1].into_iter().find(is_at).or_else(|| self.values.get_index_of(value))
    }

    fn get(&self, index: u32) -> &T {
        &self.values[index as usize]
    }
}

fn row(len: usize) -> u32 {
    u32::try_from(len - 1).expect("fewer than 2^32 rows")
}

impl Columns {
    fn offsets_id(&mut self, offsets: &[u64]) -> OffsetsId {
        NonZeroU32::MIN.saturating_add(self.offsets.index(offsets))
    }

    fn offsets(&self, id: OffsetsId) -> &Dims {
        self.offsets.get(id.get() - 1)
    }

    fn chunk(&mut self, state: &Record<'_, '_>) -> Option<u32> {
        let (offsets, sizes) = (state.dims("offsets")?, state.dims("sizes")?);
        if offsets.len() != sizes.len() {
            return None;
        }
        let chunk = (self.offsets_id(offsets), self.sizes.index(sizes));
        self.chunks.push(chunk);
        Some(row(self.chunks.len()))
    }

    fn index(&mut self, state: &Record<'_, '_>) -> Option<u32> {
        let name = self.names.index(state.text("fqn")?);
        let offsets = match state.get("offset") {
            None | Some(Field::None) => None,
            Some(_) => Some(self.offsets_id(state.dims("offset")?)),
        };
        self.indexes.push((name, offsets));
        Some(row(self.indexes.len()))
    }

    fn info(&mut self, state: &Record<'_, '_>) -> Result<Option<u32>, String> {
        let is_plain = match state.get("transform_descriptors") {
            None | Some(Field::None) => true,
            Some(Field::Dims(none)) => none.is_empty(),
            Some(_) => false,
        };
        if !is_plain {
            return Err(String::from("an item stored through transforms (compression or encryption)"));
        }
        let fields = (|| Some((state.text("relative_path")?, state.number("offset")?, state.number("length")?)))();
        let Some((path, offset, len)) = fields else { return Ok(None) };
        self.infos.push(StoredItem { path: self.paths.index(path), offset, len });
        Ok(Some(row(self.infos.len())))
    }

    /// Adds a row for a `TensorProperties`. The pickled state of the object is a tuple, and the dtype is the first item
    /// of the tuple. In old versions of PyTorch the state is a dict.
    fn properties(&mut self, state: &Record<'_, '_>) -> Option<u32> {
        let Field::Global(("torch", dtype)) = state.first().or_else(|| state.get("dtype"))? else { return None };
        self.properties.push(self.dtypes.index(dtype));
        Some(row(self.properties.len()))
    }

    fn tensor(&mut self, state: &Record<'_, '_>) -> Option<u32> {
        let properties = state.row("properties").filter(|row| row.kind == PROPERTIES)?;
        let (size, chunks) = (state.dims("size")?, state.rows("chunks")?);
        if chunks.iter().any(|chunk| chunk.kind != CHUNK) {
            return None;
        }
        let start = self.tensor_chunks.len();
        self.tensor_chunks.extend(chunks.iter().map(|chunk| chunk.index));
        self.tensors.push(TensorRow {
            dtype: self.properties[properties.index as usize],
            shape: self.sizes.index(size),
            chunks: start..self.tensor_chunks.len(),
        });
        Some(row(self.tensors.len()))
    }
}

/// Returns the row number in the table `kind`, if the visitor replaced this node of the pickle by a row of that table;
/// otherwise `None`.
fn row_of(node: Ref<'_>, kind: u32) -> Option<u32> {
    node.row().filter(|row| row.kind == kind).map(|row| row.index)
}

impl Visitor for Columns {
    fn keeps(&self, class: (&str, &str)) -> bool {
        let kept =
            ["ChunkStorageMetadata", "MetadataIndex", "_StorageInfo", "TensorProperties", "TensorStorageMetadata"];
        kept.contains(&class.1)
    }

    fn build(&mut self, class: (&str, &str), _args: Ref<'_>, state: Ref<'_>) -> Result<Option<Row>, String> {
        if !self.keeps(class) {
            return Ok(None);
        }
        self.record(class, &Fields::of(state).unwrap_or_default().record())
    }

    fn record(&mut self, class: (&str, &str), state: &Record<'_, '_>) -> Result<Option<Row>, String> {
        let (kind, row) = match class.1 {
            "ChunkStorageMetadata" => (CHUNK, self.chunk(state)),
            "MetadataIndex" => (INDEX, self.index(state)),
            "_StorageInfo" => (INFO, self.info(state)?),
            // An error in a TensorProperties or TensorStorageMetadata is reported later, when its FQN is known.
            "TensorProperties" => return Ok(self.properties(state).map(|row| Row { kind: PROPERTIES, index: row })),
            "TensorStorageMetadata" => return Ok(self.tensor(state).map(|row| Row { kind: TENSOR, index: row })),
            _ => return Ok(None),
        };
        match row {
            Some(row) => Ok(Some(Row { kind, index: row })),
            None => Err(format!("a {} with missing fields", class.1)),
        }
    }
}

impl<'a> DcpMetadata<'a> {
    /// Decodes one `.metadata` pickle.
    ///
    /// # Errors
    /// `Malformed` with the file, and with the FQN if the error is in its entry.
    pub fn decode(path: &'a Path, bytes: &[u8]) -> Result<Self> {
        let mut columns = Columns::default();
        let (pickle, _) = pickle::parse(bytes, &mut columns).map_err(|error| pickle_error(path, "pickle", &error))?;
        let root = pickle.root();
        let field = |name: &str| root.state().and_then(|state| state.get(name)).filter(|node| !node.is_none());
        let Some(entries) = field("state_dict_metadata").and_then(Ref::as_dict) else {
            let found = match (root.state(), field("state_dict_metadata")) {
                (None, _) => {
                    format!("no such field, because the pickle contains {} instead of an object", root.describe())
                }
                (Some(_), None) => String::from("no field of this name"),
                (Some(_), Some(node)) => node.describe(),
            };
            return Err(Error::malformed(path, "state_dict_metadata", "a dict of tensors", found));
        };
        let items = ItemPositions::read(path, &mut columns, field("storage_data"))?;
        let listing = list_names(path, &columns.names, entries, &Steps::read(field("planner_data")))?;
        Ok(Self { path, columns, items, listing })
    }

    /// Returns the names of data files, relative to the directory.
    pub fn files(&self) -> Vec<&str> {
        self.columns.paths.values.iter().map(AsRef::as_ref).collect()
    }

    /// Converts the entry of each FQN with `make` on several threads, and passes the results to `take` in the order of
    /// the metadata. While `take` receives results, worker threads call `make` for the next FQNs.
    ///
    /// # Errors
    /// `Malformed` with the file and the FQN, `Unsupported` for dtypes that dtshard does not have, and the errors of
    /// `make` and `take`.
    pub fn entries<T: Send>(
        self,
        make: impl Fn(MetadataEntry) -> Result<T> + Sync,
        mut take: impl FnMut(T) -> Result<()> + Send,
    ) -> Result<()> {
        let Self { path, columns, items, listing } = self;
        let of_part = |part: Vec<ListedName>| -> Result<Vec<T>> {
            let of_name = |listed: ListedName| {
                let kind = entry_kind(path, &listed, &columns, &items)?;
                make(MetadataEntry { fqn: listed.fqn, path: listed.path, kind })
            };
            part.into_iter().map(of_name).collect()
        };
        let mut take_all =
            |made: Vec<Result<Vec<T>>>| made.into_iter().try_for_each(|made| made?.into_iter().try_for_each(&mut take));
        let mut parts = listing.into_iter();
        // While this thread passes on a group of results, the other threads make the next group.
        let mut made = Vec::new();
        while parts.len() > 0 {
            let group: Vec<_> = parts.by_ref().take(2 * rayon::current_num_threads()).collect();
            let make = || group.into_par_iter().map(of_part).collect();
            let (next, taken) = rayon::join(make, || take_all(std::mem::take(&mut made)));
            taken?;
            made = next;
        }
        take_all(made)
    }
}

/// Lists the FQNs in `entries`, the dict `state_dict_metadata`. `names` are the FQNs in `storage_data`.
///
/// # Errors
/// `Malformed` with the FQN, if its path or its entry is invalid.
fn list_names(
    path: &Path,
    names: &Interned<Arc<str>>,
    entries: Entries<'_>,
    steps: &Steps<'_>,
) -> Result<Vec<Vec<ListedName>>> {
    let of_part = |start: usize| -> Result<Vec<ListedName>> {
        let (mut near, mut nth_steps, mut keys) = (start, start, HashMap::default());
        let of_name = |(key, value): (Ref<'_>, Ref<'_>)| {
            let Some(text) = key.as_str() else {
                return Err(Error::malformed(path, "state_dict_metadata", "names that are text", key.describe()));
            };
            let name = names.find(text, near);
            near = name.unwrap_or(near);
            let fqn = Fqn::from(name.map_or_else(|| text.into(), |name| Arc::clone(&names.values[name])));
            let state_path = match steps.of(text, &mut nth_steps) {
                Some(steps) => state_path(path, &fqn, steps, &mut keys)?,
                None => StatePath(vec![Key::Name((&fqn).into())]),
            };
            let tensor = tensor_row(path, text, value)?;
            Ok(ListedName { fqn, path: state_path, name, tensor })
        };
        entries.starting_at(start).take(PART_NAMES).map(of_name).collect()
    };
    let starts: Vec<usize> = (0..entries.len()).step_by(PART_NAMES).collect();
    // All parts are listed before an error is returned, so the error is always the first one.
    let parts: Vec<Result<_>> = starts.into_par_iter().map(of_part).collect();
    parts.into_iter().collect()
}

/// The byte ranges of all items in `storage_data`, which can be found by FQN and chunk offsets.
struct ItemPositions {
    /// The items, grouped by FQN. The items of one FQN are sorted by the ids of their chunk offsets.
    rows: Vec<ItemRow>,
    /// For each FQN in [`Columns::names`], the index in `rows` of the first item of the FQN. The last element is the
    /// length of `rows`.
    starts: Vec<usize>,
}

#[derive(Clone, Copy, Default)]
struct ItemRow {
    /// The id of the chunk offsets; `None` for an object.
    offsets: Option<OffsetsId>,
    /// The row number in [`Columns::infos`].
    info: u32,
}

impl ItemPositions {
    /// Reads `storage_data`. Frees `columns.indexes`, because the result has these rows in another order.
    fn read(path: &Path, columns: &mut Columns, storage_data: Option<Ref<'_>>) -> Result<Self> {
        let indexes = std::mem::take(&mut columns.indexes);
        let items = || storage_data.and_then(Ref::as_dict).into_iter().flatten();
        let item = |(key, value): (Ref<'_>, Ref<'_>)| match (row_of(key, INDEX), row_of(value, INFO)) {
            (Some(index), Some(info)) => Ok((indexes[index as usize], info)),
            _ => {
                let found = format!("{} and {}", key.describe(), value.describe());
                Err(Error::malformed(path, "storage_data", "MetadataIndex and _StorageInfo", found))
            }
        };
        let mut starts = vec![0; columns.names.values.len() + 1];
        for entry in items() {
            let ((name, _), _) = item(entry)?;
            starts[name as usize + 1] += 1;
        }
        for name in 1..starts.len() {
            starts[name] += starts[name - 1];
        }
        let mut next = starts.clone();
        let mut rows = vec![ItemRow::default(); starts[starts.len() - 1]];
        for entry in items() {
            let ((name, offsets), info) = item(entry)?;
            let place = &mut next[name as usize];
            rows[*place] = ItemRow { offsets, info };
            *place += 1;
        }
        for range in starts.windows(2) {
            // The sort is stable, and lookups take the last of several equal keys, as a Python dict does.
            rows[range[0]..range[1]].sort_by_key(|row| row.offsets);
        }
        Ok(Self { rows, starts })
    }

    /// Returns the items of an FQN: `name` is its index in [`Columns::names`].
    fn of(&self, name: usize) -> &[ItemRow] {
        &self.rows[self.starts[name]..self.starts[name + 1]]
    }
}

/// Returns the row number in [`Columns::infos`] of the item with these chunk offsets (`None` for an object); `None` if
/// the FQN with these `items` has no such item. `nth` is the expected index of the item in `items`; the lookup is fast if
/// the item has this index.
fn find_item(items: &[ItemRow], nth: usize, offsets: Option<OffsetsId>) -> Option<u32> {
    let at = |nth: usize| items.get(nth).map(|row| row.offsets);
    let is_last = |nth: &usize| at(*nth) == Some(offsets) && at(*nth + 1) != Some(offsets);
    let search = || items.partition_point(|row| row.offsets <= offsets).checked_sub(1);
    let nth = Some(nth).filter(is_last).or_else(|| search().filter(is_last))?;
    Some(items[nth].info)
}

/// The maximum number of FQNs that a worker thread converts in one call.
const PART_NAMES: usize = 1 << 10;

/// The maximum number of keys in a path. A state dict is walked recursively, so its depth needs a limit.
const MAX_PATH: usize = 128;

/// The path of each FQN in the state dict, as the planner recorded it. Planners other than PyTorch's default planner
/// record other data; the path then has a single key, which is the whole FQN.
struct Steps<'a> {
    paths: Option<Entries<'a>>,
    /// The index of each FQN in `paths`. The map is built only if FQNs are requested in an order that differs from the
    /// order of `paths`.
    by_name: OnceLock<HashMap<&'a str, usize, RandomState>>,
}

impl<'a> Steps<'a> {
    fn read(planner_data: Option<Ref<'a>>) -> Self {
        Self { paths: planner_data.and_then(Ref::as_dict), by_name: OnceLock::new() }
    }

    /// Returns the recorded path of an FQN; `None` if no path is recorded for it. `nth` is the expected index of the
    /// FQN in `paths`; if the FQN is found, `nth` becomes the index of the next FQN.
    fn of(&self, name: &str, nth: &mut usize) -> Option<Ref<'a>> {
        let paths = self.paths?;
        let by_name = || (0..).zip(paths).filter_map(|(nth, (key, _))| Some((key.as_str()?, nth))).collect();
        let is_likely = paths.get(*nth).is_some_and(|(key, _)| key.as_str() == Some(name));
        let found = if is_likely { *nth } else { *self.by_name.get_or_init(by_name).get(name)? };
        *nth = found + 1;
        paths.get(found).map(|(_, steps)| steps).filter(|steps| steps.as_tuple().is_some())
    }
}

/// Converts a recorded path to a [`StatePath`]. Equal keys of different paths share memory. If a path has a single key,
/// the key shares memory with the FQN.
fn state_path<'a>(
    path: &Path,
    fqn: &Fqn,
    steps: Ref<'a>,
    keys: &mut HashMap<&'a str, Arc<str>, RandomState>,
) -> Result<StatePath> {
    let mut name = |step: Ref<'a>, text: &'a str| match step.is_shared() {
        _ if text == fqn.as_str() => fqn.into(),
        // The planner pickles equal keys as one object, so a key that is not shared occurs once.
        false => text.into(),
        true => Arc::clone(keys.entry(text).or_insert_with(|| text.into())),
    };
    let mut key = |step: Ref<'a>| match step.as_str() {
        Some(text) => Some(Key::Name(name(step, text))),
        None => step.as_u64().map(Key::Index),
    };
    let malformed = || Error::malformed(path, fqn.as_str(), "a path of names and positions", steps.describe());
    let items = steps.as_tuple().filter(|items| (1..=MAX_PATH).contains(&items.len())).ok_or_else(malformed)?;
    let mut found = Vec::with_capacity(items.len());
    for step in items {
        found.push(key(step).ok_or_else(malformed)?);
    }
    Ok(StatePath(found))
}

/// Returns the row number in [`Columns::tensors`] of an entry of `state_dict_metadata`; `None` for an object.
///
/// # Errors
/// `Malformed` if the entry is neither a tensor nor an object.
fn tensor_row(path: &Path, fqn: &str, value: Ref<'_>) -> Result<Option<u32>> {
    if let Some(row) = row_of(value, TENSOR) {
        return Ok(Some(row));
    }
    match value.object() {
        Some(object) if object.name == "BytesStorageMetadata" => Ok(None),
        Some(object) if object.name == "TensorStorageMetadata" => Err(unfit(path, fqn, object.state)),
        _ => {
            let expected = "TensorStorageMetadata or BytesStorageMetadata";
            Err(Error::malformed(path, fqn, expected, value.describe()))
        }
    }
}

fn entry_kind(path: &Path, listed: &ListedName, columns: &Columns, items: &ItemPositions) -> Result<EntryKind> {
    let fqn = listed.fqn.as_str();
    let malformed = |expected: &str, found: String| Error::malformed(path, fqn, expected, found);
    let items = listed.name.map_or(&[][..], |name| items.of(name));
    let stored = |nth: usize, offsets: Option<OffsetsId>| {
        find_item(items, nth, offsets).map(|info| columns.infos[info as usize])
    };
    let Some(tensor) = listed.tensor else { return Ok(EntryKind::Bytes(stored(0, None))) };
    let tensor = &columns.tensors[tensor as usize];
    let dtype = dtype(path, fqn, columns.dtypes.get(tensor.dtype))?;
    let shape = columns.sizes.get(tensor.shape).clone();
    if checked_len_bytes(&shape, dtype).is_none() {
        return Err(malformed("a shape that fits memory", format!("{:?}", shape.as_slice())));
    }
    let rows = &columns.tensor_chunks[tensor.chunks.clone()];
    let mut chunks = Vec::with_capacity(rows.len());
    for (nth, row) in rows.iter().enumerate() {
        let (id, sizes) = columns.chunks[*row as usize];
        let (offsets, sizes) = (columns.offsets(id), columns.sizes.get(sizes));
        if offsets.len() != shape.len() {
            return Err(malformed(&format!("chunks of {} dims", shape.len()), offsets.len().to_string()));
        }
        let stored = stored(nth, Some(id));
        chunks.push(StoredChunk { offsets: Dims::from_slice(offsets), sizes: Dims::from_slice(sizes), stored });
    }
    Ok(EntryKind::Tensor { dtype, shape, chunks })
}

/// Returns the error for a `TensorStorageMetadata` with an invalid field.
fn unfit(path: &Path, fqn: &str, state: Option<Ref<'_>>) -> Error {
    let malformed = |expected: &str, found: String| Error::malformed(path, fqn, expected, found);
    let field = |name: &str| state.and_then(|state| state.get(name));
    let [properties, size, chunks] = ["properties", "size", "chunks"].map(field);
    let (Some(properties), Some(size), Some(chunks)) = (properties, size, chunks) else {
        return malformed(
            "TensorStorageMetadata with `properties`, `size` and `chunks`",
            String::from("missing fields"),
        );
    };
    if row_of(properties, PROPERTIES).is_none() {
        return malformed("tensor properties with a dtype", properties.describe());
    }
    let odd = chunks.as_list().and_then(|mut chunks| chunks.find(|chunk| row_of(*chunk, CHUNK).is_none()));
    match odd {
        Some(chunk) => malformed("a ChunkStorageMetadata", chunk.describe()),
        None if chunks.as_list().is_none() => malformed("a list of chunks", chunks.describe()),
        None => malformed("a torch.Size", size.describe()),
    }
}

fn dtype(path: &Path, fqn: &str, name: &str) -> Result<Dtype> {
    Dtype::from_name(name).ok_or_else(|| {
        Error::unsupported(
            format!("{}: {fqn}: dtype torch.{name} is not supported", path.display()),
            "leave that tensor out of the checkpoint, or save it as bytes (uint8)",
        )
    })
}
