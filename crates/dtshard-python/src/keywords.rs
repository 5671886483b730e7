//! Keyword arguments as options: each keyword becomes an argument of the command line, which is then parsed as the program
//! parses it. So both have the same options, defaults and checks.

use std::collections::BTreeMap;
use std::ffi::OsString;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyList, PyTuple};

use crate::error;
use dtshard::cli::{self, Command};

/// The parsed arguments of a verb.
pub struct Arguments {
    /// The verb and its options.
    pub command: Command,
    /// The options that determine the result, as text, for a run that resumes another one.
    pub labels: BTreeMap<String, String>,
}

impl Arguments {
    /// Parses the paths and keyword arguments of a call. `True` sets a flag, `None` and `False` leave an option out, a list
    /// repeats an option, and a dict repeats it as `KEY=VALUE`; a mesh takes a dict as one value.
    ///
    /// # Errors
    /// `TypeError` for a keyword that is no option of the verb; `dtshard.Error` for a wrong value.
    pub fn parse(verb: &str, paths: &[Bound<'_, PyAny>], options: &Bound<'_, PyDict>) -> PyResult<Self> {
        let declared = cli::command();
        let Some(command) = declared.find_subcommand(verb) else {
            return Err(error::usage(&format!("{verb}: no such verb"), "use reshard, unshard, flatten or consolidate"));
        };
        let mut arguments = vec![OsString::from("dtshard"), verb.into()];
        for (keyword, value) in options {
            let keyword: String = keyword.extract()?;
            let long = keyword.trim_end_matches('_').replace('_', "-");
            let Some(option) = command.get_arguments().find(|option| option.get_long() == Some(&long)) else {
                return Err(PyTypeError::new_err(format!("unexpected keyword argument '{keyword}'")));
            };
            add_option(&mut arguments, &long, option.get_action().takes_values(), &value)?;
        }
        // If another process truncates a mapped file, the operating system ends this process.
        if !options.contains("io")? && command.get_arguments().any(|option| option.get_long() == Some("io")) {
            arguments.push("--io=read".into());
        }
        arguments.push("--".into());
        for path in paths {
            arguments.push(path.extract::<std::path::PathBuf>()?.into());
        }
        let labels = cli::labels::of_arguments(arguments.iter().cloned());
        let labels = labels.into_iter().map(|(option, value)| (as_keyword(&option), value)).collect();
        let parsed = cli::parse(&arguments).map_err(|refused| {
            let text = refused.to_string();
            let message = text.strip_prefix("error: ").unwrap_or(&text);
            let message = message.split("\n\n").next().unwrap_or(message);
            error::usage(
                as_keyword(message.trim()).as_str(),
                &format!("see `dtshard {verb} --help` for the values of each option"),
            )
        })?;
        Ok(Self { command: parsed.command, labels })
    }
}

/// Replaces options of the command line in a text by keyword arguments: `--max-memory` by `max_memory`.
fn as_keyword(text: &str) -> String {
    let mut pieces = text.split("--");
    let mut spelled = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let end = piece.find(|c: char| c != '-' && !c.is_ascii_lowercase()).unwrap_or(piece.len());
        let (name, rest) = piece.split_at(end);
        spelled.push_str(&if name == "from" { String::from("from_") } else { name.replace('-', "_") });
        spelled.push_str(rest);
    }
    spelled
}

/// Adds the arguments for one keyword.
fn add_option(arguments: &mut Vec<OsString>, long: &str, takes_values: bool, value: &Bound<'_, PyAny>) -> PyResult<()> {
    if let Ok(flag) = value.cast::<PyBool>() {
        match (flag.is_true(), takes_values) {
            (true, false) => arguments.push(format!("--{long}").into()),
            (false, false) => {}
            (value, true) => arguments.push(format!("--{long}={value}").into()),
        }
    } else if value.is_none() {
    } else if let Ok(pairs) = value.cast::<PyDict>() {
        let pairs = pairs.iter().map(|(key, value)| Ok(format!("{}={}", key.str()?, value.str()?)));
        let pairs = pairs.collect::<PyResult<Vec<_>>>()?;
        // The pairs of a mesh are one value: its dims.
        let values = if long.ends_with("mesh") { vec![pairs.join(",")] } else { pairs };
        arguments.extend(values.into_iter().map(|value| format!("--{long}={value}").into()));
    } else if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        if value.len()? == 0 && long == "include" {
            return Err(error::usage(
                "include: the list is empty, and selects nothing",
                "leave include out to select everything",
            ));
        }
        for item in value.try_iter()? {
            add_option(arguments, long, takes_values, &item?)?;
        }
    } else if !takes_values {
        return Err(PyTypeError::new_err(format!("'{long}' is a flag: expected True or False")));
    } else {
        let mut argument = OsString::from(format!("--{long}="));
        if let Ok(path) = value.extract::<std::path::PathBuf>() {
            argument.push(path);
        } else if value.extract::<f64>().is_ok() {
            argument.push(value.str()?.to_string());
        } else {
            let class = value.get_type().name()?;
            return Err(PyTypeError::new_err(format!(
                "'{long}': expected text, a path, a number, a list or a dict, found {class}"
            )));
        }
        arguments.push(argument);
    }
    Ok(())
}

/// Converts a JSON document to Python's dicts, lists, texts and numbers.
pub fn document(py: Python<'_>, document: &serde_json::Value) -> PyResult<Py<PyAny>> {
    Ok(py.import("json")?.call_method1("loads", (document.to_string(),))?.unbind())
}
