import math
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from megatron_credit.rewards.prm.check import check_prm
from megatron_credit.rewards.prm.config import CallablePrm, HfPrm, PrmConfig
from megatron_credit.rewards.prm.scorer import StepScorer
from megatron_credit.rewards.prm.steps import StepItem, StepScores, read_scores
from megatron_credit.tasks.solver import exact_solution, forgetful_solution

UNRULY = CallablePrm(
    function="rewards.prm_functions:unruly", timeout_s=3.0, memory_mb=256, processes=2, batch_size=4
)
STEPS = ("a\n", "b")


@pytest.fixture(scope="module")
def unruly():
    with StepScorer(UNRULY) as scorer:
        yield scorer


def scorer_of(name: str, **options: int) -> StepScorer:
    return StepScorer(CallablePrm(function=f"rewards.prm_functions:{name}", **options))


FAILURES = {
    "raise": "ZeroDivisionError",
    "exit": "ended with 3",
    "quit": "SystemExit",
    "kill": "SIGKILL",
    "segfault": "SIGSEGV",
    "sleep": "no scores within 3 s",
    "spin": "no scores within 3 s",
    "memory": "MemoryError",
    "few": "got 1 scores for 2 steps",
    "many": "got 3 scores for 2 steps",
    "none": "expected a list of scores, got None",
    "text": "expected a list of scores, got '11'",
    "large": "the score of step 1 is 1.5",
    "negative": "the score of step 0 is -0.1",
    "nan": "the score of step 1 is nan",
    "words": "the score of step 1 is '0.5'",
}


def test_each_failure_harms_its_own_response_only(unruly):
    pairs = [(StepItem(name, STEPS), StepItem(f"fine {name}", STEPS)) for name in FAILURES]
    scored = unruly.score([item for pair in pairs for item in pair])
    assert scored[1::2] == [StepScores((0.5, 0.5))] * len(FAILURES)
    for (name, problem), found in zip(FAILURES.items(), scored[::2], strict=True):
        assert [math.isnan(score) for score in found.scores] == [True, True], name
        assert found.problem is not None and problem in found.problem


@pytest.mark.parametrize("name", ["fork", "print", "leak"])
def test_harmless_habits(unruly, name):
    assert unruly.score([StepItem(name, STEPS)]) == [StepScores((0.5, 0.5))]


def test_a_process_that_earlier_calls_filled_is_replaced(unruly):
    # 20 times 40 MiB is three times what a process may have.
    items = [StepItem("leak", (*STEPS, str(number))) for number in range(20)]
    assert unruly.score(items) == [StepScores((0.5, 0.5, 0.5))] * 20


def test_an_empty_response_is_not_asked_for_and_equal_ones_once(unruly):
    start = time.monotonic()
    scored = unruly.score([StepItem("sleep", STEPS)] * 20 + [StepItem("sleep", ())])
    assert time.monotonic() - start < 3 * UNRULY.timeout_s
    assert {found.problem for found in scored[:-1]} == {"no scores within 3 s"}
    assert scored[-1] == StepScores(())
    assert unruly.score([]) == []


def test_metadata_that_cannot_be_sent_is_a_problem(unruly):
    bad, good = unruly.score([StepItem("a", STEPS, {"when": object()}), StepItem("a", STEPS)])
    assert bad.problem is not None and "not JSON" in bad.problem
    assert len(bad.scores) == 2
    assert good == StepScores((0.5, 0.5))


def test_any_text_can_be_sent(unruly):
    items = [StepItem(text, (text, text)) for text in ("\ud800", "\x00", "a" * 1_000_000)]
    assert unruly.score(items) == [StepScores((0.5, 0.5))] * 3


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_order_and_batches_do_not_matter(processes, batch_size):
    rng = random.Random(3)
    items = [
        StepItem("p" * 20, tuple("s" * rng.randint(1, 20) for _ in range(rng.randint(1, 5))))
        for _ in range(60)
    ]
    with scorer_of("lengths", processes=processes, batch_size=batch_size) as scorer:
        scored = scorer.score(items)
        shuffled = rng.sample(items, len(items))
        again = dict(zip(shuffled_keys(shuffled), scorer.score(shuffled), strict=True))
    assert [found.scores for found in scored] == [
        tuple(len(step) / 20 for step in item.steps) for item in items
    ]
    assert [again[key] for key in shuffled_keys(items)] == scored


def shuffled_keys(items: list[StepItem]) -> list[tuple[str, ...]]:
    return [item.steps for item in items]


def test_a_function_that_takes_metadata_gets_it():
    with scorer_of("known") as scorer:
        item = StepItem("q", ("a", "b", "c"), {"right": ["a", "c"]})
        missing = StepItem("q", ("a",), {"other": 1})
        found, failed = scorer.score([item, missing])
    assert found == StepScores((1.0, 0.0, 1.0))
    assert failed.problem == "KeyError: 'right'"


def test_the_shipped_oracle():
    question = "Compute: 6 + 7 - 8 + 9 ="
    texts = [
        exact_solution(question),
        forgetful_solution(question, forget=1.0, rng=random.Random(0)),
    ]
    assert texts[1] == "6+7=3;3-8=-5;-5+9=4;<answer>4</answer>"
    texts.append("6+7=13;13-8=15;15+9=24;<answer>24</answer>")
    items = [
        StepItem(
            question, tuple(text.replace(";", ";|").split("|")), {"expression": question[9:-2]}
        )
        for text in texts
    ]
    config = CallablePrm(function="megatron_credit.tasks.chain_sum_steps:score_steps")
    with StepScorer(config) as scorer:
        assert [found.scores for found in scorer.score(items)] == [
            (1, 1, 1, 1), (0, 0, 0, 0), (1, 0, 0, 0)
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("rewards.prm_function:unruly", "did you mean rewards.prm_functions"),
        ("rewards.prm_functions:unruli", "did you mean 'unruly'"),
        ("rewards.prm_functions:NOT_A_FUNCTION", "is a int, not a function"),
        ("rewards.prm_functions:one_argument", r"must take \(prompt, steps\) or"),
        ("no_such_package:f", "PRM function .* cannot be imported: No module named"),
    ],
)
def test_a_function_that_is_not_there_is_refused(function, message):
    config = CallablePrm(function=function)
    with pytest.raises(ValueError, match=message):
        check_prm(config)
    with pytest.raises(ValueError, match=message):
        StepScorer(config)


def test_a_module_that_breaks_is_refused(tmp_path, monkeypatch):
    (tmp_path / "broken_prm.py").write_text("import os\nos._exit(7)")
    (tmp_path / "hungry_prm.py").write_text("data = bytearray(2**33)")
    (tmp_path / "slow_prm.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module, limit_s, message in [
        ("broken_prm", 60, "it ended with 7"),
        ("hungry_prm", 60, "needs more than memory_mb = 4096"),
        ("slow_prm", 1, "did not load within 1 s"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_prm(CallablePrm(function=f"{module}:f", start_limit_s=limit_s))


def test_a_process_that_cannot_start_again_is_not_waited_for_twice(tmp_path, monkeypatch):
    (tmp_path / "once.py").write_text(
        "import os, pathlib, time\n"
        f"mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "if mark.exists(): time.sleep(60)\n"
        "mark.touch()\n"
        "def score(prompt, steps): return os._exit(1) if prompt == 'die' else [1] * len(steps)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with StepScorer(CallablePrm(function="once:score", start_limit_s=4.0)) as scorer:
        start = time.monotonic()
        scored = scorer.score(
            [StepItem("die", ("a",)), *(StepItem(f"{n}", ("aaaa",)) for n in range(30))]
        )
        assert time.monotonic() - start < 8
        assert all("did not load within 4 s" in str(found.problem) for found in scored)
        (tmp_path / "mark").unlink()
        assert scorer.score([StepItem("x", ("a",))]) == [StepScores((1.0,))]


def children(pid: int) -> set[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for file in found for child in file.read_text().split()}


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_close_ends_the_processes_even_in_the_middle():
    before = children(os.getpid())
    scorer = scorer_of("unruly", processes=2, timeout_s=30)
    found: list[StepScores] = []
    asking = threading.Thread(target=lambda: found.extend(scorer.score([StepItem("sleep", STEPS)])))
    asking.start()
    time.sleep(0.3)
    mine = children(os.getpid()) - before
    assert mine
    scorer.close()
    scorer.close()
    asking.join(5)
    assert [one.problem for one in found] == ["the PRM's process failed: the scorer was closed"]
    assert not any(alive(pid) for pid in mine)
    with pytest.raises(RuntimeError):
        scorer.score([StepItem("a", STEPS)])


def test_a_scorer_brings_neither_torch_nor_transformers():
    code = (
        "import sys; from megatron_credit.rewards.prm import check, scorer; "
        "print(*{'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_the_kind_decides_what_a_table_may_hold():
    parse = TypeAdapter(PrmConfig).validate_python
    assert parse({"kind": "callable", "function": "a.b:c"}) == CallablePrm(function="a.b:c")
    assert parse({"kind": "hf", "model": "m"}) == HfPrm(model=Path("m"))
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        parse({"kind": "callable", "function": "a:b", "model": "m"})
    with pytest.raises(ValidationError, match="needs step_token"):
        parse({"kind": "hf", "model": "m", "head": "causal"})
    with pytest.raises(ValidationError, match="should match pattern"):
        parse({"kind": "callable", "function": "a.b.c"})


@pytest.mark.parametrize(
    "returned",
    [
        [0.25, 1],
        (0.25, True),
        np.array([0.25, 1.0], dtype=np.float32),
        torch.tensor([0.25, 1.0]),
        [np.float32(0.25), torch.tensor(1.0)],
    ],
)
def test_what_is_a_list_of_numbers(returned):
    assert read_scores(returned, 2) == [0.25, 1.0]


@pytest.mark.parametrize("returned", [{0.5: 1}, {0.5}, 0.5, np.array([[0.5]]), ["1"], [1j], b"1"])
def test_what_is_none(returned):
    with pytest.raises(ValueError, match=r"expected a list of scores|the score of step 0"):
        read_scores(returned, 1)
