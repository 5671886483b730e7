//! Iterators over the children of a node.

use std::fmt;

use super::Ref;
use super::arena::{NodeId, Pickle};

/// An iterator over the elements of a sequence.
#[derive(Clone, Copy)]
pub struct Items<'a> {
    pickle: &'a Pickle<'a>,
    ids: &'a [NodeId],
}

impl<'a> Items<'a> {
    pub(super) fn new(pickle: &'a Pickle<'a>, ids: &'a [NodeId]) -> Self {
        Self { pickle, ids }
    }

    /// Returns the element at `index`, counted from the current position of the iterator.
    pub fn get(&self, index: usize) -> Option<Ref<'a>> {
        self.ids.get(index).map(|&id| Ref::new(self.pickle, id))
    }

    /// Returns whether the iterator has no more elements.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Returns an iterator without the first `count` elements.
    fn starting_at(self, count: usize) -> Self {
        Self { ids: self.ids.get(count..).unwrap_or(&[]), ..self }
    }

    fn view(&self, id: NodeId) -> Ref<'a> {
        Ref::new(self.pickle, id)
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = Ref<'a>;

    fn next(&mut self) -> Option<Ref<'a>> {
        let (&first, rest) = self.ids.split_first()?;
        self.ids = rest;
        Some(self.view(first))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.ids.len(), Some(self.ids.len()))
    }
}

impl DoubleEndedIterator for Items<'_> {
    fn next_back(&mut self) -> Option<Self::Item> {
        let (&last, rest) = self.ids.split_last()?;
        self.ids = rest;
        Some(self.view(last))
    }
}

impl ExactSizeIterator for Items<'_> {}

impl fmt::Debug for Items<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(*self).finish()
    }
}

/// An iterator over the entries of a dict: pairs of a key and a value.
#[derive(Clone, Copy, Debug)]
pub struct Entries<'a>(Items<'a>);

impl<'a> Entries<'a> {
    /// Returns an iterator over entries, from a sequence in which keys and values alternate.
    pub(super) fn new(items: Items<'a>) -> Self {
        Self(items)
    }

    /// Returns the entry at `index`, counted from the current position of the iterator.
    pub fn get(self, index: usize) -> Option<(Ref<'a>, Ref<'a>)> {
        self.starting_at(index).next()
    }

    /// Returns an iterator without the first `index` entries.
    pub fn starting_at(self, index: usize) -> Self {
        Self(self.0.starting_at(index.saturating_mul(2)))
    }
}

impl<'a> Iterator for Entries<'a> {
    type Item = (Ref<'a>, Ref<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        Some((self.0.next()?, self.0.next()?))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let len = self.0.len() / 2;
        (len, Some(len))
    }
}

impl DoubleEndedIterator for Entries<'_> {
    fn next_back(&mut self) -> Option<Self::Item> {
        let value = self.0.next_back()?;
        Some((self.0.next_back()?, value))
    }
}

impl ExactSizeIterator for Entries<'_> {}
