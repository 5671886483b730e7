import os
import sys

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
HERE = os.path.dirname(os.path.abspath(__file__))
FOLDERS = [HERE, os.path.join(os.path.dirname(HERE), "fixtures")]
sys.path[:0] = FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])  # for the fork server

import pytest

import common


@pytest.fixture(scope="session")
def resharded(tmp_path_factory):
    """Returns a function (case, source, target name) -> folder of the DCP checkpoint that dtshard makes of it, once."""
    root, done = tmp_path_factory.mktemp("resharded"), {}

    def get(case, source, target):
        key = case, source, target
        if key not in done:
            folder = str(root / "-".join(key))
            mesh, placements = common.TARGETS[target]
            common.dtshard("reshard", common.source(case, source), folder, "--to", "dcp",
                           "--mesh", ",".join(f"{n}={s}" for n, s in mesh), "--placements", ",".join(placements))
            done[key] = folder
        return done[key]

    return get
