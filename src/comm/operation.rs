//! Which operation a rank is in: all ranks call the same ones in the same order, so each has a number.
//!
//! Ranks that are in different operations of one number would wait for each other for ever. They tell each other in which
//! they are, before bytes and while they wait.

use crate::error::{Error, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Operation {
    pub name: &'static str,
    /// From 1.
    pub number: u64,
}

const NAMES: [&str; 4] = ["start", "gather", "exchange", "all-gather"];

impl Operation {
    /// Before the first.
    pub const START: Self = Self { name: NAMES[0], number: 0 };
    /// In code and number.
    pub const BYTES: usize = 1 + 8;

    pub fn bytes(self) -> [u8; Self::BYTES] {
        let code = NAMES.iter().position(|name| *name == self.name).expect("one of the names");
        let mut bytes = [0; Self::BYTES];
        bytes[0] = u8::try_from(code).expect("there are few");
        bytes[1..].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    pub fn of_bytes(bytes: [u8; Self::BYTES]) -> Option<Self> {
        let [code, number @ ..] = bytes;
        Some(Self { name: NAMES.get(usize::from(code))?, number: u64::from_le_bytes(number) })
    }

    /// Whether `rank`, which is in `other`, does what this rank does.
    ///
    /// # Errors
    /// `Comm` naming it, and both operations.
    pub fn check_same(self, rank: u32, other: Option<Self>) -> Result<()> {
        if other == Some(self) {
            return Ok(());
        }
        Err(Error::comm(rank, self.name, self.differs(other)))
    }

    pub fn differs(self, other: Option<Self>) -> String {
        let there = other.map_or_else(|| "something unknown".to_owned(), |other| other.to_string());
        format!("it is in {there}, this process in {self}")
    }
}

/// `exchange 7`
impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.name, self.number)
    }
}
