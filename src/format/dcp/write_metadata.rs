//! Writes the `.metadata` pickle in protocol 2, which every reader accepts.
//!
//! A job of 16,384 ranks has millions of chunks. The pickle has three objects for each chunk, and these objects always
//! have the same three classes and the same field names. Repeated values (classes, field names, FQNs, file names, the
//! sizes of the previous chunk) are written once and then fetched from the memo. CPython does the same if a Python
//! object occurs again. A chunk takes about 80 bytes instead of 400. Tensors and chunks are in the order of the files,
//! so two equal checkpoints have equal pickles.
//!
//! Offsets and sizes of chunks count elements; offsets and lengths of items are in bytes. Source:
//! `torch/distributed/checkpoint/metadata.py`.

use std::collections::HashMap;
use std::convert::Infallible;

use super::METADATA;
use super::file_layout::{FileLayout, StorageInfo};
use crate::catalog::{Dtype, Fqn, Key, Path, StateLeaf};
use crate::format::torch::write_sizes;
use crate::layout::Dims;
use torch_pickle::pickle::{Writer, append_all, set_all};

/// Returns the `.metadata` pickle of a layout. `leaves` are the tensors and objects of the state dict.
pub fn pickle(layout: &FileLayout<'_>, leaves: &[(Path, StateLeaf<'_>)]) -> Vec<u8> {
    let mut names = layout.tensors.iter().map(|(fqn, _)| fqn).enumerate();
    let mut out = MetadataPickle::default();
    out.instance("Metadata");
    out.writer.empty_dict().mark();
    out.text("state_dict_metadata");
    out.writer.empty_dict();
    out.entries(leaves.iter(), |out, (path, leaf)| match leaf {
        StateLeaf::Tensor(_) => {
            let (tensor, fqn) = names.next().expect("one a tensor leaf");
            out.text(fqn.as_str());
            out.tensor(layout, tensor);
        }
        StateLeaf::Object(_) => {
            out.text(path.fqn().as_str());
            out.instance("BytesStorageMetadata");
        }
    });
    out.text("planner_data");
    out.writer.empty_dict();
    out.entries(leaves.iter(), |out, (path, _)| {
        out.text(path.fqn().as_str());
        write_path(&mut out.writer, path);
    });
    out.text("storage_data");
    out.writer.empty_dict();
    out.entries(layout.objects.iter(), |out, (fqn, stored)| {
        out.index(fqn, None);
        out.info(layout, stored);
    });
    for (tensor, (fqn, _)) in layout.tensors.iter().enumerate() {
        let chunks = &layout.chunks[tensor];
        out.entries(layout.stored[tensor].iter().enumerate(), |out, (position, stored)| {
            out.index(fqn, Some((position, &chunks.tile(position).bounds().offsets)));
            out.info(layout, stored);
        });
    }
    // PyTorch writes a random id that links data files to their save. Here the id is a hash, so that equal checkpoints
    // have equal files.
    let hash = blake3::hash(out.writer.written()).to_hex();
    let save_id = [&hash[..8], &hash[8..12], &hash[12..16], &hash[16..20], &hash[20..32]].join("-");
    out.text("storage_meta");
    out.instance("StorageMeta");
    out.writer.empty_dict().mark();
    out.writer.string("checkpoint_id").none().string("save_id").string(&save_id);
    out.writer.string("load_id").none().string("modules").empty_list().setitems().build();
    out.writer.string("version").string("1.0.0");
    out.writer.setitems().build();
    out.writer.finish()
}

/// A `.metadata` pickle while it is written.
#[derive(Default)]
struct MetadataPickle {
    writer: Writer,
    /// The memo index of each text that has been stored in the memo.
    texts: HashMap<String, u32>,
    classes: HashMap<(&'static str, &'static str), u32>,
    last_sizes: Option<(Dims, u32)>,
    /// The memo index of the value that is stored next.
    next: u32,
}

impl MetadataPickle {
    /// Stores the value on top of the stack in the memo, and returns its memo index.
    fn put(&mut self) -> u32 {
        let number = self.next;
        self.writer.put(number);
        self.next = number.checked_add(1).expect("fewer than 2^32 texts and sizes");
        number
    }

    fn text(&mut self, text: &str) {
        if let Some(&known) = self.texts.get(text) {
            self.writer.get(known);
            return;
        }
        self.writer.string(text);
        let number = self.put();
        self.texts.insert(text.to_owned(), number);
    }

    fn class(&mut self, module: &'static str, name: &'static str) {
        if let Some(&known) = self.classes.get(&(module, name)) {
            self.writer.get(known);
            return;
        }
        self.writer.global(module, name);
        let number = self.put();
        self.classes.insert((module, name), number);
    }

    /// Writes an instance of the class `name` in PyTorch's metadata module, made by `cls.__new__(cls)`.
    fn instance(&mut self, name: &'static str) {
        self.class(METADATA, name);
        self.writer.empty_tuple().newobj();
    }

    fn torch_size(&mut self, sizes: &[u64]) {
        self.class("torch", "Size");
        write_sizes(&mut self.writer, sizes);
        self.writer.tuple(1).reduce();
    }

    /// Writes the sizes of a chunk. If the sizes equal the sizes of the previous chunk, as they nearly always do,
    /// writes a reference to the memo.
    fn sizes(&mut self, sizes: &Dims) {
        if let Some((_, known)) = self.last_sizes.as_ref().filter(|(last, _)| last == sizes) {
            self.writer.get(*known);
            return;
        }
        self.torch_size(sizes);
        let number = self.put();
        self.last_sizes = Some((sizes.clone(), number));
    }

    fn entries<T>(&mut self, items: impl ExactSizeIterator<Item = T>, mut each: impl FnMut(&mut Self, T)) {
        let Ok(()): Result<(), Infallible> = set_all(self, items, |out, item| {
            each(out, item);
            Ok(())
        });
    }

    fn tensor(&mut self, layout: &FileLayout<'_>, tensor: usize) {
        let entry = layout.source.tensor(layout.tensors[tensor].1);
        self.instance("TensorStorageMetadata");
        self.writer.empty_dict().mark();
        self.text("properties");
        self.properties(entry.dtype);
        self.text("size");
        self.torch_size(&entry.shape);
        self.text("chunks");
        self.writer.empty_list();
        let Ok(()): Result<(), Infallible> = append_all(self, layout.chunks[tensor].iter(), |out, chunk| {
            let region = chunk.tile.bounds();
            out.instance("ChunkStorageMetadata");
            out.writer.empty_dict().mark();
            out.text("offsets");
            out.torch_size(&region.offsets);
            out.text("sizes");
            out.sizes(&region.sizes);
            out.writer.setitems().build();
            Ok(())
        });
        self.writer.setitems().build();
    }

    /// Writes a `TensorProperties` with a state of five items, which every version of PyTorch reads. PyTorch 2.15
    /// writes a sixth item, which earlier versions of PyTorch reject.
    fn properties(&mut self, dtype: Dtype) {
        self.instance("TensorProperties");
        let writer = self.writer.mark().global("torch", dtype.torch_name());
        writer.global("torch.serialization", "_get_layout").string("torch.strided").tuple(1).reduce();
        writer.boolean(false);
        writer.global(METADATA, "_MEM_FORMAT_ENCODING").int(0).tuple(1).reduce();
        writer.boolean(false).tuple(5).build();
    }

    /// Writes a key of `storage_data`: for a chunk, the FQN, the index and the offsets; for an object, only the FQN.
    fn index(&mut self, fqn: &Fqn, chunk: Option<(usize, &Dims)>) {
        self.instance("MetadataIndex");
        self.writer.empty_dict().mark();
        self.text("fqn");
        self.text(fqn.as_str());
        self.text("index");
        match chunk {
            None => {
                self.writer.none();
            }
            Some((position, offsets)) => {
                self.writer.uint(position as u64);
                self.text("offset");
                self.torch_size(offsets);
            }
        }
        self.writer.setitems().build();
    }

    fn info(&mut self, layout: &FileLayout<'_>, stored: &StorageInfo) {
        self.class("torch.distributed.checkpoint.filesystem", "_StorageInfo");
        self.writer.empty_tuple().newobj().empty_dict().mark();
        self.text("relative_path");
        let path = &layout.reservation.files[stored.file as usize].path;
        self.text(path.to_str().expect("a name made here"));
        self.text("offset");
        self.writer.uint(stored.offset);
        self.text("length");
        self.writer.uint(stored.len).setitems().build();
    }
}

impl AsMut<Writer> for MetadataPickle {
    fn as_mut(&mut self) -> &mut Writer {
        &mut self.writer
    }
}

fn write_path(writer: &mut Writer, path: &Path) {
    if path.0.len() > 3 {
        writer.mark();
    }
    for key in &path.0 {
        match key {
            Key::Name(name) => writer.string(name),
            Key::Index(index) => writer.uint(*index),
        };
    }
    writer.tuple(path.0.len());
}
