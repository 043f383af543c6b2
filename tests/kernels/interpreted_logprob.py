"""Edges of the Triton backends of linear_logprob; test_triton runs this file in the interpreter."""

from dataclasses import replace

import pytest
import torch
from credit_kernels import linear_logprob
from credit_kernels.logprob import kernels, rows, tiles
from credit_kernels.logprob.cases import CASES
from credit_kernels.logprob.operands import Operands
from credit_kernels.logprob.tables import ROW_SIZES, STATS_SIZES
from credit_kernels.targets import INTERPRETER

NAMED = {case.name: case for case in CASES}
MODULES = {"rows": rows, "tiles": tiles}
every_backend = pytest.mark.parametrize("backend", MODULES)
FAR = 2**30 + 64


def evaluate(case, backend, hidden_TH, weight_VH, target_T):
    """logprob_T, entropy_T, and the gradients of a mixture of them in hidden and weight."""
    hidden_TH = hidden_TH.detach().clone().requires_grad_()
    weight_VH = weight_VH.detach().clone().requires_grad_()
    outputs = case.compute(hidden_TH, weight_VH, target_T, backend=backend)
    ramp_T = torch.linspace(-1, 2, len(target_T))
    loss = (ramp_T * outputs[0]).sum() + (0.3 * ramp_T.flip(0) * outputs[1]).sum()
    return [*outputs, *torch.autograd.grad(loss, (hidden_TH, weight_VH))]


def same_bits(values, others):
    return all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


@every_backend
@pytest.mark.parametrize("name", ["small", "capped"])
def test_entropy_does_not_change_the_logprob(backend, name):
    case = replace(NAMED[name], rows=NAMED[name].total)
    inputs = case.draw(torch.float32)
    options = {"temperature": case.temperature, "softcap": case.softcap, "backend": backend}
    alone_T = linear_logprob(*inputs, **options)
    assert torch.equal(alone_T, case.compute(*inputs, backend=backend)[0])


@every_backend
def test_ignored_rows_are_never_read(backend):
    case = NAMED["small"]
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    ignored_T = target_T < 0
    clean = evaluate(case, backend, hidden_TH, weight_VH, target_T)
    assert all(value[ignored_T].eq(0).all() for value in clean[:3])
    dirty_TH = hidden_TH.masked_fill(ignored_T[:, None], torch.nan)
    for other in (case.total, 2**40):
        other_T = target_T.masked_fill(ignored_T, other)
        assert same_bits(clean, evaluate(case, backend, dirty_TH, weight_VH, other_T))


@every_backend
def test_padding_rows_never_count_and_get_no_gradient(backend):
    case = NAMED["padded"]
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    clean = evaluate(case, backend, hidden_TH, weight_VH, target_T)
    weight_VH[case.total :] = torch.nan
    assert same_bits(clean, evaluate(case, backend, hidden_TH, weight_VH, target_T))
    assert clean[3][case.total :].eq(0).all()


@every_backend
def test_strided_inputs_equal_contiguous_ones(backend):
    case = NAMED["padded"]
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    values = case.compute(hidden_TH, weight_VH, target_T, backend=backend)
    wide_TH = torch.cat([hidden_TH, torch.full_like(hidden_TH, torch.nan)], 1)
    strided = (wide_TH[:, : case.hidden], weight_VH.T.contiguous().T)
    again = case.compute(*strided, target_T, backend=backend)
    torch.testing.assert_close(again, values, atol=2e-6, rtol=1e-6)


@every_backend
def test_less_memory_changes_rounding_only(monkeypatch, backend):
    case = replace(NAMED["many_tiles"], tokens=300)
    inputs = case.draw(torch.float32)
    usual = evaluate(case, backend, *inputs)
    calls = []
    program = {"rows": "row_gradient", "tiles": "tile_gradient"}[backend]
    original = getattr(kernels, program)

    class Counted:
        def __getitem__(self, grid):
            calls.append(grid)
            return original[grid]

    monkeypatch.setattr(kernels, program, Counted())
    monkeypatch.setattr(MODULES[backend], "chunk_bytes", lambda device: 1)
    for a, b in zip(usual, evaluate(case, backend, *inputs), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)
    assert len(calls) > 1


def test_splits_of_the_columns_merge(monkeypatch):
    case = NAMED["far_above_zero"]
    inputs = case.draw(torch.float32)
    whole = case.compute(*inputs, backend="tiles")
    monkeypatch.setattr(tiles, "SPLIT_COLUMNS", 128)
    sizes = {INTERPRETER: replace(STATS_SIZES[INTERPRETER], columns=64)}
    monkeypatch.setattr(tiles, "STATS_SIZES", sizes)
    torch.testing.assert_close(case.compute(*inputs, backend="tiles"), whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["small", "wide", "far_below_zero"])
def test_pointers_and_descriptors_load_the_same(monkeypatch, name):
    case = NAMED[name]
    inputs = case.draw(torch.bfloat16)
    described = evaluate(case, "tiles", *inputs)
    used = []
    monkeypatch.setattr(tiles, "_can_be_described", lambda matrix: used.append(matrix))
    assert same_bits(described, evaluate(case, "tiles", *inputs))
    assert used


def test_neighbours_do_not_change_the_bits_of_a_token_in_tiles():
    case = replace(NAMED["many_tiles"], tokens=400)
    hidden_TH, weight_VH, target_T = case.draw(torch.float32)
    together = case.compute(hidden_TH, weight_VH, target_T, backend="tiles")
    alone = case.compute(hidden_TH[300:303], weight_VH, target_T[300:303], backend="tiles")
    assert same_bits(alone, [value[300:303] for value in together])


def far_apart(near_RN):
    """The same matrix, its third row beyond 2**31 elements; pages between rows take no memory."""
    num_rows, num_columns = near_RN.shape
    storage = torch.empty((num_rows - 1) * FAR + near_RN.shape[1])
    return storage.as_strided((num_rows, num_columns), (FAR, 1)).copy_(near_RN)


@pytest.mark.parametrize("descriptor", [True, False])
def test_rows_of_the_operands_beyond_int32_are_reached(monkeypatch, descriptor):
    monkeypatch.setattr(tiles, "_can_be_described", lambda matrix: descriptor)
    near_TH, near_VH, target_T = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0, 1, 2])
    expected = linear_logprob(near_TH, near_VH, target_T, backend="torch", return_entropy=True)
    for hidden_TH, weight_VH in ((far_apart(near_TH), near_VH), (near_TH, far_apart(near_VH))):
        options = {"backend": "tiles", "return_entropy": True}
        got = linear_logprob(hidden_TH, weight_VH, target_T, **options)
        torch.testing.assert_close(got, expected)


def test_rows_of_products_beyond_int32_are_reached():
    columns = ROW_SIZES[INTERPRETER].columns
    product_RC = far_apart(torch.tensor([[0.0], [1.0], [2.0]]).expand(3, columns).contiguous())
    out = torch.zeros(4, 3)
    column_R = torch.tensor([2, 1, 0], dtype=torch.int32)
    shape = {"ROWS": 4, "COLUMNS": columns, "CAPPED": False}
    kernels.row_stats[(1,)](product_RC, column_R, *out, 3, 3, FAR, 1.0, 1.0, **shape)
    assert out.tolist() == [[0.0, 1.0, 2.0], [3.0] * 3, [0.0] * 3, [0.0, 1.0, 2.0]]
    # A factor of 1 and nothing else, and a maximum 1 too large: the gradient is 1 / e.
    zero_R, one_R = torch.zeros(3), torch.ones(3)
    row_numbers = (column_R, out[0] + 1, zero_R, one_R, zero_R)
    kernels.row_gradient[(1, 1)](product_RC, product_RC, *row_numbers, 3, FAR, 1.0, 1.0, **shape)
    assert product_RC[:, 7].tolist() == pytest.approx([0.36787944] * 3)


def test_rows_of_a_slice_beyond_int32_are_reached():
    near_TH, near_VH = torch.randn(3, 4), torch.randn(5, 4)
    column_R = torch.tensor([0, 1, 2], dtype=torch.int32)
    head = Operands(near_TH, near_VH, 5, 0, 1.0, None)
    numbers = (column_R, torch.zeros(3), torch.ones(3), torch.ones(3), torch.zeros(3))
    grads = [torch.zeros(3, 512), far_apart(torch.zeros(3, 512))]
    for grad_RS in grads:
        tiles.write_product_gradient(grad_RS[:, :5], head, near_TH, near_VH, numbers)
    expected = (near_TH @ near_VH.T).exp() + torch.eye(3, 5)
    for grad_RS in grads:
        torch.testing.assert_close(grad_RS[:, :5], expected)


@every_backend
def test_one_hidden_state_for_all_tokens_may_be_expanded(backend):
    row_1H, weight_VH, target_T = torch.randn(1, 8), torch.randn(30, 8), torch.arange(5)
    expanded_T = linear_logprob(row_1H.expand(5, 8), weight_VH, target_T, backend=backend)
    assert torch.equal(
        expanded_T, linear_logprob(row_1H.repeat(5, 1), weight_VH, target_T, backend=backend)
    )
