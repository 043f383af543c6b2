"""What ends a benchmark although its input was right."""


class BenchmarkFailed(RuntimeError):
    """One of our backends is wrong, or a process died; the message says what happened."""
