"""dtshard compared with PyTorch's converters dcp_to_torch and torch_save_to_dcp: the loaded values are equal."""

import os
import subprocess
import sys

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import common
import generate

# DCP folder -> its case, and the prefix of its names in the ground truth
FOLDERS = {
    "accelerate_llama/pytorch_model_fsdp_0": ("accelerate_llama", "model."),
    "accelerate_llama/optimizer_0": ("accelerate_llama", "optimizer."),
    "titan/step-1000": ("titan", ""), "dcp_trainer": ("dcp_trainer", ""),
}
TORCH_FILES = ["model", "objects", "trainer"]
MESHES = {"one": ["--mesh", "fsdp=1"], "sharded": ["--mesh", "fsdp=3"],
          "columns": ["--mesh", "dp=2,tp=2", "--placements", "S(0),S(1)"]}


@pytest.mark.parametrize("folder", FOLDERS)
def test_unshard_gives_the_tree_of_dcp_to_torch_save(tmp_path, folder):
    """unshard gives the nested tree of dcp_to_torch_save in its order, and both equal the ground truth."""
    source = f"{common.FIXTURES}/{folder}"
    dcp_to_torch_save(source, tmp_path / "theirs.pt")
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=False)
    case, prefix = FOLDERS[folder]
    info, tensors = common.trainer_truth(case)
    items = dict(generate.dcp_items(theirs))
    whole = {n: t for n, t in tensors.items() if n.startswith(prefix)}
    whole.update({n: common.decode(v) for n, v in info["objects"].items() if n.startswith(prefix)})
    common.assert_equal(items, whole, order=False)

    common.dtshard("unshard", source, tmp_path / "ours.pt")
    common.assert_equal(torch.load(tmp_path / "ours.pt", weights_only=False), theirs)
    common.assert_equal(torch.load(tmp_path / "ours.pt", weights_only=True), theirs)


def test_format_utils_commands_give_the_same_values(tmp_path):
    """The commands dcp_to_torch and torch_to_dcp of torch.distributed.checkpoint.format_utils give the values of dtshard."""
    theirs = lambda *arguments: subprocess.run(
        [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", *map(str, arguments)],
        check=True, capture_output=True, timeout=120)
    source = f"{common.FIXTURES}/dcp_trainer"
    theirs("dcp_to_torch", source, tmp_path / "theirs.pt")
    common.dtshard("unshard", source, tmp_path / "ours.pt")
    common.assert_equal(torch.load(tmp_path / "ours.pt"), torch.load(tmp_path / "theirs.pt"))
    # now each tool converts the output of the other one
    theirs("torch_to_dcp", tmp_path / "ours.pt", tmp_path / "dcp_of_ours")
    common.dtshard("reshard", tmp_path / "theirs.pt", tmp_path / "dcp_of_theirs", "--to", "dcp", *MESHES["sharded"])
    common.dtshard("verify", tmp_path / "dcp_of_ours", tmp_path / "dcp_of_theirs")
    common.dtshard("verify", source, tmp_path / "dcp_of_theirs")
    common.assert_equal(common.load_nested(str(tmp_path / "dcp_of_theirs")),
                        common.load_nested(str(tmp_path / "dcp_of_ours")))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("stem", TORCH_FILES)
def test_reshard_to_dcp_loads_like_torch_save_to_dcp(tmp_path, stem, mesh):
    """The result of reshard from a torch file to DCP loads the same values as that of torch_save_to_dcp, for one rank or
    several. torch_save_to_dcp gets an optimizer with names, because dtshard replaces numbers by names."""
    source = os.path.join(common.FIXTURES, "torch_file", f"{stem}.pt")
    named = source
    if stem == "trainer":
        tree, named = torch.load(source, weights_only=False), str(tmp_path / "named.pt")
        names = ["0.weight", "0.bias", "1.weight", "1.bias"]
        torch.save({**tree, "optimizer": common.named(tree["optimizer"], names)}, named)
    torch_save_to_dcp(named, tmp_path / "theirs")
    common.dtshard("reshard", source, tmp_path / "ours", "--to", "dcp", *MESHES[mesh])
    theirs = common.load_nested(str(tmp_path / "theirs"))
    for name, t in generate.leaves(theirs):
        assert not isinstance(t, torch.nn.Parameter), name
    common.assert_equal(common.load_nested(str(tmp_path / "ours")), theirs)
    keys = lambda folder: {k: (v.size, v.properties.dtype) if hasattr(v, "size") else None
                           for k, v in common.dcp_keys(folder).items()}
    assert keys(str(tmp_path / "ours")) == keys(str(tmp_path / "theirs"))
