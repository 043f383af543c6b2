"""One real vLLM server: what it samples, what it runs after a weight sync, and how it dies."""

import copy
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from rollouts.engine_checks import (
    CONFIG,
    checkpoint_tensors,
    core_of,
    dense_model,
    generate_disturbed,
    largest_gap,
    perturb,
    reference_logprobs,
    request,
    send,
    started,
)

from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.server import EngineServer
from megatron_credit.rollouts.vllm_api import GENERATE, generate_request


@pytest.fixture(scope="module")
def model():
    return dense_model(intermediate_size=1024, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    with started(model, tmp_path_factory.mktemp("engine")) as engine:
        yield engine


def test_logprobs_are_those_of_the_sampling_distribution(engine, model):
    _, client, _ = engine
    prompts = [[20, 30, 40 + k] for k in range(4)]
    for temperature in (1.0, 0.7):
        requests = [request(prompt, temperature=temperature) for prompt in prompts]
        assert largest_gap(model, client, requests, temperature) <= 1e-4


def test_greedy_takes_the_most_probable(engine, model):
    _, client, _ = engine
    ((sample,),) = client.generate([request([20, 30], num_samples=1, temperature=0.0)])
    ids = torch.tensor([[20, 30, *sample.token_ids]])
    assert model(ids).logits[0, 1:-1].argmax(-1).tolist() == sample.token_ids


def test_stop_tokens_end_a_response_and_belong_to_it(engine):
    _, client, _ = engine
    everything = tuple(range(384))
    ((stopped,),) = client.generate([request([20, 30], num_samples=1, stop_token_ids=everything)])
    assert len(stopped.token_ids) == 1 and stopped.finish_reason == "stop"
    ((full,),) = client.generate([request([20, 30], num_samples=1, stop_token_ids=(383,))])
    assert len(full.token_ids) == 12 and full.finish_reason == "length"


def test_same_seed_same_bits_in_any_company(engine):
    _, client, _ = engine
    alone = client.generate([request([20, 30, 41])])[0]
    crowd = [request([9, k], seed=k, num_samples=4) for k in range(20)]
    together = client.generate([*crowd, request([20, 30, 41])])[-1]
    assert together == alone
    assert alone[0].token_ids != alone[1].token_ids
    other = client.generate([request([20, 30, 41], seed=999)])[0]
    assert other[0].token_ids != alone[0].token_ids


def test_more_prompt_tokens_than_one_engine_step_reads(engine):
    _, client, _ = engine
    requests = [request([k % 300 + 10] * 300, num_samples=1, seed=k) for k in range(40)]
    answers = client.generate(requests)
    assert all(len(samples[0].token_ids) >= 1 for samples in answers)


def test_weights_arrive_whole_and_are_counted(engine, model):
    _, client, sync = engine
    long_prompt = [k % 300 + 10 for k in range(290)]  # longer than a block of the prefix cache
    requests = [request([20, 30, 42]), request(long_prompt)]
    client.generate(requests)
    for version in (5, 6, 7):
        perturb(model, version)
        assert largest_gap(model, client, requests) > 1e-2
        num_bytes = send(sync, checkpoint_tensors(model), version)
        assert largest_gap(model, client, requests) <= 1e-4
        assert client.weight_version() == version
        assert num_bytes == sum(p.nbytes for p in model.parameters())
    (sample, _), _ = client.generate(requests)
    assert sample.versions == [(7, 0, len(sample.token_ids))]


def test_requests_that_run_go_on_with_the_new_weights(engine, model):
    """Every token has the log-prob of the weights that its version span names."""
    _, client, sync = engine
    old = copy.deepcopy(model)
    long = {"num_samples": 1, "max_new_tokens": 310, "stop_token_ids": (383,)}
    requests = [request([20, 30, 50 + k], **long, seed=k) for k in range(100)]

    def sync_again():
        perturb(model, 8)
        send(sync, checkpoint_tensors(model), 8)

    answers = generate_disturbed(client, requests, sync_again)
    mixed = [
        (one, sample)
        for one, (sample,) in zip(requests, answers, strict=True)
        if len(sample.versions) == 2
    ]
    assert mixed
    for one, sample in mixed[:10]:
        logprob_T = torch.tensor(sample.logprobs)
        for version, start, end in sample.versions:
            weights = {7: old, 8: model}[version]
            expected_T = reference_logprobs(weights, one.prompt_ids, sample)
            assert (logprob_T - expected_T)[start:end].abs().max() <= 1e-4


def test_control_endpoints_want_the_key(engine):
    server = engine[0]
    for path in ("/pause", "/update_weights", "/inference/v1/generate", "/reset_prefix_cache"):
        assert httpx.post(server.address + path, json={}).status_code == 401
    stranger = EngineClient(server.address, request_timeout_s=5)
    with pytest.raises(EngineError, match="answered 401"):
        stranger.wait_ready(5)


def test_bad_requests_are_told_apart_from_a_dead_engine(engine):
    _, client, _ = engine
    with pytest.raises(EngineError, match=r"generation: the engine at .* answered 400"):
        client.generate([request([20] * 400)])
    assert client.generate([request([20, 30])])[0][0].token_ids


def test_a_cache_that_cannot_be_reset_is_an_error(engine, monkeypatch):
    monkeypatch.setattr("megatron_credit.rollouts.client.CACHE_RESET_S", 0.0)
    _, client, _ = engine
    body = generate_request(
        [9],
        num_samples=8,
        temperature=1.0,
        max_new_tokens=300,
        stop_token_ids=(383,),
        seed=0,
    )
    running = [client.begin_post(GENERATE, body, 60, "generation") for _ in range(12)]
    time.sleep(0.3)
    with pytest.raises(EngineError, match=r"prefix cache reset: .* requests that still run"):
        client.reset_prefix_cache()
    for one in running:
        one.result()
    client.reset_prefix_cache()


def test_a_weight_of_another_shape_is_refused_at_once(engine, model):
    """Nearly last: the engine does not take weights afterwards. More buckets follow the bad one."""
    tensors = [
        (name, weight[:-1] if name == "model.layers.0.mlp.down_proj.weight" else weight)
        for name, weight in checkpoint_tensors(model)
    ]
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"cannot load model\.layers\.0\.mlp\.down_proj\.weight"):
        send(engine.sync, tensors, 9)
    assert time.monotonic() - start < 5


def test_killed_while_generating(engine):
    """Last: the engine does not survive it."""
    server, client, _ = engine
    children = psutil.Process(server.pid).children(recursive=True)
    worker = core_of(server)
    slow = [request([9, k], num_samples=8, seed=k, max_new_tokens=300) for k in range(40)]
    timer = threading.Timer(0.3, os.kill, (worker.pid, signal.SIGKILL))
    timer.start()
    start = time.monotonic()
    with pytest.raises(EngineError, match="generation: the engine at"):
        client.generate([replace(one, stop_token_ids=(383,)) for one in slow])
    assert time.monotonic() - start < 30
    for _ in range(100):
        try:
            server.check_alive()
        except EngineError as error:
            assert "ended with exit code" in str(error) and "the end of" in str(error)
            break
        time.sleep(0.2)
    server.stop()
    assert not any(child.is_running() and child.status() != "zombie" for child in children)


def test_a_directory_that_is_no_model_ends_with_the_log(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    server = EngineServer.start(
        Path(tmp_path / "model"), CONFIG, log_path=tmp_path / "engine.log", seed=0
    )
    try:
        with pytest.raises(EngineError, match=r"ended with exit code(.|\n)*the end of"):
            server.wait_ready(120)
    finally:
        server.stop()
