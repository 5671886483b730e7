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

/// Loads of all ranks. There is one of a round.
#[derive(Debug)]
pub struct Loads(Vec<Load>);

/// Loads of the ranks that have any, ascending. There are as many as drafts, in each of which few take part.
#[derive(Debug, Default)]
pub struct PartLoads(Box<[(u32, Load)]>);

impl Loads {
    #[must_use]
    pub fn none(ranks: usize) -> Self {
        Self(vec![Load::default(); ranks])
    }

    pub fn add(&mut self, part: &PartLoads) {
        for (rank, load) in &part.0 {
            let sum = &mut self.0[*rank as usize];
            *sum = sum.plus(*load);
        }
    }

    /// Undo [`Loads::add`].
    pub fn take_away(&mut self, part: &PartLoads) {
        for (rank, load) in &part.0 {
            let sum = &mut self.0[*rank as usize];
            *sum = sum.less(*load);
        }
    }

    /// The longest buffer that anybody takes.
    #[must_use]
    pub fn longest(&self) -> u64 {
        self.0.iter().map(Load::largest).max().unwrap_or(0)
    }

    /// By rank.
    #[must_use]
    pub fn into_ranks(self) -> Vec<Load> {
        self.0
    }
}

impl PartLoads {
    /// Those of all ranks that have any.
    #[must_use]
    pub fn new(all: &[Load]) -> Self {
        Self((0..).zip(all.iter().copied()).filter(|(_, load)| *load != Load::default()).collect())
    }

    /// As [`Loads::longest`].
    #[must_use]
    pub fn longest(&self) -> u64 {
        self.0.iter().map(|(_, load)| load.largest()).max().unwrap_or(0)
    }
}
