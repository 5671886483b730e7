# Jobs that are cancelled, preempted, killed and queued again: DST is whole or not there, and --resume completes it.

check_interruptions() {
    check a_job_that_is_queued_again_goes_on
    check a_signal_before_the_end_queues_the_job_again
    check a_cancelled_job_goes_on_with_other_tasks
    check who_is_killed_is_named
    check a_failed_element_is_submitted_again
    check a_second_job_is_refused
}

# DST COMMAND...: a command in the middle of what four parts do to DST.
interrupt() {
    await at_work "$1" 4
    sleep 0.6
    "${@:2}"
}

# DST: nobody sees it, and what was done of it is there.
kept() { [ ! -e "$1" ] && [ -e ".$1.dtshard-partial/plan.json" ]; }

# JOB: queued again, it would wait for two minutes. In the second in which it was killed, nodes refuse it.
start_again() {
    await is "$1" PENDING
    sleep 2
    scontrol update JobId="$1" StartTime=now
}

# The job script of the page, on a checkpoint that takes it some seconds.
submit_preemptible() {
    block '--job-name=preemptible ' >preemptible.sbatch
    ln -s "$work/large" step-1000
    SLOWLY=.001 sbatch --parsable --output=job.log preemptible.sbatch
}

a_job_that_is_queued_again_goes_on() {
    local job
    job=$(submit_preemptible)
    interrupt step-1000-dp3 scontrol requeue "$job"
    await is "$job" PENDING
    kept step-1000-dp3
    start_again "$job"
    ends "$job" COMPLETED
    same step-1000-dp3 "$work/large.dcp"
}

a_signal_before_the_end_queues_the_job_again() {
    local job
    job=$(submit_preemptible)
    interrupt step-1000-dp3 scancel --signal=USR1 "$job"
    await is "$job" PENDING
    kept step-1000-dp3
    start_again "$job"
    ends "$job" COMPLETED
    same step-1000-dp3 "$work/large.dcp"
    grep -q 'stopped by USR1; .*--resume goes on' job.log
    grep -q 'exit code 75' job.log
    scontrol show job "$job" | grep 'Restarts=1'
}

a_cancelled_job_goes_on_with_other_tasks() {
    local job command
    command=$(conversion ranks "$work/large" out.ranks)
    job=$(SLOWLY=.001 sbatch --parsable --output=job.log -N2 -n4 --wrap="srun dtshard $command")
    interrupt out.ranks scancel "$job"
    ends "$job" CANCELLED
    kept out.ranks
    # What is there is neither gone on with nor thrown away unless one says so.
    exits 2 srun -n2 dtshard $command
    srun -n3 dtshard $command --resume
    same out.ranks "$work/large.ranks"
    srun -n2 dtshard $command --resume |& tee said
    grep -q 'is there already' said
}

# Without -K, as the others notice: what they did meanwhile is done.
who_is_killed_is_named() {
    local command
    command=$(conversion safetensors "$work/large" out.safetensors)
    SLOWLY=.001 exits 2 srun -n3 sh -c "[ \$SLURM_PROCID = 1 ] && timeout -s KILL 2 dtshard $command || dtshard $command" |&
        tee said
    grep -q 'part 1 of 3 stopped' said
    kept out.safetensors
    srun -n4 dtshard $command --resume
    same out.safetensors "$work/large.safetensors"
}

a_failed_element_is_submitted_again() {
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

a_second_job_is_refused() {
    local job more
    job=$(SLOWLY=.001 sbatch --parsable --output=job.log -n4 --wrap="srun dtshard $(conversion dcp "$work/large" out.dcp)")
    interrupt out.dcp
    for more in '' --restart; do
        exits 2 dtshard reshard "$work/large" out.dcp --mesh dp=2 $more |& tee said
        grep -q 'another run' said
    done
    ends "$job" COMPLETED
    same out.dcp "$work/large.dcp"
}
