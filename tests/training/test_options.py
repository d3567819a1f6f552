"""`[training]`: its defaults are the paper's, and all that is wrong with it is said at once."""

from __future__ import annotations

import pytest

from dragoman import config
from dragoman.errors import ConfigError
from dragoman.training.optimizer import Adam, AdamW
from dragoman.training.options import LENGTHS_AND_INTERVALS, TrainingConfig
from dragoman.training.schedule import Linear, Noam


def test_the_defaults_are_the_papers() -> None:
    training = TrainingConfig()
    assert (training.max_steps, training.batch_tokens, training.label_smoothing) == (100_000, 25_000, 0.1)
    assert (training.optimizer, training.schedule) == (
        Adam(betas=(0.9, 0.98), epsilon=1e-9),
        Noam(warmup_steps=4000, factor=1.0),
    )
    assert training.clip_norm is None


def test_tables_pick_their_kind() -> None:
    training = config.build(
        TrainingConfig, {"optimizer": {"kind": "adamw"}, "schedule": {"kind": "linear", "peak": 0.1}}
    )
    assert training.optimizer == AdamW()
    assert training.schedule == Linear(peak=0.1)
    assert config.build(TrainingConfig, {"schedule": {"warmup_steps": 7}}).schedule == Noam(warmup_steps=7)


def test_every_fault_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        config.build(TrainingConfig, {"batch_tokens": 0, "accumulation": -1, "label_smoothing": 1.0, "ema": 2.0})
    for name in ("batch_tokens", "accumulation", "label_smoothing", "ema"):
        assert name in str(caught.value)
    with pytest.raises(ConfigError, match="did you mean 'accumulation'"):
        config.build(TrainingConfig, {"acumulation": 2})
    with pytest.raises(ValueError, match="training must end"):
        TrainingConfig(max_steps=None)
    with pytest.raises(ValueError, match="validate_bleu must be true"):
        TrainingConfig(metric="bleu", validate_bleu=False)


def test_lengths_and_intervals_are_keys_of_training() -> None:
    assert {*LENGTHS_AND_INTERVALS} <= {*TrainingConfig.__dataclass_fields__}
