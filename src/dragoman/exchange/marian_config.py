"""What a MarianMT `config.json` and `generation_config.json` may say, key by key, and what we make of it.

Each key is used, or must have the one value under which it changes nothing here, or says nothing about a model's
answers. A key of none of these kinds is refused by name: a model that would answer otherwise than its makers meant is
worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from dragoman.model.choices import EncoderDecoderSpec, Positionwise, Sinusoidal

ACTIVATIONS = {"relu": "relu", "swish": "swish", "silu": "swish", "gelu": "gelu"}

USED = {
    "activation_function",
    "architectures",
    "bad_words_ids",
    "d_model",
    "decoder_attention_heads",
    "decoder_ffn_dim",
    "decoder_layers",
    "decoder_start_token_id",
    "decoder_vocab_size",
    "dropout",
    "encoder_attention_heads",
    "encoder_ffn_dim",
    "encoder_layers",
    "eos_token_id",
    "length_penalty",
    "max_position_embeddings",
    "min_length",
    "model_type",
    "no_repeat_ngram_size",
    "num_beams",
    "pad_token_id",
    "scale_embedding",
    "share_encoder_decoder_embeddings",
    "tie_word_embeddings",
    "vocab_size",
}

# Any other value would be another model, another training or another search than ours.
MUST_BE: dict[str, Any] = {
    "activation_dropout": 0,
    "add_cross_attention": False,
    "add_final_layer_norm": False,
    "attention_dropout": 0,
    "chunk_size_feed_forward": 0,
    "decoder_layerdrop": 0,
    "diversity_penalty": 0,
    "do_sample": False,
    "encoder_layerdrop": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "force_bos_token_to_be_generated": False,
    "is_decoder": False,
    "is_encoder_decoder": True,
    "normalize_before": False,
    "normalize_embedding": False,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1,
    "sequence_bias": {},
    "static_position_embeddings": True,
    "tie_encoder_decoder": False,
    "token_healing": False,
    "use_bfloat16": False,
}

# Book-keeping, classifiers, formats of files and results, sampling that `do_sample` leaves off, limits of length (ours
# follow the source), and what old files say of other families: whether there is a bias is seen in the weights, and
# Marian's positions have no extra ones. Marian does not use `bos_token_id`: it starts with `decoder_start_token_id`;
# `forced_eos_token_id` ends what reaches the limit, which we report as unfinished; `renormalize_logits` changes scores.
SAYS_NOTHING = {
    "_attn_implementation",
    "_commit_hash",
    "_from_model_config",
    "_name_or_path",
    "_num_labels",
    "add_bias_logits",
    "bos_token_id",
    "classif_dropout",
    "classifier_dropout",
    "dtype",
    "early_stopping",
    "epsilon_cutoff",
    "eta_cutoff",
    "extra_pos_embeddings",
    "finetuning_task",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "init_std",
    "label2id",
    "max_length",
    "max_new_tokens",
    "min_p",
    "num_hidden_layers",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "problem_type",
    "renormalize_logits",
    "return_dict",
    "return_dict_in_generate",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "total_flos",
    "transformers_version",
    "typical_p",
    "use_cache",
}

REQUIRED = (
    "d_model",
    "encoder_layers",
    "decoder_layers",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "vocab_size",
    "pad_token_id",
    "eos_token_id",
    "decoder_start_token_id",
)


def check_keys(config: Mapping[str, Any], where: str) -> list[str]:
    """One sentence for each key that cannot be honoured."""
    problems = []
    for key, value in config.items():
        if key in USED or key in SAYS_NOTHING or value is None:
            continue
        if key not in MUST_BE:
            problems.append(f"{where} holds {key} = {value!r}, which this version does not know")
        elif value != MUST_BE[key] and not (value in (False, {}, []) and MUST_BE[key] in (False, 0, {})):
            problems.append(f"{where} holds {key} = {value!r}; supported is {MUST_BE[key]!r} only")
    return problems


def spec_of(config: Mapping[str, Any], where: str, problems: list[str]) -> EncoderDecoderSpec | None:
    """The family's spec, or None where the config does not say enough; what is wrong is added to `problems`."""
    wrong = [
        f"{where}: {key} should be a whole number, not {config.get(key)!r}"
        for key in REQUIRED
        if not isinstance(config.get(key), int) or isinstance(config.get(key), bool)
    ]
    activation = ACTIVATIONS.get(str(config.get("activation_function", "gelu")))
    if activation is None:
        known = ", ".join(ACTIVATIONS)
        wrong.append(
            f"{where}: activation_function {config['activation_function']!r} is not supported; it can be {known}"
        )
    vocab_size, target_size = config.get("vocab_size"), config.get("decoder_vocab_size")
    if target_size is not None and target_size != vocab_size:
        wrong.append(
            f"{where}: decoder_vocab_size {target_size} differs from vocab_size {vocab_size}: "
            "a vocabulary of its own for each side is not supported"
        )
    if not wrong:
        try:
            return EncoderDecoderSpec(
                n_layers=config["encoder_layers"],
                decoder_n_layers=config["decoder_layers"],
                d_model=config["d_model"],
                d_ff=config["encoder_ffn_dim"],
                decoder_d_ff=config["decoder_ffn_dim"],
                n_heads=config["encoder_attention_heads"],
                decoder_n_heads=config["decoder_attention_heads"],
                dropout=float(config.get("dropout", 0.1)),
                position=Sinusoidal(layout="halves"),
                feed_forward=Positionwise(activation=cast(Any, activation)),
                share_embeddings=bool(config.get("share_encoder_decoder_embeddings", True)),
                tie_output=bool(config.get("tie_word_embeddings", True)),
                scale_embedding=bool(config.get("scale_embedding", False)),
            )
        except ValueError as error:
            wrong.append(f"{where}: {error}")
    problems.extend(wrong)
    return None


def banned_of(config: Mapping[str, Any], where: str, problems: list[str]) -> list[int]:
    """The single tokens that must never be generated; sequences of several are refused."""
    banned = []
    for words in config.get("bad_words_ids") or []:
        if isinstance(words, list) and len(words) == 1 and isinstance(words[0], int):
            banned.append(words[0])
        else:
            problems.append(f"{where}: bad_words_ids holds {words!r}; only single tokens are supported")
    return banned


def decoding_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """`[decoding]`: their search in our words. Their scores are divided by length ** length_penalty: our `power`."""
    decoding: dict[str, Any] = {"penalty": "power", "alpha": float(config.get("length_penalty") or 1.0)}
    if config.get("length_penalty") == 0:
        decoding = {"penalty": "none"}
    if (config.get("num_beams") or 1) > 1:
        decoding["beam_size"] = config["num_beams"]
    if config.get("no_repeat_ngram_size"):
        decoding["no_repeat_ngram"] = config["no_repeat_ngram_size"]
    if (config.get("min_length") or 0) > 1:
        decoding["min_length"] = config["min_length"] - 1  # theirs counts the start token
    return decoding
