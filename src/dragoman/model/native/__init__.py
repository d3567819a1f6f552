"""Kernels in C and C++, compiled on first use where a compiler is at hand.

A library is built once for a processor, in a few seconds, and kept in the user's cache folder under the hash of its
source, the headers beside it, the compiler and the processor. Nothing depends on one but speed: without it the model
itself does the work.
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

# By a source's ending: its compilers in the order in which they are looked for, and how it is compiled. Sums may be
# taken in another order, which vectorises them; infinities and NaN keep their meaning. -ffast-math would also switch
# denormal numbers off for the whole process when the library is loaded.
COMPILERS = {".c": ("cc", "gcc", "clang"), ".cpp": ("c++", "g++", "clang++")}
FLAGS = {
    ".c": ["-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno"],
    ".cpp": [
        *("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
        *("-fassociative-math", "-freciprocal-math", "-ffp-contract=fast", "-fno-strict-aliasing"),
    ],
}


@functools.cache
def loaded(name: str) -> ctypes.CDLL | None:
    """The source of that name in this folder as a library, or None where it cannot be had. Never raises."""
    folder = resources.files(__package__)
    names = sorted(each.name for each in folder.iterdir() if each.name == name or each.name.endswith(".h"))
    sources = {each: folder.joinpath(each).read_bytes() for each in names}
    ending = Path(name).suffix
    compiler = next((found for each in COMPILERS[ending] if (found := shutil.which(each))), None)
    if compiler is None or platform.system() not in ("Linux", "Darwin"):
        return None
    parts = [*sources.values(), compiler.encode(), " ".join(FLAGS[ending]).encode(), _processor().encode()]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dragoman"
        path = cache / f"{Path(name).stem}-{key}.so"
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            _compile([compiler, *FLAGS[ending]], name, sources, path)
        return ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: there is no home
        return None


def _compile(command: list[str], name: str, sources: dict[str, bytes], path: Path) -> None:
    """Builds beside the target and renames, so that two processes at once are harmless."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        for each, text in sources.items():
            (Path(folder) / each).write_bytes(text)
        built = Path(folder) / "built.so"
        command = [*command, "-shared", "-fPIC", "-o", str(built), str(Path(folder) / name), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        built.replace(path)


def _processor() -> str:
    """What -march=native would look at: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return "|".join(
        [
            platform.machine(),
            platform.processor(),
            *[line for line in lines if line.startswith(("flags", "Features"))][:1],
        ]
    )
