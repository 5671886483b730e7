use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::conformance::{Fleet, conforms, run};
use crate::comm::address::{Address, listen};
use crate::comm::{Communicator, Control, Liveness, Meeting, Mesh, Part, Patience, Place, meet};
use crate::error::Error;

/// Threads that meet as processes do, by files in a folder.
struct Sockets {
    folder: TempDir,
    /// How often each rank of so many was asked for: all that come as often belong together.
    asked: Mutex<HashMap<(u32, u32), u32>>,
}

impl Sockets {
    fn new() -> Self {
        Self { folder: TempDir::new().unwrap(), asked: Mutex::default() }
    }

    fn control(&self, rank: u32, size: u32) -> Control {
        let turn = {
            let mut asked = self.asked.lock().unwrap();
            let turn = asked.entry((rank, size)).or_default();
            *turn += 1;
            *turn
        };
        let run = format!("{turn} of {size}");
        let meeting = Meeting {
            part: Part { index: rank, of: size },
            run: Some(&run),
            place: &Place::Folder(self.folder.path().into()),
            patience: Patience::silent(Duration::from_secs(30)),
            calls_off: true,
            shared: None,
            liveness: Liveness { beat: Duration::from_millis(300), ..Liveness::default() },
            going: Arc::new(|| Ok(())),
        };
        meet(&meeting).unwrap()
    }
}

impl Fleet for Sockets {
    type Rank = Mesh;

    fn rank(&self, rank: u32, size: u32) -> Mesh {
        Mesh::connect(self.control(rank, size), Patience::silent(Duration::from_secs(30))).unwrap()
    }

    fn memory(&self, _: &Mesh, bytes: &[u8]) -> Vec<u8> {
        bytes.to_vec()
    }

    fn bytes(&self, _: &Mesh, memory: &Vec<u8>) -> Vec<u8> {
        memory.clone()
    }
}

#[test]
fn sockets_between_all_ranks_conform() {
    conforms(Sockets::new());
}

#[test]
fn ranks_in_other_operations_are_found_out() {
    let told = run(&Arc::new(Sockets::new()), 3, |_, rank| {
        let mut memory = vec![0; 100];
        let error = if rank.rank() == 1 {
            // Its bytes go to ranks that expect an exchange.
            let sent = rank.all_gather(&mut memory, &[0..0, 0..10, 10..20]);
            sent.and_then(|()| rank.barrier()).unwrap_err()
        } else {
            let none = vec![0..0; 3];
            rank.exchange(&memory.clone(), &none, &mut memory, &none).unwrap_err()
        };
        error.to_string()
    });
    let told: Vec<_> = told.into_iter().flatten().collect();
    let both = |told: &String| told.contains("all-gather 3") && told.contains("exchange 3");
    assert!(told.iter().all(both), "{told:?}");
}

#[test]
fn ranks_that_wait_for_each_other_in_other_operations_are_found_out() {
    for odd in 0..3 {
        for gathers in [true, false] {
            let told = run(&Arc::new(Sockets::new()), 3, move |_, rank| {
                let none = vec![0..0; 3];
                let done = if (rank.rank() == odd) == gathers {
                    rank.barrier()
                } else {
                    rank.exchange(&Vec::new(), &none, &mut Vec::new(), &none)
                };
                done.unwrap_err().to_string()
            });
            let told: Vec<_> = told.into_iter().flatten().collect();
            assert!(told.iter().all(|told| told.contains("it is in ")), "{told:?}");
        }
    }
}

#[test]
fn ranges_beyond_the_memory_are_refused() {
    run(&Arc::new(Sockets::new()), 1, |_, rank| {
        let mut memory = vec![0; 10];
        let one = |range| std::iter::once(range).collect::<Vec<_>>();
        for ranges in [vec![], one(0..11), vec![0..0, 0..0]] {
            assert!(rank.exchange(&vec![0; 100], &one(0..0), &mut memory, &ranges).is_err());
        }
        for ranges in [vec![], one(3..11), vec![0..0, 0..0]] {
            assert!(rank.all_gather(&mut memory, &ranges).is_err());
        }
        rank.leave().unwrap();
    })
    .pop()
    .unwrap()
    .unwrap();
}

#[test]
fn who_leaves_while_others_are_not_done_is_named() {
    for early in 0..3 {
        let told = run(&Arc::new(Sockets::new()), 3, move |_, rank| {
            rank.barrier().unwrap();
            if rank.rank() == early {
                return rank.leave();
            }
            let again = rank.barrier();
            // As commands do.
            if let Err(error) = &again {
                rank.fail(&error.to_string());
            }
            again
        });
        for (rank, told) in (0..).zip(told) {
            match told.unwrap() {
                Ok(()) => assert!(rank == early && rank != 0),
                Err(Error::Comm { rank, .. }) => assert_eq!(rank.index, early),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// A port that refuses calls does so at once, and is called again and again.
#[test]
fn who_calls_in_vain_hears_of_one_that_fails() {
    let sockets = Arc::new(Sockets::new());
    let first = Arc::clone(&sockets);
    let first = thread::spawn(move || {
        let control = first.control(0, 2);
        let address = Address::of(&listen(&[0]).unwrap()).unwrap();
        control.gather(&serde_json::to_vec(&address).unwrap()).unwrap();
        thread::sleep(Duration::from_millis(500));
        control.fail("no space");
    });
    let control = sockets.control(1, 2);
    let begun = Instant::now();
    let failed = Mesh::connect(control, Patience::silent(Duration::from_secs(30))).map(drop).unwrap_err();
    assert_eq!(failed.to_string(), "process 0: connect: failed: no space");
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    first.join().unwrap();
}
