//! GPU settings from environment variables, which `docs/how-to/gpu.md` describes.

use std::path::PathBuf;

use crate::launch::Env;

/// The environment variable with the path of the NCCL library.
pub(super) const NCCL_LIB: &str = "DTSHARD_NCCL_LIB";
const KERNELS: &str = "DTSHARD_GPU_KERNELS";
pub(super) const SHARE: &str = "DTSHARD_SHARE_GPU";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The path of the NCCL library. If the path is set, no other path is tried. If the field is `None`, the usual file
    /// names of NCCL are tried.
    pub nccl: Option<PathBuf>,
    pub kernels: Kernels,
    pub sharing: Sharing,
}

/// The origin of the GPU kernels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Kernels {
    /// NVRTC compiles the kernels at run time.
    #[default]
    Compiled,
    /// The kernels are loaded from this PTX, which was compiled before.
    Ptx(String),
    /// No kernels are used: the driver makes the copies, and the host computes.
    Off,
}

/// The choice whether two processes may use the same device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    #[default]
    Refused,
    /// Processes may share a device, for tests on a machine with one GPU.
    Allowed,
}

impl Settings {
    #[must_use]
    pub fn new(env: Env<'_>) -> Self {
        let set = |name| env(name).filter(|value| !value.is_empty());
        Self {
            nccl: set(NCCL_LIB).map(PathBuf::from),
            kernels: if set(KERNELS).as_deref() == Some("off") { Kernels::Off } else { Kernels::Compiled },
            sharing: if set(SHARE).as_deref() == Some("1") { Sharing::Allowed } else { Sharing::Refused },
        }
    }
}
