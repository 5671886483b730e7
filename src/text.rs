//! Text of the library, as a front end shows it.
//!
//! Messages name an option by `options::` and its field; [`spell_options`] puts the name there that users of the front end
//! know. [`harmless`] makes text safe to show: names in a checkpoint are written by others, and must neither send escape codes to a
//! terminal, nor pass for other names or for lines of the program.

use std::borrow::Cow;
use std::fmt::Write as _;

pub use crate::quantity::{count, human_bytes, human_rate};

/// Prefix by which messages name an option: `options::max_memory` is the field `max_memory` of a struct in
/// [`options`](crate::options).
const OPTION: &str = "options::";

/// Replaces each name of an option in a message, such as `options::max_memory`, by what `spell` returns for `max_memory`.
///
/// ```
/// let message = "allow at least options::max_memory 64 MB";
/// let spelled = dtshard::text::spell_options(message, |name| format!("--{}", name.replace('_', "-")));
/// assert_eq!(spelled, "allow at least --max-memory 64 MB");
/// ```
pub fn spell_options(text: &str, spell: impl Fn(&str) -> String) -> Cow<'_, str> {
    let mut pieces = text.split(OPTION);
    let first = pieces.next().unwrap_or_default();
    if first.len() == text.len() {
        return Cow::Borrowed(text);
    }
    let mut spelled = first.to_owned();
    for piece in pieces {
        let end = piece.find(|c: char| c != '_' && !c.is_ascii_lowercase()).unwrap_or(piece.len());
        let (name, rest) = piece.split_at(end);
        spelled.push_str(&if name.is_empty() { OPTION.to_owned() } else { spell(name) });
        spelled.push_str(rest);
    }
    Cow::Owned(spelled)
}

/// Text with characters that are no visible text as escapes: `\u{1b}`. Escaping twice gives the same text.
pub fn harmless(text: &str) -> String {
    let mut harmless = String::with_capacity(text.len());
    for c in text.chars() {
        if is_visible(c) { harmless.push(c) } else { harmless.extend(c.escape_default()) }
    }
    harmless
}

/// A JSON document with characters that are no visible text as `\uXXXX`, which means the same to its readers.
pub fn harmless_json(text: &str) -> String {
    let mut harmless = String::with_capacity(text.len());
    for c in text.chars() {
        // The serialiser has escaped line breaks in strings: those that are left are between them.
        if c == '\n' || is_visible(c) {
            harmless.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(harmless, "\\u{unit:04x}").expect("writing to memory");
            }
        }
    }
    harmless
}

/// Returns whether a terminal shows a character as that character.
///
/// Control and format characters (Cc, Cf: bidirectional overrides, zero-width joiners), line and paragraph separators,
/// spaces other than the ASCII one, private and unassigned characters are not visible, nor are letters and marks that
/// Unicode calls ignorable.
fn is_visible(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    let is_ignorable = matches!(c, '\u{34f}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{ffa0}' | '\u{e0000}'..='\u{e0fff}');
    // Behind another character, marks that combine with it are printed, and what cannot be printed is escaped.
    let mut behind_another = ['x', c].iter().collect::<String>();
    behind_another = behind_another.escape_debug().skip(1).collect();
    !is_ignorable && !behind_another.starts_with('\\')
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_cannot_command_a_terminal() {
        let hostile = "w\u{1b}]0;owned\u{7}\u{9b}2J\r\nerror: x\u{202e}\u{2028}";
        let shown = harmless(hostile);
        assert_eq!(shown, "w\\u{1b}]0;owned\\u{7}\\u{9b}2J\\r\\nerror: x\\u{202e}\\u{2028}");
        assert_eq!(harmless(&shown), shown);
        assert_eq!(harmless("Schlüssel.權重 [0]"), "Schlüssel.權重 [0]");
    }

    #[test]
    fn options_are_spelled_wherever_they_stand() {
        let spelled = |text| spell_options(text, |name| format!("<{name}>"));
        assert_eq!(spelled("no option"), "no option");
        assert_eq!(spelled("options::a_b=1, (options::c)"), "<a_b>=1, (<c>)");
        assert_eq!(spelled("options:: and options::"), "options:: and options::");
    }

    #[test]
    fn invisible_characters_are_escaped_and_scripts_are_not() {
        for c in "\u{0}\u{7f}\u{85}\u{ad}\u{a0}\u{34f}\u{61c}\u{200b}\u{200d}\u{200f}\u{202e}\u{2028}\u{2060}\u{2066}\u{2069}\
                  \u{3164}\u{e000}\u{fe0f}\u{feff}\u{fff9}\u{e0041}\u{10ffff}"
            .chars()
        {
            assert_eq!(harmless(&c.to_string()), c.escape_default().to_string());
        }
        let scripts = "\"it's\" \\ é e\u{301} हिन्दी ไทย עברית العربية 權重 가 🦀";
        assert_eq!(harmless(scripts), scripts);
    }

    #[test]
    fn escaped_json_means_the_same() {
        let document = json!({ "w\u{202e}\u{7f}\u{e0041}\n": ["\u{1b}\u{9b}", "é \\ \"", "\u{200b}"] });
        let text = harmless_json(&serde_json::to_string_pretty(&document).unwrap());
        assert!(text.contains(r"w\u202e\u007f\udb40\udc41\n") && text.contains('é'), "{text}");
        assert!(text.chars().all(|c| c == '\n' || is_visible(c)), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), document);
    }
}
