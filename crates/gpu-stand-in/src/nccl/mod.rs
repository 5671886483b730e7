//! `libnccl`: the functions that `dtshard` uses, as `nccl.h` 2.30 declares them. Ranks are processes that send data
//! over the loopback interface.

mod bootstrap;
mod communicator;
mod group;
mod operation;
mod reduce;

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

pub use communicator::Communicator;

use crate::entry::{self, entries};
use crate::machine::{self, Machine};
use bootstrap::{RankPosition, UniqueId};
use operation::{Collected, What};

/// An error code of NCCL: `ncclResult_t`. Code 0 is success.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Code(pub u32);

impl Code {
    pub const SUCCESS: Self = Self(0);
    pub const CUDA_ERROR: Self = Self(1);
    pub const SYSTEM_ERROR: Self = Self(2);
    pub const INVALID_ARGUMENT: Self = Self(4);
    pub const INVALID_USAGE: Self = Self(5);
    pub const REMOTE_ERROR: Self = Self(6);
    pub const IN_PROGRESS: Self = Self(7);

    fn text(self) -> &'static CStr {
        match self {
            Self::SUCCESS => c"no error",
            Self::CUDA_ERROR => c"unhandled cuda error",
            Self::SYSTEM_ERROR => c"unhandled system error",
            Self::INVALID_ARGUMENT => c"invalid argument",
            Self::INVALID_USAGE => c"invalid usage",
            Self::REMOTE_ERROR => c"remote process exited or there was a network error",
            Self::IN_PROGRESS => c"NCCL operation in progress",
            _ => c"unknown result code",
        }
    }
}

pub type Answer<T = ()> = Result<T, Code>;

/// The version code of NCCL 2.30.7.
const VERSION: c_int = 23_007;
const CONFIG_MAGIC: c_uint = 0xcafe_beef;

/// The first fields of `ncclConfig_t`, which are the same in all versions.
#[derive(Clone, Copy)]
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

/// The string that `ncclGetLastError` returns. The string is never freed. The pointer is null if there was no error.
static LAST_ERROR: AtomicPtr<c_char> = AtomicPtr::new(ptr::null_mut());

/// Prints the reason of an error, and returns the code of the error.
pub fn refused(code: Code, why: &str) -> Code {
    eprintln!("gpu-stand-in: NCCL: {why}");
    LAST_ERROR.store(CString::new(why).unwrap_or_default().into_raw(), Ordering::Release);
    code
}

/// Writes a result to the address that the caller has passed. Returns an error if the address is null or not aligned.
fn put<T>(place: *mut T, value: T) -> Answer {
    entry::put(place, value).map_err(|_| refused(Code::INVALID_ARGUMENT, "the pointer for the result is null"))
}

/// Returns the communicator that a handle identifies.
fn known(handle: usize) -> Answer<Arc<Communicator>> {
    let found = Machine::start().tables().communicators.get(&handle).cloned();
    found.ok_or_else(|| refused(Code::INVALID_ARGUMENT, "the communicator does not exist, or was destroyed"))
}

/// Removes the communicator that a handle identifies from the table, and returns it.
fn taken(handle: usize) -> Answer<Arc<Communicator>> {
    let found = Machine::start().tables().communicators.remove(&handle);
    found.ok_or_else(|| {
        refused(Code::INVALID_ARGUMENT, "the communicator to destroy does not exist, or was destroyed before")
    })
}

/// Returns the current result of a communicator. It is a code other than success if a call is in progress or has failed.
fn now(communicator: &Communicator) -> Answer {
    match communicator.result() {
        Code::SUCCESS => Ok(()),
        other => Err(other),
    }
}

/// Creates a communicator and starts to connect it to its peers.
fn begin(handle: *mut usize, ranks: c_int, id: UniqueId, rank: c_int, blocking: bool) -> Answer {
    put(handle, 0)?;
    let device = machine::current().ok_or_else(|| refused(Code::CUDA_ERROR, "no CUDA context is current"))?;
    let number = |value: c_int| usize::try_from(value).map_err(|_| refused(Code::INVALID_ARGUMENT, "a negative rank"));
    let place = RankPosition { rank: number(rank)?, ranks: number(ranks)?, device };
    if place.rank >= place.ranks {
        return Err(refused(Code::INVALID_ARGUMENT, "there is no such rank"));
    }
    let new = Communicator::begin(place, id, blocking);
    let name = {
        let mut tables = Machine::start().tables();
        let name = tables.handle();
        tables.communicators.insert(name, Arc::clone(&new));
        name
    };
    put(handle, name)?;
    if blocking {
        new.settled();
    }
    now(&new)
}

entries! {
    fn ncclGetVersion(version: *mut c_int) {
        put(version, VERSION)
    }

    fn ncclGetUniqueId(id: *mut UniqueId) {
        put(id, UniqueId::listen()?)
    }

    fn ncclCommInitRankConfig(handle: *mut usize, ranks: c_int, id: UniqueId, rank: c_int, config: *const Config) {
        if config.is_null() || !config.is_aligned() {
            return Err(refused(Code::INVALID_ARGUMENT, "the config is null"));
        }
        // SAFETY: as in C, the caller of the library guarantees a config at this address. All versions of the config
        // have these fields.
        let config = unsafe { config.read() };
        if config.magic != CONFIG_MAGIC || config.size < size_of::<Config>() {
            return Err(refused(Code::INVALID_ARGUMENT, "the config is not initialized"));
        }
        begin(handle, ranks, id, rank, config.blocking != 0)
    }

    fn ncclCommInitRank(handle: *mut usize, ranks: c_int, id: UniqueId, rank: c_int) {
        begin(handle, ranks, id, rank, true)
    }

    fn ncclCommGetAsyncError(handle: usize, error: *mut Code) {
        put(error, known(handle)?.result())
    }

    fn ncclCommCount(handle: usize, count: *mut c_int) {
        put(count, c_int::try_from(known(handle)?.place().ranks).map_err(|_| Code::INVALID_ARGUMENT)?)
    }

    fn ncclCommUserRank(handle: usize, rank: *mut c_int) {
        put(rank, c_int::try_from(known(handle)?.place().rank).map_err(|_| Code::INVALID_ARGUMENT)?)
    }

    fn ncclCommCuDevice(handle: usize, device: *mut c_int) {
        put(device, c_int::try_from(known(handle)?.place().device).map_err(|_| Code::INVALID_ARGUMENT)?)
    }

    fn ncclCommFinalize(handle: usize) {
        let communicator = known(handle)?;
        communicator.finalize()?;
        if communicator.is_blocking() {
            communicator.settled();
        }
        now(&communicator)
    }

    fn ncclCommDestroy(handle: usize) {
        let communicator = taken(handle)?;
        communicator.drained();
        communicator.close();
        Ok(())
    }

    fn ncclCommAbort(handle: usize) {
        taken(handle)?.abort();
        Ok(())
    }

    fn ncclGroupStart() {
        group::start();
        Ok(())
    }

    fn ncclGroupEnd() {
        group::end()
    }

    fn ncclSend(from: u64, count: usize, dtype: c_uint, peer: c_int, handle: usize, stream: usize) {
        let call = Collected { from, into: 0, count, dtype, op: 0, stream };
        group::add(&known(handle)?, What::Send { to: peer }, call)
    }

    fn ncclRecv(into: u64, count: usize, dtype: c_uint, peer: c_int, handle: usize, stream: usize) {
        let call = Collected { from: 0, into, count, dtype, op: 0, stream };
        group::add(&known(handle)?, What::Recv { from: peer }, call)
    }

    fn ncclBroadcast(
        from: u64, into: u64, count: usize, dtype: c_uint, root: c_int, handle: usize, stream: usize,
    ) {
        group::add(&known(handle)?, What::Broadcast { root }, Collected { from, into, count, dtype, op: 0, stream })
    }

    fn ncclReduce(
        from: u64, into: u64, count: usize, dtype: c_uint, op: c_uint, root: c_int, handle: usize, stream: usize,
    ) {
        group::add(&known(handle)?, What::Reduce { root }, Collected { from, into, count, dtype, op, stream })
    }

    fn ncclAllGather(from: u64, into: u64, count: usize, dtype: c_uint, handle: usize, stream: usize) {
        group::add(&known(handle)?, What::AllGather, Collected { from, into, count, dtype, op: 0, stream })
    }

    fn ncclAllReduce(
        from: u64, into: u64, count: usize, dtype: c_uint, op: c_uint, handle: usize, stream: usize,
    ) {
        group::add(&known(handle)?, What::AllReduce, Collected { from, into, count, dtype, op, stream })
    }

    fn ncclReduceScatter(
        from: u64, into: u64, count: usize, dtype: c_uint, op: c_uint, handle: usize, stream: usize,
    ) {
        group::add(&known(handle)?, What::ReduceScatter, Collected { from, into, count, dtype, op, stream })
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: Code) -> *const c_char {
    code.text().as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_communicator: *mut c_void) -> *const c_char {
    let last = LAST_ERROR.load(Ordering::Acquire);
    if last.is_null() { c"".as_ptr() } else { last }
}
