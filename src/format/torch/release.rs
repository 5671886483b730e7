//! The PyTorch releases that can load DTensors that dtshard writes.
//!
//! A DTensor has the same fields in all releases from 2.5 to 2.15. The fields of its mesh were renamed in 2.10, and the
//! class of the mesh layout changed in 2.13, so no pickle is a valid mesh for all releases. Measured with 2.5.1, 2.9.1,
//! 2.10.0, 2.12.0 and 2.15.0:
//!
//! ```text
//! written for   loads and works in   other releases
//! 2.5           2.5 to 2.9           2.10 and later load local tensors and placements, but not the mesh
//! 2.10          2.10                 2.11 and 2.12 load all except strided shards, which store their order differently
//! 2.11          2.11 and 2.12        2.13 and later load local tensors and placements, but not the mesh;
//!                                    2.10 loads all except strided shards; earlier releases lack a module
//! 2.13          2.13 and later       earlier releases lack a class
//! ```
//!
//! Source: `torch/distributed/device_mesh.py`, `torch/distributed/_mesh_layout.py`.

/// The forms in which PyTorch releases pickle a DeviceMesh. Each form is named after its first release that dtshard
/// supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Release {
    /// PyTorch up to 2.9: the mesh is an array of ranks.
    V2_5,
    /// PyTorch 2.10: the mesh is a layout of nested sizes and strides.
    V2_10,
    /// PyTorch 2.11 and 2.12: the mesh has the fields of 2.10, and also the rank. Strided shards record the order in
    /// which mesh dims shard the tensor dim.
    V2_11,
    /// PyTorch 2.13 and later: the mesh is a layout of axes.
    #[default]
    V2_13,
}

impl Release {
    /// Returns the form that a PyTorch version such as `2.9.1`, `v2.9` or `2.15.0+cu132` uses. Returns `None` for
    /// versions before 2.5 and for invalid versions.
    pub fn from_version(version: &str) -> Option<Self> {
        let mut parts = version.trim_start_matches('v').split(['.', '+']).map(str::parse::<u32>);
        match (parts.next()?.ok()?, parts.next()?.ok()?) {
            (2, 5..=9) => Some(Self::V2_5),
            (2, 10) => Some(Self::V2_10),
            (2, 11..=12) => Some(Self::V2_11),
            (2, 13..) | (3.., _) => Some(Self::V2_13),
            _ => None,
        }
    }
}

/// The form in which a checkpoint stores DTensors. The form depends on the PyTorch release and the device type of the
/// job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DTensorStyle {
    pub release: Release,
    /// The device type of meshes: `cpu` or `cuda`. Local tensors are always written as CPU tensors, because these load
    /// on every machine. Trainers with CPU offload also save CPU tensors.
    pub device_type: String,
}

impl Default for DTensorStyle {
    fn default() -> Self {
        Self { release: Release::default(), device_type: String::from("cpu") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_map_to_releases() {
        let of = Release::from_version;
        assert_eq!((of("2.4.1"), of("1.13"), of("latest"), of("2")), (None, None, None, None));
        assert_eq!(
            (of("2.5.1"), of("v2.6.0+cu124"), of("2.10.0")),
            (Some(Release::V2_5), Some(Release::V2_5), Some(Release::V2_10))
        );
        assert_eq!(
            (of("2.12.0"), of("2.15.0+cu132"), of("3.0")),
            (Some(Release::V2_11), Some(Release::V2_13), Some(Release::V2_13))
        );
    }
}
