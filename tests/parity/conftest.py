"""What several of the parity tests need: our native code as other processors would compile it."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.model import native

NEEDED = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}
"""Processors to compile for, and what this one must have to run the result."""


@pytest.fixture(params=NEEDED)
def use_code_for_another_processor(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Call it with the name of a C++ source: whoever loads that one gets it compiled for another processor."""
    if platform.machine() != "x86_64" or NEEDED[request.param] not in native._processor():
        pytest.skip(f"this processor cannot run code for {request.param}")

    def use(source: str) -> None:
        flags = [flag.replace("native", request.param) for flag in native.FLAGS[".cpp"]]
        monkeypatch.setitem(native.FLAGS, ".cpp", flags)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        library = native.loaded.__wrapped__(source)
        if library is None:
            pytest.skip("no C++ compiler here")
        monkeypatch.setattr(native, "loaded", lambda name: library)

    return use
