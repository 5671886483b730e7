//! The memory use of this process. All results are in bytes.
//!
//! The numbers come from the kernel, so they include the overhead of the allocator. A sum over the parts of a catalog
//! would not include this overhead.

/// The size of anonymous memory, which does not include the pages of mapped files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnonymousMemory {
    /// The current size in bytes.
    pub now: u64,
    /// The largest size in bytes since the process started.
    pub peak: u64,
}

/// Returns the memory use of this process, or `None` if the system does not report it. `peak` is the largest size of
/// all memory (including mapped files) minus the current size of the mapped files. If a source was mapped, `peak` is
/// only an estimate, because the size of the mapped files changes.
pub fn anonymous_memory() -> Option<AnonymousMemory> {
    parse(&std::fs::read_to_string("/proc/self/status").ok()?)
}

/// Parses the fields of proc_pid_status(5), whose unit is 1024 bytes.
fn parse(status: &str) -> Option<AnonymousMemory> {
    let field = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        value.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    };
    let now = field("RssAnon")?;
    let others = field("RssFile")?.saturating_add(field("RssShmem")?);
    Some(AnonymousMemory { now, peak: field("VmHWM")?.saturating_sub(others).max(now) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_status_are_parsed() {
        let status = "Name:\tx\nVmHWM:\t   900 kB\nRssAnon:\t     500 kB\nRssFile:\t     100 kB\nRssShmem:\t   0 kB\n";
        assert_eq!(parse(status), Some(AnonymousMemory { now: 500 << 10, peak: 800 << 10 }));
        assert_eq!(parse("Name:\tx\n"), None);
        assert!(!cfg!(target_os = "linux") || anonymous_memory().is_some_and(|found| found.now > 0));
    }
}
