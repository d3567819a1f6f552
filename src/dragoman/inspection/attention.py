"""The attention weights of every layer and head, without keeping any on the model in ordinary use.

The model returns softmax(Q K^T / sqrt(d_k)) V W^O and throws the softmax away (§3.2.2), as it should. Here hooks sit on
its attention modules for the length of a `with` and compute that softmax once more from the same inputs.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dragoman.model.transformer import MultiHeadAttention

Kind = Literal["encoder", "cross", "decoder"]
KINDS: tuple[Kind, ...] = ("encoder", "cross", "decoder")


@dataclass(frozen=True)
class AttentionMap:
    """Where the heads of one module look."""

    kind: Kind
    """Encoder self-attention, decoder to encoder, or decoder self-attention: the three uses of §3.2.3."""
    layer: int
    """From 0, counted in the order in which the stack computes."""
    weights: Tensor
    """[B, H, T, S], float32 on the CPU; rows sum to 1, or to 0 where a query may look at nothing."""


@contextmanager
def record_attention(model: nn.Module) -> Iterator[list[AttentionMap]]:
    """Within the `with`, each forward pass of `model` appends its maps to the list, in the order of computation.

    Modules that are no `MultiHeadAttention` are passed over; a family without any gives an empty list.
    """
    maps: list[AttentionMap] = []
    places = {name: module for name, module in model.named_modules() if isinstance(module, MultiHeadAttention)}
    layers: dict[Kind, list[str]] = {kind: [name for name in places if kind_of(name) == kind] for kind in KINDS}

    def hook_of(name: str) -> Any:
        kind = kind_of(name)
        layer = layers[kind].index(name)

        def hook(module: MultiHeadAttention, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            weights = attention_weights(module, given["query"], given["key"], given.get("mask"))
            maps.append(AttentionMap(kind, layer, weights.detach().float().cpu()))

        return hook

    handles = [module.register_forward_hook(hook_of(name), with_kwargs=True) for name, module in places.items()]
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def attention_weights(module: MultiHeadAttention, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(Q K^T / sqrt(d_k)) of equation (1) for every head.

    query [B, T, D], key [B, S, D], mask to [B, H, T, S], True = may look -> [B, H, T, S].
    """
    q, k = module.split(module.q(query)), module.split(module.k(key))  # [B, H, T, K], [B, H, S, K]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # [B, H, T, S]
    if mask is None:
        return scores.softmax(dim=-1)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1).masked_fill(~mask, 0.0)


def kind_of(name: str) -> Kind:
    """The use of an attention module, told from its path in the model, such as `decoder.layers.0.cross_attention`."""
    parts = re.split(r"[._]", name)
    if "cross" in parts:
        return "cross"
    return "encoder" if "encoder" in parts else "decoder"


def entropy_bits(weights: Tensor) -> Tensor:
    """How widely heads look, the mean entropy of their rows: weights [..., T, S] -> [...], 0 (one place) to log2 S."""
    return -(weights * weights.clamp_min(1e-12).log2()).sum(dim=-1).mean(dim=-1)
