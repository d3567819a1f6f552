"""Sampling: tokens drawn from the model's distribution, or from the part of it that is asked for.

Every draw is a function of a path's seed and of its step alone: the seed mixes the user's with the sentence's own
tokens, so neither the batch nor the order of the input can change a translation. Letters: R paths, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dragoman.decoding.constraints import NEVER


@dataclass(frozen=True)
class Filter:
    """Which part of a distribution is drawn from. The filters act in this order, each on what the last one left."""

    temperature: float = 1.0
    """Logits are divided by it."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Only the fewest tokens whose probabilities reach p (Holtzman et al. 2020, arXiv:1904.09751)."""
    min_p: float = 0.0
    """Only tokens with this share of the likeliest one's probability or more (Nguyen et al. 2024, arXiv:2407.01082)."""

    def weights(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """logits [R, V] -> weights [R, n] in float64, not normalised, and the tokens [R, n] that they belong to.

        None for the tokens where they are simply 0 ... V - 1. A row of minus infinity gives weights of NaN.
        """
        values = logits.double()
        # The softmax is the same without the largest, and no temperature, however small, makes a difference overflow
        # upwards.
        values = (values - values.amax(dim=-1, keepdim=True)) / self.temperature
        index: Tensor | None = None
        if 0 < self.top_k < values.size(-1):
            values, index = values.topk(self.top_k, dim=-1)
        elif self.top_p < 1.0:
            values, index = values.sort(dim=-1, descending=True, stable=True)
        weights = values.softmax(dim=-1)  # [R, n]
        keep = torch.ones_like(weights, dtype=torch.bool)
        if self.top_p < 1.0:
            # A token stays where the likelier ones do not reach p without it: the likeliest always does.
            keep = weights.cumsum(dim=-1) - weights < self.top_p
        if self.min_p > 0.0:
            keep = keep & (weights >= self.min_p * weights.amax(dim=-1, keepdim=True))
        return weights * keep, index

    def distribution(self, logits: Tensor) -> Tensor:
        """logits [R, V] -> the probabilities [R, V] that are drawn from, in float64."""
        weights, index = self.weights(logits)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        if index is None:
            return weights
        return torch.zeros_like(logits, dtype=torch.float64).scatter_(-1, index, weights)


class Draw:
    """The choice of a path by chance."""

    def __init__(self, seeds: Tensor, filters: Filter) -> None:
        """seeds [R], int64: one for each path, of `path_seed`."""
        self.seeds = seeds
        self.filters = filters

    def choose(self, logits: Tensor, lengths: Tensor) -> Tensor:
        """logits [R, V] and the tokens so far [R] -> tokens [R]; where nothing is allowed, a forbidden one."""
        weights, index = self.filters.weights(logits)
        stuck = logits.amax(dim=-1, keepdim=True) == NEVER  # [R, 1]
        weights = weights.masked_fill(stuck, 1.0)
        return pick(weights, self.seeds, lengths, index)

    def select(self, rows: Tensor) -> Draw:
        return Draw(self.seeds[rows], self.filters)

    def join(self, other: Draw) -> Draw:
        return Draw(torch.cat([self.seeds, other.seeds]), self.filters)


def pick(weights: Tensor, seeds: Tensor, counters: Tensor, tokens: Tensor | None = None) -> Tensor:
    """weights [R, n] >= 0, of the tokens [R, n] (None: 0 ... n - 1) -> tokens [R], each by its share of the weight.

    A race: every token arrives after an exponentially distributed time, the sooner the larger its weight, and the first
    is taken. The times are fixed by seed [R], counter [R] and token alone, so a weight that moves by a rounding error
    moves its own token's time by as little. In a sum over all weights, against which one number is held, it would move
    every token behind it, and in the tail of a large vocabulary that changes a draw in a thousand.
    """
    who = torch.arange(weights.size(1), device=weights.device)[None] if tokens is None else tokens
    times = -torch.log1p(-uniform(_mixed(seeds, counters)[:, None], who))  # [R, n], of rate 1
    first = (weights / times.clamp_min(2.0**-60)).argmax(dim=-1, keepdim=True)  # [R, 1]
    return (first if tokens is None else tokens.gather(1, first))[:, 0]


def path_seed(seed: int, ids: Iterable[int], sample: int) -> int:
    """The seed of one path, a signed 64-bit number: of the user's seed, the source's tokens and the sample's number."""
    text = " ".join(map(str, (seed, sample, *ids)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


# Constants of splitmix64 (Steele, Lea, Flood 2014), as signed numbers, which is what tensors hold.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """Number `counters` of the random sequence of each seed: float64 in [0, 1), with 53 random bits.

    Any of them can be asked for, in any order and on any device, and is always the same. The two shapes are broadcast.
    """
    return _shifted(_mixed(seeds, counters), 11).double() * 2.0**-53


def _mixed(seeds: Tensor, counters: Tensor) -> Tensor:
    """The 64 bits of that number, which are as good a seed as any."""
    x = seeds + (counters + 1) * _STEP  # int64 wraps around, as the generator wants
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: the sign is a bit like any other."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
