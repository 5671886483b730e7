//! Encodes Python's unbounded integers as little-endian two's complement.
//!
//! Lengths are in bytes. Invariant of [`minimal`]: no sign byte can be dropped, and zero has no bytes at all.
//!
//! Source of the rule: CPython `Lib/pickle.py`, `encode_long` and `decode_long`.

/// Drops the sign bytes that are not needed, from an integer in little-endian two's complement.
pub(super) fn minimal(mut bytes: &[u8]) -> &[u8] {
    while let [rest @ .., last] = bytes {
        let sign = match rest.last() {
            Some(next) if next & 0x80 != 0 => 0xff,
            _ => 0x00,
        };
        if *last != sign {
            break;
        }
        bytes = rest;
    }
    bytes
}

pub(super) fn to_i64(bytes: &[u8]) -> Option<i64> {
    let bytes = minimal(bytes);
    if bytes.len() > 8 {
        return None;
    }
    let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
    let mut padded = if negative { [0xff; 8] } else { [0; 8] };
    padded[..bytes.len()].copy_from_slice(bytes);
    Some(i64::from_le_bytes(padded))
}

/// Converts an integer in little-endian two's complement to `u64`. A number in the upper half of `u64` takes nine bytes
/// in this form.
pub(super) fn to_u64(bytes: &[u8]) -> Option<u64> {
    match minimal(bytes) {
        [low @ .., 0] if low.len() == 8 => low.first_chunk().map(|low| u64::from_le_bytes(*low)),
        bytes => to_i64(bytes).and_then(|value| u64::try_from(value).ok()),
    }
}
