//! The node that this process runs on.

/// The kernel's name for the time since this node came up, where it tells.
#[must_use]
pub fn this_boot() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned()).filter(|id| !id.is_empty())
}
