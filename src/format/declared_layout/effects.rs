//! Counts the tensors to which each option of a declared layout applies. An option that applies to no tensor is an
//! error, because the user expects an effect.

use super::DeclaredLayout;
use crate::catalog::Catalog;
use crate::error::{Error, Result};
use crate::layout::comma_list;
use crate::quantity::count;

/// Counts of the plain tensors to which parts of a declared layout apply. A count of 0 shows that an option has no
/// effect.
#[derive(Debug, Default)]
pub struct DeclarationEffects {
    pub by_plan: usize,
    /// The number of tensors that got the fallback placements, because neither a rule nor the plan gives placements.
    /// 0-d tensors are not counted, because a 0-d tensor has only one possible layout.
    pub by_fallback: usize,
    /// The number of tensors that the declared layout shards.
    pub sharded: usize,
}

impl DeclarationEffects {
    /// Checks that three declarations, if given, had an effect: the plan, the bare list of `options::src_placements`,
    /// and `options::src_split`. `options::reduce` and rules are checked when they are applied. A rule in a layout file
    /// may match no tensor, because a layout file may describe more tensors than the source has.
    ///
    /// # Errors
    /// `Usage` for an option without an effect.
    pub fn check(&self, declared: &DeclaredLayout, catalog: &Catalog) -> Result<()> {
        let own = declared.fallback.as_ref().map(|(list, _)| list.as_slice());
        let of_file = declared.file.as_ref().and_then(|file| file.fallback(declared.mesh.as_ref()));
        let bare = own
            .filter(|own| of_file.as_deref() != Some(*own))
            .map(|list| format!("options::src_placements {}", comma_list(list)));
        let split = declared.split.as_ref().map(|split| format!("options::src_split {split}"));
        let plan = declared.plan.as_ref().map(|_| String::from("the plan of options::src_plan or options::src_layout"));
        let unused = [
            (plan, self.by_plan, "no plain tensor is a parameter or the state of a parameter"),
            (bare, self.by_fallback, "every plain tensor has a more specific declaration"),
            (split, self.sharded, "no plain tensor is sharded"),
        ];
        let unused =
            unused.into_iter().find_map(|(option, tensors, why)| Some((option.filter(|_| tensors == 0)?, why)));
        let Some((option, why)) = unused else { return Ok(()) };
        let shared = catalog.tensors.iter().filter(|entry| entry.is_shared()).count();
        let hint = match shared {
            0 => format!("remove {option}"),
            several => format!(
                "remove {option}: {} of {} are DTensors or ShardedTensors, which record their own layout",
                several,
                count(catalog.tensors.len(), "tensor")
            ),
        };
        Err(Error::usage(format!("{option} has no effect, because {why}"), hint))
    }
}
