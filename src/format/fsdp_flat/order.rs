//! What a checkpoint tells of the order of parameters, and of the order of elements in each.
//!
//! Many tools sort a state dict, DCP and safetensors among them, and a torch file keeps what it is given. With such an
//! order parameters of equal shapes would change places in silence.

use std::collections::HashSet;
use std::path::Path;

use crate::catalog::{Fqn, TensorEntry, contiguous_strides};
use crate::format::{Format, natural_order};
use crate::layout::Dims;
use crate::layout::flat::StorageOrder;

/// The order in which a module keeps the elements of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ElementOrder {
    RowMajor,
    Strides(Dims),
    /// The format keeps only values, and `channels_last` would be another order.
    Unknown,
}

impl ElementOrder {
    /// That of a tensor which lies whole in a torch file is that of the module's.
    #[must_use]
    pub fn of(entry: &TensorEntry, format: Format) -> Self {
        if format.keeps_order() {
            let mut chunks = entry.chunks.iter();
            if let Some(whole) = chunks.find(|chunk| chunk.tile.sizes() == entry.shape) {
                return match whole.strides.filter(|strides| *strides != contiguous_strides(&entry.shape)) {
                    // What lies with holes was not a parameter when it was saved.
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

/// Whether `channels_last` is another order than that by rows.
fn may_be_channels_last(shape: &[u64]) -> bool {
    shape.len() >= 4 && shape[1] > 1 && shape[2..].iter().any(|size| *size > 1)
}

/// What to say where weights lie by rows in a file from which the order of their elements is taken: whoever wrote it may
/// have brought them into that order. Of each: its name, its shape, whether it lies by rows.
#[must_use]
pub fn by_rows<'a>(path: &Path, params: impl Iterator<Item = (&'a Fqn, &'a [u64], bool)>) -> Option<String> {
    let mut doubtful = params.filter(|(_, shape, is_by_rows)| *is_by_rows && may_be_channels_last(shape));
    let (first, ..) = doubtful.next()?;
    let more = match doubtful.count() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    Some(format!(
        "{first}{more}: by rows in {}, so taken to be so in the job; where the module is channels_last, options::flat_layout \
         FILE has to say it",
        path.display()
    ))
}

/// Whether these names, of all that is in a model, were sorted by somebody: they come in the order of text, of text
/// with numbers, or have every `bias` before its `weight`, which modules register the other way round.
#[must_use]
pub fn is_sorted<'a>(names: impl Iterator<Item = &'a str>) -> bool {
    /// Fewer may be in order by chance.
    const TELLING: usize = 6;
    let names: Vec<&str> = names.collect();
    // Numbers are in the order of registration already.
    let by_number = |pair: &[&str]| {
        let mut parts = pair[0].split('.').zip(pair[1].split('.'));
        let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        parts.find(|(left, right)| left != right).is_some_and(|(left, right)| is_number(left) && is_number(right))
    };
    if names.len() < TELLING || names.windows(2).all(by_number) {
        return false;
    }
    names.is_sorted()
        || names.is_sorted_by(|left, right| natural_order(left, right).is_le())
        || has_biases_first(&names)
}

/// Returns whether the tensors of a module stand apart, with tensors of other modules between them. `Module.state_dict`
/// goes through one module after the other; DCP keeps another order, and so do files that are made from it.
#[must_use]
pub fn is_mixed<'a>(names: impl Iterator<Item = &'a str>) -> bool {
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

/// Whether there are modules with both, and in all of them the bias stands right before the weight.
fn has_biases_first(names: &[&str]) -> bool {
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
    fn modules_follow_each_other_in_a_state_dict() {
        let is_mixed = |names: &str| is_mixed(names.split(' '));
        assert!(!is_mixed("emb.w h.0.q.w h.0.q.b h.0.norm.w h.1.q.w h.1.norm.w norm.w head.w"));
        assert!(!is_mixed("w b h.w h.0.w"), "the tensors of a module come before those of modules in it");
        assert!(is_mixed("emb.w h.0.q.w head.w h.0.norm.w norm.w"));
        assert!(is_mixed("h.0.w h.1.w h.0.b"));
    }

    #[test]
    fn an_order_of_names_is_not_that_of_modules() {
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
