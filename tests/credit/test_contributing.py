"""CONTRIBUTING.md's worked example: a new method is one file and one line."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT = "from megatron_credit.credit.methods.agreement import Agreement\n"
USED_BY_A_RUN = """
from pathlib import Path
from megatron_credit.trainer.check_credit import check_credit
from megatron_credit.trainer.load_config import load_config

config = load_config(Path("configs/quickstart.toml"), ["credit.method=agreement"])
check_credit(config)
frozen = load_config(
    Path("configs/quickstart.toml"),
    ["credit.method=agreement", 'evidence.teacher={kind="frozen"}'],
)
check_credit(frozen)
"""


def python_blocks():
    """The code of the worked example: the method, its line, its numbers."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## A credit method, step by step")[2]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the package with the method added as the text says."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(
        ROOT / "megatron_credit", copy / "megatron_credit", ignore=shutil.ignore_patterns("*.pyc")
    )
    methods = copy / "megatron_credit/credit/methods"
    method, line, _ = python_blocks()
    (methods / "agreement.py").write_text(method)
    listed = (methods / "__init__.py").read_text()
    listed = listed.replace(
        "from megatron_credit.credit.methods.cal",
        IMPORT + "from megatron_credit.credit.methods.cal",
        1,
    )
    (methods / "__init__.py").write_text(
        listed.replace("        Srpo,\n", "        Srpo,\n" + line, 1)
    )
    return copy


def run(extended, *arguments):
    """A Python process that imports the extended copy; its output where it failed."""
    path = os.pathsep.join([str(extended), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_numbers_of_the_example(extended):
    run(extended, "-c", python_blocks()[2])


def test_the_laws_hold_for_the_example(extended):
    output = run(
        extended,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "-k",
        "agreement",
        "tests/credit/test_laws.py",
    )
    assert int(re.search(r"(\d+) passed", output)[1]) >= 5


def test_a_run_takes_the_example(extended):
    run(extended, "-c", USED_BY_A_RUN)
