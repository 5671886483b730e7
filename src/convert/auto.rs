//! `--backend auto` where all processes see SRC: whether they exchange what they read, by NCCL, or each reads what it
//! writes.
//!
//! To exchange, all have to run at once, and find each other, so that is not tried unless it can pay: this process has a
//! GPU, and what it knows of the plan, which all know alike, says so. Who has no GPU does not come; the others wait for it
//! a while, and then do without all. Counts bytes. Invariant: the output is the same, whatever is chosen.

use std::time::Duration;

use super::bucket::Bucket;
use super::estimate::{has_room, room_for_rounds};
use super::peers::Peers;
use super::prepared::{Prepared, check_destination};
use super::produce::claim;
use super::reading::input;
use super::run::Run;
use crate::convert::options::{Backend, ConvertOptions, SourceVisibility};
use crate::error::{Error, Result};
use crate::exec::weigh::Weighed;
use crate::fault;
use crate::gpu::Device;
use crate::publish::Staging;
use crate::quantity::{count, human_bytes};

/// Runs of this length are read from a disk about as fast as the whole file, shorter ones more slowly the shorter they
/// are: measured on a local disk (docs/gpu.md).
const LONG_RUN_BYTES: u64 = 64 << 10;

/// Less than this a process has read before a context of CUDA and NCCL's connections are there.
const LEAST_BYTES: u64 = 1 << 30;

/// How long processes that have a GPU wait for others, which may have none.
const MEET_WITHIN: Duration = Duration::from_secs(30);
const HURRIED: Duration = Duration::from_secs(3);

/// What is to be done, and why.
#[derive(Debug)]
enum Verdict {
    Exchange(String),
    Alone(String),
}

/// Meet the others where that is left to this program, and pays.
///
/// # Errors
/// `Stopped`, and as planning; `Usage` where DST is not to be written to, or others have other options.
pub fn join(conversion: &Prepared, args: &ConvertOptions, run: &Run<'_>) -> Result<Option<Peers>> {
    let exchange = &args.exchange;
    let is_asked = exchange.backend == Backend::Auto && exchange.source == SourceVisibility::Shared;
    let launch = &run.launch;
    let Some(destination) = args.dst.as_deref().filter(|_| is_asked && launch.waits && !launch.part.is_alone()) else {
        return Ok(None);
    };
    if !args.dry_run {
        // What is read is never written to, not even to meet there; and what is refused takes no device first.
        check_destination(conversion, args, destination)?;
        Staging::refuse_taken(destination, conversion.shape, &claim(conversion, args, &run.options, run))?;
    }
    let max_memory = args.source.max_memory;
    let rounds = Bucket::of(exchange).within(room_for_rounds(conversion, &run.options, max_memory));
    match weigh(conversion, rounds, max_memory, launch.part.of)? {
        Verdict::Alone(why) => {
            run.progress.detail(&format!("backend cpu, each process reads what it writes: {why}"));
            return Ok(None);
        }
        Verdict::Exchange(why) => run.progress.detail(&format!("backend nccl, if each process has a GPU: {why}")),
    }
    if args.dry_run {
        return Ok(None);
    }
    match Peers::join(args, destination, rounds, run, fault::patience(MEET_WITHIN, HURRIED)) {
        Err(error @ Error::Comm { .. }) => {
            let way_out = "each process reads what it writes, as --backend cpu asks for at once";
            run.progress.note(&format!("no exchange: {error}; {way_out}"));
            Ok(None)
        }
        joined => joined,
    }
}

/// What one of so many processes knows without the others.
fn weigh(conversion: &Prepared, rounds: Bucket, max_memory: u64, processes: u32) -> Result<Verdict> {
    if let Err(lack) = Device::visible() {
        return Ok(Verdict::Alone(lack.to_string()));
    }
    let each = conversion.len_bytes() / u64::from(processes);
    let least = if fault::is_hurried() { 0 } else { LEAST_BYTES };
    if each < least {
        let (each, least) = (human_bytes(each), human_bytes(least));
        return Ok(Verdict::Alone(format!("it has {each} to write, which is less than {least}")));
    }
    if !has_room(conversion, rounds, max_memory) {
        let lack = match rounds {
            Bucket::Asked(_) => "six times --bucket-size",
            Bucket::AtMost(_) => "rounds, however short",
        };
        return Ok(Verdict::Alone(format!("--max-memory has no room for {lack}")));
    }
    let weighed = Weighed::new(input(&conversion.source.checkpoint), &conversion.reservation)?;
    let (mean, long) = (human_bytes(weighed.mean_run_bytes()), human_bytes(LONG_RUN_BYTES));
    let seen = format!("looked at {} of {}", weighed.planned, count(weighed.of, "tensor"));
    Ok(if weighed.is_reduced() {
        let (reduced, all) = (human_bytes(weighed.reduced_bytes), human_bytes(weighed.bytes));
        Verdict::Exchange(format!("{reduced} of {all} are reduced ({seen})"))
    } else if weighed.mean_run_bytes() < LONG_RUN_BYTES {
        Verdict::Exchange(format!("SRC is read in runs of {mean} in the mean, shorter than {long} ({seen})"))
    } else {
        Verdict::Alone(format!("SRC is read in runs of {mean} in the mean, not shorter than {long} ({seen})"))
    })
}
