"""The launcher's package: standard library only, Python 3.9, one file that runs anywhere."""

import ast
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import credit_launch
import pytest
from credit_launch.pack import write_package
from credit_launch.plan import to_json
from launch.example_plans import SMALL

PACKAGE = Path(credit_launch.__file__).parent
SOURCES = sorted(PACKAGE.glob("*.py"))
OLD_PYTHONS = sorted(Path.home().glob(".pyenv/versions/3.9*/bin/python"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_an_old_python_reads_it_and_only_the_standard_library_is_imported(path):
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    assert names <= {*sys.stdlib_module_names, "credit_launch"}


def test_launch_is_not_a_package():
    assert not (PACKAGE.parent / "__init__.py").exists()


def test_the_same_package_is_the_same_file(tmp_path):
    write_package(tmp_path / "a.pyz")
    write_package(tmp_path / "b.pyz")
    assert (tmp_path / "a.pyz").read_bytes() == (tmp_path / "b.pyz").read_bytes()
    held = set(zipfile.ZipFile(tmp_path / "a.pyz").namelist())
    assert held == {"__main__.py", *(f"credit_launch/{path.name}" for path in SOURCES)}


@pytest.mark.parametrize("python", [Path(sys.executable), *OLD_PYTHONS[:1]], ids=str)
def test_the_file_runs_by_itself(tmp_path, python):
    write_package(tmp_path / "launch.pyz")
    found = subprocess.run(
        [python, "-I", str(tmp_path / "launch.pyz"), "--help"], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert "supervise" in found.stdout


def test_outside_of_a_job_it_says_so(tmp_path):
    write_package(tmp_path / "launch.pyz")
    (tmp_path / "plan.json").write_text(to_json(replace(SMALL, run=str(tmp_path))))
    found = subprocess.run(
        [sys.executable, str(tmp_path / "launch.pyz"), "supervise", str(tmp_path / "plan.json")],
        capture_output=True,
        text=True,
        env={},
    )
    assert found.returncode == 2
    assert found.stderr.startswith("error: SLURM_JOB_ID is not set")
