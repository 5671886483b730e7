# Checks that the job scripts of docs/how-to/slurm.md do what the page describes.

check_pages() {
    check job_scripts_for_one_node_and_several_succeed
    check array_job_and_its_verification_succeed
    check conversion_after_a_training_job_succeeds
    check failed_array_is_not_verified
}

# NAME...: extracts the job scripts with these names from the page, and makes the checkpoint step-1000 for them.
scripts() {
    local name
    for name; do block "--job-name=$name " >"$name.sbatch"; done
    ln -s "$work/small" step-1000
}

job_scripts_for_one_node_and_several_succeed() {
    local one many
    scripts consolidate reshard
    one=$(sbatch --parsable --output=one.log consolidate.sbatch)
    many=$(sbatch --parsable --output=many.log reshard.sbatch)
    ends "$one" COMPLETED
    ends "$many" COMPLETED
    dtshard consolidate step-1000 expected --dtype bf16 --quiet
    same step-1000-hf expected
    same step-1000-dp3 "$work/small.dcp"
    [ "$(grep -c wrote many.log)" = 1 ]
}

# TEXT STATE: runs the block of the page that contains TEXT, and waits for its last job, which must end in STATE.
submitted() {
    block "$1" >submit
    ends "$(bash -e submit | awk 'END { print $NF }')" "$2"
}

array_job_and_its_verification_succeed() {
    scripts array verify
    submitted 'array=$(' COMPLETED
    same step-1000-dp3 "$work/small.dcp"
    [ "$(cat array.*.log | grep -c wrote)" = 1 ]
    grep 'the same' slurm-*.out
}

conversion_after_a_training_job_succeeds() {
    scripts consolidate
    rm step-1000
    printf '#!/bin/bash\ncp -r %q step-1000\n' "$work/small" >train.sbatch
    submitted 'train=$(' COMPLETED
    grep wrote slurm-*.out
    dtshard verify step-1000 step-1000-hf --dtype bf16 --root model
}

failed_array_is_not_verified() {
    scripts array verify
    # The partial folder has a file that is not dtshard's, so the array fails.
    mkdir .step-1000-dp3.dtshard-partial
    touch .step-1000-dp3.dtshard-partial/precious
    submitted 'array=$(' CANCELLED
    grep 'exists, and cannot be resumed: it has no valid plan' array.2.log
}
