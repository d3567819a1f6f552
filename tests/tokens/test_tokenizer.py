"""Text to ids and back: what is promised for any text and any ids, and what a user is told."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dragoman.errors import ConfigError, DataError, ModelError
from dragoman.tokens.tokenizer import (
    SentencePieceTokenizer,
    TokenizerConfig,
    load_tokenizer,
    read_model,
    train_tokenizer,
)

# The tokenizer fixtures are made once and hold no state, so hypothesis may use one for all of its examples.
SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)

ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=60)
TYPED = [
    "<s> a </s> <unk> <pad> <0x41>",  # B11
    "👨‍👩‍👧‍👦 ❤️ https://example.org/a?b=1&c=%20#d 3.14 1,000",  # B13
    "你好，世界？（是的）「引号」、。！；：",  # B16
    "tab\there",
    "U+2028\u2028is no line end, nor is U+0085\u0085",
    "▁typed▁by▁hand ▅ \ufffd \ufeff",
    "e\u0301 é ﬁ Å",
    "a\u0000b\x1bc\r",
    "  two  spaces  ",
]


class TestRoundTrip:
    @SHARED
    @given(text=ANY_TEXT)
    @example(text=TYPED[0])
    @example(text=TYPED[1])
    @example(text=TYPED[2])
    @example(text=TYPED[5])
    @example(text="")
    @example(text=" \t ")
    def test_any_text_comes_back_normalised(self, tokenizer: SentencePieceTokenizer, text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.normalise(text)

    @pytest.mark.parametrize("text", TYPED)
    def test_typed_text(self, tokenizer: SentencePieceTokenizer, text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer.normalise(text)
        assert not {tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id} & set(ids)

    def test_what_is_promised_to_stay_does_stay(self, tokenizer: SentencePieceTokenizer) -> None:
        for text in (TYPED[0], TYPED[1], TYPED[2], "tab\there"):
            assert tokenizer.normalise(text) == text

    @SHARED
    @given(text=ANY_TEXT, special=st.sampled_from(["<s>", "</s>", "<unk>", "<pad>", "<0x0A>", "<0xFF>"]))
    def test_no_text_becomes_a_control_id(self, tokenizer: SentencePieceTokenizer, text: str, special: str) -> None:
        ids = tokenizer.encode(f"{text}{special}{text} {special}")
        assert not {tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id} & set(ids)

    def test_a_batch_gives_what_single_texts_give(self, tokenizer: SentencePieceTokenizer, lines: list[str]) -> None:
        assert tokenizer.encode_batch(lines) == [tokenizer.encode(line) for line in lines]
        assert tokenizer.encode_target_batch(lines[:3]) == tokenizer.encode_batch(lines[:3])
        assert tokenizer.encode_batch([]) == []

    def test_a_typed_word_mark_is_a_space(self, bpe: SentencePieceTokenizer) -> None:
        assert bpe.decode(bpe.encode("the▁old▁▁ship")) == "the old ship"

    def test_half_a_surrogate_pair_is_named(self, bpe: SentencePieceTokenizer) -> None:
        with pytest.raises(DataError, match=r"^character 3: U\+D83D is half of a surrogate pair"):
            bpe.encode("ab\ud83d")
        with pytest.raises(DataError) as caught:
            bpe.encode_batch(["fine", "\udc00", "x\udfff"])
        assert [problem[:19] for problem in caught.value.problems] == ["text 2, character 1", "text 3, character 2"]


class TestDecode:
    @SHARED
    @given(data=st.data())
    def test_any_ids_are_valid_text_on_one_line(self, tokenizer: SentencePieceTokenizer, data: st.DataObject) -> None:
        first_byte = tokenizer.piece_to_id("<0x00>")
        some = st.integers(0, len(tokenizer) - 1) | st.integers(first_byte, first_byte + 255)
        text = tokenizer.decode(data.draw(st.lists(some, max_size=40)))
        text.encode("utf-8")
        assert not [c for c in text if unicodedata.category(c) == "Cc" and c != "\t"]

    def test_control_ids_give_nothing(self, bpe: SentencePieceTokenizer) -> None:
        ids = [bpe.bos_id, *bpe.encode("the ship"), bpe.eos_id, bpe.pad_id, bpe.pad_id]
        assert bpe.decode(ids) == "the ship"
        assert bpe.decode([bpe.bos_id, bpe.eos_id]) == ""

    def test_broken_and_control_bytes(self, bpe: SentencePieceTokenizer) -> None:
        def spell(*values: int) -> str:
            return bpe.decode([bpe.piece_to_id(f"<0x{value:02X}>") for value in values])

        assert spell(0xE4, 0xBD, 0xA0) == "你"
        assert spell(0xE4, 0xBD) == "��"
        assert spell(0x41, 0xFF, 0x0A, 0x0D, 0x00, 0x42) == "A�B"
        assert spell(0xED, 0xA0, 0x80) == "���"  # a surrogate, spelt in bytes, is no character
        assert spell(0x09) == "\t"

    def test_an_id_outside_the_vocabulary_is_our_fault(self, bpe: SentencePieceTokenizer) -> None:
        for wrong in (-1, len(bpe)):
            with pytest.raises(IndexError):
                bpe.decode([wrong])

    def test_ids_of_numpy(self, bpe: SentencePieceTokenizer) -> None:
        import numpy as np

        assert bpe.decode(np.array(bpe.encode("the ship"), dtype=np.uint16)) == "the ship"


class TestSpecialIds:
    def test_ours(self, tokenizer: SentencePieceTokenizer) -> None:
        assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2, 3)
        assert tokenizer.banned_ids == (0, 1, 2)
        assert [tokenizer.id_to_piece(index) for index in range(4)] == ["<pad>", "<unk>", "<s>", "</s>"]
        assert tokenizer.piece_to_id("</s>") == tokenizer.eos_id
        assert tokenizer.piece_to_id("no such piece") == tokenizer.unk_id

    def test_those_of_a_foreign_model_are_asked_for(self, tmp_path: Path, lines: list[str]) -> None:
        path = foreign_model(tmp_path, lines, pad_id=3, unk_id=2, bos_id=1, eos_id=0, control_symbols=["<2de>"])
        tokenizer = read_model(path)
        assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (3, 2, 1, 0)
        assert tokenizer.banned_ids == (1, 2, 3, tokenizer.piece_to_id("<2de>"))
        assert tokenizer.decode([1, *tokenizer.encode("the ship"), 0]) == "the ship"

    def test_missing_ones_are_told_together(self, tmp_path: Path, lines: list[str]) -> None:
        path = foreign_model(tmp_path, lines, bos_id=-1)  # and spm_train's default has no padding
        with pytest.raises(ModelError) as caught:
            train_tokenizer([], TokenizerConfig(model=str(path)), tmp_path / "out")
        assert len(caught.value.problems) == 2
        assert "no control piece for padding: train it with --pad_id" in caught.value.problems[0]
        assert "no control piece for the start of a sentence: train it with --bos_id" in caught.value.problems[1]
        assert all(problem.startswith(str(path)) for problem in caught.value.problems)
        assert not (tmp_path / "out").exists()

    def test_one_that_can_be_typed_is_refused(self, tmp_path: Path, lines: list[str]) -> None:
        path = foreign_model(tmp_path, lines, pad_id=3, user_defined_symbols=["</s>"])
        with pytest.raises(ModelError, match=r"no control piece for the end of a sentence: .*user_defined_symbols"):
            read_model(path)


class TestTraining:
    def test_vocabulary_is_lowered_to_the_largest_legal_size(self, tmp_path: Path) -> None:
        twenty = [f"the cat sat on mat {number}" for number in range(20)]  # B9
        said: list[str] = []
        tokenizer = train_tokenizer(twenty, TokenizerConfig(vocab_size=8000), tmp_path, 1, said.append)
        limit = legal_size(twenty, "bpe")
        assert len(tokenizer) == limit
        assert f"vocab_size lowered from 8,000 to {limit:,}" in said[-1]
        facts = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
        assert (facts["vocab_size"], facts["made"]["vocab_size_asked"]) == (limit, 8000)

    def test_lowered_for_unigram_too(self, tmp_path: Path) -> None:
        twenty = [f"the cat sat on mat {number}" for number in range(20)]
        tokenizer = train_tokenizer(twenty, TokenizerConfig(kind="unigram"), tmp_path)
        assert len(tokenizer) == legal_size(twenty, "unigram")

    def test_a_size_that_fits_is_kept_without_a_word(self, tmp_path: Path, lines: list[str]) -> None:
        said: list[str] = []
        tokenizer = train_tokenizer(lines, TokenizerConfig(vocab_size=500), tmp_path, 1, said.append)
        assert len(tokenizer) == 500
        assert said == [f"tokenizer: bpe of 500 pieces, trained on {len(lines)} lines"]

    @pytest.mark.parametrize("kind", ["bpe", "unigram"])
    def test_too_small_for_the_alphabet(self, tmp_path: Path, lines: list[str], kind: str) -> None:
        with pytest.raises(ConfigError, match=r"vocab_size = 100 is too small: these texts need at least \d+") as told:
            train_tokenizer(lines, TokenizerConfig(kind=kind, vocab_size=100), tmp_path)  # type: ignore[arg-type]
        needed = int(str(told.value).split("at least ")[1].split()[0])
        assert len(train_tokenizer(lines, TokenizerConfig(vocab_size=needed), tmp_path)) == needed

    def test_nothing_to_train_on(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="the corpus has no lines"):
            train_tokenizer([], TokenizerConfig(), tmp_path)
        with pytest.raises(DataError, match="all 3 lines are blank"):
            train_tokenizer(["", " \t ", "\r"], TokenizerConfig(), tmp_path)

    def test_no_line_is_skipped_and_none_is_fatal(self, tmp_path: Path) -> None:
        # Over 4,192 bytes; over 65,535 characters in one word; and the character that SentencePiece keeps for itself.
        odd = ["q" * 5000, "\u4e00" * 70_000, "zebra \u2585 xylophone", *["plain words"] * 30]
        tokenizer = train_tokenizer(odd, TokenizerConfig(vocab_size=300, character_coverage=1.0), tmp_path)
        for character in "q\u4e00zx":
            assert tokenizer.encode(f"a{character}")[-1] != tokenizer.unk_id
            assert tokenizer.piece_to_id(character) != tokenizer.unk_id
        assert tokenizer.decode(tokenizer.encode("a▅b")) == "a▅b"

    def test_the_sample_is_seeded_and_said(self, tmp_path: Path, lines: list[str]) -> None:
        config = TokenizerConfig(vocab_size=400, sample=50)
        said: list[str] = []
        one = train_tokenizer(iter(lines), config, tmp_path / "1", 5, said.append)
        assert f"trained on a sample of 50 of {len(lines)} lines (seed 5)" in said[0]
        assert train_tokenizer(iter(lines), config, tmp_path / "2", 5).model == one.model
        assert train_tokenizer(iter(lines), config, tmp_path / "3", 6).model != one.model

    @pytest.mark.parametrize("kind", ["bpe", "unigram"])
    def test_the_same_texts_give_the_same_model(self, tmp_path: Path, lines: list[str], kind: str) -> None:
        config = TokenizerConfig(kind=kind, vocab_size=420)  # type: ignore[arg-type]
        one, two = (train_tokenizer(lines, config, tmp_path / name) for name in "ab")
        assert one.model == two.model
        assert one.fingerprint == two.fingerprint

    def test_sentencepiece_keeps_silent(self, tmp_path: Path) -> None:
        program = (
            "from dragoman.tokens.tokenizer import *\n"
            f"t = train_tokenizer(['a b c', 'd e f'] * 9, TokenizerConfig(), {str(tmp_path)!r})\n"
            "t.encode('x')\n"
            "try: train_tokenizer(['a b c'], TokenizerConfig(vocab_size=9), '.')\n"
            "except Exception as error: print(type(error).__name__)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("ConfigError\n", "")

    def test_a_model_of_ones_own_is_taken_as_it_is(self, tmp_path: Path, lines: list[str]) -> None:
        path = foreign_model(tmp_path, lines, pad_id=3)
        said: list[str] = []
        tokenizer = train_tokenizer([], TokenizerConfig(model=str(path)), tmp_path / "out", 1, said.append)
        assert tokenizer.model == path.read_bytes() == (tmp_path / "out" / "tokenizer.model").read_bytes()
        assert "nothing trained" in said[0]
        assert "no byte fallback" in said[1]

    def test_every_fault_of_a_config_is_told(self) -> None:
        with pytest.raises(ConfigError) as caught:
            TokenizerConfig(kind="word", vocab_size=3, sample=0, character_coverage=1.5)  # type: ignore[arg-type]
        assert len(caught.value.problems) == 4


class TestNormalisation:
    def test_full_width_punctuation_is_kept(self, bpe: SentencePieceTokenizer) -> None:
        text = "“真的？”（是的！），。；："  # B16
        assert bpe.decode(bpe.encode(text)) == text

    def test_forms(self, tmp_path: Path, lines: list[str]) -> None:
        text = "ｅ\u0301，ﬁ"
        shown = {}
        for form in ("nfc", "nfkc", "identity"):
            config = TokenizerConfig(normalization=form, vocab_size=450)  # type: ignore[arg-type]
            train_tokenizer(lines, config, tmp_path / form)
            tokenizer = load_tokenizer(tmp_path / form)
            shown[form] = tokenizer.decode(tokenizer.encode(text))
        assert shown == {"nfc": "ｅ\u0301，ﬁ", "nfkc": "é,fi", "identity": text}

    def test_it_is_recorded(self, tmp_path: Path, bpe: SentencePieceTokenizer) -> None:
        bpe.save(tmp_path)
        facts = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
        assert facts["normalization"] == "nfc"
        assert "U+2581" in facts["normalization_drops"]
        assert facts["byte_fallback"] is True


class TestFolder:
    def test_saved_and_loaded_it_is_the_same(self, tmp_path: Path, tokenizer: SentencePieceTokenizer) -> None:
        tokenizer.save(tmp_path)
        loaded = load_tokenizer(tmp_path)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert len(loaded) == len(tokenizer)
        assert loaded.encode(TYPED[1]) == tokenizer.encode(TYPED[1])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer.model"]

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json is missing: this is not a model folder"),
            (lambda f: (f / "tokenizer.model").unlink(), r"tokenizer\.model is missing"),
            (lambda f: (f / "tokenizer.json").write_text("{"), "it is not JSON"),
            (lambda f: (f / "tokenizer.json").write_text("[]"), 'it names no "kind"'),
            (lambda f: (f / "tokenizer.model").write_bytes(b"\x00" * 9), "is damaged or was exchanged: its SHA-256"),
            (lambda f: change(f, kind="words"), "asks for a tokenizer of kind 'words'"),
            (lambda f: change(f, format_version=99), "a newer dragoman wrote it"),
            (lambda f: change(f, normalization="nfd"), "unknown normalization 'nfd'"),
        ],
    )
    def test_damage_is_named(self, tmp_path: Path, bpe: SentencePieceTokenizer, damage, message: str) -> None:
        bpe.save(tmp_path)
        damage(tmp_path)
        with pytest.raises(ModelError, match=message):
            load_tokenizer(tmp_path)

    def test_a_cut_model_file_is_named(self, tmp_path: Path, bpe: SentencePieceTokenizer) -> None:
        path = tmp_path / "own.model"
        path.write_bytes(bpe.model[: len(bpe.model) // 2])
        with pytest.raises(ModelError, match=r"own\.model: .*not a SentencePiece model, or it is damaged"):
            read_model(path)
        path.write_bytes(b"")
        with pytest.raises(ModelError, match=r"own\.model"):
            read_model(path)


class TestSampling:
    TEXT = "Because every ship brings a letter, and every letter brings a word."

    def test_draws_differ_and_decode_alike(self, tokenizer: SentencePieceTokenizer) -> None:
        draws = [tokenizer.encode_sampled(self.TEXT, 0.2, seed=seed) for seed in range(30)]
        assert len({tuple(ids) for ids in draws}) > 10
        assert {tokenizer.decode(ids) for ids in draws} == {self.TEXT}

    def test_a_seed_names_its_draw_whatever_goes_before(self, tokenizer: SentencePieceTokenizer) -> None:
        alone = tokenizer.encode_sampled(self.TEXT, 0.3, seed=11)
        among = tokenizer.encode_sampled_batch([self.TEXT] * 5, 0.3, seeds=[4, 11, 2**70 + 3, 11, -1])
        assert among[1] == among[3] == alone
        with_thread: list[list[int]] = []
        thread = threading.Thread(target=lambda: with_thread.append(tokenizer.encode_sampled(self.TEXT, 0.3, seed=11)))
        thread.start()
        thread.join()
        assert with_thread == [alone]

    def test_bpe_dropout_of_all_and_none(self, bpe: SentencePieceTokenizer) -> None:
        assert bpe.encode_sampled(self.TEXT, 0.0, seed=1) == bpe.encode(self.TEXT)
        letters = bpe.encode_sampled(self.TEXT, 1.0, seed=1)
        assert all(len(bpe.id_to_piece(index).lstrip("▁")) <= 1 for index in letters)

    def test_bad_text(self, bpe: SentencePieceTokenizer) -> None:
        with pytest.raises(DataError, match="surrogate"):
            bpe.encode_sampled("\ud800", 0.1, seed=1)


def test_many_threads_at_once(bpe: SentencePieceTokenizer, lines: list[str]) -> None:
    expected = bpe.encode_batch(lines)
    wrong: list[int] = []

    def work(start: int) -> None:
        for number in range(start, start + len(lines)):
            place = number % len(lines)
            if bpe.encode(lines[place]) != expected[place] or bpe.decode(expected[place]) != bpe.normalise(
                lines[place]
            ):
                wrong.append(place)

    threads = [threading.Thread(target=work, args=(7 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def foreign_model(folder: Path, lines: list[str], **options: object) -> Path:
    """A SentencePiece model as people train them, with the library's own defaults but for `options`."""
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=writer, model_type="bpe", vocab_size=300, minloglevel=3, **options
    )
    path = folder / "foreign.model"
    path.write_bytes(writer.getvalue())
    return path


def legal_size(lines: list[str], kind: str) -> int:
    """The largest size that SentencePiece takes as an order, found by bisection."""

    def fits(size: int) -> bool:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=io.BytesIO(),
                model_type=kind,
                vocab_size=size,
                byte_fallback=True,
                character_coverage=0.9995,
                normalization_rule_name="identity",
                pad_id=0,
                unk_id=1,
                bos_id=2,
                eos_id=3,
                minloglevel=3,
            )
        except RuntimeError:
            return False
        return True

    low, high = 280, 1000
    assert fits(low)
    assert not fits(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def change(folder: Path, **values: object) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")
