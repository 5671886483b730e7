//! What the verbs that write share once each has chosen what to take and how to lay it out: check, have it
//! [produced](super::produce), say what was done.

use std::mem;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::conversion::{Conversion, check_destination};
use super::estimate::{room_for_rounds, within_memory};
use super::foresee::foresee;
use super::idle::{idle_in_the_end, idle_wishes};
use super::produce::{Produced, Publisher, about, claim, plan, produce};
use super::report::{Report, cast_warnings, left_out, notes};
use super::run::Run;
use super::{Status, input, refuse_without_tensors};
use crate::cli::{ConvertArgs, DestinationArgs, OnConflict};
use dtshard::catalog::{Catalog, Reservation};
use dtshard::error::{Error, Result};
use dtshard::exec::copy::Stats;
use dtshard::exec::exchange::Reducing;
use dtshard::exec::staging::{Foreseen, Staging};
use dtshard::exec::{Input, Options, copy};
use dtshard::format::{Format, resolve_unseen};
use dtshard::quantity::{count, human_bytes};
use dtshard::storage::IoMode;
use dtshard::storage::lookup;
use dtshard::storage::memory::anonymous;

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
    let suffix = destination.and_then(Path::extension).and_then(|suffix| suffix.to_str());
    let (Some(destination), Some(suffix)) = (destination, suffix) else { return Ok(default) };
    if lookup::is_folder(destination)? {
        return Ok(default);
    }
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
pub fn convert(mut conversion: Conversion<'_>, args: &ConvertArgs, run: &Run<'_>) -> Result<Status> {
    conversion.source.forget_wishes();
    let checked = check_len(&conversion.reservation).and_then(|()| check_tensors(&conversion, args));
    let settled = checked.and_then(|()| settle_rounds(&mut conversion, args, run));
    let copied = settled.and_then(|()| copy_source(&mut conversion, args, run));
    let status = copied.and_then(|()| perform(&conversion, args, run)).map_err(|error| conversion.source.locate(error));
    if let Some(peers) = conversion.source.peers.take() {
        match &status {
            Ok(_) => peers.leave(!args.destination.dry_run),
            Err(error) => peers.fail(error),
        }
    }
    // The process ends with its verb, and to free a million small things one by one takes longer than that.
    mem::forget(mem::replace(&mut conversion.source.checkpoint.catalog, Catalog::empty()));
    mem::forget(conversion.reservation);
    status
}

/// Let rounds be as long as there is memory for beside what is laid out. Collective, where there are peers.
fn settle_rounds(conversion: &mut Conversion<'_>, args: &ConvertArgs, run: &Run<'_>) -> Result<()> {
    if !conversion.source.is_exchanged() {
        return Ok(());
    }
    let room = room_for_rounds(conversion, &run.options, args.source.max_memory.0);
    conversion.source.peers.as_mut().map_or(Ok(()), |peers| peers.settle_bucket(room, run.printer))
}

/// Copies files of SRC that only some processes see, where DST may be written. Collective, where there are peers.
fn copy_source(conversion: &mut Conversion<'_>, args: &ConvertArgs, run: &Run<'_>) -> Result<()> {
    let Some(destination) = args.dst.as_deref().filter(|_| !args.destination.dry_run) else { return Ok(()) };
    let Some(mut peers) = conversion.source.peers.take() else { return Ok(()) };
    let mut copy = || {
        let is_wanted = peers.is_copy_wanted(|| preflight(conversion, args, destination, run))?;
        let (source, reservation) = (&mut conversion.source.checkpoint, &conversion.reservation);
        if is_wanted { peers.copy_source(source, reservation, args.destination.resume, run) } else { Ok(()) }
    };
    let copied = copy();
    conversion.source.peers = Some(peers);
    copied
}

/// Whether something is to be written to DST, as far as one look shows.
fn preflight(conversion: &Conversion<'_>, args: &ConvertArgs, destination: &Path, run: &Run<'_>) -> Result<bool> {
    check_destination(conversion, args, destination)?;
    let claim = claim(conversion, args, &run.options, run);
    let reducing = Reducing::InRankOrder;
    let about = about(conversion, reducing, run);
    match Staging::foresee(destination, conversion.shape, &claim, &plan(conversion, reducing, &about)) {
        Ok(foreseen) => Ok(foreseen != Foreseen::Done),
        // A run may go on once it has watched another for a while.
        Err(_) if claim.resume => Ok(true),
        Err(error) => Err(error),
    }
}

fn perform(conversion: &Conversion<'_>, args: &ConvertArgs, run: &Run<'_>) -> Result<Status> {
    let Run { printer, options, started, .. } = run;
    let source = &conversion.source.checkpoint;
    for note in notes(conversion) {
        printer.line(&note);
    }
    for name in left_out(conversion).1 {
        printer.detail(&format!("left out: {name}"));
    }
    let idle = idle_wishes(conversion, args, run);
    idle.iter().for_each(|warning| printer.warning(warning));
    let (dst, max_memory) = (args.dst.as_deref(), args.source.max_memory.0);
    let options = within_memory(conversion, *options, max_memory)?;
    // What only this node has in its memory cannot be sealed by another one.
    let options = &Options { sync: options.sync || !run.launch.part.is_alone(), ..options };
    printer.detail(&how(source.files.io(), options));
    let mut report =
        Report { conversion, destination: dst, options, before: anonymous(), max_memory, loads: Vec::new(), idle };
    if args.destination.dry_run {
        let stats = match &conversion.source.peers {
            Some(peers) if peers.exchange_bytes() => {
                let stats;
                (stats, report.loads) = peers.dry_run(source, &conversion.reservation, run)?;
                stats
            }
            // Nothing is copied for a dry run.
            Some(_) => {
                let input = Input { resolve: &resolve_unseen, ..input(source) };
                copy::dry_run(input, &conversion.reservation, &run.stop)?
            }
            None => copy::dry_run(input(source), &conversion.reservation, &run.stop)?,
        };
        let foreseen = dst.and_then(|destination| foresee(conversion, args, destination, options, run));
        let mut document = report.document(&stats);
        if let Some(warnings) = document["warnings"].as_array_mut() {
            warnings.extend(foreseen.iter().map(|warning| json!(warning)));
        }
        printer.document(&document)?;
        printer.data(&report.dry_run_text(&stats))?;
        report.memory_warning(&stats).iter().chain(&foreseen).for_each(|warning| printer.warning(warning));
        return Ok(Status::Done);
    }
    let destination = dst.expect("clap asks for DST unless --dry-run is given");
    check_destination(conversion, args, destination)?;
    let (stats, publisher) = match produce(conversion, args, destination, options, run)? {
        Produced::Published(stats, publisher) => (stats, Some(publisher)),
        Produced::Part(stats) => (stats, None),
        Produced::Already => {
            let mut document = report.document(&Stats::default());
            document["already"] = json!(true);
            printer.document(&document)?;
            printer.outcome(&format!("{} is there already, from the same source and options", destination.display()));
            return Ok(Status::Done);
        }
    };
    let part = run.launch.part;
    if let Some(warning) = idle_in_the_end(conversion, args, &stats) {
        printer.warning(&warning);
        report.idle.push(warning);
    }
    let mut document = report.document(&stats);
    if !part.is_alone() {
        document["part"] = json!({
            "index": part.index,
            "of": part.of,
            "published": publisher.is_some(),
            "publisher": publisher == Some(Publisher::This),
        });
    }
    printer.document(&document)?;
    // Only who publishes knows what the casts of all parts met.
    if publisher != Some(Publisher::Other) {
        cast_warnings(&stats).iter().for_each(|warning| printer.outcome(&format!("warning: {warning}")));
    }
    let time = started.elapsed();
    match publisher {
        // Where all wait, the first speaks for all, whoever publishes.
        Some(_) if run.launch.waits => printer.line(&report.closing_line(&stats, time)),
        Some(_) => printer.outcome(&report.closing_line(&stats, time)),
        None => printer.outcome(&format!(
            "part {} of {} is done in {:.1} s; the last part publishes {}",
            part.index,
            part.of,
            time.as_secs_f64(),
            destination.display()
        )),
    }
    Ok(Status::Done)
}

/// `reading from mappings, 2 threads, strips of 4.19 MB`
fn how(io: IoMode, options: &Options) -> String {
    let io = match io {
        IoMode::Mmap => "from mappings",
        IoMode::Read => "by read calls",
        IoMode::Direct => "past the page cache",
    };
    format!("reading {io}, {}, strips of {}", count(options.threads, "thread"), human_bytes(options.strip_bytes))
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

/// A result without tensors is a loss, unless it was asked for.
fn check_tensors(conversion: &Conversion<'_>, args: &ConvertArgs) -> Result<()> {
    if !conversion.reservation.tensors.is_empty() || args.checks.on_conflict == Some(OnConflict::Drop) {
        return Ok(());
    }
    refuse_without_tensors(&args.src, &conversion.source.checkpoint, &args.source, &args.select)
}
