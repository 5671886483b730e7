//! Where the processes of one run look for each other.
//!
//! | asked in this order | place |
//! |---|---|
//! | `--rendezvous tcp://HOST:PORT` | rank 0 listens there |
//! | `--rendezvous file://DIR` | rank 0 writes there where it listens |
//! | `MASTER_ADDR` and `MASTER_PORT` | rank 0 listens there; under torchrun on one of the ports behind that |
//! | otherwise | rank 0 writes where it listens into a folder that all share |
//!
//! torchrun's agent listens on `MASTER_PORT` itself (`torch/distributed/elastic/agent/server/api.py`), and somebody else
//! may have the next one. So rank 0 takes the first that is free of a few, and others call all of them: a run knows its
//! own by the token.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::environment::{number, text};
use super::{Env, Launcher};
use crate::error::{Error, Result};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Rank 0 listens on one of these ports of this host.
    Tcp { host: String, ports: Vec<u16> },
    /// A folder that all ranks see.
    Folder(PathBuf),
}

/// How many ports behind that of torchrun are tried.
const PORTS_BEHIND: u16 = 8;

impl Place {
    /// The place for a launch; `shared` is a folder that all its processes see.
    ///
    /// # Errors
    /// `Usage` for a `MASTER_PORT` that is none.
    pub fn choose(told: Option<Self>, launcher: Launcher, env: Env<'_>, shared: &Path) -> Result<Self> {
        if let Some(told) = told {
            return Ok(told);
        }
        let (Some(host), Some(port)) = (text(env, "MASTER_ADDR"), number(env, "MASTER_PORT")?) else {
            return Ok(Self::Folder(shared.to_path_buf()));
        };
        let port = u16::try_from(port).ok().filter(|port| *port > 0).ok_or_else(|| {
            Error::usage(
                format!("MASTER_PORT={port} in the environment: expected a port, from 1 to 65535"),
                "unset it, or say --rendezvous",
            )
        })?;
        let ports = match launcher {
            // Below it where there is none behind.
            Launcher::Torchrun => {
                let first = if port > u16::MAX - PORTS_BEHIND { port - PORTS_BEHIND - 1 } else { port };
                (first + 1..=first + PORTS_BEHIND).collect()
            }
            _ => vec![port],
        };
        Ok(Self::Tcp { host, ports })
    }
}

/// As `--rendezvous` says it.
impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(folder) = text.strip_prefix("file://") {
            if folder.is_empty() {
                return Err("expected a folder behind file://".into());
            }
            return Ok(Self::Folder(folder.into()));
        }
        let Some(place) = text.strip_prefix("tcp://") else {
            return Err("expected tcp://HOST:PORT or file://DIR".into());
        };
        let (host, port) = place.rsplit_once(':').ok_or("expected tcp://HOST:PORT, which has no port")?;
        // A number of IPv6 has colons of its own.
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        match port.parse() {
            Ok(port @ 1..) if !host.is_empty() => Ok(Self::Tcp { host: host.into(), ports: vec![port] }),
            Ok(_) if host.is_empty() => Err("expected tcp://HOST:PORT, which has no host".into()),
            _ => Err(format!("expected a port from 1 to 65535, found {port}")),
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Folder(folder) => write!(f, "file://{}", folder.display()),
            Self::Tcp { host, ports } => {
                let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
                write!(f, "tcp://{host}:{}", ports.first().copied().unwrap_or_default())?;
                if ports.len() > 1 { write!(f, " to {}", ports[ports.len() - 1]) } else { Ok(()) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told() {
        let tcp = |host: &str, port| Ok(Place::Tcp { host: host.into(), ports: vec![port] });
        assert_eq!("tcp://node1:29500".parse(), tcp("node1", 29500));
        assert_eq!("tcp://[fd00::1]:80".parse(), tcp("fd00::1", 80));
        assert_eq!("tcp://[fd00::1]:80".parse::<Place>().unwrap().to_string(), "tcp://[fd00::1]:80");
        assert_eq!("file:///shared/a b".parse(), Ok(Place::Folder("/shared/a b".into())));
        for wrong in ["", "node1:80", "tcp://node1", "tcp://:80", "tcp://a:0", "tcp://a:70000", "tcp://a:b", "file://"]
        {
            assert!(wrong.parse::<Place>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_the_environment_says() {
        let shared = Path::new("/shared");
        let choose = |launcher, address: &'static str, port: &'static str| {
            let env = move |name: &str| match name {
                "MASTER_ADDR" => Some(address.to_owned()),
                "MASTER_PORT" => Some(port.to_owned()),
                _ => None,
            };
            Place::choose(None, launcher, &env, shared)
        };
        let tcp = |ports: Vec<u16>| Place::Tcp { host: "n1".into(), ports };
        assert_eq!(choose(Launcher::Slurm, "n1", "29500").unwrap(), tcp(vec![29500]));
        assert_eq!(choose(Launcher::Torchrun, "n1", "29500").unwrap(), tcp((29501..=29508).collect()));
        assert_eq!(choose(Launcher::Torchrun, "n1", "65535").unwrap(), tcp((65527..=65534).collect()));
        assert_eq!(choose(Launcher::Torchrun, "n1", "65527").unwrap(), tcp((65528..=65535).collect()));
        assert_eq!(choose(Launcher::Slurm, "", "29500").unwrap(), Place::Folder(shared.into()));
        assert_eq!(choose(Launcher::Slurm, "n1", "").unwrap(), Place::Folder(shared.into()));
        for wrong in ["0", "65536", "x"] {
            assert!(choose(Launcher::Slurm, "n1", wrong).is_err());
        }
        let told = Some(tcp(vec![1]));
        assert_eq!(Place::choose(told, Launcher::Alone, &|_| None, shared).unwrap(), tcp(vec![1]));
    }
}
