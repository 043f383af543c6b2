"""matmul_nt against float64, on both libraries."""

import time

import pytest
import torch
from credit_kernels import matmul
from credit_kernels.matmul import matmul_nt


def draw(num_rows, num_columns, length):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(num_rows, length, generator=generator),
        torch.randn(num_columns, length, generator=generator),
    )


# Odd sizes, none, one, and sums longer than LONGEST_SUM, a multiple of it and not.
@pytest.mark.parametrize(
    "shape", [(5, 7, 3), (0, 4, 2), (4, 0, 2), (1, 1, 1), (33, 65, 1024), (9, 8, 4097)]
)
def test_error_is_at_most_twice_that_of_eager_torch(shape):
    a_MK, b_NK = draw(*shape)
    truth_MN = a_MK.double() @ b_NK.double().T
    mine_MN = matmul_nt(a_MK, b_NK)
    assert mine_MN.shape == shape[:2]
    if truth_MN.numel():
        eager = (a_MK @ b_NK.T - truth_MN).abs().max()
        assert (mine_MN - truth_MN).abs().max() <= 2 * eager + 1e-5


def test_long_sums_lose_no_digit():
    a_MK, b_NK = draw(200, 200, 4096)
    truth_MN = a_MK.double() @ b_NK.double().T
    mean_square = (matmul_nt(a_MK, b_NK) - truth_MN).square().mean()
    # Added up in one chain, the error is more than twice that of torch.mm.
    assert mean_square <= 1.8**2 * (a_MK @ b_NK.T - truth_MN).square().mean()


def test_literal():
    a_MK, b_NK = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    assert matmul_nt(a_MK, b_NK).tolist() == [[17.0, 23.0], [39.0, 53.0]]


@pytest.mark.parametrize("enabled", [True, False])
def test_transposed_and_cut_operands(enabled, monkeypatch):
    monkeypatch.setattr(matmul, "_has_onednn", lambda: enabled)
    a_MK, b_NK = draw(40, 30, 20)
    expected_MN = matmul_nt(a_MK, b_NK)
    for a, b in (
        (a_MK.T.contiguous().T, b_NK),
        (a_MK, b_NK.T.contiguous().T),
        (torch.cat([a_MK, a_MK], 1)[:, :20], torch.cat([b_NK, b_NK])[30:]),
    ):
        torch.testing.assert_close(matmul_nt(a, b), expected_MN, atol=1e-5, rtol=1e-6)


# Long sums, whose parts have gaps between rows; cut columns; single rows and columns of a part.
@pytest.mark.parametrize("shape", [(64, 512, 1500), (256, 1, 1500), (512, 512, 1), (300, 64, 513)])
@pytest.mark.parametrize("transposed", [False, True])
def test_no_layout_is_slow(shape, transposed):
    a_MK, b_NK = draw(*shape)
    wide_NK = torch.cat([b_NK, b_NK], 1)[:, : shape[2]]
    operands = (a_MK.T.contiguous().T, wide_NK.T.contiguous().T) if transposed else (a_MK, wide_NK)

    def seconds(product):
        product(*operands)
        start = time.process_time()
        product(*operands)
        return time.process_time() - start

    usual = seconds(lambda a_MK, b_NK: a_MK @ b_NK.T)
    # The loops that oneDNN has for some layouts take 1000 times as long.
    assert seconds(matmul_nt) <= 10 * usual + 2e-3


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_is_kept_out(enabled, monkeypatch):
    monkeypatch.setattr(matmul, "_has_onednn", lambda: enabled)
    a_MK, b_NK = draw(6, 5, 300)
    expected_MN = matmul_nt(a_MK, b_NK)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(matmul_nt(a_MK, b_NK), expected_MN)


def test_which_library_is_used(monkeypatch):
    calls = []
    usual = matmul._onednn_nt
    monkeypatch.setattr(matmul, "_onednn_nt", lambda a, b: calls.append(a.dtype) or usual(a, b))
    a_MK, b_NK = draw(3, 4, 5)
    matmul_nt(a_MK, b_NK)
    matmul_nt(a_MK.double(), b_NK.double())
    monkeypatch.setattr(matmul, "_has_onednn", lambda: False)
    matmul_nt(a_MK, b_NK)
    assert calls == [torch.float32]
