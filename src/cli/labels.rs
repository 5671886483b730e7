//! The options that determine the result. If a run resumes an interrupted run, these options must have the values of
//! the interrupted run; otherwise an error names the option whose value has changed.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};

use clap::parser::ValueSource;

use super::{self as cli, normalise_long_options};

/// The names of options that do not change the result. A resumed run may use other values for them.
const WITHOUT_EFFECT_ON_RESULT: [&str; 23] = [
    "backend",
    "bucket_size",
    "check_crc",
    "check_replicas",
    "dry_run",
    // The library itself records whether NCCL reduced any values.
    "fast_reduce",
    "io",
    "json",
    "max_memory",
    "no_sync",
    "no_wait",
    "overwrite",
    "part",
    "parts",
    "progress",
    "quiet",
    "rendezvous",
    "restart",
    "resume",
    "source",
    "threads",
    "verbose",
    "verify",
];

/// Returns the options on the command line that determine the result, each with its value, as the user writes them:
/// `--dtype` and `bf16`. The map also has the key `the verb`, whose value is the name of the verb.
pub fn of_arguments(arguments: impl Iterator<Item = OsString>) -> BTreeMap<String, String> {
    let command = cli::command();
    let Ok(matches) = command.clone().try_get_matches_from(normalise_long_options(arguments)) else {
        return BTreeMap::new();
    };
    let Some((verb, matches)) = matches.subcommand() else { return BTreeMap::new() };
    let options = command.find_subcommand(verb).into_iter().flat_map(clap::Command::get_arguments);
    let labels = options.filter_map(|option| {
        let (id, long) = (option.get_id().as_str(), option.get_long()?);
        if WITHOUT_EFFECT_ON_RESULT.contains(&id) || matches.value_source(id) != Some(ValueSource::CommandLine) {
            return None;
        }
        let values: Vec<String> =
            matches.get_raw(id)?.map(OsStr::to_string_lossy).map(std::borrow::Cow::into_owned).collect();
        // A flag has no value.
        let values = if option.get_action().takes_values() { values.join(" ") } else { String::new() };
        Some((format!("--{long}"), values))
    });
    labels.chain([("the verb".to_owned(), verb.to_owned())]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_decide_on_the_result_are_listed() {
        let labels_of = |line: &str| of_arguments(line.split(' ').map(OsString::from));
        let found = labels_of(
            "dtshard reshard a b --mesh dp=2 --resume --exclude x --exclude=y --keep_names --threads 3 \
                          --source per-rank --bucket-size 2KB",
        );
        let wanted = [("--exclude", "x y"), ("--keep-names", ""), ("--mesh", "dp=2"), ("the verb", "reshard")];
        assert_eq!(found, wanted.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
        let exchange = "--source per-rank --backend cpu --bucket-size 1MB --rendezvous tcp://a:1 --fast-reduce";
        let found = labels_of(&format!("dtshard unshard a b {exchange}"));
        assert_eq!(found, [("the verb", "unshard")].map(|(a, b)| (a.into(), b.into())).into());
        assert_eq!(labels_of("dtshard"), BTreeMap::new());
    }

    #[test]
    fn every_name_without_effect_is_an_option() {
        let command = cli::command();
        let mut known: Vec<String> = Vec::new();
        for part in [&command, command.find_subcommand("reshard").unwrap()] {
            known.extend(part.get_arguments().map(|option| option.get_id().to_string()));
        }
        for id in WITHOUT_EFFECT_ON_RESULT {
            assert!(known.iter().any(|known| known == id), "{id}");
        }
    }
}
