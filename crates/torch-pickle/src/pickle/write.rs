//! A writer of protocol 2, without a memo of its own.
//!
//! Why protocol 2: it is what `torch.save` writes, and `torch.load(weights_only=True)` takes no opcode of
//! the later ones. Why no memo: no reader needs one, and without it a file does not depend on which
//! equal objects happened to be the same. One price: shared objects are written out each time, unless a
//! format that means them to be one [`put`](Writer::put)s and [`get`](Writer::get)s them.
//!
//! Here are the opcodes; [`super::write_value`] strings them together for whole values. What a format spells
//! out through these methods is its own promise.
//!
//! Source of the rule: CPython `Lib/pickle.py`, class `_Pickler`, and `torch/_weights_only_unpickler.py`.

use super::long;
use super::symbols;

/// CPython's batch of items for one APPENDS or SETITEMS.
const BATCH: usize = 1000;

/// A pickle under way. The low-level methods append one opcode each and can be chained; that the
/// sequence makes sense is for the caller to see to.
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
    /// A pickle that so far says PROTO 2.
    pub fn new() -> Self {
        Self { out: vec![0x80, 2], depth: 0 }
    }

    /// The pickle so far.
    pub fn written(&self) -> &[u8] {
        &self.out
    }

    /// Ends with STOP.
    pub fn finish(mut self) -> Vec<u8> {
        self.out.push(b'.');
        self.out
    }

    /// NONE
    pub fn none(&mut self) -> &mut Self {
        self.op(b'N')
    }

    /// NEWTRUE or NEWFALSE
    pub fn boolean(&mut self, value: bool) -> &mut Self {
        self.op(if value { 0x88 } else { 0x89 })
    }

    /// The shortest opcode for an int.
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

    /// The shortest opcode for an int that is not negative.
    pub fn uint(&mut self, value: u64) -> &mut Self {
        match i64::try_from(value) {
            Ok(value) => self.int(value),
            Err(_) => self.long(&u128::from(value).to_le_bytes()),
        }
    }

    /// An int of any size as little-endian two's complement.
    ///
    /// # Panics
    /// If it takes 2 GiB or more, which LONG4 cannot count.
    pub fn big_int(&mut self, bytes: &[u8]) -> &mut Self {
        match long::to_i64(bytes) {
            Some(value) => self.int(value),
            None => self.long(bytes),
        }
    }

    /// BINFLOAT
    pub fn float(&mut self, value: f64) -> &mut Self {
        self.op(b'G').raw(&value.to_be_bytes())
    }

    /// BINUNICODE
    ///
    /// # Panics
    /// If the text takes 4 GiB or more, which BINUNICODE cannot count.
    pub fn string(&mut self, text: &str) -> &mut Self {
        self.unicode(text.as_bytes())
    }

    /// Bytes as protocol 2 has them: text of one character a byte, and the call that encodes it.
    ///
    /// # Panics
    /// If that text takes 4 GiB or more.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        if bytes.is_empty() {
            return self.global("builtins", "bytes").empty_tuple().reduce();
        }
        let text: String = bytes.iter().copied().map(char::from).collect();
        self.global("_codecs", "encode").string(&text).string("latin1").tuple(2).reduce()
    }

    /// MARK
    pub fn mark(&mut self) -> &mut Self {
        self.op(b'(')
    }

    /// EMPTY_TUPLE
    pub fn empty_tuple(&mut self) -> &mut Self {
        self.op(b')')
    }

    /// A tuple of the topmost `len` values. More than three must lie on a [`mark`](Self::mark) of their
    /// own; up to three must not.
    pub fn tuple(&mut self, len: usize) -> &mut Self {
        match len {
            0 => self.empty_tuple(),
            1 => self.op(0x85),
            2 => self.op(0x86),
            3 => self.op(0x87),
            _ => self.op(b't'),
        }
    }

    /// EMPTY_LIST
    pub fn empty_list(&mut self) -> &mut Self {
        self.op(b']')
    }

    /// APPEND
    pub fn append(&mut self) -> &mut Self {
        self.op(b'a')
    }

    /// APPENDS
    pub fn appends(&mut self) -> &mut Self {
        self.op(b'e')
    }

    /// EMPTY_DICT
    pub fn empty_dict(&mut self) -> &mut Self {
        self.op(b'}')
    }

    /// SETITEM
    pub fn setitem(&mut self) -> &mut Self {
        self.op(b's')
    }

    /// SETITEMS
    pub fn setitems(&mut self) -> &mut Self {
        self.op(b'u')
    }

    /// A name in Python 3's spelling. One with a dot is a class inside a class, which protocol 2 can only
    /// reach by `getattr`.
    ///
    /// # Panics
    /// If a part holds a line break, which would end it.
    pub fn global(&mut self, module: &str, name: &str) -> &mut Self {
        if let Some((outer, inner)) = name.rsplit_once('.') {
            let builder = self.global("builtins", "getattr").global(module, outer);
            return builder.string(inner).tuple(2).reduce();
        }
        let (module, name) = symbols::legacy(module, name);
        assert!(!module.contains('\n') && !name.contains('\n'), "a line break in a global's name");
        self.op(b'c').raw(module.as_bytes()).raw(b"\n").raw(name.as_bytes()).raw(b"\n")
    }

    /// REDUCE: calls what is below the tuple on top.
    pub fn reduce(&mut self) -> &mut Self {
        self.op(b'R')
    }

    /// NEWOBJ: makes an object of the class below the tuple on top.
    pub fn newobj(&mut self) -> &mut Self {
        self.op(0x81)
    }

    /// BUILD: gives the object below its state on top.
    pub fn build(&mut self) -> &mut Self {
        self.op(b'b')
    }

    /// BINPERSID: the object that the value on top stands for.
    pub fn binpersid(&mut self) -> &mut Self {
        self.op(b'Q')
    }

    /// Remembers the value on top under a number.
    pub fn put(&mut self, index: u32) -> &mut Self {
        match u8::try_from(index) {
            Ok(index) => self.op(b'q').raw(&[index]),
            Err(_) => self.op(b'r').raw(&index.to_le_bytes()),
        }
    }

    /// The very object that was remembered.
    pub fn get(&mut self, index: u32) -> &mut Self {
        match u8::try_from(index) {
            Ok(index) => self.op(b'h').raw(&[index]),
            Err(_) => self.op(b'j').raw(&index.to_le_bytes()),
        }
    }

    /// Appends `items` to the list on top, each written by `each` as one value.
    pub fn extend_list<T, E>(
        &mut self,
        items: impl ExactSizeIterator<Item = T>,
        each: impl FnMut(&mut Self, T) -> Result<(), E>,
    ) -> Result<(), E> {
        append_all(self, items, each)
    }

    /// Sets `entries` on the dict on top, each written by `each` as a key and a value.
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

/// [`Writer::extend_list`], for somebody who has the writer and more.
pub fn append_all<W: AsMut<Writer>, T, E>(
    out: &mut W,
    items: impl ExactSizeIterator<Item = T>,
    each: impl FnMut(&mut W, T) -> Result<(), E>,
) -> Result<(), E> {
    batches(out, items, each, Writer::append, Writer::appends)
}

/// [`Writer::extend_dict`], for somebody who has the writer and more.
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
