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
    /// repeats an option, and a dict repeats it as `KEY=VALUE`.
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
                return Err(PyTypeError::new_err(format!("{verb} got an unexpected keyword argument '{keyword}'")));
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
        let parsed = cli::parse(&arguments).map_err(|refused| {
            let text = refused.to_string();
            let message = text.strip_prefix("error: ").unwrap_or(&text);
            let message = message.split("\n\n").next().unwrap_or(message);
            error::usage(message.trim(), &format!("see `dtshard {verb} --help` for the values of each option"))
        })?;
        Ok(Self { command: parsed.command, labels })
    }
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
        for (key, value) in pairs {
            arguments.push(format!("--{long}={}={}", key.str()?, value.str()?).into());
        }
    } else if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        for item in value.try_iter()? {
            add_option(arguments, long, takes_values, &item?)?;
        }
    } else if !takes_values {
        return Err(PyTypeError::new_err(format!("'{long}' is a flag: expected True or False")));
    } else {
        let mut argument = OsString::from(format!("--{long}="));
        match value.extract::<std::path::PathBuf>() {
            Ok(path) => argument.push(path),
            Err(_) => argument.push(value.str()?.to_string()),
        }
        arguments.push(argument);
    }
    Ok(())
}

/// Converts a JSON document to Python's dicts, lists, texts and numbers.
pub fn document(py: Python<'_>, document: &serde_json::Value) -> PyResult<Py<PyAny>> {
    Ok(py.import("json")?.call_method1("loads", (document.to_string(),))?.unbind())
}
