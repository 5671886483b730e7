//! The layout file: mesh, rules, styles and flat units, as people write them down.
//!
//! One grammar in TOML and JSON, the same keys in both. All of them may be left out:
//!
//! ```toml
//! version = 1
//! mesh = "dp=2,tp=2"               # outermost dim first; a list of sizes, [2, 2], where dims have no names
//! mesh_ranks = [0, 2, 1, 3]        # row-major order of the cells
//! placements = "S(0),R"            # of every tensor without a rule; R where it does not fit
//! split = "chunk"                  # chunk, balanced or makani, for all tensors
//! plan = "llama"                   # a built-in plan, behind the styles below
//! tp = "tp"                        # mesh dims of plan and styles; also fsdp, replicate
//!
//! [styles]                         # of modules; tables nest, keys join with dots; the first match wins
//! tok_embeddings = "rowwise-embedding"
//! [styles."layers.*"]
//! "attention.{wq,wk,wv}" = "colwise"
//!
//! [[rules]]                        # before styles; the first match wins
//! tensors = "**.norm.weight"       # a pattern
//! placements = "S(0),R"            # or "plain": whole on every rank, no DTensor
//! slice = "dp"                     # dims of the tensor's own mesh, where that is to be a slice
//! split = "makani"                 # one, or one a mesh dim: "chunk,makani"
//! sizes = { dp = [3, 1] }          # one a coordinate of that dim
//!
//! [flat]                           # the document of flat_layout.json
//! ```
//!
//! A file is read in two steps: [`LayoutFile::parse`] knows no mesh but its own, [`LayoutFile::rules`] the one that all
//! is said of. Invariant: what is wrong is told with file, line and rule, and a text of any content gives an error or a
//! layout. The grammar is ours; plans are those of `parallelize_module`.

mod fields;
mod node;
mod parse;
mod print;
mod written;

#[cfg(test)]
mod tests;

use serde_json::Value as Json;

use super::parallelize::StyleRule;
use super::rules::Rule;
use super::strided::follow;
use super::{DeviceMesh, LayoutError, PlacementSpec, Split};
use fields::FilePosition;
pub use fields::did_you_mean;
pub use print::{document, toml};
use written::WrittenLayout;

/// Files beyond this are not layouts.
pub const MAX_BYTES: u64 = 16 << 20;

/// What a layout file says.
#[derive(Clone, Debug)]
pub struct LayoutFile {
    /// Of the file, for messages.
    name: String,
    mesh: Option<Positioned<DeviceMesh>>,
    fallback: Option<Positioned<Vec<PlacementSpec>>>,
    /// How dims are cut where no rule says otherwise; the command line may put another one here.
    pub split: Option<Split>,
    rules: Vec<WrittenLayout>,
    pub plan: DeclaredPlan,
    /// The document of `flat_layout.json`, and where it stands.
    pub flat: Option<Positioned<Json>>,
}

/// What is said of a parallelize plan.
#[derive(Clone, Debug, Default)]
pub struct DeclaredPlan {
    /// A built-in plan.
    pub name: Option<Positioned<String>>,
    /// Before those of the built-in plan.
    pub styles: Vec<StyleRule>,
    /// Names of mesh dims.
    pub tp: Option<Positioned<String>>,
    pub fsdp: Option<Positioned<String>>,
    pub replicate: Option<Positioned<String>>,
}

impl DeclaredPlan {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Self { name, styles, tp, fsdp, replicate } = self;
        styles.is_empty() && [name, tp, fsdp, replicate].iter().all(|said| said.is_none())
    }
}

/// Something that is said, and where.
#[derive(Clone, Debug)]
pub struct Positioned<T> {
    pub value: T,
    name: String,
    line: usize,
    what: &'static str,
}

impl<T> Positioned<T> {
    /// `layout.toml line 3: tp`
    #[must_use]
    pub fn place(&self) -> String {
        self.at().said()
    }

    fn at(&self) -> FilePosition<'_> {
        FilePosition { name: &self.name, line: self.line, what: self.what }
    }

    /// An error about it, with its place.
    #[must_use]
    pub fn wrong(&self, problem: impl std::fmt::Display, hint: impl Into<String>) -> LayoutError {
        self.at().wrong(problem, Some(hint.into()))
    }
}

impl LayoutFile {
    /// What a text says. `name` is that of the file: `.json` and `.toml` tell the syntax, else the text does.
    ///
    /// # Errors
    /// `File` naming place and problem.
    pub fn parse(name: &str, text: &str) -> Result<Self, LayoutError> {
        let at = FilePosition { name, line: 1, what: "" };
        if text.len() as u64 > MAX_BYTES {
            return Err(at.wrong(format!("expected at most {MAX_BYTES} bytes, found {}", text.len()), None));
        }
        // Editors of Windows put a mark before the text.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        if text.trim().is_empty() {
            return Err(at.wrong("expected a layout, found an empty file", None));
        }
        let parsed = if is_json(name, text) { node::of_json(text) } else { node::of_toml(text) };
        parse::layout(name, &parsed.map_err(|fault| at.on(fault.line).wrong(fault.problem, None))?)
    }

    /// The mesh, where the file or somebody beside it says one. One that is given takes the place of the file's, and has
    /// dims of the same names.
    ///
    /// # Errors
    /// `File` where it has not.
    pub fn mesh(&self, given: Option<DeviceMesh>) -> Result<Option<DeviceMesh>, LayoutError> {
        let (Some(own), Some(given)) = (&self.mesh, &given) else {
            return Ok(given.or_else(|| self.mesh.as_ref().map(|own| own.value.clone())));
        };
        if own.value.names() == given.names() && own.value.ndim() == given.ndim() {
            return Ok(Some(given.clone()));
        }
        let problem = format!("the mesh is {}, and {given}, which is given beside it, has other dims", own.value);
        Err(own.wrong(problem, "give the same dims, in their order, in other sizes; or change the mesh of the file"))
    }

    /// What every tensor without a rule gets, also on a mesh that takes the place of the file's.
    #[must_use]
    pub fn fallback(&self, given: Option<&DeviceMesh>) -> Option<Vec<PlacementSpec>> {
        let list = &self.fallback.as_ref()?.value;
        Some(match (&self.mesh, given) {
            (Some(own), Some(given)) => follow(list, &own.value, given),
            _ => list.clone(),
        })
    }

    /// Whether it says nothing of tensors that are laid out one by one.
    #[must_use]
    pub fn is_flat_alone(&self) -> bool {
        self.flat.is_some()
            && self.mesh.is_none()
            && self.fallback.is_none()
            && self.split.is_none()
            && self.rules.is_empty()
            && self.plan.is_empty()
    }

    /// Whether it says how modules are cut, and nothing else.
    #[must_use]
    pub fn is_plan_alone(&self) -> bool {
        let Self { mesh, fallback, split, rules, plan, flat, .. } = self;
        let more = mesh.is_some() || fallback.is_some() || split.is_some() || !rules.is_empty() || flat.is_some();
        !more && !plan.is_empty()
    }

    /// The rules on a mesh, in their order.
    ///
    /// # Errors
    /// `File` where something does not fit the mesh: numbers of placements and sizes, names of dims.
    pub fn rules(&self, mesh: &DeviceMesh) -> Result<Vec<Rule>, LayoutError> {
        if let Some(fallback) = &self.fallback {
            written::check(fallback.at(), &fallback.value.clone().into(), mesh)?;
        }
        let DeclaredPlan { tp, fsdp, replicate, .. } = &self.plan;
        for said in [tp, fsdp, replicate].into_iter().flatten() {
            written::dim(said.at(), &said.value, mesh)?;
        }
        let own = self.mesh.as_ref().map_or(mesh, |own| &own.value);
        self.rules.iter().map(|rule| rule.on(&self.name, own, mesh, self.split.as_ref())).collect()
    }
}

/// By the suffix of the file, else by how the text begins.
fn is_json(name: &str, text: &str) -> bool {
    let suffix = name.rsplit_once('.').map(|(_, suffix)| suffix.to_ascii_lowercase());
    match suffix.as_deref() {
        Some("json") => true,
        Some("toml") => false,
        _ => text.trim_start().starts_with('{'),
    }
}
