"""What ends a command although its input was right."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}


class FailedProcess(RuntimeError):
    """A process that the command started, or talks to, failed; the message says how."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError of the block names the file; that of a write alone does not say which."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, f"cannot write ({error.strerror})", str(path)) from error


def lasts(error: OSError) -> bool:
    """Trying again ends the same way: the disk or the quota is full, or may not be written to."""
    return error.errno in _LASTING
