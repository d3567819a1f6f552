"""What every export asks of a model: its shape in the open family's words, and its tensors in Marian's layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from dragoman.checkpoints.store import Loaded
from dragoman.errors import ModelError
from dragoman.exchange import marian_names as names
from dragoman.model.choices import EncoderDecoderSpec, PaperSpec, PostLN, Sinusoidal
from dragoman.model.positions.sinusoidal import halves_order

KEPT = "dragoman"
"""The folder in an exported Hugging Face folder that holds what transformers has no place for."""

Precision = Literal["float32", "float16", "bfloat16", "int8"]


@dataclass(frozen=True)
class Export:
    """A model on its way out."""

    source: Path
    """The model folder."""
    loaded: Loaded
    precision: Precision
    command: str
    """What the user typed, for the model card."""

    @property
    def max_source(self) -> int:
        """Most source tokens with EOS."""
        return int(self.loaded.config.data.max_length)

    @property
    def max_positions(self) -> int:
        """Positions that a fixed table must have: no translation is longer."""
        return self.max_source + int(self.loaded.config.decoding.max_extra) + 2


def opened(spec: Any, engine: str) -> EncoderDecoderSpec:
    """The spec in the open family's words. Raises ModelError for what `engine` has no word for."""
    problems = []
    if isinstance(spec, PaperSpec):
        width = spec.d_model // spec.n_heads
        for name, value in (("d_k", spec.d_k), ("d_v", spec.d_v)):
            if value not in (None, width):
                problems.append(
                    f"{engine} has heads of d_model / n_heads = {width} only, and this model has {name} {value}"
                )
        spec = EncoderDecoderSpec(
            n_layers=spec.n_layers,
            d_model=spec.d_model,
            d_ff=spec.d_ff,
            n_heads=1 if problems else spec.n_heads,
            dropout=spec.dropout,
        )
    if not isinstance(spec, EncoderDecoderSpec):
        problems.append(f"a model of kind {spec.kind!r} cannot be exported to {engine}")
    if problems:
        raise ModelError(problems)
    result: EncoderDecoderSpec = spec
    return result


def marian_tensors(model: Any, spec: EncoderDecoderSpec) -> dict[str, Tensor]:
    """The model's tensors under MarianMT's names, their width in Marian's order: sines first, then cosines.

    Where ours lies interleaved, every axis of d_model is permuted alike, which changes no answer: layers, norms and
    residual sums do not care in which order the width lies, only the positions do. Heads keep their order.
    """
    if not isinstance(spec.residual, PostLN):
        raise ModelError("MarianMT normalises after each sub-layer, and this model before: it cannot be said there")
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    order = halves_order(spec.d_model).to(model.embedding.weight.device)
    mixed = isinstance(spec.position, Sinusoidal) and spec.position.layout == "interleaved"

    def outward(tensor: Tensor) -> Tensor:
        return tensor[order] if mixed else tensor

    def inward(tensor: Tensor) -> Tensor:
        return tensor[..., order] if mixed else tensor

    result = {}
    for theirs, ours in names.layer_names(spec.n_layers, spec.decoder_layers):
        tensor = tensors[ours]
        part = ours.split(".")[-2]
        if part in ("o", "outer", "norm"):  # writes to the width
            result[theirs] = outward(tensor)
        elif theirs.endswith("weight"):  # q, k, v and inner read from it
            result[theirs] = inward(tensor)
        else:
            result[theirs] = tensor
    if spec.share_embeddings:
        result[names.SHARED] = inward(tensors["embedding.weight"])
    if not spec.share_embeddings or not spec.tie_output:
        # transformers 5 keeps three matrices where the softmax has its own, whatever is shared
        target = "embedding.weight" if spec.share_embeddings else "target_embedding.weight"
        result[names.SOURCE] = inward(tensors["embedding.weight"])
        result[names.TARGET] = inward(tensors[target])
    if not spec.tie_output:
        result[names.OUTPUT] = inward(tensors["generator.weight"])
    bias = tensors.get("generator.bias")
    vocab_size = tensors["embedding.weight"].size(0)
    result[names.BIAS] = (tensors["embedding.weight"].new_zeros(vocab_size) if bias is None else bias)[None]
    return result
