"""Every credit method trains the same under every layout, from records to gradients.

All layouts of one world size run one after another in the same processes, because starting
processes is the slow part. The policy has taken a step before, so that no teacher equals it.
"""

from pathlib import Path

import numpy
import pytest
import torch
import torch.multiprocessing as multiprocessing
from trainer import methods_records, methods_worker
from trainer.methods_cases import CASES, LAYOUTS, OFF
from trainer.methods_records import ALL_RIGHT, ALL_WRONG, GROUP_SIZE, GROUPS, MIXED, ONE_RIGHT

from megatron_credit.batch.rollout_files import read_rollouts
from megatron_credit.credit import METHODS

TOLERANCE = 1e-5
MAGNIFIED = {"rlcsd": 25.0, "grail": 20.0}
"""How much more advantages differ than the signals that they are made of: lam / tau; and the log
of a saliency, whose relative error is that of 1 - p of an answer that the policy is sure of: in
float32 about 1e-3 for 1e-4, in eager torch too. One rank makes its gradient beside the log-prob,
several make it afterwards."""
ROUGH = {"sc_grpo", "verpo"}
"""Methods that divide by as little as 1e-4 or 2.5e-5: what they make of a layout's own signals is
compared with their formula."""
RUNS = [
    (layout, name) for name, case in CASES.items() for layout in case.layouts if layout != "one"
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Holds the records and what the workers wrote: one file a layout."""
    directory = tmp_path_factory.mktemp("methods")
    methods_records.write_records(directory)
    for world_size in LAYOUTS:
        multiprocessing.spawn(
            methods_worker.run,
            args=(world_size, str(directory / "rendezvous"), str(directory)),
            nprocs=world_size,
        )
    return directory


@pytest.fixture(scope="module")
def results(directory):
    """Of each case by layout and name."""
    names = [name for layouts in LAYOUTS.values() for name in layouts]
    return {name: torch.load(directory / f"{name}.pt") for name in names}


@pytest.fixture(scope="module")
def checks(directory):
    """What was found of one rank."""
    return torch.load(directory / "checks.pt")


def flat(rows):
    return torch.cat([row.flatten().double() for row in rows])


def advantages(result):
    return [row_T for part in result["parts"] for row_T in part["advantage"]]


def of_group(rows, number):
    return flat(rows[number * GROUP_SIZE : (number + 1) * GROUP_SIZE])


def assert_close(found, expected, tolerance=TOLERANCE):
    """Relative to the largest of the expected values."""
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=0, atol=tolerance * scale, equal_nan=True
    )


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_every_rank_knows_the_same_credit(results, layout, name):
    assert results[layout][name]["agree"]


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_signals_are_those_of_one_rank(results, layout, name):
    expected, found = (results[where][name]["notes"] for where in ("one", layout))
    assert len(found) == len(expected) == GROUP_SIZE * len(GROUPS)
    for one, other in zip(found, expected, strict=True):
        assert one["spans"] == other["spans"]
        assert one["evidence"] == other["evidence"]
        assert one["token_values"].keys() == other["token_values"].keys()
        for key, values in other["token_values"].items():
            if key == "evidence_weight":
                continue  # compared with its formula below
            torch.testing.assert_close(
                torch.tensor(one["token_values"][key]),
                torch.tensor(values),
                rtol=TOLERANCE,
                atol=TOLERANCE,
                equal_nan=True,
            )


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_credit_is_that_of_one_rank(results, layout, name):
    case = CASES[name]
    expected, found = results["one"][name], results[layout][name]
    if case.method in ROUGH:
        assert_close(flat(advantages(found)), oracle(case, found), TOLERANCE)
    else:
        tolerance = TOLERANCE * MAGNIFIED.get(case.method, 1.0)
        assert_close(flat(advantages(found)), flat(advantages(expected)), tolerance)
        for key, value in expected["metrics"].items():
            # Whether two log-probs differ at all is up to their rounding.
            slack = 0.02 if key == "credit/zero_tokens" else tolerance
            assert found["metrics"][key] == pytest.approx(value, rel=1e-4, abs=slack), key
    for one, other in zip(found["parts"], expected["parts"], strict=True):
        for one_T, other_T in zip(one["selected"], other["selected"], strict=True):
            assert (one_T is None) == (other_T is None)
            assert one_T is None or torch.equal(one_T, other_T)


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_what_is_taught_is_that_of_one_rank(results, layout, name):
    for one, other in zip(
        results[layout][name]["parts"], results["one"][name]["parts"], strict=True
    ):
        found, expected = one["teaching"], other["teaching"]
        assert found.keys() == expected.keys()
        if expected:
            assert found["prompts"] == expected["prompts"]
            assert found["losses"].keys() == expected["losses"].keys()
            for key, (coefficient, mask) in expected["losses"].items():
                assert found["losses"][key][0] == coefficient
                assert torch.equal(flat(found["losses"][key][1]), flat(mask))


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_every_gradient_is_that_of_one_rank(results, layout, name):
    """Of the same credit."""
    for one, other in zip(
        results[layout][name]["parts"], results["one"][name]["parts"], strict=True
    ):
        scale = max(float(gradient.abs().max()) for gradient in other["gradients"].values())
        assert scale > 1e-4
        assert one["gradients"].keys() == other["gradients"].keys()
        for key, gradient in other["gradients"].items():
            assert (one["gradients"][key] - gradient).abs().max() <= TOLERANCE * scale, key
        for key, value in other["metrics"].items():
            assert one["metrics"][key] == pytest.approx(value, rel=1e-4, abs=TOLERANCE), key


# Formulas of the methods whose own numbers are rough


def signal(result, name):
    """[tokens of all rollouts] float64; NaN where there is none."""
    rows = advantages(result)
    found = []
    for note, row_T in zip(result["notes"], rows, strict=True):
        values = note["token_values"].get(name)
        found += [float("nan")] * len(row_T) if values is None else values
    return torch.tensor(found, dtype=torch.float64)


def base_of(kind):
    """Advantages of a baseline, on every token, from the definitions in methods.md."""
    found = []
    for outcomes in GROUPS:
        reward = numpy.array([float("nan") if one == "?" else float(one) for one in outcomes])
        valid = reward[~numpy.isnan(reward)]
        gap = numpy.nan_to_num(reward - valid.mean())
        found += list(gap / (valid.std(ddof=1) + 1e-6) if kind == "grpo" else gap)
    return found


def spread(result, values):
    rows = zip(advantages(result), values, strict=True)
    return torch.cat(
        [torch.full((len(row_T),), value, dtype=torch.float64) for row_T, value in rows]
    )


def oracle(case, result):
    """The advantages that follow from the signals of the same layout."""
    if case.method == "verpo":
        base = spread(result, base_of("dr_grpo"))
        weight = signal(result, "evidence_weight")
        return base * (1 + weight) if case.options.get("mode") == "advantage" else base
    return sc_grpo(case, result)


def sc_grpo(case, result):
    kl = signal(result, "teacher_kl")
    rows = [len(row_T) for row_T in advantages(result)]
    numbers, start = [], 0
    for part in result["parts"]:
        stop = start + sum(len(row_T) for row_T in part["advantage"])
        known = kl[start:stop][kl[start:stop].isfinite()].clamp(min=0)
        scale = max(numpy.percentile(known.numpy(), 75), 1e-4)
        numbers.append(kl[start:stop].clamp(min=0) / (kl[start:stop].clamp(min=0) + scale))
        start = stop
    factor = torch.cat(numbers)
    expected = spread(result, base_of("grpo")) * factor.where(factor.isfinite(), 1.0)
    # Where nobody is right, the mean factor over the length of the reference stands in.
    parts = list(expected.split(rows))
    own = list(factor.split(rows))[ALL_WRONG * GROUP_SIZE : (ALL_WRONG + 1) * GROUP_SIZE]
    (reference,) = [row for row, row_T in enumerate(own) if not row_T.isfinite().all()]
    length = len(own[reference])
    means = {row: row_T[:length].mean() for row, row_T in enumerate(own) if row != reference}
    values = torch.stack(list(means.values()))
    for row, row_T in enumerate(own):
        bonus = (means[row] - values.mean()) / (values.std() + 1e-6) if row != reference else 0.0
        parts[ALL_WRONG * GROUP_SIZE + row] = 0.1 * bonus * row_T.nan_to_num()
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (layout, name)
        for name, case in CASES.items()
        for layout in case.layouts
        if case.method == "verpo"
    ],
)
def test_the_controller_is_its_formula_of_the_signals(results, layout, name):
    result = results[layout][name]
    base = spread(result, base_of(CASES[name].options.get("base", "dr_grpo")))
    benefit = base * (signal(result, "contrast_target") - signal(result, "contrast_mean"))
    gained = benefit.clamp(min=0)
    cost = signal(result, "contrast_cost").clamp(min=0)
    expected = (gained / (gained + 0.0025 * cost + 2.5e-5)).nan_to_num()
    torch.testing.assert_close(signal(result, "evidence_weight"), expected, rtol=0, atol=1e-6)
    assert (expected > 0.01).sum() >= 5


@pytest.mark.parametrize("name", ["sc_grpo", "sc_grpo_in_two"])
def test_factors_are_their_formula_of_the_divergences(results, name):
    result = results["one"][name]
    assert_close(flat(advantages(result)), sc_grpo(CASES[name], result), 1e-6)


# That signals matter


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_says_something_of_its_own(results, name):
    """Or the comparisons above would show nothing."""
    result, grpo = results["one"][name], results["one"]["grpo"]
    method, found = METHODS[name], flat(advantages(result))
    if "distillation_mask_NT" in method.gives or "evidence_mask_NT" in method.gives:
        losses = result["parts"][0]["teaching"]["losses"]
        assert all(coefficient > 0 for coefficient, _ in losses.values())
        for loss, (_, mask) in losses.items():
            assert flat(mask).sum() > 100
            assert abs(result["parts"][0]["metrics"][f"policy/loss_{loss}"]) > 1e-5
        return
    plain = flat(advantages(grpo))
    if name in ("grpo", "dapo"):
        assert torch.equal(found, plain)
    else:
        assert found.shape != plain.shape or (found - plain).abs().max() > 0.05


def test_groups_that_nobody_solved_or_all_did(results):
    one = results["one"]
    for number in (ALL_WRONG, ALL_RIGHT):
        assert of_group(advantages(one["grpo"]), number).abs().max() == 0
        assert of_group(advantages(one["cepo"]), number).abs().max() == 0
    assert of_group(advantages(one["verigate"]), ALL_WRONG).abs().max() > 0.5
    assert of_group(advantages(one["verigate"]), ALL_RIGHT).abs().max() == 0
    assert of_group(advantages(one["sc_grpo"]), ALL_WRONG).abs().max() > 0.01
    assert of_group(advantages(one["sc_grpo"]), ALL_RIGHT).abs().max() == 0
    for number in (*MIXED, ONE_RIGHT):
        plain = of_group(advantages(one["grpo"]), number)
        assert torch.equal(of_group(advantages(one["verigate"]), number), plain)
        assert torch.equal(of_group(advantages(one["sc_grpo"]), number), plain) == (
            number == ONE_RIGHT
        )


@pytest.mark.parametrize("name", list(OFF))
def test_weights_of_zero_are_grpo_bit_for_bit(results, name):
    found, grpo = results["one"][name], results["one"]["grpo"]
    if name != "grail_off":  # other rollouts
        assert torch.equal(flat(advantages(found)), flat(advantages(grpo)))
        for key, gradient in grpo["parts"][0]["gradients"].items():
            assert torch.equal(found["parts"][0]["gradients"][key], gradient), key
        return
    lengths = [len(row_T) for row_T in advantages(found)]
    values = [float(row_T[0]) for row_T in advantages(grpo)]
    expected = torch.cat([torch.full((n,), v) for n, v in zip(lengths, values, strict=True)])
    assert torch.equal(flat(advantages(found)), expected.double())


def test_only_what_is_read_is_computed(results):
    """Passes of the policy and of its teacher while credit is given."""
    passes = {name: result["passes"] for name, result in results["one"].items()}
    for name in ("grpo", "dapo", "cal_grpo", "verigate", "prm_outcome", "cepo_off", "rlsd_off"):
        assert passes[name] == {"policy": 0, "teacher": 0}, name
    assert passes["sdpo"]["policy"] == 0 and passes["sdpo"]["teacher"] > 0
    assert passes["opd"]["policy"] > 0 and passes["opd"]["teacher"] > 0
    for name in ("cepo", "rlsd", "rlcsd", "sc_grpo", "grail", "rredcot"):
        assert passes[name]["policy"] > 0 and passes[name]["teacher"] == 0, name


def test_the_notes_tell_what_was_found(results, directory):
    """One for each rollout, with a number a token."""
    rollouts = list(read_rollouts(directory / "tags.jsonl"))
    keys = {
        "cepo": {"positive_logprob", "negative_logprob"},
        "sc_grpo": {"teacher_kl"},
        "verpo": {"contrast_target", "contrast_mean", "contrast_cost", "evidence_weight"},
        "opd": {"teacher_logprob"},
    }
    for name, expected in keys.items():
        notes = results["one"][name]["notes"]
        assert set(notes[0]["token_values"]) == expected
        for note, rollout in zip(notes, rollouts, strict=True):
            for values in note["token_values"].values():
                assert len(values) == len(rollout.response_ids)
    # The first group's rows are right, wrong, right, wrong.
    first = results["one"]["verpo"]["notes"][0]["evidence"]
    assert first == {"positive": rollouts[2].text, "negative": rollouts[1].text}
    assert results["one"]["cepo"]["notes"][0]["evidence"] == {
        "positive": rollouts[0].answer,
        "negative": rollouts[1].parsed,
    }
    steps = results["one"]["verigate"]["notes"][ALL_WRONG * GROUP_SIZE]["spans"]["step"]
    assert steps[0][0] == 0 and steps[-1][1] == len(rollouts[ALL_WRONG * GROUP_SIZE].response_ids)
    assert {score for _, _, score in steps} <= {0.0, 1.0}


# A context that equals the plain one (methods.md section 0)


@pytest.mark.parametrize("packing", ["packed", "alone"])
def test_the_plain_context_as_evidence_gives_the_same_bits(checks, packing):
    pairs = checks[packing]
    assert len(pairs) == GROUP_SIZE * len(GROUPS)
    for positive_T, policy_T in pairs:
        assert torch.equal(positive_T, policy_T)


def test_no_gap_between_teacher_and_policy_is_grpo_bit_for_bit(checks):
    for found_T, plain_T in checks["weights"]:
        assert torch.equal(found_T, plain_T)


def test_the_plain_context_has_no_divergence(checks):
    assert len(checks["divergences"]) > GROUP_SIZE
    assert flat(checks["divergences"]).abs().max() <= 1e-6
