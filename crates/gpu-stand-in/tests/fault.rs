//! Memory that is used after it was freed. By itself: after that, nothing works in the process, as with CUDA.

#![allow(unsafe_code, reason = "this calls a C library")]

mod common;

use common::{Buffer, Stream, device, driver};

const ILLEGAL_ADDRESS: u32 = 700;

#[test]
fn work_on_memory_that_was_freed_meanwhile_faults_the_device() {
    device();
    let (first, second) = (Stream::new(), Stream::new());
    let (from, into) = (Buffer::of(&[7; 8], &first), Buffer::new(8));
    assert_eq!(first.synchronize(), 0);
    assert_eq!(driver().cuMemFreeAsync(from.address, first.0), 0);
    for _ in 0..20 {
        assert_eq!(driver().cuMemcpyDtoDAsync_v2(into.address, into.address, 8, second.0), 0);
    }
    assert_eq!(driver().cuMemcpyDtoDAsync_v2(into.address, from.address, 8, second.0), 0);
    assert_eq!(second.synchronize(), ILLEGAL_ADDRESS);
    assert_eq!(driver().cuMemAlloc_v2(&mut 0, 8), ILLEGAL_ADDRESS);
}
