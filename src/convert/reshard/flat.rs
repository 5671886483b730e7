//! `reshard` to FSDP1 flat parameters, for another number of ranks. The units come from SRC, from `--like` or from a
//! layout file. This module checks the options of `reshard` and translates them into a [`FlattenRequest`].

use super::super::flatten::{self, FlattenRequest, GroupSize};
use super::super::prepared::Prepared;
use super::super::run::Run;
use super::super::source::ConversionSource;
use super::class::tensor_class;
use crate::convert::options::{ConvertOptions, ReshardOptions};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::layout::DeviceMesh;

/// Lays out a destination that consists of FSDP1 flat parameters.
///
/// # Errors
/// `Usage` for options that do not apply to flat parameters, or if nothing gives the units; the errors of [`flatten::lay_out`].
pub fn prepare(
    args: &ReshardOptions,
    convert: &ConvertOptions,
    source: ConversionSource,
    to: Format,
    run: &Run<'_>,
) -> Result<Prepared> {
    if let Some(placements) = args.placements.first() {
        return Err(Error::usage(
            format!("options::placements {placements}: flat parameters have no placements"),
            "use options::to torch-ranks or options::to dcp to shard each tensor by itself",
        ));
    }
    let plan = [
        ("options::plan", &args.plan),
        ("options::tp", &args.tp),
        ("options::fsdp", &args.fsdp),
        ("options::replicate", &args.replicate),
    ];
    if let Some((option, Some(name))) = plan.into_iter().find(|(_, given)| given.is_some()) {
        return Err(Error::usage(
            format!(
                "{option} {name} has no effect on flat parameters, because FSDP1 always shards the whole flat parameter"
            ),
            "use options::to torch-ranks or options::to dcp to shard each tensor by itself",
        ));
    }
    tensor_class(args.tensor_class, to)?;
    if args.split.is_some() {
        return Err(Error::usage(
            "options::split has no effect on flat parameters, because FSDP1 always splits them in the same way",
            "omit options::split",
        ));
    }
    let mut request = FlattenRequest::default().with_layout(convert, args.layout.as_deref(), &source)?;
    if let Some(text) = args.mesh.first() {
        let mesh = DeviceMesh::parse(text)?;
        request.world_size = u32::try_from(mesh.world_size()).ok();
        request.group = match *mesh.shape() {
            [_] => GroupSize::All,
            [_, shard] => GroupSize::Of(u32::try_from(shard).expect("ranks are 32-bit numbers")),
            _ => {
                return Err(Error::usage(
                    format!("options::mesh {text}: flat parameters are sharded along one mesh dimension only"),
                    "give options::mesh one dimension, or two for HYBRID_SHARD: first replicas, then the ranks of \
                     one shard group",
                ));
            }
        };
    }
    if args.mesh.len() > 1 || !args.mesh_ranks.is_empty() {
        return Err(Error::usage(
            "flat parameters always use the ranks from 0 on, in order",
            "give options::mesh once, and omit options::mesh_ranks",
        ));
    }
    if request.known_layout(&source).is_none() {
        return Err(Error::usage(
            "reshard to flat parameters needs the units of FSDP1, but SRC has no flat parameters",
            "give options::flat_layout FILE or options::layout FILE with the units, or options::like CKPT with flat \
             parameters; or use `dtshard flatten`, which wraps modules with options::wrap",
        ));
    }
    flatten::lay_out(&request, convert, source, to, run)
}
