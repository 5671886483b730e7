//! Lays out the torch.save files of a written checkpoint. All tensors are row-major, because stage 3 of DeepSpeed views
//! each tensor as a vector.

use std::collections::HashMap;
use std::path::PathBuf;

use crate::catalog::{Catalog, Dtype, OutputFile, Reservation, Reserved, TensorEntry, TensorId, Value};
use crate::error::{Error, Result};
use crate::format::archive::{Leaves, SharedBytes};
use crate::format::torch::{PREFIX, StoredView, write_view};
use crate::storage::FileId;
use torch_pickle::pickle::{WriteError, Writer};
use torch_pickle::zip::ArchiveWriter;

/// The files of a checkpoint while they are laid out.
pub struct Archives<'a> {
    source: &'a Catalog,
    shared: SharedBytes,
    pub reservation: Reservation,
}

/// A value that DeepSpeed expects in a file of a parameter.
#[derive(Clone, Copy, Debug)]
pub enum Content {
    /// A tensor of SRC, written in this dtype.
    Tensor(TensorId, Dtype),
    /// Zeros in the shape of this tensor. The file stores a single zero.
    Zeros(TensorId),
    /// A zero: a tensor without dims.
    Zero,
    /// A number that is not a tensor, as DeepSpeed's own optimizers count their steps.
    Int(i64),
}

/// A value of a file: a value of the state dict, a tensor, or a dict of such values.
pub enum Node<'v> {
    Value(&'v Value),
    Owned(Value),
    Content(Content),
    Dict(Vec<(Value, Node<'v>)>),
}

/// The data of a storage.
enum Storage {
    Tensor(TensorId, Dtype),
    /// A single zero of dtype f32.
    Zero,
}

/// The pickle and the storages of one archive.
struct Pickling<'a> {
    source: &'a Catalog,
    storages: Vec<Storage>,
    /// The storage of each tensor.
    keys: HashMap<(TensorId, Dtype), usize>,
}

impl Pickling<'_> {
    fn tensor(&mut self, writer: &mut Writer, id: TensorId, dtype: Dtype) {
        let Self { source, storages, keys } = self;
        let key = *keys.entry((id, dtype)).or_insert_with(|| {
            storages.push(Storage::Tensor(id, dtype));
            storages.len() - 1
        });
        write_view(writer, StoredView::whole(dtype, key, &source.tensor(id).shape));
    }

    fn content(&mut self, writer: &mut Writer, content: Content) {
        match content {
            Content::Tensor(id, dtype) => self.tensor(writer, id, dtype),
            Content::Zeros(id) => {
                let key = self.zero();
                let sizes = &self.source.tensor(id).shape;
                let strides = vec![0; sizes.len()];
                let whole = StoredView::whole(Dtype::F32, key, sizes);
                write_view(writer, StoredView { stored: 1, strides: Some(&strides), ..whole });
            }
            Content::Zero => {
                let key = self.zero();
                write_view(writer, StoredView::whole(Dtype::F32, key, &[]));
            }
            Content::Int(number) => _ = writer.int(number),
        }
    }

    fn node(&mut self, writer: &mut Writer, node: &Node<'_>) -> Result<(), WriteError> {
        match node {
            Node::Value(value) => {
                let source = self.source;
                let tensors = |writer: &mut Writer, id: TensorId| {
                    self.tensor(writer, id, source.tensor(id).dtype);
                    Ok(())
                };
                writer.value(value, &mut Leaves { rank: None, tensors })
            }
            Node::Owned(value) => self.node(writer, &Node::Value(value)),
            Node::Content(content) => {
                self.content(writer, *content);
                Ok(())
            }
            Node::Dict(entries) => {
                writer.empty_dict();
                for (key, node) in entries {
                    self.node(writer, &Node::Value(key))?;
                    self.node(writer, node)?;
                    writer.setitem();
                }
                Ok(())
            }
        }
    }

    /// Adds a storage with a single zero, and returns its key.
    fn zero(&mut self) -> usize {
        self.storages.push(Storage::Zero);
        self.storages.len() - 1
    }
}

impl<'a> Archives<'a> {
    pub fn new(source: &'a Catalog) -> Self {
        Self { source, shared: SharedBytes::default(), reservation: Reservation::default() }
    }

    /// Lays out a torch.save file with this content.
    ///
    /// # Errors
    /// `Unsupported` if a value cannot be pickled.
    pub fn file(&mut self, path: PathBuf, node: &Node<'_>) -> Result<()> {
        let mut pickling = Pickling { source: self.source, storages: Vec::new(), keys: HashMap::new() };
        let mut writer = Writer::new();
        pickling.node(&mut writer, node).map_err(|error| {
            Error::unsupported(
                format!("a value of the training loop cannot be pickled: {error}"),
                "leave the value out with options::exclude",
            )
        })?;
        let mut archive = ArchiveWriter::new(PREFIX);
        archive.start(&writer.finish());
        let id = FileId(u32::try_from(self.reservation.files.len()).expect("fewer than 2^32 files"));
        let mut tensors = Vec::new();
        for (key, storage) in pickling.storages.into_iter().enumerate() {
            let name = format!("data/{key}");
            match storage {
                Storage::Zero => archive.literal(&name, &[0; 4]),
                Storage::Tensor(tensor, dtype) => {
                    let entry = self.source.tensor(tensor);
                    let offset = archive.payload(&name, entry.numel() * dtype.itemsize());
                    tensors.push((tensor, dtype, offset));
                }
            }
        }
        let mut file = OutputFile::new(path);
        self.shared.append(archive.finish(), &mut file);
        self.reservation.files.push(file);
        for (tensor, dtype, offset) in tensors {
            let TensorEntry { fqn, shape, .. } = self.source.tensor(tensor);
            let entry = TensorEntry::whole(fqn.clone(), dtype, shape.clone(), id, offset);
            self.reservation.tensors.push(Reserved::new(tensor, entry));
        }
        Ok(())
    }
}
