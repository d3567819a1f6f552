"""Scoring given targets by teacher forcing: the same numbers that a search reports for the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dragoman.decoding.options import MOST_ROWS
from dragoman.decoding.search import evaluating, has_whole_pass


def padded(rows: Sequence[Sequence[int]], filler: int, device: torch.device | str | None = None) -> Tensor:
    """Lists of ids -> [B, longest], filled up on the right."""
    longest = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows], dtype=torch.long, device=device)


def mask_of(rows: Sequence[Sequence[int]], device: torch.device | str | None = None) -> Tensor:
    """[B, longest], True where `padded` has a token: a token that happens to have the filler's id counts as one."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long, device=device)
    return torch.arange(int(lengths.max()) if len(rows) else 0, device=device) < lengths[:, None]


def cut(lengths: Sequence[int], batch_tokens: int, most: int | None = None) -> Iterator[list[int]]:
    """Indices of `lengths`, longest first, in batches whose rows x longest is at most `batch_tokens`, or of one row.

    `most`: rows of a batch, at most.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and ((len(batch) + 1) * lengths[batch[0]] > batch_tokens or len(batch) == most):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def token_log_probs(
    model: Any,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    bos_id: int,
    pad_id: int,
    *,
    batch_tokens: int = 8192,
    device: torch.device | str | None = None,
) -> list[list[float]]:
    """log P of each target token given those before it and the source.

    Sources end in EOS; targets too, where their end is to be scored. BOS is added in front of each target.
    """
    results: list[list[float]] = [[] for _ in targets]
    sizes = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    with torch.no_grad(), evaluating(model):
        for batch in cut(sizes, batch_tokens, MOST_ROWS):
            src = [sources[i] for i in batch]
            tgt = [targets[i] for i in batch]
            log_probs = _forced(model, src, tgt, bos_id, pad_id, device).tolist()
            for i, row in zip(batch, log_probs, strict=True):
                results[i] = row[: len(targets[i])]
    return results


def _forced(
    model: Any,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    bos_id: int,
    pad_id: int,
    device: torch.device | str | None,
) -> Tensor:
    """[B, T] log-probabilities of the target tokens; what stands after a target's end means nothing."""
    src, src_mask = padded(sources, pad_id, device), mask_of(sources, device)
    tgt_out = padded(targets, pad_id, device)  # [B, T]
    if not tgt_out.size(1):
        return tgt_out.float()
    bos = torch.full_like(tgt_out[:, :1], bos_id)
    tgt_in = torch.cat([bos, tgt_out[:, :-1]], dim=1)  # shifted right
    if bos_id == pad_id or not has_whole_pass(model):
        # A whole pass takes a pad for nothing to see, wherever it stands; here it is where decoding starts. And what is
        # made for decoding alone has no whole pass.
        logits = _stepped(model, src, src_mask, tgt_in)
    else:
        logits = model(src, tgt_in, src_mask)  # [B, T, V]
    logits = logits.float()
    chosen = logits.gather(-1, tgt_out[..., None])[..., 0]  # [B, T]
    return chosen - logits.logsumexp(dim=-1)


def _stepped(model: Any, src: Tensor, src_mask: Tensor, tgt_in: Tensor) -> Tensor:
    """The logits [B, T, V] of a whole pass, one position after the other."""
    state = model.start(src, src_mask)
    answers = []
    for tokens in tgt_in.unbind(dim=1):
        logits, state = model.step(tokens, state)
        answers.append(logits)
    return torch.stack(answers, dim=1)
