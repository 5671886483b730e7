//! What to say where work cannot begin.

use super::lease::{LeaseName, Role};
use super::place::Place;
use super::plan::Partial;
use crate::comm::Part;
use crate::error::Error;

impl Place {
    pub fn another_run(&self, found: &Partial, name: LeaseName) -> Error {
        let record = found.leases.iter().find(|seen| seen.name == name).and_then(|seen| seen.record.as_ref());
        let who = record.map_or(String::new(), |record| {
            let Role::Part(Part { index, of }) = name.role else { return String::new() };
            let part = if of == 1 { String::new() } else { format!(", part {index} of {of}") };
            format!(" ({}{part})", record.process)
        });
        Error::usage(
            format!("another run is writing {}{who}", self.destination.display()),
            format!("wait for it, or stop it first; it works in {}", self.partial().display()),
        )
    }

    pub fn unfinished(&self) -> Error {
        Error::usage(
            format!("an earlier run did not finish: {} is in the way", self.partial().display()),
            "--resume goes on with what it has done, --restart throws it away and starts again",
        )
    }

    pub fn of_another(&self, difference: &str) -> Error {
        Error::usage(
            format!(
                "an earlier run did not finish: {} is in the way, and cannot be gone on with: {difference}",
                self.partial().display()
            ),
            "--restart throws it away and starts again; --resume needs the same dtshard, SRC and options",
        )
    }

    pub fn junk(&self) -> Error {
        Error::usage(
            format!(
                "an earlier run did not finish: {} is in the way, and has no plan to go on with",
                self.partial().display()
            ),
            "--restart throws it away and starts again; a --resume needs what this version has begun",
        )
    }
}
