"""Where a model may run on this machine."""

from __future__ import annotations

import torch

from dragoman.errors import ConfigError


def check_device(device: str) -> torch.device:
    """The device of that name. Raises ConfigError where PyTorch knows no such device or this machine has none."""
    try:
        wanted = torch.device(device)
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return wanted
