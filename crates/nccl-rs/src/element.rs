//! Element types and reductions: the built-in values of `ncclDataType_t` and `ncclRedOp_t`.

use crate::raw::{ncclDataType_t, ncclRedOp_t};

/// The type of the elements of a buffer: `ncclDataType_t`, complete as of NCCL 2.30.
///
/// Only reductions depend on the type. Data of a type that is not in this list can be sent as [`DataType::Uint8`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DataType {
    /// `ncclInt8`
    Int8,
    /// `ncclUint8`
    Uint8,
    /// `ncclInt32`
    Int32,
    /// `ncclUint32`
    Uint32,
    /// `ncclInt64`
    Int64,
    /// `ncclUint64`
    Uint64,
    /// `ncclFloat16`
    Float16,
    /// `ncclFloat32`
    Float32,
    /// `ncclFloat64`
    Float64,
    /// `ncclBfloat16`
    Bfloat16,
    /// `ncclFloat8e4m3`, since NCCL 2.24. Reductions need a device of compute capability 9.0 or above.
    Float8e4m3,
    /// `ncclFloat8e5m2`, since NCCL 2.24. Reductions need a device of compute capability 9.0 or above.
    Float8e5m2,
}

impl DataType {
    /// All element types, in the order of their codes, which begin at 0.
    pub const ALL: [Self; 12] = [
        Self::Int8,
        Self::Uint8,
        Self::Int32,
        Self::Uint32,
        Self::Int64,
        Self::Uint64,
        Self::Float16,
        Self::Float32,
        Self::Float64,
        Self::Bfloat16,
        Self::Float8e4m3,
        Self::Float8e5m2,
    ];

    /// Returns the code of the element type in `nccl.h`.
    #[must_use]
    pub const fn code(self) -> ncclDataType_t {
        match self {
            Self::Int8 => 0,
            Self::Uint8 => 1,
            Self::Int32 => 2,
            Self::Uint32 => 3,
            Self::Int64 => 4,
            Self::Uint64 => 5,
            Self::Float16 => 6,
            Self::Float32 => 7,
            Self::Float64 => 8,
            Self::Bfloat16 => 9,
            Self::Float8e4m3 => 10,
            Self::Float8e5m2 => 11,
        }
    }

    /// Returns the element type with this code in `nccl.h`. Returns `None` if this crate does not know the code.
    #[must_use]
    pub fn from_code(code: ncclDataType_t) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.code() == code)
    }

    /// Returns the size of one element in bytes.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::Int8 | Self::Uint8 | Self::Float8e4m3 | Self::Float8e5m2 => 1,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float32 => 4,
            Self::Int64 | Self::Uint64 | Self::Float64 => 8,
        }
    }
}

/// A reduction operation on the elements of all ranks: the built-in values of `ncclRedOp_t`.
///
/// Sums and products of floats depend on the order of the ranks, and narrow dtypes are rounded at every step. All ranks
/// get the same result, but another machine or another algorithm may give a different result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RedOp {
    /// `ncclSum`
    Sum,
    /// `ncclProd`
    Prod,
    /// `ncclMax`
    Max,
    /// `ncclMin`
    Min,
    /// `ncclAvg`: the sum divided by the number of ranks. Averages of integers are truncated.
    Avg,
}

impl RedOp {
    /// All reduction operations, in the order of their codes, which begin at 0.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Prod, Self::Max, Self::Min, Self::Avg];

    /// Returns the code of the reduction operation in `nccl.h`.
    #[must_use]
    pub const fn code(self) -> ncclRedOp_t {
        match self {
            Self::Sum => 0,
            Self::Prod => 1,
            Self::Max => 2,
            Self::Min => 3,
            Self::Avg => 4,
        }
    }
}
