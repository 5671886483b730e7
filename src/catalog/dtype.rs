//! Element types, with their names in PyTorch, in safetensors and on the command line.
//!
//! Sizes are in bytes. Invariant: each dtype has one row in the table, in the order of declaration.

use std::fmt;

/// The element type of a tensor. `F4E2m1fnX2` packs two values into one byte; as in PyTorch, the shape of a tensor with
/// this dtype counts bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dtype {
    /// Boolean, one byte (`torch.bool`).
    Bool,
    /// Unsigned integer of 8 bits.
    U8,
    /// Unsigned integer of 16 bits.
    U16,
    /// Unsigned integer of 32 bits.
    U32,
    /// Unsigned integer of 64 bits.
    U64,
    /// Signed integer of 8 bits.
    I8,
    /// Signed integer of 16 bits.
    I16,
    /// Signed integer of 32 bits.
    I32,
    /// Signed integer of 64 bits.
    I64,
    /// IEEE half-precision float of 16 bits.
    F16,
    /// bfloat16: 8 bits of exponent, 7 of mantissa.
    Bf16,
    /// IEEE single-precision float of 32 bits.
    F32,
    /// IEEE double-precision float of 64 bits.
    F64,
    /// Complex number of two half-precision floats.
    C32,
    /// Complex number of two single-precision floats.
    C64,
    /// Complex number of two double-precision floats.
    C128,
    /// Float of 8 bits: 4 of exponent, 3 of mantissa, no infinities.
    F8E4m3fn,
    /// Float of 8 bits: 5 of exponent, 2 of mantissa.
    F8E5m2,
    /// Float of 8 bits: 4 of exponent, 3 of mantissa, no infinities, no negative zero.
    F8E4m3fnuz,
    /// Float of 8 bits: 5 of exponent, 2 of mantissa, no infinities, no negative zero.
    F8E5m2fnuz,
    /// Exponent of 8 bits, a power of two: the scale of MX formats.
    F8E8m0fnu,
    /// Two floats of 4 bits in one byte: 2 bits of exponent, 1 of mantissa each.
    F4E2m1fnX2,
}

/// A row of the table: the dtype, its short name, its attribute in `torch`, its typed storage class (dtypes without a
/// storage class are saved as untyped bytes), its safetensors tag, and its size in bytes.
type Row = (Dtype, &'static str, &'static str, Option<&'static str>, Option<&'static str>, u64);

const TABLE: [Row; 22] = [
    (Dtype::Bool, "bool", "bool", Some("BoolStorage"), Some("BOOL"), 1),
    (Dtype::U8, "u8", "uint8", Some("ByteStorage"), Some("U8"), 1),
    (Dtype::U16, "u16", "uint16", None, Some("U16"), 2),
    (Dtype::U32, "u32", "uint32", None, Some("U32"), 4),
    (Dtype::U64, "u64", "uint64", None, Some("U64"), 8),
    (Dtype::I8, "i8", "int8", Some("CharStorage"), Some("I8"), 1),
    (Dtype::I16, "i16", "int16", Some("ShortStorage"), Some("I16"), 2),
    (Dtype::I32, "i32", "int32", Some("IntStorage"), Some("I32"), 4),
    (Dtype::I64, "i64", "int64", Some("LongStorage"), Some("I64"), 8),
    (Dtype::F16, "f16", "float16", Some("HalfStorage"), Some("F16"), 2),
    (Dtype::Bf16, "bf16", "bfloat16", Some("BFloat16Storage"), Some("BF16"), 2),
    (Dtype::F32, "f32", "float32", Some("FloatStorage"), Some("F32"), 4),
    (Dtype::F64, "f64", "float64", Some("DoubleStorage"), Some("F64"), 8),
    (Dtype::C32, "c32", "complex32", None, None, 4),
    (Dtype::C64, "c64", "complex64", Some("ComplexFloatStorage"), Some("C64"), 8),
    (Dtype::C128, "c128", "complex128", Some("ComplexDoubleStorage"), None, 16),
    (Dtype::F8E4m3fn, "f8_e4m3fn", "float8_e4m3fn", None, Some("F8_E4M3"), 1),
    (Dtype::F8E5m2, "f8_e5m2", "float8_e5m2", None, Some("F8_E5M2"), 1),
    (Dtype::F8E4m3fnuz, "f8_e4m3fnuz", "float8_e4m3fnuz", None, Some("F8_E4M3FNUZ"), 1),
    (Dtype::F8E5m2fnuz, "f8_e5m2fnuz", "float8_e5m2fnuz", None, Some("F8_E5M2FNUZ"), 1),
    (Dtype::F8E8m0fnu, "f8_e8m0fnu", "float8_e8m0fnu", None, Some("F8_E8M0"), 1),
    (Dtype::F4E2m1fnX2, "f4_e2m1fn_x2", "float4_e2m1fn_x2", None, Some("F4"), 1),
];

/// Further names of dtypes, in addition to the names in the table. Some of these names are attributes of `torch`.
const ALIASES: [(&str, Dtype); 9] = [
    ("half", Dtype::F16),
    ("fp16", Dtype::F16),
    ("float", Dtype::F32),
    ("fp32", Dtype::F32),
    ("double", Dtype::F64),
    ("short", Dtype::I16),
    ("int", Dtype::I32),
    ("long", Dtype::I64),
    ("cfloat", Dtype::C64),
];

impl Dtype {
    /// The dtypes that floating-point tensors can be cast to.
    pub const CAST_TARGETS: [Self; 8] =
        [Self::F64, Self::F32, Self::F16, Self::Bf16, Self::F8E4m3fn, Self::F8E5m2, Self::F8E4m3fnuz, Self::F8E5m2fnuz];

    fn row(self) -> &'static Row {
        // The table is in declaration order, which a test checks.
        &TABLE[self as usize]
    }

    /// Returns the size of an element in bytes.
    #[must_use]
    pub fn itemsize(self) -> u64 {
        self.row().5
    }

    /// Returns whether the dtype is a floating-point type.
    #[must_use]
    pub fn is_float(self) -> bool {
        self >= Self::F16 && self <= Self::F64 || self >= Self::F8E4m3fn
    }

    /// Returns whether a parameter can have the dtype: PyTorch trains only floating-point and complex numbers.
    #[must_use]
    pub fn may_be_trained(self) -> bool {
        self.is_float() || matches!(self, Self::C32 | Self::C64 | Self::C128)
    }

    /// Returns the short name: `bf16`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Returns the attribute of `torch`: `bfloat16`.
    #[must_use]
    pub fn torch_name(self) -> &'static str {
        self.row().2
    }

    /// Returns the typed storage class of `torch`, such as `BFloat16Storage`, or `None` if torch saves untyped bytes.
    #[must_use]
    pub fn storage_class(self) -> Option<&'static str> {
        self.row().3
    }

    /// Returns the dtype tag in a safetensors header, or `None` if safetensors has no tag for the dtype.
    #[must_use]
    pub fn safetensors_tag(self) -> Option<&'static str> {
        self.row().4
    }

    /// Returns the dtype with this name: a short name, a `torch` attribute (with or without `torch.`) or another common
    /// name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.strip_prefix("torch.").unwrap_or(name);
        (TABLE.iter().find(|row| row.1 == name || row.2 == name).map(|row| row.0))
            .or_else(|| ALIASES.iter().find(|alias| alias.0 == name).map(|alias| alias.1))
    }

    /// Returns the dtype whose typed storage class in `torch` has this name.
    #[must_use]
    pub fn from_storage_class(class: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.3 == Some(class)).map(|row| row.0)
    }

    /// Returns the dtype with this tag in safetensors headers.
    #[must_use]
    pub fn from_safetensors_tag(tag: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.4 == Some(tag)).map(|row| row.0)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_in_declaration_order() {
        for (index, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, index);
        }
    }

    #[test]
    fn every_name_gives_its_dtype() {
        for row in &TABLE {
            assert_eq!(Dtype::from_name(row.1), Some(row.0));
            assert_eq!(Dtype::from_name(row.2), Some(row.0));
            assert_eq!(row.3.and_then(Dtype::from_storage_class), row.3.map(|_| row.0));
            assert_eq!(row.4.and_then(Dtype::from_safetensors_tag), row.4.map(|_| row.0));
        }
        assert_eq!(Dtype::from_name("torch.half"), Some(Dtype::F16));
        assert_eq!(Dtype::from_name("quint8"), None);
    }
}
