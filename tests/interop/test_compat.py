"""Other PyTorch releases load what dtshard wrote. Not run by default; DTSHARD_COMPAT_PYTHONS lists interpreters."""

import os
import subprocess

import pytest

import common

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
def test_older_releases(resharded, tmp_path, python, case):
    """The DCP folder and the torch file, in that release; odd4 has dtypes that old ones lack."""
    path = str(tmp_path / "whole.pt")
    common.dtshard("unshard", common.source(case, "dcp"), path)
    arguments = [common.FIXTURES, os.path.join(common.FIXTURES, case), resharded(case, "dcp", "s0s1"), path]
    done = subprocess.run([python, "-c", CHECK, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
