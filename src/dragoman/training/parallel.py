"""One job on many devices: who is there, what they share, and the few sums that they exchange.

`torchrun` starts the processes ("ranks") and tells each its place by environment variables. Each rank computes its
share of the gradient of one and the same update: the global batch is cut into as many parts as there are ranks and
micro-batches, so all take equally many steps whatever the corpus.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dragoman.errors import TrainingError
from dragoman.model.devices import check_device
from dragoman.training.rendezvous import Progress, Start, meet
from dragoman.training.watchdog import Watchdog

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """The processes of a job, seen from one of them."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    start: Start | None = None
    """What a launcher's ranks agreed on; None without a launcher."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes and speaks."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """The sums of `values` over all ranks."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        summed: list[float] = tensor.tolist()
        return summed

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.size == 1:
            return number
        tensor = torch.tensor(number, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, values: Tensor) -> Tensor:
        """[n] on each rank -> [ranks, n]."""
        everyone = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(everyone, values)
        return torch.stack(everyone)

    def gather_texts(self, texts: Sequence[str]) -> list[list[str]]:
        """What each rank's `texts` are, on all ranks."""
        if self.size == 1:
            return [list(texts)]
        own = json.dumps(list(texts)).encode()
        padded = own.ljust(self.largest(len(own)))  # with spaces, which are nothing to JSON
        everyone = self.gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(self.device)).cpu()
        return [json.loads(row.numpy().tobytes()) for row in everyone]

    def alone(self) -> World:
        """This process by itself, on its device."""
        return World(device=self.device)

    def lead(self, what: str, work: Callable[[], Result]) -> Result | None:
        """What the first rank makes of `work`; None on the others, which wait for it. `what` is done once in a start.

        Where it fails there the others end too, in silence: the first says why. No process group is needed.
        """
        if self.start is None or self.size == 1:
            return work()
        if not self.is_first:
            if self.start.hear(what) != "done":
                time.sleep(1.0)  # leave the first the time to say it
                sys.exit(1)
            return None
        try:
            result = work()
        except BaseException:
            self.start.say(what, "failed")
            raise
        self.start.say(what, "done")
        return result

    def note(self, progress: Progress) -> None:
        """Let later starts of the job know how far this one has come."""
        if self.start is not None and self.is_first:
            self.start.note(progress)

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.sum([0.0])

    def watchdog(self, seconds: float) -> Watchdog:
        """A watchdog for this process that sees the beats of all."""
        if self.size == 1 or self.start is None:
            return Watchdog(seconds)
        return Watchdog(seconds, self.rank, self.size, self.start.connect())


def arrive(device: str = "auto") -> World:
    """The world that the environment describes: that of `torchrun`, all of whose ranks have come, or one process alone.

    They can `lead` and follow now, and exchange tensors once they are `connected`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = check_device(f"cuda:{local}" if device == "cuda" else device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    return World(rank, size, place, meet(rank, size) if size > 1 or "TORCHELASTIC_RUN_ID" in os.environ else None)


@contextlib.contextmanager
def connected(world: World) -> Iterator[None]:
    """Within the block the ranks of `world` are a process group."""
    if world.size == 1 or world.start is None:
        yield
        return
    cuda = world.device.type == "cuda"
    # How long a silence may last is the watchdog's business, which shows stacks; this is only its backstop.
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=world.start.store,
        rank=world.rank,
        world_size=world.size,
        timeout=datetime.timedelta(days=1),
        device_id=world.device if cuda else None,
    )
    yield
    # Not after an error: NCCL would wait here for ranks that wait for this one elsewhere, and nobody would read why.
    dist.destroy_process_group()


def wrap(module: nn.Module, model: nn.Module, world: World, parallel: Literal["ddp", "fsdp"]) -> nn.Module:
    """`module`, whose forward is a share of the loss of `model`, as one whose backward sums over the ranks.

    Both ways divide the sum by the number of ranks; the caller multiplies it back.
    """
    if world.size == 1:
        return module
    if parallel == "ddp":
        device_ids = [world.device.index] if world.device.type == "cuda" else None
        # Buffers are tables that each rank computes, and lengthens when it needs to: they are not to be exchanged.
        names = [name for name, _ in module.named_buffers()]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        return nn.parallel.DistributedDataParallel(module, device_ids=device_ids, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard

    for layer in layers(model):
        fully_shard(layer)
    fully_shard(module)
    return module


AGREEMENT = 1e-3
"""How much the copies of ranks may differ, relative: unlike devices round differently, a fault differs by more."""


@torch.no_grad()
def check_copies(
    parameters: Mapping[str, Tensor], world: World, step: int, what: Literal["weights", "gradients"] = "weights"
) -> None:
    """Every rank has the weights of the first, or TrainingError on all of them, with the rank and the parameter.

    For copies, not for shares (`fsdp`); every rank must call this.
    """
    if world.size == 1:
        return
    sizes = torch.stack([parameter.double().square().sum() for parameter in parameters.values()]).to(world.device)
    everyone = world.gather(sizes)  # [ranks, parameters]
    apart = (everyone - everyone[0]).abs() / everyone[0].clamp(min=1e-12)
    apart = torch.where(everyone.isfinite(), apart, torch.inf)
    if float(apart.max()) > AGREEMENT:
        rank, index = divmod(int(apart.argmax()), apart.size(1))
        ours, theirs = (float(everyone[each, index]) ** 0.5 for each in (0, rank))
        raise TrainingError(
            f"after step {step} the {what} of rank {rank} are not those of rank 0: "
            f"{list(parameters)[index]} has the norm {theirs:g} and not {ours:g}. {CAUSES}"
        )


def is_apart(norm: float, first: float) -> bool:
    """Whether this rank's gradient norm is not that of the first rank, which should have the same sum of all."""
    return abs(norm - first) > AGREEMENT * abs(first)


CAUSES = (
    "The usual causes: ranks that run other versions of PyTorch, of the drivers or of this program, a device with a "
    "fault, or a --set that was given to some ranks only; go on from the last checkpoint with --resume"
)


def synchronise(module: nn.Module, last: bool) -> None:
    """Let the next backward pass exchange gradients only where it is the last of its update."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module.require_backward_grad_sync = last
    elif sharded := getattr(module, "set_requires_gradient_sync", None):
        sharded(last)


def layers(model: nn.Module) -> list[nn.Module]:
    """The encoder's and decoder's layers: the pieces that are sharded, and computed again, one at a time."""
    stacks = [getattr(model, side).layers for side in ("encoder", "decoder") if hasattr(model, side)]
    return [layer for stack in stacks for layer in stack]


def remember_less(model: nn.Module) -> None:
    """Let each layer be computed once more on the way back, instead of keeping what it computed."""
    for layer in layers(model):
        layer.forward = functools.partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.is_grad_enabled():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return forward(*args, **kwargs)


def whole(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Tensors that are sharded over the ranks, made whole in the first rank's main memory; others stay as they are.

    Every rank must call this; the other ranks get nothing of the sharded ones. They are put together one at a time, so
    no device needs room for more than its shards and one whole tensor.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not is_sharded(tensor):
            found[name] = tensor
            continue
        full: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
        if world.is_first:
            found[name] = full.cpu()
    return found


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds a part of `tensor` only."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`."""
    held: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return held


def like(given: Tensor, target: Any) -> Tensor:
    """A whole tensor, cut as `target` is."""
    given = given.to(target.device, target.dtype)
    if not is_sharded(target):
        return given
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(given, target.device_mesh, target.placements)
