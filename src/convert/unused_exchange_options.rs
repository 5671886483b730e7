//! Warnings about exchange options that have no effect in a run, with the reason.
//!
//! An option without effect is a warning and not an error, because the same command line must work with one process or
//! many, with GPUs or without. An option with a suspicious value, such as a `--bucket-size` without its unit, is also
//! only a warning.

use super::bucket::LEAST_BYTES;
use super::prepared::Prepared;
use super::run::Run;
use super::source_options::input;
use crate::convert::options::{Backend, ConvertOptions, ExchangeOptions};
use crate::exchange::ReductionMethod;
use crate::exec::copy::Stats;

const FAST_REDUCE: &str = "options::fast_reduce";
const ALONE: &str = "this is the only process";

/// Returns warnings about options without effect, as far as these are known before the work begins. Processes that
/// exchange data must already be connected.
pub fn unused_options(conversion: &Prepared, args: &ConvertOptions, run: &Run<'_>) -> Vec<String> {
    let is_alone = run.launch.part.is_alone();
    let why_none = why_no_exchange(conversion, args, run);
    let why = |option: &str| match option {
        FAST_REDUCE if is_alone => Some(String::from(ALONE)),
        FAST_REDUCE if !has_partial_values(conversion) => {
            Some(String::from("SRC has no Partial tensors, so nothing is reduced"))
        }
        FAST_REDUCE if is_by_hosts(conversion) => {
            Some(format!("NCCL is not used, so all values are reduced {}", ReductionMethod::InRankOrder))
        }
        _ => why_none.clone(),
    };
    let ExchangeOptions { bucket_size, fast_reduce, .. } = &args.exchange;
    let options = [("options::bucket_size", bucket_size.is_some()), (FAST_REDUCE, *fast_reduce)];
    let given = options.into_iter().filter_map(|(option, is_given)| is_given.then_some(option));
    let unused = given.filter_map(|option| Some(format!("{option} has no effect, because {}", why(option)?)));
    let short = bucket_size.filter(|_| conversion.source.is_exchanged()).and_then(short_rounds);
    unused.chain(short).collect()
}

/// Returns a warning if `bytes`, the bucket size, is so small that processes mostly wait for each other.
fn short_rounds(bytes: u64) -> Option<String> {
    let unit = if bytes < 1000 { format!("; did you mean {bytes}MB?") } else { String::new() };
    (bytes < LEAST_BYTES).then(|| {
        format!("options::bucket_size is {bytes} bytes: rounds of less than 1 MB are slow and have no benefit{unit}")
    })
}

/// Returns a warning if NCCL reduced nothing although `--fast-reduce` was given. Whether NCCL has reduced a value is
/// known only after the run.
pub fn unused_after_run(conversion: &Prepared, args: &ConvertOptions, stats: &Stats) -> Option<String> {
    let is_by_nccl = conversion.source.reducing() == ReductionMethod::Nccl;
    // In a resumed run, the earlier run may have reduced all tensors that NCCL can reduce.
    let is_all =
        stats.bytes_already_written == 0 && args.exchange.fast_reduce && is_by_nccl && has_partial_values(conversion);
    (is_all && stats.global_totals.nccl_reduced == 0).then(|| {
        format!(
            "{FAST_REDUCE} had no effect, and all values were reduced {}: NCCL reduces a tensor only if each process \
             reads a different partial value of it, and if NCCL supports its dtype and reduction op",
            ReductionMethod::InRankOrder
        )
    })
}

/// Returns the reason why processes exchange no data, or `None` if they exchange data.
fn why_no_exchange(conversion: &Prepared, args: &ConvertOptions, run: &Run<'_>) -> Option<String> {
    Some(String::from(match args.exchange.backend {
        _ if conversion.source.is_exchanged() => return None,
        _ if run.launch.part.is_alone() => ALONE,
        _ if !run.launch.waits => "processes that do not wait for each other cannot exchange bytes",
        Backend::Cpu => "with options::backend cpu, each process reads from SRC all data that it writes",
        _ => "each process reads from SRC all data that it writes; run with -v to see the reason",
    }))
}

/// Returns true if processes are connected, and the CPU reduces partial values, not NCCL.
fn is_by_hosts(conversion: &Prepared) -> bool {
    conversion.source.peers.is_some() && conversion.source.reducing() == ReductionMethod::InRankOrder
}

/// Returns true if the conversion reads partial values (PyTorch's `Partial` placement).
fn has_partial_values(conversion: &Prepared) -> bool {
    let catalog = input(&conversion.source.checkpoint).catalog;
    conversion.reservation.tensors.iter().any(|tensor| catalog.tensor(tensor.source).partial_values.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_size_without_unit_is_a_warning() {
        let warning = short_rounds(10).unwrap();
        assert!(
            warning.contains("is 10 bytes: rounds of less than 1 MB are slow")
                && warning.ends_with("did you mean 10MB?"),
            "{warning}"
        );
        assert!(!short_rounds(300_000).unwrap().contains("300000MB"));
        assert_eq!(short_rounds(1_000_000), None);
    }
}
