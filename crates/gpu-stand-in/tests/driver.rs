//! Tests of the driver API: valid calls work, and invalid calls return errors.

#![allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails")]
#![allow(unsafe_code, reason = "this calls a C library")]

mod common;

use std::{ptr, slice};

use common::{Buffer, Stream, device, driver, passes_early};

const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const INVALID_CONTEXT: u32 = 201;
const NOT_FOUND: u32 = 500;
const NOT_READY: u32 = 600;
const ILLEGAL_ADDRESS: u32 = 700;

#[test]
fn allocation_without_a_context_is_an_error() {
    assert_eq!(driver().cuInit(0), 0);
    std::thread::spawn(|| assert_eq!(driver().cuMemAlloc_v2(&mut 0, 16), INVALID_CONTEXT)).join().unwrap();
}

#[test]
fn memory_is_poisoned_checked_and_limited() {
    device();
    let stream = Stream::new();
    let buffer = Buffer::new(100);
    assert_eq!(buffer.read(&stream), [0xA5; 100]);
    let mut byte = 0;
    assert_eq!(driver().cuMemcpyDtoHAsync_v2(&raw mut byte, buffer.address + 100, 1, stream.0), INVALID_VALUE);
    assert_eq!(driver().cuMemAlloc_v2(&mut 0, 1 << 40), OUT_OF_MEMORY);
    assert_eq!(driver().cuMemFree_v2(buffer.address), 0);
    assert_eq!(driver().cuMemFree_v2(buffer.address), INVALID_VALUE);
}

#[test]
fn pinned_memory_is_read_by_the_stream_and_other_memory_by_the_call() {
    assert!(passes_early("pinned"));
}

#[test]
#[ignore = "a process of a test"]
fn pinned() {
    device();
    let stream = Stream::new();
    let mut pinned = ptr::null_mut();
    assert_eq!(driver().cuMemHostAlloc(&raw mut pinned, 16, 0), 0);
    // SAFETY: `pinned` has 16 bytes.
    unsafe { pinned.write_bytes(1, 16) };
    let (late, mut data) = (Buffer::new(16), vec![1; 16]);
    let early = Buffer::of(&data, &stream);
    assert_eq!(driver().cuMemcpyHtoDAsync_v2(late.address, pinned, 16, stream.0), 0);
    data.fill(2);
    // SAFETY: `pinned` has 16 bytes. This test checks that the stream reads them later.
    unsafe { pinned.write_bytes(2, 16) };
    assert_eq!(driver().cuStreamQuery(stream.0), NOT_READY);
    assert_eq!((early.read(&stream), late.read(&stream)), (vec![1; 16], vec![2; 16]));

    assert_eq!(driver().cuMemcpyDtoHAsync_v2(pinned, early.address, 16, stream.0), 0);
    // SAFETY: `pinned` has 16 bytes.
    let seen = unsafe { slice::from_raw_parts(pinned, 16) }.to_vec();
    assert_eq!(seen, [2; 16], "the stream reads pinned memory late");
    assert_eq!(stream.synchronize(), 0);
    // SAFETY: `pinned` has 16 bytes.
    assert_eq!(unsafe { slice::from_raw_parts(pinned, 16) }, [1; 16]);
    assert_eq!(driver().cuMemFreeHost(pinned), 0);
}

#[test]
fn streams_wait_for_events_of_others() {
    device();
    let (first, second) = (Stream::new(), Stream::new());
    let (from, into) = (Buffer::of(&[7; 8], &first), Buffer::new(8));
    let mut event = ptr::null_mut();
    assert_eq!(driver().cuEventCreate(&raw mut event, 0), 0);
    assert_eq!(driver().cuEventRecord(event, first.0), 0);
    assert_eq!(driver().cuStreamWaitEvent(second.0, event, 0), 0);
    assert_eq!(driver().cuMemcpyDtoDAsync_v2(into.address, from.address, 8, second.0), 0);
    assert_eq!(into.read(&second), [7; 8]);
}

#[test]
fn use_after_free_faults_the_device() {
    assert!(passes_early("freed"));
}

/// Checks that freeing memory too early makes the device fault. Runs in its own process, because after a fault no call
/// works any more, as in CUDA.
#[test]
#[ignore = "a process of a test"]
fn freed() {
    device();
    let (first, second) = (Stream::new(), Stream::new());
    let (from, into) = (Buffer::new(8), Buffer::new(8));
    let mut event = ptr::null_mut();
    assert_eq!(driver().cuEventCreate(&raw mut event, 0), 0);
    assert_eq!(driver().cuMemFreeAsync(from.address, first.0), 0);
    assert_eq!(driver().cuEventRecord(event, first.0), 0);
    assert_eq!(driver().cuStreamWaitEvent(second.0, event, 0), 0);
    assert_eq!(driver().cuMemcpyDtoDAsync_v2(into.address, from.address, 8, second.0), 0);
    assert_eq!(second.synchronize(), ILLEGAL_ADDRESS);
    assert_eq!(driver().cuMemAlloc_v2(&mut 0, 8), ILLEGAL_ADDRESS);
}

/// Tests a copy of the box [1..3, 2..5, 1..3] from an array of (4, 6, 4) elements of two bytes.
#[test]
fn memcpy_3d_copies_strided_boxes() {
    device();
    let stream = Stream::new();
    let array: Vec<u8> = (0..4 * 6 * 4_u16).flat_map(u16::to_le_bytes).collect();
    let (from, into) = (Buffer::of(&array, &stream), Buffer::new(2 * 3 * 2 * 2));
    let source = [2, 2, 1, 0, 2, 0, from.address, 0, 0, 8, 6];
    let target = [0, 0, 0, 0, 2, 0, into.address, 0, 0, 4, 3];
    let mut copy = [0; 25];
    copy[..11].copy_from_slice(&source);
    copy[11..22].copy_from_slice(&target);
    copy[22..].copy_from_slice(&[4, 3, 2]);
    assert_eq!(driver().cuMemcpy3DAsync_v2(&raw const copy, stream.0), 0);
    let rows = (1..3).flat_map(|z| (2..5).map(move |y| z * 24 + y * 4));
    let expected: Vec<u8> = rows.flat_map(|row| (row + 1..row + 3).flat_map(u16::to_le_bytes)).collect();
    assert_eq!(into.read(&stream), expected);

    copy[9] = 5;
    assert_eq!(driver().cuMemcpy3DAsync_v2(&raw const copy, stream.0), INVALID_VALUE, "rows do not fit the pitch");
    copy[9] = 8;
    copy[24] = 4;
    assert_eq!(driver().cuMemcpy3DAsync_v2(&raw const copy, stream.0), INVALID_VALUE, "the array has fewer slices");
}

#[test]
fn unknown_kernel_is_an_error() {
    device();
    let mut module = ptr::null_mut();
    let ptx = ".version 8.0\n.target sm_80\n.visible .entry lonely(\n)\n{ ret; }\0";
    assert_eq!(driver().cuModuleLoadData(&raw mut module, ptx.as_ptr()), 0);
    let mut function = ptr::null_mut();
    assert_eq!(driver().cuModuleGetFunction(&raw mut function, module, c"lonely".as_ptr().cast()), NOT_FOUND);
}
