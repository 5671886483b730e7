//! Parses one cell of a map row: the name of a tensor, with the variables in it, and the axes of its dims.
//!
//! ```text
//! tensor  = NAME [ "[" dim* "]" ]            without brackets: [...]
//! NAME    = text with {x}, {x+n}, {x:a,b}; a final ** stands for any rest
//! dim     = axis | 1 | "(" sum ")" | "..."
//! sum     = product { "+" product }
//! product = { axis | 1 | "(" sum ")" }       row-major: the last factor varies fastest
//! axis    = name | _name (padding) | =name (copies)
//! ```
//!
//! `blk.{l}.attn.{x:q,k}.weight [(h d) i]` is a tensor over the axes l, x, h, d and i; the name has the axes l and x.
//! Invariant: a parsed pattern has each variable at most once, and `**` only at its end. The grammar is dtshard's own;
//! the axes in parentheses follow einops.

use std::fmt;
use std::sync::Arc;

/// The name of an axis.
pub type Axis = Arc<str>;

/// The maximum nesting depth of parentheses.
const MAX_DEPTH: usize = 16;

/// The pattern of one tensor: its name and its dims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPattern {
    pub name: NamePattern,
    pub dims: Vec<Dim>,
}

/// The pattern of a tensor name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern {
    pub parts: Vec<NamePart>,
}

/// A part of a name pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamePart {
    /// This text.
    Text(Box<str>),
    /// A decimal number, `{x}` or `{x+n}`: the coordinate on `axis`, plus an offset.
    Number { axis: Axis, offset: Offset },
    /// One of these words, `{x:a,b}`: the coordinate on `axis` is the position of the word.
    Words { axis: Axis, words: Vec<Box<str>> },
    /// The words of `axis` in another cell of the row, written `{x}`. [`Row`](super::row::Row) replaces it by `Words`.
    Variable { axis: Axis },
    /// Any text up to the end of the name, written `**`.
    Rest,
}

/// The number that is added to a coordinate in a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Offset {
    Number(u64),
    /// The value of this size.
    Size(Axis),
}

/// One dim of a tensor pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dim {
    /// All dims that are not written, in the same order on both sides.
    Rest,
    /// A dim whose size is this sum.
    Sum(Sum),
}

/// Terms that are concatenated along a dim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sum(pub Vec<Product>);

/// Factors of one term, in row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product(pub Vec<Factor>);

/// A factor of a product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Factor {
    Axis(Axis),
    /// A factor of size 1.
    One,
    /// Elements that no other side has, written `_name`.
    Padding(Axis),
    /// Equal copies of the elements of the other factors, written `=name`.
    Copies(Axis),
    /// A sum in parentheses.
    Group(Sum),
}

/// A cell that does not follow the grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CellError {
    pub expected: String,
    pub found: String,
}

impl CellError {
    fn new(expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self { expected: expected.into(), found: found.into() }
    }
}

impl TensorPattern {
    /// Parses the text of a tensor in a cell. `prefix` is the text that stands before the names of the block.
    ///
    /// # Errors
    /// [`CellError`] for text that does not follow the grammar.
    pub fn parse(prefix: &str, text: &str) -> Result<Self, CellError> {
        let text = text.trim();
        let (name, dims) = match text.split_once('[') {
            None => (text, None),
            Some((name, dims)) => match dims.strip_suffix(']') {
                Some(dims) => (name.trim_end(), Some(dims)),
                None => return Err(CellError::new("`]` at the end of the dims", format!("`{text}`"))),
            },
        };
        let name = NamePattern::parse(&format!("{prefix}{name}"))?;
        let dims = dims.map_or_else(|| Ok(vec![Dim::Rest]), parse_dims)?;
        if dims.iter().filter(|dim| **dim == Dim::Rest).count() > 1 {
            return Err(CellError::new("`...` once", format!("`{text}`")));
        }
        Ok(Self { name, dims })
    }

    /// Returns every axis of the dims, with those of padding and copies.
    pub fn all_dim_axes(&self) -> Vec<&Axis> {
        let sums = self.dims.iter().filter_map(|dim| match dim {
            Dim::Sum(sum) => Some(sum),
            Dim::Rest => None,
        });
        sums.flat_map(Sum::axes).collect()
    }

    /// Returns every axis of the dims, in the order of the text. An axis that occurs in several terms is returned once for
    /// each of them.
    pub fn dim_axes(&self) -> Vec<&Axis> {
        let mut axes = Vec::new();
        for dim in &self.dims {
            if let Dim::Sum(sum) = dim {
                sum.visit(&mut |factor| {
                    if let Factor::Axis(axis) = factor {
                        axes.push(axis);
                    }
                });
            }
        }
        axes
    }

    /// Returns whether the dims contain `...`.
    pub fn has_rest(&self) -> bool {
        self.dims.contains(&Dim::Rest)
    }
}

impl Sum {
    /// Returns the axes of a sum, paddings and copies included, each once.
    pub fn axes(&self) -> Vec<&Axis> {
        let mut axes = Vec::new();
        self.visit(&mut |factor| {
            if let Factor::Axis(axis) | Factor::Padding(axis) | Factor::Copies(axis) = factor
                && !axes.contains(&axis)
            {
                axes.push(axis);
            }
        });
        axes
    }

    /// Visits all factors except groups, in the order of the text.
    pub fn visit<'s>(&'s self, visit: &mut dyn FnMut(&'s Factor)) {
        for factor in self.0.iter().flat_map(|product| &product.0) {
            match factor {
                Factor::Group(sum) => sum.visit(visit),
                factor => visit(factor),
            }
        }
    }
}

impl NamePattern {
    /// Parses a name with variables.
    ///
    /// # Errors
    /// [`CellError`] for text that does not follow the grammar.
    pub fn parse(text: &str) -> Result<Self, CellError> {
        let mut parts: Vec<NamePart> = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let next = rest.find(['{', '}', '*']).unwrap_or(rest.len());
            if next > 0 {
                parts.push(NamePart::Text(rest[..next].into()));
            }
            rest = &rest[next..];
            if rest == "**" {
                parts.push(NamePart::Rest);
                break;
            }
            if rest.starts_with('*') {
                return Err(CellError::new("`**` only at the end of a name", format!("`{text}`")));
            }
            if rest.starts_with('}') {
                return Err(CellError::new("`{` before `}`", format!("`{text}`")));
            }
            if let Some(open) = rest.strip_prefix('{') {
                let Some((variable, after)) = open.split_once('}') else {
                    return Err(CellError::new("`}` after `{`", format!("`{text}`")));
                };
                parts.push(variable_part(variable)?);
                rest = after;
            }
        }
        let pattern = Self { parts };
        let mut seen: Vec<&Axis> = Vec::new();
        for axis in pattern.axes() {
            if seen.contains(&axis) {
                return Err(CellError::new("each variable once in a name", format!("`{{{axis}}}` again in `{text}`")));
            }
            seen.push(axis);
        }
        if pattern.parts.is_empty() {
            return Err(CellError::new("a tensor name", "an empty text"));
        }
        let mut neighbours = pattern.parts.windows(2);
        let is_number = |part: &NamePart| matches!(part, NamePart::Number { .. } | NamePart::Variable { .. });
        if neighbours.any(|pair| is_number(&pair[0]) && (is_number(&pair[1]) || pair[1] == NamePart::Rest)) {
            return Err(CellError::new("text between a number and what follows", format!("`{text}`")));
        }
        let begins_with_digit = |part: &NamePart| match part {
            NamePart::Text(text) => text.starts_with(|char: char| char.is_ascii_digit()),
            NamePart::Words { words, .. } => {
                words.iter().any(|word| word.starts_with(|char: char| char.is_ascii_digit()))
            }
            _ => false,
        };
        if pattern.parts.windows(2).any(|pair| is_number(&pair[0]) && begins_with_digit(&pair[1])) {
            return Err(CellError::new("no digit after a number", format!("`{text}`")));
        }
        Ok(pattern)
    }

    /// Returns the axes of the variables in the name, in the order of the text.
    pub fn axes(&self) -> impl Iterator<Item = &Axis> {
        self.parts.iter().filter_map(|part| match part {
            NamePart::Number { axis, .. } | NamePart::Words { axis, .. } | NamePart::Variable { axis } => Some(axis),
            NamePart::Text(_) | NamePart::Rest => None,
        })
    }

    /// Returns whether the name is `**` alone.
    pub fn is_open(&self) -> bool {
        self.parts == [NamePart::Rest]
    }

    /// Returns whether the name ends in `**`.
    pub fn has_rest(&self) -> bool {
        self.parts.last() == Some(&NamePart::Rest)
    }
}

/// Parses the text between the braces of a variable.
fn variable_part(text: &str) -> Result<NamePart, CellError> {
    if let Some((axis, words)) = text.split_once(':') {
        let words: Vec<Box<str>> = words.split(',').map(Into::into).collect();
        let is_word = |word: &str| !word.is_empty() && !word.contains(|char: char| char.is_whitespace() || char == '*');
        if let Some(word) = words.iter().find(|word| !is_word(word)) {
            return Err(CellError::new("words separated by commas", format!("`{word}` in `{{{text}}}`")));
        }
        if let Some((index, word)) = words.iter().enumerate().find(|(index, word)| words[..*index].contains(word)) {
            return Err(CellError::new("different words", format!("`{word}` again, as word {}", index + 1)));
        }
        return Ok(NamePart::Words { axis: axis_name(axis)?, words });
    }
    let Some((axis, offset)) = text.split_once('+') else {
        return Ok(NamePart::Variable { axis: axis_name(text)? });
    };
    let offset = match offset.parse() {
        Ok(number) => Offset::Number(number),
        Err(_) => Offset::Size(axis_name(offset)?),
    };
    Ok(NamePart::Number { axis: axis_name(axis)?, offset })
}

/// Returns the name of an axis: a letter, then letters, digits and underscores.
fn axis_name(text: &str) -> Result<Axis, CellError> {
    let is_name = text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if is_name { Ok(text.into()) } else { Err(CellError::new("the name of an axis", format!("`{text}`"))) }
}

fn parse_dims(text: &str) -> Result<Vec<Dim>, CellError> {
    let mut tokens = Tokens { rest: text, whole: text };
    let mut dims = Vec::new();
    while let Some(token) = tokens.peek() {
        if token == "..." {
            tokens.next();
            dims.push(Dim::Rest);
        } else {
            dims.push(Dim::Sum(Sum(vec![Product(vec![tokens.factor(0)?])])));
        }
    }
    Ok(dims.into_iter().map(unwrapped).collect())
}

/// Returns a dim that is one group as the sum in this group: `(h d)`.
fn unwrapped(dim: Dim) -> Dim {
    match dim {
        Dim::Sum(Sum(mut products)) if products.len() == 1 && matches!(products[0].0[..], [Factor::Group(_)]) => {
            match products.pop().and_then(|mut product| product.0.pop()) {
                Some(Factor::Group(sum)) => Dim::Sum(sum),
                _ => Dim::Sum(Sum(products)),
            }
        }
        dim => dim,
    }
}

/// The tokens of the dims of a tensor.
struct Tokens<'t> {
    rest: &'t str,
    whole: &'t str,
}

impl<'t> Tokens<'t> {
    fn peek(&self) -> Option<&'t str> {
        Self { rest: self.rest, whole: self.whole }.next()
    }

    fn next(&mut self) -> Option<&'t str> {
        let text = self.rest.trim_start();
        let first = text.chars().next()?;
        let len = if text.starts_with("...") {
            3
        } else if matches!(first, '(' | ')' | '+') {
            1
        } else {
            text.find(|char: char| char.is_whitespace() || matches!(char, '(' | ')' | '+')).unwrap_or(text.len())
        };
        let (token, rest) = text.split_at(len);
        self.rest = rest;
        Some(token)
    }

    fn wrong(&self, expected: &str, found: &str) -> CellError {
        CellError::new(expected, format!("{found} in `[{}]`", self.whole))
    }

    /// Parses `sum ")"`. The opening parenthesis was read.
    fn sum(&mut self, depth: usize) -> Result<Sum, CellError> {
        if depth > MAX_DEPTH {
            return Err(self.wrong(&format!("at most {MAX_DEPTH} nested parentheses"), "more"));
        }
        let mut products = vec![Product(Vec::new())];
        loop {
            match self.peek() {
                None => return Err(self.wrong("`)`", "the end")),
                Some(")") => break,
                Some("+") => products.push(Product(Vec::new())),
                Some(_) => {
                    let factor = self.factor(depth)?;
                    products.last_mut().expect("a first product").0.push(factor);
                    continue;
                }
            }
            self.next();
        }
        self.next();
        if products.iter().any(|product| product.0.is_empty()) {
            return Err(self.wrong("an axis in each term of a sum", "an empty term"));
        }
        Ok(Sum(products))
    }

    fn factor(&mut self, depth: usize) -> Result<Factor, CellError> {
        let token = self.next().unwrap_or_default();
        Ok(match token {
            "(" => Factor::Group(self.sum(depth + 1)?),
            "1" => Factor::One,
            ")" | "+" | "..." => return Err(self.wrong("an axis, 1 or `(`", &format!("`{token}`"))),
            token => match (token.strip_prefix('_'), token.strip_prefix('=')) {
                (Some(padding), _) => Factor::Padding(axis_name(padding)?),
                (_, Some(copies)) => Factor::Copies(axis_name(copies)?),
                (None, None) => Factor::Axis(axis_name(token)?),
            },
        })
    }
}

impl fmt::Display for TensorPattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.name)?;
        if self.dims == [Dim::Rest] {
            return Ok(());
        }
        let dims: Vec<String> = self.dims.iter().map(ToString::to_string).collect();
        write!(formatter, " [{}]", dims.join(" "))
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in &self.parts {
            match part {
                NamePart::Text(text) => write!(formatter, "{text}")?,
                NamePart::Number { axis, offset: Offset::Number(0) } | NamePart::Variable { axis } => {
                    write!(formatter, "{{{axis}}}")?;
                }
                NamePart::Number { axis, offset: Offset::Number(offset) } => write!(formatter, "{{{axis}+{offset}}}")?,
                NamePart::Number { axis, offset: Offset::Size(size) } => write!(formatter, "{{{axis}+{size}}}")?,
                NamePart::Words { axis, words } => write!(formatter, "{{{axis}:{}}}", words.join(","))?,
                NamePart::Rest => write!(formatter, "**")?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rest => write!(formatter, "..."),
            Self::Sum(Sum(products)) => match products.as_slice() {
                [Product(factors)] if factors.len() == 1 => write!(formatter, "{}", factors[0]),
                _ => write!(formatter, "({})", Sum(products.clone())),
            },
        }
    }
}

impl fmt::Display for Sum {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let factors = |product: &Product| {
            let factors: Vec<String> = product.0.iter().map(ToString::to_string).collect();
            factors.join(" ")
        };
        let products: Vec<String> = self.0.iter().map(factors).collect();
        write!(formatter, "{}", products.join(" + "))
    }
}

impl fmt::Display for Factor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Axis(axis) => write!(formatter, "{axis}"),
            Self::One => write!(formatter, "1"),
            Self::Padding(axis) => write!(formatter, "_{axis}"),
            Self::Copies(axis) => write!(formatter, "={axis}"),
            Self::Group(sum) => write!(formatter, "({sum})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cell_is_printed_as_it_was_written() {
        for text in [
            "model.norm.weight",
            "layers.{l}.attention.wq.{p:weight,bias} [(h j r) ...]",
            "mtp_layers.{m+1}.x [(h d + k d + k d) i]",
            "h.{m+l}.**",
            "linear_qkv.weight [(k (p + 1 + 1) d) i]",
            "wte [(v + _pad) d]",
            "kv [(k =c d) 1]",
        ] {
            assert_eq!(TensorPattern::parse("", text).unwrap().to_string(), text);
        }
        assert_eq!(TensorPattern::parse("a.{l}.", "w [(o) i]").unwrap().to_string(), "a.{l}.w [o i]");
    }

    #[test]
    fn text_outside_the_grammar_is_an_error() {
        for (text, expected) in [
            ("", "a tensor name"),
            ("a.{l", "`}` after `{`"),
            ("a.l}", "`{` before `}`"),
            ("a.*.b", "`**` only at the end of a name"),
            ("{l}{e}.w", "text between a number and what follows"),
            ("{l}.{l}", "each variable once in a name"),
            ("{x:a,,b}", "words separated by commas"),
            ("{x:a,a}", "different words"),
            ("{9}", "the name of an axis"),
            ("w [a", "`]` at the end of the dims"),
            ("w [(a]", "`)`"),
            ("w [(a + )]", "an axis in each term of a sum"),
            ("w [a + b]", "an axis, 1 or `(`"),
            ("w [... a ...]", "`...` once"),
            ("w [2]", "the name of an axis"),
        ] {
            assert_eq!(TensorPattern::parse("", text).unwrap_err().expected, expected, "{text}");
        }
        let nested = format!("w [{}a{}]", "(".repeat(40), ")".repeat(40));
        assert_eq!(TensorPattern::parse("", &nested).unwrap_err().expected, "at most 16 nested parentheses");
    }
}
