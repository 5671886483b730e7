//! Whether the parameters of a unit are as long together as its flat parameter, and what is likely where they are not.

use std::path::Path;

use crate::catalog::flat::{FlatParam, FlatUnit};
use crate::error::{CatalogError, Error, Result};
use crate::layout::flat::FlatParameter;

/// A layout and a file of which it is not the layout.
#[derive(Clone, Copy, Debug)]
pub struct LayoutMismatch<'a> {
    pub file: &'a Path,
    /// Where the layout is from.
    pub source: &'a str,
}

impl LayoutMismatch<'_> {
    /// The error for what the layout says of `name`, and what the file has.
    pub fn error(self, name: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::Catalog(CatalogError::Conflict {
            fqn: name.to_owned(),
            what: "the flat layout",
            between: format!("{} and {}", self.source, self.file.display()),
            detail: format!("expected {}, found {}", expected.into(), found.into()),
            hint: Some(String::from(
                "a flat layout is that of the job that saved the files: its units, use_orig_params, mixed precision",
            )),
        })
    }
}

/// Compare with the total that a file has. `align` is given with `use_orig_params`.
///
/// # Errors
/// `Conflict` naming the unit, both totals and the likely cause.
pub fn check(misfit: LayoutMismatch<'_>, unit: &FlatUnit, align: Option<u64>, group: u64, found: u64) -> Result<()> {
    let numels: Vec<u64> = unit.params.iter().map(FlatParam::numel).collect();
    let total = |align| FlatParameter::new(&numels, align, group).map(|flat| flat.total());
    let Some(expected) = total(align) else {
        return Err(misfit.error(&unit.describe(), "a total below 2^64", "more"));
    };
    if expected == found {
        return Ok(());
    }
    let cause = padding(&total, align, found).or_else(|| ties(unit, expected, found)).unwrap_or_else(|| {
        String::from("other units, parameters or a part of the model trained in another way would explain it")
    });
    let expected = format!("a flat parameter of {expected} elements for {}", count(unit.params.len()));
    Err(misfit.error(&unit.describe(), expected, format!("{found}: {cause}")))
}

fn count(params: usize) -> String {
    format!("its {params} parameter{}", if params == 1 { "" } else { "s" })
}

/// Whether it is padding that makes the difference.
fn padding(total: &dyn Fn(Option<u64>) -> Option<u64>, align: Option<u64>, found: u64) -> Option<String> {
    if align.is_some() && total(None) == Some(found) {
        return Some(String::from("the total without padding, as it is where use_orig_params is false"));
    }
    let other = [1, 2, 4, 8, 16].into_iter().find(|other| total(Some(*other)) == Some(found))?;
    Some(match align {
        Some(_) => format!("the total with padding to align_numel {other}, as mixed precision may have it"),
        None => format!("the total with padding to align_numel {other}, as it is where use_orig_params is true"),
    })
}

/// Whether a parameter that is counted twice, or one that is not, makes the difference.
fn ties(unit: &FlatUnit, expected: u64, found: u64) -> Option<String> {
    let params = &unit.params;
    if let Some(extra) = expected.checked_sub(found) {
        for (index, second) in params.iter().enumerate().filter(|(_, param)| param.numel() == extra) {
            if let Some(first) = params[..index].iter().find(|first| first.shape == second.shape) {
                return Some(format!("as if {} and {} were tied, and one", first.fqn, second.fqn));
            }
        }
        return None;
    }
    let missing = found - expected;
    let own = |name| params.iter().find(|param| param.fqn == name);
    let shared =
        unit.shared.iter().find(|shared| own(shared.with.clone()).is_some_and(|with| with.numel() == missing))?;
    Some(format!("as if {} and {} were not tied", shared.with, shared.fqn))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Dtype;
    use crate::catalog::flat::SharedName;

    fn told(unit: &FlatUnit, align: Option<u64>, found: u64) -> Option<String> {
        let misfit = LayoutMismatch { file: Path::new("rank_0.pt"), source: "flat_layout.json" };
        check(misfit, unit, align, 2, found).err().map(|error| error.to_string())
    }

    #[test]
    fn the_likely_cause_of_another_total_is_told() {
        let param = |fqn: &str, shape: &[u64]| FlatParam { fqn: fqn.into(), shape: shape.into(), stride: None };
        let params = vec![param("emb", &[5, 3]), param("bias", &[5]), param("head", &[5, 3])];
        let shared = vec![SharedName { fqn: "tail".into(), with: "emb".into() }];
        let unit = FlatUnit { params, shared, ..FlatUnit::new("", Some(Dtype::F32)) };
        assert_eq!(told(&unit, None, 35), None);
        // 15, 1 of padding, 5, 3 of padding, 15, 1 of padding for 2 shards.
        assert_eq!(told(&unit, Some(4), 40), None);
        let cases = [
            (
                None,
                40,
                "expected a flat parameter of 35 elements for its 3 parameters, found 40: the total with padding",
            ),
            (None, 40, "to align_numel 4, as it is where use_orig_params is true"),
            (Some(4), 35, "found 35: the total without padding, as it is where use_orig_params is false"),
            (Some(4), 48, "align_numel 16, as mixed precision may have it"),
            (None, 20, "found 20: as if emb and head were tied, and one"),
            (None, 34, "found 34: other units"),
            (None, 50, "found 50: as if emb and tail were not tied"),
        ];
        for (align, found, expected) in cases {
            let told = told(&unit, align, found).unwrap();
            assert!(told.contains(expected), "{told}");
        }
        let huge = FlatUnit { params: vec![param("a", &[u64::MAX]), param("b", &[2])], ..unit };
        assert!(told(&huge, None, 1).is_some());
    }
}
