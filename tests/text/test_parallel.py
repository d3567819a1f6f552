from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dragoman.text.parallel import break_line, suspicious_pair


@pytest.mark.parametrize("surplus", [1, 2, 5])
@pytest.mark.parametrize("at", [0, 1, 250, 998])
def test_the_place_of_missing_lines_is_found(at: int, surplus: int) -> None:
    random = np.random.default_rng(at * 10 + surplus)
    src = random.integers(5, 120, 1000).astype(np.int32)
    full = np.maximum(1, (src / 3 * random.uniform(0.8, 1.25, 1000))).astype(np.int32)
    tgt = np.delete(full, range(at, min(at + surplus, 1000)))
    surplus = 1000 - len(tgt)
    assert abs(break_line(src, tgt, surplus) - at) <= 5
    assert abs(break_line(tgt, src, -surplus) - at) <= 5


def test_an_empty_side() -> None:
    nothing = np.zeros(0, dtype=np.int32)
    assert break_line(np.array([3, 4], dtype=np.int32), nothing, 2) == 0


def test_the_message_shows_both_lines(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one two\n" + "x" * 100 + "\nyes\nthree four five\n", "utf-8")
    (tmp_path / "b").write_text("ein zwei\nja\ndrei vier fünf\n", "utf-8")
    told = suspicious_pair(str(tmp_path / "a"), str(tmp_path / "b"), 4, 3)
    assert told == f'the first suspicious pair is line 2 ("{"x" * 60}…" / "ja")'
