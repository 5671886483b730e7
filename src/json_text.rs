//! Describes the errors of serde_json in the words of JSON, because users do not know the types of Rust.
//!
//! Each description is a noun phrase for a message of the form `expected ..., found ...`.

/// Returns what serde_json found in the text, without the position: `the number -1 instead of text in quotes`.
#[must_use]
pub fn found(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    reworded(text.strip_suffix(&position).unwrap_or(&text))
}

/// Returns what serde_json found in the text, followed by the line and the column.
#[must_use]
pub fn found_at(error: &serde_json::Error) -> String {
    format!("{} (line {}, column {})", found(error), error.line(), error.column())
}

fn reworded(text: &str) -> String {
    let mismatch = text.strip_prefix("invalid type: ").or_else(|| text.strip_prefix("invalid value: "));
    if let Some((value, expected)) = mismatch.and_then(|rest| rest.rsplit_once(", expected ")) {
        return format!("{} instead of {}", value_in_json(value), type_in_json(expected));
    }
    let length = text.strip_prefix("invalid length ").and_then(|rest| rest.split_once(", expected "));
    if let Some((number, expected)) = length {
        let values = if number == "1" { "value" } else { "values" };
        return format!("{number} {values} instead of {}", type_in_json(expected));
    }
    if let Some(key) = text.strip_prefix("missing field ") {
        return format!("no key {key}");
    }
    if let Some(key) = text.strip_prefix("duplicate field ") {
        return format!("the key {key} twice");
    }
    if let Some((key, keys)) = text.strip_prefix("unknown field ").and_then(|rest| rest.split_once(", expected ")) {
        let keys = keys.strip_prefix("one of ").unwrap_or(keys).replace(" or ", " and ");
        return format!("the unknown key {key}; the known keys are {keys}");
    }
    let words = match text {
        "EOF while parsing a value" => "the end of the text instead of a value",
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
        "u64" | "usize" => "a whole number of at least 0",
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
    fn error_has_no_word_of_serde() {
        let cases = [
            ("{\"size\": -1}", "the number -1 instead of a whole number of at least 0"),
            ("{\"size\": \"a\"}", "the text \"a\" instead of a whole number of at least 0"),
            ("{\"size\": true}", "true instead of a whole number of at least 0"),
            ("{\"pair\": [1]}", "1 value instead of a list of 2 values"),
            ("{}", "no key `size`"),
            ("{\"sizes\": 1}", "the unknown key `sizes`; the known keys are `size` and `pair`"),
            ("7", "the number 7 instead of an object"),
            ("{\"size\": x}", "text that is not a JSON value"),
        ];
        for (text, expected) in cases {
            assert_eq!(found(&error_of(text)), expected, "{text}");
        }
        assert_eq!(found_at(&error_of("")), "the end of the text instead of a value (line 1, column 0)");
    }
}
