//! The device of this process: how it is chosen, and its CUDA context. If a launcher makes only one device visible to
//! each task, this device is used. If a launcher makes all devices of the node visible to all tasks, each process uses
//! the device with its local rank (its number on the node), as with `LOCAL_RANK` of torchrun.

use std::ffi::CStr;
use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result, sys};

use super::CPU_HINT;
use crate::error::{DeviceError, Error, Result};
use crate::quantity::human_bytes;

/// An opened CUDA device, with its primary context.
pub struct Device {
    context: Arc<CudaContext>,
    name: String,
    uuid: [u8; 16],
}

impl Device {
    /// Opens the device of the process with this local rank (its number on the node).
    ///
    /// # Errors
    /// Returns `Usage` if there is no driver or no device, and `Device` if the device cannot be used.
    pub fn open(local_rank: Option<u32>) -> Result<Arc<Self>> {
        let ordinal =
            ordinal(Self::count_visible()?, local_rank).ok_or_else(|| no_device("no CUDA device is visible".into()))?;
        Self::with_ordinal(ordinal)
    }

    /// Checks that the driver library exists, without calling it.
    ///
    /// # Errors
    /// Returns `Usage` if there is no driver.
    pub(super) fn check_driver() -> Result<()> {
        // SAFETY: the library that the system provides under the name of the driver is the driver.
        if unsafe { sys::is_culib_present() } {
            return Ok(());
        }
        let what = "no CUDA driver: neither libcuda.so nor libcuda.so.1 can be loaded";
        Err(Error::usage(what, format!("run on a machine with a GPU, or {CPU_HINT}")))
    }

    /// Returns the number of devices that are visible to this process. Does not open any of them.
    ///
    /// # Errors
    /// Returns `Usage` if there is no driver or no device.
    pub fn count_visible() -> Result<u32> {
        Self::check_driver()?;
        let visible = CudaContext::device_count()
            .map_err(|error| no_device(format!("the CUDA driver found no device: {}", error_text(error))))?;
        Ok(u32::try_from(visible).unwrap_or(0))
    }

    /// Opens the device with this index among the visible devices.
    ///
    /// # Errors
    /// Returns `Device` if the device cannot be used.
    pub fn with_ordinal(ordinal: u32) -> Result<Arc<Self>> {
        let context = CudaContext::new(ordinal as usize).map_err(failed("open the device"))?;
        let name = context.name().map_err(failed("get the name of the device"))?;
        let uuid =
            context.uuid().map_err(failed("get the UUID of the device"))?.bytes.map(|byte| byte.to_ne_bytes()[0]);
        Ok(Arc::new(Self { context, name, uuid }))
    }

    /// Returns the product name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the UUID of the device, which no other device has.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Checks that this many bytes of device memory are free.
    ///
    /// # Errors
    /// Returns `Device` if less memory is free.
    pub(super) fn check_free_memory(&self, needed: u64) -> Result<()> {
        self.bind()?;
        let (free, _) = result::mem_get_info().map_err(failed("query free memory"))?;
        if free as u64 >= needed {
            return Ok(());
        }
        let (needed, free) = (human_bytes(needed), human_bytes(free as u64));
        Err(Error::Device(DeviceError {
            op: "check free memory",
            detail: format!("rounds and NCCL may need {needed}, but only {free} are free"),
            hint: None,
        }))
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Makes this device the current device of this thread.
    pub(super) fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(failed("select the device"))
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({})", self.context.ordinal(), self.name)
    }
}

fn no_device(why: String) -> Error {
    Error::usage(why, format!("check CUDA_VISIBLE_DEVICES and nvidia-smi, or {CPU_HINT}"))
}

/// Returns the index of the device of a process: the process with local rank `r` uses device `r mod visible`. A process
/// without a local rank uses device 0. Returns `None` if no device is visible.
fn ordinal(visible: u32, local_rank: Option<u32>) -> Option<u32> {
    local_rank.unwrap_or(0).checked_rem(visible)
}

/// Returns a function that converts an error of the driver into an [`Error`]. `op` is the operation that failed.
pub(super) fn failed(op: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| DeviceError { op, detail: error_text(error), hint: None }.into()
}

/// Returns the description and the name of an error, for example `out of memory (CUDA_ERROR_OUT_OF_MEMORY)`.
pub(super) fn error_text(error: DriverError) -> String {
    let text = error.error_string().map(CStr::to_string_lossy).unwrap_or_default();
    format!("{text} ({:?})", error.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_ranks_share_one_device_or_get_their_own() {
        assert_eq!([None, Some(0), Some(5)].map(|rank| ordinal(1, rank)), [Some(0); 3]);
        assert_eq!([None, Some(0), Some(3), Some(4)].map(|rank| ordinal(4, rank)), [0, 0, 3, 0].map(Some));
        assert_eq!(ordinal(0, Some(0)), None);
    }
}
