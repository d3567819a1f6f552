"""Marian's tokenizer by itself: saved, loaded, damaged. Its ids are held to transformers' in tests/exchange."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dragoman.errors import ModelError
from dragoman.tokens.marian import MarianTokenizer, vocabulary_problems
from dragoman.tokens.tokenizer import load_tokenizer


@pytest.fixture
def tokenizer(marian_tokenizer: MarianTokenizer) -> MarianTokenizer:
    return marian_tokenizer


def test_each_side_has_its_model_and_both_one_vocabulary(tokenizer: MarianTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_target("die katze")) == "die katze"
    assert tokenizer.encode("the cat") != tokenizer.encode_target("the cat")
    assert tokenizer.encode(">>deu<< the cat") == [2, *tokenizer.encode("the cat")]
    assert 2 not in tokenizer.encode("the >>deu<< cat")
    assert tokenizer.encode_batch(["the cat"] * 100) == [tokenizer.encode("the cat")] * 100
    assert tokenizer.banned_ids == (2, len(tokenizer) - 1)
    assert tokenizer.id_to_piece(tokenizer.piece_to_id("▁the")) == "▁the"
    assert tokenizer.piece_to_id("no such piece") == tokenizer.unk_id
    with pytest.raises(IndexError):
        tokenizer.id_to_piece(len(tokenizer))


def test_the_code_of_a_language_can_be_told_from_the_text(tokenizer: MarianTokenizer) -> None:
    assert tokenizer.split_language_code(" >>deu<<  the cat ") == (">>deu<< ", "the cat")
    assert tokenizer.split_language_code(">>deu<<the cat") == (">>deu<<", "the cat")
    assert tokenizer.split_language_code(">>deu<<") == (">>deu<<", "")
    for text in ("the cat", ">>xyz<< the cat", "the >>deu<< cat", ""):
        assert tokenizer.split_language_code(text) == ("", text)


def test_saved_and_loaded_it_is_the_same(tokenizer: MarianTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, MarianTokenizer)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.banned_ids == tokenizer.banned_ids
    assert (loaded.pad_id, loaded.unk_id, loaded.bos_id, loaded.eos_id) == (len(loaded) - 1, 1, len(loaded) - 1, 0)
    assert loaded.encode("the cat sat") == tokenizer.encode("the cat sat")


def test_a_damaged_folder_is_told_whole(tokenizer: MarianTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "source.spm").unlink()
    with (tmp_path / "target.spm").open("ab") as file:
        file.write(b"!")
    with pytest.raises(ModelError) as error:
        load_tokenizer(tmp_path)
    assert len(error.value.problems) == 2
    facts = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({**facts, "format_version": 99}), encoding="utf-8")
    with pytest.raises(ModelError, match="a newer dragoman wrote it"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_has_every_id_once() -> None:
    assert vocabulary_problems({"a": 0, "b": 1}) == []
    assert vocabulary_problems({"a": 0, "b": 0}) == ["vocab.json has 2 pieces, but no piece has the id 1"]
    assert vocabulary_problems({}) == ["vocab.json must map pieces to whole numbers"]


def test_ids_outside_the_vocabulary_and_files_that_are_no_models_are_told_together() -> None:
    with pytest.raises(ModelError) as error:
        MarianTokenizer(b"no", b"neither", {"a": 0}, pad_id=9, unk_id=0, bos_id=0, eos_id=0)
    assert len(error.value.problems) == 3
