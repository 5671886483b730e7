"""Other PyTorch releases load files that dtshard wrote, and dtshard reads files that their FSDP1 saved.

Not run by default; DTSHARD_COMPAT_PYTHONS lists interpreters.
"""

import os
import subprocess

import pytest
import torch

import common
import generate

PYTHONS = [p for p in os.environ.get("DTSHARD_COMPAT_PYTHONS", "").split(":") if p]
CHECK = """
import sys
sys.path.insert(0, sys.argv[1])
import generate
from torch import load

case, dcp_folder, torch_file = sys.argv[2:]
info, tensors = generate.read_truth(case)
generate.verify_dcp(dcp_folder, info, tensors)
found = dict(generate.leaves(load(torch_file, weights_only=True)))
assert set(found) == set(tensors) - set(info.get("not_in_dcp", ()))
assert all(generate.same(t, tensors[name]) for name, t in found.items())
"""


@pytest.mark.compat
@pytest.mark.parametrize("case", [c for c in common.cases("dcp") if c != "odd4"])
@pytest.mark.parametrize("python", PYTHONS)
def test_older_release_loads_dcp_folder_and_torch_file(resharded, tmp_path, python, case):
    """The release loads the DCP folder and the torch file. odd4 is left out, because it has dtypes that old releases lack."""
    path = str(tmp_path / "whole.pt")
    common.dtshard("unshard", common.source(case, "dcp"), path)
    arguments = [common.FIXTURES, os.path.join(common.FIXTURES, case), resharded(case, "dcp", "s0s1"), path]
    done = subprocess.run([python, "-c", CHECK, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.compat
@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("python", PYTHONS)
def test_fsdp1_of_other_release_loads_flat_parameters(tmp_path, python, views):
    """FSDP1 of the release saves files and their flat layout; dtshard reads them, and writes files for another world size,
    which the release loads."""
    def fsdp1(work, folder, ranks):
        script = os.path.join(os.path.dirname(__file__), "compat_fsdp1.py")
        command = [python, script, work, folder, "--ranks", str(ranks), *(["--views"] if views else [])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr[-2000:]

    two, three, whole = tmp_path / "two", tmp_path / "three", tmp_path / "whole.pt"
    two.mkdir()
    fsdp1("save", two, 2)
    truth = torch.load(two / "truth.pt", weights_only=True)
    common.dtshard("unshard", two, whole, "--series", "all")
    found = torch.load(whole, weights_only=True)
    assert generate.same(found["model"]["head.weight"], truth["emb.weight/"])
    for name, t in truth.items():
        fqn, _, key = name.partition("/")
        assert generate.same(found["optim"]["state"][fqn][key] if key else found["model"][fqn], t), name

    common.dtshard("flatten", two, three, "--world-size", 3)
    (two / "truth.pt").rename(three / "truth.pt")
    fsdp1("load", three, 3)
