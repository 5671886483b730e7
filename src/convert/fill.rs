//! `--fill-from`: what SRC has, in the place it has in another checkpoint, FILLER.
//!
//! The result is FILLER, with its tree, its series and folders, and the files beside it; only values come from SRC. So a
//! tensor keeps its number in FILLER's catalog and its content becomes that of SRC's: names that are tied stay tied,
//! and nothing downstream knows of two checkpoints. Tensors are matched as [`Names`] does it.
//!
//! Invariant: everything that is taken of SRC has its place in FILLER, in the same shape and dtype, or it is an error.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::Path as FilePath;

use super::names::{NameMatch, Names, of_all_ranks};
use super::reading::read_options;
use super::run::Run;
use super::source::{ConversionSource, Filled, announce};
use crate::catalog::path::{self, LeafAction};
use crate::catalog::wrappers::clean_name;
use crate::catalog::{Catalog, Dtype, Key, MeshId, Path, TensorEntry, TensorId, Value};
use crate::convert::options::ConvertOptions;
use crate::error::{CatalogError, Error, Result};
use crate::format::{Checkpoint, ReadOptions, SeriesChoice, Want};
use crate::name_list::{FEW, short_list};
use crate::nearest;
use crate::quantity::count;
use crate::select::{self, Selected, Wrappers};

/// A tensor of SRC.
#[derive(Clone, Debug)]
struct FilledTensor {
    id: TensorId,
    path: Path,
}

/// Fills SRC into the checkpoint at `filler`, and remembers the one at `like`. The two may be one, which is read once.
///
/// # Errors
/// As reading those, and as [`fill`].
pub fn with_others(
    mut source: ConversionSource,
    (filler, like): (Option<&FilePath>, Option<&FilePath>),
    args: &ConvertOptions,
    run: &Run<'_>,
) -> Result<ConversionSource> {
    // The files beside the checkpoint that fills go along.
    let options = read_options(&args.source, None, SeriesChoice::All, Want::All);
    let options = ReadOptions { from: None, series: SeriesChoice::All, ..options };
    if let Some(path) = filler {
        let filler = open_whole(path, &options, run)?;
        source.like = like.filter(|like| *like == path).map(|_| filler.clone());
        let wrappers = if args.select.keep_names { Wrappers::Keep } else { Wrappers::Match };
        source = fill(source, filler, wrappers, run)?;
    }
    if let (Some(path), None) = (like, &source.like) {
        // Objects do not say how tensors lie.
        let options = ReadOptions { drop_unknown: true, want: Want::State, ..options };
        source.like = Some(open_whole(path, &options, run)?);
    }
    Ok(source)
}

/// Read all of a checkpoint that stands beside SRC, which must be whole.
fn open_whole(path: &FilePath, options: &ReadOptions, run: &Run<'_>) -> Result<Checkpoint> {
    let checkpoint = Checkpoint::open(path, options).map_err(|error| error.within(path))?;
    announce(&checkpoint, run.progress);
    Ok(checkpoint)
}

/// FILLER, with the values that SRC has.
///
/// # Errors
/// `Usage` for a name that FILLER lacks, `Conflict` where the two do not fit; as reading, where tied names are compared.
fn fill(
    source: ConversionSource,
    mut filler: Checkpoint,
    wrappers: Wrappers,
    run: &Run<'_>,
) -> Result<ConversionSource> {
    let mut wanted = select::select(&filler.catalog, &select::NameOptions::default())?;
    let mut filling = Filling { source: &source, filler: &filler, wrappers, run, own_values: 0 };
    let taken = filling.tensors()?;
    let objects = filling.objects(&mut wanted.catalog)?;
    let own_values = filling.own_values;
    let notes = notes(&source, &filler, FillCounts { tensors: taken.len(), objects, own_values });
    let Checkpoint { root, resolved_from, format, files, catalog, .. } = source.checkpoint;
    let replaced = put(&mut filler.catalog, catalog, &taken, filler.files.append(files));
    // What is not taken of SRC is not left out: FILLER has it.
    wanted = Selected { notes, casts: source.wanted.casts, ..wanted };
    let filled = Some(Filled { root, resolved_from, format, replaced });
    Ok(ConversionSource { checkpoint: filler, wanted, filled, ..source })
}

/// How much is from SRC.
struct FillCounts {
    tensors: usize,
    objects: usize,
    own_values: usize,
}

/// What the user should know.
fn notes(source: &ConversionSource, filler: &Checkpoint, counts: FillCounts) -> Vec<String> {
    let all: HashSet<TensorId> = filler.catalog.state.tensor_ids().into_iter().collect();
    let objects = if counts.objects > 0 { format!(" and {}", count(counts.objects, "object")) } else { String::new() };
    let mut notes = source.wanted.notes.clone();
    notes.push(format!(
        "{}{objects} from {}, {} from {}",
        count(counts.tensors, "tensor"),
        source.checkpoint.root.display(),
        count(all.len() - counts.tensors, "tensor"),
        filler.root.display()
    ));
    let not_taken = not_taken(source);
    if not_taken > 0 {
        notes.push(format!("{} of {} not taken", count(not_taken, "name"), source.checkpoint.root.display()));
    }
    if counts.own_values > 0 {
        let values = count(counts.own_values, "value");
        notes.push(format!("{values} of single ranks not taken: {} has them for each rank", filler.root.display()));
    }
    notes
}

/// How many names `--include` and the like leave out of SRC.
fn not_taken(source: &ConversionSource) -> usize {
    source.wanted.left_out.tensors.len() + source.wanted.left_out.objects.len()
}

/// Whether this is what a parameter group of an optimizer updates: `param_groups.0.params`.
fn is_list_of_parameters(path: &Path) -> bool {
    matches!(path.0.as_slice(), [.., Key::Name(groups), Key::Index(_), Key::Name(key)]
        if **groups == *"param_groups" && **key == *"params")
}

/// Give tensors of `catalog` the content that others have in `from`, whose files come behind `files` others now; gives
/// what they were.
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
    catalog.archives.extend(from.archives.into_iter().map(|mut archive| {
        archive.file.0 += files;
        archive
    }));
    catalog.warnings.extend(from.warnings);
    replaced
}

/// The search for the places that SRC's values have in FILLER.
struct Filling<'a> {
    source: &'a ConversionSource,
    filler: &'a Checkpoint,
    wrappers: Wrappers,
    run: &'a Run<'a>,
    /// Values of single ranks in SRC, which are one of all ranks in FILLER.
    own_values: usize,
}

impl Filling<'_> {
    /// For each tensor of FILLER that SRC has, which one.
    fn tensors(&mut self) -> Result<BTreeMap<TensorId, FilledTensor>> {
        let state = &self.source.wanted.catalog.state;
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

    /// Put the objects of SRC in the place of FILLER's; gives how many of them are others than before.
    fn objects(&mut self, filled: &mut Catalog) -> Result<usize> {
        let state = &self.source.wanted.catalog.state;
        let roots = [state, &filled.state].map(crate::catalog::model::model_root);
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
                // With what is left out of SRC its lists have lost names, of which FILLER has the state.
                Some(_) if not_taken(self.source) > 0 && is_list_of_parameters(path) => {}
                // Tensors in it are replaced by themselves.
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

    fn name(&self, path: &Path) -> String {
        if self.wrappers == Wrappers::Keep { path.to_string() } else { clean_name(&path.to_string()) }
    }

    /// # Errors
    /// `Conflict` where a tensor of SRC cannot be that tensor of FILLER.
    fn check_fits(&self, tensor: &FilledTensor, id: TensorId) -> Result<()> {
        let (ours, theirs) = (self.source.wanted.catalog.tensor(tensor.id), self.filler.catalog.tensor(id));
        if ours.shape != theirs.shape {
            let hint = "options::exclude leaves it out, and that of options::fill_from stays";
            let [theirs, ours] = [theirs, ours].map(|entry| format!("{:?}", entry.shape));
            return Err(self.misfit(&tensor.path, "the shape", &theirs, &ours, hint));
        }
        if ours.dtype != theirs.dtype {
            let (name, dtype) = (&self.source.checkpoint.catalog.tensor(tensor.id).fqn, theirs.dtype);
            let this_one = format!("options::dtype '{name}={dtype}' casts this one");
            let hint = match ours.dtype {
                // What --dtype leaves as it is in any case.
                _ if ours.shape.is_empty() || !Dtype::CAST_TARGETS.contains(&dtype) => None,
                Dtype::F64 => Some(this_one),
                Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {
                    Some(format!("{this_one}, options::dtype {dtype} all weights of SRC"))
                }
                _ => None,
            };
            let hint = hint.unwrap_or_else(|| {
                format!("save it as {dtype}; options::exclude leaves it out, and that of options::fill_from stays")
            });
            return Err(self.misfit(&tensor.path, "the dtype", &theirs.dtype, &ours.dtype, &hint));
        }
        Ok(())
    }

    /// Names that are tied in FILLER and not in SRC must mean the same all the same.
    fn check_same(&self, first: &FilledTensor, second: &FilledTensor) -> Result<()> {
        let checkpoint = &self.source.checkpoint;
        let wish = self.source.wanted.catalog.tensor(first.id);
        let Some(detail) = self.source.difference([first.id, second.id], wish.dtype, self.run)? else { return Ok(()) };
        Err(Error::Catalog(CatalogError::Conflict {
            fqn: first.path.to_string(),
            what: "a tensor that is tied in FILLER",
            between: format!("{} and {} of {}", first.path, second.path, checkpoint.root.display()),
            detail,
            hint: Some(String::from("they are one tensor there: make them equal, or options::exclude one of them")),
        }))
    }

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

    fn other(&self, path: &Path, what: &'static str, theirs: &Value, ours: &Value) -> Error {
        let hint = "options::exclude leaves it out, and that of options::fill_from stays";
        let [theirs, ours] = [theirs, ours].map(|value| format!("{value:.60}"));
        self.misfit(path, what, &theirs, &ours, hint)
    }

    fn unknown(&self, what: &str, names: &[String], nearest: &str) -> Error {
        Error::usage(
            format!("{}: {} has no {what} of this name", short_list(names, FEW), self.filler.root.display()),
            format!("{nearest}; options::rename, options::strip_prefix and options::nest change names of SRC, options::exclude leaves them out"),
        )
        .naming(names)
    }

    fn ambiguous(&self, path: &Path, in_model: TensorId, whole: TensorId) -> Error {
        let name = |id| &self.filler.catalog.tensor(id).fqn;
        Error::usage(
            format!(
                "{path}: it is {} in the model of {}, and {}",
                name(in_model),
                self.filler.root.display(),
                name(whole)
            ),
            "options::nest model says that names of SRC are those in the model, options::root model that they begin with it",
        )
    }
}
