//! Tests of the NCCL functions through nccl-rs, with several processes that have one device each.

#![allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails")]
#![allow(unsafe_code, reason = "this calls a C library")]

mod common;

use std::time::{Duration, Instant};
use std::{process, thread};

use common::{Buffer, Stream, device, driver, id, join, nccl as library, place, ranks, ranks_with};
use half::bf16;
use nccl::raw::{ncclInvalidUsage, ncclRemoteError};
use nccl::{Communicator, Config, DataType, DeviceView, DeviceViewMut, Error, RankPosition, RedOp, UniqueId, Wait};

/// `CUDA_ERROR_NOT_READY`: the code for work that is not done.
const NOT_READY: u32 = 600;

fn patient() -> Wait {
    Wait::up_to(Duration::from_secs(30))
}

/// Returns the error `queued`. If it is `Ok`, waits until the communicator reports an asynchronous error.
fn error(communicator: &Communicator, queued: nccl::Result<()>) -> Error {
    let begin = Instant::now();
    let mut status = queued;
    while status.is_ok() {
        assert!(begin.elapsed() < Duration::from_secs(30), "no error came");
        thread::sleep(Duration::from_millis(2));
        status = communicator.status();
    }
    status.unwrap_err()
}

fn is(error: &Error, expected: nccl::raw::ncclResult_t) -> bool {
    matches!(error, Error::Call { code, .. } if *code == expected)
}

#[test]
fn collectives_give_expected_bytes() {
    for count in [1, 2, 3, 5] {
        assert_eq!(ranks("exchange", count), vec![0; count]);
    }
}

/// Tests an exchange in which rank i sends (i + 1) * (j + 1) bytes with the value 16 * i + j to rank j.
#[test]
#[ignore = "one rank of a test"]
fn exchange() {
    let RankPosition { rank, ranks } = place();
    let mut communicator = join(patient()).unwrap();
    assert_eq!(communicator.device().unwrap(), 0);
    let stream = Stream::new();
    let bytes = |from: usize, to: usize| (from + 1) * (to + 1);
    let value = |from: usize, to: usize| u8::try_from(16 * from + to).unwrap();

    let data: Vec<u8> = (0..ranks).flat_map(|to| vec![value(rank, to); bytes(rank, to)]).collect();
    let send = Buffer::of(&data, &stream);
    let mut recv = Buffer::new((0..ranks).map(|from| bytes(from, rank)).sum());
    let (mut outgoing, mut incoming) = (DeviceView::of(&send), DeviceViewMut::of(&mut recv));
    communicator
        .group(&stream, |group| {
            for peer in 0..ranks {
                let (part, rest) = outgoing.split_at(bytes(rank, peer)).unwrap();
                outgoing = rest;
                group.send(part, DataType::Uint8, peer)?;
            }
            for peer in 0..ranks {
                let (part, rest) = incoming.split_at(bytes(peer, rank)).unwrap();
                incoming = rest;
                group.recv(part, DataType::Uint8, peer)?;
            }
            Ok(())
        })
        .unwrap();
    let expected: Vec<u8> = (0..ranks).flat_map(|from| vec![value(from, rank); bytes(from, rank)]).collect();
    assert_eq!(recv.read(&stream), expected);

    let mine = Buffer::of(&u32::try_from(rank + 1).unwrap().to_le_bytes(), &stream);
    let mut all = Buffer::new(4 * ranks);
    let into = DeviceViewMut::of(&mut all);
    communicator.all_gather(&stream, DeviceView::of(&mine), into, DataType::Uint32).unwrap();
    let numbers = 1..=u32::try_from(ranks).unwrap();
    assert_eq!(all.read(&stream), numbers.clone().flat_map(u32::to_le_bytes).collect::<Vec<_>>());

    let mut sum = Buffer::new(4);
    let into = DeviceViewMut::of(&mut sum);
    communicator.all_reduce(&stream, DeviceView::of(&mine), into, DataType::Int32, RedOp::Sum).unwrap();
    assert_eq!(sum.read(&stream), numbers.clone().sum::<u32>().to_le_bytes());

    let mut product = Buffer::new(4);
    let into = (rank + 1 == ranks).then(|| DeviceViewMut::of(&mut product));
    communicator.reduce(&stream, DeviceView::of(&mine), into, DataType::Uint32, (RedOp::Prod, ranks - 1)).unwrap();
    if rank + 1 == ranks {
        assert_eq!(product.read(&stream), numbers.clone().product::<u32>().to_le_bytes());
    }

    let floats = |value: f32| bf16::from_f32(value).to_le_bytes();
    let data: Vec<u8> = (0_u8..).take(ranks).flat_map(|to| floats(f32::from(to))).collect();
    let (send, mut part) = (Buffer::of(&data, &stream), Buffer::new(2));
    let into = DeviceViewMut::of(&mut part);
    communicator.reduce_scatter(&stream, DeviceView::of(&send), into, DataType::Bfloat16, RedOp::Avg).unwrap();
    assert_eq!(part.read(&stream), floats(f32::from(u8::try_from(rank).unwrap())));

    let mut word = Buffer::of(&[u8::try_from(rank).unwrap(); 8], &stream);
    communicator.broadcast(&stream, DeviceViewMut::of(&mut word), DataType::Float64, ranks - 1).unwrap();
    assert_eq!(word.read(&stream), [u8::try_from(ranks - 1).unwrap(); 8]);
    communicator.finalize().unwrap();
}

#[test]
fn mismatched_receive_fails_on_all_ranks() {
    assert_eq!(ranks("mismatch", 2), [0, 0]);
}

#[test]
#[ignore = "one rank of a test"]
fn mismatch() {
    let rank = place().rank;
    let mut communicator = join(patient()).unwrap();
    let stream = Stream::new();
    let (send, mut recv) = (Buffer::of(&[1; 8], &stream), Buffer::new(8 - rank));
    let (from, into) = (DeviceView::of(&send), DeviceViewMut::of(&mut recv));
    let queued = communicator.group(&stream, |group| {
        group.send(from, DataType::Uint8, 1 - rank)?;
        group.recv(into, DataType::Uint8, 1 - rank)
    });
    let stands_still = queued.is_ok();
    let expected = if rank == 1 { ncclInvalidUsage } else { ncclRemoteError };
    let error = error(&communicator, queued);
    assert!(is(&error, expected), "{error}");
    assert!(error.to_string().contains(if rank == 1 { "rank 1 expected" } else { "rank 1 is lost" }), "{error}");
    if stands_still {
        assert_eq!(driver().cuStreamQuery(stream.0), NOT_READY);
    }
    communicator.abort().unwrap();
    assert_eq!(stream.synchronize(), 0);
}

#[test]
fn dead_rank_is_an_error_on_other_ranks() {
    assert_eq!(ranks("death", 3), [0, 9, 0]);
}

#[test]
#[ignore = "one rank of a test"]
#[expect(clippy::exit, reason = "it is to die")]
fn death() {
    let RankPosition { rank, ranks } = place();
    let mut communicator = join(patient()).unwrap();
    let stream = Stream::new();
    if rank == 1 {
        process::exit(9);
    }
    let mine = Buffer::of(&[1; 8], &stream);
    let mut all = Buffer::new(8 * ranks);
    let into = DeviceViewMut::of(&mut all);
    let queued = communicator.all_gather(&stream, DeviceView::of(&mine), into, DataType::Uint8);
    let error = error(&communicator, queued);
    assert!(is(&error, ncclRemoteError), "{error}");
    drop(communicator);
    assert_eq!(stream.synchronize(), 0);
}

#[test]
fn dead_rank_without_error_blocks_the_stream() {
    assert_eq!(ranks_with("silence", 2, &[("GPU_STAND_IN_LOST_PEERS", "silent")]), [0, 9]);
}

#[test]
#[ignore = "one rank of a test"]
#[expect(clippy::exit, reason = "it is to die")]
fn silence() {
    let mut communicator = join(patient()).unwrap();
    let stream = Stream::new();
    if place().rank == 1 {
        process::exit(9);
    }
    let mut word = Buffer::new(8);
    communicator.broadcast(&stream, DeviceViewMut::of(&mut word), DataType::Uint8, 1).unwrap();
    thread::sleep(Duration::from_millis(200));
    assert_eq!((communicator.status(), driver().cuStreamQuery(stream.0)), (Ok(()), NOT_READY));
    communicator.abort().unwrap();
    assert_eq!((stream.synchronize(), word.read(&stream)), (0, vec![0xA5; 8]));
}

#[test]
fn missing_rank_is_a_timeout() {
    device();
    let library = library();
    let begin = Instant::now();
    let wait = Wait::up_to(Duration::from_millis(200));
    let id = UniqueId::new(&library).unwrap();
    let late =
        Communicator::new(&library, RankPosition { rank: 0, ranks: 2 }, &id, &Config::default(), wait).unwrap_err();
    assert!(matches!(late, Error::Late { .. }), "{late}");
    assert!(begin.elapsed() < Duration::from_secs(10));
}

#[test]
fn two_ranks_with_one_device_are_an_error() {
    assert_eq!(ranks("doubled", 2), [0, 0]);
}

#[test]
#[ignore = "one rank of a test"]
fn doubled() {
    device();
    let place = place();
    // Both ranks use the device of rank 0.
    let doubled = || Communicator::new(&library(), place, &id(), &Config::default(), patient());
    match std::env::var_os("DOUBLED") {
        Some(_) => assert!(is(&doubled().unwrap_err(), ncclInvalidUsage)),
        None => {
            let again = process::Command::new(std::env::current_exe().unwrap())
                .args(["--ignored", "--exact", "doubled"])
                .envs([("DOUBLED", "1"), ("CUDA_VISIBLE_DEVICES", "0")])
                .status();
            assert!(again.unwrap().success());
        }
    }
}
