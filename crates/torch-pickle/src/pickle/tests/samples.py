"""Writes the pickles beside this script: `python samples.py`, with torch 2.15 on CPython 3.11."""

import argparse
import collections
import pathlib
import pickle

import torch
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo

here = pathlib.Path(__file__).parent

shared = [1, 2]
ordered = collections.OrderedDict(a=1)
ordered._metadata = collections.OrderedDict({"": {"version": 1}})
everything = dict(
    none=None,
    yes=True,
    no=False,
    ints=[0, 255, 256, 65535, 65536, -1, -(2**31), 2**31, -(2**63), 2**63 - 1],
    big=[2**63, -(2**63) - 1, 2**64, 255 - 2**72, 0],
    f=[1.5, float("-inf")],
    s=["", "é", "a\ud800b"],
    b=[b"", b"\x00\xff"],
    ba=bytearray(b"x\x80"),
    t=((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    set={7},
    frozen=frozenset([8]),
    c=complex(1, -2),
    shared=[shared, shared],
    od=ordered,
    dd=collections.defaultdict(int, k=1),
    ns=argparse.Namespace(lr=0.5),
    size=torch.Size([2, 3]),
    dtype=torch.bfloat16,
    dev=torch.device("cuda", 1),
)
for protocol in (2, 3, 4, 5):
    (here / f"everything.{protocol}.pkl").write_bytes(pickle.dumps(everything, protocol))

size = torch.Size([4, 6])
offsets = [torch.Size([0, 0]), torch.Size([2, 0])]
tensor = m.TensorStorageMetadata(
    properties=m.TensorProperties(dtype=torch.float32),
    size=size,
    chunks=[m.ChunkStorageMetadata(offsets=o, sizes=torch.Size([2, 6])) for o in offsets],
)
metadata = m.Metadata(
    state_dict_metadata={"w": tensor, "step": m.BytesStorageMetadata()},
    planner_data={"w": ("w",), "step": ("step",)},
    storage_data={
        m.MetadataIndex("w", offsets[0], 0): _StorageInfo("__0_0.distcp", 0, 1577),
        m.MetadataIndex("w", offsets[1], 1): _StorageInfo("__1_0.distcp", 7, 1577),
        m.MetadataIndex("step"): _StorageInfo("__0_0.distcp", 1577, 1261),
    },
    storage_meta=m.StorageMeta(checkpoint_id=pathlib.PurePosixPath("a/b"), save_id="1"),
    version="1.0.0",
)
(here / "metadata.4.pkl").write_bytes(pickle.dumps(metadata, 4))
