//! Whether somebody who comes may work, by who is there and who was.

use super::lease::{LeaseName, Role};
use super::liveness::Life;
use crate::comm::Part;

/// What the leases of a partial say to somebody who comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Take this generation of the lease.
    Join {
        generation: u32,
    },
    /// Nobody is there, but somebody was: only with `--resume`.
    Resume {
        generation: u32,
    },
    /// Somebody works on the same part, or on other parts than ours.
    Rival(LeaseName),
    Watch,
}

/// Whether `part` can be worked on, where leases are as they are.
pub(super) fn judge(leases: &[(LeaseName, Life)], part: Part) -> Verdict {
    let parts = leases.iter().filter_map(|(name, life)| match name.role {
        Role::Part(other) => Some((other, name, *life)),
        Role::Seal | Role::Restart => None,
    });
    let rivals = parts.clone().filter(|(other, _, _)| other.of != part.of || *other == part);
    if let Some((_, name, _)) = rivals.clone().find(|(_, _, life)| *life == Life::Alive) {
        return Verdict::Rival(*name);
    }
    if rivals.clone().any(|(_, _, life)| life == Life::Unsure) {
        return Verdict::Watch;
    }
    let own = rivals.clone().find(|(other, _, _)| *other == part);
    let generation = own.map_or(0, |(_, name, _)| name.generation.saturating_add(1));
    let has_company = parts.clone().any(|(other, _, life)| other.of == part.of && life != Life::Dead);
    let is_of_others = rivals.clone().any(|(other, _, _)| other.of != part.of) && !has_company;
    if own.is_some() || is_of_others { Verdict::Resume { generation } } else { Verdict::Join { generation } }
}
