//! Prepares messages of the library for display in a front end.
//!
//! Messages name an option as `options::` and its field; [`spell_options`] replaces this text by the name of the option
//! in the front end. [`escape_invisible`] makes text safe to display. Names in a checkpoint are untrusted: a name must
//! not send escape codes to a terminal, and must not look like another name or like output of the program.

use std::borrow::Cow;
use std::fmt::Write as _;

pub use crate::quantity::{count, human_bytes, human_rate};

/// The prefix of an option in messages. For example, `options::max_memory` is the field `max_memory` of a struct in
/// [`options`](crate::options).
const OPTION: &str = "options::";

/// Replaces each option in a message, such as `options::max_memory`, with the result of `spell` for `max_memory`.
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

/// Escapes invisible characters, for example as `\u{1b}`. A text that was already escaped is returned unchanged.
pub fn escape_invisible(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if is_visible(c) { escaped.push(c) } else { escaped.extend(c.escape_default()) }
    }
    escaped
}

/// Escapes invisible characters in a JSON document as `\uXXXX`. A JSON parser converts these escapes back to the
/// original characters.
pub fn escape_invisible_json(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        // The serialiser has escaped line breaks in strings, so the remaining line breaks are between values.
        if c == '\n' || is_visible(c) {
            escaped.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(escaped, "\\u{unit:04x}").expect("writing to memory");
            }
        }
    }
    escaped
}

/// Returns whether a terminal displays a character as a visible character or an ordinary space.
///
/// Control and format characters (Cc, Cf: bidirectional overrides, zero-width joiners), line and paragraph separators,
/// spaces other than the ASCII space, private and unassigned characters are not visible. Letters and marks that Unicode
/// calls ignorable are not visible either.
fn is_visible(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    let is_ignorable = matches!(c, '\u{34f}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{ffa0}' | '\u{e0000}'..='\u{e0fff}');
    // `escape_debug` prints a combining mark unchanged only after another character, and escapes characters that cannot
    // be printed.
    let mut behind_another = ['x', c].iter().collect::<String>();
    behind_another = behind_another.escape_debug().skip(1).collect();
    !is_ignorable && !behind_another.starts_with('\\')
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn escape_codes_in_names_are_escaped() {
        let hostile = "w\u{1b}]0;owned\u{7}\u{9b}2J\r\nerror: x\u{202e}\u{2028}";
        let shown = escape_invisible(hostile);
        assert_eq!(shown, "w\\u{1b}]0;owned\\u{7}\\u{9b}2J\\r\\nerror: x\\u{202e}\\u{2028}");
        assert_eq!(escape_invisible(&shown), shown);
        assert_eq!(escape_invisible("Schlüssel.權重 [0]"), "Schlüssel.權重 [0]");
    }

    #[test]
    fn options_are_replaced_anywhere_in_a_message() {
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
            assert_eq!(escape_invisible(&c.to_string()), c.escape_default().to_string());
        }
        let scripts = "\"it's\" \\ é e\u{301} हिन्दी ไทย עברית العربية 權重 가 🦀";
        assert_eq!(escape_invisible(scripts), scripts);
    }

    #[test]
    fn escaped_json_parses_to_the_same_document() {
        let document = json!({ "w\u{202e}\u{7f}\u{e0041}\n": ["\u{1b}\u{9b}", "é \\ \"", "\u{200b}"] });
        let text = escape_invisible_json(&serde_json::to_string_pretty(&document).unwrap());
        assert!(text.contains(r"w\u202e\u007f\udb40\udc41\n") && text.contains('é'), "{text}");
        assert!(text.chars().all(|c| c == '\n' || is_visible(c)), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), document);
    }
}
