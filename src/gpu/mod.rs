//! GPUs: rounds of an [exchange](crate::exchange) through the memory of devices, and NCCL between them.
//!
//! ```text
//!     pinned stage --copy--> stage --pack--> outgoing --NCCL--> incoming --unpack--> unpacked --copy--> pinned room
//!     |----------- stream up -------------| |-- stream wire --| |------------- stream down ---------------|
//! ```
//!
//! What is unpacked is computed with there (`computing.rs`): summands become values, and values are cast. What others need
//! of that goes across once more. Without kernels summands come down, and the host does both.
//!
//! Nothing of CUDA is linked: driver, NVRTC and NCCL are opened by [`open`] and not before. A machine without them pays
//! nothing, and is told what is missing. Without NVRTC the driver copies what a kernel would, and the host computes.
//!
//! Counts bytes. Invariant: a device gives what the host would: bytes are moved, and where [numbers](Arithmetic) are
//! computed with, it is bit for bit as the host does. All that is `unsafe` of CUDA is in this module and in `nccl-rs`.

#![allow(unsafe_code, reason = "calls of the CUDA driver: each block says why it may")]
#![warn(clippy::undocumented_unsafe_blocks, clippy::missing_safety_doc)]

mod arithmetic;
mod communicator;
mod computing;
mod copies;
mod device;
pub(crate) mod error;
mod kernels;
mod memory;
mod nccl_reduce;
mod packer;
mod settings;
mod setup;
mod shuffle;
mod slot;
mod stream;
mod table;
#[cfg(test)]
mod tests;
mod trial;
mod watch;

use std::sync::{Arc, OnceLock};

pub use arithmetic::{Arithmetic, CastJob, ReductionJob};
pub use communicator::Nccl;
pub use device::Device;
pub use memory::{DeviceBytes, Pinned};
pub use packer::Packer;
pub use settings::{Kernels, Settings, Sharing};
pub use setup::NcclSetup;
pub use shuffle::DeviceShuffle;
pub use trial::TransferTrial;

use crate::error::{Error, Result};

/// What a process has of GPUs.
#[derive(Debug)]
pub struct Gpu {
    pub device: Arc<Device>,
    nccl: Result<nccl::Library, String>,
    pub packer: Packer,
    kernels: Kernels,
    arithmetic: OnceLock<Result<Arithmetic, String>>,
}

impl Gpu {
    fn new(device: Arc<Device>, nccl: Result<nccl::Library, String>, settings: &Settings) -> Self {
        let packer = Packer::open(&device, &settings.kernels);
        Self { device, nccl, packer, kernels: settings.kernels.clone(), arithmetic: OnceLock::new() }
    }

    /// What moves bytes between devices, or why nothing does.
    ///
    /// # Errors
    /// Why there is no NCCL: none where it was opened by [`open`].
    pub fn nccl(&self) -> Result<&nccl::Library, &str> {
        self.nccl.as_ref().map_err(String::as_str)
    }

    /// The same, if its device has room for rounds of this `--bucket-size`, and for NCCL.
    ///
    /// # Errors
    /// `Device` where it has not.
    pub fn with_room(self, bucket_bytes: u64) -> Result<Self> {
        self.device.check_room(shuffle::device_bytes(bucket_bytes).saturating_add(NCCL_BYTES))?;
        Ok(self)
    }

    /// What computes on the device, or why nothing does. It is compiled when it is asked for first.
    ///
    /// # Errors
    /// Why there are no kernels.
    pub fn arithmetic(&self) -> Result<&Arithmetic, &str> {
        self.arithmetic.get_or_init(|| Arithmetic::open(&self.device, &self.kernels)).as_ref().map_err(String::as_str)
    }
}

/// Open driver, device, NCCL and kernels. `local_rank` is which of the processes of its node this one is.
///
/// # Errors
/// `Usage` where there is no driver, no device or no NCCL, with what was looked for; `Device` from the driver.
pub fn open(settings: &Settings, local_rank: Option<u32>) -> Result<Gpu> {
    let device = Device::open(local_rank)?;
    Ok(Gpu::new(device, Ok(wanted_nccl(settings)?), settings))
}

/// Whether what [`open`] opens is installed here. No device is touched.
///
/// # Errors
/// `Usage` where there is no driver or no NCCL, as [`open`] says it.
pub fn look(settings: &Settings) -> Result<()> {
    Device::has_driver()?;
    wanted_nccl(settings).map(drop)
}

fn wanted_nccl(settings: &Settings) -> Result<nccl::Library> {
    load_nccl(settings).map_err(|why| {
        let hint = format!("install NCCL, name its file ({}=/path/to/libnccl.so.2), or {CPU}", settings::NCCL_LIB);
        Error::usage(why, hint)
    })
}

/// The same for one process that need not meet others: NCCL may lack.
///
/// # Errors
/// As [`open`].
pub fn open_alone(settings: &Settings) -> Result<Gpu> {
    Ok(Gpu::new(Device::open(None)?, load_nccl(settings), settings))
}

fn load_nccl(settings: &Settings) -> Result<nccl::Library, String> {
    // SAFETY: what the system calls NCCL, or whoever set the variable, is NCCL.
    unsafe { nccl::Library::load(settings.nccl.as_deref()) }.map_err(|error| error.to_string())
}

/// What NCCL may take of a device once it has met: some hundreds of MB, by the number of channels and peers.
const NCCL_BYTES: u64 = 256 << 20;

const CPU: &str = "use options::backend cpu";
