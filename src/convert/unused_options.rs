//! Wishes without an effect: options of an exchange that a run has no use for, and why that is so.
//!
//! They are no errors, as one command line serves runs of one process and of many, with GPUs and without. Who wrote them
//! may think all the same that they do something. Nor are those errors that do another thing than is meant, as far as one
//! can tell: a `--bucket-size` that lacks its unit.

use super::bucket::LEAST_BYTES;
use super::prepared::Prepared;
use super::reading::input;
use super::run::Run;
use crate::convert::options::{Backend, ConvertOptions, ExchangeOptions};
use crate::exchange::ReductionMethod;
use crate::exec::copy::Stats;

const FAST_REDUCE: &str = "options::fast_reduce";
const ALONE: &str = "this is the only process";

/// What is known before the work begins. Processes that are to meet have met.
pub fn unused_options(conversion: &Prepared, args: &ConvertOptions, run: &Run<'_>) -> Vec<String> {
    let is_alone = run.launch.part.is_alone();
    let why_none = why_no_exchange(conversion, args, run);
    let why = |option: &str| match option {
        FAST_REDUCE if is_alone => Some(String::from(ALONE)),
        FAST_REDUCE if !has_summands(conversion) => {
            Some(String::from("SRC has no Partial tensors, so nothing is reduced"))
        }
        FAST_REDUCE if is_by_hosts(conversion) => {
            Some(format!("bytes do not go by NCCL, so all is reduced {}", ReductionMethod::InRankOrder))
        }
        _ => why_none.clone(),
    };
    let ExchangeOptions { bucket_size, fast_reduce, .. } = &args.exchange;
    let told = [("options::bucket_size", bucket_size.is_some()), (FAST_REDUCE, *fast_reduce)];
    let told = told.into_iter().filter_map(|(option, is_told)| is_told.then_some(option));
    let idle = told.filter_map(|option| Some(format!("{option} has no effect: {}", why(option)?)));
    let short = bucket_size.filter(|_| conversion.source.is_exchanged()).and_then(short_rounds);
    idle.chain(short).collect()
}

/// Of rounds that are mostly spent on waiting for each other.
fn short_rounds(bytes: u64) -> Option<String> {
    let unit = if bytes < 1000 { format!("; with a unit it may be {bytes}MB") } else { String::new() };
    (bytes < LEAST_BYTES).then(|| {
        format!("options::bucket_size is {bytes} bytes, which makes rounds very short, and slow: less than 1 MB gains nothing{unit}")
    })
}

/// What shows when all is done.
pub fn unused_after_run(conversion: &Prepared, args: &ConvertOptions, stats: &Stats) -> Option<String> {
    let is_by_nccl = conversion.source.reducing() == ReductionMethod::Nccl;
    // Of a run that goes on, another one may have had all that there was.
    let is_all =
        stats.bytes_already_written == 0 && args.exchange.fast_reduce && is_by_nccl && has_summands(conversion);
    (is_all && stats.global_totals.nccl_reduced == 0).then(|| {
        format!(
            "{FAST_REDUCE} had no effect: there is no tensor of which each process has read another summand, in a dtype and \
             an op of NCCL, so all was reduced {}",
            ReductionMethod::InRankOrder
        )
    })
}

/// Why no bytes go between processes; `None` where they do.
fn why_no_exchange(conversion: &Prepared, args: &ConvertOptions, run: &Run<'_>) -> Option<String> {
    Some(String::from(match args.exchange.backend {
        _ if conversion.source.is_exchanged() => return None,
        _ if run.launch.part.is_alone() => ALONE,
        _ if !run.launch.waits => "processes that do not wait for each other exchange nothing",
        Backend::Cpu => "with options::backend cpu each process reads what it writes",
        _ => "each process reads what it writes; -v says why",
    }))
}

/// Whether processes have met that reduce on their hosts.
fn is_by_hosts(conversion: &Prepared) -> bool {
    conversion.source.peers.is_some() && conversion.source.reducing() == ReductionMethod::InRankOrder
}

fn has_summands(conversion: &Prepared) -> bool {
    let catalog = input(&conversion.source.checkpoint).catalog;
    conversion.reservation.tensors.iter().any(|tensor| catalog.tensor(tensor.source).partial_values.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_without_its_unit() {
        let said = short_rounds(10).unwrap();
        assert!(
            said.contains("is 10 bytes, which makes rounds very short") && said.ends_with("it may be 10MB"),
            "{said}"
        );
        assert!(!short_rounds(300_000).unwrap().contains("300000MB"));
        assert_eq!(short_rounds(1_000_000), None);
    }
}
