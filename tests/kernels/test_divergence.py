"""divergence_loss against float64 autograd written apart from it; laws of all ops: test_laws."""

import math
from dataclasses import replace

import pytest
import torch
from credit_kernels import VocabShard, divergence_loss
from credit_kernels.divergence import events as events_module
from credit_kernels.divergence.cases import CASES
from credit_kernels.divergence.reference import Plain
from credit_kernels.evidence import views as views_module
from credit_kernels.logprob import head as head_module
from objective.distillation_reference import distillation_loss
from torch.utils._python_dispatch import TorchDispatchMode

NAMED = {case.name: case for case in CASES}
REPRESENTATIVE = ("small", "forward", "reverse", "capped", "top_k", "top_k_forward")
some_cases = pytest.mark.parametrize("name", REPRESENTATIVE)
BETAS = (0.0, 0.3, 0.5, 1.0)
TOP_KS = (None, 1, 7, 40, 1000)
TOTAL, ROWS = 40, 43


def mixture(divergence_T):
    return (torch.linspace(-1, 2, len(divergence_T), dtype=divergence_T.dtype) * divergence_T).sum()


def evaluate(function, hidden_TH, weight_VH):
    """Divergences, and the gradients of a mixture of them."""
    inputs = [value.detach().clone().requires_grad_() for value in (hidden_TH, weight_VH)]
    divergence_T = function(*inputs)
    return [divergence_T, *torch.autograd.grad(mixture(divergence_T), inputs)]


def draw(dtype=torch.float32, spread=1.0):
    """hidden, teacher's hidden, weight, teacher's weight, target; some rows are ignored."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden_TH, weight_VH = spread * normal(15, 6), normal(ROWS, 6)
    teacher_TH = hidden_TH + normal(15, 6)
    target_T = torch.randint(TOTAL, (15,), generator=generator)
    target_T[[0, 4, 11]] = torch.tensor([-1, TOTAL, -100])
    return hidden_TH, teacher_TH, weight_VH, normal(ROWS, 6), target_T


def oracle(hidden_TH, teacher_TH, weight_VH, teacher_VH, target_T, *, beta, top_k, temperature):
    """Row by row and event by event, in probabilities."""
    found = []
    for hidden_H, other_H, target in zip(hidden_TH, teacher_TH, target_T.tolist(), strict=True):
        if not 0 <= target < TOTAL:
            found.append(hidden_H.new_zeros(()))
            continue
        p_V = (weight_VH[:TOTAL] @ hidden_H / temperature).softmax(0)
        q_V = (teacher_VH[:TOTAL] @ other_H / temperature).softmax(0).detach()
        if top_k is not None and top_k < TOTAL:
            ranked = sorted(range(TOTAL), key=lambda v, p_V=p_V: (-p_V[v].item(), v))
            told, others = ranked[:top_k], ranked[top_k:]
            p_V, q_V = (torch.cat([x[told], x[others].sum()[None]]) for x in (p_V, q_V))
        m_V = beta * q_V + (1 - beta) * p_V
        teacher, student = (q_V * (q_V / m_V).log()).sum(), (p_V * (p_V / m_V).log()).sum()
        if beta == 0:
            found.append((q_V * (q_V / p_V).log()).sum())
        elif beta == 1:
            found.append((p_V * (p_V / q_V).log()).sum())
        else:
            found.append(beta * teacher + (1 - beta) * student)
    return torch.stack(found)


def largest(difference):
    return difference.abs().max().item() if difference.numel() else 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("top_k", TOP_KS)
@pytest.mark.parametrize("beta", BETAS)
def test_values_and_gradients_are_those_of_float64_autograd(beta, top_k, dtype):
    # Odd sizes: 40 of 43 rows count, and a top_k of all of them and of more.
    hidden_TH, teacher_TH, weight_VH, teacher_VH, target_T = draw(dtype)
    options = {"beta": beta, "top_k": top_k, "temperature": 0.8}
    shard = VocabShard(0, ROWS, TOTAL)

    def by_oracle(hidden_TH, weight_VH):
        return oracle(
            hidden_TH, teacher_TH.to(hidden_TH), weight_VH, teacher_VH.to(hidden_TH), target_T,
            **options,
        )  # fmt: skip

    def by_us(hidden_TH, weight_VH):
        return divergence_loss(
            hidden_TH, teacher_TH, weight_VH, target_T, shard=shard,
            teacher_weight_VH=teacher_VH, **options,
        )  # fmt: skip

    truth = evaluate(by_oracle, hidden_TH.double(), weight_VH.double())
    # Eager torch in float32, its gradients rounded to the type that ours have.
    eager = evaluate(by_oracle, hidden_TH.float(), weight_VH.float())
    eager[1:] = [value.to(dtype) for value in eager[1:]]
    mine = evaluate(by_us, hidden_TH, weight_VH)
    assert mine[0].dtype == torch.float32
    assert truth[0].max() > 0.05 and truth[1].abs().max() > 0.05
    for value, theirs, true in zip(mine, eager, truth, strict=True):
        assert largest(value.double() - true) <= 2 * largest(theirs.double() - true) + 1e-5


@pytest.mark.parametrize("top_k", TOP_KS)
@pytest.mark.parametrize("beta", BETAS)
def test_the_objective_from_log_probs_is_the_same(beta, top_k):
    hidden_TH, teacher_TH, weight_VH, _, target_T = draw(torch.float64)
    weight_VH, kept_T = weight_VH[:TOTAL], (target_T >= 0) & (target_T < TOTAL)
    options = {"beta": beta, "top_k": top_k}

    def from_log_probs(hidden_TH, weight_VH):
        logs = [(x @ w.T).log_softmax(-1) for x, w in ((hidden_TH, weight_VH),
                (teacher_TH, weight_VH.detach()))]  # fmt: skip
        losses = [
            distillation_loss(logs[0][t : t + 1], logs[1][t : t + 1], kept_T[t : t + 1], **options)
            for t in range(len(kept_T))
        ]
        return torch.stack([loss.loss for loss in losses])

    def by_us(hidden_TH, weight_VH):
        return divergence_loss(hidden_TH, teacher_TH, weight_VH, target_T, **options)

    expected = evaluate(from_log_probs, hidden_TH, weight_VH)
    for value, true in zip(evaluate(by_us, hidden_TH, weight_VH), expected, strict=True):
        torch.testing.assert_close(value, true, atol=1e-10, rtol=0)


def of_probabilities(*rows):
    """Hidden states of one token whose softmaxes, with the identity for weight, are these."""
    return [torch.tensor([row], dtype=torch.float64).log() for row in rows]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"beta": 0}, 0.25 * math.log(0.5) + 0.25 * math.log(1) + 0.5 * math.log(2)),
        ({"beta": 1}, 0.5 * math.log(2) + 0.25 * math.log(1) + 0.25 * math.log(0.5)),
        # m = (.375, .25, .375)
        ({"beta": 0.5}, 0.25 * math.log(0.25 / 0.375) + 0.5 * math.log(0.5 / 0.375)),
        # Events (.5, .5) of the student and (.25, .75) of the teacher.
        ({"beta": 0, "top_k": 1}, 0.25 * math.log(0.5) + 0.75 * math.log(1.5)),
        # The second and the third are equally likely: the lower id is told apart.
        ({"beta": 1, "top_k": 2}, 0.5 * math.log(2) + 0.25 * math.log(0.5)),
        ({"beta": 1, "top_k": 3}, 0.5 * math.log(2) + 0.25 * math.log(0.5)),
    ],
)
def test_literal_divergences(options, expected):
    student_TH, teacher_TH = of_probabilities((0.5, 0.25, 0.25), (0.25, 0.25, 0.5))
    found_T = divergence_loss(
        student_TH, teacher_TH, torch.eye(3).double(), torch.tensor([2]), **options
    )
    assert found_T.tolist() == pytest.approx([expected], rel=1e-12)


def test_no_gradient_reaches_the_teacher():
    hidden_TH, teacher_TH, weight_VH, teacher_VH, target_T = draw()
    inputs = [value.requires_grad_() for value in (hidden_TH, teacher_TH, weight_VH, teacher_VH)]
    shard = VocabShard(0, ROWS, TOTAL)
    for top_k in (None, 5):
        divergence_loss(
            *inputs[:3], target_T, shard=shard, teacher_weight_VH=teacher_VH, top_k=top_k
        ).sum().backward()
    assert teacher_TH.grad is None and teacher_VH.grad is None
    assert hidden_TH.grad.abs().max() > 0.1 and weight_VH.grad.abs().max() > 0.1


def tied():
    """Logits that are whole numbers, many of them equal, and teachers that tell those apart."""
    generator = torch.Generator().manual_seed(9)
    hidden_TH = torch.randint(-1, 2, (12, 2), generator=generator).double()
    teacher_TH = torch.randn(12, 2, generator=generator).double()
    weight_VH = torch.randint(-2, 3, (ROWS, 2), generator=generator).double()
    teacher_VH = torch.randn(ROWS, 2, generator=generator).double()
    hidden_TH[0] = 0
    return hidden_TH, teacher_TH, weight_VH, teacher_VH, torch.arange(12)


@pytest.mark.parametrize("top_k", [1, 4, 13, 39])
def test_of_equal_tokens_the_lower_ids_are_told_apart(top_k):
    *inputs, target_T = tied()
    options = {"beta": 0.3, "top_k": top_k}
    expected_T = oracle(*inputs, target_T, temperature=1.0, **options)
    found_T = divergence_loss(
        *inputs[:3], target_T, teacher_weight_VH=inputs[3], shard=VocabShard(0, ROWS, TOTAL),
        **options,
    )  # fmt: skip
    torch.testing.assert_close(found_T, expected_T, atol=1e-12, rtol=0)


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_like_the_student_gives_nothing(beta, top_k):
    hidden_TH, _, weight_VH, _, target_T = draw()
    weight_VH = weight_VH[:TOTAL]
    found = evaluate(
        lambda h, w: divergence_loss(h, hidden_TH, w, target_T, beta=beta, top_k=top_k),
        hidden_TH,
        weight_VH,
    )
    assert found[0].min() >= 0
    assert max(largest(value) for value in found) < 2e-6


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("beta", BETAS)
def test_distributions_that_exclude_each_other_stay_finite(beta, top_k):
    # Log-probs down to -800: probabilities that float32 does not have.
    hidden_TH, teacher_TH, weight_VH, _, target_T = draw(spread=80.0)
    teacher_TH, weight_VH = -hidden_TH + teacher_TH / 80, weight_VH[:TOTAL]

    plain = Plain(total=TOTAL, beta=beta, top_k=top_k)

    def by_eager(hidden_TH, weight_VH):
        return plain.divergence(hidden_TH, teacher_TH.to(hidden_TH), weight_VH, target_T)

    def by_us(hidden_TH, weight_VH):
        return divergence_loss(hidden_TH, teacher_TH, weight_VH, target_T, beta=beta, top_k=top_k)

    truth = evaluate(by_eager, hidden_TH.double(), weight_VH.double())
    if 0 < beta < 1:
        limit = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        assert truth[0].max().item() == pytest.approx(limit, abs=1e-3)
    eager, mine = (evaluate(function, hidden_TH, weight_VH) for function in (by_eager, by_us))
    for value, theirs, true in zip(mine, eager, truth, strict=True):
        assert largest(value - true) <= 2 * largest(theirs - true) + 1e-5


@some_cases
def test_gradients_by_finite_differences(name, monkeypatch):
    monkeypatch.setattr(head_module, "TILE_ROWS", 2)
    monkeypatch.setattr(head_module, "TILE_COLUMNS", 5)
    # A teacher that stands still while the weight is moved.
    case = replace(NAMED[name], tokens=3, hidden=3, rows=12, total=11, frozen_teacher=True)
    hidden_TH, weight_VH, target_T = case.draw(torch.float64)
    teacher_TH, teacher_VH = case.teacher(hidden_TH, weight_VH)
    shard = VocabShard(0, 12, 11)

    def function(hidden_TH, weight_VH):
        return case.compute_on(hidden_TH, teacher_TH, weight_VH, target_T, teacher_VH, shard)[0]

    inputs = (hidden_TH.requires_grad_(), weight_VH.requires_grad_())
    assert torch.autograd.gradcheck(function, inputs)


def of_case(case, hidden_TH, weight_VH, target_T):
    """The case by the operation; the teacher follows from what was drawn."""
    return evaluate(lambda h, w: case.compute(h, w, target_T)[0], hidden_TH, weight_VH)


def same_bits(values, others):
    return all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


@some_cases
def test_ignored_rows_are_never_read(name):
    case = NAMED[name]
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    ignored_T = target_T < 0
    assert 0 < ignored_T.sum() < len(target_T)
    clean = of_case(case, hidden_TH, weight_VH, target_T)
    assert clean[0][ignored_T].eq(0).all() and clean[1][ignored_T].eq(0).all()
    for garbage in (torch.nan, torch.inf):
        dirty_TH = hidden_TH.masked_fill(ignored_T[:, None], garbage)
        for other in (case.total, -1, 2**40):
            other_T = target_T.masked_fill(ignored_T, other)
            assert same_bits(clean, of_case(case, dirty_TH, weight_VH, other_T))


@some_cases
def test_padding_rows_never_count_and_get_no_gradient(name):
    case = replace(NAMED[name], rows=NAMED[name].total + 3)
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    clean = of_case(case, hidden_TH, weight_VH, target_T)
    weight_VH[case.total :] = torch.nan
    assert same_bits(clean, of_case(case, hidden_TH, weight_VH, target_T))
    assert clean[2][case.total :].eq(0).all()


@pytest.mark.parametrize("held", [1, 3000, 10**9])
@pytest.mark.parametrize("sent", [1, 100])
@some_cases
def test_sizes_of_blocks_change_rounding_only(monkeypatch, name, held, sent):
    case = NAMED[name]
    inputs = case.draw(torch.float64)
    usual = of_case(case, *inputs)
    monkeypatch.setattr(views_module, "HELD_LOGITS", held)
    monkeypatch.setattr(views_module, "BLOCK_LOGITS", held // 6)
    monkeypatch.setattr(head_module, "TILE_ROWS", 3)
    monkeypatch.setattr(head_module, "TILE_COLUMNS", 29)
    monkeypatch.setattr(events_module, "SENT_NUMBERS", sent)
    for a, b in zip(usual, of_case(case, *inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-9)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("top_k", [None, 20])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_no_tensor_of_all_logits_is_made(monkeypatch, beta, top_k):
    monkeypatch.setattr(views_module, "HELD_LOGITS", 2**16)
    monkeypatch.setattr(views_module, "BLOCK_LOGITS", 2**13)
    monkeypatch.setattr(head_module, "TILE_ROWS", 128)
    hidden_TH, teacher_TH = torch.randn(2, 512, 4)
    weight_VH = torch.randn(1024, 4, requires_grad=True)
    target_T = torch.randint(1024, (512,))
    inputs = (hidden_TH.requires_grad_(), teacher_TH, weight_VH, target_T)
    with Largest() as largest:
        divergence_loss(*inputs, beta=beta, top_k=top_k).sum().backward()
    assert largest.elements <= 2 * 128 * head_module.TILE_COLUMNS


BAD = [
    ({"hidden_TH": torch.zeros(1, 2, 4)}, r"hidden \(1, 2, 4\).*expected \[T, H\] and \[V, H\]"),
    ({"teacher_hidden_TH": torch.zeros(3, 4)}, r"teacher_hidden is \(\(3, 4\).*hidden \(\(2, 4\)"),
    ({"teacher_hidden_TH": torch.zeros(2, 4).half()}, "float16.*float32"),
    ({"weight_VH": torch.zeros(5, 3)}, r"hidden \(2, 4\), weight \(5, 3\)"),
    ({"target_T": torch.zeros(3, dtype=torch.int64)}, r"target has shape \(3,\)"),
    ({"teacher_weight_VH": torch.zeros(6, 4)}, r"teacher_weight is \(\(6, 4\).*\(\(5, 4\)"),
    ({"shard": VocabShard(0, 5, 9)}, "holds 5 of 9 columns"),
    ({"temperature": 0.0}, "temperature=0.0"),
    ({"softcap": math.nan}, "softcap=nan"),
    ({"beta": 1.1}, "beta=1.1; expected 0"),
    ({"beta": math.nan}, "beta=nan"),
    ({"top_k": 0}, "top_k=0; expected at least 1"),
    ({"backend": "rows"}, r"'rows' is not available for divergence_loss.*\['auto', 'torch'\]"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_refused(change, message):
    arguments = {
        "hidden_TH": torch.zeros(2, 4),
        "teacher_hidden_TH": torch.zeros(2, 4),
        "weight_VH": torch.zeros(5, 4),
        "target_T": torch.zeros(2, dtype=torch.int64),
    } | change
    with pytest.raises(ValueError, match=message):
        divergence_loss(**arguments)
