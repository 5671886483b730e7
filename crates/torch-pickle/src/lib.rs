//! Reads and writes the files of [`torch.save`](https://docs.pytorch.org/docs/stable/generated/torch.save.html) as data,
//! without Python.
//!
//! Such a file is a zip archive: a pickle, `data.pkl`, that holds the object, and a record `data/KEY` for each storage that
//! tensors in it are views of. A pickle is a program, and running it runs whatever its author wrote. Here nothing named in a
//! pickle is imported or called: a call is a node like any other, and becomes part of a value only if its name is on the
//! [list](pickle::symbols) of classes and functions that are plain data.
//!
//! ```text
//! file --zip::Archive--> data.pkl --pickle::parse--> nodes --pickle::decode--> Value --pickle::Writer--> bytes
//! ```
//!
//! # Example
//!
//! The tensors of a file, and the object in it that is not known to be plain data:
//!
//! ```
//! use torch_pickle::Value;
//! use torch_pickle::pickle::{self, Call, NoVisitor, Unknown};
//! use torch_pickle::zip::Archive;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let bytes = include_bytes!("../tests/foreign.pt");
//! let archive = Archive::read(bytes.as_slice())?;
//! let content = archive.content(bytes.as_slice(), "data.pkl", pickle::MAX_BYTES)?.ok_or("no data.pkl")?;
//! let (nodes, _) = pickle::parse(&content, &mut NoVisitor)?;
//!
//! // A tensor is a call of `_rebuild_tensor_v2(storage, offset, size, stride, ...)`. It becomes a number here.
//! let mut tensors = Vec::new();
//! let read = pickle::decode_with(nodes.root(), Unknown::Drop, &mut |node| {
//!     let Some(Call { module: "torch._utils", name: "_rebuild_tensor_v2", args }) = node.call() else {
//!         return Ok(None);
//!     };
//!     // ("storage", class, key, device, number of elements)
//!     let storage = args.get(0).and_then(|storage| storage.persistent_id()?.as_tuple());
//!     let class = storage.and_then(|storage| storage.get(1)?.global());
//!     let key = storage.and_then(|storage| storage.get(2)?.as_str());
//!     let size = args.get(2).and_then(|size| size.to_dims());
//!     tensors.push((class.unwrap().1.to_owned(), key.unwrap().to_owned(), size.unwrap().to_vec()));
//!     Ok(Some(tensors.len() - 1))
//! })?;
//! let value: Value<usize> = read.value;
//!
//! assert_eq!(tensors, [("FloatStorage".into(), "0".into(), vec![4, 3])]);
//! let model = value.as_dict().and_then(|state| state.get("model")).ok_or("no model")?;
//! assert_eq!(model.to_string(), "{'w': <0>}");
//! assert_eq!(read.dropped[0].symbol, "their_trainer.Foreign");
//!
//! // The data of the first tensor: 12 floats of 4 bytes.
//! let (start, record) = archive.locate(bytes.as_slice(), "data/0")?.ok_or("no storage")?;
//! assert_eq!((start, record.len), (896, 48));
//! # Ok(())
//! # }
//! ```
//!
//! # Hostile input
//!
//! Any bytes are read or refused: no input makes this crate panic, every allocation is bounded by the length of the input,
//! and [`Limits`](pickle::Limits) bound the depth of a value and the work that shared objects cause. Offsets and sizes of an
//! archive are checked against its source before anything is read.
//!
//! # Errors
//!
//! [`PickleError`](pickle::PickleError) names the byte of a pickle that cannot be read, [`DecodeError`](pickle::DecodeError) the
//! path of an object that is no plain data, [`WriteError`](pickle::WriteError) the object that protocol 2 cannot hold, and
//! [`ArchiveError`](zip::ArchiveError) the part of an archive that is damaged.
//!
//! # Large files
//!
//! A source of bytes is anything that implements [`ReadAt`]; tensor data is located and never read. A pickle with millions
//! of small objects, such as the `.metadata` of `torch.distributed.checkpoint`, need not become a tree: a
//! [`Visitor`](pickle::Visitor) sees each object while the pickle is read, and keeps a row of it.
//!
//! # Format versions
//!
//! Pickles of protocols 2 to 5 are read, protocol 2 is written, as `torch.save` does; `torch.load(weights_only=True)` takes
//! what is written. Archives are laid out as `PyTorchStreamWriter` does.
#![warn(missing_docs)]

pub mod pickle;
mod read_at;
mod repr;
mod value;
pub mod zip;

#[cfg(unix)]
pub use read_at::FileSource;
pub use read_at::ReadAt;
pub use value::{Construct, Dict, DictKind, Entry, Extension, Object, Symbol, Value};
