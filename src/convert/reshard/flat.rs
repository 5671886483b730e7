//! `reshard` to flat parameters: those of SRC, or of a checkpoint like it, for another number of ranks.

use super::super::flatten::{self, FlattenRequest, GroupSize};
use super::super::prepared::Prepared;
use super::super::run::Run;
use super::super::source::ConversionSource;
use super::class::tensor_class;
use crate::convert::options::ReshardOptions;
use crate::error::{Error, Result};
use crate::format::Format;
use crate::layout::DeviceMesh;

pub fn prepare(args: &ReshardOptions, source: ConversionSource, to: Format, run: &Run<'_>) -> Result<Prepared> {
    if let Some(placements) = args.placements.first() {
        return Err(Error::usage(
            format!("options::placements {placements}: flat parameters have none"),
            "options::to torch-ranks or options::to dcp writes tensors that are sharded one by one",
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
            format!("{option} {name}: flat parameters are cut as a whole, by FSDP1 alone"),
            "options::to torch-ranks or options::to dcp writes tensors that are sharded one by one",
        ));
    }
    tensor_class(args.tensor_class, to)?;
    if args.split.is_some() {
        return Err(Error::usage("options::split: flat parameters are cut in one way", "leave it out"));
    }
    let mut wish = FlattenRequest::default().with_layout(&args.convert, args.layout.as_deref(), &source)?;
    if let Some(text) = args.mesh.first() {
        let mesh = DeviceMesh::parse(text)?;
        wish.world_size = u32::try_from(mesh.world_size()).ok();
        wish.group = match *mesh.shape() {
            [_] => GroupSize::All,
            [_, shard] => GroupSize::Of(u32::try_from(shard).expect("ranks are 32-bit numbers")),
            _ => {
                return Err(Error::usage(
                    format!("options::mesh {text}: flat parameters are cut once"),
                    "give one dim, or two for HYBRID_SHARD: the copies, then the ranks that share one",
                ));
            }
        };
    }
    if args.mesh.len() > 1 || !args.mesh_ranks.is_empty() {
        return Err(Error::usage(
            "flat parameters lie on the ranks from 0 on, in order",
            "give one options::mesh, without options::mesh_ranks",
        ));
    }
    flatten::lay_out(&wish, &args.convert, source, to, run)
}
