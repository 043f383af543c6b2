"""Tasks that do what a word says, for the supervisor to watch; standard library only."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ATTEMPT = Path(os.environ["CREDIT_ATTEMPT"])
LAUNCH = ATTEMPT.parent
TASK = os.environ["CREDIT_TASK"]
LEADS = (
    json.loads((ATTEMPT / "topology.json").read_text())["tasks"][TASK]["nodes"][0]["name"]
    == (os.environ["CREDIT_NODE"])
)


def wait(found):
    """Until it is so; the test is given up long before this is."""
    deadline = time.monotonic() + 300
    while not found():
        if time.monotonic() > deadline:
            sys.exit(99)
        time.sleep(0.02)


def mark(name, text=""):
    """Says something to the test, in the run directory."""
    partial = LAUNCH.parent / f".{name}.{os.getpid()}"
    partial.write_text(text)
    partial.replace(LAUNCH.parent / name)


def count(name):
    """How often this was called with the name."""
    with (LAUNCH.parent / name).open("a") as file:
        file.write("x")
    return (LAUNCH.parent / name).stat().st_size


def finish():
    """The run is complete."""
    if LEADS:
        (LAUNCH / "DONE").touch()


def done_when(name):
    """Is done once the test, or another task, has made this file."""
    wait(lambda: (LAUNCH.parent / name).exists())
    finish()


def crash():
    """Fails with a traceback."""
    raise RuntimeError("the card fell off the bus")


def crash_once():
    """Fails in the first attempt, has a checkpoint then."""
    if ATTEMPT.name == "attempt-001":
        (LAUNCH / "progress").write_text("3")
        crash()
    finish()


def hopeless():
    """Knows that another try does not help."""
    (ATTEMPT / "failure.json").write_text(
        json.dumps({"reason": "the disk is full", "retry": False})
    )
    sys.exit(1)


def silent():
    """Ends as if all were well, but nothing is done."""


def honour_stop():
    """Saves when it is told to."""
    mark("started")
    wait((ATTEMPT / "STOP").exists)
    (ATTEMPT / "STOPPED").write_text('{"step": 4}')


def ignore_stop():
    """Goes on, whatever it is told."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if TASK == "trainer":
        mark("started", str(os.getpid()))
    wait(lambda: False)


def one_node_fails():
    """The second node fails, the first would wait for it for ever."""
    if not LEADS:
        sys.exit(3)
    wait(lambda: False)


def die_twice():
    """Dies in its first two lives; the third one lets the run end."""
    if count("lives") < 3:
        sys.exit(7)
    mark("third life")
    wait(lambda: False)


def die():
    """Dies at once."""
    sys.exit(7)


def serve():
    """Says where it serves, politely ends."""
    signal.signal(signal.SIGTERM, lambda *_: (mark("asked to end"), sys.exit(0)))
    mark("served", sys.argv[2])
    wait(lambda: False)


def tell():
    """Says which variables it has."""
    mark("variables.json", json.dumps({name: os.environ[name] for name in sys.argv[2:]}))
    finish()


def checksum():
    """Shows that it has these variables, but not what they are."""
    text = "".join(os.environ[name] for name in sys.argv[2:])
    (ATTEMPT / "sum").write_text(hashlib.sha256(text.encode()).hexdigest())
    wait(lambda: False)


def family():
    """Has a child in a session of its own that ignores SIGTERM; the test wants both to go."""
    ignore = "import signal, time; signal.signal(15, 1); time.sleep(300)"
    child = subprocess.Popen([sys.executable, "-c", ignore], start_new_session=True)
    mark("pids", f"{os.getpid()} {child.pid}")
    wait(lambda: False)


if __name__ == "__main__":
    acts = {name: act for name, act in globals().items() if callable(act)}
    sys.stdout.write(f"{TASK} on {os.environ['CREDIT_NODE']}: {sys.argv[1]}\n")
    sys.stdout.flush()
    if sys.argv[1] == "done_when":
        done_when(sys.argv[2])
    else:
        acts[sys.argv[1]]()
