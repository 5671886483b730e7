//! Groups of tensors that have equal dtypes, shapes, placements and chunks, and whose names differ only in numbers. The
//! layers of a model form such groups.

use std::hash::{Hash, Hasher};

use super::Inspection;
use crate::catalog::TensorEntry;
use crate::name_list::{NameGroup, Varying, numbered_groups};

/// The facts that the tensors of a group have in common.
struct GroupKey<'a> {
    entry: &'a TensorEntry,
    /// A mark of the tensor; tensors with different marks are in different groups.
    mark: usize,
}

impl PartialEq for GroupKey<'_> {
    fn eq(&self, other: &Self) -> bool {
        let (left, right) = (self.entry, other.entry);
        self.mark == other.mark
            && left.dtype == right.dtype
            && left.shape == right.shape
            && left.sharding == right.sharding
            && left.unreadable.as_ref().map(|why| why.kind.to_string())
                == right.unreadable.as_ref().map(|why| why.kind.to_string())
            && left.chunks.is_laid_out_as(&right.chunks)
    }
}

impl Eq for GroupKey<'_> {}

impl Hash for GroupKey<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.mark, self.entry.dtype.name(), self.entry.shape.as_slice()).hash(state);
        self.entry.chunks.hash_bounds(state);
    }
}

/// Groups the tensors of an inspection. `mark` gives each tensor a number, and tensors with different numbers are in
/// different groups. The members are indices of the names of the inspection.
pub fn groups(view: &Inspection<'_>, mark: impl Fn(&str) -> usize) -> Vec<NameGroup> {
    let key = |name: &str, id| GroupKey { entry: view.checkpoint.catalog.tensor(id), mark: mark(name) };
    let named = view.names.iter().map(|(name, id)| (name.as_str(), key(name.as_str(), *id))).collect();
    numbered_groups(named, Varying::Components)
}
