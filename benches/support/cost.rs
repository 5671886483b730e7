//! Measures the cost of work: CPU time of this process in seconds, and its peak memory.
//!
//! CPU time is used instead of wall time because all measured work runs on one thread, and other programs on the
//! machine must not count. Memory is the memory of the process, in MB of 10^6 bytes, from `/proc/self/status` (Linux).

use std::time::Duration;

/// Returns the CPU time of this process so far.
pub fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).expect("below 10^9"))
}

/// Runs `work`, adds its CPU time to `spent`, and returns its result.
pub fn timed<T>(spent: &mut Duration, work: impl FnOnce() -> T) -> T {
    let start = processor_time();
    let result = work();
    *spent += processor_time().saturating_sub(start);
    result
}

/// Returns the peak of the resident memory of this process so far, in MB.
pub fn peak_mb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).and_then(|number| number.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024 / 1_000_000
}

/// Returns the CPU time `spent` divided by `items`, in nanoseconds.
#[expect(clippy::cast_precision_loss, reason = "figures to read")]
pub fn nanos_each(spent: Duration, items: u64) -> f64 {
    spent.as_nanos() as f64 / items.max(1) as f64
}
