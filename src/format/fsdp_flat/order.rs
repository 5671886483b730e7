//! The order of parameters in a checkpoint, and the order of elements within each parameter.
//!
//! A flat layout needs the order in which the module registered its parameters. DCP, safetensors and many other tools
//! sort the names of a state dict. A torch file keeps the order of the saved state dict. If dtshard used a sorted
//! order, parameters with equal shapes would be swapped without an error.

use std::collections::HashSet;
use std::path::Path;

use crate::catalog::{Fqn, TensorEntry, contiguous_strides};
use crate::format::{Format, natural_order};
use crate::layout::Dims;
use crate::layout::flat::StorageOrder;

/// The order in which a module stores the elements of a parameter (its memory format).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElementOrder {
    RowMajor,
    Strides(Dims),
    /// The order is unknown: the file does not record it, and the module may have stored the parameter in row-major
    /// order or as `channels_last`; or the strides in the file have gaps, which the strides of a parameter do not have.
    Unknown,
}

impl ElementOrder {
    /// Returns the element order of a tensor. If a torch file stores the full tensor as one chunk, the strides of this
    /// chunk give the element order. Otherwise the order is row-major, or unknown if `channels_last` is possible for
    /// the shape.
    #[must_use]
    pub fn from_entry(entry: &TensorEntry, format: Format) -> Self {
        if format.keeps_order() {
            let mut chunks = entry.chunks.iter();
            if let Some(whole) = chunks.find(|chunk| chunk.tile.sizes() == entry.shape) {
                return match whole.strides.filter(|strides| *strides != contiguous_strides(&entry.shape)) {
                    // A tensor with gaps between its elements was not a parameter when it was saved.
                    Some(strides) if StorageOrder::of_strides(&entry.shape, &strides).is_some() => {
                        Self::Strides(strides)
                    }
                    Some(_) => Self::Unknown,
                    None => Self::RowMajor,
                };
            }
        }
        if may_be_channels_last(&entry.shape) { Self::Unknown } else { Self::RowMajor }
    }
}

/// Returns whether `channels_last` differs from row-major order for this shape.
fn may_be_channels_last(shape: &[u64]) -> bool {
    shape.len() >= 4 && shape[1] > 1 && shape[2..].iter().any(|size| *size > 1)
}

/// Returns a warning about weights that are row-major in the file `path`, although `channels_last` is possible for
/// their shapes; `None` if there are no such weights. In the job the weights may have been `channels_last`, because a
/// tool may have rewritten the file in row-major order. `params` has for each parameter its name, its shape, and true
/// if it is row-major in the file.
pub fn row_major_warning<'a>(path: &Path, params: impl Iterator<Item = (&'a Fqn, &'a [u64], bool)>) -> Option<String> {
    let mut doubtful = params.filter(|(_, shape, is_by_rows)| *is_by_rows && may_be_channels_last(shape));
    let (first, ..) = doubtful.next()?;
    let more = match doubtful.count() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Some(format!(
        "{first}{more}: row-major in {}, so assumed to be row-major in the job; if the module is channels_last, \
         declare the strides in options::flat_layout FILE",
        path.display()
    ))
}

/// Returns whether a tool seems to have sorted the parameter names of a model: the names are in alphabetical or natural
/// order, or the `bias` of every module comes right before its `weight` (modules register the weight first). Returns
/// false for a short list, and for names that are in order only because modules are numbered (`0.w`, `1.w`).
pub fn is_sorted<'a>(names: impl Iterator<Item = &'a str>) -> bool {
    /// The minimum number of names for the check. A shorter list may be in sorted order by chance.
    const MIN_NAMES: usize = 6;
    let names: Vec<&str> = names.collect();
    // Modules that are named by numbers are always registered in numerical order.
    let by_number = |pair: &[&str]| {
        let mut parts = pair[0].split('.').zip(pair[1].split('.'));
        let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        parts.find(|(left, right)| left != right).is_some_and(|(left, right)| is_number(left) && is_number(right))
    };
    if names.len() < MIN_NAMES || names.windows(2).all(by_number) {
        return false;
    }
    names.is_sorted()
        || names.is_sorted_by(|left, right| natural_order(left, right).is_le())
        || has_bias_before_weight(&names)
}

/// Returns whether the list interleaves modules: a tensor of another module comes between two tensors of one module.
/// `Module.state_dict` visits one module after another, so such a list is not in the order of registration. DCP
/// directories, and files that were made from DCP directories, have such lists.
pub fn has_interleaved_modules<'a>(names: impl Iterator<Item = &'a str>) -> bool {
    let modules = |name: &'a str| name.match_indices('.').map(move |(end, _)| &name[..end]);
    let mut ended: HashSet<&str> = HashSet::new();
    let mut last = "";
    for name in names {
        let is_within = |module: &str| name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'));
        ended.extend(modules(last).filter(|module| !is_within(module)));
        if modules(name).any(|module| ended.contains(module)) {
            return true;
        }
        last = name;
    }
    false
}

/// Returns whether some modules have a weight and a bias, and the bias comes right before the weight in all of them.
fn has_bias_before_weight(names: &[&str]) -> bool {
    let is_pair = |first: &str, second: &str, order: [&str; 2]| {
        let module = first.strip_suffix(order[0]);
        module.is_some_and(|module| second.strip_suffix(order[1]) == Some(module))
    };
    let count = |order| names.windows(2).filter(|pair| is_pair(pair[0], pair[1], order)).count();
    count(["weight", "bias"]) == 0 && count(["bias", "weight"]) > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_modules_are_detected() {
        let is_mixed = |names: &str| has_interleaved_modules(names.split(' '));
        assert!(!is_mixed("emb.w h.0.q.w h.0.q.b h.0.norm.w h.1.q.w h.1.norm.w norm.w head.w"));
        assert!(!is_mixed("w b h.w h.0.w"), "the tensors of a module come before those of modules in it");
        assert!(is_mixed("emb.w h.0.q.w head.w h.0.norm.w norm.w"));
        assert!(is_mixed("h.0.w h.1.w h.0.b"));
    }

    #[test]
    fn sorted_names_are_detected() {
        let is_sorted = |names: &str| is_sorted(names.split(' '));
        assert!(is_sorted("emb h.0.wk h.0.wq h.1.wk h.1.wq norm"));
        assert!(is_sorted("emb h.2.wk h.2.wq h.10.wk h.10.wq norm"), "natural order");
        assert!(is_sorted("z.bias z.weight b.bias b.weight a.bias a.weight"), "files of sorted names");
        assert!(!is_sorted("z.weight z.bias b.weight b.bias a.weight a.bias"));
        assert!(!is_sorted("emb h.0.wq h.0.wk h.1.wq h.1.wk norm"));
        assert!(!is_sorted("a b c"), "by chance");
        assert!(!is_sorted("0.w 1.w 2.w 3.w 4.w 10.w 11.w"), "no other order");
    }
}
