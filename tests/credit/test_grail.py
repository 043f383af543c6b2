"""GRAIL against numbers worked out by hand and a slow oracle written from the formula."""

import math
import random

import pytest
import torch
from credit.full_groups import changed, full_group

from megatron_credit.credit import Group, assign
from megatron_credit.credit.methods.grail import Grail

NAN = math.nan
PARTS = [0, 0, 1, 2, 3, 4]


def salience(*logs):
    """Saliencies of these values of log(s + 1e-8)."""
    return [math.exp(value) - 1e-8 for value in logs]


def group_of(rewards, saliencies, parts, mask=None):
    saliency_NT = torch.tensor(saliencies, dtype=torch.float64)
    mask_NT = torch.ones_like(saliency_NT, dtype=torch.bool) if mask is None else mask
    return Group(
        reward_N=torch.tensor(rewards, dtype=torch.float64),
        mask_NT=mask_NT,
        saliency_NT=saliency_NT,
        answer_part_NT=torch.tensor(parts),
    )


def weights(group, **options):
    """[N, T] as lists: the advantage in multiples of dr_grpo's."""
    advantage_NT = assign("grail", group, **options).advantage_NT
    return (advantage_NT / assign("dr_grpo", group).advantage_NT).tolist()


# Logs 1 and 3 in equal number: mean 2, variance 1, so z = -1 and 1, w = 1 - .5 and 1 + .5.
TWO = group_of([1.0, 0.0], [salience(1, 3, 1, 3, 1, 3)] * 2, [PARTS] * 2)
SCORED, UNSCORED = [0.5, 1.5, 1, 5, 1, 1], [1, 1, 1, 5, 1, 1]


@pytest.mark.parametrize(
    ("rollouts", "expected"),
    [
        ("wrong", [UNSCORED, SCORED]),
        ("correct", [SCORED, UNSCORED]),
        ("both", [SCORED, SCORED]),
    ],
)
def test_saliency_and_box_by_hand(rollouts, expected):
    for row, numbers in zip(weights(TWO, rollouts=rollouts), expected, strict=True):
        assert row == pytest.approx(numbers, abs=1e-6)


def test_advantage_is_the_base_times_the_weight():
    advantage_NT = assign("grail", TWO).advantage_NT
    assert advantage_NT[0].tolist() == pytest.approx([0.5, 0.5, 0.5, 2.5, 0.5, 0.5])
    assert advantage_NT[1].tolist() == pytest.approx([-0.25, -0.75, -0.5, -2.5, -0.5, -0.5])
    rloo_NT = assign("grail", TWO, base="rloo").advantage_NT
    assert torch.allclose(rloo_NT, 2 * advantage_NT)


def test_weights_are_clipped_and_the_box_is_not():
    # w = 2 -+ 4 is cut to 1 and 3; marker, brace and the rest get w_mean, content w_max.
    row = weights(TWO, w_mean=2.0, w_std=4.0, w_min=1.0, w_max=3.0)[1]
    assert row == pytest.approx([1, 3, 2, 3, 2, 2])
    row = weights(TWO, w_mean=9.0, w_std=4.0, w_min=1.0, w_max=3.0)[1]
    assert row == pytest.approx([3, 3, 9, 3, 9, 9])
    metrics = assign("grail", TWO, w_mean=2.0, w_std=4.0, w_min=1.0, w_max=3.0).metrics
    assert metrics["credit/weight_clip_low"] == metrics["credit/weight_clip_high"] == 0.5
    # Weights 1 1 2 3 2 2 and 1 3 2 3 2 2: 24 over 12 tokens.
    assert metrics["credit/weight_mean"] == pytest.approx(2.0)
    assert metrics["credit/weight_p10"] == 1.0 and metrics["credit/weight_p90"] == 3.0


def test_tokens_after_the_box_may_be_left_out_of_mean_and_variance():
    parts = [0, 0, 1, 2, 4, 4]
    group = group_of([1.0, 0.0], [salience(1, 3, 1, 3, 9, 9)] * 2, [parts] * 2)
    row = weights(group, exclude_after_box=True)[1]
    assert row == pytest.approx([0.5, 1.5, 1, 5, 1, 1], abs=1e-6)
    # With them: mean 26 / 6, variance 182 / 6 - (26 / 6)^2 = 104 / 9, z = -(10 / 3) / 3.399 ...
    row = weights(group)[1]
    assert row[0] == pytest.approx(1 - 0.5 * (10 / 3) / math.sqrt(104 / 9), abs=1e-6)
    assert row[1] == pytest.approx(1 - 0.5 * (4 / 3) / math.sqrt(104 / 9), abs=1e-6)


def test_rows_without_a_box_or_evidence_keep_the_base():
    box, no_box = PARTS, [0] * 6
    logs = salience(1, 3, 1, 3, 1, 3)
    broken = [*logs[:5], NAN]
    group = group_of([1.0, 0.0, 0.0, NAN], [logs, logs, broken, broken], [box, no_box, box, box])
    result = assign("grail", group)
    assert result.advantage_NT[1].tolist() == pytest.approx([-1 / 3] * 6)
    assert result.advantage_NT[2].tolist() == pytest.approx([-1 / 3] * 6)
    assert result.metrics["credit/unboxed_rollouts"] == 1.0
    assert result.metrics["credit/no_evidence_rollouts"] == 1.0


def test_what_the_mask_hides_is_neither_evidence_nor_box():
    mask_NT = torch.ones(2, 6, dtype=torch.bool)
    mask_NT[:, 2:] = False
    saliencies = [[*salience(1, 3), NAN, -1.0, math.inf, NAN]] * 2
    hidden = group_of([1.0, 0.0], saliencies, [PARTS] * 2, mask_NT)
    assert assign("grail", hidden).advantage_NT[1, :2].tolist() == [-0.5, -0.5]
    part_NT = torch.tensor([[0, 4, 2, 2, 2, 2]] * 2)
    boxed = changed(hidden, {"answer_part_NT": part_NT})
    # The last trained token follows an untrained box: w_mean; the first has z = -1.
    assert assign("grail", boxed).advantage_NT[1, :2].tolist() == pytest.approx([-0.25, -0.5])


def test_an_empty_box_counts():
    group = group_of([1.0, 0.0], [salience(1, 3, 1, 3)] * 2, [[0, 0, 1, 3]] * 2)
    assert weights(group)[1] == pytest.approx([0.5, 1.5, 1, 1], abs=1e-6)


def test_weights_of_one_are_the_base_bit_for_bit():
    group = full_group([1.0, 0.0, 0.0, 0.5])
    for base in ("grpo", "dr_grpo", "rloo"):
        flat = assign("grail", group, base=base, w_std=0.0, w_max=1.0, rollouts="both")
        assert torch.equal(flat.advantage_NT, assign(base, group).advantage_NT)


def test_weights_do_not_depend_on_the_scale_of_saliency():
    group = full_group([1.0, 0.0, 0.0, 0.5])
    larger = changed(group, {"saliency_NT": (group.saliency_NT + 1e-8) * 1e6 - 1e-8})
    expected_NT = Grail().credit(group).advantage_NT
    torch.testing.assert_close(
        Grail().credit(larger).advantage_NT, expected_NT, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_rewards_give_zero_and_need_no_signal(reward):
    group = group_of([reward] * 2, [[NAN] * 6] * 2, [PARTS] * 2)
    bare = changed(group, {"saliency_NT": None, "answer_part_NT": None})
    assert Grail().required(bare) == ()
    assert assign("grail", bare).advantage_NT.eq(0).all()


@pytest.mark.parametrize(
    ("missing", "source"),
    [
        ("saliency_NT", "the activation backward pass"),
        ("answer_part_NT", "the answer parser"),
    ],
)
def test_missing_signals_are_named(missing, source):
    with pytest.raises(ValueError, match=f"'grail' needs {missing}, .*comes from {source}"):
        assign("grail", changed(TWO, {missing: None}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wstd": 1.0}, "unknown option 'wstd'; did you mean 'w_std'"),
        ({"rollouts": "right"}, "rollouts is 'right'; it should be 'wrong', 'correct' or 'both'"),
        ({"w_std": -1.0}, "w_std is -1.0; it should be greater than or equal to 0"),
        ({"w_min": 6.0}, "it has w_min = 6.0 above w_max = 5.0; lower w_min or raise w_max"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        assign("grail", TWO, **options)


def oracle(rewards, saliencies, parts, masks, options):
    """Section 3 of the specification, token by token, on Python's floats."""
    valid = [r for r in rewards if math.isfinite(r)]
    mean_reward = sum(valid) / len(valid)
    rows = []
    for reward, saliency, part, mask in zip(rewards, saliencies, parts, masks, strict=True):
        credit = [0.0] * len(mask)
        rows.append(credit)
        trained = [t for t in range(len(mask)) if mask[t]]
        if not math.isfinite(reward) or max(valid) == min(valid):
            continue
        advantage = reward - mean_reward
        box = any(part[t] > 0 for t in trained) and all(math.isfinite(saliency[t]) for t in trained)
        chosen = {"wrong": advantage <= 0, "correct": advantage > 0, "both": True}
        log_s = {t: math.log(saliency[t] + 1e-8) for t in trained} if box else {}
        counted = [t for t in log_s if not (options["exclude_after_box"] and part[t] == 4)]
        mean = sum(log_s[t] for t in counted) / max(len(counted), 1)
        variance = sum((log_s[t] - mean) ** 2 for t in counted) / max(len(counted), 1)
        for t in trained:
            weight = 1.0
            if box and chosen[options["rollouts"]]:
                weight = 1 + 0.5 * (log_s[t] - mean) / math.sqrt(variance + 1e-8)
                weight = min(max(weight, 0.5), 5.0)
            if box and part[t] == 2:
                weight = 5.0
            elif box and part[t] > 0:
                weight = 1.0
            credit[t] = advantage * weight
    return rows


@pytest.mark.parametrize("seed", range(60))
def test_random_groups_against_the_oracle(seed):
    rng = random.Random(seed)
    num, width = rng.randint(2, 6), rng.randint(1, 9)
    rewards = [rng.choice([0.0, 1.0, 1.0, 0.3, -1.0, NAN, math.inf]) for _ in range(num)]
    rewards[:2] = [0.0, rng.choice([0.0, 1.0])]
    size = [0.0, 1e-12, 1e-3, 1.0, 40.0, *[rng.expovariate(1) for _ in range(60)]]
    saliencies = [[rng.choice(size) for _ in range(width)] for _ in range(num)]
    saliencies[rng.randrange(num)][rng.randrange(width)] = rng.choice([NAN, math.inf, 1.0])
    parts = [
        sorted(rng.choices([0, 1, 2, 3, 4], k=width)) if rng.random() < 0.8 else [0] * width
        for _ in range(num)
    ]
    masks = [[rng.random() < 0.7 for _ in range(width)] for _ in range(num)]
    options = {
        "rollouts": rng.choice(["wrong", "correct", "both"]),
        "exclude_after_box": rng.random() < 0.5,
    }
    group = group_of(rewards, saliencies, parts, torch.tensor(masks))
    advantage_NT = assign("grail", group, **options).advantage_NT
    expected_NT = torch.tensor(oracle(rewards, saliencies, parts, masks, options))
    torch.testing.assert_close(advantage_NT, expected_NT, atol=1e-6, rtol=1e-6)
