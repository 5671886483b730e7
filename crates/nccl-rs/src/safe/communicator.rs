//! A rank among others.
//!
//! It is either usable or gone: what fails after NCCL was asked leaves peers waiting and buffers in use, so the
//! communicator is aborted before the error is returned, and every later call is [`Error::Aborted`].

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::{fmt, mem};

use super::device::{DeviceStream, DeviceView, DeviceViewMut};
use super::group::Group;
use super::library::{Library, UniqueId};
use super::wait::Wait;
use crate::raw::{ncclComm_t, ncclConfig_t};
use crate::result::Progress;
use crate::{DataType, Error, RedOp, Result};

/// Which rank of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// From 0 on.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
}

/// What a communicator is to be like; what is not said, NCCL decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    max_ctas: Option<u16>,
}

impl Config {
    /// How many blocks a kernel may have (`maxCTAs`): few where several ranks share a device.
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

/// This rank's end of a communicator (`ncclComm_t`).
///
/// Operations are queued on a stream, and done when the stream is. Meanwhile [`Self::status`] tells whether a peer or
/// the network is lost, which the stream does not: it would wait for ever.
pub struct Communicator {
    library: Library,
    /// None: aborted.
    comm: Option<NonNull<c_void>>,
    place: Place,
    wait: Wait,
}

// SAFETY: NCCL binds a communicator to a device and not to a thread; it may not be used by two at once, and is not Sync.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Meets all ranks (`ncclCommInitRankConfig`): each calls it with the same id and number of ranks, and a rank of its
    /// own.
    ///
    /// The device is the one whose CUDA context is current in this thread.
    ///
    /// # Errors
    ///
    /// [`Error::Late`] and [`Error::GivenUp`] where not all ranks come; [`Error::Call`] where there is no device, or NCCL
    /// cannot use it as asked.
    pub fn new(library: &Library, place: Place, id: &UniqueId, config: &Config, wait: Wait) -> Result<Self> {
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

    /// Which rank it is of how many.
    #[must_use]
    pub fn place(&self) -> Place {
        self.place
    }

    /// The ordinal of its CUDA device (`ncclCommCuDevice`).
    pub fn device(&self) -> Result<usize> {
        // SAFETY: it is neither destroyed nor aborted, and this thread alone has it.
        let device = unsafe { self.library.nccl().comm_cu_device(self.comm()?) }?;
        Ok(usize::try_from(device).unwrap_or_default())
    }

    /// Whether all is well (`ncclCommGetAsyncError`): an error tells of a peer or a network that is lost since it was used.
    ///
    /// After an error it is to be dropped or aborted, which also ends what runs on the device.
    pub fn status(&self) -> Result<()> {
        progress(&self.library, self.comm, "ncclCommGetAsyncError").map(drop)
    }

    /// Queues operations on a stream as one (`ncclGroupStart`, `ncclGroupEnd`), so that none waits for another.
    ///
    /// Returns when they are on the stream: what is queued there next comes behind them.
    ///
    /// # Errors
    ///
    /// Those of `body`, with nothing queued. Any other aborts the communicator.
    pub fn group<'b>(
        &mut self,
        stream: &impl DeviceStream,
        body: impl for<'g> FnOnce(&mut Group<'g, 'b>) -> Result<()>,
    ) -> Result<()> {
        let comm = self.comm()?;
        let mut group = Group::new(self.place);
        body(&mut group)?;
        if group.is_empty() {
            return Ok(());
        }
        // SAFETY: the communicator is neither destroyed nor aborted, and this thread alone has it. The stream and the
        // memory are what DeviceStream and DeviceBuffer promise.
        let queued = unsafe { group.queue(self.library.nccl(), comm, stream.handle()) };
        self.settle("ncclGroupEnd", queued)
    }

    /// [`Group::send`] by itself.
    pub fn send(
        &mut self,
        stream: &impl DeviceStream,
        from: DeviceView<'_>,
        dtype: DataType,
        peer: usize,
    ) -> Result<()> {
        self.group(stream, |group| group.send(from, dtype, peer))
    }

    /// [`Group::recv`] by itself.
    pub fn recv(
        &mut self,
        stream: &impl DeviceStream,
        into: DeviceViewMut<'_>,
        dtype: DataType,
        peer: usize,
    ) -> Result<()> {
        self.group(stream, |group| group.recv(into, dtype, peer))
    }

    /// [`Group::broadcast`] by itself.
    pub fn broadcast(
        &mut self,
        stream: &impl DeviceStream,
        buffer: DeviceViewMut<'_>,
        dtype: DataType,
        root: usize,
    ) -> Result<()> {
        self.group(stream, |group| group.broadcast(buffer, dtype, root))
    }

    /// [`Group::reduce`] by itself.
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

    /// [`Group::all_gather`] by itself.
    pub fn all_gather<'b>(
        &mut self,
        stream: &impl DeviceStream,
        send: DeviceView<'b>,
        recv: DeviceViewMut<'b>,
        dtype: DataType,
    ) -> Result<()> {
        self.group(stream, |group| group.all_gather(send, recv, dtype))
    }

    /// [`Group::all_reduce`] by itself.
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

    /// [`Group::all_reduce_in_place`] by itself.
    pub fn all_reduce_in_place(
        &mut self,
        stream: &impl DeviceStream,
        buffer: DeviceViewMut<'_>,
        dtype: DataType,
        op: RedOp,
    ) -> Result<()> {
        self.group(stream, |group| group.all_reduce_in_place(buffer, dtype, op))
    }

    /// [`Group::reduce_scatter`] by itself.
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

    /// Lets go of the others when all of them do (`ncclCommFinalize`, then `ncclCommDestroy`), and waits for what is
    /// queued. An error aborts it.
    pub fn finalize(mut self) -> Result<()> {
        let comm = self.comm()?;
        // SAFETY: it is neither destroyed nor aborted, and this thread alone has it.
        let begun = unsafe { self.library.nccl().comm_finalize(comm) };
        self.settle("ncclCommFinalize", begun)?;
        self.comm = None;
        // SAFETY: it is finalized, and nobody has it any more.
        unsafe { self.library.nccl().comm_destroy(comm) }.map(drop)
    }

    /// Stops what it does, also on the device, and lets go of the others, who are not asked (`ncclCommAbort`).
    ///
    /// So does dropping it, without telling whether NCCL could.
    pub fn abort(mut self) -> Result<()> {
        self.abort_now()
    }

    /// Waits for what was started; unless that gets done, it is aborted.
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
            // SAFETY: nobody has it any more.
            Some(comm) => unsafe { self.library.nccl().comm_abort(comm.as_ptr()) }.map(drop),
            None => Ok(()),
        }
    }

    fn comm(&self) -> Result<ncclComm_t> {
        self.comm.map(NonNull::as_ptr).ok_or(Error::Aborted)
    }
}

/// A communicator that may not be used before it is settled; also not after its watch has panicked.
struct Unsettled<'a>(&'a mut Communicator);

impl Drop for Unsettled<'_> {
    fn drop(&mut self) {
        // There is an error that says why; that aborting failed as well would say nothing more.
        let _ = self.0.abort_now();
    }
}

/// How far a communicator of this library is with what was started.
fn progress(library: &Library, comm: Option<NonNull<c_void>>, function: &'static str) -> Result<Progress> {
    let comm = comm.ok_or(Error::Aborted)?;
    // SAFETY: only those who own the communicator ask, and take it out of the option before they free it.
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

impl Place {
    /// Rank and number of ranks as NCCL counts.
    fn checked(self, function: &'static str) -> Result<(c_int, c_int)> {
        match (c_int::try_from(self.rank), c_int::try_from(self.ranks)) {
            (Ok(rank), Ok(ranks)) if rank < ranks => Ok((rank, ranks)),
            _ => Err(Error::Argument { function, why: format!("there is no rank {} of {}", self.rank, self.ranks) }),
        }
    }
}
