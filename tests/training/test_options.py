"""`[training]`: its defaults are the paper's, and all that is wrong with it is said at once."""

from __future__ import annotations

import math

import pytest

from dragoman import config
from dragoman.errors import ConfigError
from dragoman.training.optimizer import Adam, AdamW
from dragoman.training.options import LENGTHS_AND_INTERVALS, WAYS, TrainingConfig
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
    with pytest.raises(ValueError, match="training must end"):
        TrainingConfig(max_steps=None, max_minutes=math.inf)
    with pytest.raises(ValueError, match="validate_bleu must be true"):
        TrainingConfig(metric="bleu", validate_bleu=False)


WRONG: list[dict[str, object]] = [
    {"seed": -1},
    {"seed": 2**63},
    {"r_drop": math.nan},
    {"r_drop": math.inf},
    {"clip_norm": math.nan},
    {"max_minutes": math.nan},
    {"hang_seconds": math.nan},
    {"hang_seconds": math.inf},
    {"hang_seconds": 1e10},
    {"label_smoothing": math.nan},
    {"ema": math.nan},
    {"optimizer": {"kind": "adam", "epsilon": math.nan}},
    {"optimizer": {"kind": "adam", "betas": [0.9, math.nan]}},
    {"optimizer": {"kind": "adamw", "weight_decay": math.nan}},
    {"optimizer": {"kind": "muon", "momentum": 1.0}},
    {"optimizer": {"kind": "muon", "block": 0}},
    {"schedule": {"kind": "cosine", "floor": math.nan}},
]


@pytest.mark.parametrize("tree", WRONG, ids=str)
def test_numbers_that_nothing_could_be_computed_with_are_refused(tree: dict[str, object]) -> None:
    (name,) = tree
    with pytest.raises(ConfigError, match=rf"{name}\b.* must be "):
        config.build(TrainingConfig, tree)


def test_muon_is_refused_where_no_device_has_a_whole_matrix() -> None:
    with pytest.raises(ConfigError, match=r'Muon needs whole matrices.*parallel = "fsdp"'):
        config.build(TrainingConfig, {"optimizer": {"kind": "muon"}, "parallel": "fsdp"})


def test_an_end_can_be_taken_away_again() -> None:
    assert TrainingConfig(max_minutes=math.inf, clip_norm=math.inf).max_steps == 100_000


def test_what_may_change_are_keys_of_training() -> None:
    assert {*LENGTHS_AND_INTERVALS, *WAYS} <= {*TrainingConfig.__dataclass_fields__}
