//! Conversions: [`Conversion`] is a builder that describes the output, and [`Plan`] has the layout of every output file
//! and executes the conversion.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::catalog::Dtype;
use crate::checkpoint::{Checkpoint, Contents};
use crate::convert::options::{
    ConsolidateOptions, ConvertOptions, ExecuteOptions, FlattenOptions, ReshardOptions, SelectOptions, Tied,
    UnshardOptions,
};
use crate::convert::{self, ConversionSource, Defaults, Engine, Prepared, Preview, Report};
use crate::error::Result;
use crate::format::Format;
use crate::layout::{DeviceMesh, Pattern, parse_placements};
use crate::progress::Progress;
use crate::quantity::{count, human_bytes};
use crate::select::{Root, Wrappers};

/// The kind of result that a conversion writes, with the options of this kind.
#[derive(Clone, Debug)]
pub enum Target {
    /// The result has every tensor and object, sharded for a mesh. Placements, world size and format may differ from
    /// the source.
    Sharded(ReshardOptions),
    /// The result has complete tensors, in the nested state dict of the source.
    Whole(UnshardOptions),
    /// The result has FSDP1 flat parameters.
    Flat(FlattenOptions),
    /// The result has only the model, with complete tensors, and the config and tokenizer files that loaders need
    /// beside it.
    Model(ConsolidateOptions),
}

impl Target {
    /// Returns the components of a checkpoint folder that a conversion to this target reads.
    #[must_use]
    pub fn contents(&self) -> Contents {
        match self {
            Self::Sharded(_) | Self::Flat(_) => Contents::All,
            Self::Whole(options) if options.with_grads => Contents::ModelAndGradients,
            Self::Whole(_) | Self::Model(_) => Contents::Model,
        }
    }

    /// Returns the option `like` of this target: the path of another checkpoint of the model. The target determines
    /// what the result gets from this checkpoint, such as the layout. When the source is opened, the checkpoint also
    /// gives the shapes of parameters that the source lacks.
    #[must_use]
    pub fn like(&self) -> Option<&Path> {
        match self {
            Self::Sharded(options) => options.like.as_deref(),
            Self::Whole(options) => options.shards.like.as_deref(),
            Self::Flat(options) => options.flat.like.as_deref(),
            Self::Model(options) => options.shards.like.as_deref(),
        }
    }

    fn defaults(&self) -> Defaults {
        match self {
            Self::Sharded(_) | Self::Flat(_) => Defaults::everything(),
            Self::Whole(options) => {
                Defaults { root: Root::Whole, wrappers: Wrappers::Cut, without_gradients: !options.with_grads }
            }
            Self::Model(options) => Defaults {
                root: if options.everything { Root::Whole } else { Root::Model },
                wrappers: Wrappers::Cut,
                without_gradients: false,
            },
        }
    }
}

/// A builder that describes the output of a conversion. Without further calls, the output has every tensor and object,
/// unchanged.
///
/// Patterns match complete names: `*` matches within one component, `**` matches across dots, `{a,b}` matches either
/// alternative. A pattern that matches a module covers every name below it.
#[derive(Debug)]
pub struct Conversion {
    checkpoint: Checkpoint,
    target: Target,
    convert: ConvertOptions,
}

impl From<Checkpoint> for Conversion {
    /// Starts from all tensors and objects of a checkpoint.
    fn from(checkpoint: Checkpoint) -> Self {
        let convert = checkpoint.convert.clone();
        Self { checkpoint, target: Target::Sharded(ReshardOptions::default()), convert }
    }
}

impl Conversion {
    /// Starts from all tensors and objects of a checkpoint, which stays open. The catalog of the checkpoint is copied,
    /// and planning reports no progress. Processes that exchange bytes must use [`Conversion::from`], which takes
    /// ownership of the checkpoint.
    #[must_use]
    pub fn of(checkpoint: &Checkpoint) -> Self {
        checkpoint.clone_alone().into()
    }

    /// Keeps only names that `pattern` covers, and their optimizer state. If this method is called several times, a
    /// name is kept if at least one of the patterns covers the name.
    ///
    /// # Errors
    /// `Layout` for an invalid pattern. Planning fails if the pattern covers nothing.
    pub fn include(mut self, pattern: &str) -> Result<Self> {
        Pattern::parse(pattern)?;
        self.convert.select.include.push(pattern.to_owned());
        Ok(self)
    }

    /// Leaves out names that `pattern` covers, and their optimizer state.
    ///
    /// # Errors
    /// The errors of [`Conversion::include`].
    pub fn exclude(mut self, pattern: &str) -> Result<Self> {
        Pattern::parse(pattern)?;
        self.convert.select.exclude.push(pattern.to_owned());
        Ok(self)
    }

    /// Sets all options for names and dtypes. Replaces what earlier calls of [`Conversion::include`],
    /// [`Conversion::exclude`] and [`Conversion::cast`] have set.
    #[must_use]
    pub fn select(mut self, select: SelectOptions) -> Self {
        self.convert.select = select;
        self
    }

    /// Casts f32, f16 and bf16 tensors of one or more dimensions, except optimizer state and the scales of quantised
    /// tensors. Rounds to nearest even, as `Tensor.to` does.
    #[must_use]
    pub fn cast(mut self, dtype: Dtype) -> Self {
        self.convert.select.dtype.push(dtype.name().to_owned());
        self
    }

    /// Chooses how a tensor with several names (tied weights) is written.
    #[must_use]
    pub fn tied(mut self, tied: Tied) -> Self {
        self.convert.tied = tied;
        self
    }

    /// Distributes the result over a mesh, such as `dp=2,tp=4`. Without rules, the placements of the source are kept if
    /// the mesh has the dimensions of the source mesh, or dimensions with the same names; otherwise, on a mesh of one
    /// dimension, tensors get `S(0)`. On any other mesh, planning fails without rules.
    ///
    /// # Errors
    /// `Layout` for an invalid mesh.
    pub fn mesh(mut self, mesh: &str) -> Result<Self> {
        DeviceMesh::parse(mesh)?;
        self.sharded().mesh.push(mesh.to_owned());
        Ok(self)
    }

    /// Adds a placement rule: tensors that `pattern` covers get `placements`, one for each mesh dimension, such as
    /// `S(0),R`. The first rule that matches a tensor wins; optimizer state follows its parameter.
    ///
    /// # Errors
    /// `Layout` for an invalid pattern or invalid placements. Planning fails if the placements do not fit a tensor.
    pub fn place(mut self, pattern: &str, placements: &str) -> Result<Self> {
        Pattern::parse(pattern)?;
        parse_placements(placements)?;
        self.sharded().placements.push(format!("{pattern}={placements}"));
        Ok(self)
    }

    /// Sets the placements of tensors that no rule matches, one for each mesh dimension. If a placement does not fit a
    /// tensor, the tensor is replicated on that mesh dimension.
    ///
    /// # Errors
    /// `Layout` for invalid placements.
    pub fn place_all(mut self, placements: &str) -> Result<Self> {
        parse_placements(placements)?;
        self.sharded().placements.push(placements.to_owned());
        Ok(self)
    }

    /// Converts the tensors to another convention of names and contents, by a weight map. `map` is a model family, the path of a
    /// map file or `auto`, then `:TO`, or `:FROM:TO`: for example `llama:hf`.
    #[must_use]
    pub fn map(mut self, map: impl Into<String>) -> Self {
        self.convert.select.map.map = Some(map.into());
        self
    }

    /// Makes the target complete tensors in the nested state dict.
    #[must_use]
    pub fn whole_tensors(self) -> Self {
        self.target(Target::Whole(UnshardOptions::default()))
    }

    /// Makes the target the model only: complete tensors under the names that loaders expect, with config and tokenizer
    /// files beside it.
    #[must_use]
    pub fn model(self) -> Self {
        self.target(Target::Model(ConsolidateOptions::default()))
    }

    /// Sets the kind of result, with all its options. Replaces the settings of [`Conversion::mesh`],
    /// [`Conversion::place`] and [`Conversion::place_all`].
    #[must_use]
    pub fn target(mut self, target: Target) -> Self {
        self.target = target;
        self
    }

    /// Sets the format to write. If it is not set, the target or the suffix of the destination determines the format.
    #[must_use]
    pub fn to(mut self, format: Format) -> Self {
        self.convert.destination.to = Some(format);
        self
    }

    /// Sets the version of PyTorch that must be able to load the output, such as `2.9`. DTensors in rank files are
    /// written in the form of this version.
    #[must_use]
    pub fn torch_version(mut self, version: impl Into<String>) -> Self {
        self.convert.destination.torch_version = Some(version.into());
        self
    }

    /// Sets the destination. Its suffix determines the format, unless [`Conversion::to`] sets the format. If the output
    /// is a single file, the last component of the path is the name of this file.
    #[must_use]
    pub fn destination(mut self, path: impl Into<PathBuf>) -> Self {
        self.convert.dst = Some(path.into());
        self
    }

    fn sharded(&mut self) -> &mut ReshardOptions {
        if !matches!(self.target, Target::Sharded(_)) {
            self.target = Target::Sharded(ReshardOptions::default());
        }
        match &mut self.target {
            Target::Sharded(options) => options,
            _ => unreachable!("it was just set"),
        }
    }

    /// Checks the description against the source, checks that the chunks of every tensor cover each element exactly
    /// once, and lays out every file of the result: its length, its headers, and the position of every chunk. Writes
    /// nothing to the destination.
    ///
    /// # Errors
    /// `Coverage` if chunks of a tensor leave a gap or overlap; `Conflict` if ranks store different values; `Usage` and
    /// `Layout` for a description that does not fit the source.
    pub fn plan(self) -> Result<Plan> {
        let Self { checkpoint, target, convert } = self;
        let Checkpoint { inner, peers, engine, progress, .. } = checkpoint;
        let prepared = engine.work(&progress, |run| -> Result<Prepared> {
            let source = ConversionSource::choose(inner, peers, &convert, target.defaults(), run)?;
            let mut prepared = match &target {
                Target::Sharded(options) => convert::prepare::reshard(options, &convert, source, run),
                Target::Whole(options) => convert::prepare::unshard(options, &convert, source, run),
                Target::Flat(options) => convert::prepare::flatten(options, &convert, source, run),
                Target::Model(options) => convert::prepare::consolidate(options, &convert, source, run),
            }?;
            convert::complete(&mut prepared, &convert, run)?;
            Ok(prepared)
        })?;
        Ok(Plan { prepared, convert, engine, progress })
    }
}

/// The plan of a conversion, which has the layout of every output file. `Display` prints a summary.
pub struct Plan {
    prepared: Prepared,
    convert: ConvertOptions,
    engine: Arc<Engine>,
    progress: Arc<dyn Progress>,
}

impl Plan {
    /// Computes the number of bytes that an execution would read, and the memory that it would need. Also checks the
    /// destination, if [`Conversion::destination`] has set one.
    ///
    /// After a preview, processes that exchange bytes are disconnected, so they cannot execute the plan any more.
    ///
    /// # Errors
    /// Errors of reading the source.
    pub fn preview(&mut self) -> Result<Preview<'_>> {
        let Self { prepared, convert, engine, progress } = self;
        engine.work(progress, |run| convert::preview(prepared, convert, &engine.workers, run))
    }

    /// Moves the bytes and publishes the result at `destination`. Missing parent folders are created. If several
    /// processes share a conversion, each process writes only its own share of the output; [`Report::outcome`] shows
    /// whether the destination is complete.
    ///
    /// A single output file is written at exactly this path. The suffix of `destination` does not select the format;
    /// the suffix of the path given to [`Conversion::destination`] does.
    ///
    /// # Atomicity
    /// Files are written to a hidden folder beside `destination`, synced, and renamed. A process that is killed leaves
    /// the hidden folder, never a partial destination. An existing destination is an error unless
    /// [`ExecuteOptions::overwrite`] is set.
    ///
    /// # Memory
    /// Anonymous memory stays below [`SourceOptions::max_memory`](crate::options::SourceOptions::max_memory) plus the
    /// catalog, which grows with the number of chunks, not with their bytes.
    ///
    /// # Errors
    /// `Malformed` for damaged files; `Io` with the path of the file; `Usage` for a destination that already exists;
    /// `Stopped` after [`Stop`](crate::Stop) was raised; `Comm` if another process fails; `Device` if a GPU fails.
    /// After an error, nothing is published.
    pub fn execute(
        &mut self,
        destination: impl AsRef<Path>,
        options: &ExecuteOptions,
        progress: impl Progress + 'static,
    ) -> Result<Report> {
        self.progress = Arc::new(progress);
        self.convert.execute = options.clone();
        let destination = destination.as_ref();
        self.convert.dst = Some(destination.to_path_buf());
        let Self { prepared, convert, engine, progress } = self;
        engine.work_synced(options.sync, progress, |run| convert::execute(prepared, convert, destination, run))
    }

    /// Returns the format to write.
    #[must_use]
    pub fn format(&self) -> Format {
        self.prepared.to
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Prepared { source, reservation, carried, to, .. } = &self.prepared;
        let (given, format) = source.given();
        writeln!(f, "source        {} ({format})", given.display())?;
        writeln!(f, "target        {to}")?;
        writeln!(f, "files         {}", count(reservation.files.len() + carried.len(), "file"))?;
        writeln!(f, "tensors       {}", reservation.tensors.len())?;
        write!(f, "bytes written {}", human_bytes(self.prepared.len_bytes()))
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Plan({self})")
    }
}
