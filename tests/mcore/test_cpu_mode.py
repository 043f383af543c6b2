"""The CPU mode, each time in a process of its own: it changes torch for the whole process."""

import json
import subprocess
import sys
import textwrap

import pytest


def run_python(script: str) -> subprocess.CompletedProcess:
    """A fresh interpreter that runs `script`."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def answer(script: str) -> dict:
    """The JSON that `script` prints last."""
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_happens_where_cuda_is_available():
    found = answer("""
        import json, torch, torch.distributed
        before = {**vars(torch), **vars(torch.cuda), **vars(torch.distributed)}
        before |= {"type": torch.Tensor.type, "cuda": torch.Tensor.cuda}
        torch.cuda.is_available = lambda: True
        from megatron_credit.mcore import cpu_mode
        enabled = cpu_mode.enable()
        after = {**vars(torch), **vars(torch.cuda), **vars(torch.distributed)}
        after |= {"type": torch.Tensor.type, "cuda": torch.Tensor.cuda}
        changed = [n for n in before if before[n] is not after[n] and n != "is_available"]
        print(json.dumps({"enabled": enabled, "changed": changed, "on": cpu_mode.is_enabled()}))
    """)
    assert found == {"enabled": False, "changed": [], "on": False}


@pytest.fixture(scope="module")
def enabled() -> dict:
    """What torch and megatron say after the mode was enabled twice."""
    return answer("""
        import json, sys, torch, types
        from megatron_credit.mcore import cpu_mode
        first = cpu_mode.enable()
        zeros = torch.zeros
        second = cpu_mode.enable()
        state = torch.cuda.get_rng_state()
        drawn = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        again = torch.rand(3)
        from megatron_credit.mcore import model
        public = set()
        for module in (torch, torch.cuda, torch.cuda.random, torch.distributed):
            public |= {id(value) for value in vars(module).values()}
        ours, replaced = [], []
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron."):
                for key, value in vars(module).items():
                    function = isinstance(value, types.FunctionType)
                    if function and value.__module__ == "megatron_credit.mcore.cpu_mode":
                        (ours if id(value) in public else replaced).append(f"{name}.{key}")
        print(json.dumps({
            "returned": [first, second],
            "same": zeros is torch.zeros,
            "device": str(torch.zeros(2, device="cuda").device),
            "pinned": torch.tensor([1.0], pin_memory=True).is_pinned(),
            "current": str(torch.cuda.current_device()),
            "type": torch.ones(1).type(),
            "integers": torch.ones(1, dtype=torch.int64).type(),
            "converted": torch.ones(1).type(torch.float64).dtype.itemsize,
            "rng": torch.equal(drawn, again),
            "available": torch.cuda.is_available(),
            "modules": sum(name.startswith("megatron.") for name in sys.modules),
            "ours": ours,
            "replaced": replaced,
        }))
    """)


def test_enabling_twice_changes_nothing_more(enabled):
    assert enabled["returned"] == [True, True]
    assert enabled["same"]


def test_cuda_means_the_cpu(enabled):
    assert enabled["device"] == enabled["current"] == "cpu"
    assert enabled["pinned"] is False
    assert enabled["type"] == "torch.cuda.FloatTensor"
    assert enabled["integers"] == "torch.LongTensor"
    assert enabled["converted"] == 8
    assert enabled["rng"]
    assert enabled["available"] is False


def test_no_megatron_function_is_replaced(enabled):
    """What megatron's modules hold of ours is what they imported by name from torch."""
    assert enabled["modules"] > 100
    assert "megatron.core.tensor_parallel.random._lazy_call" in enabled["ours"]
    assert {name.split(".")[-1] for name in enabled["ours"]} == {"_lazy_call"}
    assert enabled["replaced"] == []


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            "vllm",
            "the CPU mode of the trainer changes torch.cuda and must not run in a process that "
            "imported vllm; start the engine as its own process",
        ),
        ("megatron.core", "cpu_mode.enable() came after the first import of megatron"),
    ],
)
def test_refuses_a_process_it_would_harm(module, message):
    done = run_python(f"""
        import sys, types, torch
        sys.modules["{module}"] = types.ModuleType("{module}")
        zeros = torch.zeros
        from megatron_credit.mcore import cpu_mode
        try:
            cpu_mode.enable()
        finally:
            assert torch.zeros is zeros
    """)
    assert done.returncode == 1
    assert "RuntimeError: the CPU mode" in done.stderr or "RuntimeError: cpu_mode" in done.stderr
    assert message in done.stderr


def test_megatron_is_not_started_without_a_device():
    done = run_python("""
        from megatron_credit.mcore import parallel
        from megatron_credit.mcore.config import ParallelConfig
        parallel.start_parallel(ParallelConfig(), seed=1, timeout_s=10)
    """)
    assert "RuntimeError: no CUDA device, and the CPU mode is off" in done.stderr
