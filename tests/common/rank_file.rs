//! Compares a rank file that dtshard wrote with the rank file that PyTorch wrote for the same state. Both files must
//! have the same tree, the same views of the same storages, and the same bytes, including padding.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use dtshard::format::archive::ArchiveSource;
use dtshard::format::torch::reader::{self, ArchiveContents};
use dtshard::format::torch::{TensorNode, View};
use dtshard::storage::{Files, IoMode};
use torch_pickle::pickle::Unknown;

/// An open file, and the contents of its pickle.
pub type Opened = (Files, ArchiveContents);

pub fn read(path: &Path) -> Opened {
    let mut files = Files::new(IoMode::Read);
    let file = files.add(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let contents = reader::read(&files, files.whole(file), "", Unknown::Refuse).unwrap();
    let source = ArchiveSource::new(&files, file);
    let archive = source.archive(files.whole(file)).unwrap();
    for (name, _) in archive.records() {
        archive.check_record(&source, name, &mut |_| Ok(())).unwrap();
    }
    (files, contents)
}

/// Returns all bytes of the storage of a tensor.
pub fn storage(files: &Files, contents: &ArchiveContents, view: &View) -> Vec<u8> {
    if view.storage_bytes == 0 {
        return Vec::new();
    }
    let at = contents.locate(files, view).unwrap();
    files.read(at.file, at.offset - view.offset * view.dtype.itemsize(), view.storage_bytes).unwrap()
}

/// Returns the bytes of the elements of a tensor, in row-major order.
pub fn elements(files: &Files, contents: &ArchiveContents, view: &View) -> Vec<u8> {
    let storage = storage(files, contents, view);
    let width = usize::try_from(view.dtype.itemsize()).unwrap();
    let mut elements = Vec::new();
    for index in 0..view.sizes.iter().product::<u64>() {
        let (mut rest, mut at) = (index, view.offset);
        for (size, stride) in view.sizes.iter().zip(&view.strides).rev() {
            at += rest % size * stride;
            rest /= size;
        }
        let start = usize::try_from(at).unwrap() * width;
        elements.extend_from_slice(&storage[start..start + width]);
    }
    elements
}

/// A comparison of a rank file that dtshard wrote with the rank file of PyTorch.
pub struct Comparison {
    own: Opened,
    real: Opened,
    /// For each storage key in PyTorch's file, the key of the same storage in dtshard's file.
    keys: HashMap<String, String>,
    /// True if the fixture is sharded. Only then strides, padding and shared storages are compared: without sharding,
    /// PyTorch clones tied tensors and keeps their strides.
    is_sharded: bool,
}

impl Comparison {
    pub fn run(own: &Path, real: &Path, is_sharded: bool) {
        let mut comparison = Self { own: read(own), real: read(real), keys: HashMap::new(), is_sharded };
        let (own, contents) = (&comparison.own.1, &comparison.real.1);
        assert!(own.value.same_but_tensors(&contents.value), "{}\n{:#?}", real.display(), own.value);
        let found = |contents: &ArchiveContents| -> Vec<TensorNode> {
            let ids = contents.value.tensor_ids();
            ids.into_iter().map(|id| contents.tensors[id.0 as usize].clone()).collect()
        };
        for (index, pair) in found(own).into_iter().zip(found(contents)).enumerate() {
            let what = format!("{}: tensor {index}", real.display());
            match pair {
                (TensorNode::Plain(own), TensorNode::Plain(real)) => comparison.views(&own, &real, &what),
                (
                    TensorNode::Sharded { dtype, shape, group, local, all, .. },
                    TensorNode::Sharded {
                        dtype: real_dtype,
                        shape: real_shape,
                        group: real_group,
                        local: real,
                        all: real_all,
                        ..
                    },
                ) => {
                    assert_eq!((dtype, shape, group, all), (real_dtype, real_shape, real_group, real_all), "{what}");
                    assert_eq!(local.len(), real.len(), "{what}");
                    for ((own_region, own), (region, real)) in local.iter().zip(&real) {
                        assert_eq!(own_region, region, "{what}");
                        comparison.views(own, real, &what);
                    }
                }
                other => panic!("{what}: {other:?}"),
            }
        }
        let distinct: HashSet<_> = comparison.keys.values().collect();
        assert!(!is_sharded || distinct.len() == comparison.keys.len(), "{}: storages that are one", real.display());
    }

    /// Asserts that two tensors are the same part of the same storage.
    #[track_caller]
    fn views(&mut self, own: &View, real: &View, what: &str) {
        let known = self.keys.entry(real.key.to_string()).or_insert_with(|| own.key.to_string());
        assert_eq!(*known, *own.key, "{what}: another storage");
        let numbers = |view: &View| (view.dtype, view.storage_bytes, view.offset, view.sizes.clone());
        assert_eq!(numbers(own), numbers(real), "{what}");
        let (own_at, real_at) = ((&self.own.0, &self.own.1), (&self.real.0, &self.real.1));
        assert!(elements(own_at.0, own_at.1, own) == elements(real_at.0, real_at.1, real), "{what}: other values");
        if self.is_sharded {
            assert_eq!(own.strides, real.strides, "{what}");
            assert!(storage(own_at.0, own_at.1, own) == storage(real_at.0, real_at.1, real), "{what}: other padding");
        }
    }
}
