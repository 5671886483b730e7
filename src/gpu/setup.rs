//! Setup connects the devices of all processes by NCCL. Either all processes are connected or none.
//!
//! If NCCL fails in one process, the other processes would wait for it. Therefore, during setup, a thread of each
//! process repeatedly gathers the state of all processes over the control communicator, which works without NCCL. Each
//! such gather is a turn. All processes receive the same states in the same turn, and make the same decision.
//! Invariant: unless a process has ended, the control communicator stays usable, and the processes can continue without
//! NCCL.

use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use nccl::{Config, RankPosition, UniqueId, Wait};

use super::Gpu;
use super::nccl_communicator::Nccl;
use super::settings::{SHARE, Sharing};
use super::stream::Stream;
use super::watch::{AbortReason, of_nccl};
use crate::comm::{Communicator, FailureNotes};
use crate::error::{CommError, Error, Result};
use crate::threads;

/// The maximum time that a process waits for NCCL to connect all processes.
const LIMIT: Duration = Duration::from_mins(2);
/// The first delay between two gathers of the states of all processes. Each delay is twice as long as the one before,
/// up to `LONGEST`.
const SHORTEST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_secs(1);
/// The maximum number of thread blocks of an NCCL kernel if processes share a device. The number is small, because the
/// blocks of all processes must run at the same time.
const SHARED_BLOCKS: u16 = 2;

const OP: &str = "meet by NCCL";

/// The outcome of the setup. All processes have the same outcome.
pub enum NcclSetup {
    Met(Nccl),
    /// The GPUs are not connected: processes share a device although they must not (`Usage`), or NCCL failed in a
    /// process. The control communicator is still usable.
    Missed(Error),
}

impl NcclSetup {
    /// Connects the GPUs of all processes of `control` by NCCL. Returns [`NcclSetup::Missed`] if they cannot be
    /// connected. Collective.
    ///
    /// # Errors
    /// `Comm` if a process disappears; otherwise an error of this process, of which the other processes are notified.
    pub fn new<C>(gpu: &Gpu, sharing: Sharing, control: &Arc<C>) -> Result<Self>
    where
        C: Communicator + FailureNotes + 'static,
    {
        let met = meet(gpu, sharing, control).inspect_err(|error| Communicator::fail(&**control, error))?;
        let (peers, stream) = match met {
            Ok(met) => met,
            Err(against) => return Ok(Self::Missed(against)),
        };
        let notes: Arc<dyn FailureNotes> = Arc::<C>::clone(control);
        Ok(Self::Met(Nccl::new(peers, stream, notes)?))
    }
}

impl Nccl {
    /// Connects the GPUs of all processes of `control` by NCCL. Collective.
    ///
    /// # Errors
    /// `Usage` if processes share a device although they must not; `Comm` if a process disappears or cannot connect;
    /// `Device` from NCCL. In all these cases, all processes fail.
    pub fn meet<C>(gpu: &Gpu, sharing: Sharing, control: &Arc<C>) -> Result<Self>
    where
        C: Communicator + FailureNotes + 'static,
    {
        match NcclSetup::new(gpu, sharing, control)? {
            NcclSetup::Met(nccl) => Ok(nccl),
            NcclSetup::Missed(against) => Err(against),
        }
    }
}

/// Returns the NCCL communicator of this process and its stream. The inner error is the reason why a process cannot
/// connect; after it, `control` is still usable. The outer error is an error of `control`.
fn meet<C: Communicator + FailureNotes + 'static>(
    gpu: &Gpu,
    sharing: Sharing,
    control: &Arc<C>,
) -> Result<Result<Made>> {
    let seats = control.gather(&gpu.device.uuid())?;
    if let (Sharing::Refused, Err(shared)) = (sharing, all_differ(&seats)) {
        return Ok(Err(shared));
    }
    let id = match first_word(gpu, &**control)? {
        Ok(id) => id,
        Err(against) => return Ok(Err(against)),
    };
    let (report, ended) = channel();
    let is_off = Arc::new(AtomicBool::new(false));
    let (made, vote) = thread::scope(|scope| -> Result<_> {
        let is_off_now = &is_off;
        let vote = threads::start_scoped(scope, "meeting", move || {
            let vote = talk(&**control, &ended);
            is_off_now.store(!matches!(vote, Ok(None)), Ordering::Relaxed);
            vote
        })?;
        let made = make(gpu, sharing, control, &id, Arc::clone(&is_off));
        let _ = report.send(made.as_ref().map(drop).map_err(AbortReason::clone));
        Ok((made, vote.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))))
    })?;
    let vote = vote.map_err(|error| match error {
        Error::Comm(CommError { rank, detail, hint, .. }) => CommError { rank, op: OP, detail, hint }.into(),
        other => other,
    })?;
    Ok(match (made, vote) {
        (Ok(made), None) => Ok(made),
        (Err(AbortReason::Elsewhere(_)) | Ok(_), Some((rank, words))) if rank != control.rank() => {
            Err(Error::comm(rank, OP, words))
        }
        // This rank's own error is more precise than the error of the vote, which only repeats its text.
        (Err(why), _) => Err(of_nccl(OP, why.words())),
        (Ok(_), Some((_, words))) => Err(of_nccl(OP, &words)),
    })
}

/// Returns the NCCL id that process 0 has created and sent to all processes, or the reason why process 0 could not
/// create it. Collective.
fn first_word<C: Communicator>(gpu: &Gpu, control: &C) -> Result<Result<UniqueId>> {
    let mine = match control.rank() {
        0 => Some(
            gpu.nccl().map_err(str::to_owned).and_then(|nccl| UniqueId::new(nccl).map_err(|error| error.to_string())),
        ),
        _ => None,
    };
    let word = mine.map_or_else(Vec::new, |id| match id {
        Ok(id) => [b"+", id.to_bytes().as_slice()].concat(),
        Err(why) => [b"-", why.as_bytes()].concat(),
    });
    let replies = control.gather(&word)?;
    match replies.first().and_then(|word| word.split_first()) {
        Some((b'-', why)) if control.rank() == 0 => Ok(Err(of_nccl(OP, &String::from_utf8_lossy(why)))),
        Some((b'-', why)) => Ok(Err(Error::comm(0, OP, String::from_utf8_lossy(why)))),
        Some((b'+', id)) if id.len() == UniqueId::BYTES => {
            Ok(Ok(UniqueId::from_bytes(id.try_into().expect("it is as long"))))
        }
        _ => Err(Error::comm(0, OP, "it sent no NCCL id")),
    }
}

/// The connected NCCL communicator of one process, and its stream.
type Made = (nccl::Communicator, Stream);

/// Connects this process by NCCL. Gives up if another process ends, if `is_off` is set because a process cannot
/// connect, or after the time limit.
fn make<C: Communicator + Send + 'static>(
    gpu: &Gpu,
    sharing: Sharing,
    control: &Arc<C>,
    id: &UniqueId,
    is_off: Arc<AtomicBool>,
) -> Result<Made, AbortReason> {
    let is_met = Arc::new(AtomicBool::new(false));
    let wait = {
        let (control, is_met) = (Arc::clone(control), Arc::clone(&is_met));
        // After setup there is no time limit, because a peer may be late due to a slow disk.
        Wait::up_to(Duration::MAX).watching(move |waited| match control.check() {
            Err(gone) => ControlFlow::Break(gone.to_string()),
            Ok(()) if is_met.load(Ordering::Relaxed) => ControlFlow::Continue(()),
            Ok(()) if is_off.load(Ordering::Relaxed) => {
                ControlFlow::Break(String::from("another process cannot connect"))
            }
            Ok(()) if waited > LIMIT => {
                ControlFlow::Break(format!("not all processes connected within {} s", LIMIT.as_secs()))
            }
            Ok(()) => ControlFlow::Continue(()),
        })
    };
    let config = match sharing {
        Sharing::Refused => Config::default(),
        Sharing::Allowed => Config::default().max_ctas(SHARED_BLOCKS),
    };
    let place = RankPosition { rank: control.rank() as usize, ranks: control.size() as usize };
    let here = |error: Error| AbortReason::Here(error.to_string());
    gpu.device.bind().map_err(here)?;
    let nccl = gpu.nccl().map_err(|why| AbortReason::Here(why.to_owned()))?;
    let peers = nccl::Communicator::new(nccl, place, id, &config, wait)?;
    let stream = Stream::new(&gpu.device).map_err(here)?;
    is_met.store(true, Ordering::Relaxed);
    Ok((peers, stream))
}

/// Gathers the states of all processes again and again. `ended` receives the outcome of connecting this process.
/// Returns `None` when all processes are connected, or the number and the message of a process that failed.
fn talk(control: &impl Communicator, ended: &Receiver<Result<(), AbortReason>>) -> Result<Option<(u32, String)>> {
    let mut mine = None;
    let mut pause = SHORTEST;
    loop {
        match &mine {
            None => match ended.recv_timeout(pause) {
                Ok(end) => mine = Some((end, Instant::now())),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(Error::comm(control.rank(), OP, "it has ended")),
            },
            Some((Err(_), _)) => thread::sleep(pause),
            // This rank is connected, but other ranks are not.
            Some((Ok(()), _)) => {}
        }
        pause = LONGEST.min(pause * 2);
        let word = match &mine {
            Some((Ok(()), _)) => b"+".to_vec(),
            // This rank waits before it reports its failure. If another rank has ended, gathering fails in the
            // meantime, which ends this loop. If another rank has caused the failure, that rank reports it first.
            Some((Err(why), since)) if since.elapsed() < why.grace_period() => Vec::new(),
            Some((Err(why), _)) => [b"-", why.words().as_bytes()].concat(),
            None => Vec::new(),
        };
        let replies = control.gather(&word)?;
        let against = (0..).zip(&replies).find(|(_, word)| word.starts_with(b"-"));
        if let Some((rank, word)) = against {
            return Ok(Some((rank, String::from_utf8_lossy(&word[1..]).into_owned())));
        }
        if replies.iter().all(|word| word == b"+") {
            return Ok(None);
        }
    }
}

/// Returns an error if two processes use the same device.
fn all_differ(uuids: &[Vec<u8>]) -> Result<()> {
    for (second, uuid) in uuids.iter().enumerate() {
        if let Some(first) = uuids[..second].iter().position(|other| other == uuid) {
            let what = format!("processes {first} and {second} use the same GPU ({})", words(uuid));
            let hint = format!(
                "start one process for each GPU, or set CUDA_VISIBLE_DEVICES to a different GPU for each process; \
                 {SHARE}=1 is for tests"
            );
            return Err(Error::usage(what, hint));
        }
    }
    Ok(())
}

/// Formats a device id as `nvidia-smi -L` does: `GPU-5d2e...`.
fn words(uuid: &[u8]) -> String {
    uuid.iter().enumerate().fold("GPU-".to_owned(), |mut text, (at, byte)| {
        let dash = if [4, 6, 8, 10].contains(&at) { "-" } else { "" };
        let _ = write!(text, "{dash}{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Local;

    #[test]
    fn two_ranks_of_one_device_are_named() {
        let uuids = |last: u8| [0, 1, 2, last].map(|number| [number; 16].to_vec());
        assert!(all_differ(&uuids(3)).is_ok());
        let error = all_differ(&uuids(1)).unwrap_err();
        assert_eq!(error.to_string(), "processes 1 and 3 use the same GPU (GPU-01010101-0101-0101-0101-010101010101)");
        assert!(error.hint().unwrap().contains(SHARE));
    }

    fn talks(ends: &[fn() -> Result<(), AbortReason>]) -> Vec<Option<(u32, String)>> {
        let ranks = Local::fleet(u32::try_from(ends.len()).unwrap()).into_iter().zip(ends);
        let ranks: Vec<_> = ranks
            .map(|(local, end)| {
                let end = *end;
                thread::spawn(move || {
                    let (report, ended) = channel();
                    report.send(end()).unwrap();
                    let vote = talk(&local, &ended).unwrap();
                    // The failed setup has not changed the control communicator.
                    local.barrier().unwrap();
                    local.leave().unwrap();
                    vote
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    #[test]
    fn all_hear_of_the_one_that_fails_by_itself() {
        let met = || Ok(());
        assert_eq!(talks(&[met, met, met]), [const { None }; 3]);
        let late = || {
            thread::sleep(Duration::from_millis(60));
            Err(AbortReason::Here("no network".into()))
        };
        let remote = || Err(AbortReason::Elsewhere("a peer is lost".into()));
        assert_eq!(talks(&[remote, met, late]), vec![Some((2, String::from("no network"))); 3]);
    }
}
