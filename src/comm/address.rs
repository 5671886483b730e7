//! Where a process can be reached, as it tells others.
//!
//! The name of a node need not resolve on another one, and a node has several networks, of which not all lead everywhere.
//! So an address is all there is, and who wants to connect tries all of it. Loopback is for the same node alone: on
//! another one it leads to somebody else.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

use serde::{Deserialize, Serialize};

use super::node::this_boot;

/// A name or number, and a port: what can be tried.
pub(super) type Candidate = (String, u16);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Address {
    pub host: String,
    /// Tells nodes of one name apart; empty where the system does not tell.
    boot: String,
    numbers: Vec<IpAddr>,
    port: u16,
}

impl Address {
    /// Of what listens on this node.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn of(listener: &TcpListener) -> io::Result<Self> {
        let interfaces = if_addrs::get_if_addrs()?;
        // Addresses that hold on one link only mean nothing without its name.
        let numbers = interfaces.iter().filter(|one| !one.is_link_local()).map(if_addrs::Interface::ip).collect();
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Ok(Self { host, boot: this_boot().unwrap_or_default(), numbers, port: listener.local_addr()?.port() })
    }

    /// What to try, from this node.
    pub fn candidates(&self) -> Vec<Candidate> {
        let here = rustix::system::uname();
        let is_here = here.nodename().to_string_lossy() == self.host && this_boot().unwrap_or_default() == self.boot;
        let (loopback, others): (Vec<_>, Vec<_>) = self.numbers.iter().partition(|number| number.is_loopback());
        let loopback = if is_here || others.is_empty() { loopback } else { Vec::new() };
        let name = Some(self.host.clone()).filter(|name| is_here || !is_loopback_name(name));
        let numbers = others.into_iter().chain(loopback).map(ToString::to_string);
        numbers.chain(name).map(|name| (name, self.port)).collect()
    }

    /// The same, and first the number by which a connection to the same node goes.
    pub fn candidates_beside(&self, known: Option<SocketAddr>) -> Vec<Candidate> {
        let mut candidates = self.candidates();
        if let Some(known) = known {
            let first = (known.ip().to_canonical().to_string(), self.port);
            candidates.retain(|candidate| *candidate != first);
            candidates.insert(0, first);
        }
        candidates
    }
}

fn is_loopback_name(name: &str) -> bool {
    name.is_empty() || name.starts_with("localhost")
}

/// The addresses that a name has here.
///
/// # Errors
/// Those of the resolver, which name it.
pub(super) fn resolve(name: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let found = (name, port).to_socket_addrs();
    let unknown = |error: io::Error| {
        let words = error.to_string();
        // What the standard library puts in front says the same.
        let words = words.strip_prefix("failed to lookup address information: ").unwrap_or(&words);
        io::Error::new(error.kind(), format!("cannot resolve {name}: {words}"))
    };
    found.map(Iterator::collect).map_err(unknown)
}

/// Why others may not come to this node by a name that they were told, if something speaks against it.
pub(super) fn doubt(name: &str) -> Option<String> {
    let here = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let addresses = match resolve(name, 1) {
        Ok(addresses) => addresses,
        Err(error) => return Some(format!("{error} (on {here}, where process 0 is)")),
    };
    let own: Vec<IpAddr> = if_addrs::get_if_addrs().ok()?.iter().map(if_addrs::Interface::ip).collect();
    let numbers: Vec<IpAddr> = addresses.iter().map(|address| address.ip().to_canonical()).collect();
    if numbers.iter().any(|number| own.contains(number) || number.is_loopback() || number.is_unspecified()) {
        return None;
    }
    let first = numbers.first()?;
    let which = if first.to_string() == name { name.to_owned() } else { format!("{name} ({first})") };
    Some(format!("{which} is no address of {here}, where process 0 is"))
}

/// Listen on the first of these ports that is free, on all networks of the node. Port 0 is any.
///
/// # Errors
/// Those of the operating system; that a port is taken, if all are.
pub(super) fn listen(ports: &[u16]) -> io::Result<TcpListener> {
    let mut last = io::Error::from(io::ErrorKind::InvalidInput);
    for port in ports {
        // A node without IPv6 has no such address.
        let bound = TcpListener::bind((Ipv6Addr::UNSPECIFIED, *port)).or_else(|error| match error.kind() {
            io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => Err(error),
            _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)),
        });
        match bound {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(host: &str, numbers: &[&str]) -> Address {
        let numbers = numbers.iter().map(|number| number.parse().unwrap()).collect();
        Address { host: host.into(), boot: "other".into(), numbers, port: 7 }
    }

    fn names(candidates: Vec<Candidate>) -> Vec<String> {
        candidates.into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn loopback_is_for_the_same_node_or_the_last_resort() {
        let there = address("there", &["127.0.0.1", "10.0.0.3", "::1", "fd00::3"]);
        assert_eq!(names(there.candidates()), ["10.0.0.3", "fd00::3", "there"]);
        assert_eq!(names(address("localhost", &["127.0.0.1"]).candidates()), ["127.0.0.1"]);
        let known = "[::ffff:10.1.0.3]:99".parse().ok();
        assert_eq!(there.candidates_beside(known)[0], ("10.1.0.3".into(), 7));
        let listener = listen(&[0]).unwrap();
        let here = Address::of(&listener).unwrap().candidates();
        assert!(here.iter().any(|(name, _)| name == "127.0.0.1"), "{here:?}");
        assert!(here.iter().all(|(_, port)| *port == listener.local_addr().unwrap().port()));
    }

    #[test]
    fn the_first_free_port_is_taken() {
        let first = listen(&[0]).unwrap().local_addr().unwrap().port();
        let taken = listen(&[first]).unwrap();
        let second = listen(&[first, 0]).unwrap();
        assert_ne!(taken.local_addr().unwrap().port(), second.local_addr().unwrap().port());
        assert_eq!(listen(&[first]).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }
}
