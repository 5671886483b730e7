//! Checkpoint formats: the conversion between bytes on disk and a [`Catalog`].
//!
//! Each format has a module of its own, which reads a checkpoint as a catalog, and lays out the files of a new
//! checkpoint ([`Reservation`](crate::catalog::Reservation)). Formats never copy tensor data.

pub mod archive;
pub mod checksum;
pub mod dcp;
mod dcp_hf;
pub mod declared_layout;
mod deepspeed;
mod deepspeed_universal;
mod detect;
mod entry;
pub(crate) mod error;
mod find_checkpoint;
mod foreign;
pub mod fsdp_flat;
pub mod index;
mod json;
pub mod known_files;
pub mod layout_file;
mod listing;
pub mod local;
mod metadata_ranges;
mod output_placing;
pub mod parallelize;
mod parameter_layout;
mod parts;
mod rank_names;
mod reading;
pub mod safetensors;
mod scalar;
mod series;
mod sets;
mod shortfall;
pub mod torch;
mod torch_checkpointing;
mod torchsnapshot;
mod traits;

use std::collections::HashSet;
use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

pub use declared_layout::DeclaredLayout;
pub use entry::{FormatEntry, TensorStorage, Writers};
pub use find_checkpoint::{Want, companions, may_lead_on};
pub use foreign::refuse_address;
pub use listing::is_data_file;
pub use metadata_ranges::{MirrorOf, is_read, metadata_ranges, metadata_ranges_of_items, objects};
pub use output_placing::Placing;
pub use parts::{CheckpointPart, PartContent};
pub use rank_names::{RankName, RankNamePattern};
pub use reading::RanksWithFiles;
pub use scalar::read_scalar;
pub use series::SeriesChoice;
pub use traits::{Layouts, Objects, ShardedTarget, StateTarget, WholeTarget, WriteShards, WriteState, WriteWhole};

pub use crate::name_list::natural_order;

use parts::LoadedFolder;
use reading::ReadFindings;
use torch::ranks::PlainKind;

use foldhash::fast::RandomState;
use torch_pickle::pickle::Unknown;

use crate::catalog::path::{Path as StatePath, tensors};
use crate::catalog::{
    Catalog, ChecksummedRange, FileLocation, StridedLocation, TensorEntry, Weights, contiguous_strides,
};
use crate::error::{Error, FormatError, Result};
use crate::layout::parallelize::ParameterOrder;
use crate::name_list::{FEW, short_list};
use crate::quantity::count;
use crate::storage::lookup::{self, FileKind};
use crate::storage::{Files, IoMode, MirroredFiles, filesystem};

/// The maximum length of the state of a random number generator, in bytes.
const MAX_RANDOM_STATE_BYTES: u64 = 1 << 20;

/// Declares the enum [`Format`], and maps each format to its row in the table of formats.
macro_rules! formats {
    ($($format:ident => $entry:path,)*) => {
        /// A checkpoint format. Each format has a row in the table of formats.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Format {
            $(
                #[allow(missing_docs, reason = "its row of the table describes a format")]
                $format,
            )*
        }

        impl Format {
            /// All formats, in the order of help texts.
            pub const ALL: &'static [Self] = &[$(Self::$format),*];

            /// Returns the row of this format in the table of formats.
            #[must_use]
            pub fn entry(self) -> &'static FormatEntry {
                match self {
                    $(Self::$format => &$entry,)*
                }
            }
        }
    };
}

formats! {
    Dcp => dcp::entry::ENTRY,
    Safetensors => safetensors::entry::ENTRY,
    DcpHf => dcp_hf::entry::ENTRY,
    Torch => torch::entry::ONE_FILE,
    TorchRanks => torch::entry::RANK_FILES,
    FsdpFlat => fsdp_flat::entry::ENTRY,
    Local => local::entry::ENTRY,
    Torchsnapshot => torchsnapshot::entry::ENTRY,
    TorchCheckpointing => torch_checkpointing::entry::ENTRY,
    Deepspeed => deepspeed::entry::ENTRY,
    DeepspeedUniversal => deepspeed_universal::entry::ENTRY,
}

impl Format {
    /// Returns the format with this name, as used by `--from` and `--to`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|format| format.name() == name)
    }

    /// Returns the format of a destination whose file name has this suffix.
    #[must_use]
    pub fn from_suffix(suffix: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|format| format.entry().suffixes.contains(&suffix))
    }

    /// Returns the name of the format, as used by `--from` and `--to`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.entry().name
    }

    /// Returns the form in which the format stores a tensor that is distributed over ranks.
    #[must_use]
    pub fn tensors(self) -> TensorStorage {
        self.entry().tensors
    }

    /// Returns whether the format can store objects, which are values that are not tensors.
    #[must_use]
    pub fn holds_objects(self) -> bool {
        self.entry().holds_objects
    }

    /// Returns whether a checkpoint of the format has one file per rank, in one or more series.
    #[must_use]
    pub fn has_rank_files(self) -> bool {
        self.entry().has_rank_files
    }

    /// Returns whether the format stores values for each rank separately, so that ranks can have different values.
    #[must_use]
    pub fn is_by_rank(self) -> bool {
        matches!(self.tensors(), TensorStorage::Ranks | TensorStorage::Flat)
    }

    /// Returns whether the format keeps the order and the strides that tensors have in the state dict of a module.
    #[must_use]
    pub fn keeps_order(self) -> bool {
        self.entry().keeps_order
    }

    /// Returns whether the format stores tensors in the order in which modules registered them.
    #[must_use]
    pub fn order(self) -> ParameterOrder {
        if self.entry().is_in_module_order { ParameterOrder::Registered } else { ParameterOrder::Unknown }
    }

    /// Returns the verbs that can write the format.
    #[must_use]
    pub fn writing_verbs(self) -> Vec<&'static str> {
        let Writers { shards, whole, state } = self.entry().writers;
        let flat = self.tensors() == TensorStorage::Flat;
        let verbs = [
            ("reshard", shards.is_some() || state.is_some() || flat),
            ("unshard", whole.is_some() || self.has_rank_files()),
            ("flatten", flat),
            ("consolidate", whole.is_some()),
        ];
        verbs.into_iter().filter(|(_, writes)| *writes).map(|(verb, _)| verb).collect()
    }
}

impl fmt::Display for Format {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// A checkpoint that has been read: its catalog, and the files that contain the tensor data.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The format of the checkpoint.
    pub format: Format,
    /// The file or folder that was read as the checkpoint.
    pub root: PathBuf,
    /// The path that the user gave, if the checkpoint was found in a folder below it.
    pub resolved_from: Option<PathBuf>,
    /// The files of the checkpoint, from which tensor data is read.
    pub files: Files,
    /// The tensors and the state dict.
    pub catalog: Catalog,
    /// The checkpoints that were joined into this checkpoint, for example one for each series of rank files.
    pub parts: Vec<CheckpointPart>,
    /// Regular files below the root that are not part of the checkpoint, relative to the root. Listed only for
    /// [`Want::All`].
    pub beside: Vec<PathBuf>,
    /// The names of the series of rank files that were read; empty if the format has no rank files.
    pub series: Vec<String>,
    /// The names of the series of rank files that were not read.
    pub skipped_series: Vec<String>,
    /// The names of folders beside the root that also belong to the checkpoint, and were not read.
    pub skipped_folders: Vec<String>,
    /// The names of missing files and tensors. Filled only if [`ReadOptions::show_incomplete`] is set; otherwise empty.
    pub missing: Vec<String>,
    /// The ranks that have a file, for formats with one file per rank.
    pub ranks: RanksWithFiles,
    /// The metadata mirror (a sparse copy of the metadata of all files) from which this checkpoint was read; `None` if
    /// the original files were read.
    pub mirror: Option<MirrorOf>,
}

/// Options for reading a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// The format that the user requires; `None` to detect the format.
    pub from: Option<Format>,
    /// The series of rank files to read.
    pub series: SeriesChoice,
    /// The way to read files; `None` to choose it by the file system.
    pub io: Option<IoMode>,
    /// The components of the checkpoint to read: model, optimizer, other files.
    pub want: Want,
    /// If true, the existing files of an incomplete set are read. If false, an incomplete set is an error.
    pub show_incomplete: bool,
    /// If true, rank files may be missing. A later check confirms that the existing files have all elements of each
    /// tensor.
    pub allow_missing: bool,
    /// If true, objects are left out if their class is not known to be plain data. If false, an object of such a class
    /// is an error.
    pub drop_unknown: bool,
    /// The source of the information about flat parameters that rank files do not contain.
    pub flat: FlatKnowledge,
    /// The weights to read from a checkpoint that has master weights beside the parameters of the module; `None` for the
    /// master weights, if there are any.
    pub weights: Option<Weights>,
    /// The layout of plain tensors on ranks, declared by the user because the files do not record it.
    pub declared_layout: Option<DeclaredLayout>,
    /// For each file of the metadata mirror, the byte ranges that the mirror contains; empty if the original files are
    /// read.
    pub holdings: Arc<MirroredFiles>,
}

/// Sources of the information about flat parameters that rank files lack: the units, and the order and shapes of
/// parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlatKnowledge {
    /// The path of a flat layout file.
    pub layout: Option<PathBuf>,
    /// A checkpoint of the same model, in which parameters have their original shapes.
    pub like: Option<PathBuf>,
    /// If true and no source gives the shapes of parameters, flat parameters are read as they are stored.
    pub raw: bool,
    /// Applies to a model with sharded parameters whose optimizer has state of flat parameters. If true, optimizer
    /// state that cannot be divided among the parameters is an error. If false, such state is left out with a warning
    /// if `raw` is true, and is an error if `raw` is false. For a model with flat parameters, `raw` alone decides.
    pub is_strict: bool,
}

impl ReadOptions {
    fn unknown(&self) -> Unknown {
        if self.drop_unknown { Unknown::Drop } else { Unknown::Refuse }
    }

    fn plain(&self) -> PlainKind {
        if self.declared_layout.is_some() { PlainKind::Declared } else { PlainKind::Replicas }
    }
}

impl Checkpoint {
    /// Finds the checkpoint at `path` or in a folder below it, and reads everything except tensor data.
    ///
    /// # Errors
    /// `Unsupported` for formats that cannot be read, `Usage` if the path contains several checkpoints, `Malformed`
    /// and `Conflict` for damaged checkpoints, `Io`.
    pub fn open(path: &Path, options: &ReadOptions) -> Result<Self> {
        let find_checkpoint::CheckpointLocation { root, folders, skipped_folders, weights, note } =
            find_checkpoint::find(path, options)?;
        let io = match options.io {
            Some(io) => io,
            None => filesystem::preferred_io(&root)?,
        };
        let mut reading = ReadFindings::new(options, io);
        let (mut loaded, mut formats) = (Vec::new(), Vec::new());
        for (folder, found) in folders {
            let (format, own) = reading.read(&parts::join_folder(&root, &folder), found)?;
            formats.push((folder.clone(), format));
            loaded.push((folder, own));
        }
        find_checkpoint::same_format(&root, &formats)?;
        let LoadedFolder { mut catalog, parts } = match loaded.len() {
            1 if loaded[0].0.as_os_str().is_empty() => loaded.pop().expect("one folder").1,
            _ => parts::join(loaded),
        };
        if catalog.plain_may_be_parts {
            parameter_layout::follow_parameters(&mut catalog);
        }
        match &options.declared_layout {
            Some(_) if reading.has_applied_layout => {}
            Some(declared) => {
                let (files, order) = (&reading.files, formats[0].1.order());
                declared_layout::apply(declared, &mut catalog, &root, (files, &reading.ranks), order)?;
            }
            None if catalog.plain_may_be_parts => parameter_layout::mark_unknown(&mut catalog, &root),
            None => {}
        }
        check_total(&root, &catalog)?;
        catalog.weights = catalog.weights.or(weights);
        catalog.notes.extend(note);
        if parts.iter().all(|part| part.folder.as_os_str().is_empty()) && options.want != Want::Model {
            catalog.warnings.extend(find_checkpoint::warn_of_accelerate_folders(&root)?);
        }
        let beside = match options.want {
            Want::All if lookup::is_folder(&root)? => reading.beside(&root, &mut catalog)?,
            Want::All | Want::State | Want::Model => Vec::new(),
        };
        let resolved_from = (root != path).then(|| path.to_path_buf());
        let ReadFindings { files, series, skipped_series, missing, ranks, .. } = reading;
        let format = formats[0].1;
        Ok(Self {
            format,
            root,
            resolved_from,
            files,
            catalog,
            parts,
            beside,
            series,
            skipped_series,
            skipped_folders,
            missing,
            ranks,
            mirror: None,
        })
    }

    /// Returns whether the file names show that plain tensors are shards, and no layout is known for them.
    #[must_use]
    pub fn has_undeclared_shards(&self) -> bool {
        let is_series_of_shards =
            |part: &CheckpointPart| part.name_pattern.as_ref().is_some_and(RankNamePattern::has_shards);
        let mut unreadable = self.catalog.tensors.iter().filter_map(|entry| entry.unreadable.as_ref());
        self.parts.iter().any(is_series_of_shards) && unreadable.any(|why| why.is_of_unknown_layout())
    }

    /// Joins the shards of plain tensors whose layout the files do not record and was not declared when the checkpoint was
    /// opened.
    ///
    /// # Errors
    /// The errors of a layout that does not fit the shards.
    pub fn declare_layout(&mut self, declared: &DeclaredLayout) -> Result<()> {
        let is_undeclared =
            |entry: &TensorEntry| entry.unreadable.as_ref().is_some_and(|why| why.is_of_unknown_layout());
        self.catalog.tensors.iter_mut().filter(|entry| is_undeclared(entry)).for_each(|entry| entry.unreadable = None);
        self.catalog.plain_may_be_parts = false;
        let (files, order) = ((&self.files, &self.ranks), self.format.order());
        declared_layout::apply(declared, &mut self.catalog, &self.root, files, order)?;
        check_total(&self.root, &self.catalog)
    }
}

/// Returns the format of the checkpoint at a path, or of the checkpoint that a trainer has put below it; `None` if there is no
/// checkpoint, or if there are several. Reads no checkpoint.
#[must_use]
pub fn format_of(path: &Path) -> Option<Format> {
    let location = find_checkpoint::find(path, &ReadOptions::default()).ok()?;
    location.folders.first().map(|(_, found)| found.format)
}

impl Checkpoint {
    /// Returns the number of ranks of the job that wrote the checkpoint. Checkpoints of flat parameters record this
    /// number; for other checkpoints it is the highest rank in the files plus one. Returns `None` if the files record
    /// no ranks.
    #[must_use]
    pub fn world_size(&self) -> Option<u32> {
        let catalog = &self.catalog;
        let flat = catalog.flat.as_ref().map(|flat| flat.world_size);
        let ranks =
            catalog.tensors.iter().flat_map(|entry| (0..entry.chunks.len()).filter_map(|at| entry.chunks.rank(at)));
        let meshes = catalog.meshes.iter().flat_map(|mesh| mesh.ranks().iter().copied());
        flat.or_else(|| ranks.chain(meshes).map(|rank| rank.0.saturating_add(1)).max())
    }
}

/// Checks that all tensors together have fewer than 2^62 bytes, so that sums need no overflow checks. A tensor counts
/// once for each of its chunks, and once for each of its places in the state dict. The check is needed because metadata
/// can state any size, for example with views of stride 0.
fn check_total(path: &Path, catalog: &Catalog) -> Result<()> {
    let claimed = |entry: &TensorEntry, times: usize| u128::from(entry.len_bytes()) * times as u128;
    let mut total: u128 = catalog.tensors.iter().map(|entry| claimed(entry, entry.chunks.len().max(1))).sum();
    tensors(&catalog.state, &StatePath::default(), &mut |_, id| total += claimed(catalog.tensor(id), 1));
    if total < 1 << 62 {
        return Ok(());
    }
    Err(Error::malformed(path, "tensors", "fewer than 2^62 bytes in all", format!("{total}")))
}

/// Returns the location of a chunk in its file. Reads the file if the catalog does not have the complete location.
///
/// # Errors
/// `Malformed`, `Io`.
pub fn resolve(files: &Files, entry: &TensorEntry, chunk: u32) -> Result<StridedLocation> {
    let stored = resolve_stored(files, entry, chunk)?;
    of_view(files, entry, chunk, stored)
}

/// Returns the location of a chunk, whose stored tensor is at `stored`.
fn of_view(files: &Files, entry: &TensorEntry, chunk: u32, stored: StridedLocation) -> Result<StridedLocation> {
    let Some(view) = entry.chunks.view(chunk as usize) else { return Ok(stored) };
    stored.of_view(view, entry.dtype.itemsize()).ok_or_else(|| {
        Error::malformed(files.path(stored.file), entry.fqn.as_str(), "offsets and strides below 2^64", "larger ones")
    })
}

/// Returns the location of the stored tensor that contains a chunk.
fn resolve_stored(files: &Files, entry: &TensorEntry, chunk: u32) -> Result<StridedLocation> {
    let index = chunk as usize;
    let strides = || match entry.chunks.strides(index) {
        Some(strides) => strides.clone(),
        None => contiguous_strides(&entry.chunks.stored_shape(index)),
    };
    match entry.chunks.location(index) {
        FileLocation::Bytes { file, offset } => {
            Ok(StridedLocation { file, offset, strides: strides(), checksum: None })
        }
        FileLocation::Record { file, record, within } => {
            let start = archive::data_offset(files, file, record)?;
            let offset = start.checked_add(within);
            let offset = offset.ok_or_else(|| {
                Error::malformed(files.path(file), entry.fqn.as_str(), "an offset inside the file", "2^64")
            })?;
            Ok(StridedLocation {
                file,
                offset,
                strides: strides(),
                checksum: ChecksummedRange::of_record(record, start),
            })
        }
        FileLocation::Item(stretch) => dcp::resolve(files, entry, chunk, stretch),
        FileLocation::Empty => Err(Error::unsupported(
            format!("{}: chunk {chunk} has elements but no location", entry.fqn),
            "the checkpoint does not record the file of these elements; save it again",
        )),
    }
}

/// Returns the location of a chunk like [`resolve`], but also accepts a file that only another process sees. The offset
/// of the data in such a file is unknown, so the returned offset is 0. Callers use this location only to compute the
/// size of the plan, which does not depend on the offset.
///
/// # Errors
/// The errors of [`resolve`].
pub fn resolve_unseen(files: &Files, entry: &TensorEntry, chunk: u32) -> Result<StridedLocation> {
    let index = chunk as usize;
    match (resolve(files, entry, chunk), entry.chunks.location(index).file()) {
        (Err(Error::Format(FormatError::Missing { .. })), Some(file)) if files.seen_by(file).is_some() => {
            let strides = entry.chunks.strides(index).cloned();
            let strides = strides.unwrap_or_else(|| contiguous_strides(&entry.chunks.stored_shape(index)));
            of_view(files, entry, chunk, StridedLocation { file, offset: 0, strides, checksum: None })
        }
        (resolved, _) => resolved,
    }
}

/// Returns the names of the entries of a folder. Names that are not UTF-8 are left out.
fn list(folder: &Path) -> Result<Vec<String>> {
    Ok(lookup::list(folder)?.into_iter().filter_map(|entry| entry.name.into_string().ok()).collect())
}

fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the path of a file in the checkpoint's folder, from a name that is stored in the checkpoint.
///
/// # Errors
/// `Malformed` if the path leads out of the folder.
fn relative_to_folder(folder: &Path, name: &str, named_by: &Path) -> Result<PathBuf> {
    let path = Path::new(name);
    if !name.is_empty() && !name.contains('\0') && path.components().all(|part| matches!(part, Component::Normal(_))) {
        return Ok(folder.join(path));
    }
    Err(Error::malformed(named_by, "file name", "a file inside the checkpoint's folder", format!("`{name}`")))
}

/// Returns the paths of the files that an index or metadata file names. The names are relative to the folder of that
/// index or metadata file.
///
/// # Errors
/// `Malformed` if a path leads out of the folder, `Missing` with the names of all missing files.
fn files_beside(named_by: &Path, at: &str, names: &[&str]) -> Result<Vec<PathBuf>> {
    let folder = named_by.parent().unwrap_or(Path::new("."));
    let paths: Vec<PathBuf> =
        names.iter().map(|name| relative_to_folder(folder, name, named_by)).collect::<Result<_>>()?;
    let mut missing = Vec::new();
    for (path, name) in paths.iter().zip(names) {
        match lookup::kind_of(path)? {
            None => missing.push((*name).to_owned()),
            Some(FileKind::Dangling) => missing.push(format!("{name} (a link to {})", lookup::target_of(path))),
            Some(_) => {}
        }
    }
    if missing.is_empty() {
        return Ok(paths);
    }
    Err(Error::missing(named_by, at, format!("{} beside it", count(paths.len(), "file")), short_list(&missing, FEW))
        .naming(&missing))
}

/// Checks that the dotted names of entries are distinct, and that no name is in `reserved`. The dotted names of two
/// different paths can be equal, if a key contains a dot.
///
/// # Errors
/// `Unsupported` with the first name that is duplicate or reserved.
pub fn distinct_names<'a>(names: impl IntoIterator<Item = &'a str>, reserved: &[&'a str]) -> Result<()> {
    let mut names = names.into_iter();
    let mut seen = HashSet::with_capacity_and_hasher(names.size_hint().0 + reserved.len(), RandomState::default());
    seen.extend(reserved.iter().copied());
    match names.find(|name| !seen.insert(name)) {
        None => Ok(()),
        Some(name) => Err(Error::unsupported(
            if reserved.contains(&name) {
                format!("{name}: the format does not allow a tensor of this name")
            } else {
                format!("{name}: two entries of the state dict would have this name")
            },
            "change this name before saving, or write a torch file with `dtshard unshard`, which keeps nested names",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that `lines` equals those lines of a documentation page that begin with `start`. With
    /// `UPDATE_SNAPSHOTS=1`, replaces these lines of the page by `lines` instead.
    fn check_page(page: &str, start: &str, lines: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
        let text = std::fs::read_to_string(&path).unwrap();
        let (before, rest) = text.split_at(text.find(start).unwrap());
        let others: String = rest.split_inclusive('\n').skip_while(|line| line.starts_with(start)).collect();
        let expected = [before, lines, &others].concat();
        if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
            std::fs::write(&path, expected).unwrap();
        } else {
            assert!(text == expected, "{page} differs; UPDATE_SNAPSHOTS=1 writes:\n{lines}");
        }
    }

    #[test]
    fn readme_table_lists_every_format() {
        let row = |format: &Format| {
            let FormatEntry { name, about, files, .. } = format.entry();
            let writers = format.writing_verbs().join(", ");
            let writers = if writers.is_empty() { "(only read)" } else { &writers };
            format!("| [`{name}`](docs/reference/formats/{name}.md) | {about} | {files} | {writers} |\n")
        };
        let table: String = Format::ALL.iter().map(row).collect();
        check_page("README.md", "| [`", &table);
    }

    #[test]
    fn every_format_has_a_page() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let start = "| the formats | ";
        let links = Format::ALL.iter().map(|format| format!("[{format}](reference/formats/{format}.md)"));
        check_page("docs/README.md", start, &format!("{start}{} |\n", links.collect::<Vec<_>>().join(", ")));
        for format in Format::ALL {
            let page = root.join(format!("docs/reference/formats/{format}.md"));
            assert!(std::fs::read_to_string(page).unwrap().starts_with("# "), "{format}");
        }
    }

    #[test]
    fn formats_are_found_by_name_and_by_suffix() {
        for format in Format::ALL {
            assert_eq!(Format::from_name(format.name()), Some(*format));
        }
        assert_eq!(Format::from_name("gguf"), None);
        assert_eq!(Format::from_suffix("pt"), Some(Format::Torch));
        assert_eq!(Format::from_suffix("safetensors"), Some(Format::Safetensors));
        assert_eq!(Format::from_suffix("json"), None);
    }

    #[test]
    fn names_that_leave_the_folder_are_errors() {
        let inside = |name| relative_to_folder(Path::new("/c"), name, Path::new("/c/.metadata"));
        assert_eq!(inside("__0_0.distcp").unwrap(), Path::new("/c/__0_0.distcp"));
        assert_eq!(inside("sub/x").unwrap(), Path::new("/c/sub/x"));
        for name in ["../x", "/etc/passwd", "a/../../x", "", ".", "nul\0"] {
            assert!(inside(name).is_err(), "{name}");
        }
    }
}
