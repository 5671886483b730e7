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

# Real PyTorch loads what dtshard writes; arguments go to pytest
interop *arguments:
    ci/interop {{ arguments }}

# Benchmarks
bench *arguments:
    cargo build --release --locked
    "$(ci/interop-venv)" bench/run.py {{ arguments }}

# Plans and metadata for clusters that are not at hand: `just bench-plan`, `just bench-plan --layers 2`
bench-plan *arguments:
    cargo bench --locked --bench plan -- {{ arguments }}

bench-metadata *arguments:
    cargo bench --locked --bench metadata -- {{ arguments }}

# Make the fixtures again, or some of them
fixtures *cases:
    "$(ci/interop-venv)" tests/fixtures/generate.py {{ cases }}
