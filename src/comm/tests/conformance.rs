//! What every communicator does, whatever its memory and its wires.
//!
//! A [`Fleet`] makes the ranks; each case runs one thread a rank, for the ranks that are in this process. Nothing here waits
//! longer than [`PATIENCE`].

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::comm::{Communicator, Traffic};
use crate::error::{CommError, Error, Result, Stopped};

/// Ranks of one kind, and how a test sees into their memory.
pub(crate) trait Fleet: Send + Sync + 'static {
    type Rank: Communicator + Send + 'static;

    /// Called in the thread of each rank, at the same time for all.
    fn rank(&self, rank: u32, size: u32) -> Self::Rank;

    fn memory(&self, rank: &Self::Rank, bytes: &[u8]) -> <Self::Rank as Communicator>::Memory;

    fn bytes(&self, rank: &Self::Rank, memory: &<Self::Rank as Communicator>::Memory) -> Vec<u8>;

    /// The ranks of so many that this process runs. Called at the beginning of each case.
    fn ranks(&self, size: u32) -> Vec<u32> {
        (0..size).collect()
    }

    /// Adds the outcomes of ranks that other processes run.
    fn share(&self, outcomes: Vec<Option<String>>) -> Vec<Option<String>> {
        outcomes
    }

    /// Whether lengths that do not agree are found where they do not.
    fn checks_lengths(&self) -> bool {
        true
    }
}

/// Longer than anything takes.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// All that is asked of a communicator.
pub(crate) fn conforms<F: Fleet>(fleet: F) {
    conform_all(&Arc::new(fleet));
}

/// As [`conforms`], of a fleet that is needed afterwards.
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
                names_who_is_gone(fleet, operation, end, gone);
            }
        }
    }
    if fleet.checks_lengths() {
        refuses_other_lengths(fleet);
        refuses_to_all_gather_other_lengths(fleet);
    }
}

/// What is asked of a communicator that moves words only.
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
                names_who_is_gone(&fleet, operation, end, gone);
            }
        }
    }
}

/// Run a story in a thread for each rank that is in this process; all that they return, in the order of ranks.
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
            let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| story(&fleet, fleet.rank(rank, size))));
            let _ = sender.send((rank, told.ok()));
        });
    }
    let mut told: Vec<Option<T>> = (0..size).map(|_| None).collect();
    let until = Instant::now() + PATIENCE;
    for _ in ranks {
        let left = until.saturating_duration_since(Instant::now());
        let (rank, what) = receiver.recv_timeout(left).expect("a rank waits for ever");
        told[rank as usize] = what;
    }
    told
}

/// As [`run`], with what the ranks of all processes return.
fn outcomes<F: Fleet>(
    fleet: &Arc<F>,
    size: u32,
    story: impl Fn(&F, F::Rank) -> String + Send + Sync + 'static,
) -> Vec<Option<String>> {
    fleet.share(run(fleet, size, story))
}

/// As [`run`] where no rank may end otherwise.
fn run_well<F: Fleet>(fleet: &Arc<F>, size: u32, story: impl Fn(&F, &F::Rank) + Send + Sync + 'static) {
    let outcomes = outcomes(fleet, size, move |fleet, rank| {
        story(fleet, &rank);
        rank.leave().unwrap();
        String::from("well")
    });
    assert!(outcomes.iter().all(Option::is_some), "a rank panicked");
}

/// Bytes that tell from whom, to whom and when they are.
fn bytes_of(from: u32, to: u32, round: usize, length: usize) -> Vec<u8> {
    let first = from as usize * 83 + to as usize * 31 + round * 7;
    // Of a prime length, so that nothing that is out of place by a round number of bytes looks right.
    let pattern: Vec<u8> = (0..251).map(|at| u8::try_from((first + at) % 256).unwrap()).collect();
    let mut bytes = pattern.repeat(length.div_ceil(pattern.len()));
    bytes.truncate(length);
    bytes
}

/// One behind the other, with a gap between, as a buffer has them.
fn ranges(lengths: &[usize]) -> (Vec<Range<usize>>, usize) {
    let mut end = 3;
    let ranges = lengths.iter().map(|length| {
        let range = end..end + length;
        end += length + 5;
        range
    });
    (ranges.collect(), end)
}

/// One all-to-all whose lengths `length(from, to)` says; checks all bytes, and that no others were touched.
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
            // Uneven, with pairs that have nothing to say, and rounds in which some or all have nothing.
            let length = |from: u32, to: u32| match (from as usize * 5 + to as usize * 3 + round) % 4 {
                0 => 0,
                _ if round % 10 == 9 => 0,
                more => more * 1000 + round * 13 + from as usize,
            };
            exchange_once(fleet, rank, round, length).unwrap();
        }
    });
}

/// What each sends and receives, and no words; an all-gather as it goes round.
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

/// More than any buffer of a socket holds, both ways at once.
fn exchanges_of_many_bytes<F: Fleet>(fleet: &Arc<F>) {
    run_well(fleet, 3, |fleet, rank| {
        let length = |from: u32, to: u32| if (from, to) == (1, 0) { 1 } else { (9 << 20) + 4099 * from as usize + 1 };
        exchange_once(fleet, rank, 0, length).unwrap();
        exchange_once(fleet, rank, 1, |from, _| usize::from(from == 2) * (20 << 20)).unwrap();
    });
}

/// One all-gather of these lengths, the ranges of later ranks before those of earlier ones where it is `turned`; checks
/// all bytes, and that no others were touched.
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
            // Uneven, some empty, and all from one.
            gather(&|rank| (rank + round) % 3 * 1001);
            gather(&|rank| usize::from(rank == round) * ((3 << 20) + 17));
        }
    });
}

/// Equally long and none between, as the parts of one tensor.
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

/// Far more than any buffer of a socket holds, from all at once.
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
        // A barrier: nobody is through before the last one has come.
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
            // The first of several is named.
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
            Self::Gather => rank.gather(&[1, 2, 3]).map(drop),
            Self::Barrier => rank.barrier(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Dropped,
    Failed,
    /// By a signal.
    Stopped,
    Panicked,
}

/// One of three ends after some rounds, and the others are in the middle of the next.
fn names_who_is_gone<F: Fleet>(fleet: &Arc<F>, operation: Operation, end: End, gone: u32) {
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
                // The others are waiting.
                thread::sleep(Duration::from_millis(20));
                match end {
                    End::Dropped => {}
                    // Words that look like those of a signal are words.
                    End::Failed => rank.fail(&Error::usage("stopped by TERM", "")),
                    End::Stopped => {
                        rank.fail(&Error::Stopped(Stopped { signal: "USR1", exit: 138, rank: None, kept: None }))
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
            assert!(round < 1000, "nobody has noticed");
        }
        String::from("gone")
    });
    for (rank, outcome) in (0..).zip(outcomes) {
        assert!(rank == gone || outcome.as_deref() == Some("named"), "{case}, at rank {rank}");
    }
}

fn refuses_other_lengths<F: Fleet>(fleet: &Arc<F>) {
    // What rank 1 sends to rank 0, and what that expects.
    for (sent, expected) in [(70, 50), (50, 70), (0, 70), (70, 0), (5 << 20, 1), (1, 5 << 20)] {
        let told = outcomes(fleet, 3, move |fleet, rank| {
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
        let told: Vec<_> = told.into_iter().flatten().collect();
        assert!(told[0].contains("process 1: exchange"), "{told:?}");
        for number in [sent, expected] {
            assert!(told.iter().all(|told| told.contains(&number.to_string())), "{told:?}");
        }
    }
}

/// Rank 1 has more or less than the others expect.
fn refuses_to_all_gather_other_lengths<F: Fleet>(fleet: &Arc<F>) {
    for (sent, expected) in [(70, 50), (50, 70), (0, 70), (70, 0), (5 << 20, 1), (1, 5 << 20)] {
        let told = outcomes(fleet, 3, move |fleet, rank| {
            let length = if rank.rank() == 1 { sent } else { expected };
            let error = (0..1000).find_map(|_| all_gather_once(fleet, &rank, false, &[9, length, 11]).err());
            let error = error.expect("an error in the end");
            rank.fail(&error);
            error.to_string()
        });
        let told: Vec<_> = told.into_iter().flatten().collect();
        assert!(told.iter().any(|told| told.starts_with("process 1: all-gather: expected")), "{told:?}");
        for number in [sent, expected] {
            assert!(told.iter().all(|told| told.contains(&number.to_string())), "{told:?}");
        }
    }
}
