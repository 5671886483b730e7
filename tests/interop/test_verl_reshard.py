"""`dtshard reshard actor actor6 --mesh fsdp=6` writes every file that verl opens on 6 ranks, and training continues."""

import json
import os

import pytest
import torch

import common
import generate
import ranks

ACTOR = os.path.join(common.FIXTURES, "verl", "global_step_10", "actor")
KINDS = ("model", "optim", "extra_state")


@pytest.fixture(scope="module")
def resharded(tmp_path_factory):
    root, done = tmp_path_factory.mktemp("verl"), {}

    def get(world):
        if world not in done:
            done[world] = root / f"actor{world}"
            common.dtshard("reshard", ACTOR, done[world], "--mesh", f"fsdp={world}")
        return done[world]

    return get


def test_source_resumes_in_verl(tmp_path):
    """resume_verl, which the other tests use, accepts the files that verl wrote."""
    common.run_ranks(ranks.resume_verl, 4, tmp_path, ACTOR, 4)


@pytest.mark.parametrize("world", [6, 2, 3, 4])
def test_resharded_checkpoint_resumes_in_verl(resharded, tmp_path, world):
    common.run_ranks(ranks.resume_verl, world, tmp_path, str(resharded(world)), 4)


@pytest.mark.parametrize("world", [6, 2, 3, 4])
def test_resharded_folder_has_the_files_of_verl(resharded, world):
    """Each rank has three files, config and tokenizer are unchanged, and verl's world size is updated."""
    folder = resharded(world)
    files = {f"{kind}_world_size_{world}_rank_{r}.pt" for kind in KINDS for r in range(world)}
    assert set(os.listdir(folder)) == files | {"fsdp_config.json", "huggingface"}
    with open(folder / "fsdp_config.json") as f:
        assert json.load(f) == {"FSDP_version": 2, "world_size": world}
    names = sorted(os.listdir(f"{ACTOR}/huggingface"))
    assert sorted(os.listdir(folder / "huggingface")) == names
    for name in names:
        with open(f"{ACTOR}/huggingface/{name}", "rb") as a, open(folder / "huggingface" / name, "rb") as b:
            assert a.read() == b.read(), name


@pytest.mark.parametrize("world", [6, 3])
def test_verify_accepts_the_resharded_checkpoint(resharded, world):
    common.dtshard("verify", ACTOR, resharded(world))


def test_reshard_to_six_ranks_and_back_keeps_the_state(resharded, tmp_path):
    """4 -> 6 -> 4 ranks: training resumes from equal state."""
    common.dtshard("reshard", resharded(6), tmp_path / "actor", "--mesh", "fsdp=4")
    common.run_ranks(ranks.resume_verl, 4, tmp_path, str(tmp_path / "actor"), 4)


def test_repeated_reshard_writes_identical_bytes(resharded, tmp_path):
    common.dtshard("reshard", ACTOR, tmp_path / "again", "--mesh", "fsdp=6")
    for kind in KINDS:
        for r in range(6):
            name = f"{kind}_world_size_6_rank_{r}.pt"
            assert (tmp_path / "again" / name).read_bytes() == (resharded(6) / name).read_bytes(), name


def test_per_rank_random_state_gives_a_note(tmp_path):
    """A note says what happens to the random state of each rank."""
    done = common.dtshard("reshard", ACTOR, tmp_path / "x", "--mesh", "fsdp=6")
    assert "rng" in done.stderr


@pytest.mark.parametrize("how", ["rank0", "drop"])
def test_on_conflict_selects_the_random_state(tmp_path, how):
    """--on-conflict keeps the first rank's random state for all ranks, or drops it; values that are equal on all ranks stay."""
    common.dtshard("reshard", ACTOR, tmp_path / "x", "--mesh", "fsdp=6", "--on-conflict", how)
    info, _ = common.trainer_truth("verl")
    for r in range(6):
        found = torch.load(tmp_path / "x" / f"extra_state_world_size_6_rank_{r}.pt", weights_only=False)
        common.assert_equal(found["lr_scheduler"], common.decode(info["ranks_objects"]["extra_state"]["lr_scheduler"]))
        if how == "rank0":
            assert generate.same_rng(found["rng"], generate.rng_state(0))
        else:
            assert "rng" not in found  # dtshard drops the whole random state, because verl fails if only a part is missing
