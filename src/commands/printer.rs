//! The one door for output: stdout is data, stderr is talk.
//!
//! Text for people is made [`harmless`] on the way out: names in a checkpoint are written by others, and must neither
//! send escape codes to a terminal, nor pass for other names or for lines of ours. JSON documents have the same
//! characters as escapes of JSON.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};

use anstream::{AutoStream, ColorChoice};
use anstyle::{Ansi256Color, AnsiColor, Color, Style};
use clap::error::ErrorKind;
use serde_json::{Value as Json, json};

use super::bar::without_bar;
use crate::cli::{ProgressChoice, TalkArgs};
use dtshard::Span;
use dtshard::error::UsageError;
use dtshard::options::{Launch, Part};
use dtshard::text::{harmless, harmless_json, spell_options};
use dtshard::{Error, Result};

#[derive(Clone, Copy, Debug)]
pub struct Printer {
    choice: TalkArgs,
    part: Part,
    /// Whether standard output is this process's to write to.
    documents: bool,
}

impl Printer {
    #[must_use]
    pub fn new(choice: TalkArgs) -> Self {
        Self { choice, part: Part::alone(), documents: true }
    }

    /// As one of several processes, whose lines may come to one terminal: each says which one it is of, and the first
    /// speaks for all.
    #[must_use]
    pub fn of_launch(self, launch: &Launch) -> Self {
        let first = launch.part.index == 0;
        Self { part: launch.part, documents: first || !launch.launcher.shares_output(), ..self }
    }

    /// Whether what is the same for all processes is this one's to say.
    fn speaks(&self) -> bool {
        !self.choice.quiet && (self.part.index == 0 || self.choice.verbose)
    }

    /// Prints a line to standard error.
    pub(super) fn say(&self, text: &str) {
        self.write_message(None, text);
    }

    /// Prints a line to standard error that begins with its kind: `note: ...`.
    fn say_as(&self, label: Label, text: &str) {
        self.write_message(Some(label), text);
    }

    fn write_message(&self, label: Option<Label>, text: &str) {
        let part = if self.part.is_alone() { String::new() } else { format!("[{}] ", self.part) };
        let is_coloured = AutoStream::choice(&io::stderr()) != ColorChoice::Never;
        let label = label.map_or_else(String::new, |label| label.prefix(is_coloured));
        write_stderr(&(part + &label), &spelled(text));
    }

    #[must_use]
    pub fn json(&self) -> bool {
        self.choice.json
    }

    /// Data for people; the JSON document takes its place where that is asked for. Cells that must stay on their line
    /// are made `harmless` before.
    pub fn data(&self, text: &str) -> Result<()> {
        if self.choice.json || !self.documents {
            return Ok(());
        }
        let lines: Vec<String> = spelled(text).split('\n').map(harmless).collect();
        write_stdout(&lines.join("\n"))
    }

    /// Data for people with colours, where there are any: stdout is a terminal, or `CLICOLOR_FORCE` says so, and
    /// `NO_COLOR` is not set.
    pub fn picture(&self, lines: &[Vec<Span>]) -> Result<()> {
        if self.choice.json {
            return Ok(());
        }
        write_stdout(&paint(lines, AutoStream::choice(&io::stdout()) != ColorChoice::Never))
    }

    /// Columns there are for data: those of the terminal, or `most`.
    #[must_use]
    pub fn columns(most: usize) -> usize {
        terminal_size::terminal_size_of(io::stdout()).map_or(most, |(width, _)| most.min(width.0.into()))
    }

    /// The JSON document of the run, one for all processes that share a standard output.
    pub fn document(&self, document: &Json) -> Result<()> {
        if self.documents { self.any_document(document) } else { Ok(()) }
    }

    fn any_document(&self, document: &Json) -> Result<()> {
        if !self.choice.json {
            return Ok(());
        }
        let text = serde_json::to_string_pretty(document).expect("a JSON value serialises");
        write_stdout(&(harmless_json(&spelled(&text)) + "\n"))
    }

    /// One line of what is or was done.
    pub fn line(&self, text: &str) {
        if self.speaks() {
            self.say(text);
        }
    }

    /// One line of how it ended for this process, which no other says.
    pub fn outcome(&self, text: &str) {
        if !self.choice.quiet {
            self.say(text);
        }
    }

    #[must_use]
    pub fn verbose(&self) -> bool {
        self.choice.verbose
    }

    /// One line for who wants to know more.
    pub fn detail(&self, text: &str) {
        if self.choice.verbose && !self.choice.quiet {
            self.say(text);
        }
    }

    /// Prints what was done, and why the reader may care.
    pub fn note(&self, text: &str) {
        if self.speaks() {
            self.say_as(Label::Note, text);
        }
    }

    /// Prints what to do next.
    pub fn hint(&self, text: &str) {
        if self.speaks() {
            self.say_as(Label::Hint, text);
        }
    }

    /// Prints a warning that all processes have in common.
    pub fn warning(&self, text: &str) {
        if self.speaks() {
            self.say_as(Label::Warning, text);
        }
    }

    /// Prints a warning of this process.
    pub fn own_warning(&self, text: &str) {
        if !self.choice.quiet {
            self.say_as(Label::Warning, text);
        }
    }

    /// The error, its hint, and the JSON document of a failed run.
    pub fn error(&self, error: &Error) {
        self.say_as(Label::Error, &error.to_string());
        if let Some(hint) = error.hint() {
            // Indented lines are ours or pass for none of ours.
            let mut lines = hint.split("\n    ");
            self.say_as(Label::Hint, lines.next().unwrap_or_default());
            lines.for_each(|line| self.say(&format!("    {line}")));
        }
        // The run has failed already; there is no second way to fail.
        let _ = self.any_document(&json!({ "error": error.to_json() }));
    }

    /// What clap has to say instead of running anything, and the exit code: help and version are data, the rest are
    /// errors, which have a JSON document like all others. Those that a launcher starts have one command line, so the
    /// first says what can be done about it, and the others only what is wrong.
    pub fn not_parsed(&self, error: &clap::Error) -> u8 {
        let is_first = self.part.index == 0;
        let print = || {
            // Arguments may be names of files, of which a shell has made a list. Text with colours is not escaped.
            let text = error.render().to_string();
            if text.split('\n').any(|line| harmless(line) != line) {
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

    /// Whether a terminal is this process's to draw on.
    #[must_use]
    pub fn draws(&self) -> bool {
        self.part.index == 0 && io::stderr().is_terminal()
    }

    /// When to show progress. A JSON document is for a program, which is not waiting for a bar.
    #[must_use]
    pub fn progress(&self) -> ProgressChoice {
        match self.choice.progress {
            _ if self.choice.quiet => ProgressChoice::Never,
            ProgressChoice::Auto if !self.speaks() => ProgressChoice::Never,
            ProgressChoice::Auto if self.choice.json => ProgressChoice::Never,
            choice => choice,
        }
    }
}

/// Spells the options that a message of the library names as the command line has them: `options::max_memory` is
/// `--max-memory`.
fn spelled(text: &str) -> Cow<'_, str> {
    spell_options(text, |name| format!("--{}", name.replace('_', "-")))
}

/// Data that does not arrive is an error, unless the reader has seen enough (`| head`) and went away.
fn write_stdout(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.map_err(Error::io("write", "standard output")),
    }
}

/// Writes a line to standard error: `head` as it is, and `text` made harmless. A terminal that went away is no error.
fn write_stderr(head: &str, text: &str) {
    without_bar(|| drop(writeln!(io::stderr().lock(), "{head}{}", harmless(text))));
}

/// Kind of a message. Its colour shows on a terminal, unless `NO_COLOR` is set.
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
                // Grounds are light, whatever the terminal is.
                ground => Style::new().bg_color(ground).fg_color(Some(Color::Ansi256(Ansi256Color(16)))),
            };
            write!(text, "{style}{}{style:#}", harmless(&span.text)).expect("writing to memory");
        }
        text.truncate(text.trim_end_matches(' ').len());
        text.push('\n');
    }
    text
}

/// How to talk where the arguments could not be parsed.
pub fn talk_of_unparsed(arguments: &[OsString]) -> TalkArgs {
    let options = || arguments.iter().skip(1).take_while(|argument| *argument != OsStr::new("--"));
    TalkArgs { json: options().any(|argument| argument == "--json"), ..TalkArgs::default() }
}

/// What clap says, in two: its own words, and its tips; the usage is the tip where there is no other.
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
    fn the_first_of_several_speaks_for_all() {
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
        // Elements of an array have a standard output each.
        assert!(of(1, Launcher::SlurmArray, usual).documents && !of(1, Launcher::Slurm, usual).documents);
    }

    #[test]
    fn label_is_coloured_on_request_only() {
        assert_eq!(Label::Warning.prefix(false), "warning: ");
        assert_eq!(Label::Error.prefix(true), "\u{1b}[1m\u{1b}[31merror:\u{1b}[0m ");
    }

    #[test]
    fn colour_is_all_that_colour_adds() {
        let span = |text: &str, ground| Span { text: text.into(), ground };
        let lines = [vec![span("a", None), span(" 0\u{1b}", Some(75)), span("  ", None)], vec![]];
        assert_eq!(paint(&lines, false), "a 0\\u{1b}\n\n");
        assert_eq!(paint(&lines, true), "a\u{1b}[38;5;16m\u{1b}[48;5;75m 0\\u{1b}\u{1b}[0m\n\n");
    }
}
