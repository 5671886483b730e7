//! The communicator of one rank.
//!
//! A communicator is either usable or aborted. After an error in a call of NCCL, peers may wait and buffers may still
//! be in use. Therefore the communicator is aborted before the error is returned, and every later call returns
//! [`Error::Aborted`].

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::{fmt, mem};

use super::device::{DeviceStream, DeviceView, DeviceViewMut};
use super::group::GroupCall;
use super::library::{Library, UniqueId};
use super::wait::Wait;
use crate::raw::{ncclComm_t, ncclConfig_t};
use crate::result::Progress;
use crate::{DataType, Error, RedOp, Result};

/// The number of a rank, together with the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankPosition {
    /// The number of this rank, counted from 0.
    pub rank: usize,
    /// The number of all ranks.
    pub ranks: usize,
}

/// Options of a communicator. NCCL chooses the options that are not set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    max_ctas: Option<u16>,
}

impl Config {
    /// Sets the maximum number of thread blocks of an NCCL kernel (`maxCTAs`). The number should be small if several
    /// ranks share a device.
    #[must_use]
    pub fn max_ctas(self, blocks: u16) -> Self {
        Self { max_ctas: Some(blocks) }
    }

    fn raw(self) -> ncclConfig_t {
        let mut config = ncclConfig_t { blocking: 0, ..ncclConfig_t::INITIALIZER };
        config.maxCTAs = self.max_ctas.map_or(config.maxCTAs, c_int::from);
        config
    }
}

/// The communicator of this rank (`ncclComm_t`).
///
/// Operations are queued on a stream, and are done when the stream is done. If a peer or the network fails, the stream
/// waits forever, and [`Self::status`] returns the error.
pub struct Communicator {
    library: Library,
    /// The handle of the communicator; `None` after an abort.
    comm: Option<NonNull<c_void>>,
    place: RankPosition,
    wait: Wait,
}

// SAFETY: NCCL binds a communicator to a device, not to a thread. Two threads may not use it at the same time, so it is
// not Sync.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Connects to all ranks (`ncclCommInitRankConfig`). All ranks pass the same id and the same number of ranks, but
    /// each rank passes its own number.
    ///
    /// Uses the device whose CUDA context is current in this thread.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Late`] or [`Error::GivenUp`] if not all ranks join, and [`Error::Call`] if there is no device
    /// or NCCL cannot use the device.
    pub fn new(library: &Library, place: RankPosition, id: &UniqueId, config: &Config, wait: Wait) -> Result<Self> {
        const FUNCTION: &str = "ncclCommInitRankConfig";
        let (rank, ranks) = place.checked(FUNCTION)?;
        // SAFETY: the only pointer in the config is null.
        let begun = unsafe { library.nccl().comm_init_rank_config(ranks, id.raw(), rank, &mut config.raw()) };
        let (comm, progress) = begun?;
        let comm = NonNull::new(comm).ok_or_else(|| {
            let why = format!("{} returned no communicator", library.name());
            Error::Argument { function: FUNCTION, why }
        })?;
        let mut this = Self { library: library.clone(), comm: Some(comm), place, wait };
        this.settle(FUNCTION, Ok(progress))?;
        Ok(this)
    }

    /// Returns the number of this rank, and the number of all ranks.
    #[must_use]
    pub fn place(&self) -> RankPosition {
        self.place
    }

    /// Returns the ordinal of the communicator's CUDA device (`ncclCommCuDevice`).
    pub fn device(&self) -> Result<usize> {
        // SAFETY: the communicator is neither destroyed nor aborted, and only this thread has it.
        let device = unsafe { self.library.nccl().comm_cu_device(self.comm()?) }?;
        Ok(usize::try_from(device).unwrap_or_default())
    }

    /// Checks for asynchronous errors (`ncclCommGetAsyncError`), for example a failure of a peer or of the network.
    ///
    /// After an error, drop or abort the communicator, which also stops its kernels on the device.
    pub fn status(&self) -> Result<()> {
        progress(&self.library, self.comm, "ncclCommGetAsyncError").map(drop)
    }

    /// Queues operations on a stream as one group (`ncclGroupStart`, `ncclGroupEnd`), so that no operation waits for
    /// another operation of the group.
    ///
    /// Returns after the operations are queued on the stream. Work that is queued on the stream later runs after these
    /// operations.
    ///
    /// # Errors
    ///
    /// Returns the errors of `body`; nothing is queued then. Any other error aborts the communicator.
    pub fn group<'b>(
        &mut self,
        stream: &impl DeviceStream,
        body: impl for<'g> FnOnce(&mut GroupCall<'g, 'b>) -> Result<()>,
    ) -> Result<()> {
        let comm = self.comm()?;
        let mut group = GroupCall::new(self.place);
        body(&mut group)?;
        if group.is_empty() {
            return Ok(());
        }
        // SAFETY: the communicator is neither destroyed nor aborted, and only this thread has it. DeviceStream and
        // DeviceBuffer guarantee the stream and the memory.
        let queued = unsafe { group.queue(self.library.nccl(), comm, stream.handle()) };
        self.settle("ncclGroupEnd", queued)
    }

    /// Queues a group that consists of one [`GroupCall::send`].
    pub fn send(
        &mut self,
        stream: &impl DeviceStream,
        from: DeviceView<'_>,
        dtype: DataType,
        peer: usize,
    ) -> Result<()> {
        self.group(stream, |group| group.send(from, dtype, peer))
    }

    /// Queues a group that consists of one [`GroupCall::recv`].
    pub fn recv(
        &mut self,
        stream: &impl DeviceStream,
        into: DeviceViewMut<'_>,
        dtype: DataType,
        peer: usize,
    ) -> Result<()> {
        self.group(stream, |group| group.recv(into, dtype, peer))
    }

    /// Queues a group that consists of one [`GroupCall::broadcast`].
    pub fn broadcast(
        &mut self,
        stream: &impl DeviceStream,
        buffer: DeviceViewMut<'_>,
        dtype: DataType,
        root: usize,
    ) -> Result<()> {
        self.group(stream, |group| group.broadcast(buffer, dtype, root))
    }

    /// Queues a group that consists of one [`GroupCall::reduce`].
    pub fn reduce<'b>(
        &mut self,
        stream: &impl DeviceStream,
        send: DeviceView<'b>,
        recv: Option<DeviceViewMut<'b>>,
        dtype: DataType,
        (op, root): (RedOp, usize),
    ) -> Result<()> {
        self.group(stream, |group| group.reduce(send, recv, dtype, (op, root)))
    }

    /// Queues a group that consists of one [`GroupCall::all_gather`].
    pub fn all_gather<'b>(
        &mut self,
        stream: &impl DeviceStream,
        send: DeviceView<'b>,
        recv: DeviceViewMut<'b>,
        dtype: DataType,
    ) -> Result<()> {
        self.group(stream, |group| group.all_gather(send, recv, dtype))
    }

    /// Queues a group that consists of one [`GroupCall::all_reduce`].
    pub fn all_reduce<'b>(
        &mut self,
        stream: &impl DeviceStream,
        send: DeviceView<'b>,
        recv: DeviceViewMut<'b>,
        dtype: DataType,
        op: RedOp,
    ) -> Result<()> {
        self.group(stream, |group| group.all_reduce(send, recv, dtype, op))
    }

    /// Queues a group that consists of one [`GroupCall::all_reduce_in_place`].
    pub fn all_reduce_in_place(
        &mut self,
        stream: &impl DeviceStream,
        buffer: DeviceViewMut<'_>,
        dtype: DataType,
        op: RedOp,
    ) -> Result<()> {
        self.group(stream, |group| group.all_reduce_in_place(buffer, dtype, op))
    }

    /// Queues a group that consists of one [`GroupCall::reduce_scatter`].
    pub fn reduce_scatter<'b>(
        &mut self,
        stream: &impl DeviceStream,
        send: DeviceView<'b>,
        recv: DeviceViewMut<'b>,
        dtype: DataType,
        op: RedOp,
    ) -> Result<()> {
        self.group(stream, |group| group.reduce_scatter(send, recv, dtype, op))
    }

    /// Waits for queued work, and closes the communicator together with all other ranks (`ncclCommFinalize`, then
    /// `ncclCommDestroy`). After an error, aborts the communicator.
    pub fn finalize(mut self) -> Result<()> {
        let comm = self.comm()?;
        // SAFETY: the communicator is neither destroyed nor aborted, and only this thread has it.
        let begun = unsafe { self.library.nccl().comm_finalize(comm) };
        self.settle("ncclCommFinalize", begun)?;
        self.comm = None;
        // SAFETY: the communicator is finalized, and nothing else has the handle.
        unsafe { self.library.nccl().comm_destroy(comm) }.map(drop)
    }

    /// Stops all work, also on the device, and closes the communicator without waiting for the other ranks
    /// (`ncclCommAbort`).
    ///
    /// Operations on a stream then end although they are incomplete, and the stream continues. So after an abort, a
    /// stream that has reached an event does not prove that the operations before the event are complete.
    ///
    /// Dropping the communicator also aborts it, but ignores errors.
    pub fn abort(mut self) -> Result<()> {
        self.abort_now()
    }

    /// Waits until a function that was called is completed. If the function fails, aborts the communicator.
    fn settle(&mut self, function: &'static str, begun: Result<Progress>) -> Result<()> {
        let unsettled = Unsettled(self);
        if begun? == Progress::InProgress {
            let Self { library, comm, wait, .. } = &mut *unsettled.0;
            wait.until_done(function, || progress(library, *comm, function))?;
        }
        mem::forget(unsettled);
        Ok(())
    }

    fn abort_now(&mut self) -> Result<()> {
        match self.comm.take() {
            // SAFETY: nothing else has the handle.
            Some(comm) => unsafe { self.library.nccl().comm_abort(comm.as_ptr()) }.map(drop),
            None => Ok(()),
        }
    }

    fn comm(&self) -> Result<ncclComm_t> {
        self.comm.map(NonNull::as_ptr).ok_or(Error::Aborted)
    }
}

/// A guard for a function that was called but is not completed. When it is dropped, it aborts the communicator, even if
/// the drop is caused by a panic in the watch.
struct Unsettled<'a>(&'a mut Communicator);

impl Drop for Unsettled<'_> {
    fn drop(&mut self) {
        // The caller already has the error that caused the abort. A second error from the abort itself would add
        // nothing.
        let _ = self.0.abort_now();
    }
}

/// Returns the progress of `function`, which was called on the communicator before.
fn progress(library: &Library, comm: Option<NonNull<c_void>>, function: &'static str) -> Result<Progress> {
    let comm = comm.ok_or(Error::Aborted)?;
    // SAFETY: only the owner of the communicator calls this, and takes the handle out of the option before freeing it.
    unsafe { library.nccl().comm_get_async_error(comm.as_ptr(), function) }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let _ = self.abort_now();
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator").field("place", &self.place).field("wait", &self.wait).finish_non_exhaustive()
    }
}

impl RankPosition {
    /// Checks the rank and the number of ranks, and returns both in NCCL's types.
    fn checked(self, function: &'static str) -> Result<(c_int, c_int)> {
        match (c_int::try_from(self.rank), c_int::try_from(self.ranks)) {
            (Ok(rank), Ok(ranks)) if rank < ranks => Ok((rank, ranks)),
            _ => Err(Error::Argument { function, why: format!("there is no rank {} of {}", self.rank, self.ranks) }),
        }
    }
}
