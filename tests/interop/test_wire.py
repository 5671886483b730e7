"""Processes that exchange shards of a tensor receive no more bytes than in DTensor.redistribute.

There is one process per rank. It sees only the file of its rank and would write only the file of its rank; `--dry-run --json`
reports how many bytes it would receive. PyTorch pads uneven shards, so it may receive more. `ci/mpi` runs this test with a
build that has MPI. `-s` prints all figures.
"""

import itertools
import json
import math
import os
import subprocess

import pytest
import torch

import wire
from redistribute import PLACES, refused

LINES = [((n,), (s,), (t,)) for n in (2, 3, 4) for s, t in itertools.product(PLACES, repeat=2) if not refused([s], [t])]
TYPICAL = {
    ("S(0)", "S(0)"): [("S(0)", "R"), ("R", "S(0)"), ("S(1)", "S(1)"), ("R", "R")],
    ("S(0)", "R"): [("S(0)", "S(0)"), ("S(0)", "S(1)")],
    ("R", "S(0)"): [("S(0)", "R")],
    ("R", "S(1)"): [("S(0)", "S(0)")],
    ("R", "R"): [("S(0)", "S(1)")],
    ("S(0)", "S(1)"): [("S(1)", "S(0)"), ("R", "R"), ("S(0)", "R")],
    # The layout of FSDP2 over TP.
    ("_S(0,2)", "S(0)"): [("S(0)", "S(0)"), ("R", "S(0)"), ("S(0)", "R"), ("R", "R")],
    ("P(sum)", "R"): [("R", "R"), ("S(0)", "R"), ("S(0)", "S(1)")],
    ("R", "P(sum)"): [("R", "S(1)")],
    ("P(sum)", "S(0)"): [("R", "S(0)"), ("S(1)", "S(0)"), ("R", "R")],
    ("P(sum)", "P(sum)"): [("R", "R"), ("S(0)", "S(1)"), ("S(0)", "R"), ("P(sum)", "R")],
    ("P(max)", "R"): [("R", "R")],
}
GRIDS = [(sizes, s, t) for sizes in ((2, 2), (2, 3)) for s, targets in TYPICAL.items() for t in targets]
# With the even shape, all ranks have equal shards on every mesh; with the uneven shape, they do not.
SHAPES = {"even": (12, 24), "uneven": (7, 5)}


# Without GPUs, only processes with MPI exchange bytes; others copy files.
MPI_BUILD = os.environ.get("DTSHARD_MPI")
pytestmark = pytest.mark.skipif(not MPI_BUILD, reason="DTSHARD_MPI names no dtshard that is built with MPI")
MPIRUN = ["mpirun", "--oversubscribe", "--allow-run-as-root"]


def by_dtshard(nodes, dst_folder, target):
    words = ["--source", "per-rank", "--backend", "mpi", "--dry-run", "--json", f"--placements={','.join(target)}"]
    command = list(MPIRUN)
    for node in nodes:
        command += [":"] if command != MPIRUN else []
        command += ["-n", "1", MPI_BUILD, "reshard", node, dst_folder / "out", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended
    return sum(rank["received"] for rank in json.loads(ended.stdout)["ranks"])


def label(value):
    return "x".join(map(str, value)) if isinstance(value[0], int) else ",".join(value)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes,source,target", LINES + GRIDS, ids=label)
def test_exchange_receives_no_more_bytes_than_redistribute(tmp_path, sizes, source, target, shape):
    whole = torch.arange(math.prod(SHAPES[shape]), dtype=torch.float32).reshape(SHAPES[shape])
    try:
        most = wire.by_torch(whole, sizes, source, target)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        pytest.skip(f"PyTorch refuses: {error}".split("\n")[0])
    (tmp_path / "results").mkdir()
    found = by_dtshard(wire.save(whole, sizes, source, tmp_path), tmp_path / "results", target)
    print(f"{label(sizes)} {label(source)} -> {label(target)} {shape}: {found} of PyTorch's {most:.0f} bytes")
    assert found <= most
