//! Compares the total length of a unit's parameters in a flat layout with the length of the unit's flat parameter in a
//! file. If the two lengths differ, the error names a likely cause. Unit of lengths: elements.

use std::path::Path;

use crate::catalog::flat::{FlatParam, FlatUnit};
use crate::error::{CatalogError, Error, Result};
use crate::layout::flat::FlatParameter;

/// The hint for a wrong `optimizer` in a flat layout.
pub const OPTIMIZER_HINT: &str = "correct `optimizer` in the flat layout: it has one list of names for each parameter group, in \
                                  the order of the optimizer, as flat_layout(model, optimizer) in docs/how-to/fsdp1.md \
                                  writes it; or leave the optimizer out with options::series model";

/// The origin of a flat layout, and the path of a rank file, for errors about differences between the two.
#[derive(Clone, Copy, Debug)]
pub struct LayoutMismatch<'a> {
    pub file: &'a Path,
    /// The origin of the layout, for messages.
    pub source: &'a str,
}

impl LayoutMismatch<'_> {
    /// Returns the error for the unit or parameter `name`: the layout has the value `expected`, and the file has the
    /// value `found`.
    pub fn error(self, name: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        let hint = "give the flat layout of the job that saved the files: its units, dtypes and mixed precision \
                    must match";
        self.with_hint(name, expected, found, hint)
    }

    /// Returns the error for the optimizer state `name`, whose length does not match the layout.
    pub fn state_error(self, name: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        let hint = "give the flat layout of the job that saved the files: its units, `optimizer`, use_orig_params and mixed \
                    precision must match; if the layout is right, the file is damaged";
        self.with_hint(name, expected, found, hint)
    }

    /// Returns the error for a field `optimizer` of the layout that does not match the file.
    pub fn optimizer_error(self, expected: impl Into<String>, found: impl Into<String>) -> Error {
        self.with_hint("`optimizer`", expected, found, OPTIMIZER_HINT)
    }

    fn with_hint(self, name: &str, expected: impl Into<String>, found: impl Into<String>, hint: &str) -> Error {
        Error::Catalog(CatalogError::Conflict {
            fqn: name.to_owned(),
            what: "the flat layout",
            between: format!("{} and {}", self.source, self.file.display()),
            detail: format!("expected {}, found {}", expected.into(), found.into()),
            hint: Some(hint.to_owned()),
        })
    }
}

/// Compares the length of a flat parameter in the layout with its length in the file (`found`). `group` is the number
/// of ranks in a shard group. `align` is the alignment of parameters if `use_orig_params` is true; otherwise `None`.
///
/// # Errors
/// `Conflict` naming the unit, both lengths and the likely cause.
pub fn check(misfit: LayoutMismatch<'_>, unit: &FlatUnit, align: Option<u64>, group: u64, found: u64) -> Result<()> {
    let numels: Vec<u64> = unit.params.iter().map(FlatParam::numel).collect();
    let total = |align| FlatParameter::new(&numels, align, group).map(|flat| flat.total());
    let Some(expected) = total(align) else {
        return Err(misfit.error(&unit.describe(), "a total below 2^64", "more"));
    };
    if expected == found {
        return Ok(());
    }
    let cause = explain_by_padding(&total, align, found)
        .or_else(|| explain_by_ties(unit, expected, found))
        .unwrap_or_else(|| {
            String::from("; the job may have other units, other parameters, or another choice of trained parameters")
        });
    let expected = format!("a flat parameter of {expected} elements for {}", describe_count(unit.params.len()));
    Err(misfit.error(&unit.describe(), expected, format!("{found} elements{cause}")))
}

fn describe_count(params: usize) -> String {
    format!("its {params} parameter{}", if params == 1 { "" } else { "s" })
}

/// Returns an explanation of the difference of lengths if another alignment (padding) would give exactly the length in
/// the file.
fn explain_by_padding(total: &dyn Fn(Option<u64>) -> Option<u64>, align: Option<u64>, found: u64) -> Option<String> {
    if align.is_some() && total(None) == Some(found) {
        return Some(String::from(", the number without padding (usual when use_orig_params is false)"));
    }
    let other = [1, 2, 4, 8, 16].into_iter().find(|other| total(Some(*other)) == Some(found))?;
    Some(match align {
        Some(_) => format!(", the number that align_numel {other} gives (mixed precision can change align_numel)"),
        None => format!(", the number that align_numel {other} gives (usual when use_orig_params is true)"),
    })
}

/// Returns an explanation of the difference of lengths if two parameters may be tied in the layout but not in the file,
/// or in the file but not in the layout.
fn explain_by_ties(unit: &FlatUnit, expected: u64, found: u64) -> Option<String> {
    let params = &unit.params;
    if let Some(extra) = expected.checked_sub(found) {
        for (index, second) in params.iter().enumerate().filter(|(_, param)| param.numel() == extra) {
            if let Some(first) = params[..index].iter().find(|first| first.shape == second.shape) {
                return Some(format!("; this length would fit if `{}` and `{}` were tied", first.fqn, second.fqn));
            }
        }
        return None;
    }
    let missing = found - expected;
    let own = |name| params.iter().find(|param| param.fqn == name);
    let shared =
        unit.shared.iter().find(|shared| own(shared.with.clone()).is_some_and(|with| with.numel() == missing))?;
    Some(format!("; this length would fit if `{}` and `{}` were not tied", shared.with, shared.fqn))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Dtype;
    use crate::catalog::flat::SharedName;

    fn mismatch_message(unit: &FlatUnit, align: Option<u64>, found: u64) -> Option<String> {
        let misfit = LayoutMismatch { file: Path::new("rank_0.pt"), source: "flat_layout.json" };
        check(misfit, unit, align, 2, found).err().map(|error| error.to_string())
    }

    #[test]
    fn total_mismatch_names_its_likely_cause() {
        let param = |fqn: &str, shape: &[u64]| FlatParam { fqn: fqn.into(), shape: shape.into(), stride: None };
        let params = vec![param("emb", &[5, 3]), param("bias", &[5]), param("head", &[5, 3])];
        let shared = vec![SharedName { fqn: "tail".into(), with: "emb".into() }];
        let unit = FlatUnit { params, shared, ..FlatUnit::new("", Some(Dtype::F32)) };
        assert_eq!(mismatch_message(&unit, None, 35), None);
        // The unit has 15 elements, 1 of padding, 5, 3 of padding, 15, and 1 of padding for 2 shards.
        assert_eq!(mismatch_message(&unit, Some(4), 40), None);
        let cases = [
            (
                None,
                40,
                "expected a flat parameter of 35 elements for its 3 parameters, found 40 elements, the number that",
            ),
            (None, 40, "the number that align_numel 4 gives (usual when use_orig_params is true)"),
            (Some(4), 35, "found 35 elements, the number without padding (usual when use_orig_params is false)"),
            (Some(4), 48, "align_numel 16 gives (mixed precision can change align_numel)"),
            (None, 20, "found 20 elements; this length would fit if `emb` and `head` were tied"),
            (None, 34, "found 34 elements; the job may have other units"),
            (None, 50, "found 50 elements; this length would fit if `emb` and `tail` were not tied"),
        ];
        for (align, found, expected) in cases {
            let message = mismatch_message(&unit, align, found).unwrap();
            assert!(message.contains(expected), "{message}");
        }
        let huge = FlatUnit { params: vec![param("a", &[u64::MAX]), param("b", &[2])], ..unit };
        assert!(mismatch_message(&huge, None, 1).is_some());
    }
}
