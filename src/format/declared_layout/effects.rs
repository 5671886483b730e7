//! What of that which is said came to anything. What did not is an error: somebody thinks that it says how tensors lie.

use super::DeclaredLayout;
use crate::catalog::Catalog;
use crate::error::{Error, Result};
use crate::layout::comma_list;
use crate::quantity::count;

/// For how many tensors something was heard.
#[derive(Debug, Default)]
pub struct DeclarationEffects {
    pub by_plan: usize,
    /// Tensors that what is said of all of them is for; what has no dims lies in one way only.
    pub by_fallback: usize,
    /// Tensors that are cut.
    pub cut: usize,
}

impl DeclarationEffects {
    /// `--reduce` and rules are checked where they are heard. A layout file may say more than a source has.
    ///
    /// # Errors
    /// `Usage` for options without an effect.
    pub fn check(&self, told: &DeclaredLayout, catalog: &Catalog) -> Result<()> {
        let own = told.fallback.as_ref().map(|(list, _)| list.as_slice());
        let of_file = told.file.as_ref().and_then(|file| file.fallback(told.mesh.as_ref()));
        let bare = own
            .filter(|own| of_file.as_deref() != Some(*own))
            .map(|list| format!("options::src_placements {}", comma_list(list)));
        let split = told.split.as_ref().map(|split| format!("options::src_split {split}"));
        let plan = told.plan.as_ref().map(|_| String::from("the plan"));
        let unheard = [
            (plan, self.by_plan, "no plain tensor is a parameter, or state of one"),
            (bare, self.by_fallback, "no plain tensor is left for it"),
            (split, self.cut, "no plain tensor is cut"),
        ];
        let unheard = unheard.into_iter().find_map(|(said, heard, why)| Some((said.filter(|_| heard == 0)?, why)));
        let Some((said, why)) = unheard else { return Ok(()) };
        let shared = catalog.tensors.iter().filter(|entry| entry.is_shared()).count();
        let hint = match shared {
            0 => String::from("it has no effect: leave it out"),
            several => format!(
                "{} of {} are DTensors or ShardedTensors, which say themselves how they lie: leave it out",
                several,
                count(catalog.tensors.len(), "tensor")
            ),
        };
        Err(Error::usage(format!("{said}: {why}"), hint))
    }
}
