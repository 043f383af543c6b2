"""What DAPO adds to sampling: groups of equal rewards replaced, over-long responses penalised."""

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from trainer.record_cases import rollout
from transformers import AutoTokenizer
from typer.testing import CliRunner

from megatron_credit.batch.rollout import Completion, Prompt, Span, VersionSpan
from megatron_credit.batch.rollout_files import read_rollouts
from megatron_credit.cli import app
from megatron_credit.data.config import DataConfig
from megatron_credit.data.load import load_data
from megatron_credit.rewards.verdict import Verdict
from megatron_credit.rollouts.config import AttemptsConfig, SamplingConfig
from megatron_credit.rollouts.server import EngineServer
from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.trainer.check_credit import check_credit
from megatron_credit.trainer.load_config import ConfigError, load_config
from megatron_credit.trainer.metric_names import is_known
from megatron_credit.trainer.metrics import read_metrics
from megatron_credit.trainer.resampling import STRIDE, has_equal_rewards, step_groups
from megatron_credit.trainer.rollout_meta import (
    RolloutMeta,
    check_loadable,
    check_same_sampling,
    describe_sampling,
    read_meta,
    write_meta,
)
from megatron_credit.trainer.run_directory import RunDirectory
from megatron_credit.trainer.sampler import Sampler, accuracy, group_metrics
from megatron_credit.trainer.shaped_rewards import overlong_metrics, shaped
from megatron_credit.trainer.worker_environment import API_KEY_VARIABLE

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"
MODEL = ROOT / "models" / "chain-sum-0.6m"
NAN = math.nan
PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "2 + 5"}], answer="7")
SIZES = {"num_prompts": 3, "num_samples": 2}


# Which groups are replaced


class Script:
    """Gives group `number.place` the rewards that a test wants; those of no interest differ."""

    def __init__(self, rewards):
        self.rewards = rewards
        self.asked = []

    def train_groups(self, step, *, num_prompts, num_samples, places=None, number=0):
        places = range(num_prompts) if places is None else places
        self.asked.append((number, list(places)))
        return [
            [
                rollout(f"{step}:{number}.{place}", sample, reward=reward)
                for sample, reward in enumerate(self.rewards.get((number, place), (0.0, 1.0)))
            ]
            for place in places
        ]


def names_of(found):
    return [group[0].prompt_id for group in found.groups]


def test_what_is_replaced_keeps_its_place_and_each_try_samples_what_is_missing():
    script = Script({(0, 0): (1.0, 1.0), (0, 2): (0.0, 0.0), (1, 2): (1.0, 1.0)})
    found = step_groups(script, 7, **SIZES, tries=5)
    assert script.asked == [(0, [0, 1, 2]), (1, [0, 2]), (2, [2])]
    assert names_of(found) == ["7:1.0", "7:0.1", "7:2.2"]
    assert found.metrics() == {"group/resampled": pytest.approx(2 / 3), "rollout/dropped": 6}


def test_tries_are_bounded_and_what_is_left_stays():
    script = Script({(number, 1): (0.0, 0.0) for number in range(9)})
    found = step_groups(script, 1, **SIZES, tries=3)
    assert script.asked == [(0, [0, 1, 2]), (1, [1]), (2, [1]), (3, [1])]
    assert names_of(found) == ["1:0.0", "1:3.1", "1:0.2"]
    assert [has_equal_rewards(group) for group in found.groups] == [False, True, False]
    assert found.metrics() == {"group/resampled": pytest.approx(1 / 3), "rollout/dropped": 6}


@pytest.mark.parametrize(("tries", "rewards"), [(0, (1.0, 1.0)), (4, (0.5, 1.0))])
def test_without_tries_or_equal_rewards_nothing_else_is_sampled(tries, rewards):
    script = Script({(0, 0): rewards})
    found = step_groups(script, 2, **SIZES, tries=tries)
    assert script.asked == [(0, [0, 1, 2])]
    assert names_of(found) == ["2:0.0", "2:0.1", "2:0.2"]
    assert (found.num_replaced, found.num_dropped) == (0, 0)


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ((0.0, 0.0, NAN), True),
        ((NAN, NAN), True),
        ((NAN, 1.0), True),  # nobody to be compared with
        ((0.0, 1.0, NAN), False),
        ((0.0, -0.25), False),  # both wrong, one of them over-long
    ],
)
def test_equal_rewards_are_those_that_have_a_verdict(rewards, equal):
    assert has_equal_rewards([rollout(reward=reward) for reward in rewards]) == equal


def test_of_several_attempts_the_final_reward_counts():
    first_try = rollout(reward=1.0, spans={"attempt": [Span(0, 2, 1.0)]})
    second_try = rollout(reward=1.0, spans={"attempt": [Span(0, 1, 0.0), Span(1, 2, 1.0)]})
    assert has_equal_rewards([first_try, second_try])


# The penalty

SAMPLING = SamplingConfig(max_new_tokens=8, overlong_buffer=4)


@pytest.mark.parametrize(
    ("length", "reward", "expected"),
    [
        (1, 1.0, 1.0),
        (4, 1.0, 1.0),
        (5, 1.0, 0.75),
        (6, 0.0, -0.5),
        (7, 1.0, 0.25),
        (8, 1.0, 0.0),
        (8, 0.0, -1.0),
        (8, NAN, NAN),
    ],
)
def test_the_reward_falls_over_the_buffer(length, reward, expected):
    outcome = {1.0: "right", 0.0: "wrong"}.get(reward, "timeout")
    before = rollout(response_ids=[8] * length, reward=reward, outcome=outcome)
    after = shaped(before, SAMPLING)
    assert after.reward == pytest.approx(expected, abs=0, nan_ok=True)
    assert replace(after, reward=0.0) == replace(before, reward=0.0)
    assert shaped(before, SamplingConfig(max_new_tokens=8)) is before
    penalised = float(expected < reward)
    assert overlong_metrics([after, before], SAMPLING) == {"reward/overlong": penalised / 2}


def test_of_several_attempts_the_last_one_is_long():
    chain = rollout(
        response_ids=[8] * 15,
        reward=1.0,
        outcome="right",
        spans={"attempt": [Span(0, 8, 0.0), Span(10, 15, 1.0)]},
    )
    after = shaped(chain, SAMPLING)
    assert after.reward == 0.75 and after.spans == chain.spans


def test_without_a_buffer_there_is_no_metric():
    assert overlong_metrics([rollout()], SamplingConfig(max_new_tokens=8)) == {}


# The sampler, with an engine that throws dice


class Dice:
    """An engine and a task: a seed decides how long a response is and whether it is right."""

    def __init__(self, tokenizer):
        self.right, self.wrong = (tokenizer.convert_tokens_to_ids(digit) for digit in "73")
        self.end = tokenizer.eos_token_id
        self.indices = []

    def generate(self, requests):
        return [
            [self.completion(Random(one.seed + sample)) for sample in range(one.num_samples)]
            for one in requests
        ]

    def completion(self, dice):
        said = self.right if dice.random() < 0.5 else self.wrong
        ids = [said] * dice.randint(1, 7) + [self.end]
        count = len(ids)
        return Completion(
            token_ids=ids,
            logprobs=[-0.5] * count,
            finish_reason="stop",
            versions=[VersionSpan(0, 0, count)],
        )

    def grade(self, answers):
        return [Verdict("right" if text.startswith("7") else "wrong") for _, text in answers]

    def train_prompt(self, index):
        self.indices.append(index)
        return replace(PROMPT, id=f"p{index}")

    def eval_prompts(self):
        return [replace(self.train_prompt(index), id=f"e{index}") for index in range(8)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def dice_sampler(tokenizer, *, buffer=None, attempts=None):
    dice = Dice(tokenizer)
    sampling = SamplingConfig(max_new_tokens=8, overlong_buffer=buffer)
    sampler = Sampler(
        task=dice, tokenizer=tokenizer, engine=dice, sampling=sampling, seed=1, attempts=attempts
    )
    return dice, sampler


def sampled(sampler, step, tries=2):
    return step_groups(sampler, step, num_prompts=8, num_samples=2, tries=tries)


@pytest.mark.parametrize("attempts", [None, AttemptsConfig(max_attempts=2)])
def test_a_resumed_run_draws_the_same(tokenizer, attempts):
    _, through = dice_sampler(tokenizer, attempts=attempts)
    steps = [sampled(through, step) for step in (1, 2, 3)]
    dice, resumed = dice_sampler(tokenizer, attempts=attempts)
    assert repr(sampled(resumed, 3)) == repr(steps[2])  # NaN is not equal to itself
    assert 0 < steps[2].num_replaced < 8
    first = range(16, 24)
    assert dice.indices[:8] == list(first)
    further = {index + number * STRIDE for index in first for number in (1, 2)}
    assert further >= set(dice.indices[8:]) and len(dice.indices) > 8


def test_groups_that_differ_are_those_of_a_run_without_tries(tokenizer):
    _, sampler = dice_sampler(tokenizer)
    plain, found = sampler.train_groups(2, num_prompts=8, num_samples=2), sampled(sampler, 2)
    kept = [not has_equal_rewards(group) for group in plain]
    assert 0 < sum(kept) < 8
    for group, other, stays in zip(plain, found.groups, kept, strict=True):
        assert (group == other) == stays
    assert sampled(sampler, 2, tries=0).groups == plain


def test_the_same_prompt_gets_other_samples_in_each_try(tokenizer):
    dice, sampler = dice_sampler(tokenizer)
    dice.train_prompt = lambda index: PROMPT
    texts = [
        [one.text for group in groups for one in group]
        for groups in (
            sampler.train_groups(1, num_prompts=4, num_samples=2, places=range(4), number=number)
            for number in range(3)
        )
    ]
    assert texts[0] != texts[1] != texts[2] != texts[0]


def test_training_is_shaped_and_evaluation_is_not(tokenizer):
    _, plain = dice_sampler(tokenizer)
    _, sampler = dice_sampler(tokenizer, buffer=4)
    lengths = set()
    for group, expected in zip(
        sampled(sampler, 1, tries=0).groups, sampled(plain, 1, tries=0).groups, strict=True
    ):
        for one, other in zip(group, expected, strict=True):
            lengths.add(length := len(one.response_ids))
            assert one.reward == other.reward - max(0, length - 4) / 4
            assert one.outcome == other.outcome
    assert {3, 8} <= lengths
    found = sampler.eval_rollouts(temperature=1.0)
    assert found == plain.eval_rollouts(temperature=1.0)
    assert any(one.reward == 1.0 and len(one.response_ids) > 4 for one in found)
    right = sum(one.outcome == "right" for one in found)
    assert accuracy(found, "eval/accuracy") == {"eval/accuracy": right / 8}


# Prompts that no step has


def test_further_prompts_of_generated_questions():
    task = ChainSum(ChainSumConfig(eval_size=16))
    held_out = {prompt.messages[0]["content"] for prompt in task.eval_prompts()}
    asked = [
        {task.train_prompt(index + number * STRIDE).messages[0]["content"] for index in range(16)}
        for number in range(4)
    ]
    assert sum(map(len, asked)) == len(set().union(*asked)) == 64
    assert held_out.isdisjoint(set().union(*asked))


def test_further_prompts_of_files_come_from_later_passes_over_them(tokenizer, tmp_path):
    rows = [{"prompt": f"1 + {k}", "answer": 1 + k} for k in range(12)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_data(
        DataConfig.model_validate({"verifier": "exact", "train": [{"path": str(path)}]}),
        tokenizer=tokenizer,
        check_references=lambda source, answers: [None] * len(answers),
        seed=1,
    )
    orders = [
        [data.train_prompt(index + number * STRIDE).answer for index in range(12)]
        for number in range(4)
    ]
    assert {answer for order in orders for answer in order} == {str(1 + k) for k in range(12)}
    assert len({tuple(order) for order in orders}) == 4


# Configuration and records


def test_a_buffer_beyond_the_limit_is_refused():
    overrides = ["sampling.max_new_tokens=70", "sampling.overlong_buffer=71"]
    with pytest.raises(ConfigError, match="overlong_buffer=71 is above max_new_tokens=70"):
        load_config(QUICKSTART, overrides)
    with pytest.raises(ConfigError, match="overlong_buffer: Input should be greater than or equal"):
        load_config(QUICKSTART, ["sampling.overlong_buffer=0"])


def config_of(*overrides):
    return load_config(QUICKSTART, [f"policy.model={MODEL}", *overrides])


def test_what_would_have_no_effect_is_refused():
    config = config_of(
        "credit.method=cal_grpo", "attempts.max_attempts=2", "sampling.overlong_buffer=4"
    )
    with pytest.raises(ValueError, match=r"overlong_buffer=4 has no effect on credit\.method"):
        check_credit(config)
    config = config_of(
        "credit.method=opd", "trainer.samples_per_prompt=1", "trainer.resample_tries=2"
    )
    with pytest.raises(ValueError, match=r"trainer\.resample_tries=2 replaces groups"):
        check_credit(config)


def meta_of(*overrides):
    return describe_sampling(config_of(*overrides), questions="q", weights="w")


def test_the_record_says_how_it_was_shaped_and_resampled(tmp_path):
    plain = meta_of()
    dapo = meta_of("sampling.overlong_buffer=4", "trainer.resample_tries=2")
    assert (plain.overlong_buffer, plain.resample_tries) == (None, 0)
    assert (dapo.overlong_buffer, dapo.resample_tries) == (4, 2)
    earlier = plain.model_dump(exclude={"overlong_buffer", "resample_tries"})
    assert RolloutMeta.model_validate(earlier) == plain  # of a version without them
    write_meta(tmp_path, dapo)
    with pytest.raises(ValueError, match="overlong_buffer: was 4, is None; resample_tries: was 2"):
        check_same_sampling(tmp_path, plain)
    with pytest.raises(ValueError, match="overlong_buffer: was 4, is None"):
        check_loadable(tmp_path, dapo, plain)
    check_loadable(tmp_path, dapo, meta_of("sampling.overlong_buffer=4"))


# A run

SMALL = (
    "parallel.tensor=1",
    "trainer.steps=2",
    "trainer.prompts_per_step=4",
    "trainer.samples_per_prompt=2",
    "task.eval_size=8",
    "evaluation.every=0",
    "checkpoint.every=0",
)
DAPO = ("credit.method=dapo", "trainer.resample_tries=2", "sampling.overlong_buffer=40")
NEW = {"group/resampled", "rollout/dropped", "reward/overlong"}


def command(name, *options, directory, overrides=()):
    arguments = [name, str(QUICKSTART), *map(str, options)]
    for override in (f"run.directory={directory}", f"policy.model={MODEL}", *SMALL, *overrides):
        arguments += ["--set", override]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Directories of `rollout` and `train` with and without, and of a run on what was recorded."""
    root = tmp_path_factory.mktemp("runs")
    server = EngineServer.start(
        MODEL, load_config(QUICKSTART, []).engine, log_path=root / "engine.log", seed=1
    )
    try:
        server.wait_ready(200)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(API_KEY_VARIABLE, server.api_key)
            engine = f"engine.address={server.address}"
            options = ("--steps", 1, "--output")
            command("rollout", *options, root / "plain", directory=root, overrides=[engine])
            command("rollout", *options, root / "dapo", directory=root, overrides=[engine, *DAPO])
            overrides = [engine, "trainer.resample_tries=0", "trainer.steps=1"]
            command("train", directory=root / "plain-run", overrides=overrides)
            command("train", directory=root / "dapo-run", overrides=[engine, *DAPO])
    finally:
        server.stop()
    record = RunDirectory(root / "dapo-run").rollouts
    output = command(
        "train", "--load-rollouts", record, directory=root / "loaded-run", overrides=DAPO
    )
    assert "no trainer.resample_tries: recorded groups are taken as they are" in output
    return root


def groups_of(path):
    rollouts = list(read_rollouts(path))
    return [rollouts[k : k + 2] for k in range(0, len(rollouts), 2)]


def test_a_run_without_tries_is_what_it_was(runs):
    plain = groups_of(runs / "plain" / "step-000001.jsonl")
    trained = groups_of(RunDirectory(runs / "plain-run").rollout_file(1))
    assert [one.text for group in trained for one in group] == [
        one.text for group in plain for one in group
    ]
    record = read_metrics(RunDirectory(runs / "plain-run").metrics)[1]
    assert not NEW & record.keys()
    expected = group_metrics(plain)
    assert {name: record[name] for name in expected} == expected
    assert any(map(has_equal_rewards, plain))


def test_a_run_replaces_and_penalises(runs):
    directory = RunDirectory(runs / "dapo-run")
    for step, record in enumerate(read_metrics(directory.metrics)[1:], start=1):
        assert record.keys() >= NEW and all(map(is_known, record))
        groups = groups_of(directory.rollout_file(step))
        tries = [int(group[0].prompt_id.rsplit("/")[-1]) // STRIDE for group in groups]
        places = [int(group[0].prompt_id.rsplit("/")[-1]) % STRIDE for group in groups]
        assert places == [4 * (step - 1) + place for place in range(4)]
        assert record["group/resampled"] == sum(map(bool, tries)) / 4
        assert record["rollout/dropped"] == 2 * sum(tries)
        assert record["group/equal_rewards"] == sum(map(has_equal_rewards, groups)) / 4
        rollouts = [one for group in groups for one in group]
        for one in rollouts:
            long = max(0, len(one.response_ids) - 30) / 40
            assert one.reward == (1.0 if one.outcome == "right" else 0.0) - long
        penalised = sum(len(one.response_ids) > 30 for one in rollouts)
        assert record["reward/overlong"] == penalised / 8
        assert record["reward/right"] == sum(one.outcome == "right" for one in rollouts) / 8
    records = read_metrics(directory.metrics)
    assert sum(record["group/resampled"] for record in records[1:]) > 0
    assert sum(record["reward/overlong"] for record in records[1:]) > 0


def test_rollout_samples_what_the_run_would(runs):
    sampled = groups_of(runs / "dapo" / "step-000001.jsonl")
    trained = groups_of(RunDirectory(runs / "dapo-run").rollout_file(1))
    for mine, theirs in zip(sampled, trained, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            same = replace(other, versions=one.versions, advantages=[], token_values={})
            assert one == same
    meta = read_meta(runs / "dapo")
    assert (meta.overlong_buffer, meta.resample_tries) == (40, 2)


def test_a_run_on_the_record_trains_on_its_rewards(runs):
    expected = read_metrics(RunDirectory(runs / "dapo-run").metrics)
    found = read_metrics(RunDirectory(runs / "loaded-run").metrics)
    assert len(found) == 3
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        same = theirs.keys() - {"group/resampled", "rollout/dropped"}
        same = {name for name in same if not name.startswith(("timing/", "perf/"))}
        assert {name: mine[name] for name in same} == {name: theirs[name] for name in same}
        assert "group/resampled" not in mine
