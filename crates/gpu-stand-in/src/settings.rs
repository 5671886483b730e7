//! Settings of the imitated machine, from environment variables that are read once.

use std::env;
use std::time::Duration;

use crate::fault::{self, PlannedFault};

/// The settings of the imitated machine.
#[derive(Debug)]
pub struct Settings {
    /// The visible devices, by their index in the machine. `GPU_STAND_IN_DEVICES` (default 1) is the number of devices,
    /// and `CUDA_VISIBLE_DEVICES` lists the visible devices in order.
    pub devices: Vec<usize>,
    /// The memory of each device in bytes, from `GPU_STAND_IN_MEMORY_MIB` (default 1024).
    pub memory: usize,
    /// The delay of each work item on a stream, from `GPU_STAND_IN_DELAY_US` (default 200 microseconds).
    pub delay: Duration,
    /// The way in which NCCL reacts to a dead peer, from `GPU_STAND_IN_LOST_PEERS`.
    pub lost_peers: LostPeers,
    /// The fault to inject, and when it happens, from `GPU_STAND_IN_FAULT`.
    pub(crate) fault: Option<PlannedFault>,
}

/// The way in which NCCL reacts to a dead peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostPeers {
    /// NCCL reports an asynchronous error, as over a network.
    Error,
    /// NCCL reports no error (`silent`), as over NVLink and shared memory.
    Silent,
}

impl Settings {
    pub(crate) fn of_environment() -> Self {
        let physical = number("GPU_STAND_IN_DEVICES", 1);
        Self {
            devices: visible(physical, env::var("CUDA_VISIBLE_DEVICES").ok().as_deref()),
            memory: number("GPU_STAND_IN_MEMORY_MIB", 1024) << 20,
            delay: Duration::from_micros(number("GPU_STAND_IN_DELAY_US", 200) as u64),
            lost_peers: match env::var("GPU_STAND_IN_LOST_PEERS").as_deref() {
                Ok("silent") => LostPeers::Silent,
                _ => LostPeers::Error,
            },
            fault: env::var("GPU_STAND_IN_FAULT").ok().map(|text| {
                fault::planned(&text)
                    .unwrap_or_else(|| panic!("GPU_STAND_IN_FAULT is {text}, which is not a known fault"))
            }),
        }
    }
}

fn number(name: &str, default: usize) -> usize {
    let Ok(text) = env::var(name) else { return default };
    text.parse().unwrap_or_else(|_| panic!("{name} is {text}, which is not a number"))
}

/// Returns the indices of the visible devices: the devices in the list `names`, up to the first invalid name, as in
/// CUDA.
fn visible(physical: usize, names: Option<&str>) -> Vec<usize> {
    let Some(names) = names else { return (0..physical).collect() };
    names.split(',').map_while(|name| name.trim().parse().ok().filter(|device| *device < physical)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_end_at_the_first_invalid_name() {
        assert_eq!(visible(2, None), [0, 1]);
        assert_eq!(visible(4, Some("3,1")), [3, 1]);
        assert_eq!(visible(2, Some("1,7,0")), [1]);
        assert_eq!(visible(2, Some("")), [0_usize; 0]);
    }
}
