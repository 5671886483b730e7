//! `--fill-from`: puts the values of SRC into another checkpoint, called FILLER.
//!
//! The result has the state tree, the series, the folders and the sidecar files of FILLER; only values come from SRC. A
//! tensor that gets a value from SRC keeps its [`TensorId`] in FILLER's catalog, and its catalog entry becomes the
//! entry of SRC. So tied names stay tied, and later steps see one checkpoint. [`Names`] matches the tensors of both
//! checkpoints.
//!
//! Invariant: every selected value of SRC has a counterpart in FILLER with the same shape and dtype; otherwise the
//! conversion fails.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::Path as FilePath;

use super::fill_optimizers::match_filler;
use super::matching_names::{NameMatch, Names, of_all_ranks};
use super::run::Run;
use super::source::{ConversionSource, Filled, announce};
use super::source_options::read_options;
use crate::catalog::optimizer::{GROUPS, PARAM_NAMES, PARAMS};
use crate::catalog::path::{self, LeafAction, key_text};
use crate::catalog::value::describe;
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Catalog, Dtype, Key, MeshId, Path, TensorEntry, TensorId, Value};
use crate::convert::options::ConvertOptions;
use crate::error::{CatalogError, Error, Result};
use crate::format::{Checkpoint, ReadOptions, SeriesChoice, Want};
use crate::name_list::{FEW, short_list};
use crate::nearest;
use crate::quantity::count;
use crate::select::{self, Selected, Wrappers};

/// A tensor of SRC whose value replaces a tensor of FILLER, the checkpoint of `--fill-from`.
#[derive(Clone, Debug)]
struct FilledTensor {
    id: TensorId,
    path: Path,
}

/// Combines SRC in memory with the checkpoint at `filler` (`--fill-from`), and opens the checkpoint at `like`
/// (`--like`); no file is changed. If `filler` is given, the result has the selected values of SRC and, from `filler`,
/// all values that SRC lacks. If `filler` and `like` are the same path, the checkpoint is read once.
///
/// # Errors
/// Errors from reading the two checkpoints, and the errors of [`fill`].
pub fn with_others(
    mut source: ConversionSource,
    (filler, like): (Option<&FilePath>, Option<&FilePath>),
    args: &ConvertOptions,
    run: &Run<'_>,
) -> Result<ConversionSource> {
    // The sidecar files of FILLER are copied, too.
    let options = read_options(&args.source, None, SeriesChoice::All, Want::All);
    let options = ReadOptions { from: None, series: SeriesChoice::All, ..options };
    if let Some(path) = filler {
        let filler = open_whole(path, &options, run)?;
        source.like = like.filter(|like| *like == path).map(|_| filler.clone());
        let wrappers = if args.select.keep_names { Wrappers::Keep } else { Wrappers::Match };
        source = fill(source, filler, wrappers, run)?;
    }
    if let (Some(path), None) = (like, &source.like) {
        // Only tensors have a layout, so objects of unknown types are not needed.
        let options = ReadOptions { drop_unknown: true, want: Want::State, ..options };
        source.like = Some(open_whole(path, &options, run)?);
    }
    Ok(source)
}

/// Opens the checkpoint at `path`, which is used in addition to SRC. The checkpoint must have no missing files.
fn open_whole(path: &FilePath, options: &ReadOptions, run: &Run<'_>) -> Result<Checkpoint> {
    let checkpoint = Checkpoint::open(path, options).map_err(|error| error.within(path))?;
    announce(&checkpoint, run.progress);
    Ok(checkpoint)
}

/// Returns FILLER, the checkpoint of `--fill-from`, in which values of SRC have replaced the matching values (only in
/// memory).
///
/// # Errors
/// `Usage` for a name that FILLER does not have, `Conflict` for a different shape, dtype or type, and errors from
/// reading tensors that are tied in FILLER.
fn fill(
    mut source: ConversionSource,
    mut filler: Checkpoint,
    wrappers: Wrappers,
    run: &Run<'_>,
) -> Result<ConversionSource> {
    match_filler(&mut source, &filler)?;
    let mut selection = select::select(&filler.catalog, &select::NameOptions::default())?;
    let mut filling = Filling { source: &source, filler: &filler, wrappers, run, own_values: 0 };
    let taken = filling.tensors()?;
    let objects = filling.objects(&mut selection.catalog)?;
    let own_values = filling.own_values;
    let notes = notes(&source, &filler, FillCounts { tensors: taken.len(), objects, own_values });
    let Checkpoint { root, resolved_from, format, files, catalog, .. } = source.checkpoint;
    let replaced = put(&mut filler.catalog, catalog, &taken, filler.files.append(files));
    // Names of SRC that are not selected do not count as left out, because FILLER has values for them.
    selection = Selected { notes, casts: source.selection.casts, ..selection };
    let filled = Some(Filled { root, resolved_from, format, replaced });
    Ok(ConversionSource { checkpoint: filler, selection, filled, ..source })
}

/// The number of tensors that come from SRC, the number of objects that come from SRC, and the number of per-rank
/// values of SRC that are not used.
struct FillCounts {
    tensors: usize,
    objects: usize,
    own_values: usize,
}

/// Returns the notes that state how many values come from SRC and how many from FILLER, the checkpoint of
/// `--fill-from`.
fn notes(source: &ConversionSource, filler: &Checkpoint, counts: FillCounts) -> Vec<String> {
    let all: HashSet<TensorId> = filler.catalog.state.tensor_ids().into_iter().collect();
    let objects = if counts.objects > 0 { format!(" and {}", count(counts.objects, "object")) } else { String::new() };
    let mut notes = source.selection.notes.clone();
    // The closing line counts the tensors in files, and a flat parameter is one tensor there.
    let one_by_one = match filler.catalog.flat {
        Some(_) => "; each original parameter inside a flat parameter counts as one tensor",
        None => "",
    };
    notes.push(format!(
        "DST gets {}{objects} from {} and {} from {}{one_by_one}",
        count(counts.tensors, "tensor"),
        source.checkpoint.root.display(),
        count(all.len() - counts.tensors, "tensor"),
        filler.root.display()
    ));
    let not_taken = not_taken(source);
    if not_taken > 0 {
        notes.push(format!(
            "{} of {} {}",
            count(not_taken, "name"),
            source.checkpoint.root.display(),
            if not_taken == 1 {
                "is not selected, so DST does not get its value"
            } else {
                "are not selected, so DST does not get their values"
            }
        ));
    }
    if counts.own_values > 0 {
        let values = count(counts.own_values, "value");
        notes.push(format!(
            "{values} of single ranks {} not used, because {} has one value for all ranks",
            if counts.own_values == 1 { "is" } else { "are" },
            filler.root.display()
        ));
    }
    notes
}

/// Returns the number of names in SRC that the name options (`--include` and similar) leave out.
fn not_taken(source: &ConversionSource) -> usize {
    source.selection.left_out.tensors.len() + source.selection.left_out.objects.len()
}

/// Returns whether `path` is a parameter list of an optimizer's parameter group, such as `param_groups.0.params`.
fn is_list_of_parameters(path: &Path) -> bool {
    matches!(path.0.as_slice(), [.., Key::Name(groups), Key::Index(_), Key::Name(key)]
        if **groups == *GROUPS && [PARAMS, PARAM_NAMES].contains(&key.as_ref()))
}

/// Returns the path of the list `params` in the parameter group whose list `param_names` is at `path`. Returns `None`
/// if `path` is not the path of a list `param_names`.
fn params_beside(path: &Path) -> Option<Path> {
    let (last, above) = path.0.split_last()?;
    let is_names = is_list_of_parameters(path) && matches!(last, Key::Name(key) if **key == *PARAM_NAMES);
    is_names.then(|| Path(above.to_vec()).child(Key::Name(PARAMS.into())))
}

/// Returns the first item of the parameter list `list` that is missing in the parameter list `of`, or `None` if no item
/// is missing.
fn missing_parameter(list: &Value, of: &Value) -> Option<String> {
    let (Value::List(list), Value::List(of)) = (list, of) else { return None };
    let key = |value: &Value| clean_name(&key_text(value));
    let known: HashSet<String> = of.iter().map(key).collect();
    list.iter().map(key).find(|name| !known.contains(name)).map(|name| format!("`{name}`"))
}

/// Replaces the entries of some tensors in `catalog` by entries of the catalog `from`, and returns the replaced
/// entries. The list of files of `catalog` is now followed by the files of `from`, so `files` is added to each file id
/// of `from`.
fn put(
    catalog: &mut Catalog,
    mut from: Catalog,
    taken: &BTreeMap<TensorId, FilledTensor>,
    files: u32,
) -> BTreeMap<TensorId, TensorEntry> {
    let meshes: Vec<MeshId> = from.meshes.drain(..).map(|mesh| catalog.intern_mesh(mesh)).collect();
    let replace = |(id, taken): (&TensorId, &FilledTensor)| {
        let mut entry = from.tensor(taken.id).clone();
        entry.chunks.shift_files(files);
        if let Some(sharding) = &mut entry.sharding {
            sharding.mesh = meshes[sharding.mesh.0 as usize];
        }
        (*id, std::mem::replace(&mut catalog.tensors[id.0 as usize], entry))
    };
    let replaced = taken.iter().map(replace).collect();
    // The sources of computed tensors are not in the state dict of FILLER, so they get new ids.
    for mut computed in std::mem::take(&mut from.computed) {
        computed.file.0 += files;
        for id in &mut computed.sources {
            let mut entry = from.tensor(*id).clone();
            entry.chunks.shift_files(files);
            *id = catalog.push_tensor(TensorEntry { sharding: None, ..entry });
        }
        catalog.computed.push(computed);
    }
    catalog.archives.extend(from.archives.into_iter().map(|mut archive| {
        archive.file.0 += files;
        archive
    }));
    catalog.warnings.extend(from.warnings);
    replaced
}

/// State of matching the values of SRC to the values of FILLER.
struct Filling<'a> {
    source: &'a ConversionSource,
    filler: &'a Checkpoint,
    wrappers: Wrappers,
    run: &'a Run<'a>,
    /// Number of per-rank values in SRC for which FILLER, the checkpoint of `--fill-from`, has one value for all ranks.
    /// These values of SRC are not used.
    own_values: usize,
}

impl Filling<'_> {
    /// Returns the tensor of SRC for each tensor of FILLER (the checkpoint of `--fill-from`) that SRC replaces.
    fn tensors(&mut self) -> Result<BTreeMap<TensorId, FilledTensor>> {
        let state = &self.source.selection.catalog.state;
        let (own, theirs) = (Names::new(state, self.wrappers), Names::new(&self.filler.catalog.state, self.wrappers));
        let mut all = Vec::new();
        path::tensors(state, &Path::default(), &mut |path, id| all.push(FilledTensor { id, path: path.clone() }));
        let mut taken: BTreeMap<TensorId, FilledTensor> = BTreeMap::new();
        let mut unknown = Vec::new();
        for tensor in all {
            let in_model = own.within_model(&tensor.path);
            match theirs.find(&tensor.path, in_model.as_deref()) {
                NameMatch::Nothing => match of_all_ranks(&tensor.path).map(|path| theirs.find(&path, None)) {
                    Some(NameMatch::One(_)) => self.own_values += 1,
                    _ => unknown.push((tensor.path, in_model)),
                },
                NameMatch::Two(one, other) => return Err(self.ambiguous(&tensor.path, one, other)),
                NameMatch::One(id) => {
                    self.check_fits(&tensor, id)?;
                    match taken.get(&id) {
                        Some(first) if first.id != tensor.id => self.check_same(first, &tensor)?,
                        Some(_) => {}
                        None => drop(taken.insert(id, tensor)),
                    }
                }
            }
        }
        match unknown.first() {
            None => Ok(taken),
            Some((path, in_model)) => {
                let nearest = theirs.nearest(path, in_model.as_deref());
                let names: Vec<String> = unknown.iter().map(|(path, _)| path.to_string()).collect();
                Err(self.unknown("tensor", &names, &nearest))
            }
        }
    }

    /// Replaces the objects of FILLER (the checkpoint of `--fill-from`) by the objects of SRC, and returns how many
    /// objects changed.
    fn objects(&mut self, filled: &mut Catalog) -> Result<usize> {
        let state = &self.source.selection.catalog.state;
        let roots = [state, &filled.state].map(crate::catalog::state_dict::model_root);
        let theirs: HashSet<String> = path::objects(&filled.state).iter().map(|(path, _)| self.name(path)).collect();
        let tensors = Names::new(&filled.state, self.wrappers);
        let mut given: BTreeMap<String, &Value> = BTreeMap::new();
        let mut unknown = Vec::new();
        for (path, value) in path::objects(state) {
            let within = path.0.strip_prefix(roots[0].0.as_slice()).unwrap_or(&path.0);
            let in_model = Path([roots[1].0.as_slice(), within].concat());
            let known = [&path, &in_model].map(|path| self.name(path)).into_iter().find(|name| theirs.contains(name));
            let of_all = || {
                of_all_ranks(&path).is_some_and(|whole| {
                    theirs.contains(&self.name(&whole)) || tensors.find(&whole, None) != NameMatch::Nothing
                })
            };
            match known {
                Some(name) => drop(given.insert(name, value)),
                None if of_all() => self.own_values += 1,
                // The group of FILLER has no names. DST has the parameter lists of FILLER.
                None if params_beside(&path).is_some_and(|params| theirs.contains(&self.name(&params))) => {}
                None => unknown.push(path),
            }
        }
        if let Some(path) = unknown.first() {
            let theirs: Vec<String> = theirs.into_iter().collect();
            let nearest = nearest::name_hint(&path.to_string(), &theirs);
            let names: Vec<String> = unknown.iter().map(ToString::to_string).collect();
            return Err(self.unknown("object", &names, &nearest));
        }
        let (mut changed, mut refused) = (0, None);
        path::edit_leaves(&mut filled.state, &mut |path, leaf| {
            match given.get(&self.name(path)) {
                // FILLER keeps its parameter list: the list of SRC may lack parameters whose state comes from FILLER.
                Some(value) if is_list_of_parameters(path) => {
                    if let Some(name) = missing_parameter(value, leaf) {
                        refused.get_or_insert_with(|| self.other_groups(path, &name));
                    }
                }
                // The tensors inside the object are replaced one by one in `tensors`.
                Some(value) if leaf.contains_tensor() && leaf.same_but_tensors(value) => {}
                Some(value) if leaf.contains_tensor() || value.contains_tensor() => {
                    refused.get_or_insert_with(|| self.other(path, "an object with tensors in it", leaf, value));
                }
                Some(value) if leaf != *value => {
                    changed += 1;
                    *leaf = (*value).clone();
                }
                _ => {}
            }
            LeafAction::Keep
        });
        refused.map_or(Ok(changed), Err)
    }

    /// Returns the error for a parameter that is in a parameter group of SRC, but not in the same parameter group of
    /// FILLER (the checkpoint of `--fill-from`).
    fn other_groups(&self, path: &Path, name: &str) -> Error {
        Error::usage(
            format!(
                "{path}: {} lists parameter {name}, which is not in this parameter group of {}",
                self.source.checkpoint.root.display(),
                self.filler.root.display()
            ),
            "leave the parameter groups out with options::exclude '**.param_groups.**' to keep those of FILLER",
        )
    }

    fn name(&self, path: &Path) -> String {
        if self.wrappers == Wrappers::Keep { path.to_string() } else { clean_name(&path.to_string()) }
    }

    /// Checks that a tensor of SRC can replace the tensor `id` of FILLER, the checkpoint of `--fill-from`.
    ///
    /// # Errors
    /// `Conflict` for a different shape or dtype.
    fn check_fits(&self, tensor: &FilledTensor, id: TensorId) -> Result<()> {
        let (ours, theirs) = (self.source.selection.catalog.tensor(tensor.id), self.filler.catalog.tensor(id));
        if ours.shape != theirs.shape {
            let hint = "leave this name out with options::exclude to keep the value of options::fill_from";
            let [theirs, ours] = [theirs, ours].map(|entry| format!("{:?}", entry.shape));
            return Err(self.misfit(&tensor.path, "the shape", &theirs, &ours, hint));
        }
        if ours.dtype != theirs.dtype {
            let (name, dtype) = (&self.source.checkpoint.catalog.tensor(tensor.id).fqn, theirs.dtype);
            let this_one = format!("cast this tensor with options::dtype '{name}={dtype}'");
            let hint = match ours.dtype {
                // --dtype never casts scalars, and casts only to `CAST_TARGETS`.
                _ if ours.shape.is_empty() || !Dtype::CAST_TARGETS.contains(&dtype) => None,
                Dtype::F64 => Some(this_one),
                Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {
                    Some(format!("{this_one}, or all weights of SRC with options::dtype {dtype}"))
                }
                _ => None,
            };
            let hint = hint.unwrap_or_else(|| {
                format!(
                    "save it as {dtype}, or leave this name out with options::exclude to keep the value of options::fill_from"
                )
            });
            return Err(self.misfit(&tensor.path, "the dtype", &theirs.dtype, &ours.dtype, &hint));
        }
        Ok(())
    }

    /// Checks that two tensors of SRC are equal. They must be equal because their names are the names of one tensor in
    /// FILLER, the checkpoint of `--fill-from` (tied tensors).
    fn check_same(&self, first: &FilledTensor, second: &FilledTensor) -> Result<()> {
        let checkpoint = &self.source.checkpoint;
        let selected = self.source.selection.catalog.tensor(first.id);
        let Some(detail) = self.source.difference([first.id, second.id], selected.dtype, self.run)? else {
            return Ok(());
        };
        Err(Error::Catalog(CatalogError::Conflict {
            fqn: first.path.to_string(),
            what: "the value",
            between: format!(
                "{} and {} of {}, which are tied in {} (options::fill_from)",
                first.path,
                second.path,
                checkpoint.root.display(),
                self.filler.root.display()
            ),
            detail,
            hint: Some(String::from(
                "the checkpoint of options::fill_from has one tensor for both names: make the two tensors equal, or leave one out with \
                 options::exclude",
            )),
        }))
    }

    /// Returns the error for a value of SRC whose shape, dtype or type differs from the matching value in FILLER.
    fn misfit(
        &self,
        path: &Path,
        what: &'static str,
        theirs: &dyn fmt::Display,
        ours: &dyn fmt::Display,
        hint: &str,
    ) -> Error {
        let (source, filler) = (self.source.checkpoint.root.display(), self.filler.root.display());
        Error::Catalog(CatalogError::Conflict {
            fqn: path.to_string(),
            what,
            between: format!("{filler} and {source}"),
            detail: format!("expected {theirs}, found {ours}"),
            hint: Some(hint.to_owned()),
        })
    }

    /// Returns the error for an object of SRC that cannot replace the object at the same path of FILLER, the checkpoint
    /// of `--fill-from`.
    fn other(&self, path: &Path, what: &'static str, theirs: &Value, ours: &Value) -> Error {
        let hint = "leave this name out with options::exclude to keep the value of options::fill_from";
        let show = |value, catalog: &Catalog| describe(value, &catalog.tensors, 60);
        let (theirs, ours) = (show(theirs, &self.filler.catalog), show(ours, &self.source.selection.catalog));
        self.misfit(path, what, &theirs, &ours, hint)
    }

    /// Returns the error for names of SRC that FILLER, the checkpoint of `--fill-from`, does not have.
    fn unknown(&self, what: &str, names: &[String], nearest: &str) -> Error {
        Error::usage(
            format!(
                "{}: {} has no {what} of {}",
                short_list(names, FEW),
                self.filler.root.display(),
                if names.len() == 1 { "this name" } else { "these names" }
            ),
            format!(
                "{nearest}; change names of SRC with options::rename, options::strip_prefix or options::nest, or \
                     leave them out with options::exclude"
            ),
        )
        .naming(names)
    }

    /// Returns the error for a name of SRC that matches two tensors of FILLER, the checkpoint of `--fill-from`.
    fn ambiguous(&self, path: &Path, in_model: TensorId, whole: TensorId) -> Error {
        let name = |id| &self.filler.catalog.tensor(id).fqn;
        Error::usage(
            format!(
                "`{path}` is ambiguous: it matches `{}` in the model of {}, and also `{}`",
                name(in_model),
                self.filler.root.display(),
                name(whole)
            ),
            "if the names of SRC are names inside the model, use options::nest model; if they begin with `model`, use \
             options::root model",
        )
    }
}
