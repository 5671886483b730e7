"""If a checkpoint is resharded to its own mesh, it has the DTensors that PyTorch saved: mesh, slices, specs and data."""

import pathlib

import pytest
import torch
from torch.distributed.tensor import DTensor

import common


def assert_same(expected, found, name):
    if isinstance(expected, dict):
        assert list(expected) == list(found), name
        for key in expected:
            assert_same(expected[key], found[key], f"{name}.{key}")
    elif isinstance(expected, DTensor):
        assert isinstance(found, DTensor), name
        assert found.device_mesh == expected.device_mesh, name
        assert found._spec == expected._spec, name
        assert found.device_mesh._dim_group_names == expected.device_mesh._dim_group_names, name
        assert torch.equal(found._local_tensor, expected._local_tensor), name
    elif isinstance(expected, torch.Tensor):
        assert not isinstance(found, DTensor) and torch.equal(found, expected), name
    else:
        assert found == expected, name


@pytest.mark.parametrize("case, mesh", [
    ("fsdp4/ranks", "dp=4"), ("fsdp_tp/ranks", "dp=2,tp=2"), ("fsdp_tp6/ranks", "dp=2,tp=3"),
    ("hsdp/ranks", "dp_replicate=2,dp_shard=2"), ("tp2/ranks", "tp=2"), ("verl/global_step_10/actor", "fsdp=4"),
])
def test_reshard_to_the_same_mesh_gives_the_saved_dtensors(tmp_path, case, mesh):
    source = pathlib.Path(common.FIXTURES, case)
    common.dtshard("reshard", source, tmp_path / "again", "--mesh", mesh)
    for series in ("model", "optim"):
        files = sorted(source.glob(f"{series}_world_size_*.pt"))
        assert files
        for file in files:
            expected = torch.load(file, weights_only=False)
            assert_same(expected, torch.load(tmp_path / "again" / file.name, weights_only=False), file.name)


def test_reshard_to_another_world_size_equals_files_of_pytorch(tmp_path):
    common.dtshard("reshard", pathlib.Path(common.FIXTURES, "fsdp4/ranks"), tmp_path / "three", "--mesh", "dp=3")
    for file in sorted(pathlib.Path(common.FIXTURES, "fsdp3/ranks").glob("[mo]*_world_size_3_rank_*.pt")):
        expected = torch.load(file, weights_only=False)
        assert_same(expected, torch.load(tmp_path / "three" / file.name, weights_only=False), file.name)


def test_ranks_outside_the_mesh_keep_their_values(tmp_path):
    source = pathlib.Path(common.FIXTURES, "outside4/ranks")
    common.dtshard("reshard", source, tmp_path / "again")
    files = sorted(source.iterdir())
    assert len(files) == 4
    for file in files:
        expected = torch.load(file, weights_only=False)
        found = torch.load(tmp_path / "again" / file.name, weights_only=False)
        assert_same(expected, found, file.name)
        assert found["w"].device_mesh.get_coordinate() == expected["w"].device_mesh.get_coordinate()
