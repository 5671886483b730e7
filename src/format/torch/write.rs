//! Writing a torch.save file: `torch.load(weights_only=True)` gives the state dict back, with its containers, tied
//! tensors and non-tensor values.

use std::collections::HashMap;
use std::path::PathBuf;

use smallvec::SmallVec;

use crate::catalog::{
    Catalog, Chunk, Dtype, FileLocation, OutputFile, Reservation, Reserved, TensorEntry, TensorId, Value,
    contiguous_strides,
};
use crate::error::{Error, Result};
use crate::format::archive::{Leaves, SharedBytes};
use crate::layout::flat::StorageOrder;
use crate::layout::{Dims, Tile};
use crate::storage::FileId;
use torch_pickle::pickle::{WriteError, Writer};
use torch_pickle::zip::ArchiveWriter;

/// The folder inside the archive. PyTorch takes it from the file's name, but reads any; a fixed one makes equal
/// checkpoints equal files.
pub const PREFIX: &str = "archive";

/// A tensor in another order than by rows is written as boxes that are by rows each: one a filter and place of its
/// kernel. This bounds the memory for a tensor of boxes of a few bytes, and for an archive of such tensors.
const MAX_BOXES: u64 = 1 << 16;
const MAX_BOXES_AN_ARCHIVE: u64 = 1 << 21;

/// One archive appended to a file: a pickled value and the data of the tensors in it.
pub struct SavedArchive {
    /// By storage key.
    pub tensors: Vec<SavedTensor>,
    /// Length of the archive.
    pub len: u64,
}

/// A tensor that has a storage to itself.
pub struct SavedTensor {
    pub id: TensorId,
    /// Of its data.
    pub offset: u64,
    order: SavedOrder,
}

impl SavedTensor {
    /// As a part of an output file.
    pub fn reserved(&self, source: &Catalog, file: FileId) -> Reserved {
        let TensorEntry { fqn, dtype, shape, .. } = source.tensor(self.id);
        let SavedOrder::Kept(order) = &self.order else {
            let entry = TensorEntry::whole(fqn.clone(), *dtype, shape.clone(), file, self.offset);
            return Reserved::new(self.id, entry);
        };
        let mut entry = TensorEntry::new(fqn.clone(), *dtype, shape.clone());
        let mut offset = self.offset;
        for region in order.cut_row_major(shape, 0..entry.numel()) {
            let location = FileLocation::Bytes { file, offset };
            offset += region.numel() * dtype.itemsize();
            entry.chunks.push(Chunk { tile: Tile::from_region(&region), location, strides: None, rank: None });
        }
        Reserved::new(self.id, entry)
    }
}

/// The order of its elements in its storage.
#[derive(Clone, Debug, PartialEq, Eq)]
enum SavedOrder {
    RowMajor,
    /// As it was in memory.
    Kept(StorageOrder),
    /// By rows, though it was another in memory: boxes would be too many.
    Lost,
}

impl SavedOrder {
    fn choose(entry: &TensorEntry, boxes_left: &mut u64) -> Self {
        let order = entry.stride.as_ref().and_then(|stride| StorageOrder::of_strides(&entry.shape, stride));
        let Some(order) = order else { return Self::RowMajor };
        let boxes = order.count_row_major(&entry.shape);
        match boxes_left.checked_sub(boxes) {
            Some(left) if boxes <= MAX_BOXES => {
                *boxes_left = left;
                Self::Kept(order)
            }
            _ => Self::Lost,
        }
    }
}

/// Append the archive that torch.save makes of `value`. A tensor that occurs twice is stored once, with the strides it
/// had in memory.
///
/// # Errors
/// A text where the value cannot be pickled.
pub fn save(
    source: &Catalog,
    value: &Value,
    file: &mut OutputFile,
    frames: &mut SharedBytes,
) -> Result<SavedArchive, WriteError> {
    let mut stored: Vec<(TensorId, SavedOrder)> = Vec::new();
    let mut keys: HashMap<TensorId, usize> = HashMap::new();
    let mut boxes_left = MAX_BOXES_AN_ARCHIVE;
    let mut writer = Writer::new();
    let tensors = |writer: &mut Writer, id: TensorId| {
        let entry = source.tensor(id);
        let key = *keys.entry(id).or_insert_with(|| {
            stored.push((id, SavedOrder::choose(entry, &mut boxes_left)));
            stored.len() - 1
        });
        let is_kept = matches!(stored[key].1, SavedOrder::Kept(_));
        let strides = entry.stride.as_ref().filter(|_| is_kept).map(|stride| stride.as_slice());
        write_view(writer, StoredView { strides, ..StoredView::whole(entry.dtype, key, &entry.shape) });
        Ok(())
    };
    writer.value(value, &mut Leaves { rank: None, tensors })?;
    let lens = stored.iter().map(|(id, _)| source.tensor(*id).len_bytes());
    let (offsets, len) = append(&writer.finish(), lens, file, frames);
    let tensors = stored.into_iter().zip(offsets).map(|((id, order), offset)| SavedTensor { id, offset, order });
    Ok(SavedArchive { tensors: tensors.collect(), len })
}

/// The archives that torch.save makes of one contiguous tensor each. They tell of dtype and sizes and not of their place,
/// so each is made once, however many chunks are alike.
#[derive(Default)]
pub struct TensorArchives {
    /// By dtype and sizes, as a file of its own, and the offset of the data in it.
    known: HashMap<(Dtype, Dims), (OutputFile, u64)>,
    pub frames: SharedBytes,
}

impl TensorArchives {
    /// Append one to a file; gives the offset of its data and its length.
    pub fn append(&mut self, dtype: Dtype, sizes: &[u64], file: &mut OutputFile) -> (u64, u64) {
        let Self { known, frames } = self;
        let (archive, data) = known.entry((dtype, Dims::from_slice(sizes))).or_insert_with(|| {
            let mut writer = Writer::new();
            write_tensor(&mut writer, dtype, 0, sizes);
            let len = sizes.iter().product::<u64>() * dtype.itemsize();
            let mut archive = OutputFile::default();
            let (offsets, _) = append(&writer.finish(), std::iter::once(len), &mut archive, frames);
            (archive, offsets[0])
        });
        (file.append(archive) + *data, archive.len)
    }
}

fn append(
    pickle: &[u8],
    lens: impl Iterator<Item = u64>,
    file: &mut OutputFile,
    frames: &mut SharedBytes,
) -> (SmallVec<[u64; 1]>, u64) {
    let mut archive = ArchiveWriter::new(PREFIX);
    archive.start(pickle);
    let offsets: SmallVec<[u64; 1]> =
        lens.enumerate().map(|(key, len)| archive.payload(&format!("data/{key}"), len)).collect();
    let archive = archive.finish();
    let len = archive.len;
    let base = frames.append(archive, file);
    (offsets.into_iter().map(|offset| base + offset).collect(), len)
}

/// A tensor that is a view of a storage.
#[derive(Clone, Copy, Debug)]
pub struct StoredView<'a> {
    pub dtype: Dtype,
    /// Storage key.
    pub key: usize,
    /// Elements of the storage, and where in it the view begins.
    pub stored: u64,
    pub offset: u64,
    pub sizes: &'a [u64],
    /// `None` is row-major.
    pub strides: Option<&'a [u64]>,
    pub requires_grad: bool,
}

impl<'a> StoredView<'a> {
    /// A contiguous tensor that fills its storage.
    pub fn whole(dtype: Dtype, key: usize, sizes: &'a [u64]) -> Self {
        let stored = sizes.iter().product();
        Self { dtype, key, stored, offset: 0, sizes, strides: None, requires_grad: false }
    }
}

/// A contiguous tensor that fills its storage.
pub(super) fn write_tensor(writer: &mut Writer, dtype: Dtype, key: usize, sizes: &[u64]) {
    write_view(writer, StoredView::whole(dtype, key, sizes));
}

/// `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, OrderedDict())`, or v3 with a dtype for an untyped
/// storage.
pub fn write_view(writer: &mut Writer, view: StoredView<'_>) {
    let StoredView { dtype, key, stored, offset, sizes, strides, requires_grad } = view;
    let (rebuild, class, stored) = match dtype.storage_class() {
        Some(class) => ("_rebuild_tensor_v2", ("torch", class), stored),
        None => ("_rebuild_tensor_v3", ("torch.storage", "UntypedStorage"), stored * dtype.itemsize()),
    };
    writer.global("torch._utils", rebuild).mark();
    writer.mark().string("storage").global(class.0, class.1).string(&key.to_string()).string("cpu").uint(stored);
    writer.tuple(5).binpersid();
    writer.uint(offset);
    write_sizes(writer, sizes);
    match strides {
        Some(strides) => write_sizes(writer, strides),
        None => write_sizes(writer, &contiguous_strides(sizes)),
    }
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

/// `cls.__new__(cls)`
pub(super) fn instance(writer: &mut Writer, class: (&str, &str)) {
    writer.global(class.0, class.1).empty_tuple().newobj();
}

pub(super) fn tuple<T>(writer: &mut Writer, items: &[T], mut each: impl FnMut(&mut Writer, &T)) {
    if items.len() > 3 {
        writer.mark();
    }
    for item in items {
        each(writer, item);
    }
    writer.tuple(items.len());
}

pub(super) fn list<T>(writer: &mut Writer, items: &[T], mut each: impl FnMut(&mut Writer, &T)) {
    let Ok(()): Result<(), std::convert::Infallible> = writer.empty_list().extend_list(items.iter(), |writer, item| {
        each(writer, item);
        Ok(())
    });
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

/// Lay out one file that holds `state`, every tensor whole and in the order it had in memory.
///
/// # Errors
/// `Unsupported` where a value cannot be pickled.
pub fn reserve(source: &Catalog, state: &Value, name: PathBuf) -> Result<Reservation> {
    let mut reservation = Reservation::default();
    let mut file = OutputFile::new(name);
    let saved = save(source, state, &mut file, &mut SharedBytes::default()).map_err(|error| {
        Error::unsupported(
            format!("the state dict cannot be pickled: {error}"),
            "leave that object out of the checkpoint",
        )
    })?;
    for tensor in &saved.tensors {
        if tensor.order == SavedOrder::Lost {
            let fqn = &source.tensor(tensor.id).fqn;
            reservation.notes.push(format!("{fqn}: written by rows, its order in memory is too fragmented to keep"));
        }
        reservation.tensors.push(tensor.reserved(source, FileId(0)));
    }
    reservation.files.push(file);
    Ok(reservation)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::permuted_stride;

    fn entry(shape: &[u64], strides: &[u64]) -> TensorEntry {
        let stride = permuted_stride(shape, &strides.into());
        TensorEntry { stride: stride.map(Box::new), ..TensorEntry::new("w".into(), Dtype::F32, shape.into()) }
    }

    fn written(entry: TensorEntry) -> (SavedTensor, Reserved) {
        let mut catalog = Catalog::empty();
        let id = catalog.push_tensor(entry);
        let mut saved =
            save(&catalog, &Value::Tensor(id), &mut OutputFile::new("x"), &mut SharedBytes::default()).unwrap();
        let tensor = saved.tensors.remove(0);
        let reserved = tensor.reserved(&catalog, FileId(0));
        (tensor, reserved)
    }

    #[test]
    fn an_order_of_memory_is_written_as_boxes() {
        let (tensor, reserved) = written(entry(&[2, 3, 2, 2], &[12, 1, 6, 3]));
        let chunks: Vec<_> = reserved.entry.chunks.iter().map(|chunk| (chunk.tile, chunk.location)).collect();
        assert_eq!(chunks.len(), 8);
        let (last, place) = chunks.last().unwrap();
        assert_eq!(last.as_region().unwrap().to_string(), "[1:2, 0:3, 1:2, 1:2]");
        assert_eq!(*place, FileLocation::Bytes { file: FileId(0), offset: tensor.offset + 7 * 12 });
        reserved.entry.tilings().unwrap();
    }

    #[test]
    fn what_is_not_dense_is_written_by_rows() {
        for (shape, strides) in
            [([4, 3], [0, 1]), ([3, 3], [12, 1]), ([4, 3], [3, 1]), ([0, 3], [1, 7]), ([1, 3], [u64::MAX, 1])]
        {
            let (tensor, reserved) = written(entry(&shape, &strides));
            assert_eq!((tensor.order, reserved.entry.chunks.len()), (SavedOrder::RowMajor, 1), "{strides:?}");
        }
    }

    #[test]
    fn boxes_without_end_are_not_made() {
        let n = MAX_BOXES + 1;
        assert_eq!(written(entry(&[2, n], &[1, 2])).0.order, SavedOrder::Lost);
        assert!(matches!(written(entry(&[n, 2], &[1, n])).0.order, SavedOrder::Kept(_)));
        let mut boxes_left = 8;
        let conv = entry(&[2, 3, 2, 2], &[12, 1, 6, 3]);
        assert!(matches!(SavedOrder::choose(&conv, &mut boxes_left), SavedOrder::Kept(_)));
        assert_eq!((SavedOrder::choose(&conv, &mut boxes_left), boxes_left), (SavedOrder::Lost, 0));
    }
}
