//! GPUs: runs the rounds of an [exchange](crate::exchange) in GPU memory, with NCCL between the GPUs. All sizes and
//! offsets are in bytes. Invariant: copies and [arithmetic](Arithmetic) on a GPU give the same bits as on the host. All
//! `unsafe` code that uses CUDA is in this module and in `nccl-rs`.
//!
//! ```text
//!     pinned stage --copy--> stage --pack--> outgoing --NCCL--> incoming --unpack--> unpacked --copy--> pinned output
//!     |-------- stream `upload` ----------| |-- stream `wire` -| |---------- stream `download` -------------|
//! ```
//!
//! The GPU also computes in the unpacked buffer (`computing.rs`): it reduces partial values and casts values. Reduced
//! values that other processes need are sent in a second phase. If there are no kernels, partial values are copied to
//! the host, and the host reduces and casts.
//!
//! No CUDA library is linked, because [`open`] loads the driver, NVRTC and NCCL at run time. On a machine without these
//! libraries there is no overhead, and the error names the missing library. Without NVRTC there are no kernels: the
//! driver makes the strided copies, and the host computes.

#![allow(unsafe_code, reason = "calls of the CUDA driver; each block states why it is sound")]
#![warn(clippy::undocumented_unsafe_blocks, clippy::missing_safety_doc)]

mod arithmetic;
mod computing;
mod copies;
mod device;
pub(crate) mod error;
mod kernels;
mod memory;
mod nccl_communicator;
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
pub use device::Device;
pub use memory::{DeviceBytes, Pinned};
pub use nccl_communicator::Nccl;
pub use packer::Packer;
pub use settings::{Kernels, Settings, Sharing};
pub use setup::NcclSetup;
pub use shuffle::DeviceShuffle;
pub use trial::TransferTrial;

use crate::error::{Error, Result};

/// The GPU of this process, with its kernels and the NCCL library.
#[derive(Debug)]
pub struct Gpu {
    /// The CUDA device, with its context.
    pub device: Arc<Device>,
    nccl: Result<nccl::Library, String>,
    /// The method with which the GPU makes strided copies.
    pub packer: Packer,
    kernels: Kernels,
    arithmetic: OnceLock<Result<Arithmetic, String>>,
}

impl Gpu {
    fn new(device: Arc<Device>, nccl: Result<nccl::Library, String>, settings: &Settings) -> Self {
        let packer = Packer::open(&device, &settings.kernels);
        Self { device, nccl, packer, kernels: settings.kernels.clone(), arithmetic: OnceLock::new() }
    }

    /// Returns the loaded NCCL library.
    ///
    /// # Errors
    /// Returns the reason why NCCL is not available. This cannot happen if the GPU was opened by [`open`].
    pub fn nccl(&self) -> Result<&nccl::Library, &str> {
        self.nccl.as_ref().map_err(String::as_str)
    }

    /// Returns the GPU if it has enough free memory for NCCL and for exchange rounds with the bucket size
    /// `bucket_bytes`.
    ///
    /// # Errors
    /// Returns `Device` if the GPU does not have enough free memory.
    pub fn with_memory_for(self, bucket_bytes: u64) -> Result<Self> {
        self.device.check_free_memory(shuffle::device_bytes(bucket_bytes).saturating_add(NCCL_BYTES))?;
        Ok(self)
    }

    /// Returns the kernels that reduce and cast. The kernels are compiled at the first call.
    ///
    /// # Errors
    /// Returns the reason why the kernels are not available.
    pub fn arithmetic(&self) -> Result<&Arithmetic, &str> {
        self.arithmetic.get_or_init(|| Arithmetic::open(&self.device, &self.kernels)).as_ref().map_err(String::as_str)
    }
}

/// Opens the driver, a device and NCCL, and loads the copy kernel. `local_rank` is the number of this process on its
/// node.
///
/// # Errors
/// Returns `Usage` if there is no driver, no device or no NCCL, with the names that were tried. Returns `Device` for
/// errors of the driver.
pub fn open(settings: &Settings, local_rank: Option<u32>) -> Result<Gpu> {
    let device = Device::open(local_rank)?;
    Ok(Gpu::new(device, Ok(require_nccl(settings)?), settings))
}

/// Checks that the libraries that [`open`] needs are installed. Does not access any device.
///
/// # Errors
/// Returns the `Usage` errors of [`open`] if there is no driver or no NCCL.
pub fn check_installed(settings: &Settings) -> Result<()> {
    Device::check_driver()?;
    require_nccl(settings).map(drop)
}

fn require_nccl(settings: &Settings) -> Result<nccl::Library> {
    load_nccl(settings).map_err(|why| {
        let hint = format!("install NCCL, set {}=/path/to/libnccl.so.2, or {CPU_HINT}", settings::NCCL_LIB);
        Error::usage(why, hint)
    })
}

/// Opens the driver, a device and the copy kernel for a run of a single process, which does not need NCCL.
///
/// # Errors
/// Returns the errors of [`open`], but not for missing NCCL.
pub fn open_alone(settings: &Settings) -> Result<Gpu> {
    Ok(Gpu::new(Device::open(None)?, load_nccl(settings), settings))
}

fn load_nccl(settings: &Settings) -> Result<nccl::Library, String> {
    // SAFETY: the library that the system or the environment variable names as NCCL is NCCL.
    unsafe { nccl::Library::load(settings.nccl.as_deref()) }.map_err(|error| error.to_string())
}

/// The estimate, in bytes, of the device memory that NCCL needs. NCCL needs some hundreds of MB, depending on the
/// number of channels and peers.
const NCCL_BYTES: u64 = 256 << 20;

const CPU_HINT: &str = "use options::backend cpu";
