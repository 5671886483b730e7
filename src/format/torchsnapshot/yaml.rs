//! Converts a YAML manifest to JSON. Versions of torchsnapshot before 0.1.0 write the manifest with `yaml.dump`.
//!
//! Plain scalars are resolved as PyYAML resolves them (YAML 1.1), for the types that a manifest has: null, bools and
//! decimal ints; every other scalar is text. Aliases and tags are refused: `yaml.dump` writes none for a manifest, and
//! aliases could make a short text arbitrarily large. The JSON text is at most a few times longer than the YAML text.

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span};

use crate::error::Wrong;

/// The maximum depth of nested lists and mappings. A manifest is five levels deep, and the ranks of a mesh add one
/// level for each mesh dim.
const MAX_DEPTH: usize = 64;

/// A list or mapping that is being converted.
enum Container {
    List { is_empty: bool },
    Mapping { is_empty: bool, expects_key: bool },
}

/// Converts a YAML document to JSON.
///
/// # Errors
/// A fault with the line and the column, if the text is not one YAML document, or has aliases or tags.
pub fn to_json(text: &[u8]) -> Result<Vec<u8>, Wrong> {
    let text = std::str::from_utf8(text).map_err(|error| {
        Wrong::new(format!("byte {}", error.valid_up_to()), "a manifest in JSON or YAML", "bytes that are not UTF-8")
    })?;
    let mut writer = JsonWriter { json: Vec::with_capacity(text.len()), containers: Vec::new(), is_done: false };
    let mut parser = Parser::new_from_str(text);
    while let Some(event) = parser.next_event() {
        let (event, span) = event.map_err(|error| not_yaml(&error))?;
        writer.event(event, span)?;
    }
    if writer.is_done { Ok(writer.json) } else { Err(Wrong::new("content", "a manifest", "an empty document")) }
}

fn not_yaml(error: &ScanError) -> Wrong {
    let at = format!("line {}, column {}", error.marker().line(), error.marker().col() + 1);
    let found = error.info();
    Wrong::new(at, "a manifest in JSON or YAML", found.strip_prefix("found ").unwrap_or(found))
}

const WITHOUT_ALIASES: &str = "a manifest without YAML aliases (`*name`), which dtshard does not support";

struct JsonWriter {
    json: Vec<u8>,
    containers: Vec<Container>,
    /// True if the document was read to its end.
    is_done: bool,
}

impl JsonWriter {
    fn event(&mut self, event: Event<'_>, span: Span) -> Result<(), Wrong> {
        let wrong = |expected: &str, found: String| {
            let at = format!("line {}, column {}", span.start.line(), span.start.col() + 1);
            Err(Wrong::new(at, expected, found))
        };
        match event {
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentEnd => {}
            Event::DocumentStart(_) if self.is_done => return wrong("one document", String::from("another document")),
            Event::DocumentStart(_) => {}
            Event::Alias(_) => return wrong(WITHOUT_ALIASES, String::from("an alias")),
            Event::Scalar(_, _, _, Some(tag))
            | Event::SequenceStart(_, Some(tag))
            | Event::MappingStart(_, Some(tag)) => {
                return wrong("a manifest without tags", format!("the tag `{:.60}`", tag.to_string()));
            }
            Event::Scalar(text, style, ..) => {
                if self.start_value(true).is_err() {
                    return wrong("one document", String::from("more text after it"));
                }
                let is_key = self
                    .containers
                    .last()
                    .is_some_and(|last| matches!(last, Container::Mapping { expects_key: false, .. }));
                let plain = (style == ScalarStyle::Plain && !is_key).then(|| resolve(&text)).flatten();
                match plain {
                    Some(json) => self.json.extend_from_slice(json.as_bytes()),
                    None => serde_json::to_writer(&mut self.json, &*text).expect("text can be written to memory"),
                }
                self.end_value();
            }
            Event::SequenceStart(..) | Event::MappingStart(..) => {
                if self.containers.len() == MAX_DEPTH {
                    return wrong("a manifest", format!("lists and mappings that are nested {MAX_DEPTH} deep"));
                }
                if self.start_value(false).is_err() {
                    return wrong("keys that are text", String::from("a list or mapping as a key"));
                }
                let is_list = matches!(event, Event::SequenceStart(..));
                self.json.push(if is_list { b'[' } else { b'{' });
                self.containers.push(if is_list {
                    Container::List { is_empty: true }
                } else {
                    Container::Mapping { is_empty: true, expects_key: true }
                });
            }
            Event::SequenceEnd | Event::MappingEnd => {
                self.json.push(if matches!(event, Event::SequenceEnd) { b']' } else { b'}' });
                self.containers.pop();
                self.end_value();
            }
        }
        Ok(())
    }

    /// Writes the comma or the colon in front of a key or value.
    ///
    /// # Errors
    /// If the value cannot be at this position: a value that is not a scalar as a key, or a second value in the
    /// document.
    fn start_value(&mut self, is_scalar: bool) -> Result<(), ()> {
        match self.containers.last_mut() {
            None if self.is_done => return Err(()),
            None => {}
            Some(Container::List { is_empty: is_empty @ true }) => *is_empty = false,
            Some(Container::List { .. }) => self.json.push(b','),
            Some(Container::Mapping { is_empty, expects_key }) => {
                if *expects_key && !is_scalar {
                    return Err(());
                }
                if !*expects_key {
                    self.json.push(b':');
                } else if !std::mem::take(is_empty) {
                    self.json.push(b',');
                }
                *expects_key = !*expects_key;
            }
        }
        Ok(())
    }

    fn end_value(&mut self) {
        self.is_done = self.containers.is_empty();
    }
}

/// Returns the JSON text of a plain scalar; `None` if the scalar is text.
fn resolve(text: &str) -> Option<&str> {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Some("null"),
        "true" | "True" | "TRUE" => Some("true"),
        "false" | "False" | "FALSE" => Some("false"),
        _ => {
            let digits = text.strip_prefix('-').unwrap_or(text);
            let is_decimal = digits == "0" || !digits.starts_with('0');
            let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            (is_decimal && is_number && text != "-0").then_some(text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(text: &str) -> Result<String, String> {
        match to_json(text.as_bytes()) {
            Ok(json) => Ok(String::from_utf8(json).unwrap()),
            Err(wrong) => Err(format!("{}: expected {}, found {}", wrong.at, wrong.expected, wrong.found)),
        }
    }

    #[test]
    fn output_of_yaml_dump_becomes_json() {
        let text = "version: 0.0.3\nworld_size: 2\nmanifest:\n  0/a:\n    type: dict\n    keys:\n    - w\n    - '7'\n    - 7\n    - -7\n    - ''\n    - 1e3\n    - \"a\\tb\"\n  0/a/w:\n    byte_range: null\n    replicated: true\n    shape: []\n    readable: ~\n    location: a\n      b\n";
        let expected = r#"{"version":"0.0.3","world_size":2,"manifest":{"0/a":{"type":"dict","keys":["w","7",7,-7,"","1e3","a\tb"]},"0/a/w":{"byte_range":null,"replicated":true,"shape":[],"readable":null,"location":"a b"}}}"#;
        assert_eq!(converted(text).unwrap(), expected);
        assert_eq!(converted("1: {true: [0, 00, 0x1]}").unwrap(), r#"{"1":{"true":[0,"00","0x1"]}}"#);
    }

    #[test]
    fn hostile_yaml_is_an_error() {
        for (text, expected) in [
            (
                "a: &x [1]\nb: *x\n",
                "line 2, column 4: expected a manifest without YAML aliases (`*name`), which dtshard does not support,",
            ),
            ("a: !!python/object:os.system {}\n", "line 1, column 4: expected a manifest without tags, found the tag"),
            ("a: 1\n---\nb: 2\n", "expected one document, found another document"),
            ("? [1]\n: 2\n", "expected keys that are text, found a list or mapping as a key"),
            ("", "content: expected a manifest, found an empty document"),
            ("a: [1\n", "expected a manifest in JSON or YAML, found"),
            ("a: 'x\n", "expected a manifest in JSON or YAML, found"),
            (&"[".repeat(100_000), "recursion limit exceeded"),
            (&"a: [".repeat(70), "nested 64 deep"),
            (&"- ".repeat(100_000), "nested 64 deep"),
        ] {
            let error = converted(text).unwrap_err();
            assert!(error.contains(expected), "{text:.40}: {error}");
        }
        assert!(to_json(b"a: \xff").is_err());
    }

    proptest::proptest! {
        /// Every text is converted to valid JSON or is refused.
        #[test]
        fn every_text_is_handled(text in "([a-c]|[0-9]|[-:?,#&*!|>%@'\"{}\\[\\]~ ]|\n|\n  |\\PC){0,60}") {
            if let Ok(json) = to_json(text.as_bytes()) {
                serde_json::from_slice::<serde_json::Value>(&json).unwrap();
            }
        }
    }
}
