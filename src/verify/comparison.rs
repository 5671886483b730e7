//! Compares two checkpoints, or a checkpoint with a listing of digests. Tensors and objects are matched by name.
//!
//! Invariant: each name in one or both of the checkpoints is compared, is a finding, or is listed as not compared. With
//! `--common`, names that only one checkpoint has are ignored.

use std::collections::{BTreeMap, HashSet};

use serde_json::Value as Json;

use super::ComparedNames;
use super::findings::Findings;
use super::saved_digests::{DigestListing, ListedTensor};
use crate::catalog::value::describe;
use crate::catalog::{Catalog, Dtype, TensorEntry, TensorId, Value, path, state_dict};
use crate::convert::Run;
use crate::convert::options::{SelectOptions, VerifyOptions};
use crate::convert::source_options::input;
use crate::convert::tied;
use crate::describe::object_document;
use crate::error::{Error, Result};
use crate::exec::Silent;
use crate::exec::cast::Cast;
use crate::exec::compare;
use crate::format::Checkpoint;
use crate::progress::Task;
use crate::quantity::count;
use crate::select::Selected;

/// A comparison of two checkpoints.
pub(super) struct Comparison<'a> {
    /// The checkpoint SRC as stored, with its original names and dtypes.
    pub source: &'a Checkpoint,
    /// The checkpoint OTHER as stored.
    pub other: &'a Checkpoint,
    /// The selections of SRC and OTHER, with the names and dtypes for the comparison.
    pub names: &'a ComparedNames,
    /// The options of `verify`.
    pub args: &'a VerifyOptions,
    /// The resources of the run.
    pub run: &'a Run<'a>,
}

impl Comparison<'_> {
    /// Checks that SRC and OTHER have equal tensors and objects under equal names. The layouts and formats may differ.
    pub fn same(&self, found: &mut Findings) -> Result<()> {
        let Self { source, other, names, args, run } = self;
        let (ours, theirs) = (&names.source.catalog, &names.other.as_ref().expect("OTHER is a checkpoint").catalog);
        let left = named_tensors(ours);
        let mut right = named_tensors(theirs);
        check_common(args, left.keys(), right.keys())?;
        let progress =
            Task::start(run.progress, "comparing", left.values().map(|id| ours.tensor(*id).len_bytes()).sum());
        // The totals of the soundness check are reset, because the result reports only the compared tensors.
        (found.tensors, found.bytes) = (0, 0);
        for (name, id) in left {
            let Some(other_id) = right.remove(&name) else {
                found.removed(name, args);
                continue;
            };
            // The selected entry has the dtype for the comparison. The stored entries have the file locations.
            let (selected, entry, other_entry) =
                (ours.tensor(id), source.catalog.tensor(id), other.catalog.tensor(other_id));
            found.tensors += 1;
            found.bytes += selected.len_bytes();
            if !found.same_kind(&name, selected, other_entry) {
                continue;
            }
            let (left, right) = ((input(source), entry), (input(other), other_entry));
            match compare::measured_difference(left, right, selected.dtype, &run.options, &progress, &run.stop) {
                Ok(None) => found.equal.push(name),
                Ok(Some(difference)) => found.add_difference(name, &selected.shape, &difference),
                Err(error) if compare::has_no_value(&error, &[entry, other_entry]) => {
                    found.not_comparable.push(error.to_string());
                }
                Err(error) => found.absorb(&name, error)?,
            }
        }
        for name in right.into_keys() {
            found.added(name, args);
        }
        suggest_root(&names.source, &args.select, found);
        if found.hints.is_empty() {
            self.suggest_common(&[(source, ours, "OTHER"), (other, theirs, "SRC")], found)?;
        }
        if source.format.holds_objects() && other.format.holds_objects() {
            found.same_objects(ours, theirs, args);
        } else {
            let names = [ours, theirs].map(|catalog| objects(&catalog.state).into_keys());
            found.not_comparable.extend(names.into_iter().flatten());
        }
        Ok(())
    }

    /// Adds a hint to use `--common` if one checkpoint lacks an output layer that may be tied to an embedding. The
    /// output layer may be tied if the other checkpoint has both tensors with equal values.
    fn suggest_common(&self, sides: &[(&Checkpoint, &Catalog, &str); 2], found: &mut Findings) -> Result<()> {
        let Self { run, .. } = self;
        let only_in: [&[String]; 2] = [&found.only_in_src, &found.only_in_other];
        for ((checkpoint, names, other), only) in sides.iter().zip(only_in) {
            let tensors = named_tensors(names);
            for (output, embedding) in tied::stored_outputs(&names.state) {
                let (Some(one), Some(two)) = (tensors.get(&output), tensors.get(&embedding)) else { continue };
                let [one, two] = [one, two].map(|id| checkpoint.catalog.tensor(*id));
                if !only.contains(&output) || (one.dtype, &one.shape) != (two.dtype, &two.shape) {
                    continue;
                }
                let [left, right] = [one, two].map(|entry| (input(checkpoint), entry));
                let are_equal =
                    match compare::first_difference(left, right, one.dtype, &run.options, &Silent, &run.stop) {
                        Ok(difference) => difference.is_none(),
                        // The soundness check already reports this damage.
                        Err(error) if error.is_about_content() || compare::has_no_value(&error, &[one, two]) => false,
                        Err(error) => return Err(error),
                    };
                if are_equal {
                    found.hints.push(format!(
                        "{other} lacks `{output}`, which is equal to `{embedding}`: add options::common to compare only \
                         the tensors that both checkpoints have"
                    ));
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

impl ComparedNames {
    /// Checks that the tensors and objects of SRC equal those in a listing of digests.
    pub fn same_digests(
        &self,
        source: &Checkpoint,
        listing: &DigestListing,
        args: &VerifyOptions,
        run: &Run<'_>,
        found: &mut Findings,
    ) -> Result<()> {
        let selection = &self.source.catalog;
        let mut listed: BTreeMap<&str, &ListedTensor> =
            listing.tensors.iter().map(|(name, one)| (name.as_str(), one)).collect();
        listed.retain(|name, _| !self.left_out.contains(*name));
        let ours = named_tensors(selection);
        check_common(args, ours.keys(), listed.keys())?;
        let progress = Task::start(run.progress, "hashing", selection.tensors.iter().map(TensorEntry::len_bytes).sum());
        (found.tensors, found.bytes) = (0, 0);
        let mut known: BTreeMap<TensorId, String> = BTreeMap::new();
        for (name, id) in ours {
            let Some(other) = listed.remove(name.as_str()) else {
                found.removed(name, args);
                continue;
            };
            let (selected, entry) = (selection.tensor(id), source.catalog.tensor(id));
            let Some(expected) = other.digest.as_deref() else {
                found.not_comparable.push(format!("{name} (no digest)"));
                continue;
            };
            found.tensors += 1;
            found.bytes += selected.len_bytes();
            if !found.same_listed_kind(&name, selected, other) {
                continue;
            }
            let digest = match known.get(&id) {
                Some(digest) => Ok(digest.clone()),
                None => compare::digest(input(source), entry, selected.dtype, &run.options, &progress, &run.stop),
            };
            match digest {
                Ok(digest) => {
                    if digest != expected {
                        found.add(name, "differing", format!("{digest} in SRC, {expected} listed"));
                    }
                    known.insert(id, digest);
                }
                Err(error) if compare::has_no_value(&error, &[entry]) => found.not_comparable.push(error.to_string()),
                Err(error) => found.absorb(&name, error)?,
            }
        }
        for name in listed.into_keys() {
            found.added(name.to_owned(), args);
        }
        suggest_root(&self.source, &args.select, found);
        let ours = objects(&selection.state);
        if source.format.holds_objects() && listing.holds_objects() {
            let listed = listing.objects.iter().map(|(name, one)| (name.as_str(), one));
            let listed = listed.filter(|(name, _)| !self.left_out.contains(*name)).collect();
            found.same_listed_objects(ours, listed, args);
        } else {
            found.not_comparable.extend(ours.into_keys());
        }
        Ok(())
    }
}

/// Refuses `--common` if SRC and OTHER have no tensor name in common, because such a comparison would always succeed.
fn check_common(
    args: &VerifyOptions,
    ours: impl Iterator<Item = impl AsRef<str>>,
    theirs: impl Iterator<Item = impl AsRef<str>>,
) -> Result<()> {
    if !args.common {
        return Ok(());
    }
    let theirs: Vec<String> = theirs.map(|name| name.as_ref().to_owned()).collect();
    let known: HashSet<&str> = theirs.iter().map(String::as_str).collect();
    let ours: Vec<String> = ours.map(|name| name.as_ref().to_owned()).collect();
    if ours.iter().any(|name| known.contains(name.as_str())) {
        return Ok(());
    }
    let hint = match root_in_other(&ours, &theirs) {
        Some(root) => format!("in OTHER, the names of SRC are below `{root}`: add options::nest {root}"),
        None => String::from(
            "see the names with `dtshard inspect`; change the names of SRC with options::root, options::strip_prefix, \
             options::rename or options::nest",
        ),
    };
    Err(Error::usage("options::common: SRC and OTHER have no tensor name in common", hint))
}

impl Findings {
    fn removed(&mut self, name: String, args: &VerifyOptions) {
        if state_dict::is_random_state(&name) {
            self.not_comparable.push(name);
        } else if !args.common {
            self.only_in_src.push(name);
        }
    }

    fn added(&mut self, name: String, args: &VerifyOptions) {
        if state_dict::is_random_state(&name) {
            self.not_comparable.push(name);
        } else if !args.common {
            self.only_in_other.push(name);
        }
    }

    /// Returns true if two tensors have equal dtypes and shapes. If not, adds a finding.
    fn same_kind(&mut self, name: &str, ours: &TensorEntry, theirs: &TensorEntry) -> bool {
        self.same_dtype_and_shape(name, (ours.dtype.name(), &ours.shape), (theirs.dtype.name(), &theirs.shape))
    }

    fn same_listed_kind(&mut self, name: &str, ours: &TensorEntry, listed: &ListedTensor) -> bool {
        self.same_dtype_and_shape(name, (ours.dtype.name(), &ours.shape), (&listed.dtype, &listed.shape))
    }

    fn same_dtype_and_shape(&mut self, name: &str, ours: (&str, &[u64]), theirs: (&str, &[u64])) -> bool {
        if ours.0 != theirs.0 {
            let dtypes = Dtype::from_name(ours.0).zip(Dtype::from_name(theirs.0));
            if let Some(cast) = dtypes.and_then(|(from, to)| Cast::new(from, to)) {
                *self.casts.entry(cast.to().name()).or_default() += 1;
            }
            self.add(name, "retyped", format!("{} in SRC, {} in OTHER", ours.0, theirs.0));
        } else if ours.1 != theirs.1 {
            self.add(name, "reshaped", format!("{:?} in SRC, {:?} in OTHER", ours.1, theirs.1));
        }
        ours == theirs
    }

    fn same_objects(&mut self, source: &Catalog, other: &Catalog, args: &VerifyOptions) {
        let (ours, mut theirs) = (objects(&source.state), objects(&other.state));
        for (name, value) in ours {
            match theirs.remove(&name) {
                None => self.removed(name, args),
                // Tensors in objects are compared by their own names. Here only their positions in the object have to
                // match.
                Some(other) if value.same_but_tensors(other) => {}
                // `.params` lists the names in a flat parameter, and the order may differ.
                Some(other) if name.ends_with(".params") && same_names(value, other) => {}
                // Random state differs between ranks, and the number of ranks may have changed.
                Some(_) if state_dict::is_random_state(&name) => self.not_comparable.push(name),
                Some(their_value) => {
                    let value = describe(value, &source.tensors, 60);
                    let their_value = describe(their_value, &other.tensors, 60);
                    self.add(name, "object", format!("{value} in SRC, {their_value} in OTHER"));
                }
            }
        }
        for name in theirs.into_keys() {
            self.added(name, args);
        }
    }

    /// Compares objects with a listing. A listing has only the text that `inspect` prints for an object, so the texts
    /// of the objects are compared.
    fn same_listed_objects(
        &mut self,
        ours: BTreeMap<String, &Value>,
        mut listed: BTreeMap<&str, &Json>,
        args: &VerifyOptions,
    ) {
        for (name, value) in ours {
            let shown = object_document(value);
            match listed.remove(name.as_str()) {
                None => self.removed(name, args),
                Some(other) if *other == shown => {}
                // Random state differs between ranks, and the number of ranks may have changed.
                Some(_) if state_dict::is_random_state(&name) => self.not_comparable.push(name),
                Some(other) => self.add(name, "object", format!("{shown} in SRC, {other} listed")),
            }
        }
        for name in listed.into_keys() {
            self.added(name.to_owned(), args);
        }
    }
}

/// Adds a hint to change the prefix of names, if a name that only SRC has and a name that only OTHER has differ only in
/// a prefix. For example, a checkpoint has the name `model.x`, and the exported model has the name `x`.
fn suggest_root(source: &Selected, options: &SelectOptions, found: &mut Findings) {
    let SelectOptions { root, strip_prefix, rename, rename_file, add_prefix, nest, .. } = options;
    // `options::root` takes names of the file, and the names here are those after the options.
    let changes_names = root.is_some()
        || [strip_prefix, rename].iter().any(|list| !list.is_empty())
        || rename_file.is_some()
        || add_prefix.is_some()
        || nest.is_some();
    let root = state_dict::model(&source.catalog.state).root.to_string();
    let is_root = !root.is_empty() && has_below(&found.only_in_src, &root, &found.only_in_other);
    let root = is_root.then_some(root.as_str()).or_else(|| common_prefix(&found.only_in_src, &found.only_in_other));
    if let Some(root) = root.filter(|_| changes_names) {
        found.hints.push(format!(
            "OTHER has some names of SRC without `{root}.`: correct the options that change the names of SRC"
        ));
    } else if let Some(root) = root {
        found.hints.push(format!("in SRC, some names of OTHER are below `{root}`: add options::root {root}"));
    } else if let Some(prefix) = common_prefix(&found.only_in_other, &found.only_in_src) {
        let hint = format!("in OTHER, the names of SRC begin with `{prefix}.`: add options::add_prefix {prefix}.");
        found.hints.push(hint);
    } else if let Some(root) = root_in_other(&found.only_in_src, &found.only_in_other) {
        found.hints.push(if options.root.as_deref() == Some(root) {
            format!("in OTHER, the names of SRC are below `{root}`: use options::include {root} instead of options::root {root}")
        } else {
            format!(
                "in OTHER, the names of SRC are below `{root}`, beside other names: swap SRC and OTHER and add \
                 options::root {root}; or add options::nest {root} and options::common"
            )
        });
    }
}

/// Returns the path below which `theirs` has all names of `ours`: `model` if `ours` has the name `x`, and `theirs` has
/// the name `model.x`. For example, SRC is an exported model, and OTHER is the checkpoint of a trainer with a model and
/// an optimizer.
fn root_in_other<'n>(ours: &[String], theirs: &'n [String]) -> Option<&'n str> {
    let first = ours.first()?;
    let known: HashSet<&str> = theirs.iter().map(String::as_str).collect();
    let roots = theirs.iter().filter_map(|name| name.strip_suffix(first.as_str())?.strip_suffix('.'));
    roots
        .filter(|root| !root.is_empty())
        .find(|root| ours.iter().all(|name| known.contains(format!("{root}.{name}").as_str())))
}

/// Returns true if one of `names` consists of `root`, a dot and a name in `others`.
fn has_below(names: &[String], root: &str, others: &[String]) -> bool {
    let below = |name: &String| name.strip_prefix(root).and_then(|rest| rest.strip_prefix('.')).map(str::to_owned);
    let shorter: HashSet<String> = names.iter().filter_map(below).collect();
    others.iter().any(|name| shorter.contains(name))
}

/// Returns the first component of `names` if two conditions hold: all of `names` have this first component, and at
/// least one of them without this component is in `others`.
fn common_prefix<'n>(names: &'n [String], others: &[String]) -> Option<&'n str> {
    let (first, _) = names.first()?.split_once('.')?;
    let is_below = |name: &String| name.strip_prefix(first).is_some_and(|rest| rest.starts_with('.'));
    (names.iter().all(is_below) && has_below(names, first, others)).then_some(first)
}

/// Adds a hint to compare SRC as if it were cast, if OTHER has tensors in another dtype.
pub(super) fn suggest_dtype(found: &mut Findings, args: &VerifyOptions) {
    let Some((dtype, number)) = found.casts.iter().max_by_key(|(_, number)| **number) else { return };
    // If `--dtype` was given already, the tensors that still differ in dtype need a pattern.
    let pattern = if args.select.dtype.is_empty() { "" } else { "PATTERN=" };
    let number = count(*number, "tensor");
    found.hints.push(format!(
        "OTHER has {number} in {dtype}: add options::dtype {pattern}{dtype} to compare SRC as if cast to {dtype}"
    ));
}

fn named_tensors(catalog: &Catalog) -> BTreeMap<String, TensorId> {
    by_name(state_dict::all_tensors(&catalog.state).into_iter().map(|(fqn, id)| (fqn.to_string(), id)))
}

/// Returns true if two lists contain equal names, in any order. Returns false if a value is not a list of names.
fn same_names(left: &Value, right: &Value) -> bool {
    let names = |value: &Value| match value {
        Value::List(items) => {
            let mut names: Vec<String> =
                items.iter().map(|item| item.as_str().map(str::to_owned)).collect::<Option<_>>()?;
            names.sort_unstable();
            Some(names)
        }
        _ => None,
    };
    names(left).is_some_and(|left| names(right) == Some(left))
}

/// Returns the objects of a state dict by name. Tensors that differ between ranks are left out, because they are
/// compared as tensors, with one name for each rank.
fn objects(state: &Value) -> BTreeMap<String, &Value> {
    let is_tensor = |value: &Value| match value {
        Value::Other(holdings) => holdings.iter().all(|holding| matches!(holding.value, Value::Tensor(_))),
        _ => false,
    };
    by_name(
        path::objects(state)
            .into_iter()
            .filter(|(_, value)| !is_tensor(value))
            .map(|(path, value)| (path.to_string(), value)),
    )
}

/// Collects values by name. Two paths of a state dict, as in `{"a.b": .., "a": {"b": ..}}`, may have one dotted name.
/// The second value then gets another name, so that both values are compared.
fn by_name<T>(named: impl Iterator<Item = (String, T)>) -> BTreeMap<String, T> {
    let mut all = BTreeMap::new();
    for (mut name, value) in named {
        while all.contains_key(&name) {
            name.push_str(" (again)");
        }
        all.insert(name, value);
    }
    all
}
