//! Errors of applying a map to a model.

use super::cell::Axis;
use super::sizes::{DimFault, SizeConflict};

/// The names and shapes of a model do not fit a map.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant shows what its fields are")]
pub enum MapError {
    /// A name of the source has no row.
    #[error("{name}: the map {family} has no row for this name on the side {side}{}", more_names(*more))]
    NoRow { family: String, side: String, name: String, more: usize, nearest: String },

    /// The target has no tensor for a part of a quantised weight.
    #[error("{name}: {from} stores this part of a quantised weight, and {to} does not")]
    QuantisedLeftOut { name: String, from: String, to: String },

    /// No name of the source has a row.
    #[error("no row of the map {family} matches a name on the side {side}; the first name is {name}")]
    NothingMatches { family: String, side: String, name: String },

    /// Tensors that belong together are missing.
    #[error("{name}: expected {expected} tensors of `{pattern}`, found {found}; this one is missing")]
    Missing { name: String, pattern: String, expected: u64, found: u64 },

    /// A tensor has another number of dims than its cell.
    #[error("{name}: expected the dims of `{pattern}`, found the shape {shape:?}")]
    DimCount { name: String, shape: Vec<u64>, pattern: String },

    /// The dims that `...` stands for differ.
    #[error("{}: the shape {:?} differs from the shape {:?} of {} in a dim that both must share", names[1], shapes[1], shapes[0], names[0])]
    RestDiffers { names: [String; 2], shapes: [Vec<u64>; 2] },

    /// The shapes do not give the size of an axis.
    #[error("{name}: the shape {shape:?} does not give {} in `{dim}`", list(axes))]
    UnknownSize { name: String, shape: Vec<u64>, dim: String, axes: Vec<Axis> },

    /// The target has an axis whose size is unknown.
    #[error("`{pattern}`: the size of {} is unknown", list(axes))]
    UnknownTargetSize { pattern: String, axes: Vec<Axis> },

    /// A name has an offset whose size is unknown.
    #[error("`{pattern}`: the size {size}, which is added to the number in the name, is unknown")]
    UnknownOffset { pattern: String, size: Axis },

    /// A dim does not fit the sizes of its axes.
    #[error("{name}: `{dim}` is {size}: {}{}", describe(fault), known_sizes(known))]
    Dim { name: String, dim: String, size: u64, fault: Box<DimFault>, known: Vec<String> },

    /// Two sources give different sizes.
    #[error(transparent)]
    SizeConflict(Box<SizeConflict>),

    /// Two rows make tensors of one name.
    #[error("{name}: two rows of {file} make this tensor, in line {} and line {}", lines[0], lines[1])]
    SameName { name: String, file: String, lines: [usize; 2] },

    /// An earlier row matches the name of a target tensor.
    #[error("{name}: the row in line {} of {file} makes this tensor, but the row in line {} takes its name on the way back", lines[0], lines[1])]
    Shadowed { name: String, file: String, lines: [usize; 2] },

    /// No declared placement gives the whole tensor the sizes of the model.
    #[error("{name}: the shards do not form the tensor of the model: {}{}", tried.join(", "), known_sizes(known))]
    CutMisfit { name: String, tried: Vec<String>, known: Vec<String> },

    /// Several declared placements fit.
    #[error("{name}: the shapes do not tell how the ranks cut the tensor: {}", tried.join(", "))]
    UnknownCut { name: String, tried: Vec<String>, axis: Axis },

    /// A tensor of the target, or the number of its tensors, is too large.
    #[error("`{pattern}`: the target has more tensors or larger dims than dtshard supports")]
    TooLarge { pattern: String },
}

impl From<SizeConflict> for MapError {
    fn from(conflict: SizeConflict) -> Self {
        Self::SizeConflict(Box::new(conflict))
    }
}

impl MapError {
    /// Returns a hint for the user.
    pub fn hint(&self) -> String {
        match self {
            Self::NoRow { name, .. } if is_scale(name) => String::from(
                "SRC is quantised, and a map moves elements without their scales: decode them with options::dequantize",
            ),
            Self::QuantisedLeftOut { .. } => String::from(
                "SRC is quantised: decode the weights with options::dequantize, or leave them out with options::exclude",
            ),
            Self::Shadowed { .. } => {
                String::from("put the row with the more specific name first, and rows with `**` last")
            }
            Self::NoRow { nearest, .. } => {
                format!("leave the tensor out with options::exclude, or add a row; the nearest row is `{nearest}`")
            }
            Self::NothingMatches { .. } => String::from("list the maps that fit: dtshard maps SRC"),
            Self::Missing { .. } => {
                String::from("give the complete model, or leave all tensors of the row out with options::exclude")
            }
            Self::UnknownSize { axes, .. } | Self::UnknownTargetSize { axes, .. } => {
                format!("give the model's configuration with options::config, or options::set {}=N", axes[0])
            }
            Self::UnknownOffset { size, .. } => {
                format!("give the model's configuration with options::config, or options::set {size}=N")
            }
            Self::CutMisfit { .. } => String::from(
                "check that the files of all ranks are there, and that the configuration is that of the model; or declare the layout \
                 with options::src_mesh and options::src_placements",
            ),
            Self::UnknownCut { axis, .. } => {
                format!("give the model's configuration with options::config, or options::set {axis}=N")
            }
            Self::SizeConflict(_) | Self::Dim { .. } => {
                String::from("correct options::set or the configuration, or choose another map")
            }
            Self::DimCount { .. } | Self::RestDiffers { .. } | Self::TooLarge { .. } | Self::SameName { .. } => {
                String::from("choose another map, or correct the rows of the map")
            }
        }
    }

    /// Returns whether the error may disappear once further sizes are known.
    pub(super) fn is_unknown_size(&self) -> bool {
        matches!(self, Self::UnknownSize { .. } | Self::UnknownTargetSize { .. } | Self::UnknownOffset { .. })
    }
}

/// Returns whether a name is that of the scales of a quantised weight, or of its packed elements.
pub fn is_scale(name: &str) -> bool {
    ["_scale", "_scale_inv", "_scales", "_blocks", ".scales", ".blocks"].iter().any(|suffix| name.ends_with(suffix))
}

fn more_names(more: usize) -> String {
    match more {
        0 => String::new(),
        1 => String::from(", nor for 1 other name"),
        more => format!(", nor for {more} other names"),
    }
}

fn list(axes: &[Axis]) -> String {
    axes.join(" and ")
}

fn describe(fault: &DimFault) -> String {
    match fault {
        DimFault::Unknown(axes) => format!("{} is unknown", list(axes)),
        DimFault::NotDivisible { axis, by, rest } => format!("{rest} is not divisible by {by}, so {axis} has no size"),
        DimFault::Differs(value) => format!("the sizes of its axes give {value}"),
        DimFault::TooLarge => String::from("the sizes of its axes exceed 64 bits"),
    }
}

fn known_sizes(known: &[String]) -> String {
    if known.is_empty() { String::new() } else { format!("; {}", known.join(", ")) }
}
