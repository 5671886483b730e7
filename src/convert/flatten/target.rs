//! The flat layout to write: that of a file, of the source or of a checkpoint like it, or derived from the order of a
//! state dict; for the ranks that are asked for.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use super::super::source::ConversionSource;
use super::numbering;
use super::units::{self, OrderedModel, WrapPolicy};
use crate::catalog::flat::{FlatLayout, default_align};
use crate::catalog::model::{self, Model};
use crate::catalog::modules::{self, module_of};
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Dtype, Fqn, TensorId, Value};
use crate::convert::options::{ConvertOptions, FlattenOptions, Strategy};
use crate::error::{Error, Result};
use crate::format::fsdp_flat::order;
use crate::format::{Checkpoint, TensorStorage, fsdp_flat};
use crate::layout::Pattern;

/// What files say grows with the square of it.
const MAX_RANKS: u32 = 1 << 14;

/// What a target starts from.
struct FlatBase {
    layout: FlatLayout,
    /// From nothing but the order of a state dict, which knows no ranks.
    derived: bool,
    notes: Vec<String>,
}

/// How many ranks share a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GroupSize {
    /// As the layout says, or all.
    #[default]
    Unsaid,
    All,
    Of(u32),
}

/// What is asked for.
#[derive(Default)]
pub struct FlattenRequest {
    /// Of the model, from a file. Where SRC is flat, that says how to read it, and nothing here.
    layout: Option<FlatLayout>,
    /// What an optimizer numbers with `use_orig_params`, from the same file.
    numbered: Option<Vec<Vec<Fqn>>>,
    pub wrap: Vec<Pattern>,
    pub buffers: Vec<Pattern>,
    pub world_size: Option<u32>,
    pub group: GroupSize,
    pub use_orig_params: Option<bool>,
    pub forward_dtype: Option<Dtype>,
}

impl FlattenRequest {
    /// # Errors
    /// As reading the checkpoint and the layout that arguments name.
    pub fn of_arguments(args: &FlattenOptions, source: &ConversionSource) -> Result<Self> {
        let flat = &args.flat;
        let group = match (flat.strategy, flat.shard_group_size) {
            (None, None) => GroupSize::Unsaid,
            (Some(Strategy::FullShard), None) => GroupSize::All,
            (Some(Strategy::NoShard), None) => GroupSize::Of(1),
            (None | Some(Strategy::HybridShard), Some(size)) => GroupSize::Of(size),
            (Some(Strategy::HybridShard), None) => {
                return Err(Error::usage(
                    "options::strategy hybrid-shard: how many ranks share one copy?",
                    "say it with options::shard_group_size N; FSDP takes the ranks of a node",
                ));
            }
            (Some(_), Some(_)) => {
                return Err(Error::usage(
                    "options::shard_group_size is for options::strategy hybrid-shard",
                    "leave one of them out",
                ));
            }
        };
        let forward_dtype = flat.forward_dtype.as_deref().map(|name| {
            let known = Dtype::from_name(name).filter(|dtype| dtype.is_float());
            known.ok_or_else(|| {
                Error::usage(
                    format!("options::forward_dtype {name}: no dtype of floats"),
                    "f32, bf16 and f16 are usual",
                )
            })
        });
        let wish = Self {
            wrap: Pattern::parse_all(&flat.wrap)?,
            buffers: Pattern::parse_all(&flat.buffers)?,
            world_size: flat.world_size,
            group,
            use_orig_params: flat.use_orig_params,
            forward_dtype: forward_dtype.transpose()?,
            ..Self::default()
        };
        wish.with_layout(&args.convert, flat.layout.as_deref(), source)
    }

    /// With what a layout file, or else `--flat-layout`, says of the target.
    ///
    /// # Errors
    /// As reading the file, `Usage` where both say the same.
    pub fn with_layout(
        mut self,
        args: &ConvertOptions,
        target: Option<&Path>,
        source: &ConversionSource,
    ) -> Result<Self> {
        let of_source = source.checkpoint.catalog.flat.is_some();
        let given = args.source.flat_layout.as_deref();
        if let (Some(_), Some(_), false) = (target, given, of_source) {
            return Err(Error::usage(
                "options::layout and options::flat_layout: both say the units",
                "leave one of them out",
            ));
        }
        if let Some(path) = target.or(given) {
            let layout = fsdp_flat::document::read(path)?;
            self.numbered = layout.optimizer.clone().filter(|_| layout.use_orig_params);
            self.layout = Some(layout).filter(|_| target.is_some() || !of_source);
        }
        Ok(self)
    }

    /// The layout of the target, and what to tell the user.
    ///
    /// # Errors
    /// `Unsupported` where an order would be a guess, `Usage` for wishes that contradict each other.
    pub fn layout(&self, source: &ConversionSource) -> Result<(FlatLayout, Vec<String>)> {
        let FlatBase { layout: base, derived, notes } = self.base(source)?;
        let (world_size, shard_group_size) = self.ranks(&base, derived)?;
        let use_orig_params = self.use_orig_params.unwrap_or(base.use_orig_params);
        if let (false, Some(dtype)) = (use_orig_params, self.forward_dtype) {
            return Err(Error::usage(
                format!("options::forward_dtype {dtype}: without use_orig_params nothing is aligned"),
                "leave it out, or give options::use_orig_params as well",
            ));
        }
        let optimizer = match (use_orig_params, &self.numbered) {
            (false, _) => base.optimizer_of_units(),
            (true, Some(groups)) => Some(groups.clone()),
            (true, None) => {
                let order = Self::order(source);
                numbering::of_parameters(&base, &source.wanted.catalog.state, order.as_deref())?
            }
        };
        let mut layout = FlatLayout { world_size, shard_group_size, use_orig_params, optimizer, units: base.units };
        self.retype(&mut layout, source);
        layout.check().map_err(|wrong| {
            Error::usage(
                format!("the flat layout, {}: expected {}, found {}", wrong.at, wrong.expected, wrong.found),
                "docs/how-to/fsdp1.md tells what a flat layout says",
            )
        })?;
        Ok((layout, notes))
    }

    /// The world size, and that of the groups in which ranks share a copy.
    fn ranks(&self, base: &FlatLayout, derived: bool) -> Result<(u32, u32)> {
        let world_size = match self.world_size {
            Some(0) => return Err(Error::usage("options::world_size 0: no ranks", "give the ranks that will load")),
            Some(size) if size > MAX_RANKS => {
                return Err(Error::usage(
                    format!("{size} ranks: every file lists them all"),
                    format!("flat parameters are written for {MAX_RANKS} ranks at most"),
                ));
            }
            Some(size) => size,
            None if derived => {
                return Err(Error::usage("how many ranks will load the files?", "say it with options::world_size N"));
            }
            None => base.world_size,
        };
        let group = match self.group {
            GroupSize::All => world_size,
            GroupSize::Of(size) => size,
            // NO_SHARD and HYBRID_SHARD stay what they are.
            GroupSize::Unsaid if !derived && base.shard_group_size < base.world_size => base.shard_group_size,
            GroupSize::Unsaid => world_size,
        };
        if group == 0 || !world_size.is_multiple_of(group) {
            return Err(Error::usage(
                format!("groups of {group} among {world_size} ranks"),
                "the size of a group must divide the world size: options::shard_group_size N",
            ));
        }
        Ok((world_size, group))
    }

    /// Parameters that are cast are aligned as those of their new dtype are, but under mixed precision.
    fn retype(&self, layout: &mut FlatLayout, source: &ConversionSource) {
        let wanted = &source.wanted.catalog;
        let tensors: HashMap<Fqn, TensorId> = model::model(&wanted.state).tensors.into_iter().collect();
        for unit in &mut layout.units {
            let first = unit.params.first().and_then(|param| tensors.get(&param.fqn));
            if let Some(dtype) = first.map(|id| wanted.tensor(*id).dtype) {
                let mixed = unit.align_numel.filter(|align| unit.dtype.map(default_align) != Some(*align));
                unit.align_numel = Some(mixed.unwrap_or(default_align(dtype)));
                unit.dtype = Some(dtype);
            }
            if let Some(forward) = self.forward_dtype {
                unit.align_numel = Some(default_align(forward));
            }
        }
    }

    /// The units, and how ranks shared them.
    fn base<'s>(&'s self, source: &'s ConversionSource) -> Result<FlatBase> {
        let like = source.like.as_ref();
        let of = |checkpoint: &'s Checkpoint| checkpoint.catalog.flat.as_ref();
        let known = self.layout.as_ref().or_else(|| like.and_then(of)).or_else(|| of(&source.checkpoint));
        if let Some(layout) = known.filter(|_| self.wrap.is_empty()) {
            if let Some(pattern) = self.buffers.first() {
                return Err(Error::usage(
                    format!("options::buffers {}: the flat layout says what is a parameter", pattern.as_str()),
                    "leave it out; what is not in the layout is a buffer",
                ));
            }
            return Ok(FlatBase { layout: layout.clone(), derived: false, notes: Vec::new() });
        }
        if self.layout.is_some() {
            return Err(Error::usage("options::wrap and a flat layout: both say the units", "leave one of them out"));
        }
        let wrapping = WrapPolicy { wrap: &self.wrap, buffers: &self.buffers };
        let ordered = match like {
            Some(like) if like.format.keeps_order() => {
                OrderedModel { checkpoint: like, catalog: &like.catalog, state: &like.catalog.state }
            }
            Some(like) => return Err(units::unordered(&not_kept(like))),
            None if source.checkpoint.format.keeps_order() => {
                let wanted = &source.wanted.catalog;
                OrderedModel { checkpoint: &source.checkpoint, catalog: wanted, state: &wanted.state }
            }
            None => return Err(units::unordered(&not_kept(&source.checkpoint))),
        };
        let (mut layout, notes) = units::derive(&ordered, &wrapping)?;
        if like.is_some() {
            units::add_tied(&mut layout, &source.wanted.catalog.state)?;
        }
        Ok(FlatBase { layout, derived: true, notes })
    }

    /// The names of the model in the order of registration, where something keeps it.
    fn order(source: &ConversionSource) -> Option<Vec<Fqn>> {
        let names = |state| -> Vec<Fqn> { model::model(state).tensors.into_iter().map(|(fqn, _)| fqn).collect() };
        let like = source.like.as_ref().filter(|like| like.format.keeps_order());
        let Checkpoint { format, catalog, .. } = &source.checkpoint;
        let has_order =
            format.keeps_order() || format.tensors() == TensorStorage::Flat && knows_modules(&catalog.state);
        let own = || has_order.then(|| names(&source.wanted.catalog.state));
        let found = like.map(|like| names(&like.catalog.state)).or_else(own);
        found.filter(|names| !order::is_sorted(names.iter().map(Fqn::as_str)))
    }
}

/// Whether the model has PyTorch's `_metadata` of all its modules: flat parameters are read in that order.
fn knows_modules(state: &Value) -> bool {
    let Model { root, tensors } = model::model(state);
    let dict = root.find(state).and_then(Value::as_dict);
    let Some(registered) = dict.and_then(modules::registered_modules) else { return false };
    let registered: HashSet<String> = registered.into_iter().collect();
    tensors.iter().all(|(fqn, _)| registered.contains(module_of(&clean_name(fqn.as_str()))))
}

fn not_kept(checkpoint: &Checkpoint) -> String {
    let Checkpoint { format, root, .. } = checkpoint;
    match format.tensors() {
        TensorStorage::Flat => format!("{} is flat, and its units would be others", root.display()),
        _ => format!("{} is {format}, which does not keep it", root.display()),
    }
}
