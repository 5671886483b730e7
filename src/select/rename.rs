//! `--rename 'REGEX=REPL'`: names rewritten by regular expressions.
//!
//! A regular expression is searched for anywhere in a name and every match is replaced, as `re.sub` and `sed s///g`
//! do. The replacement writes groups as `\1`, `${1}` or `${name}`. A bare `$1` is refused, not guessed: in the
//! syntax of the `regex` crate `$1_w` is a group called `1_w`.

use std::borrow::Cow;

use regex::{Captures, Regex};

use crate::error::{Error, Result};

const FORM: &str = "a rename is REGEX=REPL, such as '^model\\.=' or 'layers\\.(\\d+)=blocks.\\1'; \\= is a plain =";

/// A compiled rename.
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
    /// # Errors
    /// `Usage` where there is no `=`, where the regular expression is none, or where the replacement has a group that
    /// it has not.
    pub fn parse(text: &str) -> Result<Self> {
        Self::compile(text).map_err(|(problem, hint)| Error::usage(format!("options::rename {text}: {problem}"), hint))
    }

    /// One rename a line; empty lines and lines that begin with `#` are skipped.
    ///
    /// # Errors
    /// As [`Rename::parse`], with the number of the line.
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
        let cut = last_unescaped_equals(text).ok_or_else(|| because(String::from("there is no =")))?;
        // `\=` is an `=` to the regular expression, too.
        let pattern = &text[..cut];
        if pattern.is_empty() {
            return Err(because(String::from("the regular expression is empty")));
        }
        let regex = Regex::new(pattern).map_err(|error| because(one_line(&error)))?;
        let replacement = parse_replacement(&text[cut + 1..], &regex).map_err(because)?;
        Ok(Self { text: text.to_owned(), regex, replacement })
    }

    /// The new name, where the old one has a match.
    #[must_use]
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

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The regular expression without what is no part of a name, to look for names like it.
    #[must_use]
    pub fn likeness(&self) -> String {
        let pattern = self.regex.as_str().replace("\\d", "").replace("\\w", "");
        pattern.chars().filter(|c| c.is_alphanumeric() || ['.', '_', '-'].contains(c)).collect()
    }
}

/// An `=` after an even number of backslashes is itself, not an escaped one.
fn last_unescaped_equals(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let escaped = |at: usize| bytes[..at].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1;
    (0..bytes.len()).rev().find(|&at| bytes[at] == b'=' && !escaped(at))
}

/// The crate shows syntax errors under the expression, on several lines of which the last says it.
fn one_line(error: &regex::Error) -> String {
    let text = error.to_string();
    let said = text.lines().find_map(|line| line.strip_prefix("error: ")).map(str::to_owned);
    said.unwrap_or_else(|| text.lines().map(str::trim).collect::<Vec<_>>().join(" "))
}

fn parse_replacement(text: &str, regex: &Regex) -> Result<Vec<ReplacementPiece>, String> {
    let numbered = |digits: &str| {
        let known = digits.parse().ok().filter(|group| *group < regex.captures_len());
        known.map(ReplacementPiece::Group).ok_or_else(|| {
            let groups = regex.captures_len() - 1;
            format!("there is no group {digits} in it, the last is {groups}")
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
                let end = after.find('}').ok_or("a ${ is not closed")?;
                rest = &after[end + 1..];
                group(&after[1..end], regex, &numbered)?
            }
            ("$", _) => return Err(String::from("a $ is written $$, a group ${1}")),
            _ => return Err(String::from("a backslash is written \\\\, a group \\1")),
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

/// A group by what stands between braces.
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
        format!("there is no group called `{name}` in it; it has {known}")
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
    fn a_bad_rename_says_what_is_wrong_in_one_line() {
        for (rename, problem) in [
            ("layers", "there is no ="),
            (r"a\=b", "there is no ="),
            ("=b", "the regular expression is empty"),
            ("(a=b", "unclosed group"),
            (r"(a)=\2", "there is no group 2 in it, the last is 1"),
            (r"(a)=${b}", "there is no group called `b` in it; it has none"),
            (r"(?<c>a)=${b}", "there is no group called `b` in it; it has c"),
            (r"(a)=$1", "a $ is written $$, a group ${1}"),
            (r"(a)=${1", "a ${ is not closed"),
            (r"(a)=\n", r"a backslash is written \\, a group \1"),
            (r"(a)=\99999999999999999999", "there is no group 99999999999999999999 in it, the last is 1"),
        ] {
            let error = Rename::parse(rename).unwrap_err();
            assert_eq!(error.to_string(), format!("options::rename {rename}: {problem}"));
            assert!(error.hint().is_some());
        }
        let huge = Rename::parse(r"\w{1000}{1000}=x").unwrap_err().to_string();
        assert!(huge.contains("size limit") && !huge.contains('\n'), "{huge}");
    }

    #[test]
    fn a_file_has_one_rename_a_line() {
        let renames = Rename::parse_file("# names\n\n  a=b \r\n^c#=d\n").unwrap();
        assert_eq!(renames.iter().map(Rename::as_str).collect::<Vec<_>>(), ["a=b", "^c#=d"]);
        let error = Rename::parse_file("a=b\n\n(c=d").unwrap_err();
        assert_eq!(error.to_string(), "options::rename_file line 3: (c=d: unclosed group");
    }
}
