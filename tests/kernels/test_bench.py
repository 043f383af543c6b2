"""The benchmark refuses to time what is wrong, and its figures mean what they say."""

import csv
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from credit_kernels import logprob
from credit_kernels.bench import clock, run
from credit_kernels.bench.check import Truth
from credit_kernels.bench.clock import extra_bytes, quantiles
from credit_kernels.bench.errors import BenchmarkFailed
from credit_kernels.bench.machine import Ceilings
from credit_kernels.bench.methods import Method, methods_of
from credit_kernels.bench.operations import OPERATIONS
from credit_kernels.bench.plan import make_plan
from credit_kernels.bench.problem import Problem
from credit_kernels.bench.report import markdown
from credit_kernels.bench.roofline import Work, work_of
from credit_kernels.bench.rows import figures_of
from credit_kernels.bench.shapes import MODELS, parse_head
from credit_kernels.evidence import units
from credit_kernels.logprob.chunked import BACKEND
from typer.testing import CliRunner

from megatron_credit.cli import app

CPU = torch.device("cpu")
BY_NAME = {operation.name: operation for operation in OPERATIONS}
every_operation = pytest.mark.parametrize("name", BY_NAME)


def problem(name, *, head="16x300", tokens=20, dtype=torch.float32):
    return Problem(
        operation=BY_NAME[name], head=parse_head(head), tokens=tokens, dtype=dtype, device=CPU
    )


def method(operation, name):
    return next(known for known in methods_of(BY_NAME[operation]) if known.name == name)


def wrong_sum(head, target_R, with_entropy):
    stats = BACKEND.local_stats(head, target_R, with_entropy)
    return replace(stats, sum_T=stats.sum_T * 1.001)


def wrong_hidden(*arguments):
    grad_RH, grad_VH = BACKEND.gradients(*arguments)
    return grad_RH * 1.01, grad_VH


def wrong_weight(*arguments):
    grad_RH, grad_VH = BACKEND.gradients(*arguments)
    grad_VH[-1] = 0
    return grad_RH, grad_VH


def no_entropy_gradient(head, incoming, *wanted):
    return BACKEND.gradients(head, replace(incoming, slope_R=None), *wanted)


def not_a_number(head, target_R, with_entropy):
    stats = BACKEND.local_stats(head, target_R, with_entropy)
    return replace(stats, max_T=stats.max_T * torch.nan)


WRONG = [
    ("output 0", {"local_stats": wrong_sum}),
    ("output 0", {"local_stats": not_a_number}),
    ("the gradient of hidden", {"gradients": wrong_hidden}),
    ("the gradient of the weight", {"gradients": wrong_weight}),
    ("the gradient of hidden", {"gradients": no_entropy_gradient}),
]


@pytest.mark.parametrize(("culprit", "changes"), WRONG)
def test_a_wrong_backend_ends_the_benchmark_before_anything_is_timed(
    tmp_path, monkeypatch, culprit, changes
):
    monkeypatch.setitem(logprob.BACKENDS, "torch", lambda: replace(BACKEND, **changes))
    monkeypatch.setattr(run, "time_methods", lambda *_: pytest.fail("something was timed"))
    command = ["bench", "kernels", str(tmp_path), "--head", "16x300", "--tokens", "20"]
    chosen = ["--operation", "logprob_entropy", "--method", "ours-torch"]
    result = CliRunner().invoke(app, [*command, *chosen])
    assert result.exit_code == 1
    where = "ours-torch of logprob_entropy, 16x300: T 20, H 16, V 300, float32"
    assert f"failed: {where}: {culprit} is off by" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_method_of_others_is_named_and_not_timed(monkeypatch):
    eager = method("logprob", "eager")
    wrong = Method(name="liger", compute=lambda *inputs: (eager.compute(*inputs)[0] + 0.01,))
    kept = [eager, wrong]
    monkeypatch.setattr(run, "methods_of", lambda _: kept)
    able, refused = run.check(problem("logprob"), ["eager", "liger"])
    assert [one.name for one in able] == ["eager"]
    assert refused["liger"].startswith("not timed: output 0 is off by 1.0e-02")


@every_operation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ours_and_those_of_others_that_run_here_are_right(name, dtype):
    # Of torch.compile only that it is asked: compiling takes too long for a test.
    names = ["eager", "F.linear_cross_entropy", "ours-torch", "ours-rows", "cut-cross-entropy"]
    able, refused = run.check(problem(name, dtype=dtype), names)
    chunked = {"cross_entropy", "logprob"}
    expected = {"eager", "ours-torch"} | ({"F.linear_cross_entropy"} if name in chunked else set())
    assert {one.name for one in able} == expected
    # No Triton program computes the divergence.
    gpu = {"ours-rows": "cannot run here: needs a GPU"} if "rows" in BY_NAME[name].backends else {}
    assert set(refused) == set(gpu) | ({"cut-cross-entropy"} if name in chunked else set())
    assert gpu.items() <= refused.items()
    assert (gpu == {}) == name.startswith("divergence_loss")


def test_the_truth_is_float64_and_eager_errs_less_in_float32_than_with_rounded_logits():
    truth = Truth.of(problem("logprob", dtype=torch.bfloat16))
    assert {value.dtype for value in truth.values} == {torch.float64}
    assert truth.float32_errors[0] < 1e-4 < 1e-3 < truth.eager_errors[0]


def test_one_command_measures_and_writes_everything(tmp_path):
    command = ["bench", "kernels", str(tmp_path), "--head", "16x300", "--tokens", "20"]
    chosen = ["--repeats", "2", "--tp", "2", "--method", "ours-torch", "--method", "ours-tiles"]
    result = CliRunner().invoke(
        app, [*command, *chosen, "--operation", "logprob", "--operation", "evidence_stats"]
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "kernels.json").read_text())
    assert report["machine"]["device_type"] == "cpu" and report["machine"]["threads"] == 1
    rows = {(row["operation"], row["method"]): row for row in report["rows"]}
    assert set(rows) == {
        (operation, name)
        for operation in ("logprob", "evidence_stats")
        for name in ("eager", "ours-torch", "ours-tiles")
    }
    eager, ours = rows["logprob", "eager"], rows["logprob", "ours-torch"]
    assert (ours["vocabulary"], ours["ranks"]) == (256, 2)
    assert eager["time_ratio"] == 1 and eager["memory_ratio"] == 1
    assert ours["time_ratio"] == pytest.approx(ours["total_p50_s"] / eager["total_p50_s"])
    assert 0 < ours["forward_p50_s"] < ours["total_p20_s"] <= ours["total_p50_s"]
    # Three products of 2 T H V.
    flops = 3 * 2 * 20 * 16 * 256
    assert ours["tflop_per_s"] == pytest.approx(flops / ours["total_p50_s"] / 1e12)
    ceiling = report["ceilings"]["flop_per_s"]
    assert ours["gemm_percent"] == pytest.approx(100 * flops / ours["total_p50_s"] / ceiling)
    tiles = rows["logprob", "ours-tiles"]
    assert tiles["note"] == "cannot run here: needs a GPU" and tiles["total_p50_s"] is None
    table = list(csv.DictReader((tmp_path / "kernels.csv").open()))
    assert [(row["operation"], row["method"]) for row in table] == list(rows)
    assert float(table[0]["total_p50_s"]) == eager["total_p50_s"]
    text = (tmp_path / "kernels.md").read_text()
    assert "CPU figures" in text and "- ours-tiles: cannot run here: needs a GPU" in text
    for picture in ("speed.png", "roofline.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_a_frozen_head_has_no_gradient_and_is_still_checked(monkeypatch):
    frozen = problem("evidence_loss_frozen_head")
    hidden, weight_VH, _ = frozen.draw()
    assert hidden.requires_grad and not weight_VH.requires_grad
    right = method("evidence_loss_frozen_head", "ours-torch")
    # Two losses and one gradient.
    assert len(Truth.of(frozen).values) == 3
    scaled = units.scaled
    monkeypatch.setattr(units, "scaled", lambda *arguments: scaled(*arguments) * 1.01)
    assert Truth.of(frozen).complaint(right).startswith("the gradient of hidden is off by")


def test_the_report_says_whether_other_jobs_ran():
    ceilings = Ceilings(flop_per_s=1e12, bytes_per_s=1e9)
    state = {"device": "this", "device_type": "cpu", "date": "today", "torch": "2", "threads": 1}
    for load, expected in ((0.9, "0.9; CPU time"), (3.4, "3.4 (other jobs ran too); CPU time")):
        text = markdown(state | {"load_average": load}, ceilings, [], repeats=1)
        assert f"load average up to {expected} of one thread" in text


def test_the_highest_load_is_reported(tmp_path, monkeypatch):
    loads = iter([0.5, 3.0, 1.0])
    monkeypatch.setattr(run, "load_average", lambda: next(loads))
    monkeypatch.setattr(run, "extra_bytes", lambda *_: 1e6)
    chosen = ["--operation", "logprob", "--operation", "evidence_stats", "--method", "ours-torch"]
    command = ["bench", "kernels", str(tmp_path), "--head", "16x300", "--tokens", "20", *chosen]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert json.loads((tmp_path / "kernels.json").read_text())["machine"]["load_average"] == 3.0


def test_memory_is_that_of_the_logits_in_eager_torch():
    # [1024, 16000] float32 logits: 66 MB, above what malloc keeps; eager torch holds them thrice.
    logits = 1024 * 16000 * 4
    large = problem("logprob", head="16x16000", tokens=1024)
    eager, ours = (extra_bytes(large, method("logprob", name)) for name in ("eager", "ours-torch"))
    assert 2.5 * logits < eager < 4 * logits
    assert ours < logits / 2


def test_a_failed_measurement_of_memory_says_why():
    unknown = Method(name="nobody", compute=method("logprob", "eager").compute)
    with pytest.raises(BenchmarkFailed, match=r"credit_kernels\.bench\.peak .* ended with 1 "):
        extra_bytes(problem("logprob"), unknown)


def test_methods_take_turns_and_the_first_round_is_dropped(monkeypatch):
    calls = []
    monkeypatch.setattr(
        clock, "time_pass", lambda one, _: calls.append(one.name) or (len(calls), 10 * len(calls))
    )
    both = [method("logprob", name) for name in ("eager", "ours-torch")]
    taken = clock.time_methods(problem("logprob"), both, 2)
    assert calls == ["eager", "ours-torch"] * 3
    assert taken == {"eager": [(3, 30), (5, 50)], "ours-torch": [(4, 40), (6, 60)]}


def test_quantiles():
    assert quantiles([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == pytest.approx((2.0, 3.5, 5.0))
    assert quantiles([7.0]) == (7.0, 7.0, 7.0)


def test_work_and_roofline():
    # H 16, V 300, T 20, 4 bytes: hidden 1280, weight 19200, a product 2 * 20 * 16 * 300 = 192000.
    assert work_of(problem("logprob")) == Work(flops=3 * 192000, bytes=3 * (1280 + 19200))
    assert work_of(problem("evidence_stats")) == Work(flops=3 * 192000, bytes=3 * 1280 + 19200)
    assert work_of(problem("evidence_loss", dtype=torch.bfloat16)) == Work(
        flops=5 * 192000, bytes=5 * 640 + 3 * 9600
    )
    # Only the gradient of hidden is made and written: 3 contexts are read, the student once more.
    assert work_of(problem("evidence_loss_frozen_head")) == Work(
        flops=4 * 192000, bytes=5 * 1280 + 2 * 19200
    )
    assert work_of(problem("divergence_loss")) == Work(flops=4 * 192000, bytes=4 * 1280 + 3 * 19200)
    work = Work(flops=600, bytes=100)
    assert work.attainable_s(Ceilings(flop_per_s=60, bytes_per_s=20)) == 10
    assert work.attainable_s(Ceilings(flop_per_s=60, bytes_per_s=5)) == 20


def test_figures():
    ceilings = Ceilings(flop_per_s=1e6, bytes_per_s=1e9)
    passes = [(0.5, 1.0), (1.0, 2.0), (1.5, 3.0)]
    found = figures_of(problem("logprob"), ceilings, passes, 2e6, (4.0, 8e6))
    assert (found.forward_p50_s, found.total_p50_s, found.total_p20_s) == (1.0, 2.0, 1.4)
    assert (found.time_ratio, found.extra_mb, found.memory_ratio) == (0.5, 2.0, 0.25)
    # 576000 operations: 0.576 s at the ceiling.
    assert (found.attainable_s, found.tflop_per_s * 2e6) == pytest.approx((0.576, 0.576))
    assert (found.roofline_percent, found.gemm_percent) == pytest.approx((28.8, 28.8))
    assert found.bandwidth_percent == pytest.approx(100 * 61440 / 2 / 1e9)


def test_heads():
    assert [(model.hidden, model.vocabulary) for model in MODELS] == [
        (1024, 151936),
        (4096, 151936),
        (5120, 151936),
        (2048, 151936),
        (4096, 128256),
        (8192, 128256),
        (7168, 129280),
    ]
    # Megatron pads to a multiple of 128 * 8: 152576.
    assert parse_head("qwen3-8b").shard(8).vocabulary == 19072
    assert parse_head("llama3-70b").shard(2).vocabulary == 64128
    assert parse_head("deepseek-v3/16").hidden == 448


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        (("--head", "qwen3-9b"), "head 'qwen3-9b'; expected one of ['qwen3-0.6b'"),
        (("--head", "qwen3-8b/0"), "head 'qwen3-8b/0'; expected one of"),
        (("--head", "qwen3-8b/5000"), "has no hidden size left; qwen3-8b has 4096"),
        (("--operation", "logprobs"), "operation 'logprobs'; expected one of ['cross_entropy'"),
        (("--method", "ligre"), "method 'ligre'; expected one of ['eager', 'torch.compile'"),
        (("--tokens", "0"), "tokens=0; expected at least 1"),
        (("--tp", "0"), "tp=0; expected at least 1"),
        (("--repeats", "-1"), "repeats=-1; expected at least 1"),
    ],
)
def test_bad_input_is_one_message(tmp_path, option, complaint):
    result = CliRunner().invoke(app, ["bench", "kernels", str(tmp_path / "out"), *option])
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_the_directory(tmp_path):
    (tmp_path / "out").write_text("mine")
    result = CliRunner().invoke(app, ["bench", "kernels", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "out is a file; expected a directory" in " ".join(result.output.split())


def test_a_run_that_is_stopped_leaves_what_it_has_measured(tmp_path, monkeypatch):
    def stopped(problem, *arguments):
        if problem.operation.name == "evidence_stats":
            raise KeyboardInterrupt
        return measure(problem, *arguments)

    measure = run.measure
    monkeypatch.setattr(run, "measure", stopped)
    monkeypatch.setattr(run, "extra_bytes", lambda *_: 1e6)
    chosen = ["--operation", "logprob", "--operation", "evidence_stats", "--method", "ours-torch"]
    command = ["bench", "kernels", str(tmp_path), "--head", "16x300", "--tokens", "20", *chosen]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 130 and "stopped; the tables hold the problems" in result.output
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert [row["operation"] for row in rows] == ["logprob", "logprob"]


def test_every_operation_is_measured_unless_some_are_named():
    everything = make_plan(heads=["16x300"], ranks=[1, 2])
    assert [one.operation.name for one in everything.problems] == [*BY_NAME, *BY_NAME]
    assert [one.head.ranks for one in everything.problems] == [1] * 8 + [2] * 8
    assert {"divergence_loss", "divergence_loss_top_k"} <= set(BY_NAME)
    assert {"eager", "torch.compile", "liger", "cut-cross-entropy", "ours-tiles"} <= set(
        everything.methods
    )
    assert "eager" in make_plan(methods=["liger"]).methods


def test_other_commands_do_not_import_the_benchmark():
    code = (
        "import sys, megatron_credit.cli; "
        "print([name for name in ('torch', 'credit_kernels') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
