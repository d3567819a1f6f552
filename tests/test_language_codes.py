"""A code such as `>>deu<<` tells a model of many languages which one to write: every part of a line goes with it."""

from __future__ import annotations

import pytest

from dragoman.decoding.search import Hypothesis
from dragoman.text.corpus import DataConfig
from dragoman.translator import Defaults, Translator

CODE = 2
"""The id of `>>deu<<`."""


@pytest.fixture
def asked(marian_tokenizer, monkeypatch) -> list[list[int]]:
    """The sources that are searched for, without EOS; the answer to each is `die katze`."""
    sources: list[list[int]] = []
    answer = [*marian_tokenizer.encode_target("die katze"), marian_tokenizer.eos_id]

    def decode(model, jobs, options, rules, **others):
        sources.extend(job.src[:-1] for job in jobs)
        return [[Hypothesis.of(answer, [-0.5] * len(answer), rules.eos_id, 0.6, "paper")] for _ in jobs]

    monkeypatch.setattr("dragoman.translator.decode", decode)
    return sources


@pytest.fixture
def translator(marian_tokenizer) -> Translator:
    return Translator(object(), marian_tokenizer, Defaults(DataConfig(max_length=12)))


@pytest.mark.parametrize("code", [">>deu<< ", ">>deu<<", ""])
def test_every_piece_of_a_long_line_begins_with_it_and_still_fits(translator, asked, code) -> None:
    text = " ".join(["the cat sat on the mat"] * 9)
    translation = translator.translate(code + text)
    assert translation.pieces == len(asked) > 3
    assert all(len(source) <= 12 for source in asked)
    assert all(source.count(CODE) == bool(code) for source in asked)
    if code:
        assert {source[0] for source in asked} == {CODE}
    assert [i for source in asked for i in source if i != CODE] == translator.tokenizer.encode(text)


def test_every_part_around_what_is_kept_begins_with_it(translator, asked) -> None:
    encode = translator.tokenizer.encode
    assert translator.translate(">>deu<< the cat {x} sat", keep=r"\{x\}").text == "die katze {x} die katze"
    assert asked[1:] == [[CODE, *encode("the cat")], [CODE, *encode("sat")]]
    asked.clear()
    assert translator.translate(">>deu<< {x} the cat", keep=r"\{x\}").text == "{x} die katze"
    assert asked[1:] == [[CODE, *encode("the cat")]]
    asked.clear()
    assert translator.translate(">>deu<< {x}", keep=r"\{x\}").text == "{x}"
    assert len(asked) == 1
