//! Rooms: host memory of rounds, which goes back for the next ones.
//!
//! A round's buffers are too large to be had anew each time: the kernel would clear as many pages as bytes are moved, and
//! memory that a device can reach takes longer still.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Result;

/// Host memory of a fixed length, of the kind that a shuffle moves bytes out of and into.
pub trait HostMemory: AsRef<[u8]> + AsMut<[u8]> + Send + Sync + 'static {}

impl HostMemory for Vec<u8> {}

/// Gives memory of one kind, and takes it back.
pub struct BufferPool<M> {
    make: Box<dyn Fn(usize) -> Result<M> + Send + Sync>,
    free: Mutex<Vec<M>>,
}

impl<M: HostMemory> BufferPool<M> {
    #[must_use]
    pub fn new(make: impl Fn(usize) -> Result<M> + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { make: Box::new(make), free: Mutex::default() })
    }

    /// Memory of this length, with anything in it.
    ///
    /// # Errors
    /// Where there is none left.
    pub fn buffer(self: &Arc<Self>, len: usize) -> Result<PooledBuffer<M>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = free.iter().position(|memory| memory.as_ref().len() >= len).map(|at| free.swap_remove(at));
        // What is too short now will be so again: rounds are of about the same length.
        let too_short = if fitting.is_none() { free.pop() } else { None };
        drop(free);
        // To free what a device can reach takes time, in which others want their room.
        drop(too_short);
        let memory = match fitting {
            Some(memory) => memory,
            None => (self.make)(len)?,
        };
        Ok(PooledBuffer { memory: Some(memory), len, rooms: Arc::clone(self) })
    }
}

/// The beginning of some memory; the whole goes back when this is dropped.
pub struct PooledBuffer<M: HostMemory> {
    /// `None` only while it is dropped.
    memory: Option<M>,
    len: usize,
    rooms: Arc<BufferPool<M>>,
}

impl<M: HostMemory> Deref for PooledBuffer<M> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| &memory.as_ref()[..self.len])
    }
}

impl<M: HostMemory> DerefMut for PooledBuffer<M> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut().map_or(&mut [], |memory| &mut memory.as_mut()[..self.len])
    }
}

impl<M: HostMemory> AsRef<[u8]> for PooledBuffer<M> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl<M: HostMemory> Drop for PooledBuffer<M> {
    fn drop(&mut self) {
        let memory = self.memory.take();
        self.rooms.free.lock().unwrap_or_else(PoisonError::into_inner).extend(memory);
    }
}

/// Parts of a buffer at ascending places, by where they start and how long they are.
pub fn pieces(mut buffer: &mut [u8], places: impl Iterator<Item = (usize, usize)>) -> Vec<&mut [u8]> {
    let mut at = 0;
    let take = |(start, len): (usize, usize)| {
        let (_, rest) = std::mem::take(&mut buffer).split_at_mut(start - at);
        let (piece, rest) = rest.split_at_mut(len);
        buffer = rest;
        at = start + len;
        piece
    };
    places.map(take).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn memory_is_used_again_where_it_is_long_enough() {
        let made = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&made);
        let rooms = BufferPool::new(move |len| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(vec![7_u8; len])
        });
        let (first, second) = (rooms.buffer(10).unwrap(), rooms.buffer(8).unwrap());
        assert_eq!((first.len(), second.len(), made.load(Ordering::Relaxed)), (10, 8, 2));
        drop((first, second));
        let mut again = rooms.buffer(9).unwrap();
        again.fill(1);
        assert_eq!((&again[..], made.load(Ordering::Relaxed)), (&[1; 9][..], 2));
        // The other one is too short, and is let go.
        let longer = rooms.buffer(11).unwrap();
        assert_eq!((longer.len(), made.load(Ordering::Relaxed)), (11, 3));
        assert_eq!(rooms.free.lock().unwrap().len(), 0);
    }
}
