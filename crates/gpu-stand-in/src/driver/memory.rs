//! Functions for device memory and for pinned host memory.

use std::alloc::{self, Layout};
use std::ffi::c_uint;

use super::{Answer, Code, current, entries, put, started, stream};
use crate::fault::Fault;

/// The alignment of pinned memory in bytes, which is one page.
const PAGE: usize = 4096;

fn pages(bytes: usize) -> Answer<Layout> {
    Layout::from_size_align(bytes, PAGE).ok().filter(|_| bytes > 0).ok_or(Code::ERROR_INVALID_VALUE)
}

entries! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let heap = &current()?.heap;
        put(free, heap.left())?;
        put(total, heap.size())
    }

    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        let heap = &current()?.heap;
        if bytes == 0 {
            return Err(Code::ERROR_INVALID_VALUE);
        }
        if Fault::RefusesMemory.happens() {
            return Err(Code::ERROR_OUT_OF_MEMORY);
        }
        put(address, heap.allocate(bytes).ok_or(Code::ERROR_OUT_OF_MEMORY)?)
    }

    /// Waits for all work of the device, as CUDA does, and then frees the memory.
    fn cuMemFree_v2(address: u64) {
        current()?;
        if address == 0 {
            return Ok(());
        }
        started()?.synchronize();
        let device = started()?.devices.iter().find(|device| device.heap.has(address));
        Ok(device.ok_or(Code::ERROR_INVALID_VALUE)?.heap.free(address)?)
    }

    fn cuMemAllocAsync(address: *mut u64, bytes: usize, handle: usize) {
        let (_, device) = stream(handle)?;
        if bytes == 0 {
            return Err(Code::ERROR_INVALID_VALUE);
        }
        put(address, device.heap.allocate(bytes).ok_or(Code::ERROR_OUT_OF_MEMORY)?)
    }

    /// Frees the memory when the stream has done all work that was queued before this call.
    fn cuMemFreeAsync(address: u64, handle: usize) {
        let (stream, device) = stream(handle)?;
        device.heap.locate(address, 0)?;
        stream.push(move || {
            if device.heap.free(address).is_err() {
                device.fault();
            }
        });
        Ok(())
    }

    fn cuMemHostAlloc(address: *mut usize, bytes: usize, _flags: c_uint) {
        current()?;
        if Fault::RefusesPinned.happens() {
            return Err(Code::ERROR_OUT_OF_MEMORY);
        }
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc::alloc(pages(bytes)?) } as usize;
        if memory == 0 {
            return Err(Code::ERROR_OUT_OF_MEMORY);
        }
        started()?.tables().pinned.insert(memory, bytes);
        put(address, memory)
    }

    /// Waits for all work of the device, as CUDA does, and then frees the memory.
    fn cuMemFreeHost(address: usize) {
        started()?.synchronize();
        let bytes = started()?.tables().pinned.remove(&address).ok_or(Code::ERROR_INVALID_VALUE)?;
        // SAFETY: the memory was allocated with this layout, and is no longer in the table.
        unsafe { alloc::dealloc(address as *mut u8, pages(bytes)?) };
        Ok(())
    }
}
