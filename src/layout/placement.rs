//! Placements: the effect of one mesh dim on a tensor, and their text forms.
//!
//! A placement contains the index of a tensor dim; [`super::local_shard`] converts placements to ranges of elements.
//! The classes are defined in `torch/distributed/tensor/placement_types.py`, and PyTorch prints the short forms:
//!
//! ```text
//!     S(0)        Shard(dim=0)                          each coordinate has one part
//!     _S(0,2)     _StridedShard(dim=0, split_factor=2)  each coordinate has one part of each of 2 blocks
//!     R           Replicate()                           each coordinate has the tensor
//!     P(sum)      Partial(reduce_op=sum)                each coordinate has a partial value of the tensor
//! ```
//!
//! `StridedShard` is not a kind of `Shard`: code that treats a `StridedShard` as a `Shard` reads the wrong elements
//! without an error.
//!
//! Invariant: the tensor dim in a [`Placement`] exists. In the text of a user, a dim may count from the end (`S(-1)`),
//! or may not exist in some tensors (`S(1)` for a 1-d tensor). So text is parsed to a [`PlacementSpec`] first.

use std::{fmt, str::FromStr};

use super::{LayoutError, TensorDim};

/// The reduction op of a [`Placement::Partial`]: it reduces the partial values of the ranks to the complete value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    Sum,
    Avg,
    Max,
    Min,
    Product,
    Band,
    Bor,
    Bxor,
}

impl ReduceOp {
    /// All reduction ops, in the order of declaration.
    pub const ALL: [Self; 8] =
        [Self::Sum, Self::Avg, Self::Max, Self::Min, Self::Product, Self::Band, Self::Bor, Self::Bxor];

    /// Returns PyTorch's name of the op.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Max => "max",
            Self::Min => "min",
            Self::Product => "product",
            Self::Band => "band",
            Self::Bor => "bor",
            Self::Bxor => "bxor",
        }
    }

    /// Returns the op with this name, in upper or lower case. The inverse function is [`as_str`](Self::as_str).
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|op| op.as_str().eq_ignore_ascii_case(name))
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The effect of one mesh dim on one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// The tensor dim is split into consecutive parts, one for each coordinate of the mesh dim.
    Shard(TensorDim),
    /// The tensor dim is divided into `split_factor` blocks, and each coordinate of the mesh dim has a part of every
    /// block.
    StridedShard { dim: TensorDim, split_factor: u64 },
    /// Every coordinate of the mesh dim has a copy of the elements.
    Replicate,
    /// Every coordinate of the mesh dim has a partial value of the elements, and the op reduces these to the complete
    /// value.
    Partial(ReduceOp),
}

impl Placement {
    /// Returns whether the ranks hold partial values.
    pub fn is_partial(self) -> bool {
        matches!(self, Self::Partial(_))
    }

    /// Returns the tensor dim that the placement shards, if any.
    pub fn sharded_dim(self) -> Option<TensorDim> {
        match self {
            Self::Shard(dim) | Self::StridedShard { dim, .. } => Some(dim),
            Self::Replicate | Self::Partial(_) => None,
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shard(dim) => write!(f, "S({dim})"),
            Self::StridedShard { dim, split_factor } => write!(f, "_S({dim},{split_factor})"),
            Self::Replicate => f.write_str("R"),
            Self::Partial(op) => write!(f, "P({op})"),
        }
    }
}

/// A placement as the user wrote it, before it is applied to a tensor. A negative tensor dim counts from the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlacementSpec {
    Shard(i64),
    StridedShard { dim: i64, split_factor: u64 },
    Replicate,
    Partial(ReduceOp),
}

impl PlacementSpec {
    /// Returns the tensor dim that the placement shards, as written.
    pub fn sharded_dim(self) -> Option<i64> {
        match self {
            Self::Shard(dim) | Self::StridedShard { dim, .. } => Some(dim),
            Self::Replicate | Self::Partial(_) => None,
        }
    }

    /// Returns the placement for a tensor of `ndim` dims, or `None` if the placement shards a dim that the tensor does
    /// not have.
    pub fn resolve(self, ndim: usize) -> Option<Placement> {
        let resolve = |dim: i64| {
            let magnitude = usize::try_from(dim.unsigned_abs()).ok()?;
            let dim = if dim < 0 { ndim.checked_sub(magnitude)? } else { magnitude };
            (dim < ndim).then_some(TensorDim(dim))
        };
        Some(match self {
            Self::Shard(dim) => Placement::Shard(resolve(dim)?),
            Self::StridedShard { dim, split_factor } => Placement::StridedShard { dim: resolve(dim)?, split_factor },
            Self::Replicate => Placement::Replicate,
            Self::Partial(op) => Placement::Partial(op),
        })
    }
}

/// Joins items with commas: `S(0),R`.
pub fn comma_list<T: fmt::Display>(items: &[T]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

impl From<Placement> for PlacementSpec {
    fn from(placement: Placement) -> Self {
        let number = |dim: TensorDim| i64::try_from(dim.0).expect("tensors have few dims");
        match placement {
            Placement::Shard(dim) => Self::Shard(number(dim)),
            Placement::StridedShard { dim, split_factor } => Self::StridedShard { dim: number(dim), split_factor },
            Placement::Replicate => Self::Replicate,
            Placement::Partial(op) => Self::Partial(op),
        }
    }
}

impl fmt::Display for PlacementSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shard(dim) => write!(f, "S({dim})"),
            Self::StridedShard { dim, split_factor } => write!(f, "_S({dim},{split_factor})"),
            Self::Replicate => f.write_str("R"),
            Self::Partial(op) => write!(f, "P({op})"),
        }
    }
}

impl FromStr for PlacementSpec {
    type Err = LayoutError;

    /// Parses the short form `S(0)` or the long form `Shard(dim=0)`. Upper and lower case, keywords such as `dim=`, and
    /// spaces make no difference.
    fn from_str(spec: &str) -> Result<Self, LayoutError> {
        let spec = spec.trim();
        let error = |expected, found: &str| LayoutError::PlacementSpec {
            spec: spec.to_owned(),
            expected,
            found: found.to_owned(),
        };
        let (name, inside) = match spec.split_once('(') {
            None => (spec, ""),
            Some((name, rest)) => {
                (name, rest.strip_suffix(')').ok_or_else(|| error("a closing parenthesis at the end", spec))?)
            }
        };
        let arguments: Vec<&str> = match inside.trim() {
            "" => vec![],
            inside => inside.split(',').collect(),
        };
        let dim = |argument| {
            let text = keyword(argument, &["dim"]);
            text.parse().map_err(|_| error("the number of a tensor dim", text))
        };
        let split_factor = |argument| {
            let text = keyword(argument, &["split_factor", "sf"]);
            let number = text.parse().ok().filter(|&factor: &u64| factor > 0);
            number.ok_or_else(|| error("a split factor of at least 1", text))
        };
        match (name.trim().to_ascii_lowercase().as_str(), arguments.as_slice()) {
            ("s" | "shard", &[a]) => Ok(Self::Shard(dim(a)?)),
            ("s" | "shard", _) => Err(error("one tensor dim, as in S(0)", inside)),
            ("_s" | "_stridedshard" | "stridedshard", &[a, b]) => {
                Ok(Self::StridedShard { dim: dim(a)?, split_factor: split_factor(b)? })
            }
            ("_s" | "_stridedshard" | "stridedshard", _) => {
                Err(error("a tensor dim and a split factor, as in _S(0,2)", inside))
            }
            ("r" | "replicate", []) => Ok(Self::Replicate),
            ("r" | "replicate", _) => Err(error("nothing within the parentheses", inside)),
            ("p" | "partial", []) => Ok(Self::Partial(ReduceOp::Sum)),
            ("p" | "partial", &[a]) => {
                let text = keyword(a, &["reduce_op"]).trim_matches(['\'', '"']);
                let op = ReduceOp::from_name(text);
                op.map(Self::Partial).ok_or_else(|| error("a reduce op, as in P(sum)", text))
            }
            _ => Err(error("S(dim), _S(dim,split_factor), R or P(op)", spec)),
        }
    }
}

/// Returns the value of `key=value` if the key is in `keys`, otherwise the complete argument.
fn keyword<'a>(argument: &'a str, keys: &[&str]) -> &'a str {
    match argument.split_once('=') {
        Some((key, value)) if keys.contains(&key.trim()) => value.trim(),
        _ => argument.trim(),
    }
}

/// Parses one placement for each mesh dim, outermost first: `S(0),R` or `_S(0,2), S(0)`.
///
/// # Errors
/// If an item is not a placement, or a parenthesis is not closed.
pub fn parse_placements(list: &str) -> Result<Vec<PlacementSpec>, LayoutError> {
    let mut inside = false;
    list.split(|c| {
        inside = (inside || c == '(') && c != ')';
        c == ',' && !inside
    })
    .map(str::parse)
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_parses_to_the_same_placement() {
        let same = [
            ("S(0)", vec!["s(0)", "Shard(0)", "Shard(dim=0)", " shard ( dim = 0 ) "]),
            ("_S(0,2)", vec!["_s( 0 , 2 )", "_StridedShard(dim=0, sf=2)", "StridedShard(0, split_factor=2)"]),
            ("R", vec!["r", "R()", "Replicate()", "Replicate"]),
            ("P(sum)", vec!["P", "p(SUM)", "Partial()", "Partial(sum)", "Partial(reduce_op='sum')"]),
            ("S(-1)", vec!["Shard(dim=-1)"]),
        ];
        for (short, others) in same {
            for text in others.into_iter().chain([short]) {
                assert_eq!(text.parse::<PlacementSpec>().unwrap().to_string(), short, "{text}");
            }
        }
        for op in ReduceOp::ALL {
            assert_eq!(format!("P({op})").parse(), Ok(PlacementSpec::Partial(op)));
        }
    }

    #[test]
    fn lists_split_outside_parentheses() {
        let parsed = parse_placements("_S(0,2), S(0),R").unwrap();
        let strided = PlacementSpec::StridedShard { dim: 0, split_factor: 2 };
        assert_eq!(parsed, [strided, PlacementSpec::Shard(0), PlacementSpec::Replicate]);
    }

    #[test]
    fn invalid_placement_error_names_expected_and_found() {
        let junk = ["", "S", "S()", "S(0", "S)0(", "S(a)", "S(0,1)", "_S(0)", "_S(0,0)", "R(1)", "P(mean)", "Q(0)"];
        for text in junk.into_iter().chain(["S(0)x", "S((0))", "S(0),", "S(0)R", "S(dim=)", "S(99999999999999999999)"])
        {
            let error = parse_placements(text).expect_err(text).to_string();
            assert!(error.contains("expected") && error.contains("found"), "{error}");
        }
    }

    #[test]
    fn negative_dims_count_from_the_end() {
        let resolve = |text: &str, ndim| text.parse::<PlacementSpec>().unwrap().resolve(ndim);
        assert_eq!(resolve("S(-1)", 2), Some(Placement::Shard(TensorDim(1))));
        assert_eq!(resolve("S(1)", 1), None);
        assert_eq!(resolve("S(0)", 0), None);
        assert_eq!(resolve("S(-3)", 2), None);
        assert_eq!(resolve("S(-9223372036854775808)", 2), None);
        assert_eq!(resolve("R", 0), Some(Placement::Replicate));
    }
}
