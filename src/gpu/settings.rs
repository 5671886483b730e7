//! What the environment says of GPUs. `docs/how-to/gpu.md` tells of the variables.

use std::path::PathBuf;

use crate::launch::Env;

/// The file of NCCL.
pub(super) const NCCL_LIB: &str = "DTSHARD_NCCL_LIB";
const KERNELS: &str = "DTSHARD_GPU_KERNELS";
pub(super) const SHARE: &str = "DTSHARD_SHARE_GPU";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Nothing else is tried then.
    pub nccl: Option<PathBuf>,
    pub kernels: Kernels,
    pub sharing: Sharing,
}

/// Where kernels come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Kernels {
    /// NVRTC compiles them.
    #[default]
    Compiled,
    /// PTX, compiled before.
    Ptx(String),
    /// There are none: the driver copies.
    Off,
}

/// Whether two ranks may have one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    #[default]
    Refused,
    /// For tests on a machine of one GPU.
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
