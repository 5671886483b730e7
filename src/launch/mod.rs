//! Launch: which of several processes this one is, as its launcher says.
//!
//! Every process derives the same plan and does one [`Part`] of the bytes. The number of its part, and the number of parts,
//! come from the command line or from the environment that srun, torchrun, mpirun or a PMIx server has set; [`launch()`]
//! finds them. Nothing here talks to another process.
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
//! The innermost launcher wins: srun starts torchrun or the daemons of mpirun, and those start this process, which sees the
//! variables of both. A launcher that started only one process does not count, so `srun -n1` in an array element, or in a
//! job that has `RANK` set, keeps the number of that element or that rank.
//!
//! Two launchers that disagree, where neither started the other, are an error that names both: a wrong guess would convert
//! some parts twice and others never. `--part` and `--parts` together win over a bare `RANK`, which may be left over.
//! `--parts 1` is always a run of its own, in any environment.

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
    pub index: u32,
    pub of: u32,
}

impl Part {
    /// Returns the part that is all of the work.
    #[must_use]
    pub fn alone() -> Self {
        Self { index: 0, of: 1 }
    }

    #[must_use]
    pub fn is_alone(self) -> bool {
        self.of == 1
    }
}

/// `2/4`
impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.of)
    }
}

/// The environment as a function, so that it can be a map in tests. A variable that is empty counts as not set.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Returns a variable of the environment of this process.
#[must_use]
pub fn process_environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The launcher that numbers this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// No launcher: all is one part.
    Alone,
    /// `--part` and `--parts`, and no launcher.
    Options,
    Torchrun,
    OpenMpi,
    Pmi,
    Pmix,
    /// srun.
    Slurm,
    SlurmArray,
    /// `RANK` and `WORLD_SIZE` alone.
    Variables,
}

impl Launcher {
    /// The word for messages.
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

    /// True where all processes of a launch write to one standard output, and a document of each would be a muddle.
    #[must_use]
    pub fn shares_output(self) -> bool {
        matches!(self, Self::Torchrun | Self::OpenMpi | Self::Pmi | Self::Pmix | Self::Slurm)
    }
}

/// How this process was started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    pub part: Part,
    /// Who started all parts; where that agrees with the command line, not the command line.
    pub launcher: Launcher,
    /// Which of the processes on this node, where the launcher counts them.
    pub local_rank: Option<u32>,
    /// The name that Slurm has for this node.
    pub node: Option<String>,
    /// What all processes of this launch have in common and those of no other launch, where there is such a name.
    pub run: Option<String>,
    /// Whether the other parts run at the same time, so that it makes sense to wait for them.
    pub waits: bool,
}

impl Launch {
    #[must_use]
    pub fn alone() -> Self {
        Self { part: Part::alone(), launcher: Launcher::Alone, local_rank: None, node: None, run: None, waits: false }
    }
}

/// Which part this process is: by `--part` and `--parts`, or by whoever started it.
///
/// # Errors
/// `Usage` where a part is not one of so many, is said by halves or not at all, and where two say different things.
pub fn launch(part: Option<u32>, parts: Option<u32>, no_wait: bool, env: Env<'_>) -> Result<Launch> {
    let told = match (part, parts) {
        (part, Some(parts)) => Some(told_by_options(part, parts, env)?),
        (Some(part), None) => {
            return Err(Error::usage(
                format!("options::part {part}: of how many is not said"),
                "say options::parts N, too; parts are counted from 0",
            ));
        }
        (None, None) => told_by_environment(env)?,
    };
    let node = text(env, "SLURMD_NODENAME");
    let Some(Told { launcher, part, .. }) = told.filter(is_one_of_several) else {
        return Ok(Launch { node, ..Launch::alone() });
    };
    Ok(Launch {
        part,
        launcher,
        local_rank: local_rank(env, launcher),
        node,
        run: run(env, launcher),
        // Elements of an array start when they can, maybe never together.
        waits: launcher != Launcher::SlurmArray && !no_wait,
    })
}

/// A part of a number of parts that the command line says, and by whom it was started.
fn told_by_options(part: Option<u32>, parts: u32, env: Env<'_>) -> Result<Told> {
    let options = part.map_or_else(
        || format!("options::parts {parts}"),
        |part| format!("options::part {part} options::parts {parts}"),
    );
    if parts == 0 {
        return Err(Error::usage(
            format!("{options}: at least one part is needed"),
            "options::parts is the number of processes that share the work",
        ));
    }
    if part.is_some_and(|index| index >= parts) {
        return Err(Error::usage(
            format!("{options}: there is no such part"),
            format!("parts are counted from 0, up to options::part {}", parts - 1),
        ));
    }
    let said = |index, launcher| Told { launcher, part: Part { index, of: parts }, by: options.clone() };
    if parts == 1 {
        return Ok(said(0, Launcher::Options));
    }
    match (part, told_by_launcher(env)?, array_index(env)?) {
        // Elements of several processes may be numbered in any way, and this is said in full.
        (Some(index), _, Some(_)) => Ok(said(index, Launcher::SlurmArray)),
        (None, Some(told), Some(element)) => Err(Error::usage(
            format!(
                "{options}: {} says part {} and SLURM_ARRAY_TASK_ID={element} says part {element}",
                told.by, told.part.index
            ),
            "start one process an element; or leave options::parts out, and each element is a run of its own processes; or \
             say options::part, too",
        )),
        (None, None, Some(element)) => array_element(element, parts, env),
        (part, Some(told), None) if told.part.of != parts || part.is_some_and(|index| index != told.part.index) => {
            Err(Error::usage(
                format!("{options}, but {} started this process: {}", told.launcher.name(), told.by),
                format!(
                    "leave {} out; {ALONE}",
                    if part.is_some() { "options::part and options::parts" } else { "options::parts" }
                ),
            ))
        }
        (_, Some(told), None) => Ok(told),
        (Some(index), None, None) => Ok(said(index, Launcher::Options)),
        (None, None, None) => numbered_elsewhere(parts, env),
    }
}

fn array_element(index: u32, parts: u32, env: Env<'_>) -> Result<Told> {
    if index < parts {
        let by = format!("SLURM_ARRAY_TASK_ID={index}, options::parts {parts}");
        let told = Told { launcher: Launcher::SlurmArray, part: Part { index, of: parts }, by };
        agree_with_plain(&told, env)?;
        return Ok(told);
    }
    Err(Error::usage(
        format!("options::parts {parts}: SLURM_ARRAY_TASK_ID={index} is no part, which are counted from 0"),
        format!("number the array from 0: sbatch --array=0-{}", parts - 1),
    ))
}

/// `--parts` and nobody who says both which and of how many.
fn numbered_elsewhere(parts: u32, env: Env<'_>) -> Result<Told> {
    if let Some(index) = number(env, "PMIX_RANK")? {
        if index >= parts {
            return Err(Error::usage(
                format!("options::parts {parts}: PMIX_RANK={index} is no part, which are counted from 0"),
                "options::parts is the number of processes that are started",
            ));
        }
        let by = format!("PMIX_RANK={index}, options::parts {parts}");
        return Ok(Told { launcher: Launcher::Pmix, part: Part { index, of: parts }, by });
    }
    match plain(env)? {
        Some(told) if told.part.of == parts => Ok(told),
        Some(told) => Err(Error::usage(
            format!("options::parts {parts}, but the environment has {}", told.by),
            "leave options::parts out, or say options::part, too",
        )),
        None => Err(Error::usage(
            format!("options::parts {parts}: which of them this is is not said"),
            format!(
                "say options::part K, from 0 to {}; srun, torchrun, mpirun and Slurm arrays say it by themselves",
                parts - 1
            ),
        )),
    }
}

/// What the environment alone says, where it says that there are several.
fn told_by_environment(env: Env<'_>) -> Result<Option<Told>> {
    if let Some(told) = told_by_launcher(env)? {
        return Ok(Some(told));
    }
    let plain = plain(env)?.filter(is_one_of_several);
    // Slurm's own servers of PMIx know the tasks of their step.
    let started = slurm_step(env)?.is_some() || open_mpi(env)?.is_some() || pmi(env)?.is_some();
    match number(env, "PMIX_RANK")? {
        Some(rank) if plain.is_none() && !started => Err(Error::usage(
            format!("PMIX_RANK={rank} in the environment, which does not have the number of processes"),
            format!("say options::parts N, the number of processes that are started; {ALONE}"),
        )),
        _ => Ok(plain),
    }
}

fn is_one_of_several(told: &Told) -> bool {
    !told.part.is_alone()
}

/// The innermost that started several processes, this one among them.
fn told_by_launcher(env: Env<'_>) -> Result<Option<Told>> {
    if let Some(told) = torchrun(env)? {
        // RANK is its own, and what started it started one agent a node.
        return Ok(Some(told).filter(is_one_of_several));
    }
    let step = slurm_step(env)?;
    let told = match (open_mpi(env)?, pmi(env)?) {
        // Its daemons may be tasks of a step, on more nodes than it uses.
        (Some(told), _) => Some(told),
        (None, Some(told)) => {
            if let Some(step) = step.filter(|step| step.part.of > told.part.of) {
                // A process manager starts its daemons as tasks, and each of those a process at least.
                return Err(contradiction(&step, &told, "PMI_RANK and PMI_SIZE"));
            }
            Some(told)
        }
        (None, None) => step,
    };
    let told = told.filter(is_one_of_several);
    told.iter().try_for_each(|told| agree_with_plain(told, env))?;
    Ok(told)
}

/// `RANK` and `WORLD_SIZE` are copied from what a launcher says, or they are of something else.
fn agree_with_plain(told: &Told, env: Env<'_>) -> Result<()> {
    match plain(env)? {
        Some(plain) if plain.part != told.part => Err(contradiction(told, &plain, "RANK and WORLD_SIZE")),
        _ => Ok(()),
    }
}

fn contradiction(one: &Told, other: &Told, unset: &str) -> Error {
    Error::usage(
        format!(
            "two say which part this is, and not the same: {} ({}) and {} ({})",
            one.launcher.name(),
            one.by,
            other.launcher.name(),
            other.by
        ),
        format!("unset {unset} if they are left over; {ALONE}"),
    )
}
