//! Values of options that several verbs have.

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

use crate::Format;
use crate::options::IoMode;
use crate::options::Split;

/// Returns a parser that accepts the name of any format. The help of the option lists only the formats in `shown`. If
/// the user gives another format, the verb itself reports the error, and explains why it does not write this format.
pub fn formats(shown: &[&Format]) -> impl TypedValueParser<Value = Format> + use<> {
    let value = |format: &Format| PossibleValue::new(format.name()).hide(!shown.contains(&format));
    let names: Vec<PossibleValue> = Format::ALL.iter().map(value).collect();
    PossibleValuesParser::new(names).map(|name| Format::from_name(&name).expect("one of the names"))
}

/// Returns a parser for the name of any format.
pub fn any_format() -> impl TypedValueParser<Value = Format> {
    formats(&Format::ALL.iter().collect::<Vec<_>>())
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum IoArg {
    /// Read files in the way that suits the file system
    Auto,
    /// Read files through mapped memory
    Mmap,
    /// Read files with positional reads
    Read,
    /// Read files past the page cache, if the file system allows it
    Direct,
}

impl IoArg {
    pub fn mode(self) -> Option<IoMode> {
        match self {
            Self::Auto => None,
            Self::Mmap => Some(IoMode::Mmap),
            Self::Read => Some(IoMode::Read),
            Self::Direct => Some(IoMode::Direct),
        }
    }
}

/// The rule by which an uneven dimension is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SplitArg {
    /// Cut as torch.chunk does
    Chunk,
    /// Divide n elements among k ranks; the first n mod k ranks get one more
    Balanced,
    /// Cut as the region mappings of makani do
    Makani,
}

impl From<SplitArg> for Split {
    fn from(arg: SplitArg) -> Self {
        match arg {
            SplitArg::Chunk => Self::Chunk,
            SplitArg::Balanced => Self::Balanced,
            SplitArg::Makani => Self::Makani,
        }
    }
}

/// Parses a number. The error describes the expected number without naming a Rust type.
pub(super) fn number<T: std::str::FromStr>(text: &str) -> Result<T, &'static str> {
    text.parse().map_err(|_| "expected a whole number below 2^32, such as 4")
}

/// Parses one rank. The error describes the list of ranks to which it belongs.
pub(super) fn rank(text: &str) -> Result<u32, &'static str> {
    text.trim().parse().map_err(|_| "expected ranks separated by commas, such as 0,2,1,3")
}
