"""evidence_loss where the weight is frozen: its gradient is made in the forward pass.

By the backends that KERNEL_BACKENDS names; test_triton_evidence starts this file again for those of
Triton.
"""

import importlib
import math
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from credit_kernels import VocabShard, evidence_loss
from credit_kernels.evidence import units, views
from credit_kernels.evidence.cases import CASES
from credit_kernels.evidence.contrast import Contrast, Options
from credit_kernels.logprob import head as head_module
from credit_kernels.logprob.head import Head

BACKENDS = os.environ.get("KERNEL_BACKENDS", "torch").split()
# The Triton one is imported in the interpreter only.
ROWS = importlib.import_module("credit_kernels.evidence.rows") if "rows" in BACKENDS else None
NAMED = {case.name: case for case in CASES}
# More than one tile and block of rows, with fewer of both than the other tests have.
NAMED["many_tiles"] = replace(NAMED["many_tiles"], tokens=70, rows=603, total=603)
# The reference of the student by itself, whose gradient is 0 on all columns but not on a support.
NAMED["free_student_top_k"] = replace(NAMED["free_student"], name="free_student_top_k", top_k=5)
NAMED["free_student_reverse"] = replace(
    NAMED["free_student"], name="free_student_reverse", divergence="reverse"
)
NAMED["capped_reverse"] = replace(
    NAMED["capped"], name="capped_reverse", divergence="reverse", softcap=1.0
)
every_case = pytest.mark.parametrize("case", NAMED.values(), ids=lambda case: case.name)
# Those that can make it in the forward pass; the logits of `tiles` are gone by then.
AHEAD = [backend for backend in BACKENDS if backend != "tiles"]
every_backend_ahead = pytest.mark.parametrize("backend", AHEAD)
LOSSES = ("reference", "evidence", "reference evidence")


def losses(case, backend):
    """(reference_T, evidence_T) by the operation."""

    def compute(hidden_CTH, weight_VH, target_T, shard=None):
        return evidence_loss(
            hidden_CTH,
            weight_VH,
            target_T,
            case.controller(hidden_CTH),
            contrast=case.contrast,
            temperature=case.temperature,
            softcap=case.softcap,
            shard=VocabShard(0, case.rows, case.total) if shard is None else shard,
            backend=backend,
            teacher_weight_VH=case.teacher_weight(weight_VH),
            divergence=case.divergence,
            top_k=case.top_k,
        )

    return compute


def plain(case):
    return lambda *inputs: case.plain(*inputs)[:2]


def evaluate(compute, hidden_CTH, weight_VH, target_T, *, trained=False, through=LOSSES[-1:]):
    """The losses, and the gradients of hidden, each through one of them or through both."""
    hidden_CTH = hidden_CTH.detach().clone().requires_grad_()
    weight_VH = weight_VH.detach().clone().requires_grad_(trained)
    reference_T, evidence_T = compute(hidden_CTH, weight_VH, target_T)
    ramp_T = torch.linspace(-1, 2, len(target_T), dtype=reference_T.dtype)
    mixed = {"reference": ramp_T * reference_T, "evidence": 0.3 * ramp_T.flip(0) * evidence_T}
    sums = [sum(mixed[name].sum() for name in names.split()) for names in through]
    grads = [torch.autograd.grad(one, hidden_CTH, retain_graph=True)[0] for one in sums]
    return [reference_T, evidence_T, *grads]


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
    if ROWS is not None:
        products = ROWS.products

        def counted_products(contexts):
            for rows, product_CKV in products(contexts):
                counts.append(product_CKV.numel())
                yield rows, product_CKV

        monkeypatch.setattr(ROWS, "products", counted_products)
    return counts


@every_backend_ahead
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_literal_gradient(backend, temperature, divergence):
    # p (1/2, 1/2), q+ (1/4, 3/4), q- (3/4, 1/4), q0 (1/10, 9/10). In the second logit, the gradient
    # of the reference is p - q0 = -2/5 or p (log p/q0 - KL) = -ln 3 / 2, that of the evidence, with
    # a controller of 1/2, w (q- - q+) = -1/4 or w p (E_p[r] - r) = -ln 3 / 4.
    log3 = math.log(3)
    weight_VH = torch.tensor([[0.0], [log3 * temperature]])
    hidden_CT = torch.tensor([0.0, 1.0, -1.0, 2.0])[:, None].expand(4, 4)
    hidden_CTH = hidden_CT[..., None].clone().requires_grad_()
    target_T = torch.tensor([0, 1, -100, 1])
    reference_T, evidence_T = evidence_loss(
        hidden_CTH,
        weight_VH,
        target_T,
        torch.tensor([0.5, 0.5, 0.5, -1.5]),
        contrast=("pair", 1, 2, 3),
        temperature=temperature,
        backend=backend,
        divergence=divergence,
    )
    torch.autograd.backward(
        (reference_T, evidence_T),
        (torch.tensor([2.0, 0.0, math.nan, 1.0]), torch.tensor([4.0, -1.0, math.nan, 1.0])),
    )
    of_2 = (-0.4, -0.25) if divergence == "forward" else (-0.5 * log3, -0.25 * log3)
    expected = [2 * of_2[0] + 4 * of_2[1], -of_2[1], 0.0, of_2[0] - 3 * of_2[1]]
    assert hidden_CTH.grad[0, :, 0].tolist() == pytest.approx([log3 * one for one in expected])
    assert hidden_CTH.grad[1:].eq(0).all()


@every_backend_ahead
@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_is_at_most_twice_that_of_eager_torch(case, backend, dtype):
    inputs = case.draw(dtype)
    exact = [value.double() if value.is_floating_point() else value for value in inputs]
    truth = evaluate(plain(case), *exact, through=LOSSES)
    eager = evaluate(plain(case), *inputs, through=LOSSES)
    mine = evaluate(losses(case, backend), *inputs, through=LOSSES)
    assert {value.dtype for value in mine[2:]} == {dtype}
    for value, theirs, true in zip(mine, eager, truth, strict=True):
        assert error(value, true) <= 2 * error(theirs, true) + 1e-5


@every_case
def test_float64_agrees_to_rounding(case):
    inputs = case.draw(torch.float64)
    mine, truth = (
        evaluate(f, *inputs, through=LOSSES) for f in (losses(case, "torch"), plain(case))
    )
    assert max(error(*pair) for pair in zip(mine, truth, strict=True)) < 1e-9


@every_backend_ahead
@every_case
def test_agrees_with_a_trained_head(case, backend):
    inputs = case.draw(torch.float32)
    compute = losses(case, backend)
    frozen, trained = (evaluate(compute, *inputs, trained=either) for either in (False, True))
    assert same_bits(frozen[:2], trained[:2])
    # An offset of the logits comes with weights as large, which the sums of probabilities meet.
    atol = 1e-5 + 1e-6 * abs(case.offset)
    torch.testing.assert_close(frozen[2], trained[2], atol=atol, rtol=1e-5)
    assert frozen[2][1:].eq(0).all()
    with torch.no_grad():
        assert same_bits(frozen[:2], compute(*inputs))


@every_backend_ahead
@pytest.mark.parametrize("name", ["small", "reverse_negatives"])
def test_ignored_rows_and_padding_are_never_read(backend, name):
    case = replace(NAMED[name], rows=NAMED[name].total + 3)
    hidden_CTH, weight_VH, target_T = case.draw(torch.float32)
    clean = evaluate(losses(case, backend), hidden_CTH, weight_VH, target_T)
    ignored_T = target_T < 0
    assert 0 < ignored_T.sum() < len(target_T)
    assert clean[2][:, ignored_T].eq(0).all()
    dirty_CTH = hidden_CTH.masked_fill(ignored_T[:, None], torch.nan)
    weight_VH[case.total :] = torch.inf
    other_T = target_T.masked_fill(ignored_T, case.total)
    assert same_bits(clean, evaluate(losses(case, backend), dirty_CTH, weight_VH, other_T))


@every_backend_ahead
@pytest.mark.parametrize("name", ["many_tiles", "capped", "reverse"])
def test_chunks_change_rounding_only(monkeypatch, made, backend, name):
    case = replace(NAMED[name], tokens=300, rows=203, total=203)
    inputs = case.draw(torch.float32)
    usual = evaluate(losses(case, backend), *inputs)
    num_chunks = len(made)
    if backend == "rows":
        monkeypatch.setattr(ROWS, "chunk_bytes", lambda device: 1)
    monkeypatch.setattr(head_module, "TILE_COLUMNS", 50)
    # A few of the rows at once, and of those a few.
    monkeypatch.setattr(views, "HELD_LOGITS", 25 * 203 * 4)
    monkeypatch.setattr(views, "BLOCK_LOGITS", 7 * 203)
    again = evaluate(losses(case, backend), *inputs)
    assert len(made) - num_chunks > num_chunks
    for a, b in zip(usual, again, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@every_backend_ahead
def test_the_graph_can_be_gone_through_again(backend):
    case = NAMED["capped"]
    hidden_CTH, weight_VH, target_T = case.draw(torch.float32)
    hidden_CTH.requires_grad_()
    both = losses(case, backend)(hidden_CTH, weight_VH, target_T)
    ramp_T = torch.linspace(-1, 2, len(target_T))

    def grad_CTH(*incoming):
        return torch.autograd.grad(both, hidden_CTH, incoming, retain_graph=True)[0]

    first_CTH = grad_CTH(ramp_T, -ramp_T)
    grad_CTH(ramp_T, 0 * ramp_T)
    assert torch.equal(grad_CTH(ramp_T, -ramp_T), first_CTH)
    assert torch.equal(grad_CTH(2 * ramp_T, -2 * ramp_T), 2 * first_CTH)


@every_backend_ahead
@pytest.mark.parametrize(("name", "passes"), [("many_tiles", 1), ("reverse", 2), ("top_k", 2)])
def test_no_logit_is_made_again_for_the_gradient(made, backend, name, passes):
    # The reverse loss looks at them twice, and top_k goes over them for its thresholds.
    case = NAMED[name]
    inputs = case.draw(torch.float32)
    once = int((inputs[2] >= 0).sum()) * case.total * case.contexts

    def logits(**options):
        made.clear()
        evaluate(losses(case, backend), *inputs, **options)
        return sum(made)

    assert logits() == passes * once
    assert logits(trained=True) == (passes + 1) * once


def saved_shapes(case, backend, *, trained=False, dtype=torch.float32):
    """Type and shape of what autograd keeps that has the size of hidden states."""
    hidden_CTH, weight_VH, target_T = case.draw(dtype)
    hidden_CTH.requires_grad_()
    weight_VH.requires_grad_(trained)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )
    with hooks:
        losses(case, backend)(hidden_CTH, weight_VH, target_T)
    inputs = (hidden_CTH, weight_VH)
    others = [each for each in kept if all(each is not one for one in inputs)]
    return [
        (each.dtype, tuple(each.shape))
        for each in others
        if each.dim() > 2 and each.shape[-1] == case.hidden
    ]


@every_backend_ahead
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "count"),
    [("small", 2), ("free_student", 1), ("free_student_top_k", 2), ("free_student_reverse", 1)],
)
def test_what_is_kept_is_a_float32_row_for_each_loss_with_a_gradient(backend, name, count, dtype):
    case = replace(NAMED[name], hidden=24)
    num_rows = int((case.draw(dtype)[2] >= 0).sum())
    expected = [(torch.float32, (count, num_rows, 24))]
    assert saved_shapes(case, backend, dtype=dtype) == expected
    assert saved_shapes(case, backend, trained=True, dtype=dtype) == []


def test_tiles_keep_none():
    if "tiles" not in BACKENDS:
        return
    case = NAMED["small"]
    assert saved_shapes(case, "tiles") == []


def test_they_are_made_only_where_they_are_all_that_can_be_asked():
    free, frozen = torch.zeros(2, 2, 3, requires_grad=True), torch.zeros(2, 3)
    contrast = Contrast.parse(("pair", 1, 0, 0), 2)
    alone = Options(contrast, "forward", None, 1.0, None, VocabShard.whole(2))
    grouped = replace(alone, shard=VocabShard(0, 2, 4, "the group"))
    trained = torch.zeros(2, 3, requires_grad=True)
    assert units.pay(free, frozen, alone)
    for hidden_CTH, weight_VH in ((free, trained), (free.detach(), frozen), (free[:1], frozen)):
        assert not units.pay(hidden_CTH, weight_VH, alone)
    assert not units.pay(free, frozen, grouped)
    with torch.no_grad():
        assert not units.pay(free, frozen, alone)


@every_backend_ahead
@pytest.mark.parametrize("top_k", [None, 3])
def test_the_student_alone_in_every_role(backend, top_k):
    # There is no second context whose logits could make room for a gradient.
    case = replace(NAMED["small"], contexts=1, contrast=("fec", 0, 0, 0), top_k=top_k)
    inputs = case.draw(torch.float32)
    mine, truth = (evaluate(f, *inputs)[2] for f in (losses(case, backend), plain(case)))
    torch.testing.assert_close(mine, truth, atol=1e-6, rtol=1e-5)


@every_backend_ahead
def test_with_a_group_the_logits_are_made_again(monkeypatch, made, backend):
    # The other ranks of the group have nothing to add.
    monkeypatch.setattr(dist, "all_reduce", lambda *arguments, **options: None)
    case = NAMED["small"]
    inputs = case.draw(torch.float32)

    def compute(*inputs):
        shard = VocabShard(0, case.rows, case.total, "the group")
        return losses(case, backend)(*inputs, shard)

    frozen = evaluate(compute, *inputs)
    assert sum(made) == 2 * int((inputs[2] >= 0).sum()) * case.total * case.contexts
    assert same_bits(frozen, evaluate(compute, *inputs, trained=True))
