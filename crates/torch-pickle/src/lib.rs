//! Reads and writes the files of [`torch.save`](https://docs.pytorch.org/docs/stable/generated/torch.save.html) as
//! data, without Python.
//!
//! Such a file is a ZIP archive. It contains a pickle, `data.pkl`, with the object, and a zip record `data/KEY` for
//! each storage that tensors of the object refer to. A pickle is a program, and running it runs any code that its
//! author wrote. This crate never imports or calls a class or function that a pickle names. It only records each call
//! as a node. A call becomes part of a value only if the name of the called class or function is on the
//! [list](pickle::symbols) of names that are plain data.
//!
//! ```text
//! file --zip::Archive--> data.pkl --pickle::parse--> nodes --pickle::decode--> Value --pickle::Writer--> bytes
//! ```
//!
//! # Example
//!
//! The example lists the tensors of a file, and those objects of the file that are not known to be plain data:
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
//! Every input is either read or refused: no input makes this crate panic, the length of the input bounds every
//! allocation, and [`Limits`](pickle::Limits) bound the depth of a value and the work that shared objects cause.
//! Offsets and sizes of an archive are checked against its source before anything is read.
//!
//! # Errors
//!
//! [`PickleError`](pickle::PickleError) names the byte of a pickle that cannot be read,
//! [`DecodeError`](pickle::DecodeError) the path of an object that is not plain data,
//! [`WriteError`](pickle::WriteError) the object that protocol 2 cannot store, and [`ArchiveError`](zip::ArchiveError)
//! the damaged part of an archive.
//!
//! # Large files
//!
//! A source of bytes is any type that implements [`ReadAt`]. Tensor data is located, and read only to check checksums.
//! A pickle with millions of small objects, such as the `.metadata` of `torch.distributed.checkpoint`, does not have to
//! become a tree of values: a [`Visitor`](pickle::Visitor) receives each object while the pickle is read, and stores a
//! row for the object.
//!
//! # Format versions
//!
//! Pickles of protocols 2 to 5 are read. Pickles of protocol 2 are written, because `torch.save` writes this protocol
//! and `torch.load(weights_only=True)` reads it. Archives have the layout of `PyTorchStreamWriter`.
#![warn(missing_docs)]

pub mod pickle;
mod read_at;
mod repr;
mod value;
pub mod zip;

#[cfg(unix)]
pub use read_at::FileSource;
pub use read_at::ReadAt;
pub use value::{Construct, Dict, DictEntry, DictKind, Extension, Object, Symbol, Value};
