"""What holds for every operation of the catalogue, on every one of its cases.

By the backends that KERNEL_BACKENDS names; test_triton starts this file again for those of Triton.
"""

import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from credit_kernels.catalogue import OPERATIONS

BACKENDS = os.environ.get("KERNEL_BACKENDS", "torch").split()
PROBLEMS = [
    pytest.param(
        SimpleNamespace(
            draw=case.draw,
            plain=case.plain,
            compute=partial(case.compute, backend=backend),
            has_float64=backend == "torch",
            # Of hidden alone; test_frozen_evidence compares it with the truth.
            made_ahead=operation.name == "evidence_stats and evidence_loss",
            offset=case.offset,
        ),
        id=f"{operation.name}-{backend}-{case.name}",
    )
    for operation in OPERATIONS
    for backend in BACKENDS
    if backend in operation.backends
    for case in operation.cases
]
every_problem = pytest.mark.parametrize("case", PROBLEMS)


def mixture(outputs):
    """A fixed random mixture of all outputs."""
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(out.shape, generator=generator).double() for out in outputs]
    return sum((out.double() * w).sum() for out, w in zip(outputs, weights, strict=True))


def evaluate(function, inputs, dtype):
    """Outputs, and the gradients of a mixture of them in each floating input."""
    inputs = [
        value.detach().to(dtype).clone().requires_grad_() if value.is_floating_point() else value
        for value in inputs
    ]
    outputs = function(*inputs)
    wanted = [value for value in inputs if value.requires_grad]
    return [*outputs, *torch.autograd.grad(mixture(outputs), wanted)]


def errors(values, truth):
    return [
        (value.double() - true).abs().max().item() if true.numel() else 0.0
        for value, true in zip(values, truth, strict=True)
    ]


def same_bits(values, others):
    return all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


@every_problem
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_is_at_most_twice_that_of_eager_torch(case, dtype, seed):
    inputs = case.draw(dtype, seed)
    truth = evaluate(case.plain, inputs, torch.float64)
    eager = errors(evaluate(case.plain, inputs, dtype), truth)
    fused = errors(evaluate(case.compute, inputs, dtype), truth)
    for mine, theirs in zip(fused, eager, strict=True):
        assert mine <= 2 * theirs + 1e-5


@every_problem
def test_float64_agrees_to_rounding_or_is_refused(case):
    inputs = case.draw(torch.float64)
    if not case.has_float64:
        with pytest.raises(ValueError, match="use backend='torch' for float64"):
            case.compute(*inputs)
        return
    truth = evaluate(case.plain, inputs, torch.float64)
    assert max(errors(evaluate(case.compute, inputs, torch.float64), truth)) < 1e-9


@every_problem
def test_outputs_are_float32_at_least_and_gradients_of_the_inputs_type(case):
    for dtype in (torch.bfloat16, torch.float64)[: 1 + case.has_float64]:
        expected = torch.promote_types(dtype, torch.float32)
        inputs = case.draw(dtype)
        values = evaluate(case.compute, inputs, dtype)
        outputs, gradients = values[:-2], values[-2:]
        assert {value.dtype for value in outputs} == {expected}
        assert {value.dtype for value in gradients} == {dtype}


@every_problem
def test_scoring_and_training_agree_bitwise(case):
    inputs = case.draw(torch.float32)
    with torch.no_grad():
        scored = case.compute(*inputs)
    trainable = [value.requires_grad_(value.is_floating_point()) for value in inputs]
    assert same_bits(scored, case.compute(*trainable))


@every_problem
def test_same_inputs_give_the_same_bits(case):
    inputs = case.draw(torch.float32)
    first, second = (evaluate(case.compute, inputs, torch.float32) for _ in range(2))
    assert same_bits(first, second)


@every_problem
def test_a_second_backward_pass_gives_the_same_bits(case):
    inputs = case.draw(torch.float32)
    wanted = [value.requires_grad_() for value in inputs if value.is_floating_point()]
    loss = mixture(case.compute(*inputs))
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    assert same_bits(first, torch.autograd.grad(loss, wanted))


@every_problem
@pytest.mark.parametrize("trained", [0, 1])
def test_each_gradient_alone_is_the_same(case, trained):
    inputs = case.draw(torch.float32)
    both = evaluate(case.compute, inputs, torch.float32)[-2:]
    alone = inputs[trained].requires_grad_()
    mixture(case.compute(*inputs)).backward()
    if case.made_ahead and trained == 0:
        atol = 1e-5 + 1e-6 * abs(case.offset)
        torch.testing.assert_close(alone.grad, both[trained], atol=atol, rtol=1e-5)
    else:
        assert torch.equal(alone.grad, both[trained])
    assert inputs[1 - trained].grad is None


@every_problem
def test_inputs_are_not_written_to(case):
    inputs = case.draw(torch.float32)
    copies = [value.clone() for value in inputs]
    trainable = [value.requires_grad_(value.is_floating_point()) for value in inputs]
    mixture(case.compute(*trainable)).backward()
    assert same_bits(inputs, copies)
