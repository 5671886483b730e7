//! The declarations of `nccl.h`: types, constants, and a table of function pointers.
//!
//! Codes are integers and not enums. A newer NCCL may return values that this crate does not know, and an enum with
//! such a value would be undefined behaviour. Names are the names in the header.

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals, reason = "the names of nccl.h")]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::{fmt, ptr};

/// The return code of NCCL's functions. It has the layout of the C enum, and values without a name are valid.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct ncclResult_t(pub c_uint);

macro_rules! results {
    ($($name:ident = $code:literal, $meaning:literal;)*) => {
        $(
            #[doc = $meaning]
            pub const $name: ncclResult_t = ncclResult_t($code);
        )*

        impl fmt::Debug for ncclResult_t {
            /// Formats the code as its name in `nccl.h`, or as its number if it has no name.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match *self {
                    $($name => f.write_str(stringify!($name)),)*
                    Self(code) => write!(f, "ncclResult_t {code}"),
                }
            }
        }
    };
}

results! {
    ncclSuccess = 0, "Done.";
    ncclUnhandledCudaError = 1, "A call to CUDA failed.";
    ncclSystemError = 2, "A call to the system failed.";
    ncclInternalError = 3, "An error in NCCL, or memory that was overwritten.";
    ncclInvalidArgument = 4, "An argument has an invalid value.";
    ncclInvalidUsage = 5, "A call that is invalid after earlier calls, or on this machine.";
    ncclRemoteError = 6, "A peer or the network is lost.";
    ncclInProgress = 7, "A call on a non-blocking communicator is not done yet.";
    ncclTimeout = 8, "A time limit of NCCL was exceeded.";
}

/// The code of an element type; see [`DataType`](crate::DataType).
pub type ncclDataType_t = c_uint;

/// The code of a reduction operation; see [`RedOp`](crate::RedOp).
pub type ncclRedOp_t = c_uint;

/// The handle of a communicator, which NCCL owns.
pub type ncclComm_t = *mut c_void;

/// A CUDA stream: `cudaStream_t` of the runtime API, which is identical to `CUstream` of the driver API.
pub type cudaStream_t = *mut c_void;

/// The size of a [`ncclUniqueId`] in bytes.
pub const NCCL_UNIQUE_ID_BYTES: usize = 128;

/// The id that the ranks of one communicator share. It contains the address and the token with which the ranks find
/// each other.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ncclUniqueId {
    /// The bytes of the id. Only NCCL knows their meaning.
    pub internal: [c_char; NCCL_UNIQUE_ID_BYTES],
}

/// `NCCL_CONFIG_UNDEF_INT`: the value that an option has if NCCL should choose it.
pub const NCCL_CONFIG_UNDEF_INT: c_int = c_int::MIN;

/// `NCCL_API_MAGIC`: the number with which NCCL recognises a config struct.
pub const NCCL_API_MAGIC: c_uint = 0xcafe_beef;

/// Options of a communicator, as of NCCL 2.18.
///
/// Later versions append options. `size` and `version` show which options this struct has. A newer NCCL uses defaults
/// for the missing options, and an older NCCL reads the options that it knows (`parseCommConfig` in `src/init.cc`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ncclConfig_t {
    /// The size of this struct in bytes.
    pub size: usize,
    /// A fixed number with which NCCL recognises this struct: [`NCCL_API_MAGIC`].
    pub magic: c_uint,
    /// The version of NCCL whose `nccl.h` declares this struct.
    pub version: c_uint,
    /// If this is 0, calls return `ncclInProgress` instead of waiting.
    pub blocking: c_int,
    /// The number of thread blocks in a cluster of an NCCL kernel.
    pub cgaClusterSize: c_int,
    /// The minimum number of thread blocks of an NCCL kernel.
    pub minCTAs: c_int,
    /// The maximum number of thread blocks of an NCCL kernel.
    pub maxCTAs: c_int,
    /// The name of the network module. If it is null, NCCL chooses a module.
    pub netName: *const c_char,
    /// If this is 1, communicators that are split off this communicator share its resources.
    pub splitShare: c_int,
}

impl ncclConfig_t {
    /// The value of `NCCL_CONFIG_INITIALIZER` in NCCL 2.18, with which NCCL chooses all options.
    pub const INITIALIZER: Self = Self {
        size: size_of::<Self>(),
        magic: NCCL_API_MAGIC,
        version: 21_800,
        blocking: NCCL_CONFIG_UNDEF_INT,
        cgaClusterSize: NCCL_CONFIG_UNDEF_INT,
        minCTAs: NCCL_CONFIG_UNDEF_INT,
        maxCTAs: NCCL_CONFIG_UNDEF_INT,
        netName: ptr::null(),
        splitShare: NCCL_CONFIG_UNDEF_INT,
    };
}

macro_rules! table {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        /// The functions of NCCL that this crate uses. A field is `None` if the library does not have the function.
        #[derive(Clone, Copy, Debug)]
        pub struct Table {
            $(
                #[doc = concat!("`", stringify!($name), "` of `nccl.h`.")]
                pub $name: Option<unsafe extern "C" fn($($argument: $type),*) -> $result>,
            )*
        }

        impl Table {
            /// Finds the functions of a library by their names.
            ///
            /// # Safety
            ///
            /// A symbol with one of these names in the library must be the function that `nccl.h` declares. The library
            /// must stay loaded as long as any of the functions may be called.
            #[must_use]
            pub unsafe fn of(library: &libloading::Library) -> Self {
                Self {
                    // SAFETY: the caller guarantees that the symbol with this name has this type.
                    $($name: unsafe { library.get(stringify!($name)) }.ok().map(|symbol| *symbol),)*
                }
            }
        }
    };
}

table! {
    ncclGetVersion(version: *mut c_int) -> ncclResult_t;
    ncclGetErrorString(result: ncclResult_t) -> *const c_char;
    ncclGetLastError(comm: ncclComm_t) -> *const c_char;
    ncclGetUniqueId(uniqueId: *mut ncclUniqueId) -> ncclResult_t;
    ncclCommInitRankConfig(
        comm: *mut ncclComm_t, nranks: c_int, commId: ncclUniqueId, rank: c_int, config: *mut ncclConfig_t
    ) -> ncclResult_t;
    ncclCommGetAsyncError(comm: ncclComm_t, asyncError: *mut ncclResult_t) -> ncclResult_t;
    ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t;
    ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t;
    ncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) -> ncclResult_t;
    ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t;
    ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t;
    ncclCommAbort(comm: ncclComm_t) -> ncclResult_t;
    ncclGroupStart() -> ncclResult_t;
    ncclGroupEnd() -> ncclResult_t;
    ncclSend(
        sendbuff: *const c_void, count: usize, datatype: ncclDataType_t, peer: c_int, comm: ncclComm_t,
        stream: cudaStream_t
    ) -> ncclResult_t;
    ncclRecv(
        recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, peer: c_int, comm: ncclComm_t,
        stream: cudaStream_t
    ) -> ncclResult_t;
    ncclBroadcast(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int,
        comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
    ncclReduce(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, op: ncclRedOp_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
    ncclAllGather(
        sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t, comm: ncclComm_t,
        stream: cudaStream_t
    ) -> ncclResult_t;
    ncclAllReduce(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, op: ncclRedOp_t,
        comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
    ncclReduceScatter(
        sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t, op: ncclRedOp_t,
        comm: ncclComm_t, stream: cudaStream_t
    ) -> ncclResult_t;
}
