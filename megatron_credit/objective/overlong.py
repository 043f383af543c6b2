"""DAPO's soft penalty for responses that come close to the length limit (2503.14476)."""


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """0 up to max_length - buffer tokens, then linear down to -1 at max_length and beyond.

    ValueError where the buffer is not between 1 and max_length.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer={buffer} must be between 1 and max_length={max_length}")
    return max(min(max_length - buffer - length, 0) / buffer, -1.0)
