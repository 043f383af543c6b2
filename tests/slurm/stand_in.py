"""Tasks that keep a run's contract and compute nothing: in place of trainer and engines, where only
the launcher is under test. Standard library only, run by the nodes' own python3."""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

ATTEMPT = Path(os.environ["CREDIT_ATTEMPT"])
TASK = os.environ["CREDIT_TASK"]
NODE = os.environ.get("CREDIT_NODE") or os.environ["SLURMD_NODENAME"]
TOPOLOGY = json.loads((ATTEMPT / "topology.json").read_text())
RUN = Path(TOPOLOGY["run"])
LAUNCH = RUN / "launch"


def publish(path: Path, text: str) -> None:
    """A file that nobody sees half of."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{NODE}.{os.getpid()}")
    partial.write_text(text)
    partial.rename(path)


def append(path: Path, **record) -> None:
    """A line at the end of a file that several nodes may write."""
    line = json.dumps({**record, "time": time.time()}) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, line.encode())
    os.close(file)


def owns_the_run() -> bool:
    """Whether no later attempt has begun: the fence of the real trainer."""
    return int((LAUNCH / "current").read_text()) == TOPOLOGY["attempt"]


def tell_what_was_given() -> None:
    """Which environment this task got, for the tests."""
    sys.stdout.write(f"{TASK} begins on {NODE}\n")
    sys.stdout.flush()
    append(
        RUN / "seen.jsonl",
        attempt=TOPOLOGY["attempt"],
        task=TASK,
        node=NODE,
        pid=os.getpid(),
        cwd=os.getcwd(),
        arguments=sys.argv,
        environment=dict(os.environ),
    )


def follow() -> int:
    """A trainer's node that does not lead."""
    while not (ATTEMPT / "finished").exists():
        append(RUN / "beats.jsonl", attempt=TOPOLOGY["attempt"], node=NODE, task=TASK)
        time.sleep(0.2)
    return 0


def lead(options) -> int:
    """The trainer's first node: numbered steps, checkpoints, the end of the run."""
    start = int((LAUNCH / "progress").read_text()) if (LAUNCH / "progress").exists() else 0
    engines = Path(TOPOLOGY["engines"])
    while len(list(engines.glob("*.json"))) < options.engines:
        time.sleep(0.1)
    for step in range(start + 1, options.steps + 1):
        if step == options.crash_at:
            sys.stderr.write("Traceback: the stand-in was told to crash\n")
            return 3
        time.sleep(options.seconds)
        if not owns_the_run():
            return 4
        append(RUN / "steps.jsonl", step=step, attempt=TOPOLOGY["attempt"], node=NODE)
        stop = (ATTEMPT / "STOP").exists()
        if stop or step % options.save_every == 0:
            time.sleep(options.save_seconds)
            publish(LAUNCH / "progress", str(step))
        if stop and step < options.steps:
            publish(ATTEMPT / "STOPPED", json.dumps({"step": step}))
            publish(ATTEMPT / "finished", "")
            return 0
    publish(LAUNCH / "DONE", "")
    publish(ATTEMPT / "finished", "")
    return 0


def train(options) -> int:
    """The trainer's task on one node."""
    if options.refuse and TASK == "trainer":
        refusal = {
            "reason": options.refuse,
            "retry": False,
            "task": TASK,
            "rank": 0,
            "phase": "start",
        }
        publish(ATTEMPT / "failure.json", json.dumps(refusal))
        return 1
    leads = TOPOLOGY["tasks"]["trainer"]["nodes"][0]["name"] == NODE
    return lead(options) if leads else follow()


def sample(options) -> int:
    """An engine: says where it is, and withdraws that when it is told to end."""
    entry = Path(TOPOLOGY["engines"]) / f"{TASK}.0.json"
    publish(entry, json.dumps({"name": f"{TASK}.0", "node": NODE, "pid": os.getpid()}))

    def withdraw(_signal, _frame):
        entry.unlink(missing_ok=True)
        append(RUN / "ends.jsonl", task=TASK, node=NODE, attempt=TOPOLOGY["attempt"])
        os._exit(0)

    signal.signal(signal.SIGTERM, withdraw)
    while True:
        append(RUN / "beats.jsonl", attempt=TOPOLOGY["attempt"], node=NODE, task=TASK)
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("train", "sample"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a step")
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--save-seconds", type=float, default=0.0)
    parser.add_argument("--crash-at", type=int, default=-1, help="step")
    parser.add_argument("--engines", type=int, default=0, help="to wait for")
    parser.add_argument("--refuse", default="", help="fail for good, with this reason")
    options = parser.parse_args()
    tell_what_was_given()
    return train(options) if options.kind == "train" else sample(options)


if __name__ == "__main__":
    sys.exit(main())
