//! Parses and formats numbers of bytes, such as `5GB`.
//!
//! Decimal units (kB, MB, GB, TB) are powers of 1000, and binary units (KiB, MiB, GiB, TiB) powers of 1024.

use std::str::FromStr;
use std::time::Duration;

/// A number of bytes: `512MB` is 512 * 10^6, `4GiB` is 4 * 2^30, `4G` is `4GB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantity(pub u64);

impl FromStr for Quantity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let no_number = || String::from("expected a number of bytes, such as 5GB");
        if number.is_empty() {
            return Err(no_number());
        }
        let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kb" => 1_000,
            "m" | "mb" => 1_000_000,
            "g" | "gb" => 1_000_000_000,
            "t" | "tb" => 1_000_000_000_000,
            "kib" => 1 << 10,
            "mib" => 1 << 20,
            "gib" => 1 << 30,
            "tib" => 1 << 40,
            _ => return Err(format!("unknown unit `{unit}`: use KB, MB, GB, TB or KiB, MiB, GiB, TiB")),
        };
        let too_large = || format!("`{text}` is too large for a number of bytes");
        if let Ok(whole) = number.parse::<u64>() {
            if whole == 0 {
                return Err(format!("`{text}` is zero: use at least 1 byte"));
            }
            return whole.checked_mul(factor).map(Self).ok_or_else(too_large);
        }
        let value: f64 = number.parse().map_err(|_| no_number())?;
        #[expect(clippy::cast_precision_loss, reason = "sizes with a fraction are not exact anyway")]
        let bytes = value * factor as f64;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be in range")]
        if (1.0..9e18).contains(&bytes) { Ok(Self(bytes as u64)) } else { Err(too_large()) }
    }
}

/// Formats a number of bytes: `14.96 GB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "kB", "MB", "GB", "TB"];
    #[expect(clippy::cast_precision_loss, reason = "shown with two decimals")]
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 999.995 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.2} {}", UNITS[unit]) }
}

/// Formats a rate: `1.53 GB/s`. Returns `None` if `time` is too short for a meaningful rate.
pub fn human_rate(bytes: u64, time: Duration) -> Option<String> {
    #[expect(clippy::cast_precision_loss, reason = "shown with few digits")]
    let rate = bytes as f64 / time.as_secs_f64();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive, and far below 2^64")]
    (time >= SHORTEST_RATED).then(|| format!("{}/s", human_bytes(rate as u64)))
}

/// The shortest time for which a rate is shown. In a shorter time, start-up would dominate the rate.
const SHORTEST_RATED: Duration = Duration::from_millis(100);

/// Formats a number with its noun: `1 file`, `7 files`.
pub fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_powers_of_ten_or_two() {
        for (text, bytes) in
            [("5GB", 5_000_000_000), ("5GiB", 5 << 30), ("1.5k", 1500), ("7", 7), ("512 MB", 512_000_000)]
        {
            assert_eq!(text.parse(), Ok(Quantity(bytes)), "{text}");
        }
        for text in ["", "GB", "5XB", "-1", "0", "99999999999999999999", "99999999TB", "1e3", "nan"] {
            assert!(text.parse::<Quantity>().is_err(), "{text}");
        }
    }

    #[test]
    fn short_time_has_no_rate() {
        assert_eq!(human_rate(15_300_000_000, Duration::from_secs(10)).unwrap(), "1.53 GB/s");
        assert_eq!(human_rate(270_000, Duration::from_millis(100)).unwrap(), "2.70 MB/s");
        assert_eq!(human_rate(270_000, Duration::from_millis(99)), None);
    }

    #[test]
    fn bytes_are_formatted_in_powers_of_ten() {
        assert_eq!(human_bytes(999), "999 B");
        assert_eq!(human_bytes(14_960_000_000), "14.96 GB");
        assert_eq!(human_bytes(999_999), "1.00 MB");
        assert_eq!(count(1, "file"), "1 file");
        assert_eq!(count(0, "file"), "0 files");
    }
}
