"""Our tokenizer in the format of Hugging Face's `tokenizers`: the same ids and texts, and no code of ours to run.

MarianTokenizer would not do: it takes `<s>` typed by a user for a control token, and knows no NFC. So the SentencePiece
model is rewritten: its pieces, the order of its merges or their scores, byte fallback, and our normalisation in front.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from dragoman.errors import ModelError
from dragoman.tokens.tokenizer import SentencePieceTokenizer

# Types of pieces in a SentencePiece model file.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2

# A piece that no text may choose, such as `<s>` or `<0x41>`, which must yet stand in the vocabulary.
NEVER = -1e6


def convert(tokenizer: SentencePieceTokenizer) -> Any:
    """A `tokenizers.Tokenizer` that appends EOS. Raises ModelError for what it cannot say."""
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors

    proto = _parse(tokenizer.model)
    problems = []
    if proto.trainer_spec.model_type not in (UNIGRAM, BPE):
        problems.append("only SentencePiece models of type bpe or unigram can be exported to Hugging Face")
    if any(piece.type == USER_DEFINED for piece in proto.pieces):
        problems.append("a SentencePiece model with user-defined pieces cannot be exported to Hugging Face")
    if not proto.normalizer_spec.add_dummy_prefix:
        problems.append("a SentencePiece model without add_dummy_prefix cannot be exported to Hugging Face")
    if problems:
        raise ModelError(problems)

    model = _bpe(proto) if proto.trainer_spec.model_type == BPE else _unigram(proto)
    result = tokenizers.Tokenizer(model)
    # What text.normalise does, in its order; then SentencePiece's own rules, where the model has any.
    steps: list[Any] = [
        normalizers.Replace(Regex(r"[\x{00}-\x{08}\x{0A}-\x{1F}\x{7F}-\x{9F}]"), ""),
        normalizers.Replace("▁", " "),
    ]
    if tokenizer.normalization != "identity":
        steps.append({"nfc": normalizers.NFC, "nfkc": normalizers.NFKC}[tokenizer.normalization]())
    if proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    steps += [
        normalizers.Replace(Regex(" {2,}"), " "),
        normalizers.Replace(Regex(r"\A +| +\z"), ""),
    ]
    result.normalizer = normalizers.Sequence(steps)
    words = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    # A low score alone does not keep a typed `<s>` from being that piece, where `<` is no piece of its own.
    cuts = pre_tokenizers.Split(Regex(_first_characters_of_never(proto)), "isolated")
    unigram = proto.trainer_spec.model_type == UNIGRAM
    result.pre_tokenizer = pre_tokenizers.Sequence([words, cuts]) if unigram else words
    result.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    eos = tokenizer.id_to_piece(tokenizer.eos_id)
    result.post_processor = processors.TemplateProcessing(single=f"$A {eos}", special_tokens=[(eos, tokenizer.eos_id)])
    ids = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id)
    result.add_special_tokens(
        [AddedToken(tokenizer.id_to_piece(index), special=True, normalized=False) for index in ids]
    )
    result.encode_special_tokens = True  # `<s>` typed by a user is text
    return result


def _bpe(proto: Any) -> Any:
    """SentencePiece merges the pair whose union has the best score; so here a merge's rank is that of its union."""
    from tokenizers import models

    pieces = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    ranked = sorted(
        (piece for piece in proto.pieces if piece.type == NORMAL and len(piece.piece) > 1),
        key=lambda piece: -piece.score,
    )
    usable = {piece.piece for piece in proto.pieces if piece.type == NORMAL}
    merges = [
        (whole[:cut], whole[cut:])
        for whole in (piece.piece for piece in ranked)
        for cut in range(1, len(whole))
        if whole[:cut] in usable and whole[cut:] in usable
    ]
    return models.BPE(
        vocab=pieces,
        merges=merges,
        unk_token=_unknown(proto),
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _unigram(proto: Any) -> Any:
    from tokenizers import models

    scores = [(piece.piece, piece.score if piece.type in (NORMAL, UNKNOWN) else NEVER) for piece in proto.pieces]
    unk_id = next(index for index, piece in enumerate(proto.pieces) if piece.type == UNKNOWN)
    return models.Unigram(scores, unk_id=unk_id, byte_fallback=proto.trainer_spec.byte_fallback)


def _first_characters_of_never(proto: Any) -> str:
    """A pattern for the first character of each text that looks like a piece which no text may become."""
    never = [piece.piece for piece in proto.pieces if piece.type != NORMAL and len(piece.piece) > 1]
    return "|".join(f"{re.escape(piece[0])}(?={re.escape(piece[1:])})" for piece in never)


def _unknown(proto: Any) -> str:
    return str(next(piece.piece for piece in proto.pieces if piece.type == UNKNOWN))


def _parse(model: bytes) -> Any:
    """The model file as its protocol buffer, which the package sentencepiece describes."""
    proto = importlib.import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
    proto.ParseFromString(model)
    return proto
