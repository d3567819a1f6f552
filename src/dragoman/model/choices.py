"""The catalogue: one union per socket, one word per variant, and no other list anywhere.

A spec is what the `[model]` table of a TOML file says; `kind` picks the family and `build` makes the module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
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


ModelSpec = PaperSpec
