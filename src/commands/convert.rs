//! What `reshard`, `unshard` and `consolidate` share once each has chosen what to take and how to lay it out:
//! check, stage, fill, publish, say what was done.

use std::path::{Component, Path, PathBuf};
use std::time::Instant;

use serde_json::{Value as Json, json};

use super::printer::Printer;
use super::progress::Progress;
use super::{Status, check_series, input, read_options, refuse_fragment, tell_resolved, work_options};
use crate::catalog::{OutputFile, Reservation};
use crate::cli::{ConvertArgs, DestinationArgs};
use crate::error::{Error, Result};
use crate::exec::copy::Stats;
use crate::exec::staging::{Existing, Shape, Staging};
use crate::exec::{Options, Stop, compare, copy};
use crate::format::{Checkpoint, Format, ReadOptions, SeriesChoice, Want, detect};
use crate::quantity::{count, human_bytes};
use crate::storage::filesystem;

/// A conversion with everything decided.
pub struct Conversion<'a> {
    /// When the verb began, reading the source included.
    pub started: Instant,
    pub checkpoint: &'a Checkpoint,
    pub reservation: Reservation,
    pub destination: Option<&'a Path>,
    pub shape: Shape,
    pub to: Format,
    /// Tensors of the source that are not written, in words for the closing line: `54 tensors (optim)`.
    pub left_out: Vec<String>,
    /// Further lines for the user.
    pub notes: Vec<String>,
}

/// Read the source of a verb that writes, which must be whole.
pub fn open_source(args: &ConvertArgs, default: SeriesChoice, want: Want, printer: &Printer) -> Result<Checkpoint> {
    let options = ReadOptions { want, ..read_options(&args.source, default) };
    let checkpoint = Checkpoint::open(&args.src, &options)?;
    tell_resolved(&checkpoint, printer);
    refuse_fragment(&checkpoint)?;
    check_series(&args.source, &[&checkpoint])?;
    Ok(checkpoint)
}

/// The format to write: `--to`, else the suffix of DST, else `default`.
pub fn target_format(args: &DestinationArgs, destination: Option<&Path>, default: Format) -> Format {
    let from_suffix = || match destination?.extension()?.to_str()? {
        "safetensors" => Some(Format::Safetensors),
        "pt" | "pth" | "bin" | "ckpt" => Some(Format::Torch),
        _ => None,
    };
    args.to.map(Format::from).or_else(from_suffix).unwrap_or(default)
}

/// The error for a verb that writes whole tensors and is asked for a format of shards.
pub fn holds_shards(verb: &str, to: Format) -> Error {
    Error::usage(
        format!("{verb} writes whole tensors, to torch or safetensors, not to {to}"),
        "use `dtshard reshard` with a --mesh to write shards",
    )
}

/// The name of a single-file destination.
pub fn file_name(destination: Option<&Path>, default: &str) -> PathBuf {
    destination.and_then(Path::file_name).map_or_else(|| PathBuf::from(default), PathBuf::from)
}

/// Do it.
///
/// # Errors
/// Anything; the destination is then as it was.
pub fn convert(conversion: Conversion<'_>, args: &ConvertArgs, printer: &Printer) -> Result<Status> {
    let ConvertArgs { source, destination: args, .. } = args;
    let options = work_options(source, !args.no_sync)?;
    for warning in &conversion.checkpoint.catalog.warnings {
        printer.detail(warning);
    }
    for note in &conversion.notes {
        printer.line(note);
    }
    if args.dry_run {
        let stats = copy::dry_run(input(conversion.checkpoint), &conversion.reservation, &Stop::default())?;
        printer.document(&document(&conversion, &stats, &options))?;
        printer.data(&dry_run_text(&conversion, &stats, &options))?;
        return Ok(Status::Done);
    }
    let destination = conversion.destination.expect("clap asks for DST unless --dry-run is given");
    refuse_nesting(&conversion.checkpoint.root, destination)?;
    if conversion.checkpoint.root.is_file() {
        // An index stands for the files it names.
        let files = &conversion.checkpoint.files;
        files.ids().try_for_each(|id| refuse_nesting(files.path(id), destination))?;
    }
    check_replaceable(destination, conversion.shape, args.overwrite)?;
    let stop = Stop::on_signals()?;
    let existing = Existing { overwrite: args.overwrite, restart: args.restart };
    let staging = Staging::begin(destination, conversion.shape, existing)?;
    check_space(staging.folder(), conversion.reservation.len_bytes())?;
    check_plain_replicas(&conversion, &options, printer, &stop)?;

    let progress = Progress::start(printer, "writing", conversion.reservation.len_bytes());
    let stats = copy::copy(
        input(conversion.checkpoint),
        &conversion.reservation,
        staging.folder(),
        &options,
        &progress,
        &stop,
    )?;
    drop(progress);
    if args.verify {
        read_back(&conversion, staging.folder(), &options, printer, &stop)?;
    }
    stop.check()?;
    staging.publish(options.sync)?;
    printer.document(&document(&conversion, &stats, &options))?;
    printer.line(&closing_line(&conversion, conversion.started.elapsed().as_secs_f64()));
    Ok(Status::Done)
}

/// What --overwrite replaces must be a checkpoint, not somebody's other work.
fn check_replaceable(destination: &Path, shape: Shape, overwrite: bool) -> Result<()> {
    let holds_something = || std::fs::read_dir(destination).is_ok_and(|mut entries| entries.next().is_some());
    if overwrite && shape == Shape::Folder && holds_something() && detect(destination, None).is_err() {
        return Err(Error::usage(
            format!("{} holds no checkpoint, so --overwrite does not replace it", destination.display()),
            "choose another destination, or remove it yourself",
        ));
    }
    Ok(())
}

/// A destination inside the source would change what is being read.
fn refuse_nesting(source: &Path, destination: &Path) -> Result<()> {
    let (source, target) = (resolve_missing(source)?, resolve_missing(destination)?);
    let relation = if target == source {
        "is the source itself"
    } else if target.starts_with(&source) {
        "lies inside the source"
    } else if source.starts_with(&target) {
        "contains the source"
    } else {
        return Ok(());
    };
    Err(Error::usage(
        format!("the destination {} {relation}", destination.display()),
        "choose a destination beside the source; the source is never changed",
    ))
}

/// The path a file would have if it were made now: links are followed where there is something to follow, and what is
/// missing is taken as the plain folders that will be made.
fn resolve_missing(path: &Path) -> Result<PathBuf> {
    let mut resolved = std::env::current_dir().map_err(Error::io("find", "the current folder"))?;
    for part in path.components() {
        match part {
            Component::ParentDir => drop(resolved.pop()),
            part => resolved.push(part),
        }
        if let Ok(known) = resolved.canonicalize() {
            resolved = known;
        }
    }
    Ok(resolved)
}

fn check_space(folder: &Path, needed: u64) -> Result<()> {
    let free = filesystem::free_bytes(folder)?;
    if free >= needed {
        return Ok(());
    }
    Err(Error::usage(
        format!(
            "{} needed on the file system of {}, {} free",
            human_bytes(needed),
            folder.display(),
            human_bytes(free)
        ),
        "free space there, or choose a destination on another file system",
    ))
}

/// Tensors that several ranks store whole must be equal on all of them.
fn check_plain_replicas(conversion: &Conversion<'_>, options: &Options, printer: &Printer, stop: &Stop) -> Result<()> {
    let catalog = &conversion.checkpoint.catalog;
    let mut checked = std::collections::HashSet::new();
    let plain: Vec<_> = (conversion.reservation.tensors.iter())
        .filter(|tensor| checked.insert(tensor.source))
        .map(|tensor| catalog.tensor(tensor.source))
        .filter(|entry| entry.sharding.is_none() && entry.chunks.len() > 1)
        .collect();
    let total = plain.iter().map(|entry| entry.len_bytes() * entry.chunks.len() as u64).sum();
    let progress = Progress::start(printer, "comparing replicas", total);
    for entry in plain {
        let found = compare::replica_difference(input(conversion.checkpoint), entry, options, &progress, stop)?;
        if let Some(difference) = found {
            let (first, second) = (entry.chunk_name(difference.first), entry.chunk_name(difference.second));
            return Err(Error::Conflict {
                fqn: entry.fqn.to_string(),
                what: "a plain tensor",
                between: format!("{first} and {second}"),
                detail: format!("first at element {} (row-major)", difference.element),
                hint: Some(
                    "tensors that every rank stores whole must be equal; `dtshard verify` lists all such tensors"
                        .into(),
                ),
            });
        }
    }
    Ok(())
}

/// Compare what was written with the source, before anybody can see it.
fn read_back(
    conversion: &Conversion<'_>,
    folder: &Path,
    options: &Options,
    printer: &Printer,
    stop: &Stop,
) -> Result<()> {
    let mut files = crate::storage::Files::new(conversion.checkpoint.files.io());
    for file in &conversion.reservation.files {
        files.add(folder.join(&file.path))?;
    }
    let catalog = crate::catalog::Catalog::empty();
    let written = crate::exec::Input { files: &files, catalog: &catalog, resolve: &crate::format::resolve };
    let source = &conversion.checkpoint.catalog;
    let progress = Progress::start(printer, "verifying", conversion.reservation.payload_bytes());
    for tensor in &conversion.reservation.tensors {
        let left = (input(conversion.checkpoint), source.tensor(tensor.source));
        let found = compare::first_difference(left, (written, &tensor.entry), options, &progress, stop)?;
        if let Some(element) = found {
            return Err(Error::Conflict {
                fqn: tensor.entry.fqn.to_string(),
                what: "a tensor",
                between: "the source and what was written".into(),
                detail: format!("first at element {element} (row-major)"),
                hint: Some("memory or disk is at fault; nothing was published".into()),
            });
        }
    }
    Ok(())
}

fn left_out(conversion: &Conversion<'_>) -> Vec<String> {
    let objects = conversion.reservation.left_out.len();
    let objects = (objects > 0).then(|| count(objects, "object"));
    let series = conversion.checkpoint.skipped_series.iter().map(|name| format!("series {name}"));
    conversion.left_out.iter().cloned().chain(objects).chain(series).collect()
}

/// `wrote 7 files, 291 tensors, 14.96 GB in 9.8 s (1.5 GB/s); left out: 54 tensors (optim), 12 objects`
fn closing_line(conversion: &Conversion<'_>, seconds: f64) -> String {
    let reservation = &conversion.reservation;
    let bytes = reservation.len_bytes();
    #[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
    let rate = bytes as f64 / seconds.max(1e-3) / 1e9;
    let mut line = format!(
        "wrote {}, {}, {} in {seconds:.1} s ({rate:.1} GB/s)",
        count(reservation.files.len(), "file"),
        count(reservation.tensors.len(), "tensor"),
        human_bytes(bytes),
    );
    let left_out = left_out(conversion);
    if !left_out.is_empty() {
        line.push_str(&format!("; left out: {}", left_out.join(", ")));
    }
    line
}

fn peak_bytes(options: &Options) -> u64 {
    super::BASE_BYTES + options.buffer_bytes()
}

fn mean_run_bytes(stats: &Stats) -> u64 {
    stats.bytes_read.checked_div(stats.runs).unwrap_or(0)
}

fn document(conversion: &Conversion<'_>, stats: &Stats, options: &Options) -> Json {
    let reservation = &conversion.reservation;
    let files: Vec<Json> = reservation.files.iter().map(file_document).collect();
    let mut left_out = left_out(conversion);
    left_out.extend(reservation.left_out.iter().cloned());
    json!({
        "source": { "path": conversion.checkpoint.root.display().to_string(), "format": conversion.checkpoint.format.name() },
        "target": {
            "path": conversion.destination.map(|path| path.display().to_string()),
            "format": conversion.to.name(),
        },
        "files": files,
        "tensors": reservation.tensors.len(),
        "bytes_read": stats.bytes_read,
        "bytes_written": reservation.len_bytes(),
        "runs": stats.runs,
        "mean_run_bytes": mean_run_bytes(stats),
        "peak_bytes": peak_bytes(options),
        "left_out": left_out,
        "cast": {},
        "tied": {},
        "warnings": conversion.checkpoint.catalog.warnings.iter().chain(&conversion.notes).collect::<Vec<_>>(),
    })
}

fn file_document(file: &OutputFile) -> Json {
    json!({ "path": file.path.display().to_string(), "bytes": file.len })
}

fn dry_run_text(conversion: &Conversion<'_>, stats: &Stats, options: &Options) -> String {
    let reservation = &conversion.reservation;
    let mut lines = vec![
        format!("source        {} ({})", conversion.checkpoint.root.display(), conversion.checkpoint.format),
        format!(
            "target        {} ({})",
            conversion.destination.map_or_else(|| String::from("-"), |path| path.display().to_string()),
            conversion.to
        ),
        format!("files         {}", reservation.files.len()),
        format!("tensors       {}", reservation.tensors.len()),
        format!("bytes read    {}", human_bytes(stats.bytes_read)),
        format!("bytes written {}", human_bytes(reservation.len_bytes())),
        format!("runs          {} (mean {})", stats.runs, human_bytes(mean_run_bytes(stats))),
        format!("peak memory   {} (anonymous)", human_bytes(peak_bytes(options))),
    ];
    let left_out = left_out(conversion);
    if !left_out.is_empty() {
        lines.push(format!("left out      {}", left_out.join(", ")));
    }
    lines.join("\n") + "\n"
}
