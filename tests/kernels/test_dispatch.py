"""Which backend runs, and what is said about it."""

import logging

import pytest
import torch
from credit_kernels import dispatch
from credit_kernels.dispatch import Work, choose

BUILT = {"torch": 1, "rows": 2, "tiles": 3}
GIB = 2**30


def work(num_tokens=4096, num_columns=32000, dtype=torch.bfloat16, device="cuda"):
    return Work(torch.device(device), dtype, num_tokens, num_columns)


@pytest.fixture
def a_gpu(monkeypatch):
    """Triton runs, and a chunk may take 1 GiB."""
    monkeypatch.setattr(dispatch, "refusal", lambda device: None)
    monkeypatch.setattr(dispatch, "chunk_bytes", lambda device: GIB)


def test_auto_takes_torch_on_a_processor():
    assert choose("auto", BUILT, operation="op", work=work(device="cpu")) == 1
    assert choose("auto", BUILT, operation="op") == 1


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("rows", work()),
        ("tiles", work(num_tokens=128)),
        ("rows", work(num_tokens=129)),
        # 1024 rows of 6 bytes a column fill 1 GiB with 174,762 columns.
        ("rows", work(num_columns=174_000)),
        ("tiles", work(num_columns=175_000)),
        ("tiles", work(num_columns=174_000, dtype=torch.float32)),
        ("torch", work(dtype=torch.float64)),
    ],
)
def test_auto_goes_by_tokens_memory_and_type_on_a_gpu(a_gpu, name, task):
    assert choose("auto", BUILT, operation="op", work=task) == BUILT[name]


def test_auto_takes_torch_where_triton_cannot_run(monkeypatch):
    monkeypatch.setattr(dispatch, "refusal", lambda device: "no driver")
    assert choose("auto", BUILT, operation="op", work=work()) == 1


def test_auto_takes_torch_where_the_operation_has_nothing_else(a_gpu):
    assert choose("auto", {"torch": 1}, operation="op", work=work()) == 1


def test_auto_takes_rows_where_tiles_cannot_serve_the_call(a_gpu):
    assert choose("auto", {"torch": 1, "rows": 2}, operation="op", work=work(num_tokens=64)) == 2


def test_auto_says_each_choice_once(a_gpu, caplog):
    dispatch._tell.cache_clear()
    with caplog.at_level(logging.INFO, "credit_kernels"):
        for num_tokens in (4096, 8192, 64, 32, 4096):
            choose("auto", BUILT, operation="op", work=work(num_tokens))
    assert [record.getMessage()[:18].strip() for record in caplog.records] == [
        "op: backend rows (",
        "op: backend tiles",
    ]


def test_a_named_backend_that_cannot_run_is_an_error(monkeypatch):
    with pytest.raises(ValueError, match=r"'rows' cannot run op: .* cpu .*TRITON_INTERPRET=1"):
        choose("rows", BUILT, operation="op", work=work(device="cpu"))
    monkeypatch.setattr(dispatch, "refusal", lambda device: "the package triton is not installed")
    with pytest.raises(ValueError, match="'tiles' cannot run op: the package triton is not inst"):
        choose("tiles", BUILT, operation="op", work=work())


def test_no_driver_is_an_error():
    # This machine has none, or the tests would not be on CPU tensors.
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(ValueError, match="'tiles' cannot run op: Triton finds no driver"):
        choose("tiles", BUILT, operation="op", work=work())


def test_an_unknown_backend_is_an_error():
    with pytest.raises(ValueError, match=r"'cuda' is not available for op; use one of \['auto'"):
        choose("cuda", BUILT, operation="op", work=work())
