//! The fields of an object record. An object record is an object as a flat list of fields, without nodes.
//!
//! Reason: an object record exists only while a visitor reads it, and there are millions of object records. So the
//! numbers and rows of all fields are in two vectors that are reused for every object record, and a field itself is a
//! small value that can be copied.
//!
//! Invariant: a [`FieldPart`] is used only with the object record that it comes from.

use std::ops::Range;

use super::Ref;
use super::visitor::Row;

/// The maximum number of fields of an object record.
pub(super) const MAX_FIELDS: usize = 16;

/// The maximum number of sizes that are read as the dims of a tensor. No tensor has more dims.
const MAX_NDIM: usize = 255;

/// The fields of one object, by name. If the state of the object is a tuple, the names of the fields are empty.
#[derive(Clone, Copy, Debug)]
pub struct Record<'r, 'a> {
    pub(super) fields: &'r [(&'a [u8], Field<'a>)],
    numbers: &'r [u64],
    rows: &'r [Row],
}

/// The value of a field in an object record.
#[derive(Clone, Copy, Debug, Default)]
pub enum Field<'a> {
    /// The value `None`.
    None,
    /// A non-negative int.
    Number(u64),
    /// A text.
    Text(&'a str),
    /// The sizes of a `torch.Size`. A tuple or a list of non-negative ints may also become such a field.
    Dims(FieldPart),
    /// A global name: a class, a function or a dtype.
    Global((&'a str, &'a str)),
    /// An object that the visitor replaced by this row.
    Row(Row),
    /// A list of objects, each of which the visitor replaced by a row.
    Rows(FieldPart),
    /// Any other value.
    #[default]
    Other,
}

/// The numbers or the rows of one field, as a range of the list of numbers or of the list of rows of the object record.
#[derive(Clone, Copy, Debug)]
pub struct FieldPart {
    start: u32,
    len: u32,
}

impl FieldPart {
    /// Returns whether the range is empty.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    fn range(self) -> Range<usize> {
        self.start as usize..(self.start + self.len) as usize
    }
}

impl<'r, 'a> Record<'r, 'a> {
    /// Returns the first field of an object whose state is a tuple.
    pub fn first(&self) -> Option<Field<'a>> {
        self.fields.first().filter(|(name, _)| name.is_empty()).map(|(_, field)| *field)
    }

    /// Returns the field of this name. If several fields have the name, the last one counts, as in Python.
    pub fn get(&self, name: &str) -> Option<Field<'a>> {
        self.fields.iter().rev().find(|(key, _)| *key == name.as_bytes()).map(|(_, field)| *field)
    }

    /// Returns the value of the field `name`, if it is a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        match self.get(name)? {
            Field::Number(number) => Some(number),
            _ => None,
        }
    }

    /// Returns the value of the field `name`, if it is a text.
    pub fn text(&self, name: &str) -> Option<&'a str> {
        match self.get(name)? {
            Field::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the sizes in the field `name`, if it is a [`Field::Dims`].
    pub fn dims(&self, name: &str) -> Option<&'r [u64]> {
        match self.get(name)? {
            Field::Dims(part) => Some(self.numbers_of(part)),
            _ => None,
        }
    }

    /// Returns the row in the field `name`, if the field is an object that the visitor replaced by a row.
    pub fn row(&self, name: &str) -> Option<Row> {
        match self.get(name)? {
            Field::Row(row) => Some(row),
            _ => None,
        }
    }

    /// Returns the rows in the field `name`, if the field is a list of objects that the visitor replaced by rows.
    pub fn rows(&self, name: &str) -> Option<&'r [Row]> {
        match self.get(name)? {
            Field::Rows(part) => Some(self.rows_of(part)),
            // An empty list may be a list of numbers or a list of rows.
            Field::Dims(none) if none.is_empty() => Some(&[]),
            _ => None,
        }
    }

    pub(super) fn numbers_of(&self, part: FieldPart) -> &'r [u64] {
        &self.numbers[part.range()]
    }

    pub(super) fn rows_of(&self, part: FieldPart) -> &'r [Row] {
        &self.rows[part.range()]
    }
}

/// The fields of an object record, with their numbers and rows. While a nested object is read, its fields follow the
/// fields of the outer object.
#[derive(Debug, Default)]
pub struct Fields<'a> {
    pub(super) named: Vec<(&'a [u8], Field<'a>)>,
    pub(super) numbers: Vec<u64>,
    pub(super) rows: Vec<Row>,
}

/// The position in [`Fields`] at which the fields, numbers and rows of one object start.
#[derive(Clone, Copy, Default)]
pub(super) struct Bottom {
    pub named: usize,
    pub numbers: usize,
    pub rows: usize,
}

impl<'a> Fields<'a> {
    /// Returns the fields of an object, from its state: a dict or a tuple of at most 16 fields. Returns `None` for any
    /// other state.
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

    /// Returns the fields as an object record.
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

    /// Returns all numbers from `bottom` on as a field.
    pub(super) fn dims_from(&self, bottom: Bottom) -> Field<'a> {
        let len = self.numbers.len() - bottom.numbers;
        Field::Dims(FieldPart { start: bottom.numbers as u32, len: len as u32 })
    }

    /// Returns all rows from `bottom` on as a field.
    pub(super) fn rows_from(&self, bottom: Bottom) -> Field<'a> {
        let len = self.rows.len() - bottom.rows;
        Field::Rows(FieldPart { start: bottom.rows as u32, len: len as u32 })
    }
}
