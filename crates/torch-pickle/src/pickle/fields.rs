//! Fields: what a record tells of an object.
//!
//! Why: a record lives while a visitor looks at it, and there are millions. So what it has several of, numbers and rows, lies
//! in vectors that serve one record after the other, and a field is copied.
//!
//! Invariant: a [`Part`] is looked up in the record that it is of.

use std::ops::Range;

use super::Ref;
use super::visitor::Row;

/// More fields than this make no record.
pub(super) const MAX_FIELDS: usize = 16;

/// No tensor has more dims.
const MAX_NDIM: usize = 255;

/// The state of an object: its fields by name; those of a tuple have none.
#[derive(Clone, Copy, Debug)]
pub struct Record<'r, 'a> {
    pub(super) fields: &'r [(&'a [u8], Field<'a>)],
    numbers: &'r [u64],
    rows: &'r [Row],
}

/// The value of a field.
#[derive(Clone, Copy, Debug, Default)]
pub enum Field<'a> {
    /// `None`
    None,
    /// An int that is not negative.
    Number(u64),
    /// A text.
    Text(&'a str),
    /// A `torch.Size`; in a record made of nodes also a tuple or list of numbers.
    Dims(Part),
    /// A class, a function, a dtype.
    Global((&'a str, &'a str)),
    /// An object that became a row.
    Row(Row),
    /// A list of those.
    Rows(Part),
    /// Something else.
    #[default]
    Other,
}

/// Some of the numbers of a record, or of its rows.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    start: u32,
    len: u32,
}

impl Part {
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    fn range(self) -> Range<usize> {
        self.start as usize..(self.start + self.len) as usize
    }
}

impl<'r, 'a> Record<'r, 'a> {
    /// The first item of a state that is a tuple.
    pub fn first(&self) -> Option<Field<'a>> {
        self.fields.first().filter(|(name, _)| name.is_empty()).map(|(_, field)| *field)
    }

    /// The field of this name; of several, the last, as Python has it.
    pub fn get(&self, name: &str) -> Option<Field<'a>> {
        self.fields.iter().rev().find(|(key, _)| *key == name.as_bytes()).map(|(_, field)| *field)
    }

    /// Returns a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        match self.get(name)? {
            Field::Number(number) => Some(number),
            _ => None,
        }
    }

    /// Returns a text.
    pub fn text(&self, name: &str) -> Option<&'a str> {
        match self.get(name)? {
            Field::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the sizes of a `torch.Size`.
    pub fn dims(&self, name: &str) -> Option<&'r [u64]> {
        match self.get(name)? {
            Field::Dims(part) => Some(self.numbers_of(part)),
            _ => None,
        }
    }

    /// Returns the row of an object that became one.
    pub fn row(&self, name: &str) -> Option<Row> {
        match self.get(name)? {
            Field::Row(row) => Some(row),
            _ => None,
        }
    }

    /// Returns the rows of a list of objects that became rows.
    pub fn rows(&self, name: &str) -> Option<&'r [Row]> {
        match self.get(name)? {
            Field::Rows(part) => Some(self.rows_of(part)),
            // An empty list is one of anything.
            Field::Dims(none) if none.is_empty() => Some(&[]),
            _ => None,
        }
    }

    pub(super) fn numbers_of(&self, part: Part) -> &'r [u64] {
        &self.numbers[part.range()]
    }

    pub(super) fn rows_of(&self, part: Part) -> &'r [Row] {
        &self.rows[part.range()]
    }
}

/// The fields of a record, and what they have several of. Those of an object within another lie behind those of that one.
#[derive(Debug, Default)]
pub struct Fields<'a> {
    pub(super) named: Vec<(&'a [u8], Field<'a>)>,
    pub(super) numbers: Vec<u64>,
    pub(super) rows: Vec<Row>,
}

/// Where the fields of one object begin.
#[derive(Clone, Copy, Default)]
pub(super) struct Bottom {
    pub named: usize,
    pub numbers: usize,
    pub rows: usize,
}

impl<'a> Fields<'a> {
    /// Those of a state that is a dict or a tuple.
    pub fn of(state: Ref<'a>) -> Option<Self> {
        let mut all = Self::default();
        if let Some(items) = state.as_tuple().filter(|items| items.len() <= MAX_FIELDS) {
            items.for_each(|item| all.push_node(b"", item));
            return Some(all);
        }
        let entries = state.as_dict().filter(|entries| entries.len() <= MAX_FIELDS)?;
        entries.for_each(|(key, value)| _ = key.as_str().map(|name| all.push_node(name.as_bytes(), value)));
        Some(all)
    }

    /// Returns the fields as a record.
    pub fn record(&self) -> Record<'_, 'a> {
        self.record_from(Bottom::default())
    }

    pub(super) fn record_from(&self, bottom: Bottom) -> Record<'_, 'a> {
        Record { fields: &self.named[bottom.named..], numbers: &self.numbers, rows: &self.rows }
    }

    pub(super) fn top(&self) -> Bottom {
        Bottom { named: self.named.len(), numbers: self.numbers.len(), rows: self.rows.len() }
    }

    pub(super) fn truncate(&mut self, bottom: Bottom) {
        self.named.truncate(bottom.named);
        self.numbers.truncate(bottom.numbers);
        self.rows.truncate(bottom.rows);
    }

    fn push_node(&mut self, name: &'a [u8], node: Ref<'a>) {
        let bottom = self.top();
        let field = if node.is_none() {
            Field::None
        } else if let Some(number) = node.as_u64() {
            Field::Number(number)
        } else if let Some(text) = node.as_str() {
            Field::Text(text)
        } else if let Some(dims) = node.to_dims_up_to(MAX_NDIM) {
            self.numbers.extend(dims);
            self.dims_from(bottom)
        } else if let Some(global) = node.global() {
            Field::Global(global)
        } else if let Some(row) = node.row() {
            Field::Row(row)
        } else if let Some(rows) = node.as_list().and_then(|items| items.map(Ref::row).collect::<Option<Vec<_>>>()) {
            self.rows.extend(rows);
            self.rows_from(bottom)
        } else {
            Field::Other
        };
        self.push(name, field);
    }

    pub(super) fn push(&mut self, name: &'a [u8], field: Field<'a>) {
        self.named.push((name, field));
    }

    /// All numbers from there on.
    pub(super) fn dims_from(&self, bottom: Bottom) -> Field<'a> {
        let len = self.numbers.len() - bottom.numbers;
        Field::Dims(Part { start: bottom.numbers as u32, len: len as u32 })
    }

    /// All rows from there on.
    pub(super) fn rows_from(&self, bottom: Bottom) -> Field<'a> {
        let len = self.rows.len() - bottom.rows;
        Field::Rows(Part { start: bottom.rows as u32, len: len as u32 })
    }
}
