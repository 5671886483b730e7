//! Parallelize plans: how modules are cut over the mesh dim of tensor parallelism, and parameters over that of FSDP.
//!
//! Counts elements. A plan gives *modules* styles, by patterns of their names; a style says how each parameter of the
//! module lies on the one mesh dim it is applied to. FSDP then cuts dim 0 of what tensor parallelism left, over a mesh
//! dim of its own.
//!
//! ```text
//!     style                  weight    bias
//!     colwise                S(0)      S(0)      nn.Linear, whose weight is (out, in): the outputs
//!     rowwise                S(1)      R         nn.Linear: the inputs; the bias is added once, after the reduction
//!     colwise-embedding      S(1)                nn.Embedding: its columns
//!     rowwise-embedding      S(0)                nn.Embedding: the vocabulary
//!     colwise-conv1d         S(1)      S(0)      transformers' Conv1D, whose weight is (in, out)
//!     rowwise-conv1d         S(0)      R
//!     colwise(3)             _S(0,3)   _S(0,3)   three weights in one (q, k, v), each cut by itself
//!     pairwise                                   linear children in turn: colwise, rowwise, colwise, ...
//!     sequence, replicate    R         R         a DTensor all the same
//! ```
//!
//! Weights of more dims are stacks of such weights (experts), and dims count from the end.
//!
//! Source: `torch/distributed/tensor/parallel/style.py` and `api.py`, `torch/distributed/fsdp/_fully_shard/_fsdp_param.py`;
//! `PairwiseParallel`, which was in PyTorch to 2.3, and Conv1D, which it refuses, are defined here.

use std::{fmt, str::FromStr};

use super::{LayoutError, Pattern};

/// What becomes of the parameters of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Style {
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
}

/// A style and the modules that have it.
#[derive(Clone, Debug)]
pub struct StyleRule {
    /// Of the module itself, or of a parameter that has none of its own (stacked experts).
    pub pattern: Pattern,
    pub style: Style,
    /// Where it was said, for messages: `plan llama: layers.*.attention.wo`, `plan.toml line 7`.
    pub said: String,
}

impl Style {
    /// Every name, as in a layout file.
    pub const NAMES: [&'static str; 9] = [
        "colwise",
        "rowwise",
        "colwise-embedding",
        "rowwise-embedding",
        "colwise-conv1d",
        "rowwise-conv1d",
        "pairwise",
        "sequence",
        "replicate",
    ];

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
        }
    }

    fn blocks(self) -> u64 {
        match self {
            Self::Colwise { blocks }
            | Self::Rowwise { blocks }
            | Self::ColwiseConv1d { blocks }
            | Self::RowwiseConv1d { blocks } => blocks,
            _ => 1,
        }
    }
}

impl fmt::Display for Style {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        if self.blocks() > 1 { write!(f, "({})", self.blocks()) } else { Ok(()) }
    }
}

impl FromStr for Style {
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
        for name in Style::NAMES {
            assert_eq!(name.parse::<Style>().unwrap().to_string(), name);
        }
        let fused: Style = " Colwise_Conv1d(3) ".parse().unwrap();
        assert_eq!((fused, fused.to_string()), (Style::ColwiseConv1d { blocks: 3 }, "colwise-conv1d(3)".to_owned()));
        for text in ["", "colwise(0)", "colwise(", "colwise(x)", "pairwise(2)", "column", "sequence(2)"] {
            assert!(text.parse::<Style>().is_err(), "{text}");
        }
    }
}
