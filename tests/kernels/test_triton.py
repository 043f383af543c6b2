"""The Triton backends in the interpreter, which a process must choose before it imports them."""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = (
    "test_laws.py",
    "test_frozen_head.py",
    "test_vocab_parallel.py",
    "interpreted_logprob.py",
)


def test_triton_backends_in_the_interpreter():
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "KERNEL_BACKENDS": "rows tiles",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    # Programs compute columns that are then dropped; on those numpy warns of overflow.
    options = ["-x", "-W", "ignore::RuntimeWarning"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(HERE / name for name in FILES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 250
    assert "skipped" not in done.stdout
