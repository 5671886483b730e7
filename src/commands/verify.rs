//! `verify`: a checkpoint is sound; two hold the same values.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use super::digests::{Listed, Listing};
use super::printer::Printer;
use super::progress::Progress;
use super::run::Run;
use super::source::{Defaults, announce, select_options};
use super::told::told;
use super::{Status, check_flat, check_series, checks, input, read_options, refuse_fragment};
use crate::catalog::{Catalog, Dtype, TensorEntry, TensorId, Value, model, path};
use crate::cli::Verify;
use crate::error::{Error, Result};
use crate::exec::cast::Cast;
use crate::exec::compare;
use crate::format::{Checkpoint, SeriesChoice, Told, Want, fsdp_flat};
use crate::quantity::{count, human_bytes};
use crate::select::{self, Selected, Wrappers};

/// Something that is not as it should be.
#[derive(Debug)]
struct Finding {
    fqn: String,
    kind: &'static str,
    detail: String,
}

/// Everything a run finds.
#[derive(Debug, Default)]
struct Report {
    different: Vec<Finding>,
    only_in_src: Vec<String>,
    only_in_other: Vec<String>,
    not_comparable: Vec<String>,
    tensors: usize,
    bytes: u64,
    /// Dtypes to which SRC may have been cast, and how many tensors.
    casts: BTreeMap<&'static str, usize>,
    /// What may be the matter.
    hints: Vec<String>,
}

impl Report {
    fn add(&mut self, fqn: impl Into<String>, kind: &'static str, detail: impl Into<String>) {
        self.different.push(Finding { fqn: fqn.into(), kind, detail: detail.into() });
    }

    /// Damage is a finding; anything else keeps the run from being done.
    fn absorb(&mut self, fqn: &str, error: Error) -> Result<()> {
        if !error.is_about_content() {
            return Err(error);
        }
        self.add(error.fqn().unwrap_or(fqn).to_owned(), error.kind(), error.detail());
        Ok(())
    }

    fn same(&self) -> bool {
        self.different.is_empty() && self.only_in_src.is_empty() && self.only_in_other.is_empty()
    }
}

pub fn run(args: &Verify, printer: &Printer) -> Result<Status> {
    let run = Run::reading(&args.source, printer)?;
    let mut report = Report::default();
    let listing = args.other.as_deref().map(Listing::read_if_any).transpose()?.flatten();
    let Some(source) = open(args, &args.src, told(&args.source.told, args.select.keep_names)?, printer, &mut report)?
    else {
        return finish(&report, args, printer);
    };
    let other = match &args.other {
        Some(path) if listing.is_none() => match open(args, path, None, printer, &mut report)? {
            Some(other) => Some(other),
            None => return finish(&report, args, printer),
        },
        _ => None,
    };
    let opened: Vec<&Checkpoint> = std::iter::once(&source).chain(&other).collect();
    check_series(&args.source, &opened)?;
    check_flat(&args.source, args.shapes.like.as_deref(), &opened)?;
    // Names that cannot be had are known before hours of reading.
    let names = Names::new(args, &source, other.as_ref())?;
    sound(&source, &run, &mut report)?;
    match (&other, &listing) {
        (Some(other), _) => Comparison { source: &source, other, names: &names, args, run: &run }.same(&mut report)?,
        (None, Some(listing)) => names.same_digests(&source, listing, args, &run, &mut report)?,
        (None, None) => {}
    }
    suggest_dtype(&mut report, args);
    finish(&report, args, printer)
}

/// What is compared: SRC under the names and in the dtypes that were asked for, OTHER as it is.
struct Names {
    source: Selected,
    other: Option<Selected>,
}

impl Names {
    fn new(args: &Verify, source: &Checkpoint, other: Option<&Checkpoint>) -> Result<Self> {
        let defaults = Defaults { wrappers: Wrappers::Cut, ..Defaults::everything() };
        let options = select_options(&args.select, defaults)?;
        let as_it_is = select::Options { wrappers: options.wrappers, ..select::Options::default() };
        Ok(Self {
            source: select::select(&source.catalog, &options)?,
            other: other.map(|other| select::select(&other.catalog, &as_it_is)).transpose()?,
        })
    }
}

/// A checkpoint, or `None` where it is too damaged to be read, which is a finding.
fn open(
    args: &Verify,
    path: &std::path::Path,
    told: Option<Told>,
    printer: &Printer,
    report: &mut Report,
) -> Result<Option<Checkpoint>> {
    let mut options = read_options(&args.source, args.shapes.like.as_deref(), SeriesChoice::All, Want::All);
    options.told = told;
    // Damage to that is none of the checkpoint.
    if let Some(path) = &options.flat.layout {
        fsdp_flat::document::read(path)?;
    }
    // Soundness needs no shapes, a comparison does.
    options.flat.raw = args.other.is_none();
    match Checkpoint::open(path, &options) {
        Ok(checkpoint) => {
            announce(&checkpoint, printer);
            refuse_fragment(&checkpoint)?;
            Ok(Some(checkpoint))
        }
        Err(error) => {
            report.absorb(&path.display().to_string(), error)?;
            Ok(None)
        }
    }
}

/// Every tensor is covered once, every replica is equal, every stored checksum holds.
fn sound(checkpoint: &Checkpoint, run: &Run<'_>, report: &mut Report) -> Result<()> {
    let catalog = &checkpoint.catalog;
    report.not_comparable.extend(catalog.dropped.iter().map(|name| format!("{name}, dropped")));
    for conflict in catalog.conflicts() {
        report.absorb("", conflict)?;
    }
    for (name, error) in checks::sums(checkpoint, run) {
        report.absorb(&name, error)?;
    }
    let mut untold = 0;
    let replicas = catalog.tensors.iter().filter(|entry| entry.chunks.len() > 1);
    let progress = Progress::start(run.printer, "comparing replicas", replicas.map(TensorEntry::len_bytes).sum());
    for entry in &catalog.tensors {
        let checked = compare::locate(input(checkpoint), entry).and_then(|()| {
            if model::is_random_state(entry.fqn.as_str()) {
                return Ok(None);
            }
            compare::replica_difference(input(checkpoint), entry, &run.options, &progress, &run.stop)
        });
        match checked {
            Ok(None) => {}
            Ok(Some(found)) => {
                let (first, second) = (entry.chunk_name(found.first), entry.chunk_name(found.second));
                let detail = format!("{first} and {second} differ, first at element {}", found.element);
                report.add(entry.fqn.as_str(), "replica", detail);
                untold += usize::from(!entry.is_shared());
            }
            Err(error) => report.absorb(entry.fqn.as_str(), error)?,
        }
        report.tensors += 1;
        report.bytes += entry.len_bytes();
    }
    if untold > 0 {
        report.hints.push(String::from(
            "plain tensors are taken for copies; where ranks hold parts of them, --src-mesh and --src-placements or \
             --src-plan say which, and where they hold summands, --reduce",
        ));
    }
    Ok(())
}

/// Whether tensors cannot be compared because the summands of one make no value: the op is not one of its dtype, or the
/// result does not fit.
pub fn has_no_value(error: &Error, entries: &[&TensorEntry]) -> bool {
    matches!(error, Error::Unsupported { .. }) && entries.iter().any(|entry| entry.summands.is_some())
}

/// Two checkpoints side by side.
struct Comparison<'a> {
    source: &'a Checkpoint,
    other: &'a Checkpoint,
    names: &'a Names,
    args: &'a Verify,
    run: &'a Run<'a>,
}

impl Comparison<'_> {
    /// Both hold the same tensors and objects, whatever their layouts and formats.
    fn same(&self, report: &mut Report) -> Result<()> {
        let Self { source, other, names, args, run } = self;
        let (ours, theirs) = (&names.source.catalog, &names.other.as_ref().expect("OTHER is a checkpoint").catalog);
        let left = named_tensors(ours);
        let mut right = named_tensors(theirs);
        check_common(args, left.keys(), |name| right.contains_key(name))?;
        let progress =
            Progress::start(run.printer, "comparing", left.values().map(|id| ours.tensor(*id).len_bytes()).sum());
        // From here on what is counted is what is compared.
        (report.tensors, report.bytes) = (0, 0);
        for (name, id) in left {
            let Some(other_id) = right.remove(&name) else {
                report.removed(name, args);
                continue;
            };
            // The wishes have the dtypes to compare in, the checkpoints the places.
            let (wish, entry, other_entry) =
                (ours.tensor(id), source.catalog.tensor(id), other.catalog.tensor(other_id));
            report.tensors += 1;
            report.bytes += wish.len_bytes();
            if !report.same_kind(&name, wish, other_entry) {
                continue;
            }
            let (left, right) = ((input(source), entry), (input(other), other_entry));
            match compare::first_difference(left, right, wish.dtype, &run.options, &progress, &run.stop) {
                Ok(None) => {}
                Ok(Some(difference)) => report.add(name, "differing", difference.detail(wish.numel())),
                Err(error) if has_no_value(&error, &[entry, other_entry]) => {
                    report.not_comparable.push(error.to_string());
                }
                Err(error) => report.absorb(&name, error)?,
            }
        }
        for name in right.into_keys() {
            report.added(name, args);
        }
        suggest_root(&names.source, report);
        let (ours, theirs) = (objects(&ours.state), objects(&theirs.state));
        if source.format.holds_objects() && other.format.holds_objects() {
            report.same_objects(ours, theirs, args);
        } else {
            report.not_comparable.extend(ours.into_keys().chain(theirs.into_keys()));
        }
        Ok(())
    }
}

impl Names {
    /// SRC has the tensors and objects that were listed with their digests.
    fn same_digests(
        &self,
        source: &Checkpoint,
        listing: &Listing,
        args: &Verify,
        run: &Run<'_>,
        report: &mut Report,
    ) -> Result<()> {
        let wanted = &self.source.catalog;
        let mut listed: BTreeMap<&str, &Listed> =
            listing.tensors.iter().map(|(name, one)| (name.as_str(), one)).collect();
        let ours = named_tensors(wanted);
        check_common(args, ours.keys(), |name| listed.contains_key(name))?;
        let progress = Progress::start(run.printer, "hashing", wanted.tensors.iter().map(TensorEntry::len_bytes).sum());
        (report.tensors, report.bytes) = (0, 0);
        let mut known: BTreeMap<TensorId, String> = BTreeMap::new();
        for (name, id) in ours {
            let Some(other) = listed.remove(name.as_str()) else {
                report.removed(name, args);
                continue;
            };
            let (wish, entry) = (wanted.tensor(id), source.catalog.tensor(id));
            let Some(expected) = other.digest.as_deref() else {
                report.not_comparable.push(format!("{name} (no digest)"));
                continue;
            };
            report.tensors += 1;
            report.bytes += wish.len_bytes();
            if !report.same_listed_kind(&name, wish, other) {
                continue;
            }
            let digest = match known.get(&id) {
                Some(digest) => Ok(digest.clone()),
                None => compare::digest(input(source), entry, wish.dtype, &run.options, &progress, &run.stop),
            };
            match digest {
                Ok(digest) => {
                    if digest != expected {
                        report.add(name, "differing", format!("{digest} in SRC, {expected} listed"));
                    }
                    known.insert(id, digest);
                }
                Err(error) if has_no_value(&error, &[entry]) => report.not_comparable.push(error.to_string()),
                Err(error) => report.absorb(&name, error)?,
            }
        }
        for name in listed.into_keys() {
            report.added(name.to_owned(), args);
        }
        suggest_root(&self.source, report);
        let ours = objects(&wanted.state);
        if source.format.holds_objects() && listing.holds_objects() {
            report.same_listed_objects(ours, listing, args);
        } else {
            report.not_comparable.extend(ours.into_keys());
        }
        Ok(())
    }
}

/// Two that have no name in common would be the same whatever they hold.
fn check_common<'n>(
    args: &Verify,
    mut ours: impl Iterator<Item = &'n String>,
    in_other: impl Fn(&str) -> bool,
) -> Result<()> {
    if !args.common || ours.any(|name| in_other(name)) {
        return Ok(());
    }
    Err(Error::usage(
        "--common: SRC and OTHER have no name of a tensor in common",
        "`dtshard inspect` shows their names; --root, --strip-prefix and --rename change those of SRC",
    ))
}

impl Report {
    fn removed(&mut self, name: String, args: &Verify) {
        if model::is_random_state(&name) {
            self.not_comparable.push(name);
        } else if !args.common {
            self.only_in_src.push(name);
        }
    }

    fn added(&mut self, name: String, args: &Verify) {
        if model::is_random_state(&name) {
            self.not_comparable.push(name);
        } else if !args.common {
            self.only_in_other.push(name);
        }
    }

    /// Equal dtypes and shapes; a difference is noted.
    fn same_kind(&mut self, name: &str, ours: &TensorEntry, theirs: &TensorEntry) -> bool {
        self.same_dtype_and_shape(name, (ours.dtype.name(), &ours.shape), (theirs.dtype.name(), &theirs.shape))
    }

    fn same_listed_kind(&mut self, name: &str, ours: &TensorEntry, listed: &Listed) -> bool {
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

    fn same_objects(&mut self, ours: BTreeMap<String, &Value>, mut theirs: BTreeMap<String, &Value>, args: &Verify) {
        for (name, value) in ours {
            match theirs.remove(&name) {
                None => self.removed(name, args),
                // Tensors in objects are compared by their own names; here they only have to stand in the same places.
                Some(other) if value.same_but_tensors(other) => {}
                // Flat parameters list what they hold in an order of their own.
                Some(other) if name.ends_with(".params") && same_names(value, other) => {}
                // Every rank has its own, and there may be more ranks now.
                Some(_) if model::is_random_state(&name) => self.not_comparable.push(name),
                Some(other) => self.add(name, "object", format!("{value:.60} in SRC, {other:.60} in OTHER")),
            }
        }
        for name in theirs.into_keys() {
            self.added(name, args);
        }
    }

    /// Objects are listed as they are shown, which is all there is to compare.
    fn same_listed_objects(&mut self, ours: BTreeMap<String, &Value>, listing: &Listing, args: &Verify) {
        let mut listed: BTreeMap<&str, &Json> =
            listing.objects.iter().map(|(name, one)| (name.as_str(), one)).collect();
        for (name, value) in ours {
            let shown = super::inspect::object_document(value);
            match listed.remove(name.as_str()) {
                None => self.removed(name, args),
                Some(other) if *other == shown => {}
                // Every rank has its own, and there may be more ranks now.
                Some(_) if model::is_random_state(&name) => self.not_comparable.push(name),
                Some(other) => self.add(name, "object", format!("{shown} in SRC, {other} listed")),
            }
        }
        for name in listed.into_keys() {
            self.added(name.to_owned(), args);
        }
    }
}

/// A shipped model has the names below the model of its checkpoint: say so where that is all there is to it.
fn suggest_root(source: &Selected, report: &mut Report) {
    let root = model::model(&source.catalog.state).root.to_string();
    let below = |name: &String| name.strip_prefix(&root).and_then(|rest| rest.strip_prefix('.')).map(str::to_owned);
    let shorter: Vec<String> = report.only_in_src.iter().filter_map(below).collect();
    if !root.is_empty() && report.only_in_other.iter().any(|name| shorter.contains(name)) {
        report.hints.push(format!("OTHER has the names that SRC has below `{root}`: add --root {root}"));
    }
}

/// What was cast when it was written is compared as if SRC had been.
fn suggest_dtype(report: &mut Report, args: &Verify) {
    let Some((dtype, number)) = report.casts.iter().max_by_key(|(_, number)| **number) else { return };
    // Those that one for all tensors leaves are said by pattern.
    let pattern = if args.select.dtype.is_empty() { "" } else { "PATTERN=" };
    let number = count(*number, "tensor");
    report
        .hints
        .push(format!("OTHER has {number} as {dtype}: --dtype {pattern}{dtype} compares SRC as if it were cast"));
}

fn named_tensors(catalog: &Catalog) -> BTreeMap<String, TensorId> {
    by_name(model::all_tensors(&catalog.state).into_iter().map(|(fqn, id)| (fqn.to_string(), id)))
}

/// Whether two lists hold the same names, in whatever order.
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

fn objects(state: &Value) -> BTreeMap<String, &Value> {
    by_name(path::objects(state).into_iter().map(|(path, value)| (path.to_string(), value)))
}

/// A state dict may have `{"a.b": ..}` beside `{"a": {"b": ..}}`, and each of them is compared.
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

fn finish(report: &Report, args: &Verify, printer: &Printer) -> Result<Status> {
    printer.document(&document(report))?;
    printer.data(&findings(report, if printer.verbose() { usize::MAX } else { SHOWN }))?;
    let mut what = format!("{}, {}", count(report.tensors, "tensor"), human_bytes(report.bytes));
    if !report.not_comparable.is_empty() {
        what.push_str(&format!("; {} not compared", report.not_comparable.len()));
    }
    if report.same() {
        let verdict = if args.other.is_some() { "the same" } else { "sound" };
        printer.line(&format!("{verdict}: {what}"));
        return Ok(Status::Done);
    }
    let number = report.different.len() + report.only_in_src.len() + report.only_in_other.len();
    printer.line(&format!("{} in {what}", count(number, "finding")));
    for hint in &report.hints {
        printer.line(&format!("hint: {hint}"));
    }
    Ok(Status::Different)
}

/// Names of a list that are shown; `-v` shows all.
const SHOWN: usize = 20;

fn findings(report: &Report, shown: usize) -> String {
    let mut text = String::new();
    for finding in &report.different {
        text.push_str(&format!("{}: {}: {}\n", finding.fqn, finding.kind, finding.detail));
    }
    let lists = [
        ("removed: only in SRC", &report.only_in_src),
        ("added: only in OTHER", &report.only_in_other),
        ("not compared", &report.not_comparable),
    ];
    for (what, names) in lists {
        for name in names.iter().take(shown) {
            text.push_str(&format!("{name}: {what}\n"));
        }
        if let Some(more @ 1..) = names.len().checked_sub(shown) {
            text.push_str(&format!("{more} more {what} (-v lists all)\n"));
        }
    }
    text
}

fn document(report: &Report) -> Json {
    let different: Vec<Json> = (report.different.iter())
        .map(|finding| json!({ "fqn": finding.fqn, "kind": finding.kind, "detail": finding.detail }))
        .collect();
    json!({
        "same": report.same(),
        "tensors": report.tensors,
        "bytes": report.bytes,
        "different": different,
        "only_in_src": report.only_in_src,
        "only_in_other": report.only_in_other,
        "not_comparable": report.not_comparable,
    })
}
