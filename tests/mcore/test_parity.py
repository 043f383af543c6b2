"""One step is the same step under every layout, and the step that float64 arithmetic takes.

All layouts of one world size run one after another in the same processes, because starting
processes is the slow part.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing
from mcore import parity_worker, replay_checks, tiny_models
from mcore.parity_worker import CASES, OBJECTIVE, TEMPERATURE
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5
CHECKPOINTS = ("qwen3_odd_vocab", "qwen2_bias", "qwen3_moe", "qwen3_moe_shares")
EXACT = {name: case for cases in CASES.values() for name, case in cases.items()}
BF16 = [name for name, case in EXACT.items() if case.dtype == "bf16"]
FP32 = [name for name, case in EXACT.items() if case.dtype == "fp32"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Holds what the workers wrote: one file a case, and those of the single-rank checks."""
    directory = tmp_path_factory.mktemp("parity")
    for kind in CHECKPOINTS:
        tiny_models.write_tiny_model(directory, kind)
    for world_size in CASES:
        multiprocessing.spawn(
            parity_worker.run,
            args=(world_size, str(directory / "rendezvous"), str(directory)),
            nprocs=world_size,
        )
    return directory


@pytest.fixture(scope="module")
def results(directory):
    """Of each case by name."""
    return {name: torch.load(directory / f"{name}.pt") for name in EXACT}


def reference(results, name):
    """The result of one rank on the same model and batch."""
    case = EXACT[name]
    if case.batch == "single":
        return results["single"]
    return results["replayed_moe" if case.replayed else case.model]


@pytest.mark.parametrize("name", FP32)
def test_loss_and_metrics_are_those_of_one_rank_on_every_rank(results, name):
    expected = reference(results, name)["all_metrics"][0]
    for metrics in results[name]["all_metrics"]:
        assert metrics == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("name", FP32)
def test_every_gradient_is_that_of_one_rank(results, name):
    expected = reference(results, name)["gradients"]
    found = results[name]["gradients"]
    assert sorted(found) == sorted(expected)
    assert max(gradient.abs().max() for gradient in expected.values()) > 0.1
    for key, gradient in expected.items():
        assert (found[key] - gradient).abs().max() <= TOLERANCE, key


@pytest.mark.parametrize("name", FP32)
def test_scores_are_those_of_one_rank(results, name):
    for found, expected in zip(
        results[name]["scored"], reference(results, name)["scored"], strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", EXACT)
def test_scoring_and_training_see_the_same_bits(results, name):
    assert results[name]["bitwise"] == 0.0


@pytest.mark.parametrize("name", BF16)
def test_bf16_differs_by_no_more_than_its_rounding(results, name):
    """bf16 keeps 8 bits; through four layers of width 32 a log-prob may lose a few of them."""
    expected, found = reference(results, name), results[name]
    for one, other in zip(found["scored"], expected["scored"], strict=True):
        assert torch.allclose(one["logprob_T"], other["logprob_T"], rtol=0, atol=0.15)
    norm = torch.stack([g.norm() for g in expected["gradients"].values()]).norm()
    gaps = [found["gradients"][key] - g for key, g in expected["gradients"].items()]
    assert torch.stack([gap.norm() for gap in gaps]).norm() <= 0.1 * norm


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_step_is_that_of_float64_arithmetic_on_the_transformers_model(directory, kind):
    """An independent computation: no packing, no megatron, logits in full."""
    found = torch.load(directory / "hugging_face.pt")[kind]
    model = AutoModelForCausalLM.from_pretrained(
        directory / kind, dtype=torch.float64, experts_implementation="eager"
    )
    loss = plain_loss(model, parity_worker.make_batch("mixed", model.config.vocab_size))
    loss.backward()
    assert found["metrics"]["loss"] == pytest.approx(loss.item(), abs=TOLERANCE)
    named = ((name, parameter.grad) for name, parameter in model.named_parameters())
    expected = dict(tiny_models.published(named))
    assert found["gradients"].keys() == expected.keys()
    for name, gradient in expected.items():
        gap = (found["gradients"][name].double() - gradient).abs().max()
        assert gap <= TOLERANCE * max(1.0, gradient.abs().max()), name
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert found["metrics"]["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)


def plain_loss(model, batch):
    """Mean over sequences of the mean over trained tokens of the clipped objective with KL."""
    losses = []
    for sequence in (s for s in batch if s.num_trained):
        first = sequence.num_prompt - 1
        logits_TV = model(sequence.token_ids_L[None]).logits[0, first:-1] / TEMPERATURE
        response_T = sequence.token_ids_L[sequence.num_prompt :]
        picked_T = logits_TV.log_softmax(-1).gather(-1, response_T[:, None])[:, 0]
        mask_T = sequence.mask_T
        policy, old, engine, reference, advantage = (
            values_T[mask_T].double()
            for values_T in (
                picked_T,
                sequence.old_logprob_T,
                sequence.rollout_logprob_T,
                sequence.reference_logprob_T,
                sequence.advantage_T,
            )
        )
        ratio = (policy - old).exp()
        clipped = ratio.clamp(1 - OBJECTIVE.clip_low, 1 + OBJECTIVE.clip_high)
        surrogate = -torch.minimum(ratio * advantage, clipped * advantage)
        correction = (old - engine).exp().clamp(max=OBJECTIVE.importance_cap)
        gap = reference - policy
        kl = gap.exp() - 1 - gap
        losses.append((correction * surrogate + OBJECTIVE.kl_coef * kl).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_gets_what_rank_0_shares(directory, rank):
    found = torch.load(directory / f"payload-{rank}.pt")
    assert found["header"] == {"step": 3, "name": "n"}
    expected = parity_worker.make_batch("mixed", 134)
    for one, sequence in zip(found["sequences"], expected, strict=True):
        torch.testing.assert_close(one, vars(sequence), rtol=0, atol=0, equal_nan=True)


def test_no_tensor_has_tokens_times_vocabulary_elements(directory):
    largest = json.loads((directory / "largest.json").read_text())
    assert largest["scoring"] <= largest["logits"] / 2
    assert largest["training"] <= largest["logits"] / 2


@pytest.mark.parametrize("name", ["infinite", "untrained", "empty"])
def test_a_step_without_a_finite_gradient_changes_nothing(directory, name):
    result = json.loads((directory / "skipped.json").read_text())[name]
    assert not result["changed"] and result["steps"] == 0
    assert result["metrics"]["optimizer/skipped"] == "1.0"
    # Of a warm-up of two steps to 1e-3, the first is still to come.
    assert result["metrics"]["lr"] == "0.0005"


def test_odd_inputs_to_score(directory):
    results = json.loads((directory / "skipped.json").read_text())
    assert results["scored_empty"] == []
    assert "sequence 1 has token ids outside of 0 .. 130" in results["foreign"]


def test_skipped_steps_leave_no_trace(directory):
    results = json.loads((directory / "skipped.json").read_text())
    assert results["empty"]["metrics"]["loss"] == "0.0"
    assert sorted(results["empty"]["metrics"]) == sorted(results["sound"]["metrics"])
    assert results["sound"]["changed"] and results["sound"]["steps"] == 1
    assert results["sound"]["metrics"]["optimizer/skipped"] == "0.0"


@pytest.fixture(scope="module")
def replay(directory):
    return torch.load(directory / "replay.pt")


@pytest.mark.parametrize("kind", replay_checks.REPLAYED)
def test_the_routers_own_choice_replayed_gives_the_same_bits(replay, kind):
    for name in ("replayed", "not replayed"):
        for own_T, other_T in zip(replay[kind]["own"], replay[kind][name], strict=True):
            assert torch.equal(own_T, other_T)


@pytest.mark.parametrize("kind", replay_checks.REPLAYED)
def test_replayed_experts_are_those_that_compute(directory, replay, kind):
    """Against transformers in float64, its routers told by hand which experts to take."""
    model = AutoModelForCausalLM.from_pretrained(
        directory / kind, dtype=torch.float64, experts_implementation="eager"
    )
    found = replay[kind]
    changed = 0.0
    for fields, random_T, own_T in zip(
        found["sequences"], found["random"], found["own"], strict=True
    ):
        ids_L, first = fields["token_ids_L"], fields["num_prompt"] - 1
        with torch.no_grad(), tiny_models.routed(model, fields["routed_experts_LDK"].long()):
            logits_TV = model(ids_L[None]).logits[0, first:-1] / TEMPERATURE
        expected_T = logits_TV.log_softmax(-1).gather(-1, ids_L[first + 1 :, None])[:, 0]
        torch.testing.assert_close(random_T.double(), expected_T, rtol=0, atol=TOLERANCE)
        if len(random_T):
            changed = max(changed, (random_T - own_T).abs().max().item())
    assert changed > 0.01


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "sequence 0 does not say which experts its tokens went to"),
        ("layers", "sequence 0: routed in 3 layers to 2 experts a token, but this model has 4"),
        ("twice", "token 2 was routed in layer 1 to experts [1, 1]; expected different ones of 0"),
        ("partly", "token 0 was routed in layer 0 to experts [2, -1]"),
        ("beyond", "token 3 was routed in layer 2 to experts [4, "),
    ],
)
def test_experts_of_another_model_are_refused(replay, name, message):
    assert message in replay["refused"][name]


def test_a_bfloat16_model_routes_in_float32(replay):
    found = replay["bf16"]
    assert (found["hidden"], found["weight"]) == ({"torch.bfloat16"}, {"torch.float32"})
    assert found["gap"] <= 1e-6
