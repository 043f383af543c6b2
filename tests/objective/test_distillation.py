"""The distillation loss: literal numbers, laws, gradients, and a slow oracle."""

import math

import pytest
import torch
from objective.distillation_reference import distillation_loss, generalised_jsd, with_tail

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
every_beta = pytest.mark.parametrize("beta", BETAS)


def logprobs(num_tokens, size, seed, scale=2.0):
    rng = torch.Generator().manual_seed(seed)
    logit_TV = scale * torch.randn(num_tokens, size, generator=rng, dtype=torch.float64)
    return logit_TV.log_softmax(dim=-1)


def oracle(student, teacher, beta):
    """Of two lists of probabilities."""

    def kl(p, q):
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)

    if beta in (0, 1):
        return kl(student, teacher) if beta else kl(teacher, student)
    mixture = [beta * t + (1 - beta) * s for s, t in zip(student, teacher, strict=True)]
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        # Student .5, .5; teacher .25, .75.
        (0.0, 0.25 * math.log(0.5) + 0.75 * math.log(1.5)),
        (1.0, 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),
        # Mixture .375, .625.
        (
            0.5,
            0.5 * (0.25 * math.log(2 / 3) + 0.75 * math.log(1.2))
            + 0.5 * (0.5 * math.log(4 / 3) + 0.5 * math.log(0.8)),
        ),
        # Mixture .75 x .5 + .25 x .25 = .4375, .5625.
        (
            0.25,
            0.25 * (0.25 * math.log(4 / 7) + 0.75 * math.log(4 / 3))
            + 0.75 * (0.5 * math.log(8 / 7) + 0.5 * math.log(8 / 9)),
        ),
    ],
)
def test_two_events(beta, expected):
    student_TX = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    teacher_TX = torch.tensor([[0.25, 0.75]], dtype=torch.float64).log()
    divergence = generalised_jsd(student_TX, teacher_TX, beta=beta)
    assert divergence.tolist() == pytest.approx([expected], abs=1e-15)


@every_beta
@pytest.mark.parametrize("scale", [0.5, 5.0])
def test_against_the_oracle(beta, scale):
    student_TV, teacher_TV = logprobs(20, 7, 0, scale), logprobs(20, 7, 1, scale)
    divergence_T = generalised_jsd(student_TV, teacher_TV, beta=beta)
    rows = zip(student_TV.exp().tolist(), teacher_TV.exp().tolist(), strict=True)
    expected = [oracle(student, teacher, beta) for student, teacher in rows]
    assert divergence_T.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert divergence_T.min() > 0
    if 0 < beta < 1:
        entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        assert divergence_T.max() < entropy
    swapped_T = generalised_jsd(teacher_TV, student_TV, beta=1 - beta)
    torch.testing.assert_close(swapped_T, divergence_T, rtol=1e-12, atol=1e-14)


@every_beta
@pytest.mark.parametrize("top_k", [None, 3])
def test_a_teacher_that_agrees_costs_nothing_and_moves_nothing(beta, top_k):
    logit_TV = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    student_TV = logit_TV.log_softmax(dim=-1)
    mask_T = torch.ones(5, dtype=torch.bool)
    result = distillation_loss(student_TV, student_TV, mask_T, beta=beta, top_k=top_k)
    assert result.loss.item() == pytest.approx(0, abs=1e-14)
    (grad_TV,) = torch.autograd.grad(result.loss, logit_TV)
    assert grad_TV.abs().max() < 1e-14


@every_beta
@pytest.mark.parametrize("top_k", [None, 3])
def test_gradients_are_those_of_finite_differences(beta, top_k):
    logit_TV = logprobs(3, 6, 0).requires_grad_()
    teacher_TV, mask_T = logprobs(3, 6, 1), torch.tensor([True, False, True])

    def loss(logit_TV):
        student_TV = logit_TV.log_softmax(dim=-1)
        return distillation_loss(student_TV, teacher_TV, mask_T, beta=beta, top_k=top_k).loss

    assert torch.autograd.gradcheck(loss, logit_TV, eps=1e-6, atol=1e-8)


def test_top_k_tells_the_students_likeliest_apart_and_pools_the_others():
    student_TV = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64).log()
    teacher_TV = torch.tensor([[0.5, 0.1, 0.15, 0.25]], dtype=torch.float64).log()
    mask_T = torch.ones(1, dtype=torch.bool)
    # The student's likeliest are the second and the last; the tails are .3 and .65.
    expected = oracle([0.4, 0.3, 0.3], [0.1, 0.25, 0.65], 0.5)
    result = distillation_loss(student_TV, teacher_TV, mask_T, top_k=2)
    assert float(result.loss) == pytest.approx(expected, abs=1e-14)
    whole = distillation_loss(student_TV, teacher_TV, mask_T).loss
    assert expected < float(whole)
    for top_k in (4, 9):
        assert distillation_loss(student_TV, teacher_TV, mask_T, top_k=top_k).loss == whole


def test_a_tail_of_nothing_stays_finite():
    # In float32 the first token has all of the probability.
    student_TV = torch.tensor([[0.0, -40.0, -50.0]], requires_grad=True)
    assert with_tail(student_TV[:, :1]).isfinite().all()
    teacher_TV = torch.tensor([[-40.0, 0.0, -50.0]])
    mask_T = torch.ones(1, dtype=torch.bool)
    for beta in BETAS:
        result = distillation_loss(student_TV, teacher_TV, mask_T, beta=beta, top_k=1)
        assert result.loss.isfinite()
        assert torch.autograd.grad(result.loss, student_TV)[0].isfinite().all()
    largest = distillation_loss(student_TV, teacher_TV, mask_T, top_k=1).loss.item()
    assert largest == pytest.approx(math.log(2), abs=1e-5)


@every_beta
def test_impossible_tokens_count_as_probability_zero(beta):
    student_TV, teacher_TV = logprobs(1, 4, 0), logprobs(1, 4, 1)
    impossible_T1 = torch.full((1, 1), -math.inf, dtype=torch.float64)
    wide_student_TV = torch.cat([student_TV, impossible_T1], 1).requires_grad_()
    wide_teacher_TV = torch.cat([teacher_TV, impossible_T1], 1)
    divergence_T = generalised_jsd(wide_student_TV, wide_teacher_TV, beta=beta)
    expected_T = generalised_jsd(student_TV, teacher_TV, beta=beta)
    torch.testing.assert_close(divergence_T, expected_T, rtol=1e-14, atol=0)
    assert torch.autograd.grad(divergence_T.sum(), wide_student_TV)[0].isfinite().all()


def test_disjoint_distributions_have_the_largest_divergence():
    student_TV = torch.tensor([[0.0, -math.inf]])
    divergence_T = generalised_jsd(student_TV, student_TV.flip(-1), beta=0.5)
    assert divergence_T.tolist() == pytest.approx([math.log(2)], abs=1e-7)


def test_what_stands_outside_the_mask_is_not_read():
    mask_T = torch.tensor([True, False, True, False])
    student_TV = logprobs(4, 6, 0)
    student_TV[~mask_T] = math.nan
    student_TV.requires_grad_()
    teacher_TV = logprobs(4, 6, 1).where(mask_T[:, None], math.nan).requires_grad_()
    result = distillation_loss(student_TV, teacher_TV, mask_T)
    assert result.loss.isfinite() and int(result.tokens) == 2
    student_grad_TV, teacher_grad_TV = torch.autograd.grad(
        result.loss, [student_TV, teacher_TV], allow_unused=True
    )
    assert teacher_grad_TV is None
    assert student_grad_TV[~mask_T].eq(0).all() and student_grad_TV[mask_T].ne(0).any()


def test_sums_of_parts_are_the_sums_of_the_whole():
    student_TV, teacher_TV = logprobs(9, 5, 0), logprobs(9, 5, 1)
    mask_T = torch.arange(9) % 3 != 0
    whole = distillation_loss(student_TV, teacher_TV, mask_T, top_k=2)
    parts = [
        distillation_loss(student_TV[part], teacher_TV[part], mask_T[part], top_k=2)
        for part in (slice(0, 1), slice(1, 5), slice(5, 9))
    ]
    assert [int(part.tokens) for part in parts] == [0, 3, 3] and int(whole.tokens) == 6
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(whole.loss), rel=1e-14)
    assert float(parts[0].loss) == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_low_precision_is_computed_in_float32(dtype, tolerance):
    student_TV, teacher_TV = logprobs(30, 50, 0), logprobs(30, 50, 1)
    expected_T = generalised_jsd(student_TV, teacher_TV, beta=0.5)
    divergence_T = generalised_jsd(student_TV.to(dtype), teacher_TV.to(dtype), beta=0.5)
    assert divergence_T.dtype == torch.float32
    torch.testing.assert_close(divergence_T.double(), expected_T, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 1.1}, r"beta=1.1; expected 0 \(forward KL\) to 1"),
        ({"beta": -0.1}, "beta=-0.1"),
        ({"beta": math.nan}, "beta=nan"),
        ({"top_k": 0}, "top_k=0; expected at least 1, or None"),
    ],
)
def test_bad_options(options, message):
    logprob_TV = logprobs(2, 3, 0)
    with pytest.raises(ValueError, match=message):
        distillation_loss(logprob_TV, logprob_TV, torch.ones(2, dtype=torch.bool), **options)
