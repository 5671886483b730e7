//! Reads the `.metadata` pickle of a DCP directory into columns of numbers.
//!
//! The pickle of a million chunks has 68 opcodes and 143 bytes per chunk. The pickle of a hundred thousand small
//! tensors has 116 opcodes and 260 bytes per tensor. A tree of Python values would take far more memory than columns of
//! numbers. So the pickle parser passes each object that describes a tensor, a chunk, an index key or a storage
//! location to a visitor, as soon as the object is complete, and the visitor stores the object as a row of numbers.
//! [`DcpMetadata::entries`] then combines these rows to one entry for each FQN. The pickle contains no meshes and no
//! placements.
//!
//! Offsets and lengths of items are in bytes; offsets and sizes of chunks count elements. Source:
//! `torch/distributed/checkpoint/metadata.py`.

use std::collections::HashMap;
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
use torch_pickle::pickle::{self, Entries, Field, Fields, Pickle, Record, Ref, Row, Visitor};

/// A decoded `.metadata` file.
pub struct DcpMetadata<'a> {
    path: &'a Path,
    pickle: Pickle<'a>,
    columns: Columns,
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
    /// The offsets and sizes of all chunks and tensors, in elements, one list after another. The rows of the tables
    /// have positions in this vector. If a row has the same values as the previous row, both rows have the same
    /// position.
    dims: Vec<u64>,
    /// For each chunk, the position of its offsets in `dims`. In `dims`, the sizes of the chunk follow the offsets.
    chunks: Vec<DimsAt>,
    /// For each `MetadataIndex` row, the index of the FQN in `names`, and the position of the chunk offsets in `dims`.
    /// If the row is for an object, the position is `None`.
    indexes: Vec<(u32, Option<DimsAt>)>,
    infos: Vec<StoredItem>,
    /// For each `TensorProperties` row, the index of the dtype in `dtypes`.
    properties: Vec<u32>,
    tensors: Vec<TensorRow>,
    /// The chunks of all tensors, tensor after tensor, as row numbers of `chunks`.
    tensor_chunks: Vec<u32>,
    names: Interned,
    paths: Interned,
    dtypes: Interned,
}

/// The position of a list of offsets or sizes in [`Columns::dims`].
#[derive(Clone, Copy)]
struct DimsAt {
    start: u64,
    ndim: u8,
}

impl DimsAt {
    /// Returns the position in [`Columns::dims`] directly after these dims, with the same number of values. For the
    /// offsets of a chunk, this is the position of the chunk's sizes.
    fn behind(self) -> Self {
        Self { start: self.start + u64::from(self.ndim), ..self }
    }
}

struct TensorRow {
    dtype: u32,
    shape: DimsAt,
    chunks: Range<usize>,
}

#[derive(Default)]
struct Interned {
    texts: IndexSet<Arc<str>, RandomState>,
    last: u32,
}

impl Interned {
    fn id(&mut self, text: &str) -> u32 {
        if self.texts.get_index(self.last as usize).is_some_and(|last| **last == *text) {
            return self.last;
        }
        let known = self.texts.get_index_of(text);
        let id = known.unwrap_or_else(|| self.texts.insert_full(text.into()).0);
        self.last = u32::try_from(id).expect("fewer than 2^32 names");
        self.last
    }

    fn text(&self, id: u32) -> &str {
        &self.texts[id as usize]
    }
}

fn row(len: usize) -> u32 {
    u32::try_from(len - 1).expect("fewer than 2^32 rows")
}

impl Columns {
    fn add_dims(&mut self, dims: &[u64]) -> Option<DimsAt> {
        let at = DimsAt { start: self.dims.len() as u64, ndim: u8::try_from(dims.len()).ok()? };
        self.dims.extend_from_slice(dims);
        Some(at)
    }

    fn dims(&self, at: DimsAt) -> &[u64] {
        let start = usize::try_from(at.start).expect("an index into memory");
        &self.dims[start..start + usize::from(at.ndim)]
    }

    /// Stores `dims` and returns their position. If `dims` equal the dims at `before` (the position of the previous
    /// row's dims), stores nothing and returns `before`.
    fn dims_like(&mut self, before: Option<DimsAt>, dims: &[u64]) -> Option<DimsAt> {
        before.filter(|at| self.dims(*at) == dims).or_else(|| self.add_dims(dims))
    }

    fn chunk(&mut self, state: &Record<'_, '_>) -> Option<u32> {
        let (offsets, sizes) = (state.dims("offsets")?, state.dims("sizes")?);
        let before = self.chunks.last().filter(|at| self.dims(**at) == offsets && self.dims(at.behind()) == sizes);
        let at = match before {
            Some(at) => *at,
            None => {
                let at = self.add_dims(offsets).filter(|_| offsets.len() == sizes.len())?;
                self.add_dims(sizes)?;
                at
            }
        };
        self.chunks.push(at);
        Some(row(self.chunks.len()))
    }

    fn index(&mut self, state: &Record<'_, '_>) -> Option<u32> {
        let name = self.names.id(state.text("fqn")?);
        let offset = match state.get("offset") {
            None | Some(Field::None) => None,
            Some(_) => Some(self.dims_like(self.indexes.last().and_then(|index| index.1), state.dims("offset")?)?),
        };
        self.indexes.push((name, offset));
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
        self.infos.push(StoredItem { path: self.paths.id(path), offset, len });
        Ok(Some(row(self.infos.len())))
    }

    /// Adds a row for a `TensorProperties`. The pickled state of the object is a tuple, and the dtype is the first item
    /// of the tuple. In old versions of PyTorch the state is a dict.
    fn properties(&mut self, state: &Record<'_, '_>) -> Option<u32> {
        let Field::Global(("torch", dtype)) = state.first().or_else(|| state.get("dtype"))? else { return None };
        self.properties.push(self.dtypes.id(dtype));
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
        let sizes = chunks.first().map(|chunk| self.chunks[chunk.index as usize].behind());
        let (shape, chunks) = (self.dims_like(sizes, size)?, start..self.tensor_chunks.len());
        self.tensors.push(TensorRow { dtype: self.properties[properties.index as usize], shape, chunks });
        Some(row(self.tensors.len()))
    }

    fn chunk_at(&self, row: u32) -> (&[u64], &[u64]) {
        let offsets = self.chunks[row as usize];
        (self.dims(offsets), self.dims(offsets.behind()))
    }

    /// Returns the chunk offsets in a `MetadataIndex` row; `None` for an object.
    fn offset_at(&self, row: u32) -> Option<&[u64]> {
        self.indexes[row as usize].1.map(|at| self.dims(at))
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
    /// `Malformed` with the file.
    pub fn decode(path: &'a Path, bytes: &'a [u8]) -> Result<Self> {
        let mut columns = Columns::default();
        let (pickle, _) = pickle::parse(bytes, &mut columns).map_err(|error| pickle_error(path, "pickle", &error))?;
        Ok(Self { path, pickle, columns })
    }

    /// Returns the names of data files, relative to the directory.
    pub fn files(&self) -> Vec<&str> {
        self.columns.paths.texts.iter().map(AsRef::as_ref).collect()
    }

    /// Converts the entry of each FQN with `make` on several threads, and passes the results to `take` in the order of
    /// the metadata. While `take` receives results, worker threads call `make` for the next FQNs.
    ///
    /// # Errors
    /// `Malformed` with the file and the FQN, `Unsupported` for dtypes that dtshard does not have, and the errors of
    /// `make` and `take`.
    pub fn entries<T: Send>(
        &self,
        make: impl Fn(MetadataEntry) -> Result<T> + Sync,
        mut take: impl FnMut(T) -> Result<()> + Send,
    ) -> Result<()> {
        let path = self.path;
        let malformed = |at: &str, expected: &str, found: String| Error::malformed(path, at, expected, found);
        let root = self.pickle.root();
        let field = |name: &str| root.state().and_then(|state| state.get(name)).filter(|node| !node.is_none());
        let Some(tensors) = field("state_dict_metadata").and_then(Ref::as_dict) else {
            let found = match (root.state(), field("state_dict_metadata")) {
                (None, _) => {
                    format!("no such field, because the pickle contains {} instead of an object", root.describe())
                }
                (Some(_), None) => String::from("no field of this name"),
                (Some(_), Some(node)) => node.describe(),
            };
            return Err(malformed("state_dict_metadata", "a dict of tensors", found));
        };
        let places = ItemPositions::read(path, &self.columns, field("storage_data"))?;
        let steps = Steps::read(field("planner_data"));
        let of_part = |start: usize| -> Result<Vec<T>> {
            let (mut nth_items, mut nth_steps, mut keys) = (start, start, HashMap::default());
            let of_name = |(key, value): (Ref<'_>, Ref<'_>)| {
                let Some(name) = key.as_str() else {
                    return Err(malformed("state_dict_metadata", "names that are text", key.describe()));
                };
                let items = places.of(name, &mut nth_items);
                let fqn = Fqn::from(items.name.map_or_else(|| name.into(), Arc::clone));
                let state_path = match steps.of(name, &mut nth_steps) {
                    Some(steps) => state_path(path, &fqn, steps, &mut keys)?,
                    None => StatePath(vec![Key::Name((&fqn).into())]),
                };
                let kind = entry_kind(path, name, value, &places, &items)?;
                make(MetadataEntry { fqn, path: state_path, kind })
            };
            tensors.starting_at(start).take(PART_NAMES).map(of_name).collect()
        };
        let parts: Vec<usize> = (0..tensors.len()).step_by(PART_NAMES).collect();
        let mut take_all =
            |made: Vec<Result<Vec<T>>>| made.into_iter().try_for_each(|made| made?.into_iter().try_for_each(&mut take));
        if let [only] = parts[..] {
            return take_all(vec![of_part(only)]);
        }
        // While this thread passes on a group of results, the other threads make the next group.
        let mut made = Vec::new();
        for parts in parts.chunks(2 * rayon::current_num_threads()) {
            let make = || parts.par_iter().copied().map(of_part).collect();
            let (next, taken) = rayon::join(make, || take_all(std::mem::take(&mut made)));
            taken?;
            made = next;
        }
        take_all(made)
    }
}

/// The byte ranges of all items in `storage_data`, which can be found by FQN and chunk offsets.
struct ItemPositions<'a> {
    columns: &'a Columns,
    /// For each item, its row number in `columns.indexes` and its row number in `columns.infos`. The items are grouped
    /// by FQN, and the items of one FQN are sorted by the chunk offsets.
    rows: Vec<(u32, u32)>,
    /// For each FQN in `columns.names`, the index in `rows` of the first item of the FQN. The last element is the
    /// length of `rows`.
    starts: Vec<usize>,
}

/// The items of one FQN, as a range of [`ItemPositions::rows`].
struct Items<'a> {
    /// The FQN; `None` if `storage_data` has no item for this FQN, and then `rows` is empty.
    name: Option<&'a Arc<str>>,
    rows: &'a [(u32, u32)],
}

impl<'a> ItemPositions<'a> {
    fn read(path: &Path, columns: &'a Columns, storage_data: Option<Ref<'_>>) -> Result<Self> {
        let mut given = Vec::with_capacity(columns.indexes.len());
        for (key, value) in storage_data.and_then(Ref::as_dict).into_iter().flatten() {
            let (Some(index), Some(info)) = (row_of(key, INDEX), row_of(value, INFO)) else {
                let found = format!("{} and {}", key.describe(), value.describe());
                return Err(Error::malformed(path, "storage_data", "MetadataIndex and _StorageInfo", found));
            };
            given.push((index, info));
        }
        // The metadata lists items rank by rank, so the items of each name are mostly sorted already.
        let name = |row: &(u32, u32)| columns.indexes[row.0 as usize].0 as usize;
        let mut starts = vec![0; columns.names.texts.len() + 1];
        given.iter().for_each(|row| starts[name(row) + 1] += 1);
        for name in 1..starts.len() {
            starts[name] += starts[name - 1];
        }
        let mut next = starts.clone();
        let mut rows = vec![(0, 0); given.len()];
        for row in given {
            let place = &mut next[name(&row)];
            rows[*place] = row;
            *place += 1;
        }
        for range in starts.windows(2) {
            // The sort is stable, and lookups take the last of several equal keys, as a Python dict does.
            rows[range[0]..range[1]].sort_by_key(|row| columns.offset_at(row.0));
        }
        Ok(Self { columns, rows, starts })
    }

    /// Returns the items of an FQN. `nth` is the expected index of the FQN in `columns.names`; the lookup is fast if
    /// the FQN has this index. If the FQN is found, `nth` becomes the index of the next FQN.
    fn of(&self, fqn: &str, nth: &mut usize) -> Items<'_> {
        let names = &self.columns.names.texts;
        let is_likely = |name: &&Arc<str>| ***name == *fqn;
        let found = names.get_index(*nth).filter(is_likely).map(|name| (*nth, name));
        let Some((id, name)) = found.or_else(|| names.get_full(fqn)) else { return Items { name: None, rows: &[] } };
        *nth = id + 1;
        Items { name: Some(name), rows: &self.rows[self.starts[id]..self.starts[id + 1]] }
    }

    /// Returns the byte range of the item with the chunk offsets `offset` (`None` for an object); `None` if `items` has
    /// no such item. `nth` is the expected index of the item in `items`; the lookup is fast if the item has this index.
    fn find(&self, items: &Items<'_>, nth: usize, offset: Option<&[u64]>) -> Option<StoredItem> {
        let rows = items.rows;
        let at = |nth: usize| rows.get(nth).map(|row| self.columns.offset_at(row.0));
        let is_last = |nth: usize| at(nth) == Some(offset) && at(nth + 1) != Some(offset);
        if is_last(nth) {
            return Some(self.columns.infos[rows[nth].1 as usize]);
        }
        let end = rows.partition_point(|row| self.columns.offset_at(row.0) <= offset);
        let nth = end.checked_sub(1).filter(|&nth| is_last(nth))?;
        Some(self.columns.infos[rows[nth].1 as usize])
    }
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

fn entry_kind(
    path: &Path,
    fqn: &str,
    value: Ref<'_>,
    places: &ItemPositions<'_>,
    items: &Items<'_>,
) -> Result<EntryKind> {
    let malformed = |expected: &str, found: String| Error::malformed(path, fqn, expected, found);
    let columns = places.columns;
    let Some(row) = row_of(value, TENSOR) else {
        return match value.object() {
            Some(object) if object.name == "BytesStorageMetadata" => Ok(EntryKind::Bytes(places.find(items, 0, None))),
            Some(object) if object.name == "TensorStorageMetadata" => Err(unfit(path, fqn, object.state)),
            _ => Err(malformed("TensorStorageMetadata or BytesStorageMetadata", value.describe())),
        };
    };
    let tensor = &columns.tensors[row as usize];
    let dtype = dtype(path, fqn, columns.dtypes.text(tensor.dtype))?;
    let shape = Dims::from(columns.dims(tensor.shape));
    if checked_len_bytes(&shape, dtype).is_none() {
        return Err(malformed("a shape that fits memory", format!("{:?}", shape.as_slice())));
    }
    let rows = &columns.tensor_chunks[tensor.chunks.clone()];
    let mut chunks = Vec::with_capacity(rows.len());
    for (nth, row) in rows.iter().enumerate() {
        let (offsets, sizes) = columns.chunk_at(*row);
        if offsets.len() != shape.len() {
            return Err(malformed(&format!("chunks of {} dims", shape.len()), offsets.len().to_string()));
        }
        let stored = places.find(items, nth, Some(offsets));
        chunks.push(StoredChunk { offsets: offsets.into(), sizes: sizes.into(), stored });
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
