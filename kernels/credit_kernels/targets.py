"""Where Triton runs: kinds of device that have a table of tile sizes, and why it cannot run."""

from importlib.util import find_spec

import torch

INTERPRETER = "interpreter"


def refusal(device: torch.device) -> str | None:
    """Why Triton cannot run on tensors of the device, and what to do; None if it can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    from triton import knobs
    from triton.backends import backends

    if knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return (
            f"Triton runs tensors on {device.type} in its interpreter only; set "
            "TRITON_INTERPRET=1 before Python starts, or use backend='torch'"
        )
    if not any(backend.driver.is_active() for backend in backends.values()):
        return "Triton finds no driver for this GPU"
    return None


def target_of(device: torch.device) -> str:
    """The row of a table of tile sizes that is meant for the device."""
    from triton import knobs

    if knobs.runtime.interpret:
        return INTERPRETER
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    # Consumer Blackwell (12.x) has neither the shared memory nor the instructions of sm_100.
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")
