//! The files of a side: their names, and how their ranks cut the tensors.
//!
//! ```toml
//! meta = { files = "consolidated.{rank}.pth", cut = { "layers.{l}.attention.wo.weight" = "S(1)", "tok_embeddings.weight [v d]" = ["S(0)", "S(1)"] } }
//! ```
//!
//! The keys of `cut` are tensors, as in a row. A list has the placements that occur. A tensor without a key is whole on every rank.

use super::cell::{CellError, NamePart, NamePattern, Offset, TensorPattern};
use crate::layout::{Pattern, PlacementSpec};

/// The name of the files of a side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileName(String);

/// The placements that a side declares for tensors of one pattern.
#[derive(Clone, Debug)]
pub struct Cut {
    pub tensor: TensorPattern,
    /// The pattern of the names, with `*` for numbers.
    pub pattern: Pattern,
    /// The placements that occur, on a mesh of one dim.
    pub placements: Vec<PlacementSpec>,
}

impl FileName {
    /// Returns a pattern of file names, in which `{rank}` stands for digits.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// Returns whether a file may have this name.
    pub fn matches(&self, name: &str) -> bool {
        match self.0.split_once("{rank}") {
            None => name == self.0,
            Some((before, after)) => {
                let rank = name.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
                rank.is_some_and(|rank| !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit()))
            }
        }
    }
}

impl Cut {
    /// Parses a key of `cut`, for these placements.
    ///
    /// # Errors
    /// [`CellError`] for text that is not a tensor.
    pub fn new(key: &str, placements: Vec<PlacementSpec>) -> Result<Self, CellError> {
        let mut tensor = TensorPattern::parse("", key)?;
        for part in &mut tensor.name.parts {
            if let NamePart::Variable { axis } = part {
                *part = NamePart::Number { axis: axis.clone(), offset: Offset::Number(0) };
            }
        }
        let pattern = Pattern::parse(&glob(&tensor.name))
            .map_err(|error| CellError { expected: String::from("a tensor name"), found: error.to_string() })?;
        Ok(Self { tensor, pattern, placements })
    }
}

/// Returns the text of a pattern for names, with `*` for numbers.
fn glob(name: &NamePattern) -> String {
    let mut glob = String::new();
    for part in &name.parts {
        match part {
            NamePart::Text(text) => glob += text,
            NamePart::Words { words, .. } => glob += &format!("{{{}}}", words.join(",")),
            NamePart::Number { .. } | NamePart::Variable { .. } => glob += "*",
            NamePart::Rest => glob += "**",
        }
    }
    glob
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_file_has_the_digits_of_its_rank() {
        let files = ["part.{rank}.bin", "all.bin"].map(FileName::new);
        for (name, expected) in
            [("part.03.bin", true), ("all.bin", true), ("part..bin", false), ("part.x.bin", false), ("part.bin", false)]
        {
            assert_eq!(files.iter().any(|file| file.matches(name)), expected, "{name}");
        }
    }
}
