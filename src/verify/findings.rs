//! The findings of `verify`, as lines of text and as a JSON document.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde_json::{Value as Json, json};

use crate::catalog::error::shown_name;
use crate::error::{Error, Result};
use crate::exec::compare::{Difference, MeasuredDifference, number_text};
use crate::format::Checkpoint;
use crate::name_list::FEW;
use crate::quantity::{count, human_bytes};
use crate::text::escape_invisible;

/// One finding of `verify`: a difference, or a case of damage.
#[derive(Debug)]
pub(super) struct Finding {
    /// The name of the tensor or object, or the path of the checkpoint.
    pub fqn: String,
    /// The kind of the finding, as the JSON document names it.
    pub kind: &'static str,
    /// The description for the user.
    pub detail: String,
    /// The complete list of names, if `detail` shortens it.
    pub names: Option<Vec<String>>,
    /// The index of the first element that differs, if elements were compared.
    pub index: Option<Vec<u64>>,
    /// The size of the difference between two tensors.
    pub measure: Option<Measure>,
}

/// The size of the difference between two tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measure {
    /// The largest absolute difference between two elements, if the dtype has a distance.
    pub max_abs: Option<f64>,
    /// The L2 norm of the difference divided by the L2 norm of the tensor of SRC, if the dtype has a distance.
    pub relative_l2: Option<f64>,
    /// The share of the elements that differ, from 0 to 1.
    pub changed_share: f64,
}

impl Measure {
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    fn new(found: &MeasuredDifference, numel: u64) -> Self {
        let Difference { max_abs, differing, .. } = found.difference;
        Self { max_abs, relative_l2: found.relative_l2(), changed_share: differing as f64 / numel as f64 }
    }
}

/// The findings of one run.
#[derive(Debug, Default)]
pub(super) struct Findings {
    /// The cases of damage, and the values that differ.
    pub different: Vec<Finding>,
    /// The weight map that was applied to SRC, as a JSON document.
    pub map: Option<Json>,
    /// Names that only SRC has.
    pub only_in_src: Vec<String>,
    /// Names that only OTHER has.
    pub only_in_other: Vec<String>,
    /// The names of tensors that are equal in SRC and OTHER.
    pub equal: Vec<String>,
    /// Names that could not be compared. The text of a name may also give the reason.
    pub not_comparable: Vec<String>,
    /// The number of tensors checked or compared.
    pub tensors: usize,
    /// The number of bytes of the tensors that were checked or compared.
    pub bytes: u64,
    /// For each dtype of OTHER, the number of tensors that have another dtype in SRC, if tensors can be cast from the
    /// dtype of SRC to the dtype of OTHER. OTHER may be the result of such a cast.
    pub casts: BTreeMap<&'static str, usize>,
    /// Texts for the user. Each text names a likely cause of findings, and an option to try.
    pub hints: Vec<String>,
}

impl Findings {
    /// Adds a finding.
    pub fn add(&mut self, fqn: impl Into<String>, kind: &'static str, detail: impl Into<String>) {
        let (fqn, detail) = (fqn.into(), detail.into());
        self.different.push(Finding { fqn, kind, detail, names: None, index: None, measure: None });
    }

    /// Adds a finding that begins at an index of a tensor.
    pub fn add_at(&mut self, index: &[u64], fqn: impl Into<String>, kind: &'static str, detail: impl Into<String>) {
        self.add(fqn, kind, detail);
        self.last().index = Some(index.to_vec());
    }

    /// Adds the finding that two tensors differ.
    pub fn add_difference(&mut self, fqn: String, shape: &[u64], found: &MeasuredDifference) {
        let index = found.difference.index(shape);
        self.add_at(&index, fqn, "differing", found.difference.detail(shape));
        self.last().measure = Some(Measure::new(found, shape.iter().product()));
    }

    fn last(&mut self) -> &mut Finding {
        self.different.last_mut().expect("a finding was added")
    }

    /// Turns an error about damage into a finding, unless a finding already reports the same damage.
    ///
    /// # Errors
    /// Any other error.
    pub fn absorb(&mut self, fqn: &str, error: Error) -> Result<()> {
        if !error.is_about_content() {
            return Err(error);
        }
        let (named, kind, detail) = (error.fqn(), error.kind(), error.detail());
        // Several checks report the same damage, and one damaged file can affect several tensors.
        let is_known = |finding: &Finding| {
            let is_same_tensor = named.is_none_or(|named| finding.fqn == named);
            is_same_tensor && finding.kind == kind && finding.detail == detail
        };
        if !self.different.iter().any(is_known) {
            let names = error.names().map(<[String]>::to_vec);
            let fqn = named.unwrap_or(fqn).to_owned();
            self.different.push(Finding { fqn, kind, detail, names, index: None, measure: None });
        }
        Ok(())
    }

    fn same(&self) -> bool {
        self.different.is_empty() && self.only_in_src.is_empty() && self.only_in_other.is_empty()
    }
}

/// The result of `verify`.
pub struct Verification {
    pub(super) findings: Findings,
    is_comparison: bool,
    /// The checkpoints that were verified, for the report.
    pub(super) subjects: Subjects,
}

/// The checkpoints that were verified.
#[derive(Default)]
pub(super) struct Subjects {
    /// The path of SRC, and of OTHER.
    pub src: PathBuf,
    pub other: Option<PathBuf>,
    /// SRC, if it could be opened.
    pub source: Option<Checkpoint>,
}

impl fmt::Debug for Verification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verification").field("findings", &self.findings).finish_non_exhaustive()
    }
}

impl Verification {
    /// Makes the result from the findings of a run. If OTHER was given, the closing line says whether SRC and OTHER are the
    /// same.
    pub(super) fn new(findings: Findings, subjects: Subjects) -> Self {
        Self { findings, is_comparison: subjects.other.is_some(), subjects }
    }

    /// Returns true if there is no finding: SRC is sound and, if OTHER was given, SRC and OTHER have equal values.
    #[must_use]
    pub fn is_same(&self) -> bool {
        self.findings.same()
    }

    /// Returns hints that may explain the findings.
    #[must_use]
    pub fn hints(&self) -> &[String] {
        &self.findings.hints
    }

    /// Returns a line for each finding, and for each name that was not compared. Shortens long lists of names unless
    /// `all` is true.
    #[must_use]
    pub fn lines(&self, all: bool) -> String {
        let shown = match self.findings.hints.as_slice() {
            _ if all => usize::MAX,
            [] => SHOWN,
            _ => FEW,
        };
        lines(&self.findings, shown)
    }

    /// Returns the findings as a JSON document.
    #[must_use]
    pub fn to_json(&self) -> Json {
        document(&self.findings)
    }
}

/// Writes the closing line, such as `the same: 54 tensors, 1.20 MB` or `2 findings in 54 tensors, 1.20 MB`.
impl fmt::Display for Verification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = &self.findings;
        let mut what = format!("{}, {}", count(found.tensors, "tensor"), human_bytes(found.bytes));
        if !found.not_comparable.is_empty() {
            what.push_str(&format!("; {} not compared", found.not_comparable.len()));
        }
        if found.same() {
            return write!(f, "{}: {what}", if self.is_comparison { "the same" } else { "sound" });
        }
        let number = found.different.len() + found.only_in_src.len() + found.only_in_other.len();
        write!(f, "{} in {what}", count(number, "finding"))
    }
}

/// The maximum number of names that are shown from each list, if there is no hint. `-v` shows all names.
const SHOWN: usize = 20;

fn lines(found: &Findings, shown: usize) -> String {
    let mut text = String::new();
    for finding in &found.different {
        let Finding { fqn, kind, detail, .. } = finding;
        let name = shown_name(fqn);
        let own = detail.strip_prefix(&format!("{name}: ")).unwrap_or(detail);
        text.push_str(&(escape_invisible(&format!("{name}: {kind}: {own}")) + "\n"));
    }
    let lists = [
        ("removed: only in SRC", &found.only_in_src),
        ("added: only in OTHER", &found.only_in_other),
        ("not compared", &found.not_comparable),
    ];
    for (what, names) in lists {
        for name in names.iter().take(shown) {
            text.push_str(&(escape_invisible(&format!("{name}: {what}")) + "\n"));
        }
        if let Some(more @ 1..) = names.len().checked_sub(shown) {
            text.push_str(&format!("{more} more {what} (-v lists all)\n"));
        }
    }
    text
}

fn document(found: &Findings) -> Json {
    let different: Vec<Json> = found.different.iter().map(finding_document).collect();
    let mut document = json!({
        "same": found.same(),
        "tensors": found.tensors,
        "bytes": found.bytes,
        "different": different,
        "only_in_src": found.only_in_src,
        "only_in_other": found.only_in_other,
        "not_comparable": found.not_comparable,
    });
    if let Some(map) = &found.map {
        document["map"] = map.clone();
    }
    document
}

fn finding_document(finding: &Finding) -> Json {
    let Finding { fqn, kind, detail, names, measure, .. } = finding;
    let mut document = json!({ "fqn": fqn, "kind": kind, "detail": detail });
    if let Some(names) = names {
        document["names"] = json!(names);
    }
    if let Some(Measure { max_abs, relative_l2, changed_share }) = measure {
        document["max_abs_difference"] = max_abs.map_or(Json::Null, number_document);
        document["relative_l2"] = relative_l2.map_or(Json::Null, number_document);
        document["changed_share"] = json!(changed_share);
    }
    document
}

/// Returns a number as JSON: infinity and NaN, which JSON does not have, as the texts `inf` and `nan`.
fn number_document(number: f64) -> Json {
    if number.is_finite() { json!(number) } else { json!(number_text(number)) }
}
