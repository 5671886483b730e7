//! Benchmarks conversion plans for large clusters: every tensor of Llama 3.1 405B with AdamW from one mesh to another.
//!
//! The benchmark runs on one thread, tensor by tensor, and keeps no results. It measures the chunk tables of source and
//! target, the proof of coverage, the intersection, and the conversion of the plan to strided byte copies. An *item* is
//! a strided copy. The output has CPU seconds.
//!
//! `cargo bench --bench plan [-- --layers N] [FILTER]`; the model has 126 layers. FILTER selects the output rows that
//! contain this text in the columns `from` and `to`.

#![expect(clippy::print_stdout, reason = "a bench prints its figures")]

mod support;

use std::convert::Infallible;
use std::time::Duration;

use dtshard::catalog::contiguous_strides;
use dtshard::plan::{Pieces, SourceTensor};
use support::cost::{nanos_each, peak_mb, timed};
use support::model::{Job, tensors};

#[derive(Default)]
struct Costs {
    tables: Duration,
    proof: Duration,
    intersection: Duration,
    lowering: Duration,
    chunks: u64,
    tiles: u64,
    items: u64,
}

impl Costs {
    fn total(&self) -> Duration {
        self.tables + self.proof + self.intersection + self.lowering
    }
}

fn plan(from: &Job, to: &Job, layers: u64) -> Costs {
    let mut costs = Costs::default();
    for tensor in tensors(layers) {
        let (source, target) = timed(&mut costs.tables, || (from.entry(&tensor), to.entry(&tensor)));
        let proven = timed(&mut costs.proof, || SourceTensor::new(&source).expect("a grid"));
        costs.chunks += source.chunks.len() as u64;
        costs.tiles += target.chunks.len() as u64;
        let plans: Vec<_> = timed(&mut costs.intersection, || {
            (0..target.chunks.len()).map(|chunk| proven.plan(&target.chunks.tile(chunk), 0, None)).collect()
        });
        costs.items += timed(&mut costs.lowering, || {
            let mut items = 0;
            for plan in &plans {
                let sizes = |chunk: u32| source.chunks.sizes(chunk as usize);
                let strides: Vec<_> =
                    plan.overlaps.iter().map(|overlap| contiguous_strides(&sizes(overlap.chunk))).collect();
                let numel = plan.sizes.iter().product();
                let Ok(()): Result<(), Infallible> =
                    Pieces::new(plan, |overlap| &strides[overlap], source.dtype.itemsize()).visit(0..numel, |_| {
                        items += 1;
                        Ok(())
                    });
            }
            items
        });
    }
    costs
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let (mut layers, mut filter) = (126, String::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--layers" => layers = arguments.next().and_then(|number| number.parse().ok()).expect("--layers NUMBER"),
            _ => filter = argument,
        }
    }
    println!(
        "| from | to | chunks | tiles | items | tables | proof | intersection | lowering | total s | ns an item | peak MB |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    let to_quarter = [2048, 4096, 8192, 16_384].map(|ranks| (Job::fsdp(ranks), Job::fsdp(ranks / 4)));
    let with_tp = [2048, 4096, 8192, 16_384].map(|ranks| (Job::fsdp_tp(ranks, 8), Job::fsdp_tp(ranks / 4, 8)));
    let across = [(Job::fsdp_tp(16_384, 8), Job::fsdp(4096)), (Job::fsdp(16_384), Job::fsdp_tp(4096, 8))];
    for (from, to) in to_quarter.into_iter().chain(with_tp).chain(across) {
        let name = format!("| {} | {} |", from.name, to.name);
        if !name.contains(&filter) {
            continue;
        }
        let costs = plan(&from, &to, layers);
        let seconds = |spent: Duration| format!("{:.2}", spent.as_secs_f64());
        println!(
            "{name} {} | {} | {} | {} | {} | {} | {} | {} | {:.0} | {} |",
            costs.chunks,
            costs.tiles,
            costs.items,
            seconds(costs.tables),
            seconds(costs.proof),
            seconds(costs.intersection),
            seconds(costs.lowering),
            seconds(costs.total()),
            nanos_each(costs.total(), costs.items),
            peak_mb(),
        );
    }
}
