//! Streams: what a device does in order. Calls return before it is done.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, result};
use nccl::{DeviceBuffer, DeviceStream};

use super::device::{Device, failed};
use super::memory::DeviceBytes;
use crate::error::Result;

#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    stream: Arc<CudaStream>,
}

impl Stream {
    pub fn new(device: &Arc<Device>) -> Result<Self> {
        let stream = device.context().new_stream().map_err(failed("make a stream"))?;
        Ok(Self { device: Arc::clone(device), stream })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub fn cuda(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The point that the stream has come to when what is queued now is done.
    pub fn record(&self) -> Result<CudaEvent> {
        self.stream.record_event(None).map_err(failed("mark a stream"))
    }

    /// Do what is queued next behind that point of another stream.
    pub fn wait(&self, event: &CudaEvent) -> Result<()> {
        self.stream.wait(event).map_err(failed("let a stream wait"))
    }

    /// Copy from the host to the beginning of some memory.
    ///
    /// # Safety
    /// Until the stream has done it, both stay where they are, and `from` is not written.
    pub unsafe fn copy_in(&self, from: &[u8], into: &mut DeviceBytes) -> Result<()> {
        assert!(from.len() <= into.len(), "memory of a round is as long as what is copied");
        if from.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: it fits, and the rest is promised by the caller.
        unsafe { result::memcpy_htod_async(into.address(), from, self.stream.cu_stream()) }
            .map_err(failed("copy to the device"))
    }

    /// Copy the beginning of some memory to the host.
    ///
    /// # Safety
    /// Until the stream has done it, both stay where they are, and `into` is neither read nor written.
    pub unsafe fn copy_out(&self, from: &DeviceBytes, into: &mut [u8]) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { self.copy_out_of(from, 0, into) }
    }

    /// Copy what stands behind an offset to the host.
    ///
    /// # Safety
    /// As [`Stream::copy_out`].
    pub unsafe fn copy_out_of(&self, from: &DeviceBytes, offset: usize, into: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(into.len());
        assert!(end.is_some_and(|end| end <= from.len()), "memory of a round is as long as what is copied");
        if into.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        let address = from.address() + offset as u64;
        // SAFETY: it fits, and the rest is promised by the caller.
        unsafe { result::memcpy_dtoh_async(into, address, self.stream.cu_stream()) }
            .map_err(failed("copy from the device"))
    }

    /// Fill some memory with zeros.
    pub fn zero(&self, memory: &mut DeviceBytes, range: Range<usize>) -> Result<()> {
        assert!(range.end <= memory.len(), "memory of a round is as long as what is zeroed");
        if range.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        let address = memory.address() + range.start as u64;
        // SAFETY: the range is in the memory, which is freed after all work of the device is done.
        unsafe { result::memset_d8_async(address, 0, range.len(), self.stream.cu_stream()) }
            .map_err(failed("clear memory of the device"))
    }
}

// SAFETY: it is a stream of the device, destroyed when this is dropped and no sooner.
unsafe impl DeviceStream for Stream {
    fn handle(&self) -> *mut c_void {
        self.stream.cu_stream().cast()
    }
}
