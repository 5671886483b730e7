//! Check that all connected processes have the same options.
//!
//! Two kinds of options must be equal on all processes: options that determine the collective steps (which steps run,
//! which replicas are compared, how long rounds are), and options that determine the result. Later, the processes also
//! [compare](super::Peers::compare) their plans.

use std::collections::BTreeMap;

use crate::comm::Communicator;
use crate::convert::options::ConvertOptions;
use crate::error::{CommError, Error, Result};

const GIVEN: &str = "given";
const NOT_GIVEN: &str = "not given";

/// Returns the names and values of the options that determine the collective steps.
fn options(args: &ConvertOptions) -> [(&'static str, String); 6] {
    let flag = |is_given: bool| if is_given { GIVEN } else { NOT_GIVEN }.to_owned();
    let (exchange, checks) = (&args.exchange, &args.checks);
    [
        ("options::source", exchange.source.name().to_owned()),
        ("options::backend", exchange.backend.name().to_owned()),
        ("options::bucket_size", exchange.bucket_size.map_or_else(|| flag(false), |asked| asked.to_string())),
        ("options::on_conflict", checks.on_conflict.map_or_else(|| flag(false), |choice| choice.name().to_owned())),
        ("options::check_replicas", flag(checks.check_replicas)),
        ("options::dry_run", flag(args.dry_run)),
    ]
}

/// Checks that all processes have the same options for collective steps. Collective.
///
/// # Errors
/// `Usage`, on every process, with the first process whose options differ from those of process 0, the option, and the
/// values on these two processes; and the errors of [`Communicator::gather`].
pub fn agree(communicator: &impl Communicator, args: &ConvertOptions) -> Result<()> {
    let options = options(args);
    let own: Vec<&str> = options.iter().map(|(_, value)| value.as_str()).collect();
    let messages = communicator.gather(own.join("\n").as_bytes())?;
    let messages: Vec<String> = messages.iter().map(|words| String::from_utf8_lossy(words).into_owned()).collect();
    let differing = messages.iter().enumerate().find_map(|(rank, words)| {
        let both = options.iter().zip(words.lines().zip(messages[0].lines()));
        let ((name, _), values) = { both }.find(|(_, (value, first))| value != first)?;
        Some((rank, *name, values))
    });
    let Some((rank, name, (value, first))) = differing else { return Ok(()) };
    // No process ends before all have received the options.
    communicator.barrier()?;
    Err(Error::usage(
        format!("{name} differs between processes: process {rank} of {}: {value}; process 0: {first}", messages.len()),
        "start all processes with the same options",
    ))
}

/// Checks that all processes have the same `options`, which determine the result. Collective.
///
/// # Errors
/// `Comm`, on every process, with the first process whose options differ from those of process 0, the option, and the
/// values on these two processes; and the errors of [`Communicator::gather`].
pub fn compare(communicator: &impl Communicator, options: &BTreeMap<String, String>) -> Result<()> {
    let own = serde_json::to_vec(options).expect("a map of words");
    let messages = communicator.gather(&own)?;
    let Some(rank) = messages.iter().position(|other| *other != messages[0]) else { return Ok(()) };
    // No process ends before all have received the options.
    communicator.barrier()?;
    // Another version of dtshard may send another encoding, which is read as an empty list of options.
    let options =
        |rank: usize| -> BTreeMap<String, String> { serde_json::from_slice(&messages[rank]).unwrap_or_default() };
    let (first, other) = (options(0), options(rank));
    let value = |options: &BTreeMap<String, String>, name: &str| match options.get(name).map(String::as_str) {
        None => NOT_GIVEN.to_owned(),
        Some("") => GIVEN.to_owned(),
        Some(value) => value.to_owned(),
    };
    let name = first.keys().chain(other.keys()).find(|name| first.get(*name) != other.get(*name));
    let differs = name.map(|name| format!(": {name}: {}; at process 0: {}", value(&other, name), value(&first, name)));
    Err(Error::Comm(CommError {
        rank: u32::try_from(rank).expect("a rank").into(),
        op: "plan",
        detail: format!("it differs from the plan of process 0{}", differs.unwrap_or_default()),
        hint: Some(String::from("start all processes with the same options and the same version of dtshard")),
    }))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::comm::Local;
    use crate::convert::options::{Backend, OnConflict, SourceVisibility};

    fn errors_of(options: [ConvertOptions; 3]) -> Vec<Option<String>> {
        let ranks = Local::fleet(3).into_iter().zip(options).map(|(local, options)| {
            thread::spawn(move || agree(&local, &options).err().map(|error| error.to_string()))
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    #[test]
    fn error_names_the_first_process_that_differs() {
        let with = |change: &dyn Fn(&mut ConvertOptions)| {
            let mut options = ConvertOptions::default();
            change(&mut options);
            options
        };
        let usual = || ConvertOptions::default();
        let bucket = |bytes| with(&|options| options.exchange.bucket_size = Some(bytes));
        let resumes = with(&|options| {
            options.exchange.bucket_size = Some(64_000_000);
            options.execute.resume = true;
        });
        assert_eq!(errors_of([bucket(64_000_000), bucket(64_000_000), resumes]), [const { None }; 3]);
        let rank0 = with(&|options| options.checks.on_conflict = Some(OnConflict::Rank0));
        let dry_run = with(&|options| options.dry_run = true);
        let cpu = with(&|options| options.exchange.backend = Backend::Cpu);
        let per_rank = || with(&|options| options.exchange.source = SourceVisibility::PerRank);
        let cases = [
            (
                [usual(), usual(), bucket(1_000_000)],
                "options::bucket_size differs between processes: process 2 of 3: 1000000; process 0: not given",
            ),
            (
                [usual(), rank0, usual()],
                "options::on_conflict differs between processes: process 1 of 3: rank0; process 0: not given",
            ),
            (
                [dry_run, usual(), usual()],
                "options::dry_run differs between processes: process 1 of 3: not given; process 0: given",
            ),
            (
                [usual(), cpu, per_rank()],
                "options::backend differs between processes: process 1 of 3: cpu; process 0: auto",
            ),
            (
                [usual(), usual(), per_rank()],
                "options::source differs between processes: process 2 of 3: per-rank; process 0: shared",
            ),
        ];
        for (options, wanted) in cases {
            assert_eq!(errors_of(options), vec![Some(wanted.to_owned()); 3]);
        }
    }
}
