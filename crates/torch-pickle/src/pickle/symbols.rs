//! Which globals of a pickle may become data: the three lists.
//!
//! * **Known**: read into a value of their own (`OrderedDict`, `set`, `bytearray`, ...); that list is
//!   `known.rs`.
//! * **Inert**: carried by name with their arguments and state. Being written back, they run in whoever
//!   loads the result, so a name is here only if making such an object does nothing but make it.
//! * Everything else is refused by name. There is no pattern, no prefix and no module on the list:
//!   `builtins.getattr`, `os.system` and `torch.load` are each one name that is not here.
//!
//! Invariant: what a listed name does with its arguments is store them, or call the listed types among
//! them, as `defaultdict` does with its factory. A name that would call more than that stays off.
//!
//! Source of the rule: `torch/_weights_only_unpickler.py` for torch's names, the `__reduce_ex__` of each
//! class for the others, and CPython `Lib/_compat_pickle.py` for the spellings of protocol 2.

/// How an inert global may occur.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Bare only: a type or a constant that is stored, never called.
    Type,
    /// Called by REDUCE only.
    Function,
    /// Bare, called, or made by NEWOBJ; may be given items, entries and state.
    Class,
}

impl Use {
    /// Whether the name may be a value itself.
    pub fn bare(self) -> bool {
        self != Use::Function
    }

    /// Whether the name may be called.
    pub fn made(self) -> bool {
        self != Use::Type
    }
}

/// The use that is allowed of an inert global; `None` for all that is not listed.
pub fn inert(module: &str, name: &str) -> Option<Use> {
    let listed = |(modules, names, _): &&(&[&str], &[&str], Use)| modules.contains(&module) && names.contains(&name);
    INERT.iter().find(listed).map(|&(_, _, usage)| usage)
}

/// Protocol 2 spells Python 3's names as Python 2's. No module of Python 3 has one of the old names, so
/// they are read as the new ones whatever the protocol says, like torch's reader does.
pub(super) fn modern<'a>(module: &'a str, name: &'a str) -> (&'a str, &'a str) {
    match (module, name) {
        ("__builtin__", "xrange") => ("builtins", "range"),
        ("__builtin__", "long") => ("builtins", "int"),
        ("__builtin__", "unicode") => ("builtins", "str"),
        ("__builtin__", _) => ("builtins", name),
        ("copy_reg", _) => ("copyreg", name),
        _ => (module, name),
    }
}

/// The reverse of [`modern`], as CPython writes protocol 2.
pub(super) fn legacy<'a>(module: &'a str, name: &'a str) -> (&'a str, &'a str) {
    match (module, name) {
        ("builtins", "range") => ("__builtin__", "xrange"),
        ("builtins", "int") => ("__builtin__", "long"),
        ("builtins", "str") => ("__builtin__", "unicode"),
        ("builtins", _) => ("__builtin__", name),
        ("copyreg", _) => ("copy_reg", name),
        _ => (module, name),
    }
}

type Row = (&'static [&'static str], &'static [&'static str], Use);

/// (modules, names, use): each name of a row may come from each module of it.
#[rustfmt::skip]
const INERT: &[Row] = &[
    (&["builtins"], &[
        "int", "float", "str", "bool", "complex", "bytes", "bytearray", "list", "dict", "tuple", "set", "frozenset",
        "object", "type", "Ellipsis", "NotImplemented",
    ], Use::Type),
    (&["builtins"], &["slice", "range"], Use::Class),
    (&["collections"], &["OrderedDict"], Use::Type),
    (&["collections"], &["defaultdict", "Counter", "deque"], Use::Class),
    (&["argparse"], &["Namespace"], Use::Class),
    (&["types"], &["SimpleNamespace"], Use::Class),
    (&["pathlib", "pathlib._local"], &[
        "Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath",
    ], Use::Class),
    (&["datetime"], &["datetime", "date", "time", "timedelta", "timezone"], Use::Class),
    (&["uuid"], &["UUID"], Use::Class),
    (&["decimal"], &["Decimal"], Use::Class),
    (&["fractions"], &["Fraction"], Use::Class),

    (&["torch"], &["Size", "device"], Use::Class),
    (&["torch"], TORCH_DTYPES, Use::Type),
    (&["torch"], &[
        "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric",
        "per_channel_affine_float_qparams",
    ], Use::Type),
    (&["torch.serialization"], &["_get_layout"], Use::Function),
    (&["torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types"], &[
        "Shard", "_StridedShard", "Replicate", "Partial",
    ], Use::Class),
    // An enum's member is its class and a value, and which classes are enums no name tells: these are.
    (&["torch.distributed.distributed_c10d", "torch._C._distributed_c10d"], &[
        "ReduceOp", "ReduceOp.RedOpType", "RedOpType",
    ], Use::Class),

    (&["numpy"], &["ndarray"], Use::Type),
    (&["numpy"], &["dtype"], Use::Class),
    (&["numpy"], NUMPY_SCALARS, Use::Type),
    (&["numpy._core.multiarray", "numpy.core.multiarray"], &["_reconstruct", "scalar"], Use::Function),
    (&["numpy._core.numeric", "numpy.core.numeric"], &["_frombuffer"], Use::Function),
    (&["numpy.random._pickle"], &["__randomstate_ctor", "__generator_ctor"], Use::Function),
    // numpy 1.24 to 1.26 hands this function to the other two.
    (&["numpy.random._pickle"], &["__bit_generator_ctor"], Use::Class),
    (&["numpy.random._mt19937"], &["MT19937"], Use::Type),
    (&["numpy.random._pcg64"], &["PCG64", "PCG64DXSM"], Use::Type),
    (&["numpy.random._philox"], &["Philox"], Use::Type),
    (&["numpy.random._sfc64"], &["SFC64"], Use::Type),
    (&["numpy.random.bit_generator"], &["SeedSequence"], Use::Type),
    (&["numpy.random.bit_generator"], &["__pyx_unpickle_SeedSequence"], Use::Function),
];

#[rustfmt::skip]
const TORCH_DTYPES: &[&str] = &[
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex32", "bcomplex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    "qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
    "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
    "int1", "int2", "int3", "int4", "int5", "int6", "int7",
];

#[rustfmt::skip]
const NUMPY_SCALARS: &[&str] = &[
    "bool", "bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "longlong", "ulonglong",
    "float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble",
    "str_", "bytes_", "object_", "void", "datetime64", "timedelta64",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denies_by_default() {
        for (module, name) in [
            ("os", "system"),
            ("posix", "system"),
            ("builtins", "eval"),
            ("builtins", "getattr"),
            ("torch", "load"),
            ("functools", "partial"),
            ("", ""),
        ] {
            assert_eq!(inert(module, name), None, "{module}.{name}");
        }
    }

    #[test]
    fn types_are_not_called() {
        assert!(!inert("builtins", "type").unwrap().made());
        assert!(!inert("numpy._core.multiarray", "scalar").unwrap().bare());
    }

    #[test]
    fn no_name_is_listed_twice() {
        let mut all: Vec<_> = INERT
            .iter()
            .flat_map(|(modules, names, _)| modules.iter().flat_map(|m| names.iter().map(move |n| (m, n))))
            .collect();
        let len = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), len);
    }
}
