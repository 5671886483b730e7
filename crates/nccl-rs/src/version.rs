//! Versions of NCCL, as `NCCL_VERSION_CODE`. The encoding of the code changed with NCCL 2.9.

use std::fmt;

/// A version of NCCL. The field is the version code: 23007 is version 2.30.7.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(u32);

impl Version {
    /// Returns the version with this version code, which `ncclGetVersion` returns.
    #[must_use]
    pub const fn from_code(code: u32) -> Self {
        Self(code)
    }

    /// Returns the version code, as in `NCCL_VERSION_CODE`.
    #[must_use]
    pub const fn code(self) -> u32 {
        self.0
    }

    /// Returns the major, minor and patch numbers: the arguments of `NCCL_VERSION(X, Y, Z)`.
    #[must_use]
    pub const fn parts(self) -> (u32, u32, u32) {
        // Up to NCCL 2.8, the code is major * 1000 + minor * 100 + patch: 2.8.4 is 2804. Since 2.9, the factor of the
        // major number is 10,000: 2.9.6 is 20906.
        let major = if self.0 < 10_000 { 1000 } else { 10_000 };
        (self.0 / major, self.0 % major / 100, self.0 % 100)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor, patch) = self.parts();
        write!(f, "{major}.{minor}.{patch}")
    }
}
