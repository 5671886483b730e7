# Recipes for developers; CI calls the same scripts without just.

# What CI runs
check:
    ci/check

# Rust tests
test *arguments:
    cargo test --locked {{ arguments }}

# Formatting and clippy
lint:
    ci/lint

# Every system call fails once, over all verbs and formats: a night's length, or --short
faults *arguments:
    ci/faults {{ arguments }}

# Real PyTorch loads what dtshard writes; arguments go to pytest
interop *arguments:
    ci/interop {{ arguments }}

# The wheel, built, installed and tested
wheel *arguments:
    ci/wheel {{ arguments }}

# Jobs, arrays and preemption in a Slurm of two pretended nodes
slurm:
    ci/slurm

# nccl-rs against a real libnccl.so.2, on a machine without a GPU
nccl file:
    DTSHARD_TEST_NCCL={{ file }} cargo test --locked -p nccl-rs --test real -- --ignored

# What scripts/gpu-check takes to a machine with GPUs and no Rust
gpu-pack folder:
    scripts/gpu-pack {{ folder }}

# scripts/gpu-check itself, without a GPU
gpu-stand-in:
    ci/gpu

# dtshard against cp, in memory: what to look at while working on it
bench *arguments:
    cargo build --release --locked -p dtshard
    "$(ci/venv bench bench/requirements.txt)" bench/run.py --only tmpfs --peer-rounds 0 --print {{ arguments }}

# dtshard against another build of it, in memory, on small checkpoints
bench-against binary *arguments:
    cargo build --release --locked -p dtshard
    "$(ci/venv bench bench/requirements.txt)" bench/run.py --only tmpfs --quick --against {{ binary }} {{ arguments }}

# dtshard against cp and every peer, in memory, on disk and cold; writes docs/explanation/benchmarks.md
bench-peers *arguments:
    cargo build --release --locked -p dtshard
    "$(ci/venv bench bench/requirements.txt)" bench/run.py {{ arguments }}

# Plans for clusters that are not at hand; `--layers 2` for a shorter look
bench-plan *arguments:
    cargo bench --locked --bench plan -- {{ arguments }}

# `.metadata` of a million chunks: laid out, written and read
bench-metadata *arguments:
    cargo bench --locked --bench metadata -- {{ arguments }}

# Make the fixtures again, or some of them
fixtures *cases:
    "$(ci/interop-venv)" tests/fixtures/generate.py {{ cases }}
