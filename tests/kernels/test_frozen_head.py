"""linear_logprob where the weight is frozen: its gradient is made in the forward pass.

By the backends that KERNEL_BACKENDS names; test_triton starts this file again for those of Triton.
"""

import importlib
import math
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from credit_kernels import VocabShard, linear_logprob
from credit_kernels.logprob import head as head_module
from credit_kernels.logprob.cases import CASES
from credit_kernels.logprob.function import unit_pays
from credit_kernels.logprob.head import Head

BACKENDS = os.environ.get("KERNEL_BACKENDS", "torch").split()
MODULES = {
    # The Triton ones are imported in the interpreter only.
    backend: importlib.import_module(f"credit_kernels.logprob.{module}")
    for backend, module in {"torch": "chunked", "rows": "rows", "tiles": "tiles"}.items()
    if backend in BACKENDS
}
NAMED = {case.name: case for case in CASES}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
# Those that can make it in the forward pass; the logits of `tiles` are gone by then.
AHEAD = [backend for backend in BACKENDS if backend != "tiles"]
every_backend_ahead = pytest.mark.parametrize("backend", AHEAD)


def evaluate(compute, hidden_TH, weight_VH, target_T, *, trained="", through="logprob"):
    """logprob_T, entropy_T, and the gradient of hidden through one of them or through both."""
    hidden_TH = hidden_TH.detach().clone().requires_grad_()
    weight_VH = weight_VH.detach().clone().requires_grad_("weight" in trained)
    outputs = compute(hidden_TH, weight_VH, target_T)
    ramp_T = torch.linspace(-1, 2, len(target_T), dtype=outputs[0].dtype)
    losses = {"logprob": ramp_T * outputs[0], "entropy": 0.3 * ramp_T.flip(0) * outputs[1]}
    loss = sum(losses[name].sum() for name in through.split())
    return [*outputs, *torch.autograd.grad(loss, hidden_TH)]


def by(case, backend):
    return lambda *inputs: case.compute(*inputs, backend=backend)


def error(value, true):
    return (value.double() - true).abs().max().item() if true.numel() else 0.0


def same_bits(values, others):
    return all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


@pytest.fixture
def made(monkeypatch):
    """Numbers of the logits that were made, one entry a tile or chunk."""
    counts = []
    logits = Head.logits

    def counted_logits(head, *arguments):
        tile_RC = logits(head, *arguments)
        counts.append(tile_RC.numel())
        return tile_RC

    monkeypatch.setattr(Head, "logits", counted_logits)
    if "rows" in MODULES:
        products = MODULES["rows"].products

        def counted_products(head):
            for chunk, product_KC in products(head):
                counts.append(product_KC.numel())
                yield chunk, product_KC

        monkeypatch.setattr(MODULES["rows"], "products", counted_products)
    return counts


@every_backend
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_literal_gradient(backend, temperature):
    # Logits (0, ln 3): d logprob / d logits = (3/4, -3/4) for target 0, (-1/4, 1/4) for 1.
    weight_VH = torch.tensor([[0.0], [math.log(3) * temperature]])
    hidden_TH = torch.ones(3, 1, requires_grad=True)
    target_T = torch.tensor([0, 1, -100])
    logprob_T = linear_logprob(
        hidden_TH, weight_VH, target_T, temperature=temperature, backend=backend
    )
    logprob_T.backward(torch.tensor([2.0, -4.0, math.nan]))
    expected = [-1.5 * math.log(3), -1.0 * math.log(3), 0.0]
    assert hidden_TH.grad[:, 0].tolist() == pytest.approx(expected)


@every_backend_ahead
@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_is_at_most_twice_that_of_eager_torch(case, backend, dtype):
    hidden_TH, weight_VH, target_T = case.draw(dtype)
    exact = (hidden_TH.double(), weight_VH.double(), target_T)
    for through in ("logprob", "logprob entropy"):
        truth = evaluate(case.plain, *exact, through=through)[2]
        inputs = (hidden_TH, weight_VH, target_T)
        eager = evaluate(case.plain, *inputs, through=through)[2]
        mine = evaluate(by(case, backend), *inputs, through=through)[2]
        assert mine.dtype == dtype
        assert error(mine, truth) <= 2 * error(eager, truth) + 1e-5


@every_case
def test_float64_agrees_to_rounding(case):
    inputs = case.draw(torch.float64)
    mine, truth = (evaluate(f, *inputs)[2] for f in (by(case, "torch"), case.plain))
    assert error(mine, truth) < 1e-9


@every_backend_ahead
@every_case
def test_agrees_with_a_trained_head(case, backend):
    inputs = case.draw(torch.float32)
    compute = by(case, backend)
    frozen, trained = (evaluate(compute, *inputs, trained=name) for name in ("", "weight"))
    assert same_bits(frozen[:2], trained[:2])
    # An offset of the logits comes with weights as large, which the sums of probabilities meet.
    atol = 1e-5 + 1e-6 * abs(case.offset)
    torch.testing.assert_close(frozen[2], trained[2], atol=atol, rtol=1e-5)
    with torch.no_grad():
        assert same_bits(frozen[:2], compute(*inputs))
    # The logits are made again, as for a trained head.
    for through in ("entropy", "logprob entropy"):
        frozen = evaluate(compute, *inputs, through=through)
        assert same_bits(frozen, evaluate(compute, *inputs, trained="weight", through=through))


@every_backend_ahead
def test_ignored_rows_and_padding_are_never_read(backend):
    case = NAMED["padded"]
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    clean = evaluate(by(case, backend), hidden_TH, weight_VH, target_T)
    ignored_T = target_T < 0
    assert 0 < ignored_T.sum() < len(target_T)
    assert clean[2][ignored_T].eq(0).all()
    dirty_TH = hidden_TH.masked_fill(ignored_T[:, None], torch.nan)
    weight_VH[case.total :] = torch.inf
    other_T = target_T.masked_fill(ignored_T, case.total)
    assert same_bits(clean, evaluate(by(case, backend), dirty_TH, weight_VH, other_T))


@every_backend_ahead
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_chunks_change_rounding_only(monkeypatch, made, backend, softcap):
    case = replace(NAMED["many_tiles"], tokens=300, softcap=softcap, temperature=0.7)
    inputs = case.draw(torch.float32)
    usual = evaluate(by(case, backend), *inputs)
    num_chunks = len(made)
    monkeypatch.setattr(head_module, "TILE_ROWS", 77)
    monkeypatch.setattr(head_module, "TILE_COLUMNS", 100)
    if backend == "rows":
        monkeypatch.setattr(MODULES["rows"], "chunk_bytes", lambda device: 1)
    again = evaluate(by(case, backend), *inputs)
    assert len(made) - num_chunks > num_chunks
    for a, b in zip(usual, again, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@every_backend_ahead
def test_the_graph_can_be_gone_through_again(backend):
    case = NAMED["capped"]
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    hidden_TH.requires_grad_()
    logprob_T, entropy_T = case.compute(hidden_TH, weight_VH, target_T, backend=backend)
    ramp_T = torch.linspace(-1, 2, len(target_T))

    def grad_TH(out_T, incoming_T):
        return torch.autograd.grad(out_T, hidden_TH, incoming_T, retain_graph=True)[0]

    first_TH = grad_TH(logprob_T, ramp_T)
    grad_TH(entropy_T, ramp_T)
    assert torch.equal(grad_TH(logprob_T, ramp_T), first_TH)
    assert torch.equal(grad_TH(logprob_T, 2 * ramp_T), 2 * first_TH)


@every_backend_ahead
def test_no_logit_is_made_twice(made, backend):
    case = NAMED["many_tiles"]
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    once = int((target_T >= 0).sum()) * case.total

    def logits(**options):
        made.clear()
        evaluate(by(case, backend), hidden_TH, weight_VH, target_T, **options)
        return sum(made)

    assert logits() == once
    assert logits(trained="weight") == 2 * once
    assert logits(through="logprob entropy") == 2 * once


def saved_shapes(backend, hidden_TH, weight_VH):
    """Type and shape of what autograd keeps, the inputs apart."""
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )
    target_T = torch.arange(12).masked_fill(torch.arange(12) % 3 == 0, -100)
    with hooks:
        linear_logprob(hidden_TH, weight_VH, target_T, backend=backend, return_entropy=True)
    inputs = (hidden_TH, weight_VH)
    others = [each for each in kept if all(each is not one for one in inputs)]
    return [(each.dtype, tuple(each.shape)) for each in others if each.dim() > 1]


@every_backend_ahead
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_kept_is_one_float32_row_for_each_token_that_counts(backend, dtype):
    hidden_TH, weight_VH = torch.randn(12, 5).to(dtype), torch.randn(40, 5).to(dtype)
    hidden_TH.requires_grad_()
    assert saved_shapes(backend, hidden_TH, weight_VH) == [(torch.float32, (8, 5))]
    assert saved_shapes(backend, hidden_TH, weight_VH.clone().requires_grad_()) == []
    assert saved_shapes(backend, hidden_TH.detach(), weight_VH.clone().requires_grad_()) == []


@every_backend
def test_it_is_made_only_where_it_is_all_that_can_be_asked(backend):
    free, frozen = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3)
    alone, grouped = VocabShard.whole(2), VocabShard(0, 2, 4, "the group")

    def pays(hidden_TH, weight_VH, shard):
        return unit_pays(hidden_TH, weight_VH, shard, MODULES[backend].BACKEND)

    assert pays(free, frozen, alone) is (backend in AHEAD)
    for inputs in ((free, free, alone), (frozen, frozen, alone), (frozen, free, alone)):
        assert not pays(*inputs)
    assert not pays(free, frozen, grouped)
    with torch.no_grad():
        assert not pays(free, frozen, alone)


@every_backend
def test_with_a_group_the_logits_are_made_again(monkeypatch, made, backend):
    # The other ranks of the group have nothing to add.
    monkeypatch.setattr(dist, "all_reduce", lambda *arguments, **options: None)
    case = NAMED["small"]
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)

    def compute(*inputs):
        shard = VocabShard(0, case.rows, case.total, "the group")
        return linear_logprob(*inputs, shard=shard, backend=backend, return_entropy=True)

    frozen = evaluate(compute, hidden_TH, weight_VH, target_T)
    if backend in AHEAD:
        assert sum(made) == 2 * int((target_T >= 0).sum()) * case.total
    assert same_bits(frozen, evaluate(compute, hidden_TH, weight_VH, target_T, trained="weight"))
