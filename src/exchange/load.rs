//! Load: the memory that a round, or a part of a round, needs on each process. All sizes are in bytes. Invariant: all
//! processes know the loads of all processes, so that all make the same decisions.

/// The bytes that one process sends and receives in one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireBytes {
    /// All sent bytes. Bytes that are sent by an all-gather count once.
    pub sent: u64,
    /// The part of the sent bytes that is sent by an all-gather. These bytes need space in the sender's incoming buffer
    /// as well.
    pub all_gathered: u64,
    /// All received bytes.
    pub received: u64,
}

impl WireBytes {
    fn plus(self, other: Self) -> Self {
        Self {
            sent: self.sent + other.sent,
            all_gathered: self.all_gathered + other.all_gathered,
            received: self.received + other.received,
        }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            sent: self.sent - other.sent,
            all_gathered: self.all_gathered - other.all_gathered,
            received: self.received - other.received,
        }
    }
}

/// The memory that one process needs for a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// The bytes that are read into the stage.
    pub read: u64,
    /// The bytes of the first phase, including NCCL reductions.
    pub first_phase: WireBytes,
    /// The bytes of the second phase.
    pub second_phase: WireBytes,
    /// The bytes of the unpacked buffer: values, and the partial values that this process reduces.
    pub unpacked: u64,
    /// This process's own partial values of NCCL reductions whose root is this process. They need space in the outgoing
    /// buffer.
    pub own_partial_values: u64,
}

impl Load {
    /// Returns the bytes that are sent in both phases.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.first_phase.sent + self.second_phase.sent
    }

    /// Returns the bytes that are received in both phases.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.first_phase.received + self.second_phase.received
    }

    /// Returns the length of the largest buffer.
    #[must_use]
    pub fn largest_buffer(&self) -> u64 {
        let WireBytes { sent, all_gathered, received } = self.first_phase.plus(self.second_phase);
        self.read.max(sent + self.own_partial_values).max(received + all_gathered).max(self.unpacked)
    }

    /// Returns the sum of two loads.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            read: self.read + other.read,
            first_phase: self.first_phase.plus(other.first_phase),
            second_phase: self.second_phase.plus(other.second_phase),
            unpacked: self.unpacked + other.unpacked,
            own_partial_values: self.own_partial_values + other.own_partial_values,
        }
    }

    fn less(self, other: Self) -> Self {
        Self {
            read: self.read - other.read,
            first_phase: self.first_phase.minus(other.first_phase),
            second_phase: self.second_phase.minus(other.second_phase),
            unpacked: self.unpacked - other.unpacked,
            own_partial_values: self.own_partial_values - other.own_partial_values,
        }
    }
}

/// The loads of all ranks. A round has one such value.
#[derive(Debug)]
pub struct Loads(Vec<Load>);

/// The loads of the ranks that take part in a transfer plan, ascending by rank. A round has many plans, but few ranks
/// take part in each.
#[derive(Debug, Default)]
pub struct PartLoads(Box<[(u32, Load)]>);

impl Loads {
    /// Returns loads of 0 bytes.
    #[must_use]
    pub fn zero(ranks: usize) -> Self {
        Self(vec![Load::default(); ranks])
    }

    /// Adds the loads of a transfer plan.
    pub fn add(&mut self, part: &PartLoads) {
        for (rank, load) in &part.0 {
            let sum = &mut self.0[*rank as usize];
            *sum = sum.plus(*load);
        }
    }

    /// Subtracts the loads of a transfer plan that was added before.
    pub fn subtract(&mut self, part: &PartLoads) {
        for (rank, load) in &part.0 {
            let sum = &mut self.0[*rank as usize];
            *sum = sum.less(*load);
        }
    }

    /// Returns the length of the largest buffer of any rank.
    #[must_use]
    pub fn largest_buffer(&self) -> u64 {
        self.0.iter().map(Load::largest_buffer).max().unwrap_or(0)
    }

    /// Returns the load of each rank.
    #[must_use]
    pub fn into_ranks(self) -> Vec<Load> {
        self.0
    }
}

impl PartLoads {
    /// Keeps the loads that are not zero.
    #[must_use]
    pub fn new(all: &[Load]) -> Self {
        Self((0..).zip(all.iter().copied()).filter(|(_, load)| *load != Load::default()).collect())
    }

    /// Returns the length of the largest buffer of any rank.
    #[must_use]
    pub fn largest_buffer(&self) -> u64 {
        self.0.iter().map(|(_, load)| load.largest_buffer()).max().unwrap_or(0)
    }
}
