"""What is read out of metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.errors import DataError
from dragoman.inspection.history import History, read_history


def test_curves_and_facts(folder: Path) -> None:
    history = read_history(folder)
    assert len(history.train) == 30
    assert history.curve("dev", "bleu") == ([10, 20, 30], [4.0, 12.5, 11.0])
    facts = history.facts()
    assert (facts["best_dev_bleu"], facts["best_dev_bleu_step"]) == (12.5, 20)
    assert (facts["best_dev_perplexity"], facts["best_dev_perplexity_step"]) == (30.0, 30)
    assert facts["last_loss"] == pytest.approx(2.0)
    assert facts["steps"] == 30
    assert "best_dev_chrf" not in facts


def test_no_file_is_no_history(tmp_path: Path) -> None:
    assert read_history(tmp_path) == History()
    assert History().facts() == {}


def test_a_cut_last_line_is_left_out_and_other_damage_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1, "loss": 2.0}\n{"kind": "train", "st', encoding="utf-8")
    assert read_history(tmp_path).train == [{"step": 1, "loss": 2.0}]
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tr\n{"kind": "train", "step": 2}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: not a record"):
        read_history(tmp_path)


def test_a_step_told_twice_counts_once_and_nan_is_no_point(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "train", "step": 2, "loss": 9.0}\n{"kind": "train", "step": 1, "loss": NaN}\n'
        '{"kind": "other", "step": 1}\n{"kind": "train", "step": 2, "loss": 3.0, "note": "x"}\n',
        encoding="utf-8",
    )
    history = read_history(tmp_path)
    assert history.curve("train", "loss") == ([2], [3.0])
    assert history.train == [{"step": 1}, {"step": 2, "loss": 3.0}]
