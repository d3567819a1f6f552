"""Which precision is chosen, and the scale that float16 needs."""

from __future__ import annotations

import pytest
import torch

from dragoman.errors import TrainingError
from dragoman.training.precision import LossScale, choose


def test_what_is_asked_for_is_what_is_used() -> None:
    cpu = torch.device("cpu")
    assert choose("float32", cpu) == "float32"
    assert choose("bfloat16", cpu) == "bfloat16"
    assert choose("auto", cpu) in ("float32", "bfloat16")
    with pytest.raises(TrainingError, match="float16 training needs a GPU"):
        choose("float16", cpu)


def test_the_scale_halves_on_overflow_and_doubles_in_quiet_times() -> None:
    scale = LossScale.of("float16")
    scale.patience = 3
    start = scale.value
    assert scale.update(finite=False)  # cured by a smaller scale: not the model's fault
    assert scale.value == start / 2
    for _ in range(3):
        assert not scale.update(finite=True)
    assert scale.value == start
    scale.value = scale.least
    assert not scale.update(finite=False)  # no scale helps any more


def test_the_scale_is_idle_in_the_other_precisions() -> None:
    for chosen in ("float32", "bfloat16"):
        scale = LossScale.of(chosen)
        assert not scale.update(finite=False)
        assert scale.value == 1.0
