# Many processes write what one writes, however they are started.

check_division() {
    local source to
    for source in small large; do
        for to in "${conversions[@]}"; do check tasks_of_srun "$source" "$to"; done
    done
    for to in "${conversions[@]}"; do check elements_of_an_array "$to"; done
    check elements_with_nothing_to_do
    for to in dcp safetensors; do check tasks_that_see_their_own_files large "$to"; done
    check tasks_that_see_their_own_files small ranks
    check one_of_those_is_killed
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

# Each task has a folder of its own with some of the files, and none has all.
tasks_that_see_their_own_files() {
    local tasks task file number
    for tasks in 2 5; do
        number=0
        for ((task = 0; task < tasks; task++)); do mkdir "shards.$task"; done
        while read -r file; do
            cp -p "$work/$1/$file" "shards.$((number++ % tasks))/"
        done < <(cd "$work/$1" && find . -type f | sort)
        srun -N2 -n"$tasks" sh -c "exec dtshard $(conversion "$2" "shards.\$SLURM_PROCID" "out.$2") \
            --source per-rank --bucket-size 1MB" |& tee said
        same "out.$2" "$work/$1.$2"
        exits 1 grep '^\[[1-9]' said
        [ "$(grep -c wrote said)" = 1 ]
        rm -r "out.$2" shards.*
    done
}

# One of them is killed: the others name it, and --resume goes on.
one_of_those_is_killed() {
    local command task file number=0
    for ((task = 0; task < 3; task++)); do mkdir "shards.$task"; done
    while read -r file; do
        cp -p "$work/large/$file" "shards.$((number++ % 3))/"
    done < <(cd "$work/large" && find . -type f | sort)
    command="dtshard $(conversion ranks "shards.\$SLURM_PROCID" out.ranks) --source per-rank --bucket-size 1MB"
    # The others wait for it, so it alone is to be slow.
    exits 137 srun -N2 -n3 sh -c "[ \$SLURM_PROCID != 1 ] || exec timeout -s KILL 2 env SLOWLY=1 $command; exec $command" |&
        tee said
    grep -q 'rank 1: .*its process ended' said
    [ ! -e out.ranks ]
    srun -N2 -n3 sh -c "exec $command --resume"
    same out.ranks "$work/large.ranks"
}
