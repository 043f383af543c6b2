"""Answer probes are those of float64 arithmetic under every layout, shared or read one by one.

All layouts of one world size run one after another in the same processes, because starting
processes is the slow part.
"""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from mcore import probes_worker, tiny_models
from mcore.probes_worker import CASES, DENSE, EXPERTS, TEMPERATURE
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5
LAYOUTS = {name: case for cases in CASES.values() for name, case in cases.items()}
VOCABULARY = 131


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Holds what the workers wrote: one file a case, and those of the single-rank checks."""
    directory = tmp_path_factory.mktemp("probes")
    for kind in (DENSE, EXPERTS):
        tiny_models.write_tiny_model(directory, kind)
    for world_size in CASES:
        multiprocessing.spawn(
            probes_worker.run,
            args=(world_size, str(directory / "rendezvous"), str(directory)),
            nprocs=world_size,
        )
    return directory


@pytest.fixture(scope="module")
def results(directory):
    """Of each case by name, what each rank found."""
    return {name: torch.load(directory / f"{name}.pt") for name in LAYOUTS}


@pytest.fixture(scope="module")
def truths(directory):
    """Of each model the log-probs [P, Y] of every rollout, from logits of whole sequences."""
    return {
        kind: [truth(load(directory, kind), one) for one in rollouts()] for kind in (DENSE, EXPERTS)
    }


def rollouts():
    return probes_worker.make_rollouts(VOCABULARY)


def load(directory, kind):
    return AutoModelForCausalLM.from_pretrained(
        directory / kind, dtype=torch.float64, experts_implementation="eager"
    )


@torch.no_grad()
def truth(model, rollout):
    found_PY = torch.zeros(len(rollout.states), len(rollout.continuations), dtype=torch.float64)
    tokens = rollout.sequence.token_ids_L.tolist()
    for row, state in enumerate(rollout.states):
        for column, one in enumerate(rollout.continuations):
            prefix = tokens[: rollout.sequence.num_prompt + state] + list(one.opening_ids)
            text = torch.tensor([prefix + list(one.answer_ids)])
            logprob_LV = (model(text).logits[0] / TEMPERATURE).log_softmax(-1)
            for place, token in enumerate(one.answer_ids, start=len(prefix)):
                found_PY[row, column] += logprob_LV[place - 1, token]
    return found_PY


def assert_close(found, expected):
    assert len(found) == len(expected)
    for one_PY, truth_PY in zip(found, expected, strict=True):
        assert one_PY.dtype == torch.float32
        torch.testing.assert_close(one_PY.double(), truth_PY, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", LAYOUTS)
def test_shared_probes_are_those_of_float64_arithmetic_on_every_rank(results, truths, name):
    expected = truths[LAYOUTS[name].model]
    assert [tuple(one.shape) for one in expected] == [
        (3, 6), (2, 3), (1, 6), (4, 12), (1, 1), (0, 6), (2, 0), (4, 6), (2, 2), (1, 1),
        (3, 6), (4, 6),
    ]  # fmt: skip
    for found in results[name]:
        assert_close(found["shared"], expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_plain_probes_are_those_of_float64_arithmetic_on_every_rank(results, truths, name):
    asked = [one for one in truths[LAYOUTS[name].model] if one.numel()]
    for found in results[name]:
        assert_close(found["plain"], asked)


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_keep_their_bits(results, name):
    for found in results[name]:
        for before_T, after_T in zip(found["before"], found["after"], strict=True):
            assert torch.equal(before_T, after_T)


def test_the_truth_tells_states_and_answers_apart(truths):
    """Or the comparison with it would show nothing."""
    for kind in (DENSE, EXPERTS):
        first_PY = truths[kind][0]
        distinct_PY = first_PY[:, [0, 1, 2, 4, 5]]
        assert first_PY.diff(dim=0).abs().min() > 1e-3
        assert distinct_PY.sort(dim=1).values.diff(dim=1).min() > 1e-3


def test_duplicate_answers_are_equal_to_the_bit(results):
    for found in results["one"]:
        for kind in ("shared", "plain"):
            assert torch.equal(found[kind][0][:, 0], found[kind][0][:, 3])
            assert torch.equal(found[kind][1][:, 0], found[kind][1][:, 2])


def test_rollouts_that_ask_the_same_get_the_same_bits(results):
    for found in results["one"]:
        first_PY, again_PY, other_PY = (found["shared"][number] for number in (0, 10, 11))
        assert torch.equal(first_PY, again_PY)
        assert torch.equal(first_PY[:2], other_PY[[0, 2]])


def test_a_scored_part_is_the_whole_but_for_its_opening(results):
    """log p(60 61 62) - log p(60) = log p(61 62 | 60), from the same tree."""
    for found in results["one"]:
        prefixes_PY = found["shared"][7]
        gap_P = prefixes_PY[:, 2] - prefixes_PY[:, 0] - prefixes_PY[:, 4]
        assert gap_P.abs().max() <= 2e-6


def test_replay_does_not_matter(directory, truths):
    expected = truths[EXPERTS]
    asked = [one for one in expected if one.numel()]
    assert_close(torch.load(directory / "replayed.pt"), [*expected, *asked])


def test_where_attention_takes_no_trees_probes_are_read_one_by_one(directory, truths):
    unshared = torch.load(directory / "unshared.pt")
    assert_close(unshared["found"], truths[DENSE])
    (message,) = unshared["messages"]
    assert message.startswith("INFO answer probes are read one by one")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("temperature", "temperature=0.0; expected a positive number"),
        ("foreign", "rollout 1 has token ids outside of 0 .. 130"),
        ("foreign_answer", "rollout 0, continuation 1 has token ids outside of 0 .. 130"),
        ("long", "rollout 1: its longest probe has 65 tokens, the model 64 positions; leave out"),
        ("fits", "(3, 1)"),
        ("empty", "[]"),
    ],
)
def test_what_cannot_be_probed_is_refused(directory, name, message):
    assert message in torch.load(directory / "refusals.pt")[name]
