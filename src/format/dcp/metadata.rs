//! The `.metadata` pickle, read into packed columns.
//!
//! A checkpoint of a million chunks has 68 opcodes and 143 bytes a chunk here; as a tree of values that is over a
//! gigabyte. So chunks, index keys and storage places are folded into columns the moment they are built.
//! Nothing of meshes or placements is in it.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use foldhash::fast::RandomState;

use crate::catalog::Path as StatePath;
use crate::catalog::{Dtype, Key, checked_len_bytes};
use crate::error::{Error, Result};
use crate::format::pickle::{self, Field, Fold, Folded, Record, Ref};
use crate::format::torch::reader::pickle_error;
use crate::layout::Dims;

/// What `.metadata` says, in its own order.
#[derive(Debug, Default)]
pub struct Metadata {
    pub entries: Vec<Entry>,
    /// Names of data files, relative to the directory.
    pub paths: Vec<String>,
}

#[derive(Debug)]
pub struct Entry {
    pub fqn: String,
    pub path: StatePath,
    pub kind: EntryKind,
}

#[derive(Debug)]
pub enum EntryKind {
    Tensor { dtype: Dtype, shape: Dims, chunks: Vec<StoredChunk> },
    Bytes(Option<Stored>),
}

#[derive(Debug)]
pub struct StoredChunk {
    pub offsets: Dims,
    pub sizes: Dims,
    /// `None` where the metadata does not say where it lies.
    pub stored: Option<Stored>,
}

/// A stretch of a data file.
#[derive(Clone, Copy, Debug)]
pub struct Stored {
    /// Index into [`Metadata::paths`].
    pub path: u32,
    pub offset: u64,
    pub len: u64,
}

/// Kinds of folded rows.
const CHUNK: u32 = 0;
const INDEX: u32 = 1;
const INFO: u32 = 2;

#[derive(Default)]
struct Columns {
    /// Offsets and sizes of all chunks, one after the other; each chunk's stretch begins at `chunk_starts`.
    chunk_dims: Vec<u64>,
    chunk_starts: Vec<(u64, u8)>,
    /// Name and offset of each index key; 255 dims stand for no offset at all.
    index_dims: Vec<u64>,
    index_rows: Vec<(u32, u64, u8)>,
    infos: Vec<Stored>,
    names: Interned,
    paths: Interned,
}

const NO_OFFSET: u8 = u8::MAX;

#[derive(Default)]
struct Interned {
    texts: Vec<String>,
    known: HashMap<String, u32, RandomState>,
    last: u32,
}

impl Interned {
    fn id(&mut self, text: &str) -> u32 {
        if self.texts.get(self.last as usize).is_some_and(|last| last == text) {
            return self.last;
        }
        self.last = self.known.get(text).copied().unwrap_or_else(|| self.add(text));
        self.last
    }

    fn add(&mut self, text: &str) -> u32 {
        let id = u32::try_from(self.texts.len()).expect("fewer than 2^32 names");
        self.texts.push(text.to_owned());
        self.known.insert(text.to_owned(), id);
        id
    }
}

fn row(len: usize) -> u32 {
    u32::try_from(len - 1).expect("fewer than 2^32 rows")
}

impl Columns {
    fn chunk(&mut self, state: &Record<'_>) -> Option<u32> {
        let (offsets, sizes) = (state.dims("offsets")?, state.dims("sizes")?);
        let ndim = u8::try_from(offsets.len()).ok().filter(|_| offsets.len() == sizes.len())?;
        self.chunk_starts.push((self.chunk_dims.len() as u64, ndim));
        self.chunk_dims.extend_from_slice(offsets);
        self.chunk_dims.extend_from_slice(sizes);
        Some(row(self.chunk_starts.len()))
    }

    fn index(&mut self, state: &Record<'_>) -> Option<u32> {
        let name = self.names.id(state.text("fqn")?);
        let start = self.index_dims.len() as u64;
        let ndim = match state.get("offset") {
            None | Some(Field::None) => NO_OFFSET,
            Some(_) => {
                let offset = state.dims("offset")?;
                let ndim = u8::try_from(offset.len()).ok().filter(|ndim| *ndim != NO_OFFSET)?;
                self.index_dims.extend_from_slice(offset);
                ndim
            }
        };
        self.index_rows.push((name, start, ndim));
        Some(row(self.index_rows.len()))
    }

    fn info(&mut self, state: &Record<'_>) -> Result<Option<u32>, String> {
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
        self.infos.push(Stored { path: self.paths.id(path), offset, len });
        Ok(Some(row(self.infos.len())))
    }

    fn chunk_at(&self, row: u32) -> (Dims, Dims) {
        let (start, ndim) = self.chunk_starts[row as usize];
        let start = usize::try_from(start).expect("an index into memory");
        let (offsets, sizes) = self.chunk_dims[start..start + 2 * usize::from(ndim)].split_at(usize::from(ndim));
        (offsets.into(), sizes.into())
    }

    /// (name, offset) of an index key; no offset is `None`.
    fn index_at(&self, row: u32) -> (u32, Option<&[u64]>) {
        let (name, start, ndim) = self.index_rows[row as usize];
        let start = usize::try_from(start).expect("an index into memory");
        let offset = (ndim != NO_OFFSET).then(|| &self.index_dims[start..start + usize::from(ndim)]);
        (name, offset)
    }
}

impl Fold for Columns {
    fn keeps(&self, class: (&str, &str)) -> bool {
        ["ChunkStorageMetadata", "MetadataIndex", "_StorageInfo"].contains(&class.1)
    }

    fn build(&mut self, class: (&str, &str), _args: Ref<'_>, state: Ref<'_>) -> Result<Option<Folded>, String> {
        if !self.keeps(class) {
            return Ok(None);
        }
        self.record(class, &Record::of(state).unwrap_or_default())
    }

    fn record(&mut self, class: (&str, &str), state: &Record<'_>) -> Result<Option<Folded>, String> {
        let (kind, row) = match class.1 {
            "ChunkStorageMetadata" => (CHUNK, self.chunk(state)),
            "MetadataIndex" => (INDEX, self.index(state)),
            "_StorageInfo" => (INFO, self.info(state)?),
            _ => return Ok(None),
        };
        match row {
            Some(row) => Ok(Some(Folded { kind, row })),
            None => Err(format!("a {} without the fields it should have", class.1)),
        }
    }
}

/// Read one `.metadata` pickle.
///
/// # Errors
/// `Malformed` naming the file and the FQN, `Unsupported` for dtypes without a counterpart.
pub fn parse(path: &Path, bytes: &[u8]) -> Result<Metadata> {
    let mut columns = Columns::default();
    let (pickle, _) = pickle::decode(bytes, &mut columns).map_err(|error| pickle_error(path, "pickle", &error))?;
    let malformed = |at: &str, expected: &str, found: String| Error::malformed(path, at, expected, found);
    let root = pickle.root();
    let field = |name: &str| root.state().and_then(|state| state.get(name)).filter(|node| !node.is_none());
    let Some(tensors) = field("state_dict_metadata").and_then(Ref::as_dict) else {
        return Err(malformed("state_dict_metadata", "a dict of tensors", root.describe()));
    };
    let places = Places::read(path, &columns, field("storage_data"))?;
    let mut state_paths = state_paths(path, field("planner_data"))?;
    let mut entries = Vec::new();
    for (key, value) in tensors {
        let Some(fqn) = key.as_str() else {
            return Err(malformed("state_dict_metadata", "names that are text", key.describe()));
        };
        let state_path = state_paths.remove(fqn).unwrap_or_else(|| StatePath(vec![Key::Name(fqn.into())]));
        let kind = entry_kind(path, fqn, value, &places)?;
        entries.push(Entry { fqn: fqn.to_owned(), path: state_path, kind });
    }
    Ok(Metadata { entries, paths: columns.paths.texts })
}

/// Where items lie, looked up by name and offset.
struct Places<'a> {
    columns: &'a Columns,
    /// (index row, info row), by name; those of a name sorted by offset.
    rows: Vec<(u32, u32)>,
    /// Where the rows of each name begin, and the end of the last.
    starts: Vec<usize>,
}

impl<'a> Places<'a> {
    fn read(path: &Path, columns: &'a Columns, storage_data: Option<Ref<'_>>) -> Result<Self> {
        let mut given = Vec::new();
        for (key, value) in storage_data.and_then(Ref::as_dict).into_iter().flatten() {
            let row = |node: Ref<'_>, kind| node.folded().filter(|folded| folded.kind == kind).map(|folded| folded.row);
            let (Some(index), Some(info)) = (row(key, INDEX), row(value, INFO)) else {
                let found = format!("{} and {}", key.describe(), value.describe());
                return Err(Error::malformed(path, "storage_data", "MetadataIndex and _StorageInfo", found));
            };
            given.push((index, info));
        }
        // Ranks list their items one after the other: by name first, then most are in order.
        let name = |row: &(u32, u32)| columns.index_rows[row.0 as usize].0 as usize;
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
            // Stable: of equal keys the last wins, as in a dict.
            rows[range[0]..range[1]].sort_by_key(|row| columns.index_at(row.0));
        }
        Ok(Self { columns, rows, starts })
    }

    /// The rows of a name.
    fn of(&self, fqn: &str) -> Range<usize> {
        let name = self.columns.names.known.get(fqn).map(|name| *name as usize);
        name.map_or(0..0, |name| self.starts[name]..self.starts[name + 1])
    }

    /// The place of one of the items of a name, which is most likely its `nth`.
    fn find(&self, of: Range<usize>, nth: usize, offset: Option<&[u64]>) -> Option<Stored> {
        let rows = &self.rows[of];
        let at = |nth: usize| rows.get(nth).map(|row| self.columns.index_at(row.0).1);
        let is_last = |nth: usize| at(nth) == Some(offset) && at(nth + 1) != Some(offset);
        if is_last(nth) {
            return Some(self.columns.infos[rows[nth].1 as usize]);
        }
        let end = rows.partition_point(|row| self.columns.index_at(row.0).1 <= offset);
        let nth = end.checked_sub(1).filter(|&nth| is_last(nth))?;
        Some(self.columns.infos[rows[nth].1 as usize])
    }
}

/// Steps of a path; a state dict is walked by recursion, so its depth has a bound.
const MAX_PATH: usize = 128;

/// The path of each name, where the planner kept it.
fn state_paths<'a>(path: &Path, planner_data: Option<Ref<'a>>) -> Result<HashMap<&'a str, StatePath, RandomState>> {
    let mut paths = HashMap::default();
    // Other planners keep other things here; without paths, names are keys.
    for (key, value) in planner_data.and_then(Ref::as_dict).into_iter().flatten() {
        let (Some(fqn), Some(steps)) = (key.as_str(), value.as_tuple()) else { continue };
        let steps: Option<Vec<Key>> = steps
            .map(|step| (step.as_str().map(|name| Key::Name(name.into()))).or_else(|| step.as_u64().map(Key::Index)))
            .collect();
        let steps = steps.filter(|steps| (1..=MAX_PATH).contains(&steps.len()));
        let Some(steps) = steps else {
            return Err(Error::malformed(path, fqn, "a path of names and positions", value.describe()));
        };
        paths.insert(fqn, StatePath(steps));
    }
    Ok(paths)
}

fn entry_kind(path: &Path, fqn: &str, value: Ref<'_>, places: &Places<'_>) -> Result<EntryKind> {
    let malformed = |expected: &str, found: String| Error::malformed(path, fqn, expected, found);
    match value.object().map(|object| object.name) {
        Some("BytesStorageMetadata") => Ok(EntryKind::Bytes(places.find(places.of(fqn), 0, None))),
        Some("TensorStorageMetadata") => {
            let field = |name: &str| {
                (value.state().and_then(|state| state.get(name)))
                    .ok_or_else(|| malformed(&format!("TensorStorageMetadata with `{name}`"), String::from("none")))
            };
            let dtype = dtype(path, fqn, field("properties")?)?;
            let shape = field("size")?;
            let shape = shape.to_dims().ok_or_else(|| malformed("a torch.Size", shape.describe()))?;
            if checked_len_bytes(&shape, dtype).is_none() {
                return Err(malformed("a shape that fits memory", format!("{:?}", shape.as_slice())));
            }
            let list = field("chunks")?;
            let nodes = list.as_list().ok_or_else(|| malformed("a list of chunks", list.describe()))?;
            let mut chunks = Vec::with_capacity(nodes.len());
            let of = places.of(fqn);
            for (nth, node) in nodes.enumerate() {
                let Some(folded) = node.folded().filter(|folded| folded.kind == CHUNK) else {
                    return Err(malformed("a ChunkStorageMetadata", node.describe()));
                };
                let (offsets, sizes) = places.columns.chunk_at(folded.row);
                if offsets.len() != shape.len() {
                    return Err(malformed(&format!("chunks of {} dims", shape.len()), format!("{}", offsets.len())));
                }
                let stored = places.find(of.clone(), nth, Some(&offsets));
                chunks.push(StoredChunk { offsets, sizes, stored });
            }
            Ok(EntryKind::Tensor { dtype, shape, chunks })
        }
        _ => Err(malformed("TensorStorageMetadata or BytesStorageMetadata", value.describe())),
    }
}

/// `TensorProperties`: a tuple whose first item is the dtype; instances of old versions have a dict.
fn dtype(path: &Path, fqn: &str, properties: Ref<'_>) -> Result<Dtype> {
    let state = properties.state();
    let node = state.and_then(|state| state.as_tuple().and_then(|items| items.get(0)).or_else(|| state.get("dtype")));
    match node.and_then(Ref::global) {
        Some(("torch", name)) => Dtype::from_name(name).ok_or_else(|| {
            Error::unsupported(
                format!("{}: {fqn}: dtype torch.{name} is not supported", path.display()),
                "leave that tensor out of the checkpoint, or save it as bytes (uint8)",
            )
        }),
        _ => Err(Error::malformed(path, fqn, "tensor properties with a dtype", properties.describe())),
    }
}
