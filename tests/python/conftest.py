import os
import pathlib
import sys
import warnings

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])  # for spawned ranks
warnings.filterwarnings("ignore", category=FutureWarning)


@pytest.fixture(scope="session")
def fixtures():
    return HERE.parent / "fixtures"
