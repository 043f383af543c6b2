"""One real vLLM server: what it samples, what it runs after a weight sync, and how it dies."""

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
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_credit.rollouts.buckets import Piece
from megatron_credit.rollouts.client import EngineClient, GenerateRequest
from megatron_credit.rollouts.config import EngineConfig
from megatron_credit.rollouts.errors import EngineError
from megatron_credit.rollouts.server import EngineServer
from megatron_credit.rollouts.sync import WeightSync

CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=320,
    kv_cache_mib=64,
    request_timeout_s=60,
    sync_timeout_s=30,
    bucket_mib=1,
)
STOP = 7


@pytest.fixture(scope="module")
def model():
    """A tied model with numbers large enough to make its distributions uneven."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=384,
        hidden_size=128,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("engine")
    model.save_pretrained(path / "model")
    log = path / "engine.log"
    server = EngineServer.start(path / "model", CONFIG, log_path=log, seed=0)
    server.wait_ready(200)
    client = EngineClient(
        server.address, request_timeout_s=60, log_path=log, api_key=server.api_key
    )
    client.wait_ready(10)
    yield server, client, WeightSync([client], CONFIG)
    server.stop()


def request(prompt, **changes):
    fields = {
        "prompt_ids": prompt,
        "num_samples": 2,
        "temperature": 1.0,
        "max_new_tokens": 12,
        "stop_token_ids": (STOP,),
        "seed": 11,
    }
    return GenerateRequest(**(fields | changes))


def reference_logprobs(model, prompt, completion, temperature=1.0):
    ids = torch.tensor([list(prompt) + completion.token_ids])
    with torch.no_grad():
        logprob_TV = torch.log_softmax(model(ids).logits[0] / temperature, -1)
    rows = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return logprob_TV[rows, ids[0, len(prompt) :]]


def largest_gap(model, client, requests, temperature=1.0):
    gaps = []
    for one, samples in zip(requests, client.generate(requests), strict=True):
        for sample in samples:
            expected_T = reference_logprobs(model, one.prompt_ids, sample, temperature)
            gaps.append((torch.tensor(sample.logprobs) - expected_T).abs().max().item())
    return max(gaps)


def perturb(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def send(model, sync, version):
    weights = [(n, p) for n, p in model.named_parameters() if n != "lm_head.weight"]
    pieces = [Piece(name, p.dtype, tuple(p.shape)) for name, p in weights]
    return sync.send(pieces, iter(weights), version=version)


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
    ((stopped,),) = client.generate(
        [request([20, 30], num_samples=1, stop_token_ids=everything)]
    )
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
        num_bytes = send(model, sync, version)
        assert largest_gap(model, client, requests) <= 1e-4
        assert client.weight_version() == version
        assert num_bytes == sum(p.nbytes for p in model.parameters())
    (sample, _), _ = client.generate(requests)
    assert sample.versions == [(7, 0, len(sample.token_ids))]


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


def test_an_unknown_weight_is_refused(engine):
    sync = engine[2]
    with pytest.raises(EngineError, match="weight sync"):
        sync.send(
            [Piece("model.nonsense.weight", torch.float32, (2,))],
            iter([("model.nonsense.weight", torch.zeros(2))]),
            version=9,
        )


def test_killed_while_generating(engine):
    """Last: the engine does not survive it."""
    server, client, _ = engine
    children = psutil.Process(server.pid).children(recursive=True)
    worker = max(children, key=lambda child: child.memory_info().rss)
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
