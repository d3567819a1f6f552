"""Label smoothing (§5.4) and the loss over the shared vocabulary (§3.4), plain and without the logits in memory.

The paper says only "label smoothing of value ε_ls = 0.1" (arXiv:1512.00567); three readings of it are in use, and they
are three different losses. All of them are a target distribution q and the cross-entropy -Σ q log p:

    paper     q = 1 - ε on the target, ε / (V - 1) on every other entry (the authors' code, but q's entropy stays in)
    uniform   q = (1 - ε) on the target plus ε / V on all entries, the target too (torch's cross_entropy)
    skip_pad  q = 1 - ε on the target, ε / (V - 2) on every other entry but padding, 0 there (The Annotated Transformer)

Letters: n positions, D d_model, V vocabulary, C positions in a chunk. Losses are sums over tokens in float32: the
caller divides by the tokens of the whole update, however it was cut.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Convention = Literal["paper", "uniform", "skip_pad"]


class Smoothing(NamedTuple):
    """q as three numbers: `on_target` at the target, `elsewhere` at every other entry, 0 at the entry `never`."""

    on_target: float
    elsewhere: float
    never: int | None


def smoothing(vocab_size: int, label_smoothing: float, pad_id: int, convention: Convention = "paper") -> Smoothing:
    """The target distribution of a convention over `vocab_size` entries. ValueError for a convention unknown to it."""
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing must be at least 0 and below 1, not {label_smoothing}")
    eps, V = label_smoothing, vocab_size
    if convention == "paper":
        return Smoothing(1.0 - eps, eps / max(V - 1, 1), None)
    if convention == "uniform":
        return Smoothing(1.0 - eps + eps / V, eps / V, None)
    if convention == "skip_pad":
        return Smoothing(1.0 - eps, eps / max(V - 2, 1), pad_id)
    raise ValueError(f"convention must be paper, uniform or skip_pad, not {convention!r}")


def smoothed_cross_entropy(
    logits: Tensor, tgt_out: Tensor, label_smoothing: float, pad_id: int, convention: Convention = "paper"
) -> tuple[Tensor, int]:
    """logits [..., V], tgt_out [...] -> the loss summed over the targets that are not padding, and their number.

    Padding weighs nothing; where all is padding the loss is 0 with finite (zero) gradients. `label_smoothing` 0 is the
    plain negative log-likelihood. This is the readable form: `projected_loss` gives the same numbers from features.
    """
    V = logits.size(-1)
    q = smoothing(V, label_smoothing, pad_id, convention)
    real = tgt_out != pad_id  # [...]
    log_probs = logits[real].log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))  # [n, V]
    at_target = log_probs.gather(-1, tgt_out[real][:, None])[:, 0]  # [n]
    everywhere = log_probs.sum(dim=-1)  # [n]
    if q.never is not None:
        everywhere = everywhere - log_probs[:, q.never]
    loss = -((q.on_target - q.elsewhere) * at_target + q.elsewhere * everywhere).sum()
    return loss, int(real.sum())


def nll(logits: Tensor, tgt_out: Tensor, pad_id: int) -> tuple[Tensor, int]:
    """logits [..., V], tgt_out [...] -> the unsmoothed sum, from which perplexity is taken, and the token count."""
    return smoothed_cross_entropy(logits, tgt_out, 0.0, pad_id)
