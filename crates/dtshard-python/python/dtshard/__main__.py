"""``python -m dtshard``: replaces this process by the program ``dtshard`` of the package."""

import os
import sys
import sysconfig
from importlib.metadata import files
from pathlib import Path

from ._error import usage


def program() -> Path:
    """Return the path of the program that was installed with this package."""
    installed = [Path(str(file.locate())) for file in files("dtshard") or [] if file.name == "dtshard" and "bin" in file.parts]
    beside = Path(sysconfig.get_path("scripts")) / "dtshard"
    for path in [*installed, beside]:
        if path.is_file():
            return path
    raise usage(f"{beside}: the program is missing", "install the wheel of dtshard again")


if __name__ == "__main__":
    os.execv(program(), ["dtshard", *sys.argv[1:]])
