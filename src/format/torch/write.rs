//! Writing a torch.save file: `torch.load(weights_only=True)` gives the state dict back, with its containers, tied
//! tensors and non-tensor values.

use std::collections::HashMap;
use std::path::PathBuf;

use smallvec::SmallVec;

use crate::catalog::{
    Catalog, Dtype, OutputFile, Reservation, Reserved, TensorEntry, TensorId, Value, contiguous_strides,
};
use crate::error::{Error, Result};
use crate::format::pickle::{WriteError, Writer};
use crate::format::zip::{ArchiveWriter, Frames};
use crate::storage::FileId;

/// The folder inside the archive. PyTorch takes it from the file's name, but reads any; a fixed one makes equal
/// checkpoints equal files.
pub const PREFIX: &str = "archive";

/// One archive appended to a file: a pickled value and the data of the tensors in it.
pub struct Saved {
    /// Tensors by storage key, with the offset of their data.
    pub tensors: Vec<(TensorId, u64)>,
    /// Length of the archive.
    pub len: u64,
}

/// Append the archive that torch.save makes of `value`. A tensor that occurs twice is stored once.
///
/// # Errors
/// A text where the value cannot be pickled.
pub fn save(source: &Catalog, value: &Value, file: &mut OutputFile, frames: &mut Frames) -> Result<Saved, WriteError> {
    let mut order: Vec<TensorId> = Vec::new();
    let mut keys: HashMap<TensorId, usize> = HashMap::new();
    let mut writer = Writer::new();
    writer.value(value, &mut |writer, id| {
        let key = *keys.entry(id).or_insert_with(|| {
            order.push(id);
            order.len() - 1
        });
        let entry = source.tensor(id);
        write_tensor(writer, entry.dtype, key, &entry.shape);
        Ok(())
    })?;
    let lens = order.iter().map(|id| source.tensor(*id).len_bytes());
    let (offsets, len) = append(&writer.finish(), lens, file, frames);
    Ok(Saved { tensors: order.into_iter().zip(offsets).collect(), len })
}

/// Append the archive that torch.save makes of one contiguous tensor; gives the offset of its data and the length.
pub fn save_tensor(dtype: Dtype, sizes: &[u64], file: &mut OutputFile, frames: &mut Frames) -> (u64, u64) {
    let mut writer = Writer::new();
    write_tensor(&mut writer, dtype, 0, sizes);
    let len = sizes.iter().product::<u64>() * dtype.itemsize();
    let (offsets, archive) = append(&writer.finish(), std::iter::once(len), file, frames);
    (offsets[0], archive)
}

fn append(
    pickle: &[u8],
    lens: impl Iterator<Item = u64>,
    file: &mut OutputFile,
    frames: &mut Frames,
) -> (SmallVec<[u64; 1]>, u64) {
    let mut archive = ArchiveWriter::new(file, frames, PREFIX);
    archive.start(pickle);
    let offsets = lens.enumerate().map(|(key, len)| archive.payload(&format!("data/{key}"), len)).collect();
    (offsets, archive.finish())
}

/// A tensor that is a row-major view of a storage.
#[derive(Clone, Copy, Debug)]
pub struct StoredView<'a> {
    pub dtype: Dtype,
    /// Storage key.
    pub key: usize,
    /// Elements of the storage, and where in it the view begins.
    pub stored: u64,
    pub offset: u64,
    pub sizes: &'a [u64],
    pub requires_grad: bool,
}

/// A contiguous tensor that fills its storage.
pub(super) fn write_tensor(writer: &mut Writer, dtype: Dtype, key: usize, sizes: &[u64]) {
    let stored = sizes.iter().product();
    write_view(writer, StoredView { dtype, key, stored, offset: 0, sizes, requires_grad: false });
}

/// `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, OrderedDict())`, or v3 with a dtype for an untyped
/// storage.
pub fn write_view(writer: &mut Writer, view: StoredView<'_>) {
    let StoredView { dtype, key, stored, offset, sizes, requires_grad } = view;
    let (rebuild, class, stored) = match dtype.storage_class() {
        Some(class) => ("_rebuild_tensor_v2", ("torch", class), stored),
        None => ("_rebuild_tensor_v3", ("torch.storage", "UntypedStorage"), stored * dtype.itemsize()),
    };
    writer.global("torch._utils", rebuild).mark();
    writer.mark().string("storage").global(class.0, class.1).string(&key.to_string()).string("cpu").uint(stored);
    writer.tuple(5).binpersid();
    writer.uint(offset);
    write_sizes(writer, sizes);
    write_sizes(writer, &contiguous_strides(sizes));
    writer.boolean(requires_grad);
    writer.global("collections", "OrderedDict").empty_tuple().reduce();
    if dtype.storage_class().is_some() {
        writer.tuple(6);
    } else {
        writer.global("torch", dtype.torch_name()).tuple(7);
    }
    writer.reduce();
}

/// `_rebuild_from_type_v2(_rebuild_wrapper_subclass, CLASS, (..),` on a mark: the state and `tuple(4).reduce()` are to
/// follow.
pub(super) fn start_wrapper(
    writer: &mut Writer,
    class: (&str, &str),
    dtype: Dtype,
    shape: &[u64],
    requires_grad: bool,
) {
    writer.global("torch._tensor", "_rebuild_from_type_v2").mark();
    writer.global("torch._utils", "_rebuild_wrapper_subclass").global(class.0, class.1);
    writer.mark().global(class.0, class.1).global("torch", dtype.torch_name());
    write_sizes(writer, shape);
    write_sizes(writer, &contiguous_strides(shape));
    writer.int(0);
    write_strided(writer);
    write_cpu(writer);
    writer.boolean(requires_grad).tuple(8);
}

/// `torch.strided`
pub(super) fn write_strided(writer: &mut Writer) {
    writer.global("torch.serialization", "_get_layout").string("torch.strided").tuple(1).reduce();
}

/// `torch.device('cpu')`
pub(super) fn write_cpu(writer: &mut Writer) {
    writer.global("torch", "device").string("cpu").tuple(1).reduce();
}

/// A tuple of ints.
pub fn write_sizes(writer: &mut Writer, sizes: &[u64]) {
    if sizes.len() > 3 {
        writer.mark();
    }
    for &size in sizes {
        writer.uint(size);
    }
    writer.tuple(sizes.len());
}

/// Lay out one file that holds `state`, every tensor whole.
///
/// # Errors
/// `Unsupported` where a value cannot be pickled.
pub fn reserve(source: &Catalog, state: &Value, name: PathBuf) -> Result<Reservation> {
    let mut reservation = Reservation::default();
    let mut file = OutputFile::new(name);
    let saved = save(source, state, &mut file, &mut Frames::default()).map_err(|error| {
        Error::unsupported(
            format!("the state dict cannot be pickled: {error}"),
            "leave that object out of the checkpoint",
        )
    })?;
    for (id, offset) in saved.tensors {
        reservation.tensors.push(reserved_whole(source, id, FileId(0), offset));
    }
    reservation.files.push(file);
    Ok(reservation)
}

/// A source tensor stored whole and contiguous at an offset of an output file.
pub fn reserved_whole(source: &Catalog, id: TensorId, file: FileId, offset: u64) -> Reserved {
    let TensorEntry { fqn, dtype, shape, .. } = source.tensor(id);
    Reserved { source: id, entry: TensorEntry::whole(fqn.clone(), *dtype, shape.clone(), file, offset) }
}
