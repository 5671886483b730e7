//! Devices and their primary contexts. Other contexts are not supported.

use std::ffi::{c_char, c_int, c_uint};
use std::ptr;

use super::{Code, device, entries, put, started};
use crate::fault::Fault;
use crate::machine::{self, Machine};

/// The version that `cuDriverGetVersion` returns: CUDA 13.0.
const DRIVER_VERSION: c_int = 13_000;

/// Returns the handle of the primary context of a device.
fn context(ordinal: usize) -> usize {
    (ordinal + 1) * 0x10
}

entries! {
    fn cuInit(flags: c_uint) {
        Fault::DiesLoading.strikes();
        match flags {
            0 if Machine::start().devices.is_empty() => Err(Code::ERROR_NO_DEVICE),
            0 => Ok(()),
            _ => Err(Code::ERROR_INVALID_VALUE),
        }
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        put(version, DRIVER_VERSION)
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        put(count, c_int::try_from(started()?.devices.len()).map_err(|_| Code::ERROR_INVALID_VALUE)?)
    }

    fn cuDeviceGet(handle: *mut c_int, ordinal: c_int) {
        device(ordinal)?;
        put(handle, ordinal)
    }

    fn cuDeviceGetName(name: *mut c_char, length: c_int, ordinal: c_int) {
        device(ordinal)?;
        let text = c"stand-in (no GPU)".to_bytes_with_nul();
        let length = usize::try_from(length).unwrap_or(0);
        if name.is_null() || length < text.len() {
            return Err(Code::ERROR_INVALID_VALUE);
        }
        // SAFETY: as in C, the caller of the library guarantees `length` bytes at `name`.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len()) };
        Ok(())
    }

    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], ordinal: c_int) {
        let mut bytes = *b"gpu-stand-in\0\0\0\0";
        bytes[15] = u8::try_from(device(ordinal)?.number).unwrap_or(u8::MAX);
        put(uuid, bytes)
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, ordinal: c_int) {
        put(bytes, device(ordinal)?.heap.size())
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, ordinal: c_int) {
        device(ordinal)?;
        put(value, match attribute {
            1..=3 => 1024, // MAX_THREADS_PER_BLOCK, MAX_BLOCK_DIM_X and _Y
            4 => 64,           // MAX_BLOCK_DIM_Z
            5 => c_int::MAX,   // MAX_GRID_DIM_X
            6 | 7 => 65_535,   // MAX_GRID_DIM_Y and _Z
            10 => 32,          // WARP_SIZE
            16 => 1,           // MULTIPROCESSOR_COUNT
            75 => 8,           // COMPUTE_CAPABILITY_MAJOR
            76 => 0,           // COMPUTE_CAPABILITY_MINOR
            115 => 1,          // MEMORY_POOLS_SUPPORTED
            _ => 0,
        })
    }

    fn cuDevicePrimaryCtxRetain(handle: *mut usize, ordinal: c_int) {
        device(ordinal)?;
        put(handle, context(usize::try_from(ordinal).map_err(|_| Code::ERROR_INVALID_DEVICE)?))
    }

    fn cuDevicePrimaryCtxRelease_v2(ordinal: c_int) {
        device(ordinal).map(drop)
    }

    fn cuCtxSetCurrent(handle: usize) {
        let known = (0..started()?.devices.len()).find(|ordinal| context(*ordinal) == handle);
        if handle != 0 && known.is_none() {
            return Err(Code::ERROR_INVALID_CONTEXT);
        }
        machine::make_current(known);
        Ok(())
    }

    fn cuCtxGetCurrent(handle: *mut usize) {
        started()?;
        put(handle, machine::current().map_or(0, context))
    }

    fn cuCtxGetDevice(ordinal: *mut c_int) {
        let current = machine::current().ok_or(Code::ERROR_INVALID_CONTEXT)?;
        put(ordinal, c_int::try_from(current).map_err(|_| Code::ERROR_INVALID_DEVICE)?)
    }

    fn cuCtxSynchronize() {
        super::current()?;
        started()?.synchronize();
        super::current().map(drop)
    }
}
