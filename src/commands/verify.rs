//! `verify`: a checkpoint is sound; two hold the same values.

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde_json::{Value as Json, json};

use super::printer::Printer;
use super::progress::Progress;
use super::{Status, check_series, input, read_options, refuse_fragment, work_options};
use crate::catalog::{Catalog, TensorEntry, TensorId, Value, model, path};
use crate::cli::Verify;
use crate::error::{Error, Result};
use crate::exec::{Options, Reporter, Stop, compare};
use crate::format::{Checkpoint, Format, SeriesChoice, checksum};
use crate::quantity::{count, human_bytes};

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
    let options = work_options(&args.source, false)?;
    let stop = Stop::on_signals()?;
    let mut report = Report::default();
    let Some(source) = open(args, &args.src, &mut report)? else { return finish(&report, args, printer) };
    if args.other.is_none() {
        check_series(&args.source, &[&source])?;
    }
    sound(&source, &options, printer, &stop, &mut report)?;
    if let Some(other_path) = &args.other {
        let Some(other) = open(args, other_path, &mut report)? else { return finish(&report, args, printer) };
        check_series(&args.source, &[&source, &other])?;
        same_values(args, (&source, &other), &options, printer, &stop, &mut report)?;
    }
    finish(&report, args, printer)
}

/// A checkpoint, or `None` where it is too damaged to be read, which is a finding.
fn open(args: &Verify, path: &std::path::Path, report: &mut Report) -> Result<Option<Checkpoint>> {
    match Checkpoint::open(path, &read_options(&args.source, SeriesChoice::All)) {
        Ok(checkpoint) => {
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
fn sound(
    checkpoint: &Checkpoint,
    options: &Options,
    printer: &Printer,
    stop: &Stop,
    report: &mut Report,
) -> Result<()> {
    for conflict in checkpoint.catalog.conflicts() {
        report.absorb("", conflict)?;
    }
    check_sums(checkpoint, printer, stop, report)?;
    let catalog = &checkpoint.catalog;
    let replicas = catalog.tensors.iter().filter(|entry| entry.chunks.len() > 1);
    let progress = Progress::start(printer, "comparing replicas", replicas.map(TensorEntry::len_bytes).sum());
    for entry in &catalog.tensors {
        let partial = entry.sharding.as_ref().is_some_and(crate::catalog::Sharding::is_partial);
        if partial {
            report.not_comparable.push(format!("{} (Partial)", entry.fqn));
            continue;
        }
        let checked = compare::locate(input(checkpoint), entry)
            .and_then(|()| compare::replica_difference(input(checkpoint), entry, options, &progress, stop));
        match checked {
            Ok(None) => {}
            Ok(Some(found)) => {
                let (first, second) = (entry.chunk_name(found.first), entry.chunk_name(found.second));
                let detail = format!("{first} and {second} differ, first at element {}", found.element);
                report.add(entry.fqn.as_str(), "replica", detail);
            }
            Err(error) => report.absorb(entry.fqn.as_str(), error)?,
        }
        report.tensors += 1;
        report.bytes += entry.len_bytes();
    }
    Ok(())
}

/// Every stored checksum holds.
fn check_sums(checkpoint: &Checkpoint, printer: &Printer, stop: &Stop, report: &mut Report) -> Result<()> {
    let archives = checksum::archives(&checkpoint.catalog);
    let progress = Progress::start(printer, "checking sums", archives.iter().map(|(archive, _)| archive.len).sum());
    let outcomes: Vec<Result<()>> = archives
        .par_iter()
        .map(|(archive, _)| {
            let mut summed = 0;
            checksum::check(&checkpoint.files, *archive, &mut |bytes| {
                summed += bytes;
                progress.advance(bytes);
                stop.check()
            })?;
            // What lies between the records has no sum.
            progress.advance(archive.len.saturating_sub(summed));
            Ok(())
        })
        .collect();
    for ((archive, fqn), outcome) in archives.iter().zip(outcomes) {
        if let Err(error) = outcome {
            let name =
                fqn.map_or_else(|| checkpoint.files.path(archive.file).display().to_string(), ToString::to_string);
            report.absorb(&name, error)?;
        }
    }
    Ok(())
}

/// Both hold the same tensors and objects, whatever their layouts and formats.
fn same_values(
    args: &Verify,
    (source, other): (&Checkpoint, &Checkpoint),
    options: &Options,
    printer: &Printer,
    stop: &Stop,
    report: &mut Report,
) -> Result<()> {
    let left = named_tensors(&source.catalog, args.root.as_deref())?;
    let mut right = named_tensors(&other.catalog, None)?;
    let progress =
        Progress::start(printer, "comparing", left.values().map(|id| source.catalog.tensor(*id).len_bytes()).sum());
    // From here on what is counted is what is compared.
    (report.tensors, report.bytes) = (0, 0);
    for (name, id) in left {
        let Some(other_id) = right.remove(&name) else {
            report.only_in_src.push(name);
            continue;
        };
        let (ours, theirs) = (source.catalog.tensor(id), other.catalog.tensor(other_id));
        report.tensors += 1;
        report.bytes += ours.len_bytes();
        if ours.dtype != theirs.dtype {
            report.add(name, "dtype", format!("{} in SRC, {} in OTHER", ours.dtype, theirs.dtype));
        } else if ours.shape != theirs.shape {
            let (ours, theirs) = (ours.shape.as_slice(), theirs.shape.as_slice());
            report.add(name, "shape", format!("{ours:?} in SRC, {theirs:?} in OTHER"));
        } else {
            match compare::first_difference((input(source), ours), (input(other), theirs), options, &progress, stop) {
                Ok(None) => {}
                Ok(Some(element)) => report.add(name, "values", format!("first at element {element} (row-major)")),
                Err(error) => report.absorb(&name, error)?,
            }
        }
    }
    report.only_in_other.extend(right.into_keys());
    if args.root.is_none() {
        suggest_root(&source.catalog, printer, report);
        same_objects(source, other, report);
    }
    Ok(())
}

/// A shipped model has the names below the model of its checkpoint: say so where that is all there is to it.
fn suggest_root(source: &Catalog, printer: &Printer, report: &Report) {
    let root = model::model(&source.state).root.to_string();
    let below = |name: &String| name.strip_prefix(&root).and_then(|rest| rest.strip_prefix('.')).map(str::to_owned);
    let shorter: Vec<String> = report.only_in_src.iter().filter_map(below).collect();
    if !root.is_empty() && report.only_in_other.iter().any(|name| shorter.contains(name)) {
        printer.line(&format!("hint: OTHER has the names that SRC has below `{root}`: add --root {root}"));
    }
}

fn named_tensors(catalog: &Catalog, root: Option<&str>) -> Result<BTreeMap<String, TensorId>> {
    let found = match root {
        None => model::all_tensors(&catalog.state),
        Some(root) => model::subtree(&catalog.state, root),
    };
    if let Some(root) = root.filter(|_| found.is_empty()) {
        return Err(Error::usage(
            format!("--root {root}: SRC has no tensors under that path"),
            "`dtshard inspect` shows its names",
        ));
    }
    Ok(found.into_iter().map(|(fqn, id)| (fqn.to_string(), id)).collect())
}

/// Objects are compared where both formats can hold them.
fn same_objects(source: &Checkpoint, other: &Checkpoint, report: &mut Report) {
    let (left, mut right) = (objects(&source.catalog.state), objects(&other.catalog.state));
    if source.format == Format::Safetensors || other.format == Format::Safetensors {
        report.not_comparable.extend(left.into_keys().chain(right.into_keys()));
        return;
    }
    for (name, value) in left {
        match right.remove(&name) {
            None => report.only_in_src.push(name),
            // Tensors in objects are compared by their own names; here they only have to stand in the same places.
            Some(theirs) if value.same_but_tensors(theirs) => {}
            Some(theirs) => report.add(name, "object", format!("{value:.60} in SRC, {theirs:.60} in OTHER")),
        }
    }
    report.only_in_other.extend(right.into_keys());
}

fn objects(state: &Value) -> BTreeMap<String, &Value> {
    path::objects(state).into_iter().map(|(path, value)| (path.to_string(), value)).collect()
}

fn finish(report: &Report, args: &Verify, printer: &Printer) -> Result<Status> {
    printer.document(&document(report))?;
    printer.data(&findings(report))?;
    let what = format!("{}, {}", count(report.tensors, "tensor"), human_bytes(report.bytes));
    if report.same() {
        let verdict = if args.other.is_some() { "the same" } else { "sound" };
        printer.line(&format!("{verdict}: {what}"));
        return Ok(Status::Done);
    }
    let number = report.different.len() + report.only_in_src.len() + report.only_in_other.len();
    printer.line(&format!("{} in {what}", count(number, "finding")));
    Ok(Status::Different)
}

fn findings(report: &Report) -> String {
    let mut text = String::new();
    for finding in &report.different {
        text.push_str(&format!("{}: {}: {}\n", finding.fqn, finding.kind, finding.detail));
    }
    let lists = [
        ("only in SRC", &report.only_in_src),
        ("only in OTHER", &report.only_in_other),
        ("not compared", &report.not_comparable),
    ];
    for (what, names) in lists {
        for name in names {
            text.push_str(&format!("{name}: {what}\n"));
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
