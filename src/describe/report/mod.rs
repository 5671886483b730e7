//! The HTML page of `inspect`, which is also a part of the page of `verify`: the problems, the summary, a treemap of the
//! tensors, the bytes of each rank, pictures of the layouts, and a table.

mod holders;
mod pictures;

use std::collections::{HashMap, HashSet};

use indexmap::IndexMap;

use super::groups::groups;
use super::table::{TensorFacts, likely_ranks};
use super::{Inspection, summary};
use crate::catalog::{TensorEntry, path};
use crate::error::{Error, Result};
use crate::html::{COLOURS, Cell, Colouring, Details, Page, Problem, Section, Table, TreeNode, Treemap, percent};
use crate::name_list::NameGroup;
use crate::quantity::{count, human_bytes};
use crate::storage::lookup;

/// A problem of one tensor, which the pictures and tables mark.
pub struct TensorProblem {
    /// The name of the tensor.
    pub name: String,
    pub detail: String,
    /// The index of the element at which the problem begins, if there is such an element.
    pub index: Option<Vec<u64>>,
}

/// Equal tensors whose names differ only in numbers, with the facts that a report needs.
struct ReportedGroup<'a> {
    name: String,
    group: NameGroup,
    entry: &'a TensorEntry,
    facts: TensorFacts,
    /// The placements with their mesh.
    layout: String,
    /// The bytes of one tensor, and of all tensors of the group. A tied tensor counts under its first name only.
    each: u64,
    total: u64,
    problem: Option<GroupProblem>,
}

struct GroupProblem {
    detail: String,
    index: Option<Vec<u64>>,
}

/// Returns the page of `inspect`.
///
/// # Errors
/// `Io` if the tensor that holds the training step cannot be read.
pub fn page(view: &Inspection<'_>) -> Result<Page> {
    let checkpoint = view.checkpoint;
    let groups = reported_groups(view, &[]);
    let mut problems = Vec::new();
    let is_one_file = !lookup::is_folder(&checkpoint.place(&checkpoint.root))?;
    if !checkpoint.missing.is_empty() && !is_one_file {
        let detail = crate::name_list::short_list(&checkpoint.missing, 20);
        problems.push(Problem { subject: count(checkpoint.missing.len(), "missing file"), detail });
    }
    problems.extend(groups.iter().filter_map(|group| {
        let detail = group.problem.as_ref()?.detail.clone();
        Some(Problem { subject: group.name.clone(), detail })
    }));
    problems.extend(checkpoint.catalog.conflicts().iter().map(problem_of_error));
    problems.extend(checkpoint.catalog.tensors.iter().filter_map(|entry| {
        let why = entry.unreadable.as_ref()?;
        Some(Problem { subject: entry.fqn.to_string(), detail: format!("cannot be read: {}", why.kind) })
    }));
    problems.extend(
        checkpoint
            .catalog
            .warnings
            .iter()
            .map(|warning| Problem { subject: String::from("warning"), detail: warning.clone() }),
    );
    let total: u64 = groups.iter().map(|group| group.total).fold(0, u64::saturating_add);
    let found = match problems.len() {
        0 => String::from("no problem in the metadata (dtshard verify also checks the data)"),
        number => count(number, "problem"),
    };
    Ok(Page {
        title: format!("Checkpoint {}", checkpoint.root.display()),
        result: format!("{}, {}: {found}", count(view.names.len(), "tensor"), human_bytes(total)),
        problems,
        facts: facts(view)?,
        sections: sections_of(view, &groups),
    })
}

/// Returns an error about a tensor or an object as a problem.
pub fn problem_of_error(error: &Error) -> Problem {
    Problem { subject: error.fqn().unwrap_or("checkpoint").to_owned(), detail: error.detail() }
}

/// Returns the lines of the summary.
///
/// # Errors
/// `Io` if the tensor that holds the training step cannot be read.
pub fn facts(view: &Inspection<'_>) -> Result<Vec<(String, String)>> {
    Ok(summary::lines(view)?.into_iter().map(|(name, text)| (name.to_owned(), text)).collect())
}

/// Returns the sections that show tensors. `problems` are marked.
pub fn sections(view: &Inspection<'_>, problems: &[TensorProblem]) -> Vec<Section> {
    sections_of(view, &reported_groups(view, problems))
}

fn sections_of(view: &Inspection<'_>, groups: &[ReportedGroup<'_>]) -> Vec<Section> {
    if groups.is_empty() {
        return Vec::new();
    }
    let mut sections = vec![treemap(view, groups)];
    sections.extend(holders::section(view));
    sections.extend(pictures::section(view, groups));
    sections.push(table(groups));
    sections.extend(objects(view));
    sections
}

fn reported_groups<'a>(view: &Inspection<'a>, problems: &[TensorProblem]) -> Vec<ReportedGroup<'a>> {
    let marks: HashMap<&str, usize> =
        problems.iter().enumerate().rev().map(|(index, problem)| (problem.name.as_str(), index + 1)).collect();
    let ranks = likely_ranks(view);
    let mut seen = HashSet::new();
    let first_names: Vec<bool> = view.names.iter().map(|(_, id)| seen.insert(*id)).collect();
    let report = |group: NameGroup| {
        let (name, id) = &view.names[group.members[0]];
        let entry = view.checkpoint.catalog.tensor(*id);
        let is_absent = entry.unreadable.as_ref().is_some_and(|why| !why.has_parts());
        let each = if is_absent { 0 } else { entry.len_bytes() };
        let number = group.members.iter().filter(|member| first_names[**member]).count() as u64;
        let marked = marks.get(name.as_str()).or_else(|| marks.get(entry.fqn.as_str()));
        let problem = match marked.map(|mark| &problems[mark - 1]) {
            Some(problem) => Some(GroupProblem { detail: problem.detail.clone(), index: problem.index.clone() }),
            // Every tensor of the group has equal chunks.
            None if entry.unreadable.is_none() => {
                let error = entry.tilings().err();
                error.map(|error| GroupProblem { detail: error.detail(), index: None })
            }
            None => None,
        };
        let facts = TensorFacts::of(entry, ranks);
        let layout = match &entry.sharding {
            Some(sharding) => format!("{} on {}", facts.placements, view.checkpoint.catalog.mesh(sharding)),
            None if facts.placements == "-" => String::from("no placements recorded"),
            None => facts.placements.clone(),
        };
        let total = each.saturating_mul(number);
        ReportedGroup { name: group.name(), group, entry, facts, layout, each, total, problem }
    };
    groups(view, |name| marks.get(name).copied().unwrap_or(0)).into_iter().map(report).collect()
}

fn treemap(view: &Inspection<'_>, groups: &[ReportedGroup<'_>]) -> Section {
    let top = |group: &ReportedGroup<'_>| group.group.components[0].clone();
    let series = if view.checkpoint.series.is_empty() { "the first component of the name" } else { "the series" };
    let dtype = |group: &ReportedGroup<'_>| group.facts.dtype.clone();
    let layout = |group: &ReportedGroup<'_>| group.layout.clone();
    let mut colourings = Vec::new();
    let mut categories: Vec<Vec<usize>> = vec![Vec::new(); groups.len()];
    for (colouring, numbers) in [
        colouring("the dtype", groups, dtype),
        colouring("the placements", groups, layout),
        colouring(series, groups, top),
    ] {
        colourings.push(colouring);
        categories.iter_mut().zip(numbers).for_each(|(list, number)| list.push(number));
    }
    let mut root = ModuleTree::default();
    for (group, categories) in groups.iter().zip(categories) {
        let of = count(group.group.members.len(), "tensor");
        let TensorFacts { dtype, shape, .. } = &group.facts;
        let [each, all] = [group.each, group.total].map(human_bytes);
        let title = format!("{}: {of}, each {dtype} {shape}, {}, {each}; {all} in total", group.name, group.layout);
        root.add(&group.group.components, TreeNode { bytes: group.total, categories, title, ..TreeNode::default() });
    }
    let total: u64 = groups.iter().map(|group| group.total).fold(0, u64::saturating_add);
    let caption = format!(
        "Each box is a tensor, or equal tensors whose names differ only in the numbers in braces, such as the layers of a model. \
         The area of a box is its share of all {}; boxes of one module are together in a frame.",
        human_bytes(total)
    );
    Section::new("Where the bytes are", caption, Treemap { roots: root.nodes(), colourings })
}

/// Returns a colouring with the categories in the order of their bytes, and the category of each group.
fn colouring(
    name: &str,
    groups: &[ReportedGroup<'_>],
    category: impl Fn(&ReportedGroup<'_>) -> String,
) -> (Colouring, Vec<usize>) {
    let mut bytes: IndexMap<String, u64> = IndexMap::new();
    for group in groups {
        let sum = bytes.entry(category(group)).or_default();
        *sum = sum.saturating_add(group.total);
    }
    bytes.sort_by(|_, left, _, right| right.cmp(left));
    let last = if bytes.len() > COLOURS { COLOURS - 1 } else { bytes.len() };
    let number = |group| bytes.get_index_of(&category(group)).unwrap_or(0).min(last);
    let numbers = groups.iter().map(number).collect();
    let mut categories: Vec<(String, u64)> = bytes.iter().take(last).map(|(name, sum)| (name.clone(), *sum)).collect();
    if last < bytes.len() {
        let rest = bytes.values().skip(last).copied().fold(0, u64::saturating_add);
        categories.push((format!("{} others", bytes.len() - last), rest));
    }
    (Colouring { name: name.to_owned(), categories }, numbers)
}

/// The modules of a model, by the components of names.
#[derive(Default)]
struct ModuleTree {
    children: IndexMap<String, ModuleTree>,
    tensor: Option<TreeNode>,
}

/// The maximum depth of the tree. Names from files may have any number of components.
const MOST_DEPTH: usize = 16;

impl ModuleTree {
    fn add(&mut self, components: &[String], tensor: TreeNode) {
        let mut node = self;
        let (modules, rest) = components.split_at(components.len().min(MOST_DEPTH) - 1);
        for module in modules {
            node = node.children.entry(module.clone()).or_default();
        }
        // A second tensor of this name is shown beside the first tensor.
        let mut label = rest.join(".");
        while node.children.get(&label).is_some_and(|other| other.tensor.is_some()) {
            label.push_str(" (again)");
        }
        node.children.entry(label).or_default().tensor = Some(tensor);
    }

    /// Returns the children as nodes. A module with a single child is joined with this child.
    fn nodes(self) -> Vec<TreeNode> {
        let node = |(label, Self { children, tensor }): (String, Self)| {
            let mut children = Self { children, tensor: None }.nodes();
            match (tensor, children.len()) {
                (Some(tensor), 0) => TreeNode { label, ..tensor },
                (None, 1) => {
                    let only = children.remove(0);
                    TreeNode { label: format!("{label}.{}", only.label), ..only }
                }
                (tensor, _) => {
                    children
                        .extend(tensor.map(|tensor| TreeNode { label: String::from("(the module itself)"), ..tensor }));
                    let bytes = children.iter().map(|child| child.bytes).fold(0, u64::saturating_add);
                    let title = format!("{label}: {}", human_bytes(bytes));
                    TreeNode { label, bytes, children, categories: Vec::new(), title }
                }
            }
        };
        self.children.into_iter().map(node).collect()
    }
}

fn table(groups: &[ReportedGroup<'_>]) -> Section {
    let total: u64 = groups.iter().map(|group| group.total).fold(0, u64::saturating_add);
    let has_problem = groups.iter().any(|group| group.problem.is_some());
    let row = |group: &ReportedGroup<'_>| {
        let TensorFacts { dtype, shape, chunks, .. } = &group.facts;
        let mut row: Vec<Cell> = [
            group.name.clone(),
            group.group.members.len().to_string(),
            dtype.clone(),
            shape.clone(),
            group.layout.clone(),
            chunks.clone(),
            human_bytes(group.each),
            human_bytes(group.total),
            percent(group.total, total),
        ]
        .into_iter()
        .map(Cell::new)
        .collect();
        if has_problem {
            row.push(Cell::bad(group.problem.as_ref().map(|problem| problem.detail.clone()).unwrap_or_default()));
        }
        row
    };
    let mut columns = vec![
        ("tensors", false),
        ("count", true),
        ("dtype", false),
        ("shape", false),
        ("placements", false),
        ("chunks", true),
        ("each", true),
        ("total", true),
        ("share", true),
    ];
    if has_problem {
        columns.push(("problem", false));
    }
    let number: usize = groups.iter().map(|group| group.group.members.len()).sum();
    let mut last: Vec<Cell> = vec![Cell::new("total"), Cell::new(number.to_string())];
    last.extend(std::iter::repeat_n(Cell::new(""), 5));
    last.extend([Cell::new(human_bytes(total)), Cell::new("")]);
    let caption = "One row for each tensor, or for equal tensors whose names differ only in the numbers in braces. Chunks are the \
                   stored parts of one tensor, replicas included.";
    let table = Table::new(&columns, groups.iter().map(row).collect()).with_total(last);
    Section::new("Tensors", caption, table)
}

/// The maximum number of objects that a page shows.
const MOST_OBJECTS: usize = 200;

fn objects(view: &Inspection<'_>) -> Option<Section> {
    let objects = path::objects(&view.checkpoint.catalog.state);
    let number = objects.len();
    let row = |(path, value): (path::Path, &crate::catalog::Value)| {
        vec![Cell::new(path.to_string()), Cell::new(value.type_name()), Cell::new(value.to_string())]
    };
    let rows: Vec<Vec<Cell>> = objects.into_iter().take(MOST_OBJECTS).map(row).collect();
    let rest = if number > MOST_OBJECTS { format!(" The first {MOST_OBJECTS} are listed.") } else { String::new() };
    let caption = format!("The checkpoint has {} beside the tensors.{rest}", count(number, "value"));
    let table = Table::new(&[("name", false), ("type", false), ("value", false)], rows);
    (number > 0).then(|| Section::new("Other values", caption, Details(String::from("Show the values"), table)))
}
