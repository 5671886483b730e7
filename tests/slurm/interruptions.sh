# Checks jobs that are cancelled, preempted, killed or requeued: DST is complete or does not exist, and --resume completes it.

check_interruptions() {
    check requeued_job_resumes
    check signal_before_the_time_limit_requeues_the_job
    check cancelled_job_resumes_with_other_tasks
    check killed_task_is_named_by_the_others
    check failed_array_element_is_resubmitted
    check second_job_at_one_destination_is_refused
}

# DST COMMAND...: waits until four processes write DST, and then runs the command.
interrupt() {
    await at_work "$1" 4
    sleep 0.6
    "${@:2}"
}

# DST: asserts that DST does not exist, and that the finished work in its partial folder is kept.
kept() { [ ! -e "$1" ] && [ -e ".$1.dtshard-partial/plan.json" ]; }

# JOB: starts a requeued job at once; otherwise it would wait for two minutes. Sleeps first, because nodes refuse the job in the
# second in which it was killed.
start_again() {
    await is "$1" PENDING
    sleep 2
    scontrol update JobId="$1" StartTime=now
}

# Submits the job script `preemptible` of the page, with a checkpoint whose conversion takes some seconds.
submit_preemptible() {
    block '--job-name=preemptible ' >preemptible.sbatch
    ln -s "$work/large" step-1000
    SLOWLY=.001 sbatch --parsable --output=job.log preemptible.sbatch
}

requeued_job_resumes() {
    local job
    job=$(submit_preemptible)
    interrupt step-1000-dp3 scontrol requeue "$job"
    await is "$job" PENDING
    kept step-1000-dp3
    start_again "$job"
    ends "$job" COMPLETED
    same step-1000-dp3 "$work/large.dcp"
}

signal_before_the_time_limit_requeues_the_job() {
    local job
    job=$(submit_preemptible)
    interrupt step-1000-dp3 scancel --signal=USR1 "$job"
    await is "$job" PENDING
    kept step-1000-dp3
    start_again "$job"
    ends "$job" COMPLETED
    same step-1000-dp3 "$work/large.dcp"
    grep -q 'stopped by USR1; .*use --resume to continue' job.log
    grep -q 'exit code 75' job.log
    scontrol show job "$job" | grep 'Restarts=1'
}

cancelled_job_resumes_with_other_tasks() {
    local job command
    command=$(conversion ranks "$work/large" out.ranks)
    job=$(SLOWLY=.001 sbatch --parsable --output=job.log -N2 -n4 --wrap="srun dtshard $command")
    interrupt out.ranks scancel "$job"
    ends "$job" CANCELLED
    kept out.ranks
    # Without an option, dtshard neither resumes nor discards existing work.
    exits 2 srun -n2 dtshard $command
    srun -n3 dtshard $command --resume
    same out.ranks "$work/large.ranks"
    srun -n2 dtshard $command --resume |& tee output
    grep -q 'exists already' output
}

# Runs without -K, so that Slurm does not end the other tasks: they detect the kill, and their finished work is kept.
killed_task_is_named_by_the_others() {
    local command
    command=$(conversion safetensors "$work/large" out.safetensors)
    SLOWLY=.001 exits 2 srun -n3 sh -c "[ \$SLURM_PROCID = 1 ] && timeout -s KILL 2 dtshard $command || dtshard $command" |&
        tee output
    grep -q 'part 1 of 3 stopped' output
    kept out.safetensors
    srun -n4 dtshard $command --resume
    same out.safetensors "$work/large.safetensors"
}

failed_array_element_is_resubmitted() {
    local job command
    command="srun dtshard $(conversion dcp "$work/large" out.dcp) --parts 4 --resume"
    job=$(SLOWLY=.001 sbatch --parsable --output=%a.log --array=0-3 --wrap="$command")
    interrupt out.dcp scancel "${job}_2"
    await over "$job"
    [ ! -e out.dcp ]
    job=$(sbatch --parsable --output=%a.log --open-mode=append --array=2 --wrap="$command")
    ends "$job" COMPLETED
    grep 'wrote' 2.log
    same out.dcp "$work/large.dcp"
}

second_job_at_one_destination_is_refused() {
    local job more
    job=$(SLOWLY=.001 sbatch --parsable --output=job.log -n4 --wrap="srun dtshard $(conversion dcp "$work/large" out.dcp)")
    interrupt out.dcp
    for more in '' --restart; do
        exits 2 dtshard reshard "$work/large" out.dcp --mesh dp=2 $more |& tee output
        grep -q 'another run' output
    done
    ends "$job" COMPLETED
    same out.dcp "$work/large.dcp"
}
