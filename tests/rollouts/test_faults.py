"""Real engines that break in a weight sync, or are about to run something other than was sent.

The one with experts and the one with a vocabulary that is no multiple of 64 also cover what vLLM
packs and pads on a CPU.
"""

import signal
import time

import psutil
import pytest
from rollouts.engine_checks import (
    CONFIG,
    announced,
    checkpoint_tensors,
    chosen_experts,
    core_of,
    dense_model,
    expert_model,
    generate_disturbed,
    largest_gap,
    perturb,
    request,
    send,
    started,
)

from megatron_credit.batch.routing import decode_experts
from megatron_credit.rollouts.client import EngineClient
from megatron_credit.rollouts.errors import EngineError

REQUESTS = [request([20, 30, 42 + k]) for k in range(4)]


def require_synced(engine, model, version):
    """New weights arrive: before, the engine is far from the model, afterwards it is the model."""
    perturb(model, version)
    assert largest_gap(model, engine.client, REQUESTS) > 1e-2
    send(engine.sync, checkpoint_tensors(model), version)
    assert largest_gap(model, engine.client, REQUESTS) <= 1e-4


def require_routed(engine, model):
    """Every token that was read comes back with the experts that the model chooses for it, from
    requests of many lengths at once and a prompt that was read before."""
    prompts = [[20, 30], [k % 300 + 10 for k in range(270)], [20, 30, 44], [9]]
    requests = [request(prompt, seed=k, num_samples=3) for k, prompt in enumerate(2 * prompts)]
    for one, samples in zip(requests, engine.client.generate(requests), strict=True):
        for sample in samples:
            require_chosen(model, one, sample)


def require_routed_again(engine, model):
    """Requests that run while new weights come are read again; so are their experts."""
    long = {"num_samples": 1, "max_new_tokens": 310, "stop_token_ids": (383,)}
    requests = [request([20, 30, 50 + k], **long, seed=k) for k in range(60)]

    def sync_again():
        perturb(model, 3)
        send(engine.sync, checkpoint_tensors(model), 3)

    answers = generate_disturbed(engine.client, requests, sync_again)
    mixed = [
        (one, sample)
        for one, (sample,) in zip(requests, answers, strict=True)
        if len(sample.versions) == 2
    ]
    assert mixed
    for one, sample in mixed:
        require_chosen(model, one, sample)


def require_chosen(model, one, sample):
    """The sample comes with the experts that the model chooses, and none for the last token.

    Two experts of nearly the same logit may change places by rounding, and what follows such a
    choice, in layers above and in later tokens, has seen another expert.
    """
    ids = [*one.prompt_ids, *sample.token_ids]
    found_LDK = decode_experts(sample.routed_experts, num_tokens=len(ids))
    assert (found_LDK[-1] == -1).all()
    found_LDK = found_LDK[:-1].sort(-1).values
    expected_LDK, logit_LDE = chosen_experts(model, ids[:-1])
    differs_LD = (found_LDK != expected_LDK.sort(-1).values).any(-1)
    if not differs_LD.any():
        return
    token, layer = differs_LD.nonzero()[0].tolist()
    logit_E = logit_LDE[token, layer]
    least = logit_E[found_LDK[token, layer].long()].min()
    threshold = logit_E.topk(found_LDK.shape[-1]).values[-1]
    assert threshold - least <= 1e-4, f"token {token}, layer {layer}: {threshold} > {least}"


def test_an_engine_with_experts(tmp_path):
    model = expert_model()
    with started(model, tmp_path, routed_experts=True) as engine:
        for version in (1, 2):  # the first may pack what the second would leave packed
            require_synced(engine, model, version)
        require_routed(engine, model)
        require_routed_again(engine, model)
        core = core_of(engine.server)
        core.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        hasty = EngineClient(
            engine.server.address, request_timeout_s=3.0, api_key=engine.server.api_key
        )
        with pytest.raises(EngineError, match=r"generation: .* gave no answer within 3 s"):
            hasty.generate([request([20, k], num_samples=1) for k in range(300)])
        hasty.close()
        assert time.monotonic() - start < 6
        core.send_signal(signal.SIGCONT)
        complete = checkpoint_tensors(model)
        left_out = "model.layers.1.mlp.experts.3.up_proj.weight"
        with pytest.raises(EngineError, match=r"left out parts of model\.layers\.1\.mlp\.experts"):
            send(engine.sync, [pair for pair in complete if pair[0] != left_out], 4)
        with pytest.raises(EngineError, match=r"weight sync, start: .* answered 500"):
            send(engine.sync, complete, 5)  # it would be mixed with what came before


def test_an_engine_whose_core_is_killed_in_a_sync(tmp_path):
    model = dense_model(vocab_size=397, intermediate_size=2304, tie_word_embeddings=False)
    with started(model, tmp_path) as engine:
        require_synced(engine, model, 1)
        perturb(model, 2)
        strided = [
            (name, weight.mT.contiguous().mT if weight.dim() > 1 else weight)
            for name, weight in checkpoint_tensors(model)
        ]
        assert max(w.nbytes for _, w in strided) > CONFIG.bucket_mib << 20
        send(engine.sync, strided, 2)
        assert largest_gap(model, engine.client, REQUESTS) <= 1e-4
        tensors = checkpoint_tensors(model)
        below = psutil.Process(engine.server.pid).children(recursive=True)

        def dying():
            for number, pair in enumerate(tensors):
                if number == len(tensors) // 2:
                    core_of(engine.server).kill()
                yield pair

        start = time.monotonic()
        with pytest.raises(EngineError, match="weight sync, transfer: the engine at") as error:
            engine.sync.send(announced(tensors), dying(), version=4)
        assert "on their way" in str(error.value) or "died" in str(error.value)
        assert time.monotonic() - start < 10
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not alive
