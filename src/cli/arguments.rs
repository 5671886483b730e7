//! Converts arguments of the command line to options of the library. No other file uses both.

use std::path::PathBuf;

use super::{self as cli, Command, ConvertArgs, ExchangeArgs, MapArgs, SelectArgs, SourceArgs};
use crate::options::{
    Assets, Backend, CheckOptions, ConsolidateOptions, Contents, ExchangeOptions, FlatOptions, FlattenOptions,
    InspectOptions, MapOptions, OnConflict, ReshardOptions, SelectOptions, ShardOptions, SourceLayoutOptions,
    SourceOptions, SourceVisibility, Strategy, Target, TensorClass, TensorOrder, Tied, UnshardOptions, Weights, Writes,
};
use crate::{Conversion, Dtype, ExecuteOptions, OpenOptions, Setup, VerifyOptions};

impl Command {
    /// Returns the target and the arguments of a verb that converts, or `None` for another verb.
    pub fn conversion(&self) -> Option<(Target, &ConvertArgs)> {
        match self {
            Self::Reshard(args) => Some((args.target(), &args.convert)),
            Self::Unshard(args) => Some((args.target(), &args.convert)),
            Self::Flatten(args) => Some((args.target(), &args.convert)),
            Self::Consolidate(args) => Some((args.target(), &args.convert)),
            Self::Inspect(_) | Self::Verify(_) | Self::Maps(_) | Self::Completions(_) | Self::Man(_) => None,
        }
    }
}

impl SourceArgs {
    pub fn options(&self) -> SourceOptions {
        SourceOptions {
            from: self.from,
            series: self.series.clone(),
            io: self.io.mode(),
            threads: self.threads,
            max_memory: self.max_memory.0,
            allow_missing: self.allow_missing,
            drop_unknown: self.drop_unknown,
            weights: self.weights.map(|weights| match weights {
                cli::source::WeightsArg::Master => Weights::Master,
                cli::source::WeightsArg::Module => Weights::Module,
            }),
            flat_layout: self.flat_layout.clone(),
            layout: SourceLayoutOptions {
                src_mesh: self.layout.src_mesh.clone(),
                src_mesh_ranks: self.layout.src_mesh_ranks.clone(),
                src_placements: self.layout.src_placements.clone(),
                src_split: self.layout.src_split.map(Into::into),
                src_plan: self.layout.src_plan.clone(),
                src_layout: self.layout.src_layout.clone(),
                reduce: self.layout.reduce.clone(),
            },
        }
    }
}

impl SelectArgs {
    pub fn options(&self) -> SelectOptions {
        SelectOptions {
            include: self.include.clone(),
            exclude: self.exclude.clone(),
            include_from: self.include_from.clone(),
            root: self.root.clone(),
            strip_prefix: self.strip_prefix.clone(),
            rename: self.rename.clone(),
            rename_file: self.rename_file.clone(),
            add_prefix: self.add_prefix.clone(),
            nest: self.nest.clone(),
            keep_names: self.keep_names,
            dtype: self.dtype.clone(),
            map: self.map.options(),
        }
    }
}

impl MapArgs {
    pub fn options(&self) -> MapOptions {
        MapOptions {
            map: self.map.clone(),
            config: self.config.clone(),
            set: self.set.clone(),
            drops_state: self.map_state.is_some(),
            dequantize: self.dequantize.map(|dtype| match dtype {
                cli::DequantizedDtype::Bf16 => Dtype::Bf16,
                cli::DequantizedDtype::F32 => Dtype::F32,
            }),
        }
    }
}

impl ExchangeArgs {
    fn options(&self) -> ExchangeOptions {
        ExchangeOptions {
            source: match self.source {
                cli::SourceSight::Shared => SourceVisibility::Shared,
                cli::SourceSight::PerRank => SourceVisibility::PerRank,
            },
            backend: match self.backend {
                cli::Backend::Auto => Backend::Auto,
                cli::Backend::Cpu => Backend::Cpu,
                cli::Backend::Nccl => Backend::Nccl,
                cli::Backend::Mpi => Backend::Mpi,
            },
            fast_reduce: self.fast_reduce,
            bucket_size: self.bucket_size.map(|size| size.0),
        }
    }
}

impl ConvertArgs {
    /// Returns the options for executing the plan of a conversion.
    pub fn execute_options(&self) -> ExecuteOptions {
        let destination = &self.destination;
        ExecuteOptions {
            overwrite: destination.overwrite,
            resume: destination.resume,
            restart: destination.restart,
            sync: !destination.no_sync,
            verify: destination.verify,
        }
    }

    /// Returns the options for opening the source of a conversion to this target, including the options of the run.
    pub fn open_options(&self, target: &Target, setup: Setup) -> OpenOptions {
        let writes = Writes {
            destination: self.dst.clone(),
            execute: self.execute_options(),
            dry_run: self.destination.dry_run,
            exchange: self.exchange.options(),
            checks: CheckOptions {
                on_conflict: self.checks.on_conflict.map(|choice| match choice {
                    cli::OnConflict::Rank0 => OnConflict::Rank0,
                    cli::OnConflict::PerRank => OnConflict::PerRank,
                    cli::OnConflict::Drop => OnConflict::Drop,
                }),
                check_replicas: self.checks.check_replicas,
                check_crc: self.checks.check_crc,
            },
        };
        OpenOptions {
            source: self.source.options(),
            contents: target.contents(),
            like: target.like().map(std::path::Path::to_path_buf),
            keep_names: self.select.keep_names,
            setup,
            writes: Some(writes),
            ..OpenOptions::default()
        }
    }

    /// Adds to a conversion the arguments that are common to all verbs that write: names, formats and DST.
    pub fn apply(&self, conversion: Conversion) -> Conversion {
        let mut conversion = conversion.select(self.select.options()).tied(match self.tied {
            cli::Tied::Keep => Tied::Keep,
            cli::Tied::Drop => Tied::Drop,
            cli::Tied::Write => Tied::Write,
        });
        if let Some(to) = self.destination.to {
            conversion = conversion.to(to);
        }
        if let Some(version) = &self.destination.torch_version {
            conversion = conversion.torch_version(version);
        }
        match &self.dst {
            Some(dst) => conversion.destination(dst),
            None => conversion,
        }
    }
}

impl cli::ShardArgs {
    fn options(&self) -> ShardOptions {
        ShardOptions { like: self.like.clone(), max_shard_size: self.max_shard_size.0 }
    }
}

impl cli::Reshard {
    pub fn target(&self) -> Target {
        Target::Sharded(ReshardOptions {
            mesh: self.mesh.clone(),
            mesh_ranks: self.mesh_ranks.clone(),
            placements: self.placements.clone(),
            layout: self.layout.clone(),
            plan: self.plan.clone(),
            tp: self.tp.clone(),
            fsdp: self.fsdp.clone(),
            replicate: self.replicate.clone(),
            ddp: self.ddp.clone(),
            split: self.split.map(Into::into),
            like: self.like.clone(),
            fill_from: self.fill_from.clone(),
            tensor_class: self.tensor_class.map(|class| match class {
                cli::TensorClass::Auto => TensorClass::Auto,
                cli::TensorClass::DTensor => TensorClass::DTensor,
                cli::TensorClass::ShardedTensor => TensorClass::ShardedTensor,
                cli::TensorClass::Local => TensorClass::Local,
            }),
        })
    }
}

impl cli::Unshard {
    pub fn target(&self) -> Target {
        Target::Whole(UnshardOptions {
            all_ranks: self.all_ranks,
            unit: self.unit.clone(),
            with_grads: self.with_grads,
            shards: self.shards.options(),
        })
    }
}

impl cli::Flatten {
    pub fn target(&self) -> Target {
        let flat = &self.flat;
        Target::Flat(FlattenOptions {
            flat: FlatOptions {
                world_size: flat.world_size,
                wrap: flat.wrap.clone(),
                use_orig_params: flat.use_orig_params,
                strategy: flat.strategy.map(|strategy| match strategy {
                    cli::Strategy::FullShard => Strategy::FullShard,
                    cli::Strategy::HybridShard => Strategy::HybridShard,
                    cli::Strategy::NoShard => Strategy::NoShard,
                }),
                shard_group_size: flat.shard_group_size,
                forward_dtype: flat.forward_dtype.clone(),
                buffers: flat.buffers.clone(),
                layout: flat.layout.clone(),
                like: flat.like.clone(),
            },
        })
    }
}

impl cli::Consolidate {
    pub fn target(&self) -> Target {
        let assets = match &self.assets {
            None => Assets::Found,
            Some(none) if none.as_os_str() == "none" => Assets::None,
            Some(folder) => Assets::From(PathBuf::from(folder)),
        };
        let shards = self.shards.options();
        Target::Model(ConsolidateOptions { everything: self.everything, assets, shards })
    }
}

impl cli::Inspect {
    /// Returns the options for opening the checkpoint. A checkpoint with missing files can be inspected, too.
    pub fn open_options(&self, setup: Setup) -> OpenOptions {
        OpenOptions {
            source: self.source.options(),
            contents: Contents::State,
            like: self.shapes.like.clone(),
            incomplete: true,
            raw_flat: !self.layout,
            setup,
            ..OpenOptions::default()
        }
    }

    pub fn options(&self) -> InspectOptions {
        let sort = match self.sort {
            None => TensorOrder::StateDict,
            Some(cli::SortKey::Size) => TensorOrder::Size,
            Some(cli::SortKey::Name) => TensorOrder::Name,
        };
        InspectOptions { brief: self.brief, tensor: self.tensor.clone(), digest: self.digest, all: self.all, sort }
    }
}

impl cli::Verify {
    pub fn options(&self) -> VerifyOptions {
        VerifyOptions {
            src: self.src.clone(),
            other: self.other.clone(),
            common: self.common,
            select: self.select.options(),
            like: self.shapes.like.clone(),
            source: self.source.options(),
        }
    }
}
