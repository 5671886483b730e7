//! A vector with holes: slots are handed out, given back and handed out again.
//!
//! Invariant: a slot given back is not read until it is handed out again; its owner sees to that.

pub(super) struct Slab<T> {
    slots: Vec<T>,
    free: Vec<u32>,
}

impl<T: Default> Slab<T> {
    pub fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = value;
            return slot;
        }
        // Fits: a slot costs at least one byte of an input shorter than 4 GiB.
        let slot = self.slots.len() as u32;
        self.slots.push(value);
        slot
    }

    pub fn remove(&mut self, slot: u32) -> T {
        self.free.push(slot);
        std::mem::take(&mut self.slots[slot as usize])
    }

    pub fn get(&self, slot: u32) -> &T {
        &self.slots[slot as usize]
    }

    pub fn get_mut(&mut self, slot: u32) -> &mut T {
        &mut self.slots[slot as usize]
    }

    pub fn live(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}
