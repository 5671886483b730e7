//! A vector of slots that are allocated, freed and reused.
//!
//! Invariant: a freed slot is not read until it is allocated again. The owner of the slot ensures this.

pub(super) struct Slab<T> {
    slots: Vec<T>,
    free: Vec<u32>,
}

impl<T: Default> Slab<T> {
    /// Returns a slab without slots.
    pub fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    /// Stores a value in a free slot, and returns the number of the slot.
    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = value;
            return slot;
        }
        // The number fits 32 bits, because each slot takes at least one byte of an input shorter than 4 GiB.
        let slot = self.slots.len() as u32;
        self.slots.push(value);
        slot
    }

    /// Frees a slot and returns its value.
    pub fn remove(&mut self, slot: u32) -> T {
        self.free.push(slot);
        std::mem::take(&mut self.slots[slot as usize])
    }

    /// Returns the value of a slot.
    pub fn get(&self, slot: u32) -> &T {
        &self.slots[slot as usize]
    }

    /// Returns the value of a slot for modification.
    pub fn get_mut(&mut self, slot: u32) -> &mut T {
        &mut self.slots[slot as usize]
    }

    /// Returns the number of slots in use.
    pub fn live(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}
