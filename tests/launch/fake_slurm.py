"""Slurm's commands as small programs that write down how they were called."""

import os

COMMANDS = {
    "sbatch": """
case "$*" in
  *--test-only*) [ -e "$FAKE/refuse" ] && { cat "$FAKE/refuse" >&2; exit 1; }
                 echo "sbatch: Job 9 to start at 2030-01-01T00:00:00" >&2 ;;
  *) n=$(cat "$FAKE/next" 2>/dev/null || echo 41); n=$((n + 1)); echo $n > "$FAKE/next"; echo $n ;;
esac
""",
    "squeue": '[ -e "$FAKE/queue" ] && cat "$FAKE/queue" || exit 1',
    "sinfo": 'cat "$FAKE/gres" 2>/dev/null || echo "gpu:h100:8(S:0-1)"',
    "scancel": "exit 0",
}


class FakeSlurm:
    """A directory of commands; what they answer and what they were asked."""

    def __init__(self, root, monkeypatch):
        self.root = root
        self.root.mkdir()
        for name, body in COMMANDS.items():
            path = root / name
            path.write_text(f'#!/bin/bash\nFAKE={root}\necho "{name} $*" >> $FAKE/calls\n{body}\n')
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{root}:{os.environ['PATH']}")

    def answers(self, name, text):
        """What a command says from now on: queue, gres, refuse."""
        (self.root / name).write_text(text)

    @property
    def calls(self):
        """Command lines so far."""
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []
