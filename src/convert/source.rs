//! The source of a conversion: the opened checkpoint, the selected names, and the choice of values where ranks differ.
//! All of this is decided before the destination is laid out.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use super::declared_layout::declared_layout;
use super::differing_values::{self, ResolvedConflicts, TargetFiles};
use super::peers::Peers;
use super::run::Run;
use super::source_checks::{self, Replicas};
use super::source_options::{check_root, check_series, check_weights, read_options};
use super::{tied, weight_map};
use crate::catalog::path::{self, LeafAction};
use crate::catalog::{Catalog, Class, Dtype, Fqn, TensorEntry, TensorId, Value, state_dict};
use crate::convert::options::{CheckOptions, ConvertOptions, OnConflict, SelectOptions, SourceOptions, Tied};
use crate::error::{Error, Result};
use crate::exchange::ReductionMethod;
use crate::exec::compare::ReplicaDifference;
use crate::format::{Checkpoint, Format, ReadOptions, SeriesChoice, Want};
use crate::layout::Pattern;
use crate::progress::Progress;
use crate::select::{self, DtypeRule, MatchedNames, Rename, Root, Selected, Wrappers};
use crate::storage::regular_file;

/// Defaults of a verb for the options that select and change names.
pub struct Defaults {
    pub root: Root,
    pub wrappers: Wrappers,
    pub without_gradients: bool,
}

impl Defaults {
    /// Returns defaults that select the whole state dict unchanged.
    pub fn everything() -> Self {
        Self { root: Root::Whole, wrappers: Wrappers::Match, without_gradients: false }
    }
}

/// Path and format of SRC for a run with `--fill-from`. In such a run, the values of SRC are put into the checkpoint
/// FILLER, and [`ConversionSource::checkpoint`] has the path and format of FILLER.
pub struct Filled {
    pub root: PathBuf,
    pub resolved_from: Option<PathBuf>,
    pub format: Format,
    /// Entries that FILLER had for the tensors that SRC replaced.
    pub replaced: BTreeMap<TensorId, TensorEntry>,
}

/// Opened source of a conversion, with the selected names and the connection to the other processes.
pub struct ConversionSource {
    /// The opened checkpoint SRC. With `--fill-from`, this is the checkpoint FILLER with values of SRC, and its list of
    /// files has the files of both checkpoints.
    pub checkpoint: Checkpoint,
    /// Path and format of SRC; `None` without `--fill-from`.
    pub filled: Option<Filled>,
    /// Checkpoint of `--like`, whose layout the destination gets.
    pub like: Option<Checkpoint>,
    /// Selected values, with their new names and dtypes.
    pub selection: Selected,
    /// Result of resolving the values that differ between ranks.
    pub conflicts: ResolvedConflicts,
    /// True if `--on-conflict` was given, so that replicas have already been compared.
    pub compared: bool,
    /// Connection to the other processes of the run.
    pub peers: Option<Peers>,
    /// True if this process has disconnected from the other processes.
    pub has_parted: bool,
    /// The weight map that was applied, as a JSON document.
    pub map: Option<serde_json::Value>,
    /// Hint about tensors that are left out by default. The hint names the option that includes these tensors. `None`
    /// if no tensors are left out by default, or if the user selected names.
    pub left_out_remedy: Option<&'static str>,
}

/// Returns a hint that names the option with which tensors are included that the defaults of the verb leave out.
/// Returns `None` if the defaults leave out no tensors, or if the user selected names.
fn left_out_remedy(select: &SelectOptions, defaults: &Defaults) -> Option<&'static str> {
    let SelectOptions { include, include_from, exclude, root, .. } = select;
    if !include.is_empty() || !exclude.is_empty() || include_from.is_some() || root.is_some() {
        return None;
    }
    match defaults.root {
        Root::Model => Some("use options::everything to write all tensors"),
        _ => defaults.without_gradients.then_some("use options::with_grads to write gradients, too"),
    }
}

impl ConversionSource {
    /// Returns the method by which partial values are reduced.
    pub fn reducing(&self) -> ReductionMethod {
        self.peers.as_ref().map_or(ReductionMethod::InRankOrder, Peers::reducing)
    }

    /// Returns true if the processes exchange the data that they read.
    pub fn is_exchanged(&self) -> bool {
        self.peers.as_ref().is_some_and(Peers::exchange_bytes)
    }

    /// Selects names and values of an opened checkpoint, as the options and the defaults of the verb say.
    ///
    /// # Errors
    /// The errors of the selection.
    pub fn choose(
        mut checkpoint: Checkpoint,
        peers: Option<Peers>,
        args: &ConvertOptions,
        defaults: Defaults,
        run: &Run<'_>,
    ) -> Result<Self> {
        let left_out_remedy = left_out_remedy(&args.select, &defaults);
        let mut applied = None;
        let choose = || {
            let tie = (args.tied == Tied::Write).then(|| tied::restore(&mut checkpoint)).transpose()?;
            let options = select_options(&args.select, defaults)?;
            check_root(args.select.root.as_deref(), &checkpoint)?;
            let map = weight_map::apply(&mut checkpoint, &args.select.map, &options)?;
            if map.is_some() && peers.is_some() {
                return Err(weight_map::not_between_processes(&args.select.map));
            }
            let options = map.as_ref().map_or(options, |map| map.options.clone());
            let mut selection = select::select(&checkpoint.catalog, &options)?;
            check_reduced(args, &checkpoint, &selection, options.without_gradients)?;
            if let Some(map) = map {
                map.details.iter().for_each(|line| run.progress.detail(line));
                weight_map::check_joined(&checkpoint, &map, run)?;
                selection.notes.splice(0..0, map.notes);
                applied = map.document;
                selection.left_out.extend(map.left_out);
            }
            selection.notes.extend(tie);
            Ok(selection)
        };
        let selection = choose().inspect_err(|error| peers.iter().for_each(|peers| peers.fail(error)))?;
        Ok(Self {
            checkpoint,
            filled: None,
            like: None,
            selection,
            conflicts: ResolvedConflicts::default(),
            compared: false,
            peers,
            has_parted: false,
            map: applied,
            left_out_remedy,
        })
    }

    /// Returns the path and the format of SRC, also with `--fill-from`.
    pub fn given(&self) -> (&Path, Format) {
        match &self.filled {
            Some(Filled { root, format, .. }) => (root, *format),
            None => (&self.checkpoint.root, self.checkpoint.format),
        }
    }

    /// Returns the checkpoints that are read, each as its name for messages and its path. A checkpoint that was found
    /// in a subfolder of the path that the user named occurs with both paths.
    pub fn paths_read(&self) -> Vec<(&'static str, &Path)> {
        fn both<'a>(name: &'static str, root: &'a Path, given: Option<&'a PathBuf>) -> Vec<(&'static str, &'a Path)> {
            [Some(root), given.map(PathBuf::as_path)].into_iter().flatten().map(|path| (name, path)).collect()
        }
        let mut read = Vec::new();
        let name = match &self.filled {
            Some(filled) => {
                read.extend(both("the source", &filled.root, filled.resolved_from.as_ref()));
                "the checkpoint of options::fill_from"
            }
            None => "the source",
        };
        let Checkpoint { root, resolved_from, .. } = &self.checkpoint;
        read.extend(both(name, root, resolved_from.as_ref()));
        if let Some(Checkpoint { root, resolved_from, .. }) = &self.like {
            read.extend(both("the checkpoint of options::like", root, resolved_from.as_ref()));
        }
        read
    }

    /// Informs the other processes why this process ends.
    pub fn announce_failure(&self, error: &Error) {
        self.peers.iter().for_each(|peers| peers.fail(error));
    }

    /// Completes an error: adds the checkpoint if the error names only a tensor, and adds node and process id if it
    /// names a process.
    pub fn locate(&self, error: Error) -> Error {
        let error = match &self.peers {
            Some(peers) => peers.name(error),
            None => error,
        };
        let replaced = self.filled.iter().flat_map(|filled| filled.replaced.keys());
        let from_src = |fqn: &str| replaced.clone().any(|id| self.checkpoint.catalog.tensor(*id).fqn.as_str() == fqn);
        let root = if error.fqn().is_some_and(from_src) { self.given().0 } else { &self.checkpoint.root };
        error.within(root)
    }

    /// Resolves every value that differs between ranks, as `--on-conflict` says.
    ///
    /// With `--on-conflict`, this function compares the replicas of plain tensors; otherwise dtshard compares these
    /// replicas just before the copy.
    ///
    /// # Errors
    /// `Conflict` if ranks differ and no choice was made, and errors from reading.
    pub fn resolve_conflicts(&mut self, args: CheckOptions, ranks: TargetFiles, run: &Run<'_>) -> Result<()> {
        let decided = self.decide(args, ranks, run);
        decided.map_err(|error| self.locate(error)).inspect_err(|error| self.announce_failure(error))
    }

    fn decide(&mut self, args: CheckOptions, ranks: TargetFiles, run: &Run<'_>) -> Result<()> {
        let mut dropped = Vec::new();
        let undecided = match args.on_conflict {
            Some(_) => self.tensor_ids(),
            None => self.random_state(),
        };
        self.compared = args.on_conflict.is_some();
        let selected: HashSet<TensorId> = undecided.iter().copied().collect();
        for (id, difference) in self.differing(&undecided, args, run)? {
            let entry = self.checkpoint.catalog.tensor(id);
            let choice = args.on_conflict.unwrap_or(OnConflict::PerRank);
            if choice != OnConflict::Rank0 && !selected.contains(&id) {
                return Err(Error::usage(
                    format!(
                        "{}: ranks store different values, and another tensor is computed from this tensor",
                        entry.fqn
                    ),
                    "use options::on_conflict rank0, or resolve the conflict in a conversion before this one",
                ));
            }
            match choice {
                OnConflict::Rank0 => self.conflicts.rank0.push(entry.fqn.to_string()),
                OnConflict::Drop => path::edit_leaves(&mut self.selection.catalog.state, &mut |path, leaf| {
                    if !differing_values::holds(leaf, id) {
                        return LeafAction::Keep;
                    }
                    dropped.push(path.to_string());
                    LeafAction::Remove
                }),
                OnConflict::PerRank
                    if entry.class != Class::Tensor
                        || entry.partial_values.is_some()
                        || !differing_values::has_ranks(entry) =>
                {
                    return Err(source_checks::replica_conflict(
                        &self.checkpoint,
                        id,
                        &difference,
                        self.peers.as_ref(),
                    ));
                }
                OnConflict::PerRank => {
                    differing_values::split_by_rank(&mut self.checkpoint.catalog, &mut self.selection.catalog, id);
                }
            }
        }
        let resolved = differing_values::resolve(&mut self.selection.catalog, args.on_conflict, ranks)?;
        self.conflicts = ResolvedConflicts {
            dropped_tensors: [dropped, resolved.dropped_tensors].concat(),
            rank0: [std::mem::take(&mut self.conflicts.rank0), resolved.rank0].concat(),
            ..resolved
        };
        Ok(())
    }

    /// Checks the stored checksums, with `--check-crc`, and the replicas of `taken`, unless they have already been
    /// compared. `taken` are the source tensors that this process writes, at least in part.
    ///
    /// # Errors
    /// `Malformed` for a wrong checksum, `Conflict` for replicas that differ.
    pub fn check(&self, taken: &[TensorId], args: CheckOptions, run: &Run<'_>) -> Result<()> {
        if args.check_crc
            && let Some((_, error)) = source_checks::sums(&self.checkpoint, run).into_iter().next()
        {
            return Err(error);
        }
        if self.compared {
            return Ok(());
        }
        let found = self.differing(taken, args, run)?;
        match found.first() {
            None => Ok(()),
            Some((id, difference)) => {
                Err(source_checks::replica_conflict(&self.checkpoint, *id, difference, self.peers.as_ref()))
            }
        }
    }

    /// Describes the first difference between two tensors of SRC, or returns `None` if they are equal. A process
    /// without a connection to other processes compares the tensors after a cast to `dtype`. Connected processes
    /// compare them without a cast; the call is then collective.
    ///
    /// # Errors
    /// Errors from reading.
    pub fn difference(&self, pair: [TensorId; 2], dtype: Dtype, run: &Run<'_>) -> Result<Option<String>> {
        let checkpoint = &self.checkpoint;
        if let Some(peers) = &self.peers {
            return peers.difference(checkpoint, pair, run).map_err(|error| peers.name(error));
        }
        source_checks::difference(checkpoint, pair, dtype, run)
    }

    fn differing(
        &self,
        tensors: &[TensorId],
        args: CheckOptions,
        run: &Run<'_>,
    ) -> Result<Vec<(TensorId, ReplicaDifference)>> {
        let which = if args.check_replicas { Replicas::All } else { Replicas::Plain };
        let apart = self.peers.as_ref().filter(|peers| peers.see_apart());
        source_checks::differing(&self.checkpoint, tensors, which, apart, run)
    }

    /// Returns the notes about values of single ranks: those of [`ResolvedConflicts::notes`], and, if SRC has one rank, a note
    /// about its random number state, which all ranks of the new job get. `target_ranks` is the number of ranks of the new
    /// job, or `None` if the target has no rank files.
    pub fn notes_of_ranks(&self, target_ranks: Option<u32>) -> Vec<String> {
        let mut notes = self.conflicts.notes(target_ranks);
        let Checkpoint { format, parts, .. } = &self.checkpoint;
        let has_one_rank = format.has_rank_files() && parts.iter().all(|part| part.world_size == 1);
        if has_one_rank && let Some(ranks) = target_ranks.filter(|ranks| *ranks > 1) {
            let leaves = path::leaves(&self.selection.catalog.state);
            let names = leaves.iter().map(|(path, _)| path.fqn().to_string());
            let random: Vec<String> = names.filter(|name| state_dict::is_random_state(name)).collect();
            if !random.is_empty() {
                notes.push(format!(
                    "SRC has one rank, so all {ranks} ranks of the new job get its random number state ({})",
                    differing_values::few(&random)
                ));
            }
        }
        notes
    }

    /// Frees the memory of the selection and the state dict, after the destination is laid out. For a checkpoint with
    /// very many tensors, the selection and the state dict take half of the memory. Two threads free them in parallel.
    pub fn drop_selection(&mut self) {
        let state = std::mem::replace(&mut self.checkpoint.catalog.state, Value::None);
        let selected = std::mem::replace(&mut self.selection.catalog, Catalog::empty());
        rayon::join(|| drop((state, selected.state)), || drop(selected.tensors));
    }

    /// Returns every selected tensor under each of its names.
    pub fn tensors(&self) -> Vec<(Fqn, TensorId)> {
        state_dict::all_tensors(&self.selection.catalog.state)
    }

    /// Returns the tensors of random number state, which may differ between ranks without `--on-conflict`.
    fn random_state(&self) -> Vec<TensorId> {
        let mut found = Vec::new();
        path::tensors(&self.selection.catalog.state, &path::Path::default(), &mut |path, id| {
            if state_dict::is_random_state(path.fqn().as_str()) {
                found.push(id);
            }
        });
        found
    }

    /// Returns every selected tensor once, even if it has several names.
    pub fn tensor_ids(&self) -> Vec<TensorId> {
        let mut ids = Vec::with_capacity(self.selection.catalog.tensors.len());
        path::tensors(&self.selection.catalog.state, &path::Path::default(), &mut |_, id| ids.push(id));
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

/// Choice of what is read from a source, and of whether an incomplete source may be read.
pub struct ReadRequest<'a> {
    /// Checkpoint of the same model that provides shapes for flat parameters.
    pub like: Option<&'a Path>,
    pub series: SeriesChoice,
    pub want: Want,
    /// True if a checkpoint with missing files may be read. Only its existing files are then read.
    pub incomplete: bool,
    /// True if flat parameters of unknown shapes are read as 1-d tensors.
    pub raw_flat: bool,
}

/// Opens the source of a conversion. If the options need connected processes, also connects to the other processes, and
/// reads the source with them.
///
/// # Errors
/// Errors from reading, and from connecting to the other processes.
pub fn open(args: &ConvertOptions, reading: ReadRequest<'_>, run: &Run<'_>) -> Result<(Checkpoint, Option<Peers>)> {
    let ReadRequest { like, series, want, incomplete, raw_flat } = reading;
    let declared = declared_layout(&args.source.layout, args.select.keep_names)?;
    let mut options = ReadOptions {
        declared_layout: declared,
        show_incomplete: incomplete,
        ..read_options(&args.source, like, series, want)
    };
    options.flat.raw = raw_flat;
    let (peers, checkpoint) = match Peers::open(args, &options, run)? {
        Some((peers, checkpoint)) => (Some(peers), checkpoint),
        None => {
            let opened = Checkpoint::open(&args.src, &options);
            (None, opened?)
        }
    };
    let opened = [&checkpoint];
    let checked = check_series(&args.source, &opened).and_then(|()| check_weights(&args.source, &opened));
    checked.inspect_err(|error| peers.iter().for_each(|peers| peers.fail(error)))?;
    announce(&checkpoint, run.progress);
    Ok((checkpoint, peers))
}

/// Adds a hint to an error about missing files: the files may be on the disk of another node. Errors of another kind,
/// or with a hint, stay unchanged.
pub fn maybe_on_other_nodes(error: Error) -> Error {
    error.missing_hint(
        "copy the missing files into the folder, or save the checkpoint again; if other nodes have them, start a \
         process on each node with options::source per-rank",
    )
}

/// Prints the path to which SRC was resolved, and the warnings and notes from reading it.
pub fn announce(checkpoint: &Checkpoint, progress: &dyn Progress) {
    if let Some(given) = &checkpoint.resolved_from {
        progress.note(&format!("reading {}, found in {}", checkpoint.root.display(), given.display()));
    }
    for warning in &checkpoint.catalog.warnings {
        progress.warning(warning);
    }
    for note in &checkpoint.catalog.notes {
        progress.note(note);
    }
    for detail in &checkpoint.catalog.details {
        progress.detail(detail);
    }
}

/// Checks that the gradients are selected if `--reduce` is given, because only gradients are partial values. Not every
/// verb selects gradients by default.
///
/// # Errors
/// `Usage` with the option that selects the gradients.
fn check_reduced(args: &ConvertOptions, checkpoint: &Checkpoint, selected: &Selected, with_grads: bool) -> Result<()> {
    let SourceOptions { series, layout, .. } = &args.source;
    let is_gradients = |name: &&String| state_dict::GRADIENTS.contains(&name.as_str());
    // Only gradients are partial values. Other series have complete values, which must not be reduced.
    let are_taken = series.iter().any(|name| is_gradients(&name));
    let skipped = checkpoint.skipped_series.iter().find(is_gradients).filter(|_| !are_taken);
    let hint = match skipped {
        _ if layout.reduce.is_empty() => return Ok(()),
        Some(_) if with_grads && series.is_empty() => String::from("include the gradients with options::with_grads"),
        Some(name) => format!("convert only the gradients with options::series {name}"),
        None => match left_out_gradients(checkpoint, selected) {
            Some(_) if with_grads => String::from("include the gradients with options::with_grads"),
            Some(root) => format!("convert only the gradients with options::root {root}"),
            None => return Ok(()),
        },
    };
    let effect = if skipped.is_some() {
        "and the other tensors have complete values, which need no reduction"
    } else {
        "so no tensor would be reduced"
    };
    let given = layout.reduce.join(" options::reduce ");
    Err(Error::usage(format!("options::reduce {given}: the gradients are left out, {effect}"), hint))
}

/// Returns the path of the gradients in the state dict of the source if none of them is selected, otherwise `None`.
fn left_out_gradients(checkpoint: &Checkpoint, selected: &Selected) -> Option<path::Path> {
    let state = &checkpoint.catalog.state;
    let root = state_dict::gradients_root(state, &state_dict::model_root(state))?;
    let gradients: HashSet<TensorId> =
        state_dict::all_tensors(root.find(state)?).into_iter().map(|(_, id)| id).collect();
    let mut taken = false;
    path::tensors(&selected.catalog.state, &path::Path::default(), &mut |_, id| taken |= gradients.contains(&id));
    (!taken && !gradients.is_empty()).then_some(root)
}

/// Parses the options that select and rename tensors and set their dtypes.
///
/// # Errors
/// `Layout` and `Usage` for invalid patterns and rules, `Io` for files that cannot be read.
pub fn select_options(args: &SelectOptions, defaults: Defaults) -> Result<select::NameOptions> {
    let mut include = args.include.clone();
    if let Some(file) = &args.include_from {
        let lines = read_text(file)?;
        let patterns = lines.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let before = include.len();
        include.extend(patterns.map(str::to_owned));
        if include.len() == before {
            return Err(Error::usage(
                format!("options::include_from {}: the file has no patterns", file.display()),
                "write one pattern per line; lines that begin with # are comments",
            ));
        }
    }
    let mut renames: Vec<Rename> = args.rename.iter().map(|text| Rename::parse(text)).collect::<Result<_>>()?;
    if let Some(file) = &args.rename_file {
        renames.extend(Rename::parse_file(&read_text(file)?)?);
    }
    Ok(select::NameOptions {
        wrappers: if args.keep_names { Wrappers::Keep } else { defaults.wrappers },
        include: Pattern::parse_all(&include)?,
        exclude: Pattern::parse_all(&args.exclude)?,
        without_gradients: defaults.without_gradients,
        allow_unknown_layouts: false,
        allow_unreadable: false,
        root: args.root.clone().map_or(defaults.root, Root::At),
        strip_prefixes: args.strip_prefix.clone(),
        renames,
        add_prefix: args.add_prefix.clone(),
        nest: args.nest.clone(),
        dtypes: args.dtype.iter().map(|text| DtypeRule::parse(text)).collect::<Result<_>>()?,
        matched: MatchedNames::Only,
    })
}

fn read_text(path: &Path) -> Result<String> {
    regular_file(path)?;
    std::fs::read_to_string(path).map_err(Error::io("read", path))
}
