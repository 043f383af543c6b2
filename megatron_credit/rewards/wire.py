"""Messages between the pool and its workers: a length in four bytes, then that much JSON."""

import json
import struct
from typing import Any, BinaryIO

LENGTH = struct.Struct(">I")
MAX_BYTES = 256 * 2**20


def packed(message: Any) -> bytes:
    """The message's bytes; TypeError when it is not JSON."""
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


def receive(stream: BinaryIO) -> Any:
    """The next message; EOFError when the other side is gone, ValueError on anything else."""
    (length,) = LENGTH.unpack(_exactly(stream, LENGTH.size))
    if length > MAX_BYTES:
        raise ValueError(f"a message of {length} bytes is none of ours")
    return json.loads(_exactly(stream, length))


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if data is None or len(data) < size:
        raise EOFError("the other side closed the connection")
    return data
