//! What the verbs that write share once each has chosen what to take and how to lay it out:
//! check, stage, fill, publish, say what was done.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use serde_json::{Map, Value as Json, json};

use super::progress::Progress;
use super::run::Run;
use super::source::Source;
use super::{Status, input, partial};
use crate::catalog::{Fqn, OutputFile, Reservation};
use crate::cli::{ConvertArgs, DestinationArgs};
use crate::error::{Error, Result};
use crate::exec::carry::{Carried, carry};
use crate::exec::copy::Stats;
use crate::exec::staging::{Existing, Shape, Staging};
use crate::exec::{Options, Silent, Stop, compare, copy};
use crate::format::{Format, is_checkpoint};
use crate::quantity::{count, human_bytes};
use crate::storage::filesystem;
use crate::storage::memory::{Anonymous, anonymous};

/// A conversion with everything decided.
pub struct Conversion<'a> {
    pub source: &'a Source,
    pub reservation: Reservation,
    /// Files that go to the destination as they are.
    pub carried: Vec<Carried>,
    pub shape: Shape,
    pub to: Format,
    /// Names that are not written but recorded as others: alias to kept.
    pub tied: Vec<(Fqn, Fqn)>,
    /// Further lines for the user.
    pub notes: Vec<String>,
}

/// The format to write: `--to`, else the suffix of DST, else `default`.
///
/// # Errors
/// `Usage` where the suffix is that of a file in another format, or nearly that of one: DST would become a folder.
pub fn target_format(args: &DestinationArgs, destination: Option<&Path>, default: Format) -> Result<Format> {
    let to = named_format(args, destination, default)?;
    match &args.torch_version {
        Some(version) if to != Format::TorchRanks => Err(Error::usage(
            format!("--torch-version {version} is for DTensors in rank files, and DST is to be {to}"),
            "leave it out: every PyTorch that is supported loads the same",
        )),
        _ => Ok(to),
    }
}

fn named_format(args: &DestinationArgs, destination: Option<&Path>, default: Format) -> Result<Format> {
    const WRITTEN: [(&str, Format); 5] = [
        ("safetensors", Format::Safetensors),
        ("pt", Format::Torch),
        ("pth", Format::Torch),
        ("bin", Format::Torch),
        ("ckpt", Format::Torch),
    ];
    const OTHERS: [&str; 10] = ["gguf", "ggml", "h5", "npz", "npy", "onnx", "msgpack", "pkl", "zip", "json"];
    if let Some(to) = args.to {
        return Ok(to.into());
    }
    let path = destination.filter(|path| !path.is_dir());
    let Some(suffix) = path.and_then(Path::extension).and_then(|suffix| suffix.to_str()) else { return Ok(default) };
    if let Some((_, format)) = WRITTEN.iter().find(|(known, _)| *known == suffix) {
        return Ok(*format);
    }
    let meant = (suffix.len() > 4).then(|| WRITTEN.iter().find(|(known, _)| strsim::levenshtein(known, suffix) <= 2));
    if !OTHERS.contains(&suffix) && meant.flatten().is_none() {
        return Ok(default);
    }
    Err(Error::usage(
        format!("DST ends in .{suffix}, which is no format that is written"),
        "files end in .safetensors, .pt, .pth, .bin or .ckpt; --to says the format of any other name",
    ))
}

/// The error for a verb that writes whole tensors and is asked for a format of shards.
pub fn holds_shards(verb: &str, to: Format) -> Error {
    if to == Format::DcpHf {
        return not_written(to);
    }
    Error::usage(
        format!("{verb} writes whole tensors, to torch or safetensors, not to {to}"),
        "use `dtshard reshard` with a --mesh to write shards",
    )
}

/// The error for a format that is only read.
pub fn not_written(to: Format) -> Error {
    Error::usage(
        format!("{to} is read, not written"),
        "--to safetensors is what Hugging Face loaders open, --to dcp what DCP loads; leave --to out for the verb's own",
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
pub fn convert(conversion: &Conversion<'_>, args: &ConvertArgs, run: &Run<'_>) -> Result<Status> {
    perform(conversion, args, run).map_err(|error| conversion.source.locate(error))
}

fn perform(conversion: &Conversion<'_>, args: &ConvertArgs, run: &Run<'_>) -> Result<Status> {
    let Run { printer, options, stop, started } = run;
    check_len(&conversion.reservation)?;
    let source = &conversion.source.checkpoint;
    for note in notes(conversion) {
        printer.line(&note);
    }
    for name in left_out(conversion).1 {
        printer.detail(&format!("left out: {name}"));
    }
    let (checks, dst, max_memory) = (args.checks, args.dst.as_deref(), args.source.max_memory.0);
    let args = &args.destination;
    let options = &within_memory(conversion, *options, max_memory)?;
    let report = Report { conversion, destination: dst, options, before: anonymous() };
    if args.dry_run {
        let stats = copy::dry_run(input(source), &conversion.reservation, &Stop::default())?;
        printer.document(&report.document(&stats))?;
        printer.data(&report.dry_run_text(&stats))?;
        return Ok(Status::Done);
    }
    let destination = dst.expect("clap asks for DST unless --dry-run is given");
    let read = conversion.source.paths_read();
    read.iter().try_for_each(|(name, path)| refuse_nesting(name, path, destination))?;
    if read.iter().any(|(_, path)| path.is_file()) {
        // An index stands for the files it names.
        source.files.ids().try_for_each(|id| refuse_nesting("the source", source.files.path(id), destination))?;
    }
    check_replaceable(destination, conversion.shape, args.overwrite)?;
    let existing = Existing { overwrite: args.overwrite, restart: args.restart };
    let staging = Staging::begin(destination, conversion.shape, existing)?;
    let carried_bytes: u64 = conversion.carried.iter().map(|file| file.len).sum();
    let total = conversion.reservation.len_bytes() + carried_bytes;
    check_space(staging.folder(), total)?;
    conversion.source.check(checks, run)?;

    let progress = Progress::start(printer, "writing", total);
    let stats = copy::copy(input(source), &conversion.reservation, staging.folder(), options, &progress, stop)?;
    carry(&conversion.carried, staging.folder(), options.sync, &progress, stop)?;
    drop(progress);
    if args.verify {
        read_back(conversion, staging.folder(), run)?;
    }
    stop.check()?;
    staging.publish(options.sync)?;
    printer.document(&report.document(&stats))?;
    for warning in cast_warnings(&stats) {
        printer.warning(&warning);
    }
    printer.line(&report.closing_line(&stats, started.elapsed().as_secs_f64()));
    Ok(Status::Done)
}

/// A source may claim any size, and each of many ranks may get a copy of it all. Sums of lengths need no checks behind
/// this one.
fn check_len(reservation: &Reservation) -> Result<()> {
    let total: u128 = reservation.files.iter().map(|file| u128::from(file.len)).sum();
    if total < 1 << 62 {
        return Ok(());
    }
    Err(Error::usage(
        format!("the files of DST would have {total} bytes in all: no file system holds 2^62"),
        "does SRC hold views of few bytes that claim to be many?",
    ))
}

/// What --overwrite replaces must be a checkpoint, not somebody's other work.
fn check_replaceable(destination: &Path, shape: Shape, overwrite: bool) -> Result<()> {
    let holds_something = || std::fs::read_dir(destination).is_ok_and(|mut entries| entries.next().is_some());
    let occupied = destination.is_file() || shape == Shape::Folder && holds_something();
    if overwrite && occupied && !is_checkpoint(destination) {
        return Err(Error::usage(
            format!("{} holds no checkpoint, so --overwrite does not replace it", destination.display()),
            "choose another destination, or remove it yourself",
        ));
    }
    Ok(())
}

/// A destination inside the source would change what is being read.
fn refuse_nesting(name: &str, source: &Path, destination: &Path) -> Result<()> {
    let (source, target) = (resolve_missing(source)?, resolve_missing(destination)?);
    let relation = if target == source {
        format!("is {name} itself")
    } else if target.starts_with(&source) {
        format!("lies inside {name}")
    } else if source.starts_with(&target) {
        format!("contains {name}")
    } else {
        return Ok(());
    };
    Err(Error::usage(
        format!("the destination {} {relation}", destination.display()),
        format!("choose a destination beside {name}, which is never changed"),
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

/// What headers, pickles and tables take beyond what every run is allowed for them.
fn held_bytes(conversion: &Conversion<'_>) -> u64 {
    const ALLOWED: u64 = 16 << 20;
    conversion.reservation.held_bytes(&conversion.source.checkpoint.catalog).saturating_sub(ALLOWED)
}

/// What the way of reading takes besides strips and scratch.
fn bounce_bytes(conversion: &Conversion<'_>, options: &Options) -> u64 {
    super::bounce_bytes(Some(conversion.source.checkpoint.files.io()), options.threads)
}

/// Strips as long as what is held leaves room for.
///
/// # Errors
/// `Usage` with the floor, where the memory that is allowed is less.
fn within_memory(conversion: &Conversion<'_>, options: Options, max_memory: u64) -> Result<Options> {
    let held = held_bytes(conversion) + bounce_bytes(conversion, &options);
    let left = max_memory.saturating_sub(held);
    match super::strip_bytes(left, options.threads) {
        Ok(strip_bytes) => Ok(Options { strip_bytes: strip_bytes.min(options.strip_bytes), ..options }),
        Err(_) => {
            let needed = held + super::least_bytes(options.threads);
            Err(Error::usage(
                format!(
                    "--max-memory {}: the headers of {} and their tables take more, {} in all",
                    human_bytes(max_memory),
                    count(conversion.reservation.files.len(), "file"),
                    human_bytes(needed)
                ),
                format!("allow at least --max-memory {needed}"),
            ))
        }
    }
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

/// Compare what was written with the source, before anybody can see it.
fn read_back(conversion: &Conversion<'_>, folder: &Path, run: &Run<'_>) -> Result<()> {
    let checkpoint = &conversion.source.checkpoint;
    let mut files = crate::storage::Files::new(checkpoint.files.io());
    for file in &conversion.reservation.files {
        files.add(folder.join(&file.path))?;
    }
    let catalog = crate::catalog::Catalog::empty();
    let written = crate::exec::Input { files: &files, catalog: &catalog, resolve: &crate::format::resolve };
    let progress = Progress::start(run.printer, "verifying", conversion.reservation.payload_bytes());
    for tensor in &conversion.reservation.tensors {
        let left = (input(checkpoint), checkpoint.catalog.tensor(tensor.source));
        let right = (written, &tensor.entry);
        let found = if tensor.shares.is_empty() {
            compare::first_difference(left, right, tensor.dtype(), &run.options, &progress, &run.stop)?
                .map(|difference| difference.detail(tensor.entry.numel()))
        } else {
            compare::share_difference(left, written, tensor, &run.options, &progress, &run.stop)?
                .map(|chunk| format!("{} is not as it should be", tensor.entry.chunk_name(chunk)))
        };
        // Rank files have copies of their own of what is replicated.
        let found = match found {
            None if tensor.shares.is_empty() => {
                compare::replica_difference(written, &tensor.entry, &run.options, &Silent, &run.stop)?
                    .map(|difference| format!("{} is not as the others", tensor.entry.chunk_name(difference.second)))
            }
            found => found,
        };
        if let Some(detail) = found {
            return Err(Error::Conflict {
                fqn: tensor.entry.fqn.to_string(),
                what: "a tensor",
                between: "the source and what was written".into(),
                detail,
                hint: Some("memory or disk is at fault; nothing was published".into()),
            });
        }
    }
    Ok(())
}

/// What a run tells of itself.
struct Report<'a> {
    conversion: &'a Conversion<'a>,
    destination: Option<&'a Path>,
    options: &'a Options,
    /// Memory when all is read and laid out, and no tensor data has moved.
    before: Option<Anonymous>,
}

/// Lines for the user before the work begins.
fn notes(conversion: &Conversion<'_>) -> Vec<String> {
    let source = conversion.source;
    let mut notes = source.wanted.notes.clone();
    notes.extend_from_slice(&conversion.reservation.notes);
    notes.extend_from_slice(&conversion.notes);
    notes.extend(partial::notes(&source.checkpoint.catalog, &conversion.reservation));
    notes
}

/// What is not written: groups for the closing line, then every name for the document.
fn left_out(conversion: &Conversion<'_>) -> (Vec<String>, Vec<String>) {
    let source = conversion.source;
    let left = &source.wanted.left_out;
    let objects = [&left.objects, &conversion.reservation.left_out].into_iter().flatten();
    let objects: Vec<String> =
        objects.chain(&source.settled.dropped).chain(&source.checkpoint.catalog.dropped).cloned().collect();
    let number = (!objects.is_empty()).then(|| count(objects.len(), "object"));
    let series = source.checkpoint.skipped_series.iter().map(|name| format!("series {name}"));
    let tensors = left.groups.iter().map(|(top, number)| format!("{} ({top})", count(*number, "tensor")));
    let differing = &source.settled.dropped_tensors;
    let differing_number = (!differing.is_empty()).then(|| format!("{} (differing)", count(differing.len(), "tensor")));
    let groups = tensors.chain(differing_number).chain(number).chain(series).collect();
    (groups, [&left.tensors, differing, &objects].into_iter().flatten().cloned().collect())
}

/// `290 f32->bf16`
fn cast_text(stats: &Stats) -> Vec<String> {
    stats.casts.iter().map(|((from, to), cast)| format!("{} {from}->{to}", cast.tensors)).collect()
}

fn cast_warnings(stats: &Stats) -> Vec<String> {
    let mut warnings = Vec::new();
    for ((from, to), cast) in &stats.casts {
        if cast.overflows > 0 {
            warnings.push(format!("{} overflowed from {from} to {to}", count_values(cast.overflows)));
        }
        if cast.nans > 0 {
            warnings.push(format!("{} that were cast from {from} to {to} are NaN", count_values(cast.nans)));
        }
    }
    warnings
}

fn count_values(number: u64) -> String {
    format!("{number} {}", if number == 1 { "value" } else { "values" })
}

impl Report<'_> {
    /// `wrote 7 files, 291 tensors, 14.96 GB in 9.8 s (1.5 GB/s); left out: 54 tensors (optim), 12 objects; cast 290
    /// f32->bf16`
    fn closing_line(&self, stats: &Stats, seconds: f64) -> String {
        let reservation = &self.conversion.reservation;
        let (carried, bytes) = (&self.conversion.carried, self.bytes_written());
        #[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
        let rate = bytes as f64 / seconds.max(1e-3) / 1e9;
        let mut line = format!(
            "wrote {}, {}, {} in {seconds:.1} s ({rate:.1} GB/s)",
            count(reservation.files.len() + carried.len(), "file"),
            count(reservation.tensors.len(), "tensor"),
            human_bytes(bytes),
        );
        let (left_out, _) = left_out(self.conversion);
        let parts = [("left out: ", left_out), ("cast ", cast_text(stats))];
        for (what, list) in parts.into_iter().filter(|(_, list)| !list.is_empty()) {
            line.push_str(&format!("; {what}{}", list.join(", ")));
        }
        line
    }

    /// With the files that are carried along.
    fn bytes_written(&self) -> u64 {
        let Conversion { reservation, carried, .. } = self.conversion;
        reservation.len_bytes() + carried.iter().map(|file| file.len).sum::<u64>()
    }

    /// All anonymous memory at its peak, which is while metadata is read, or while data moves.
    fn peak_bytes(&self, stats: &Stats) -> u64 {
        /// Stack of a worker, and what its allocations leave unused.
        const WORKER_BYTES: u64 = 1 << 20;
        let buffers = self.options.buffer_bytes() + bounce_bytes(self.conversion, self.options);
        let Some(before) = self.before else {
            return super::BASE_BYTES + buffers + held_bytes(self.conversion) + stats.planned_bytes;
        };
        let workers = buffers + self.options.threads as u64 * WORKER_BYTES;
        let waiting = self.conversion.reservation.waiting_bytes(self.options.strip_bytes);
        let peak = before.peak.max(before.now + workers + stats.planned_bytes + waiting);
        // Another run is not the same to the last page.
        (peak + peak / 32 + (1 << 20)).next_multiple_of(1 << 20)
    }

    fn document(&self, stats: &Stats) -> Json {
        let Conversion { source, reservation, carried, to, tied, .. } = self.conversion;
        let (checkpoint, (given, format)) = (&source.checkpoint, source.given());
        let carried = carried.iter().map(|file| json!({ "path": file.to.display().to_string(), "bytes": file.len }));
        let files: Vec<Json> = reservation.files.iter().map(file_document).chain(carried).collect();
        let (groups, names) = left_out(self.conversion);
        let left_out = [groups, names].concat();
        let cast: Map<String, Json> = (stats.casts.iter())
            .map(|((from, to), cast)| {
                let counts = json!({ "tensors": cast.tensors, "overflows": cast.overflows, "nans": cast.nans });
                (format!("{from}->{to}"), counts)
            })
            .collect();
        let tied: BTreeMap<&str, &str> = tied.iter().map(|(alias, kept)| (alias.as_str(), kept.as_str())).collect();
        let mut warnings = checkpoint.catalog.warnings.clone();
        warnings.extend(notes(self.conversion));
        warnings.extend(cast_warnings(stats));
        json!({
            "source": { "path": given.display().to_string(), "format": format.name() },
            "target": {
                "path": self.destination.map(|path| path.display().to_string()),
                "format": to.name(),
            },
            "files": files,
            "tensors": reservation.tensors.len(),
            "bytes_read": stats.bytes_read,
            "bytes_written": self.bytes_written(),
            "runs": stats.runs,
            "mean_run_bytes": mean_run_bytes(stats),
            "peak_bytes": self.peak_bytes(stats),
            "left_out": left_out,
            "cast": cast,
            "tied": tied,
            "warnings": warnings,
        })
    }

    fn dry_run_text(&self, stats: &Stats) -> String {
        let Conversion { source, reservation, carried, to, .. } = self.conversion;
        let (given, format) = source.given();
        let mut lines = vec![
            format!("source        {} ({format})", given.display()),
            format!(
                "target        {} ({to})",
                self.destination.map_or_else(|| String::from("-"), |path| path.display().to_string()),
            ),
            format!("files         {}", reservation.files.len() + carried.len()),
            format!("tensors       {}", reservation.tensors.len()),
            format!("bytes read    {}", human_bytes(stats.bytes_read)),
            format!("bytes written {}", human_bytes(self.bytes_written())),
            format!("runs          {} (mean {})", stats.runs, human_bytes(mean_run_bytes(stats))),
            format!("peak memory   {} (anonymous)", human_bytes(self.peak_bytes(stats))),
        ];
        let (left_out, _) = left_out(self.conversion);
        let lists = [("left out", left_out), ("cast", cast_text(stats))];
        for (what, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
            lines.push(format!("{what:13} {}", list.join(", ")));
        }
        lines.join("\n") + "\n"
    }
}

fn mean_run_bytes(stats: &Stats) -> u64 {
    stats.bytes_read.checked_div(stats.runs).unwrap_or(0)
}

fn file_document(file: &OutputFile) -> Json {
    json!({ "path": file.path.display().to_string(), "bytes": file.len })
}
