//! Launch: finds out which part of the work this process does, from the command line or from its launcher.
//!
//! Every process derives the same plan, and does one [`Part`] of the bytes. The index of the part and the number of
//! parts come from the command line, or from the environment that srun, torchrun, mpirun or a PMIx server has set.
//! [`launch()`] reads these two numbers. This module does not communicate with other processes.
//!
//! | source, in order of precedence | part | of |
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
//! The innermost launcher determines the part: srun starts torchrun or the daemons of mpirun, and torchrun or the
//! daemons start this process. This process sees the variables of srun and of the inner launcher. A launcher that
//! started only one process is ignored. Therefore `srun -n1` in an array element, or in a job that has `RANK` set,
//! keeps the index of that element or that rank.
//!
//! If two launchers disagree and neither started the other, an error names both, because a wrong guess would convert
//! some parts twice and some parts never. `--part` and `--parts` together override `RANK` if no launcher is known,
//! because `RANK` may be a leftover. `--parts 1` always starts a run of one process, in any environment.

pub mod cpus;
mod environment;
#[cfg(test)]
mod tests;

use std::fmt;

use self::environment::{
    ALONE, AssignedPart, array_index, local_rank, number, open_mpi, pmi, rank_variables, run, slurm_step, text,
    torchrun,
};
use crate::error::{Error, Result};

/// The share of the work that one process does: part `index` of `of`, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Part {
    /// The index of the part, counted from 0.
    pub index: u32,
    /// The number of parts into which the work is divided.
    pub of: u32,
}

impl Part {
    /// Returns the only part of an undivided run, which contains all of the work.
    #[must_use]
    pub fn alone() -> Self {
        Self { index: 0, of: 1 }
    }

    /// Returns true if there is only one part.
    #[must_use]
    pub fn is_alone(self) -> bool {
        self.of == 1
    }
}

/// Formats the part as `INDEX/COUNT`, for example `2/4`.
impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.of)
    }
}

/// A function that returns the value of an environment variable. Tests use a map instead of the real environment. An
/// empty variable counts as not set.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Returns the value of an environment variable of this process.
#[must_use]
pub fn process_environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The launcher or option from which this process got its part index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// There is no launcher: one process does all of the work.
    Alone,
    /// `--part` and `--parts` define the part, without a launcher.
    Options,
    /// The torchrun command of PyTorch started the process.
    Torchrun,
    /// The mpirun command of Open MPI started the process.
    OpenMpi,
    /// A launcher that uses the PMI protocol started the process, for example the mpirun command of MPICH.
    Pmi,
    /// A launcher that uses the PMIx protocol started the process.
    Pmix,
    /// The srun command of Slurm started the process.
    Slurm,
    /// The process is an element of a Slurm job array. The elements need not run at the same time.
    SlurmArray,
    /// `RANK` and `WORLD_SIZE` define the part, without a known launcher.
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

    /// Returns true if all processes of a launch write to one standard output. Their JSON documents would then be
    /// mixed.
    #[must_use]
    pub fn shares_output(self) -> bool {
        matches!(self, Self::Torchrun | Self::OpenMpi | Self::Pmi | Self::Pmix | Self::Slurm)
    }
}

/// The launcher that started this process, and this process's part of the work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The part of the work that this process does.
    pub part: Part,
    /// The launcher that started the processes of all parts. If the launcher and the command line agree, this field
    /// names the launcher.
    pub launcher: Launcher,
    /// The index of this process among the processes of its node; `None` if it is unknown, because the launcher does
    /// not set it.
    pub local_rank: Option<u32>,
    /// The name that Slurm gives to this node; `None` without Slurm.
    pub node: Option<String>,
    /// The name of this launch; `None` if the launcher sets none. All processes of a launch have the same name, and no
    /// other launch has it.
    pub run: Option<String>,
    /// True if this process may wait for the other parts: they run at the same time, and the user did not give
    /// `--no-wait`.
    pub waits: bool,
}

impl Launch {
    /// Returns the launch for a process that has no launcher and does all of the work.
    #[must_use]
    pub fn alone() -> Self {
        Self { part: Part::alone(), launcher: Launcher::Alone, local_rank: None, node: None, run: None, waits: false }
    }
}

/// Returns the launch of this process, from `--part` and `--parts` or from its launcher.
///
/// # Errors
/// `Usage` if one of these holds: the part index is not below the number of parts; `part` is given, but not `parts`;
/// the launcher sets only the rank or only the number of ranks; `parts` is given, but nothing defines the index; two
/// launchers disagree; the launcher and the options disagree.
pub fn launch(part: Option<u32>, parts: Option<u32>, no_wait: bool, env: Env<'_>) -> Result<Launch> {
    let assigned = match (part, parts) {
        (part, Some(parts)) => Some(part_from_options(part, parts, env)?),
        (Some(part), None) => {
            return Err(Error::usage(
                format!("options::part {part} needs options::parts"),
                "add options::parts N, the number of parts; parts are counted from 0",
            ));
        }
        (None, None) => part_from_environment(env)?,
    };
    let node = text(env, "SLURMD_NODENAME");
    let Some(AssignedPart { launcher, part, .. }) = assigned.filter(is_one_of_several) else {
        return Ok(Launch { node, ..Launch::alone() });
    };
    Ok(Launch {
        part,
        launcher,
        local_rank: local_rank(env, launcher),
        node,
        run: run(env, launcher),
        // The elements of an array start independently, and may never run at the same time.
        waits: launcher != Launcher::SlurmArray && !no_wait,
    })
}

/// Returns the part if `--parts` is given. If `--part` is missing, the index comes from the launcher or the
/// environment. If there are several parts, a known launcher must agree with the options.
fn part_from_options(part: Option<u32>, parts: u32, env: Env<'_>) -> Result<AssignedPart> {
    let options = part.map_or_else(
        || format!("options::parts {parts}"),
        |part| format!("options::part {part} options::parts {parts}"),
    );
    if parts == 0 {
        return Err(Error::usage(
            format!("{options}: a run needs at least one part"),
            "set options::parts to the number of processes that share the work",
        ));
    }
    if let Some(index) = part.filter(|index| *index >= parts) {
        return Err(Error::usage(
            format!("{options}: part {index} does not exist, because parts are counted from 0"),
            format!("set options::part to a number from 0 to {}", parts - 1),
        ));
    }
    let from_options =
        |index, launcher| AssignedPart { launcher, part: Part { index, of: parts }, by: options.clone() };
    if parts == 1 {
        return Ok(from_options(0, Launcher::Options));
    }
    match (part, part_from_launcher(env)?, array_index(env)?) {
        // If an array element runs several processes, it is unknown how they are numbered. The command line defines the
        // part completely here, so this is no problem.
        (Some(index), _, Some(_)) => Ok(from_options(index, Launcher::SlurmArray)),
        (None, Some(assigned), Some(element)) => Err(Error::usage(
            format!(
                "{options}: {} selects part {}, but SLURM_ARRAY_TASK_ID={element} selects part {element}",
                assigned.by, assigned.part.index
            ),
            "start only one process in each task of the array; or omit options::parts, so that each array task is a run of \
             its own; or give the part of each process with options::part",
        )),
        (None, None, Some(element)) => array_element(element, parts, env),
        (part, Some(assigned), None)
            if assigned.part.of != parts || part.is_some_and(|index| index != assigned.part.index) =>
        {
            Err(Error::usage(
                format!(
                    "{} started this process as part {} of {} ({}), but the command line has {options}",
                    assigned.launcher.name(),
                    assigned.part.index,
                    assigned.part.of,
                    assigned.by
                ),
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

fn array_element(index: u32, parts: u32, env: Env<'_>) -> Result<AssignedPart> {
    if index < parts {
        let by = format!("SLURM_ARRAY_TASK_ID={index}, options::parts {parts}");
        let assigned = AssignedPart { launcher: Launcher::SlurmArray, part: Part { index, of: parts }, by };
        check_rank_variables(&assigned, env)?;
        return Ok(assigned);
    }
    Err(Error::usage(
        format!("options::parts {parts}: SLURM_ARRAY_TASK_ID={index} is not a valid part; parts are counted from 0"),
        format!("number the array from 0: sbatch --array=0-{}", parts - 1),
    ))
}

/// Returns the part if the command line has `--parts` but not `--part`, and no launcher gives the index. The index
/// comes from `PMIX_RANK`, or from `RANK` and `WORLD_SIZE`.
fn numbered_elsewhere(parts: u32, env: Env<'_>) -> Result<AssignedPart> {
    if let Some(index) = number(env, "PMIX_RANK")? {
        if index >= parts {
            return Err(Error::usage(
                format!("options::parts {parts}: PMIX_RANK={index} is not a valid part; parts are counted from 0"),
                "set options::parts to the number of processes that are started",
            ));
        }
        let by = format!("PMIX_RANK={index}, options::parts {parts}");
        return Ok(AssignedPart { launcher: Launcher::Pmix, part: Part { index, of: parts }, by });
    }
    match rank_variables(env)? {
        Some(assigned) if assigned.part.of == parts => Ok(assigned),
        Some(assigned) => Err(Error::usage(
            format!("the command line has options::parts {parts}, but the environment has {}", assigned.by),
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

/// Returns the part that the environment alone defines. Returns `None` if there is only one part.
fn part_from_environment(env: Env<'_>) -> Result<Option<AssignedPart>> {
    if let Some(assigned) = part_from_launcher(env)? {
        return Ok(Some(assigned));
    }
    let plain = rank_variables(env)?.filter(is_one_of_several);
    // `PMIX_RANK` does not matter if another launcher is known: a PMIx server of Slurm, for example, numbers the tasks
    // of the Slurm step.
    let started = slurm_step(env)?.is_some() || open_mpi(env)?.is_some() || pmi(env)?.is_some();
    match number(env, "PMIX_RANK")? {
        Some(rank) if plain.is_none() && !started => Err(Error::usage(
            format!("PMIX_RANK={rank} is set, but the environment does not contain the number of processes"),
            format!("add options::parts N, the number of processes that are started; {ALONE}"),
        )),
        _ => Ok(plain),
    }
}

fn is_one_of_several(assigned: &AssignedPart) -> bool {
    !assigned.part.is_alone()
}

/// Returns the part from the innermost launcher that started several processes, including this process.
fn part_from_launcher(env: Env<'_>) -> Result<Option<AssignedPart>> {
    if let Some(assigned) = torchrun(env)? {
        // The variables of other launchers need not agree: torchrun sets `RANK` itself, and an outer launcher has
        // started one torchrun agent on each node.
        return Ok(Some(assigned).filter(is_one_of_several));
    }
    let step = slurm_step(env)?;
    let assigned = match (open_mpi(env)?, pmi(env)?) {
        // The step need not agree: the daemons of mpirun may be tasks of a step that has more nodes than mpirun uses.
        (Some(assigned), _) => Some(assigned),
        (None, Some(assigned)) => {
            if let Some(step) = step.filter(|step| step.part.of > assigned.part.of) {
                // A process manager starts its daemons as tasks, and each daemon starts at least one process. So it
                // cannot have started fewer processes than the step has tasks.
                return Err(contradiction(&step, &assigned, "PMI_RANK and PMI_SIZE"));
            }
            Some(assigned)
        }
        (None, None) => step,
    };
    let assigned = assigned.filter(is_one_of_several);
    assigned.iter().try_for_each(|assigned| check_rank_variables(assigned, env))?;
    Ok(assigned)
}

/// Checks that `RANK` and `WORLD_SIZE`, if they are set, agree with the launcher. If they do not agree, another program
/// has set them, and it is not certain which part this process should do.
///
/// # Errors
/// `Usage` if the variables and the launcher disagree.
fn check_rank_variables(assigned: &AssignedPart, env: Env<'_>) -> Result<()> {
    match rank_variables(env)? {
        Some(plain) if plain.part != assigned.part => Err(contradiction(assigned, &plain, "RANK and WORLD_SIZE")),
        _ => Ok(()),
    }
}

fn contradiction(one: &AssignedPart, other: &AssignedPart, unset: &str) -> Error {
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
