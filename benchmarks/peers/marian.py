"""Hugging Face's MarianMTModel (transformers, an extra of the benchmarks) with random weights and the same sizes."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn


class Marian(nn.Module):
    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        d_ff: int,
        n_layers: int,
        n_heads: int,
        pad_id: int,
        attention: Literal["sdpa", "eager"] = "sdpa",
    ) -> None:
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        self.pad_id = pad_id
        config: Any = MarianConfig(
            vocab_size=vocab_size,
            d_model=d_model,
            encoder_layers=n_layers,
            decoder_layers=n_layers,
            encoder_ffn_dim=d_ff,
            decoder_ffn_dim=d_ff,
            encoder_attention_heads=n_heads,
            decoder_attention_heads=n_heads,
            dropout=0.1,
            attention_dropout=0.0,
            activation_dropout=0.0,
            activation_function="relu",
            scale_embedding=True,
            share_encoder_decoder_embeddings=True,
            max_position_embeddings=512,
            pad_token_id=pad_id,
            decoder_start_token_id=pad_id,
            attn_implementation=attention,
            use_cache=False,
        )
        self.model = MarianMTModel(config)

    def forward(self, src: Tensor, tgt_in: Tensor, tgt_out: Tensor) -> tuple[Tensor, Tensor]:
        """src [B, S], tgt_in, tgt_out [B, T] -> logits [B * T, V] and targets [B * T], padding among them."""
        logits = self.model(
            input_ids=src,
            attention_mask=(src != self.pad_id).to(torch.int64),
            decoder_input_ids=tgt_in,
            use_cache=False,
        ).logits
        return logits.flatten(0, 1), tgt_out.flatten()
