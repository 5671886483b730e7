use std::sync::Mutex;

use super::conformance::{Fleet, conforms};
use crate::comm::Local;

/// A fleet of [`Local`] communicators, whose ranks are threads of this process. It gives each thread its communicator.
#[derive(Default)]
pub(crate) struct Threads(Mutex<Vec<Option<Local>>>);

impl Fleet for Threads {
    type Rank = Local;

    fn rank(&self, rank: u32, size: u32) -> Local {
        let mut ranks = self.0.lock().unwrap();
        if ranks.iter().all(Option::is_none) {
            *ranks = Local::fleet(size).into_iter().map(Some).collect();
        }
        ranks[rank as usize].take().unwrap()
    }

    fn memory(&self, _: &Local, bytes: &[u8]) -> Vec<u8> {
        bytes.to_vec()
    }

    fn bytes(&self, _: &Local, memory: &Vec<u8>) -> Vec<u8> {
        memory.clone()
    }
}

#[test]
fn threads_of_one_process_conform() {
    conforms(Threads::default());
}
