"""`export --to ctranslate2`: our layers named in CTranslate2's own specification, and written by its own converter.

The folder appends EOS to the source and starts the target by itself, so pieces in give pieces out. What must never be
generated (padding, start token, bad words) gets a bias that no logit outweighs: there is no other place for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dragoman.exchange.card import card
from dragoman.exchange.layout import Export, opened
from dragoman.model.choices import EncoderDecoderSpec, PreLN
from dragoman.model.positions.sinusoidal import halves_order
from dragoman.model.transformer import sinusoids
from dragoman.tokens.marian import MarianTokenizer
from dragoman.tokens.tokenizer import Tokenizer

BANNED = -1e4
"""Added to the logits of tokens that must not be chosen; finite in half precision too."""
LAYER_NORM_EPSILON = 1e-5
"""PyTorch's, and so ours."""
DEFAULTS = "generation_config.json"


def write(export: Export, out: Path) -> None:
    """Fill the folder `out`."""
    from ctranslate2.converters import Converter

    spec = opened(export.loaded.config.model, "CTranslate2")
    quantization = None if export.precision == "float32" else export.precision

    class Ours(Converter):  # type: ignore[misc]  # CTranslate2 ships no types
        def _load(self) -> Any:
            return describe(export, spec)

    Ours().convert(str(out), quantization=quantization, force=True)
    export.loaded.tokenizer.save(out)
    defaults = generation_defaults(export)
    (out / DEFAULTS).write_text(json.dumps(defaults, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(card(export, _usage(export), _search(export), "ctranslate2"), encoding="utf-8")


def describe(export: Export, spec: EncoderDecoderSpec) -> Any:
    """The model as a `TransformerSpec` with its weights and vocabularies."""
    from ctranslate2.specs import common_spec, transformer_spec

    tensors = {name: tensor.detach().float().cpu() for name, tensor in export.loaded.model.state_dict().items()}
    activation = {
        "relu": common_spec.Activation.RELU,
        "gelu": common_spec.Activation.GELU,
        "swish": common_spec.Activation.SWISH,
    }[spec.feed_forward.activation]
    pre_norm = isinstance(spec.residual, PreLN)
    encoder = transformer_spec.TransformerEncoderSpec(
        spec.n_layers, spec.n_heads, pre_norm=pre_norm, activation=activation
    )
    decoder = transformer_spec.TransformerDecoderSpec(
        spec.decoder_layers, spec.decoder_heads, pre_norm=pre_norm, activation=activation
    )
    result = transformer_spec.TransformerSpec(encoder, decoder)

    table = sinusoids(export.max_positions, spec.d_model)
    if spec.position.layout == "halves":
        table = table[:, halves_order(spec.d_model)].contiguous()
    for stack in (encoder, decoder):
        stack.scale_embeddings = spec.scale_embedding
        stack.position_encodings.encodings = table
    encoder.embeddings[0].weight = tensors["embedding.weight"]
    decoder.embeddings.weight = tensors["embedding.weight" if spec.share_embeddings else "target_embedding.weight"]
    decoder.projection.weight = tensors["generator.weight"]
    decoder.projection.bias = _bias(tensors.get("generator.bias"), export.loaded.tokenizer)
    if pre_norm:
        _norm(encoder.layer_norm, tensors, "encoder_norm")
        _norm(decoder.layer_norm, tensors, "decoder_norm")
    for name, stack in (("encoder", encoder), ("decoder", decoder)):
        for number, layer in enumerate(stack.layer):
            _layer(layer, tensors, f"{name}.layers.{number}", cross=name == "decoder")

    tokenizer = export.loaded.tokenizer
    pieces = [tokenizer.id_to_piece(index) for index in range(len(tokenizer))]
    result.register_source_vocabulary(pieces)
    result.register_target_vocabulary(pieces)
    result.config.unk_token = pieces[tokenizer.unk_id]
    result.config.bos_token = pieces[tokenizer.bos_id]
    result.config.eos_token = pieces[tokenizer.eos_id]
    result.config.decoder_start_token = pieces[tokenizer.bos_id]
    result.config.add_source_eos = True
    result.config.layer_norm_epsilon = LAYER_NORM_EPSILON
    return result


def _bias(bias: Tensor | None, tokenizer: Tokenizer) -> Tensor:
    """The bias of the logits, with what must never be generated pushed out of reach."""
    result = torch.zeros(len(tokenizer)) if bias is None else bias.clone()
    result[list(tokenizer.banned_ids)] = BANNED
    return result


def _layer(layer: Any, tensors: Mapping[str, Tensor], name: str, cross: bool) -> None:
    """Fill one layer's specification from the tensors under `name`."""
    own = f"{name}.self_attention"
    _linear(layer.self_attention.linear[0], tensors, f"{own}.q", f"{own}.k", f"{own}.v")
    _linear(layer.self_attention.linear[1], tensors, f"{own}.o")
    _norm(layer.self_attention.layer_norm, tensors, f"{own}_residual.norm")
    if cross:
        other = f"{name}.cross_attention"
        _linear(layer.attention.linear[0], tensors, f"{other}.q")
        _linear(layer.attention.linear[1], tensors, f"{other}.k", f"{other}.v")
        _linear(layer.attention.linear[2], tensors, f"{other}.o")
        _norm(layer.attention.layer_norm, tensors, f"{other}_residual.norm")
    _linear(layer.ffn.linear_0, tensors, f"{name}.feed_forward.inner")
    _linear(layer.ffn.linear_1, tensors, f"{name}.feed_forward.outer")
    _norm(layer.ffn.layer_norm, tensors, f"{name}.feed_forward_residual.norm")


def _linear(spec: Any, tensors: Mapping[str, Tensor], *names: str) -> None:
    """One matrix, or several one above the other."""
    spec.weight = torch.cat([tensors[f"{name}.weight"] for name in names])
    spec.bias = torch.cat([tensors[f"{name}.bias"] for name in names])


def _norm(spec: Any, tensors: Mapping[str, Tensor], name: str) -> None:
    spec.gamma, spec.beta = tensors[f"{name}.weight"], tensors[f"{name}.bias"]


def generation_defaults(export: Export) -> dict[str, Any]:
    """Our search as arguments of `translate_batch`; it divides scores by length ** length_penalty."""
    decoding = export.loaded.config.decoding
    exponents = {"paper": decoding.alpha, "power": decoding.alpha, "average": 1.0, "none": 0.0}
    greedy = decoding.greedy or decoding.beam_size == 1
    return {
        "beam_size": 1 if greedy else decoding.beam_size,
        "length_penalty": exponents[decoding.penalty],
        "max_decoding_length": export.max_positions - 1,
        "min_decoding_length": max(decoding.min_length - 1, 0),  # ours counts EOS
        "no_repeat_ngram_size": decoding.no_repeat_ngram,
    }


def _usage(export: Export) -> str:
    if isinstance(export.loaded.tokenizer, MarianTokenizer):
        tokenizer = (
            'source = sentencepiece.SentencePieceProcessor(model_file="source.spm")\n'
            'target = sentencepiece.SentencePieceProcessor(model_file="target.spm")\n'
        )
    else:
        tokenizer = 'source = target = sentencepiece.SentencePieceProcessor(model_file="tokenizer.model")\n'
    return (
        "```python\nimport json\n\nimport ctranslate2\nimport sentencepiece\n\n"
        'translator = ctranslate2.Translator(".")  # this folder\n'
        f"{tokenizer}"
        f'options = json.load(open("{DEFAULTS}"))\n'
        'results = translator.translate_batch([source.encode("…", out_type=str)], **options)\n'
        "print(target.decode_pieces(results[0].hypotheses[0]))\n```\n\n"
        "EOS is added to the source by the model itself (`add_source_eos` in config.json): do not add it."
    )


def _search(export: Export) -> str:
    decoding = export.loaded.config.decoding
    text = (
        "Greedy search gives dragoman's tokens. Beam search stops by other rules than dragoman's (it lets go when as "
        "many hypotheses as the beam is wide have ended)"
    )
    if decoding.penalty == "paper":
        text += (
            f", and divides by length ** {decoding.alpha} where dragoman divides by ((5 + length) / 6) ** "
            f"{decoding.alpha}"
        )
    return text + ", so that some beams end in another of their hypotheses."
