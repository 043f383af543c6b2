"""The gate on machine code, in a process of its own: the interpreter's flag is read at import."""

import json
import os
import subprocess
import sys
from pathlib import Path

import credit_kernels
import pytest

QUALITY = Path(credit_kernels.__file__).parents[1] / "quality"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def gate(*arguments):
    return subprocess.run(
        [sys.executable, QUALITY, *arguments], env=ENVIRONMENT, capture_output=True, text=True
    )


def test_every_program_keeps_its_budget_on_every_target(tmp_path):
    done = gate("--out", tmp_path / "quality.json")
    assert done.returncode == 0, done.stdout + done.stderr
    costs = {
        (cost["name"], cost["target"]): cost
        for cost in json.loads((tmp_path / "quality.json").read_text())["programs"]
    }
    assert {target for _, target in costs} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert len(costs) >= 100 and not any(cost["spills"] for cost in costs.values())
    assert costs["tile_stats", "sm_90"]["registers"] <= 168
    assert costs["evidence_tile_sums_3", "sm_90"]["registers"] <= 168
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        assert 1 < costs["tile_stats", target]["epilogue_percent"] < 10
        assert 1 < costs["tile_gradient", target]["epilogue_percent"] < 10


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("registers = 168", "registers = 100", "tile_stats on sm_90: registers 166, budget 100"),
        ("epilogue_percent = 4 ", "epilogue_percent = 1 ", "tile_stats on sm_90: epilogue_percent"),
        ("[tile_stats]", "[tile_statistics]", "tile_stats on sm_90 has no budget"),
    ],
)
def test_a_lower_budget_is_exceeded(tmp_path, before, after, complaint):
    budgets = (QUALITY / "budgets.toml").read_text()
    lowered = tmp_path / "budgets.toml"
    lowered.write_text(budgets.replace(before, after))
    done = gate("--budgets", lowered, "--only", "tile_stats/sm_90")
    assert done.returncode == 1
    assert complaint in done.stdout


def test_spills_are_found():
    # A tile too large for the registers of sm_80, within the budget of everything else.
    code = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
from binary import cost_of
from credit_kernels.logprob.tables import TileSize
from jobs import tile_job

size = TileSize(rows=256, columns=256, depth=32, warps=8, stages=3)
job = tile_job("tile_stats", "sm_80", size)
violations = runpy.run_path(sys.argv[1] + "/__main__.py")["violations"]
cost = cost_of(job.compile(), job.target, job.tile)
print(violations(job, cost, {"tile_stats": {"sm_80": {"registers": 255}}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(QUALITY)], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert "spills; none is allowed" in done.stdout, done.stdout + done.stderr
