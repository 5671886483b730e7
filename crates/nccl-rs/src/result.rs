//! The functions of NCCL as methods that return a [`Result`] with NCCL's error text.
//!
//! Handles and addresses are raw, and counts are in elements, as in `nccl.h`. If the library does not have a function,
//! the call returns [`Error::Missing`]. Therefore a program works with older versions if it does not call newer
//! functions.

use std::ffi::{OsStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;

use libloading::Library;

use crate::raw::{
    self, NCCL_UNIQUE_ID_BYTES, Table, cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t,
    ncclResult_t, ncclUniqueId,
};
use crate::{Error, Result, Version};

/// The state of an NCCL call that returned no error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a non-blocking communicator may not be used for anything else while it is in progress"]
pub enum Progress {
    /// `ncclSuccess`: the call is done.
    Done,
    /// `ncclInProgress`: the call is not done. Poll [`Nccl::comm_get_async_error`] until it is done.
    InProgress,
}

/// The loaded NCCL library, with its function table.
#[derive(Debug)]
pub struct Nccl {
    name: String,
    table: Table,
    /// The library handle. The library is never unloaded, because NCCL has threads that outlive communicators.
    _library: ManuallyDrop<Library>,
}

/// Calls a function of the function table and checks its return code.
macro_rules! call {
    ($nccl:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let function = $nccl.table.$function.ok_or_else(|| $nccl.missing(stringify!($function)))?;
        // SAFETY: the caller of `load` guarantees that the library is NCCL. The arguments are guaranteed by the caller
        // of the method, or they are values of this frame.
        let result = unsafe { function($($argument),*) };
        $nccl.progress(stringify!($function), result)
    }};
}

impl Nccl {
    /// Opens the first library in `names` that can be opened and that has the function `ncclGetVersion`.
    ///
    /// A name without a slash is searched as by `dlopen`: in `LD_LIBRARY_PATH`, and then in the library folders of the
    /// system.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Load`] with the reason for each name that could not be opened.
    ///
    /// # Safety
    ///
    /// Each file with one of these names must be NCCL, or follow the declarations of `nccl.h`, because its code is run.
    pub unsafe fn load<N: AsRef<OsStr>>(names: &[N]) -> Result<Self> {
        let mut tried = Vec::new();
        for name in names {
            // SAFETY: guaranteed by the caller.
            match unsafe { Self::open(name.as_ref()) } {
                Ok(nccl) if nccl.table.ncclGetVersion.is_some() => return Ok(nccl),
                Ok(other) => tried.push(format!("{}, so it is not NCCL", other.missing("ncclGetVersion"))),
                Err(why) => tried.push(why),
            }
        }
        Err(Error::Load { tried })
    }

    /// Opens one library and looks up its functions.
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::load`] hold.
    unsafe fn open(name: &OsStr) -> Result<Self, String> {
        let shown = name.to_string_lossy().into_owned();
        // SAFETY: the caller guarantees that the library is NCCL; loading it runs its initialisers.
        let library = unsafe { Library::new(name) }.map_err(|error| {
            // The message of dlopen is the source of the error. It usually begins with the file name.
            let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            if why.starts_with(&shown) { why } else { format!("{shown}: {why}") }
        })?;
        // SAFETY: the caller guarantees that its functions are those of `nccl.h`; it is never unloaded.
        let table = unsafe { Table::of(&library) };
        Ok(Self { name: shown, table, _library: ManuallyDrop::new(library) })
    }

    /// Returns the file name with which the library was loaded.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the table of NCCL's functions.
    #[must_use]
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Returns the text that describes a code (`ncclGetErrorString`). If the library does not have this function,
    /// returns the name of the code in `nccl.h`.
    #[must_use]
    pub fn error_string(&self, code: ncclResult_t) -> String {
        // SAFETY: the function takes any value, and returns null or a constant string.
        let text = self.table.ncclGetErrorString.and_then(|function| unsafe { text(function(code)) });
        text.unwrap_or_else(|| format!("{code:?}"))
    }

    /// Returns the last warning that NCCL logged in this process (`ncclGetLastError`). The warning may be about another
    /// call.
    #[must_use]
    pub fn last_error(&self) -> Option<String> {
        // SAFETY: the function ignores the communicator, and returns null or a buffer that is never freed.
        self.table.ncclGetLastError.and_then(|function| unsafe { text(function(ptr::null_mut())) })
    }

    /// Returns the error for a function that returned this code. The error contains NCCL's text for the code.
    #[must_use]
    pub fn error(&self, function: &'static str, code: ncclResult_t) -> Error {
        Error::Call { function, code, text: self.error_string(code), last: self.last_error() }
    }

    fn missing(&self, symbol: &'static str) -> Error {
        Error::Missing { library: self.name.clone(), symbol }
    }

    fn progress(&self, function: &'static str, code: ncclResult_t) -> Result<Progress> {
        match code {
            raw::ncclSuccess => Ok(Progress::Done),
            raw::ncclInProgress => Ok(Progress::InProgress),
            _ => Err(self.error(function, code)),
        }
    }

    /// Returns the version of NCCL (`ncclGetVersion`).
    pub fn version(&self) -> Result<Version> {
        let mut code = 0;
        let _ = call!(self, ncclGetVersion(&raw mut code))?;
        Ok(Version::from_code(code.try_into().unwrap_or_default()))
    }

    /// Creates a unique id (`ncclGetUniqueId`). The call opens a port of this process, to which the ranks of one
    /// communicator connect.
    pub fn unique_id(&self) -> Result<ncclUniqueId> {
        let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
        let _ = call!(self, ncclGetUniqueId(&raw mut id))?;
        Ok(id)
    }

    /// Creates the communicator of a rank (`ncclCommInitRankConfig`), on the CUDA device that is current in this
    /// thread.
    ///
    /// While the creation is in progress, the communicator may only be polled or aborted.
    ///
    /// # Safety
    ///
    /// Each pointer in `config` is null or points to a string.
    pub unsafe fn comm_init_rank_config(
        &self,
        ranks: c_int,
        id: ncclUniqueId,
        rank: c_int,
        config: &mut ncclConfig_t,
    ) -> Result<(ncclComm_t, Progress)> {
        let mut comm = ptr::null_mut();
        let begun = call!(self, ncclCommInitRankConfig(&raw mut comm, ranks, id, rank, ptr::from_mut(config)));
        if begun.is_err() && !comm.is_null() {
            // SAFETY: NCCL created it, and nothing else has the handle.
            let _ = unsafe { self.comm_abort(comm) };
        }
        Ok((comm, begun?))
    }

    /// Returns the progress of `function`, which was called before and is not done (`ncclCommGetAsyncError`). Also
    /// returns errors of the network.
    ///
    /// An error names `function`.
    ///
    /// # Safety
    ///
    /// `comm` is a communicator of this library, and is neither destroyed nor aborted. No other thread uses this
    /// communicator at the same time.
    pub unsafe fn comm_get_async_error(&self, comm: ncclComm_t, function: &'static str) -> Result<Progress> {
        let mut code = raw::ncclSuccess;
        let _ = call!(self, ncclCommGetAsyncError(comm, &raw mut code))?;
        self.progress(function, code)
    }

    /// Returns the number of ranks (`ncclCommCount`).
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::comm_get_async_error`] hold.
    pub unsafe fn comm_count(&self, comm: ncclComm_t) -> Result<c_int> {
        let mut count = 0;
        let _ = call!(self, ncclCommCount(comm, &raw mut count))?;
        Ok(count)
    }

    /// Returns the rank of this communicator (`ncclCommUserRank`).
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::comm_get_async_error`] hold.
    pub unsafe fn comm_user_rank(&self, comm: ncclComm_t) -> Result<c_int> {
        let mut rank = 0;
        let _ = call!(self, ncclCommUserRank(comm, &raw mut rank))?;
        Ok(rank)
    }

    /// Returns the ordinal of the communicator's CUDA device (`ncclCommCuDevice`).
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::comm_get_async_error`] hold.
    pub unsafe fn comm_cu_device(&self, comm: ncclComm_t) -> Result<c_int> {
        let mut device = 0;
        let _ = call!(self, ncclCommCuDevice(comm, &raw mut device))?;
        Ok(device)
    }

    /// Completes the queued operations (`ncclCommFinalize`). After that, the communicator may be destroyed.
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::comm_get_async_error`] hold.
    pub unsafe fn comm_finalize(&self, comm: ncclComm_t) -> Result<Progress> {
        call!(self, ncclCommFinalize(comm))
    }

    /// Frees the communicator (`ncclCommDestroy`).
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::comm_get_async_error`] hold, and the communicator is never used again.
    pub unsafe fn comm_destroy(&self, comm: ncclComm_t) -> Result<Progress> {
        call!(self, ncclCommDestroy(comm))
    }

    /// Stops all work of the communicator, including running kernels, and frees the communicator (`ncclCommAbort`).
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::comm_get_async_error`] hold, and the communicator is never used again.
    pub unsafe fn comm_abort(&self, comm: ncclComm_t) -> Result<Progress> {
        call!(self, ncclCommAbort(comm))
    }

    /// Starts a group (`ncclGroupStart`): NCCL collects the following calls of this thread.
    pub fn group_start(&self) -> Result<Progress> {
        call!(self, ncclGroupStart())
    }

    /// Ends a group (`ncclGroupEnd`): NCCL queues the collected calls on their streams together.
    pub fn group_end(&self) -> Result<Progress> {
        call!(self, ncclGroupEnd())
    }

    /// Sends `count` elements to the rank `peer`, which must receive the same number of elements of the same type
    /// (`ncclSend`).
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::comm_get_async_error`] hold. The buffer contains `count` elements. The device of the
    /// communicator can access this memory until the work on the stream is done. The stream is a stream of that device.
    pub unsafe fn send(
        &self,
        buffer: *const c_void,
        count: usize,
        datatype: ncclDataType_t,
        peer: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<Progress> {
        call!(self, ncclSend(buffer, count, datatype, peer, comm, stream))
    }

    /// Receives `count` elements from the rank `peer`, which must send the same number of elements of the same type
    /// (`ncclRecv`).
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::send`] hold.
    pub unsafe fn recv(
        &self,
        buffer: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        peer: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<Progress> {
        call!(self, ncclRecv(buffer, count, datatype, peer, comm, stream))
    }

    /// Copies `count` elements of `root` to all ranks (`ncclBroadcast`). The operation is in place if both addresses
    /// are equal.
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::send`] hold for both buffers.
    #[expect(clippy::too_many_arguments, reason = "the arguments of nccl.h")]
    pub unsafe fn broadcast(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        root: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<Progress> {
        call!(self, ncclBroadcast(send, recv, count, datatype, root, comm, stream))
    }

    /// Reduces `count` elements over all ranks. The rank `root` gets the result (`ncclReduce`). NCCL ignores `recv` on
    /// other ranks.
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::send`] hold for `send`, and at the root also for `recv`.
    #[expect(clippy::too_many_arguments, reason = "the arguments of nccl.h")]
    pub unsafe fn reduce(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        root: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<Progress> {
        call!(self, ncclReduce(send, recv, count, datatype, op, root, comm, stream))
    }

    /// Gathers `count` elements of each rank, in rank order. All ranks get the result (`ncclAllGather`).
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::send`] hold; `recv` has `count` elements for each rank.
    pub unsafe fn all_gather(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<Progress> {
        call!(self, ncclAllGather(send, recv, count, datatype, comm, stream))
    }

    /// Reduces `count` elements over all ranks. All ranks get the result (`ncclAllReduce`). The operation is in place
    /// if both addresses are equal.
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::send`] hold for both buffers.
    #[expect(clippy::too_many_arguments, reason = "the arguments of nccl.h")]
    pub unsafe fn all_reduce(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<Progress> {
        call!(self, ncclAllReduce(send, recv, count, datatype, op, comm, stream))
    }

    /// Reduces `ranks * count` elements over all ranks, in `ranks` parts of `count` elements. Rank r gets part r of the
    /// result (`ncclReduceScatter`).
    ///
    /// # Safety
    ///
    /// The conditions of [`Self::send`] hold; `send` has `count` elements for each rank.
    #[expect(clippy::too_many_arguments, reason = "the arguments of nccl.h")]
    pub unsafe fn reduce_scatter(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        datatype: ncclDataType_t,
        op: ncclRedOp_t,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Result<Progress> {
        call!(self, ncclReduceScatter(send, recv, count, datatype, op, comm, stream))
    }
}

/// Copies a C string that another thread may change at the same time. Reads at most as many bytes as NCCL's buffer has.
///
/// # Safety
///
/// `text` is null, or one of the first `LONGEST` bytes at `text` is 0.
unsafe fn text(text: *const c_char) -> Option<String> {
    /// The size in bytes of NCCL's buffer `ncclLastError` (in `src/debug.cc`).
    const LONGEST: usize = 1024;
    if text.is_null() {
        return None;
    }
    let mut bytes = Vec::new();
    for at in 0..LONGEST {
        // SAFETY: no earlier byte is 0, so this byte is still part of the string.
        match unsafe { text.add(at).read_volatile() }.to_ne_bytes()[0] {
            0 => break,
            byte => bytes.push(byte),
        }
    }
    let text = String::from_utf8_lossy(&bytes).trim().to_owned();
    (!text.is_empty()).then_some(text)
}
