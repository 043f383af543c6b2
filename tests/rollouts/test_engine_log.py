"""What an error message says of an engine's log, to which several starts have written."""

import pytest

from megatron_credit.rollouts.engine_log import LOG_LINES, EngineLog
from megatron_credit.rollouts.errors import EngineError

OF_MEMORY = "; it ran out of memory: engine.kv_cache_mib (on a CPU), engine.gpu_memory"
CUDA = (
    "(Worker_TP1 pid=6) ERROR 11-30 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. "
    "Tried to allocate 20.00 MiB."
)
TORCH = (
    "(EngineCore pid=5) ERROR 11-30 [core.py:1] RuntimeError: [enforce fail at alloc_cpu.cpp:124] "
    "err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
)
PLANNED = (
    "(EngineCore pid=5) ERROR 11-30 [core.py:1510] ValueError: Available memory on node 0 (18.92/"
    "23.54 GiB) on kv cache allocation is less than requested memory for kv (97656.25 GiB)."
)
KERNEL = "(Keeper pid=3) out of memory: the kernel ended a process of this machine just now"
STARTS = "(Keeper pid={}) the engine starts"


@pytest.fixture
def log(tmp_path):
    return tmp_path / "engine.log"


def test_the_message_shows_the_cause_and_the_end_of_a_long_log(tmp_path):
    log = tmp_path / "engine.log"
    cause = ["(EngineCore pid=5) ERROR 11-30 [core.py:1] IndexError: the cause"]
    spam = [f"(APIServer pid=4) ERROR line {number}" for number in range(5000)]
    log.write_text("\n".join(["before", *cause, *spam]) + "\n")
    lines = str(EngineError("generation: it died", EngineLog(log))).splitlines()
    assert lines[:2] == ["generation: it died", f"the end of {log}:"]
    assert lines[2] == f"  {cause[0]}"
    assert lines[3:] == [f"  {line}" for line in spam[-LOG_LINES:]]


@pytest.mark.parametrize("line", [CUDA, TORCH, PLANNED, KERNEL])
def test_a_lack_of_memory_is_said_first(log, line):
    log.write_text(f"{STARTS.format(3)}\n{line}\nthe end\n")
    message = str(EngineError("generation: it died", EngineLog(log, 3)))
    assert message.startswith(f"generation: it died{OF_MEMORY}")
    assert message.endswith("the end")


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=5) ERROR 11-30 [core.py:1] IndexError: the cause",
        "(EngineCore pid=5) WARNING 11-30 [core.py:1] this may run out of memory",
        "(APIServer pid=4) ERROR 11-30 the prompt was: out of memory",
        STARTS.format(3),
    ],
)
def test_no_other_end_is_blamed_on_memory(log, line):
    log.write_text(f"{line}\n")
    assert "ran out of memory" not in str(EngineError("it died", EngineLog(log, 3)))
    assert "ran out of memory" not in str(EngineError("it died", EngineLog(log.parent / "none")))
    assert str(EngineError("it died")) == "it died"


def test_each_start_has_its_own_lines(log):
    first = [STARTS.format(3), "before", CUDA]
    second = [STARTS.format(30), "IndexError: the cause"]
    log.write_text("\n".join(["of old", *first, *second]) + "\n")

    def shown(keeper):
        _, *lines = EngineLog(log, keeper).tail().strip().splitlines()
        return [line.strip() for line in lines]

    assert shown(3) == first and EngineLog(log, 3).tells_of_memory()
    assert shown(30) == shown(None) == second
    assert not EngineLog(log, 30).tells_of_memory()
    assert shown(300) == ["of old", *first, *second]  # none of ours: an engine that ran already
