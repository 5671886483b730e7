"""`dtshard reshard` of rank files to rank files: each process loads its own file with torch.load, as DTensors.

With DTSHARD_COMPAT_PYTHONS and `-m compat`, other PyTorch releases load files that were resharded from rank files of their own.
"""

import glob
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

import common
import generate

PYTHONS = [p for p in os.environ.get("DTSHARD_COMPAT_PYTHONS", "").split(":") if p]

TARGETS = {
    "6": ([("fsdp", 6)], ["S(0)"]),
    "2": ([("fsdp", 2)], ["S(0)"]),
    "2x2": ([("dp", 2), ("tp", 2)], ["S(0)", "S(1)"]),
    "replicas": ([("rep", 2), ("fsdp", 3)], ["R", "S(0)"]),
    "strided": ([("dp", 2), ("tp", 3)], ["_S(0,3)", "S(0)"]),
}


def reshard(source, folder, target, *options):
    mesh, placements = TARGETS[target]
    common.dtshard("reshard", source, folder, "--mesh", ",".join(f"{n}={s}" for n, s in mesh), "--placements",
                   ",".join(placements), *options)


def load(python, tmp_path, folder, truth, target, full=True, **more):
    mesh, placements = TARGETS[target]
    job = {"folder": str(folder), "truth": str(truth), "mesh": mesh, "placements": placements, "full": full,
           "world": math.prod(s for _, s in mesh), "rendezvous": str(tmp_path / "rendezvous"), **more}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank_files.py")
    done = subprocess.run([python, script, str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def objects(case):
    """Returns the objects in the files of a case, by series."""
    import rank_files
    series = common.ranks_tree(case)
    return {kind: generate.encode(rank_files.plain(tree)) for kind, tree in series.items()}


@pytest.mark.parametrize("case,target", [
    *(("fsdp4", target) for target in TARGETS), *(("fsdp_tp", target) for target in TARGETS), ("hsdp", "6"), ("tp2", "2x2"),
])
def test_each_rank_loads_its_dtensors(tmp_path, case, target):
    folder = tmp_path / "written"
    reshard(common.source(case, "ranks"), folder, target)
    load(sys.executable, tmp_path, folder, os.path.join(common.FIXTURES, case), target, objects=objects(case))


@pytest.mark.parametrize("case", ["fsdp4", "fsdp_tp", "odd4", "replicated_plain"])
def test_repeated_reshard_writes_identical_bytes(tmp_path, case):
    for name in ("a", "b"):
        reshard(common.source(case, "ranks"), tmp_path / name, "strided")
    names = sorted(os.listdir(tmp_path / "a"))
    assert names == sorted(os.listdir(tmp_path / "b"))
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


def test_reshard_to_another_mesh_and_back_keeps_values(tmp_path):
    """A conversion to another mesh and back keeps the values."""
    source = common.source("odd4", "ranks")
    reshard(source, tmp_path / "there", "strided")
    reshard(tmp_path / "there", tmp_path / "back", "2")
    common.dtshard("verify", source, tmp_path / "back")


def test_tied_tensors_stay_one_object(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    tied, other = torch.arange(6.0), torch.ones(2, 2, dtype=torch.int64)
    for rank in range(2):
        torch.save({"embed": tied, "other": other, "head": {"weight": tied}}, source / f"model_world_size_2_rank_{rank}.pt")
    reshard(source, tmp_path / "written", "2x2")
    paths = glob.glob(f"{tmp_path}/written/*.pt")
    assert len(paths) == 4
    for path in paths:
        for weights_only in (False, True):
            found = torch.load(path, weights_only=weights_only)
            assert found["embed"] is found["head"]["weight"]
            # The source has no DTensors, so every tensor becomes one.
            assert all(isinstance(found[name], DTensor) for name in ("embed", "other"))
            assert found["embed"].shape == tied.shape and found["other"].shape == other.shape


def local_storage(tensor):
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


@pytest.mark.parametrize("case", ["fsdp4", "fsdp_tp"])
def test_load_without_data_finds_the_storages(tmp_path, case):
    """`torch.load` in `FakeTensorMode` and on the meta device computes the offsets of storages from their order."""
    reshard(common.source(case, "ranks"), tmp_path / "written", "2x2")
    compared = 0
    for path in glob.glob(f"{tmp_path}/written/*.pt"):
        with open(path, "rb") as file:
            data = file.read()
        torch.load(path, map_location="meta", weights_only=False)
        with FakeTensorMode():
            fake = dict(generate.leaves(torch.load(path, weights_only=False)))
        for name, tensor in generate.leaves(torch.load(path, weights_only=False)):
            expected = bytes(local_storage(tensor).tolist())
            if expected:
                offset = local_storage(fake[name])._checkpoint_offset
                assert data[offset:offset + len(expected)] == expected, (path, name)
                compared += 1
    assert compared > 20


def version_of(python):
    return subprocess.run([python, "-c", "import torch; print(torch.__version__.split('+')[0])"],
                          capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.compat
@pytest.mark.parametrize("target", ["6", "2x2", "strided"])
@pytest.mark.parametrize("case", ["fsdp4", "hsdp", "fsdp_tp"])
@pytest.mark.parametrize("python", PYTHONS)
def test_releases_load_files_resharded_from_their_own(tmp_path, python, case, target):
    """dtshard writes meshes in the form in which the source has them, so the release that wrote the source loads the result."""
    version = version_of(python)
    folder = os.path.join(common.FIXTURES, "compat", f"torch-{version}", case)
    if not os.path.isdir(f"{folder}/ranks"):
        pytest.skip(f"no rank files of {version}")
    reshard(f"{folder}/ranks", tmp_path / "written", target)
    # Releases before 2.15 do not support full_tensor() of uneven strided shards.
    load(python, tmp_path, tmp_path / "written", folder, target, full=target != "strided")


@pytest.mark.compat
@pytest.mark.parametrize("case,source,target", [
    ("fsdp4", "dcp", "6"), ("fsdp4", "ranks", "2x2"), ("fsdp_tp", "ranks", "strided"), ("hsdp", "dcp", "replicas"),
])
@pytest.mark.parametrize("python", PYTHONS)
def test_releases_load_files_written_with_torch_version(tmp_path, python, case, source, target):
    """The newest PyTorch wrote the source; --torch-version names the release that loads the result."""
    version = version_of(python)
    if tuple(map(int, version.split(".")[:2])) < (2, 5):
        pytest.skip(f"DTensors of {version} are not written")
    options = ["--to", "torch-ranks", "--torch-version", version]
    options += ["--include", "model"] if source == "dcp" else ["--series", "model"]
    reshard(common.source(case, source), tmp_path / "written", target, *options)
    load(python, tmp_path, tmp_path / "written", os.path.join(common.FIXTURES, case), target, full=target != "strided")
