# Checks that many processes write the bytes of one process, with srun and as elements of an array.

check_division() {
    local source to
    for source in small large; do
        for to in "${conversions[@]}"; do check srun_tasks_write_the_bytes_of_one_process "$source" "$to"; done
    done
    for to in "${conversions[@]}"; do check array_elements_write_the_bytes_of_one_process "$to"; done
    check array_elements_without_work_succeed
}

srun_tasks_write_the_bytes_of_one_process() {
    local layout
    for layout in '-n1' '-n3' '-N2 -n4'; do
        srun $layout dtshard $(conversion "$2" "$work/$1" "out.$2") |& tee output
        same "out.$2" "$work/$1.$2"
        # One process prints for all.
        exits 1 grep '^\[[1-9]' output
        [ "$(grep -c wrote output)" = 1 ]
        rm -r "out.$2"
    done
}

# Elements run in another order, never all at once. Each element prints how it ended.
array_elements_write_the_bytes_of_one_process() {
    local some rest
    element() { sbatch --parsable --output=%a.log "$@" --wrap="srun dtshard $command --parts 4"; }
    command=$(conversion "$1" "$work/large" "out.$1")
    some=$(element --array=3,1)
    rest=$(element --array=2,0%1 --dependency="afterok:$some")
    ends "$some" COMPLETED
    ends "$rest" COMPLETED
    same "out.$1" "$work/large.$1"
    tail -n 1 ?.log
    [ "$(cat ?.log | grep -c 'is done')" = 3 ]
    [ "$(cat ?.log | grep -c wrote)" = 1 ]
}

# The file is smaller than the smallest part: all elements but one have no work.
array_elements_without_work_succeed() {
    local array
    array=$(sbatch --parsable --output=%a.log --array=0-7 --wrap="
        srun dtshard $(conversion safetensors "$work/small" out.safetensors) --parts 8 --resume")
    ends "$array" COMPLETED
    same out.safetensors "$work/small.safetensors"
    [ "$(cat ?.log | grep -c wrote)" = 1 ]
}
