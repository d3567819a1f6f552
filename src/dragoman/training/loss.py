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

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dragoman.model.compiled import best_kernels
from dragoman.model.kernels import Kernels
from dragoman.model.projections import Projection

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


def r_drop_cross_entropy(
    first: Tensor,
    second: Tensor,
    tgt_out: Tensor,
    label_smoothing: float,
    pad_id: int,
    alpha: float,
    convention: Convention = "paper",
) -> Tensor:
    """first, second [..., V]: logits of two passes with dropout over the same targets [...] -> their loss, summed.

    Half the sum of both smoothed losses, and `alpha` / 2 times the mean of the divergences of their distributions from
    each other (R-Drop, Liang et al. 2021, arXiv:2106.14448, eq. 4, halved so that it is a mean over the passes).
    """
    losses = [
        smoothed_cross_entropy(logits, tgt_out, label_smoothing, pad_id, convention)[0] for logits in (first, second)
    ]
    real = tgt_out != pad_id
    log_p, log_r = (
        logits[real].log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        for logits in (first, second)
    )  # [n, V]
    divergence = ((log_p.exp() - log_r.exp()) * (log_p - log_r)).sum()  # KL(p || r) + KL(r || p)
    return (losses[0] + losses[1]) / 2.0 + alpha / 4.0 * divergence


def projected_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tgt: Tensor,
    label_smoothing: float,
    pad_id: int,
    convention: Convention = "paper",
    *,
    r_drop: float = 0.0,
    projection: Projection | None = None,
    chunk: int | None = None,
    kernels: Kernels | None = None,
) -> tuple[Tensor, Tensor]:
    """The Generator (§3.4) and its loss in one: features [n, D], weight [V, D], tgt [n] -> (loss sum, nll sum).

    With `r_drop` features are [2n, D], those of two passes one behind the other, and the loss is that of
    `r_drop_cross_entropy` with this alpha.

    As `smoothed_cross_entropy(features @ weight.T + bias, ...)`, but logits exist for `chunk` positions at a time (by
    default about 16 MB of them, 256 MB on a GPU) and are overwritten by their gradient, so that none are kept for the
    way back. Padding in `tgt` weighs nothing, yet costs its logits: leave it out. `projection` is that of weight and
    bias, if the caller has it; the gradient of `weight` is summed in float32. The second sum has no gradient.
    """
    q = smoothing(weight.size(0), label_smoothing, pad_id, convention)
    if chunk is None:
        chunk = chunk_of(features, weight.size(0))
    if kernels is None:
        kernels = best_kernels() if features.device.type == "cpu" and features.dtype in _NATIVE else Kernels()
    if features.size(0) != tgt.size(0) * (2 if r_drop else 1):
        raise ValueError(f"there are {features.size(0)} rows of features for {tgt.size(0)} targets")
    if projection is None:
        projection = Projection([weight], [bias], features.dtype)
    apply: Any = _ProjectedLoss.apply
    recorded = torch.is_grad_enabled()
    loss, nll_sum = apply(features, weight, bias, projection, tgt, q, pad_id, r_drop, chunk, kernels, recorded)
    return loss, nll_sum


def chunk_of(features: Tensor, vocab_size: int) -> int:
    """C: how many of the features [n, D] should have their logits at a time."""
    held = CHUNK_BYTES if features.device.type == "cpu" else GPU_CHUNK_BYTES
    return max(held // (vocab_size * features.element_size()), 64)


_NATIVE = (torch.float32, torch.bfloat16)
CHUNK_BYTES = 16_000_000
"""Of logits at a time: about what a cache holds."""
GPU_CHUNK_BYTES = 256_000_000
"""A GPU waits for the host after each chunk: few large ones."""


class _ProjectedLoss(Function):
    """The gradient of a sum of losses is known when the losses are, so the way forward computes it, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        projection: Projection,
        tgt: Tensor,
        q: Smoothing,
        pad_id: int,
        r_drop: float,
        chunk: int,
        kernels: Kernels,
        recorded: bool,
    ) -> tuple[Tensor, Tensor]:
        wanted = recorded and any(ctx.needs_input_grad[:3])
        exact = torch.promote_types(features.dtype, torch.float32)
        d_features = torch.empty_like(features) if wanted else None
        shapes = weight.shape, weight.shape[:1]  # [V, D], [V]
        sums = [weight.new_zeros(shape if wanted else (0,), dtype=exact) for shape in shapes]
        loss = nll_sum = 0.0
        n = tgt.size(0)
        passes = range(0, features.size(0), n) if n else ()  # where each pass begins
        chunk = max(chunk // max(len(passes), 1), 1)
        for start in range(0, n, chunk):
            target = tgt[start : start + chunk]  # [C]
            rows = [slice(first + start, first + start + target.size(0)) for first in passes]
            logits = [projection.forward(features[where]) for where in rows]  # each [C, V]
            if r_drop:
                one, plain = kernels.r_drop_loss(logits[0], logits[1], target, pad_id, *q, r_drop)
            else:
                one, plain = kernels.smoothed_loss(logits[0], target, pad_id, *q)
            loss, nll_sum = loss + one, nll_sum + plain
            if d_features is not None:
                for where, gradient in zip(rows, logits, strict=True):
                    d_features[where] = projection.backward(gradient)
                    projection.gradients(gradient, features[where], into=(sums[0], sums[1]))
        if d_features is not None:
            ctx.save_for_backward(d_features, *(each.to(weight.dtype) for each in sums))
            ctx.biased = bias is not None
        result = features.new_tensor(loss, dtype=exact), features.new_tensor(nll_sum, dtype=exact)
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        d_features, d_weight, d_bias = ctx.saved_tensors
        scaled = [d_features * grad, d_weight * grad, d_bias * grad if ctx.biased else None]
        return *scaled, None, None, None, None, None, None, None, None
