//! Output of the program: data on standard output, messages on standard error.
//!
//! All text passes through [`escape_invisible`], because the names in a checkpoint are untrusted. A name must not send
//! escape codes to a terminal, and must not imitate another name or a message. JSON documents contain such characters
//! as JSON escapes.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use anstream::{AutoStream, ColorChoice};
use anstyle::{Ansi256Color, AnsiColor, Color, Style};
use clap::error::ErrorKind;
use serde_json::{Value as Json, json};

use super::bar::without_bar;
use dtshard::Span;
use dtshard::cli::{ProgressChoice, TalkArgs};
use dtshard::error::UsageError;
use dtshard::options::{Launch, Part};
use dtshard::text::{escape_invisible, escape_invisible_json, spell_options};
use dtshard::{Error, Result};

#[derive(Clone, Copy, Debug)]
pub struct Printer {
    choice: TalkArgs,
    part: Part,
    /// True if this process writes documents and data to standard output. If several processes share a standard output,
    /// only process 0 does so.
    documents: bool,
}

impl Printer {
    #[must_use]
    pub fn new(choice: TalkArgs) -> Self {
        Self { choice, part: Part::alone(), documents: true }
    }

    /// Returns the printer of one process of a launch. The lines of several processes may appear on one terminal, so
    /// each line begins with the number of its process. Only process 0 prints messages that are equal in all processes;
    /// with `-v`, each process prints them.
    #[must_use]
    pub fn of_launch(self, launch: &Launch) -> Self {
        let first = launch.part.index == 0;
        Self { part: launch.part, documents: first || !launch.launcher.shares_output(), ..self }
    }

    /// Returns true if this process prints the messages that are equal in all processes: it is process 0, or the user
    /// gave `-v`. Always false with `-q`.
    fn speaks(&self) -> bool {
        !self.choice.quiet && (self.part.index == 0 || self.choice.verbose)
    }

    /// Prints a line to standard error.
    pub(super) fn say(&self, text: &str) {
        self.write_message(None, text);
    }

    /// Prints a line to standard error that begins with the kind of the message: `note: ...`.
    fn say_as(&self, label: Label, text: &str) {
        self.write_message(Some(label), text);
    }

    fn write_message(&self, label: Option<Label>, text: &str) {
        let part = if self.part.is_alone() { String::new() } else { format!("[{}] ", self.part) };
        let is_coloured = AutoStream::choice(&io::stderr()) != ColorChoice::Never;
        let label = label.map_or_else(String::new, |label| label.prefix(is_coloured));
        write_stderr(&(part + &label), &spelled(text));
    }

    pub fn json(&self) -> bool {
        self.choice.json
    }

    /// Returns true if this process is alone or the first process of its run.
    pub fn is_first(&self) -> bool {
        self.part.index == 0
    }

    /// Prints text for people to standard output. Prints nothing with `--json`, because the JSON document replaces the
    /// text. If processes share a standard output, only process 0 prints.
    pub fn data(&self, text: &str) -> Result<()> {
        if self.choice.json || !self.documents {
            return Ok(());
        }
        let lines: Vec<String> = spelled(text).split('\n').map(escape_invisible).collect();
        write_stdout(&lines.join("\n"))
    }

    /// Prints a drawing to standard output. It is in colour on a terminal and if `CLICOLOR_FORCE` is set, but never if
    /// `NO_COLOR` is set. Prints nothing with `--json`.
    pub fn picture(&self, lines: &[Vec<Span>]) -> Result<()> {
        if self.choice.json {
            return Ok(());
        }
        write_stdout(&paint(lines, AutoStream::choice(&io::stdout()) != ColorChoice::Never))
    }

    /// Returns the number of columns that a drawing may have: the width of the terminal, but at most `most`. Returns
    /// `most` if standard output is no terminal.
    pub fn columns(most: usize) -> usize {
        terminal_size::terminal_size_of(io::stdout()).map_or(most, |(width, _)| most.min(width.0.into()))
    }

    /// Prints the JSON document of the run if `--json` is given. If processes share a standard output, only process 0
    /// prints.
    pub fn document(&self, document: &Json) -> Result<()> {
        if self.documents { self.any_document(document) } else { Ok(()) }
    }

    fn any_document(&self, document: &Json) -> Result<()> {
        if !self.choice.json {
            return Ok(());
        }
        let text = serde_json::to_string_pretty(document).expect("a JSON value serialises");
        write_stdout(&(escape_invisible_json(&spelled(&text)) + "\n"))
    }

    /// Prints a line that is equal in all processes. Only process 0 prints it; with `-v`, each process does.
    pub fn line(&self, text: &str) {
        if self.speaks() {
            self.say(text);
        }
    }

    /// Prints a line about the result of this process. Each process prints its own line.
    pub fn outcome(&self, text: &str) {
        if !self.choice.quiet {
            self.say(text);
        }
    }

    pub fn verbose(&self) -> bool {
        self.choice.verbose
    }

    /// Prints a line if the user gave `-v`.
    pub fn detail(&self, text: &str) {
        if self.choice.verbose && !self.choice.quiet {
            self.say(text);
        }
    }

    /// Prints a note: a fact about the result that is equal in all processes. Only process 0 prints it; with `-v`, each
    /// process does.
    pub fn note(&self, text: &str) {
        if self.speaks() {
            self.say_as(Label::Note, text);
        }
    }

    /// Prints a hint: the next step for the user, which is equal in all processes. Only process 0 prints it; with `-v`,
    /// each process does.
    pub fn hint(&self, text: &str) {
        if self.speaks() {
            self.say_as(Label::Hint, text);
        }
    }

    /// Prints a warning that is equal in all processes. Only process 0 prints it; with `-v`, each process does.
    pub fn warning(&self, text: &str) {
        if self.speaks() {
            self.say_as(Label::Warning, text);
        }
    }

    /// Prints a warning about this process alone. Each process prints its own warnings.
    pub fn own_warning(&self, text: &str) {
        if !self.choice.quiet {
            self.say_as(Label::Warning, text);
        }
    }

    /// Prints an error and its hint, and the JSON document of a failed run if `--json` is given.
    pub fn error(&self, error: &Error) {
        self.say_as(Label::Error, &error.to_string());
        if let Some(hint) = error.hint() {
            // A hint may have several lines; `escape_invisible` would escape the line breaks.
            let mut lines = hint.split("\n    ");
            self.say_as(Label::Hint, lines.next().unwrap_or_default());
            lines.for_each(|line| self.say(&format!("    {line}")));
        }
        // The run has already failed, so an error of printing is ignored.
        let _ = self.any_document(&json!({ "error": error.to_json() }));
    }

    /// Prints the message of clap if clap did not return parsed arguments, and returns the exit code. Help and version
    /// are data on standard output. Any other message is an error, with a JSON document if `--json` is given. All
    /// processes of a launch have the same command line, so process 0 prints the whole text, and the other processes
    /// print only the error.
    pub fn not_parsed(&self, error: &clap::Error) -> u8 {
        let is_first = self.part.index == 0;
        let print = || {
            // Arguments may be file names that a shell expanded, so they are escaped. Text with colours must not be
            // escaped.
            let text = error.render().to_string();
            if text.split('\n').any(|line| escape_invisible(line) != line) {
                text.trim_end().split('\n').for_each(|line| write_stderr("", line));
                return 0;
            }
            match error.print() {
                Err(problem) if problem.kind() != io::ErrorKind::BrokenPipe => 2,
                _ => 0,
            }
        };
        if !error.use_stderr() {
            return if self.documents { print() } else { 0 };
        }
        let (message, hint) = usage_text(error);
        if is_first {
            print();
        } else {
            self.say_as(Label::Error, &message);
        }
        let _ = self.document(&json!({ "error": Error::from(UsageError::new(message, hint)).to_json() }));
        2
    }

    /// Returns true if this process may draw a progress bar: it is process 0, and standard error is a terminal.
    pub fn draws(&self) -> bool {
        self.part.index == 0 && io::stderr().is_terminal()
    }

    /// Returns when to show progress: never with `-q`, otherwise as the user chose. If the user did not choose, only
    /// process 0 shows progress, or each process with `-v`. With `--json`, no process then shows progress, because a
    /// program reads the output.
    pub fn progress(&self) -> ProgressChoice {
        match self.choice.progress {
            _ if self.choice.quiet => ProgressChoice::Never,
            ProgressChoice::Auto if !self.speaks() => ProgressChoice::Never,
            ProgressChoice::Auto if self.choice.json => ProgressChoice::Never,
            choice => choice,
        }
    }
}

/// Replaces the option names of the library in a message by the names on the command line: `options::max_memory`
/// becomes `--max-memory`.
pub(super) fn spelled(text: &str) -> Cow<'_, str> {
    spell_options(text, |name| format!("--{}", name.replace('_', "-")))
}

/// Writes to standard output. It is not an error if the reader has closed the pipe (`| head`).
fn write_stdout(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.map_err(Error::io("write", "standard output")),
    }
}

/// Writes a line to standard error: `head` unchanged, and then `text` with escaped control characters. It is not an
/// error if the terminal was closed.
fn write_stderr(head: &str, text: &str) {
    without_bar(|| drop(writeln!(io::stderr().lock(), "{head}{}", escape_invisible(text))));
}

/// The kind of a message. Its name, such as `note`, is coloured on a terminal, unless `NO_COLOR` is set.
#[derive(Clone, Copy)]
enum Label {
    Error,
    Warning,
    Note,
    Hint,
}

impl Label {
    fn prefix(self, is_coloured: bool) -> String {
        let (name, colour) = match self {
            Self::Error => ("error", AnsiColor::Red),
            Self::Warning => ("warning", AnsiColor::Yellow),
            Self::Note => ("note", AnsiColor::Cyan),
            Self::Hint => ("hint", AnsiColor::Green),
        };
        let style = if is_coloured { colour.on_default().bold() } else { Style::new() };
        format!("{style}{name}:{style:#} ")
    }
}

fn paint(lines: &[Vec<Span>], coloured: bool) -> String {
    let mut text = String::new();
    for line in lines {
        for span in line {
            let ground = span.ground.filter(|_| coloured).map(|colour| Color::Ansi256(Ansi256Color(colour)));
            let style = match ground {
                None => Style::new(),
                // The backgrounds of drawings are light on every terminal, so the text is black.
                ground => Style::new().bg_color(ground).fg_color(Some(Color::Ansi256(Ansi256Color(16)))),
            };
            write!(text, "{style}{}{style:#}", escape_invisible(&span.text)).expect("writing to memory");
        }
        text.truncate(text.trim_end_matches(' ').len());
        text.push('\n');
    }
    text
}

/// Returns the message options for arguments that could not be parsed: `json` is true if the arguments contain
/// `--json`, and all other options have their defaults.
pub fn talk_of_unparsed(arguments: &[OsString]) -> TalkArgs {
    let options = || arguments.iter().skip(1).take_while(|argument| *argument != OsStr::new("--"));
    TalkArgs { json: options().any(|argument| argument == "--json"), ..TalkArgs::default() }
}

/// Splits an error of clap into a message and a hint. If clap has no tip, the hint is the usage text.
fn usage_text(error: &clap::Error) -> (String, Option<String>) {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return (String::from("no verb is given"), Some(String::from("`dtshard --help` lists the verbs")));
    }
    let text = error.render().to_string();
    let mut message = Vec::new();
    let (mut tips, mut usage) = (Vec::new(), None);
    let mut beginning = true;
    for line in text.lines().map(str::trim) {
        if line.is_empty() {
            beginning = false;
        } else if beginning {
            message.push(line.strip_prefix("error: ").unwrap_or(line));
        } else if let Some(tip) = line.strip_prefix("tip: ") {
            tips.push(tip);
        } else if let Some(line) = line.strip_prefix("Usage: ") {
            usage = Some(format!("usage: {line}"));
        }
    }
    let hint = if tips.is_empty() { usage } else { Some(tips.join("; ")) };
    (message.join(" "), hint)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dtshard::options::Launcher;

    #[test]
    fn first_process_prints_what_all_have_in_common() {
        let of = |index, launcher, choice: TalkArgs| {
            Printer::new(choice).of_launch(&Launch { part: Part { index, of: 4 }, launcher, ..Launch::alone() })
        };
        let (usual, verbose) = (TalkArgs::default(), TalkArgs { verbose: true, ..TalkArgs::default() });
        let quiet = TalkArgs { quiet: true, verbose: true, ..TalkArgs::default() };
        assert!(Printer::new(usual).speaks() && of(0, Launcher::Slurm, usual).speaks());
        assert!(!of(1, Launcher::Slurm, usual).speaks() && of(1, Launcher::Slurm, verbose).speaks());
        assert!(!of(0, Launcher::Slurm, quiet).speaks());
        assert_eq!(of(1, Launcher::Slurm, usual).progress(), ProgressChoice::Never);
        let always = TalkArgs { progress: ProgressChoice::Always, ..usual };
        assert_eq!(of(1, Launcher::Slurm, always).progress(), ProgressChoice::Always);
        // The processes of a Slurm array have separate standard outputs.
        assert!(of(1, Launcher::SlurmArray, usual).documents && !of(1, Launcher::Slurm, usual).documents);
    }

    #[test]
    fn label_is_coloured_on_request_only() {
        assert_eq!(Label::Warning.prefix(false), "warning: ");
        assert_eq!(Label::Error.prefix(true), "\u{1b}[1m\u{1b}[31merror:\u{1b}[0m ");
    }

    #[test]
    fn coloured_drawing_has_the_text_of_the_plain_one() {
        let span = |text: &str, ground| Span { text: text.into(), ground };
        let lines = [vec![span("a", None), span(" 0\u{1b}", Some(75)), span("  ", None)], vec![]];
        assert_eq!(paint(&lines, false), "a 0\\u{1b}\n\n");
        assert_eq!(paint(&lines, true), "a\u{1b}[38;5;16m\u{1b}[48;5;75m 0\\u{1b}\u{1b}[0m\n\n");
    }
}
