"""Make the `.metadata` of a job of very many ranks, as PyTorch writes it, without the job.

    bench/make_metadata.py DST [--ranks 16384] [--chunks 1000000]

The classes and the pickle are those of `torch.distributed.checkpoint`. The data files are sparse: they have the right lengths,
but no data. So `inspect` and `--dry-run` work, but a conversion does not.
"""

import argparse
import os
import pathlib
import pickle
import sys

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

COLUMNS = 16384
FRAME = 1024


def make(folder: pathlib.Path, ranks: int, chunks: int) -> None:
    folder.mkdir(parents=True)
    tensors, storage, paths = {}, {}, {}
    lengths = [0] * ranks
    for number in range(-(-chunks // ranks)):
        fqn = f"model.layers.{number // 9}.feed_forward.w{number % 9}.weight"
        rows = min(ranks, chunks - number * ranks)
        boxes = []
        for row in range(rows):
            offsets, sizes = torch.Size([row, 0]), torch.Size([1, COLUMNS])
            length = COLUMNS * 4 + FRAME
            boxes.append(ChunkStorageMetadata(offsets, sizes))
            # In a real job, these names come from the pickles of the ranks, so equal names are separate objects.
            index = MetadataIndex("".join(list(fqn)), offsets, row)
            storage[index] = _StorageInfo(f"__{row}_0.distcp", lengths[row], length)
            lengths[row] += length
        size = torch.Size([rows, COLUMNS])
        tensors[fqn] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, boxes)
        paths[fqn] = tuple(fqn.split(".", 1))
    metadata = Metadata(tensors, paths, storage, StorageMeta(save_id="0"))
    with open(folder / ".metadata", "wb") as file:
        pickle.dump(metadata, file)
    for rank, length in enumerate(lengths):
        with open(folder / f"__{rank}_0.distcp", "wb") as file:
            os.truncate(file.fileno(), length)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dst", type=pathlib.Path)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    arguments = parser.parse_args()
    make(arguments.dst, arguments.ranks, arguments.chunks)
    print((arguments.dst / ".metadata").stat().st_size, "bytes of metadata")
    return 0


if __name__ == "__main__":
    sys.exit(main())
