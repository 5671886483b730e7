//! What the machine is pretended to be: environment variables, read once.

use std::env;
use std::time::Duration;

use crate::fault::{self, Planned};

/// The pretended machine.
#[derive(Debug)]
pub struct Settings {
    /// Devices that are visible, by their number in the machine: `GPU_STAND_IN_DEVICES` (1) says how many there are, and
    /// `CUDA_VISIBLE_DEVICES` which of them are seen, in which order.
    pub devices: Vec<usize>,
    /// Bytes of memory of each device: `GPU_STAND_IN_MEMORY_MIB` (1024).
    pub memory: usize,
    /// How late every piece of work on a stream is: `GPU_STAND_IN_DELAY_US` (200).
    pub delay: Duration,
    /// What NCCL tells of a peer that died: `GPU_STAND_IN_LOST_PEERS`.
    pub lost_peers: LostPeers,
    /// What goes wrong, and when: `GPU_STAND_IN_FAULT`.
    pub(crate) fault: Option<Planned>,
}

/// How a dead peer shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostPeers {
    /// As over a network: an asynchronous error.
    Told,
    /// As over NVLink and shared memory (`silent`): not at all.
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
                _ => LostPeers::Told,
            },
            fault: env::var("GPU_STAND_IN_FAULT").ok().map(|text| {
                fault::planned(&text).unwrap_or_else(|| panic!("GPU_STAND_IN_FAULT is {text}, which is no fault"))
            }),
        }
    }
}

fn number(name: &str, default: usize) -> usize {
    let Ok(text) = env::var(name) else { return default };
    text.parse().unwrap_or_else(|_| panic!("{name} is {text}, which is no number"))
}

/// Devices up to the first name that is none, as CUDA takes the variable.
fn visible(physical: usize, names: Option<&str>) -> Vec<usize> {
    let Some(names) = names else { return (0..physical).collect() };
    names.split(',').map_while(|name| name.trim().parse().ok().filter(|device| *device < physical)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_end_at_the_first_that_is_none() {
        assert_eq!(visible(2, None), [0, 1]);
        assert_eq!(visible(4, Some("3,1")), [3, 1]);
        assert_eq!(visible(2, Some("1,7,0")), [1]);
        assert_eq!(visible(2, Some("")), [0_usize; 0]);
    }
}
