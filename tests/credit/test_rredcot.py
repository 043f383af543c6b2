"""RREDCoT against numbers worked out by hand, its laws, and a slow oracle written from the text."""

import math
import random

import pytest
import torch
from credit.full_groups import changed, full_group, tensors

from megatron_credit.credit import Group, assign
from megatron_credit.credit.baselines import sequence_advantage
from megatron_credit.credit.methods.rredcot import RredCot

NAN = math.nan
RULES = ["td", "togo", "group", "mix"]
VALUES = ["pooled", "own", "enumerated"]


def group_of(rewards, ids, probabilities, answers, utilities, mask=None):
    """Probabilities are [row][state][answer]; every token is trained unless `mask` is given."""
    id_NT = torch.tensor(ids)
    return Group(
        reward_N=torch.tensor(rewards, dtype=torch.float64),
        mask_NT=torch.ones_like(id_NT, dtype=torch.bool) if mask is None else mask,
        segment_id_NT=id_NT,
        answer_logprob_NMY=torch.tensor(probabilities, dtype=torch.float64).log(),
        answer_index_N=torch.tensor(answers),
        utility_Y=torch.tensor(utilities, dtype=torch.float64),
    )


# Two segments and an answer; answer 0 is right. In the last states p(0) is .8 and .2: q = .5, so
# V = (1/2) p(0) / .5 = p(0). Changes .2 .4 and -.1 .1, closing 1 - .8 = .2 and 0 - .2 = -.2.
TWO = group_of(
    [1.0, 0.0],
    [[0, 0, 1, 2], [0, 1, 1, 2]],
    [[[0.2, 0.8], [0.4, 0.6], [0.8, 0.2]], [[0.2, 0.8], [0.1, 0.9], [0.2, 0.8]]],
    [0, 1],
    [1.0, 0.0],
)
# Deviations from the mean .1: .1 .3 .1 -.2 0 -.3, squares .24, over 5: .048.
STD = math.sqrt(0.048) + 1e-6
A = 0.5 / (math.sqrt(0.5) + 1e-6)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("td", [[0.2, 0.2, 0.4, 0.2], [-0.1, 0.1, 0.1, -0.2]]),
        ("togo", [[0.8, 0.8, 0.6, 0.2], [-0.2, -0.1, -0.1, -0.2]]),
        ("group", [[0.1, 0.1, 0.3, 0.1], [-0.2, 0.0, 0.0, -0.3]]),
        ("mix", [[0.2, 0.2, 0.4, 0.2], [-0.1, 0.1, 0.1, -0.2]]),
    ],
)
def test_two_rollouts_by_hand(rule, expected):
    expected_NT = torch.tensor(expected)
    if rule in ("td", "group"):
        expected_NT = expected_NT / STD
    if rule == "mix":
        expected_NT = 2 * expected_NT + torch.tensor([[A], [-A]])
    result = assign("rredcot", TWO, credit=rule, beta=2.0)
    torch.testing.assert_close(result.advantage_NT, expected_NT, atol=1e-6, rtol=1e-6)
    metrics = {name: result.metrics[f"credit/{name}"] for name in ("value_start", "value_end")}
    assert metrics == {"value_start": pytest.approx(0.2), "value_end": pytest.approx(0.5)}
    assert result.metrics["credit/closing_abs"] == pytest.approx(0.2)
    assert result.metrics["credit/segments"] == 2.0


def test_own_values_by_hand():
    # p(0 | s) / p(0 | s_2) is .25 .5 1 in the first row; the second has R = 0.
    advantage_NT = assign("rredcot", TWO, values="own", credit="togo").advantage_NT
    assert advantage_NT.tolist() == [pytest.approx([0.75, 0.75, 0.5, 0.0]), [0.0] * 4]


@pytest.mark.parametrize(
    ("values", "first", "last"), [("pooled", 0.9, 0.75), ("enumerated", 0.6, 0.6)]
)
def test_an_answer_counts_as_often_as_it_was_given(values, first, last):
    # q is .5 .1 .25. Pooled: two of four times .4/.5, once .2/.1, the wrong answer nothing, which
    # is .4 + .5; in the end 3/4. Enumerated: .4 + .2 and .5 + .1.
    states = [[0.4, 0.2, 0.25], [0.5, 0.1, 0.25]]
    group = group_of(
        [1.0, 1.0, 1.0, 0.0], [[0, 1]] * 4, [states] * 4, [0, 0, 1, 2], [1.0, 1.0, 0.0]
    )
    togo_NT = assign("rredcot", group, values=values, credit="togo").advantage_NT
    assert togo_NT[0].tolist() == pytest.approx([1 - first, 1 - last])
    assert togo_NT[3].tolist() == pytest.approx([-first, -last])


def unrounded(group, rule, values):
    """[N, T] float64: what `assign` has yet to mask and round."""
    return RredCot.configure({"credit": rule, "values": values}).credit(group).advantage_NT


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("seed", range(5))
def test_shares_add_up_to_the_reward_minus_the_first_value(values, seed):
    group = full_group([1.0, 0.0, 1.0, 0.3], num_tokens=4, seed=seed)
    group = changed(group, {"mask_NT": torch.ones_like(group.mask_NT)})
    base_N1 = sequence_advantage("grpo", group.reward_N)[:, None]
    change_NT = unrounded(group, "mix", values) - base_N1
    # One token a segment: the sum over tokens is the sum over segments and answer.
    to_go_N = unrounded(group, "togo", values)[:, 0]
    torch.testing.assert_close(change_NT.sum(dim=1), to_go_N, rtol=0, atol=1e-12)


def test_pooled_is_the_chance_of_a_right_answer_where_answers_are_as_frequent_as_probable():
    # q is .5 .25 .25, as are the frequencies of the answers 0 0 1 2; 0 and 2 are right.
    first = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4], [0.9, 0.1, 0.01]]
    last = [[0.8, 0.1, 0.1], [0.6, 0.2, 0.2], [0.4, 0.4, 0.2], [0.2, 0.3, 0.5]]
    states = [list(row) for row in zip(first, last, strict=True)]
    group = group_of([1.0, 1.0, 0.0, 1.0], [[0, 1]] * 4, states, [0, 0, 1, 2], [1.0, 0.0, 1.0])
    pooled_NT = unrounded(group, "togo", "pooled")
    expected = [[0.3, 0.1], [0.6, 0.2], [-0.7, -0.6], [0.09, 0.3]]
    expected_NT = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(pooled_NT, expected_NT, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        unrounded(group, "togo", "enumerated"), expected_NT, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("values", ["pooled", "own"])
@pytest.mark.parametrize("rule", RULES)
def test_how_unlikely_an_answer_is_in_itself_does_not_matter(values, rule):
    group = full_group([1.0, 0.0, 1.0, 0.0])
    less_Y = torch.tensor([-1e4, -37.0], dtype=torch.float64)
    shifted = changed(group, {"answer_logprob_NMY": group.answer_logprob_NMY + less_Y})
    torch.testing.assert_close(
        unrounded(shifted, rule, values),
        unrounded(group, rule, values),
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("values", ["pooled", "own"])
def test_values_are_clamped_without_overflow(values):
    # The right answer is likely at first, impossible in the end: e^(1e4 - 1) is cut to 1.
    logprob_NMY = torch.tensor([[[-1.0, -1e4], [-1e4, -1.0]]] * 2, dtype=torch.float64)
    ids = {"segment_id_NT": torch.tensor([[0, 1]] * 2), "mask_NT": torch.ones(2, 2).bool()}
    group = changed(TWO, {"answer_logprob_NMY": logprob_NMY, **ids})
    togo_NT = assign("rredcot", group, values=values, credit="togo").advantage_NT
    end = {"pooled": 0.5, "own": 1.0}[values]
    wrong = {"pooled": [-1.0, -0.5], "own": [0.0, 0.0]}[values]
    assert togo_NT.tolist() == [pytest.approx([0.0, 1 - end]), pytest.approx(wrong)]


def three(third_states, *, ids=(0, 0, 1, 2), answer=-1):
    """TWO and a third rollout of R = 0."""
    values = tensors(TWO)
    states = torch.tensor([third_states], dtype=torch.float64).log()
    third = {
        "reward_N": torch.zeros(1),
        "mask_NT": torch.ones(1, 4, dtype=torch.bool),
        "segment_id_NT": torch.tensor([ids]),
        "answer_logprob_NMY": states,
        "answer_index_N": torch.tensor([answer]),
    }
    return changed(TWO, {name: torch.cat([values[name], row]) for name, row in third.items()})


def test_a_row_with_a_nan_probe_gets_zero_and_is_left_out():
    # Without an answer of its own it leaves n = 2 and q, and so the others, as they are.
    group = three([[0.5, 0.5], [NAN, 0.5], [0.5, 0.5]])
    for rule in ("td", "togo", "group"):
        result = assign("rredcot", group, credit=rule)
        without_NT = assign("rredcot", TWO, credit=rule).advantage_NT
        assert torch.equal(result.advantage_NT[:2], without_NT)
        assert result.advantage_NT[2].eq(0).all()
    assert assign("rredcot", group, credit="mix").advantage_NT[2].eq(0).all()
    assert result.metrics["credit/unprobed_rollouts"] == 1.0
    assert result.metrics["credit/unparsed_rollouts"] == 1.0


def test_the_answer_of_a_row_without_a_probe_still_counts():
    group = three([[0.5, 0.5], [NAN, 0.5], [0.5, 0.5]], answer=1)
    # n = 3 with two wrong answers: V = (1/3) p(0) / .5.
    togo_NT = assign("rredcot", group, credit="togo").advantage_NT
    assert togo_NT[0].tolist() == pytest.approx([1 - 0.4 / 3] * 2 + [1 - 0.8 / 3, 1 - 1.6 / 3])


def test_truncated_rows_count_in_q_and_have_no_closing():
    # Cut in its first segment with p(0) = .5: q = (.8 + .2 + .5) / 3 = .5, n = 2, V = p(0).
    group = three([[0.2, 0.8], [0.5, 0.5], [NAN, NAN]], ids=[0, 0, 0, -1])
    togo_NT = assign("rredcot", group, credit="togo").advantage_NT
    assert togo_NT[2].tolist() == pytest.approx([-0.2, -0.2, -0.2, 0.0])
    # Its one segment joins the std once: .2 .4 .2 -.1 .1 -.2 .3, but no closing.
    shares = torch.tensor([0.2, 0.4, 0.2, -0.1, 0.1, -0.2, 0.3], dtype=torch.float64)
    td_NT = assign("rredcot", group).advantage_NT
    assert td_NT[2].tolist() == pytest.approx([0.3 / float(shares.std() + 1e-6)] * 3 + [0.0])


def test_a_row_without_segments_has_its_closing_only():
    group = three([[0.5, 0.5], [NAN, NAN], [NAN, NAN]], ids=[-1, 2, 2, 2])
    togo_NT = assign("rredcot", group, credit="togo").advantage_NT
    assert togo_NT[2].tolist() == pytest.approx([0.0, -0.5, -0.5, -0.5])
    mix_NT = assign("rredcot", group, credit="mix").advantage_NT
    base = float(assign("grpo", group).advantage_NT[2, 0])
    # A token of no segment keeps the base.
    assert mix_NT[2].tolist() == pytest.approx([base] + [base - 0.5] * 3)


def test_segments_under_the_mask_only():
    mask_NT = torch.tensor([[True] * 4, [True, False, False, False]])
    group = changed(TWO, {"mask_NT": mask_NT})
    # The second row ends after its first segment with p(0) = .1: q = .45, V = p(0) / .9.
    togo_NT = assign("rredcot", group, credit="togo").advantage_NT
    assert togo_NT[0, 0] == pytest.approx(1 - 0.2 / 0.9)
    assert togo_NT[1].tolist() == pytest.approx([-0.2 / 0.9, 0, 0, 0])


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("rule", ["td", "togo", "group", "mix"])
def test_nobody_parsed_leaves_the_rewards_to_the_answers(values, rule):
    nobody = changed(TWO, {"answer_index_N": torch.tensor([-1, -1])})
    result = assign("rredcot", nobody, values=values, credit=rule, base="dr_grpo")
    # Shares 0 0 1 and 0 0 0: mean 1/6, squares 1 - 1/6, over 5: std sqrt(1/6).
    std = math.sqrt(1 / 6) + 1e-6
    expected = {
        "td": [[0.0, 0.0, 0.0, 1 / std], [0.0] * 4],
        "togo": [[1.0] * 4, [0.0] * 4],
        "group": [[-1 / 6 / std] * 3 + [5 / 6 / std], [-1 / 6 / std] * 4],
        "mix": [[0.5, 0.5, 0.5, 1.5], [-0.5] * 4],
    }[rule]
    torch.testing.assert_close(result.advantage_NT, torch.tensor(expected), atol=1e-6, rtol=1e-6)


def test_all_wrong_has_no_values():
    group = changed(TWO, {"reward_N": torch.tensor([0.4, 0.0])})
    for values in VALUES:
        togo_NT = assign("rredcot", group, values=values, credit="togo").advantage_NT
        assert togo_NT.tolist() == [pytest.approx([0.4] * 4), [0.0] * 4]


@pytest.mark.parametrize("reward", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_equal_rewards_need_no_signal_unless_right_and_wanted(reward, rule):
    group = changed(TWO, {"reward_N": torch.tensor([reward] * 2)})
    bare = Group(reward_N=group.reward_N, mask_NT=group.mask_NT)
    assert assign("rredcot", bare, credit=rule).advantage_NT.eq(0).all()
    if reward < 0.5:
        kept_NT = assign("rredcot", bare, credit=rule, train_all_correct=True).advantage_NT
        assert kept_NT.eq(0).all()
    else:
        kept_NT = assign("rredcot", group, credit=rule, train_all_correct=True).advantage_NT
        # The first row as ever, but for A = 0; the second closes with 1 - .2.
        second = [1 - 0.2, 1 - 0.1, 1 - 0.1, 1 - 0.2]
        expected = {"togo": second, "mix": [-0.1, 0.1, 0.1, 0.8]}.get(rule)
        assert kept_NT.ne(0).any()
        assert expected is None or kept_NT[1].tolist() == pytest.approx(expected)


def test_shares_that_are_all_equal_give_zero():
    # Values do not move and the rollouts are cut: every share is 0 up to rounding.
    flat = [[[0.3, 0.7], [0.3, 0.7], [NAN, NAN]]] * 2
    group = group_of([1.0, 0.0], [[0, 0, 0, 0]] * 2, flat, [0, 1], [1.0, 0.0])
    for rule in ("td", "group"):
        assert assign("rredcot", group, credit=rule).advantage_NT.eq(0).all()


@pytest.mark.parametrize(
    ("missing", "source"),
    [
        ("segment_id_NT", "the segmenter"),
        ("answer_logprob_NMY", "answer probes"),
        ("utility_Y", "the verifier, once an answer"),
        ("answer_index_N", "the answer parser"),
    ],
)
def test_missing_signals_are_named(missing, source):
    bare = changed(TWO, {missing: None})
    with pytest.raises(ValueError, match=f"'rredcot' needs {missing}, .*comes from {source}"):
        assign("rredcot", bare)


def test_own_values_read_no_utility():
    bare = changed(TWO, {"utility_Y": None})
    expected_NT = assign("rredcot", TWO, values="own").advantage_NT
    assert torch.equal(assign("rredcot", bare, values="own").advantage_NT, expected_NT)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"segment_id_NT": torch.full((2, 4), 3)}, "segment_id_NT has id 3 .* 3 columns"),
        ({"answer_index_N": torch.tensor([0, 2])}, "answer_index_N has 2, but .* has 2 answers"),
        ({"utility_Y": torch.tensor([2.0, 0.0])}, "utility_Y has 2.0 .* between 0 and 1"),
        ({"utility_Y": torch.tensor([1.0, NAN])}, "utility_Y has nan .* between 0 and 1"),
        ({"answer_logprob_NMY": torch.zeros(2, 0, 2)}, "has no state; expected at least"),
    ],
)
def test_bad_signals(values, message):
    with pytest.raises(ValueError, match=message):
        assign("rredcot", changed(TWO, values))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": "own"}, "unknown option 'value'; did you mean 'values'"),
        ({"credit": "tdd"}, "credit is 'tdd'; it should be 'td', 'togo', 'group' or 'mix'"),
        ({"beta": -1.0}, "beta is -1.0; it should be greater than or equal to 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        assign("rredcot", TWO, **options)


def oracle_values(row, group, values):
    """Section 4's V of each state of a row, on Python's floats; None where the row has no probe."""
    p, utility = group["p"], group["utility"]
    if not any(math.isfinite(r) and r >= 0.5 for r in group["rewards"]):
        return [0.0] * (group["last"][row] + 1)
    given = [a for a, r in zip(group["answers"], group["rewards"], strict=True) if math.isfinite(r)]
    given = [answer for answer in given if answer >= 0]
    probed = [i for i in range(len(p)) if group["probed"][i]]
    found = []
    for state in range(group["last"][row] + 1):
        value = 0.0
        if values == "pooled":
            for y in given:
                q = sum(p[i][group["last"][i]][y] for i in probed) / len(probed)
                value += p[row][state][y] / q * utility[y] / len(given)
        elif values == "enumerated":
            value = sum(p[row][state][y] for y in set(given) if utility[y] == 1)
        elif (y := group["answers"][row]) >= 0:
            value = group["rewards"][row] * p[row][state][y] / p[row][group["last"][row]][y]
        found.append(min(max(value, 0.0), 1.0))
    return found


def oracle_changes(group, values):
    """For each probed row its segments' changes and, under M, the closing, with the values."""
    changes, befores = {}, {}
    for row in range(len(group["p"])):
        if not group["probed"][row]:
            continue
        value, last = oracle_values(row, group, values), group["last"][row]
        for m in range(last):
            changes[row, m] = value[m + 1] - value[m]
            befores[row, m] = value[m]
        if group["num_segments"] in group["ids"][row]:
            changes[row, group["num_segments"]] = group["rewards"][row] - value[last]
            befores[row, group["num_segments"]] = value[last]
    return changes, befores


def oracle(group, values, rule, beta):
    changes, befores = oracle_changes(group, values)
    xs = list(changes.values())
    mean = sum(xs) / max(len(xs), 1)
    std = math.sqrt(sum((x - mean) ** 2 for x in xs) / (len(xs) - 1)) if len(xs) > 1 else 0.0
    valid = [r for r in group["rewards"] if math.isfinite(r)]
    centre = sum(valid) / len(valid)
    reward_std = math.sqrt(sum((r - centre) ** 2 for r in valid) / (len(valid) - 1))
    credit = [[0.0] * len(ids) for ids in group["ids"]]
    if max(valid) == min(valid):
        return credit
    for row, ids in enumerate(group["ids"]):
        for t, m in enumerate(ids):
            if not group["probed"][row] or m is None:
                continue
            reward = group["rewards"][row]
            x = changes[row, m] if m >= 0 else 0.0
            if rule == "mix":
                credit[row][t] = (reward - centre) / (reward_std + 1e-6) + beta * x
            elif m < 0 or (std < 1e-8 and rule != "togo"):
                continue
            elif rule == "togo":
                credit[row][t] = reward - befores[row, m]
            else:
                credit[row][t] = (x - (mean if rule == "group" else 0)) / (std + 1e-6)
    return credit


def random_group(rng):
    """Ragged rows with holes, masked tokens (id None), rows without verdict, answer or probe."""
    num, width = rng.randint(2, 6), rng.randint(1, 8)
    most, num_answers = rng.randint(0, 4), rng.randint(1, 4)
    rewards = [rng.choice([0.0, 1.0, 1.0, 0.3, -0.5, NAN]) for _ in range(num)]
    rewards[:2] = [0.0, rng.choice([1.0, 0.0, 0.2])]
    ids = [
        [None if rng.random() < 0.2 else rng.randint(-1, most) for _ in range(width)]
        for _ in range(num)
    ]
    last = [max([m + 1 for m in row if m is not None and m < most], default=0) for row in ids]
    p = [
        [[math.exp(-rng.uniform(0, 6)) for _ in range(num_answers)] for _ in range(most + 1)]
        for _ in range(num)
    ]
    probed = [math.isfinite(reward) for reward in rewards]
    if rng.random() < 0.4:
        row = rng.randrange(num)
        p[row][rng.randint(0, last[row])][0] = NAN
        probed[row] = False
    for row in range(num):
        p[row][last[row] + 1 :] = [[NAN] * num_answers] * (most - last[row])
    return {
        "rewards": rewards,
        "ids": ids,
        "last": last,
        "p": p,
        "probed": probed,
        "num_segments": most,
        "answers": [rng.randint(-1, num_answers - 1) for _ in range(num)],
        "utility": [float(rng.randint(0, 1)) for _ in range(num_answers)],
    }


@pytest.mark.parametrize("seed", range(120))
def test_random_groups_against_the_oracle(seed):
    rng = random.Random(seed)
    group, values = random_group(rng), rng.choice(VALUES)
    ids = group["ids"]
    tensor_group = group_of(
        group["rewards"],
        # What the mask hides is a segment that would change the row's last state.
        [[group["num_segments"] if m is None else m for m in row] for row in ids],
        group["p"],
        group["answers"],
        group["utility"],
        torch.tensor([[m is not None for m in row] for row in ids]),
    )
    for rule in RULES:
        beta = rng.choice([1.0, 0.3])
        advantage_NT = assign(
            "rredcot", tensor_group, values=values, credit=rule, beta=beta
        ).advantage_NT
        expected_NT = torch.tensor(oracle(group, values, rule, beta))
        torch.testing.assert_close(advantage_NT, expected_NT, atol=1e-6, rtol=1e-5)
