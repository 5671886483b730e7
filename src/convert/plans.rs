//! A parallelize plan as the command line says it: built in, or a layout file with styles, of a target (`--plan`) or of a
//! source (`--src-plan`).

use std::path::Path;

use crate::error::{Error, Result};
use crate::format::layout_file;
use crate::layout::file::{DeclaredPlan, LayoutFile, Positioned};
use crate::layout::parallelize::{Family, RoleNames, UnboundPlan};
use crate::nearest;
use crate::storage::lookup;

/// What the command line says of a plan.
pub struct PlanOptions<'a> {
    /// Its name, or that of a file; and the option that says it.
    pub plan: Option<&'a str>,
    pub option: &'static str,
    /// The option for all of a layout file.
    pub layout_option: &'static str,
    pub names: RoleNames,
}

impl PlanOptions<'_> {
    /// The plan of the command line, and of the layout file: what the first says goes before what the other does.
    ///
    /// # Errors
    /// `Usage` for plans that there are not, and as reading the file of the option.
    pub fn draft(self, layout: Option<&LayoutFile>) -> Result<Option<UnboundPlan>> {
        let built_in = self.plan.and_then(Family::named);
        let file = match self.plan {
            Some(name) if built_in.is_none() => Some(self.file_of(name)?),
            _ => None,
        };
        let said: Vec<&DeclaredPlan> = file.iter().chain(layout).map(|file| &file.plan).collect();
        let Self { plan, names, .. } = self;
        let given = [&names.tp, &names.fsdp, &names.replicate];
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
            unused: names.unused,
        };
        let styles = said.iter().flat_map(|said| said.styles.iter().cloned()).collect();
        let family = match (built_in, said.iter().find_map(|said| said.name.as_ref())) {
            (Some(family), _) => Some(family),
            (None, Some(name)) => {
                let unknown = || name.error(format!("no built-in plan is called {}", name.value), hint(&name.value));
                Some(Family::named(&name.value).ok_or_else(unknown)?)
            }
            (None, None) => None,
        };
        Ok(Some(UnboundPlan { styles, family, names }))
    }

    /// The layout file that is given for a plan.
    fn file_of(&self, name: &str) -> Result<LayoutFile> {
        let (option, path) = (self.option, Path::new(name));
        if path.extension().is_none() && !lookup::exists(path)? {
            return Err(Error::usage(format!("{option} {name}: no built-in plan has this name"), hint(name)));
        }
        let file = layout_file::read(path)?;
        if !file.has_only_plan() {
            return Err(Error::usage(
                format!("{option} {name}: it says more than a plan, or none"),
                format!(
                    "{} takes mesh, placements and rules of a file as well as its plan and styles",
                    self.layout_option
                ),
            ));
        }
        Ok(file)
    }
}

fn hint(name: &str) -> String {
    let known: Vec<String> = Family::all().iter().map(|family| family.name.to_owned()).collect();
    format!("{}; there are {}, and layout files with styles", nearest::name_hint(name, &known), known.join(", "))
}
