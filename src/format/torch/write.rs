//! Writes a torch.save file that `torch.load(weights_only=True)` reads back as a state dict equal to the given state
//! dict, including containers, tied tensors and values that are not tensors. Unit of offsets and lengths: bytes in
//! files, elements in storages.

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

/// The name of the folder inside a written archive. PyTorch writes the name of the file as the name of this folder, but
/// reads archives with any folder name. dtshard uses a fixed name, so that equal checkpoints have equal files.
pub const PREFIX: &str = "archive";

/// The maximum number of boxes for one tensor that is not row-major. Such a tensor is written as row-major boxes, for
/// example one box per filter and kernel position. [`MAX_BOXES_PER_ARCHIVE`] is the maximum for all such tensors of an
/// archive together. Both constants limit the memory that boxes take.
const MAX_BOXES: u64 = 1 << 16;
const MAX_BOXES_PER_ARCHIVE: u64 = 1 << 21;

/// A torch.save archive in an output file, which contains a pickled value and the data of its tensors.
pub struct SavedArchive {
    /// The tensors of the archive. The index of a tensor is the key of its storage.
    pub tensors: Vec<SavedTensor>,
    /// The length of the archive in bytes.
    pub len: u64,
}

/// A tensor in a written archive. Each tensor has a storage of its own.
pub struct SavedTensor {
    pub id: TensorId,
    /// The offset of the tensor's data in the file, in bytes.
    pub offset: u64,
    order: SavedOrder,
}

impl SavedTensor {
    /// Returns the reservation entry of the tensor, which has the position of the tensor's data in the output file.
    pub fn reserved(&self, source: &Catalog, file: FileId) -> Reserved {
        let TensorEntry { fqn, dtype, shape, .. } = source.tensor(self.id);
        let SavedOrder::Permuted(order) = &self.order else {
            let entry = TensorEntry::whole(fqn.clone(), *dtype, shape.clone(), file, self.offset);
            return Reserved::new(self.id, entry);
        };
        let mut entry = TensorEntry::new(fqn.clone(), *dtype, shape.clone());
        let mut offset = self.offset;
        for region in order.cut_row_major(shape, 0..entry.numel()) {
            let location = FileLocation::Bytes { file, offset };
            offset += region.numel() * dtype.itemsize();
            entry.chunks.push(Chunk {
                tile: Tile::from_region(&region),
                location,
                strides: None,
                rank: None,
                view: None,
            });
        }
        Reserved::new(self.id, entry)
    }
}

/// The order of a tensor's elements in its storage.
#[derive(Clone, Debug, PartialEq, Eq)]
enum SavedOrder {
    RowMajor,
    /// The elements have the order that the strides in the catalog describe, which is the order in the memory of the
    /// job.
    Permuted(StorageOrder),
    /// The elements have row-major order, although the strides in the catalog describe another order. That order would
    /// need too many boxes.
    TooFragmented,
}

impl SavedOrder {
    fn choose(entry: &TensorEntry, boxes_left: &mut u64) -> Self {
        let order = entry.stride.as_ref().and_then(|stride| StorageOrder::of_strides(&entry.shape, stride));
        let Some(order) = order else { return Self::RowMajor };
        let boxes = order.count_row_major(&entry.shape);
        match boxes_left.checked_sub(boxes) {
            Some(left) if boxes <= MAX_BOXES => {
                *boxes_left = left;
                Self::Permuted(order)
            }
            _ => Self::TooFragmented,
        }
    }
}

/// Appends an archive to a file, as torch.save writes it for `value`. A tensor that occurs several times in `value` is
/// stored once. Tensors get the strides that the catalog records.
///
/// # Errors
/// A message about the reason why the value cannot be pickled.
pub fn save(
    source: &Catalog,
    value: &Value,
    file: &mut OutputFile,
    frames: &mut SharedBytes,
) -> Result<SavedArchive, WriteError> {
    let mut stored: Vec<(TensorId, SavedOrder)> = Vec::new();
    let mut keys: HashMap<TensorId, usize> = HashMap::new();
    let mut boxes_left = MAX_BOXES_PER_ARCHIVE;
    let mut writer = Writer::new();
    let tensors = |writer: &mut Writer, id: TensorId| {
        let entry = source.tensor(id);
        let key = *keys.entry(id).or_insert_with(|| {
            stored.push((id, SavedOrder::choose(entry, &mut boxes_left)));
            stored.len() - 1
        });
        let is_kept = matches!(stored[key].1, SavedOrder::Permuted(_));
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

/// A cache of archives that contain a single contiguous tensor, as `torch.save` writes them. Except for tensor data, an
/// archive depends only on the dtype and the sizes of the tensor. So one cached archive is used for all tensors with
/// equal dtype and sizes.
#[derive(Default)]
pub struct TensorArchives {
    /// For each dtype and sizes, the layout of the archive as a separate file, and the offset of the tensor data in
    /// this file, in bytes.
    archives: HashMap<(Dtype, Dims), (OutputFile, u64)>,
    pub frames: SharedBytes,
}

impl TensorArchives {
    /// Appends an archive for a tensor of this dtype and these sizes to `file`. Returns the offset of the tensor data
    /// in `file` and the length of the archive, in bytes.
    pub fn append(&mut self, dtype: Dtype, sizes: &[u64], file: &mut OutputFile) -> (u64, u64) {
        let Self { archives: known, frames } = self;
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

/// A tensor to write: a view of a storage.
#[derive(Clone, Copy, Debug)]
pub struct StoredView<'a> {
    pub dtype: Dtype,
    /// The key of the storage, which is the number in the name of its zip record `data/KEY`.
    pub key: usize,
    /// The number of elements in the storage.
    pub stored: u64,
    /// The index of the first element of the view in the storage.
    pub offset: u64,
    pub sizes: &'a [u64],
    /// The strides of the view; `None` for row-major order.
    pub strides: Option<&'a [u64]>,
    pub requires_grad: bool,
}

impl<'a> StoredView<'a> {
    /// Returns a contiguous view that covers its storage completely.
    pub fn whole(dtype: Dtype, key: usize, sizes: &'a [u64]) -> Self {
        let stored = sizes.iter().product();
        Self { dtype, key, stored, offset: 0, sizes, strides: None, requires_grad: false }
    }
}

/// Writes a contiguous tensor that covers its storage completely.
pub(super) fn write_tensor(writer: &mut Writer, dtype: Dtype, key: usize, sizes: &[u64]) {
    write_view(writer, StoredView::whole(dtype, key, sizes));
}

/// Writes `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, OrderedDict())`. If the storage is untyped,
/// writes `_rebuild_tensor_v3`, which has the dtype as a further argument.
pub fn write_view(writer: &mut Writer, view: StoredView<'_>) {
    write_rebuild_function(writer, view.dtype);
    write_rebuild_arguments(writer, view);
    writer.reduce();
}

/// Writes a tensor with attributes: `_rebuild_from_type_v2(_rebuild_tensor_v2, Tensor, (storage, ...), ATTRIBUTES)`.
/// The function `attributes` writes a dict.
pub(super) fn write_tensor_with_attributes(
    writer: &mut Writer,
    (dtype, key, sizes): (Dtype, usize, &[u64]),
    attributes: impl FnOnce(&mut Writer),
) {
    writer.global("torch._tensor", "_rebuild_from_type_v2").mark();
    write_rebuild_function(writer, dtype);
    writer.global("torch", "Tensor");
    write_rebuild_arguments(writer, StoredView::whole(dtype, key, sizes));
    attributes(writer);
    writer.tuple(4).reduce();
}

fn write_rebuild_function(writer: &mut Writer, dtype: Dtype) {
    let rebuild = if dtype.storage_class().is_some() { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" };
    writer.global("torch._utils", rebuild);
}

fn write_rebuild_arguments(writer: &mut Writer, view: StoredView<'_>) {
    let StoredView { dtype, key, stored, offset, sizes, strides, requires_grad } = view;
    let (class, stored) = match dtype.storage_class() {
        Some(class) => (("torch", class), stored),
        None => (("torch.storage", "UntypedStorage"), stored * dtype.itemsize()),
    };
    writer.mark();
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
}

/// Writes the beginning of the call `_rebuild_from_type_v2(_rebuild_wrapper_subclass, CLASS, (..), STATE)`: the
/// function, a mark, and the first three arguments. The caller must write STATE and `tuple(4).reduce()` next.
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

/// Writes an instance of a class, made by `cls.__new__(cls)`.
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

/// Writes the value `torch.strided`, which is the memory layout of a tensor.
pub(super) fn write_strided(writer: &mut Writer) {
    writer.global("torch.serialization", "_get_layout").string("torch.strided").tuple(1).reduce();
}

/// Writes the device `torch.device('cpu')`.
pub(super) fn write_cpu(writer: &mut Writer) {
    writer.global("torch", "device").string("cpu").tuple(1).reduce();
}

/// Writes a tuple of integers.
pub fn write_sizes(writer: &mut Writer, sizes: &[u64]) {
    if sizes.len() > 3 {
        writer.mark();
    }
    for &size in sizes {
        writer.uint(size);
    }
    writer.tuple(sizes.len());
}

/// Lays out one torch.save file that contains `state`. Every tensor is written in full. If the catalog records the
/// strides of a tensor, the elements are written in the order of these strides.
///
/// # Errors
/// `Unsupported` if a value cannot be pickled.
pub fn reserve(source: &Catalog, state: &Value, name: PathBuf) -> Result<Reservation> {
    let mut reservation = Reservation::default();
    let mut file = OutputFile::new(name);
    let saved = save(source, state, &mut file, &mut SharedBytes::default()).map_err(|error| {
        Error::unsupported(
            format!("the state dict cannot be pickled: {error}"),
            "remove that object from the checkpoint",
        )
    })?;
    for tensor in &saved.tensors {
        if tensor.order == SavedOrder::TooFragmented {
            let fqn = &source.tensor(tensor.id).fqn;
            reservation.notes.push(format!(
                "`{fqn}` is written in row-major order, because its order in memory is too fragmented to keep"
            ));
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
    fn permuted_tensor_is_written_as_boxes() {
        let (tensor, reserved) = written(entry(&[2, 3, 2, 2], &[12, 1, 6, 3]));
        let chunks: Vec<_> = reserved.entry.chunks.iter().map(|chunk| (chunk.tile, chunk.location)).collect();
        assert_eq!(chunks.len(), 8);
        let (last, place) = chunks.last().unwrap();
        assert_eq!(last.as_region().unwrap().to_string(), "[1:2, 0:3, 1:2, 1:2]");
        assert_eq!(*place, FileLocation::Bytes { file: FileId(0), offset: tensor.offset + 7 * 12 });
        reserved.entry.tilings().unwrap();
    }

    #[test]
    fn overlapping_or_row_major_tensor_is_one_chunk() {
        for (shape, strides) in
            [([4, 3], [0, 1]), ([3, 3], [12, 1]), ([4, 3], [3, 1]), ([0, 3], [1, 7]), ([1, 3], [u64::MAX, 1])]
        {
            let (tensor, reserved) = written(entry(&shape, &strides));
            assert_eq!((tensor.order, reserved.entry.chunks.len()), (SavedOrder::RowMajor, 1), "{strides:?}");
        }
    }

    #[test]
    fn too_many_boxes_fall_back_to_row_major() {
        let n = MAX_BOXES + 1;
        assert_eq!(written(entry(&[2, n], &[1, 2])).0.order, SavedOrder::TooFragmented);
        assert!(matches!(written(entry(&[n, 2], &[1, n])).0.order, SavedOrder::Permuted(_)));
        let mut boxes_left = 8;
        let conv = entry(&[2, 3, 2, 2], &[12, 1, 6, 3]);
        assert!(matches!(SavedOrder::choose(&conv, &mut boxes_left), SavedOrder::Permuted(_)));
        assert_eq!((SavedOrder::choose(&conv, &mut boxes_left), boxes_left), (SavedOrder::TooFragmented, 0));
    }
}
