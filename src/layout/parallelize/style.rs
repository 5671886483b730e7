//! What a style makes of a parameter: the dim that is cut, and how it is written.
//!
//! Counts dims from the end, so that stacks of weights are cut as one of them is.

use std::{fmt, str::FromStr};

use super::super::{LayoutError, TensorDim};

/// What becomes of the parameters of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParallelStyle {
    /// `blocks` weights in one, each cut by itself; 1 for an ordinary one.
    Colwise {
        blocks: u64,
    },
    Rowwise {
        blocks: u64,
    },
    ColwiseEmbedding,
    RowwiseEmbedding,
    ColwiseConv1d {
        blocks: u64,
    },
    RowwiseConv1d {
        blocks: u64,
    },
    Pairwise,
    Sequence,
    Replicate,
    /// As if no style named it: for what a later pattern, or a built-in plan, would name.
    None,
}

/// What a parameter is to its module, which its name tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterRole {
    Weight,
    Bias,
    /// What else a module has: scales of quantised weights. `RowwiseParallel` leaves them whole, `ColwiseParallel` cuts
    /// them as weights.
    Other,
}

impl ParameterRole {
    /// Of a module that has a style.
    #[must_use]
    pub fn of_module(name: &str) -> Self {
        match name.rsplit('.').next() {
            Some("weight") => Self::Weight,
            Some(own) if own == "bias" || own.ends_with("_bias") => Self::Bias,
            _ => Self::Other,
        }
    }

    /// A parameter that has a style of its own: stacked experts, or `gate_up_proj_bias` of such.
    #[must_use]
    pub fn by_itself(name: &str) -> Self {
        let own = Self::of_module(name);
        if own == Self::Other { Self::Weight } else { own }
    }
}

impl ParallelStyle {
    /// Every name, as in a layout file.
    pub const NAMES: [&'static str; 10] = [
        "colwise",
        "rowwise",
        "colwise-embedding",
        "rowwise-embedding",
        "colwise-conv1d",
        "rowwise-conv1d",
        "pairwise",
        "sequence",
        "replicate",
        "none",
    ];

    /// The dim along which a parameter is cut; `None` where every rank has all of it.
    ///
    /// A vector that is no bias belongs to the outputs, as a bias does (scales of quantised weights).
    #[must_use]
    pub fn dim(self, part: ParameterRole, ndim: usize) -> Option<TensorDim> {
        let part = if ndim == 1 { ParameterRole::Bias } else { part };
        let from_the_end = match (self, part) {
            (Self::Rowwise { .. } | Self::RowwiseConv1d { .. }, ParameterRole::Other) => return None,
            (
                Self::Colwise { .. } | Self::RowwiseEmbedding | Self::RowwiseConv1d { .. },
                ParameterRole::Weight | ParameterRole::Other,
            ) => 2,
            (
                Self::Rowwise { .. } | Self::ColwiseEmbedding | Self::ColwiseConv1d { .. },
                ParameterRole::Weight | ParameterRole::Other,
            )
            | (Self::Colwise { .. } | Self::ColwiseConv1d { .. }, ParameterRole::Bias) => 1,
            _ => return None,
        };
        ndim.checked_sub(from_the_end).map(TensorDim)
    }

    /// Weights in one, each cut by itself.
    #[must_use]
    pub fn blocks(self) -> u64 {
        match self {
            Self::Colwise { blocks }
            | Self::Rowwise { blocks }
            | Self::ColwiseConv1d { blocks }
            | Self::RowwiseConv1d { blocks } => blocks,
            _ => 1,
        }
    }

    /// Whether it cuts linear modules.
    #[must_use]
    pub fn cuts(self) -> bool {
        matches!(self, Self::Colwise { .. } | Self::Rowwise { .. })
    }

    fn name(self) -> &'static str {
        match self {
            Self::Colwise { .. } => "colwise",
            Self::Rowwise { .. } => "rowwise",
            Self::ColwiseEmbedding => "colwise-embedding",
            Self::RowwiseEmbedding => "rowwise-embedding",
            Self::ColwiseConv1d { .. } => "colwise-conv1d",
            Self::RowwiseConv1d { .. } => "rowwise-conv1d",
            Self::Pairwise => "pairwise",
            Self::Sequence => "sequence",
            Self::Replicate => "replicate",
            Self::None => "none",
        }
    }
}

impl fmt::Display for ParallelStyle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        if self.blocks() > 1 { write!(f, "({})", self.blocks()) } else { Ok(()) }
    }
}

impl FromStr for ParallelStyle {
    type Err = LayoutError;

    /// `colwise`, `colwise(3)`; underscores may stand for hyphens.
    fn from_str(text: &str) -> Result<Self, LayoutError> {
        let error = |expected| LayoutError::Style { text: text.to_owned(), expected };
        let (name, blocks) = match text.trim().strip_suffix(')').and_then(|inside| inside.split_once('(')) {
            None => (text.trim(), 1),
            Some((name, blocks)) => {
                let blocks = blocks.trim().parse().ok().filter(|&blocks: &u64| blocks > 0);
                (name.trim(), blocks.ok_or_else(|| error("a number of blocks of at least 1, as in colwise(3)"))?)
            }
        };
        let style = match name.to_ascii_lowercase().replace('_', "-").as_str() {
            "colwise" => Self::Colwise { blocks },
            "rowwise" => Self::Rowwise { blocks },
            "colwise-embedding" => Self::ColwiseEmbedding,
            "rowwise-embedding" => Self::RowwiseEmbedding,
            "colwise-conv1d" => Self::ColwiseConv1d { blocks },
            "rowwise-conv1d" => Self::RowwiseConv1d { blocks },
            "pairwise" => Self::Pairwise,
            "sequence" => Self::Sequence,
            "replicate" => Self::Replicate,
            "none" => Self::None,
            _ => return Err(error("the name of a style")),
        };
        if style.blocks() != blocks {
            return Err(error("blocks of a linear module only"));
        }
        Ok(style)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn styles_parse_as_they_print() {
        for name in ParallelStyle::NAMES {
            assert_eq!(name.parse::<ParallelStyle>().unwrap().to_string(), name);
        }
        let fused: ParallelStyle = " Colwise_Conv1d(3) ".parse().unwrap();
        assert_eq!(
            (fused, fused.to_string()),
            (ParallelStyle::ColwiseConv1d { blocks: 3 }, "colwise-conv1d(3)".to_owned())
        );
        for text in ["", "colwise(0)", "colwise(", "colwise(x)", "pairwise(2)", "column", "sequence(2)"] {
            assert!(text.parse::<ParallelStyle>().is_err(), "{text}");
        }
    }

    #[test]
    fn weights_and_biases_are_cut_as_the_table_says() {
        let cut =
            |style: &str, part, ndim| style.parse::<ParallelStyle>().unwrap().dim(part, ndim).map(|TensorDim(dim)| dim);
        let dim = |style: &str, name: &str, ndim| cut(style, ParameterRole::of_module(name), ndim);
        let alone = |style: &str, name: &str, ndim| cut(style, ParameterRole::by_itself(name), ndim);
        for (style, weight, bias) in [
            ("colwise", Some(0), Some(0)),
            ("rowwise", Some(1), None),
            ("colwise-embedding", Some(1), None),
            ("rowwise-embedding", Some(0), None),
            ("colwise-conv1d", Some(1), Some(0)),
            ("rowwise-conv1d", Some(0), None),
            ("sequence", None, None),
            ("replicate", None, None),
        ] {
            assert_eq!((dim(style, "a.weight", 2), dim(style, "a.bias", 1)), (weight, bias), "{style}");
            // A stack.
            let next = |dim: Option<usize>| dim.map(|dim| dim + 1);
            assert_eq!((alone(style, "a.w", 3), alone(style, "a.w_bias", 2)), (next(weight), next(bias)), "{style}");
            // Scales of blocks of a quantised weight.
            let is_row = matches!(style, "rowwise" | "rowwise-conv1d");
            assert_eq!(dim(style, "a.weight_scale", 2), weight.filter(|_| !is_row), "{style}");
            assert_eq!((dim(style, "a.scale", 1), dim(style, "a.weight", 0)), (bias, None), "{style}");
        }
    }
}
