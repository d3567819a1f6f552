"""A trained model packed for decoding: the numbers of `start` and `step`, without what they spend on generality.

Weights are laid out once for products in the chosen precision. Sentences lie end to end: no padding is computed. Each
row of a step stands for itself, so that sentences of any age share a batch and leave it when they end. Keys and values
are written once and never moved: a row's past is a list of slots, which beams of one sentence share. What lies between
two products is one pass over each row (`native/decoding.cpp`).

Letters: R rows, L decoder layers, D d_model, V vocabulary, E = H (K + V), the width of one position's keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dragoman.model import native
from dragoman.model.few_rows import FEW_ROWS, FewRows
from dragoman.model.native.calls import Kernels
from dragoman.model.packed_weights import (
    INPUT_TYPES,
    PRODUCT_TYPES,
    VOCABULARY_BLOCK,
    Norm,
    PackedEncoderLayer,
    PackedLinear,
    PackedWeights,
)

PAGE_BITS = 13
"""A step may have up to 2^13 rows; their keys and values are one page."""
SOURCE_TOKENS = 512
"""Source tokens that go through the encoder together: what lies between its products then stays in the cache."""
PRUNE_EVERY = 32
"""Steps after which pages that no row looks back to are let go."""


class Input(NamedTuple):
    """What a product reads: values [R, n], and for int8 the scale of each row [R]."""

    values: Tensor
    scales: Tensor


class Product(NamedTuple):
    """What a product leaves: values [R, out], the scales of its rows, and the weights it came from."""

    values: Tensor
    row_scales: Tensor
    linear: PackedLinear


class Page:
    """The keys and values that one step wrote: [L, R, E]. Its number is free again when no state holds it."""

    def __init__(self, number: int, values: Tensor, free: list[int]) -> None:
        self.number = number
        self.values = values
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.number)


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
        library = native.loaded("decoding.cpp")
        if library is None:
            raise RuntimeError("the kernels are not there; ask can_pack first")
        self.weights = weights
        self.pad_id = weights.pad_id
        self.kernels = Kernels(library, weights.precision)
        self._few_rows = FewRows(weights, library)
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._page_at = np.zeros((len(weights.decoder), 64), dtype=np.int64)  # [L, pages] addresses
        self._free_pages: list[int] = []
        self._n_pages = 0
        self._n_memories = 0
        self._steps = 0

    # -- products ------------------------------------------------------------------------------------------------

    def _buffer(self, name: str, rows: int, n: int, dtype: torch.dtype) -> Tensor:
        """[rows, n] of memory that the next call under this name writes over."""
        held = self._buffers.get((name, n))
        if held is None or held.size(0) < rows:
            held = torch.empty(max(rows, 64), n, dtype=dtype)
            self._buffers[name, n] = held
        return held[:rows]

    def _product(self, x: Input, linear: PackedLinear) -> Product:
        """[R, in] -> [R, out]; its rows stay until the next product of the same width."""
        rows = x.values.size(0)
        out = None
        if not linear.in_blocks:
            out = self._buffer("product", rows, linear.n_out, PRODUCT_TYPES[self.weights.precision])
        return Product(linear.product(x.values, out), x.scales, linear)

    def _input(self, name: str, rows: int, n: int) -> Input:
        values = self._buffer(name, rows, n, INPUT_TYPES[self.weights.precision])
        return Input(values, self._buffer(name + " scales", rows, 1, torch.float32).view(-1))

    def _prepared(self, x: Tensor) -> Input:
        """Float rows as a product's input."""
        if self.weights.precision == "float32":
            return Input(x, x)
        out = self._input("x", *x.shape)
        self.kernels.prepare(x, out.values, out.scales)
        return out

    def _residual_norm(self, x: Tensor, product: Product, norm: Norm) -> Input:
        """x becomes LayerNorm(x + product); also as the next product's input."""
        out = Input(x, x) if self.weights.precision == "float32" else self._input("x", *x.shape)
        self.kernels.residual_norm(product, x, norm, out.values, out.scales)
        return out

    def _feed_forward(self, x: Tensor, given: Input, layer: PackedEncoderLayer) -> Input:
        product = self._product(given, layer.inner)
        inner = self._input("inner", x.size(0), layer.inner.n_out)
        self.kernels.activate(product, self.weights.activation, inner.values, inner.scales)
        return self._residual_norm(x, self._product(inner, layer.outer), layer.last_norm)

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
        lengths = np.array([len(source) for source in sources], dtype=np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = torch.tensor([token for source in sources for token in source], dtype=torch.long)
        places = torch.from_numpy(np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths))
        x = self._embed(tokens, places, self.weights.source_embedding, "source x")  # [tokens, D]
        given = self._prepared(x)
        for layer in self.weights.encoder:
            product = self._product(given, layer.qkv)
            heads = self._input("heads", x.size(0), layer.heads.n * layer.heads.d_v)
            self.kernels.attend_source(product, offsets, layer.heads, heads.values, heads.scales)
            given = self._residual_norm(x, self._product(heads, layer.o), layer.norm)
            given = self._feed_forward(x, given, layer)
        for decoder_layer, kept in zip(self.weights.decoder, memory, strict=True):
            self.kernels.finish(self._product(given, decoder_layer.memory), kept)

    def start(self, src: Tensor, src_mask: Tensor | None = None) -> PackedState:
        """src [B, S] ending in EOS, src_mask [B, S] -> the state before the first target token."""
        real = (src != self.pad_id) if src_mask is None else src_mask
        return self.encode([row[seen].tolist() for row, seen in zip(src, real, strict=True)])

    def _embed(self, tokens: Tensor, places: Tensor, embedding: Tensor, name: str) -> Tensor:
        """tokens [R] at positions places [R] -> [R, D], which the layers then write over."""
        positions = self.weights.positions(int(places.max()) + 1 if places.numel() else 0)
        x = self._buffer(name, tokens.size(0), embedding.size(1), torch.float32)
        torch.index_select(embedding, 0, tokens, out=x)
        return x.mul_(self.weights.scale).add_(positions.index_select(0, places))

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, tokens: Tensor, state: PackedState) -> tuple[Tensor, PackedState]:
        """tokens [R], the newest of each row -> logits [R, V] of the next, and the new state."""
        given, state = self._layers(tokens, state)
        logits = torch.empty(tokens.size(0), self.weights.n_vocabulary)
        for i, block in enumerate(self.weights.blocks):
            self.kernels.finish(self._product(given, block), logits[:, i * VOCABULARY_BLOCK :])
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
        if rows <= FEW_ROWS:
            state = self._with_slots(state)
            self._few_rows.best(tokens, state, self._page_at, PAGE_BITS, barred, best)
            return best, state
        given, state = self._layers(tokens, state)
        for i, block in enumerate(self.weights.blocks):
            self.kernels.best_tokens(self._product(given, block), i * VOCABULARY_BLOCK, barred, best)
        return best, state

    def _layers(self, tokens: Tensor, state: PackedState) -> tuple[Input, PackedState]:
        """The decoder up to the Generator's input, and the state with one position more."""
        rows = tokens.size(0)
        state = self._with_slots(state)
        x = self._embed(tokens, torch.from_numpy(state.lengths - 1), self.weights.target_embedding, "target x")
        given = self._prepared(x)
        for i, layer in enumerate(self.weights.decoder):
            product = self._product(given, layer.qkv)
            heads = self._input("heads", rows, layer.heads.n * layer.heads.d_v)
            self.kernels.attend_past(
                product,
                layer.heads,
                self._page_at[i],
                PAGE_BITS,
                state.slots,
                state.lengths,
                heads.values,
                heads.scales,
            )
            given = self._residual_norm(x, self._product(heads, layer.o), layer.norm)
            product = self._product(given, layer.q)
            heads = self._input("heads", rows, layer.cross_heads.n * layer.cross_heads.d_v)
            self.kernels.attend_memory(
                product, layer.cross_heads, state.memory_at[i], state.memory_lengths, heads.values, heads.scales
            )
            given = self._residual_norm(x, self._product(heads, layer.cross_o), layer.cross_norm)
            given = self._feed_forward(x, given, layer)
        return given, state

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
            seen = set((slots[past] >> PAGE_BITS).tolist())
            pages = {number: page for number, page in pages.items() if number in seen}
            memories = {number: memories[number] for number in np.unique(state.memory_numbers).tolist()}
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
        number = self._free_pages.pop() if self._free_pages else self._n_pages
        self._n_pages = max(self._n_pages, number + 1)
        if number >= self._page_at.shape[1]:
            self._page_at = np.pad(self._page_at, ((0, 0), (0, self._page_at.shape[1])))
        values = [layer.heads.kept for layer in self.weights.decoder]
        page = Page(number, torch.empty(rows * sum(values)), self._free_pages)
        at = page.values.data_ptr()
        for i, kept in enumerate(values):
            self._page_at[i, number] = at
            at += rows * kept * 4
        return page


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
