//! Random numbers that are the same in each run: xorshift64*, which is good enough to choose shapes.

/// A generator of random numbers.
pub struct Random(u64);

impl Random {
    /// Returns a generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Returns 64 random bits.
    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Returns a number below `count`.
    pub fn below(&mut self, count: u64) -> u64 {
        (self.word() >> 16) % count
    }

    /// Returns a random index of a list of this length.
    pub fn index(&mut self, count: usize) -> usize {
        usize::try_from(self.below(count as u64)).expect("below a length")
    }

    /// Fills `bytes` with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_mut(8) {
            word.copy_from_slice(&self.word().to_le_bytes()[..word.len()]);
        }
    }
}
