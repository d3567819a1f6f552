"""The training loop: a generator that makes one update after the other and yields a report of each.

What is particular to a run stands elsewhere: the caller logs, validates and saves between two reports. An update
depends on the weights, the optimiser, the step and the place in the data alone; even its dropout is drawn from a seed
made of the run's seed, that place and the rank. So there is no random state that could be lost.

The loss is summed over target tokens and divided by their number in the whole update, on all ranks and in all
micro-batches: however the same pairs are cut, the gradient is the same.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dragoman.batches.stream import Position
from dragoman.errors import TrainingError
from dragoman.training import gradients, parallel
from dragoman.training.ema import Ema
from dragoman.training.feed import Share
from dragoman.training.optimizer import Muon
from dragoman.training.options import TrainingConfig
from dragoman.training.precision import LossScale, choose
from dragoman.training.schedule import Progress

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Report:
    """One update."""

    step: int
    """Updates so far, from 1."""
    epoch: int
    """The pass over the data, from 0."""
    loss: float
    """Smoothed, per target token of the update (EOS counts, padding does not)."""
    nll: float
    """The same unsmoothed: perplexity is its exponential."""
    lr: float
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Target tokens, EOS counted, padding not."""
    src_padded: int
    tgt_padded: int
    """Positions on each side, padding counted."""
    seconds: float
    """That this update took, waiting for its data included."""
    minutes: float
    """Since the first update of the run, validations and earlier parts of a resumed run included."""
    skipped: int
    """Updates so far that were left out, because a loss or gradient was not finite."""
    empty: int
    """Batches so far without a target token."""
    stop: signal.Signals | None = None
    """The signal that some rank was sent: this is the last report."""


class Loop:
    """The state of training between two updates, and the update."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        *,
        d_model: int,
        pad_id: int,
        world: parallel.World | None = None,
        total_steps: int | None = None,
        beat: Callable[[], None] = lambda: None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`model` is moved to the world's device. `total_steps`: after which training ends, where that is known."""
        self.config = config
        self.d_model = d_model
        self.world = world or parallel.World()
        self.total_steps = total_steps
        self.beat, self.warn = beat, warn
        self.precision = choose(config.precision, self.world.device)
        self.model = model.to(self.world.device)
        self.gradients = gradients.choose(self.model, config, pad_id, self.world, self.precision, beat)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = config.optimizer.build(self.model)
        self.scale = LossScale.of(self.precision)
        self.ema = Ema(self.model, config.ema) if config.ema is not None else None
        self.step = 0
        self.schedule_step = 0
        self.position = Position()
        self.minutes = 0.0
        self.skipped = 0
        self.empty = 0
        self._in_a_row = 0
        self._norm = 0.0
        self._is_apart = False
        self._signal: signal.Signals | None = None

    def request_stop(self, number: signal.Signals) -> None:
        """End after the update that is under way, on all ranks: what a signal handler calls."""
        self._signal = number

    def run(self, shares: Iterable[Share]) -> Iterator[Report]:
        """Make updates from `shares` until an end of the config is reached or a stop is requested."""
        earlier = self.minutes
        start = time.perf_counter()
        source = iter(shares)
        while not self.is_done():
            begun = time.perf_counter()
            share = next(source)
            self.beat()
            report = self.update(share, begun, earlier + (begun - start) / 60)
            if report is not None:
                yield report
                if report.stop is not None:
                    return

    def is_done(self) -> bool:
        """Whether an end of the config is reached."""
        config = self.config
        return (
            (config.max_steps is not None and self.step >= config.max_steps)
            or (config.max_epochs is not None and self.position.epoch >= config.max_epochs)
            or (config.max_minutes is not None and self.minutes >= config.max_minutes)
        )

    def update(self, share: Share, begun: float | None = None, minutes: float = 0.0) -> Report | None:
        """One update. None where it was left out: no target token in it, or a gradient that is not finite.

        Raises TrainingError where that happens too often in a row.
        """
        begun = time.perf_counter() if begun is None else begun
        self.position = share.next
        if share.n_tokens == 0:
            self.empty += 1
            return None
        with self.gradients.alone():
            return self._update(share, begun, minutes)

    def _update(self, share: Share, begun: float, minutes: float) -> Report | None:
        self.model.train()
        if self.config.scheduled_sampling:
            done = self._progress().done(self.schedule_step + 1, since=1, follows="minutes")
            self.gradients.sample(self.config.scheduled_sampling * done)
        loss, plain = self.gradients.of(share, self.scale.value, self._seed(share.position))
        tokens: float = sum(batch.n_tokens for batch in share.batches)
        padded = [
            sum(x.numel() for x in side) for side in zip(*((b.src, b.tgt_out) for b in share.batches), strict=True)
        ]
        sent = [float(self._signal == number) for number in SIGNALS]
        now = minutes + (time.perf_counter() - begun) / 60
        first = now if self.world.is_first else 0.0
        before = self._norm if self.world.is_first else 0.0
        loss, plain, tokens, src_padded, tgt_padded, self.minutes, before, apart, *sent = self.world.sum(
            [loss, plain, tokens, *padded, first, before, float(self._is_apart), *sent]
        )
        if apart:
            self._check_gradients()
        self._is_apart = parallel.is_apart(self._norm, before)  # told an update later: it costs no message of its own
        norm = self._unscaled_norm(share.n_tokens / tokens)
        rate = self.rate()
        # The norm is that of the sum over all ranks, so all come to the same decision.
        finite = bool(np.isfinite(norm)) and bool(np.isfinite(loss))
        if not finite:
            self._skip(share.position, norm, loss)
            return None
        self._norm = norm
        self.scale.update(True)
        self._in_a_row = 0
        self._apply(rate, norm)
        self.step += 1
        self.schedule_step += 1
        if self.ema is not None:
            self.ema.update(self.step)
        return Report(
            step=self.step,
            epoch=share.position.epoch,
            loss=loss / tokens,
            nll=plain / tokens,
            lr=rate,
            grad_norm=norm,
            tokens=int(tokens),
            src_padded=int(src_padded),
            tgt_padded=int(tgt_padded),
            seconds=time.perf_counter() - begun,
            minutes=self.minutes,
            skipped=self.skipped,
            empty=self.empty,
            stop=next((number for number, count in zip(SIGNALS, sent, strict=True) if count), None),
        )

    def try_out(self, share: Share) -> None:
        """Compute a share and forget it: memory that does not suffice shows now and not hours later.

        Where a compiled model fails, a warning is given and the model as it is takes over.
        """
        self.model.train()
        if self.config.scheduled_sampling:
            self.gradients.sample(self.config.scheduled_sampling)
        means = [] if self.optimizer.state else self._room_for_means()
        try:
            self.gradients.of(share, self.scale.value, 0)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not self.gradients.fall_back(error):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.warn(f"torch.compile does not work here ({reason}); training goes on without it")
            self.optimizer.zero_grad(set_to_none=True)
            self.gradients.of(share, self.scale.value, 0)
        del means
        self.optimizer.zero_grad(set_to_none=True)

    def _room_for_means(self) -> list[Tensor]:
        """As much memory as the optimiser will take at its first step: Adam's two means of each parameter, or Muon's
        one and the copies that it makes on its way."""
        each = 5 if isinstance(self.config.optimizer, Muon) else 2
        return [torch.empty_like(p) for p in self.parameters.values() if p.requires_grad for _ in range(each)]

    def rate(self) -> float:
        """The learning rate of the next update."""
        return self.config.schedule.rate(self.schedule_step + 1, self.d_model, self._progress())

    def _progress(self) -> Progress:
        return Progress(self.total_steps, self.minutes, self.config.max_minutes)

    def _seed(self, position: Position) -> int:
        words = np.random.SeedSequence([self.config.seed, *position, self.world.rank]).generate_state(2)
        return int(words[0]) << 31 ^ int(words[1])

    def _unscaled_norm(self, planned: float) -> float:
        """Take the scale out of the gradients, and put in the tokens `planned` per actual one; give their norm over all
        parameters and ranks."""
        found = [p.grad for p in self.parameters.values() if p.grad is not None]
        if self.scale.value != 1.0 or planned != 1.0:
            torch._foreach_mul_(found, planned / self.scale.value)
        norm = torch.nn.utils.get_total_norm(found)
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return float(whole)

    def _apply(self, rate: float, norm: float) -> None:
        limit = self.config.clip_norm
        if limit is not None and norm > limit:
            torch._foreach_mul_([p.grad for p in self.parameters.values() if p.grad is not None], limit / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _skip(self, position: Position, norm: float, loss: float) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.scale.update(False):
            return
        self.skipped += 1
        self._in_a_row += 1
        what = f"loss {loss:g}, gradient norm {norm:g}"
        self.warn(f"the update after step {self.step} is left out: it is not finite ({what})")
        if self._in_a_row >= self.config.max_skipped:
            advice = "a lower peak of the learning rate or clip_norm = 1.0 helps against most causes"
            if self.precision == "float16":
                advice += ', and precision = "float32" shows whether float16 is one'
            raise TrainingError(
                f"{self._in_a_row} updates in a row were not finite after step {self.step}, at epoch {position.epoch}, "
                f"batch {position.batch} ({what}); {advice}"
            )

    # -- what resuming needs -----------------------------------------------------------------------------------------

    def _check_gradients(self) -> None:
        """TrainingError where a rank's gradients are not those of the others; every rank must call this."""
        if self.config.parallel == "ddp":
            found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            parallel.check_copies(found, self.world, self.step, "gradients")
        self.warn(f"the gradient norms of the ranks differed after step {self.step}; now they agree")

    def check_copies(self) -> None:
        """TrainingError where a rank's weights are not those of the others; every rank must call this."""
        if self.config.parallel == "ddp":
            parallel.check_copies(self.parameters, self.world, self.step)

    def check_finite(self) -> None:
        """TrainingError on all ranks where a weight, or the running mean of one, is not finite on any; every rank must
        call this."""
        tensors = self.model.state_dict() | (self.ema.named_means() if self.ema is not None else {})
        names = list(tensors)
        bad = (place for place, name in enumerate(names) if not bool(parallel.local(tensors[name]).isfinite().all()))
        left = self.world.largest(len(names) - next(bad, len(names)))
        if left:
            name = names[len(names) - left]
            raise TrainingError(f"after step {self.step} the weights are not finite, {name} among them")

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The state of the optimiser as `optimizer.<parameter>.<what>`, as whole as `weights`; every rank must call
        this."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        return parallel.whole(
            {
                f"optimizer.{names[parameter]}.{what}": value
                for parameter, state in self.optimizer.state.items()
                for what, value in state.items()
                if isinstance(value, Tensor)
            },
            self.world,
        )

    def weights(self) -> dict[str, Tensor]:
        """The weights as they are trained, tied names sharing a tensor; every rank must call this.

        Sharded ones are whole on the first rank, in main memory, and left out on the others.
        """
        return self._named(self.parameters)

    def kept_weights(self) -> dict[str, Tensor]:
        """The weights of the model as it would be used: the running mean where there is one. As `weights`."""
        return self._named(self.ema.named_means()) if self.ema is not None else self.weights()

    def _named(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's state with `parameters` in it, under every name that each parameter has."""
        first: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        whole = parallel.whole(parameters, self.world)
        all_names = dict(self.model.named_parameters(remove_duplicate=False))
        others = {name: tensor for name, tensor in self.model.state_dict().items() if name not in all_names}
        named = {name: first[parameter] for name, parameter in all_names.items() if first[parameter] in whole}
        return {name: whole[source] for name, source in named.items()} | others

    def facts(self) -> dict[str, Any]:
        """All else that resuming needs, as plain values."""
        return {
            "step": self.step,
            "schedule_step": self.schedule_step,
            "position": list(self.position),
            "minutes": self.minutes,
            "skipped": self.skipped,
            "skipped_in_a_row": self._in_a_row,
            "empty": self.empty,
            "loss_scale": self.scale.value,
            "loss_scale_good": self.scale.good,
        }

    @torch.no_grad()
    def restore_weights(self, weights: Mapping[str, Tensor], means: Mapping[str, Tensor]) -> None:
        """Put back weights, and the running mean where there is one. The names must be those of the model."""
        for name, target in self.model.state_dict().items():
            target.copy_(parallel.like(weights[name], target))
        if self.ema is not None:
            for name, mean in self.ema.named_means().items():
                mean.copy_(parallel.like(means.get(name, weights[name]), mean))

    @torch.no_grad()
    def restore_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `optimizer_tensors` gave. TrainingError where another optimiser gave it."""
        kept = {name.rpartition(".")[2] for name in tensors if name.startswith("optimizer.")}
        if kept and ("momentum" in kept) != isinstance(self.config.optimizer, Muon):
            raise TrainingError(
                f'the checkpoint holds the state of another optimiser than "{self.config.optimizer.kind}"; '
                "--reset optimizer starts afresh with this one"
            )
        for name, parameter in self.parameters.items():
            prefix = f"optimizer.{name}."
            state = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
            self.optimizer.state[parameter] = {
                # The count of steps is a number, on the device all the same: the fused optimisers want it there.
                what: parallel.like(value, parameter)
                if value.shape == parameter.shape
                else value.to(parameter.device, copy=True)
                for what, value in state.items()
            }

    def restore_facts(self, facts: Mapping[str, Any], reset: frozenset[str] = frozenset()) -> None:
        """Put back what `facts` gave, but for what `reset` names: `step`, `schedule`, `data`."""
        if "step" not in reset:
            self.step = int(facts["step"])
            self.minutes = float(facts["minutes"])
        if "schedule" not in reset:
            self.schedule_step = int(facts["schedule_step"])
        if "data" not in reset:
            self.position = Position(*facts["position"])
        self.skipped, self.empty = int(facts["skipped"]), int(facts["empty"])
        self._in_a_row = int(facts["skipped_in_a_row"])
        self.scale.value, self.scale.good = float(facts["loss_scale"]), int(facts["loss_scale_good"])
