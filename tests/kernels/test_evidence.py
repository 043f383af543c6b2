"""evidence_stats and evidence_loss at their edges; what holds everywhere is in test_laws."""

import math
from dataclasses import replace

import pytest
import torch
from credit_kernels import VocabShard, evidence_loss, evidence_stats, linear_logprob
from credit_kernels.evidence import views as views_module
from credit_kernels.evidence.cases import CASES, fields
from credit_kernels.logprob import head as head_module
from torch.utils._python_dispatch import TorchDispatchMode

NAMED = {case.name: case for case in CASES}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
REPRESENTATIVE = ("small", "negatives", "capped", "top_k", "reverse", "reverse_negatives")
some_cases = pytest.mark.parametrize("name", REPRESENTATIVE)
KINDS = {"fec": ("fec", 1, 2, 3), "pair": ("pair", 1, 2, 3), "fixed": ("fixed", 1, None, 3)}


def evaluate(case, hidden_CTH, weight_VH, target_T):
    """Outputs, and the gradients of a mixture of the losses in hidden and weight."""
    hidden_CTH = hidden_CTH.detach().clone().requires_grad_()
    weight_VH = weight_VH.detach().clone().requires_grad_()
    outputs = case.compute(hidden_CTH, weight_VH, target_T)
    ramp_T = torch.linspace(-1, 2, len(target_T), dtype=outputs[0].dtype)
    loss = (ramp_T * outputs[0]).sum() + (0.3 * ramp_T.flip(0) * outputs[1]).sum()
    return [*outputs, *torch.autograd.grad(loss, (hidden_CTH, weight_VH))]


def same_bits(values, others):
    return all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


def of_probabilities(*contexts):
    """Hidden states of one token whose softmaxes, with the identity for weight, are these."""
    return torch.tensor(contexts, dtype=torch.float64).log()[:, None], torch.eye(len(contexts[0]))


def test_literal_statistics():
    hidden_CTH, weight_VH = of_probabilities((0.5, 0.25, 0.25), (0.25, 0.5, 0.25))
    stats = evidence_stats(hidden_CTH, weight_VH.double(), torch.tensor([0]))
    assert stats.logprob_CT.exp()[:, 0].tolist() == pytest.approx([0.5, 0.25])
    assert stats.entropy_CT[:, 0].tolist() == pytest.approx([1.5 * math.log(2)] * 2)
    assert stats.kl_teacher_student_CT[:, 0].tolist() == pytest.approx([0, 0.25 * math.log(2)])
    assert stats.alpha_T is stats.target_T is stats.mean_T is stats.cost_T is None


def test_literal_contrasts():
    # task = (.5, -.25, -.25) and E_p[task] = .125; nuisance = (.1, -.125, .025).
    hidden_CTH, weight_VH = of_probabilities(
        (0.5, 0.25, 0.25), (0.75, 0.125, 0.125), (0.25, 0.375, 0.375), (0.4, 0.375, 0.225)
    )
    inputs = hidden_CTH, weight_VH.double(), torch.tensor([0])
    pair = evidence_stats(*inputs, contrast=KINDS["pair"])
    assert [v.item() for v in fields(pair)[4:]] == pytest.approx([0, 0.5, 0.125, 0.140625])
    fixed = evidence_stats(*inputs, contrast=KINDS["fixed"])
    assert [v.item() for v in fields(fixed)[4:]] == pytest.approx([0, 0.35, 0.0875, 0.07171875])
    fec = evidence_stats(*inputs, contrast=KINDS["fec"])
    alpha = 0.028125 / (0.0084375 + 1e-8)
    assert fec.alpha_T.item() == pytest.approx(alpha, rel=1e-12)
    assert fec.target_T.item() == pytest.approx(0.5 - 0.1 * alpha, rel=1e-12)


def test_literal_losses():
    # p = (1/2, 1/2), q+ = (3/4, 1/4), q0 = (1/4, 3/4): d = (1/2, -1/2).
    hidden_CTH, weight_VH = of_probabilities((0.5, 0.5), (0.75, 0.25), (0.25, 0.75))
    hidden_CTH[0] = torch.tensor([math.log(0.8), math.log(0.2)])
    hidden_CTH.requires_grad_()
    inputs = hidden_CTH, weight_VH.double(), torch.tensor([1]), torch.tensor([0.6])
    reference_T, evidence_T = evidence_loss(*inputs, contrast=("fixed", 1, None, 2))
    expected = 0.25 * math.log(0.25 / 0.8) + 0.75 * math.log(0.75 / 0.2)
    assert reference_T.item() == pytest.approx(expected, rel=1e-6)
    assert evidence_T.item() == pytest.approx(-0.6 * 0.5 * math.log(4), rel=1e-6)
    (grad_CTH,) = torch.autograd.grad(reference_T, hidden_CTH, retain_graph=True)
    assert grad_CTH[0, 0].tolist() == pytest.approx([0.8 - 0.25, 0.2 - 0.75])
    (grad_CTH,) = torch.autograd.grad(evidence_T, hidden_CTH)
    assert grad_CTH[0, 0].tolist() == pytest.approx([-0.3, 0.3], rel=1e-6)
    assert grad_CTH[1:].eq(0).all()


def test_literal_reverse_losses():
    # r = log q+ / q0 = (log 3, -log 3); w = 1: log sum q0 e^r = log sum q+ = 0.
    hidden_CTH, weight_VH = of_probabilities((0.8, 0.2), (0.75, 0.25), (0.25, 0.75))
    reference_T, evidence_T = evidence_loss(
        hidden_CTH,
        weight_VH.double(),
        torch.tensor([1]),
        torch.tensor([1.0]),
        contrast=("fixed", 1, None, 2),
        divergence="reverse",
    )
    assert evidence_T.item() == pytest.approx(-0.6 * math.log(3))
    expected = 0.8 * math.log(0.8 / 0.25) + 0.2 * math.log(0.2 / 0.75)
    assert reference_T.item() == pytest.approx(expected)


def full_contrast(kind, divergence="forward"):
    """One token seen once for every column as its target: stats, log-probs [C, V] and d [V]."""
    generator = torch.Generator().manual_seed(5)
    hidden_CH = torch.randn(4, 6, generator=generator).double()
    weight_VH = torch.randn(40, 6, generator=generator).double()
    hidden_CTH = hidden_CH[:, None].expand(-1, 40, -1)
    stats = evidence_stats(
        hidden_CTH, weight_VH, torch.arange(40), contrast=KINDS[kind], divergence=divergence
    )
    return stats, stats.logprob_CT, stats.target_T


def covariance(p_V, a_V, b_V):
    return ((p_V * a_V * b_V).sum() - (p_V * a_V).sum() * (p_V * b_V).sum()).item()


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_laws_of_the_contrast(divergence):
    stats, log_CV, d_V = full_contrast("fec", divergence)
    task_V = full_contrast("pair", divergence)[2]
    p_V, positive_V, negative_V, free_V = log_CV.exp()
    nuisance_V = (positive_V + negative_V) / 2 - free_V
    if divergence == "reverse":
        ratio_V = (log_CV[1] + log_CV[2]) / 2 - log_CV[3]
        nuisance_V = p_V * (ratio_V - (p_V * ratio_V).sum())
    alpha = stats.alpha_T[0].item()
    assert abs(alpha) > 0.05
    assert d_V.sum().abs() < 1e-12
    assert task_V - alpha * nuisance_V == pytest.approx(d_V, abs=1e-12)
    assert covariance(p_V, d_V, nuisance_V) == pytest.approx(alpha * 1e-8, abs=1e-12)
    assert stats.cost_T[0].item() == pytest.approx(covariance(p_V, d_V, d_V), abs=1e-12)
    assert stats.cost_T[0].item() <= covariance(p_V, task_V, task_V) + 1e-12
    assert stats.mean_T[0].item() == pytest.approx((p_V * d_V).sum().item(), abs=1e-12)


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_equal_evidence_gives_no_contrast(divergence):
    hidden_CTH, weight_VH, target_T = NAMED["small"].draw(torch.float32)
    hidden_CTH[2] = hidden_CTH[1]
    stats = evidence_stats(
        hidden_CTH, weight_VH, target_T, contrast=KINDS["fec"], divergence=divergence
    )
    assert all(value.eq(0).all() for value in fields(stats)[4:])


def test_a_mean_of_equal_negatives_is_one_of_them():
    hidden_CTH, weight_VH, target_T = NAMED["small"].draw(torch.float64)
    for divergence in ("forward", "reverse"):
        one, mean = (
            evidence_stats(
                hidden_CTH, weight_VH, target_T, contrast=contrast, divergence=divergence
            )
            for contrast in (("fec", 1, 2, 3), ("fec", 1, (2, 2, 2), 3))
        )
        for a, b in zip(fields(one), fields(mean), strict=True):
            torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-11)


def test_the_evidence_gradient_in_the_logits_is_d():
    generator = torch.Generator().manual_seed(2)
    hidden_CTH = torch.randn(4, 3, 9, generator=generator).double().requires_grad_()
    weight_VH, target_T = torch.eye(9).double(), torch.tensor([4, 0, 8])
    controller_T = torch.tensor([0.9, 0.1, 0.5], requires_grad=True)
    options = {"contrast": KINDS["fec"], "temperature": 0.5}
    _, evidence_T = evidence_loss(hidden_CTH, weight_VH, target_T, controller_T, **options)
    evidence_T.sum().backward()
    d_T = evidence_stats(hidden_CTH, weight_VH, target_T, **options).target_T
    grad_T = hidden_CTH.grad[0].gather(-1, target_T[:, None])[:, 0]
    expected_T = -controller_T.detach().double() * d_T / 0.5
    torch.testing.assert_close(grad_T, expected_T, atol=1e-12, rtol=0)
    assert hidden_CTH.grad[1:].eq(0).all()
    assert controller_T.grad is None


@some_cases
def test_gradients_by_finite_differences(name, monkeypatch):
    monkeypatch.setattr(head_module, "TILE_ROWS", 2)
    monkeypatch.setattr(head_module, "TILE_COLUMNS", 5)
    # alpha is a constant of the loss, and the teachers are: differences see a contrast without the
    # one, beside teachers that stand still. The rest is compared with autograd in test_laws.
    contrast = ("pair", *NAMED[name].contrast[1:])
    case = replace(
        NAMED[name], tokens=3, hidden=3, rows=12, total=11, contrast=contrast, frozen_teacher=True
    )
    hidden_CTH, weight_VH, target_T = case.draw(torch.float64)
    teachers_CTH = hidden_CTH[1:]

    def function(student_TH, weight_VH):
        return case.compute(torch.cat([student_TH[None], teachers_CTH]), weight_VH, target_T)[:2]

    inputs = (hidden_CTH[0].clone().requires_grad_(), weight_VH.requires_grad_())
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_case
def test_scores_have_the_bits_of_linear_logprob(case, dtype):
    # float32 products on CPUs, in which every row has the same bits whatever the other rows.
    hidden_CTH, weight_VH, target_T = case.draw(dtype)
    options = {
        "temperature": case.temperature,
        "softcap": case.softcap,
        "shard": VocabShard(0, case.rows, case.total),
    }
    stats = evidence_stats(hidden_CTH, weight_VH, target_T, **options)
    for context, hidden_TH in enumerate(hidden_CTH):
        expected = linear_logprob(hidden_TH, weight_VH, target_T, return_entropy=True, **options)
        assert same_bits((stats.logprob_CT[context], stats.entropy_CT[context]), expected)


@every_case
def test_small_differences_keep_their_digits(case):
    inputs = case.draw(torch.float32)
    truth, eager = (case.plain(v.to(d), w.to(d), t) for d in (torch.float64, torch.float32)
                    for v, w, t in [inputs])  # fmt: skip
    mine = case.compute(*inputs)
    for index in (6, 9):  # alpha and cost
        scale_T = truth[index].abs() + 1e-6
        errors = [((value[index] - truth[index]).abs() / scale_T) for value in (mine, eager)]
        worst = [error.max().item() if error.numel() else 0.0 for error in errors]
        assert worst[0] <= 3 * worst[1] + 1e-5


@some_cases
def test_ignored_rows_are_never_read(name):
    case = NAMED[name]
    hidden_CTH, weight_VH, target_T = case.draw(torch.float32)
    ignored_T = target_T < 0
    assert 0 < ignored_T.sum() < len(target_T)
    clean = evaluate(case, hidden_CTH, weight_VH, target_T)
    assert all(value[..., ignored_T].eq(0).all() for value in clean[:-2])
    assert clean[-2][:, ignored_T].eq(0).all()
    for garbage in (torch.nan, torch.inf, 3e38):
        dirty_CTH = hidden_CTH.masked_fill(ignored_T[:, None], garbage)
        for other in (case.total, -1, 2**40):
            other_T = target_T.masked_fill(ignored_T, other)
            assert same_bits(clean, evaluate(case, dirty_CTH, weight_VH, other_T))


def test_garbage_in_controller_and_incoming_gradient_of_ignored_rows_is_dropped():
    hidden_CTH, weight_VH, target_T = NAMED["small"].draw(torch.float32)
    inputs = hidden_CTH.requires_grad_(), weight_VH.requires_grad_()
    garbage_T = torch.ones(len(target_T)).masked_fill(target_T < 0, torch.nan)
    losses = evidence_loss(*inputs, target_T, garbage_T, contrast=KINDS["fec"])
    assert all(loss.isfinite().all() for loss in losses)
    for grad in torch.autograd.grad(losses, inputs, (garbage_T, garbage_T)):
        assert grad.isfinite().all()


@some_cases
def test_padding_rows_never_count_and_get_no_gradient(name):
    case = replace(NAMED[name], rows=NAMED[name].total + 3)
    hidden_CTH, weight_VH, target_T = case.draw(torch.float32)
    clean = evaluate(case, hidden_CTH, weight_VH, target_T)
    for garbage in (torch.inf, torch.nan):
        weight_VH[case.total :] = garbage
        assert same_bits(clean, evaluate(case, hidden_CTH, weight_VH, target_T))
    assert clean[-1][case.total :].eq(0).all()


@pytest.mark.parametrize(("held", "block"), [(1, 1), (3000, 500), (10**9, 500), (10**9, 10**9)])
@some_cases
def test_sizes_of_blocks_change_rounding_only(monkeypatch, name, held, block):
    case = NAMED[name]
    inputs = case.draw(torch.float64)
    usual = evaluate(case, *inputs)
    monkeypatch.setattr(views_module, "HELD_LOGITS", held)
    monkeypatch.setattr(views_module, "BLOCK_LOGITS", block)
    monkeypatch.setattr(head_module, "TILE_COLUMNS", 29)
    for a, b in zip(usual, evaluate(case, *inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-9)


def test_the_teachers_weight_is_the_students_unless_given():
    case = NAMED["small"]
    hidden_CTH, weight_VH, target_T = case.draw(torch.float32)
    inputs = hidden_CTH.requires_grad_(), weight_VH.requires_grad_(), target_T
    controller_T = torch.full(target_T.shape, 0.5)
    teacher_VH = weight_VH.detach().clone().requires_grad_()
    shared, own = (
        evidence_loss(*inputs, controller_T, contrast=case.contrast, teacher_weight_VH=teacher)
        for teacher in (None, teacher_VH)
    )
    assert same_bits(shared, own)
    one_T = torch.ones(len(target_T))
    expected = torch.autograd.grad(shared, inputs[:2], (one_T, one_T))
    torch.autograd.backward(own, (one_T, one_T))
    assert same_bits(expected, [value.grad for value in inputs[:2]])
    assert teacher_VH.grad is None


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


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_no_tensor_of_all_logits_is_made(monkeypatch, divergence):
    monkeypatch.setattr(views_module, "HELD_LOGITS", 2**16)
    monkeypatch.setattr(views_module, "BLOCK_LOGITS", 2**13)
    monkeypatch.setattr(head_module, "TILE_ROWS", 128)
    hidden_CTH = torch.randn(4, 512, 4, requires_grad=True)
    weight_VH = torch.randn(1024, 4, requires_grad=True)
    options = {"contrast": KINDS["fec"], "divergence": divergence}
    target_T = torch.randint(1024, (512,))
    with Largest() as largest:
        losses = evidence_loss(hidden_CTH, weight_VH, target_T, torch.rand(512), **options)
        (losses[0] + losses[1]).sum().backward()
        evidence_stats(hidden_CTH, weight_VH, target_T, **options)
    assert largest.elements <= 4 * 128 * head_module.TILE_COLUMNS


BAD = [
    ({"hidden_CTH": torch.zeros(2, 4)}, r"hidden \(2, 4\).*expected \[C, T, H\] and \[V, H\]"),
    ({"hidden_CTH": torch.zeros(0, 2, 4)}, r"hidden \(0, 2, 4\) has no context"),
    ({"weight_VH": torch.zeros(5, 3)}, r"hidden \(3, 2, 4\), weight \(5, 3\)"),
    ({"weight_VH": torch.zeros(5, 4).double()}, "one floating type"),
    ({"target_T": torch.zeros(3, dtype=torch.int64)}, r"target has shape \(3,\).*\(2,\)"),
    ({"target_T": torch.zeros(2)}, "type torch.float32; expected .* torch.int64"),
    ({"teacher_weight_VH": torch.zeros(6, 4)}, r"\(6, 4\).*\(5, 4\)"),
    ({"teacher_weight_VH": torch.zeros(5, 4).half()}, r"torch.float16.*torch.float32"),
    ({"shard": VocabShard(0, 6, 6)}, "weight has 5 rows.*has 6"),
    ({"shard": VocabShard(0, 5, 9)}, "holds 5 of 9 columns"),
    ({"temperature": 0.0}, "temperature=0.0"),
    ({"softcap": math.nan}, "softcap=nan"),
    ({"contrast": ("fisher", 1, 2, 0)}, r"'fisher'.*\['fec', 'pair', 'fixed'\]"),
    ({"contrast": ("fec", 1, 2)}, r"\('fec', 1, 2\); expected \(kind, positive, negative, free\)"),
    ({"contrast": ("fec", 1, 3, 0)}, r"names context 3; hidden has the contexts 0..2"),
    ({"contrast": ("fec", -1, 2, 0)}, r"names context -1"),
    ({"contrast": ("fec", 1, (), 0)}, "at least one negative"),
    ({"contrast": ("fec", 1, None, 0)}, "fec takes a negative context"),
    ({"contrast": ("fixed", 1, 2, 0)}, "fixed takes None"),
    ({"divergence": "both"}, r"divergence='both'; expected one of \['forward', 'reverse'\]"),
    ({"top_k": 0}, "top_k=0.*at least 1"),
    ({"backend": "tails"}, r"'tails' is not available for .*\['auto', 'torch', 'rows', 'tiles'\]"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_refused(change, message):
    arguments = {
        "hidden_CTH": torch.zeros(3, 2, 4),
        "weight_VH": torch.zeros(5, 4),
        "target_T": torch.zeros(2, dtype=torch.int64),
        "contrast": ("fec", 1, 2, 0),
    } | change
    with pytest.raises(ValueError, match=message):
        evidence_stats(**arguments)
    with pytest.raises(ValueError, match=message):
        evidence_loss(**arguments, controller_T=torch.zeros(2))


@pytest.mark.parametrize(
    ("controller_T", "contrast", "message"),
    [
        (torch.zeros(3), ("fec", 1, 2, 0), r"controller has shape \(3,\).*expected \(2,\)"),
        (torch.zeros(2, dtype=torch.int64), ("fec", 1, 2, 0), "torch.int64; .*floating"),
        (torch.zeros(2, device="meta"), ("fec", 1, 2, 0), "controller is on meta, target on cpu"),
        (torch.zeros(2), None, "contrast=None; expected"),
    ],
)
def test_bad_controllers_are_refused(controller_T, contrast, message):
    inputs = torch.zeros(3, 2, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        evidence_loss(*inputs, controller_T, contrast=contrast)


def test_top_k_without_a_contrast_is_refused():
    inputs = torch.zeros(3, 2, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="top_k=3 with contrast=None"):
        evidence_stats(*inputs, top_k=3)
