//! The node that this process runs on, by names that mean the same to all processes.

/// Its name, where it has one.
#[must_use]
pub fn this_host() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// The kernel's name for the time since this node came up, where it tells.
#[must_use]
pub fn this_boot() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned()).filter(|id| !id.is_empty())
}
