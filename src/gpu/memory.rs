//! Memory that a GPU can access: device memory, and pinned host memory (as with `pin_memory` in PyTorch). Allocating
//! either is slow, so allocations are rounded up and reused: pinned memory by a [`BufferPool`], and device memory by
//! [`DeviceBytes::grow_to`]. All sizes and offsets are in bytes.

use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use cudarc::driver::{DriverError, result, sys};
use nccl::DeviceBuffer;

use super::device::{Device, error_text, failed};
use crate::error::{DeviceError, Error, Result};
use crate::exchange::{BufferPool, HostMemory};
use crate::quantity::human_bytes;

/// Allocations of at least this many bytes are rounded up to a multiple of this number. Shorter allocations are rounded
/// up to a power of two.
const LARGE_ALLOCATION: usize = 4 << 20;

/// Pinned host memory. A device can read and write it while the CPU does other work.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a `Pinned` owns its bytes, and any thread may call the driver.
unsafe impl Send for Pinned {}
// SAFETY: a shared reference to a `Pinned` only allows reading its bytes.
unsafe impl Sync for Pinned {}

impl Pinned {
    fn new(device: Arc<Device>, len: usize) -> Result<Self> {
        device.bind()?;
        // No flags are set, because the CPU reads this memory, and reads of write-combined memory are very slow.
        // SAFETY: a context is current.
        let start = unsafe { result::malloc_host(len, 0) }
            .map_err(|error| allocation_error("pinned memory", len, error, ""))?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| DeviceError {
            op: "allocate pinned memory",
            detail: "the driver returned a null pointer".into(),
            hint: None,
        })?;
        // SAFETY: the allocation has `len` bytes and one owner. Rust may only read initialised bytes, so they are set
        // to 0.
        unsafe { start.write_bytes(0, len) };
        Ok(Self { device, start, len })
    }

    /// Returns a pool of pinned memory.
    pub fn pool(device: &Arc<Device>) -> Arc<BufferPool<Self>> {
        let device = Arc::clone(device);
        BufferPool::new(move |len| Self::new(Arc::clone(&device), allocation_len(len)))
    }
}

impl HostMemory for Pinned {}

impl AsRef<[u8]> for Pinned {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: it owns `len` initialised bytes; a device writes them only while the buffer is lent to a stream.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl AsMut<[u8]> for Pinned {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the value owns `len` initialised bytes, a device writes them only while the buffer is lent to a
        // stream, and the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: `malloc_host` allocated it, and nothing else refers to it.
            let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };
        }
    }
}

/// A range of device memory, with one owner that frees it.
#[derive(Debug)]
pub struct DeviceBytes {
    device: Arc<Device>,
    address: u64,
    len: usize,
}

impl DeviceBytes {
    /// Allocates `len` bytes of device memory with arbitrary content. `what` is the purpose of the memory, for the
    /// error message.
    ///
    /// # Errors
    /// Returns `Device` if there is not enough free memory.
    pub fn new(device: &Arc<Device>, len: usize, what: &str) -> Result<Self> {
        device.bind()?;
        let address = match len {
            0 => 0,
            // SAFETY: a context is current; the memory holds no Rust values.
            _ => unsafe { result::malloc_sync(len) }
                .map_err(|error| allocation_error(what, len, error, &free_memory_note()))?,
        };
        Ok(Self { device: Arc::clone(device), address, len })
    }

    /// Makes sure that the memory has at least `len` bytes. If it is shorter, a longer allocation replaces it, and its
    /// content is lost. `what` is the purpose of the memory, for the error message.
    ///
    /// # Errors
    /// Returns the errors of [`DeviceBytes::new`]. The memory is then unchanged.
    pub fn grow_to(&mut self, len: usize, what: &str) -> Result<()> {
        if self.len < len {
            *self = Self::new(&self.device, allocation_len(len), what)?;
        }
        Ok(())
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

// SAFETY: the driver allocated `len` bytes at this address, and `drop` frees them after all work of the device is done.
unsafe impl DeviceBuffer for DeviceBytes {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> usize {
        self.len
    }
}

impl Drop for DeviceBytes {
    fn drop(&mut self) {
        if self.len > 0 && self.device.bind().is_ok() {
            let _ = self.device.context().synchronize();
            // SAFETY: `malloc_sync` allocated it, nothing else refers to it, and no stream uses it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Returns the number of bytes to allocate for a buffer of `len` bytes. The result is at least 1, because the driver
/// rejects empty allocations.
fn allocation_len(len: usize) -> usize {
    if len < LARGE_ALLOCATION { len.max(1).next_power_of_two() } else { len.next_multiple_of(LARGE_ALLOCATION) }
}

/// Returns a text such as `; the device has 2 GiB free` about the current device, for error messages.
fn free_memory_note() -> String {
    let note = |(free, _)| format!("; the device has {} free", human_bytes(free as u64));
    result::mem_get_info().map_or(String::new(), note)
}

fn allocation_error(what: &str, len: usize, error: DriverError, left: &str) -> Error {
    if error.0 != sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return failed("allocate memory")(error);
    }
    Error::Device(DeviceError {
        op: "allocate memory",
        detail: format!("{} for {what}: {}{left}", human_bytes(len as u64), error_text(error)),
        hint: Some(
            "reduce options::bucket_size, which uses less device and host memory, or use options::backend cpu, which uses no device memory"
                .into(),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_lengths_are_rounded_up() {
        assert_eq!([0, 1, 3, 4097].map(allocation_len), [1, 1, 4, 8192]);
        assert_eq!(
            [LARGE_ALLOCATION - 1, LARGE_ALLOCATION, LARGE_ALLOCATION + 1].map(allocation_len),
            [LARGE_ALLOCATION, LARGE_ALLOCATION, 2 * LARGE_ALLOCATION]
        );
    }
}
