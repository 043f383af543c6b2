"""The Triton backends of the evidence operations in the interpreter, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parent / "interpreted_evidence.py"


def test_triton_backends_in_the_interpreter():
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    # Programs compute columns that are then dropped; on those numpy warns of overflow.
    options = ["-x", "--import-mode=importlib", "-W", "ignore::RuntimeWarning"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, FILE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 75
    assert "skipped" not in done.stdout
