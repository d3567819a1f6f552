"""A trained model packed for decoding: the numbers of `start` and `step`, without what they spend on generality.

Weights are laid out once for products in the chosen precision. Sentences lie end to end: no padding is computed. Each
row of a step stands for itself, so that sentences of any age share a batch and leave it when they end. Keys and values
are written once and never moved: a row's past is a list of slots, which beams of one sentence share. The numbers come
from `native/decoding.cpp`, a step or some sentences a call; here is what it is to read and where it is to write.

Letters: R rows, L decoder layers, D d_model, V vocabulary, E = H (K + V), the width of one position's keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dragoman.model.native.calls import DescribedModel
from dragoman.model.packed_weights import PackedWeights

PAGE_BITS = 13
"""A step may have up to 2^13 rows; their keys and values are one page."""
SOURCE_TOKENS = 512
"""Source tokens that go through the encoder together: what lies between its products then stays in the cache."""
PRUNE_EVERY = 8
"""Steps after which pages that no row looks back to are let go."""
FEW_LINES = 1 << 13
"""Lines of pages that are not worth moving, however few of them are still looked at."""


class Page:
    """Keys and values that one step wrote, [L, lines, E]; its number and memory are free when no state holds it."""

    def __init__(self, number: int, lines: int, memory: Tensor, free: list[tuple[int, Tensor]]) -> None:
        self.number = number
        self.lines = lines
        self.memory = memory
        self._free = free

    def __del__(self) -> None:
        self._free.append((self.number, self.memory))


Memory = list[Tensor]
"""The source as the decoder's layers see it: for each, keys and values [tokens, E] of sentences end to end."""


@dataclass
class PackedState:
    """R rows in flight. Nothing is shared with the rows of another state but what is never written again."""

    session: PackedModel
    memory_at: np.ndarray
    """[L, R] addresses: where each row's source begins in each layer's memory."""
    memory_numbers: np.ndarray
    """[R] which of `memories` that is."""
    memory_lengths: np.ndarray
    """[R] source tokens, int32."""
    lengths: np.ndarray
    """[R] target tokens read so far, int32."""
    slots: np.ndarray
    """[R, room] int32: page number * 2^PAGE_BITS + line, of each position read."""
    pages: dict[int, Page] = field(default_factory=dict)
    memories: dict[int, Memory] = field(default_factory=dict)

    def select(self, rows: Tensor | np.ndarray) -> PackedState:
        """rows [R'] of indices into R -> those rows, in that order, repeats allowed. Moves four bytes a position."""
        index = rows.numpy() if isinstance(rows, Tensor) else rows
        return PackedState(
            self.session,
            np.ascontiguousarray(self.memory_at[:, index]),
            self.memory_numbers[index],
            self.memory_lengths[index],
            self.lengths[index],
            self.slots[index],
            self.pages,
            self.memories,
        )

    def join(self, other: PackedState) -> PackedState:
        """These rows and then those of another state of the same session."""
        room = max(self.slots.shape[1], other.slots.shape[1])
        return PackedState(
            self.session,
            np.concatenate([self.memory_at, other.memory_at], axis=1),
            np.concatenate([self.memory_numbers, other.memory_numbers]),
            np.concatenate([self.memory_lengths, other.memory_lengths]),
            np.concatenate([self.lengths, other.lengths]),
            np.concatenate([_with_room(self.slots, room), _with_room(other.slots, room)]),
            self.pages | other.pages,
            self.memories | other.memories,
        )


def _with_room(slots: np.ndarray, room: int) -> np.ndarray:
    return slots if slots.shape[1] == room else np.pad(slots, ((0, 0), (0, room - slots.shape[1])))


class PackedModel:
    """One thread's decoder over shared weights; answers `contracts.Decodable`, and more for those who ask for less."""

    def __init__(self, weights: PackedWeights) -> None:
        self.weights = weights
        self.pad_id = weights.pad_id
        self._model = DescribedModel(weights, weights.kernels)
        self._kept = [layer.heads.kept for layer in weights.decoder]  # [L] E
        self._page_at = np.zeros((len(weights.decoder), 64), dtype=np.int64)  # [L, pages] addresses
        self._free_pages: list[tuple[int, Tensor]] = []  # the last is used first: it may still be in the cache
        self._n_pages = 0
        self._n_memories = 0
        self._steps = 0

    # -- the source ----------------------------------------------------------------------------------------------

    def encode(self, sources: Sequence[Sequence[int]]) -> PackedState:
        """Sentences in tokens, EOS at their ends -> the state before the first target token, one row each."""
        lengths = np.array([len(source) for source in sources], dtype=np.int32)
        ends = np.cumsum(lengths)
        layers = [torch.empty(int(lengths.sum()), layer.cross_heads.kept) for layer in self.weights.decoder]
        first = 0
        while first < len(sources):
            begin = int(ends[first] - lengths[first])
            after = max(first + 1, int(np.searchsorted(ends, begin + SOURCE_TOKENS, side="right")))
            self._encode(sources[first:after], [kept[begin : int(ends[after - 1])] for kept in layers])
            first = after
        starts = (ends - lengths).astype(np.int64)
        addresses = np.stack([kept.data_ptr() + starts * (kept.size(1) * 4) for kept in layers])  # [L, R]
        rows = len(sources)
        self._n_memories += 1
        return PackedState(
            self,
            addresses,
            np.full(rows, self._n_memories, dtype=np.int64),
            lengths,
            np.zeros(rows, dtype=np.int32),
            np.zeros((rows, 16), dtype=np.int32),
            {},
            {self._n_memories: layers},
        )

    def _encode(self, sources: Sequence[Sequence[int]], memory: Memory) -> None:
        """Fill what the decoder's layers see of these sentences."""
        lengths = [len(source) for source in sources]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = torch.tensor([token for source in sources for token in source], dtype=torch.long)
        addresses = np.array([kept.data_ptr() for kept in memory], dtype=np.int64)
        self._model.encode(tokens, offsets, addresses)

    def start(self, src: Tensor, src_mask: Tensor | None = None) -> PackedState:
        """src [B, S] ending in EOS, src_mask [B, S] -> the state before the first target token."""
        real = (src != self.pad_id) if src_mask is None else src_mask
        return self.encode([row[seen].tolist() for row, seen in zip(src, real, strict=True)])

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, tokens: Tensor, state: PackedState) -> tuple[Tensor, PackedState]:
        """tokens [R], the newest of each row -> logits [R, V] of the next, and the new state."""
        state = self._with_slots(state)
        logits = torch.empty(tokens.size(0), self.weights.n_vocabulary)
        self._model.logits(tokens, state, self._page_at, PAGE_BITS, logits)
        return logits, state

    def best(self, tokens: Tensor, state: PackedState, k: int, barred: np.ndarray) -> tuple[Best, PackedState]:
        """As `step`, but only the `k` largest logits of each row are kept: no row of logits is ever written out.

        barred [R, n] int32 are tokens that must not be among them, each row ending in -1. They count in `totals`.
        """
        rows = tokens.size(0)
        best = Best(
            torch.empty(rows, k),
            torch.empty(rows, k, dtype=torch.int32),
            torch.empty(rows),
            torch.empty(rows),
        )
        state = self._with_slots(state)
        self._model.step(tokens, state, self._page_at, PAGE_BITS, barred, best)
        return best, state

    def _with_slots(self, state: PackedState) -> PackedState:
        """The state with a new slot for each row's next position."""
        rows = len(state.lengths)
        longest = int(state.lengths.max()) if rows else 0
        slots = state.slots
        if longest + 1 > slots.shape[1]:
            slots = _with_room(slots, 2 * slots.shape[1])
        else:
            slots = slots.copy()
        page = self._page(rows)
        slots[np.arange(rows), state.lengths] = (page.number << PAGE_BITS) + np.arange(rows, dtype=np.int32)
        pages, memories = state.pages | {page.number: page}, state.memories
        self._steps += 1
        if self._steps % PRUNE_EVERY == 0:
            past = np.arange(slots.shape[1])[None, :] <= state.lengths[:, None]
            seen, inverse = np.unique(slots[past], return_inverse=True)
            numbers = set(np.unique(seen >> PAGE_BITS).tolist())
            pages = {number: page for number, page in pages.items() if number in numbers}
            memories = {number: memories[number] for number in np.unique(state.memory_numbers).tolist()}
            if sum(page.lines for page in pages.values()) > max(4 * len(seen), FEW_LINES):
                pages, places = self._moved_together(seen, pages)
                slots[past] = places[inverse]
            self._free_pages[:-PRUNE_EVERY] = [
                (number, torch.empty(0)) for number, _ in self._free_pages[:-PRUNE_EVERY]
            ]
        return PackedState(
            self,
            state.memory_at,
            state.memory_numbers,
            state.memory_lengths,
            state.lengths + np.int32(1),
            slots,
            pages,
            memories,
        )

    def _page(self, rows: int) -> Page:
        """Room for the keys and values of one step."""
        if rows > 1 << PAGE_BITS:
            raise ValueError(f"a step has at most {1 << PAGE_BITS} rows, not {rows}: use a smaller batch_tokens")
        kept = self._kept
        if self._free_pages:
            number, memory = self._free_pages.pop()
        else:
            number, memory = self._n_pages, torch.empty(0)
            self._n_pages += 1
        if memory.numel() < rows * sum(kept):
            memory = torch.empty(rows * sum(kept))
        if number >= self._page_at.shape[1]:
            self._page_at = np.pad(self._page_at, ((0, 0), (0, self._page_at.shape[1])))
        self._page_at[:, number] = memory.data_ptr() + np.cumsum([0, *kept[:-1]]) * (4 * rows)
        return Page(number, rows, memory, self._free_pages)

    def _moved_together(self, seen: np.ndarray, pages: dict[int, Page]) -> tuple[dict[int, Page], np.ndarray]:
        """What `seen`, slots in ascending order, name, copied into pages of its own; those, and where each slot is now.

        A long hypothesis would otherwise hold on to all that short ones, gone long since, have written beside it.
        """
        fresh: dict[int, Page] = {}
        places = np.empty_like(seen)
        for begin in range(0, len(seen), 1 << PAGE_BITS):
            part = seen[begin : begin + (1 << PAGE_BITS)]
            page = self._page(len(part))
            fresh[page.number] = page
            places[begin : begin + len(part)] = (page.number << PAGE_BITS) + np.arange(len(part), dtype=np.int32)
            ends = np.flatnonzero(np.diff(part >> PAGE_BITS)) + 1
            for first, after in pairwise([0, *ends.tolist(), len(part)]):
                lines = torch.from_numpy((part[first:after] & ((1 << PAGE_BITS) - 1)).astype(np.int64))
                old = pages[int(part[first] >> PAGE_BITS)]
                for to, of in zip(self._layers(page), self._layers(old), strict=True):
                    to[first:after] = of[lines]
        return fresh, places

    def _layers(self, page: Page) -> list[Tensor]:
        """The lines of a page in each layer, [lines, E]."""
        parts = page.memory[: page.lines * sum(self._kept)].split([page.lines * kept for kept in self._kept])
        return [part.view(page.lines, -1) for part in parts]


class Best(NamedTuple):
    """The k likeliest tokens of each row, and what their log-probabilities are to be measured against."""

    logits: Tensor
    """[R, k], descending."""
    tokens: Tensor
    """[R, k] int32; -1 where there are fewer than k."""
    largest: Tensor
    """[R] the largest logit of the whole vocabulary."""
    sums: Tensor
    """[R] the sum of e^(logit - largest) over it."""

    @property
    def totals(self) -> Tensor:
        """[R] log of the sum of exponentials: a token's log-probability is its logit minus this."""
        return self.largest + self.sums.log()
