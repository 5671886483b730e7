//! Parses the arguments with clap. For an option that the verb does not have, suggests the option of the verb with the same
//! meaning, or the verbs that have the option.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, Error, FromArgMatches};

use super::{Cli, command};

/// Options of other tools for the number of ranks.
const NUMBER_OF_RANKS: [&str; 5] = ["--world-size", "--nproc", "--nproc-per-node", "--num-ranks", "--ranks"];

/// Parses the arguments. If an option is unknown to the verb, the error says which option to use, or names the verbs that
/// have the option.
///
/// # Errors
/// Errors of clap, which include `--help` and `--version`.
pub fn parse(arguments: &[OsString]) -> Result<Cli, Error> {
    let mut declared = command();
    let matches = declared.try_get_matches_from_mut(arguments);
    let parsed =
        matches.and_then(|matches| Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut declared)));
    parsed.map_err(|mut error| {
        let option = match (error.kind(), error.get(ContextKind::InvalidArg)) {
            (ErrorKind::UnknownArgument, Some(ContextValue::String(option))) => option.clone(),
            _ => return error,
        };
        // clap suggests passing the option as a value (`-- --option`), but no value of dtshard begins with a hyphen.
        error.remove(ContextKind::Suggested);
        if let Some(tip) = number_of_ranks(arguments, &option).or_else(|| tip_for_mesh(&option, arguments)) {
            error.remove(ContextKind::SuggestedArg);
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
            return error;
        }
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

/// Returns a tip for an option that gives the number of ranks in other tools. Returns `None` for other options, and for verbs
/// that do not write files for a number of ranks.
fn number_of_ranks(arguments: &[OsString], option: &str) -> Option<String> {
    let name = option.split('=').next()?;
    if !NUMBER_OF_RANKS.contains(&name.replace('_', "-").as_str()) {
        return None;
    }
    let texts: Vec<&str> = arguments.iter().filter_map(|argument| argument.to_str()).collect();
    let value =
        texts.iter().zip(texts.iter().skip(1).chain([&""])).find_map(|(text, next)| match text.strip_prefix(name)? {
            "" => Some(*next),
            rest => rest.strip_prefix('='),
        });
    let ranks = value.filter(|value| value.parse::<u32>().is_ok()).unwrap_or("N");
    match texts.iter().find(|text| ["reshard", "flatten"].contains(*text))? {
        &"reshard" => Some(format!("give the number of ranks with --mesh fsdp={ranks}")),
        _ => Some(format!("give the number of ranks with --world-size {ranks}")),
    }
}

/// Returns a tip if the unknown argument is a mesh dim that follows a mesh: `--mesh dp=2 tp=2`.
fn tip_for_mesh(unknown: &str, arguments: &[OsString]) -> Option<String> {
    let is_dim = |text: &str| {
        let (name, size) = text.split_once('=').unwrap_or_default();
        !name.is_empty() && !name.starts_with('-') && size.bytes().all(|byte| byte.is_ascii_digit()) && !size.is_empty()
    };
    let words: Vec<&str> = arguments.iter().filter_map(|argument| argument.to_str()).collect();
    let at = words.iter().position(|word| *word == unknown).filter(|_| is_dim(unknown))?;
    let (option, first) = match words[..at] {
        [.., option @ ("--mesh" | "--src-mesh"), first] => (option, first),
        [.., last] => last.split_once('=').filter(|(option, _)| ["--mesh", "--src-mesh"].contains(option))?,
        [] => return None,
    };
    Some(format!("separate the dims of a mesh with commas, without spaces: {option} {first},{unknown}"))
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
