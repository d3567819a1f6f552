"""`--threads`, as every verb that computes has it."""

from __future__ import annotations

from typing import Annotated

import typer

MOST_THREADS = 1024
"""No machine has more cores, and the libraries below take no number that is far larger."""

Threads = Annotated[int | None, typer.Option(min=1, max=MOST_THREADS, help="Processor threads.")]


def use_threads(threads: int | None) -> None:
    """Compute with so many threads; None leaves it to PyTorch."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
