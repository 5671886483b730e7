//! What a run would meet at a destination, by one look that changes nothing: for who only wants to know.

use std::path::Path;
use std::time::Instant;

use super::acquire::{check_destination, refuse_folder};
use super::admission::{Verdict, judge};
use super::destination::Place;
use super::lease::LeaseName;
use super::liveness::{Life, Watch};
use super::partial::{Found, Partial};
use super::{Claim, Pace, Plan, Shape, plan_xattr};
use crate::error::{Error, Result};

/// How a run would begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreseen {
    Anew,
    /// With what others do at this moment, or did.
    GoesOn,
    /// Not at all: the destination is there, from the same plan.
    Done,
}

pub(super) fn foresee(
    destination: &Path,
    shape: Shape,
    claim: &Claim,
    plan: &Plan<'_>,
    pace: &Pace,
) -> Result<Foreseen> {
    refuse_folder(destination, shape)?;
    let place = Place::of(destination)?.for_a_look();
    let foreseen = match Found::at(&place.partial(), shape)? {
        Found::Junk | Found::Unclear if !claim.restart => return Err(place.junk(claim)),
        Found::Partial(found) if !found.is_published => meet(&place, &found, claim, plan, pace)?,
        Found::Nothing if claim.takes_what_is_done() && plan_xattr::is(destination, plan.fingerprint) => {
            return Ok(Foreseen::Done);
        }
        _ => Foreseen::Anew,
    };
    check_destination(&place, shape, claim)?;
    Ok(foreseen)
}

fn meet(place: &Place, found: &Partial, claim: &Claim, plan: &Plan<'_>, pace: &Pace) -> Result<Foreseen> {
    let (mut watch, now) = (Watch::new(pace.dead_after), Instant::now());
    let lives: Vec<(LeaseName, Life)> = found.leases.iter().map(|seen| (seen.name, watch.life(seen, now))).collect();
    let is_same = found.plan.is_of(plan);
    if is_same && !claim.restart {
        return match judge(&lives, claim.part) {
            Verdict::Rival(name) => Err(place.another_run(found, name)),
            Verdict::Watch => Err(place.in_doubt()),
            Verdict::Resume { .. } if !claim.resume => Err(place.unfinished(claim)),
            Verdict::Resume { .. } | Verdict::Join { .. } => Ok(Foreseen::GoesOn),
        };
    }
    if let Some((name, _)) = lives.iter().find(|(_, life)| *life == Life::Alive) {
        return Err(place.another_run(found, *name));
    }
    if lives.iter().any(|(_, life)| *life == Life::Unsure) {
        return Err(place.in_doubt());
    }
    if claim.restart {
        return Ok(Foreseen::Anew);
    }
    Err(place.of_another(&found.plan.difference(plan, &place.partial()), claim))
}

impl Place {
    fn in_doubt(&self) -> Error {
        Error::usage(
            format!("{} is in the way, and a run on another node may be at work in it", self.partial().display()),
            "a run watches it for some 20 seconds before it begins; --resume goes on where nobody is",
        )
    }
}
