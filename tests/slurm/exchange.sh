# Checks that processes that each see only some files of SRC write the bytes of one process: by copying files (--backend cpu),
# and by NCCL between stand-ins for GPUs (crates/gpu-stand-in), which work on one machine and prove nothing about real GPUs.

# Columns: name; SRC, a fixture or a folder that the checks made; numbers of tasks; bucket size; verb, DST and options, in which
# @ stands for the folder of fixtures.
#
# With a copy, the tasks run on one node and on two nodes, each with its own folder, and on two nodes with one folder per node.
# With NCCL, they also run on one node and on two nodes with one folder for all tasks.
conversions_by_exchange() {
    grep '^[a-z]' <<'TABLE'
rows_to_columns      fsdp4/ranks         1,3,8     500   reshard out --mesh tp=3 --placements S(1)
strided_shards       fsdp_tp/ranks       3,8       64MB  reshard out --mesh dp=2,tp=3 --placements _S(0,3),S(0)
into_strided_shards  titan/step-1000     3         4KB   reshard out --mesh dp_shard=3,tp=2 --placements _S(0,2),S(0)
shards_to_replicas   fsdp4/dcp           4         64MB  reshard out --mesh dp=3 --placements R
replicas_to_shards   replicas            3         1KB   reshard out --mesh fsdp=5
of_hybrid_shards     hsdp/ranks          4         64MB  reshard out --mesh fsdp=3 --to dcp
uneven_and_empty     odd4/ranks          3         300   reshard out --mesh fsdp=5
uneven_columns       odd4/dcp            2         1KB   reshard out --mesh a=3 --placements S(1)
of_a_mesh_of_two     outside4/ranks      3         64MB  unshard out.pt
flat_to_flat         flat4/views         3         300   flatten out --world-size 3 --flat-layout @/flat4/views.flat_layout.json
flat_to_shards       flat2/flat          2         64MB  reshard out --mesh fsdp=3 --to dcp --flat-layout @/flat2/flat.flat_layout.json
shards_to_flat       llama_tiny/ranks    4         1KB   flatten out --world-size 3 --wrap model.layers.* --use-orig-params
sharded_tensors      fsdp1_sharded/ranks 4         1KB   reshard out --mesh fsdp=6
partial_reduced      partial2/ranks      2         64MB  reshard out --mesh fsdp=3
partial_consolidated partial2/ranks      3         64    consolidate out
more_ranks_out       llama_tiny/dcp      3         2KB   reshard out --mesh fsdp=8
fewer_ranks_out      fsdp4/ranks         8         64MB  reshard out --mesh fsdp=2
into_local           fsdp_tp/dcp         3         64MB  reshard out --mesh fsdp=2 --to local
of_local             local               4         500   consolidate out.safetensors
cast                 fsdp_tp/ranks       4         500   consolidate out --dtype bf16
of_whole_files       safetensors/sharded 2         300   reshard out --mesh fsdp=3 --placements S(1)
of_hugging_face      dcp_hf/shards       3         64MB  reshard out --mesh fsdp=4 --to torch-ranks
larger_tensors       large               5         4MB   consolidate out
TABLE
}

# MEANS: prints the names of conversions. With a copy, all processes see all of SRC in the end, so a few conversions are enough.
conversions_over() {
    local names='.'
    [ "$1" != copy ] || names='^(rows_to_columns|uneven_and_empty|flat_to_flat|partial_reduced|of_whole_files|larger_tensors) '
    conversions_by_exchange | grep -E "$names" | cut -d' ' -f1
}

check_exchange() {
    local means name
    make_exchanged
    for means in copy $(stand_in); do
        for name in $(conversions_over "$means"); do check exchange_writes_the_bytes_of_one_process_by "$means" "$name"; done
        check killed_task_ends_the_exchange_and_resume_completes_by "$means"
        check requeued_exchange_resumes_by "$means"
    done
    [ "$means" = copy ] || check task_without_a_GPU_stand-in_makes_all_copy_files
}

make_exchanged() {
    local fixtures=$root/tests/fixtures
    dtshard reshard "$fixtures/llama_tiny/dcp" "$work/replicas" --to torch-ranks --mesh dp=2 --placements R --quiet
    dtshard reshard "$fixtures/fsdp_tp/ranks" "$work/local" --to local --quiet
}

# Prints the name of the stand-in if it is available; otherwise prints why it is skipped.
stand_in() {
    local library
    library=$(realpath -m "$(dirname "$program")/libgpu_stand_in.so")
    if [ ! -e "$library" ]; then
        echo "skipped: exchanges over the GPU stand-in, as it is not built (cargo build --release -p gpu-stand-in)" >&2
    elif [ "$(sinfo --noheader --Node --Format=NodeHost | sort -u | wc -l)" != 1 ]; then
        echo "skipped: exchanges over the GPU stand-in, which does not reach from one machine to another" >&2
    else
        mkdir "$work/stand-in"
        ln -s "$library" "$work/stand-in/libcuda.so"
        ln -s "$library" "$work/stand-in/libnccl.so.2"
        echo GPU_stand-in
    fi
}

# MEANS: sets the options for the backend, and the environment in which processes find its libraries.
backend=()
exchange_by() {
    backend=(--backend cpu)
    [ "$1" != copy ] || return 0
    backend=(--backend nccl)
    export LD_LIBRARY_PATH=$work/stand-in GPU_STAND_IN_DEVICES=16 GPU_STAND_IN_DELAY_US=20
    unset DTSHARD_NCCL_LIB
}

# SOURCE FOLDER N: distributes the files of SOURCE over the N folders FOLDER.0/step, FOLDER.1/step, ...
deal() {
    local file to number=0
    mkdir -p $(seq -f "$2.%g/step" 0 $(($3 - 1)))
    while read -r file; do
        to=$2.$((number++ % $3))/step/$file
        mkdir -p "${to%/*}"
        cp -p "$1/$file" "$to"
    done < <(cd "$1" && find . -type f | sort)
}

# MEANS TASKS: prints pairs of the number of nodes and the files that each task sees: of its rank, of its node, or all. With a
# copy, a single task is left out, because it has no task to exchange with.
places() {
    case $1,$2 in
        copy,1) ;;
        *,1) echo 1:all ;;
        copy,*) echo 1:rank 2:rank 2:node ;;
        *) echo 1:rank 2:rank 2:node 1:all 2:all ;;
    esac
}

exchange_writes_the_bytes_of_one_process_by() {
    local source counts bucket verb dst options tasks place nodes sees
    read -r _ source counts bucket verb dst options < <(conversions_by_exchange | grep "^$2 ")
    [ -e "$work/$source" ] && source=$work/$source || source=$root/tests/fixtures/$source
    options=${options//@/$root/tests/fixtures}
    mkdir all expected
    ln -s "$source" all/step
    dtshard "$verb" all/step "expected/$dst" $options --backend cpu
    deal "$source" node 2
    exchange_by "$1"
    for tasks in ${counts//,/ }; do
        deal "$source" rank "$tasks"
        for place in $(places "$1" "$tasks"); do
            nodes=${place%:*} sees=${place#*:}
            echo "$tasks tasks on $nodes nodes, each seeing the files of $sees"
            srun -N"$nodes" -n"$tasks" "$here/apart" "$sees" dtshard "$verb" step "$PWD/$dst" $options \
                $([ "$sees" = all ] || echo --source per-rank) "${backend[@]}" --bucket-size "$bucket" |& tee output
            same "$dst" "expected/$dst"
            # One process prints for all.
            exits 1 grep '^\[[1-9]' output
            [ "$(grep -c wrote output)" = 1 ]
            rm -r "$dst"
        done
        rm -r rank.*
    done
}

# MEANS: print the seconds for which the slow task runs before each stop of half a second, and the seconds after which it is in
# the middle of its work. With a copy, it waits for no other task.
share() { [ "$1" = copy ] && echo .0005 || echo .003; }
middle() { [ "$1" = copy ] && echo 3 || echo 6; }

# Runs with -K, and without, where the other tasks detect the kill and name the killed task. --resume then completes DST.
killed_task_ends_the_exchange_and_resume_completes_by() {
    local command ends task
    export SHARE MIDDLE
    SHARE=$(share "$1") MIDDLE=$(middle "$1")
    deal "$work/large" rank 4
    exchange_by "$1"
    command=(dtshard $(conversion ranks step "$PWD/out.ranks") --source per-rank "${backend[@]}" --bucket-size 1MB)
    for ends in '' -K; do
        # The other tasks wait for the slow task, so it is killed in the middle of the run.
        exits 137 timeout 120 srun $ends -N2 -n4 "$here/apart" rank bash -c '
            [ $SLURM_PROCID = 1 ] || exec "$@"
            SLOWLY=$SHARE "$@" &
            until compgen -G "../.*.dtshard-partial/part-1-*"; do sleep 0.05; done
            sleep $MIDDLE
            kill -KILL $!
            wait $!' task "${command[@]}" |& tee output
        for task in 0 2 3; do grep -E "^\[$task/4] error: (process 1 of 4 .*its process ended|part 1 of 4 stopped: its process is gone)" output || [ "$ends" = -K ]; done
        [ "$ends" = -K ] || grep -qE 'error: (process 1 of 4 .*its process ended|part 1 of 4 stopped)' output
        kept out.ranks
        srun -N2 -n4 "$here/apart" rank "${command[@]}" --resume |& tee output
        grep 'by an earlier run' output
        same out.ranks "$work/large.ranks"
        rm -r out.ranks
    done
}

requeued_exchange_resumes_by() {
    local job
    deal "$work/large" rank 4
    exchange_by "$1"
    cat >job.sbatch <<JOB
#!/bin/bash
srun $here/apart rank sh -c '
    [ \$SLURM_PROCID\$SLURM_RESTART_COUNT != 1 ] || export SLOWLY=$(share "$1")
    exec dtshard $(conversion ranks step "$PWD/out.ranks") --source per-rank ${backend[*]} --bucket-size 1MB --resume'
JOB
    job=$(sbatch --parsable --requeue --open-mode=append --output=job.log -N2 -n4 job.sbatch)
    await at_work out.ranks 4
    sleep "$(middle "$1")"
    scontrol requeue "$job"
    start_again "$job"
    kept out.ranks
    ends "$job" COMPLETED
    same out.ranks "$work/large.ranks"
    grep 'stopped by TERM.*use --resume to continue' job.log
    grep 'by an earlier run' job.log
}

# Runs with the default, --backend auto, and one device for each task, like --gpus-per-task=1; then without a device for one
# task.
task_without_a_GPU_stand-in_makes_all_copy_files() {
    deal "$work/small" rank 4
    exchange_by GPU_stand-in
    together() {
        srun -N2 -n4 sh -c "DEVICES=$1 exec $here/apart rank dtshard $(conversion ranks step "$PWD/out.ranks") \
            --source per-rank -v" |& tee output
        same out.ranks "$work/small.ranks"
        rm -r out.ranks
    }
    together '$SLURM_PROCID'
    [ "$(grep -c 'tensors are sent by NCCL .*, on this process from GPU . (stand-in' output)" = 4 ]
    together '${SLURM_PROCID#3}'
    [ "$(grep -c 'not nccl: process 3 of 4 .*no device' output)" = 4 ]
}
