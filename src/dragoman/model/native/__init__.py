"""The kernels of a decoding step, compiled from kernels.cpp where a C++ compiler is at hand.

The library is built once for a processor, in about two seconds, and kept in the user's cache folder. Nothing depends on
it but speed: without it, decoding steps through the model itself.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

# Sums may be taken in another order, which vectorises them; infinities and NaN keep their meaning. -ffast-math would
# also switch denormal numbers off for the whole process when the library is loaded.
FLAGS = [
    "-O3",
    "-march=native",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-freciprocal-math",
]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there is no compiler, no place to keep them, or they do not load."""
    source = resources.files(__package__).joinpath("kernels.cpp").read_bytes()
    key = hashlib.sha256(b"\0".join([source, " ".join(FLAGS).encode(), _processor().encode()])).hexdigest()[:20]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dragoman"
    path = folder / f"kernels-{key}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _compile(source, path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None


def _compile(source: bytes, path: Path) -> None:
    """Builds beside the target and renames, so that two processes at once are harmless. RuntimeError: no compiler."""
    compiler = next(
        (found for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and (found := shutil.which(name))),
        None,
    )
    if compiler is None:
        raise RuntimeError("no C++ compiler")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        text, built = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
        text.write_bytes(source)
        subprocess.run([compiler, *FLAGS, str(text), "-o", str(built)], check=True, capture_output=True, timeout=120)
        built.replace(path)


def _processor() -> str:
    """What -march=native would look at: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return "|".join(
        [platform.machine(), platform.processor(), *[line for line in lines if line.startswith("flags")][:1]]
    )
