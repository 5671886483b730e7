//! Load: what a round, or a part of it, takes of each process.
//!
//! Counts bytes. Invariant: all processes know the loads of all, so they decide alike what follows from them.

use super::relays;

/// What goes over the wire in one hop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wire {
    /// What is told all others is sent once.
    pub sent: u64,
    /// Of what is sent: it lies with what is received.
    pub told: u64,
    pub received: u64,
}

impl Wire {
    fn plus(self, other: Self) -> Self {
        Self { sent: self.sent + other.sent, told: self.told + other.told, received: self.received + other.received }
    }

    /// Both ways are used at a time.
    fn longer(self) -> u64 {
        self.sent.max(self.received)
    }
}

/// What one process has in memory for a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    pub read: u64,
    /// By hop.
    pub first: Wire,
    pub second: Wire,
    /// Values, and the summands of those that are made here.
    pub unpacked: u64,
    /// Of summands that NCCL reduces those for values that come here: they lie with what is sent.
    pub kept: u64,
}

impl Load {
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.first.sent + self.second.sent
    }

    #[must_use]
    pub fn received(&self) -> u64 {
        self.first.received + self.second.received
    }

    /// The longest buffer that it takes.
    #[must_use]
    pub fn largest(&self) -> u64 {
        let Wire { sent, told, received } = self.first.plus(self.second);
        self.read.max(sent + self.kept).max(received + told).max(self.unpacked)
    }

    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            read: self.read + other.read,
            first: self.first.plus(other.first),
            second: self.second.plus(other.second),
            unpacked: self.unpacked + other.unpacked,
            kept: self.kept + other.kept,
        }
    }
}

/// Loads of all ranks, where readers send everything themselves and where [relays] pass it on.
#[derive(Clone, Debug)]
pub struct Loads {
    pub direct: Vec<Load>,
    pub relayed: Vec<Load>,
}

impl Loads {
    #[must_use]
    pub fn none(ranks: usize) -> Self {
        let none = || vec![Load::default(); ranks];
        Self { direct: none(), relayed: none() }
    }

    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let sums =
            |ones: &[Load], others: &[Load]| ones.iter().zip(others).map(|(one, other)| one.plus(*other)).collect();
        Self { direct: sums(&self.direct, &other.direct), relayed: sums(&self.relayed, &other.relayed) }
    }

    /// Whether relays are worth their hop.
    #[must_use]
    pub fn relays_pay(&self) -> bool {
        relays::pay(time(&self.direct), time(&self.relayed))
    }

    /// As it is to go.
    #[must_use]
    pub fn best(&self) -> &[Load] {
        if self.relays_pay() { &self.relayed } else { &self.direct }
    }

    #[must_use]
    pub fn into_best(self) -> Vec<Load> {
        if self.relays_pay() { self.relayed } else { self.direct }
    }
}

/// How long it takes, in bytes of the busiest rank: one hop comes behind the other.
fn time(loads: &[Load]) -> u64 {
    let busiest = |of: fn(&Load) -> Wire| loads.iter().map(|load| of(load).longer()).max().unwrap_or(0);
    busiest(|load| load.first) + busiest(|load| load.second)
}
