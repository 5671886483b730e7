//! Text that is safe to show: names in a checkpoint are written by others, and must neither send escape codes to a
//! terminal, nor pass for other names or for lines of the program.

use std::fmt::Write as _;

pub use crate::quantity::{count, human_bytes, human_rate};

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
