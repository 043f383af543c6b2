"""Every shipped configuration at 1 to 2048 nodes, asked of a real controller of 2048 GPU nodes."""

import json
import re
import sys
from pathlib import Path

import pytest
from slurm.runs import ROOT

pytestmark = pytest.mark.slurm

CONFIGS = sorted((ROOT / "configs/launch").glob("*.toml"))
NODES = (1, 2, 64, 512, 2048)
# What does not fit, with the words that say what would; all else is accepted.
REFUSED = {
    ("qwen3_235b_a22b_64_nodes", 1): "use at least 11 nodes",
    ("qwen3_235b_a22b_64_nodes", 2): "use at least 11 nodes",
    ("qwen3_32b_16_nodes", 1): "use at least 3 nodes",
    ("qwen3_32b_16_nodes", 2): "use at least 3 nodes",
    ("qwen3_coder_480b_512_nodes", 1): "use at least 9 nodes",
    ("qwen3_coder_480b_512_nodes", 2): "use at least 9 nodes",
    # 1024 engine jobs are more than an array may have where the site says nothing (1001).
    ("qwen3_coder_480b_512_nodes", 2048): "MaxArraySize",
}


SMALL = "qwen3_8b_2_nodes"
ABSENT = {
    "launch.gpus_per_node=16": "nodes of this site have at most 8",
    'launch.partition="nowhere"': "invalid partition",
    'launch.time="8-00:00:00"': "time limit",
    "launch.cpus_per_node=1000": "node configuration is not available",
}
"""What the site does not have, with words of the refusal."""


@pytest.fixture(scope="module")
def answers(lab, big, started):
    """Slurm's answer for each configuration with a number of nodes or an override, asked while the
    tests that run side by side have `started`."""
    questions = [(path.stem, number, []) for path in CONFIGS for number in NODES]
    questions += [(SMALL, None, [override]) for override in ABSENT]
    asked = [(str(ROOT / f"configs/launch/{name}.toml"), *rest) for name, *rest in questions]
    program = Path(__file__).with_name("ask_big.py")
    result = lab.finished(
        *(sys.executable, str(program), str(lab.site.home / "asked"), json.dumps(asked)),
        SLURM_CONF=big,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    return {
        (name, number or overrides[0]): said
        for (name, number, overrides), said in zip(questions, found, strict=True)
    }


@pytest.mark.parametrize("config", [path.stem for path in CONFIGS])
def test_slurm_takes_it_or_the_refusal_says_what_would_fit(answers, config):
    for number in NODES:
        said = answers[config, number]
        if (config, number) in REFUSED:
            assert said.startswith("refused") and REFUSED[config, number] in said
        else:
            assert said.startswith("accepted"), said
            assert num_nodes(said) == number, said


def num_nodes(said):
    """Nodes that Slurm would give: of the trainer's job and, in an array, of each engine job."""
    jobs = [expanded(text) for text in re.findall(r"on nodes (\S+) in partition", said)]
    if len(jobs) == 1:
        return jobs[0]
    # --test-only answers for one job of an array; the other half of the nodes are its jobs.
    assert len(jobs) == 2 and jobs[1] == 1
    return 2 * jobs[0]


def expanded(nodes):
    """How many names gpu[0001-0064] are."""
    found = re.fullmatch(r"gpu\[(\d+)-(\d+)\]", nodes)
    return int(found[2]) - int(found[1]) + 1 if found else 1


@pytest.mark.parametrize("override", list(ABSENT))
def test_what_the_site_does_not_have_is_refused_before_it_is_submitted(answers, override):
    said = answers[SMALL, override]
    assert said.startswith("refused") and ABSENT[override] in said
