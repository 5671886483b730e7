//! Renames by regular expressions. A value of `options::rename` has the form `REGEX=REPL`.
//!
//! The regular expression may match anywhere in a name, and every match is replaced, as in `re.sub` and `sed s///g`.
//! The replacement refers to groups as `\1`, `${1}` or `${name}`. A bare `$1` is an error, because in the syntax of the
//! `regex` crate `$1_w` is a group called `1_w`.

use std::borrow::Cow;

use regex::{Captures, Regex};

use crate::error::{Error, Result};

const FORM: &str = "write REGEX=REPL, such as '^model\\.=' or 'layers\\.(\\d+)=blocks.\\1'; write \\= for a literal =";

/// A compiled rename: a regular expression and its replacement.
#[derive(Clone, Debug)]
pub struct Rename {
    text: String,
    regex: Regex,
    replacement: Vec<ReplacementPiece>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ReplacementPiece {
    Text(String),
    Group(usize),
}

impl Rename {
    /// Compiles a rename.
    ///
    /// # Errors
    /// `Usage` if there is no `=`, the regular expression is invalid, or the replacement refers to a group that does
    /// not exist.
    pub fn parse(text: &str) -> Result<Self> {
        Self::compile(text).map_err(|(problem, hint)| Error::usage(format!("options::rename {text}: {problem}"), hint))
    }

    /// Compiles one rename from each line. Empty lines and lines that start with `#` are ignored.
    ///
    /// # Errors
    /// The errors of [`Rename::parse`], with the number of the line.
    pub fn parse_file(text: &str) -> Result<Vec<Self>> {
        let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
        let renames = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).map(|(number, line)| {
            Self::compile(line).map_err(|(problem, hint)| {
                Error::usage(format!("options::rename_file line {number}: {line}: {problem}"), hint)
            })
        });
        renames.collect()
    }

    fn compile(text: &str) -> Result<Self, (String, String)> {
        let because = |problem: String| (problem, String::from(FORM));
        let cut =
            last_unescaped_equals(text).ok_or_else(|| because(String::from("expected REGEX=REPL, found no `=`")))?;
        // The regular expression itself also reads `\=` as `=`, so the backslash can stay.
        let pattern = &text[..cut];
        if pattern.is_empty() {
            return Err(because(String::from("the regular expression is empty")));
        }
        let regex = Regex::new(pattern).map_err(|error| because(one_line(&error)))?;
        let replacement = parse_replacement(&text[cut + 1..], &regex).map_err(because)?;
        Ok(Self { text: text.to_owned(), regex, replacement })
    }

    /// Returns the new name, or `None` if the regular expression does not match the name.
    pub fn apply(&self, name: &str) -> Option<String> {
        let replace = |groups: &Captures<'_>| {
            let mut new = String::new();
            for piece in &self.replacement {
                new.push_str(match piece {
                    ReplacementPiece::Text(text) => text,
                    ReplacementPiece::Group(group) => groups.get(*group).map_or("", |found| found.as_str()),
                });
            }
            new
        };
        match self.regex.replace_all(name, replace) {
            Cow::Borrowed(_) => None,
            Cow::Owned(new) => Some(new),
        }
    }

    /// Returns the rename as the user wrote it.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the characters of the regular expression that may occur in a name, without operators. Hints use this
    /// text to find similar names.
    pub fn likeness(&self) -> String {
        let pattern = self.regex.as_str().replace("\\d", "").replace("\\w", "");
        pattern.chars().filter(|c| c.is_alphanumeric() || ['.', '_', '-'].contains(c)).collect()
    }
}

/// Returns the position of the last `=` that is not escaped. An `=` after an even number of backslashes is not escaped.
fn last_unescaped_equals(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let escaped = |at: usize| bytes[..at].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1;
    (0..bytes.len()).rev().find(|&at| bytes[at] == b'=' && !escaped(at))
}

/// Returns a syntax error as one line. The `regex` crate formats the error in several lines; the last line describes
/// the problem.
fn one_line(error: &regex::Error) -> String {
    let text = error.to_string();
    let problem = text.lines().find_map(|line| line.strip_prefix("error: ")).map(str::to_owned);
    problem.unwrap_or_else(|| text.lines().map(str::trim).collect::<Vec<_>>().join(" "))
}

fn parse_replacement(text: &str, regex: &Regex) -> Result<Vec<ReplacementPiece>, String> {
    let numbered = |digits: &str| {
        let known = digits.parse().ok().filter(|group| *group < regex.captures_len());
        known.map(ReplacementPiece::Group).ok_or_else(|| {
            let groups = regex.captures_len() - 1;
            format!("the regular expression has no group {digits}; the number of its groups is {groups}")
        })
    };
    let mut pieces = Vec::new();
    let mut plain = String::new();
    let mut rest = text;
    while let Some(special) = rest.find(['\\', '$']) {
        plain.push_str(&rest[..special]);
        let (sign, after) = rest[special..].split_at(1);
        let piece = match (sign, after.chars().next()) {
            ("\\", Some(c)) if c.is_ascii_digit() => {
                let end = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
                rest = &after[end..];
                numbered(&after[..end])?
            }
            ("\\", Some(c @ ('\\' | '='))) | ("$", Some(c @ '$')) => {
                rest = &after[1..];
                plain.push(c);
                continue;
            }
            ("$", Some('{')) => {
                let end = after.find('}').ok_or("expected } after ${")?;
                rest = &after[end + 1..];
                group(&after[1..end], regex, &numbered)?
            }
            ("$", _) => return Err(String::from("write $$ for a literal $, or ${1} for a group")),
            _ => return Err(String::from("write \\\\ for a literal backslash, or \\1 for a group")),
        };
        if !plain.is_empty() {
            pieces.push(ReplacementPiece::Text(std::mem::take(&mut plain)));
        }
        pieces.push(piece);
    }
    plain.push_str(rest);
    if !plain.is_empty() {
        pieces.push(ReplacementPiece::Text(plain));
    }
    Ok(pieces)
}

/// Returns the capture group whose name or number is between braces.
fn group(
    name: &str,
    regex: &Regex,
    numbered: &dyn Fn(&str) -> Result<ReplacementPiece, String>,
) -> Result<ReplacementPiece, String> {
    if !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit()) {
        return numbered(name);
    }
    let found = regex.capture_names().position(|known| known == Some(name));
    found.map(ReplacementPiece::Group).ok_or_else(|| {
        let known: Vec<&str> = regex.capture_names().flatten().collect();
        let known = if known.is_empty() { String::from("none") } else { known.join(", ") };
        format!("the regular expression has no group `{name}`; its named groups: {known}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_match_is_replaced() {
        for (rename, name, new) in [
            (r"^model\.=", "model.layers.0.w", Some("layers.0.w")),
            (r"a=b", "a.a.ca", Some("b.b.cb")),
            (r"layers\.(\d+)=blocks.\1", "layers.12.w", Some("blocks.12.w")),
            (r"(?P<n>\d+)\.(w)=${n}0.${2}\2", "l.3.w", Some("l.30.ww")),
            (r"(x)?w=\1v", "w", Some("v")),
            (r"w=$$\\\=", "w", Some(r"$\=")),
            (r"a\=b=c", "a=b", Some("c")),
            (r"a\\=c", r"a\", Some("c")),
            (r"a=b=c", "a=b", Some("c")),
            (r"layers=blocks", "head", None),
            (r"\.=_", "ä.ö", Some("ä_ö")),
            (r"w=\0\0", "w", Some("ww")),
            (r"^(.*)$=m.\1", "w", Some("m.w")),
        ] {
            assert_eq!(Rename::parse(rename).unwrap().apply(name).as_deref(), new, "{rename}");
        }
    }

    #[test]
    fn error_of_an_invalid_rename_is_one_line() {
        for (rename, problem) in [
            ("layers", "expected REGEX=REPL, found no `=`"),
            (r"a\=b", "expected REGEX=REPL, found no `=`"),
            ("=b", "the regular expression is empty"),
            ("(a=b", "unclosed group"),
            (r"(a)=\2", "the regular expression has no group 2; the number of its groups is 1"),
            (r"(a)=${b}", "the regular expression has no group `b`; its named groups: none"),
            (r"(?<c>a)=${b}", "the regular expression has no group `b`; its named groups: c"),
            (r"(a)=$1", "write $$ for a literal $, or ${1} for a group"),
            (r"(a)=${1", "expected } after ${"),
            (r"(a)=\n", r"write \\ for a literal backslash, or \1 for a group"),
            (
                r"(a)=\99999999999999999999",
                "the regular expression has no group 99999999999999999999; the number of its groups is 1",
            ),
        ] {
            let error = Rename::parse(rename).unwrap_err();
            assert_eq!(error.to_string(), format!("options::rename {rename}: {problem}"));
            assert!(error.hint().is_some());
        }
        let huge = Rename::parse(r"\w{1000}{1000}=x").unwrap_err().to_string();
        assert!(huge.contains("size limit") && !huge.contains('\n'), "{huge}");
    }

    #[test]
    fn file_has_one_rename_on_each_line() {
        let renames = Rename::parse_file("# names\n\n  a=b \r\n^c#=d\n").unwrap();
        assert_eq!(renames.iter().map(Rename::as_str).collect::<Vec<_>>(), ["a=b", "^c#=d"]);
        let error = Rename::parse_file("a=b\n\n(c=d").unwrap_err();
        assert_eq!(error.to_string(), "options::rename_file line 3: (c=d: unclosed group");
    }
}
