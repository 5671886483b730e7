//! Load: what a round, or a part of it, takes of each process.
//!
//! Counts bytes. Invariant: all processes know the loads of all, so they decide alike what follows from them.

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

    fn less(self, other: Self) -> Self {
        Self { sent: self.sent - other.sent, told: self.told - other.told, received: self.received - other.received }
    }

    /// Both directions are used at a time.
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

    fn less(self, other: Self) -> Self {
        Self {
            read: self.read - other.read,
            first: self.first.less(other.first),
            second: self.second.less(other.second),
            unpacked: self.unpacked - other.unpacked,
            kept: self.kept - other.kept,
        }
    }
}

/// How bytes go to those that need them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Readers send everything themselves.
    Direct,
    /// Relays pass it on.
    Relayed,
}

/// What one process has by either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ways {
    pub direct: Load,
    pub relayed: Load,
}

impl Ways {
    fn by(self, way: Way) -> Load {
        match way {
            Way::Direct => self.direct,
            Way::Relayed => self.relayed,
        }
    }
}

/// Loads of all ranks. There is one of a round.
#[derive(Debug)]
pub struct Loads(Vec<Ways>);

/// Loads of the ranks that have any, ascending. There are as many as drafts, in each of which few take part.
#[derive(Debug, Default)]
pub struct PartLoads(Box<[(u32, Ways)]>);

impl Loads {
    #[must_use]
    pub fn none(ranks: usize) -> Self {
        Self(vec![Ways::default(); ranks])
    }

    pub fn add(&mut self, part: &PartLoads) {
        for (rank, ways) in &part.0 {
            let sum = &mut self.0[*rank as usize];
            *sum = Ways { direct: sum.direct.plus(ways.direct), relayed: sum.relayed.plus(ways.relayed) };
        }
    }

    /// Undo [`Loads::add`].
    pub fn take_away(&mut self, part: &PartLoads) {
        for (rank, ways) in &part.0 {
            let sum = &mut self.0[*rank as usize];
            *sum = Ways { direct: sum.direct.less(ways.direct), relayed: sum.relayed.less(ways.relayed) };
        }
    }

    /// The longest buffer that anybody takes, as it is to go.
    #[must_use]
    pub fn longest(&self) -> u64 {
        longest(self.0.iter().copied())
    }

    /// How it is to go, and the loads that has.
    #[must_use]
    pub fn settle(self) -> (Vec<Load>, Way) {
        let way = best(self.0.iter().copied());
        (self.by(way), way)
    }

    #[must_use]
    pub fn by(self, way: Way) -> Vec<Load> {
        self.0.into_iter().map(|ways| ways.by(way)).collect()
    }
}

impl PartLoads {
    /// Of what all ranks have.
    #[must_use]
    pub fn new(direct: &[Load], relayed: &[Load]) -> Self {
        let all = direct.iter().zip(relayed).map(|(direct, relayed)| Ways { direct: *direct, relayed: *relayed });
        Self((0..).zip(all).filter(|(_, ways)| *ways != Ways::default()).collect())
    }

    /// As [`Loads::longest`].
    #[must_use]
    pub fn longest(&self) -> u64 {
        longest(self.0.iter().map(|(_, ways)| *ways))
    }
}

fn longest(all: impl Iterator<Item = Ways> + Clone) -> u64 {
    let way = best(all.clone());
    all.map(|ways| ways.by(way).largest()).max().unwrap_or(0)
}

/// Whether relays are worth their hop.
fn best(all: impl Iterator<Item = Ways> + Clone) -> Way {
    let time = |way: Way| time(all.clone().map(|ways| ways.by(way)));
    if pay(time(Way::Direct), time(Way::Relayed)) { Way::Relayed } else { Way::Direct }
}

/// Whether it is worth a hop that something takes so long, and not so long.
fn pay(direct: u64, relayed: u64) -> bool {
    relayed < direct - direct / 8
}

/// How long it takes, in bytes of the busiest rank: one hop comes behind the other.
fn time(loads: impl Iterator<Item = Load>) -> u64 {
    let busiest =
        |(first, second): (u64, u64), load: Load| (first.max(load.first.longer()), second.max(load.second.longer()));
    let (first, second) = loads.fold((0, 0), busiest);
    first + second
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hop_has_to_be_won() {
        assert!(pay(800, 699) && !pay(800, 700) && !pay(0, 0));
    }
}
