//! The flat layout of an FSDP1 model: its units (the wrapped modules), and the parameters of each unit in order.
//!
//! Sizes and alignments count elements. Names are relative to the model. FSDP1 files record this layout only in part or
//! not at all. If the order of two parameters with equal shapes were wrong, their values would be swapped without an
//! error. So the layout is read from the files if they record it, or given by the user, and is written into every
//! output folder with flat parameters. Invariant: in a layout that passes [`FlatLayout::check`], each name occurs once.
//! PyTorch's counterpart is `FlatParamHandle` in `torch/distributed/fsdp/_flat_param.py`.

use std::collections::HashSet;

use super::modules::{is_within, module_of};
use super::wrappers::clean_name;
use super::{Dtype, Fqn, checked_len_bytes};
use crate::error::Wrong;
use crate::layout::Dims;
use crate::layout::flat::{FlatParameter, StorageOrder};

/// The last component of a flat parameter's name.
pub const FLAT_PARAM: &str = "_flat_param";

/// The units of a model, and the number of ranks that shard them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatLayout {
    pub world_size: u32,
    /// The number of ranks that shard one copy of a flat parameter: the world size, or fewer under `HYBRID_SHARD`, or 1
    /// under `NO_SHARD`.
    pub shard_group_size: u32,
    pub use_orig_params: bool,
    /// Whether the alignment of parameters is an assumption: the files match several alignments, which give flat
    /// parameters with different padding. Parameters are aligned only if `use_orig_params` is true.
    pub has_assumed_alignment: bool,
    /// The units: the root unit first, then the other units in registration order.
    pub units: Vec<FlatUnit>,
    /// The names of the parameters that the optimizer updates: one list for each parameter group, in the optimizer's
    /// order; `None` if the parameter groups are unknown. If `use_orig_params` is true, the lists have names of
    /// parameters, otherwise names of flat parameters. A list may also have names of parameters outside all units,
    /// which FSDP1 neither flattens nor shards.
    pub optimizer: Option<Vec<Vec<Fqn>>>,
}

/// A module that FSDP1 wraps, with its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatUnit {
    /// The path of the module; empty for the root.
    pub module: Box<str>,
    pub dtype: Option<Dtype>,
    /// The alignment of parameters in elements, which is used only if `use_orig_params` is true: the number of elements
    /// of the forward pass's dtype in 16 bytes. With `None`, the dtype of the parameters determines the alignment.
    pub align_numel: Option<u64>,
    pub params: Vec<FlatParam>,
    /// Additional names of tied parameters. A parameter with an additional name may belong to this unit or to another
    /// unit.
    pub shared: Vec<SharedName>,
}

/// A parameter in a flat parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatParam {
    pub fqn: Fqn,
    pub shape: Dims,
    /// The strides of the parameter in elements, if the parameter is not row-major; otherwise `None`.
    pub stride: Option<Dims>,
}

/// An additional name of a tied parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedName {
    pub fqn: Fqn,
    /// The first name of the parameter. The parameter also has the name `fqn`.
    pub with: Fqn,
}

impl FlatLayout {
    /// Returns the number of copies of the model that the ranks hold together.
    pub fn replicas(&self) -> u32 {
        self.world_size / self.shard_group_size
    }

    /// Returns the index of the shard that a rank holds of each flat parameter. The ranks of a shard group are
    /// consecutive.
    pub fn shard_of(&self, rank: u32) -> u64 {
        u64::from(rank % self.shard_group_size)
    }

    /// Returns the flat parameter of a unit.
    ///
    /// # Panics
    /// If the layout does not pass [`FlatLayout::check`].
    pub fn flat(&self, unit: &FlatUnit) -> FlatParameter {
        self.checked_flat(unit).expect("a layout that was checked")
    }

    /// Returns the flat parameter of a unit, or `None` if its sizes exceed `u64`, or if its alignment is unknown or 0.
    pub fn checked_flat(&self, unit: &FlatUnit) -> Option<FlatParameter> {
        let numels: Vec<u64> = unit.params.iter().map(FlatParam::numel).collect();
        let align = if self.use_orig_params { Some(unit.align_numel()?) } else { None };
        FlatParameter::new(&numels, align, u64::from(self.shard_group_size))
    }

    /// Returns whether another alignment of FSDP would change the position of a parameter in its flat parameter.
    pub fn depends_on_alignment(&self) -> bool {
        let flat = |unit: &FlatUnit, align_numel| self.checked_flat(&FlatUnit { align_numel, ..unit.clone() });
        let differs = |unit: &FlatUnit| {
            let own = self.checked_flat(unit);
            ALIGNMENTS.into_iter().any(|align| flat(unit, align) != own)
        };
        self.use_orig_params && self.units.iter().any(differs)
    }

    /// Returns every parameter with its unit.
    pub fn params(&self) -> impl Iterator<Item = (&FlatUnit, &FlatParam)> {
        self.units.iter().flat_map(|unit| unit.params.iter().map(move |param| (unit, param)))
    }

    /// Returns the flat parameters that the optimizer updates if `use_orig_params` is false, in the order of their
    /// units. The flat parameter of the root is registered first, even if the first parameter of the model is in
    /// another unit.
    ///
    /// Returns `None` if the groups are unknown, or if a flat parameter would be in two groups. If a flat parameter
    /// would be in two groups, a caller that knows the optimizer must refuse the layout.
    pub fn optimizer_of_units(&self) -> Option<Vec<Vec<Fqn>>> {
        let groups = self.optimizer.as_ref()?;
        if !self.use_orig_params {
            return Some(groups.clone());
        }
        let keys: Vec<Vec<Fqn>> = groups.iter().map(|group| self.group_of_units(group)).collect();
        let mut seen = HashSet::new();
        keys.iter().flatten().all(|key| seen.insert(key)).then_some(keys)
    }

    /// Returns a parameter group of an optimizer without `use_orig_params`: the flat parameters of the units that have
    /// parameters in `group`, and the names in `group` that are outside all units. `group` is in the order of the model.
    /// A module registers its flat parameter after its own parameters outside the unit, and before the parameters of the
    /// modules inside it.
    pub fn group_of_units(&self, group: &[Fqn]) -> Vec<Fqn> {
        let members: HashSet<&Fqn> = group.iter().collect();
        let flattened: HashSet<&Fqn> = self.params().map(|(_, param)| &param.fqn).collect();
        let outside: Vec<(usize, &Fqn)> =
            group.iter().enumerate().filter(|(_, fqn)| !flattened.contains(fqn)).collect();
        let mut keys = Vec::new();
        let mut written = 0;
        for unit in &self.units {
            if !unit.params.iter().any(|param| members.contains(&param.fqn)) {
                continue;
            }
            if !outside.is_empty() {
                let start = group.iter().position(|fqn| is_within(fqn.as_str(), &unit.module));
                let is_before = |(index, fqn): &&(usize, &Fqn)| {
                    module_of(fqn.as_str()) == &*unit.module
                        || !is_within(fqn.as_str(), &unit.module) && start.is_some_and(|start| *index < start)
                };
                let before = outside.iter().filter(is_before).count();
                keys.extend(outside[written..before.max(written)].iter().map(|(_, fqn)| (*fqn).clone()));
                written = before.max(written);
            }
            keys.push(unit.key());
        }
        keys.extend(outside[written..].iter().map(|(_, fqn)| (*fqn).clone()));
        keys
    }

    /// Checks that the layout is consistent.
    ///
    /// # Errors
    /// The first problem.
    pub fn check(&self) -> Result<(), Wrong> {
        let (world_size, group) = (self.world_size, self.shard_group_size);
        if world_size == 0 || group == 0 || !world_size.is_multiple_of(group) {
            let expected = "a divisor of world_size";
            return Err(Wrong::new(
                "shard_group_size",
                expected,
                format!("shard_group_size {group} and world_size {world_size}"),
            ));
        }
        let mut names: HashSet<&Fqn> = HashSet::new();
        let mut modules: HashSet<&str> = HashSet::new();
        for unit in &self.units {
            if !modules.insert(&unit.module) {
                return Err(Wrong::new(unit.describe(), "each module once", format!("`{}` again", unit.module)));
            }
            for param in &unit.params {
                if !names.insert(&param.fqn) {
                    return Err(Wrong::new(unit.describe(), "each name once", format!("`{}` again", param.fqn)));
                }
                unit.check_param(param)?;
            }
            if self.use_orig_params && unit.align_numel().is_none() {
                let expected = "a dtype or an align_numel, because use_orig_params is true";
                return Err(Wrong::new(unit.describe(), expected, "neither"));
            }
            if self.use_orig_params && unit.align_numel() == Some(0) {
                return Err(Wrong::new(unit.describe(), "an align_numel of at least 1", "0"));
            }
            if self.checked_flat(unit).is_none() {
                let expected = "a flat parameter of fewer than 2^64 elements, padding included";
                return Err(Wrong::new(unit.describe(), expected, "more elements"));
            }
        }
        let mut numbered: HashSet<&Fqn> = HashSet::new();
        if let Some(fqn) = self.optimizer.iter().flatten().flatten().find(|fqn| !numbered.insert(fqn)) {
            return Err(Wrong::new("optimizer", "each name once", format!("`{fqn}` again")));
        }
        self.check_shared(&names)
    }

    /// Checks that every additional name of a tied parameter refers to an existing parameter, and that no name occurs
    /// twice.
    fn check_shared(&self, names: &HashSet<&Fqn>) -> Result<(), Wrong> {
        for unit in &self.units {
            for SharedName { fqn, with } in &unit.shared {
                if !names.contains(with) {
                    let expected = "the name of a parameter in shared_with";
                    return Err(Wrong::new(unit.describe(), expected, format!("`{with}` for `{fqn}`")));
                }
            }
        }
        let mut aliases: HashSet<&Fqn> = HashSet::new();
        for SharedName { fqn, .. } in self.units.iter().flat_map(|unit| &unit.shared) {
            if names.contains(fqn) || !aliases.insert(fqn) {
                return Err(Wrong::new("params", "each name once", format!("`{fqn}` again")));
            }
        }
        Ok(())
    }
}

/// The alignments that FSDP1 uses, in elements. `None` is the default: 16 bytes of the parameter's dtype. Mixed precision
/// changes the alignment to 16 bytes of another dtype.
pub const ALIGNMENTS: [Option<u64>; 4] = [None, Some(8), Some(4), Some(2)];

/// Returns the default alignment of FSDP1: the number of elements of this dtype in 16 bytes.
pub fn default_align(dtype: Dtype) -> u64 {
    16 / dtype.itemsize()
}

/// Returns the module path, without wrappers, in the name of a flat parameter; `None` for other names.
pub fn flat_module(name: &str) -> Option<Box<str>> {
    let module = match name.strip_suffix(FLAT_PARAM)? {
        "" => "",
        module => module.strip_suffix('.')?,
    };
    Some(clean_name(module).into())
}

impl FlatUnit {
    /// Makes a unit without parameters.
    #[must_use]
    pub fn new(module: impl Into<Box<str>>, dtype: Option<Dtype>) -> Self {
        Self { module: module.into(), dtype, align_numel: None, params: Vec::new(), shared: Vec::new() }
    }

    /// Returns the name of the flat parameter: `layers.0._flat_param`.
    pub fn key(&self) -> Fqn {
        match &*self.module {
            "" => Fqn::from(FLAT_PARAM),
            module => Fqn::from(format!("{module}.{FLAT_PARAM}")),
        }
    }

    /// Returns the name of the unit for messages: `unit layers.0`, `the root unit`.
    pub fn describe(&self) -> String {
        if self.module.is_empty() { String::from("the root unit") } else { format!("unit {}", self.module) }
    }

    fn check_param(&self, param: &FlatParam) -> Result<(), Wrong> {
        let FlatParam { fqn, shape, stride } = param;
        let wrong = |expected, found| Err(Wrong::new(self.describe(), expected, found));
        if !is_within(fqn.as_str(), &self.module) {
            return wrong("names of parameters in this module", format!("`{fqn}`"));
        }
        // If the dtype is unknown, assume 16 bytes for each element, the largest element size.
        if checked_len_bytes(shape, self.dtype.unwrap_or(Dtype::C128)).is_none() {
            return wrong("shapes that fit memory", format!("{fqn} of {:?}", shape.as_slice()));
        }
        if param.order().is_none() {
            let stride = stride.as_deref().unwrap_or_default();
            let found = format!("{fqn} of shape {:?} with stride {stride:?}", shape.as_slice());
            return wrong("strides that leave no gaps between elements", found);
        }
        Ok(())
    }

    /// Returns the given alignment, or the default alignment of the dtype.
    pub fn align_numel(&self) -> Option<u64> {
        self.align_numel.or_else(|| self.dtype.map(default_align))
    }
}

impl FlatParam {
    /// Returns the number of elements, or `u64::MAX` if the number exceeds 64 bits. [`FlatLayout::check`] refuses such
    /// shapes.
    pub fn numel(&self) -> u64 {
        crate::layout::numel(&self.shape).unwrap_or(u64::MAX)
    }

    /// Returns the storage order of the elements, or `None` if the strides leave gaps between elements.
    pub fn order(&self) -> Option<StorageOrder> {
        match &self.stride {
            None => Some(StorageOrder::row_major(self.shape.len())),
            Some(stride) => StorageOrder::of_strides(&self.shape, stride),
        }
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    fn layout() -> FlatLayout {
        let param = |fqn: &str, shape: Dims| FlatParam { fqn: fqn.into(), shape, stride: None };
        let unit = |module: &str, params| FlatUnit { params, ..FlatUnit::new(module, Some(Dtype::F32)) };
        let mut root = unit("", vec![param("emb.weight", smallvec![5, 3]), param("l1.weight", smallvec![5, 3])]);
        root.shared.push(SharedName { fqn: "head.weight".into(), with: "emb.weight".into() });
        FlatLayout {
            world_size: 4,
            shard_group_size: 2,
            use_orig_params: true,
            has_assumed_alignment: false,
            units: vec![root, unit("blk", vec![param("blk.w", smallvec![7])])],
            optimizer: None,
        }
    }

    #[test]
    fn flat_parameter_key_gives_its_module() {
        for (key, module) in [
            ("_flat_param", Some("")),
            ("layers.0._flat_param", Some("layers.0")),
            ("_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module._flat_param", Some("layers.0")),
            ("my_flat_param", None),
            ("_flat_param.x", None),
            ("", None),
        ] {
            assert_eq!(flat_module(key).as_deref(), module, "{key}");
        }
    }

    #[test]
    fn valid_layout_gives_flat_parameters() {
        let layout = layout();
        layout.check().unwrap();
        assert_eq!(layout.flat(&layout.units[0]).total(), 32);
        assert_eq!((layout.replicas(), layout.shard_of(3)), (2, 1));
        assert_eq!(
            layout.units.iter().map(|unit| unit.key().to_string()).collect::<Vec<_>>(),
            ["_flat_param", "blk._flat_param"]
        );
    }

    #[test]
    fn inconsistent_layout_is_an_error() {
        type Change<'a> = &'a dyn Fn(&mut FlatLayout);
        let broken = |change: Change<'_>| {
            let mut layout = layout();
            change(&mut layout);
            let Wrong { at, expected, found } = layout.check().unwrap_err();
            format!("{at}: {expected}, {found}")
        };
        let cases: [(Change<'_>, &str); 9] = [
            (
                &|l| l.shard_group_size = 3,
                "shard_group_size: a divisor of world_size, shard_group_size 3 and world_size 4",
            ),
            (&|l| l.units[1].module = "".into(), "the root unit: each module once, `` again"),
            (&|l| l.units[1].params[0].fqn = "blkw".into(), "unit blk: names of parameters in this module, `blkw`"),
            (&|l| l.units[0].params[1].fqn = "emb.weight".into(), "the root unit: each name once, `emb.weight` again"),
            (
                &|l| l.units[1].params[0].stride = Some(smallvec![2]),
                "unit blk: strides that leave no gaps between elements, blk.w of shape [7] with stride [2]",
            ),
            (
                &|l| l.units[1].params[0].shape = smallvec![1 << 40, 1 << 40],
                "unit blk: shapes that fit memory, blk.w of [1099511627776, 1099511627776]",
            ),
            (
                &|l| l.units[0].shared[0].with = "x".into(),
                "the root unit: the name of a parameter in shared_with, `x` for `head.weight`",
            ),
            (
                &|l| l.optimizer = Some(vec![vec!["emb.weight".into()], vec!["emb.weight".into()]]),
                "optimizer: each name once, `emb.weight` again",
            ),
            (
                &|l| l.units[1].dtype = None,
                "unit blk: a dtype or an align_numel, because use_orig_params is true, neither",
            ),
        ];
        for (change, expected) in cases {
            assert_eq!(broken(change), expected);
        }
    }

    /// The flat parameter of the root is registered first, although the first parameter of the model is in another
    /// unit. An example is a model whose root unit has a norm after a wrapped embedding.
    #[test]
    fn flat_parameter_of_the_root_is_first() {
        let names = |names: &[&str]| names.iter().map(|name| Fqn::from(*name)).collect::<Vec<_>>();
        let of_units = |groups: &[&[&str]]| {
            let optimizer = Some(groups.iter().copied().map(names).collect());
            FlatLayout { optimizer, ..layout() }.optimizer_of_units()
        };
        let keys = Some(vec![names(&["_flat_param", "blk._flat_param"])]);
        assert_eq!(of_units(&[&["blk.w", "emb.weight", "l1.weight"]]), keys);
        assert_eq!(of_units(&[&["blk.w", "emb.weight"], &["l1.weight"]]), None);
        // Parameters outside all units: a module has its own parameters first, then its flat parameter, then its modules.
        let outside = ["vec", "emb.weight", "blk.vec", "blk.w", "blk.skip.w", "l1.weight", "out.w"];
        let keys = ["vec", "_flat_param", "blk.vec", "blk._flat_param", "blk.skip.w", "out.w"];
        assert_eq!(of_units(&[&outside]), Some(vec![names(&keys)]));
    }
}
