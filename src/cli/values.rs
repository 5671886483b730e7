//! Values that options of several groups take.

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

use dtshard::Format;
use dtshard::options::IoMode;
use dtshard::options::Split;

/// Reads the name of any format, and shows those that `shown` names: a verb says why it does not write another one.
pub fn formats(shown: &[&Format]) -> impl TypedValueParser<Value = Format> + use<> {
    let value = |format: &Format| PossibleValue::new(format.name()).hide(!shown.contains(&format));
    let names: Vec<PossibleValue> = Format::ALL.iter().map(value).collect();
    PossibleValuesParser::new(names).map(|name| Format::from_name(&name).expect("one of the names"))
}

/// Reads the name of a format.
pub fn any_format() -> impl TypedValueParser<Value = Format> {
    formats(&Format::ALL.iter().collect::<Vec<_>>())
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum IoArg {
    Auto,
    Mmap,
    Read,
    // Past the page cache, where the file system can.
    Direct,
}

impl IoArg {
    #[must_use]
    pub fn mode(self) -> Option<IoMode> {
        match self {
            Self::Auto => None,
            Self::Mmap => Some(IoMode::Mmap),
            Self::Read => Some(IoMode::Read),
            Self::Direct => Some(IoMode::Direct),
        }
    }
}

/// How a dim is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SplitArg {
    Chunk,
    Balanced,
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

/// One of a list of ranks.
pub(super) fn rank(text: &str) -> Result<u32, &'static str> {
    text.trim().parse().map_err(|_| "expected ranks with commas between them, such as 0,2,1,3")
}
