//! MPI tests, with one process for each rank. `ci/mpi` runs this test binary under mpirun. Without a launcher, these
//! tests do nothing.
//!
//! A process can initialise MPI only once, so one test runs all cases.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};

use super::conformance::{Fleet, conform_all};
use crate::comm::Communicator;
use crate::comm::mpi::{Finalize, KeepGoing, Mpi, is_under_mpi};
use crate::error::{Error, Stopped};
use crate::launch::{launch, process_environment};

/// The environment variable with the name of an operation and a rank. This rank is killed while the other ranks are in
/// the operation.
const KILLED: &str = "DTSHARD_TEST_MPI_KILLED";

/// All processes of the MPI world. Each test case uses its own MPI tags.
struct Processes {
    world: Mpi,
    case: AtomicI32,
    is_stopped: Arc<AtomicBool>,
}

impl Processes {
    fn going(&self) -> KeepGoing {
        let is_stopped = Arc::clone(&self.is_stopped);
        Arc::new(move || {
            let stopped = || Error::from(Stopped { signal: "TERM", exit: 143, rank: None, kept: None });
            if is_stopped.load(Ordering::Relaxed) { Err(stopped()) } else { Ok(()) }
        })
    }

    /// Returns the communicator of this process for a test case with `size` ranks. Returns `None` if the case runs
    /// without this process.
    fn of_case(&self, size: u32) -> Option<Mpi> {
        self.ranks(size).pop().map(|rank| self.rank(rank, size))
    }
}

impl Fleet for Processes {
    type Rank = Mpi;

    fn ranks(&self, size: u32) -> Vec<u32> {
        assert!(
            size <= self.world.size(),
            "mpirun started {} processes, at least {size} are needed",
            self.world.size()
        );
        self.case.fetch_add(1, Ordering::Relaxed);
        Some(self.world.rank()).filter(|rank| *rank < size).into_iter().collect()
    }

    fn rank(&self, rank: u32, size: u32) -> Mpi {
        Mpi::with_tag(rank, size, 2 * self.case.load(Ordering::Relaxed), self.going())
    }

    fn share(&self, outcomes: Vec<Option<String>>) -> Vec<Option<String>> {
        let own = outcomes.get(self.world.rank() as usize).cloned().flatten();
        let said = self.world.gather(&serde_json::to_vec(&own).unwrap()).unwrap();
        let all = said.iter().map(|said| serde_json::from_slice(said).unwrap());
        all.take(outcomes.len()).collect()
    }

    fn memory(&self, _: &Mpi, bytes: &[u8]) -> Vec<u8> {
        bytes.to_vec()
    }

    fn bytes(&self, _: &Mpi, memory: &Vec<u8>) -> Vec<u8> {
        memory.clone()
    }
}

#[test]
fn processes_conform() {
    let started = launch(None, None, false, &process_environment).unwrap();
    if !is_under_mpi(&started, &process_environment) || std::env::var(KILLED).is_ok() {
        return;
    }
    let _finalize = Finalize::default();
    let world = Mpi::world(started.part, Arc::new(|| Ok(()))).unwrap();
    let (rank, size) = (world.rank(), world.size());
    assert!(Mpi::world(started.part, Arc::new(|| Ok(()))).is_err(), "MPI was initialised twice");
    let processes = Processes { world, case: AtomicI32::default(), is_stopped: Arc::default() };
    finds_ranks_in_other_operations(&processes);
    names_a_rank_that_leaves_early(&processes);
    stops_where_one_is_stopped(&processes);
    refuses_ranges_beyond_the_memory(&processes);
    let cases = conforms_counted(processes);
    // The line is written in one call, because all processes write to one terminal.
    let line = format!("\nrank {rank} of {size} conforms: {cases} cases, by {}\n", Mpi::library());
    std::io::stdout().write_all(line.as_bytes()).unwrap();
}

fn conforms_counted(processes: Processes) -> i32 {
    let processes = Arc::new(processes);
    conform_all(&processes);
    let cases = processes.case.load(Ordering::Relaxed);
    Arc::into_inner(processes).unwrap().world.leave().unwrap();
    cases
}

fn finds_ranks_in_other_operations(processes: &Processes) {
    for odd in 0..3 {
        for gathers in [true, false] {
            let Some(rank) = processes.of_case(3) else { continue };
            let none = vec![0..0; 3];
            let done = if (rank.rank() == odd) == gathers {
                rank.barrier()
            } else {
                rank.exchange(&Vec::new(), &none, &mut Vec::new(), &none)
            };
            let error = done.unwrap_err().to_string();
            assert!(error.contains("it is in ") && error.contains("this process is in "), "{error}");
        }
    }
}

fn names_a_rank_that_leaves_early(processes: &Processes) {
    for early in 0..3 {
        let Some(rank) = processes.of_case(3) else { continue };
        rank.barrier().unwrap();
        let error = if rank.rank() == early { rank.leave().unwrap_err() } else { rank.barrier().unwrap_err() };
        let said = error.to_string();
        assert!(said.starts_with(&format!("process {early}: ")) && said.contains("has left"), "{said}");
    }
}

/// Checks that a signal stops all ranks. One rank gets the signal while it waits in a gather for a rank that is late.
/// All ranks then get the error `Stopped`, which names the rank that got the signal.
fn stops_where_one_is_stopped(processes: &Processes) {
    for stopped in 0..3 {
        let Some(rank) = processes.of_case(3) else { continue };
        rank.barrier().unwrap();
        let (this, late) = (rank.rank(), (stopped + 1) % 3);
        if this == late {
            thread::sleep(Duration::from_millis(100));
        }
        let error = thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(30));
                processes.is_stopped.store(this == stopped, Ordering::Relaxed);
            });
            (0..1000).find_map(|_| rank.gather(&[7]).err())
        });
        match error {
            Some(Error::Stopped(Stopped { signal: "TERM", rank, .. })) if this == stopped => assert!(rank.is_none()),
            Some(Error::Stopped(Stopped { signal: "TERM", rank: Some(rank), .. })) => assert_eq!(rank.index, stopped),
            other => panic!("{other:?}"),
        }
        processes.is_stopped.store(false, Ordering::Relaxed);
    }
}

fn refuses_ranges_beyond_the_memory(processes: &Processes) {
    let Some(rank) = processes.of_case(1) else { return };
    let mut memory = vec![0; 10];
    let one = |range| std::iter::once(range).collect::<Vec<_>>();
    for ranges in [vec![], one(0..11), vec![0..0, 0..0]] {
        assert!(rank.exchange(&vec![0; 100], &one(0..0), &mut memory, &ranges).is_err());
        assert!(rank.all_gather(&mut memory, &ranges).is_err());
    }
    rank.leave().unwrap();
}

/// Repeats an operation until one rank kills itself. The launcher must then end the other ranks. A rank that gets an
/// error instead fails the test.
#[test]
fn killed() {
    let Ok(setting) = std::env::var(KILLED) else { return };
    let (work, victim) = setting.split_once(' ').expect("an operation and a rank");
    let victim: u32 = victim.parse().unwrap();
    let started = launch(None, None, false, &process_environment).unwrap();
    let _finalize = Finalize::default();
    let rank = Mpi::world(started.part, Arc::new(|| Ok(()))).unwrap();
    let mut memory = vec![0; (rank.size() as usize) << 20];
    let shared: Vec<_> = (0..rank.size() as usize).map(|rank| rank << 20..(rank + 1) << 20).collect();
    let mut ranges = shared.clone();
    ranges[rank.rank() as usize] = 0..0;
    let outgoing = memory.clone();
    let mut round = 0;
    let error = loop {
        if rank.rank() == victim && round == 3 {
            // The other ranks are waiting in the operation.
            thread::sleep(Duration::from_millis(100));
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        let done = match work {
            "exchange" => rank.exchange(&outgoing, &ranges, &mut memory, &ranges),
            "all-gather" => rank.all_gather(&mut memory, &shared),
            "gather" => rank.gather(&[1; 5000]).map(drop),
            "barrier" => rank.barrier(),
            // The ranks are busy with long local work, without any operation.
            "nothing" => {
                thread::sleep(Duration::from_millis(5));
                rank.check()
            }
            other => panic!("no operation: {other}"),
        };
        if let Err(error) = done {
            break error;
        }
        round += 1;
    };
    panic!("rank {} survived: {error}", rank.rank());
}
