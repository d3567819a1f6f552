"""`metrics.jsonl`: one object a line, written as training goes; after a resume each step stands there once."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dragoman.checkpoints.atomic import write_file
from dragoman.errors import ModelError


class Metrics:
    """The file, open for appending."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line. A number that is not finite becomes null, since JSON has no other word for it."""
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        try:
            with self.path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(clean, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ModelError(f"{self.path} cannot be written: {error.strerror}") from None

    def records(self) -> Iterator[dict[str, Any]]:
        """What stands there; a last line that a kill cut short is left out."""
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record

    def go_back_to(self, step: int, validated: int) -> None:
        """Drop what was written after `step`, and of validations after `validated`: training goes on from there."""
        lasts = {"dev": min(step, validated), "average": -1}
        kept = [r for r in self.records() if int(r.get("step", 0)) <= lasts.get(str(r.get("kind")), step)]
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
        write_file(self.path, text.encode())

    def sync(self) -> None:
        """Put the lines on the disk itself, before a checkpoint that says they are there."""
        if self.path.exists():
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
