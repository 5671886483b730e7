//! What to say where work cannot begin.

use super::Claim;
use super::destination::Place;
use super::lease::{LeaseName, Role};
use super::partial::Partial;
use super::plan_xattr::Mark;
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

    pub fn unfinished(&self, claim: &Claim) -> Error {
        let start_again = claim.start_again(self);
        Error::usage(
            format!("an earlier run did not finish: {} is in the way", self.partial().display()),
            format!("--resume goes on with what it has done, {start_again}"),
        )
    }

    pub fn of_another(&self, difference: &str, claim: &Claim) -> Error {
        let start_again = claim.start_again(self);
        Error::usage(
            format!(
                "an earlier run did not finish: {} is in the way, and cannot be gone on with: {difference}",
                self.partial().display()
            ),
            format!("{start_again}; --resume needs the same dtshard, SRC and options"),
        )
    }

    /// The destination is there. Whoever comes to go on, or late, is told what is known of it.
    pub fn is_taken(&self, claim: &Claim, mark: &Mark) -> Error {
        let destination = self.destination.display();
        let comes_back = claim.resume || !claim.parts_wait && !claim.part.is_alone();
        let (message, hint) = match mark {
            Mark::Of(_) if comes_back => (
                format!("{destination} exists: it is finished, and of another source, or made with other options"),
                "choose another destination, or replace it with --overwrite",
            ),
            Mark::Nothing if comes_back => (
                format!("{destination} exists, and nothing tells what it was made from"),
                "if it may be finished, `dtshard verify` says whether it is sound, and compares it with SRC where that is \
                 seen whole: some file systems keep no marks. --overwrite replaces it",
            ),
            _ => (format!("{destination} exists"), "choose another destination, or replace it with --overwrite"),
        };
        Error::usage(message, hint)
    }

    pub fn junk(&self, claim: &Claim) -> Error {
        let start_again = claim.start_again(self);
        Error::usage(
            format!(
                "an earlier run did not finish: {} is in the way, and has no plan to go on with",
                self.partial().display()
            ),
            format!("{start_again}; a --resume needs what this version has begun"),
        )
    }
}

impl Claim {
    /// Whether this process, or the first of its launch, may throw away what is there.
    pub(super) fn can_restart(&self) -> bool {
        self.part.is_alone() || self.run.is_some() && self.parts_wait
    }

    fn start_again(&self, place: &Place) -> String {
        if self.can_restart() {
            String::from("--restart throws it away and starts again")
        } else {
            format!("without {} all parts start again", place.partial().display())
        }
    }
}
