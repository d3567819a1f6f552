"""`[training]` of the TOML file. The defaults are the paper's base model (§5)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from dragoman.training.optimizer import Adam, Muon, Optimizer
from dragoman.training.schedule import Noam, Schedule

Precision = Literal["auto", "float32", "bfloat16", "float16"]
Metric = Literal["loss", "bleu", "chrf"]

LENGTHS_AND_INTERVALS = (
    *("max_steps", "max_epochs", "max_minutes", "log_every", "validate_every", "save_every"),
    *("keep_last", "keep_best", "average_last", "patience", "hang_seconds", "tensorboard"),
)
"""What `--set` may change when a run is resumed: nothing that alters what an update computes."""

WAYS = ("accumulation", "activation_checkpointing", "workers")
"""What it may change too, for a run that ends for want of memory: how an update is computed. Its gradients are the same
up to rounding; dropout draws other masks, but for `workers`, which change nothing."""

LONGEST_SILENCE = 1e9
"""Seconds that a timer of the operating system still counts."""


@dataclass(frozen=True)
class TrainingConfig:
    """How long, on how much at a time, with what loss and optimiser, and what is kept."""

    max_steps: int | None = 100_000
    """Updates after which training ends."""
    max_epochs: int | None = None
    """Passes over the corpus after which training ends, if that comes first."""
    max_minutes: float | None = None
    """Minutes after which training ends, validation included, if that comes first."""
    batch_tokens: int = 25_000
    """Padded tokens a side and an update, whatever the devices and the accumulation (§5.1: about 25,000)."""
    accumulation: int = 1
    """Micro-batches that each device cuts its share of an update into: less memory, the same result."""
    workers: int = 0
    """Threads that prepare batches ahead of the update; the result does not depend on their number."""
    lanes: int = 0
    """Threads on a CPU that each compute a part of every update, with one core each; 0: one for each core."""
    seed: int = 1
    """Of initial weights, order of batches and dropout."""
    subword_regularisation: float = 0.0
    """Cut sentences anew each time they are seen: SentencePiece's alpha, for BPE the share of merges left out (0.1)."""
    scheduled_sampling: float = 0.0
    """Share of target inputs that are the model's own guesses at the end of training. It rises linearly from 0 with the
    updates or, under `max_minutes` and where that is more, with the minutes; a run is then not repeated to the bit."""
    r_drop: float = 0.0
    """Every pair is computed twice, under two draws of dropout that must agree: the weight of their divergence (R-Drop,
    arXiv:2106.14448: 5). For small corpora, where it costs twice the time and is worth it."""
    label_smoothing: float = 0.1
    """epsilon_ls of §5.4."""
    smoothing: Literal["paper", "uniform", "skip_pad"] = "paper"
    """Where the smoothed probability goes: to all other tokens, to all tokens, or to all others but padding."""
    clip_norm: float | None = None
    """Gradients with a larger norm are scaled down to it; the paper does not clip."""
    precision: Precision = "auto"
    """Of matrix products; weights stay in float32. `auto`: bfloat16 where the hardware multiplies it fast."""
    compile: bool = False
    """Run the model through torch.compile; where that fails, a warning and the model as it is."""
    activation_checkpointing: bool = False
    """Compute each layer twice and remember less: for models that would not fit."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: a whole copy of the model on each device, or a share of it (FSDP2)."""
    log_every: int = 50
    """Updates between lines of metrics.jsonl."""
    validate_every: int = 1000
    """Updates between validations on `data.dev`."""
    validate_bleu: bool = True
    """Translate the dev set at each validation (greedily), for BLEU and chrF beside the loss."""
    save_every: int = 1000
    """Updates between checkpoints."""
    keep_last: int = 2
    """Checkpoints to resume from that are kept, at least one."""
    keep_best: int = 1
    """Models that are kept by `metric`; the best is the folder's own, the others stand in `best/`."""
    average_last: int = 1
    """At the end the model is the mean of that many last checkpoints (§6.1: 5 for base, 20 for big); 1: no mean."""
    metric: Metric = "loss"
    """What makes a model the best, and what early stopping watches, on the dev set."""
    patience: int | None = None
    """Validations without a better `metric` after which training ends; a tie is not better."""
    tensorboard: bool = False
    """Write the curves for TensorBoard too, to `training/tensorboard` (needs the extra `lab`)."""
    ema: float | None = None
    """Decay of a running mean of the weights, which is then what is validated and kept; none in the paper."""
    max_skipped: int = 20
    """Updates in a row with a loss or gradient that is not finite after which training gives up."""
    hang_seconds: float = 600.0
    """Seconds without a sign of life after which every device shows its stack and the job ends."""
    optimizer: Optimizer = field(default_factory=Adam)
    """What turns gradients into new weights."""
    schedule: Schedule = field(default_factory=Noam)
    """The learning rate."""

    def __post_init__(self) -> None:
        counts = (
            *("max_steps", "max_epochs", "batch_tokens", "accumulation", "log_every", "validate_every"),
            *("save_every", "keep_last", "keep_best", "average_last", "patience", "max_skipped"),
        )
        wrong = [
            f"{name} must be at least 1, not {value}"
            for name in counts
            if (value := getattr(self, name)) is not None and value < 1
        ]
        wrong += [
            f"{name} must be at least 0 and finite, not {value}"
            for name in ("workers", "lanes", "r_drop")
            if not 0 <= (value := getattr(self, name)) < math.inf
        ]
        if not 0 <= self.seed < 2**63:
            wrong.append(f"seed must be at least 0 and below 2^63, not {self.seed}")
        wrong += [
            f"{name} must be at least 0 and below 1, not {value}"
            for name in ("label_smoothing", "subword_regularisation", "scheduled_sampling")
            if not 0.0 <= (value := getattr(self, name)) < 1.0
        ]
        if self.ema is not None and not 0.0 < self.ema < 1.0:
            wrong.append(f"ema must be between 0 and 1, not {self.ema}")
        wrong += [
            f"{name} must be above 0, not {value}"
            for name in ("max_minutes", "clip_norm", "hang_seconds")
            if (value := getattr(self, name)) is not None and not value > 0
        ]
        if self.hang_seconds > LONGEST_SILENCE:
            wrong.append(
                f"hang_seconds must be at most {LONGEST_SILENCE:.0e}, which is thirty years and as good as never, "
                f"not {self.hang_seconds}"
            )
        # Infinitely many minutes are how --set takes away a file's limit, and no end.
        if self.max_steps is None and self.max_epochs is None and self.max_minutes in (None, math.inf):
            wrong.append("give one of max_steps, max_epochs and max_minutes: training must end")
        if self.parallel == "fsdp" and isinstance(self.optimizer, Muon):
            wrong.append('Muon needs whole matrices, which no device has with parallel = "fsdp": take adamw, or ddp')
        if self.metric != "loss" and not self.validate_bleu:
            wrong.append(f'metric = "{self.metric}" needs the dev set translated: validate_bleu must be true')
        if wrong:
            raise ValueError("; ".join(wrong))
