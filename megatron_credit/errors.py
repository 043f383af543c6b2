"""What ends a command although its input was right."""


class FailedProcess(RuntimeError):
    """A process that the command started, or talks to, failed; the message says how."""
