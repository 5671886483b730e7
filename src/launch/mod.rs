//! Launch: finds out which part of the work this process does, from the command line or its launcher.
//!
//! Every process derives the same plan and does one [`Part`] of the bytes. The index of its part, and the number of
//! parts, come from the command line or from the environment that srun, torchrun, mpirun or a PMIx server has set;
//! [`launch()`] finds them. This module does not communicate with other processes.
//!
//! | asked in this order | part | of |
//! |---|---|---|
//! | `--part`, `--parts` | K | N |
//! | torchrun (`TORCHELASTIC_RUN_ID`) | `RANK` | `WORLD_SIZE` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` |
//! | other process managers of MPI | `PMI_RANK` | `PMI_SIZE` |
//! | a task of a Slurm step (`SLURM_STEP_NUM_TASKS`) | `SLURM_PROCID` | `SLURM_STEP_NUM_TASKS` |
//! | an element of a Slurm array | `SLURM_ARRAY_TASK_ID` | `--parts` |
//! | a PMIx server | `PMIX_RANK` | `--parts` |
//! | a PyTorchJob, or by hand | `RANK` | `WORLD_SIZE` |
//!
//! The innermost launcher wins: srun starts torchrun or the daemons of mpirun, and those start this process, which sees
//! the variables of both. A launcher that started only one process is ignored, so `srun -n1` in an array element, or in
//! a job that has `RANK` set, keeps the index of that element or that rank.
//!
//! If two launchers disagree and neither started the other, an error names both: a wrong guess would convert some parts
//! twice and others never. `--part` and `--parts` together override a bare `RANK`, which may be a leftover. `--parts 1`
//! always starts a run of one process, in any environment.

pub mod cpus;
mod environment;
#[cfg(test)]
mod tests;

use std::fmt;

use self::environment::{
    ALONE, Told, array_index, local_rank, number, open_mpi, plain, pmi, run, slurm_step, text, torchrun,
};
use crate::error::{Error, Result};

/// The share of the work that one process does: part `index` of `of`, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part {
    /// Index of the part, from 0.
    pub index: u32,
    /// Number of parts.
    pub of: u32,
}

impl Part {
    /// Returns the single part that contains all of the work.
    #[must_use]
    pub fn alone() -> Self {
        Self { index: 0, of: 1 }
    }

    /// Returns true if there is one part only.
    #[must_use]
    pub fn is_alone(self) -> bool {
        self.of == 1
    }
}

/// Formats the part as `2/4`.
impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.of)
    }
}

/// The environment as a function, so that tests can use a map. An empty variable counts as not set.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Returns a variable of the environment of this process.
#[must_use]
pub fn process_environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The source of the part number of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// No launcher: one process does all of the work.
    Alone,
    /// `--part` and `--parts`, without a launcher.
    Options,
    /// The torchrun command of PyTorch.
    Torchrun,
    /// The mpirun command of Open MPI.
    OpenMpi,
    /// A launcher that speaks PMI, such as the mpirun command of MPICH.
    Pmi,
    /// A launcher that speaks PMIx.
    Pmix,
    /// The srun command of Slurm.
    Slurm,
    /// A Slurm array, whose elements need not run at the same time.
    SlurmArray,
    /// Only `RANK` and `WORLD_SIZE`.
    Variables,
}

impl Launcher {
    /// Returns the name of the launcher for messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Options => "the command line",
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "PMI",
            Self::Pmix => "PMIx",
            Self::Slurm => "srun",
            Self::SlurmArray => "a Slurm array",
            Self::Variables => "the environment",
        }
    }

    /// Returns true if all processes of a launch share one standard output, where several JSON documents would mix.
    #[must_use]
    pub fn shares_output(self) -> bool {
        matches!(self, Self::Torchrun | Self::OpenMpi | Self::Pmi | Self::Pmix | Self::Slurm)
    }
}

/// The launch of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The part of this process.
    pub part: Part,
    /// The launcher that started all parts; it has precedence over the command line if both agree.
    pub launcher: Launcher,
    /// The rank of this process on its node, if the launcher sets it.
    pub local_rank: Option<u32>,
    /// Slurm's name for this node.
    pub node: Option<String>,
    /// A name that all processes of this launch share and no other launch has, if there is such a name.
    pub run: Option<String>,
    /// True if the other parts run at the same time, so that this process can wait for them.
    pub waits: bool,
}

impl Launch {
    /// Returns the launch of a process that does all of the work.
    #[must_use]
    pub fn alone() -> Self {
        Self { part: Part::alone(), launcher: Launcher::Alone, local_rank: None, node: None, run: None, waits: false }
    }
}

/// Returns the part of this process, from `--part` and `--parts` or from its launcher.
///
/// # Errors
/// `Usage` if the part is outside the number of parts, if one of the two is missing, and if two sources disagree.
pub fn launch(part: Option<u32>, parts: Option<u32>, no_wait: bool, env: Env<'_>) -> Result<Launch> {
    let assigned = match (part, parts) {
        (part, Some(parts)) => Some(told_by_options(part, parts, env)?),
        (Some(part), None) => {
            return Err(Error::usage(
                format!("options::part {part} needs options::parts"),
                "add options::parts N, the number of parts; parts are counted from 0",
            ));
        }
        (None, None) => told_by_environment(env)?,
    };
    let node = text(env, "SLURMD_NODENAME");
    let Some(Told { launcher, part, .. }) = assigned.filter(is_one_of_several) else {
        return Ok(Launch { node, ..Launch::alone() });
    };
    Ok(Launch {
        part,
        launcher,
        local_rank: local_rank(env, launcher),
        node,
        run: run(env, launcher),
        // Elements of an array start independently, possibly never at the same time.
        waits: launcher != Launcher::SlurmArray && !no_wait,
    })
}

/// Returns the part that the command line defines, and the launcher that started this process.
fn told_by_options(part: Option<u32>, parts: u32, env: Env<'_>) -> Result<Told> {
    let options = part.map_or_else(
        || format!("options::parts {parts}"),
        |part| format!("options::part {part} options::parts {parts}"),
    );
    if parts == 0 {
        return Err(Error::usage(
            format!("{options}: at least one part is needed"),
            "set options::parts to the number of processes that share the work",
        ));
    }
    if part.is_some_and(|index| index >= parts) {
        return Err(Error::usage(
            format!("{options}: the part does not exist"),
            format!("parts are counted from 0, up to options::part {}", parts - 1),
        ));
    }
    let from_options = |index, launcher| Told { launcher, part: Part { index, of: parts }, by: options.clone() };
    if parts == 1 {
        return Ok(from_options(0, Launcher::Options));
    }
    match (part, told_by_launcher(env)?, array_index(env)?) {
        // Elements with several processes may use any numbering, and the command line defines the part completely.
        (Some(index), _, Some(_)) => Ok(from_options(index, Launcher::SlurmArray)),
        (None, Some(assigned), Some(element)) => Err(Error::usage(
            format!(
                "{options}: {} selects part {}, but SLURM_ARRAY_TASK_ID={element} selects part {element}",
                assigned.by, assigned.part.index
            ),
            "start one process for each element; or omit options::parts to make each element a run of its own; or add \
             options::part",
        )),
        (None, None, Some(element)) => array_element(element, parts, env),
        (part, Some(assigned), None)
            if assigned.part.of != parts || part.is_some_and(|index| index != assigned.part.index) =>
        {
            Err(Error::usage(
                format!("{options}, but {} started this process: {}", assigned.launcher.name(), assigned.by),
                format!(
                    "omit {}; {ALONE}",
                    if part.is_some() { "options::part and options::parts" } else { "options::parts" }
                ),
            ))
        }
        (_, Some(assigned), None) => Ok(assigned),
        (Some(index), None, None) => Ok(from_options(index, Launcher::Options)),
        (None, None, None) => numbered_elsewhere(parts, env),
    }
}

fn array_element(index: u32, parts: u32, env: Env<'_>) -> Result<Told> {
    if index < parts {
        let by = format!("SLURM_ARRAY_TASK_ID={index}, options::parts {parts}");
        let assigned = Told { launcher: Launcher::SlurmArray, part: Part { index, of: parts }, by };
        agree_with_plain(&assigned, env)?;
        return Ok(assigned);
    }
    Err(Error::usage(
        format!("options::parts {parts}: SLURM_ARRAY_TASK_ID={index} is not a valid part; parts are counted from 0"),
        format!("number the array from 0: sbatch --array=0-{}", parts - 1),
    ))
}

/// Returns the part for `--parts` if no launcher provides both the index and the number of parts.
fn numbered_elsewhere(parts: u32, env: Env<'_>) -> Result<Told> {
    if let Some(index) = number(env, "PMIX_RANK")? {
        if index >= parts {
            return Err(Error::usage(
                format!("options::parts {parts}: PMIX_RANK={index} is not a valid part; parts are counted from 0"),
                "set options::parts to the number of processes that are started",
            ));
        }
        let by = format!("PMIX_RANK={index}, options::parts {parts}");
        return Ok(Told { launcher: Launcher::Pmix, part: Part { index, of: parts }, by });
    }
    match plain(env)? {
        Some(assigned) if assigned.part.of == parts => Ok(assigned),
        Some(assigned) => Err(Error::usage(
            format!("options::parts {parts}, but the environment has {}", assigned.by),
            "omit options::parts, or add options::part",
        )),
        None => Err(Error::usage(
            format!("options::parts {parts}: the part of this process is unknown"),
            format!(
                "add options::part K, from 0 to {}; srun, torchrun, mpirun and Slurm arrays provide it automatically",
                parts - 1
            ),
        )),
    }
}

/// Returns the part that the environment alone defines, if there are several parts.
fn told_by_environment(env: Env<'_>) -> Result<Option<Told>> {
    if let Some(assigned) = told_by_launcher(env)? {
        return Ok(Some(assigned));
    }
    let plain = plain(env)?.filter(is_one_of_several);
    // The PMIx servers of Slurm know the tasks of their step.
    let started = slurm_step(env)?.is_some() || open_mpi(env)?.is_some() || pmi(env)?.is_some();
    match number(env, "PMIX_RANK")? {
        Some(rank) if plain.is_none() && !started => Err(Error::usage(
            format!("PMIX_RANK={rank} is set, but the environment does not contain the number of processes"),
            format!("add options::parts N, the number of processes that are started; {ALONE}"),
        )),
        _ => Ok(plain),
    }
}

fn is_one_of_several(assigned: &Told) -> bool {
    !assigned.part.is_alone()
}

/// Returns the part from the innermost launcher that started several processes, including this one.
fn told_by_launcher(env: Env<'_>) -> Result<Option<Told>> {
    if let Some(assigned) = torchrun(env)? {
        // torchrun sets RANK itself, and the outer launcher started one agent on each node.
        return Ok(Some(assigned).filter(is_one_of_several));
    }
    let step = slurm_step(env)?;
    let assigned = match (open_mpi(env)?, pmi(env)?) {
        // The daemons of mpirun may be tasks of a step on more nodes than mpirun uses.
        (Some(assigned), _) => Some(assigned),
        (None, Some(assigned)) => {
            if let Some(step) = step.filter(|step| step.part.of > assigned.part.of) {
                // A process manager starts its daemons as tasks, and each daemon starts at least one process.
                return Err(contradiction(&step, &assigned, "PMI_RANK and PMI_SIZE"));
            }
            Some(assigned)
        }
        (None, None) => step,
    };
    let assigned = assigned.filter(is_one_of_several);
    assigned.iter().try_for_each(|assigned| agree_with_plain(assigned, env))?;
    Ok(assigned)
}

/// Checks that `RANK` and `WORLD_SIZE`, if set, match the launcher: otherwise they come from something else.
fn agree_with_plain(assigned: &Told, env: Env<'_>) -> Result<()> {
    match plain(env)? {
        Some(plain) if plain.part != assigned.part => Err(contradiction(assigned, &plain, "RANK and WORLD_SIZE")),
        _ => Ok(()),
    }
}

fn contradiction(one: &Told, other: &Told, unset: &str) -> Error {
    Error::usage(
        format!(
            "two launchers assign different parts to this process: {} ({}) and {} ({})",
            one.launcher.name(),
            one.by,
            other.launcher.name(),
            other.by
        ),
        format!("unset {unset} if they are left over; {ALONE}"),
    )
}
