//! Values that options of several groups take.

use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

use dtshard::format::Format;
use dtshard::layout::Split;
use dtshard::storage::IoMode;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    Dcp,
    Safetensors,
    DcpHf,
    Torch,
    TorchRanks,
    FsdpFlat,
    Local,
}

impl From<FormatArg> for Format {
    fn from(arg: FormatArg) -> Self {
        match arg {
            FormatArg::Dcp => Self::Dcp,
            FormatArg::Safetensors => Self::Safetensors,
            FormatArg::DcpHf => Self::DcpHf,
            FormatArg::Torch => Self::Torch,
            FormatArg::TorchRanks => Self::TorchRanks,
            FormatArg::FsdpFlat => Self::FsdpFlat,
            FormatArg::Local => Self::Local,
        }
    }
}

/// Reads the name of any format, and shows those that are `written`: the verb says why it does not write another one.
pub fn formats(written: &[FormatArg]) -> impl TypedValueParser<Value = FormatArg> + use<> {
    let value = |format: &FormatArg| {
        let value = format.to_possible_value().expect("no format is skipped");
        value.hide(!written.contains(format))
    };
    let names: Vec<PossibleValue> = FormatArg::value_variants().iter().map(value).collect();
    PossibleValuesParser::new(names).map(|name| FormatArg::from_str(&name, false).expect("one of the names"))
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
