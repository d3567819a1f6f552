"""A rank's share of each update as tensors, prepared ahead by threads where that helps. The result is the same with any
number of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from dragoman.batches.batch import Batch, PairSource, collate
from dragoman.batches.buckets import Ids as Indices
from dragoman.batches.regularise import Sampler, collate_sampled
from dragoman.batches.stream import GlobalBatch, Position, Stream


@dataclass(frozen=True)
class Ids:
    """The special ids that a batch needs, asked of the tokenizer."""

    pad_id: int
    bos_id: int
    eos_id: int


@dataclass(frozen=True)
class Regularise:
    """Subword regularisation (Kudo 2018, arXiv:1804.10959; Provilkov et al. 2019, arXiv:1910.13267)."""

    tokenizer: Sampler
    alpha: float


@dataclass(frozen=True)
class Share:
    """What one rank computes of one update, and what it must know of the whole."""

    batches: list[Batch]
    """Rectangles, run one after the other; at least one, which may have no rows."""
    position: Position
    next: Position
    """Where the data goes on after this update."""
    n_tokens: int
    """Target tokens of the whole update, on all ranks, by plan: the divisor of the summed loss. Where sentences are cut
    anew they are counted once more afterwards."""


class Feed:
    """The shares of one rank, in the order of the stream."""

    def __init__(
        self,
        data: PairSource,
        stream: Stream,
        ids: Ids,
        *,
        accumulation: int = 1,
        rank: int = 0,
        size: int = 1,
        workers: int = 0,
        device: torch.device | str = "cpu",
        regularise: Regularise | None = None,
    ) -> None:
        self.regularise = regularise
        self.data, self.stream, self.ids = data, stream, ids
        self.accumulation, self.rank, self.size = accumulation, rank, size
        self.workers = workers
        self.device = torch.device(device)

    def share(self, whole: GlobalBatch) -> Share:
        """This rank's share of a global batch."""
        parts = whole.split(self.accumulation * self.size)
        mine = parts[self.rank * self.accumulation : (self.rank + 1) * self.accumulation]
        tiles = [tile for part in mine for tile in part]
        if not tiles:
            # Fewer rows than ranks: this one works on nothing, in step with the others.
            tiles = [whole.indices[:0]]
        batches = [self._batch(tile, whole.position.epoch) for tile in tiles]
        if self.device.type == "cuda":
            batches = [batch.pin() for batch in batches]
        return Share(batches, whole.position, whole.next, whole.n_tokens)

    def _batch(self, tile: Indices, epoch: int) -> Batch:
        ids = self.ids
        if self.regularise is None or not len(tile):
            return collate(self.data, tile, ids.pad_id, ids.bos_id, ids.eos_id)
        how = self.regularise
        return collate_sampled(self.data, tile, how.tokenizer, alpha=how.alpha, seed=self.stream.seed, epoch=epoch)

    def largest(self) -> Share:
        """This rank's share of the largest batch that can come."""
        return self.share(self.stream.largest_batch())

    def shares(self, start: Position) -> Iterator[Share]:
        """The shares from a position on, without end."""
        order = self.stream.iterate(start)
        if not self.workers:
            yield from map(self.share, order)
            return
        with ThreadPoolExecutor(self.workers, "batches") as pool:
            ahead: deque[Future[Share]] = deque()
            try:
                while True:
                    while len(ahead) < 2 * self.workers:
                        ahead.append(pool.submit(self.share, next(order)))
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()
