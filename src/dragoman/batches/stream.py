"""The order of training: which pairs make which update, a function of seed, epoch and position alone.

An epoch is cut into windows of shuffled pairs; a window is cut into tiles, rectangles of pairs of like lengths;
shuffled tiles make batches. A batch is what one update learns from, whatever the devices, lanes and accumulation: these
only say in how many parts it is worked through. Nothing here is as long as the corpus, so five million pairs cost what
one window costs, and any position is found again by planning its window.

Why tiles: on a small corpus a batch of 25,000 tokens holds a twentieth of everything, and pairs that many are not
alike; as one rectangle a seventh of it would be padding. Worked through as several tight rectangles it is the same
update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.batches.buckets import Ids, Lengths, cut, over_budget, padded, padding
from dragoman.batches.shuffle import key_of, permuted, shuffled
from dragoman.errors import DataError

WINDOW = 500_000
"""Pairs that are shuffled, sorted and cut together."""

# Tried in turn until padding is below this share. The first is more than padding asks for: an update whose pairs are
# all of a few lengths learns those lengths, and the next one unlearns them. On Tatoeba en-zh with 1,024 tokens an
# update, the dev loss after 1,200 updates is 3.89 with one tile and 3.46 with eight; with 2,048 tokens the perplexity
# after 3,000 is 13.9 with eight and 12.8 with 32. Small batches, to which this happens, have at least the latter.
_TILES = (8, 12, 16, 24, 32, 48, 64)
_SMALL_BATCH, _SMALL_BATCH_TILES = 8192, 32
_PADDING = 0.048
_SMALLEST_TILE = 64

# A part may be this much of its share larger than another, rather than have a sliver of a tile.
_SNAP = 0.05


class Position(NamedTuple):
    """A place in the endless order: three integers, kept with a checkpoint as they are."""

    epoch: int = 0
    window: int = 0
    batch: int = 0


@dataclass(frozen=True)
class GlobalBatch:
    """What one update learns from. `tiles` together hold each of its pairs once."""

    position: Position
    next: Position
    """Where to go on after this batch."""
    tiles: tuple[Ids, ...]
    """Index arrays; each is a rectangle of pairs of like lengths."""
    src_tokens: int
    """Source tokens, EOS counted, padding not."""
    n_tokens: int
    """Target tokens, EOS counted, padding not: what the summed loss of the whole update is divided by."""
    src_padded: int
    tgt_padded: int
    """Positions that the tiles take up, padding counted."""
    costs: tuple[int, ...]
    """Of each tile: positions of a row, both sides together."""

    @property
    def indices(self) -> Ids:
        """All pairs of the batch."""
        return np.concatenate(self.tiles) if self.tiles else np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return sum(map(len, self.tiles))

    def split(self, parts: int) -> list[list[Ids]]:
        """The batch in exactly `parts` shares of about equal padded tokens (accumulation x ranks x lanes).

        Each share is a list of rectangles to run one after the other; it is empty where there are fewer rows than
        parts. Shares cut tiles and never join them, so together they are no larger than the batch.
        """
        if parts < 1:
            raise ValueError(f"a batch is split into at least 1 part, not {parts}")
        ends = np.cumsum([len(tile) * cost for tile, cost in zip(self.tiles, self.costs, strict=True)])
        total = int(ends[-1]) if len(ends) else 0
        cuts = [(0, 0), *(self._cut_at(total * part / parts, total / parts, ends) for part in range(1, parts))]
        cuts.append((len(self.tiles), 0))
        shares: list[list[Ids]] = []
        for (tile, row), (last, last_row) in pairwise(cuts):
            pieces = []
            for number in range(tile, min(last + 1, len(self.tiles))):
                piece = self.tiles[number][row if number == tile else 0 : last_row if number == last else None]
                if len(piece):
                    pieces.append(piece)
            shares.append(pieces)
        return shares

    def _cut_at(self, place: float, share: float, ends: NDArray[np.int64]) -> tuple[int, int]:
        """The tile and the row in it where the cost of all rows before reaches `place`."""
        tile = int(np.searchsorted(ends, place, side="right"))
        if tile == len(self.tiles):
            return tile, 0
        start = int(ends[tile - 1]) if tile else 0
        if place - start < _SNAP * share:
            return tile, 0
        if int(ends[tile]) - place < _SNAP * share:
            return tile + 1, 0
        return tile, round((place - start) / self.costs[tile])


class Stream:
    """The batches of a corpus, endlessly. Reading it is safe from several threads, each with its own `iterate`."""

    def __init__(
        self,
        src_lengths: Lengths,
        tgt_lengths: Lengths,
        batch_tokens: int,
        seed: int,
        *,
        bounds: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        tiles: int | None = None,
        window: int = WINDOW,
    ) -> None:
        """Lengths ([n]) are without EOS or BOS. `bounds` ([c + 1], from 0 to n) tell where each corpus starts and ends.

        A corpus of weight w is seen w times an epoch: 2 is twice each pair, and 0.5 is the one half in this epoch, the
        other half in the next. `tiles` is how many rectangles a batch is worked through in, chosen by measuring the
        padding unless given. Raises DataError where no pair fits into the budget.
        """
        self.src_lengths, self.tgt_lengths = src_lengths, tgt_lengths
        self.batch_tokens, self.seed = batch_tokens, seed
        n = len(src_lengths)
        bounds = [0, n] if bounds is None else list(bounds)
        weights = [1.0] * (len(bounds) - 1) if weights is None else list(weights)
        self.dropped = 0
        """Pairs that are larger than the budget by themselves: they are never trained on."""
        for start in range(0, n, WINDOW):
            ends = slice(start, start + WINDOW)
            self.dropped += int(over_budget(src_lengths[ends], tgt_lengths[ends], batch_tokens).sum())
        if self.dropped == n:
            raise DataError(
                f"no pair to train on: all {n:,} are longer than training.batch_tokens = {batch_tokens:,}"
                if n
                else "no pair to train on: the corpus is empty, or all of it was left out"
            )
        self._parts = _parts(bounds, weights)
        self.n = self._parts[-1].end
        """Pairs of an epoch, repeats by weight counted, those over the budget too."""
        self.window = window
        self.windows = max(1, round(self.n / window))
        self._plan: tuple[Position, list[GlobalBatch]] | None = None
        self.tiles = self._choose_tiles() if tiles is None else tiles

    def batch_at(self, position: Position) -> GlobalBatch:
        """The batch of a position. IndexError where its window has no such batch."""
        return self._window(position.epoch, position.window)[position.batch]

    def iterate(self, start: Position | None = None) -> Iterator[GlobalBatch]:
        """The batches from a position on, without end. A position after a window's last batch is the next window's."""
        epoch, window, first = start if start is not None else Position()
        while True:
            yield from self._window(epoch, window)[first:]
            epoch, window, first = *self._after(epoch, window), 0

    def batches_per_epoch(self, epoch: int = 0) -> int:
        """How many updates an epoch is. It plans every window: a second or so for each."""
        return sum(len(self._window(epoch, window)) for window in range(self.windows))

    def expected_batches(self, epochs: int) -> int:
        """How many updates the first `epochs` are: exact for no more pairs than a window has, else as many as if all
        windows were like the first, which is right to within a few in a thousand."""
        if self.n * epochs <= self.window:
            return sum(map(self.batches_per_epoch, range(epochs)))
        return len(self._window(0, 0)) * self.windows * epochs

    def epochs_at(self, position: Position) -> float:
        """How many epochs a position is from the start, for people to read."""
        batches = len(self._window(position.epoch, position.window))
        return position.epoch + (position.window + min(1.0, position.batch / max(1, batches))) / self.windows

    def largest_batch(self) -> GlobalBatch:
        """The batch that needs the most memory: of the longest pairs, as full as the budget allows.

        Training tries it first, so that memory fails at the start or never. Its pairs need not stand together in any
        batch of the order; where the corpus is too small to fill it, the hungriest batch of the first window is taken.
        """
        budget = self._tile_tokens()
        longest = self._longest(16 * self.batch_tokens)
        heights = np.maximum(self.src_lengths[longest], self.tgt_lengths[longest]).astype(np.int64) + 1
        tiles: list[Ids] = []
        left = self.batch_tokens
        start = 0
        while start < len(longest) and len(tiles) < self.tiles:
            limit = min(max(budget, int(heights[start])), left)
            # Rows of the very longest pairs may leave much of the budget empty: as long as possible, and full too.
            rows = np.minimum(limit // heights[start:], np.arange(len(longest) - start, 0, -1))
            areas = rows * heights[start:]
            if not areas.max():
                break
            best = int(np.argmax(areas >= min(0.98 * limit, int(areas.max()))))
            start += best
            tiles.append(longest[start : start + int(rows[best])])
            left -= int(areas[best])
            start += int(rows[best])
        return max([self._batch(Position(), Position(), tiles), *self._window(0, 0)], key=self._memory)

    def _memory(self, batch: GlobalBatch) -> float:
        """What the tiles need together, in no particular unit: so much a token, and as much again for attention where
        a row has some 512 of them."""
        needs = 0.0
        for tile in batch.tiles:
            src, tgt = padded(self.src_lengths, self.tgt_lengths, tile)
            needs += (src + tgt) * (1 + max(src, tgt) / len(tile) / 512)
        return needs

    def _longest(self, tokens: int) -> Ids:
        """Indices of the longest pairs that fit, longest first, enough of them to hold so many tokens."""
        n = len(self.src_lengths)
        histogram = np.zeros(self.batch_tokens + 1, dtype=np.int64)

        def heights(start: int) -> NDArray[np.int64]:
            ends = slice(start, start + WINDOW)
            return np.maximum(self.src_lengths[ends], self.tgt_lengths[ends]).astype(np.int64) + 1

        for start in range(0, n, WINDOW):
            found = heights(start)
            histogram += np.bincount(found[found <= self.batch_tokens], minlength=len(histogram))
        held = np.cumsum((histogram * np.arange(len(histogram)))[::-1])[::-1]
        enough = np.flatnonzero(held >= tokens)
        shortest = int(enough[-1]) if len(enough) else 1
        chosen: list[Ids] = []
        for start in range(0, n, WINDOW):
            found = heights(start)
            rows = np.flatnonzero((found >= shortest) & (found <= self.batch_tokens))
            if len(rows) > tokens:  # all of one length: no more of them are needed
                rows = rows[np.argsort(-found[rows], kind="stable")[:tokens]]
            chosen.append(rows + start)
        indices = np.concatenate(chosen)
        height = np.maximum(self.src_lengths[indices], self.tgt_lengths[indices]).astype(np.int64)
        return np.asarray(indices[np.argsort(-height, kind="stable")], dtype=np.int64)

    def _after(self, epoch: int, window: int) -> tuple[int, int]:
        return (epoch, window + 1) if window + 1 < self.windows else (epoch + 1, 0)

    def _tile_tokens(self) -> int:
        return max(1, self.batch_tokens // self.tiles)

    def _pairs(self, epoch: int, window: int) -> Ids:
        """The pairs of a window in shuffled order, those over the budget left out."""
        start, end = self.n * window // self.windows, self.n * (window + 1) // self.windows
        places = permuted(np.arange(start, end, dtype=np.int64), self.n, key_of(self.seed, epoch, 1))
        indices = self._resolve(places, epoch)
        if self.dropped:
            indices = indices[~over_budget(self.src_lengths[indices], self.tgt_lengths[indices], self.batch_tokens)]
        return indices

    def _resolve(self, places: Ids, epoch: int) -> Ids:
        """Pairs from their places in the epoch, in which each corpus stands as often as its weight says."""
        if len(self._parts) == 1 and self._parts[0].size == self._parts[0].pairs == len(self.src_lengths):
            return places
        indices = places.copy()
        which = np.searchsorted([part.end for part in self._parts], places, side="right")
        for number, part in enumerate(self._parts):
            rows = np.flatnonzero(which == number)
            inside = places[rows] - part.begin
            if part.size < part.pairs:  # a fraction of the corpus: epoch by epoch the next slice of one fixed order
                turn = (inside + epoch * part.size) % part.pairs
                inside = permuted(turn, part.pairs, key_of(self.seed, part.first, 2))
            indices[rows] = part.first + inside
        return indices

    def _choose_tiles(self) -> int:
        """The fewest tiles a batch that keep padding low, measured on the first window."""
        indices = self._pairs(0, 0)
        src, tgt = self.src_lengths[indices], self.tgt_lengths[indices]
        rows = np.arange(len(indices), dtype=np.int64)
        least = _SMALL_BATCH_TILES if self.batch_tokens <= _SMALL_BATCH else _TILES[0]
        chosen = max(1, min(least, self.batch_tokens // _SMALLEST_TILE))
        for tiles in _TILES[_TILES.index(least) :]:
            budget = self.batch_tokens // tiles
            if budget < _SMALLEST_TILE:
                break
            chosen = tiles
            large = over_budget(src, tgt, budget)  # each is a tile of its own, without padding
            batches = cut(src, tgt, rows[~large], budget)
            if padding(src, tgt, [*batches, *(row[None] for row in rows[large])]) < _PADDING:
                break
        return chosen

    def _window(self, epoch: int, window: int) -> list[GlobalBatch]:
        at = Position(epoch, window)
        plan = self._plan  # one reference, read once: another thread may put a new plan there
        if plan is None or plan[0] != at:
            plan = (at, self._plan_window(epoch, window))
            self._plan = plan
        return plan[1]

    def _plan_window(self, epoch: int, window: int) -> list[GlobalBatch]:
        indices = self._pairs(epoch, window)
        large = over_budget(self.src_lengths[indices], self.tgt_lengths[indices], self._tile_tokens())
        tiles = cut(self.src_lengths, self.tgt_lengths, indices[~large], self._tile_tokens())
        tiles += [indices[row : row + 1] for row in np.flatnonzero(large)]
        tiles = [tiles[number] for number in shuffled(len(tiles), key_of(self.seed, epoch, window, 3))]
        sizes = [padded(self.src_lengths, self.tgt_lengths, tile) for tile in tiles]
        groups = _group(sizes, self.batch_tokens)
        after = Position(*self._after(epoch, window))
        return [
            self._batch(
                Position(epoch, window, number),
                Position(epoch, window, number + 1) if number + 1 < len(groups) else after,
                tiles[start:end],
            )
            for number, (start, end) in enumerate(groups)
        ]

    def _batch(self, position: Position, after: Position, tiles: Sequence[Ids]) -> GlobalBatch:
        sizes = [padded(self.src_lengths, self.tgt_lengths, tile) for tile in tiles]
        return GlobalBatch(
            position=position,
            next=after,
            tiles=tuple(tiles),
            src_tokens=sum(int(self.src_lengths[tile].sum()) + len(tile) for tile in tiles),
            n_tokens=sum(int(self.tgt_lengths[tile].sum()) + len(tile) for tile in tiles),
            src_padded=sum(src for src, _ in sizes),
            tgt_padded=sum(tgt for _, tgt in sizes),
            costs=tuple((src + tgt) // len(tile) for (src, tgt), tile in zip(sizes, tiles, strict=True)),
        )


class _Part(NamedTuple):
    """A stretch of the epoch that one corpus fills, wholly or in part."""

    begin: int
    end: int
    first: int
    """The corpus's first pair."""
    pairs: int
    """The corpus's number of pairs."""

    @property
    def size(self) -> int:
        return self.end - self.begin


def _parts(bounds: Sequence[int], weights: Sequence[float]) -> list[_Part]:
    parts: list[_Part] = []
    at = 0
    for (first, last), weight in zip(pairwise(bounds), weights, strict=True):
        pairs = last - first
        whole = int(weight)
        for size in [pairs] * whole + [round((weight - whole) * pairs)]:
            if size:
                parts.append(_Part(at, at + size, first, pairs))
                at += size
    if not parts:  # weights so small that nothing is left of any corpus
        raise DataError("no pair to train on: the weights of the corpora leave less than one pair an epoch")
    return parts


def _group(sizes: Sequence[tuple[int, int]], budget: int) -> list[tuple[int, int]]:
    """Neighbouring tiles joined into batches within the budget on both sides, as (start, end).

    They are as few as filling one after the other gives, and then about equally full, so that no update of a window is
    left with the crumbs where that can be helped.
    """
    groups = _fill(sizes, budget)
    needed = max(sum(src for src, _ in sizes), sum(tgt for _, tgt in sizes)) / max(1, len(groups))
    for slack in (1.01, 1.03, 1.06, 1.1):
        limit = int(needed * slack)
        if limit < budget:
            even = _fill(sizes, limit)
            if len(even) == len(groups):
                return even
    return groups


def _fill(sizes: Sequence[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    groups: list[tuple[int, int]] = []
    start = src = tgt = 0
    for number, (more_src, more_tgt) in enumerate(sizes):
        if number > start and (src + more_src > limit or tgt + more_tgt > limit):
            groups.append((start, number))
            start, src, tgt = number, 0, 0
        src, tgt = src + more_src, tgt + more_tgt
    if start < len(sizes):
        groups.append((start, len(sizes)))
    return groups
