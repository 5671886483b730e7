//! Errors of the library as Python exceptions: `dtshard.Error`, whose attributes are the fields of the JSON document of an
//! error.

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use serde_json::json;

use crate::keywords::document;

/// Converts an error of the library. Its hint is a note of the exception, which Python prints below the message.
pub fn exception(py: Python<'_>, error: &dtshard::Error) -> PyErr {
    if matches!(error, dtshard::Error::Stopped(_)) {
        return PyKeyboardInterrupt::new_err(());
    }
    make(py, &error.to_json())
}

/// Returns the exception for arguments that are wrong.
pub fn usage(message: &str, hint: &str) -> PyErr {
    Python::attach(|py| make(py, &json!({ "kind": "usage", "message": message, "hint": hint })))
}

fn make(py: Python<'_>, fields: &serde_json::Value) -> PyErr {
    let made = || -> PyResult<PyErr> {
        let class = py.import("dtshard._error")?.getattr("Error")?;
        Ok(PyErr::from_value(class.call1((document(py, &spelled(fields))?,))?))
    };
    made().unwrap_or_else(|error| error)
}

/// Returns a JSON value in which texts name options as keyword arguments.
fn spelled(value: &serde_json::Value) -> serde_json::Value {
    match value {
        serde_json::Value::String(text) => json!(spell(text)),
        serde_json::Value::Object(fields) => fields.iter().map(|(key, value)| (key.clone(), spelled(value))).collect(),
        other => other.clone(),
    }
}

/// Replaces option names of the library by keyword arguments.
pub fn spell(text: &str) -> String {
    let keyword = |name: &str| if name == "from" { String::from("from_") } else { name.to_owned() };
    dtshard::text::spell_options(text, keyword).into_owned()
}
