//! Tests that every communicator must pass, whatever its memory and its network are. A rank is here one member of the
//! communicator: a process or a thread.
//!
//! A [`Fleet`] creates the ranks. Each case runs one thread for each rank of this process. No case takes longer than
//! [`WAIT_LIMIT`].

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::comm::{Communicator, Traffic};
use crate::error::{CommError, Error, Result, Stopped};

/// A factory for the ranks of one kind of communicator. A rank is one member of the communicator: a process or a
/// thread. The factory also gives tests access to the ranks' memory.
pub(crate) trait Fleet: Send + Sync + 'static {
    type Rank: Communicator + Send + 'static;

    /// Creates a rank. Called in the thread of the rank, on all ranks at the same time.
    fn rank(&self, rank: u32, size: u32) -> Self::Rank;

    fn memory(&self, rank: &Self::Rank, bytes: &[u8]) -> <Self::Rank as Communicator>::Memory;

    fn bytes(&self, rank: &Self::Rank, memory: &<Self::Rank as Communicator>::Memory) -> Vec<u8>;

    /// Returns the ranks that run in this process, in a test case with `size` ranks. Called at the beginning of each
    /// case.
    fn ranks(&self, size: u32) -> Vec<u32> {
        (0..size).collect()
    }

    /// Adds the outcomes of the ranks in other processes to the outcomes of the ranks in this process.
    fn share(&self, outcomes: Vec<Option<String>>) -> Vec<Option<String>> {
        outcomes
    }

    /// Returns true if the communicator detects that the receiver expects another length than the sender sends.
    fn checks_lengths(&self) -> bool {
        true
    }
}

/// The time limit of each test case.
pub(crate) const WAIT_LIMIT: Duration = Duration::from_mins(1);

/// Runs all tests of a communicator.
pub(crate) fn conforms<F: Fleet>(fleet: F) {
    conform_all(&Arc::new(fleet));
}

/// Runs all tests of a communicator, like [`conforms`], but leaves the fleet with the caller.
pub(crate) fn conform_all<F: Fleet>(fleet: &Arc<F>) {
    for size in [1, 2, 5] {
        exchanges_in_order(fleet, size);
        all_gathers(fleet, size);
        all_gathers_parts(fleet, size);
        gathers(fleet, size);
        votes(fleet, size);
        leaves_in_any_order(fleet, size);
        counts(fleet, size);
    }
    exchanges_of_many_bytes(fleet);
    all_gathers_many_bytes(fleet);
    for end in [End::Dropped, End::Failed, End::Stopped, End::Panicked] {
        for operation in [Operation::Exchange, Operation::AllGather, Operation::Gather, Operation::Barrier] {
            for gone in [0, 1, 2] {
                names_the_ended_process(fleet, operation, end, gone);
            }
        }
    }
    if fleet.checks_lengths() {
        refuses_other_lengths(fleet);
        refuses_to_all_gather_other_lengths(fleet);
    }
}

/// Runs the tests of a communicator that passes only small messages.
pub(crate) fn conforms_in_words<F: Fleet>(fleet: F) {
    let fleet = Arc::new(fleet);
    for size in [1, 2, 5] {
        gathers(&fleet, size);
        votes(&fleet, size);
        leaves_in_any_order(&fleet, size);
    }
    for end in [End::Dropped, End::Failed, End::Stopped, End::Panicked] {
        for operation in [Operation::Gather, Operation::Barrier] {
            for gone in [0, 1, 2] {
                names_the_ended_process(&fleet, operation, end, gone);
            }
        }
    }
}

/// Runs `story` in a thread for each rank of this process, and returns the results in rank order. The result is `None`
/// for a rank that panicked or runs in another process.
pub(crate) fn run<F: Fleet, T: Send + 'static>(
    fleet: &Arc<F>,
    size: u32,
    story: impl Fn(&F, F::Rank) -> T + Send + Sync + 'static,
) -> Vec<Option<T>> {
    let story = Arc::new(story);
    let (sender, receiver) = mpsc::channel();
    let ranks = fleet.ranks(size);
    for &rank in &ranks {
        let (fleet, story, sender) = (Arc::clone(fleet), Arc::clone(&story), sender.clone());
        thread::spawn(move || {
            let results =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| story(&fleet, fleet.rank(rank, size))));
            let _ = sender.send((rank, results.ok()));
        });
    }
    let mut results: Vec<Option<T>> = (0..size).map(|_| None).collect();
    let until = Instant::now() + WAIT_LIMIT;
    for _ in ranks {
        let left = until.saturating_duration_since(Instant::now());
        let (rank, what) = receiver.recv_timeout(left).expect("a rank waits for ever");
        results[rank as usize] = what;
    }
    results
}

/// Runs `story` like [`run`], and returns the results of all ranks, including ranks in other processes.
fn outcomes<F: Fleet>(
    fleet: &Arc<F>,
    size: u32,
    story: impl Fn(&F, F::Rank) -> String + Send + Sync + 'static,
) -> Vec<Option<String>> {
    fleet.share(run(fleet, size, story))
}

/// Runs `story` like [`run`], then lets every rank leave the run. Asserts that no rank panicked.
fn run_well<F: Fleet>(fleet: &Arc<F>, size: u32, story: impl Fn(&F, &F::Rank) + Send + Sync + 'static) {
    let outcomes = outcomes(fleet, size, move |fleet, rank| {
        story(fleet, &rank);
        rank.leave().unwrap();
        String::from("well")
    });
    assert!(outcomes.iter().all(Option::is_some), "a rank panicked");
}

/// Returns test bytes whose values depend on the sender, the receiver and the round.
fn bytes_of(from: u32, to: u32, round: usize, length: usize) -> Vec<u8> {
    let first = from as usize * 83 + to as usize * 31 + round * 7;
    // The length of the pattern is a prime number, so bytes that are shifted by the round number do not match.
    let pattern: Vec<u8> = (0..251).map(|at| u8::try_from((first + at) % 256).unwrap()).collect();
    let mut bytes = pattern.repeat(length.div_ceil(pattern.len()));
    bytes.truncate(length);
    bytes
}

/// Returns ranges of these lengths in one buffer, with gaps between them, and the length of the buffer.
fn ranges(lengths: &[usize]) -> (Vec<Range<usize>>, usize) {
    let mut end = 3;
    let ranges = lengths.iter().map(|length| {
        let range = end..end + length;
        end += length + 5;
        range
    });
    (ranges.collect(), end)
}

/// Runs one all-to-all, in which rank `from` sends `length(from, to)` bytes to rank `to`. Checks all received bytes,
/// and that no other bytes have changed.
fn exchange_once<F: Fleet>(fleet: &F, rank: &F::Rank, round: usize, length: impl Fn(u32, u32) -> usize) -> Result<()> {
    let (this, size) = (rank.rank(), rank.size());
    let length = |from, to| if from == to { 0 } else { length(from, to) };
    let (to, sent) = ranges(&(0..size).map(|to| length(this, to)).collect::<Vec<_>>());
    let (from, received) = ranges(&(0..size).map(|from| length(from, this)).collect::<Vec<_>>());
    let mut outgoing = vec![0xA5; sent];
    let mut expected = vec![0x5A; received];
    for peer in 0..size {
        let (to, from) = (to[peer as usize].clone(), from[peer as usize].clone());
        outgoing[to.clone()].copy_from_slice(&bytes_of(this, peer, round, to.len()));
        expected[from.clone()].copy_from_slice(&bytes_of(peer, this, round, from.len()));
    }
    let mut incoming = fleet.memory(rank, &vec![0x5A; received]);
    rank.exchange(&fleet.memory(rank, &outgoing), &to, &mut incoming, &from)?;
    assert!(fleet.bytes(rank, &incoming) == expected, "rank {this} of {size}, round {round}: other bytes");
    Ok(())
}

fn exchanges_in_order<F: Fleet>(fleet: &Arc<F>, size: u32) {
    run_well(fleet, size, |fleet, rank| {
        for round in 0..30 {
            // The lengths differ between pairs of ranks. Some pairs send nothing, and in some rounds some or all ranks
            // send nothing.
            let length = |from: u32, to: u32| match (from as usize * 5 + to as usize * 3 + round) % 4 {
                0 => 0,
                _ if round % 10 == 9 => 0,
                more => more * 1000 + round * 13 + from as usize,
            };
            exchange_once(fleet, rank, round, length).unwrap();
        }
    });
}

/// Checks that the communicator counts the tensor bytes that it sends and receives, but not small messages, and that it
/// counts an all-gather as a ring.
fn counts<F: Fleet>(fleet: &Arc<F>, size: u32) {
    run_well(fleet, size, |fleet, rank| {
        let (this, size) = (rank.rank(), rank.size());
        let length = |from: u32, to: u32| 100 * (from as usize + 1) + to as usize;
        exchange_once(fleet, rank, 0, length).unwrap();
        let others = || (0..size).filter(|other| *other != this);
        let sent = others().map(|to| length(this, to) as u64).sum();
        let received = others().map(|from| length(from, this) as u64).sum();
        let exchanged = rank.traffic();
        assert_eq!(exchanged, Traffic { sent, received });
        let lengths: Vec<usize> = (0..size).map(|rank| (rank as usize + 1) * 1000).collect();
        all_gather_once(fleet, rank, false, &lengths).unwrap();
        rank.barrier().unwrap();
        let Traffic { sent, received } = rank.traffic().since(exchanged);
        assert_eq!(received, others().map(|from| lengths[from as usize] as u64).sum::<u64>());
        let all = rank.gather(&[sent.to_le_bytes(), received.to_le_bytes()].concat()).unwrap();
        let sum = |at: usize| -> u64 {
            all.iter().map(|words| u64::from_le_bytes(words[at..at + 8].try_into().unwrap())).sum()
        };
        assert_eq!(sum(0), sum(8));
    });
}

/// Tests an all-to-all with more bytes than a socket buffer holds, in both directions at the same time.
fn exchanges_of_many_bytes<F: Fleet>(fleet: &Arc<F>) {
    run_well(fleet, 3, |fleet, rank| {
        let length = |from: u32, to: u32| if (from, to) == (1, 0) { 1 } else { (9 << 20) + 4099 * from as usize + 1 };
        exchange_once(fleet, rank, 0, length).unwrap();
        exchange_once(fleet, rank, 1, |from, _| usize::from(from == 2) * (20 << 20)).unwrap();
    });
}

/// Runs one all-gather, in which rank `n` contributes `lengths[n]` bytes. If `turned` is true, the ranges are in
/// reverse rank order. Checks all bytes, and that no other bytes have changed.
fn all_gather_once<F: Fleet>(fleet: &F, rank: &F::Rank, turned: bool, lengths: &[usize]) -> Result<()> {
    let mut lengths = lengths.to_vec();
    if turned {
        lengths.reverse();
    }
    let (mut ranges, size) = ranges(&lengths);
    if turned {
        ranges.reverse();
    }
    let mut expected = vec![0x5A; size];
    let mut mine = expected.clone();
    for (from, range) in (0..).zip(&ranges) {
        let bytes = bytes_of(from, 0, range.len(), range.len());
        expected[range.clone()].copy_from_slice(&bytes);
        if from == rank.rank() {
            mine[range.clone()].copy_from_slice(&bytes);
        }
    }
    let mut memory = fleet.memory(rank, &mine);
    rank.all_gather(&mut memory, &ranges)?;
    assert!(fleet.bytes(rank, &memory) == expected, "rank {} of {lengths:?}: other bytes", rank.rank());
    Ok(())
}

fn all_gathers<F: Fleet>(fleet: &Arc<F>, size: u32) {
    run_well(fleet, size, |fleet, rank| {
        let size = rank.size() as usize;
        let gather = |length: &dyn Fn(usize) -> usize| {
            for turned in [false, true] {
                all_gather_once(fleet, rank, turned, &(0..size).map(length).collect::<Vec<_>>()).unwrap();
            }
        };
        gather(&|_| 0);
        gather(&|_| 1000);
        gather(&|_| (1 << 20) + 1);
        for round in 0..size {
            // The lengths differ, some are 0, and in one case all bytes are from one rank.
            gather(&|rank| (rank + round) % 3 * 1001);
            gather(&|rank| usize::from(rank == round) * ((3 << 20) + 17));
        }
    });
}

/// Tests an all-gather of ranges of equal lengths without gaps between them, like the shards of one tensor.
fn all_gathers_parts<F: Fleet>(fleet: &Arc<F>, size: u32) {
    const LENGTH: usize = 70_000;
    run_well(fleet, size, |fleet, rank| {
        let part = |rank: u32| rank as usize * LENGTH..(rank as usize + 1) * LENGTH;
        let ranges: Vec<_> = (0..rank.size()).map(part).collect();
        let expected: Vec<u8> = (0..rank.size()).flat_map(|from| bytes_of(from, 0, 0, LENGTH)).collect();
        let mut mine = vec![0; expected.len()];
        mine[part(rank.rank())].copy_from_slice(&expected[part(rank.rank())]);
        let mut memory = fleet.memory(rank, &mine);
        rank.all_gather(&mut memory, &ranges).unwrap();
        assert!(fleet.bytes(rank, &memory) == expected);
    });
}

/// Tests an all-gather with far more bytes than a socket buffer holds, from all ranks at the same time.
fn all_gathers_many_bytes<F: Fleet>(fleet: &Arc<F>) {
    run_well(fleet, 3, |fleet, rank| all_gather_once(fleet, rank, false, &[9 << 20, 0, (20 << 20) + 4099]).unwrap());
}

fn gathers<F: Fleet>(fleet: &Arc<F>, size: u32) {
    run_well(fleet, size, |_, rank| {
        for round in 0..20 {
            let said = |rank: u32| bytes_of(rank, 0, round, (rank as usize + round) % 3 * 7000);
            let expected: Vec<_> = (0..rank.size()).map(said).collect();
            assert!(rank.gather(&said(rank.rank())).unwrap() == expected);
        }
        // No rank may leave the barrier before the last rank has reached it.
        let begun = Instant::now();
        let late = Duration::from_millis(150);
        if rank.rank() + 1 == rank.size() {
            thread::sleep(late);
        }
        rank.barrier().unwrap();
        assert!(begun.elapsed() >= late / 2, "{:?}", begun.elapsed());
        rank.check().unwrap();
    });
}

fn votes<F: Fleet>(fleet: &Arc<F>, size: u32) {
    run_well(fleet, size, |_, rank| {
        rank.vote(Ok(())).unwrap();
        let last = rank.size() - 1;
        for words in ["no space", ""] {
            // The error names the first rank that failed.
            let mine = if rank.rank() + 2 >= rank.size() { Err(words) } else { Ok(()) };
            match rank.vote(mine).unwrap_err() {
                Error::Comm(CommError { rank, detail, .. }) => {
                    assert_eq!((rank.index, &*detail), (last.saturating_sub(1), words));
                }
                other => panic!("{other}"),
            }
        }
        rank.vote(Ok(())).unwrap();
    });
}

fn leaves_in_any_order<F: Fleet>(fleet: &Arc<F>, size: u32) {
    for first in 0..size {
        run_well(fleet, size, move |_, rank| {
            rank.barrier().unwrap();
            if rank.rank() != first {
                thread::sleep(Duration::from_millis(20 * u64::from(rank.rank() + 1)));
            }
        });
    }
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Exchange,
    AllGather,
    Gather,
    Barrier,
}

impl Operation {
    fn once<F: Fleet>(self, fleet: &F, rank: &F::Rank, round: usize) -> Result<()> {
        match self {
            Self::Exchange => exchange_once(fleet, rank, round, |_, _| 300_000),
            Self::AllGather => all_gather_once(fleet, rank, round % 2 == 1, &[100_000, 0, 70_000]),
            Self::Gather => {
                let replies = rank.gather(&[1, 2, 3])?;
                assert_eq!(replies, vec![vec![1, 2, 3]; rank.size() as usize], "round {round}");
                Ok(())
            }
            Self::Barrier => rank.barrier(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Dropped,
    Failed,
    /// The rank reports that a signal stopped it.
    Stopped,
    Panicked,
}

/// Runs one operation again and again on three ranks, of which rank `gone` ends after three rounds. Checks that the
/// other two ranks get an error that names rank `gone`.
fn names_the_ended_process<F: Fleet>(fleet: &Arc<F>, operation: Operation, end: End, gone: u32) {
    let case = format!("{operation:?}, rank {gone} {end:?}");
    let names_it = {
        let case = case.clone();
        move |error: &Error| {
            let rank = match error {
                Error::Stopped(Stopped { signal: "USR1", rank: Some(rank), .. }) if end == End::Stopped => rank,
                Error::Comm(CommError { rank, detail, .. }) if end != End::Stopped => {
                    assert_eq!(detail.contains("stopped by TERM"), end == End::Failed, "{case}: {error}");
                    rank
                }
                other => panic!("{case}: {other}"),
            };
            assert_eq!(rank.index, gone, "{case}: {error}");
        }
    };
    let outcomes = outcomes(fleet, 3, move |fleet, rank| {
        for round in 0.. {
            if rank.rank() == gone && round == 3 {
                // The other ranks are waiting in the next operation.
                thread::sleep(Duration::from_millis(20));
                match end {
                    End::Dropped => {}
                    // An ordinary failure may have the same message as a stop by a signal.
                    End::Failed => rank.fail(&Error::usage("stopped by TERM", "")),
                    End::Stopped => {
                        rank.fail(&Error::Stopped(Stopped { signal: "USR1", exit: 138, rank: None, kept: None }));
                    }
                    End::Panicked => std::panic::resume_unwind(Box::new("a test")),
                }
                break;
            }
            if let Err(error) = operation.once(fleet, &rank, round) {
                names_it(&error);
                names_it(&rank.barrier().unwrap_err());
                names_it(&rank.check().unwrap_err());
                return String::from("named");
            }
            // An all-gather to which the ended rank contributes no bytes may succeed without that rank.
            let may_succeed = round < 3 || matches!(operation, Operation::AllGather);
            assert!(may_succeed, "round {round} succeeded without rank {gone}");
            assert!(round < 1000, "nobody has noticed");
        }
        String::from("gone")
    });
    for (rank, outcome) in (0..).zip(outcomes) {
        assert!(rank == gone || outcome.as_deref() == Some("named"), "{case}, at rank {rank}");
    }
}

fn refuses_other_lengths<F: Fleet>(fleet: &Arc<F>) {
    // Each pair is the length that rank 1 sends to rank 0, and the different length that rank 0 expects.
    for (sent, expected) in [(70, 50), (50, 70), (0, 70), (70, 0), (5 << 20, 1), (1, 5 << 20)] {
        let results = outcomes(fleet, 3, move |fleet, rank| {
            let length = match rank.rank() {
                0 => expected,
                _ => sent,
            };
            let error = (0..1000).find_map(|round| {
                exchange_once(fleet, &rank, round, |from, to| if (from, to) == (1, 0) { length } else { 9 }).err()
            });
            let error = error.expect("an error in the end");
            rank.fail(&error);
            error.to_string()
        });
        let results: Vec<_> = results.into_iter().flatten().collect();
        assert!(results[0].contains("process 1: exchange"), "{results:?}");
        for number in [sent, expected] {
            assert!(results.iter().all(|results| results.contains(&number.to_string())), "{results:?}");
        }
    }
}

/// Checks that an all-gather fails on all ranks if rank 1 contributes more or fewer bytes than the other ranks expect.
fn refuses_to_all_gather_other_lengths<F: Fleet>(fleet: &Arc<F>) {
    for (sent, expected) in [(70, 50), (50, 70), (0, 70), (70, 0), (5 << 20, 1), (1, 5 << 20)] {
        let results = outcomes(fleet, 3, move |fleet, rank| {
            let length = if rank.rank() == 1 { sent } else { expected };
            let error = (0..1000).find_map(|_| all_gather_once(fleet, &rank, false, &[9, length, 11]).err());
            let error = error.expect("an error in the end");
            rank.fail(&error);
            error.to_string()
        });
        let results: Vec<_> = results.into_iter().flatten().collect();
        assert!(results.iter().any(|results| results.starts_with("process 1: all-gather: expected")), "{results:?}");
        for number in [sent, expected] {
            assert!(results.iter().all(|results| results.contains(&number.to_string())), "{results:?}");
        }
    }
}
