//! Tests against element-wise arithmetic that shares only the casts with the tested loops.

#![expect(clippy::cast_possible_truncation, clippy::float_cmp, reason = "compares numbers bit for bit")]

use super::*;
use ReduceOp::{Avg, Band, Bor, Bxor, Max, Min, Product, Sum};

/// Reduces partial values, adding one at a time.
fn reduce(dtype: Dtype, op: ReduceOp, divisor: u64, partial_values: &[Vec<u8>]) -> Result<Vec<u8>, ReduceError> {
    let reducer = Reducer::new(dtype, op, divisor)?;
    let len = partial_values[0].len();
    // The initial content of `sums` does not matter.
    let (mut sums, mut value) = (vec![0x5a; len * reducer.widening()], vec![0; len]);
    for (number, partial_value) in partial_values.iter().enumerate() {
        reducer.add(number == 0, partial_value, &mut sums);
    }
    reducer.finish(&mut sums, &mut value)?;
    Ok(value)
}

fn cast(from: Dtype, to: Dtype, source: &[u8]) -> Vec<u8> {
    let Some(cast) = Cast::new(from, to) else { return source.to_vec() };
    let size = |dtype: Dtype| usize::try_from(dtype.itemsize()).unwrap();
    let mut target = vec![0; source.len() / size(from) * size(to)];
    cast.convert(source, &mut target);
    target
}

fn doubles(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn to_doubles(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    let wide = match dtype {
        Dtype::F8E4m3fn => return bytes.iter().map(|byte| e4m3fn([*byte])).collect(),
        Dtype::F8E5m2 => return bytes.iter().map(|byte| e5m2([*byte])).collect(),
        Dtype::F8E4m3fnuz => return bytes.iter().map(|byte| e4m3fnuz([*byte])).collect(),
        Dtype::F8E5m2fnuz => return bytes.iter().map(|byte| e5m2fnuz([*byte])).collect(),
        dtype => cast(dtype, Dtype::F64, bytes),
    };
    wide.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
}

/// Returns element `index` of the partial value with the number `of`. The elements have different magnitudes, so that
/// sums are not exact.
fn number(index: usize, of: usize) -> f64 {
    let wild = (index * 31 + of * 17 + 5).wrapping_mul(0x9E37_79B9) % 2003;
    (f64::from(u32::try_from(wild).unwrap()) - 1001.0) / [5.0, 7.0, 64.0, 1000.0][index % 4]
}

const FLOATS: [Dtype; 8] = Dtype::CAST_TARGETS;

#[test]
fn floats_are_rounded_once_from_the_wider_type() {
    for dtype in FLOATS {
        let narrow = !matches!(dtype, Dtype::F32 | Dtype::F64);
        let partial_values: Vec<Vec<u8>> = (0..5)
            .map(|of| cast(Dtype::F64, dtype, &doubles(&(0..301).map(|at| number(at, of)).collect::<Vec<_>>())))
            .collect();
        let values: Vec<Vec<f64>> =
            partial_values.iter().map(|partial_value| to_doubles(dtype, partial_value)).collect();
        for (op, divisor) in [(Sum, 1), (Sum, 3), (Avg, 5), (Product, 1), (Max, 1), (Min, 1)] {
            let naive = (0..301).map(|at| {
                let mut sum = values[0][at];
                for other in &values[1..] {
                    sum = match op {
                        Max => {
                            if other[at] > sum {
                                other[at]
                            } else {
                                sum
                            }
                        }
                        Min => {
                            if other[at] < sum {
                                other[at]
                            } else {
                                sum
                            }
                        }
                        Product => sum * other[at],
                        _ => sum + other[at],
                    };
                    if narrow {
                        sum = f64::from(sum as f32);
                    }
                }
                #[expect(clippy::cast_precision_loss)]
                let quotient = sum / divisor as f64;
                if narrow { f64::from(quotient as f32) } else { quotient }
            });
            let expected = cast(Dtype::F64, dtype, &doubles(&naive.collect::<Vec<_>>()));
            assert_eq!(reduce(dtype, op, divisor, &partial_values), Ok(expected), "{op} of {dtype} by {divisor}");
        }
    }
}

#[test]
fn small_addends_are_not_lost() {
    // If the sum were computed in these dtypes, adding 1 would not change it.
    let ones = |dtype, first: f64, count: usize| {
        let first = std::iter::once(cast(Dtype::F64, dtype, &doubles(&[first])));
        let partial_values: Vec<Vec<u8>> =
            first.chain((0..count).map(|_| cast(Dtype::F64, dtype, &doubles(&[1.0])))).collect();
        to_doubles(dtype, &reduce(dtype, Sum, 1, &partial_values).unwrap())[0]
    };
    assert_eq!(ones(Dtype::F32, 16_777_216.0, 4), 16_777_220.0);
    assert_eq!(ones(Dtype::Bf16, 256.0, 4), 260.0);
    assert_eq!(ones(Dtype::F16, 2048.0, 4), 2052.0);
    assert_eq!(ones(Dtype::F8E5m2, 8.0, 4), 12.0);
}

#[test]
fn nan_propagates_and_first_zero_is_kept() {
    let nan = f64::NAN;
    for dtype in FLOATS {
        let of = |values: &[f64]| cast(Dtype::F64, dtype, &doubles(values));
        let partial_values =
            [of(&[-0.0, 0.0, nan, 1.0, 2.0]), of(&[0.0, -0.0, 1.0, nan, nan]), of(&[-0.0, 0.0, 3.0, 3.0, nan])];
        for op in [Max, Min, Sum, Product] {
            let found = reduce(dtype, op, 1, &partial_values).unwrap();
            let values = to_doubles(dtype, &found);
            assert!(values[2..].iter().all(|value| value.is_nan()), "{op} of {dtype}");
            if matches!(op, Max | Min) {
                assert_eq!(
                    found[..2 * found.len() / 5],
                    partial_values[0][..2 * found.len() / 5],
                    "the first zero stays"
                );
            }
        }
        let quiet = cast(Dtype::F64, dtype, &doubles(&[nan]));
        let infinite = [of(&[f64::INFINITY]), of(&[f64::NEG_INFINITY])];
        if !matches!(dtype, Dtype::F8E4m3fn) {
            assert_eq!(reduce(dtype, Sum, 1, &infinite).unwrap(), quiet, "{dtype}: one NaN on all machines");
        }
        assert_eq!(reduce(dtype, Sum, 1, &[of(&[-0.0]), of(&[-0.0])]).unwrap(), of(&[-0.0]));
    }
}

#[test]
fn integers_are_exact_or_an_error() {
    let i64s = |values: &[i64]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let both = [i64s(&[i64::MAX, -7, 6]), i64s(&[-2, 3, 10])];
    let found = |op, divisor| reduce(Dtype::I64, op, divisor, &both);
    assert_eq!(found(Sum, 1), Ok(i64s(&[i64::MAX - 2, -4, 16])));
    assert_eq!(found(Max, 1), Ok(i64s(&[i64::MAX, 3, 10])));
    assert_eq!(found(Min, 1), Ok(i64s(&[-2, -7, 6])));
    assert_eq!(found(Band, 1), Ok(i64s(&[i64::MAX & -2, -7 & 3, 0b10])));
    assert_eq!(found(Bor, 1), Ok(i64s(&[i64::MAX | -2, -7 | 3, 0b1110])));
    assert_eq!(found(Bxor, 1), Ok(i64s(&[i64::MAX ^ -2, -7 ^ 3, 0b1100])));
    assert_eq!(found(Avg, 2), Err(ReduceError::Remainder { value: i128::from(i64::MAX) - 2, divisor: 2 }));
    let overflow = |value| ReduceError::Overflow { dtype: Dtype::I64, op: Product, value };
    assert_eq!(found(Product, 1), Err(overflow(i128::from(i64::MAX) * -2)));
    // An intermediate sum may exceed the range of the dtype.
    let three = [i64s(&[i64::MAX]), i64s(&[i64::MAX]), i64s(&[-i64::MAX])];
    assert_eq!(reduce(Dtype::I64, Sum, 1, &three), Ok(i64s(&[i64::MAX])));
    let most = vec![i64s(&[i64::MAX]); 5];
    assert!(matches!(reduce(Dtype::I64, Product, 1, &most), Err(ReduceError::Overflow { .. })));
    assert_eq!(reduce(Dtype::I64, Product, 1, &[most, vec![i64s(&[0])]].concat()), Ok(i64s(&[0])));
    for (dtype, bytes, fits) in [
        (Dtype::U8, [200, 55], true),
        (Dtype::U8, [200, 56], false),
        (Dtype::I8, [0x80, 0x7f], true),
        (Dtype::I8, [0x80, 0xff], false),
    ] {
        assert_eq!(reduce(dtype, Sum, 1, &bytes.map(|byte| vec![byte])).is_ok(), fits, "{dtype} {bytes:?}");
    }
    for dtype in [Dtype::U16, Dtype::U32, Dtype::U64, Dtype::I16, Dtype::I32] {
        let size = usize::try_from(dtype.itemsize()).unwrap();
        let of = |value: u8| {
            let mut bytes = vec![0; size];
            bytes[0] = value;
            bytes
        };
        assert_eq!(reduce(dtype, Avg, 3, &[of(100), of(50), of(60)]), Ok(of(70)), "{dtype}");
    }
}

#[test]
fn bool_and_complex_support_some_ops() {
    let both = [vec![0, 0, 1, 2], vec![0, 1, 0, 1]];
    for (op, expected) in
        [(Max, [0, 1, 1, 1]), (Min, [0, 0, 0, 1]), (Band, [0, 0, 0, 1]), (Bor, [0, 1, 1, 1]), (Bxor, [0, 1, 1, 0])]
    {
        assert_eq!(reduce(Dtype::Bool, op, 1, &both), Ok(expected.to_vec()), "{op}");
    }
    for (dtype, part) in [(Dtype::C32, Dtype::F16), (Dtype::C64, Dtype::F32), (Dtype::C128, Dtype::F64)] {
        let of = |values: &[f64]| cast(Dtype::F64, part, &doubles(values));
        let both = [of(&[1.0, -2.0, 0.5, 8.0]), of(&[3.0, 4.0, -0.5, 8.0])];
        assert_eq!(reduce(dtype, Avg, 2, &both), Ok(of(&[2.0, 1.0, 0.0, 8.0])), "{dtype}");
    }
}

#[test]
fn undefined_op_of_a_dtype_is_an_error() {
    let undefined = [
        (Dtype::Bool, Sum),
        (Dtype::Bool, Avg),
        (Dtype::Bool, Product),
        (Dtype::F32, Band),
        (Dtype::Bf16, Bxor),
        (Dtype::C64, Max),
        (Dtype::C128, Min),
        (Dtype::C64, Product),
        (Dtype::F4E2m1fnX2, Sum),
        (Dtype::F8E8m0fnu, Max),
    ];
    for (dtype, op) in undefined {
        let fault = Reducer::new(dtype, op, 1).unwrap_err();
        assert_eq!(fault, ReduceError::Undefined { dtype, op });
        assert!(fault.to_string().contains(dtype.name()), "{fault}");
    }
    // A division is allowed only for a sum, and bool has no sum.
    assert!(Reducer::new(Dtype::Bool, Max, 2).is_err());
}
