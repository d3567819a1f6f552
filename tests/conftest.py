"""What tests of several rooms need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

RunDragoman = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of corpora and reference numbers beside the repository; where it is not, the test is skipped."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the folder `shared` beside the repository")
    return folder


@pytest.fixture
def dragoman() -> RunDragoman:
    """`dragoman("score", folder, stdin=b"...")`: the command line in a process of its own, bytes in and bytes out."""

    def run(*arguments: object, stdin: bytes = b"", timeout: float = 300, **environment: str):
        return subprocess.run(
            [sys.executable, "-m", "dragoman", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            timeout=timeout,
            env={**os.environ, **environment},
            check=False,
        )

    return run
