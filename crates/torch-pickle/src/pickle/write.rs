//! A writer of protocol 2, without an automatic memo.
//!
//! Reason for protocol 2: `torch.save` writes it, and `torch.load(weights_only=True)` refuses the opcodes of later
//! protocols. Reason for no memo: no reader needs one, and without a memo a file does not depend on which equal Python
//! objects were one object in memory. The cost: a shared object is written again at each occurrence, unless the caller
//! uses the memo explicitly with [`put`](Writer::put) and [`get`](Writer::get).
//!
//! This module writes single opcodes; [`super::write_value`] writes complete values. A caller of the methods for single
//! opcodes must make sure that the sequence of opcodes is valid.
//!
//! Source of the rule: CPython `Lib/pickle.py`, class `_Pickler`, and `torch/_weights_only_unpickler.py`.

use super::long;
use super::symbols;

/// The maximum number of items in one APPENDS or SETITEMS, as in CPython.
const BATCH: usize = 1000;

/// A pickle that is being written. The low-level methods append one opcode each and can be chained; the caller ensures
/// that the sequence is valid.
pub struct Writer {
    out: Vec<u8>,
    pub(super) depth: usize,
}

impl Default for Writer {
    fn default() -> Self {
        Self::new()
    }
}

impl Writer {
    /// Creates a pickle that contains only the opcode PROTO 2.
    pub fn new() -> Self {
        Self { out: vec![0x80, 2], depth: 0 }
    }

    /// Returns the bytes that were written.
    pub fn written(&self) -> &[u8] {
        &self.out
    }

    /// Writes STOP, and returns the finished pickle.
    pub fn finish(mut self) -> Vec<u8> {
        self.out.push(b'.');
        self.out
    }

    /// Writes NONE.
    pub fn none(&mut self) -> &mut Self {
        self.op(b'N')
    }

    /// Writes NEWTRUE or NEWFALSE.
    pub fn boolean(&mut self, value: bool) -> &mut Self {
        self.op(if value { 0x88 } else { 0x89 })
    }

    /// Writes the shortest opcode for an int.
    pub fn int(&mut self, value: i64) -> &mut Self {
        if let Ok(value) = u8::try_from(value) {
            self.op(b'K').raw(&[value])
        } else if let Ok(value) = u16::try_from(value) {
            self.op(b'M').raw(&value.to_le_bytes())
        } else if let Ok(value) = i32::try_from(value) {
            self.op(b'J').raw(&value.to_le_bytes())
        } else {
            self.long(&value.to_le_bytes())
        }
    }

    /// Writes the shortest opcode for an int that is not negative.
    pub fn uint(&mut self, value: u64) -> &mut Self {
        match i64::try_from(value) {
            Ok(value) => self.int(value),
            Err(_) => self.long(&u128::from(value).to_le_bytes()),
        }
    }

    /// Writes an int of any size, given as little-endian two's complement.
    ///
    /// # Panics
    /// If the int takes 2 GiB or more, which LONG4 cannot count.
    pub fn big_int(&mut self, bytes: &[u8]) -> &mut Self {
        match long::to_i64(bytes) {
            Some(value) => self.int(value),
            None => self.long(bytes),
        }
    }

    /// Writes BINFLOAT.
    pub fn float(&mut self, value: f64) -> &mut Self {
        self.op(b'G').raw(&value.to_be_bytes())
    }

    /// Writes BINUNICODE.
    ///
    /// # Panics
    /// If the text takes 4 GiB or more, which BINUNICODE cannot count.
    pub fn string(&mut self, text: &str) -> &mut Self {
        self.unicode(text.as_bytes())
    }

    /// Writes a `bytes` object in the form of protocol 2: a text with one character per byte, and the call that encodes
    /// the text as bytes.
    ///
    /// # Panics
    /// If the text takes 4 GiB or more, which BINUNICODE cannot count.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        if bytes.is_empty() {
            return self.global("builtins", "bytes").empty_tuple().reduce();
        }
        let text: String = bytes.iter().copied().map(char::from).collect();
        self.global("_codecs", "encode").string(&text).string("latin1").tuple(2).reduce()
    }

    /// Writes MARK.
    pub fn mark(&mut self) -> &mut Self {
        self.op(b'(')
    }

    /// Writes EMPTY_TUPLE.
    pub fn empty_tuple(&mut self) -> &mut Self {
        self.op(b')')
    }

    /// Writes the opcode that makes a tuple of the topmost `len` values. If `len` is more than three, a
    /// [`mark`](Self::mark) must be below the values; otherwise there must be no mark.
    pub fn tuple(&mut self, len: usize) -> &mut Self {
        match len {
            0 => self.empty_tuple(),
            1 => self.op(0x85),
            2 => self.op(0x86),
            3 => self.op(0x87),
            _ => self.op(b't'),
        }
    }

    /// Writes EMPTY_LIST.
    pub fn empty_list(&mut self) -> &mut Self {
        self.op(b']')
    }

    /// Writes APPEND.
    pub fn append(&mut self) -> &mut Self {
        self.op(b'a')
    }

    /// Writes APPENDS.
    pub fn appends(&mut self) -> &mut Self {
        self.op(b'e')
    }

    /// Writes EMPTY_DICT.
    pub fn empty_dict(&mut self) -> &mut Self {
        self.op(b'}')
    }

    /// Writes SETITEM.
    pub fn setitem(&mut self) -> &mut Self {
        self.op(b's')
    }

    /// Writes SETITEMS.
    pub fn setitems(&mut self) -> &mut Self {
        self.op(b'u')
    }

    /// Writes a global. Module and name are in the spelling of Python 3. A name with a dot is a class inside a class,
    /// which protocol 2 can only access through `getattr`.
    ///
    /// # Panics
    /// If the module or the name contains a line break.
    pub fn global(&mut self, module: &str, name: &str) -> &mut Self {
        if let Some((outer, inner)) = name.rsplit_once('.') {
            let builder = self.global("builtins", "getattr").global(module, outer);
            return builder.string(inner).tuple(2).reduce();
        }
        let (module, name) = symbols::legacy(module, name);
        assert!(!module.contains('\n') && !name.contains('\n'), "a line break in a global's name");
        self.op(b'c').raw(module.as_bytes()).raw(b"\n").raw(name.as_bytes()).raw(b"\n")
    }

    /// Writes REDUCE, which calls a function. The tuple of arguments is on top of the stack, and the function is below
    /// the tuple.
    pub fn reduce(&mut self) -> &mut Self {
        self.op(b'R')
    }

    /// Writes NEWOBJ, which makes an object of a class. The tuple of arguments is on top of the stack, and the class is
    /// below the tuple.
    pub fn newobj(&mut self) -> &mut Self {
        self.op(0x81)
    }

    /// Writes BUILD, which sets the state of an object. The state is on top of the stack, and the object is below the
    /// state.
    pub fn build(&mut self) -> &mut Self {
        self.op(b'b')
    }

    /// Writes BINPERSID, which loads the object whose persistent id is on top of the stack.
    pub fn binpersid(&mut self) -> &mut Self {
        self.op(b'Q')
    }

    /// Stores the value on top of the stack in the memo, under the index `index`.
    pub fn put(&mut self, index: u32) -> &mut Self {
        match u8::try_from(index) {
            Ok(index) => self.op(b'q').raw(&[index]),
            Err(_) => self.op(b'r').raw(&index.to_le_bytes()),
        }
    }

    /// Loads the value that is stored in the memo under the index `index`.
    pub fn get(&mut self, index: u32) -> &mut Self {
        match u8::try_from(index) {
            Ok(index) => self.op(b'h').raw(&[index]),
            Err(_) => self.op(b'j').raw(&index.to_le_bytes()),
        }
    }

    /// Appends `items` to the list on top of the stack. `each` must write one item as one value.
    pub fn extend_list<T, E>(
        &mut self,
        items: impl ExactSizeIterator<Item = T>,
        each: impl FnMut(&mut Self, T) -> Result<(), E>,
    ) -> Result<(), E> {
        append_all(self, items, each)
    }

    /// Sets `entries` on the dict on top of the stack. `each` must write one entry as a key and a value.
    pub fn extend_dict<T, E>(
        &mut self,
        entries: impl ExactSizeIterator<Item = T>,
        each: impl FnMut(&mut Self, T) -> Result<(), E>,
    ) -> Result<(), E> {
        set_all(self, entries, each)
    }

    pub(super) fn unicode(&mut self, text: &[u8]) -> &mut Self {
        let len = u32::try_from(text.len()).expect("text under 4 GiB");
        self.op(b'X').raw(&len.to_le_bytes()).raw(text)
    }

    fn long(&mut self, bytes: &[u8]) -> &mut Self {
        let bytes = long::minimal(bytes);
        match u8::try_from(bytes.len()) {
            Ok(len) => self.op(0x8a).raw(&[len]),
            Err(_) => {
                let len = i32::try_from(bytes.len()).expect("an int under 2 GiB");
                self.op(0x8b).raw(&len.to_le_bytes())
            }
        };
        self.raw(bytes)
    }

    fn op(&mut self, op: u8) -> &mut Self {
        self.out.push(op);
        self
    }

    fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.out.extend_from_slice(bytes);
        self
    }
}

impl AsMut<Self> for Writer {
    fn as_mut(&mut self) -> &mut Self {
        self
    }
}

/// Appends items like [`Writer::extend_list`], but `each` gets a type that contains a writer.
pub fn append_all<W: AsMut<Writer>, T, E>(
    out: &mut W,
    items: impl ExactSizeIterator<Item = T>,
    each: impl FnMut(&mut W, T) -> Result<(), E>,
) -> Result<(), E> {
    batches(out, items, each, Writer::append, Writer::appends)
}

/// Sets entries like [`Writer::extend_dict`], but `each` gets a type that contains a writer.
pub fn set_all<W: AsMut<Writer>, T, E>(
    out: &mut W,
    entries: impl ExactSizeIterator<Item = T>,
    each: impl FnMut(&mut W, T) -> Result<(), E>,
) -> Result<(), E> {
    batches(out, entries, each, Writer::setitem, Writer::setitems)
}

fn batches<W: AsMut<Writer>, T, E>(
    out: &mut W,
    mut items: impl ExactSizeIterator<Item = T>,
    mut each: impl FnMut(&mut W, T) -> Result<(), E>,
    one: fn(&mut Writer) -> &mut Writer,
    many: fn(&mut Writer) -> &mut Writer,
) -> Result<(), E> {
    while items.len() > 0 {
        let batch = items.len().min(BATCH);
        if batch > 1 {
            out.as_mut().mark();
        }
        for item in items.by_ref().take(batch) {
            each(out, item)?;
        }
        let close = if batch > 1 { many } else { one };
        close(out.as_mut());
    }
    Ok(())
}
