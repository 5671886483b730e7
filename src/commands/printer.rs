//! The one door for output: stdout is data, stderr is talk.

use std::io::{self, Write};

use serde_json::{Value as Json, json};

use crate::cli::{ProgressChoice, TalkArgs};
use crate::error::{Error, Result};

#[derive(Clone, Copy, Debug)]
pub struct Printer {
    choice: TalkArgs,
}

impl Printer {
    #[must_use]
    pub fn new(choice: TalkArgs) -> Self {
        Self { choice }
    }

    #[must_use]
    pub fn json(&self) -> bool {
        self.choice.json
    }

    /// Data for people; the JSON document takes its place where that is asked for.
    pub fn data(&self, text: &str) -> Result<()> {
        if self.choice.json { Ok(()) } else { write_stdout(text) }
    }

    /// The JSON document of the run.
    pub fn document(&self, document: &Json) -> Result<()> {
        if !self.choice.json {
            return Ok(());
        }
        let text = serde_json::to_string_pretty(document).expect("a JSON value serialises");
        write_stdout(&(text + "\n"))
    }

    /// One line of what is or was done.
    pub fn line(&self, text: &str) {
        if !self.choice.quiet {
            write_stderr(text);
        }
    }

    /// One line for who wants to know more.
    pub fn detail(&self, text: &str) {
        if self.choice.verbose && !self.choice.quiet {
            write_stderr(text);
        }
    }

    pub fn warning(&self, text: &str) {
        self.line(&format!("warning: {text}"));
    }

    /// The error, its hint, and the JSON document of a failed run.
    pub fn error(&self, error: &Error) {
        write_stderr(&format!("error: {error}"));
        if let Some(hint) = error.hint() {
            write_stderr(&format!("hint: {hint}"));
        }
        // The run has failed already; there is no second way to fail.
        let _ = self.document(&json!({ "error": error_document(error) }));
    }

    /// When to show progress. A JSON document is for a program, which is not waiting for a bar.
    #[must_use]
    pub fn progress(&self) -> ProgressChoice {
        match self.choice.progress {
            _ if self.choice.quiet => ProgressChoice::Never,
            ProgressChoice::Auto if self.choice.json => ProgressChoice::Never,
            choice => choice,
        }
    }
}

/// Data that does not arrive is an error, unless the reader has seen enough (`| head`) and went away.
fn write_stdout(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.map_err(Error::io("write", "standard output")),
    }
}

/// A line of talk. A terminal that went away is no error.
pub(super) fn write_stderr(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

fn error_document(error: &Error) -> Json {
    let mut fqn = error.fqn().map(str::to_owned);
    let (mut file, mut expected, mut found) = (None, None, None);
    match error {
        Error::Io { path, .. } => file = Some(path.display().to_string()),
        Error::Missing { path, at, expected: wanted, missing, .. } => {
            file = Some(path.display().to_string());
            fqn = Some(at.clone());
            (expected, found) = (Some(wanted.clone()), Some(format!("missing: {missing}")));
        }
        Error::Malformed { path, at, expected: wanted, found: got } => {
            file = Some(path.display().to_string());
            fqn = Some(at.clone());
            (expected, found) = (Some(wanted.clone()), Some(got.clone()));
        }
        _ => {}
    }
    json!({
        "kind": error.kind(),
        "message": error.to_string(),
        "file": file,
        "fqn": fqn,
        "expected": expected,
        "found": found,
        "hint": error.hint(),
    })
}
