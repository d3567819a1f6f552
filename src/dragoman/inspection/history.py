"""What `metrics.jsonl` tells of a training: its curves, and the few facts that one asks first."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dragoman.checkpoints.store import METRICS
from dragoman.errors import DataError

Record = dict[str, float]


@dataclass(frozen=True)
class History:
    """The records of a training, by step; empty for a model that was not trained here."""

    train: list[Record] = field(default_factory=list)
    dev: list[Record] = field(default_factory=list)

    def curve(self, kind: str, key: str) -> tuple[list[float], list[float]]:
        """(steps, values) of `key` in the "train" or "dev" records; records without a finite value are passed over."""
        records = self.train if kind == "train" else self.dev
        points = [(record["step"], record[key]) for record in records if key in record]
        return [step for step, _ in points], [value for _, value in points]

    def facts(self) -> dict[str, float]:
        """`steps`, `last_loss`, `last_nll`, `tokens` and `seconds` (where recorded), `best_…` with its step.

        A fact whose record is missing is missing here.
        """
        facts: dict[str, float] = {}
        everything = self.train + self.dev
        if everything:
            facts["steps"] = max(record["step"] for record in everything)
        for key, name in (("loss", "last_loss"), ("nll", "last_nll"), ("lr", "last_lr")):
            values = self.curve("train", key)[1]
            if values:
                facts[name] = values[-1]
        for key, best in (("bleu", max), ("chrf", max), ("loss", min), ("perplexity", min)):
            steps, values = self.curve("dev", key)
            if values:
                facts[f"best_dev_{key}"] = best(values)
                facts[f"best_dev_{key}_step"] = steps[values.index(best(values))]
        return facts


def read_history(folder: Path) -> History:
    """The history in a model folder. A last line that was cut by a crash is left out; other damage is a DataError."""
    path = folder / METRICS
    if not path.is_file():
        return History()
    lines = path.read_bytes().split(b"\n")
    ended = not lines[-1]
    steps: dict[str, dict[float, Record]] = {"train": {}, "dev": {}}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
            kind, step = record["kind"], record["step"]
        except (ValueError, KeyError, TypeError):
            if number == len(lines) and not ended:
                continue
            raise DataError(f"{path}, line {number}: not a record of training (JSON with kind and step)") from None
        if kind in steps:
            steps[kind][step] = {
                key: value
                for key, value in record.items()
                if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            }
    return History(*([by_step[step] for step in sorted(by_step)] for by_step in (steps["train"], steps["dev"])))
