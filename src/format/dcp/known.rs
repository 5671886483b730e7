//! A cache that speeds up locating the tensor data of items. An item is one chunk in a DCP data file, stored as a small
//! `torch.save` archive. The *frame* of an item is all bytes of the item except the tensor data.
//!
//! All items with the same dtype and chunk shape have equal frames, so a checkpoint has few different frames. Each
//! thread keeps the most recent frames. If the frame of an item equals a kept frame, the tensor data of the item is
//! located without reading the ZIP directory and the pickle of the item. The cache is bounded and never changes a
//! result (see [`Frame`]).

use std::cell::RefCell;
use std::collections::VecDeque;

use crate::catalog::{ChecksummedRange, Dtype, StridedLocation};
use crate::error::Result;
use crate::format::archive::ArchiveSource;
use crate::format::torch::View;
use crate::layout::Dims;
use crate::storage::{FileRange, Files};
use torch_pickle::zip::Frame;

/// The maximum number of frames that a thread keeps. A model has fewer different shapes. Each frame takes a few kB.
const FRAMES: usize = 32;

struct KnownRecords {
    /// The dtype, sizes and strides of the tensor, and its offset in its storage. They are equal in all archives with
    /// this frame.
    view: View,
    frame: Frame,
}

#[derive(Default)]
struct Frames {
    /// The cached frames; the most recently added frame is first.
    known: VecDeque<KnownRecords>,
    buffer: Vec<u8>,
}

thread_local! {
    static FRAMES_MET: RefCell<Frames> = RefCell::default();
}

/// Returns the location of the tensor data of an item, if the frame of the item (its bytes except the tensor data)
/// equals a frame in the cache.
///
/// # Errors
/// `Io`.
pub fn recall(files: &Files, stretch: FileRange, dtype: Dtype, sizes: &Dims) -> Result<Option<StridedLocation>> {
    FRAMES_MET.with_borrow_mut(|Frames { known, buffer }| {
        let source = ArchiveSource::new(files, stretch.file);
        for KnownRecords { view, frame } in known {
            if view.dtype != dtype || view.sizes != *sizes {
                continue;
            }
            let range = stretch.offset..stretch.offset + stretch.len;
            let found = frame.find(&source, range, buffer).map_err(|error| source.error(error))?;
            if let Some((data, record)) = found {
                let offset = data + view.offset * dtype.itemsize();
                let strides = view.strides.clone();
                return Ok(Some(StridedLocation {
                    file: stretch.file,
                    offset,
                    strides,
                    checksum: ChecksummedRange::of_record(record, data),
                }));
            }
        }
        Ok(None)
    })
}

/// Adds a frame to the cache. The caller has read the ZIP directory and the pickle of an item with this frame.
pub fn remember(view: &View, frame: Frame) {
    FRAMES_MET.with_borrow_mut(|Frames { known, .. }| {
        known.truncate(FRAMES - 1);
        known.push_front(KnownRecords { view: view.clone(), frame });
    });
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use super::*;
    use crate::catalog::{FileLocation, TensorEntry};
    use crate::format::dcp::{read, resolve};
    use crate::storage::IoMode;
    use torch_pickle::pickle::Unknown;

    /// Returns two items with the same frame: for each item the tensor, the index of the chunk, and the byte range.
    fn alike(tensors: &[TensorEntry]) -> [(&TensorEntry, u32, FileRange); 2] {
        let mut met = HashMap::new();
        for entry in tensors {
            for chunk in 0..entry.chunks.len() {
                let FileLocation::Item(stretch) = entry.chunks.location(chunk) else { continue };
                let chunk = u32::try_from(chunk).unwrap();
                let key = (entry.dtype, entry.chunks.sizes(chunk as usize), stretch.len);
                if let Some(first) = met.insert(key, (entry, chunk, stretch)) {
                    return [first, (entry, chunk, stretch)];
                }
            }
        }
        panic!("expected two items with the same frame");
    }

    /// Flips two bits of each byte of an item, one bit at a time, and locates the tensor data of the damaged item.
    /// Asserts that the result (or the error) is the same with the frame of the undamaged item in the cache and with an
    /// empty cache.
    #[test]
    fn cached_frames_do_not_change_results() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/fsdp4/dcp");
        let folder = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(source).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        for io in [IoMode::Mmap, IoMode::Read] {
            let mut files = Files::new(io);
            let catalog = read(&mut files, folder.path(), Unknown::Refuse, false).unwrap().0;
            let [first, (entry, chunk, stretch)] = alike(&catalog.tensors);
            let file = std::fs::File::options().write(true).open(files.path(stretch.file)).unwrap();
            let mut item = files.read(stretch.file, stretch.offset, stretch.len).unwrap();
            let locate_item = |in_new_thread: bool| {
                let locate = || resolve(&files, entry, chunk, stretch).map_err(|error| error.to_string());
                if in_new_thread { std::thread::scope(|scope| scope.spawn(locate).join().unwrap()) } else { locate() }
            };
            let locate_first = || resolve(&files, first.0, first.1, first.2).unwrap();
            let mut located = 0;
            for at in 0..item.len() {
                for flip in [0x01, 0x80] {
                    item[at] ^= flip;
                    file.write_all_at(&item[at..=at], stretch.offset + at as u64).unwrap();
                    locate_first();
                    let found = locate_item(false);
                    assert_eq!(found, locate_item(true), "byte {at}");
                    located += usize::from(found.is_ok());
                    item[at] ^= flip;
                    file.write_all_at(&item[at..=at], stretch.offset + at as u64).unwrap();
                }
            }
            assert!(located > 0 && located < 2 * item.len());
            let sizes = entry.chunks.sizes(chunk as usize);
            locate_first();
            assert_eq!(recall(&files, stretch, entry.dtype, &sizes).unwrap(), locate_item(true).ok());
        }
    }
}
