//! Splits a new dotted name into keys, using the keys of the old name.
//!
//! A name is a list of keys joined with dots, but keys may contain dots, so the keys of a new name are not obvious. If
//! the old and the new name begin or end with equal components, the old keys are kept for these components. If the
//! remaining middle components are equally many in both names, the middle of the new name is divided into keys at the
//! positions at which the old name is divided:
//!
//! ```text
//! old   optim . state . layers.0.w1 . exp_avg        old   layers . 0 . attn . wq . weight
//! new   optim . state . blocks.0.w1 . exp_avg        new   layers . 0 . self_attn . q . weight
//!       kept    kept    one key       kept          kept     kept  two keys, as before  kept
//! ```

use std::borrow::Cow;

use crate::catalog::Value;
use crate::catalog::path::key_text;
use crate::catalog::wrappers::{WRAPPERS, has_wrapper};

/// A key of the source, by reference.
#[derive(Clone, Copy, Debug)]
pub(super) enum KeyRef<'a> {
    Entry(&'a Value),
    Item(u64),
}

impl<'a> KeyRef<'a> {
    /// Returns the key as text.
    pub fn text(self) -> Cow<'a, str> {
        match self {
            Self::Entry(Value::Str(text)) => Cow::Borrowed(text),
            Self::Entry(key) => Cow::Owned(key_text(key).to_string()),
            Self::Item(index) => Cow::Owned(index.to_string()),
        }
    }
}

/// One key of the path to a leaf.
#[derive(Clone, Debug)]
pub(super) struct Step<'a> {
    pub text: Cow<'a, str>,
    /// The key in the source, or `None` if the key is new.
    pub key: Option<KeyRef<'a>>,
    /// The dict or list of the source that contains the key, as the index of its node in the
    /// [`Survey`](super::survey::Survey).
    pub container: Option<u32>,
}

impl Step<'_> {
    /// Makes a key that is not in the source.
    pub fn new(text: String, container: Option<u32>) -> Self {
        Self { text: Cow::Owned(text), key: None, container }
    }

    /// Removes wrapper components from the key. Returns `None` if the key consists only of wrapper components. The last
    /// component of a name is never treated as a wrapper.
    pub fn clean(mut self, is_last: bool) -> Option<Self> {
        if !has_wrapper(&self.text) {
            return Some(self);
        }
        let parts: Vec<&str> = self.text.split('.').collect();
        let last = parts.len() - 1;
        let kept = parts.iter().enumerate();
        let kept = kept.filter(|(index, part)| is_last && *index == last || !WRAPPERS.contains(part));
        let kept: Vec<&str> = kept.map(|(_, part)| *part).collect();
        if kept.is_empty() {
            return None;
        }
        if kept.len() < parts.len() {
            (self.text, self.key) = (Cow::Owned(kept.join(".")), None);
        }
        Some(self)
    }
}

/// Joins keys with dots to a name.
pub(super) fn join(steps: &[Step<'_>]) -> String {
    let mut name = String::new();
    for (index, step) in steps.iter().enumerate() {
        if index > 0 {
            name.push('.');
        }
        name.push_str(&step.text);
    }
    name
}

/// Removes `bytes` bytes from the front of the name that `steps` form.
pub(super) fn cut_front(steps: &mut Vec<Step<'_>>, mut bytes: usize) {
    let whole = steps.iter().take_while(|step| {
        let goes = bytes > step.text.len();
        bytes -= if goes { step.text.len() + 1 } else { 0 };
        goes
    });
    let whole = whole.count();
    steps.drain(..whole);
    if let Some(first) = steps.first_mut().filter(|_| bytes > 0) {
        (first.text, first.key) = (Cow::Owned(first.text[bytes..].to_owned()), None);
    }
}

/// Returns the keys of the new name of a leaf whose old keys are `old`. `flat` returns whether a container has dotted
/// names as keys.
pub(super) fn rekey<'a>(old: &[Step<'a>], new: &str, flat: &dyn Fn(u32) -> bool) -> Vec<Step<'a>> {
    let mut rest = new;
    let mut start = 0;
    while start + 1 < old.len() {
        let Some(after) = rest.strip_prefix(old[start].text.as_ref()).and_then(|after| after.strip_prefix('.')) else {
            break;
        };
        (rest, start) = (after, start + 1);
    }
    let mut end = old.len();
    let mut done = false;
    while end > start && !done {
        let Some(before) = rest.strip_suffix(old[end - 1].text.as_ref()) else { break };
        done = before.is_empty();
        if !done && !before.ends_with('.') {
            break;
        }
        (rest, end) = (before.strip_suffix('.').unwrap_or(before), end - 1);
    }
    let mut middle = rest.to_owned();
    let is_flat = |step: &Step<'_>| step.container.is_some_and(flat);
    let put_before_flat = !done && start == end && old.get(end).is_some_and(is_flat);
    if put_before_flat {
        middle = format!("{middle}.{}", old[end].text);
        end += 1;
    }
    let mut steps = old[..start].to_vec();
    if !done {
        steps.extend(replace(&old[start..end], &middle, old.get(start).and_then(|step| step.container)));
    }
    steps.extend_from_slice(&old[end..]);
    steps
}

/// Returns the keys of `text`, which replace the keys `old`. If `text` and `old` have equally many components, each new
/// key gets as many components as the old key. Otherwise `text` becomes a single key if `old` is a single key or
/// contains keys with dots. In all other cases, each component of `text` becomes a key.
fn replace<'a>(old: &[Step<'a>], text: &str, container: Option<u32>) -> Vec<Step<'a>> {
    let parts: Vec<&str> = text.split('.').collect();
    let len = |step: &Step<'_>| step.text.split('.').count();
    if parts.len() == old.iter().map(len).sum::<usize>() {
        let mut rest = parts.as_slice();
        let steps = old.iter().map(|step| {
            let (own, after) = rest.split_at(len(step));
            rest = after;
            let text = own.join(".");
            if text == step.text { step.clone() } else { Step::new(text, step.container) }
        });
        return steps.collect();
    }
    if old.len() == 1 || old.iter().any(|step| step.text.contains('.')) {
        return vec![Step::new(text.to_owned(), container)];
    }
    let fresh = |(index, part): (usize, &&str)| Step::new((*part).to_owned(), container.filter(|_| index == 0));
    parts.iter().enumerate().map(fresh).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rekeyed(old: &[&str], new: &str, flat: &[u32]) -> Vec<String> {
        let step = |(index, text): (usize, &&str)| Step::new((*text).to_owned(), u32::try_from(index).ok());
        let old: Vec<Step<'_>> = old.iter().enumerate().map(step).collect();
        let new_steps = rekey(&old, new, &|container| flat.contains(&container));
        assert_eq!(join(&new_steps), new);
        new_steps.into_iter().map(|step| step.text.into_owned()).collect()
    }

    #[test]
    fn keys_are_kept_from_both_ends() {
        let state = ["optim", "state", "layers.0.w", "exp_avg"];
        assert_eq!(rekeyed(&state, "optim.state.blk.0.w.exp_avg", &[]), ["optim", "state", "blk.0.w", "exp_avg"]);
        let nested = ["layers", "0", "attn", "wq", "weight"];
        assert_eq!(rekeyed(&nested, "layers.0.self_attn.q.weight", &[]), ["layers", "0", "self_attn", "q", "weight"]);
        assert_eq!(rekeyed(&nested, "layers.0.a.b.c.weight", &[]), ["layers", "0", "a", "b", "c", "weight"]);
        assert_eq!(rekeyed(&nested, "layers.0.wq.weight", &[]), ["layers", "0", "wq", "weight"]);
        assert_eq!(rekeyed(&nested, "layers.0.weight", &[]), ["layers", "0", "weight"]);
        assert_eq!(rekeyed(&["a", "a", "w"], "a.w", &[]), ["a", "w"]);
        assert_eq!(rekeyed(&["a", "w"], "a.a.w", &[]), ["a", "a", "w"]);
        assert_eq!(rekeyed(&["head", "weight"], "head", &[]), ["head"]);
        assert_eq!(rekeyed(&["w"], "w.x", &[]), ["w.x"]);
        assert_eq!(rekeyed(&["a", "w"], "aw", &[]), ["aw"]);
    }

    #[test]
    fn flat_dicts_stay_flat() {
        assert_eq!(rekeyed(&["model", "layers.0.w"], "model.net.layers.0.w", &[1]), ["model", "net.layers.0.w"]);
        assert_eq!(rekeyed(&["model.w"], "base.model.w", &[0]), ["base.model.w"]);
        assert_eq!(rekeyed(&["model", "w"], "model.net.w", &[1]), ["model", "net.w"]);
        assert_eq!(rekeyed(&["model", "w"], "model.net.w", &[]), ["model", "net", "w"]);
        assert_eq!(rekeyed(&["model.a", "b.w"], "x.y.z", &[]), ["x.y.z"]);
        assert_eq!(rekeyed(&["model.a", "b.w"], "x.a.y.v", &[]), ["x.a", "y.v"]);
        assert_eq!(rekeyed(&["b", "a.b", "w"], "c.a.c.v", &[]), ["c", "a.c", "v"]);
    }

    #[test]
    fn cut_front_removes_bytes_across_keys() {
        for (bytes, left) in [(0, "model|layers.0|w"), (6, "layers.0|w"), (13, "0|w"), (15, "w"), (3, "el|layers.0|w")]
        {
            let texts = ["model", "layers.0", "w"];
            let mut steps: Vec<Step<'_>> = texts.iter().map(|text| Step::new((*text).to_owned(), None)).collect();
            cut_front(&mut steps, bytes);
            assert_eq!(steps.iter().map(|step| step.text.as_ref()).collect::<Vec<_>>().join("|"), left, "{bytes}");
        }
    }

    #[test]
    fn clean_removes_wrapper_components() {
        let clean =
            |text: &str, is_last| Step::new(text.to_owned(), None).clean(is_last).map(|step| step.text.into_owned());
        assert_eq!(clean("_orig_mod.a._fsdp_wrapped_module.w", true).as_deref(), Some("a.w"));
        assert_eq!(clean("_orig_mod", false), None);
        assert_eq!(clean("_orig_mod", true).as_deref(), Some("_orig_mod"));
        assert_eq!(clean("a._checkpoint_wrapped_module", false).as_deref(), Some("a"));
        assert_eq!(clean("my_orig_mod.w", true).as_deref(), Some("my_orig_mod.w"));
    }
}
