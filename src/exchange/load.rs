//! Load: the memory that a round, or one transfer plan of a round, needs on each process. All sizes are in bytes.
//! Invariant: all processes know the loads of all processes, so that all make the same decisions.

/// The bytes that one process sends and receives in one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireBytes {
    /// The number of sent bytes. Bytes that an all-gather sends to all processes count once.
    pub sent: u64,
    /// The number of those bytes in `sent` that an all-gather sends. All-gathered bytes also need space in the incoming
    /// buffer of the sender.
    pub all_gathered: u64,
    /// The number of received bytes.
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
    /// The number of bytes that are read from files into the stage buffer.
    pub read: u64,
    /// The bytes that are sent and received in the first phase (the messages with source bytes) and in NCCL reductions.
    pub first_phase: WireBytes,
    /// The bytes that are sent and received in the second phase, which sends reduced values to further processes.
    pub second_phase: WireBytes,
    /// The length of the unpacked buffer in bytes. It contains the values that this process writes, and the partial
    /// values that it reduces.
    pub unpacked: u64,
    /// The number of bytes of this process's own partial values in NCCL reductions for which this process is the root.
    /// These partial values need space in the outgoing buffer.
    pub own_partial_values: u64,
}

impl Load {
    /// Returns the number of bytes that are sent in both phases together.
    pub fn sent(&self) -> u64 {
        self.first_phase.sent + self.second_phase.sent
    }

    /// Returns the number of bytes that are received in both phases together.
    pub fn received(&self) -> u64 {
        self.first_phase.received + self.second_phase.received
    }

    /// Returns the length in bytes of the largest buffer that the process needs for the round.
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

/// The memory that each process needs for one round.
#[derive(Debug)]
pub struct Loads(Vec<Load>);

/// The memory that a transfer plan (the transfers of one tensor, or of ranges of it) needs on each process that takes
/// part, in ascending order of processes. A round has many plans, but few processes take part in each plan.
#[derive(Debug, Default)]
pub struct PartLoads(Box<[(u32, Load)]>);

impl Loads {
    /// Returns the loads of a round without any transfer plan: 0 bytes for each of `ranks` processes.
    #[must_use]
    pub fn zero(ranks: usize) -> Self {
        Self(vec![Load::default(); ranks])
    }

    /// Adds the memory needs of a transfer plan to the needs of the round.
    pub fn add(&mut self, part: &PartLoads) {
        for (rank, load) in &part.0 {
            let sum = &mut self.0[*rank as usize];
            *sum = sum.plus(*load);
        }
    }

    /// Subtracts the memory needs of a transfer plan that was added before.
    pub fn subtract(&mut self, part: &PartLoads) {
        for (rank, load) in &part.0 {
            let sum = &mut self.0[*rank as usize];
            *sum = sum.less(*load);
        }
    }

    /// Returns the length in bytes of the largest buffer that any process needs.
    pub fn largest_buffer(&self) -> u64 {
        self.0.iter().map(Load::largest_buffer).max().unwrap_or(0)
    }

    /// Returns the load of each process, in the order of the processes.
    pub fn into_ranks(self) -> Vec<Load> {
        self.0
    }
}

impl PartLoads {
    /// Keeps the loads of the processes that take part. `all` has the loads of all processes; loads of 0 bytes are left
    /// out.
    #[must_use]
    pub fn new(all: &[Load]) -> Self {
        Self((0..).zip(all.iter().copied()).filter(|(_, load)| *load != Load::default()).collect())
    }

    /// Returns the length in bytes of the largest buffer that any process needs.
    pub fn largest_buffer(&self) -> u64 {
        self.0.iter().map(|(_, load)| load.largest_buffer()).max().unwrap_or(0)
    }
}
