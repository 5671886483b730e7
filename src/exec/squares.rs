//! Sums of squares of numbers of any size: squares of very large numbers do not overflow, and squares of very small numbers
//! do not become zero.

/// A sum of squares. Large and small numbers are scaled before they are squared, and have sums of their own (Blue, "A
/// Portable Fortran Program to Find the Euclidean Norm of a Vector", 1978).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SumOfSquares {
    small: f64,
    middle: f64,
    large: f64,
}

/// Returns a power of two, whose exponent is `biased` - 1023.
const fn power(biased: u64) -> f64 {
    f64::from_bits(biased << 52)
}

/// The smallest number that is large.
const LARGE: f64 = power(1023 + 400);

/// The smallest number that is neither large nor small.
const MIDDLE: f64 = power(1023 - 400);

/// The factors that make small numbers larger, and large numbers smaller.
const GROW: f64 = power(1023 + 600);
const SHRINK: f64 = power(1023 - 600);

impl SumOfSquares {
    /// Adds the square of a number. Infinity makes the sum infinite, and NaN makes it NaN.
    pub fn add(&mut self, number: f64) {
        let size = number.abs();
        if (MIDDLE..LARGE).contains(&size) {
            self.middle += size * size;
        } else if size < MIDDLE {
            self.small += (size * GROW) * (size * GROW);
        } else {
            self.large += (size * SHRINK) * (size * SHRINK);
        }
    }

    /// Returns the sum of the squares of both.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        Self { small: self.small + other.small, middle: self.middle + other.middle, large: self.large + other.large }
    }

    /// Returns the root of this sum divided by the root of another sum: 0 if this sum is 0, and infinity if only the
    /// other sum is 0.
    pub fn root_ratio(self, other: Self) -> f64 {
        let (above, below) = (self.root(), other.root());
        if above.0 == 0.0 {
            return 0.0;
        }
        let mut ratio = above.0 / below.0;
        // A single factor could overflow although the result does not.
        for _ in below.1..above.1 {
            ratio *= GROW;
        }
        for _ in above.1..below.1 {
            ratio *= SHRINK;
        }
        ratio
    }

    /// Returns the root as a number, and how often the number is to be multiplied by [`GROW`].
    fn root(self) -> (f64, i32) {
        let shrunk = |sum: f64| sum * SHRINK * SHRINK;
        if self.large != 0.0 {
            ((self.large + shrunk(self.middle)).sqrt(), 1)
        } else if self.middle != 0.0 {
            ((self.middle + shrunk(self.small)).sqrt(), 0)
        } else {
            (self.small.sqrt(), -1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ratio(left: &[f64], right: &[f64]) -> f64 {
        let sum = |numbers: &[f64]| {
            let mut sum = SumOfSquares::default();
            numbers.iter().for_each(|number| sum.add(*number));
            sum
        };
        sum(left).root_ratio(sum(right))
    }

    #[test]
    fn squares_neither_overflow_nor_vanish() {
        for scale in [1.0, 1e300, 1e-300, 1e150, 1e-150, 1e-308] {
            let found = ratio(&[3.0 * scale, -4.0 * scale], &[scale]);
            assert!((found - 5.0).abs() < 1e-12, "{scale}: {found}");
        }
        let found = ratio(&[1e-300], &[1e300]);
        assert!(found == 0.0, "{found}");
        let found = ratio(&[1e-140, 1e-10], &[2e-10]);
        assert!((found - 0.5).abs() < 1e-12, "{found}");
    }

    #[test]
    fn nan_infinity_and_zero_are_kept() {
        assert!(ratio(&[f64::NAN, 1.0], &[1.0]).is_nan());
        assert!(ratio(&[f64::INFINITY], &[1.0]).is_infinite());
        assert!(ratio(&[f64::INFINITY, f64::NAN], &[1.0]).is_nan());
        assert!(ratio(&[1.0], &[]).is_infinite());
        assert!(ratio(&[0.0], &[]) == 0.0);
    }
}
