"""What a run was made with: `training/run.json`, one entry for each time that it was started."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dragoman.checkpoints.atomic import write_file
from dragoman.checkpoints.store import CONFIG, TRAINING

RUN = "run.json"
_PACKAGES = ("dragoman", "torch", "numpy", "sentencepiece", "safetensors", "sacrebleu", "pydantic")


def write(folder: Path, facts: dict[str, Any]) -> None:
    """Add an entry: versions, hardware and flags, and `facts`, such as hashes of the data and the tokenizer."""
    path = folder / TRAINING / RUN
    entries: list[Any] = []
    with contextlib.suppress(OSError, ValueError):
        entries = list(json.loads(path.read_text(encoding="utf-8")))
    path.parent.mkdir(parents=True, exist_ok=True)
    entries.append(surroundings() | {"config_sha256": _sha256(folder / CONFIG)} | facts)
    write_file(path, (json.dumps(entries, indent=2, ensure_ascii=False) + "\n").encode())


def surroundings(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Versions, hardware and flags of this process."""
    cuda = torch.cuda.is_available()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv if command is None else command),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else ["cpu"],
        "cuda": torch.version.cuda,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
