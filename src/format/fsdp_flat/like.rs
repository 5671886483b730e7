//! What another checkpoint of the same model tells of its parameters: shapes, which of them are one, and, where its
//! format keeps the order of a state dict, the order of registration.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use indexmap::IndexMap;

use super::order;
use crate::catalog::flat::FlatLayout;
use crate::catalog::path::clean_name;
use crate::catalog::{Catalog, Fqn, TensorEntry, TensorId, contiguous_strides, model};
use crate::error::Result;
use crate::format::{Checkpoint, FlatKnowledge, Format, ReadOptions, SeriesChoice, Want, resolve};
use crate::layout::Dims;

/// The model of a checkpoint.
#[derive(Debug)]
pub struct Like {
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
    pub order: Order,
    /// The first name of the same tensor.
    pub shared_with: Option<Fqn>,
}

/// The order in which a module keeps the elements of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    RowMajor,
    Strides(Dims),
    /// The format keeps only values, and `channels_last` would be another order.
    Unknown,
}

impl Like {
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
            let chunk = (0..entry.chunks.len()).find(|chunk| entry.chunks.tile(*chunk).sizes() == entry.shape)?;
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
        let params = self.params.iter().filter(|_| matches!(self.format, Format::Torch | Format::TorchRanks));
        by_rows(&self.path, params.map(|(fqn, param)| (fqn, &*param.shape, param.order == Order::RowMajor)))
    }

    /// Whether parameters come in the order in which the module registered them.
    #[must_use]
    pub fn is_ordered(&self) -> bool {
        match self.format {
            Format::FsdpFlat => true,
            Format::Torch | Format::TorchRanks => !order::is_sorted(self.params.keys().map(Fqn::as_str)),
            _ => false,
        }
    }
}

fn params(catalog: &Catalog, format: Format) -> IndexMap<Fqn, LikeParam> {
    let flat = catalog.flat.iter().flat_map(FlatLayout::params);
    let known: HashMap<&Fqn, Order> =
        flat.map(|(_, param)| (&param.fqn, param.stride.clone().map_or(Order::RowMajor, Order::Strides))).collect();
    let mut first: HashMap<TensorId, Fqn> = HashMap::new();
    let mut found = IndexMap::new();
    for (name, id) in model::model(&catalog.state).tensors {
        let name = Fqn::from(clean_name(name.as_str()));
        let entry = catalog.tensor(id);
        let order = known.get(&name).cloned().unwrap_or_else(|| order_of(entry, format));
        let shared_with = first.get(&id).cloned();
        first.entry(id).or_insert_with(|| name.clone());
        found.entry(name).or_insert(LikeParam { id, shape: entry.shape.clone(), order, shared_with });
    }
    found
}

/// The order of a tensor that lies whole in a torch file is that of the module's.
#[must_use]
pub fn order_of(entry: &TensorEntry, format: Format) -> Order {
    if matches!(format, Format::Torch | Format::TorchRanks) {
        let mut chunks = entry.chunks.iter();
        if let Some(whole) = chunks.find(|chunk| chunk.tile.sizes() == entry.shape) {
            return match whole.strides.filter(|strides| *strides != contiguous_strides(&entry.shape)) {
                // What lies with holes was not a parameter when it was saved.
                Some(strides) if crate::layout::flat::StorageOrder::of_strides(&entry.shape, &strides).is_some() => {
                    Order::Strides(strides)
                }
                Some(_) => Order::Unknown,
                None => Order::RowMajor,
            };
        }
    }
    if may_be_channels_last(&entry.shape) { Order::Unknown } else { Order::RowMajor }
}

/// Whether `channels_last` is another order than that by rows.
fn may_be_channels_last(shape: &[u64]) -> bool {
    shape.len() >= 4 && shape[1] > 1 && shape[2..].iter().any(|size| *size > 1)
}

/// What to say where weights lie by rows in a file from which the order of their elements is taken: whoever wrote it may
/// have brought them into that order.
#[must_use]
pub fn by_rows<'a>(path: &Path, params: impl Iterator<Item = (&'a Fqn, &'a [u64], bool)>) -> Option<String> {
    let mut doubtful = params.filter(|(_, shape, is_by_rows)| *is_by_rows && may_be_channels_last(shape));
    let (first, ..) = doubtful.next()?;
    let more = match doubtful.count() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Some(format!(
        "{first}{more}: by rows in {}, so taken to be so in the job; where the module is channels_last, --flat-layout \
         FILE has to say it",
        path.display()
    ))
}
