# Many processes write what one writes, however they are started.

check_division() {
    local source to
    for source in small large; do
        for to in "${conversions[@]}"; do check tasks_of_srun "$source" "$to"; done
    done
    for to in "${conversions[@]}"; do check elements_of_an_array "$to"; done
    check elements_with_nothing_to_do
}

tasks_of_srun() {
    local layout
    for layout in '-n1' '-n3' '-N2 -n4'; do
        srun $layout dtshard $(conversion "$2" "$work/$1" "out.$2") |& tee said
        same "out.$2" "$work/$1.$2"
        # One of them speaks for all.
        exits 1 grep '^\[[1-9]' said
        [ "$(grep -c wrote said)" = 1 ]
        rm -r "out.$2"
    done
}

# In any order, never all at once, and each of them says how it ended.
elements_of_an_array() {
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

# A file that is smaller than the least part: all but one find nothing to do, and DST there before they come or go.
elements_with_nothing_to_do() {
    local array
    array=$(sbatch --parsable --output=%a.log --array=0-7 --wrap="
        srun dtshard $(conversion safetensors "$work/small" out.safetensors) --parts 8 --resume")
    ends "$array" COMPLETED
    same out.safetensors "$work/small.safetensors"
    [ "$(cat ?.log | grep -c wrote)" = 1 ]
}
