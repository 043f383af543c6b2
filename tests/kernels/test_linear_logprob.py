"""linear_logprob at its edges; what holds everywhere is in test_laws."""

import math
from itertools import pairwise

import pytest
import torch
from credit_kernels import VocabShard, linear_logprob
from credit_kernels.logprob import head as head_module
from credit_kernels.logprob.cases import CASES
from credit_kernels.logprob.chunked import local_stats
from credit_kernels.logprob.head import Head
from credit_kernels.vocab_parallel import finish, merge
from torch.utils._python_dispatch import TorchDispatchMode

NAMED = {case.name: case for case in CASES}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def evaluate(case, hidden_TH, weight_VH, target_T):
    """logprob_T, entropy_T, and the gradients of a mixture of them in hidden and weight."""
    hidden_TH = hidden_TH.detach().clone().requires_grad_()
    weight_VH = weight_VH.detach().clone().requires_grad_()
    outputs = case.compute(hidden_TH, weight_VH, target_T)
    ramp_T = torch.linspace(-1, 2, len(target_T), dtype=outputs[0].dtype)
    loss = (ramp_T * outputs[0]).sum() + (0.3 * ramp_T.flip(0) * outputs[1]).sum()
    return [*outputs, *torch.autograd.grad(loss, (hidden_TH, weight_VH))]


def same_bits(values, others):
    return all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


def test_literal_values():
    # Logits (0, ln 3): probabilities 1/4 and 3/4.
    weight_VH = torch.tensor([[0.0], [math.log(3)]])
    logprob_T, entropy_T = linear_logprob(
        torch.ones(2, 1), weight_VH, torch.tensor([0, 1]), return_entropy=True
    )
    assert logprob_T.exp().tolist() == pytest.approx([0.25, 0.75])
    assert entropy_T.tolist() == pytest.approx([0.5623351446] * 2)


def test_literal_gradients():
    # d logprob / d logits = [target] - p = (3/4, -3/4); the logits are hidden times weight.
    hidden_TH = torch.ones(1, 1, requires_grad=True)
    weight_VH = torch.tensor([[0.0], [math.log(3)]], requires_grad=True)
    linear_logprob(hidden_TH, weight_VH, torch.tensor([0])).backward()
    assert weight_VH.grad[:, 0].tolist() == pytest.approx([0.75, -0.75])
    assert hidden_TH.grad.item() == pytest.approx(-0.75 * math.log(3))


def test_softcap_comes_before_temperature():
    logits = torch.tensor([4.0, -1.0])
    expected = torch.log_softmax(2 * torch.tanh(logits / 2) / 0.5, -1)[0]
    logprob_T = linear_logprob(
        torch.ones(1, 1), logits[:, None], torch.tensor([0]), softcap=2.0, temperature=0.5
    )
    assert logprob_T.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("return_entropy", [False, True])
def test_gradients_by_finite_differences(softcap, return_entropy, monkeypatch):
    monkeypatch.setattr(head_module, "TILE_ROWS", 4)
    monkeypatch.setattr(head_module, "TILE_COLUMNS", 17)
    hidden_TH, weight_VH, target_T = NAMED["small"].draw(torch.float64)

    def function(hidden_TH, weight_VH):
        return linear_logprob(
            hidden_TH,
            weight_VH,
            target_T,
            temperature=0.8,
            softcap=softcap,
            shard=VocabShard(0, 50, 47),
            return_entropy=return_entropy,
        )

    target_T.clamp_(max=46)
    inputs = (hidden_TH.requires_grad_(), weight_VH.requires_grad_())
    assert torch.autograd.gradcheck(function, inputs)


@every_case
def test_entropy_does_not_change_the_logprob(case):
    inputs = case.draw(torch.float32)
    alone_T = linear_logprob(
        *inputs,
        temperature=case.temperature,
        softcap=case.softcap,
        shard=VocabShard(0, case.rows, case.total),
    )
    assert torch.equal(alone_T, case.compute(*inputs)[0])


def test_entropy_alone_can_be_trained():
    # Two equal logits: the entropy is at its maximum, ln 2, where it is flat.
    hidden_TH = torch.ones(1, 1, requires_grad=True)
    weight_VH = torch.zeros(2, 1, requires_grad=True)
    _, entropy_T = linear_logprob(hidden_TH, weight_VH, torch.tensor([1]), return_entropy=True)
    entropy_T.backward()
    assert entropy_T.item() == pytest.approx(math.log(2))
    assert weight_VH.grad.tolist() == [[0.0], [0.0]]


def test_ignored_rows_are_never_read():
    case = NAMED["small"]
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    ignored_T = target_T < 0
    assert 0 < ignored_T.sum() < len(target_T)
    clean = evaluate(case, hidden_TH, weight_VH, target_T)
    assert all(value[ignored_T].eq(0).all() for value in clean[:3])
    for garbage in (torch.nan, torch.inf, 3e38):
        dirty_TH = hidden_TH.masked_fill(ignored_T[:, None], garbage)
        for other in (case.total, case.total + 3, -1, 2**40):
            other_T = target_T.masked_fill(ignored_T, other)
            assert same_bits(clean, evaluate(case, dirty_TH, weight_VH, other_T))


def test_garbage_in_the_incoming_gradient_of_ignored_rows_is_dropped():
    hidden_TH, weight_VH, target_T = NAMED["small"].draw(torch.float32)
    hidden_TH.requires_grad_()
    weight_VH.requires_grad_()
    outputs = linear_logprob(hidden_TH, weight_VH, target_T, return_entropy=True)
    incoming_T = torch.ones(len(target_T)).masked_fill(target_T < 0, torch.nan)
    for grad in torch.autograd.grad(outputs, (hidden_TH, weight_VH), (incoming_T, incoming_T)):
        assert grad.isfinite().all()


def test_all_rows_ignored_gives_zeros():
    hidden_TH, weight_VH, target_T = NAMED["all_ignored"].draw(torch.float32)
    assert (target_T == -100).all()
    values = evaluate(NAMED["all_ignored"], hidden_TH * torch.nan, weight_VH, target_T)
    assert [value.abs().sum().item() for value in values] == [0.0] * 4


def test_padding_rows_never_count_and_get_no_gradient():
    case = NAMED["padded"]
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    clean = evaluate(case, hidden_TH, weight_VH, target_T)
    for garbage in (torch.inf, torch.nan):
        weight_VH[case.total :] = garbage
        assert same_bits(clean, evaluate(case, hidden_TH, weight_VH, target_T))
    assert clean[3][case.total :].eq(0).all()
    unpadded = linear_logprob(hidden_TH, weight_VH[: case.total], target_T)
    assert torch.equal(unpadded, clean[0])


def test_strided_inputs_equal_contiguous_ones():
    case = NAMED["many_tiles"]
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    values = evaluate(case, hidden_TH, weight_VH, target_T)
    wide_TH = torch.cat([hidden_TH, torch.full_like(hidden_TH, torch.nan)], 1)
    strided = (wide_TH[:, : case.hidden], weight_VH.T.contiguous().T)
    again = case.compute(*strided, target_T)
    torch.testing.assert_close(list(again), values[:2], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(7, 100), (1, 1203), (1100, 1), (333, 512)])
def test_tile_sizes_change_rounding_only(monkeypatch, shape):
    case = NAMED["many_tiles"]
    inputs = case.draw(torch.float32)
    inputs = (inputs[0][-300:], inputs[1], inputs[2][-300:])
    usual = evaluate(case, *inputs)
    monkeypatch.setattr(head_module, "TILE_ROWS", shape[0])
    monkeypatch.setattr(head_module, "TILE_COLUMNS", shape[1])
    for a, b in zip(usual, evaluate(case, *inputs), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@every_case
def test_shards_merge_to_the_whole(case):
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    row_R = (target_T >= 0).nonzero()[:, 0]
    cuts = sorted({0, case.rows // 5, case.rows // 2, case.rows})
    cuts.append(case.rows)  # the last shard is empty
    parts = []
    for start, stop in pairwise(cuts):
        shard = VocabShard(start, stop, case.total)
        head = Head.of(
            hidden_TH, weight_VH[start:stop], row_R, shard, case.temperature, case.softcap
        )
        parts.append(local_stats(head, target_T[row_R], True))
    truth = [
        value[row_R]
        for value in case.plain(*(v.double() for v in (hidden_TH, weight_VH)), target_T)
    ]
    eager = [value[row_R] for value in case.plain(hidden_TH, weight_VH, target_T)]
    for order in (parts, parts[::-1]):
        merged = finish(merge(order))
        for mine, true, theirs in zip(
            (merged.logprob_T, merged.entropy_T), truth, eager, strict=True
        ):
            error_T, eager_error_T = (mine - true).abs(), (theirs - true).abs()
            bound = 2 * eager_error_T.max().item() + 1e-5 if len(row_R) else 0.0
            assert (error_T <= bound).all()


class Watch(TorchDispatchMode):
    """Largest tensor made, and multiply-adds of the matrix products."""

    def __init__(self):
        super().__init__()
        self.largest, self.multiplied = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        if function in (torch.ops.aten.mm.default, torch.ops.mkldnn._linear_pointwise.default):
            self.multiplied += out.numel() * args[0].shape[1]
        return out


def test_no_tensor_of_all_logits_is_made():
    hidden_TH = torch.randn(2048, 4, requires_grad=True)
    weight_VH = torch.randn(4096, 4, requires_grad=True)
    with Watch() as watch:
        logprob_T, entropy_T = linear_logprob(
            hidden_TH, weight_VH, torch.randint(4096, (2048,)), return_entropy=True
        )
        (logprob_T + entropy_T).sum().backward()
    assert watch.largest <= head_module.TILE_ROWS * head_module.TILE_COLUMNS


@pytest.mark.parametrize(
    ("trained", "products"), [("", 1), ("hidden", 2), ("weight", 3), ("hidden weight", 4)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_frozen_inputs_cost_no_product(trained, products, dtype):
    hidden_TH = torch.randn(30, 8, dtype=dtype, requires_grad="hidden" in trained)
    weight_VH = torch.randn(70, 8, dtype=dtype, requires_grad="weight" in trained)
    target_T = torch.arange(30).masked_fill(torch.arange(30) % 3 == 0, -100)
    with Watch() as watch:
        logprob_T = linear_logprob(hidden_TH, weight_VH, target_T)
        if trained:
            logprob_T.sum().backward()
    # Ignored rows, 10 of 30, cost nothing.
    assert watch.multiplied == products * 20 * 70 * 8


def test_autocast_does_not_lower_the_precision():
    hidden_TH, weight_VH, target_T = NAMED["small"].draw(torch.float32)
    expected_T = linear_logprob(hidden_TH, weight_VH, target_T)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_logprob(hidden_TH, weight_VH, target_T), expected_T)


def test_bfloat16_weight_gradient_is_summed_in_float32():
    # Row 0 gives 1, and each of 4 later row tiles 1/512, which bfloat16 would lose beside 1.
    rows = head_module.TILE_ROWS
    hidden_TH = torch.zeros(5 * rows, 1, dtype=torch.bfloat16)
    hidden_TH[0] = 2.0
    hidden_TH[rows:] = 2 * 2.0**-9 / rows
    weight_VH = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_logprob(hidden_TH, weight_VH, torch.zeros(5 * rows, dtype=torch.int64)).sum().backward()
    assert weight_VH.grad[:, 0].tolist() == [1.0078125, -1.0078125]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_T": torch.zeros(3, dtype=torch.int64)}, r"target has shape \(3,\)"),
        ({"target_T": torch.zeros(2)}, "torch.int64"),
        ({"hidden_TH": torch.zeros(2, 1, 4)}, r"expected \[T, H\] and \[V, H\]"),
        ({"weight_VH": torch.zeros(5, 3)}, r"hidden \(2, 4\), weight \(5, 3\)"),
        ({"weight_VH": torch.zeros(5, 4).double()}, "one floating type"),
        ({"weight_VH": torch.zeros(5, 4, device="meta")}, "expected one device"),
        ({"shard": VocabShard(0, 6, 6)}, "weight has 5 rows"),
        ({"shard": VocabShard(0, 5, 9)}, "holds 5 of 9 columns"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"backend": "tiles"}, "'tiles' cannot run .* interpreter only; set TRITON_INTERPRET=1"),
        ({"backend": "rows"}, "'rows' cannot run .* or use backend='torch'"),
        ({"backend": "cuda"}, r"'cuda' is not available .*\['auto', 'torch', 'rows', 'tiles'\]"),
    ],
)
def test_bad_input_is_refused(change, message):
    arguments = {
        "hidden_TH": torch.zeros(2, 4),
        "weight_VH": torch.zeros(5, 4),
        "target_T": torch.zeros(2, dtype=torch.int64),
    } | change
    with pytest.raises(ValueError, match=message):
        linear_logprob(**arguments)
