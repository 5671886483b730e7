# Functions that all checks use: they make checkpoints, wait for jobs, and compare results.

conversions=(dcp ranks safetensors)

# Makes a small checkpoint, which PyTorch wrote, and one so large that parts begin and end inside its files. Converts both.
make_sources() {
    cp -r "$root/tests/fixtures/llama_tiny/dcp" "$work/small"
    large_model >"$work/model.safetensors"
    dtshard reshard "$work/model.safetensors" "$work/large" --to dcp --mesh dp=4 --quiet
    for source in small large; do
        for to in "${conversions[@]}"; do
            dtshard $(conversion "$to" "$work/$source" "$work/$source.$to") --quiet
        done
    done
}

# Writes a safetensors file of 24 matrices of 5.3 MB, whose rows are not a power of two.
large_model() {
    local layers=24 rows=1031 columns=2571 header='' bytes layer
    bytes=$((rows * columns * 2))
    for ((layer = 0; layer < layers; layer++)); do
        header+=",\"layers.$layer.w\":{\"dtype\":\"BF16\",\"shape\":[$rows,$columns]"
        header+=",\"data_offsets\":[$((layer * bytes)),$(((layer + 1) * bytes))]}"
    done
    header="{${header:1}}"
    printf '%b' "$(printf '\\x%02x' $((${#header} & 255)) $((${#header} >> 8)))" '\0\0\0\0\0\0'
    printf '%s' "$header"
    head -c $((layers * bytes)) /dev/urandom
}

# TO SOURCE DST: prints the arguments of a conversion. DST ends in TO.
conversion() {
    case $1 in
        dcp) echo "reshard $2 $3 --mesh dp=3" ;;
        ranks) echo "reshard $2 $3 --mesh dp=3 --to torch-ranks" ;;
        safetensors) echo "consolidate $2 $3" ;;
    esac
}

# DST EXPECTED: asserts that both have equal bytes, and that no temporary folder is left beside DST.
same() {
    diff -r "$2" "$1"
    [ -z "$(compgen -G ".$1.dtshard-*")" ]
}

# CODE COMMAND...: asserts that the command ends with this exit code.
exits() {
    local code=0
    "${@:2}" || code=$?
    [ $code = "$1" ] || { echo "exit code $code, not $1: ${*:2}"; return 1; }
}

# CONDITION...: waits until the condition holds, at most 60 seconds.
await() {
    local until=$((SECONDS + 60))
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $until ] || { echo "waited in vain for: $*"; squeue; return 1; }
        sleep 0.05
    done
}

# JOB STATE: returns whether the job, or every element of the array that Slurm still lists, is in this state.
is() { [[ $(squeue --noheader --jobs="$1" --states=all --format=%T | sort -u) == "$2" ]]; }

# JOB STATE: waits until the job has ended, and asserts its final state.
ends() {
    await over "$1"
    is "$1" "$2" || { squeue --jobs="$1" --states=all; return 1; }
}
over() { [ -z "$(squeue --noheader --jobs="$1")" ]; }

# DST PARTS: returns whether this number of processes writes DST.
at_work() { [ "$(compgen -G ".$1.dtshard-partial/part-*.lease" | wc -l)" = "$2" ]; }

# TEXT: prints the first block of docs/how-to/slurm.md that contains TEXT.
block() {
    awk -v text="$1" '
        /^```bash$/ { inside = 1; block = ""; next }
        /^```$/ && inside && index(block, text) { printf "%s", block; found = 1; exit }
        /^```$/ { inside = 0 }
        inside { block = block $0 "\n" }
        END { exit !found }' "$root/docs/how-to/slurm.md"
}
