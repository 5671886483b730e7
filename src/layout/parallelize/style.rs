//! Parallel styles: the tensor dim that each style shards, and the name of the style in a layout file.
//!
//! Dims are numbered from the end, so that a stack of weights is sharded like a single weight. If PyTorch has a class for
//! a style, such as `ColwiseParallel` for `colwise`, the style shards parameters as the class does
//! (`torch/distributed/tensor/parallel/style.py`).

use std::collections::HashSet;
use std::{fmt, str::FromStr};

use super::super::{LayoutError, TensorDim};

/// The way to shard the parameters of a module over tensor parallelism. `blocks` is the number of weights in a fused
/// weight; each of these weights is sharded separately. For an ordinary weight, `blocks` is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParallelStyle {
    /// Shards the outputs of a linear module.
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
    Sequence,
    Replicate,
    /// Excludes a module from later patterns, from the built-in plan, and from the modules that `pairwise` pairs.
    None,
}

/// The style of a rule: one style for the parameters of a module, or styles for pairs of its child modules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleStyle {
    /// One style for all parameters of the module.
    Single(ParallelStyle),
    /// `colwise` and `rowwise` in turn for the child modules.
    Pairwise {
        /// The names of the child modules in the order in which the module uses the children, relative to the module;
        /// empty if all linear children are paired in the order of registration.
        children: Vec<String>,
    },
}

/// The role of a parameter in its module, derived from its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterRole {
    Weight,
    Bias,
    /// Any other tensor of a module, such as the scales of quantised weights. `RowwiseParallel` replicates such
    /// tensors, and `ColwiseParallel` shards them like weights.
    Other,
}

impl ParameterRole {
    /// Returns the role of a parameter of a module that a pattern matches.
    #[must_use]
    pub fn of_module(name: &str) -> Self {
        match name.rsplit('.').next() {
            Some("weight") => Self::Weight,
            Some(own) if own == "bias" || own.ends_with("_bias") => Self::Bias,
            _ => Self::Other,
        }
    }

    /// Returns the role of a parameter that a pattern matches by the parameter's own name, such as stacked experts or
    /// their `gate_up_proj_bias`. The role is bias if the name ends in `bias`, otherwise weight.
    #[must_use]
    pub fn by_itself(name: &str) -> Self {
        let own = Self::of_module(name);
        if own == Self::Other { Self::Weight } else { own }
    }
}

impl ParallelStyle {
    /// Returns the dim along which a parameter is sharded, or `None` if it is replicated.
    ///
    /// A 1-d tensor other than a bias (scales of quantised weights) is sharded like a bias, because the tensor has one
    /// element for each output.
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

    /// Returns the number of weights that a fused weight consists of; each of these weights is sharded separately.
    /// Returns 1 for a weight that is not fused.
    pub fn blocks(self) -> u64 {
        match self {
            Self::Colwise { blocks }
            | Self::Rowwise { blocks }
            | Self::ColwiseConv1d { blocks }
            | Self::RowwiseConv1d { blocks } => blocks,
            _ => 1,
        }
    }

    /// Returns whether the style is `colwise` or `rowwise`, the two styles that shard an `nn.Linear`.
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

    /// Parses `colwise` or `colwise(3)`. Underscores and hyphens are equivalent.
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
            "sequence" => Self::Sequence,
            "replicate" => Self::Replicate,
            "none" => Self::None,
            _ => return Err(error("the name of a style")),
        };
        if style.blocks() != blocks {
            return Err(error("a number of blocks only for colwise, rowwise and their conv1d forms"));
        }
        Ok(style)
    }
}

impl RuleStyle {
    /// The name of every style in a layout file.
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

    /// Returns whether the style shows that the matched modules are not linear: the style is for embeddings, or
    /// excludes the modules.
    pub(super) fn is_not_linear(&self) -> bool {
        use ParallelStyle::{ColwiseEmbedding, None, RowwiseEmbedding};
        matches!(self, Self::Single(ColwiseEmbedding | RowwiseEmbedding | None))
    }
}

impl From<ParallelStyle> for RuleStyle {
    fn from(style: ParallelStyle) -> Self {
        Self::Single(style)
    }
}

impl fmt::Display for RuleStyle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Single(style) => style.fmt(f),
            Self::Pairwise { children } if children.is_empty() => f.write_str("pairwise"),
            Self::Pairwise { children } => write!(f, "pairwise({})", children.join(",")),
        }
    }
}

impl FromStr for RuleStyle {
    type Err = LayoutError;

    /// Parses a style, `pairwise`, or `pairwise(fc1,fc2)`.
    fn from_str(text: &str) -> Result<Self, LayoutError> {
        let trimmed = text.trim();
        let (name, inside) = trimmed.split_once('(').unwrap_or((trimmed, ")"));
        if !name.trim().eq_ignore_ascii_case("pairwise") {
            return trimmed.parse().map(Self::Single);
        }
        let list = inside.strip_suffix(')').map(str::trim).unwrap_or_default();
        let children: Vec<String> = list.split(',').map(|child| child.trim().to_owned()).collect();
        let are_distinct = children.iter().collect::<HashSet<_>>().len() == children.len();
        let is_list =
            children.len().is_multiple_of(2) && children.iter().all(|child| !child.is_empty()) && are_distinct;
        match trimmed.contains('(') {
            false => Ok(Self::Pairwise { children: Vec::new() }),
            true if is_list => Ok(Self::Pairwise { children }),
            true => Err(LayoutError::Style {
                text: text.to_owned(),
                expected: "pairs of different child modules, as in pairwise(fc1,fc2)",
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsed_style_displays_as_its_name() {
        for name in RuleStyle::NAMES {
            assert_eq!(name.parse::<RuleStyle>().unwrap().to_string(), name);
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
    fn pairwise_may_name_pairs_of_children() {
        let style: RuleStyle = " Pairwise ( fc1, net.0 ) ".parse().unwrap();
        assert_eq!(style, RuleStyle::Pairwise { children: vec!["fc1".into(), "net.0".into()] });
        assert_eq!(style.to_string(), "pairwise(fc1,net.0)");
        for text in
            ["pairwise()", "pairwise(a)", "pairwise(a,a)", "pairwise(a,b,c)", "pairwise(a,,b,c)", "pairwise(a,b"]
        {
            assert!(text.parse::<RuleStyle>().is_err(), "{text}");
        }
        assert_eq!("none".parse(), Ok(RuleStyle::Single(ParallelStyle::None)));
    }

    #[test]
    fn style_shards_the_dims_in_the_table() {
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
            // A stack of weights has one more leading dim.
            let next = |dim: Option<usize>| dim.map(|dim| dim + 1);
            assert_eq!((alone(style, "a.w", 3), alone(style, "a.w_bias", 2)), (next(weight), next(bias)), "{style}");
            // The scales of the blocks of a quantised weight are sharded like the weight, except by rowwise styles,
            // which replicate these scales.
            let is_row = matches!(style, "rowwise" | "rowwise-conv1d");
            assert_eq!(dim(style, "a.weight_scale", 2), weight.filter(|_| !is_row), "{style}");
            assert_eq!((dim(style, "a.scale", 1), dim(style, "a.weight", 0)), (bias, None), "{style}");
        }
    }
}
