//! A communicator over the MPI library with which this program was built. It connects processes on several hosts.
//!
//! Every operation begins with a header from each process to each other process. The header contains the operation, its
//! number, and the number of bytes that follow. A process sends the bytes only after it has received matching headers
//! from all other processes. Then all processes send their bytes, because all of them have the same headers. A process
//! that ends sends a final message instead of a header. The other processes receive the final message before they send
//! any bytes of that operation. Therefore no transfer stays unfinished, and MPI can be finalised after an error as
//! well.
//!
//! A process that is killed sends no final message. Its launcher, mpirun or srun, then ends the other processes of the
//! job.
//!
//! Only one thread calls MPI at a time (`MPI_THREAD_SERIALIZED`), and no call blocks: a waiting thread polls, and
//! releases the lock between two polls. All sizes and offsets are in bytes. Invariant: once a process has recorded a
//! failure, it has sent its final message.

use std::collections::VecDeque;
use std::mem;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mpi::environment::Universe;
use mpi::point_to_point::MatchedReceiveVec;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, Destination, Source};
use serde::{Deserialize, Serialize};

use super::Communicator;
use super::failure::{DROPPED, FirstFailure, LEFT, PeerFailure, other_length};
use super::ranges::carved;
use super::traffic::{Counter, Traffic};
use crate::error::{CommError, Error, Result};
use crate::launch::{Env, Launch, Launcher, Part};

/// The maximum length of one MPI message in bytes. MPI counts with 32 bits, so longer transfers are split.
const LONGEST: usize = 16 << 20;

/// The maximum length in bytes of the reason text in a final message. JSON escapes may make the text six times as long.
const LONGEST_REASON: usize = 1 << 10;

/// The number of bytes that MPI's send buffer has for each process of the run. The buffer holds headers and final
/// messages that are being sent.
const BUFFER_A_RANK: usize = 8 << 10;

/// The maximum time that a process waits for the final messages of the other processes before it aborts the MPI job.
const ENDS_WITHIN: Duration = Duration::from_mins(1);

/// The state of the MPI library; `None` before MPI is initialised. A thread holds the lock while it calls MPI.
static LIBRARY: Mutex<Option<Universe>> = Mutex::new(None);

/// The inboxes of communicators that were dropped before the final messages of all other processes arrived.
static ENDING: Mutex<Vec<Inbox>> = Mutex::new(Vec::new());

/// A function that this process calls repeatedly while it waits for other processes. If the function returns an error,
/// this process notifies the other processes, and the current operation returns this error.
pub type KeepGoing = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// Returns true if the launcher connects processes by MPI, and has started several processes including this one. Such a
/// launcher is mpirun, or srun with `--mpi=`.
#[must_use]
pub fn is_under_mpi(launch: &Launch, env: Env<'_>) -> bool {
    match launch.launcher {
        Launcher::OpenMpi | Launcher::Pmi => !launch.part.is_alone(),
        Launcher::Slurm => !launch.part.is_alone() && env("PMIX_RANK").is_some(),
        _ => false,
    }
}

/// The communicator of one process of `MPI_COMM_WORLD`. It moves bytes of host memory.
pub struct Mpi {
    rank: u32,
    size: u32,
    going: KeepGoing,
    first_failure: FirstFailure,
    counter: Counter,
    state: Mutex<State>,
    /// A lock that a thread holds during an operation, so that operations run one at a time.
    operating: Mutex<()>,
}

struct State {
    inbox: Inbox,
    /// The number of the latest operation, counted from 1.
    number: u64,
    has_left: bool,
}

/// Headers and final messages of the other processes that have arrived but are not processed yet.
#[derive(Default)]
struct Inbox {
    tag: i32,
    rank: u32,
    words: Vec<VecDeque<Word>>,
    /// For each process, true if its final message has arrived. The entry of this process itself is always true.
    is_last: Vec<bool>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Word {
    Header {
        operation: Operation,
        number: u64,
        len: u64,
    },
    Left,
    /// A process has failed. The value names the process that failed first, and its reason. The sender may be another
    /// process.
    Failed(PeerFailure),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Operation {
    Gather,
    Exchange,
    AllGather,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Gather => "gather",
            Self::Exchange => "exchange",
            Self::AllGather => "all-gather",
        }
    }
}

/// An operation that may send its bytes, because the headers of all processes have arrived.
struct Begun {
    /// For each process, the number of bytes that it sends to this process.
    lens: Vec<usize>,
    /// `Ok`, or the error with which [`KeepGoing`] stopped this process while it waited for headers. The other
    /// processes complete the operation, so this process also completes it, and then returns the error.
    stopped: Result<()>,
}

impl Mpi {
    /// Initialises MPI and connects all processes that the launcher started. `part` has the number of this process and
    /// the number of processes, as the launcher gives them. Every wait calls `going`, and this process ends if `going`
    /// returns an error. Call this function once, and keep a [`Finalize`] in `main`.
    ///
    /// # Errors
    /// `Usage` if MPI assigns another number to this process, was initialised before, or does not support threads.
    pub fn world(part: Part, going: KeepGoing) -> Result<Self> {
        let (rank, size) = initialise()?;
        if (rank, size) != (part.index, part.of) {
            return Err(Error::usage(
                format!(
                    "MPI numbers this process {rank} of {size}, but it was started as process {} of {}",
                    part.index, part.of
                ),
                "start dtshard with the mpirun of the MPI library it was built with, or srun --mpi=pmix or --mpi=pmi2",
            ));
        }
        Ok(Self::with_tag(rank, size, 0, going))
    }

    /// Returns the communicator of process `rank`, which connects the first `size` processes of `MPI_COMM_WORLD`. `tag`
    /// is the MPI tag of headers; `tag + 1` is the tag of the bytes that follow.
    pub(super) fn with_tag(rank: u32, size: u32, tag: i32, going: KeepGoing) -> Self {
        let inbox = Inbox {
            tag,
            rank,
            words: (0..size).map(|_| VecDeque::new()).collect(),
            is_last: (0..size).map(|other| other == rank).collect(),
        };
        Self {
            rank,
            size,
            going,
            first_failure: FirstFailure::default(),
            counter: Counter::default(),
            state: Mutex::new(State { inbox, number: 0, has_left: false }),
            operating: Mutex::default(),
        }
    }

    /// Returns the name and the version of the MPI library.
    #[must_use]
    pub fn library() -> String {
        let _turn = turn();
        // The name is the first line of the text, or the first words of a long line such as "Open MPI v4.1.4, package:
        // ..".
        let text = mpi::environment::library_version().unwrap_or_default();
        let line = text.trim_matches(['\0', '\n', ' ']).lines().next().unwrap_or_default();
        let words = line.split(',').next().unwrap_or_default().split_whitespace();
        words.filter(|word| *word != "Version:").collect::<Vec<_>>().join(" ")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let this = self.rank;
        (0..self.size).filter(move |rank| *rank != this)
    }

    fn send_to_all(&self, state: &State, word: impl Fn(u32) -> Word) {
        let _turn = turn();
        let world = SimpleCommunicator::world();
        for other in self.others() {
            let bytes = serde_json::to_vec(&word(other)).expect("words are plain data");
            // A buffered send returns before the receiver is ready.
            world.process_at_rank(mpi_rank(other)).buffered_send_with_tag(&bytes[..], state.inbox.tag);
        }
    }

    /// Records that this process ends because of `gone`, and informs the other processes. Does nothing if this process
    /// has already failed or left.
    fn end(&self, state: &State, gone: PeerFailure) {
        if state.has_left || !self.first_failure.seal(gone) {
            return;
        }
        let Some(PeerFailure { rank, why }) = self.first_failure.gone().cloned() else { return };
        let gone = PeerFailure { rank, why: why.cut(LONGEST_REASON) };
        self.send_to_all(state, |_| Word::Failed(gone.clone()));
    }

    /// Calls the caller's [`KeepGoing`] function. If it returns an error, this process ends: it informs the other
    /// processes and returns the error.
    fn ask(&self) -> Result<()> {
        (self.going)().inspect_err(|error| Communicator::fail(self, error))
    }

    /// Begins an operation: sends a header to each other process, and waits for the headers of all other processes.
    /// `len(n)` is the number of bytes that this process will send to process `n`.
    fn begin(&self, operation: Operation, len: impl Fn(u32) -> usize) -> Result<Begun> {
        let op = operation.name();
        self.ask()?;
        let number = {
            let mut state = self.state();
            self.first_failure.check(op)?;
            state.number += 1;
            let number = state.number;
            self.send_to_all(&state, |other| Word::Header { operation, number, len: len(other) as u64 });
            number
        };
        let (mut pause, mut stopped) = (Pause::default(), Ok(()));
        loop {
            {
                let mut state = self.state();
                state.inbox.receive();
                match state.inbox.headers(operation, number) {
                    Ok(Some(lens)) => return Ok(Begun { lens, stopped }),
                    Ok(None) => {}
                    Err(gone) => {
                        self.end(&state, gone);
                        stopped?;
                        return self
                            .first_failure
                            .check(op)
                            .map(|()| unreachable!("a failure is recorded for this rank"));
                    }
                }
            }
            if stopped.is_ok() {
                stopped = self.ask();
            }
            pause.wait();
        }
    }

    /// Sends and receives the bytes of an operation that [`Self::begin`] has begun. Each entry of `to` and `from` has
    /// the number of the other process.
    fn transfer<'a>(&self, to: impl Iterator<Item = (u32, &'a [u8])>, from: Vec<(u32, &'a mut [u8])>) {
        let tag = self.state().inbox.tag + 1;
        mpi::request::scope(|scope| {
            let mut requests = Vec::new();
            {
                let _turn = turn();
                let world = SimpleCommunicator::world();
                for (rank, bytes) in from {
                    let peer = world.process_at_rank(mpi_rank(rank));
                    let pieces = bytes.chunks_mut(LONGEST);
                    requests.extend(pieces.map(|piece| peer.immediate_receive_into_with_tag(scope, piece, tag)));
                }
                for (rank, bytes) in to {
                    let peer = world.process_at_rank(mpi_rank(rank));
                    let pieces = bytes.chunks(LONGEST);
                    requests.extend(pieces.map(|piece| peer.immediate_send_with_tag(scope, piece, tag)));
                }
            }
            let mut pause = Pause::default();
            while !requests.is_empty() {
                let before = requests.len();
                let turn = turn();
                requests = mem::take(&mut requests).into_iter().filter_map(|request| request.test().err()).collect();
                drop(turn);
                if requests.len() < before {
                    pause = Pause::default();
                }
                pause.wait();
            }
        });
    }

    /// Runs an operation from its header to its last byte. Sends `to(n)` to each other process `n`, and receives bytes
    /// from each process in `from` into the slice beside its number.
    fn go<'a>(
        &self,
        operation: Operation,
        to: impl Fn(u32) -> &'a [u8],
        mut from: Vec<(u32, &'a mut [u8])>,
    ) -> Result<()> {
        let _operating = self.operating.lock().unwrap_or_else(PoisonError::into_inner);
        let Begun { lens, stopped } = self.begin(operation, |other| to(other).len())?;
        let mut wrong = None;
        let mut unwanted: Vec<Vec<u8>> = lens.iter().map(|_| Vec::new()).collect();
        for ((rank, place), unwanted) in from.iter_mut().zip(&mut unwanted) {
            let sent = lens[*rank as usize];
            if sent != place.len() {
                wrong.get_or_insert((*rank, place.len(), sent));
                // The bytes are received and dropped, so that the sender can complete its send.
                *unwanted = vec![0; sent];
                *place = &mut [];
            }
        }
        let received: usize = from.iter().map(|(_, place)| place.len()).sum();
        let ranks: Vec<u32> = from.iter().map(|(rank, _)| *rank).collect();
        let unwanted = ranks.into_iter().zip(&mut unwanted).map(|(rank, bytes)| (rank, &mut bytes[..]));
        let from = from.into_iter().chain(unwanted).filter(|(_, place)| !place.is_empty()).collect();
        self.transfer(self.others().map(|other| (other, to(other))), from);
        self.counter.sent(self.others().map(|other| to(other).len() as u64).sum());
        self.counter.received(received as u64);
        if let Some((rank, expected, sent)) = wrong {
            let error = other_length(rank, operation.name(), expected as u64, sent as u64);
            if let Error::Comm(CommError { detail, .. }) = &error {
                self.end(&self.state(), PeerFailure { rank, why: detail.as_str().into() });
            }
            return Err(error);
        }
        stopped
    }

    /// Checks that there is one range for each process, and that each range is inside the memory.
    fn check_ranges(&self, operation: Operation, ranges: &[Range<usize>], memory: &[u8]) -> Result<()> {
        let wrong = |detail: String| Err(Error::comm(self.rank, operation.name(), detail));
        if ranges.len() != self.size as usize {
            return wrong(format!("found {} ranges, expected one for each of {} processes", ranges.len(), self.size));
        }
        match ranges.iter().find(|range| memory.get((*range).clone()).is_none()) {
            Some(range) => wrong(format!("bytes {range:?} of {}", memory.len())),
            None => Ok(()),
        }
    }

    /// Splits `memory` into the disjoint `ranges`, one for each process. Returns each process number with its slice.
    fn parts<'m>(
        &self,
        operation: Operation,
        memory: &'m mut [u8],
        ranges: &[Range<usize>],
    ) -> Result<Vec<(u32, &'m mut [u8])>> {
        self.check_ranges(operation, ranges, memory)?;
        let parts = carved(memory, <[u8]>::split_at_mut_checked, ranges).map_err(|range| {
            Error::comm(self.rank, operation.name(), format!("bytes {range:?} overlap the range of another process"))
        })?;
        Ok((0..).zip(parts.into_iter().map(Option::unwrap_or_default)).collect())
    }
}

impl Communicator for Mpi {
    type Memory = Vec<u8>;

    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn exchange(
        &self,
        outgoing: &Vec<u8>,
        to: &[Range<usize>],
        incoming: &mut Vec<u8>,
        from: &[Range<usize>],
    ) -> Result<()> {
        let operation = Operation::Exchange;
        self.check_ranges(operation, to, outgoing)?;
        let mut from = self.parts(operation, incoming, from)?;
        from.retain(|(rank, _)| *rank != self.rank);
        self.go(operation, |other| &outgoing[to[other as usize].clone()], from)
    }

    fn all_gather(&self, memory: &mut Vec<u8>, ranges: &[Range<usize>]) -> Result<()> {
        let operation = Operation::AllGather;
        let mut from = self.parts(operation, memory, ranges)?;
        let (_, own) = from.remove(self.rank as usize);
        let own: &[u8] = own;
        self.go(operation, |_| own, from)
    }

    fn traffic(&self) -> Traffic {
        self.counter.traffic()
    }

    fn gather(&self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        let _operating = self.operating.lock().unwrap_or_else(PoisonError::into_inner);
        let Begun { lens, stopped } = self.begin(Operation::Gather, |_| message.len())?;
        let mut all: Vec<Vec<u8>> = lens.into_iter().map(|len| vec![0; len]).collect();
        all[self.rank as usize] = message.to_vec();
        let from = (0..).zip(all.iter_mut().map(Vec::as_mut_slice)).filter(|(rank, _)| *rank != self.rank).collect();
        self.transfer(self.others().map(|other| (other, message)), from);
        stopped.map(|()| all)
    }

    fn check(&self) -> Result<()> {
        let mut state = self.state();
        state.inbox.receive();
        if let Some(gone) = state.inbox.gone() {
            self.end(&state, gone);
        }
        self.first_failure.check("check")?;
        drop(state);
        self.ask()
    }

    fn fail(&self, error: &Error) {
        self.end(&self.state(), PeerFailure::because_of(error, self.rank));
    }

    fn leave(self) -> Result<()> {
        const OP: &str = "leave";
        {
            let mut state = self.state();
            self.first_failure.check(OP)?;
            self.send_to_all(&state, |_| Word::Left);
            state.has_left = true;
        }
        let mut pause = Pause::default();
        loop {
            {
                let mut state = self.state();
                state.inbox.receive();
                if let Some(gone) = state.inbox.gone() {
                    return Err(gone.error(OP));
                }
                if state.inbox.is_complete() {
                    return Ok(());
                }
            }
            (self.going)()?;
            pause.wait();
        }
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        let mut state = self.state();
        self.end(&state, PeerFailure { rank: self.rank, why: DROPPED.into() });
        let inbox = mem::take(&mut state.inbox);
        if !inbox.is_complete() {
            ENDING.lock().unwrap_or_else(PoisonError::into_inner).push(inbox);
        }
    }
}

impl Inbox {
    /// Receives all headers and final messages that have arrived, without waiting.
    fn receive(&mut self) {
        let _turn = turn();
        let world = SimpleCommunicator::world();
        while let Some(found) = world.any_process().immediate_matched_probe_with_tag(self.tag) {
            let (bytes, status) = found.matched_receive_vec::<u8>();
            let from = u32::try_from(status.source_rank()).expect("MPI counts ranks from 0");
            let word = serde_json::from_slice(&bytes).unwrap_or_else(|error| {
                Word::Failed(PeerFailure { rank: from, why: format!("sent an invalid message: {error}").into() })
            });
            self.is_last[from as usize] |= !matches!(word, Word::Header { .. });
            self.words[from as usize].push_back(word);
        }
    }

    /// Returns true if the final messages of all other processes have arrived.
    fn is_complete(&self) -> bool {
        self.is_last.iter().all(|is_last| *is_last)
    }

    /// Returns the failure in a final message that has arrived, if there is one.
    fn gone(&self) -> Option<PeerFailure> {
        self.words.iter().filter_map(VecDeque::back).find_map(Word::gone)
    }

    /// Removes one header of each other process from the inbox, once a header of every process has arrived. Returns,
    /// for each process, the number of bytes that its header announces. Returns `None` if a header is still missing.
    ///
    /// # Errors
    /// The process that does not take part in the operation, with the reason.
    fn headers(&mut self, operation: Operation, number: u64) -> Result<Option<Vec<usize>>, PeerFailure> {
        let firsts = || (0..).zip(self.words.iter().map(VecDeque::front)).filter(|(rank, _)| *rank != self.rank);
        // If several ranks report failures, the original failure is returned, and not one of its consequences.
        if let Some(gone) = firsts().find_map(|(_, word)| word?.gone()) {
            return Err(gone);
        }
        let mut lens = vec![0; self.words.len()];
        let mut is_complete = true;
        for (rank, word) in firsts() {
            match word {
                None => is_complete = false,
                Some(Word::Header { operation: other, number: at, len }) if (*other, *at) == (operation, number) => {
                    lens[rank as usize] = usize::try_from(*len).expect("a length in memory");
                }
                Some(Word::Header { operation: other, number: at, .. }) => {
                    let (other, this) = (other.name(), operation.name());
                    let why = format!("it is in {other} {at}, but this process is in {this} {number}");
                    return Err(PeerFailure { rank, why: why.into() });
                }
                Some(_) => return Err(PeerFailure { rank, why: LEFT.into() }),
            }
        }
        if !is_complete {
            return Ok(None);
        }
        self.words.iter_mut().for_each(|words| drop(words.pop_front()));
        Ok(Some(lens))
    }
}

impl Word {
    fn gone(&self) -> Option<PeerFailure> {
        if let Self::Failed(gone) = self { Some(gone.clone()) } else { None }
    }
}

/// A guard that finalises MPI when it is dropped, if MPI was initialised. It is dropped at the end of `main`, after all
/// communicators are dropped and errors have been printed. After an error, it waits until the other processes have
/// noticed the error, and aborts the job if a process does not notice the error in time.
#[must_use = "MPI is finalised when this is dropped"]
#[derive(Debug, Default)]
pub struct Finalize(());

impl Drop for Finalize {
    fn drop(&mut self) {
        let mut inboxes = mem::take(&mut *ENDING.lock().unwrap_or_else(PoisonError::into_inner));
        let (begun, mut pause) = (Instant::now(), Pause::default());
        loop {
            inboxes.iter_mut().for_each(Inbox::receive);
            inboxes.retain(|inbox| !inbox.is_complete());
            if inboxes.is_empty() {
                break;
            }
            if begun.elapsed() > ENDS_WITHIN {
                SimpleCommunicator::world().abort(1);
            }
            pause.wait();
        }
        drop(turn().take());
    }
}

/// Waits between two polls. The number counts the waits so far: the delay is short at first, because most replies
/// arrive soon, and grows to 1 ms.
#[derive(Default)]
struct Pause(u32);

impl Pause {
    const YIELDS: u32 = 1000;
    const SLEEP: Duration = Duration::from_micros(20);
    const LONGEST_SLEEP: Duration = Duration::from_millis(1);

    fn wait(&mut self) {
        if self.0 < Self::YIELDS {
            thread::yield_now();
        } else {
            let longer = Self::SLEEP * (self.0 - Self::YIELDS + 1).min(1 << 10);
            thread::sleep(longer.min(Self::LONGEST_SLEEP));
        }
        self.0 = self.0.saturating_add(1);
    }
}

fn turn() -> MutexGuard<'static, Option<Universe>> {
    LIBRARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Initialises MPI. Returns the number of this process and the number of processes.
fn initialise() -> Result<(u32, u32)> {
    let mut library = turn();
    let Some((mut universe, level)) = mpi::initialize_with_threading(mpi::Threading::Serialized) else {
        return Err(Error::usage("MPI is already initialised", "connect the processes only once"));
    };
    let world = universe.world();
    let ranks = [world.rank(), world.size()].map(|count| u32::try_from(count).expect("MPI counts from 0"));
    if level < mpi::Threading::Serialized {
        *library = Some(universe);
        return Err(Error::usage(
            format!("this MPI library supports thread level {level:?}, but Serialized is required"),
            "use an MPI library that was built with thread support",
        ));
    }
    universe.set_buffer_size(ranks[1] as usize * BUFFER_A_RANK);
    *library = Some(universe);
    Ok((ranks[0], ranks[1]))
}

fn mpi_rank(rank: u32) -> i32 {
    i32::try_from(rank).expect("MPI counts ranks with 32 bits")
}

/// Failures of processes are read and reported over MPI. [`leave`](super::FailureNotes::leave) of this trait does
/// nothing, because [`Communicator::leave`] leaves the run.
impl super::FailureNotes for Mpi {
    fn check(&self) -> Result<()> {
        Communicator::check(self)
    }

    fn fail(&self, error: &Error) {
        Communicator::fail(self, error);
    }

    fn leave(&self) {}
}
