//! The device of this process: which one it is, and its context.
//!
//! Launchers show each task its own device, or show all tasks of a node all devices. In the first case there is one, and
//! in the second local ranks take turns.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result, sys};

use super::CPU;
use crate::error::{DeviceError, Error, Result};
use crate::quantity::human_bytes;

/// A device that is in use, by its primary context.
pub struct Device {
    context: Arc<CudaContext>,
    name: String,
    uuid: [u8; 16],
}

impl Device {
    /// The device for a local rank.
    ///
    /// # Errors
    /// `Usage` where there is no driver or no device; `Device` where it cannot be used.
    pub fn open(local_rank: Option<u32>) -> Result<Arc<Self>> {
        let ordinal = ordinal(Self::visible()?, local_rank).ok_or_else(|| none("no CUDA device is visible".into()))?;
        Self::with_ordinal(ordinal)
    }

    /// Whether there is a driver, which is not asked anything.
    ///
    /// # Errors
    /// `Usage` where there is none.
    pub(super) fn has_driver() -> Result<()> {
        // SAFETY: what the system has under the name of the driver is the driver.
        if unsafe { sys::is_culib_present() } {
            return Ok(());
        }
        let what = "no CUDA driver here: there is neither libcuda.so nor libcuda.so.1";
        Err(Error::usage(what, format!("run where a GPU is, or {CPU}")))
    }

    /// How many devices there are for this process. Takes none of them.
    ///
    /// # Errors
    /// `Usage` where there is no driver or no device.
    pub fn visible() -> Result<u32> {
        Self::has_driver()?;
        let visible = CudaContext::device_count()
            .map_err(|error| none(format!("the CUDA driver finds no device: {}", text(error))))?;
        Ok(u32::try_from(visible).unwrap_or(0))
    }

    /// The device with this number among those that are visible.
    ///
    /// # Errors
    /// `Device` where it cannot be used.
    pub fn with_ordinal(ordinal: u32) -> Result<Arc<Self>> {
        let context = CudaContext::new(ordinal as usize).map_err(failed("take the device"))?;
        let name = context.name().map_err(failed("name the device"))?;
        let uuid = context.uuid().map_err(failed("name the device"))?.bytes.map(c_char::cast_unsigned);
        Ok(Arc::new(Self { context, name, uuid }))
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Tells it from all others there are.
    #[must_use]
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Whether so many bytes of its memory are free.
    ///
    /// # Errors
    /// `Device` where they are not.
    pub(super) fn check_room(&self, needed: u64) -> Result<()> {
        self.bind()?;
        let (free, _) = result::mem_get_info().map_err(failed("look at its memory"))?;
        if free as u64 >= needed {
            return Ok(());
        }
        let (needed, free) = (human_bytes(needed), human_bytes(free as u64));
        Err(Error::Device(DeviceError {
            op: "look at its memory",
            detail: format!("rounds and NCCL may take {needed}, {free} are free"),
            hint: None,
        }))
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Let what this thread asks of CUDA be about this device.
    pub(super) fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(failed("take the device"))
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({})", self.context.ordinal(), self.name)
    }
}

fn none(why: String) -> Error {
    Error::usage(why, format!("look at CUDA_VISIBLE_DEVICES and nvidia-smi, or {CPU}"))
}

/// The only one, or that of the local rank where there are many.
fn ordinal(visible: u32, local_rank: Option<u32>) -> Option<u32> {
    local_rank.unwrap_or(0).checked_rem(visible)
}

/// What the driver says of a step that it refuses.
pub(super) fn failed(op: &'static str) -> impl Fn(DriverError) -> Error {
    move |error| DeviceError { op, detail: text(error), hint: None }.into()
}

/// `out of memory (CUDA_ERROR_OUT_OF_MEMORY)`
pub(super) fn text(error: DriverError) -> String {
    let words = error.error_string().map(CStr::to_string_lossy).unwrap_or_default();
    format!("{words} ({:?})", error.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_device_is_everybodys_and_of_many_each_rank_has_its_own() {
        assert_eq!([None, Some(0), Some(5)].map(|rank| ordinal(1, rank)), [Some(0); 3]);
        assert_eq!([None, Some(0), Some(3), Some(4)].map(|rank| ordinal(4, rank)), [0, 0, 3, 0].map(Some));
        assert_eq!(ordinal(0, Some(0)), None);
    }
}
