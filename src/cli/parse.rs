//! Parses the arguments with clap. For an option that the verb does not have, suggests the verbs that have the option.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, Error, FromArgMatches};

use super::{Cli, command};

/// Parses the arguments. If an option is unknown to the verb, the error names the verbs that have the option.
///
/// # Errors
/// Errors of clap, which include `--help` and `--version`.
pub fn parse(arguments: &[std::ffi::OsString]) -> Result<Cli, Error> {
    let mut declared = command();
    let matches = declared.try_get_matches_from_mut(arguments);
    let parsed =
        matches.and_then(|matches| Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut declared)));
    parsed.map_err(|mut error| {
        let option = match (error.kind(), error.get(ContextKind::InvalidArg)) {
            (ErrorKind::UnknownArgument, Some(ContextValue::String(option))) => option.clone(),
            _ => return error,
        };
        let verbs = verbs_with(&option);
        if let Some(((last, others), name)) = verbs.split_last().zip(option.split('=').next()) {
            let verbs = if others.is_empty() { last.clone() } else { format!("{} and {last}", others.join(", ")) };
            // The user does not mean another option with a similar name.
            error.remove(ContextKind::SuggestedArg);
            let tip = format!("{name} is an option of {verbs}");
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
        }
        error
    })
}

fn verbs_with(option: &str) -> Vec<String> {
    let Some(name) = option.strip_prefix("--") else { return Vec::new() };
    let is_it = |arg: &Arg| arg.get_long() == Some(name) && !arg.is_hide_set();
    let cli = command();
    cli.get_subcommands()
        .filter(|verb| verb.get_arguments().any(is_it))
        .map(Command::get_name)
        .map(String::from)
        .collect()
}
