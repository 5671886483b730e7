//! CUDA streams: queues of work, which a device runs in order. Calls return before the work is done. All sizes and
//! offsets are in bytes.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, result};
use nccl::{DeviceBuffer, DeviceStream};

use super::device::{Device, failed};
use super::memory::DeviceBytes;
use crate::error::Result;

/// A stream of a CUDA device: work that is queued on it runs in order.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    stream: Arc<CudaStream>,
}

impl Stream {
    /// Creates a stream.
    ///
    /// # Errors
    /// Returns `Device` if the driver cannot create the stream.
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let stream = device.context().new_stream().map_err(failed("create a stream"))?;
        Ok(Self { device: Arc::clone(device), stream })
    }

    /// Returns the device of the stream.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the stream as an object of the crate `cudarc`.
    pub fn cuda(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Records a CUDA event that marks the end of all work that has been queued so far.
    pub fn record(&self) -> Result<CudaEvent> {
        self.stream.record_event(None).map_err(failed("record an event"))
    }

    /// Makes all work that is queued after this call wait for an event of another stream.
    pub fn wait(&self, event: &CudaEvent) -> Result<()> {
        self.stream.wait(event).map_err(failed("wait for an event"))
    }

    /// Queues a copy from the host to the beginning of device memory.
    ///
    /// # Safety
    /// Until the stream has made the copy, both buffers stay allocated, and `from` is not written.
    pub unsafe fn copy_in(&self, from: &[u8], into: &mut DeviceBytes) -> Result<()> {
        assert!(from.len() <= into.len(), "memory of a round is as long as what is copied");
        if from.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: the length was checked, and the caller guarantees the rest.
        unsafe { result::memcpy_htod_async(into.address(), from, self.stream.cu_stream()) }
            .map_err(failed("copy to the device"))
    }

    /// Queues a copy from the beginning of device memory to the host.
    ///
    /// # Safety
    /// Until the stream has made the copy, both buffers stay allocated, and `into` is neither read nor written.
    pub unsafe fn copy_out(&self, from: &DeviceBytes, into: &mut [u8]) -> Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.copy_out_from(from, 0, into) }
    }

    /// Queues a copy from an offset of device memory to the host.
    ///
    /// # Safety
    /// The conditions of [`Stream::copy_out`] hold.
    pub unsafe fn copy_out_from(&self, from: &DeviceBytes, offset: usize, into: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(into.len());
        assert!(end.is_some_and(|end| end <= from.len()), "memory of a round is as long as what is copied");
        if into.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        let address = from.address() + offset as u64;
        // SAFETY: the length was checked, and the caller guarantees the rest.
        unsafe { result::memcpy_dtoh_async(into, address, self.stream.cu_stream()) }
            .map_err(failed("copy from the device"))
    }

    /// Queues a write of zeros to a byte range of device memory.
    pub fn zero(&self, memory: &mut DeviceBytes, range: Range<usize>) -> Result<()> {
        assert!(range.end <= memory.len(), "memory of a round is as long as what is zeroed");
        if range.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        let address = memory.address() + range.start as u64;
        // SAFETY: the range is in the memory, which is freed after all work of the device is done.
        unsafe { result::memset_d8_async(address, 0, range.len(), self.stream.cu_stream()) }
            .map_err(failed("zero device memory"))
    }
}

// SAFETY: the handle is a stream of the device, which is destroyed when `self` is dropped and not before.
unsafe impl DeviceStream for Stream {
    fn handle(&self) -> *mut c_void {
        self.stream.cu_stream().cast()
    }
}
