"""What training computes between its matrix products, on packed rows, in PyTorch.

Packed: the real tokens of a batch lie row under row without padding, [n, D]; `Rows` says where each sentence begins.
`compiled.CompiledKernels` has the same methods in C, one pass over memory each; these are its fallback and its oracle.
Dropout is decided by 16 random bits an element (`Bits`), the same in both, so that both make the same masks.

Letters as in transformer.py, and n rows of tokens, W the widest sentence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Rows:
    """Where the sentences of a packed batch lie: sentence b in rows start[b] ... start[b] + length[b] - 1."""

    start: Tensor  # [B]
    length: Tensor  # [B], may be 0
    positions: Tensor  # [n] column of each token in its sentence, for the sinusoids
    real: int
    """Rows that hold tokens; those behind, up to `n`, only make `n` a round number."""
    widest: int

    @property
    def n(self) -> int:
        return self.positions.numel()

    @cached_property
    def places(self) -> Tensor:
        """[real] index of each token in a padded [B * W]."""
        sentence = torch.repeat_interleave(torch.arange(self.length.numel()), self.length)  # [real]
        return sentence * self.widest + (torch.arange(self.real) - self.start[sentence])

    def pad(self, x: Tensor) -> Tensor:
        """[n, H, K] -> [B, H, W, K], zeros where there is no token."""
        padded = x.new_zeros(self.length.numel() * self.widest, *x.shape[1:])
        padded[self.places] = x[: self.real]
        rows: Tensor = padded.unflatten(0, (-1, self.widest))
        return rows.transpose(1, 2)

    def unpad(self, x: Tensor, out: Tensor) -> None:
        """[B, H, W, K] -> the first `real` rows of out [n, H, K]."""
        out[: self.real] = x.transpose(1, 2).flatten(0, 1)[self.places]


def pack(mask: Tensor, multiple: int = 1) -> tuple[Tensor, Rows]:
    """mask [B, S], True = a real token -> index [n] into the flattened batch, and the layout.

    With `multiple` the number of rows is rounded up, for products that want few different sizes; the rows that this
    adds point at token 0 and are to be ignored.
    """
    index = mask.flatten().nonzero()[:, 0]  # [real]
    real = index.numel()
    length = mask.sum(dim=1)  # [B]
    if extra := -real % multiple:
        index = F.pad(index, (0, extra))
    widest = int(length.max()) if length.numel() else 0
    return index, Rows(length.cumsum(0) - length, length, index % max(mask.size(1), 1), real, widest)


class Bits:
    """Random bits for dropout: a function of the seed alone, in the order in which they are drawn (numpy's SFC64)."""

    def __init__(self, *seed: int) -> None:
        self._source = np.random.SFC64(np.random.SeedSequence(seed))

    def draw(self, n: int, width: int) -> Tensor:
        """[n, width] of int16, every value equally likely."""
        words = self._source.random_raw(-(-n * width // 4))
        return torch.from_numpy(words.view(np.int16)[: n * width]).view(n, width)


@dataclass(frozen=True)
class Dropout:
    """Dropout of probability p as 16 bits see it, to 1 / 65,536: keep where bits >= threshold, times scale."""

    p: float

    @property
    def threshold(self) -> int:
        return round(self.p * 65_536) - 32_768

    @property
    def scale(self) -> float:
        return 1.0 / (1.0 - round(self.p * 65_536) / 65_536)

    def __call__(self, x: Tensor, bits: Tensor | None) -> Tensor:
        """x [n, D] -> the same, dropped by bits [n, D]."""
        return x if bits is None else torch.where(bits >= self.threshold, x * self.scale, 0.0).to(x.dtype)


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of one attention, and who may look at whom."""

    n_heads: int
    d_k: int
    d_v: int
    queries: Rows
    keys: Rows
    causal: bool

    def mask(self) -> Tensor:
        """[B, 1, T, S], True = may look."""
        keys = torch.arange(self.keys.widest)
        mask = (keys < self.keys.length[:, None])[:, None, None]  # [B, 1, 1, S]
        return mask & (keys <= torch.arange(self.queries.widest)[:, None]) if self.causal else mask


class Kernels:
    """All in PyTorch. Statistics and sums are float32 whatever the rows are."""

    name = "torch"

    def fits(self, *widths: int) -> bool:
        """Whether rows of these widths can be computed: here, any."""
        return True

    def residual_norm(
        self, x: Tensor, y: Tensor, bits: Tensor | None, dropout: Dropout, gamma: Tensor, beta: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, y [n, D] -> LayerNorm(z), z = x + Dropout(y), and each row's mean and 1 / deviation [n] (§5.4)."""
        z = x.float() + dropout(y, bits).float()
        out, mean, rstd = torch.native_layer_norm(z, [z.size(1)], gamma, beta, eps)
        return out.to(x.dtype), z.to(x.dtype), mean[:, 0], rstd[:, 0]

    def residual_norm_backward(
        self,
        grad: Tensor,
        z: Tensor,
        bits: Tensor | None,
        dropout: Dropout,
        gamma: Tensor,
        beta: Tensor,
        mean: Tensor,
        rstd: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """grad [n, D] -> dx, dy [n, D], dgamma, dbeta [D]."""
        dz, dgamma, dbeta = torch.ops.aten.native_layer_norm_backward(
            grad.float(), z.float(), [z.size(1)], mean[:, None], rstd[:, None], gamma, beta, [True, True, True]
        )
        dx = dz.to(grad.dtype)
        return dx, dropout(dx, bits), dgamma, dbeta

    def embed(
        self,
        tokens: Tensor,
        positions: Tensor,
        table: Tensor,
        sinusoids: Tensor,
        factor: float,
        bits: Tensor | None,
        dropout: Dropout,
        dtype: torch.dtype,
    ) -> Tensor:
        """tokens, positions [n] -> Dropout(table[tokens] * factor + sinusoids[positions]) [n, D] (§3.4, §3.5)."""
        return dropout(table[tokens] * factor + sinusoids[positions], bits).to(dtype)

    def embed_backward(
        self, grad: Tensor, tokens: Tensor, rows: int, factor: float, bits: Tensor | None, dropout: Dropout
    ) -> Tensor:
        """grad [n, D] -> the gradient of the table [rows, D], float32: a frequent token sums many small terms."""
        out = torch.zeros(rows, grad.size(1))
        return out.index_add_(0, tokens, dropout(grad.float() * factor, bits))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, shape: AttentionShape, out: Tensor) -> Tensor:
        """q [n, H * K], k [m, H * K], v [m, H * V] -> out [n, H * V], filled; returns log sum exp [n, H] (§3.2.1)."""
        weights, scores = self._weights(q, k, shape)
        values = shape.keys.pad(v.unflatten(1, (shape.n_heads, -1)))  # [B, H, S, V]
        shape.queries.unpad(weights.to(v.dtype) @ values, out.unflatten(1, (shape.n_heads, -1)))
        lse = q.new_zeros(q.size(0), shape.n_heads, 1, dtype=torch.float32)
        shape.queries.unpad(scores.logsumexp(-1, keepdim=True), lse)
        return lse[:, :, 0]

    def attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, shape: AttentionShape, into: list[Tensor]
    ) -> None:
        """grad [n, H * V] -> fills `into`, the gradients of q, k and v."""
        weights, _ = self._weights(q, k, shape)  # [B, H, T, S]

        def heads(x: Tensor) -> Tensor:
            split: Tensor = x.unflatten(1, (shape.n_heads, -1))
            return split

        g, low = shape.queries.pad(heads(grad)), grad.dtype
        d_weights = (g @ shape.keys.pad(heads(v)).transpose(-2, -1)).float()
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) / math.sqrt(shape.d_k)
        d_scores = d_scores.to(low)
        shape.queries.unpad(d_scores @ shape.keys.pad(heads(k)), heads(into[0]))
        shape.keys.unpad(d_scores.transpose(-2, -1) @ shape.queries.pad(heads(q)), heads(into[1]))
        shape.keys.unpad(weights.to(low).transpose(-2, -1) @ g, heads(into[2]))

    def _weights(self, q: Tensor, k: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor]:
        """Softmax of the scores, zeros in an empty row, and the scores: [B, H, T, S] in float32."""
        queries = shape.queries.pad(q.unflatten(1, (shape.n_heads, -1)))
        keys = shape.keys.pad(k.unflatten(1, (shape.n_heads, -1)))
        mask = shape.mask()
        scores = (queries @ keys.transpose(-2, -1)).float() / math.sqrt(shape.d_k)
        scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
        return scores.softmax(-1).masked_fill(~mask, 0.0), scores

    def smoothed_loss(
        self, logits: Tensor, targets: Tensor, pad_id: int, on: float, off: float, never: int | None
    ) -> tuple[float, float]:
        """logits [n, V] -> replaced by their gradient; the sums of -Σ q log p and of -log p (training/loss.py).

        q is `on` at the target, `off` elsewhere, 0 at `never`; a target of `pad_id` has neither loss nor gradient.
        """
        real = (targets != pad_id)[:, None]  # [n, 1]
        log_p = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        at_target = torch.where(real, log_p.gather(1, targets[:, None]), 0.0).sum(dtype=torch.float64)
        everywhere = torch.where(real, log_p, 0.0).sum(dtype=torch.float64)
        if never is not None:
            everywhere -= torch.where(real[:, 0], log_p[:, never], 0.0).sum()
        weight = on + off * (logits.size(1) - (1 if never is None else 2))
        gradient = log_p.exp_().mul_(weight).sub_(off)
        if never is not None:
            gradient[:, never] += off
        gradient.scatter_add_(1, targets[:, None], gradient.new_full((logits.size(0), 1), off - on))
        logits.copy_(gradient.masked_fill_(~real, 0.0))
        return float(-(on - off) * at_target - off * everywhere), float(-at_target)

    def r_drop_loss(
        self,
        first: Tensor,
        second: Tensor,
        targets: Tensor,
        pad_id: int,
        on: float,
        off: float,
        never: int | None,
        alpha: float,
    ) -> tuple[float, float]:
        """first, second [n, V]: logits of two passes with the same targets -> both replaced by their gradients of

            1/2 the sum of their smoothed losses + alpha / 4 (KL(p || r) + KL(r || p)), p and r their distributions

        (R-Drop, Liang et al. 2021, arXiv:2106.14448, eq. 4, halved); that sum, and half the sum of their -log p.
        """
        real = (targets != pad_id)[:, None]  # [n, 1]
        log_p, log_r = (x.log_softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (first, second))
        p, r, apart = log_p.exp(), log_r.exp(), log_p - log_r
        p_mean, r_mean = ((x * apart).sum(-1, keepdim=True) for x in (p, r))  # KL(p || r), -KL(r || p)
        pull = alpha / 4.0
        loss = pull * float(torch.where(real, p_mean - r_mean, 0.0).sum(dtype=torch.float64))
        nll = 0.0
        pulls = p * (apart - p_mean) + p - r, r * (r_mean - apart) + r - p
        for logits, toward in zip((first, second), pulls, strict=True):
            smoothed, plain = self.smoothed_loss(logits, targets, pad_id, on, off, never)
            loss, nll = loss + smoothed / 2.0, nll + plain / 2.0
            logits.copy_(logits / 2.0 + pull * torch.where(real, toward, 0.0))
        return loss, nll
