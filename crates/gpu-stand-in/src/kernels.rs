//! Finds the kernels of `dtshard` by name. `kernels.cpp` includes their source, and is compiled for the CPU.
//!
//! The kernels have the code that runs on a device, but threads do not run in parallel. As on a device, an access is
//! illegal if it is not aligned, or if it is not inside one allocation.

use std::ffi::{CStr, c_char};

use crate::memory::{Allocation, Heap, Illegal};

/// A kernel, identified by its number in `kernels.cpp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(u32);

/// The sizes in bytes of the three arguments of each kernel: the address of the job table, the number of jobs, and the
/// number of units per thread block.
pub const ARGUMENTS: [usize; 3] = [8, 4, 4];

/// The arguments of a kernel launch.
pub struct Launch<'a> {
    pub blocks: u32,
    /// The number of threads in each thread block.
    pub threads: u32,
    /// The bytes of each kernel argument.
    pub arguments: &'a [Vec<u8>],
    pub heap: &'a Heap,
}

/// The address and the length of an illegal access: `struct Illegal` in `kernels.cpp`.
#[repr(C)]
struct Access {
    address: u64,
    bytes: u64,
}

#[cfg(not(no_kernels))]
unsafe extern "C" {
    safe fn stand_in_kernel(number: u32) -> *const c_char;

    /// Runs a kernel on the host.
    ///
    /// # Safety
    /// A kernel with this number exists, and the list `allocations` has `count` entries.
    fn stand_in_launch(
        number: u32,
        allocations: *const Allocation,
        count: u64,
        blocks: u32,
        threads: u32,
        table: u64,
        jobs: u32,
        block_units: u32,
    ) -> Access;
}

/// Replaces `kernels.cpp` in a build without a C++ compiler: no kernel is found.
#[cfg(no_kernels)]
mod none {
    use super::{Access, Allocation, c_char};

    pub fn stand_in_kernel(_: u32) -> *const c_char {
        std::ptr::null()
    }

    #[expect(clippy::too_many_arguments, reason = "as it is in C++")]
    pub unsafe fn stand_in_launch(
        _: u32,
        _: *const Allocation,
        _: u64,
        _: u32,
        _: u32,
        address: u64,
        _: u32,
        _: u32,
    ) -> Access {
        Access { address, bytes: 1 }
    }
}
#[cfg(no_kernels)]
use none::{stand_in_kernel, stand_in_launch};

impl Kernel {
    pub fn named(name: &str) -> Option<Self> {
        let names = (0..).map_while(|number| {
            let name = stand_in_kernel(number);
            // SAFETY: if the result is not null, it is a static string.
            (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) })
        });
        (0..).zip(names).find(|(_, known)| known.to_bytes() == name.as_bytes()).map(|(number, _)| Self(number))
    }

    /// Runs all thread blocks of a launch, one after the other.
    pub fn run(self, launch: &Launch<'_>) -> Result<(), Illegal> {
        let argument =
            |nth: usize| launch.arguments[nth].iter().rev().fold(0, |value: u64, byte| value << 8 | u64::from(*byte));
        let word = |nth| u32::try_from(argument(nth)).unwrap_or(u32::MAX);
        let allocations = launch.heap.allocations();
        // SAFETY: the kernel was found by its name, and the list has as many allocations as the count states.
        let access = unsafe {
            let (first, count) = (allocations.as_ptr(), allocations.len() as u64);
            stand_in_launch(self.0, first, count, launch.blocks, launch.threads, argument(0), word(1), word(2))
        };
        if access.bytes == 0 {
            return Ok(());
        }
        eprintln!("gpu-stand-in: a kernel accesses {} B at {:#x}, which is illegal", access.bytes, access.address);
        Err(Illegal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(no_kernels, ignore = "there was no C++ compiler")]
    fn kernels_are_found_by_name() {
        assert!(Kernel::named("copy_runs").is_some_and(|kernel| Kernel::named("cast") != Some(kernel)));
        assert_eq!(Kernel::named("copy"), None);
    }

    #[test]
    #[cfg_attr(no_kernels, ignore = "there was no C++ compiler")]
    fn illegal_access_of_a_kernel_is_an_error() {
        let heap = Heap::new(1 << 16);
        let table = heap.allocate(64).unwrap();
        // The first table is shorter than a job, and the second table would cross the end of the address space.
        for table in [table, u64::MAX - 15] {
            let arguments = [table.to_le_bytes().to_vec(), 1_u32.to_le_bytes().to_vec(), 1_u32.to_le_bytes().to_vec()];
            let launch = Launch { blocks: 1, threads: 1, arguments: &arguments, heap: &heap };
            assert_eq!(Kernel::named("copy_runs").unwrap().run(&launch), Err(Illegal));
        }
    }
}
