//! Meeting: how ranks come to have NCCL between their devices, all of them or none.
//!
//! NCCL that fails on one rank leaves the others waiting for that one. So while it meets, a thread of each rank tells all
//! others over the control how it goes here, turn by turn: all hear the same words in the same turn, and come to one
//! result. Invariant: unless a rank is gone, the control is as it was, and ranks can do without NCCL.

use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use nccl::{Config, Place, UniqueId, Wait};

use super::Gpu;
use super::communicator::Nccl;
use super::settings::{SHARE, Sharing};
use super::stream::Stream;
use super::watch::{AbortReason, of_nccl};
use crate::comm::{Communicator, FailureNotes};
use crate::error::{CommError, Error, Result};
use crate::threads;

/// How long ranks that all are there may take to meet.
const LIMIT: Duration = Duration::from_mins(2);
/// Pauses between two turns; each is twice as long as the one before.
const SHORTEST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_secs(1);
/// Blocks of a kernel of NCCL where ranks share a device: all of them have to run at once.
const SHARED_BLOCKS: u16 = 2;

const OP: &str = "meet by NCCL";

/// How ranks come out of it, all alike.
pub enum NcclSetup {
    Met(Nccl),
    /// They share devices and may not (`Usage`), or NCCL fails on one of them. They still have each other.
    Missed(Error),
}

impl NcclSetup {
    /// Meet the other ranks of `control`, all of which do the same.
    ///
    /// # Errors
    /// `Comm` where one goes away; what stops this one. The others are told.
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
    /// Meet the other ranks of `control`, all of which do the same.
    ///
    /// # Errors
    /// `Usage` where ranks share a device and may not; `Comm` where one goes away, or cannot meet; `Device` from NCCL.
    /// All ranks fail then.
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

/// What this rank gets of it, or what is against it on one of them.
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
    let (tell, ended) = channel();
    let is_off = Arc::new(AtomicBool::new(false));
    let (made, heard) = thread::scope(|scope| -> Result<_> {
        let is_off_now = &is_off;
        let heard = threads::start_scoped(scope, "meeting", move || {
            let heard = talk(&**control, &ended);
            is_off_now.store(!matches!(heard, Ok(None)), Ordering::Relaxed);
            heard
        })?;
        let made = make(gpu, sharing, control, &id, Arc::clone(&is_off));
        let _ = tell.send(made.as_ref().map(drop).map_err(AbortReason::clone));
        Ok((made, heard.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))))
    })?;
    let heard = heard.map_err(|error| match error {
        Error::Comm(CommError { rank, detail, hint, .. }) => CommError { rank, op: OP, detail, hint }.into(),
        other => other,
    })?;
    Ok(match (made, heard) {
        (Ok(made), None) => Ok(made),
        (Err(AbortReason::Elsewhere(_)) | Ok(_), Some((rank, words))) if rank != control.rank() => {
            Err(Error::comm(rank, OP, words))
        }
        // What it has met with itself it knows best.
        (Err(why), _) => Err(of_nccl(OP, why.words())),
        (Ok(_), Some((_, words))) => Err(of_nccl(OP, &words)),
    })
}

/// The id that all meet by, from the first rank, or why that has none.
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
    let said = control.gather(&word)?;
    match said.first().and_then(|word| word.split_first()) {
        Some((b'-', why)) if control.rank() == 0 => Ok(Err(of_nccl(OP, &String::from_utf8_lossy(why)))),
        Some((b'-', why)) => Ok(Err(Error::comm(0, OP, String::from_utf8_lossy(why)))),
        Some((b'+', id)) if id.len() == UniqueId::BYTES => {
            Ok(Ok(UniqueId::from_bytes(id.try_into().expect("it is as long"))))
        }
        _ => Err(Error::comm(0, OP, "it has no id for NCCL")),
    }
}

/// What a rank has of a meeting.
type Made = (nccl::Communicator, Stream);

/// This rank's side of it, unless it is off.
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
        // Later a peer may be late because its disk is.
        Wait::up_to(Duration::MAX).watching(move |waited| match control.check() {
            Err(gone) => ControlFlow::Break(gone.to_string()),
            Ok(()) if is_met.load(Ordering::Relaxed) => ControlFlow::Continue(()),
            Ok(()) if is_off.load(Ordering::Relaxed) => ControlFlow::Break(String::from("another process cannot meet")),
            Ok(()) if waited > LIMIT => {
                ControlFlow::Break(format!("not all processes have come within {} s", LIMIT.as_secs()))
            }
            Ok(()) => ControlFlow::Continue(()),
        })
    };
    let config = match sharing {
        Sharing::Refused => Config::default(),
        Sharing::Allowed => Config::default().max_ctas(SHARED_BLOCKS),
    };
    let place = Place { rank: control.rank() as usize, ranks: control.size() as usize };
    let here = |error: Error| AbortReason::Here(error.to_string());
    gpu.device.bind().map_err(here)?;
    let nccl = gpu.nccl().map_err(|why| AbortReason::Here(why.to_owned()))?;
    let peers = nccl::Communicator::new(nccl, place, id, &config, wait)?;
    let stream = Stream::new(&gpu.device).map_err(here)?;
    is_met.store(true, Ordering::Relaxed);
    Ok((peers, stream))
}

/// Tell all others, turn by turn, how it goes here, until all have met, or one says why it has not: that one.
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
            // The others take their time.
            Some((Ok(()), _)) => {}
        }
        pause = LONGEST.min(pause * 2);
        let word = match &mine {
            Some((Ok(()), _)) => b"+".to_vec(),
            // A rank that is gone ends the talk meanwhile; and whoever it is because of speaks first.
            Some((Err(why), since)) if since.elapsed() < why.patience() => Vec::new(),
            Some((Err(why), _)) => [b"-", why.words().as_bytes()].concat(),
            None => Vec::new(),
        };
        let said = control.gather(&word)?;
        let against = (0..).zip(&said).find(|(_, word)| word.starts_with(b"-"));
        if let Some((rank, word)) = against {
            return Ok(Some((rank, String::from_utf8_lossy(&word[1..]).into_owned())));
        }
        if said.iter().all(|word| word == b"+") {
            return Ok(None);
        }
    }
}

/// An error where two ranks have one device.
fn all_differ(uuids: &[Vec<u8>]) -> Result<()> {
    for (second, uuid) in uuids.iter().enumerate() {
        if let Some(first) = uuids[..second].iter().position(|other| other == uuid) {
            let what = format!("processes {first} and {second} have one GPU ({})", words(uuid));
            let hint = format!("start a process for each GPU, or show each another one; {SHARE}=1 is for tests");
            return Err(Error::usage(what, hint));
        }
    }
    Ok(())
}

/// `GPU-5d2e..`, as `nvidia-smi -L` has it.
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
        assert_eq!(error.to_string(), "processes 1 and 3 have one GPU (GPU-01010101-0101-0101-0101-010101010101)");
        assert!(error.hint().unwrap().contains(SHARE));
    }

    fn talks(ends: &[fn() -> Result<(), AbortReason>]) -> Vec<Option<(u32, String)>> {
        let ranks = Local::fleet(u32::try_from(ends.len()).unwrap()).into_iter().zip(ends);
        let ranks: Vec<_> = ranks
            .map(|(local, end)| {
                let end = *end;
                thread::spawn(move || {
                    let (tell, ended) = channel();
                    tell.send(end()).unwrap();
                    let heard = talk(&local, &ended).unwrap();
                    // As it was.
                    local.barrier().unwrap();
                    local.leave().unwrap();
                    heard
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
