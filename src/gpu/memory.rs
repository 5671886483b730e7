//! Memory that devices reach: theirs, and pages of the host that stay where they are.
//!
//! Both are slow to be had, so they are made somewhat larger than asked and used again: pinned memory by
//! [`Rooms`](crate::exchange::Rooms), a device's by [`DeviceBytes::at_least`]. Counts bytes.

use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use cudarc::driver::{DriverError, result, sys};
use nccl::DeviceBuffer;

use super::device::{Device, failed, text};
use crate::error::{DeviceError, Error, Result};
use crate::exchange::{BufferPool, HostMemory};
use crate::quantity::human_bytes;

/// Allocations are multiples of this, or powers of two below.
const LARGE: usize = 4 << 20;

/// Pinned host memory: a device copies out of it and into it by itself, while the program goes on.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns its bytes, and the driver takes calls from all threads.
unsafe impl Send for Pinned {}
// SAFETY: as above; shared, it can only be read.
unsafe impl Sync for Pinned {}

impl Pinned {
    fn new(device: Arc<Device>, len: usize) -> Result<Self> {
        device.bind()?;
        // Without flags: the CPU reads what arrives, which write-combined memory makes very slow.
        // SAFETY: a context is current.
        let start =
            unsafe { result::malloc_host(len, 0) }.map_err(|error| short_of("pinned memory", len, error, ""))?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| DeviceError {
            op: "allocate pinned memory",
            detail: "the driver gave nothing".into(),
            hint: None,
        })?;
        // SAFETY: it has so many bytes, which nobody else has. Rust may read only what was written.
        unsafe { start.write_bytes(0, len) };
        Ok(Self { device, start, len })
    }

    /// Where such memory is had.
    #[must_use]
    pub fn rooms(device: &Arc<Device>) -> Arc<BufferPool<Self>> {
        let device = Arc::clone(device);
        BufferPool::new(move |len| Self::new(Arc::clone(&device), rounded(len)))
    }
}

impl HostMemory for Pinned {}

impl AsRef<[u8]> for Pinned {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: it owns so many bytes, all written; a device writes them only while its room is lent to a stream.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl AsMut<[u8]> for Pinned {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and it is borrowed alone.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: it was allocated so, and nobody has it any more.
            let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };
        }
    }
}

/// Memory of a device.
#[derive(Debug)]
pub struct DeviceBytes {
    device: Arc<Device>,
    address: u64,
    len: usize,
}

impl DeviceBytes {
    /// So many bytes, with anything in them; `what` is in the error.
    ///
    /// # Errors
    /// `Device` where there are not so many left.
    pub fn new(device: &Arc<Device>, len: usize, what: &str) -> Result<Self> {
        device.bind()?;
        let address = match len {
            0 => 0,
            // SAFETY: a context is current; what the memory has in it is no Rust value.
            _ => unsafe { result::malloc_sync(len) }.map_err(|error| short_of(what, len, error, &left()))?,
        };
        Ok(Self { device: Arc::clone(device), address, len })
    }

    /// The same, or longer memory in its place. What was in it may be lost.
    ///
    /// # Errors
    /// As [`DeviceBytes::new`]. Then it is as it was.
    pub fn at_least(&mut self, len: usize, what: &str) -> Result<()> {
        if self.len < len {
            *self = Self::new(&self.device, rounded(len), what)?;
        }
        Ok(())
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

// SAFETY: the driver gave so many bytes at this address, and they are freed after all work of the device is done.
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
            // SAFETY: it was allocated so, nobody has it any more, and no stream uses it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// At least a byte, as there is no memory of none.
fn rounded(len: usize) -> usize {
    if len < LARGE { len.max(1).next_power_of_two() } else { len.next_multiple_of(LARGE) }
}

/// What is left of the memory of the device whose context is current.
fn left() -> String {
    let told = |(free, _)| format!("; the device has {} left", human_bytes(free as u64));
    result::mem_get_info().map_or(String::new(), told)
}

fn short_of(what: &str, len: usize, error: DriverError, left: &str) -> Error {
    if error.0 != sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        return failed("allocate memory")(error);
    }
    Error::Device(DeviceError {
        op: "allocate memory",
        detail: format!("{} for {what}: {}{left}", human_bytes(len as u64), text(error)),
        hint: Some(
            "a smaller options::bucket_size takes less memory, of devices and of hosts; options::backend cpu takes none of devices"
                .into(),
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_have_few_sizes() {
        assert_eq!([0, 1, 3, 4097].map(rounded), [1, 1, 4, 8192]);
        assert_eq!([LARGE - 1, LARGE, LARGE + 1].map(rounded), [LARGE, LARGE, 2 * LARGE]);
    }
}
