"""Which source token a target token comes from, read off the cross-attention of a trained model.

The heads of all layers are averaged, at the position that predicts the token, as `inspect` shows it. On the small
Marian model that we could check by hand this names the right word, where the middle layer alone, read one position
later (Chen et al. 2020, arXiv:2004.14837, SHIFT-ATT), does not. Nothing was trained for it: it is a hint, no promise.
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
            )
            for row, i in zip(weights, batch, strict=True):
                n = len(sources[i]) - 1
                if n and targets[i]:
                    best = row[: len(targets[i]), :n].argmax(dim=-1)
                    results[i] = [(s, t) for t, s in enumerate(best.tolist())]
    return results


def cross_attention(model: Any, src: Tensor, src_mask: Tensor, tgt_in: Tensor) -> Tensor:
    """The weights [B, T, S] of the decoder's attention over the source, averaged over layers and heads.

    Raises ModelError for a model that has no such attention.
    """
    try:
        attentions = [layer.cross_attention for layer in model.decoder.layers]
    except AttributeError:
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
        seen.append(scores.softmax(dim=-1).mean(dim=1))  # [B, T, S]

    handles = [attention.register_forward_pre_hook(look) for attention in attentions]
    try:
        model(src, tgt_in, src_mask)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(seen).mean(dim=0)
