//! Benchmarks the planning of exchange rounds between very many processes: the cost for each process, and the balance
//! between processes.
//!
//! The benchmark converts layers of Llama 3.1 405B with AdamW from one mesh to another, with a process for each rank of
//! the source mesh. It also converts 100,000 tensors of 1 KiB (`small`) between a few ranks. It runs on one thread and
//! moves no data. It prints CPU seconds, and the bytes of the busiest process divided by the average bytes of a
//! process.
//!
//! `cargo bench --bench exchange [-- --layers N] [FILTER]`; FILTER selects the output rows that contain this text in
//! the columns `from` and `to`.

#![expect(clippy::print_stdout, reason = "a bench prints its figures")]

mod support;

use std::time::Duration;

use dtshard::exchange::{FileOwners, FileVisibility, Load, Moves, ReductionMethod, ReplicaChoice, Rounds, Topology};
use dtshard::exec::division::even_share;
use dtshard::launch::Part;
use support::cost::{peak_mb, timed};
use support::model::{Job, Tensor, small_tensors, tensors};
use support::tables::tables;

const BUCKET_BYTES: u64 = 64 << 20;

/// Returns the largest `value` of a process, divided by the average over all processes.
fn busiest(loads: &[Load], value: impl Fn(&Load) -> u64) -> f64 {
    let (most, sum) = loads.iter().map(value).fold((0, 0), |(most, sum), bytes| (bytes.max(most), sum + bytes));
    #[expect(clippy::cast_precision_loss, reason = "two digits are printed")]
    let ratio = most as f64 * loads.len() as f64 / sum.max(1) as f64;
    ratio
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let (mut layers, mut filter) = (2, String::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--layers" => layers = arguments.next().and_then(|number| number.parse().ok()).expect("--layers NUMBER"),
            _ => filter = argument,
        }
    }
    // Rounds are planned by all threads of the pool. The benchmark measures one thread, so the pool gets one.
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().expect("the global pool is built once");
    println!("| from | to | rounds | copies | GB | on the wire | s | in rounds: read | sent | received | peak MB |");
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    let large = [8, 64, 256].into_iter().flat_map(|ranks| {
        let (fsdp, tp) = (|| Job::fsdp(ranks), || Job::fsdp_tp(ranks, 8));
        [(fsdp(), Job::fsdp(ranks * 3 / 4)), (fsdp(), tp()), (tp(), fsdp())]
    });
    let small = [2, 8].map(|ranks| ("small, ", Job::fsdp(ranks), Job::fsdp(ranks + 1)));
    for (what, from, to) in small.into_iter().chain(large.map(|(from, to)| ("", from, to))) {
        let name = format!("| {what}{} | {} |", from.name, to.name);
        if !name.contains(&filter) {
            continue;
        }
        let tensors: Box<dyn Iterator<Item = Tensor>> =
            if what.is_empty() { Box::new(tensors(layers)) } else { Box::new(small_tensors(100_000)) };
        let (catalog, reservation) = tables(&from, &to, tensors);
        let of = u32::try_from(catalog.tensors[0].chunks.len()).expect("few ranks");
        let todos: Vec<_> = (0..of).map(|index| even_share(&reservation.files, Part { index, of })).collect();
        let owners = FileOwners::new(&reservation.files, &todos);
        let nodes = (0..of).map(|rank| rank / 8).collect();
        let topology = Topology {
            visibility: FileVisibility::Shared,
            nodes,
            replica_choice: ReplicaChoice::Any,
            reducing: ReductionMethod::InRankOrder,
        };
        let mut spent = Duration::ZERO;
        let (mut count, mut copies) = (0, 0);
        let mut sums = vec![Load::default(); of as usize];
        let (mut read, mut sent, mut received) = (0.0, 0.0, 0.0);
        timed(&mut spent, || {
            for round in Rounds::new(&catalog, &reservation.tensors, &owners, &topology, BUCKET_BYTES) {
                let round = round.expect("a plan");
                let moves = Moves::new(&round, 0);
                copies += moves.first_phase.packs.iter().map(Vec::len).sum::<usize>();
                copies += moves.copy_destinations().iter().map(|landing| landing.copies.len()).sum::<usize>();
                read += busiest(&round.loads, |load| load.read);
                sent += busiest(&round.loads, Load::sent);
                received += busiest(&round.loads, Load::received);
                sums.iter_mut().zip(&round.loads).for_each(|(sum, load)| *sum = sum.plus(*load));
                count += 1;
            }
        });
        let total: u64 = sums.iter().map(|load| load.read).sum();
        let wire: u64 = sums.iter().map(Load::received).sum();
        let average = |sum: f64| sum / f64::from(count).max(1.0);
        #[expect(clippy::cast_precision_loss, reason = "two digits are printed")]
        let (gigabytes, percent) = (total as f64 / 1e9, 100.0 * wire as f64 / total.max(1) as f64);
        println!(
            "{name} {count} | {copies} | {gigabytes:.1} | {percent:.0} % | {:.2} | {:.2} | {:.2} | {:.2} | {} |",
            spent.as_secs_f64(),
            average(read),
            average(sent),
            average(received),
            peak_mb(),
        );
    }
}
