//! The HTML page of `verify`: the findings, the differences between two checkpoints by layer and by tensor, and SRC.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::findings::{Finding, Findings, Measure, Subjects, Verification};
use crate::convert::InspectOptions;
use crate::describe::Inspection;
use crate::describe::report::{self, TensorProblem};
use crate::error::Result;
use crate::exec::compare::number_text;
use crate::html::{Cell, Details, Heat, HeatCell, Page, Problem, Section, Table};
use crate::name_list::{NameGroup, Varying, natural_order, numbered_groups, short_list};
use crate::quantity::count;

/// The maximum number of names in a list.
const MOST_NAMES: usize = 20;

/// The maximum number of columns of the table of layers.
const MOST_COLUMNS: usize = 24;

/// The finding that two tensors differ, with the size of the difference.
struct DifferingTensor<'a> {
    finding: &'a Finding,
    measure: Measure,
}

impl Verification {
    /// Returns a report to look at: an HTML page in one file, which loads nothing from a network and runs no scripts. It
    /// shows the findings, how large the differences are in each layer, and SRC as
    /// [`Inspection::to_html`](crate::Inspection::to_html) shows it. [`html_frame`](crate::html_frame) makes the page a part
    /// of another page.
    ///
    /// # Errors
    /// `Io` if the tensor that holds the training step cannot be read.
    pub fn to_html(&self) -> Result<String> {
        Ok(page(&self.findings, &self.subjects, &self.to_string())?.document())
    }
}

/// Returns the page. `result` is the closing line of `verify`.
fn page(found: &Findings, subjects: &Subjects, result: &str) -> Result<Page> {
    let src = subjects.src.display();
    let differing: Vec<DifferingTensor<'_>> = found
        .different
        .iter()
        .filter_map(|finding| Some(DifferingTensor { finding, measure: finding.measure? }))
        .collect();
    let args = InspectOptions::default();
    let view = subjects.source.as_ref().map(|source| Inspection::complete(source, &args));
    let mut facts = vec![(String::from("SRC"), src.to_string())];
    facts.extend(subjects.other.iter().map(|other| (String::from("OTHER"), other.display().to_string())));
    if subjects.other.is_some() {
        facts.push((String::from("compared"), count(found.tensors, "tensor")));
        facts.push((String::from("differing"), count(differing.len(), "tensor")));
    }
    if let Some(view) = &view {
        facts.extend(report::facts(view)?);
    }
    let mut sections = differences(found, &differing);
    if !found.not_comparable.is_empty() {
        let rows = found.not_comparable.iter().map(|name| vec![Cell::new(name.clone())]).collect();
        let table = Table::new(&[("name", false)], rows);
        let caption = format!("{} could not be compared. This is not a difference.", found.not_comparable.len());
        sections.push(Section::new("Not compared", caption, Details(String::from("Show the names"), table)));
    }
    if let Some(view) = &view {
        let marks = found.different.iter().filter(|finding| finding.measure.is_none()).map(|finding| TensorProblem {
            name: finding.fqn.clone(),
            detail: format!("{}: {}", finding.kind, finding.detail),
            index: finding.index.clone(),
        });
        sections.extend(report::sections(view, &marks.collect::<Vec<_>>()));
    }
    Ok(Page {
        title: match &subjects.other {
            Some(other) => format!("Comparison of {src} and {}", other.display()),
            None => format!("Verification of {src}"),
        },
        result: result.to_owned(),
        problems: problems(found, &differing),
        facts,
        sections,
    })
}

fn problems(found: &Findings, differing: &[DifferingTensor<'_>]) -> Vec<Problem> {
    let mut problems = Vec::new();
    if !differing.is_empty() {
        let names = differing.iter().map(|tensor| (tensor.finding.fqn.as_str(), ())).collect();
        let names: Vec<String> = numbered_groups(names, Varying::Components).iter().map(NameGroup::name).collect();
        let verb = if differing.len() == 1 { "differs" } else { "differ" };
        let subject = format!("{} {verb}", count(differing.len(), "tensor"));
        problems.push(Problem { subject, detail: short_list(&names, MOST_NAMES) });
    }
    problems.extend(found.different.iter().filter(|finding| finding.measure.is_none()).map(|finding| Problem {
        subject: finding.fqn.clone(),
        detail: format!("{}: {}", finding.kind, finding.detail),
    }));
    for (side, names) in [("SRC", &found.only_in_src), ("OTHER", &found.only_in_other)] {
        if !names.is_empty() {
            let subject = format!("{} only in {side}", count(names.len(), "name"));
            problems.push(Problem { subject, detail: short_list(names, MOST_NAMES) });
        }
    }
    let hints = found.hints.iter().filter(|_| !found.different.is_empty() || !problems.is_empty());
    let hints: Vec<Problem> =
        hints.map(|hint| Problem { subject: String::from("hint"), detail: hint.clone() }).collect();
    problems.extend(hints);
    problems
}

fn differences(found: &Findings, differing: &[DifferingTensor<'_>]) -> Vec<Section> {
    if differing.is_empty() {
        return Vec::new();
    }
    let mut sections = Vec::new();
    sections.extend(by_layer(found, differing));
    sections.push(table(differing));
    sections
}

/// The position of a tensor in the table of layers.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct LayerTensor {
    /// The name up to the number of the layer: `model.layers`.
    stack: String,
    layer: u64,
    /// The name after the number, with `*` for further numbers: `mlp.up_proj.weight`.
    tensor: String,
}

impl LayerTensor {
    fn new(name: &str) -> Option<Self> {
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        let parts: Vec<&str> = name.split('.').collect();
        let at = parts.iter().position(|part| is_number(part) && part.parse::<u64>().is_ok())?;
        let rest: Vec<&str> = parts[at + 1..].iter().map(|part| if is_number(part) { "*" } else { part }).collect();
        Some(Self { stack: parts[..at].join("."), layer: parts[at].parse().ok()?, tensor: rest.join(".") })
    }
}

/// Returns the table of layers, or `None` if no tensor with a layer differs.
fn by_layer(found: &Findings, differing: &[DifferingTensor<'_>]) -> Option<Section> {
    // The largest difference of the tensors at one position; `None` if all are equal.
    let mut cells: HashMap<LayerTensor, Option<Measure>> = HashMap::new();
    for name in &found.equal {
        if let Some(at) = LayerTensor::new(name) {
            cells.insert(at, None);
        }
    }
    let mut columns: BTreeMap<String, f64> = BTreeMap::new();
    let mut stacks = BTreeSet::new();
    for tensor in differing {
        let Some(at) = LayerTensor::new(&tensor.finding.fqn) else { continue };
        let most = columns.entry(at.tensor.clone()).or_insert(0.0);
        *most = most.max(size(&tensor.measure));
        stacks.insert(at.stack.clone());
        let cell = cells.entry(at).or_default();
        if cell.as_ref().is_none_or(|other| size(other) < size(&tensor.measure)) {
            *cell = Some(tensor.measure);
        }
    }
    let number = columns.len();
    let mut columns: Vec<(String, f64)> = columns.into_iter().collect();
    columns.sort_by(|left, right| right.1.total_cmp(&left.1));
    columns.truncate(MOST_COLUMNS);
    columns.sort_by(|left, right| natural_order(&left.0, &right.0));
    let layers: BTreeSet<(&str, u64)> =
        cells.keys().filter(|at| stacks.contains(&at.stack)).map(|at| (at.stack.as_str(), at.layer)).collect();
    let logarithms =
        || cells.values().flatten().map(size).filter(|size| size.is_finite() && *size > 0.0).map(f64::log10);
    let (least, most) = (logarithms().fold(f64::INFINITY, f64::min), logarithms().fold(f64::NEG_INFINITY, f64::max));
    let mut rows: Vec<(&str, u64, u64, Vec<HeatCell>)> = Vec::new();
    for (stack, layer) in layers {
        let cell = |(tensor, _): &(String, f64)| {
            let at = LayerTensor { stack: stack.to_owned(), layer, tensor: tensor.clone() };
            match cells.get(&at) {
                None => HeatCell::default(),
                Some(None) => HeatCell { text: String::from("="), intensity: 0 },
                Some(Some(measure)) => {
                    HeatCell { text: short_text(measure), intensity: intensity(size(measure), least, most) }
                }
            }
        };
        let row: Vec<HeatCell> = columns.iter().map(cell).collect();
        let is_equal = |row: &[HeatCell]| row.iter().all(|cell| cell.intensity == 0);
        match rows.last_mut() {
            // Neighbouring layers that are equal share a row.
            Some((other, _, last, above))
                if *other == stack
                    && *last + 1 == layer
                    && is_equal(&row)
                    && above.iter().zip(&row).all(|(above, cell)| above.text == cell.text) =>
            {
                *last = layer;
            }
            _ => rows.push((stack, layer, layer, row)),
        }
    }
    let mut caption = String::from(
        "One row for each layer, one column for each tensor of a layer. A figure is the relative L2 difference: the L2 norm of \
         SRC - OTHER, divided by the L2 norm of SRC. 1e-2 means that a tensor has changed by about 1 % of its size. Stronger \
         colours are larger differences (on a logarithmic scale); = means equal bit for bit. A figure in % is the share of \
         changed elements, for dtypes without a distance. Columns without a difference are left out.",
    );
    if number > MOST_COLUMNS {
        caption
            .push_str(&format!(" {MOST_COLUMNS} of {number} columns are shown: those with the largest differences."));
    }
    let name = |stack: &str, first: u64, last: u64| {
        if first == last { format!("{stack}.{first}") } else { format!("{stack}.{{{first}..{last}}}") }
    };
    let is_empty = rows.is_empty();
    let rows = rows.into_iter().map(|(stack, first, last, row)| (name(stack, first, last), row)).collect();
    let columns = columns.into_iter().map(|(tensor, _)| tensor).collect();
    let heat = Heat { corner: String::from("layer"), columns, rows };
    (!is_empty).then(|| Section::new("Differences by layer", caption, heat))
}

/// Returns a number by which differences are ordered.
fn size(measure: &Measure) -> f64 {
    let size = measure.relative_l2.unwrap_or(measure.changed_share);
    if size.is_nan() { f64::INFINITY } else { size }
}

/// Returns the intensity of the colour of a difference, from 1 to 8. `least` and `most` are the logarithms of the smallest
/// and the largest difference.
fn intensity(size: f64, least: f64, most: f64) -> u8 {
    if !size.is_finite() {
        return 8;
    }
    if size <= 0.0 {
        return 1;
    }
    let share = if most > least { (size.log10() - least) / (most - least) } else { 0.5 };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 1 to 8")]
    let intensity = (1.0 + 7.0 * share.clamp(0.0, 1.0)).round() as u8;
    intensity
}

fn short_text(measure: &Measure) -> String {
    match measure.relative_l2 {
        None => share_text(measure.changed_share),
        Some(size) if size.is_finite() => format!("{size:.1e}"),
        Some(size) => number_text(size),
    }
}

fn share_text(share: f64) -> String {
    let percent = share * 100.0;
    if percent < 0.01 { format!("{percent:.0e} %") } else { format!("{percent:.2} %") }
}

fn table(differing: &[DifferingTensor<'_>]) -> Section {
    let mut differing: Vec<&DifferingTensor<'_>> = differing.iter().collect();
    differing.sort_by(|left, right| size(&right.measure).total_cmp(&size(&left.measure)));
    let text = |number: Option<f64>| number.map_or_else(|| String::from("-"), number_text);
    let row = |tensor: &&DifferingTensor<'_>| {
        let Measure { max_abs, relative_l2, changed_share } = tensor.measure;
        let index = tensor.finding.index.as_ref().map(|index| format!("{index:?}")).unwrap_or_default();
        [tensor.finding.fqn.clone(), text(relative_l2), text(max_abs), share_text(changed_share), index]
            .map(Cell::new)
            .to_vec()
    };
    let columns = [
        ("tensor", false),
        ("relative L2", true),
        ("largest difference", true),
        ("changed elements", true),
        ("first at index", false),
    ];
    let table = Table::new(&columns, differing.iter().map(row).collect());
    let caption = "The tensors that differ, the largest relative difference first. The largest difference is the largest absolute \
                   difference of two elements; nan means that one of two elements is NaN and the other is not.";
    Section::new("Differing tensors", caption, table)
}
