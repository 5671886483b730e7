//! Buffer pool that reuses host memory, so that not every exchange round allocates new buffers. Allocating is slow: the
//! operating system clears every new page, and pinned memory takes even longer. Lengths and offsets are in bytes.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Result;

/// Host memory of a fixed length. Each kind of shuffle (host or GPU) has its own kind of host memory.
pub trait HostMemory: AsRef<[u8]> + AsMut<[u8]> + Send + Sync + 'static {}

impl HostMemory for Vec<u8> {}

/// A pool of reusable buffers in one kind of host memory.
pub struct BufferPool<M> {
    make: Box<dyn Fn(usize) -> Result<M> + Send + Sync>,
    free: Mutex<Vec<M>>,
}

impl<M: HostMemory> BufferPool<M> {
    /// Returns an empty pool that calls `make` to allocate memory of a given length.
    pub fn new(make: impl Fn(usize) -> Result<M> + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { make: Box::new(make), free: Mutex::default() })
    }

    /// Returns a buffer with `len` bytes. Its content is arbitrary.
    ///
    /// # Errors
    /// Returns the error of the allocation.
    pub fn buffer(self: &Arc<Self>, len: usize) -> Result<PooledBuffer<M>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = free.iter().position(|memory| memory.as_ref().len() >= len).map(|at| free.swap_remove(at));
        // Rounds have about the same length, so a buffer that is too short for this round would be too short for later
        // rounds as well.
        let too_short = if fitting.is_none() { free.pop() } else { None };
        drop(free);
        // Freeing pinned memory takes time, so the memory is freed after the lock is released.
        drop(too_short);
        let memory = match fitting {
            Some(memory) => memory,
            None => (self.make)(len)?,
        };
        Ok(PooledBuffer { memory: Some(memory), len, pool: Arc::clone(self) })
    }
}

/// A buffer that belongs to a pool. When it is dropped, its memory returns to the pool.
pub struct PooledBuffer<M: HostMemory> {
    /// The memory, which may be longer than the buffer. The field is `None` only during `drop`.
    memory: Option<M>,
    len: usize,
    pool: Arc<BufferPool<M>>,
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
        self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).extend(memory);
    }
}

/// Splits a buffer into disjoint slices. `places` has the start and the length of each slice, in ascending order.
pub fn disjoint_slices(mut buffer: &mut [u8], places: impl Iterator<Item = (usize, usize)>) -> Vec<&mut [u8]> {
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
    fn long_enough_buffer_is_reused() {
        let made = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&made);
        let pool = BufferPool::new(move |len| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(vec![7_u8; len])
        });
        let (first, second) = (pool.buffer(10).unwrap(), pool.buffer(8).unwrap());
        assert_eq!((first.len(), second.len(), made.load(Ordering::Relaxed)), (10, 8, 2));
        drop((first, second));
        let mut again = pool.buffer(9).unwrap();
        again.fill(1);
        assert_eq!((&again[..], made.load(Ordering::Relaxed)), (&[1; 9][..], 2));
        // The other buffer is too short and is freed.
        let longer = pool.buffer(11).unwrap();
        assert_eq!((longer.len(), made.load(Ordering::Relaxed)), (11, 3));
        assert_eq!(pool.free.lock().unwrap().len(), 0);
    }
}
