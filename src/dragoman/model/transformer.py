"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762), whole, in the paper's order.

Letters: B batch, S source length, T target length, D d_model, F d_ff, H heads, K d_k, V d_v in shapes of values and
vocabulary in shapes of logits. Batch comes first everywhere. Masks are boolean, True = may look, and broadcast to
[B, H, T, S]. What the paper leaves open is taken from its authors' released code and marked "T2T" below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

# Table 3: the columns are the only knobs -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TransformerConfig:
    """One row of Table 3; the defaults are the base model."""

    vocab_size: int
    """Entries of the one vocabulary that source, target and softmax share (§5.1: about 37,000)."""
    n_layers: int = 6
    """N: identical layers in the encoder, and as many in the decoder."""
    d_model: int = 512
    """Width of every embedding and sub-layer output."""
    d_ff: int = 2048
    """Inner width of the feed-forward networks."""
    n_heads: int = 8
    """h: parallel attention heads."""
    d_k: int | None = None
    """Width of a head's queries and keys; d_model / n_heads unless given."""
    d_v: int | None = None
    """Width of a head's values; d_model / n_heads unless given."""
    dropout: float = 0.1
    """P_drop: on each sub-layer's output and on embeddings plus positions (§5.4)."""
    pad_id: int = 0
    """The token that fills short rows; it is never looked at."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("vocab_size", "n_layers", "d_model", "d_ff", "n_heads")}
        sizes |= {name: value for name in ("d_k", "d_v") if (value := getattr(self, name)) is not None}
        wrong = [f"{name} must be at least 1, not {value}" for name, value in sizes.items() if value < 1]
        if not 0.0 <= self.dropout < 1.0:
            wrong.append(f"dropout must be at least 0 and below 1, not {self.dropout}")
        if self.d_model % 2:
            wrong.append(f"d_model must be even, since sines and cosines come in pairs (§3.5), not {self.d_model}")
        if not 0 <= self.pad_id < self.vocab_size:
            wrong.append(f"pad_id {self.pad_id} is not an entry of a vocabulary of {self.vocab_size}")
        if (self.d_k is None or self.d_v is None) and self.n_heads > 0 and self.d_model % self.n_heads:
            wrong.append(f"d_model {self.d_model} does not divide into {self.n_heads} heads; give d_k and d_v")
        if wrong:
            raise ValueError("; ".join(wrong))


# §3.1 Encoder and decoder stacks -------------------------------------------------------------------------------------

Sublayer = Callable[[Tensor], Tensor]


class PostNorm(nn.Module):
    """The residual connection of §3.1 and §5.4: LayerNorm(x + Dropout(Sublayer(x)))."""

    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        y: Tensor = self.norm(x + self.dropout(sublayer(x)))  # [B, T, D]
        return y


class EncoderLayer(nn.Module):
    """§3.1: "a multi-head self-attention mechanism, and [...] a position-wise fully connected feed-forward network"."""

    def __init__(self, self_attention: nn.Module, feed_forward: nn.Module, residual: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.feed_forward = feed_forward
        self.self_attention_residual = residual()
        self.feed_forward_residual = residual()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B, S, D], mask to [B, H, S, S] -> [B, S, D]."""
        x = self.self_attention_residual(x, lambda x: self.self_attention(x, x, x, mask))  # [B, S, D]
        y: Tensor = self.feed_forward_residual(x, self.feed_forward)  # [B, S, D]
        return y


class Encoder(nn.Module):
    """§3.1: "a stack of N = 6 identical layers". Post-norm layers end normalised: the paper has no final norm."""

    def __init__(self, layers: list[EncoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B, S, D], mask to [B, H, S, S] -> memory [B, S, D]."""
        for layer in self.layers:
            x = layer(x, mask)
        return x


@dataclass(frozen=True)
class LayerState:
    """What one decoder layer remembers between steps; all [B, H, length, K or V]."""

    k: Tensor
    v: Tensor
    memory_k: Tensor
    memory_v: Tensor


class DecoderLayer(nn.Module):
    """§3.1: the encoder's two sub-layers, and between them "multi-head attention over the output of the encoder"."""

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        cross_attention: MultiHeadAttention,
        feed_forward: nn.Module,
        residual: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.cross_attention = cross_attention
        self.feed_forward = feed_forward
        self.self_attention_residual = residual()
        self.cross_attention_residual = residual()
        self.feed_forward_residual = residual()

    def forward(
        self, x: Tensor, memory: Tensor, mask: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        """x [B, T, D], memory [B, S, D], masks to [B, H, T, T] and [B, H, T, S] -> [B, T, D]."""
        x = self.self_attention_residual(x, lambda x: self.self_attention(x, x, x, mask))  # [B, T, D]
        x = self.cross_attention_residual(x, lambda x: self.cross_attention(x, memory, memory, memory_mask))
        y: Tensor = self.feed_forward_residual(x, self.feed_forward)  # [B, T, D]
        return y

    def start(self, memory: Tensor) -> LayerState:
        """memory [B, S, D] -> the state before the first token: its keys and values are projected once."""
        k, v = self.self_attention.keys_and_values(memory[:, :0], memory[:, :0])  # no past yet: [B, H, 0, K]
        memory_k, memory_v = self.cross_attention.keys_and_values(memory, memory)  # [B, H, S, K], [B, H, S, V]
        return LayerState(k, v, memory_k, memory_v)

    def step(self, x: Tensor, state: LayerState, memory_mask: Tensor | None) -> tuple[Tensor, LayerState]:
        """One position of `forward`: x [B, 1, D] sees all positions before it, so no causal mask is needed."""
        grown = state

        def look_back(x: Tensor) -> Tensor:
            nonlocal grown
            k, v = self.self_attention.keys_and_values(x, x)  # [B, H, 1, K]
            grown = replace(state, k=torch.cat([state.k, k], dim=2), v=torch.cat([state.v, v], dim=2))
            return self.self_attention.attend(x, grown.k, grown.v)

        x = self.self_attention_residual(x, look_back)  # [B, 1, D]
        x = self.cross_attention_residual(
            x, lambda x: self.cross_attention.attend(x, state.memory_k, state.memory_v, memory_mask)
        )
        x = self.feed_forward_residual(x, self.feed_forward)  # [B, 1, D]
        return x, grown


class Decoder(nn.Module):
    """§3.1: "also composed of a stack of N = 6 identical layers"; again no final norm."""

    layers: Sequence[DecoderLayer]

    def __init__(self, layers: list[DecoderLayer]) -> None:
        super().__init__()
        self.layers = cast("Sequence[DecoderLayer]", nn.ModuleList(layers))

    def forward(
        self, x: Tensor, memory: Tensor, mask: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        """x [B, T, D], memory [B, S, D], masks to [B, H, T, T] and [B, H, T, S] -> [B, T, D]."""
        for layer in self.layers:
            x = layer(x, memory, mask, memory_mask)
        return x


# §3.2 Attention ------------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention, equation (1): softmax(Q K^T / sqrt(d_k)) V.

    q [..., T, K], k [..., S, K], v [..., S, V], mask to [..., T, S] -> [..., T, V].
    A query that may look at nothing gets zeros, and finite gradients.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # [..., T, S]
    if mask is None:
        return scores.softmax(dim=-1) @ v  # [..., T, V]
    if mask.dim() > scores.dim():
        raise ValueError(
            f"a mask of shape {list(mask.shape)} has more dimensions than the scores {list(scores.shape)}: it would "
            "broadcast them to another shape in silence"
        )
    # §3.2.3 masks by minus infinity; the lowest finite number gives the same weights and no NaN in an empty row.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1).masked_fill(~mask, 0.0)  # [..., T, S]
    return weights @ v  # [..., T, V]


class MultiHeadAttention(nn.Module):
    """§3.2.2: Concat(head_1, ..., head_h) W^O with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    The projections of all heads lie side by side in one matrix each, with biases (T2T).
    """

    def __init__(self, d_model: int, n_heads: int, d_k: int | None = None, d_v: int | None = None) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.d_k = d_k or d_model // n_heads
        self.d_v = d_v or d_model // n_heads
        self.q = nn.Linear(d_model, n_heads * self.d_k)
        self.k = nn.Linear(d_model, n_heads * self.d_k)
        self.v = nn.Linear(d_model, n_heads * self.d_v)
        self.o = nn.Linear(n_heads * self.d_v, d_model)
        self.attention = attention  # equation (1); model/fused.py has the same function, faster

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """query [B, T, D], key and value [B, S, D], mask to [B, H, T, S] -> [B, T, D]."""
        return self.attend(query, *self.keys_and_values(key, value), mask)

    def keys_and_values(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key and value [B, S, D] -> K W^K [B, H, S, K] and V W^V [B, H, S, V], which decoding keeps."""
        return self.split(self.k(key)), self.split(self.v(value))

    def attend(self, query: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """query [B, T, D], k [B, H, S, K], v [B, H, S, V], mask to [B, H, T, S] -> [B, T, D]."""
        q = self.split(self.q(query))  # [B, H, T, K]
        heads = self.attention(q, k, v, mask)  # [B, H, T, V]
        y: Tensor = self.o(heads.transpose(1, 2).flatten(2))  # [B, T, H * V] -> [B, T, D]
        return y

    def split(self, x: Tensor) -> Tensor:
        """[B, S, H * K] -> [B, H, S, K]: each head gets its own slice of the width."""
        heads: Tensor = x.unflatten(-1, (self.n_heads, -1))  # [B, S, H, K]
        return heads.transpose(1, 2)


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """§3.2.3: position i may look at positions up to i. [T, T], True on and below the diagonal."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


# §3.3 Position-wise feed-forward networks ----------------------------------------------------------------------------


class PositionwiseFeedForward(nn.Module):
    """Equation (2): FFN(x) = max(0, x W_1 + b_1) W_2 + b_2."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, F] -> [B, T, D]."""
        y: Tensor = self.outer(torch.relu(self.inner(x)))
        return y


# §3.4 Embeddings and softmax -----------------------------------------------------------------------------------------


class Generator(nn.Module):
    """The pre-softmax linear transformation: the embedding matrix itself, without a bias (§3.4)."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight  # [V, D], the very parameter
        self.bias: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> logits [B, T, V]; softmax and loss are the caller's."""
        return nn.functional.linear(x, self.weight)


# §3.5 Positional encoding --------------------------------------------------------------------------------------------


def sinusoids(length: int, d_model: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos(the same). [length, D], float32.

    Computed in float64: the usual float32 exp-log form is off by 4e-4 at position 5,000.
    """
    pos = torch.arange(length, dtype=torch.float64)[:, None]  # [length, 1]
    two_i = torch.arange(0, d_model, 2, dtype=torch.float64)  # [D / 2]
    angles = pos / 10_000.0 ** (two_i / d_model)  # [length, D / 2]
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()  # interleaved: [length, D]


class PositionalEncoding(nn.Module):
    """Adds the sinusoids of §3.5 and applies dropout to the sum (§5.4). The table grows on demand."""

    table: Tensor

    def __init__(self, d_model: int, max_length: int = 512, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("table", sinusoids(max_length, d_model), persistent=False)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        """x [B, T, D] at positions start ... start + T - 1 -> [B, T, D]."""
        end = start + x.size(1)
        table = self.table
        if end > table.size(0):
            table = self.table = sinusoids(max(end, 2 * table.size(0)), x.size(2)).to(table)
        y: Tensor = self.dropout(x + table[start:end])  # [B, T, D]
        return y


# The start of training: not in the paper, but in its authors' code ---------------------------------------------------


def initialise(model: nn.Module) -> None:
    """Glorot uniform matrices, zero biases, embeddings N(0, d_model^-0.5): of unit size after their scaling (T2T).

    W^Q, W^K and W^V are drawn as the one matrix that T2T makes of them. Drawn one by one they are larger by sqrt(2),
    and a post-norm model needs several times the updates to find out where to look.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            rows = module.q.out_features + module.k.out_features + module.v.out_features
            bound = math.sqrt(6 / (module.q.in_features + rows))
            for part in (module.q, module.k, module.v):
                nn.init.uniform_(part.weight, -bound, bound)


# Figure 1: the model -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecoderState:
    """All that decoding remembers. Row b of every tensor belongs to hypothesis b."""

    layers: tuple[LayerState, ...]
    memory_mask: Tensor
    """[B, 1, 1, S], True = a real source token."""
    length: int = 0
    """Target positions read so far."""

    def select(self, rows: Tensor) -> DecoderState:
        """rows [B'] of indices into B -> the state of those hypotheses, in that order, repeats allowed."""
        layers = tuple(
            LayerState(layer.k[rows], layer.v[rows], layer.memory_k[rows], layer.memory_v[rows])
            for layer in self.layers
        )
        return DecoderState(layers, self.memory_mask[rows], self.length)


class Transformer(nn.Module):
    """Figure 1. `forward` is teacher forcing; `start` and `step` give the same logits one position at a time."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.pad_id = config.pad_id

        def heads() -> MultiHeadAttention:
            return MultiHeadAttention(config.d_model, config.n_heads, config.d_k, config.d_v)

        def feed_forward() -> PositionwiseFeedForward:
            return PositionwiseFeedForward(config.d_model, config.d_ff)

        def residual() -> PostNorm:
            return PostNorm(config.d_model, config.dropout)

        self.embedding = nn.Embedding(config.vocab_size, config.d_model)  # one for source and target (§3.4)
        self.position = PositionalEncoding(config.d_model, dropout=config.dropout)
        self.encoder = Encoder([EncoderLayer(heads(), feed_forward(), residual) for _ in range(config.n_layers)])
        self.decoder = Decoder(
            [DecoderLayer(heads(), heads(), feed_forward(), residual) for _ in range(config.n_layers)]
        )
        self.generator = Generator(self.embedding)
        initialise(self)

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """tokens [B, T] -> [B, T, D]: embeddings times sqrt(d_model) (§3.4), plus positions (§3.5), with dropout."""
        x: Tensor = self.position(self.embedding(tokens) * math.sqrt(self.config.d_model), start)
        return x

    def forward(self, src: Tensor, tgt_in: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """src [B, S] ending in EOS, tgt_in [B, T] beginning with BOS, src_mask [B, S] -> logits [B, T, V]."""
        logits: Tensor = self.generator(self.features(src, tgt_in, src_mask))
        return logits

    def features(self, src: Tensor, tgt_in: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """As `forward`, up to the decoder's output [B, T, D], before the Generator."""
        memory_mask = self.source_mask(src, src_mask)  # [B, 1, 1, S]
        tgt_mask = causal_mask(tgt_in.size(1), tgt_in.device) & (tgt_in != self.pad_id)[:, None, None]  # [B, 1, T, T]
        memory = self.encoder(self.embed(src), memory_mask)  # [B, S, D]
        x: Tensor = self.decoder(self.embed(tgt_in), memory, tgt_mask, memory_mask)  # [B, T, D]
        return x

    def source_mask(self, src: Tensor, src_mask: Tensor | None) -> Tensor:
        """src [B, S] and perhaps a mask of the same shape -> [B, 1, 1, S]."""
        return ((src != self.pad_id) if src_mask is None else src_mask)[:, None, None]

    def start(self, src: Tensor, src_mask: Tensor | None = None) -> DecoderState:
        """src [B, S] ending in EOS -> the state before the first target token."""
        memory_mask = self.source_mask(src, src_mask)  # [B, 1, 1, S]
        memory = self.encoder(self.embed(src), memory_mask)  # [B, S, D]
        return DecoderState(tuple(layer.start(memory) for layer in self.decoder.layers), memory_mask)

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """tokens [B], the newest of each hypothesis (BOS first) -> logits [B, V] of the next, and the new state."""
        x = self.embed(tokens[:, None], state.length)  # [B, 1, D]
        layers = []
        for layer, past in zip(self.decoder.layers, state.layers, strict=True):
            x, grown = layer.step(x, past, state.memory_mask)
            layers.append(grown)
        return self.generator(x)[:, 0], DecoderState(tuple(layers), state.memory_mask, state.length + 1)
