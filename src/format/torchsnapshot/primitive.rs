//! Values that the manifest itself contains: ints, floats, bools, texts and bytes objects, each as text.

use crate::catalog::Value;

/// Returns the value of a Python type from its text. Returns `None` if the text is not a value of this type.
pub fn value(kind: &str, text: &str) -> Option<Value> {
    Some(match kind {
        "int" => int(text)?,
        "str" => Value::Str(text.into()),
        "bool" if text == "True" => Value::Bool(true),
        "bool" if text == "False" => Value::Bool(false),
        "bytes" => Value::Bytes(from_base64(text)?),
        // `struct.pack("d", ...)` on a little-endian machine. PyTorch supports only few big-endian machines.
        "float" => Value::Float(f64::from_le_bytes(from_base64(text)?.try_into().ok()?)),
        _ => return None,
    })
}

/// Parses a decimal integer. Returns `None` if the text is not an integer, or if the integer needs more than 128 bits.
fn int(text: &str) -> Option<Value> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let number: i128 = text.parse().ok()?;
    if let Ok(number) = i64::try_from(number) {
        return Some(Value::Int(number));
    }
    let bytes = number.to_le_bytes();
    // The number needs all bytes up to the last one that is not a redundant sign byte, and one more byte if the sign bit
    // of this last byte is wrong.
    let sign = if number < 0 { 0xff } else { 0 };
    let mut len = bytes.iter().rposition(|byte| *byte != sign).map_or(1, |last| last + 1);
    if (bytes[len - 1] ^ sign) & 0x80 != 0 {
        len += 1;
    }
    let mut short = bytes[..len.min(bytes.len())].to_vec();
    short.resize(len, sign);
    Some(Value::BigInt(short.into()))
}

/// Decodes base64 with padding (RFC 4648). Returns `None` if the text is not canonical base64.
fn from_base64(text: &str) -> Option<Vec<u8>> {
    let text = text.as_bytes();
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let padding = text.iter().rev().take_while(|byte| **byte == b'=').count();
    if padding > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for group in text[..text.len() - padding].chunks(4) {
        let mut bits = 0_u32;
        for byte in group {
            bits = bits << 6 | sextet(*byte)?;
        }
        bits <<= 6 * (4 - group.len());
        let [_, decoded @ ..] = bits.to_be_bytes();
        let (kept, rest) = decoded.split_at(group.len() - 1);
        if rest.iter().any(|byte| *byte != 0) {
            return None;
        }
        bytes.extend_from_slice(kept);
    }
    Some(bytes)
}

fn sextet(byte: u8) -> Option<u32> {
    let value = match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    };
    Some(value.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_become_values_of_their_types() {
        for (kind, text, expected) in [
            ("int", "-30", Value::Int(-30)),
            ("int", "9223372036854775807", Value::Int(i64::MAX)),
            ("int", "9223372036854775808", Value::from(1_u64 << 63)),
            ("int", "18446744073709551615", Value::from(u64::MAX)),
            ("int", "-9223372036854775809", Value::BigInt([255, 255, 255, 255, 255, 255, 255, 127, 255].into())),
            ("bool", "True", Value::Bool(true)),
            ("bool", "False", Value::Bool(false)),
            ("str", "x: y", Value::Str("x: y".into())),
            ("bytes", "", Value::Bytes(Vec::new())),
            ("bytes", "AP8=", Value::Bytes(vec![0, 255])),
            ("bytes", "AA==", Value::Bytes(vec![0])),
            ("float", "AAAAAAAABEA=", Value::Float(2.5)),
        ] {
            assert_eq!(value(kind, text), Some(expected), "{kind} {text}");
        }
        assert!(matches!(value("float", "AAAAAAAA+H8="), Some(Value::Float(nan)) if nan.is_nan()));
    }

    #[test]
    fn texts_of_other_types_are_refused() {
        for (kind, text) in [
            ("int", ""),
            ("int", "+1"),
            ("int", "1_0"),
            ("int", "0x10"),
            ("int", "999999999999999999999999999999999999999999"),
            ("bool", "true"),
            ("float", "2.5"),
            ("float", "AAAA"),
            ("bytes", "AP8"),
            ("bytes", "A==="),
            ("bytes", "===="),
            ("bytes", "AP9="),
            ("bytes", "A P8"),
            ("complex", "1j"),
        ] {
            assert_eq!(value(kind, text), None, "{kind} {text}");
        }
    }

    proptest::proptest! {
        /// Every text is a value or is refused; no text makes the decoder panic.
        #[test]
        fn every_text_is_handled(text in ".{0,40}") {
            for kind in ["int", "bool", "bytes", "float", "str"] {
                let _ = value(kind, &text);
            }
        }
    }
}
