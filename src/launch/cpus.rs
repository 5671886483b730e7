//! The number of CPUs that Slurm has assigned to this process.
//!
//! If the administrator has configured neither cgroups nor affinity, only the environment shows how many CPUs a task
//! may use. The number follows the rule of srun(1): the CPUs per task, if they were requested; otherwise an equal share
//! of the job's CPUs on this node.

use super::Env;
use super::environment::{open_mpi, pmi, slurm_step, text, torchrun};

/// Returns the number of CPUs that Slurm assigned to this process, in a step or a batch script. Returns `None` if Slurm
/// assigned no CPUs to it: Slurm did not start it, or torchrun or mpirun did, so that Slurm assigned the CPUs to the
/// launcher.
#[must_use]
pub fn cpus(env: Env<'_>) -> Option<usize> {
    let number = |name: &str| text(env, name)?.parse::<usize>().ok().filter(|number| *number > 0);
    // `srun --mpi=pmi2` sets the variables of PMI and of Slurm, with the same values.
    let of_step = match (pmi(env), slurm_step(env)) {
        (Ok(Some(task)), Ok(step)) => step.is_some_and(|step| step.part == task.part),
        (Ok(None), Ok(_)) => true,
        _ => false,
    };
    let nested = !of_step || !matches!((torchrun(env), open_mpi(env)), (Ok(None), Ok(None)));
    // The shell of salloc runs on the login node, which is not a node of the job.
    if nested || text(env, "SLURMD_NODENAME").is_none() {
        return None;
    }
    number("SLURM_CPUS_PER_TASK").or_else(|| {
        let all = number("SLURM_CPUS_ON_NODE")?;
        let tasks = match text(env, "SLURM_STEP_NUM_TASKS") {
            // A batch script runs as one process.
            None => 1,
            Some(_) => {
                let nodes = text(env, "SLURM_STEP_TASKS_PER_NODE").or_else(|| text(env, "SLURM_TASKS_PER_NODE"))?;
                tasks_on(text(env, "SLURM_NODEID")?.parse().ok()?, &nodes)?
            }
        };
        Some((all / tasks).max(1))
    })
}

/// Returns the number of tasks on one node, from a list such as `4(x2),1`: 4 for nodes 0 and 1, and 1 for node 2.
fn tasks_on(node: usize, list: &str) -> Option<usize> {
    let mut before = 0_usize;
    for run in list.split(',') {
        let (tasks, nodes) = match run.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (run, 1_usize),
        };
        before = before.checked_add(nodes)?;
        if node < before {
            return tasks.trim().parse().ok().filter(|tasks| *tasks > 0);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::tasks_on;

    #[test]
    fn tasks_per_node_are_runs_of_nodes() {
        let on = |list| [0, 1, 2, 3].map(|node| tasks_on(node, list));
        assert_eq!(on("4(x2),1"), [Some(4), Some(4), Some(1), None]);
        assert_eq!(on("3,1"), [Some(3), Some(1), None, None]);
        for damaged in ["", "0", "x", "4(x", "4(x2", "4(xy)"] {
            assert_eq!(tasks_on(0, damaged), None, "{damaged}");
        }
        assert_eq!(tasks_on(2, "1(x18446744073709551615),5"), Some(1));
        assert_eq!(tasks_on(usize::MAX, "1(x18446744073709551615),5"), None);
    }
}
