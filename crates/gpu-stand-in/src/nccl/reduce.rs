//! Reductions: combines the elements of two ranks.

use half::{bf16, f16};

/// Returns the size in bytes of an element with this dtype code (`ncclDataType_t`).
pub fn size(dtype: u32) -> Option<usize> {
    match dtype {
        0 | 1 | 10 | 11 => Some(1),
        6 | 9 => Some(2),
        2 | 3 | 7 => Some(4),
        4 | 5 | 8 => Some(8),
        _ => None,
    }
}

/// Returns true if the imitated device can reduce this dtype by this operation. It cannot reduce 8-bit floats.
pub fn can(dtype: u32, op: u32) -> bool {
    dtype <= 9 && op <= AVG
}

const PROD: u32 = 1;
const MAX: u32 = 2;
const MIN: u32 = 3;
const AVG: u32 = 4;

trait Element: Copy + PartialOrd {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn over(self, ranks: usize) -> Self;
}

macro_rules! integers {
    ($($type:ty),*) => {
        $(impl Element for $type {
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            fn times(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            fn over(self, ranks: usize) -> Self {
                <$type>::try_from(ranks).map_or(0, |ranks| self / ranks)
            }
        })*
    };
}

macro_rules! floats {
    ($($type:ty as $wide:ty: $widen:expr, $narrow:expr;)*) => {
        $(impl Element for $type {
            fn plus(self, other: Self) -> Self {
                $narrow($widen(self) + $widen(other))
            }

            fn times(self, other: Self) -> Self {
                $narrow($widen(self) * $widen(other))
            }

            #[expect(clippy::cast_precision_loss, reason = "ranks are few")]
            fn over(self, ranks: usize) -> Self {
                $narrow($widen(self) / ranks as $wide)
            }
        })*
    };
}

integers!(i8, u8, i32, u32, i64, u64);
floats! {
    f16 as f32: f16::to_f32, f16::from_f32;
    bf16 as f32: bf16::to_f32, bf16::from_f32;
    f32 as f32: std::convert::identity, std::convert::identity;
    f64 as f64: std::convert::identity, std::convert::identity;
}

/// Runs code with the Rust type for a dtype code.
macro_rules! with_type {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            0 => {
                type $type = i8;
                $body
            }
            1 => {
                type $type = u8;
                $body
            }
            2 => {
                type $type = i32;
                $body
            }
            3 => {
                type $type = u32;
                $body
            }
            4 => {
                type $type = i64;
                $body
            }
            5 => {
                type $type = u64;
                $body
            }
            6 => {
                type $type = f16;
                $body
            }
            7 => {
                type $type = f32;
                $body
            }
            8 => {
                type $type = f64;
                $body
            }
            9 => {
                type $type = bf16;
                $body
            }
            _ => unreachable!("such elements are not reduced"),
        }
    };
}

/// Combines each element of `total` with the element of `other` at the same index, and stores the result in `total`.
pub fn add(dtype: u32, op: u32, total: &mut [u8], other: &[u8]) {
    with_type!(dtype, T => {
        let size = size_of::<T>();
        for (into, from) in total.chunks_exact_mut(size).zip(other.chunks_exact(size)) {
            let (a, b) = (T::from_le_bytes(element(into)), T::from_le_bytes(element(from)));
            into.copy_from_slice(&reduced(op, a, b).to_le_bytes());
        }
    });
}

/// Completes a reduction: if the operation is an average, divides the sums by the number of ranks.
pub fn finish(dtype: u32, op: u32, ranks: usize, total: &mut [u8]) {
    if op != AVG {
        return;
    }
    with_type!(dtype, T => {
        for into in total.chunks_exact_mut(size_of::<T>()) {
            let mean = T::from_le_bytes(element(into)).over(ranks);
            into.copy_from_slice(&mean.to_le_bytes());
        }
    });
}

fn element<const N: usize>(bytes: &[u8]) -> [u8; N] {
    std::array::from_fn(|at| bytes[at])
}

fn reduced<T: Element>(op: u32, a: T, b: T) -> T {
    match op {
        PROD => a.times(b),
        MAX => {
            if b > a {
                b
            } else {
                a
            }
        }
        MIN => {
            if b < a {
                b
            } else {
                a
            }
        }
        _ => a.plus(b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_reduced_in_their_dtype() {
        let mut total = [200, 3];
        add(1, 0, &mut total, &[100, 4]);
        assert_eq!(total, [44, 7], "integers wrap");
        let mut total = bf16::from_f32(256.0).to_le_bytes();
        add(9, 0, &mut total, &bf16::from_f32(1.0).to_le_bytes());
        assert_eq!(bf16::from_le_bytes(total), bf16::from_f32(256.0), "each step rounds");
        let mut total = (-8_i32).to_le_bytes();
        add(2, MAX, &mut total, &5_i32.to_le_bytes());
        finish(2, AVG, 2, &mut total);
        assert_eq!(i32::from_le_bytes(total), 2);
    }

    #[test]
    fn unsupported_reductions_are_rejected() {
        assert!(can(9, AVG) && !can(10, 0) && !can(7, 5));
        assert_eq!((size(11), size(12)), (Some(1), None));
    }
}
