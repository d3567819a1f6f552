"""A small corpus and tokenizers learnt from it, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.tokens.tokenizer import SentencePieceTokenizer, TokenizerConfig, train_tokenizer

EN = [
    "The old translator sat by the harbour and counted the ships.",
    "Why do you count ships? asked a child who had nothing to count.",
    "Because every ship brings a letter, and every letter brings a word I do not know.",
    "In 1914 there were 3.14 times as many, or 1,000; nobody counted twice.",
    "Where does the river end, and who gave the town its name?",
    "He wrote the answer on a piece of paper and folded it in four.",
]
ZH = [
    "老翻译坐在港口边，数着船。",
    "“你为什么数船？”一个没有东西可数的孩子问。",
    "因为每艘船都带来一封信，每封信都带来一个我不认识的词（真的！）。",
    "一九一四年的船是现在的三倍，也许有一千艘；没有人数过两次。",
    "河流在哪里结束，是谁给这座城市起的名字？",
    "他把答案写在一张纸上，折成四折。",
]


@pytest.fixture(scope="session")
def lines() -> list[str]:
    return [f"{text} {number}" for number in range(20) for pair in zip(EN, ZH, strict=True) for text in pair]


@pytest.fixture(scope="session")
def bpe(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    folder: Path = tmp_path_factory.mktemp("bpe")
    return train_tokenizer(lines, TokenizerConfig(vocab_size=600), folder, seed=3)


@pytest.fixture(scope="session")
def unigram(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    folder: Path = tmp_path_factory.mktemp("unigram")
    return train_tokenizer(lines, TokenizerConfig(kind="unigram", vocab_size=450), folder, seed=3)


@pytest.fixture(scope="session", params=["bpe", "unigram"])
def tokenizer(
    request: pytest.FixtureRequest, bpe: SentencePieceTokenizer, unigram: SentencePieceTokenizer
) -> SentencePieceTokenizer:
    return {"bpe": bpe, "unigram": unigram}[request.param]
