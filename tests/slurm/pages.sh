# The job scripts of docs/how-to/slurm.md do what the page says.

check_pages() {
    check one_node_and_many
    check an_array_and_its_check
    check after_training
    check an_array_of_which_one_failed_is_not_checked
}

# NAME...: the scripts of these names, and the checkpoint they are about.
scripts() {
    local name
    for name; do block "--job-name=$name " >"$name.sbatch"; done
    ln -s "$work/small" step-1000
}

one_node_and_many() {
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

# Submit as the page does, and wait for the last job, with the word that it must end with.
submitted() {
    block "$1" >submit
    ends "$(bash -e submit | awk 'END { print $NF }')" "$2"
}

an_array_and_its_check() {
    scripts array verify
    submitted 'array=$(' COMPLETED
    same step-1000-dp3 "$work/small.dcp"
    [ "$(cat array.*.log | grep -c wrote)" = 1 ]
    grep 'the same' slurm-*.out
}

after_training() {
    scripts consolidate
    rm step-1000
    printf '#!/bin/bash\ncp -r %q step-1000\n' "$work/small" >train.sbatch
    submitted 'train=$(' COMPLETED
    grep wrote slurm-*.out
    dtshard verify step-1000 step-1000-hf --dtype bf16 --root model
}

an_array_of_which_one_failed_is_not_checked() {
    scripts array verify
    # Something else is where parts would work.
    mkdir .step-1000-dp3.dtshard-partial
    touch .step-1000-dp3.dtshard-partial/precious
    submitted 'array=$(' CANCELLED
    grep 'is in the way, and has no plan' array.2.log
}
