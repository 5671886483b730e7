//! Describes the errors of serde_json in the words of JSON, because users do not know the types of Rust.
//!
//! Each description has two noun phrases, for a message of the form `expected ..., found ...`.

use std::path::Path;

use crate::error::Error;

/// The expected and the found content of a JSON text.
#[derive(Debug, PartialEq, Eq)]
pub struct JsonMismatch {
    /// The expected content: `text in quotes`.
    pub expected: String,
    /// The found content: `the number -1`.
    pub found: String,
}

/// Describes an error of serde_json, without its line and column. `document` is a description of the complete text. It
/// is used as the expected content if serde_json does not name an expected type or key.
pub fn mismatch(error: &serde_json::Error, document: &str) -> JsonMismatch {
    let text = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    let text = text.strip_suffix(&position).unwrap_or(&text);
    let (expected, found) = wrong_type(text).unwrap_or_else(|| (document.to_owned(), wrong_text(text)));
    JsonMismatch { expected, found }
}

/// Returns the error of a file: `PATH: line 1, column 3: expected ..., found ...`.
pub fn malformed(path: &Path, error: &serde_json::Error, document: &str) -> Error {
    let JsonMismatch { expected, found } = mismatch(error, document);
    Error::malformed(path, format!("line {}, column {}", error.line(), error.column()), expected, found)
}

/// Returns the error for one part of a file, such as the value of a key: `PATH: KEY: expected ..., found ... (line 1,
/// column 3)`.
pub fn malformed_part(path: &Path, part: impl Into<String>, error: &serde_json::Error, document: &str) -> Error {
    let JsonMismatch { expected, found } = mismatch(error, document);
    Error::malformed(path, part, expected, format!("{found} (line {}, column {})", error.line(), error.column()))
}

/// Returns the expected and the found content, if the error text of serde_json is about a value of the wrong type, a
/// list of the wrong length, or a missing key.
fn wrong_type(text: &str) -> Option<(String, String)> {
    let mismatch = text.strip_prefix("invalid type: ").or_else(|| text.strip_prefix("invalid value: "));
    if let Some((value, expected)) = mismatch.and_then(|rest| rest.rsplit_once(", expected ")) {
        return Some((type_in_json(expected), value_in_json(value)));
    }
    let length = text.strip_prefix("invalid length ").and_then(|rest| rest.split_once(", expected "));
    if let Some((number, expected)) = length {
        let values = if number == "1" { "value" } else { "values" };
        return Some((type_in_json(expected), format!("a list of {number} {values}")));
    }
    let key = text.strip_prefix("missing field ")?;
    Some((format!("the key {key}"), String::from("an object without this key")))
}

/// Returns the found content for any other error text of serde_json: the document is not JSON, or has a key that is not
/// allowed.
fn wrong_text(text: &str) -> String {
    if let Some(key) = text.strip_prefix("duplicate field ") {
        return format!("the key {key} twice");
    }
    if let Some((key, keys)) = text.strip_prefix("unknown field ").and_then(|rest| rest.split_once(", expected ")) {
        let keys = keys.strip_prefix("one of ").unwrap_or(keys).replace(" or ", " and ");
        return format!("the unknown key {key}; the known keys are {keys}");
    }
    let words = match text {
        "EOF while parsing a value" => "the end of the text",
        "EOF while parsing a list" => "the end of the text inside a list",
        "EOF while parsing an object" => "the end of the text inside an object",
        "EOF while parsing a string" => "the end of the text inside a string",
        "expected value" | "expected ident" => "text that is not a JSON value",
        "expected `:`" => "a key without `:` after it",
        "expected `,` or `]`" => "a value in a list without `,` or `]` after it",
        "expected `,` or `}`" => "a value in an object without `,` or `}` after it",
        "key must be a string" => "a key without quotes",
        "trailing comma" => "a comma after the last value",
        "trailing characters" => "more text after the JSON value",
        "number out of range" => "a number that is too large",
        "invalid number" => "an invalid number",
        "invalid escape" => "an invalid escape in a string",
        "invalid unicode code point" => "invalid Unicode in a string",
        "unexpected end of hex escape" | "lone leading surrogate in hex escape" => "an incomplete `\\u` escape",
        "recursion limit exceeded" => "too many nested lists and objects",
        other if other.starts_with("control character") => "a control character in a string",
        other => other,
    };
    words.to_owned()
}

/// Describes a value that serde found, such as ``integer `1` ``.
fn value_in_json(found: &str) -> String {
    let quoted = |kind: &str| found.strip_prefix(kind)?.strip_prefix(" `")?.strip_suffix('`');
    if let Some(number) = quoted("integer").or_else(|| quoted("floating point")) {
        return format!("the number {number}");
    }
    if let Some(truth) = quoted("boolean") {
        return truth.to_owned();
    }
    match found {
        "sequence" => String::from("a list"),
        "map" => String::from("an object"),
        _ => found.strip_prefix("string ").map_or_else(|| found.to_owned(), |text| format!("the text {text}")),
    }
}

/// Describes a type that serde expects, given as the name of a Rust type, such as `u64` or `struct DocumentJson`.
fn type_in_json(expected: &str) -> String {
    if let Some(len) = expected.strip_prefix("a tuple of size ") {
        return format!("a list of {len} values");
    }
    let words = match expected {
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number from 0 to 2^64 - 1",
        "i64" => "a whole number",
        "f64" => "a number",
        "a boolean" => "true or false",
        "a map" => "an object",
        "a sequence" => "a list",
        "a string" | "a borrowed string" => "text in quotes",
        other if other.starts_with("struct ") => "an object",
        other => other,
    };
    words.to_owned()
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        #[expect(dead_code, reason = "only errors are tested")]
        size: u64,
        #[expect(dead_code, reason = "only errors are tested")]
        pair: Option<(u64, u64)>,
    }

    fn error_of(text: &str) -> serde_json::Error {
        serde_json::from_str::<Sample>(text).unwrap_err()
    }

    #[test]
    fn description_has_no_word_of_serde() {
        let cases = [
            ("{\"size\": -1}", "a whole number from 0 to 2^64 - 1", "the number -1"),
            ("{\"size\": \"a\"}", "a whole number from 0 to 2^64 - 1", "the text \"a\""),
            ("{\"size\": true}", "a whole number from 0 to 2^64 - 1", "true"),
            ("{\"pair\": [1]}", "a list of 2 values", "a list of 1 value"),
            ("{}", "the key `size`", "an object without this key"),
            ("{\"sizes\": 1}", "a sample", "the unknown key `sizes`; the known keys are `size` and `pair`"),
            ("7", "an object", "the number 7"),
            ("{\"size\": x}", "a sample", "text that is not a JSON value"),
        ];
        for (text, expected, found) in cases {
            let mismatch = mismatch(&error_of(text), "a sample");
            assert_eq!((mismatch.expected.as_str(), mismatch.found.as_str()), (expected, found), "{text}");
        }
        let error = malformed_part(Path::new("a.json"), "size", &error_of(""), "a sample");
        assert_eq!(error.to_string(), "a.json: size: expected a sample, found the end of the text (line 1, column 0)");
    }
}
