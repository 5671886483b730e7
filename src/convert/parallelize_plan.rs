//! Parallelize plan from the command line: a built-in plan or a layout file with styles, for a target (`--plan`) or a
//! source (`--src-plan`). PyTorch's counterpart is `parallelize_module`.

use std::path::Path;

use crate::error::{Error, Result};
use crate::format::layout_file;
use crate::layout::file::{DeclaredPlan, LayoutFile, Positioned};
use crate::layout::parallelize::{Family, RoleNames, UnboundPlan};
use crate::nearest;
use crate::storage::lookup;

/// Options that name a parallelize plan.
pub struct PlanOptions<'a> {
    /// Name of a built-in plan or path of a layout file.
    pub plan: Option<&'a str>,
    pub option: &'static str,
    /// Name of the option that reads a complete layout file, for messages.
    pub layout_option: &'static str,
    pub names: RoleNames,
}

impl PlanOptions<'_> {
    /// Combines the plan of the command line with the plan of the layout file `layout`; the command line has priority.
    /// Returns `None` if neither of them names a plan or sets the use of a mesh dimension, as `--tp` or `--fsdp` does.
    ///
    /// # Errors
    /// `Usage` for an unknown plan, and errors from reading the file of the option.
    pub fn draft(self, layout: Option<&LayoutFile>) -> Result<Option<UnboundPlan>> {
        let built_in = self.plan.and_then(Family::named);
        let file = match self.plan {
            Some(name) if built_in.is_none() => Some(self.file_of(name)?),
            _ => None,
        };
        let said: Vec<&DeclaredPlan> = file.iter().chain(layout).map(|file| &file.plan).collect();
        let Self { plan, names, .. } = self;
        let given = [&names.tp, &names.fsdp, &names.replicate, &names.ddp];
        if plan.is_none() && given.iter().all(|name| name.is_none()) && said.iter().all(|said| said.is_empty()) {
            return Ok(None);
        }
        let dim = |given: Option<String>, of: fn(&DeclaredPlan) -> &Option<Positioned<String>>| {
            given.or_else(|| said.iter().find_map(|said| of(said).as_ref()).map(|said| said.value.clone()))
        };
        let names = RoleNames {
            tp: dim(names.tp, |said| &said.tp),
            fsdp: dim(names.fsdp, |said| &said.fsdp),
            replicate: dim(names.replicate, |said| &said.replicate),
            ddp: dim(names.ddp, |said| &said.ddp),
            unused: names.unused,
        };
        let styles = said.iter().flat_map(|said| said.styles.iter().cloned()).collect();
        let family = match (built_in, said.iter().find_map(|said| said.name.as_ref())) {
            (Some(family), _) => Some(family),
            (None, Some(name)) => {
                let unknown =
                    || name.error(format!("there is no built-in plan with the name {}", name.value), hint(&name.value));
                Some(Family::named(&name.value).ok_or_else(unknown)?)
            }
            (None, None) => None,
        };
        Ok(Some(UnboundPlan { styles, family, names }))
    }

    /// Reads the layout file whose path the option gives instead of the name of a built-in plan.
    fn file_of(&self, name: &str) -> Result<LayoutFile> {
        let (option, path) = (self.option, Path::new(name));
        if path.extension().is_none() && !lookup::exists(path)? {
            return Err(Error::usage(format!("{option} {name}: no built-in plan has this name"), hint(name)));
        }
        let file = layout_file::read(path)?;
        if !file.has_only_plan() {
            return Err(Error::usage(
                format!("{option} {name}: expected a layout file that has only a plan and styles"),
                format!("use {} {name} to read the mesh, placements and rules of the file, too", self.layout_option),
            ));
        }
        Ok(file)
    }
}

/// Returns a hint for an unknown plan name: the most similar name, and all built-in plans.
fn hint(name: &str) -> String {
    let known: Vec<String> = Family::all().iter().map(|family| family.name.to_owned()).collect();
    format!("{}; use one of {}, or a layout file with styles", nearest::name_hint(name, &known), known.join(", "))
}
