//! The one error of the crate, split by what the reader can do about it.
//!
//! A message says what was expected and what was found, and where; [`Error::hint`] says what to do next and is
//! printed on a line of its own.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use crate::layout::LayoutError;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How chunks fail to tile their tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoverageKind {
    Gap,
    Overlap,
    OutOfBounds,
}

impl CoverageKind {
    /// The word used in messages and in `--json`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gap => "gap",
            Self::Overlap => "overlap",
            Self::OutOfBounds => "out of bounds",
        }
    }
}

/// Any failure of the library.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something.
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },

    /// Bytes that break the rules of their format.
    #[error("{}: {at}: expected {expected}, found {found}", path.display())]
    Malformed { path: PathBuf, at: String, expected: String, found: String, hint: Option<Box<str>> },

    /// Files that others say should be there.
    #[error("{}: {at}: expected {expected}, missing: {missing}", path.display())]
    Missing { path: PathBuf, at: String, expected: String, missing: String, hint: Option<String> },

    /// Something real that this version does not convert.
    #[error("{what}")]
    Unsupported { what: String, hint: Option<String> },

    /// The chunks of a tensor do not cover it exactly once.
    #[error("{fqn}: {} at {region}: {detail}", kind.as_str())]
    Coverage { fqn: String, kind: CoverageKind, region: String, detail: String, hint: Option<String> },

    /// Ranks (or replicas) that should hold the same thing do not.
    #[error("{fqn}: {what} differs between {between}: {detail}")]
    Conflict { fqn: String, what: &'static str, between: String, detail: String, hint: Option<String> },

    /// A layout that cannot be, or cannot be applied to a tensor.
    #[error("{0}")]
    Layout(LayoutError),

    /// Options ask for something that cannot be done.
    #[error("{message}")]
    Usage { message: String, hint: Option<String> },

    /// An error whose message shortens a list, with all names of that list.
    #[error("{error}")]
    Naming { names: Vec<String>, error: Box<Error> },

    /// An error about a tensor, in the checkpoint it is in.
    #[error("{}: {error}", path.display())]
    Within { path: PathBuf, error: Box<Error> },

    /// Another process of the run is gone, or does not do what this one does.
    #[error("{rank}: {op}: {detail}")]
    Comm { rank: Peer, op: &'static str, detail: String, hint: Option<String> },

    /// A GPU, or a library for it, refused something.
    #[error("GPU: {op}: {detail}")]
    Device { op: &'static str, detail: String, hint: Option<String> },

    /// A signal, to this process or to the one of the run that `rank` names; nothing was published. `kept` is what another run
    /// can go on from: where it is, and how much.
    #[error("stopped by {signal}{}; {}", at_peer(rank.as_ref()), what_is_left(kept.as_ref()))]
    Stopped { signal: &'static str, exit: u8, rank: Option<Peer>, kept: Option<(PathBuf, String)> },
}

/// A file or folder that is neither written to nor deleted, because another user may have put it there.
#[derive(Debug, thiserror::Error)]
pub enum Untrusted {
    #[error("{} is a link to {}, which is not followed", path.display(), target.display())]
    Link { path: PathBuf, target: PathBuf },
    #[error("{} belongs to {owner}", path.display())]
    Owner { path: PathBuf, owner: String },
    #[error("{} is a file with {names} names, so that writing to it changes another file, too", path.display())]
    Names { path: PathBuf, names: u64 },
}

impl Untrusted {
    fn hint(&self) -> String {
        match self {
            Self::Link { .. } => String::from("remove the link, or choose another destination"),
            Self::Owner { owner, .. } => {
                format!("ask {owner} to finish or remove it, or choose another destination")
            }
            Self::Names { .. } => String::from("remove that name, or start again with options::restart"),
        }
    }
}

impl From<Untrusted> for io::Error {
    fn from(found: Untrusted) -> Self {
        Self::new(io::ErrorKind::PermissionDenied, found)
    }
}

const PLACEMENTS_HINT: &str =
    "a mesh is named dims (options::mesh dp=4,tp=2), a layout one placement a mesh dim (options::placements 'S(0),R')";
/// What is wrong where in a document, before anybody says in which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    pub at: String,
    pub expected: String,
    pub found: String,
}

impl Wrong {
    pub fn new(at: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self { at: at.into(), expected: expected.into(), found: found.into() }
    }

    #[must_use]
    pub fn within(self, path: &Path) -> Error {
        Error::malformed(path, self.at, self.expected, self.found)
    }
}

/// What a shell says of a command that INT ended.
pub const INTERRUPTED: u8 = 130;

/// `EX_TEMPFAIL` of sysexits.h.
pub const TRY_AGAIN: u8 = 75;

/// What stops a run, and the exit code of one that keeps nothing: as a shell says it of a command that a signal ended.
pub const STOPPING: [(&str, u8); 4] = [("INT", INTERRUPTED), ("TERM", 143), ("USR1", 138), ("USR2", 140)];

fn at_peer(peer: Option<&Peer>) -> String {
    peer.map_or_else(String::new, |peer| format!(" at {peer}"))
}

/// A process of the run, named as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// From 0.
    pub index: u32,
    /// How many there are.
    pub of: Option<u32>,
    /// Where it runs: `n1, pid 4711`.
    pub place: Option<String>,
}

impl From<u32> for Peer {
    fn from(index: u32) -> Self {
        Self { index, of: None, place: None }
    }
}

/// `process 2 of 4 (n1, pid 4711)`, counted from 0.
impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.index)?;
        self.of.map_or(Ok(()), |of| write!(f, " of {of}"))?;
        self.place.as_ref().map_or(Ok(()), |place| write!(f, " ({place})"))
    }
}

fn what_is_left(kept: Option<&(PathBuf, String)>) -> String {
    kept.map_or_else(
        || String::from("nothing was written at the destination"),
        |(path, much)| format!("{} keeps {much}, options::resume goes on from there", path.display()),
    )
}

impl Error {
    /// Returns a function that turns an error of the operating system into `Io`, and an `Untrusted` into `Usage`.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| match source.downcast::<Untrusted>() {
            Ok(found) => Self::usage(found.to_string(), found.hint()),
            Err(source) => Self::Io { action, path, source },
        }
    }

    pub fn malformed(
        path: &Path,
        at: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        let (at, expected, found) = (at.into(), expected.into(), found.into());
        Self::Malformed { path: path.to_path_buf(), at, expected, found, hint: None }
    }

    pub fn unsupported(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), hint: Some(hint.into()) }
    }

    pub fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), hint: Some(hint.into()) }
    }

    pub fn comm(rank: u32, op: &'static str, detail: impl Into<String>) -> Self {
        Self::Comm { rank: rank.into(), op, detail: detail.into(), hint: None }
    }

    /// Adds all names of a list that the message shortens, for `--json`.
    #[must_use]
    pub fn naming(self, names: &[impl AsRef<str>]) -> Self {
        let names = names.iter().map(|name| name.as_ref().to_owned()).collect();
        Self::Naming { names, error: Box::new(self) }
    }

    /// All names of the list that the message shortens.
    #[must_use]
    pub fn names(&self) -> Option<&[String]> {
        match self {
            Self::Naming { names, .. } => Some(names),
            Self::Within { error, .. } => error.names(),
            _ => None,
        }
    }

    /// Adds a hint to an error about missing files that has none.
    #[must_use]
    pub fn missing_hint(mut self, text: &str) -> Self {
        if let Self::Missing { hint, .. } = self.innermost_mut() {
            hint.get_or_insert_with(|| text.to_owned());
        }
        self
    }

    /// The error that is within others.
    fn innermost_mut(&mut self) -> &mut Self {
        match self {
            Self::Within { error, .. } | Self::Naming { error, .. } => error.innermost_mut(),
            error => error,
        }
    }

    /// A file of which this says that it is damaged, and the hint, if there is another one than for every such file.
    pub fn damaged_mut(&mut self) -> Option<(&Path, &mut Option<Box<str>>)> {
        match self {
            Self::Within { error, .. } | Self::Naming { error, .. } => error.damaged_mut(),
            Self::Malformed { path, hint, .. } if !is_written_by_hand(path) => Some((path, hint)),
            _ => None,
        }
    }

    /// The process that this names, if it does.
    pub fn peer_mut(&mut self) -> Option<&mut Peer> {
        match self {
            Self::Comm { rank, .. } | Self::Stopped { rank: Some(rank), .. } => Some(rank),
            _ => None,
        }
    }

    /// Name the checkpoint where the error names a tensor only.
    #[must_use]
    pub fn within(self, path: &Path) -> Self {
        match self {
            Self::Coverage { .. } | Self::Conflict { .. } => {
                Self::Within { path: path.to_path_buf(), error: Box::new(self) }
            }
            Self::Naming { names, error } => Self::Naming { names, error: Box::new(error.within(path)) },
            error => error,
        }
    }

    /// Say where the work of a run that was stopped is kept, and how `much` it is. Whoever sent the signal learns from the exit code that the
    /// same command can go on; a person who interrupts sees it.
    #[must_use]
    pub fn keeping(self, path: &Path, much: String) -> Self {
        match self {
            Self::Stopped { signal, exit, rank, .. } => {
                let exit = if exit == INTERRUPTED { exit } else { TRY_AGAIN };
                Self::Stopped { signal, exit, rank, kept: Some((path.to_path_buf(), much)) }
            }
            error => error,
        }
    }

    /// What the reader can do next, if there is something to say.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Within { error, .. } | Self::Naming { error, .. } => error.hint(),
            Self::Unsupported { hint, .. }
            | Self::Coverage { hint, .. }
            | Self::Conflict { hint, .. }
            | Self::Comm { hint, .. }
            | Self::Device { hint, .. }
            | Self::Usage { hint, .. } => hint.as_deref(),
            Self::Io { source, .. }
                if matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) =>
            {
                Some("free space on the file system of that path, or choose another one")
            }
            Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Some("check the path; relative ones start at the current folder")
            }
            Self::Malformed { hint: Some(hint), .. } => Some(hint),
            Self::Malformed { path, .. } if is_written_by_hand(path) => {
                Some("mend it, or write it anew; docs/how-to/fsdp1.md tells what a flat layout says")
            }
            Self::Malformed { .. } => {
                Some("the file is damaged or was not completely written; `dtshard verify` lists every fault")
            }
            Self::Missing { hint, .. } => {
                Some(hint.as_deref().unwrap_or("copy the missing files into the folder, or save the checkpoint again"))
            }
            Self::Layout(LayoutError::RuleMisfit { .. }) => {
                Some("give it placements that its dims allow, in a rule before that one or in its place")
            }
            Self::Layout(LayoutError::Pattern { .. }) => {
                Some("a pattern is a name with * within a component, ** across and {a,b}; quote it for the shell")
            }
            Self::Layout(LayoutError::File { hint, .. }) => {
                Some(hint.as_deref().unwrap_or("docs/reference/layout-file.md tells what a layout file says"))
            }
            Self::Layout(LayoutError::Cut { hint, .. }) => Some(hint),
            Self::Layout(LayoutError::RankCount { .. } | LayoutError::DuplicateRank { .. }) => {
                Some("a rank for each cell of the mesh, each once, with commas between them: options::mesh_ranks 0,2,1,3")
            }
            Self::Layout(_) => Some(PLACEMENTS_HINT),
            Self::Io { .. } | Self::Stopped { .. } => None,
        }
    }

    /// Returns the JSON document of the error: `kind`, `message`, `file`, `fqn`, `expected`, `found`, `hint`, and `names`
    /// if it lists names.
    #[must_use]
    pub fn to_json(&self) -> Json {
        let mut fqn = self.fqn().map(str::to_owned);
        let (mut file, mut expected, mut found) = (None, None, None);
        let mut inner = self;
        while let Self::Within { error, .. } | Self::Naming { error, .. } = inner {
            if let Self::Within { path, .. } = inner {
                file = Some(path.display().to_string());
            }
            inner = error;
        }
        match inner {
            Self::Io { path, .. } => file = Some(path.display().to_string()),
            Self::Missing { path, at, expected: wanted, missing, .. } => {
                file = Some(path.display().to_string());
                fqn = Some(at.clone());
                (expected, found) = (Some(wanted.clone()), Some(format!("missing: {missing}")));
            }
            Self::Malformed { path, at, expected: wanted, found: got, .. } => {
                file = Some(path.display().to_string());
                fqn = Some(at.clone());
                (expected, found) = (Some(wanted.clone()), Some(got.clone()));
            }
            Self::Coverage { kind, region, detail, .. } => {
                expected = Some(String::from("every element exactly once"));
                found = Some(format!("{} at {region}: {detail}", kind.as_str()));
            }
            Self::Conflict { what, between, detail, .. } => {
                expected = Some(format!("the same from {between}"));
                found = Some(format!("{what} differs: {detail}"));
            }
            Self::Layout(LayoutError::File { file: name, .. }) => file = Some(name.clone()),
            Self::Layout(LayoutError::RuleMisfit { placement, shape, .. }) => {
                expected = Some(format!("placements that fit its shape {shape:?}"));
                found = Some(placement.clone());
            }
            _ => {}
        }
        let mut document = json!({
            "kind": self.kind(),
            "message": self.to_string(),
            "file": file,
            "fqn": fqn,
            "expected": expected,
            "found": found,
            "hint": self.hint(),
        });
        if let Some(names) = self.names() {
            document["names"] = json!(names);
        }
        document
    }

    /// The `kind` of `--json`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Within { error, .. } | Self::Naming { error, .. } => error.kind(),
            Self::Io { .. } => "io",
            Self::Malformed { .. } => "malformed",
            Self::Missing { .. } => "missing",
            Self::Unsupported { .. } => "unsupported",
            Self::Coverage { .. } => "coverage",
            Self::Conflict { .. } => "conflict",
            Self::Comm { .. } => "comm",
            Self::Device { .. } => "device",
            Self::Layout(_) => "layout",
            Self::Usage { .. } => "usage",
            Self::Stopped { .. } => "stopped",
        }
    }

    /// True where the error is about bytes that exist but are wrong, which `verify` reports as a finding (exit 1)
    /// and every other verb as bad input (exit 2).
    #[must_use]
    pub fn is_about_content(&self) -> bool {
        match self {
            Self::Within { error, .. } | Self::Naming { error, .. } => error.is_about_content(),
            Self::Malformed { .. } | Self::Missing { .. } | Self::Coverage { .. } | Self::Conflict { .. } => true,
            _ => false,
        }
    }

    /// The name of the tensor or object it is about, where it is about one.
    #[must_use]
    pub fn fqn(&self) -> Option<&str> {
        match self {
            Self::Within { error, .. } | Self::Naming { error, .. } => error.fqn(),
            Self::Coverage { fqn, .. }
            | Self::Conflict { fqn, .. }
            | Self::Layout(
                LayoutError::RuleMisfit { fqn, .. } | LayoutError::Tensor { fqn, .. } | LayoutError::Cut { fqn, .. },
            ) => Some(fqn),
            _ => None,
        }
    }

    /// The message without the name, for lists that have names in a column of their own.
    #[must_use]
    pub fn detail(&self) -> String {
        if let Self::Within { error, .. } | Self::Naming { error, .. } = self {
            return error.detail();
        }
        let whole = self.to_string();
        let prefix = self.fqn().map(|fqn| format!("{fqn}: ")).unwrap_or_default();
        whole.strip_prefix(&prefix).unwrap_or(&whole).to_owned()
    }
}

impl From<LayoutError> for Error {
    fn from(error: LayoutError) -> Self {
        Self::Layout(error)
    }
}
/// A flat layout, which somebody may have written; indexes of safetensors and torch files are not.
fn is_written_by_hand(path: &Path) -> bool {
    let is_index = path.file_name().is_some_and(|name| name.to_string_lossy().contains(".index."));
    let is_ours = path.file_name().is_some_and(|name| name == "layout.json");
    path.extension().is_some_and(|extension| extension == "json") && !is_index && !is_ours
}
