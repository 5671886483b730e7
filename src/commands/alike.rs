//! Options that all processes which meet must have alike, since what they do together follows from them: who takes which
//! step, what is compared, and which rounds there are; and options that decide on the result. What is made shows in the plan as
//! well, which is [compared](super::peers::Peers::compare) for itself.

use std::collections::BTreeMap;

use clap::ValueEnum;

use crate::cli::ConvertArgs;
use dtshard::comm::Communicator;
use dtshard::error::{Error, Result};

const GIVEN: &str = "it is given";
const NOT_GIVEN: &str = "it is not given";

/// Each by its name, as it would be given.
fn options(args: &ConvertArgs) -> [(&'static str, String); 6] {
    fn word(choice: &impl ValueEnum) -> String {
        choice.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
    let flag = |is_given: bool| if is_given { GIVEN } else { NOT_GIVEN }.to_owned();
    let (exchange, checks) = (&args.exchange, &args.checks);
    [
        ("--source", word(&exchange.source)),
        ("--backend", word(&exchange.backend)),
        ("--bucket-size", exchange.bucket_size.map_or_else(|| flag(false), |asked| asked.0.to_string())),
        ("--on-conflict", checks.on_conflict.as_ref().map_or_else(|| flag(false), word)),
        ("--check-replicas", flag(checks.check_replicas)),
        ("--dry-run", flag(args.destination.dry_run)),
    ]
}

/// Hear from all that they have the same. Collective.
///
/// # Errors
/// `Usage` naming one that does not, the option and both values: at all of them. As [`Communicator::gather`].
pub fn agree(communicator: &impl Communicator, args: &ConvertArgs) -> Result<()> {
    let options = options(args);
    let own: Vec<&str> = options.iter().map(|(_, value)| value.as_str()).collect();
    let said = communicator.gather(own.join("\n").as_bytes())?;
    let said: Vec<String> = said.iter().map(|words| String::from_utf8_lossy(words).into_owned()).collect();
    let differing = said.iter().enumerate().find_map(|(rank, words)| {
        let both = options.iter().zip(words.lines().zip(said[0].lines()));
        let ((name, _), values) = { both }.find(|(_, (value, first))| value != first)?;
        Some((rank, *name, values))
    });
    let Some((rank, name, (value, first))) = differing else { return Ok(()) };
    // All have heard it before one goes.
    communicator.barrier()?;
    Err(Error::usage(
        format!("process {rank} of {}: {name}: {value}; at process 0: {first}", said.len()),
        "start all processes with the same options",
    ))
}

/// Checks that all processes were given the same options that decide on the result. Collective.
///
/// # Errors
/// `Comm` naming the first process that differs, the option and both values: at all of them. As [`Communicator::gather`].
pub fn compare(communicator: &impl Communicator, told: &BTreeMap<String, String>) -> Result<()> {
    let own = serde_json::to_vec(told).expect("a map of words");
    let said = communicator.gather(&own)?;
    let Some(rank) = said.iter().position(|other| *other != said[0]) else { return Ok(()) };
    // All have heard it before one goes.
    communicator.barrier()?;
    // A process of another dtshard may say it in another way.
    let told = |rank: usize| -> BTreeMap<String, String> { serde_json::from_slice(&said[rank]).unwrap_or_default() };
    let (first, other) = (told(0), told(rank));
    let value = |told: &BTreeMap<String, String>, name: &str| match told.get(name).map(String::as_str) {
        None => NOT_GIVEN.to_owned(),
        Some("") => GIVEN.to_owned(),
        Some(value) => value.to_owned(),
    };
    let name = first.keys().chain(other.keys()).find(|name| first.get(*name) != other.get(*name));
    let differs = name.map(|name| format!(": {name}: {}; at process 0: {}", value(&other, name), value(&first, name)));
    Err(Error::Comm {
        rank: u32::try_from(rank).expect("a rank").into(),
        op: "plan",
        detail: format!("it makes something else than process 0 does{}", differs.unwrap_or_default()),
        hint: Some(String::from("start all processes with the same options, of the same dtshard")),
    })
}

#[cfg(test)]
mod tests {
    use std::thread;

    use clap::Parser;

    use super::*;
    use crate::cli::Cli;
    use dtshard::comm::Local;

    fn said(lines: [&'static str; 3]) -> Vec<Option<String>> {
        let ranks = Local::fleet(3).into_iter().zip(lines).map(|(local, line)| {
            thread::spawn(move || {
                let words = "dtshard consolidate src dst".split(' ').chain(line.split_whitespace());
                let cli = Cli::parse_from(words);
                agree(&local, cli.command.convert().unwrap()).err().map(|error| error.to_string())
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    #[test]
    fn the_first_that_differs_is_named() {
        assert_eq!(
            said(["--bucket-size 64MB -v", "--bucket-size 64000000", "--bucket-size 64MB --resume"]),
            [const { None }; 3]
        );
        let cases = [
            (["", "", "--bucket-size 1MB"], "process 2 of 3: --bucket-size: 1000000; at process 0: it is not given"),
            (["", "--on-conflict rank0", ""], "process 1 of 3: --on-conflict: rank0; at process 0: it is not given"),
            (["--dry-run", "", ""], "process 1 of 3: --dry-run: it is not given; at process 0: it is given"),
            (
                ["", "--backend cpu --dry-run", "--source per-rank"],
                "process 1 of 3: --backend: cpu; at process 0: auto",
            ),
            (["", "", "--source per-rank"], "process 2 of 3: --source: per-rank; at process 0: shared"),
        ];
        for (lines, wanted) in cases {
            assert_eq!(said(lines), vec![Some(wanted.to_owned()); 3]);
        }
    }
}
