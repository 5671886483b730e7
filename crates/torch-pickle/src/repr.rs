//! Prints a value in one line for humans, with a limited length.

use std::fmt::{self, Write};

use crate::value::{DictEntry, DictKind, Extension, Object, Value};

/// Prints a value in one line like Python's `repr`. The line has at most 120 characters; a precision in the format
/// string, such as `{:.40}`, sets another limit.
impl<T: fmt::Display, X: Extension<T>> fmt::Display for Value<T, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left = f.precision().unwrap_or(120);
        let mut line = Line { left, out: f, cut: false };
        match line.value(self) {
            Err(_) if line.cut => Ok(()),
            result => result,
        }
    }
}

/// A line of output with a limited number of characters. Writing fails when the line is full. Each level of nesting
/// writes at least one character before it recurses, so the limit also bounds the recursion depth.
struct Line<'a, 'f> {
    out: &'a mut fmt::Formatter<'f>,
    left: usize,
    cut: bool,
}

impl Write for Line<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            if self.left == 0 {
                self.cut = true;
                self.out.write_char('…')?;
                return Err(fmt::Error);
            }
            self.left -= 1;
            self.out.write_char(c)?;
        }
        Ok(())
    }
}

impl Line<'_, '_> {
    fn value<T: fmt::Display, X: Extension<T>>(&mut self, value: &Value<T, X>) -> fmt::Result {
        match value {
            Value::None => self.write_str("None"),
            Value::Bool(value) => self.write_str(if *value { "True" } else { "False" }),
            Value::Int(value) => write!(self, "{value}"),
            Value::BigInt(bytes) => self.big_int(bytes),
            Value::Float(value) => self.float(*value),
            Value::Complex(re, im) => {
                self.write_str("complex(")?;
                self.float(*re)?;
                self.write_str(", ")?;
                self.float(*im)?;
                self.write_char(')')
            }
            Value::Str(text) => self.text(text),
            Value::SurrogateStr(text) => self.text(&String::from_utf8_lossy(text)),
            Value::Bytes(bytes) => write!(self, "b'{}'", bytes.escape_ascii()),
            Value::ByteArray(bytes) => write!(self, "bytearray(b'{}')", bytes.escape_ascii()),
            Value::List(items) => self.list("[", items, "]"),
            Value::Ints(ints) => {
                self.write_str("[")?;
                for (i, int) in ints.iter().enumerate() {
                    self.comma(i)?;
                    write!(self, "{int}")?;
                }
                self.write_str("]")
            }
            Value::Tuple(items) => self.list("(", items, if items.len() == 1 { ",)" } else { ")" }),
            Value::Set(items) if items.is_empty() => self.write_str("set()"),
            Value::Set(items) => self.list("{", items, "}"),
            Value::FrozenSet(items) => self.list("frozenset({", items, "})"),
            Value::Dict(dict) => match dict.kind {
                DictKind::Plain => self.dict("{", &dict.entries, "}"),
                DictKind::Ordered => self.dict("OrderedDict({", &dict.entries, "})"),
            },
            Value::Symbol(symbol) if &*symbol.module == "builtins" => self.write_str(&symbol.name),
            Value::Symbol(symbol) => write!(self, "{symbol}"),
            Value::Object(object) => self.object(object),
            Value::Tensor(tensor) => write!(self, "<{tensor}>"),
            Value::Other(other) => other.show(self),
        }
    }

    fn list<T: fmt::Display, X: Extension<T>>(
        &mut self,
        open: &str,
        items: &[Value<T, X>],
        close: &str,
    ) -> fmt::Result {
        self.write_str(open)?;
        for (i, item) in items.iter().enumerate() {
            self.comma(i)?;
            self.value(item)?;
        }
        self.write_str(close)
    }

    fn dict<T: fmt::Display, X: Extension<T>>(
        &mut self,
        open: &str,
        entries: &[DictEntry<T, X>],
        close: &str,
    ) -> fmt::Result {
        self.write_str(open)?;
        for (i, (key, value)) in entries.iter().enumerate() {
            self.comma(i)?;
            self.value(key)?;
            self.write_str(": ")?;
            self.value(value)?;
        }
        self.write_str(close)
    }

    /// Prints an object such as `argparse.Namespace(lr=0.1)`: the arguments, then the state. If the state is a dict of
    /// attributes, each attribute is printed with its name.
    fn object<T: fmt::Display, X: Extension<T>>(&mut self, object: &Object<T, X>) -> fmt::Result {
        self.value(&object.class)?;
        self.list("(", &object.args, "")?;
        let mut written = object.args.len();
        if !object.items.is_empty() {
            self.comma(written)?;
            self.list("[", &object.items, "]")?;
            written += 1;
        }
        if !object.entries.is_empty() {
            self.comma(written)?;
            self.dict("{", &object.entries, "}")?;
            written += 1;
        }
        let state = match &object.state {
            Some(Value::Dict(dict)) => dict.entries.as_slice(),
            _ => &[],
        };
        for (key, value) in object.kwargs.iter().chain(state) {
            self.comma(written)?;
            match key.as_str() {
                Some(name) => self.write_str(name)?,
                None => self.value(key)?,
            }
            self.write_char('=')?;
            self.value(value)?;
            written += 1;
        }
        self.write_char(')')
    }

    fn comma(&mut self, before: usize) -> fmt::Result {
        if before > 0 { self.write_str(", ") } else { Ok(()) }
    }

    fn text(&mut self, text: &str) -> fmt::Result {
        let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
        self.write_char(quote)?;
        for c in text.chars() {
            match c {
                '\'' | '"' if c != quote => self.write_char(c)?,
                _ => write!(self, "{}", c.escape_debug())?,
            }
        }
        self.write_char(quote)
    }

    fn float(&mut self, value: f64) -> fmt::Result {
        if value.is_nan() { self.write_str("nan") } else { write!(self, "{value:?}") }
    }

    /// Prints an int. If it has more than 512 bits, prints only its length.
    fn big_int(&mut self, bytes: &[u8]) -> fmt::Result {
        if bytes.len() > 64 {
            return write!(self, "<int of {} bytes>", bytes.len());
        }
        let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
        let mut magnitude = bytes.to_vec();
        if negative {
            let mut carry = true;
            for byte in &mut magnitude {
                (*byte, carry) = (!*byte).overflowing_add(carry.into());
            }
            self.write_char('-')?;
        }
        let mut digits = Vec::new();
        while magnitude.iter().any(|&byte| byte != 0) {
            let mut rest = 0;
            for byte in magnitude.iter_mut().rev() {
                let part = rest << 8 | u32::from(*byte);
                *byte = u8::try_from(part / 10).expect("a rest below 10 and a byte");
                rest = part % 10;
            }
            digits.push(char::from_digit(rest, 10).unwrap_or('0'));
        }
        digits.iter().rev().try_for_each(|&digit| self.write_char(digit))
    }
}
