//! Finds plain tensors in a pickle: strided views of a storage. Unit of offsets, sizes and strides: elements.
//!
//! Source: `torch/_utils.py` (`_rebuild_tensor*`), `torch/_tensor.py` (`_rebuild_from_type_v2`).

use super::context::{Reader, View};
use crate::catalog::{Dtype, span};
use crate::layout::Dims;
use torch_pickle::pickle::{DecodeError, Items, Ref};

const META: &str = "a tensor on the meta device, which has no data";

/// Returns the view of a plain tensor; `None` for any other node.
///
/// # Errors
/// `DecodeError` for a damaged tensor, and for a kind of tensor that dtshard does not support.
pub fn plain_view(reader: &mut Reader<'_>, node: Ref<'_>) -> Result<Option<View>, DecodeError> {
    let Some(call) = node.call() else { return Ok(None) };
    let args = call.args;
    if let Some(view) = read_rebuilt(reader, (call.module, call.name), args)? {
        return Ok(Some(view));
    }
    match (call.module, call.name) {
        _ if is_wrapping_function(call.module, call.name) => {
            let wrapped = argument(args, 0)?;
            reader.read_nested(|reader| plain_view(reader, wrapped))
        }
        ("torch._tensor", "_rebuild_from_type_v2") => read_typed(reader, args),
        ("torch._utils", name) if name.starts_with("_rebuild_") => Err(reader.unsupported(match name {
            "_rebuild_sparse_tensor" => String::from("a sparse tensor"),
            "_rebuild_qtensor" => String::from("a quantized tensor"),
            "_rebuild_nested_tensor" => String::from("a nested tensor"),
            "_rebuild_meta_tensor_no_storage" => String::from(META),
            other => format!("a tensor that `torch._utils.{other}` rebuilds"),
        })),
        _ => Ok(None),
    }
}

/// Returns whether a function of torch only wraps a tensor, which is the first argument of the function. An example is
/// `_rebuild_parameter`.
pub fn is_wrapping_function(module: &str, name: &str) -> bool {
    let wrappers = ["_rebuild_parameter", "_rebuild_parameter_with_state", "_rebuild_device_tensor_from_cpu_tensor"];
    module == "torch._utils" && wrappers.contains(&name)
}

/// Returns whether a class is a DTensor or a ShardedTensor.
pub fn is_distributed(class: (&str, &str)) -> bool {
    class.0.starts_with("torch.distributed") && ["DTensor", "ShardedTensor"].contains(&class.1)
}

fn read_rebuilt(reader: &mut Reader<'_>, function: (&str, &str), args: Items<'_>) -> Result<Option<View>, DecodeError> {
    match function {
        ("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor") => read_plain(reader, args, None).map(Some),
        ("torch._utils", "_rebuild_tensor_v3") => {
            let dtype = dtype(reader, argument(args, 6)?)?;
            read_plain(reader, args, Some(dtype)).map(Some)
        }
        _ => Ok(None),
    }
}

/// Reads a tensor whose class is a subclass of `Tensor`, pickled as `_rebuild_from_type_v2(func, type, args, state)`.
fn read_typed(reader: &mut Reader<'_>, args: Items<'_>) -> Result<Option<View>, DecodeError> {
    let (func, class) = (argument(args, 0)?, argument(args, 1)?.global().unwrap_or_default());
    let inner = argument(args, 2)?.as_tuple();
    let inner = inner.ok_or_else(|| DecodeError::malformed("a tensor subclass without arguments"))?;
    if is_distributed(class) {
        return Ok(None);
    }
    let view = match class {
        ("torch.nn.parameter", _) | ("torch", "Tensor") => {
            let function = func.global().unwrap_or_default();
            reader.read_nested(|reader| read_rebuilt(reader, function, inner))?
        }
        _ => None,
    };
    let (module, name) = class;
    view.map(Some).ok_or_else(|| reader.unsupported(format!("a tensor of class `{module}.{name}`")))
}

/// Returns the argument at `index` of a call.
pub fn argument(args: Items<'_>, index: usize) -> Result<Ref<'_>, DecodeError> {
    args.get(index).ok_or_else(|| DecodeError::malformed(format!("a tensor without argument {index}")))
}

/// Returns the sizes or strides in a tuple. `what` names the tuple in messages.
pub fn dims(node: Ref<'_>, what: &str) -> Result<Dims, DecodeError> {
    // The maximum number of sizes. Many tensors may share a long tuple, and the tuple would be copied for each of them.
    const MAX_DIMS: usize = 255;
    (node.to_dims().filter(|dims| dims.len() <= MAX_DIMS)).ok_or_else(|| {
        let found = if node.as_tuple().is_some() { "a tuple with other values" } else { &node.describe() };
        DecodeError::malformed(format!("expected up to {MAX_DIMS} non-negative integers as the {what}, found {found}"))
    })
}

/// Returns a non-negative integer. `what` names the integer in messages.
pub fn unsigned(node: Ref<'_>, what: &str) -> Result<u64, DecodeError> {
    node.as_u64().ok_or_else(|| {
        let found = node.as_i64().map_or_else(|| format!("`{}`", node.describe()), |number| number.to_string());
        DecodeError::malformed(format!("expected a non-negative integer as the {what}, found {found}"))
    })
}

/// Reads a dtype such as `torch.float32`.
pub fn dtype(reader: &Reader<'_>, node: Ref<'_>) -> Result<Dtype, DecodeError> {
    match node.global() {
        Some(("torch", name)) => {
            Dtype::from_name(name).ok_or_else(|| reader.unsupported(format!("a tensor of dtype `torch.{name}`")))
        }
        _ => Err(DecodeError::malformed(format!("expected a dtype, found `{}`", node.describe()))),
    }
}

/// Reads the arguments `(storage, offset, size, stride, ...)` of a plain tensor.
fn read_plain(reader: &mut Reader<'_>, args: Items<'_>, dtype: Option<Dtype>) -> Result<View, DecodeError> {
    // If a flag in the last argument is true, the data must be conjugated or negated, which dtshard does not support.
    if let Some(flags) = args.get(if dtype.is_some() { 7 } else { 6 }).and_then(Ref::as_dict)
        && flags.into_iter().any(|(_, value)| value.as_bool() == Some(true))
    {
        return Err(reader.unsupported("a tensor with a conjugate or negative bit (call resolve_conj() before saving)"));
    }
    let storage = read_storage(reader, argument(args, 0)?)?;
    let Some(dtype) = dtype.or(storage.dtype) else {
        return Err(DecodeError::malformed("an untyped storage without a dtype"));
    };
    let view = View {
        dtype,
        key: storage.key.into(),
        storage_bytes: storage.bytes,
        offset: unsigned(argument(args, 1)?, "storage offset")?,
        sizes: dims(argument(args, 2)?, "size")?,
        strides: dims(argument(args, 3)?, "stride")?,
    };
    view.check()?;
    Ok(view)
}

impl View {
    /// Checks that all elements of the view are inside the storage, so that reading the elements needs no further
    /// checks.
    fn check(&self) -> Result<(), DecodeError> {
        if self.sizes.len() != self.strides.len() {
            let (sizes, strides) = (self.sizes.len(), self.strides.len());
            return Err(DecodeError::malformed(format!(
                "expected a stride for each dim, found {sizes} dims and {strides} strides"
            )));
        }
        let numel = crate::catalog::checked_len_bytes(&self.sizes, self.dtype);
        let elements = self.storage_bytes / self.dtype.itemsize();
        let end = span(&self.sizes, &self.strides).filter(|span| *span > 0);
        let fits = match end {
            Some(span) => self.offset.checked_add(span).is_some_and(|end| end <= elements),
            // A view without elements fits any storage, because nothing is read.
            None => self.sizes.contains(&0),
        };
        if fits && numel.is_some() {
            return Ok(());
        }
        Err(DecodeError::malformed(format!(
            "expected a tensor inside its storage of {elements} elements, found sizes {:?} and strides {:?} from element {} on",
            self.sizes.as_slice(),
            self.strides.as_slice(),
            self.offset
        )))
    }
}

struct StorageReference<'a> {
    dtype: Option<Dtype>,
    key: &'a str,
    bytes: u64,
}

/// Reads a storage from its persistent id `('storage', class, key, location, numel)`.
fn read_storage<'a>(reader: &Reader<'_>, node: Ref<'a>) -> Result<StorageReference<'a>, DecodeError> {
    let fields: Vec<Ref<'a>> = node.persistent_id().and_then(Ref::as_tuple).map(Iterator::collect).unwrap_or_default();
    let [kind, class, key, location, numel] = fields.as_slice() else {
        return Err(DecodeError::malformed(format!("expected a tensor storage, found `{}`", node.describe())));
    };
    let (Some("storage"), Some((_, class)), Some(key), Some(numel)) =
        (kind.as_str(), class.global(), key.as_str(), numel.as_u64())
    else {
        return Err(DecodeError::malformed(
            "expected a storage as (storage, class, key, location, numel), found other values",
        ));
    };
    if location.as_str() == Some("meta") {
        return Err(reader.unsupported(META));
    }
    let dtype = Dtype::from_storage_class(class);
    if dtype.is_none() && class != "UntypedStorage" {
        return Err(reader.unsupported(format!("a storage of class `{class}`")));
    }
    let bytes = numel.checked_mul(dtype.map_or(1, Dtype::itemsize)).ok_or_else(|| {
        DecodeError::malformed(format!("expected a storage that fits memory, found a storage of {numel} elements"))
    })?;
    Ok(StorageReference { dtype, key, bytes })
}
