"""linear_logprob against float64 truth, and its laws at the edges."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import credit_kernels
import pytest
import torch
from credit_kernels import VocabShard, linear_logprob
from credit_kernels.logprob import chunked
from credit_kernels.logprob.cases import CASES
from credit_kernels.logprob.chunked import Head, local_stats
from credit_kernels.logprob.reference import linear_logprob_reference
from credit_kernels.vocab_parallel import finish, merge

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def options(case):
    return {"temperature": case.temperature, "softcap": case.softcap}


def ours(case, hidden_TH, weight_VH, target_T):
    shard = VocabShard(0, case.rows, case.total)
    return linear_logprob(
        hidden_TH, weight_VH, target_T, shard=shard, return_entropy=True, **options(case)
    )


def plain(case, hidden_TH, weight_VH, target_T):
    return linear_logprob_reference(
        hidden_TH, weight_VH, target_T, total=case.total, **options(case)
    )


def mixture(outputs):
    """A fixed random mixture of both outputs."""
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(len(out), generator=generator).double() for out in outputs]
    return sum((out.double() * w).sum() for out, w in zip(outputs, weights, strict=True))


def evaluate(function, case, inputs, dtype):
    """Both outputs, and the gradients of a fixed random mixture of them."""
    hidden_TH, weight_VH, target_T = inputs
    hidden_TH = hidden_TH.detach().to(dtype).clone().requires_grad_()
    weight_VH = weight_VH.detach().to(dtype).clone().requires_grad_()
    outputs = function(case, hidden_TH, weight_VH, target_T)
    return [*outputs, *torch.autograd.grad(mixture(outputs), (hidden_TH, weight_VH))]


def error(values, truth):
    return [
        (value.double() - true).abs().max().item() if true.numel() else 0.0
        for value, true in zip(values, truth, strict=True)
    ]


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_is_at_most_twice_that_of_eager_torch(case, dtype):
    inputs = case.draw(dtype)
    truth = evaluate(plain, case, inputs, torch.float64)
    eager = error(evaluate(plain, case, inputs, dtype), truth)
    fused = error(evaluate(ours, case, inputs, dtype), truth)
    for mine, theirs in zip(fused, eager, strict=True):
        assert mine <= 2 * theirs + 1e-5


@every_case
def test_float64_agrees_to_rounding(case):
    inputs = case.draw(torch.float64)
    truth = evaluate(plain, case, inputs, torch.float64)
    assert max(error(evaluate(ours, case, inputs, torch.float64), truth)) < 1e-9


def test_literal_values():
    # Logits (0, ln 3): probabilities 1/4 and 3/4.
    weight_VH = torch.tensor([[0.0], [3.0]]).log().nan_to_num(neginf=0.0)
    logprob_T, entropy_T = linear_logprob(
        torch.ones(2, 1), weight_VH, torch.tensor([0, 1]), return_entropy=True
    )
    assert logprob_T.exp().tolist() == pytest.approx([0.25, 0.75])
    assert entropy_T.tolist() == pytest.approx([0.5623351446] * 2)


def test_softcap_comes_before_temperature():
    logits = torch.tensor([4.0, -1.0])
    expected = torch.log_softmax(2 * torch.tanh(logits / 2) / 0.5, -1)[0]
    logprob_T = linear_logprob(
        torch.ones(1, 1), logits[:, None], torch.tensor([0]), softcap=2.0, temperature=0.5
    )
    assert logprob_T.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradients_by_finite_differences(softcap):
    case = next(case for case in CASES if case.name == "small")
    hidden_TH, weight_VH, target_T = case.draw(torch.float64)

    def function(hidden_TH, weight_VH):
        return linear_logprob(
            hidden_TH, weight_VH, target_T, temperature=0.8, softcap=softcap, return_entropy=True
        )

    inputs = (hidden_TH.requires_grad_(), weight_VH.requires_grad_())
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_each_gradient_alone_is_the_same(frozen):
    case = CASES[0]
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    both = evaluate(ours, case, (hidden_TH, weight_VH, target_T), torch.float32)[2:]
    hidden_TH.requires_grad_(frozen != "hidden")
    weight_VH.requires_grad_(frozen != "weight")
    mixture(ours(case, hidden_TH, weight_VH, target_T)).backward()
    lone, index = (weight_VH, 1) if frozen == "hidden" else (hidden_TH, 0)
    assert torch.equal(lone.grad, both[index])


@every_case
def test_scoring_and_training_agree_bitwise(case):
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    with torch.no_grad():
        scored = ours(case, hidden_TH, weight_VH, target_T)
    trained = ours(case, hidden_TH.requires_grad_(), weight_VH.requires_grad_(), target_T)
    alone_T = linear_logprob(
        hidden_TH, weight_VH, target_T, shard=VocabShard(0, case.rows, case.total), **options(case)
    )
    assert all(torch.equal(a, b) for a, b in zip(scored, trained, strict=True))
    assert torch.equal(alone_T, scored[0])


def test_ignored_rows_are_never_read():
    case = CASES[0]
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    ignored_T = target_T < 0
    assert ignored_T.any()
    clean = evaluate(ours, case, (hidden_TH, weight_VH, target_T), torch.float32)
    dirty = hidden_TH.masked_fill(ignored_T[:, None], torch.nan)
    for other_T in (target_T, target_T.masked_fill(ignored_T, case.total + 3)):
        spoiled = evaluate(ours, case, (dirty, weight_VH, other_T), torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(clean, spoiled, strict=True))
    assert all(out[ignored_T].eq(0).all() for out in clean[:3])


def test_padding_rows_never_count_and_get_no_gradient():
    case = next(case for case in CASES if case.name == "padded")
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    clean = evaluate(ours, case, (hidden_TH, weight_VH, target_T), torch.float32)
    weight_VH[case.total :] = torch.inf
    spoiled = evaluate(ours, case, (hidden_TH, weight_VH, target_T), torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(clean, spoiled, strict=True))
    assert clean[3][case.total :].eq(0).all()


def test_tile_sizes_change_rounding_only(monkeypatch):
    case = next(case for case in CASES if case.name == "many_tiles")
    inputs = case.draw(torch.float32)
    usual = evaluate(ours, case, inputs, torch.float32)
    monkeypatch.setattr(chunked, "TILE_TOKENS", 7)
    monkeypatch.setattr(chunked, "TILE_COLUMNS", 100)
    for a, b in zip(usual, evaluate(ours, case, inputs, torch.float32), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


def test_same_inputs_give_the_same_bits():
    case = next(case for case in CASES if case.name == "many_tiles")
    inputs = case.draw(torch.float32)
    first, second = (evaluate(ours, case, inputs, torch.float32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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
    merged = finish(merge(parts))
    logprob_T, entropy_T = ours(case, hidden_TH, weight_VH, target_T)
    torch.testing.assert_close(merged.logprob_T, logprob_T[row_R], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(merged.entropy_T, entropy_T[row_R], atol=1e-4, rtol=1e-5)


def test_no_tensor_of_all_logits_is_made():
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            tensors = [out] if isinstance(out, torch.Tensor) else []
            self.elements = max([self.elements, *(tensor.numel() for tensor in tensors)])
            return out

    hidden_TH = torch.randn(2048, 4, requires_grad=True)
    weight_VH = torch.randn(4096, 4, requires_grad=True)
    with Largest() as largest:
        linear_logprob(hidden_TH, weight_VH, torch.randint(4096, (2048,))).sum().backward()
    assert largest.elements <= chunked.TILE_TOKENS * chunked.TILE_COLUMNS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_T": torch.zeros(3, dtype=torch.int64)}, r"target has shape \(3,\)"),
        ({"target_T": torch.zeros(2)}, "torch.int64"),
        ({"weight_VH": torch.zeros(5, 3)}, r"hidden \(2, 4\), weight \(5, 3\)"),
        ({"weight_VH": torch.zeros(5, 4).double()}, "one floating type"),
        ({"shard": VocabShard(0, 6, 6)}, "weight has 5 rows"),
        ({"shard": VocabShard(0, 5, 9)}, "holds 5 of 9 columns"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"backend": "tiles"}, "backend='tiles' is not available"),
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


def test_shard_bounds_are_checked():
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        VocabShard(5, 3, 9)


def test_the_package_stands_alone():
    root = Path(credit_kernels.__file__).parents[1]
    assert not (root / "__init__.py").exists()
    probe = (
        "import sys, credit_kernels; "
        "others = ('megatron', 'vllm', 'transformers', 'megatron_credit'); "
        "print([name for name in others if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", probe], text=True).strip() == "[]"
