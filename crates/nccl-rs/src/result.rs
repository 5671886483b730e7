//! Functions of NCCL as methods that return a [`Result`], with NCCL's own words for what went wrong.
//!
//! Handles and addresses are raw and counts are elements, as in `nccl.h`. A function that the library lacks is
//! [`Error::Missing`] when it is called, not before: older versions do for programs that call less.

use std::ffi::{OsStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;

use libloading::Library;

use crate::raw::{
    self, NCCL_UNIQUE_ID_BYTES, Table, cudaStream_t, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t,
    ncclResult_t, ncclUniqueId,
};
use crate::{Error, Result, Version};

/// How far a call that did not fail has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a non-blocking communicator may not be used for anything else while it is in progress"]
pub enum Progress {
    /// `ncclSuccess`
    Done,
    /// `ncclInProgress`: ask [`Nccl::comm_get_async_error`] until it is done.
    InProgress,
}

/// A loaded library.
#[derive(Debug)]
pub struct Nccl {
    name: String,
    table: Table,
    /// NCCL has threads that outlive communicators, so it is never unloaded.
    _library: ManuallyDrop<Library>,
}

/// Calls a function of the table and looks at what it returns.
macro_rules! call {
    ($nccl:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let function = $nccl.table.$function.ok_or_else(|| $nccl.missing(stringify!($function)))?;
        // SAFETY: the table has it from a library that is NCCL, as `load` was promised; that arguments are what they
        // have to be was promised by the caller of the method, or they are values of this frame.
        let result = unsafe { function($($argument),*) };
        $nccl.progress(stringify!($function), result)
    }};
}

impl Nccl {
    /// Opens the first of these libraries that can be opened and has `ncclGetVersion`.
    ///
    /// A name without a slash is looked for as `dlopen` does: in `LD_LIBRARY_PATH`, then where the system has libraries.
    ///
    /// # Errors
    ///
    /// [`Error::Load`] with the reason for each of them.
    ///
    /// # Safety
    ///
    /// A file that is found under one of the names must be NCCL, or keep to the declarations of `nccl.h`: it is run.
    pub unsafe fn load<N: AsRef<OsStr>>(names: &[N]) -> Result<Self> {
        let mut tried = Vec::new();
        for name in names {
            // SAFETY: promised by the caller.
            match unsafe { Self::open(name.as_ref()) } {
                Ok(nccl) if nccl.table.ncclGetVersion.is_some() => return Ok(nccl),
                Ok(other) => tried.push(format!("{}, so it is not NCCL", other.missing("ncclGetVersion"))),
                Err(why) => tried.push(why),
            }
        }
        Err(Error::Load { tried })
    }

    /// # Safety
    ///
    /// As for [`Self::load`].
    unsafe fn open(name: &OsStr) -> Result<Self, String> {
        let shown = name.to_string_lossy().into_owned();
        // SAFETY: the caller promises that what is run when the library is loaded is NCCL.
        let library = unsafe { Library::new(name) }.map_err(|error| {
            // What dlopen says is in the source of the error, mostly with the name in front.
            let why = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            if why.starts_with(&shown) { why } else { format!("{shown}: {why}") }
        })?;
        // SAFETY: the caller promises that its functions are those of `nccl.h`; it is never unloaded.
        let table = unsafe { Table::of(&library) };
        Ok(Self { name: shown, table, _library: ManuallyDrop::new(library) })
    }

    /// The file, as it was asked for.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its functions.
    #[must_use]
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// `ncclGetErrorString`: what a code means. Without that function, its name in `nccl.h`.
    #[must_use]
    pub fn error_string(&self, code: ncclResult_t) -> String {
        // SAFETY: it takes any value, and returns null or a constant string.
        let text = self.table.ncclGetErrorString.and_then(|function| unsafe { text(function(code)) });
        text.unwrap_or_else(|| format!("{code:?}"))
    }

    /// `ncclGetLastError`: the last warning that NCCL logged in this process, which may be about something else.
    #[must_use]
    pub fn last_error(&self) -> Option<String> {
        // SAFETY: the communicator is not looked at, and what is returned is null or a buffer that is never freed.
        self.table.ncclGetLastError.and_then(|function| unsafe { text(function(ptr::null_mut())) })
    }

    /// A code as an error of a function, in NCCL's words.
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

    /// `ncclGetVersion`.
    pub fn version(&self) -> Result<Version> {
        let mut code = 0;
        let _ = call!(self, ncclGetVersion(&raw mut code))?;
        Ok(Version::from_code(code.try_into().unwrap_or_default()))
    }

    /// `ncclGetUniqueId`: opens a port of this process, at which the ranks of one communicator will meet.
    pub fn unique_id(&self) -> Result<ncclUniqueId> {
        let mut id = ncclUniqueId { internal: [0; NCCL_UNIQUE_ID_BYTES] };
        let _ = call!(self, ncclGetUniqueId(&raw mut id))?;
        Ok(id)
    }

    /// `ncclCommInitRankConfig`: the communicator of a rank, on the CUDA device that is current in this thread.
    ///
    /// A communicator in progress may be asked how it is, or aborted, and nothing else.
    ///
    /// # Safety
    ///
    /// Pointers in `config` are null or strings.
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
            // SAFETY: NCCL made it, and nobody else has seen it.
            let _ = unsafe { self.comm_abort(comm) };
        }
        Ok((comm, begun?))
    }

    /// `ncclCommGetAsyncError`: what has become of what was started. Also fails with an error of the network.
    ///
    /// The error is that of `function`, which was started.
    ///
    /// # Safety
    ///
    /// `comm` is a communicator of this library, not destroyed or aborted, and not used by another thread meanwhile.
    pub unsafe fn comm_get_async_error(&self, comm: ncclComm_t, function: &'static str) -> Result<Progress> {
        let mut code = raw::ncclSuccess;
        let _ = call!(self, ncclCommGetAsyncError(comm, &raw mut code))?;
        self.progress(function, code)
    }

    /// `ncclCommCount`: how many ranks there are.
    ///
    /// # Safety
    ///
    /// As for [`Self::comm_get_async_error`].
    pub unsafe fn comm_count(&self, comm: ncclComm_t) -> Result<c_int> {
        let mut count = 0;
        let _ = call!(self, ncclCommCount(comm, &raw mut count))?;
        Ok(count)
    }

    /// `ncclCommUserRank`: which of them this one is.
    ///
    /// # Safety
    ///
    /// As for [`Self::comm_get_async_error`].
    pub unsafe fn comm_user_rank(&self, comm: ncclComm_t) -> Result<c_int> {
        let mut rank = 0;
        let _ = call!(self, ncclCommUserRank(comm, &raw mut rank))?;
        Ok(rank)
    }

    /// `ncclCommCuDevice`: the ordinal of its CUDA device.
    ///
    /// # Safety
    ///
    /// As for [`Self::comm_get_async_error`].
    pub unsafe fn comm_cu_device(&self, comm: ncclComm_t) -> Result<c_int> {
        let mut device = 0;
        let _ = call!(self, ncclCommCuDevice(comm, &raw mut device))?;
        Ok(device)
    }

    /// `ncclCommFinalize`: flushes what was queued. When that is done, it may be destroyed.
    ///
    /// # Safety
    ///
    /// As for [`Self::comm_get_async_error`].
    pub unsafe fn comm_finalize(&self, comm: ncclComm_t) -> Result<Progress> {
        call!(self, ncclCommFinalize(comm))
    }

    /// `ncclCommDestroy`: frees it.
    ///
    /// # Safety
    ///
    /// As for [`Self::comm_get_async_error`]; it is never used again.
    pub unsafe fn comm_destroy(&self, comm: ncclComm_t) -> Result<Progress> {
        call!(self, ncclCommDestroy(comm))
    }

    /// `ncclCommAbort`: stops what it does, also kernels that run, and frees it.
    ///
    /// # Safety
    ///
    /// As for [`Self::comm_get_async_error`]; it is never used again.
    pub unsafe fn comm_abort(&self, comm: ncclComm_t) -> Result<Progress> {
        call!(self, ncclCommAbort(comm))
    }

    /// `ncclGroupStart`: calls of this thread are collected from here on.
    pub fn group_start(&self) -> Result<Progress> {
        call!(self, ncclGroupStart())
    }

    /// `ncclGroupEnd`: what was collected is queued on its streams as one.
    pub fn group_end(&self) -> Result<Progress> {
        call!(self, ncclGroupEnd())
    }

    /// `ncclSend`: `count` elements to the rank `peer`, which receives as many of the same type.
    ///
    /// # Safety
    ///
    /// As for [`Self::comm_get_async_error`]. The buffer holds `count` elements, in memory that the device of the
    /// communicator can access, until the work on the stream is done; the stream is one of that device.
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

    /// `ncclRecv`: `count` elements from the rank `peer`, which sends as many of the same type.
    ///
    /// # Safety
    ///
    /// As for [`Self::send`].
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

    /// `ncclBroadcast`: `count` elements of `root` to all ranks; in place where both addresses are the same.
    ///
    /// # Safety
    ///
    /// As for [`Self::send`], for both buffers.
    #[expect(clippy::too_many_arguments, reason = "those of nccl.h")]
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

    /// `ncclReduce`: `count` elements, reduced over all ranks, to rank `root`; other ranks' `recv` is not looked at.
    ///
    /// # Safety
    ///
    /// As for [`Self::send`], for both buffers, of which only the root has `recv`.
    #[expect(clippy::too_many_arguments, reason = "those of nccl.h")]
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

    /// `ncclAllGather`: `count` elements of each rank, one behind the other, to all ranks.
    ///
    /// # Safety
    ///
    /// As for [`Self::send`], where `recv` holds `count` elements of each rank.
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

    /// `ncclAllReduce`: `count` elements, reduced over all ranks, to all of them; in place where both addresses are the
    /// same.
    ///
    /// # Safety
    ///
    /// As for [`Self::send`], for both buffers.
    #[expect(clippy::too_many_arguments, reason = "those of nccl.h")]
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

    /// `ncclReduceScatter`: `count` elements for each rank, reduced over all ranks; the r-th `count` to rank r.
    ///
    /// # Safety
    ///
    /// As for [`Self::send`], where `send` holds `count` elements for each rank.
    #[expect(clippy::too_many_arguments, reason = "those of nccl.h")]
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

/// A C string that another thread may write to: what is there now, up to the size of NCCL's buffer.
///
/// # Safety
///
/// `text` is null, or points to bytes of which one of the first [`LONGEST`] is 0.
unsafe fn text(text: *const c_char) -> Option<String> {
    /// Bytes of `ncclLastError` in `src/debug.cc`.
    const LONGEST: usize = 1024;
    if text.is_null() {
        return None;
    }
    let mut bytes = Vec::new();
    for at in 0..LONGEST {
        // SAFETY: no byte before this one is the 0 at its end.
        match unsafe { text.add(at).read_volatile() }.cast_unsigned() {
            0 => break,
            byte => bytes.push(byte),
        }
    }
    let text = String::from_utf8_lossy(&bytes).trim().to_owned();
    (!text.is_empty()).then_some(text)
}
