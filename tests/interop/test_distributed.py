"""`dtshard reshard ... --to dcp`, loaded by 2 and 3 processes: world sizes other than that of the files."""

import pytest
import torch

import common
import ranks

TARGET_OF = {2: ("s0x3", "s0s1"), 3: ("s0x4", "strided")}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case,kind", common.SOURCES)
def test_dcp_loads_into_dtensors_of_another_world_size(resharded, tmp_path, case, kind, world):
    """Loads every tensor into DTensors with another layout."""
    expected = str(tmp_path / "expected.pt")
    whole = common.expected_by_key(case, kind)
    torch.save({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in whole.items()}, expected)
    common.run_ranks(ranks.load_dtensors, world, tmp_path, expected,
                     [resharded(case, kind, target) for target in TARGET_OF[world]])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case,kind", [s for s in common.SOURCES if s[0] in ranks.MODELS])
def test_fsdp2_training_resumes_from_dcp(resharded, tmp_path, case, kind, world):
    """Loads model and optimizer under FSDP2 as a trainer does, and takes an optimizer step."""
    common.run_ranks(ranks.load_training, world, tmp_path, case, kind,
                     [resharded(case, kind, target) for target in TARGET_OF[world]])
