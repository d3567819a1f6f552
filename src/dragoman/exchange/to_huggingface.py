"""`export --to huggingface`: a folder that `AutoModelForSeq2SeqLM` and `AutoTokenizer` load, as MarianMT.

MarianMT is the paper's model with the sinusoids in another order, so that nothing but the order of the width changes.
The folder `dragoman/` in it keeps what transformers has no place for, and `dragoman import` takes it up again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dragoman.checkpoints import store
from dragoman.checkpoints.weights import save_tensors
from dragoman.errors import ModelError
from dragoman.exchange.card import card
from dragoman.exchange.layout import KEPT, Export, marian_tensors, opened
from dragoman.model.choices import EncoderDecoderSpec
from dragoman.tokens.marian import MarianTokenizer
from dragoman.tokens.tokenizer import SentencePieceTokenizer, Tokenizer

_PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def write(export: Export, out: Path) -> None:
    """Fill the folder `out`. Raises ModelError for what MarianMT cannot say."""
    if export.precision not in _PRECISIONS:
        raise ModelError(f"transformers keeps weights as {', '.join(_PRECISIONS)}; int8 is for ctranslate2 and onnx")
    loaded = export.loaded
    spec = opened(loaded.config.model, "Hugging Face")
    dtype = _PRECISIONS[export.precision]
    tensors = {name: tensor.to(dtype) for name, tensor in marian_tensors(loaded.model, spec).items()}
    _write_tokenizer(loaded.tokenizer, export, out)
    _dump(out / "config.json", _config(export, spec))
    _dump(out / "generation_config.json", generation_config(export))
    save_tensors(out / "model.safetensors", {name: tensor.clone() for name, tensor in tensors.items()})
    store.prepare(out / KEPT, loaded.tokenizer, _without_paths(loaded.config))
    usage = (
        "```python\nfrom transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n\n"
        'folder = "."  # this folder\n'
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        "model = AutoModelForSeq2SeqLM.from_pretrained(folder)\n"
        'batch = tokenizer(["…"], return_tensors="pt", padding=True)\n'
        "print(tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True))\n```"
    )
    (out / "README.md").write_text(card(export, usage, _search(export), "transformers"), encoding="utf-8")


def _without_paths(config: Any) -> Any:
    """The run's config without the places of its files, which are nobody's business elsewhere."""
    return replace(
        config, data=replace(config.data, train=(), dev=None), tokenizer=replace(config.tokenizer, model=None)
    )


def _config(export: Export, spec: EncoderDecoderSpec) -> dict[str, Any]:
    """config.json of MarianMT."""
    tokenizer = export.loaded.tokenizer
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "vocab_size": len(tokenizer),
        "decoder_vocab_size": len(tokenizer),
        "d_model": spec.d_model,
        "encoder_layers": spec.n_layers,
        "decoder_layers": spec.decoder_layers,
        "encoder_attention_heads": spec.n_heads,
        "decoder_attention_heads": spec.decoder_heads,
        "encoder_ffn_dim": spec.d_ff,
        "decoder_ffn_dim": spec.decoder_ff,
        "activation_function": spec.feed_forward.activation,
        "dropout": spec.dropout,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "init_std": spec.d_model**-0.5,
        "scale_embedding": spec.scale_embedding,
        "share_encoder_decoder_embeddings": spec.share_embeddings,
        "tie_word_embeddings": spec.tie_output,
        "max_position_embeddings": export.max_positions,
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "decoder_start_token_id": tokenizer.bos_id,
        "forced_eos_token_id": None,
        "use_cache": True,
        "dtype": export.precision,
        "torch_dtype": export.precision,
    }


def generation_config(export: Export) -> dict[str, Any]:
    """Our search in transformers' words, as far as it has them; it divides scores by length ** length_penalty."""
    tokenizer, decoding = export.loaded.tokenizer, export.loaded.config.decoding
    exponents = {"paper": decoding.alpha, "power": decoding.alpha, "average": 1.0, "none": 0.0}
    config: dict[str, Any] = {
        "decoder_start_token_id": tokenizer.bos_id,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "bad_words_ids": [[index] for index in tokenizer.banned_ids],
        "do_sample": False,
        "num_beams": 1 if decoding.greedy else decoding.beam_size,
        "max_length": export.max_positions,
    }
    if config["num_beams"] > 1:
        config |= {"length_penalty": exponents[decoding.penalty], "early_stopping": False}
    if decoding.min_length:
        config["min_length"] = decoding.min_length + 1  # theirs counts the start token
    if decoding.no_repeat_ngram:
        config["no_repeat_ngram_size"] = decoding.no_repeat_ngram
    return config


def _search(export: Export) -> str:
    """What a reader must know to compare results."""
    decoding = export.loaded.config.decoding
    text = (
        "Greedy search gives dragoman's tokens. A translation ends after (source tokens) + "
        f"{decoding.max_extra} tokens in dragoman; here `max_length` is the one limit for all."
    )
    if decoding.penalty == "paper":
        text += (
            f" dragoman divides a hypothesis' log-probability by ((5 + length) / 6) ** {decoding.alpha}; transformers "
            f"knows length ** length_penalty only, and is set to {decoding.alpha}, so that beams can choose another of "
            "their hypotheses."
        )
    return text


def _write_tokenizer(tokenizer: Tokenizer, export: Export, out: Path) -> None:
    names = {f"{name}_token": tokenizer.id_to_piece(getattr(tokenizer, f"{name}_id")) for name in ("pad", "unk", "eos")}
    settings: dict[str, Any] = {
        **names,
        "model_max_length": export.max_source,
        "clean_up_tokenization_spaces": False,
    }
    if isinstance(tokenizer, MarianTokenizer):
        data = export.loaded.config.data
        settings |= {"tokenizer_class": "MarianTokenizer", "separate_vocabs": False}
        settings |= {"source_lang": data.src_lang or None, "target_lang": data.tgt_lang or None}
        for name, content in tokenizer.files.items():
            (out / name).write_bytes(content)
        _dump(out / "vocab.json", tokenizer.vocabulary)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        from dragoman.exchange.fast_tokenizer import convert

        settings |= {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.id_to_piece(tokenizer.bos_id),
            "split_special_tokens": True,  # what a user types is text, even `</s>`
            "model_input_names": ["input_ids", "attention_mask"],
        }
        (out / "tokenizer.json").write_text(convert(tokenizer).to_str(pretty=True), encoding="utf-8")
    else:
        raise ModelError(f"a tokenizer of kind {tokenizer.kind!r} cannot be exported to Hugging Face")
    _dump(out / "tokenizer_config.json", settings)


def _dump(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
