//! An open checkpoint: the names, shapes and chunk positions of the tensors, and the files that store the tensors.
//! Offsets and sizes of boxes count elements; lengths of buffers are in bytes.

mod read;
mod select;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use crate::catalog::{Dtype, TensorEntry, TensorId, path, state_dict};
use crate::convert::options::{
    CheckOptions, ConvertOptions, ExchangeOptions, ExecuteOptions, InspectOptions, SelectOptions, SourceOptions,
};
use crate::convert::{self, Engine, ReadRequest, Setup};
use crate::describe::{self, Inspection, MapListing};
use crate::error::{Error, Result};
use crate::format::{self, Format, SeriesChoice, Want};
use crate::launch::Launch;
use crate::layout::Rank;
use crate::progress::{NoProgress, Progress};

pub use read::{TensorPart, TensorRead};

/// Options for opening a checkpoint. The default opens everything, as the command line does.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// The format of the source, the resources for reading it, and a declared layout, for a source whose files do not
    /// record the layout.
    pub source: SourceOptions,
    /// The components of a checkpoint folder to read: model, optimizer, other files.
    pub contents: Contents,
    /// Another checkpoint of the same model. It gives the shapes of parameters if the source has FSDP1 flat parameters
    /// without these shapes.
    pub like: Option<PathBuf>,
    /// If true, a set (files that form one checkpoint together) is opened even if some of its files are missing.
    /// [`Checkpoint::missing`] lists the missing files.
    pub incomplete: bool,
    /// If true, an FSDP1 flat parameter is read as a 1-d tensor when the shapes of its parameters are unknown. If false,
    /// unknown shapes are an error.
    pub raw_flat: bool,
    /// If true, wrapper prefixes (`_orig_mod.`, `_fsdp_wrapped_module.`) stay in names: patterns are compared with
    /// names that have these prefixes, and a conversion of the checkpoint keeps the prefixes. If false, patterns of a
    /// declared layout are compared with names without these prefixes.
    pub keep_names: bool,
    /// The rank of the job that saved the checkpoint whose values are read where ranks store values of their own: states of
    /// random number generators, and objects. If this rank stored no value, another rank's value is read, as
    /// [`OnConflict::PerRank`](crate::options::OnConflict::PerRank) chooses it.
    pub rank: u32,
    /// The identity of this process, its stop signal, and the spelling of option names in messages.
    pub setup: Setup,
    /// The options of the conversion that follows; `None` if no conversion follows. Processes that exchange bytes must
    /// set this field, because they check that these options are equal on all processes. With `None`, it is an error to
    /// set `like`, or `flat_layout` in `source`, for a source without FSDP1 flat parameters.
    pub writes: Option<Writes>,
}

/// Options of a conversion that are already needed when the source of the conversion is opened. Processes that exchange
/// bytes check that these options are equal on all processes.
#[derive(Clone, Debug, Default)]
pub struct Writes {
    /// The destination. Processes that exchange bytes find each other in a hidden folder in the parent folder of the
    /// destination.
    pub destination: Option<PathBuf>,
    /// Options for writing the destination.
    pub execute: ExecuteOptions,
    /// If true, the conversion writes nothing to the destination.
    pub dry_run: bool,
    /// Options for exchanging bytes between the processes of a run.
    pub exchange: ExchangeOptions,
    /// Options for the checks that run before anything is written.
    pub checks: CheckOptions,
}

/// The components of a checkpoint folder that are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Contents {
    /// The model, the optimizer, and the other files in the folder are read.
    #[default]
    All,
    /// The model and the optimizer are read.
    State,
    /// Only the model is read.
    Model,
    /// The model is read, and the gradients if there are any.
    ModelAndGradients,
}

impl Contents {
    fn split(self) -> (SeriesChoice, Want) {
        match self {
            Self::All => (SeriesChoice::All, Want::All),
            Self::State => (SeriesChoice::All, Want::State),
            Self::Model => (SeriesChoice::Model, Want::Model),
            Self::ModelAndGradients => (SeriesChoice::ModelAndGradients, Want::Model),
        }
    }
}

/// An open checkpoint, without its tensor data.
///
/// Opening reads headers and metadata files only, so a checkpoint of terabytes opens in seconds. A file that is
/// replaced while the checkpoint is open is detected when a conversion is published.
pub struct Checkpoint {
    /// The catalog and the files of the checkpoint.
    pub(crate) inner: format::Checkpoint,
    /// The connection to the other processes of the run, or `None` if the processes do not exchange bytes.
    pub(crate) peers: Option<convert::Peers>,
    /// Threads and resources, which the conversions of this checkpoint share.
    pub(crate) engine: Arc<Engine>,
    /// The options with which the checkpoint was opened. A conversion of this checkpoint starts with these options.
    pub(crate) convert: ConvertOptions,
    /// The object that receives progress and messages.
    pub(crate) progress: Arc<dyn Progress>,
    /// The rank whose values are read where ranks store values of their own.
    rank: Rank,
    /// The tensors whose copies were compared. The value is true if each rank has its own values.
    compared: Mutex<HashMap<TensorId, bool>>,
    /// The tensors by name. The map is built when a tensor is first looked up by name.
    by_name: OnceLock<HashMap<String, TensorId>>,
    /// The names of the tensors and objects that a selection left out, as the files have them.
    left_out: Vec<String>,
    /// The weight map that was applied, as a JSON document.
    applied_map: Option<serde_json::Value>,
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checkpoint")
            .field("format", &self.inner.format)
            .field("root", &self.inner.root)
            .finish_non_exhaustive()
    }
}

impl Checkpoint {
    /// Opens a file, or a folder, and detects its format.
    ///
    /// `path` may also be a folder above a checkpoint, if exactly one checkpoint is below it.
    ///
    /// # Errors
    /// `Unsupported` if no format matches, `Missing` if files are missing, `Malformed` if a file breaks the rules of
    /// its format.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, &OpenOptions::default(), NoProgress)
    }

    /// Opens a file or a folder with options. `progress` receives the messages of opening.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::open`]; `Usage` for options that do not fit the checkpoint.
    pub fn open_with(path: impl AsRef<Path>, options: &OpenOptions, progress: impl Progress + 'static) -> Result<Self> {
        let progress: Arc<dyn Progress> = Arc::new(progress);
        let convert = options.convert(path.as_ref());
        let engine = match &options.writes {
            None => Engine::reading(&options.source, &options.setup)?,
            Some(writes) => {
                let whereto = (writes.destination.as_deref(), writes.execute.sync);
                Engine::writing(&options.source, &writes.exchange, whereto, &options.setup)?
            }
        };
        let (inner, peers) = engine.work(&progress, |run| -> Result<_> {
            if options.writes.is_some() {
                run.introduce();
            }
            let (series, want) = options.contents.split();
            let (incomplete, raw_flat) = (options.incomplete, options.raw_flat);
            let reading = ReadRequest { like: options.like.as_deref(), series, want, incomplete, raw_flat };
            let opened = convert::open(&convert, reading, run);
            if options.writes.is_some() {
                return opened.map_err(|error| convert::maybe_on_other_nodes(error).within(&convert.src));
            }
            let (checkpoint, peers) = opened?;
            convert::check_flat(&options.source, options.like.as_deref(), &[&checkpoint])?;
            Ok((checkpoint, peers))
        })?;
        Ok(Self {
            inner,
            peers,
            engine: Arc::new(engine),
            convert,
            progress,
            rank: Rank(options.rank),
            compared: Mutex::default(),
            by_name: OnceLock::new(),
            left_out: Vec::new(),
            applied_map: None,
        })
    }

    /// Lists the weight maps that have names of the checkpoint, the best fit first.
    ///
    /// # Errors
    /// `Io` if the configuration of the model cannot be read.
    pub fn maps(&self) -> Result<MapListing> {
        MapListing::of(&self.inner)
    }

    /// Lists how well one weight map, a built-in family or a map file, fits the checkpoint.
    ///
    /// # Errors
    /// `Usage` if there is no such map, `Layout` for a file that is not a map, and `Io`.
    pub fn map_fit(&self, map: &Path) -> Result<MapListing> {
        MapListing::of_map_and(map, &self.inner)
    }

    /// Returns the format of the checkpoint.
    #[must_use]
    pub fn format(&self) -> Format {
        self.inner.format
    }

    /// Returns the file or folder that is the checkpoint: the path that was opened, or a path below it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.inner.root
    }

    /// Returns the names of the series of rank files that were read, such as `model` and `optim`.
    #[must_use]
    pub fn series(&self) -> &[String] {
        &self.inner.series
    }

    /// Returns the files and tensors that are missing, if [`OpenOptions::incomplete`] was set.
    #[must_use]
    pub fn missing(&self) -> &[String] {
        &self.inner.missing
    }

    /// Returns all tensors in the order of the state dict. A tied tensor is returned once for each of its names.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        let named = state_dict::all_tensors(&self.inner.catalog.state);
        named.into_iter().map(|(name, id)| self.tensor_info(name.to_string(), id))
    }

    /// Returns the tensor of this name. A name is the complete dotted path in the state dict.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<TensorInfo<'_>> {
        self.find(name).map(|id| self.tensor_info(name.to_owned(), id))
    }

    /// Returns the values that are not tensors, by their dotted paths, as Python would print them.
    pub fn objects(&self) -> impl Iterator<Item = (String, String)> {
        path::objects(&self.inner.catalog.state).into_iter().map(|(path, value)| (path.to_string(), value.to_string()))
    }

    fn tensor_info(&self, name: String, id: TensorId) -> TensorInfo<'_> {
        TensorInfo { name, checkpoint: &self.inner, entry: self.inner.catalog.tensor(id) }
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        let names = || {
            let named = state_dict::all_tensors(&self.inner.catalog.state);
            named.into_iter().map(|(name, id)| (name.to_string(), id)).collect()
        };
        self.by_name.get_or_init(names).get(name).copied()
    }

    /// Returns a copy of this checkpoint, with the same files, that does not exchange bytes with other processes.
    pub(crate) fn clone_alone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            peers: None,
            engine: Arc::clone(&self.engine),
            convert: self.convert.clone(),
            progress: Arc::new(NoProgress),
            rank: self.rank,
            compared: Mutex::default(),
            by_name: OnceLock::new(),
            left_out: self.left_out.clone(),
            applied_map: self.applied_map.clone(),
        }
    }

    /// Describes the checkpoint: a summary, tables, drawings and a JSON document.
    ///
    /// # Errors
    /// `Usage` for a name that no tensor has; errors of reading tensors if digests are asked for.
    pub fn inspect<'a>(&'a self, options: &'a InspectOptions) -> Result<Inspection<'a>> {
        self.engine.work(&self.progress, |run| Inspection::new(&self.inner, self.applied_map.as_ref(), options, run))
    }

    /// Returns the layout of the tensors as a layout file: a JSON document, and this document converted to TOML.
    ///
    /// # Errors
    /// `Unsupported` if the files do not record a layout, or record more than one.
    pub fn layout(&self) -> Result<(serde_json::Value, String)> {
        describe::layout(&self.inner)
    }

    /// Returns an error for each object (a value that is not a tensor) that ranks store differently, except the state
    /// of random number generators.
    #[must_use]
    pub fn conflicts(&self) -> Vec<Error> {
        self.inner.catalog.conflicts()
    }
}

impl OpenOptions {
    fn convert(&self, path: &Path) -> ConvertOptions {
        let Writes { destination: dst, execute, dry_run, exchange, checks } = self.writes.clone().unwrap_or_default();
        ConvertOptions {
            src: path.to_path_buf(),
            dst,
            execute,
            dry_run,
            select: SelectOptions { keep_names: self.keep_names, ..SelectOptions::default() },
            checks,
            source: self.source.clone(),
            exchange,
            ..ConvertOptions::default()
        }
    }

    /// Returns the launcher of this process, and the part of the work that the process does.
    #[must_use]
    pub fn launch(&self) -> &Launch {
        &self.setup.launch
    }
}

/// One tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct TensorInfo<'a> {
    name: String,
    checkpoint: &'a format::Checkpoint,
    entry: &'a TensorEntry,
}

impl TensorInfo<'_> {
    /// Returns the name of the tensor, which is its complete dotted path in the state dict: `model.layers.0.wq.weight`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the global shape in elements. It is empty for a 0-d tensor.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.entry.shape
    }

    /// Returns the dtype of the tensor.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.entry.dtype
    }

    /// Returns the number of bytes of all elements.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.entry.len_bytes()
    }

    /// Returns the placements in PyTorch's notation, one for each mesh dimension: `S(0),R`. Returns `None` for a plain
    /// tensor, and if the format does not record placements; DCP is such a format.
    #[must_use]
    pub fn placements(&self) -> Option<String> {
        self.entry.sharding.as_deref().map(crate::catalog::Sharding::display_placements)
    }

    /// Returns the device mesh, such as `dp=2,tp=4`. Returns `None` for a plain tensor, and if the format does not
    /// record the mesh.
    #[must_use]
    pub fn mesh(&self) -> Option<String> {
        self.entry.sharding.as_deref().map(|sharding| self.checkpoint.catalog.mesh(sharding).to_string())
    }

    /// Returns whether this is an object instead of a tensor: an object of a class that is not known to be plain data. Such an
    /// object cannot be read; [`Checkpoint::read`] returns an error that names the class.
    #[must_use]
    pub fn is_unreadable_object(&self) -> bool {
        self.entry.is_unreadable_object()
    }

    /// Returns the boxes of the stored chunks, including replicas: for each box the offsets and the sizes, in elements. A chunk
    /// with gaps (of `_StridedShard`) is several boxes.
    #[must_use]
    pub fn boxes(&self) -> Vec<(Vec<u64>, Vec<u64>)> {
        let chunks = self.entry.chunks.iter();
        let boxes = chunks.flat_map(|chunk| chunk.tile.regions().map(|(region, _)| region).collect::<Vec<_>>());
        boxes.map(|region| (region.offsets.to_vec(), region.sizes.to_vec())).collect()
    }

    /// Returns the number of stored chunks, including replicas.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.entry.chunks.len()
    }
}
