//! Names of the node on which this process runs. All processes on a node get the same names, except that a container
//! may have a host name of its own.

/// Returns the host name, if the node has one.
pub fn this_host() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// Returns the id that the kernel gives to the current boot, if it is available.
pub fn this_boot() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned()).filter(|id| !id.is_empty())
}
