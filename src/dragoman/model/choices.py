"""The catalogue: one union per socket, one word per variant, and no other list anywhere.

A spec is what the `[model]` table of a TOML file says; `kind` picks the family and `build` makes the module.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import nn

    from dragoman.model.families.encoder_decoder import EncoderDecoder
    from dragoman.model.transformer import Transformer, TransformerConfig


@dataclass(frozen=True)
class PaperSpec:
    """The closed 2017 family (arXiv:1706.03762): the columns of Table 3, by default those of the base model."""

    kind: Literal["paper"] = "paper"
    n_layers: int = 6
    """N: layers in the encoder, and as many in the decoder."""
    d_model: int = 512
    """Width of embeddings and sub-layer outputs."""
    d_ff: int = 2048
    """Inner width of the feed-forward networks."""
    n_heads: int = 8
    """h: attention heads."""
    d_k: int | None = None
    """Width of a head's queries and keys; d_model / n_heads unless given."""
    d_v: int | None = None
    """Width of a head's values; d_model / n_heads unless given."""
    dropout: float = 0.1
    """P_drop, on sub-layer outputs and on embeddings plus positions."""

    def __post_init__(self) -> None:
        self.config(vocab_size=1, pad_id=0)  # Table 3's own checks; the vocabulary comes later, with the tokenizer

    def config(self, vocab_size: int, pad_id: int) -> TransformerConfig:
        """The row of Table 3 with the vocabulary that a tokenizer brings."""
        from dragoman.model.transformer import TransformerConfig

        return TransformerConfig(
            vocab_size,
            self.n_layers,
            self.d_model,
            self.d_ff,
            self.n_heads,
            self.d_k,
            self.d_v,
            self.dropout,
            pad_id,
        )

    def build(self, vocab_size: int, pad_id: int) -> Transformer:
        """A freshly initialised model over `vocab_size` tokens."""
        from dragoman.model.transformer import Transformer

        return Transformer(self.config(vocab_size, pad_id))


# ---------------------------------------------------------------------------------------------------------------------
# Sockets of `encoder_decoder`
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sinusoidal:
    """§3.5: sines and cosines of geometrically growing wavelengths."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    layout: Literal["interleaved", "halves"] = "interleaved"
    """Sine and cosine of a wavelength side by side (the paper), or all sines and then all cosines (Marian)."""

    def build(self, d_model: int, dropout: float) -> nn.Module:
        """A module that answers `contracts.Position`."""
        from dragoman.model.positions.sinusoidal import SinusoidsInHalves
        from dragoman.model.transformer import PositionalEncoding

        layouts = {"interleaved": PositionalEncoding, "halves": SinusoidsInHalves}
        return layouts[self.layout](d_model, dropout=dropout)


@dataclass(frozen=True)
class Positionwise:
    """§3.3: two linear transformations with an activation between them."""

    kind: Literal["positionwise"] = "positionwise"
    activation: Literal["relu", "gelu", "swish"] = "relu"
    """ReLU in the paper."""

    def build(self, d_model: int, d_ff: int) -> nn.Module:
        """A module that answers `contracts.FeedForward`."""
        from dragoman.model.feed_forward.activated import ActivatedFeedForward

        return ActivatedFeedForward(d_model, d_ff, self.activation)


@dataclass(frozen=True)
class PostLN:
    """§3.1: LayerNorm(x + Dropout(Sublayer(x)))."""

    kind: Literal["post_norm"] = "post_norm"

    def build(self, d_model: int, dropout: float) -> nn.Module:
        """A module that answers `contracts.Residual`."""
        from dragoman.model.transformer import PostNorm

        return PostNorm(d_model, dropout)

    def build_end(self, d_model: int) -> nn.Module:
        """What ends a stack of such layers: nothing, for they end normalised."""
        from torch import nn

        return nn.Identity()


@dataclass(frozen=True)
class PreLN:
    """x + Dropout(Sublayer(LayerNorm(x))), and one LayerNorm at the end of each stack."""

    kind: Literal["pre_norm"] = "pre_norm"

    def build(self, d_model: int, dropout: float) -> nn.Module:
        """A module that answers `contracts.Residual`."""
        from dragoman.model.residuals.pre_norm import PreNorm

        return PreNorm(d_model, dropout)

    def build_end(self, d_model: int) -> nn.Module:
        """What ends a stack of such layers."""
        from torch import nn

        return nn.LayerNorm(d_model)


Position = Sinusoidal
FeedForward = Positionwise
Residual = PostLN | PreLN


@dataclass(frozen=True)
class EncoderDecoderSpec:
    """The open family: the paper's layers, and sockets for what other models do otherwise. By default, the paper."""

    kind: Literal["encoder_decoder"] = "encoder_decoder"
    n_layers: int = 6
    """Layers in the encoder."""
    decoder_n_layers: int | None = None
    """Layers in the decoder; as many as in the encoder unless given."""
    d_model: int = 512
    """Width of embeddings and sub-layer outputs."""
    d_ff: int = 2048
    """Inner width of the encoder's feed-forward networks."""
    decoder_d_ff: int | None = None
    """Inner width of the decoder's; that of the encoder unless given."""
    n_heads: int = 8
    """Attention heads in the encoder."""
    decoder_n_heads: int | None = None
    """Attention heads in the decoder; as many as in the encoder unless given."""
    dropout: float = 0.1
    """On sub-layer outputs and on embeddings plus positions."""
    position: Position = Sinusoidal()
    """How tokens get their places."""
    feed_forward: FeedForward = Positionwise()
    """What a layer does to each position by itself."""
    residual: Residual = PostLN()
    """How sub-layer, sum and normalisation follow each other."""
    share_embeddings: bool = True
    """One matrix for source and target tokens (§3.4), rather than one each."""
    tie_output: bool = True
    """The softmax uses the target's embedding matrix (§3.4), rather than one of its own."""
    output_bias: bool = False
    """A bias on the logits; the paper has none."""
    scale_embedding: bool = True
    """Embeddings are multiplied by sqrt(d_model) (§3.4)."""

    def __post_init__(self) -> None:
        wrong = []
        sizes = [self.n_layers, self.decoder_layers, self.d_model, self.d_ff, self.decoder_ff]
        if min(*sizes, self.n_heads, self.decoder_heads) < 1:
            wrong.append("numbers of layers and heads, d_model and d_ff must be at least 1")
        if not 0.0 <= self.dropout < 1.0:
            wrong.append(f"dropout must be at least 0 and below 1, not {self.dropout}")
        if self.d_model % 2:
            wrong.append(f"d_model must be even, since sines and cosines come in pairs, not {self.d_model}")
        wrong += [
            f"d_model {self.d_model} does not divide into {heads} heads"
            for heads in dict.fromkeys((self.n_heads, self.decoder_heads))
            if heads > 0 and self.d_model % heads
        ]
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def decoder_layers(self) -> int:
        """Layers in the decoder, resolved."""
        return self.n_layers if self.decoder_n_layers is None else self.decoder_n_layers

    @property
    def decoder_ff(self) -> int:
        """Inner width of the decoder's feed-forward networks, resolved."""
        return self.d_ff if self.decoder_d_ff is None else self.decoder_d_ff

    @property
    def decoder_heads(self) -> int:
        """Attention heads in the decoder, resolved."""
        return self.n_heads if self.decoder_n_heads is None else self.decoder_n_heads

    def build(self, vocab_size: int, pad_id: int) -> EncoderDecoder:
        """A freshly initialised model over `vocab_size` tokens."""
        from dragoman.model.families.encoder_decoder import EncoderDecoder, EncoderDecoderConfig

        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(EncoderDecoderSpec)}
        return EncoderDecoder(EncoderDecoderConfig(**fields, vocab_size=vocab_size, pad_id=pad_id))


ModelSpec = PaperSpec | EncoderDecoderSpec
