//! What another checkpoint of the same model tells of its parameters: shapes, which of them are one, and, where its
//! format keeps the order of a state dict, the order of registration.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use indexmap::IndexMap;

use crate::catalog::flat::FlatLayout;
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Catalog, Fqn, TensorId, contiguous_strides, model};
use crate::error::Result;
use crate::format::fsdp_flat::order::{self, ElementOrder};
use crate::format::{Checkpoint, FlatKnowledge, Format, ReadOptions, SeriesChoice, Want, resolve};
use crate::layout::Dims;

/// The model of a checkpoint.
#[derive(Debug)]
pub struct LikeModel {
    pub path: PathBuf,
    pub format: Format,
    /// By name, without wrappers, in the order of the checkpoint.
    pub params: IndexMap<Fqn, LikeParam>,
    checkpoint: Checkpoint,
}

/// A tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LikeParam {
    id: TensorId,
    pub shape: Dims,
    pub order: ElementOrder,
    /// The first name of the same tensor.
    pub shared_with: Option<Fqn>,
}

impl LikeModel {
    /// # Errors
    /// As reading a checkpoint.
    pub fn open(path: &Path) -> Result<Self> {
        let options = ReadOptions {
            want: Want::Model,
            series: SeriesChoice::Model,
            flat: FlatKnowledge::default(),
            ..ReadOptions::default()
        };
        let checkpoint = Checkpoint::open(path, &options).map_err(|error| error.within(path))?;
        Ok(Self {
            path: path.to_path_buf(),
            format: checkpoint.format,
            params: params(&checkpoint.catalog, checkpoint.format),
            checkpoint,
        })
    }

    /// Whether two tensors that lie whole in files have the same bytes: tied weights of a full state dict are copies.
    ///
    /// # Errors
    /// As reading.
    pub fn are_copies(&self, left: &Fqn, right: &Fqn) -> Result<bool> {
        const STRIP_BYTES: u64 = 1 << 20;
        let Checkpoint { files, catalog, .. } = &self.checkpoint;
        let whole = |name: &Fqn| {
            let entry = catalog.tensor(self.params.get(name)?.id);
            let chunk = (0..entry.chunks.len()).find(|chunk| entry.chunks.sizes(*chunk) == entry.shape)?;
            Some((entry, u32::try_from(chunk).ok()?))
        };
        let (Some((left, left_chunk)), Some((right, right_chunk))) = (whole(left), whole(right)) else {
            return Ok(false);
        };
        if left.dtype != right.dtype || left.shape != right.shape {
            return Ok(false);
        }
        let (one, other) = (resolve(files, left, left_chunk)?, resolve(files, right, right_chunk)?);
        let contiguous = contiguous_strides(&left.shape);
        if one.strides != contiguous || other.strides != contiguous {
            return Ok(false);
        }
        let len = left.len_bytes();
        for at in (0..len).step_by(usize::try_from(STRIP_BYTES).expect("a small number")) {
            let strip = STRIP_BYTES.min(len - at);
            if files.read(one.file, one.offset + at, strip)? != files.read(other.file, other.offset + at, strip)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What to say of parameters whose elements may lie in another order than here.
    #[must_use]
    pub fn by_rows(&self) -> Option<String> {
        let params = self.params.iter().filter(|_| self.format.keeps_order());
        order::by_rows(
            &self.path,
            params.map(|(fqn, param)| (fqn, &*param.shape, param.order == ElementOrder::RowMajor)),
        )
    }

    /// Whether parameters come in the order in which the module registered them.
    #[must_use]
    pub fn is_ordered(&self) -> bool {
        let names = || self.params.keys().map(Fqn::as_str);
        let is_registered = || !order::is_sorted(names()) && !order::is_mixed(names());
        self.format == Format::FsdpFlat || self.format.keeps_order() && is_registered()
    }
}

fn params(catalog: &Catalog, format: Format) -> IndexMap<Fqn, LikeParam> {
    let flat = catalog.flat.iter().flat_map(FlatLayout::params);
    let known: HashMap<&Fqn, ElementOrder> = flat
        .map(|(_, param)| (&param.fqn, param.stride.clone().map_or(ElementOrder::RowMajor, ElementOrder::Strides)))
        .collect();
    let mut first: HashMap<TensorId, Fqn> = HashMap::new();
    let mut found = IndexMap::new();
    for (name, id) in model::model(&catalog.state).tensors {
        let name = Fqn::from(clean_name(name.as_str()));
        let entry = catalog.tensor(id);
        let order = known.get(&name).cloned().unwrap_or_else(|| ElementOrder::of(entry, format));
        let shared_with = first.get(&id).cloned();
        first.entry(id).or_insert_with(|| name.clone());
        found.entry(name).or_insert(LikeParam { id, shape: entry.shape.clone(), order, shared_with });
    }
    found
}
