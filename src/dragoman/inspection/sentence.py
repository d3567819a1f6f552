"""One sentence pair under the lens: pieces, log-probabilities, every attention map, and the alignment they suggest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dragoman.errors import DataError
from dragoman.inspection.attention import AttentionMap, record_attention
from dragoman.text.normalise import is_blank

if TYPE_CHECKING:
    from dragoman.translator import Translator

LONGEST = 128
"""Tokens a side that can be looked at: a picture of more cells than this squared shows nothing."""
ALTERNATIVES = 5


@dataclass(frozen=True)
class TargetToken:
    """One target token and what the model would rather have said."""

    piece: str
    log_prob: float
    """Natural logarithm of its probability, given the source and the target tokens before it."""
    alternatives: tuple[tuple[str, float], ...]
    """The likeliest pieces at this place with their log-probabilities, best first."""


@dataclass(frozen=True)
class Sentence:
    """A pair as the model sees it, teacher-forced."""

    source: str
    target: str
    given: bool
    """Whether the target was given; otherwise it is the model's own translation."""
    source_pieces: tuple[str, ...]
    """What the encoder reads, EOS at the end: S of them."""
    input_pieces: tuple[str, ...]
    """What the decoder reads: the target shifted right, BOS first: T of them."""
    tokens: tuple[TargetToken, ...]
    """What the decoder is asked for, EOS at the end: T of them."""
    maps: tuple[AttentionMap, ...]
    """All attention, B = 1."""
    alignment: Tensor
    """[T, S]: the cross-attention, averaged over layers and heads. Empty where the family has none."""
    links: tuple[int | None, ...]
    """For each target token but EOS the source token (EOS left out) that it looks at most."""

    @property
    def log_prob(self) -> float:
        return sum(token.log_prob for token in self.tokens)


@torch.no_grad()
def look(translator: Translator, source: str, target: str | None = None) -> Sentence:
    """Run the model over a pair, or over `source` and its translation, and keep what it looked at.

    Raises DataError for blank text and for more than `LONGEST` tokens on a side.
    """
    tokenizer, model = translator.tokenizer, translator.model
    if is_blank(source) or (target is not None and is_blank(target)):
        raise DataError(f"the {'source' if is_blank(source) else 'target'} is blank: there is nothing to look at")
    src = [*tokenizer.encode(source), tokenizer.eos_id]
    _check_length("source", len(src))
    given = target is not None
    if target is None:
        target, ids = _translation(translator, source)
    else:
        ids = tokenizer.encode_target(target)
    tgt_out = [*ids, tokenizer.eos_id]
    tgt_in = [tokenizer.bos_id, *ids]
    _check_length("target", len(tgt_out))

    device = next(model.parameters()).device
    was_training = model.training
    model.eval()  # dropout would blur the picture
    try:
        with record_attention(model) as maps:
            logits: Tensor = model(torch.tensor([src], device=device), torch.tensor([tgt_in], device=device))
    finally:
        model.train(was_training)
    log_probs = logits[0].float().log_softmax(dim=-1).cpu()  # [T, V]

    best = log_probs.topk(min(ALTERNATIVES, log_probs.size(-1)), dim=-1)
    tokens = tuple(
        TargetToken(
            piece=tokenizer.id_to_piece(index),
            log_prob=float(log_probs[i, index]),
            alternatives=tuple(
                (tokenizer.id_to_piece(int(other)), float(value))
                for other, value in zip(best.indices[i], best.values[i], strict=True)
            ),
        )
        for i, index in enumerate(tgt_out)
    )
    alignment = mean_cross_attention(maps)  # [T, S]
    return Sentence(
        source=source,
        target=target,
        given=given,
        source_pieces=tuple(map(tokenizer.id_to_piece, src)),
        input_pieces=tuple(map(tokenizer.id_to_piece, tgt_in)),
        tokens=tokens,
        maps=tuple(maps),
        alignment=alignment,
        links=best_links(alignment, len(src) - 1, len(ids)),
    )


def mean_cross_attention(maps: list[AttentionMap]) -> Tensor:
    """The decoder-to-encoder weights of one pair, averaged over layers and heads: [T, S], or [0, 0] without any."""
    cross = [found.weights[0].mean(dim=0) for found in maps if found.kind == "cross"]  # each [T, S]
    return torch.stack(cross).mean(dim=0) if cross else torch.zeros(0, 0)


def best_links(alignment: Tensor, n_source: int, n_target: int) -> tuple[int | None, ...]:
    """alignment [T, S] -> for each of the first `n_target` rows the best of the first `n_source` columns.

    EOS, the last column, is where heads rest when nothing concerns them (Clark et al. 2019): no word is aligned to it.
    """
    if not alignment.numel() or not n_source:
        return (None,) * n_target
    return tuple(int(row[:n_source].argmax()) for row in alignment[:n_target])


def _translation(translator: Translator, source: str) -> tuple[str, list[int]]:
    """The model's own translation and its ids, as generated (encoding the text again may cut it otherwise)."""
    tokenizer = translator.tokenizer
    translation = translator.translate([source])[0]
    ids = [tokenizer.piece_to_id(piece) for piece in translation.tokens]
    eos = tokenizer.eos_id
    if ids and ids[-1] == eos:
        ids.pop()
    if eos in ids or tokenizer.decode(ids) != translation.text:  # several pieces joined, or names that are not ids
        ids = tokenizer.encode_target(translation.text)
    return translation.text, ids


def _check_length(side: str, length: int) -> None:
    if length > LONGEST:
        raise DataError(f"the {side} has {length} tokens, and {LONGEST} can be shown: look at a shorter sentence")
