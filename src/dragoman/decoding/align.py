"""Which source token a target token comes from, read off the cross-attention of a trained model.

The heads of one middle layer are averaged, and a target token takes the weights of the position where it is read, not
where it is predicted: attention there knows which word it is about (Chen et al. 2020, arXiv:2004.14837, SHIFT-ATT).
Nothing was trained for it, so an alignment is a hint and not a promise.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dragoman.decoding.force import cut, mask_of, padded
from dragoman.decoding.search import evaluating
from dragoman.errors import ModelError


def alignments(
    model: Any,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    bos_id: int,
    pad_id: int,
    *,
    batch_tokens: int = 8192,
    device: torch.device | str | None = None,
) -> list[list[tuple[int, int]]]:
    """For each pair, (source position, target position) for every target token, in the order of the target.

    Sources end in EOS, which nothing is aligned with; targets come without EOS.
    """
    results: list[list[tuple[int, int]]] = [[] for _ in targets]
    sizes = [max(len(source), len(target) + 1) for source, target in zip(sources, targets, strict=True)]
    with torch.no_grad(), evaluating(model):
        for batch in cut(sizes, batch_tokens):
            src = [sources[i] for i in batch]
            tgt = [[bos_id, *targets[i]] for i in batch]
            weights = cross_attention(
                model, padded(src, pad_id, device), mask_of(src, device), padded(tgt, pad_id, device)
            ).mean(dim=1)  # [B, T, S]
            for row, i in zip(weights, batch, strict=True):
                n = len(sources[i]) - 1
                if n and targets[i]:
                    best = row[1 : len(targets[i]) + 1, :n].argmax(dim=-1)
                    results[i] = [(s, t) for t, s in enumerate(best.tolist())]
    return results


def cross_attention(model: Any, src: Tensor, src_mask: Tensor, tgt_in: Tensor, layer: int | None = None) -> Tensor:
    """The weights [B, H, T, S] of one decoder layer's attention over the source, by default the middle one's.

    Raises ModelError for a model that has no such attention.
    """
    try:
        layers = model.decoder.layers
        attention = layers[len(layers) // 2 if layer is None else layer].cross_attention
    except (AttributeError, IndexError):
        raise ModelError("this model has no attention over the source to read an alignment from") from None
    seen: list[Tensor] = []
    this_thread = threading.get_ident()

    def look(module: Any, args: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> None:
        if threading.get_ident() != this_thread:  # another request on the same weights
            return
        query, key, _, mask = args
        q, k = module.split(module.q(query)), module.split(module.k(key))  # [B, H, T, K], [B, H, S, K]
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).float()
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        seen.append(scores.softmax(dim=-1))

    handle = attention.register_forward_pre_hook(look)
    try:
        model(src, tgt_in, src_mask)
    finally:
        handle.remove()
    return seen[-1]
