//! Determines the flat layout to write: its units, world size and shard group size. The units come from a layout file,
//! the source or `--like`, or are derived from the order of a state dict.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use super::super::source::ConversionSource;
use super::numbering;
use super::units::{self, OrderedModel, WrapPolicy};
use crate::catalog::flat::{FlatLayout, default_align};
use crate::catalog::modules::{self, module_of};
use crate::catalog::state_dict::{self, Model};
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Dtype, Fqn, TensorId, Value};
use crate::convert::options::{ConvertOptions, FlattenOptions, Strategy};
use crate::error::{Error, Result};
use crate::format::fsdp_flat::order;
use crate::format::{Checkpoint, TensorStorage, fsdp_flat};
use crate::layout::Pattern;

/// Largest world size that `flatten` accepts. Every file lists all ranks, so the total length of these lists grows with
/// the square of the world size.
const MAX_RANKS: u32 = 1 << 14;

/// The base layout: the flat layout from which the layout of the target is made.
struct FlatBase {
    layout: FlatLayout,
    /// True if the layout was derived from the order of a state dict. Such a layout does not know the world size.
    derived: bool,
    notes: Vec<String>,
}

/// The shard group size: the number of ranks over which one copy of the model is sharded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GroupSize {
    /// The user gave no group size. `NO_SHARD`, and the group size of `HYBRID_SHARD`, are taken from the base layout;
    /// otherwise one copy of the model is sharded over all ranks.
    #[default]
    Unsaid,
    /// One copy of the model is sharded over all ranks: `FULL_SHARD`.
    All,
    /// One copy of the model is sharded over this number of ranks: `HYBRID_SHARD`, or `NO_SHARD` for 1.
    Of(u32),
}

/// The options of the user for the flat layout of the target. If a field is `None`, the base layout provides the value.
#[derive(Default)]
pub struct FlattenRequest {
    /// The flat layout in the layout file of the target. If SRC has flat parameters, `--flat-layout` describes SRC, so
    /// it is not used here.
    layout: Option<FlatLayout>,
    /// The parameters of each optimizer group, in the order of their parameter ids. The list comes from the layout file
    /// of the target, and is used with `use_orig_params`.
    numbered: Option<Vec<Vec<Fqn>>>,
    /// Patterns of module names; each module that matches becomes a unit.
    pub wrap: Vec<Pattern>,
    /// Patterns of tensor names; a tensor that matches is a buffer, not a parameter.
    pub buffers: Vec<Pattern>,
    /// The number of ranks that will load the files.
    pub world_size: Option<u32>,
    /// The shard group size: the number of ranks over which one copy of the model is sharded.
    pub group: GroupSize,
    /// The value of FSDP's `use_orig_params`.
    pub use_orig_params: Option<bool>,
    /// The dtype of the forward pass under mixed precision, which sets the alignment of parameters.
    pub forward_dtype: Option<Dtype>,
}

impl FlattenRequest {
    /// Reads the request from the arguments of `flatten`.
    ///
    /// # Errors
    /// `Usage` for options that contradict each other; errors of reading the layout file.
    pub fn of_arguments(args: &FlattenOptions, convert: &ConvertOptions, source: &ConversionSource) -> Result<Self> {
        let flat = &args.flat;
        let group = match (flat.strategy, flat.shard_group_size) {
            (None, None) => GroupSize::Unsaid,
            (Some(Strategy::FullShard), None) => GroupSize::All,
            (Some(Strategy::NoShard), None) => GroupSize::Of(1),
            (None | Some(Strategy::HybridShard), Some(size)) => GroupSize::Of(size),
            (Some(Strategy::HybridShard), None) => {
                return Err(Error::usage(
                    "options::strategy hybrid-shard needs options::shard_group_size, the number of ranks that share one copy",
                    "give options::shard_group_size N; FSDP uses the ranks of one node",
                ));
            }
            (Some(_), Some(_)) => {
                return Err(Error::usage(
                    "options::shard_group_size cannot be used with options::strategy full-shard or no-shard",
                    "use options::strategy hybrid-shard, or omit options::shard_group_size",
                ));
            }
        };
        let forward_dtype = flat.forward_dtype.as_deref().map(|name| {
            let known = Dtype::from_name(name).filter(|dtype| dtype.is_float());
            known.ok_or_else(|| {
                Error::usage(
                    format!("options::forward_dtype {name}: not a floating-point dtype"),
                    "give a floating-point dtype such as f32, bf16 or f16",
                )
            })
        });
        let request = Self {
            wrap: Pattern::parse_all(&flat.wrap)?,
            buffers: Pattern::parse_all(&flat.buffers)?,
            world_size: flat.world_size,
            group,
            use_orig_params: flat.use_orig_params,
            forward_dtype: forward_dtype.transpose()?,
            ..Self::default()
        };
        request.with_layout(convert, flat.layout.as_deref(), source)
    }

    /// Adds the layout of the target from `--layout`, otherwise from `--flat-layout`.
    ///
    /// # Errors
    /// `Usage` if both options give units; errors of reading the file.
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
                "options::layout and options::flat_layout both define the units",
                "omit options::layout or options::flat_layout",
            ));
        }
        if let Some(path) = target.or(given) {
            let layout = fsdp_flat::document::read(path)?;
            self.numbered = layout.optimizer.clone().filter(|_| layout.use_orig_params);
            self.layout = Some(layout).filter(|_| target.is_some() || !of_source);
        }
        Ok(self)
    }

    /// Returns the flat layout of the target, and notes for the user.
    ///
    /// # Errors
    /// `Unsupported` if the order of parameters is not certain, `Usage` for options that contradict each other.
    pub fn layout(&self, source: &ConversionSource) -> Result<(FlatLayout, Vec<String>)> {
        let FlatBase { layout: base, derived, notes } = self.base(source)?;
        let (world_size, shard_group_size) = self.ranks(&base, derived)?;
        let use_orig_params = self.use_orig_params.unwrap_or(base.use_orig_params);
        if let (false, Some(dtype)) = (use_orig_params, self.forward_dtype) {
            return Err(Error::usage(
                format!(
                    "options::forward_dtype {dtype} has no effect, because it only sets the alignment of parameters, \
                     and FSDP aligns parameters only with use_orig_params"
                ),
                "omit options::forward_dtype, or add options::use_orig_params",
            ));
        }
        let optimizer = match (use_orig_params, &self.numbered) {
            (false, _) => base.optimizer_of_units(),
            (true, Some(groups)) => Some(groups.clone()),
            (true, None) => {
                let order = Self::order(source);
                let flat = source.checkpoint.catalog.flat.as_ref().filter(|flat| !flat.use_orig_params);
                numbering::of_parameters(&base, flat, &source.selection.catalog.state, order.as_deref())?
            }
        };
        let has_assumed_alignment = base.has_assumed_alignment && use_orig_params && self.forward_dtype.is_none();
        let units = base.units;
        let mut layout =
            FlatLayout { world_size, shard_group_size, use_orig_params, has_assumed_alignment, units, optimizer };
        self.retype(&mut layout, source);
        layout.check().map_err(|wrong| {
            Error::usage(
                format!("the flat layout, {}: expected {}, found {}", wrong.at, wrong.expected, wrong.found),
                "correct the layout; docs/how-to/fsdp1.md describes its format",
            )
        })?;
        Ok((layout, notes))
    }

    /// Returns the world size and the shard group size of the target.
    fn ranks(&self, base: &FlatLayout, derived: bool) -> Result<(u32, u32)> {
        let world_size = match self.world_size {
            Some(0) => {
                return Err(Error::usage(
                    "options::world_size 0: at least one rank is needed",
                    "give the number of ranks that will load the files",
                ));
            }
            Some(size) if size > MAX_RANKS => {
                return Err(Error::usage(
                    format!("{size} ranks are too many: every file lists all ranks"),
                    format!("give options::world_size at most {MAX_RANKS}"),
                ));
            }
            Some(size) => size,
            None if derived => {
                return Err(Error::usage(
                    "the number of ranks that will load the files is not given",
                    "give options::world_size N",
                ));
            }
            None => base.world_size,
        };
        let group = match self.group {
            GroupSize::All => world_size,
            GroupSize::Of(size) => size,
            // A base layout with NO_SHARD or HYBRID_SHARD keeps its group size.
            GroupSize::Unsaid if !derived && base.shard_group_size < base.world_size => base.shard_group_size,
            GroupSize::Unsaid => world_size,
        };
        if group == 0 || !world_size.is_multiple_of(group) {
            return Err(Error::usage(
                format!("{world_size} ranks cannot be divided into groups of {group}"),
                "give options::shard_group_size a number that divides the world size",
            ));
        }
        Ok((world_size, group))
    }

    /// Sets the dtype and the alignment of each unit. The dtype is the dtype of the unit's tensors in the target. The
    /// alignment comes from `--forward-dtype` if that option is given; otherwise an alignment from mixed precision is
    /// kept; otherwise the new dtype determines it.
    fn retype(&self, layout: &mut FlatLayout, source: &ConversionSource) {
        let selected = &source.selection.catalog;
        let tensors: HashMap<Fqn, TensorId> = state_dict::model(&selected.state).tensors.into_iter().collect();
        for unit in &mut layout.units {
            let first = unit.params.first().and_then(|param| tensors.get(&param.fqn));
            if let Some(dtype) = first.map(|id| selected.tensor(*id).dtype) {
                let mixed = unit.align_numel.filter(|align| unit.dtype.map(default_align) != Some(*align));
                unit.align_numel = Some(mixed.unwrap_or(default_align(dtype)));
                unit.dtype = Some(dtype);
            }
            if let Some(forward) = self.forward_dtype {
                unit.align_numel = Some(default_align(forward));
            }
        }
    }

    /// Returns the flat layout of the layout file, otherwise of `--like`, otherwise of the source.
    pub fn known_layout<'s>(&'s self, source: &'s ConversionSource) -> Option<&'s FlatLayout> {
        let of = |checkpoint: &'s Checkpoint| checkpoint.catalog.flat.as_ref();
        self.layout.as_ref().or_else(|| source.like.as_ref().and_then(of)).or_else(|| of(&source.checkpoint))
    }

    /// Returns the base layout, from which the layout of the target is made: a known flat layout, or a layout that is
    /// derived from `--wrap` and the order of a state dict.
    fn base<'s>(&'s self, source: &'s ConversionSource) -> Result<FlatBase> {
        let like = source.like.as_ref();
        if let Some(layout) = self.known_layout(source).filter(|_| self.wrap.is_empty()) {
            if let Some(pattern) = self.buffers.first() {
                return Err(Error::usage(
                    format!(
                        "options::buffers {} has no effect, because the flat layout already lists the parameters",
                        pattern.as_str()
                    ),
                    "omit options::buffers; every tensor that is not in the layout is a buffer",
                ));
            }
            return Ok(FlatBase { layout: layout.clone(), derived: false, notes: Vec::new() });
        }
        if self.layout.is_some() {
            return Err(Error::usage(
                "options::wrap and a flat layout both define the units",
                "omit options::wrap or the flat layout",
            ));
        }
        let of_source = source.checkpoint.catalog.flat.as_ref().filter(|_| like.is_some());
        let state = &source.selection.catalog.state;
        let wrapping = WrapPolicy { wrap: &self.wrap, buffers: &self.buffers, source: of_source, state };
        let ordered = match like {
            Some(like) if like.format.keeps_order() => {
                OrderedModel { checkpoint: like, catalog: &like.catalog, state: &like.catalog.state }
            }
            Some(like) => return Err(order_not_kept(like)),
            None if source.checkpoint.format.keeps_order() => {
                let selected = &source.selection.catalog;
                OrderedModel { checkpoint: &source.checkpoint, catalog: selected, state: &selected.state }
            }
            None => return Err(order_not_kept(&source.checkpoint)),
        };
        let (mut layout, notes) = units::derive(&ordered, &wrapping)?;
        if like.is_some() {
            units::add_tied(&mut layout, &source.selection.catalog.state)?;
        }
        Ok(FlatBase { layout, derived: true, notes })
    }

    /// Returns the names of the model in the order of registration, if `--like` or the source keeps that order.
    fn order(source: &ConversionSource) -> Option<Vec<Fqn>> {
        let names = |state| -> Vec<Fqn> { state_dict::model(state).tensors.into_iter().map(|(fqn, _)| fqn).collect() };
        let like = source.like.as_ref().filter(|like| like.format.keeps_order());
        let Checkpoint { format, catalog, .. } = &source.checkpoint;
        let has_order =
            format.keeps_order() || format.tensors() == TensorStorage::Flat && knows_modules(&catalog.state);
        let own = || has_order.then(|| names(&source.selection.catalog.state));
        let found = like.map(|like| names(&like.catalog.state)).or_else(own);
        found.filter(|names| !order::is_sorted(names.iter().map(Fqn::as_str)))
    }
}

/// Returns the error for a target that cannot be laid out, because the padding between parameters of flat parameters is
/// unknown: the files match several alignments.
pub fn unknown_padding(source: &ConversionSource) -> Error {
    let like = source.like.as_ref().filter(|like| like.catalog.flat.is_some());
    Error::unsupported(
        format!(
            "{}: the padding between the parameters of flat parameters is unknown, because the files match several \
             alignments",
            like.unwrap_or(&source.checkpoint).root.display()
        ),
        "give options::flat_layout FILE, which has the `align_numel` of each unit (docs/how-to/fsdp1.md has the Python \
         snippet that writes FILE from a live model)",
    )
}

/// Returns true if PyTorch's `_metadata` in the state dict lists the module of every parameter. The parameters of a
/// checkpoint with flat parameters are then in the order in which the model registers them.
fn knows_modules(state: &Value) -> bool {
    let Model { root, tensors } = state_dict::model(state);
    let dict = root.find(state).and_then(Value::as_dict);
    let Some(registered) = dict.and_then(modules::registered_modules) else { return false };
    let registered: HashSet<String> = registered.into_iter().collect();
    tensors.iter().all(|(fqn, _)| registered.contains(module_of(&clean_name(fqn.as_str()))))
}

/// Returns the error for `--wrap` if the checkpoint does not have the order of all parameters.
fn order_not_kept(checkpoint: &Checkpoint) -> Error {
    let Checkpoint { format, root, .. } = checkpoint;
    let root = root.display();
    match format.tensors() {
        TensorStorage::Flat => Error::unsupported(
            format!(
                "options::wrap defines new units, but {root} has the order of parameters only within its own units"
            ),
            format!(
                "omit options::wrap to keep the units of {root}; or give the new units with options::layout FILE instead; \
                 or give options::like CKPT, a torch file of the same model, which has the order of all parameters"
            ),
        ),
        _ => units::unordered(&format!("{root} has format {format}, which does not keep the order of parameters")),
    }
}
