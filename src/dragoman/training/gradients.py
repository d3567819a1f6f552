"""Where gradients come from: autograd through the whole model on any device, or lanes on the cores of a CPU.

Both leave in `.grad` the gradient of the summed loss of the whole update over all ranks, divided by its target tokens,
and give this rank's sums of the smoothed and the plain loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dragoman.batches.batch import gathered, merged
from dragoman.model.fused import use_sdpa
from dragoman.model.transformer import Transformer
from dragoman.training import parallel
from dragoman.training.feed import Share
from dragoman.training.lanes import Lanes
from dragoman.training.loss import chunk_of, projected_loss, r_drop_cross_entropy, smoothed_cross_entropy
from dragoman.training.options import TrainingConfig
from dragoman.training.precision import Chosen, autocast

MOST_RECTANGLES = 8
"""Passes that a micro-batch is cut into: more would be small, and fewer would be padding."""
GPU_RECTANGLE = 8192
"""Tokens a side that a GPU's rectangle should have at least: smaller ones wait for the host."""
SLACK, GPU_SLACK = 2.0, 1.25
"""How much more than its share of an update a rectangle may be: on a GPU little more than what is tried first."""
MERGED_TOKENS = 8192
"""Tokens a side that lanes work through together: enough to be fast, and few enough to bound their memory."""


class Gradients(Protocol):
    """What the loop asks for the gradients of an update."""

    @property
    def how(self) -> str:
        """What computes them, for people to read."""

    def of(self, share: Share, scale: float, seed: int) -> tuple[float, float]:
        """Set the gradients of a share, multiplied by `scale`; the smoothed and the plain loss, summed."""

    def alone(self) -> AbstractContextManager[None]:
        """Around an update: the work between gradients and new weights goes to as many threads as suit it."""

    def sample(self, probability: float) -> None:
        """Let that share of the target inputs be the model's own guesses from now on."""

    def fall_back(self, error: Exception) -> bool:
        """Try to go on without what failed. False: there is nothing to go without."""

    def close(self) -> None:
        """End what runs in the background."""


class LossModule(nn.Module):
    """The model together with its loss: the one module that is compiled, copied to all ranks or sharded."""

    def __init__(self, model: nn.Module, config: TrainingConfig, pad_id: int) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing, self.smoothing, self.pad_id = config.label_smoothing, config.smoothing, pad_id
        self.r_drop = config.r_drop
        self.sampled = 0.0
        self.most_likely: Callable[[Tensor, nn.Module], Tensor] = most_likely

    def forward(self, src: Tensor, tgt_in: Tensor, tgt_out: Tensor) -> tuple[Tensor, Tensor]:
        """src [B, S], tgt_in and tgt_out [B, T] -> smoothed and plain loss, each summed over the targets.

        Families that give their features have the Generator and the loss computed chunk by chunk, so that the logits of
        a whole batch are never held.
        """
        model: Any = self.model
        if self.sampled and self.training:
            tgt_in = self.guess(src, tgt_in)
        r_drop = self.r_drop if model.training else 0.0
        if r_drop:
            src, tgt_in = torch.cat([src, src]), torch.cat([tgt_in, tgt_in])
        if not hasattr(model, "features"):
            logits = model(src, tgt_in)  # [B, T, V]
            if r_drop:
                first, second = logits.chunk(2)
                loss = r_drop_cross_entropy(
                    first, second, tgt_out, self.label_smoothing, self.pad_id, r_drop, self.smoothing
                )
                plain = smoothed_cross_entropy(logits.detach(), torch.cat([tgt_out, tgt_out]), 0.0, self.pad_id)[0]
                return loss, plain / 2.0
            loss, _ = smoothed_cross_entropy(logits, tgt_out, self.label_smoothing, self.pad_id, self.smoothing)
            return loss, smoothed_cross_entropy(logits.detach(), tgt_out, 0.0, self.pad_id)[0]
        x = model.features(src, tgt_in)  # [B, T, D]
        real = tgt_out != self.pad_id
        x = torch.cat([each[real] for each in x.chunk(2)]) if r_drop else x[real]
        generator = model.generator
        low = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        # In float16 the gradients of the logits would vanish: the loss is scaled only behind them.
        x = x.to(torch.float32 if low == torch.float16 else low)
        with torch.autocast(x.device.type, enabled=False):
            return projected_loss(
                x,
                generator.weight,
                generator.bias,
                tgt_out[real],
                self.label_smoothing,
                self.pad_id,
                self.smoothing,
                r_drop=r_drop,
            )

    @torch.no_grad()
    def guess(self, src: Tensor, tgt_in: Tensor) -> Tensor:
        """Scheduled sampling for a Transformer: tgt_in [B, T] with a share of its tokens from a first pass of the model
        itself (Bengio et al. 2015, arXiv:1506.03099; Mihaylova and Martins 2019, arXiv:1906.07651)."""
        model: Any = self.model
        if hasattr(model, "features"):
            guessed = self.most_likely(model.features(src, tgt_in), model.generator)
        else:
            guessed = model(src, tgt_in).argmax(dim=-1)
        guessed = guessed[:, :-1]  # what it expects at 1 ... T - 1
        torch.clear_autocast_cache()  # it holds weights that this pass has cast, without a way back to their gradients
        given = tgt_in[:, 1:]
        drawn = torch.rand(given.shape, device=given.device) < self.sampled
        drawn &= (given != self.pad_id) & (guessed != self.pad_id)
        return torch.cat([tgt_in[:, :1], torch.where(drawn, guessed, given)], dim=1)


def most_likely(x: Tensor, generator: Any) -> Tensor:
    """Features x [B, T, D] -> the token [B, T] of the largest logit at each place; logits are made chunk by chunk."""
    rows = x.flatten(0, 1)
    chunks = rows.split(chunk_of(rows, generator.weight.size(0)))
    return torch.cat([generator(chunk).argmax(dim=-1) for chunk in chunks]).view(x.shape[:-1])


class ByAutograd:
    """Any model on any device, compiled by choice; on several ranks through DDP or FSDP2."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainingConfig,
        pad_id: int,
        world: parallel.World,
        precision: Chosen,
        beat: Callable[[], None],
    ) -> None:
        self.world, self.precision, self.beat = world, precision, beat
        self.compiled = config.compile
        self.most = MOST_RECTANGLES * config.accumulation
        if world.device.type == "cuda":
            self.most = min(self.most, max(config.batch_tokens // (GPU_RECTANGLE * world.size), config.accumulation))
        self.slack = GPU_SLACK if world.device.type == "cuda" else SLACK
        self.sharded = config.parallel == "fsdp" and world.size > 1
        self.how = "PyTorch's autograd"
        self.loss = LossModule(model, config, pad_id)
        if self.compiled:
            # Its loop would be unrolled, and the whole module compiled anew for every number of chunks.
            self.loss.most_likely = cast("Any", torch.compiler).disable(most_likely)
            self.loss.compile(dynamic=True)
        self.wrapped = parallel.wrap(self.loss, model, world, config.parallel)

    def of(self, share: Share, scale: float, seed: int) -> tuple[float, float]:
        torch.manual_seed(seed)
        factor = scale * self.world.size / max(1, share.n_tokens)
        device = self.world.device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        batches = gathered(share.batches, self.loss.pad_id, self.most, self.slack)
        if self.sharded:
            # Each pass puts the weights together, which takes all ranks.
            batches += [batches[0].without_rows()] * (self.world.largest(len(batches)) - len(batches))
        for number, batch in enumerate(batches, start=1):
            parallel.synchronise(self.wrapped, last=number == len(batches))
            batch = batch.to(device)
            with autocast(self.precision, device):
                loss, plain = self.wrapped(batch.src, batch.tgt_in, batch.tgt_out)
            (loss * factor).backward()
            total += torch.stack([loss.detach(), plain.detach()])
            self.beat()
        loss_sum, plain_sum = total.tolist()
        return loss_sum, plain_sum

    def alone(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def sample(self, probability: float) -> None:
        self.loss.sampled = probability

    def fall_back(self, error: Exception) -> bool:
        if not self.compiled:
            return False
        self.compiled = False
        self.loss._compiled_call_impl = None
        return True

    def close(self) -> None:
        """Nothing runs in the background."""


class InLanes:
    """The 2017 model on a CPU: threads with one core each, and kernels of our own."""

    def __init__(
        self,
        model: Transformer,
        config: TrainingConfig,
        world: parallel.World,
        precision: Literal["float32", "bfloat16"],
        beat: Callable[[], None],
    ) -> None:
        self.config, self.world, self.beat = config, world, beat
        self.pad_id = model.pad_id
        self.parameters = list(model.parameters())
        self.lanes = Lanes(model, config.lanes or torch.get_num_threads(), precision)

    @property
    def how(self) -> str:
        if self.lanes.kernels.name == "compiled":
            products = " and matrix products" if self.lanes.products == "compiled" else ", PyTorch's matrix products"
            return f"{self.lanes.n} lanes, compiled kernels{products}"
        why = "a C compiler and widths (d_model, d_ff, a head's) that are multiples of 16 would have compiled ones"
        return f"{self.lanes.n} lanes, PyTorch's kernels ({why})"

    def of(self, share: Share, scale: float, seed: int) -> tuple[float, float]:
        loss = plain = 0.0
        # Lanes compute nothing at padding, so tiles need not stay rectangles.
        config = self.config
        most = MERGED_TOKENS // (2 if config.r_drop else 1)
        batches = merged([batch for batch in share.batches if len(batch)], self.pad_id, most)
        if batches:
            loss, plain = self.lanes.gradients(
                batches, max(1, share.n_tokens), seed, config.label_smoothing, config.smoothing, config.r_drop
            )
        else:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        self.beat()
        if self.world.size > 1:
            self._sum_over_ranks()
        return loss, plain

    def _sum_over_ranks(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        # Where other programs want the cores too, two threads that wait for each other in an optimiser's many small
        # operations take a hundred times as long as one; where none does, they save a thousandth of an update.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def sample(self, probability: float) -> None:
        """`choose` takes autograd where guesses are wanted."""
        raise RuntimeError("guesses are not drawn in lanes")

    def fall_back(self, error: Exception) -> bool:
        return False

    def close(self) -> None:
        self.lanes.close()


def choose(
    model: nn.Module,
    config: TrainingConfig,
    pad_id: int,
    world: parallel.World,
    precision: Chosen,
    beat: Callable[[], None],
) -> Gradients:
    """Lanes where they can, autograd everywhere else."""
    if (
        type(model) is Transformer
        and world.device.type == "cpu"
        and precision != "float16"
        and not (config.compile or config.activation_checkpointing or config.scheduled_sampling)
        and (world.size == 1 or config.parallel == "ddp")
    ):
        return InLanes(model, config, world, precision, beat)
    if world.device.type == "cuda":
        use_sdpa(model)
        # cuDNN's makes a plan for every new shape, and here nearly every rectangle has one.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if config.activation_checkpointing:
        parallel.remember_less(model)
    return ByAutograd(model, config, pad_id, world, precision, beat)
