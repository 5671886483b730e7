//! Reads another checkpoint of the same model (`options::like`). That checkpoint provides the shapes of parameters and
//! the names of tied parameters. If its format keeps the order of a state dict, that checkpoint also provides the order
//! in which modules registered parameters. Unit of shapes: elements.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use indexmap::IndexMap;

use crate::catalog::flat::FlatLayout;
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Catalog, Fqn, TensorId, contiguous_strides, state_dict};
use crate::error::Result;
use crate::format::fsdp_flat::order::{self, ElementOrder};
use crate::format::{Checkpoint, FlatKnowledge, Format, ReadOptions, SeriesChoice, Want, resolve};
use crate::layout::Dims;

/// The model in the checkpoint that `options::like` names.
#[derive(Debug)]
pub struct LikeModel {
    pub path: PathBuf,
    pub format: Format,
    /// Parameters by name, in the order of the checkpoint. The names have no wrapper prefixes.
    pub params: IndexMap<Fqn, LikeParam>,
    checkpoint: Checkpoint,
}

/// A parameter of the checkpoint that `options::like` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LikeParam {
    id: TensorId,
    pub shape: Dims,
    pub order: ElementOrder,
    /// The first name of the tensor, if the parameter is tied and its key in [`LikeModel::params`] is a further name;
    /// otherwise `None`.
    pub shared_with: Option<Fqn>,
}

impl LikeModel {
    /// Opens the checkpoint and reads the names and shapes of its model.
    ///
    /// # Errors
    ///
    /// The errors of reading a checkpoint.
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

    /// Returns whether two parameters of the checkpoint have equal bytes; false if one of them is not stored in full.
    /// Equal bytes can mean that the parameters are tied, because some checkpoints store tied parameters as separate
    /// copies.
    ///
    /// # Errors
    /// The errors of reading the files.
    pub fn have_equal_bytes(&self, left: &Fqn, right: &Fqn) -> Result<bool> {
        const BLOCK_BYTES: u64 = 1 << 20;
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
        let (left_location, right_location) = (resolve(files, left, left_chunk)?, resolve(files, right, right_chunk)?);
        let contiguous = contiguous_strides(&left.shape);
        if left_location.strides != contiguous || right_location.strides != contiguous {
            return Ok(false);
        }
        let len = left.len_bytes();
        for at in (0..len).step_by(usize::try_from(BLOCK_BYTES).expect("a small number")) {
            let len_read = BLOCK_BYTES.min(len - at);
            if files.read(left_location.file, left_location.offset + at, len_read)?
                != files.read(right_location.file, right_location.offset + at, len_read)?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns a warning about parameters whose elements may have another order in memory in the job than in this
    /// checkpoint.
    pub fn row_major_warning(&self) -> Option<String> {
        let params = self.params.iter().filter(|_| self.format.keeps_order());
        order::row_major_warning(
            &self.path,
            params.map(|(fqn, param)| (fqn, &*param.shape, param.order == ElementOrder::RowMajor)),
        )
    }

    /// Returns whether the parameters are listed in the order in which the module registered them.
    pub fn is_in_registration_order(&self) -> bool {
        let names = || self.params.keys().map(Fqn::as_str);
        let is_registered = || !order::is_sorted(names()) && !order::has_interleaved_modules(names());
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
    for (name, id) in state_dict::model(&catalog.state).tensors {
        let name = Fqn::from(clean_name(name.as_str()));
        let entry = catalog.tensor(id);
        let order = known.get(&name).cloned().unwrap_or_else(|| ElementOrder::from_entry(entry, format));
        let shared_with = first.get(&id).cloned();
        first.entry(id).or_insert_with(|| name.clone());
        found.entry(name).or_insert(LikeParam { id, shape: entry.shape.clone(), order, shared_with });
    }
    found
}
