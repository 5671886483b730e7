//! What memory this process has.
//!
//! What a catalog takes, with all that an allocator adds to it, is better asked of the kernel than added up.

/// Bytes of anonymous memory: what the process owns, without the pages of files that it has mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Anonymous {
    pub now: u64,
    /// The most it has been until now.
    pub peak: u64,
}

/// `None` where the system does not tell. The peak is that of all memory less the pages of files there are now, so it is
/// right as long as no source was mapped.
#[must_use]
pub fn anonymous() -> Option<Anonymous> {
    parse(&std::fs::read_to_string("/proc/self/status").ok()?)
}

/// The fields of proc_pid_status(5), in its kB of 1024 bytes.
fn parse(status: &str) -> Option<Anonymous> {
    let field = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        value.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    };
    let now = field("RssAnon")?;
    let others = field("RssFile")?.saturating_add(field("RssShmem")?);
    Some(Anonymous { now, peak: field("VmHWM")?.saturating_sub(others).max(now) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_the_kernel_are_read() {
        let status = "Name:\tx\nVmHWM:\t   900 kB\nRssAnon:\t     500 kB\nRssFile:\t     100 kB\nRssShmem:\t   0 kB\n";
        assert_eq!(parse(status), Some(Anonymous { now: 500 << 10, peak: 800 << 10 }));
        assert_eq!(parse("Name:\tx\n"), None);
        assert!(!cfg!(target_os = "linux") || anonymous().is_some_and(|found| found.now > 0));
    }
}
