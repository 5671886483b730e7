//! Recognising tensors among the calls of a torch.save pickle.
//!
//! A tensor is a view: a storage key, an offset, sizes and strides, all counted in elements. A DTensor is a view of
//! the local part with a mesh and placements; a ShardedTensor is a list of views with their offsets.
//!
//! Source: `torch/_utils.py` (`_rebuild_*`), `torch/_tensor.py` (`_rebuild_from_type_v2`),
//! `torch/distributed/tensor/_api.py`, `torch/distributed/_shard/sharded_tensor/api.py`.

use std::sync::Arc;

use super::mesh::{MeshSpec, read_mesh};
use super::reader::Reader;
use crate::catalog::{Dtype, span};
use crate::format::pickle::{Items, LiftError, Ref};
use crate::layout::{Dims, MeshDim, Placement, ReduceOp, Region, TensorDim, from_shard_order};

/// Part of a storage, as a strided array. Offset, sizes and strides in elements of `dtype`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct View {
    pub dtype: Dtype,
    /// The storage is the record `data/KEY`.
    pub key: Box<str>,
    pub storage_bytes: u64,
    pub offset: u64,
    pub sizes: Dims,
    pub strides: Dims,
}

/// What a tensor node is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    Plain(View),
    Distributed {
        local: View,
        shape: Dims,
        mesh: Arc<MeshSpec>,
        placements: Vec<Placement>,
    },
    /// `all` is what the ranks of the group have.
    Sharded {
        dtype: Dtype,
        shape: Dims,
        /// Of the whole tensor in memory, as [`crate::catalog::TensorEntry::stride`]; the class does not tell it.
        stride: Option<Dims>,
        group: Group,
        local: Vec<(Region, View)>,
        all: Arc<[Region]>,
    },
}

/// The process group that a ShardedTensor lay on, as one of its ranks knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The rank in the job.
    pub rank: u32,
    /// Ranks of the group, and of the job.
    pub sizes: Option<(u32, u32)>,
}

/// The tensor at a node, if it is one.
pub fn recognise(reader: &mut Reader<'_>, node: Ref<'_>) -> Result<Option<Found>, LiftError> {
    let Some(call) = node.call() else { return Ok(None) };
    let args = call.args;
    match (call.module, call.name) {
        ("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor") => plain(reader, args, None).map(Some),
        ("torch._utils", "_rebuild_tensor_v3") => {
            let dtype = dtype(reader, arg(args, 6)?)?;
            plain(reader, args, Some(dtype)).map(Some)
        }
        (
            "torch._utils",
            "_rebuild_parameter" | "_rebuild_parameter_with_state" | "_rebuild_device_tensor_from_cpu_tensor",
        ) => {
            let wrapped = arg(args, 0)?;
            reader.inside(|reader| recognise(reader, wrapped))
        }
        ("torch._tensor", "_rebuild_from_type_v2") => reader.inside(|reader| typed(reader, args)).map(Some),
        ("torch._utils", name) if name.starts_with("_rebuild_") => {
            let kind = name.trim_start_matches("_rebuild_").replace('_', " ");
            Err(reader.unsupported(format!("a tensor of kind `{kind}`")))
        }
        _ => Ok(None),
    }
}

fn arg(args: Items<'_>, index: usize) -> Result<Ref<'_>, LiftError> {
    args.get(index).ok_or_else(|| LiftError::malformed(format!("a tensor without argument {index}")))
}

fn dims(node: Ref<'_>, what: &str) -> Result<Dims, LiftError> {
    // A long tuple that many tensors share would be copied for each.
    const MAX_DIMS: usize = 255;
    (node.to_dims().filter(|dims| dims.len() <= MAX_DIMS))
        .ok_or_else(|| LiftError::malformed(format!("{what} is {}, not a list of sizes", node.describe())))
}

fn unsigned(node: Ref<'_>, what: &str) -> Result<u64, LiftError> {
    node.as_u64().ok_or_else(|| LiftError::malformed(format!("{what} is {}, not a size", node.describe())))
}

/// `torch.<dtype>`
fn dtype(reader: &Reader<'_>, node: Ref<'_>) -> Result<Dtype, LiftError> {
    match node.global() {
        Some(("torch", name)) => {
            Dtype::from_name(name).ok_or_else(|| reader.unsupported(format!("a tensor of dtype `torch.{name}`")))
        }
        _ => Err(LiftError::malformed(format!("a dtype that is {}", node.describe()))),
    }
}

/// (storage, offset, size, stride, ...)
fn plain(reader: &mut Reader<'_>, args: Items<'_>, dtype: Option<Dtype>) -> Result<Found, LiftError> {
    // The last argument, where it is a dict with something in it, says that the data must be conjugated or negated.
    if let Some(flags) = args.get(if dtype.is_some() { 7 } else { 6 }).and_then(Ref::as_dict)
        && flags.into_iter().any(|(_, value)| value.as_bool() == Some(true))
    {
        return Err(reader.unsupported("a tensor with a conjugate or negative bit (call resolve_conj() before saving)"));
    }
    let storage = storage(reader, arg(args, 0)?)?;
    let Some(dtype) = dtype.or(storage.dtype) else {
        return Err(LiftError::malformed("an untyped storage without a dtype"));
    };
    let view = View {
        dtype,
        key: storage.key.into(),
        storage_bytes: storage.bytes,
        offset: unsigned(arg(args, 1)?, "storage offset")?,
        sizes: dims(arg(args, 2)?, "size")?,
        strides: dims(arg(args, 3)?, "stride")?,
    };
    view.check()?;
    Ok(Found::Plain(view))
}

impl View {
    /// Everything that reading the view relies on.
    fn check(&self) -> Result<(), LiftError> {
        if self.sizes.len() != self.strides.len() {
            let (sizes, strides) = (self.sizes.len(), self.strides.len());
            return Err(LiftError::malformed(format!("a tensor of {sizes} dims with {strides} strides")));
        }
        let numel = crate::catalog::checked_len_bytes(&self.sizes, self.dtype);
        let elements = self.storage_bytes / self.dtype.itemsize();
        let end = span(&self.sizes, &self.strides).filter(|span| *span > 0);
        let fits = match end {
            Some(span) => self.offset.checked_add(span).is_some_and(|end| end <= elements),
            // An empty view touches nothing.
            None => self.sizes.contains(&0),
        };
        if fits && numel.is_some() {
            return Ok(());
        }
        Err(LiftError::malformed(format!(
            "a view of sizes {:?} and strides {:?} at {} in a storage of {elements} elements",
            self.sizes.as_slice(),
            self.strides.as_slice(),
            self.offset
        )))
    }
}

struct Storage<'a> {
    dtype: Option<Dtype>,
    key: &'a str,
    bytes: u64,
}

/// `('storage', class, key, location, numel)`
fn storage<'a>(reader: &Reader<'_>, node: Ref<'a>) -> Result<Storage<'a>, LiftError> {
    let fields: Vec<Ref<'a>> = node.persistent_id().and_then(Ref::as_tuple).map(Iterator::collect).unwrap_or_default();
    let [kind, class, key, location, numel] = fields.as_slice() else {
        return Err(LiftError::malformed(format!("a storage that is {}", node.describe())));
    };
    let (Some("storage"), Some((_, class)), Some(key), Some(numel)) =
        (kind.as_str(), class.global(), key.as_str(), numel.as_u64())
    else {
        return Err(LiftError::malformed("a storage reference that is not (storage, class, key, location, numel)"));
    };
    if location.as_str() == Some("meta") {
        return Err(reader.unsupported("a tensor on the meta device, which has no data"));
    }
    let dtype = Dtype::from_storage_class(class);
    if dtype.is_none() && class != "UntypedStorage" {
        return Err(reader.unsupported(format!("a storage of class `{class}`")));
    }
    let bytes = numel
        .checked_mul(dtype.map_or(1, Dtype::itemsize))
        .ok_or_else(|| LiftError::malformed(format!("a storage of {numel} elements")))?;
    Ok(Storage { dtype, key, bytes })
}

/// `_rebuild_from_type_v2(func, type, args, state)`
fn typed(reader: &mut Reader<'_>, args: Items<'_>) -> Result<Found, LiftError> {
    let (func, class) = (arg(args, 0)?, arg(args, 1)?);
    let (inner, state) = (arg(args, 2)?, arg(args, 3)?);
    let (module, name) = class.global().unwrap_or_default();
    let inner = inner.as_tuple().ok_or_else(|| LiftError::malformed("a tensor subclass without arguments"))?;
    match (module, name) {
        (_, "DTensor") if module.starts_with("torch.distributed") => distributed(reader, inner, state),
        (_, "ShardedTensor") if module.starts_with("torch.distributed") => sharded(reader, inner, state),
        ("torch.nn.parameter", _) | ("torch", "Tensor") => match func.global() {
            Some(("torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor")) => plain(reader, inner, None),
            Some(("torch._utils", "_rebuild_tensor_v3")) => {
                let dtype = dtype(reader, arg(inner, 6)?)?;
                plain(reader, inner, Some(dtype))
            }
            _ => Err(reader.unsupported(format!("a tensor of class `{module}.{name}`"))),
        },
        _ => Err(reader.unsupported(format!("a tensor of class `{module}.{name}`"))),
    }
}

/// State of a wrapper subclass: a dict, or `(dict or None, slots)`.
fn attribute<'a>(state: Ref<'a>, name: &str) -> Result<Ref<'a>, LiftError> {
    let parts: Vec<Ref<'a>> = state.as_tuple().map_or_else(|| vec![state], Iterator::collect);
    (parts.iter().find_map(|part| part.get(name)))
        .ok_or_else(|| LiftError::malformed(format!("a distributed tensor without `{name}`")))
}

/// (cls, dtype, size, stride, offset, layout, device, requires grad), {_local_tensor, _spec}
fn distributed(reader: &mut Reader<'_>, args: Items<'_>, state: Ref<'_>) -> Result<Found, LiftError> {
    let shape = dims(arg(args, 2)?, "global size")?;
    let Some(Found::Plain(local)) = recognise(reader, attribute(state, "_local_tensor")?)? else {
        return Err(reader.unsupported("a DTensor whose local tensor is not a plain tensor"));
    };
    let spec = attribute(state, "_spec")?;
    let spec = spec.state().ok_or_else(|| LiftError::malformed("a DTensor spec without state"))?;
    let field =
        |name: &str| spec.get(name).ok_or_else(|| LiftError::malformed(format!("a DTensor spec without `{name}`")));
    let mesh = read_mesh(reader, field("mesh")?)?;
    let placements: Vec<Placement> = field("placements")?
        .as_tuple()
        .ok_or_else(|| LiftError::malformed("placements that are not a tuple"))?
        .map(|node| placement(reader, node))
        .collect::<Result<_, _>>()?;
    let placements = match spec.get("shard_order").filter(|order| !order.is_none()) {
        Some(order) => from_shard_order(mesh.mesh.shape(), &placements, &shard_order(order)?)
            .map_err(|error| LiftError::malformed(error.to_string()))?,
        None => placements,
    };
    Ok(Found::Distributed { local, shape, mesh, placements })
}

/// Tuple of `ShardOrderEntry(tensor_dim, mesh_dims)`.
fn shard_order(node: Ref<'_>) -> Result<Vec<(TensorDim, Vec<MeshDim>)>, LiftError> {
    let malformed = || LiftError::malformed("a shard_order that is not a tuple of (tensor dim, mesh dims)");
    let index = |node: Ref<'_>| node.as_u64().and_then(|value| usize::try_from(value).ok()).ok_or_else(malformed);
    node.as_tuple()
        .ok_or_else(malformed)?
        .map(|entry| {
            let args = entry.object().ok_or_else(malformed)?.args;
            let mesh_dims = arg(args, 1)?.as_tuple().ok_or_else(malformed)?;
            let mesh_dims = mesh_dims.map(|dim| index(dim).map(MeshDim)).collect::<Result<_, _>>()?;
            Ok((TensorDim(index(arg(args, 0)?)?), mesh_dims))
        })
        .collect()
}

fn placement(reader: &Reader<'_>, node: Ref<'_>) -> Result<Placement, LiftError> {
    let Some(object) = node.object() else {
        return Err(LiftError::malformed(format!("a placement that is {}", node.describe())));
    };
    let number = |name: &str| {
        (object.state.and_then(|state| state.get(name)).and_then(Ref::as_u64))
            .ok_or_else(|| LiftError::malformed(format!("a placement {} without `{name}`", object.name)))
    };
    let dim = || number("dim").map(|dim| TensorDim(usize::try_from(dim).unwrap_or(usize::MAX)));
    match object.name {
        "Shard" => Ok(Placement::Shard(dim()?)),
        "_StridedShard" => Ok(Placement::StridedShard { dim: dim()?, split_factor: number("split_factor")? }),
        "Replicate" => Ok(Placement::Replicate),
        "Partial" | "_Partial" => {
            let op = object.state.and_then(|state| state.get("reduce_op")).and_then(Ref::as_str);
            let op = op.and_then(ReduceOp::from_name);
            op.map(Placement::Partial)
                .ok_or_else(|| reader.unsupported("a Partial placement with an unknown reduce_op"))
        }
        name => {
            let why = match name {
                "_MaskPartial" | "MaskPartial" => ", whose mask is not saved with it",
                "_NormPartial" => ", a step on the way to a norm",
                _ => "",
            };
            Err(reader.unsupported(format!("a DTensor with placement `{}.{name}`{why}", object.module)))
        }
    }
}

/// (cls, dtype, size, ...), (local shards, metadata, process group state, spec, init_rrefs)
fn sharded(reader: &mut Reader<'_>, args: Items<'_>, state: Ref<'_>) -> Result<Found, LiftError> {
    let malformed = |what: &str| LiftError::malformed(format!("a ShardedTensor {what}"));
    let dtype = dtype(reader, arg(args, 1)?)?;
    let shape = dims(arg(args, 2)?, "global size")?;
    let fields: Vec<Ref<'_>> = state.as_tuple().map(Iterator::collect).unwrap_or_default();
    let [shards, metadata, group, ..] = fields.as_slice() else {
        return Err(malformed("whose state is not a tuple of five"));
    };
    let number = |name: &str| {
        let value = group.state().and_then(|group| group.get(name)).and_then(Ref::as_u64);
        value.and_then(|value| u32::try_from(value).ok())
    };
    let rank = number("global_rank").ok_or_else(|| malformed("without a rank"))?;
    let group = Group { rank, sizes: number("local_world_size").zip(number("global_world_size")) };
    let mut local = Vec::new();
    for shard in shards.as_list().ok_or_else(|| malformed("without local shards"))? {
        reader.count_shard()?;
        let state = shard.state().ok_or_else(|| malformed("with a shard that has no state"))?;
        let Some(Found::Plain(view)) = recognise(reader, attribute(state, "tensor")?)? else {
            return Err(reader.unsupported("a ShardedTensor whose shard is not a plain tensor"));
        };
        local.push((shard_region(attribute(state, "metadata")?)?, view));
    }
    let listed = metadata
        .state()
        .and_then(|metadata| metadata.get("shards_metadata"))
        .and_then(Ref::as_list)
        .ok_or_else(|| malformed("without shards_metadata"))?;
    let all = listed.map(|shard| reader.count_shard().and_then(|()| shard_region(shard))).collect::<Result<_, _>>()?;
    Ok(Found::Sharded { dtype, shape, stride: None, group, local, all })
}

/// `ShardMetadata(shard_offsets, shard_sizes, placement)`
fn shard_region(node: Ref<'_>) -> Result<Region, LiftError> {
    let state = node.state().ok_or_else(|| LiftError::malformed("a ShardMetadata without state"))?;
    let offsets = dims(attribute(state, "shard_offsets")?, "shard_offsets")?;
    let sizes = dims(attribute(state, "shard_sizes")?, "shard_sizes")?;
    if offsets.len() != sizes.len() {
        return Err(LiftError::malformed("a ShardMetadata with unequal offsets and sizes"));
    }
    Ok(Region::new(offsets, sizes))
}
