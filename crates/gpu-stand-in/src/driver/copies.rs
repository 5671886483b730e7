//! Copies between host and device, and within a device.
//!
//! Each range is checked twice. An invalid range is an error of the call. If the memory is freed after the call and
//! before the stream runs the copy, the device faults. As on a device, two streams that write to one address race.

use std::ffi::c_uint;
use std::ptr;

use super::{Answer, Code, entries, started, stream};
use crate::machine::Device;
use crate::memory::Illegal;

/// Runs work of a stream, unless the device has faulted. If the work accesses invalid memory, the device faults.
pub fn on_device(device: &'static Device, work: impl FnOnce() -> Result<(), Illegal>) {
    if !device.has_faulted() && work().is_err() {
        device.fault();
    }
}

/// The source or the target of a copy, as an address.
#[derive(Clone, Copy)]
enum End {
    Device(u64),
    Host(usize),
}

impl End {
    fn locate(self, device: &Device, bytes: usize) -> Result<*mut u8, Illegal> {
        match self {
            Self::Device(address) => device.heap.locate(address, bytes),
            Self::Host(address) => Ok(address as *mut u8),
        }
    }
}

fn copy(device: &'static Device, from: End, into: End, bytes: usize) {
    on_device(device, || {
        let (from, into) = (from.locate(device, bytes)?, into.locate(device, bytes)?);
        // SAFETY: device ranges were checked just now; host ranges are pinned, staged, or waited for.
        unsafe { ptr::copy(from, into, bytes) };
        Ok(())
    });
}

/// The arguments of a 3-D copy: `CUDA_MEMCPY3D`, version 2.
#[derive(Clone, Copy)]
#[repr(C)]
struct Copy3D {
    source: Side,
    target: Side,
    width: usize,
    height: usize,
    depth: usize,
}

/// The source or the target of a 3-D copy: a box of bytes in an array with `pitch` bytes per row and `height` rows per
/// slice.
#[derive(Clone, Copy)]
#[repr(C)]
struct Side {
    x: usize,
    y: usize,
    z: usize,
    lod: usize,
    memory_type: c_uint,
    host: usize,
    device: u64,
    array: usize,
    reserved: usize,
    pitch: usize,
    height: usize,
}

/// `CU_MEMORYTYPE_DEVICE`: the memory type of device memory.
const DEVICE: c_uint = 2;

/// The source or the target of a 3-D copy, with the distances in bytes between rows and between slices.
#[derive(Clone, Copy)]
struct Strided {
    begin: u64,
    span: usize,
    row: usize,
    slice: usize,
}

impl Copy3D {
    /// Returns the address of a side, and the distances in bytes between its rows and between its slices. Checks that
    /// the box is inside its array. Host memory is not supported.
    fn strided(&self, side: &Side) -> Answer<Strided> {
        if side.memory_type != DEVICE || side.lod != 0 {
            return Err(Code::ERROR_NOT_SUPPORTED);
        }
        let fits = |begin: usize, length: usize, size: usize| begin.checked_add(length).is_some_and(|end| end <= size);
        let single = self.depth == 1;
        let row = if side.pitch == 0 { side.x + self.width } else { side.pitch };
        let rows = if side.height == 0 && single { side.y + self.height } else { side.height };
        if !fits(side.x, self.width, row) || !fits(side.y, self.height, rows) {
            return Err(Code::ERROR_INVALID_VALUE);
        }
        let parts = || {
            let slice = row.checked_mul(rows)?;
            let offset = side.z.checked_mul(slice)?.checked_add(side.y.checked_mul(row)?)?.checked_add(side.x)?;
            let last = (self.depth - 1).checked_mul(slice)?.checked_add((self.height - 1).checked_mul(row)?)?;
            let begin = side.device.checked_add(offset as u64)?;
            Some(Strided { begin, span: last.checked_add(self.width)?, row, slice })
        };
        parts().ok_or(Code::ERROR_INVALID_VALUE)
    }
}

entries! {
    fn cuMemcpyHtoDAsync_v2(into: u64, from: usize, bytes: usize, handle: usize) {
        let (stream, device) = stream(handle)?;
        device.heap.locate(into, bytes)?;
        if started()?.is_pinned(from, bytes) {
            stream.push(move || copy(device, End::Host(from), End::Device(into), bytes));
            return Ok(());
        }
        // SAFETY: as in C, the caller of the library guarantees `bytes` bytes at this address until the call returns.
        let staged = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) }.to_vec();
        stream.push(move || copy(device, End::Host(staged.as_ptr() as usize), End::Device(into), bytes));
        Ok(())
    }

    fn cuMemcpyDtoHAsync_v2(into: usize, from: u64, bytes: usize, handle: usize) {
        let (stream, device) = stream(handle)?;
        device.heap.locate(from, bytes)?;
        stream.push(move || copy(device, End::Device(from), End::Host(into), bytes));
        if !started()?.is_pinned(into, bytes) {
            stream.synchronize();
        }
        Ok(())
    }

    fn cuMemcpyDtoDAsync_v2(into: u64, from: u64, bytes: usize, handle: usize) {
        let (stream, device) = stream(handle)?;
        device.heap.locate(into, bytes)?;
        device.heap.locate(from, bytes)?;
        stream.push(move || copy(device, End::Device(from), End::Device(into), bytes));
        Ok(())
    }

    fn cuMemsetD8Async(address: u64, byte: u8, bytes: usize, handle: usize) {
        let (stream, device) = stream(handle)?;
        device.heap.locate(address, bytes)?;
        stream.push(move || on_device(device, || {
            // SAFETY: the range was checked just now.
            unsafe { ptr::write_bytes(device.heap.locate(address, bytes)?, byte, bytes) };
            Ok(())
        }));
        Ok(())
    }

    /// Copies from device memory to device memory. Other copies are not supported.
    fn cuMemcpy3DAsync_v2(asked: *const Copy3D, handle: usize) {
        let (stream, device) = stream(handle)?;
        if asked.is_null() || !asked.is_aligned() {
            return Err(Code::ERROR_INVALID_VALUE);
        }
        // SAFETY: as in C, the caller of the library guarantees that the struct is there.
        let asked = unsafe { asked.read() };
        if asked.width == 0 || asked.height == 0 || asked.depth == 0 {
            return Ok(());
        }
        let (from, into) = (asked.strided(&asked.source)?, asked.strided(&asked.target)?);
        device.heap.locate(from.begin, from.span)?;
        device.heap.locate(into.begin, into.span)?;
        stream.push(move || on_device(device, || {
            let source = device.heap.locate(from.begin, from.span)?;
            let target = device.heap.locate(into.begin, into.span)?;
            for (z, y) in (0..asked.depth).flat_map(|z| (0..asked.height).map(move |y| (z, y))) {
                // SAFETY: rows are within the spans, which were checked just now.
                unsafe {
                    let row = source.add(z * from.slice + y * from.row);
                    ptr::copy(row, target.add(z * into.slice + y * into.row), asked.width);
                }
            }
            Ok(())
        }));
        Ok(())
    }
}
