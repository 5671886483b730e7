//! Layout files: the mesh, rules, styles and units of flat parameters that a user writes.
//!
//! TOML and JSON have the same keys, and every key is optional:
//!
//! ```toml
//! version = 1
//! mesh = "dp=2,tp=2"               # outermost dim first; for dims without names, a list of sizes: [2, 2]
//! mesh_ranks = [0, 2, 1, 3]        # row-major order of the cells
//! placements = "S(0),R"            # for every tensor without a rule; R where a placement does not fit
//! split = "chunk"                  # chunk, balanced or makani, for all tensors
//! plan = "llama"                   # a built-in plan, tried after the styles below
//! tp = "tp"                        # the mesh dim of tensor parallelism; other roles: fsdp, replicate, ddp
//!
//! [styles]                         # styles of modules; keys of nested tables are joined with dots; the first match wins
//! tok_embeddings = "rowwise-embedding"
//! [styles."layers.*"]
//! "attention.{wq,wk,wv}" = "colwise"
//!
//! [[rules]]                        # tried before plan and styles; the first match wins
//! tensors = "**.norm.weight"       # a pattern
//! placements = "S(0),R"            # or "plain": complete on every rank, no DTensor
//! slice = "dp"                     # mesh dims of the tensor's own mesh, if that is a slice
//! split = "makani"                 # one for all mesh dims, or one for each: "chunk,makani"
//! sizes = { dp = [3, 1] }          # one size for each coordinate of that mesh dim
//!
//! [flat]                           # the document of flat_layout.json
//! ```
//!
//! A file is read in two steps: [`LayoutFile::parse`] knows only the mesh in the file, and [`LayoutFile::rules`]
//! applies the rules to the mesh in use. Unit of sizes: elements. Invariant: any text gives a layout or an error, and
//! errors name file, line and rule. The grammar is dtshard's own; plans are those of PyTorch's `parallelize_module`.

mod parse;
mod print;
mod written;

#[cfg(test)]
mod tests;

use serde_json::Value as Json;

use super::parallelize::StyleRule;
use super::rules::Rule;
use super::strided::adapt_split_factors;
use super::{DeviceMesh, LayoutError, PlacementSpec, Split};
use crate::document::{self, FilePosition};
pub use print::{document, toml};
use written::WrittenRule;

/// The content of a layout file.
#[derive(Clone, Debug)]
pub struct LayoutFile {
    /// The name of the file, for messages.
    name: String,
    mesh: Option<Positioned<DeviceMesh>>,
    fallback: Option<Positioned<Vec<PlacementSpec>>>,
    /// The split rule of tensors that no rule matches, and of rules without a split rule. An option may replace this
    /// default.
    pub split: Option<Split>,
    rules: Vec<WrittenRule>,
    /// The parallelize plan that the file declares; empty if the file declares none.
    pub plan: DeclaredPlan,
    /// The content of the key `flat`, which has the format of `flat_layout.json`, together with the position of the key
    /// in the file.
    pub flat: Option<Positioned<Json>>,
}

/// A parallelize plan, as a layout file declares it.
#[derive(Clone, Debug, Default)]
pub struct DeclaredPlan {
    /// The name of a built-in plan, such as `llama`.
    pub name: Option<Positioned<String>>,
    /// The styles in the file. These styles are tried before the styles of the built-in plan.
    pub styles: Vec<StyleRule>,
    /// The name of the mesh dim of tensor parallelism.
    pub tp: Option<Positioned<String>>,
    pub fsdp: Option<Positioned<String>>,
    pub replicate: Option<Positioned<String>>,
    pub ddp: Option<Positioned<String>>,
}

impl DeclaredPlan {
    /// Returns whether the file declares no plan: the file has no built-in plan, no styles, and no mesh dims of a plan.
    pub fn is_empty(&self) -> bool {
        let Self { name, styles, tp, fsdp, replicate, ddp } = self;
        styles.is_empty() && [name, tp, fsdp, replicate, ddp].iter().all(|value| value.is_none())
    }
}

/// A value from a layout file, with the position of the value in the file.
#[derive(Clone, Debug)]
pub struct Positioned<T> {
    pub value: T,
    name: String,
    line: usize,
    section: &'static str,
}

impl<T> Positioned<T> {
    /// Returns the position for messages: `layout.toml line 3: tp`.
    pub fn describe(&self) -> String {
        self.at().describe()
    }

    fn at(&self) -> FilePosition<'_> {
        FilePosition { name: &self.name, line: self.line, section: self.section }
    }

    /// Makes an error about the value that names the position of the value.
    pub fn error(&self, problem: impl std::fmt::Display, hint: impl Into<String>) -> LayoutError {
        self.at().error(problem, Some(hint.into()))
    }
}

impl LayoutFile {
    /// Parses a layout file. The suffix of `name`, `.json` or `.toml`, selects the syntax; otherwise the text does.
    ///
    /// # Errors
    /// `File` with the position and the problem.
    pub fn parse(name: &str, text: &str) -> Result<Self, LayoutError> {
        parse::layout(name, &document::parse(name, text, "a layout")?)
    }

    /// Returns the mesh `given`, or the mesh of the file if `given` is `None`.
    ///
    /// # Errors
    /// `File` if `given` and the file both have a mesh, and the names of the dims of the two meshes differ.
    pub fn mesh(&self, given: Option<DeviceMesh>) -> Result<Option<DeviceMesh>, LayoutError> {
        let (Some(own), Some(given)) = (&self.mesh, &given) else {
            return Ok(given.or_else(|| self.mesh.as_ref().map(|own| own.value.clone())));
        };
        if own.value.names() == given.names() && own.value.ndim() == given.ndim() {
            return Ok(Some(given.clone()));
        }
        let problem = format!("the mesh of the file is {}, and the given mesh {given} has other dims", own.value);
        Err(own.error(problem, "give a mesh with the same dims in the same order, or change the mesh of the file"))
    }

    /// Returns the placements of tensors that no rule matches, or `None` if the file has no such placements. If the
    /// file has a mesh and the mesh in use is another mesh, `given`, the split factors of the placements are adapted to
    /// the sizes of `given`.
    pub fn fallback(&self, given: Option<&DeviceMesh>) -> Option<Vec<PlacementSpec>> {
        let list = &self.fallback.as_ref()?.value;
        Some(match (&self.mesh, given) {
            (Some(own), Some(given)) => adapt_split_factors(list, &own.value, given),
            _ => list.clone(),
        })
    }

    /// Returns whether the file has a flat layout and nothing else.
    pub fn has_only_flat(&self) -> bool {
        self.flat.is_some()
            && self.mesh.is_none()
            && self.fallback.is_none()
            && self.split.is_none()
            && self.rules.is_empty()
            && self.plan.is_empty()
    }

    /// Returns whether the file has a plan (a built-in plan, styles, or mesh dims of a plan) and nothing else.
    pub fn has_only_plan(&self) -> bool {
        let Self { mesh, fallback, split, rules, plan, flat, .. } = self;
        let more = mesh.is_some() || fallback.is_some() || split.is_some() || !rules.is_empty() || flat.is_some();
        !more && !plan.is_empty()
    }

    /// Returns the rules, applied to a mesh, in the order of the file.
    ///
    /// # Errors
    /// `File` if the number of placements or sizes, or the name of a dim, does not fit the mesh.
    pub fn rules(&self, mesh: &DeviceMesh) -> Result<Vec<Rule>, LayoutError> {
        if let Some(fallback) = &self.fallback {
            written::check(fallback.at(), &fallback.value.clone().into(), mesh)?;
        }
        let DeclaredPlan { tp, fsdp, replicate, ddp, .. } = &self.plan;
        for role in [tp, fsdp, replicate, ddp].into_iter().flatten() {
            written::dim(role.at(), &role.value, mesh)?;
        }
        let own = self.mesh.as_ref().map_or(mesh, |own| &own.value);
        self.rules.iter().map(|rule| rule.resolve(&self.name, own, mesh, self.split.as_ref())).collect()
    }
}

/// Returns a function for `map_err` that adds the position to an error, unless the error already has a position.
fn within(at: FilePosition<'_>) -> impl Fn(LayoutError) -> LayoutError {
    move |error| match error {
        LayoutError::File(_) => error,
        error => at.error(error, None),
    }
}
