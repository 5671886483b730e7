//! The names of a pickle that may become data, in two lists, and the rule for all other names.
//!
//! * **Known**: decoded to a separate variant of `Value` (`OrderedDict`, `set`, `bytearray`, ...); `known.rs` has this
//!   list.
//! * **Inert**: a call or object of such a name is kept as its name, arguments and state. If the value is written to a
//!   file again, the program that loads the file runs the call. So a name is on this list only if the call creates an
//!   object and has no other effect.
//! * All other names are refused. The lists have no pattern, no prefix and no module: `builtins.getattr`,
//!   `os.system` and `torch.load` are each a name that is not listed.
//!
//! Invariant: a class or function on a list only stores its arguments, or calls an argument that is itself a listed
//! type, as `defaultdict` calls its factory. A class or function that calls anything else is on no list.
//!
//! Source of the rule: `torch/_weights_only_unpickler.py` for the names of torch, the `__reduce_ex__` of each class
//! for the others, and CPython `Lib/_compat_pickle.py` for the spellings of protocol 2.

/// The use that the inert list allows for a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// The name itself may be a value, such as a type or a constant. It must not be called.
    Type,
    /// The name may be called by REDUCE. It must not be a value itself.
    Function,
    /// The name may be a value, may be called by REDUCE, and may be made by NEWOBJ. Its objects may have items, entries
    /// and state.
    Class,
}

impl Use {
    /// Returns whether the name may be a value without a call.
    pub fn bare(self) -> bool {
        self != Use::Function
    }

    /// Returns whether the name may be called, by REDUCE or NEWOBJ.
    pub fn made(self) -> bool {
        self != Use::Type
    }
}

/// Returns the allowed use of a name on the inert list; `None` for a name that is not on the list.
pub fn inert(module: &str, name: &str) -> Option<Use> {
    let listed = |(modules, names, _): &&(&[&str], &[&str], Use)| modules.contains(&module) && names.contains(&name);
    INERT.iter().find(listed).map(|&(_, _, usage)| usage)
}

/// Returns the Python 3 spelling of a name. Protocol 2 uses the spelling of Python 2. No module of Python 3 uses one of
/// the old names for something else. So old names are converted in pickles of every protocol, as in torch's reader.
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

/// Returns the Python 2 spelling of a name, the inverse of [`modern`]. CPython writes this spelling in protocol 2.
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

/// The inert list. A row has modules, names, and the allowed use of these names. Each name of a row may be in each
/// module of the row.
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
    (&["torch.torch_version"], &["TorchVersion"], Use::Class),
    (&["torch"], TORCH_DTYPES, Use::Type),
    (&["torch"], &[
        "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric",
        "per_channel_affine_float_qparams",
    ], Use::Type),
    (&["torch.serialization"], &["_get_layout"], Use::Function),
    (&["torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types"], &[
        "Shard", "_StridedShard", "Replicate", "Partial",
    ], Use::Class),
    // A member of an enum is pickled as a call of its class with a value. The name of a class does not show that it is
    // an enum; these classes are enums.
    (&["torch.distributed.distributed_c10d", "torch._C._distributed_c10d"], &[
        "ReduceOp", "ReduceOp.RedOpType", "RedOpType",
    ], Use::Class),

    (&["deepspeed.utils.tensor_fragment"], &["fragment_address"], Use::Class),

    (&["numpy"], &["ndarray"], Use::Type),
    (&["numpy"], &["dtype"], Use::Class),
    (&["numpy"], NUMPY_SCALARS, Use::Type),
    (&["numpy._core.multiarray", "numpy.core.multiarray"], &["_reconstruct", "scalar"], Use::Function),
    (&["numpy._core.numeric", "numpy.core.numeric"], &["_frombuffer"], Use::Function),
    (&["numpy.random._pickle"], &["__randomstate_ctor", "__generator_ctor"], Use::Function),
    // numpy 1.24 to 1.26 passes this function as an argument to the two functions in the row above.
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
    fn unlisted_names_have_no_use() {
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
    fn bare_types_may_not_be_called() {
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
