//! Two processes, one of which is killed in the middle of an exchange.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, recv};

use super::*;
use crate::comm::{Communicator, Traffic};
use crate::error::Error;
use crate::gpu::stream::Stream;
use crate::gpu::{DeviceBytes, Nccl, Sharing};

/// A control of two processes: a socket.
struct Pair {
    rank: u32,
    socket: UnixStream,
}

impl Pair {
    fn new(rank: u32, folder: &Path) -> Self {
        let name = folder.join("control");
        if rank == 0 {
            let listener = UnixListener::bind(folder.join("unready")).unwrap();
            std::fs::rename(folder.join("unready"), name).unwrap();
            return Self { rank, socket: listener.accept().unwrap().0 };
        }
        loop {
            match UnixStream::connect(&name) {
                Ok(socket) => return Self { rank, socket },
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    fn gone(&self, op: &'static str) -> Error {
        Error::comm(1 - self.rank, op, "its process ended")
    }
}

impl Communicator for Pair {
    type Memory = Vec<u8>;

    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        2
    }

    fn exchange(&self, _: &Vec<u8>, _: &[Range<usize>], _: &mut Vec<u8>, _: &[Range<usize>]) -> Result<()> {
        Err(self.gone("exchange"))
    }

    fn all_gather(&self, _: &mut Vec<u8>, _: &[Range<usize>]) -> Result<()> {
        Err(self.gone("all-gather"))
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn gather(&self, said: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut socket = &self.socket;
        let mut heard = || -> io::Result<Vec<u8>> {
            socket.write_all(&[&(said.len() as u64).to_le_bytes()[..], said].concat())?;
            let mut len = [0; 8];
            socket.read_exact(&mut len)?;
            let mut heard = vec![0; usize::try_from(u64::from_le_bytes(len)).unwrap()];
            socket.read_exact(&mut heard).map(|()| heard)
        };
        let heard = heard().map_err(|_| self.gone("gather"))?;
        Ok(if self.rank == 0 { vec![said.to_vec(), heard] } else { vec![heard, said.to_vec()] })
    }

    fn check(&self) -> Result<()> {
        let peeked = recv(&self.socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        if matches!(peeked, Ok((0, _)) | Err(rustix::io::Errno::CONNRESET)) { Err(self.gone("check")) } else { Ok(()) }
    }

    fn fail(&self, _: &str) {}

    fn leave(self) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_process_that_is_killed_is_named_stand_in() {
    killed(&[]);
}

#[test]
fn a_process_that_is_killed_is_named_where_nccl_tells_nothing_stand_in() {
    killed(&[("GPU_STAND_IN_LOST_PEERS", "silent")]);
}

fn killed(settings: &[(&str, &str)]) {
    one_is_killed("dying::rank", settings);
}

/// Who frees memory asks nobody, and waits for the device, which waits for the peer.
#[test]
fn memory_is_freed_where_a_peer_is_gone_stand_in() {
    for told in ["", "silent"] {
        one_is_killed("dying::freeing", &[("GPU_STAND_IN_LOST_PEERS", told)]);
    }
}

/// Two processes that run a test, of which one ends at once.
fn one_is_killed(test: &str, settings: &[(&str, &str)]) {
    let folder = libraries();
    let ranks = ["0", "1"].map(|rank| {
        let mut process = process_of(test, 2, &folder);
        process.env("RANK", rank).env("FOLDER", folder.path()).envs(settings.iter().copied());
        process.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    });
    let [survivor, dead] = ranks.map(|rank| rank.wait_with_output().unwrap());
    passed(test, &survivor);
    assert!(!dead.status.success());
}

fn met() -> (Gpu, Nccl<Pair>) {
    let rank: u32 = std::env::var("RANK").unwrap().parse().unwrap();
    let control = Pair::new(rank, Path::new(&std::env::var_os("FOLDER").unwrap()));
    let gpu = open(kernels(), rank).unwrap();
    let peers = Nccl::meet(&gpu, Sharing::Refused, control).unwrap();
    (gpu, peers)
}

#[test]
#[ignore = "a process of a test"]
fn freeing() {
    let (gpu, peers) = met();
    if peers.rank() == 1 {
        std::thread::sleep(Duration::from_millis(100));
        std::process::abort();
    }
    let memory = || DeviceBytes::new(&gpu.device, 1 << 20, "a test").unwrap();
    let (outgoing, mut incoming, other) = (memory(), memory(), memory());
    let all = [0..0, 0..1 << 20];
    let stream = Stream::new(&gpu.device).unwrap();
    peers.queue_exchange(&stream, &outgoing, &all, &mut incoming, &all).unwrap();
    let begun = Instant::now();
    drop(other);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let error = peers.wait("exchange", &stream.record().unwrap()).err();
    assert!(error.is_none_or(|error| error.to_string() == "process 1: exchange: its process ended"));
}

#[test]
#[ignore = "a process of a test"]
fn rank() {
    let (gpu, peers) = met();
    let rank = peers.rank();
    let memory = || DeviceBytes::new(&gpu.device, 1 << 20, "a test").unwrap();
    let (outgoing, mut incoming) = (memory(), memory());
    let all = if rank == 0 { [0..0, 0..1 << 20] } else { [0..1 << 20, 0..0] };
    let mut exchange = || peers.exchange(&outgoing, &all, &mut incoming, &all);
    exchange().unwrap();
    exchange().unwrap();
    if rank == 1 {
        std::thread::sleep(Duration::from_millis(100));
        std::process::abort();
    }
    let begun = Instant::now();
    let error = exchange().unwrap_err();
    assert_eq!(error.to_string(), "process 1: exchange: its process ended");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    // Nothing is usable after that, and nothing waits.
    assert_eq!(exchange().unwrap_err().to_string(), "process 1: exchange: its process ended");
    assert!(peers.barrier().is_err());
}
