//! Tests that the objects of a `.metadata` become rows: the rows are correct, and the nodes of the objects are freed.

use super::*;

const CHUNK: u32 = 0;
const INDEX: u32 = 1;
const STORAGE: u32 = 2;
const TENSOR: u32 = 3;

/// A visitor that stores the content of a `.metadata` in tables, as a reader of checkpoints could.
#[derive(Default)]
struct Columns {
    /// The offsets and the sizes of each chunk.
    chunks: Vec<(Vec<u64>, Vec<u64>)>,
    /// The FQN and the offset in each `MetadataIndex`.
    indices: Vec<(String, Option<Vec<u64>>)>,
    /// The file, the offset and the length of each item.
    storage: Vec<(String, u64, u64)>,
    /// The shape of each tensor, and the indices in `chunks` of the tensor's chunks.
    tensors: Vec<(Vec<u64>, Vec<u32>)>,
}

fn text_of(state: Ref<'_>, key: &str) -> Option<String> {
    Some(state.get(key)?.as_str()?.to_owned())
}

fn dims_of(state: Ref<'_>, key: &str) -> Option<Vec<u64>> {
    Some(state.get(key)?.to_dims()?.to_vec())
}

impl Columns {
    fn row(&mut self, class: &str, state: Ref<'_>) -> Option<Row> {
        let number = |key| state.get(key)?.as_u64();
        let (kind, len) = match class {
            "ChunkStorageMetadata" => {
                self.chunks.push((dims_of(state, "offsets")?, dims_of(state, "sizes")?));
                (CHUNK, self.chunks.len())
            }
            "MetadataIndex" => {
                self.indices.push((text_of(state, "fqn")?, dims_of(state, "offset")));
                (INDEX, self.indices.len())
            }
            "_StorageInfo" => {
                let file = text_of(state, "relative_path")?;
                self.storage.push((file, number("offset")?, number("length")?));
                (STORAGE, self.storage.len())
            }
            "TensorStorageMetadata" => {
                let chunks = state.get("chunks")?.as_list()?;
                let rows = chunks.map(|chunk| Some(chunk.row()?.index)).collect::<Option<_>>()?;
                self.tensors.push((dims_of(state, "size")?, rows));
                (TENSOR, self.tensors.len())
            }
            _ => return None,
        };
        Some(Row { kind, index: len as u32 - 1 })
    }
}

impl Visitor for Columns {
    fn build(&mut self, (module, name): (&str, &str), _args: Ref<'_>, state: Ref<'_>) -> Result<Option<Row>, String> {
        if !module.starts_with("torch.distributed.checkpoint.") {
            return Ok(None);
        }
        let known = ["ChunkStorageMetadata", "MetadataIndex", "_StorageInfo", "TensorStorageMetadata"];
        match self.row(name, state) {
            None if known.contains(&name) => Err(format!("a {name} with missing fields")),
            row => Ok(row),
        }
    }
}

#[test]
fn real_metadata_becomes_rows() {
    let mut columns = Columns::default();
    let bytes = include_bytes!("metadata.4.pkl");
    let (pickle, _) = parse(bytes, &mut columns).unwrap();

    assert_eq!(columns.chunks, [(vec![0, 0], vec![2, 6]), (vec![2, 0], vec![2, 6])]);
    assert_eq!(columns.tensors, [(vec![4, 6], vec![0, 1])]);

    let root = pickle.root().object().unwrap();
    assert_eq!(root.name, "Metadata");
    let state = root.state.unwrap();
    assert_eq!(state.get("version").unwrap().as_str(), Some("1.0.0"));
    let names = state.get("state_dict_metadata").unwrap();
    assert_eq!(names.get("w").unwrap().row(), Some(Row { kind: TENSOR, index: 0 }));
    assert_eq!(names.get("step").unwrap().object().unwrap().name, "BytesStorageMetadata");

    let storage = state.get("storage_data").unwrap().as_dict().unwrap();
    let rows: Vec<_> = storage
        .map(|(key, value)| {
            let (key, value) = (key.row().unwrap(), value.row().unwrap());
            assert_eq!((key.kind, value.kind), (INDEX, STORAGE));
            let (fqn, offset) = &columns.indices[key.index as usize];
            let (file, at, len) = &columns.storage[value.index as usize];
            (fqn.as_str(), offset.clone(), file.as_str(), *at, *len)
        })
        .collect();
    let expected = [
        ("w", Some(vec![0, 0]), "__0_0.distcp", 0, 1577),
        ("w", Some(vec![2, 0]), "__1_0.distcp", 7, 1577),
        ("step", None, "__0_0.distcp", 1577, 1261),
    ];
    assert_eq!(rows, expected);

    let planner = decode(state.get("planner_data").unwrap(), &mut |_| Ok(None)).unwrap();
    assert_eq!(planner.to_string(), "{'w': ('w',), 'step': ('step',)}");
}

#[test]
fn visitor_can_refuse_an_object() {
    let bytes = b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n)\x81}b.";
    let error = parse(bytes, &mut Columns::default()).err().unwrap();
    assert_eq!(error.kind, PickleErrorKind::Rejected);
    assert_eq!(error.to_string(), "byte 63: a ChunkStorageMetadata with missing fields");
}

/// Writes a `.metadata` as CPython's pickler writes it: every value is memoized, and repeated objects are fetched from
/// the memo.
struct Metadata {
    out: Vec<u8>,
    memo: u32,
}

impl Metadata {
    fn put(&mut self, bytes: &[u8]) {
        self.out.extend(bytes);
    }

    fn memoize(&mut self) -> u32 {
        self.put(b"\x94");
        self.memo += 1;
        self.memo - 1
    }

    fn get(&mut self, index: u32) {
        match u8::try_from(index) {
            Ok(index) => self.put(&[b'h', index]),
            Err(_) => {
                self.put(b"j");
                self.put(&index.to_le_bytes());
            }
        }
    }

    fn text(&mut self, text: &str) -> u32 {
        self.put(&[0x8c, text.len() as u8]);
        self.put(text.as_bytes());
        self.memoize()
    }

    /// Stores a class in the memo, leaves the stack unchanged, and returns the memo index.
    fn class(&mut self, module: &str, name: &str) -> u32 {
        self.text(module);
        self.text(name);
        self.put(b"\x93");
        let class = self.memoize();
        self.put(b"0");
        class
    }

    fn number(&mut self, number: u32) {
        self.put(b"J");
        self.put(&number.to_le_bytes());
    }

    fn size(&mut self, class: u32, dims: [u32; 2]) -> u32 {
        self.get(class);
        dims.into_iter().for_each(|dim| self.number(dim));
        self.put(b"\x86");
        self.memoize();
        self.put(b"\x85");
        self.memoize();
        self.put(b"R");
        self.memoize()
    }

    fn new_object(&mut self, class: u32) {
        self.get(class);
        self.put(b")\x81");
        self.memoize();
        self.put(b"}");
        self.memoize();
        self.put(b"(");
    }

    /// Returns a `.metadata` of `tensors` tensors with `chunks` chunks each.
    fn of(tensors: u32, chunks: u32) -> Vec<u8> {
        let mut w = Self { out: b"\x80\x04".to_vec(), memo: 0 };
        let module = "torch.distributed.checkpoint.metadata";
        let size = w.class("torch", "Size");
        let tensor = w.class(module, "TensorStorageMetadata");
        let chunk = w.class(module, "ChunkStorageMetadata");
        let index = w.class(module, "MetadataIndex");
        let info = w.class("torch.distributed.checkpoint.filesystem", "_StorageInfo");
        let keys = ["size", "chunks", "offsets", "sizes", "fqn", "index", "offset", "relative_path", "length"];
        let [k_size, k_chunks, k_offsets, k_sizes, k_fqn, k_index, k_offset, k_path, k_length] = keys.map(|key| {
            let index = w.text(key);
            w.put(b"0");
            index
        });

        w.put(b"}");
        w.memoize();
        let mut names = Vec::new();
        let mut offsets = Vec::new();
        for t in 0..tensors {
            names.push(w.text(&format!("model.layers.{t}.weight")));
            w.new_object(tensor);
            w.get(k_size);
            w.size(size, [chunks, 8]);
            w.get(k_chunks);
            w.put(b"]");
            w.memoize();
            for batch in (0..chunks).step_by(1000) {
                w.put(b"(");
                for c in batch..chunks.min(batch + 1000) {
                    w.new_object(chunk);
                    w.get(k_offsets);
                    offsets.push(w.size(size, [c, 0]));
                    w.get(k_sizes);
                    w.size(size, [1, 8]);
                    w.put(b"ub");
                }
                w.put(b"e");
            }
            w.put(b"ubs");
        }
        w.put(b"}");
        w.memoize();
        let file = w.text("__0_0.distcp");
        w.put(b"0");
        for t in 0..tensors {
            for c in 0..chunks {
                w.new_object(index);
                w.get(k_fqn);
                w.get(names[t as usize]);
                w.get(k_index);
                w.number(c);
                w.get(k_offset);
                w.get(offsets[(t * chunks + c) as usize]);
                w.put(b"ub");
                w.new_object(info);
                w.get(k_path);
                w.get(file);
                w.get(k_offset);
                w.number(c);
                w.get(k_length);
                w.number(1577);
                w.put(b"ubs");
            }
        }
        w.put(b"\x86.");
        w.out
    }
}

#[test]
fn nodes_of_rows_are_freed() {
    let (tensors, chunks) = (10, 20_000);
    let bytes = Metadata::of(tensors, chunks);
    let mut columns = Columns::default();
    let (pickle, len) = parse(&bytes, &mut columns).unwrap();
    assert_eq!(len, bytes.len());

    let count = (tensors * chunks) as usize;
    assert_eq!(columns.chunks.len(), count);
    assert_eq!(columns.indices.len(), count);
    assert_eq!(columns.storage.len(), count);
    assert_eq!(columns.chunks[count - 1], (vec![19_999, 0], vec![1, 8]));
    assert_eq!(columns.indices[count - 1].1, Some(vec![19_999, 0]));

    // For each item there remain a key, a value, and the offsets that two tables share. A few names remain as well.
    let live = pickle.live_nodes();
    assert!(live <= 3 * count + 100, "{live} nodes for {count} chunks");
}
