//! Options that all processes which meet must have alike, since what they do together follows from them: who takes which
//! step, what is compared, and which rounds there are; and options that decide on the result. What is made shows in the plan as
//! well, which is [compared](super::peers::Peers::compare) for itself.

use std::collections::BTreeMap;

use crate::comm::Communicator;
use crate::convert::options::ConvertOptions;
use crate::error::{CommError, Error, Result};

const GIVEN: &str = "it is given";
const NOT_GIVEN: &str = "it is not given";

/// Each by its name, as it would be given.
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

/// Hear from all that they have the same. Collective.
///
/// # Errors
/// `Usage` naming one that does not, the option and both values: at all of them. As [`Communicator::gather`].
pub fn agree(communicator: &impl Communicator, args: &ConvertOptions) -> Result<()> {
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
    Err(Error::Comm(CommError {
        rank: u32::try_from(rank).expect("a rank").into(),
        op: "plan",
        detail: format!("it makes something else than process 0 does{}", differs.unwrap_or_default()),
        hint: Some(String::from("start all processes with the same options, of the same dtshard")),
    }))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::comm::Local;
    use crate::convert::options::{Backend, OnConflict, SourceVisibility};

    fn said(options: [ConvertOptions; 3]) -> Vec<Option<String>> {
        let ranks = Local::fleet(3).into_iter().zip(options).map(|(local, options)| {
            thread::spawn(move || agree(&local, &options).err().map(|error| error.to_string()))
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    #[test]
    fn the_first_that_differs_is_named() {
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
        assert_eq!(said([bucket(64_000_000), bucket(64_000_000), resumes]), [const { None }; 3]);
        let rank0 = with(&|options| options.checks.on_conflict = Some(OnConflict::Rank0));
        let dry_run = with(&|options| options.dry_run = true);
        let cpu = with(&|options| options.exchange.backend = Backend::Cpu);
        let per_rank = || with(&|options| options.exchange.source = SourceVisibility::PerRank);
        let cases = [
            (
                [usual(), usual(), bucket(1_000_000)],
                "process 2 of 3: options::bucket_size: 1000000; at process 0: it is not given",
            ),
            ([usual(), rank0, usual()], "process 1 of 3: options::on_conflict: rank0; at process 0: it is not given"),
            (
                [dry_run, usual(), usual()],
                "process 1 of 3: options::dry_run: it is not given; at process 0: it is given",
            ),
            ([usual(), cpu, per_rank()], "process 1 of 3: options::backend: cpu; at process 0: auto"),
            ([usual(), usual(), per_rank()], "process 2 of 3: options::source: per-rank; at process 0: shared"),
        ];
        for (options, wanted) in cases {
            assert_eq!(said(options), vec![Some(wanted.to_owned()); 3]);
        }
    }
}
