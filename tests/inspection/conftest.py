"""A small random model with a tokenizer of words, and the folder that it would lie in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dragoman.model.transformer import Transformer, TransformerConfig

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
ENGLISH = ["the", "a", "cat", "dog", "sees", "and"]
GERMAN = ["die", "der", "katze", "hund", "sieht", "und"]
WORDS = [*SPECIAL, *ENGLISH, *GERMAN, "<b>", "&", "猫"]
N_LAYERS, N_HEADS = 2, 3


class WordTokenizer:
    """One id a word: enough of the tokenizers' contract to be looked at."""

    kind = "words"
    normalization = "nfc"
    pad_id, unk_id, bos_id, eos_id = 0, 1, 2, 3

    def encode(self, text: str) -> list[int]:
        return [WORDS.index(word) if word in WORDS else self.unk_id for word in text.split()]

    encode_target = encode

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(WORDS[index] for index in ids if index > 3)

    def id_to_piece(self, index: int) -> str:
        return WORDS[index]

    def piece_to_id(self, piece: str) -> int:
        return WORDS.index(piece)

    def __len__(self) -> int:
        return len(WORDS)


class SmallTranslator:
    """What `load` gives, as far as an inspection asks."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = Transformer(
            TransformerConfig(len(WORDS), n_layers=N_LAYERS, d_model=12, d_ff=20, n_heads=N_HEADS, d_v=5, dropout=0.3)
        )
        self.tokenizer = WordTokenizer()
        self.config = SimpleNamespace(
            model=SimpleNamespace(kind="paper"), data=SimpleNamespace(src_lang="en", tgt_lang="de")
        )
        self.answer = SimpleNamespace(text="die katze sieht", tokens=["die", "katze", "sieht", "</s>"])

    def translate(self, texts: Sequence[str], **options: Any) -> list[Any]:
        return [self.answer for _ in texts]


@pytest.fixture
def translator() -> SmallTranslator:
    return SmallTranslator()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """config.toml and metrics.jsonl of a run of 30 updates."""
    folder = tmp_path / "en-de"
    folder.mkdir()
    (folder / "config.toml").write_text('format_version = 1\n[model]\nkind = "paper" # <tag>\n', encoding="utf-8")
    records: list[dict[str, Any]] = []
    for step in range(1, 31):
        records.append(
            {"kind": "train", "step": step, "loss": 5 - step / 10, "nll": 4.5 - step / 10, "lr": step * 1e-5}
        )
        if step % 10 == 0:
            bleu = {10: 4.0, 20: 12.5, 30: 11.0}[step]
            records.append({"kind": "dev", "step": step, "nll": 3.0, "perplexity": 60.0 - step, "bleu": bleu})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return folder
