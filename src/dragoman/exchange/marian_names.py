"""MarianMT's names of tensors and ours, as a table to be read. Both directions of the exchange use it.

A row names a Linear, a LayerNorm or an Embedding on either side; its `weight` and `bias` keep these names.
"""

from __future__ import annotations

from collections.abc import Iterator

LAYER = (
    # MarianMT                 ours
    ("self_attn.q_proj", "self_attention.q"),
    ("self_attn.k_proj", "self_attention.k"),
    ("self_attn.v_proj", "self_attention.v"),
    ("self_attn.out_proj", "self_attention.o"),
    ("self_attn_layer_norm", "self_attention_residual.norm"),
    ("fc1", "feed_forward.inner"),
    ("fc2", "feed_forward.outer"),
    ("final_layer_norm", "feed_forward_residual.norm"),
)
CROSS_ATTENTION = (
    ("encoder_attn.q_proj", "cross_attention.q"),
    ("encoder_attn.k_proj", "cross_attention.k"),
    ("encoder_attn.v_proj", "cross_attention.v"),
    ("encoder_attn.out_proj", "cross_attention.o"),
    ("encoder_attn_layer_norm", "cross_attention_residual.norm"),
)
STACKS = {"encoder": LAYER, "decoder": LAYER + CROSS_ATTENTION}

SHARED = "model.shared.weight"
SOURCE = "model.encoder.embed_tokens.weight"
TARGET = "model.decoder.embed_tokens.weight"
OUTPUT = "lm_head.weight"
BIAS = "final_logits_bias"
POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
"""Constants, which old files hold all the same."""


def layer_names(encoder_layers: int, decoder_layers: int) -> Iterator[tuple[str, str]]:
    """(MarianMT's name, our name) of every tensor that belongs to a layer."""
    for stack, count in (("encoder", encoder_layers), ("decoder", decoder_layers)):
        for layer in range(count):
            for theirs, ours in STACKS[stack]:
                for part in ("weight", "bias"):
                    yield f"model.{stack}.layers.{layer}.{theirs}.{part}", f"{stack}.layers.{layer}.{ours}.{part}"
