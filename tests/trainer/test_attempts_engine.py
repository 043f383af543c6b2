"""Chains of attempts that a real vLLM server samples with the shipped model."""

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_credit.batch.rollout_files import read_rollouts, write_rollouts
from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.config import AttemptsConfig, EngineConfig, SamplingConfig
from megatron_credit.rollouts.engine_log import EngineLog
from megatron_credit.rollouts.server import EngineServer
from megatron_credit.tasks.chain_sum import ChainSum, ChainSumConfig
from megatron_credit.trainer.attempts import attempt_signals
from megatron_credit.trainer.recorded_steps import Limits, recorded_steps
from megatron_credit.trainer.sampler import Sampler, accuracy, group_metrics, verification

MODEL = Path(__file__).parents[2] / "models" / "chain-sum-0.6m"
ATTEMPTS = AttemptsConfig(max_attempts=3)
SIZES = {"num_prompts": 6, "num_samples": 4}
TEMPERATURE = 1.3
"""Wrong answers become frequent."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """What a sampler is made of, with a started server."""
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    config = EngineConfig(dtype="float32", max_model_len=384, kv_cache_mib=64)
    server = EngineServer.start(MODEL, config, log_path=log, seed=0)
    try:
        server.wait_ready(200)
        client = EngineClient(
            server.address, request_timeout_s=60, log=EngineLog(log), api_key=server.api_key
        )
        yield SimpleNamespace(
            client=client,
            task=ChainSum(ChainSumConfig(eval_size=16)),
            tokenizer=AutoTokenizer.from_pretrained(MODEL),
        )
        client.close()
    finally:
        server.stop()


def sampler_of(engine, attempts=ATTEMPTS):
    return Sampler(
        task=engine.task,
        tokenizer=engine.tokenizer,
        engine=engine.client,
        sampling=SamplingConfig(max_new_tokens=40, temperature=TEMPERATURE),
        seed=3,
        attempts=attempts,
    )


@pytest.fixture(scope="module")
def groups(engine):
    return sampler_of(engine).train_groups(1, **SIZES)


@pytest.fixture(scope="module")
def chains(groups):
    """The rollouts, among which there are some of each length that passed or failed."""
    rollouts = [rollout for group in groups for rollout in group]
    kinds = {(len(one.spans["attempt"]), one.reward) for one in rollouts}
    assert {(1, 1.0), (2, 1.0), (3, 0.0)} <= kinds
    return rollouts


def test_a_chain_goes_on_after_failures_only(engine, chains):
    """The verdicts are those of the attempts' texts, one by one."""
    prompts = {f: engine.task.train_prompt(f) for f in range(SIZES["num_prompts"])}
    by_id = {prompt.id: prompt for prompt in prompts.values()}
    for rollout in chains:
        *earlier, last = rollout.spans["attempt"]
        assert all(span.score == 0.0 for span in earlier) and last.score == rollout.reward
        for span in rollout.spans["attempt"]:
            ids = rollout.response_ids[span.start : span.end]
            if ids[-1] == engine.tokenizer.eos_token_id:
                text = engine.tokenizer.decode(ids[:-1])
                (verdict,) = engine.task.grade([(by_id[rollout.prompt_id], text)])
                assert verdict.reward == span.score
            else:
                assert span.score == 0.0 and span is last and len(ids) == 40
        ended = len(earlier) == 2 or last.score == 1.0 or rollout.finish_reason == "length"
        assert ended


def test_feedback_is_not_trained_on(engine, chains):
    turn = engine.tokenizer.encode(
        "<|user|>Wrong, try again.<|assistant|>", add_special_tokens=False
    )
    for rollout in chains:
        spans = rollout.spans["attempt"]
        between = [(a.end, b.start) for a, b in pairwise(spans)]
        for start, end in between:
            assert rollout.response_ids[start:end] == turn
            assert not any(rollout.mask[start:end])
            assert all(map(math.isnan, rollout.logprobs[start:end]))
        num_feedback = len(turn) * len(between)
        assert len(rollout.mask) - sum(rollout.mask) == num_feedback
        assert sum(b.end - b.start for b in rollout.versions) == sum(rollout.mask)


def test_logprobs_of_every_attempt_are_the_models(chains):
    """Of a plain forward pass over the whole conversation, in float32."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for rollout in chains:
        ids = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        with torch.no_grad():
            logprob_TV = torch.log_softmax(model(ids[None]).logits[0] / TEMPERATURE, -1)
        response_T = torch.arange(len(rollout.prompt_ids), len(ids))
        expected_T = logprob_TV[response_T - 1, ids[response_T]]
        mask_T = torch.tensor(rollout.mask)
        gap_T = (torch.tensor(rollout.logprobs) - expected_T)[mask_T].abs()
        assert gap_T.max() <= 1e-4


def test_a_resumed_run_draws_the_same_chains(engine, groups):
    """Also in other company, and the first attempts are those of a run without further ones."""
    again = sampler_of(engine)
    again.train_groups(2, **SIZES)
    assert repr(again.train_groups(1, **SIZES)) == repr(groups)
    fewer = again.train_groups(1, num_prompts=2, num_samples=4)
    assert repr(fewer) == repr(groups[:2])
    plain = sampler_of(engine, attempts=None).train_groups(1, **SIZES)
    for group, first_attempts in zip(groups, plain, strict=True):
        for rollout, first in zip(group, first_attempts, strict=True):
            end = rollout.spans["attempt"][0].end
            assert rollout.response_ids[:end] == first.response_ids
            assert rollout.logprobs[:end] == first.logprobs
            assert first.spans == {}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_record_can_be_trained_on(groups, chains, tmp_path, suffix):
    write_rollouts(tmp_path / f"step-000001{suffix}", chains)
    assert repr(list(read_rollouts(tmp_path / f"step-000001{suffix}"))) == repr(chains)
    limits = Limits(num_groups=6, group_size=4, vocab_size=384, max_positions=512)
    assert repr(list(recorded_steps(tmp_path, limits, first=1, last=1))) == repr([groups])


def test_signals_are_those_of_the_record(groups):
    for group in groups:
        ids, pass_NK = attempt_signals(group)
        for rollout, id_T, pass_K in zip(group, ids, pass_NK, strict=True):
            assert (id_T >= 0).tolist() == rollout.mask
            assert pass_K.nansum() == rollout.reward
            assert id_T.max() + 1 == (~pass_K.isnan()).sum() == len(rollout.spans["attempt"])


def test_evaluation_counts_the_attempts(engine, groups):
    rollouts = sampler_of(engine).eval_rollouts(temperature=1.0)
    first = accuracy(rollouts, "eval/accuracy")["eval/accuracy"]
    later = verification(rollouts, "eval/verification", 3)
    assert 0 < first <= later["eval/verification_at_2"] <= later["eval/verification_at_3"] <= 1
    assert len(rollouts) == 16 and max(len(one.spans["attempt"]) for one in rollouts) == 3
    assert later["eval/verification_at_3"] == sum(one.reward for one in rollouts) / 16
    plain = sampler_of(engine, attempts=None).eval_rollouts(temperature=1.0)
    assert accuracy(plain, "eval/accuracy") == {"eval/accuracy": first}
    metrics = group_metrics(groups, max_attempts=3)
    chains = [len(one.spans["attempt"]) for group in groups for one in group]
    assert metrics["attempts/reached_3"] == chains.count(3) / 24
    assert 0 < metrics["attempts/pass_1"] < 1
