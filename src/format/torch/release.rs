//! Which PyTorch is to load DTensors.
//!
//! A DTensor's own part has been the same from 2.5 to 2.15. The mesh in it has not: its fields were renamed in 2.10,
//! and the class of its layout took another form in 2.13, so that no pickle is a mesh to all of them. Measured with
//! 2.5.1, 2.9.1, 2.10.0, 2.12.0 and 2.15.0:
//!
//! ```text
//! written for   loads and works in   elsewhere
//! 2.5           2.5 to 2.9           loads from 2.10 on, too: local tensors and placements are there, the mesh is not
//! 2.10          2.10                 2.11 and 2.12, but for strided shards, whose order they write otherwise
//! 2.11          2.11 and 2.12        2.13 and later: as above; 2.10 but for strided shards; earlier ones lack a module
//! 2.13          2.13 and later       earlier ones lack a class
//! ```
//!
//! Source: `torch/distributed/device_mesh.py`, `torch/distributed/_mesh_layout.py`.

/// The PyTorch releases whose DeviceMesh is written, by the first that had it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Release {
    /// To 2.9: the array of ranks.
    V2_5,
    /// A layout of nested sizes and strides.
    V2_10,
    /// To 2.12: the same, with the rank, and with strided shards that say their order themselves.
    V2_11,
    /// And later: a layout of axes.
    #[default]
    V2_13,
}

impl Release {
    /// That of a version such as `2.9.1`, `v2.9` or `2.15.0+cu132`; `None` before 2.5, and for what is no version.
    #[must_use]
    pub fn of_version(version: &str) -> Option<Self> {
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

/// What a checkpoint's DTensors do not share with those of every other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DTensorStyle {
    pub release: Release,
    /// Of the meshes: `cpu`, `cuda`. Local tensors are always written as those of the CPU, where they can be loaded
    /// everywhere; trainers that save with CPU offload have the same.
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
    fn versions_have_releases() {
        let of = Release::of_version;
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
