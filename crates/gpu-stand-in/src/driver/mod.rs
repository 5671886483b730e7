//! `libcuda`: the functions of the driver API that `dtshard` uses, as `cuda.h` declares them.

mod copies;
mod device;
mod kernels;
mod memory;
mod streams;

use std::ffi::{c_char, c_int};
use std::sync::Arc;

use crate::entry::{self, entries};
use crate::machine::{self, Device, Machine};
use crate::memory::Illegal;
use crate::stream::Stream;

/// An error code of the driver: `CUresult`. Code 0 is success.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Code(pub u32);

macro_rules! codes {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        impl Code {
            $(pub const $name: Self = Self($code);)*

            /// Returns the name and the description of the code. Both end with a 0 byte.
            fn texts(self) -> Option<(&'static str, &'static str)> {
                match self {
                    $(Self::$name => Some((concat!("CUDA_", stringify!($name), "\0"), concat!($text, "\0"))),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    SUCCESS = 0, "no error";
    ERROR_INVALID_VALUE = 1, "invalid argument";
    ERROR_OUT_OF_MEMORY = 2, "out of memory";
    ERROR_NOT_INITIALIZED = 3, "initialization error";
    ERROR_NO_DEVICE = 100, "no CUDA-capable device is detected";
    ERROR_INVALID_DEVICE = 101, "invalid device ordinal";
    ERROR_INVALID_IMAGE = 200, "device kernel image is invalid";
    ERROR_INVALID_CONTEXT = 201, "invalid device context";
    ERROR_INVALID_HANDLE = 400, "invalid resource handle";
    ERROR_NOT_FOUND = 500, "named symbol not found";
    ERROR_NOT_READY = 600, "device not ready";
    ERROR_ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    ERROR_NOT_SUPPORTED = 801, "operation not supported";
}

type Answer<T = ()> = Result<T, Code>;

impl From<Illegal> for Code {
    fn from(_: Illegal) -> Self {
        Self::ERROR_INVALID_VALUE
    }
}

/// Writes a result of a call to the address `place`, which the caller has passed. Returns an error if the address is
/// null or not aligned.
fn put<T>(place: *mut T, value: T) -> Answer {
    entry::put(place, value).map_err(|_| Code::ERROR_INVALID_VALUE)
}

/// Returns the imitated machine, or an error if `cuInit` was not called.
fn started() -> Answer<&'static Machine> {
    Machine::get().ok_or(Code::ERROR_NOT_INITIALIZED)
}

/// Returns the device with this ordinal.
fn device(ordinal: c_int) -> Answer<&'static Device> {
    let ordinal = usize::try_from(ordinal).map_err(|_| Code::ERROR_INVALID_DEVICE)?;
    started()?.devices.get(ordinal).ok_or(Code::ERROR_INVALID_DEVICE)
}

/// Returns the device whose context is current in this thread, or an error if this device has faulted.
fn current() -> Answer<&'static Device> {
    let ordinal = machine::current().ok_or(Code::ERROR_INVALID_CONTEXT)?;
    check_fault(&started()?.devices[ordinal])
}

/// Returns the device, or an error if the device has faulted.
fn check_fault(device: &'static Device) -> Answer<&'static Device> {
    if device.has_faulted() { Err(Code::ERROR_ILLEGAL_ADDRESS) } else { Ok(device) }
}

/// Returns the stream that a handle identifies, and its device. Returns an error if the device has faulted.
fn stream(handle: usize) -> Answer<(Arc<Stream>, &'static Device)> {
    current()?;
    let stream = started()?.stream(handle).ok_or(Code::ERROR_INVALID_HANDLE)?;
    let device = check_fault(&started()?.devices[stream.device()])?;
    Ok((stream, device))
}

entries! {
    fn cuGetErrorName(error: Code, text: *mut *const c_char) {
        put(text, error.texts().ok_or(Code::ERROR_INVALID_VALUE)?.0.as_ptr().cast())
    }

    fn cuGetErrorString(error: Code, text: *mut *const c_char) {
        put(text, error.texts().ok_or(Code::ERROR_INVALID_VALUE)?.1.as_ptr().cast())
    }
}
