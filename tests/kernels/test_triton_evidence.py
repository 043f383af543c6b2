"""The Triton backends of the evidence operations in the interpreter, each file in its process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# With the least number of tests in each.
FILES = {
    "interpreted_evidence.py": 75,
    "test_frozen_evidence.py": 115,
    "interpreted_far_rows.py": 32,
}


@pytest.mark.parametrize("name", FILES)
def test_triton_backends_in_the_interpreter(name):
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "KERNEL_BACKENDS": "rows tiles",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    # Programs compute columns that are then dropped; on those numpy warns of overflow.
    options = ["-x", "--import-mode=importlib", "-W", "ignore::RuntimeWarning"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, HERE / name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > FILES[name]
    assert "skipped" not in done.stdout
