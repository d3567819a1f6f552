"""A corpus as memory-mapped ids: whole, counted, made once, and made on after a kill."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dragoman.errors import DataError
from dragoman.text.corpus import CleanConfig, Corpus, DataConfig
from dragoman.tokens import binarize as module
from dragoman.tokens.binarize import PairedIds, binarize
from dragoman.tokens.tokenizer import SentencePieceTokenizer, TokenizerConfig, train_tokenizer

CONFIG = DataConfig()


@pytest.fixture
def corpus(tmp_path: Path, lines: list[str]) -> Corpus:
    """120 pairs, then one with a blank side, one blank on both, and one long one."""
    rows = [f"{src}\t{tgt}" for src, tgt in zip(lines[::2], lines[1::2], strict=True)]
    rows += ["something\t", " \t ", "far too long " * 200 + "\t长"]
    path = tmp_path / "train.tsv.gz"
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    return Corpus(tsv=str(path))


def texts(data: PairedIds, tokenizer: SentencePieceTokenizer) -> list[tuple[str, str]]:
    return [(tokenizer.decode(data.src(row)), tokenizer.decode(data.tgt(row))) for row in range(data.n)]


def test_every_pair_in_order_and_what_is_left_out_counted(
    tmp_path: Path, corpus: Corpus, lines: list[str], bpe: SentencePieceTokenizer
) -> None:
    said: list[str] = []
    data = binarize([corpus], bpe, CONFIG, tmp_path / "ids", said.append)
    assert texts(data, bpe) == list(zip(lines[::2], lines[1::2], strict=True))
    assert data.counts == {"read": 123, "kept": 120, "one_side_blank": 1, "both_sides_blank": 1, "too_long": 1}
    assert "120 pairs of 123 kept; left out: 1 one side blank, 1 both sides blank, 1 too long" in said[-1].replace(
        "1 both sides blank, 1 one side blank", "1 one side blank, 1 both sides blank"
    )
    assert data.src_lengths.tolist() == [len(bpe.encode(line)) for line in lines[::2]]
    assert data.tgt_lengths.tolist() == [len(data.tgt(row)) for row in range(data.n)]
    assert data.bounds == (0, 120)
    assert data.src_ids.dtype == np.uint16
    assert isinstance(data.src_ids.base, np.memmap)


def test_length_limit_is_in_tokens_and_inclusive(tmp_path: Path, corpus: Corpus, bpe: SentencePieceTokenizer) -> None:
    everything = binarize([corpus], bpe, CONFIG, tmp_path / "all")
    limit = int(np.median(np.maximum(everything.src_lengths, everything.tgt_lengths)))
    data = binarize([corpus], bpe, replace(CONFIG, max_length=limit), tmp_path / "some")
    longest = np.maximum(everything.src_lengths, everything.tgt_lengths)
    assert data.n == int((longest <= limit).sum())
    assert data.counts["too_long"] == 1 + int((longest > limit).sum())
    assert max(data.src_lengths.max(), data.tgt_lengths.max()) == limit


def test_several_corpora_keep_their_bounds_and_weights(
    tmp_path: Path, corpus: Corpus, bpe: SentencePieceTokenizer
) -> None:
    (tmp_path / "b.en").write_text("One ship.\nTwo ships.\n", encoding="utf-8")
    (tmp_path / "b.zh").write_text("一艘船。\n两艘船。\n", encoding="utf-8")
    second = Corpus(src=str(tmp_path / "b.en"), tgt=str(tmp_path / "b.zh"), weight=2.5)
    data = binarize([corpus, second], bpe, CONFIG, tmp_path / "ids")
    assert data.bounds == (0, 120, 122)
    assert data.weights == (1.0, 2.5)
    assert texts(data, bpe)[120:] == [("One ship.", "一艘船。"), ("Two ships.", "两艘船。")]
    # A weight is no part of the files: nothing is made again for it.
    again = binarize([corpus, replace(second, weight=1.0)], bpe, CONFIG, tmp_path / "ids")
    assert (again.fingerprint, again.weights) == (data.fingerprint, (1.0, 1.0))


def test_cleaning_is_done_and_counted(
    tmp_path: Path, corpus: Corpus, lines: list[str], bpe: SentencePieceTokenizer
) -> None:
    cleaned = replace(CONFIG, clean=CleanConfig(max_chars=62))
    data = binarize([corpus], bpe, cleaned, tmp_path / "ids")
    short = sum(len(src) <= 62 and len(tgt) <= 62 for src, tgt in zip(lines[::2], lines[1::2], strict=True))
    assert 0 < short < 120
    assert data.counts["length"] == 121 - short
    assert data.n == short
    assert all(max(map(len, pair)) <= 62 for pair in texts(data, bpe))


def test_a_pair_that_gives_no_tokens_is_counted_also_across_a_kill(
    tmp_path: Path, lines: list[str], bpe: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(SentencePieceTokenizer):
        """Knows no U+200B, as the normalisation of some models of one's own."""

        def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
            return super().encode_batch([text.replace("\u200b", "") for text in texts])

    tokenizer = Forgetful(bpe.model, bpe.normalization, bpe.facts)
    rows = [f"{src}\t{tgt}" for src, tgt in zip(lines[::2], lines[1::2], strict=True)]
    rows[3] = rows[60] = "\u200b\tsomething"
    rows[61] = "\u200b\t" + "far too long " * 200
    (tmp_path / "train.tsv").write_text("\n".join(rows), encoding="utf-8")
    corpus = Corpus(tsv=str(tmp_path / "train.tsv"))
    monkeypatch.setattr(module, "_CHUNK", 25)
    monkeypatch.setattr(module, "_SAVE_EVERY", 0.0)
    add, chunks = module._Writer.add, []

    def die(self, sides, max_length) -> None:
        chunks.append(sides)
        if len(chunks) == 2:
            raise KeyboardInterrupt
        add(self, sides, max_length)

    with monkeypatch.context() as patched:
        patched.setattr(module._Writer, "add", die)
        with pytest.raises(KeyboardInterrupt):
            binarize([corpus], tokenizer, CONFIG, tmp_path / "ids")
    data = binarize([corpus], tokenizer, CONFIG, tmp_path / "ids")
    assert data.counts == {"read": 120, "kept": 117, "too_long": 1, "no_tokens": 2}
    assert data.n == 117


class TestSecondStart:
    def test_it_reads_no_text(
        self, tmp_path: Path, corpus: Corpus, bpe: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        age(corpus)
        first = binarize([corpus], bpe, CONFIG, tmp_path / "ids")
        before = inodes(tmp_path / "ids")
        monkeypatch.setattr(module, "cleaned_pairs", None)
        monkeypatch.setattr("dragoman.tokens.fingerprint.hashlib.file_digest", None)
        said: list[str] = []
        second = binarize([corpus], bpe, CONFIG, tmp_path / "ids", said.append)
        assert second.fingerprint == first.fingerprint
        assert second.counts == first.counts
        assert np.array_equal(second.tgt_ids, first.tgt_ids)
        assert inodes(tmp_path / "ids") == before
        assert "binarised before" in said[0]

    def test_a_touched_or_moved_file_with_the_same_content_is_the_same(
        self, tmp_path: Path, corpus: Corpus, bpe: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        binarize([corpus], bpe, CONFIG, tmp_path / "ids")
        monkeypatch.setattr(module, "cleaned_pairs", None)
        os.utime(str(corpus.tsv), (1, 1))
        binarize([corpus], bpe, CONFIG, tmp_path / "ids")
        moved = Path(str(corpus.tsv)).rename(tmp_path / "elsewhere.tsv.gz")
        assert binarize([Corpus(tsv=str(moved))], bpe, CONFIG, tmp_path / "ids").n == 120

    def test_a_changed_corpus_is_made_again_even_at_the_same_size_and_second(
        self, tmp_path: Path, bpe: SentencePieceTokenizer
    ) -> None:
        path = tmp_path / "c.tsv"
        soon = time.time() + 3600  # a clock so coarse that the file is never older than the look at it
        path.write_text("one ship\t一艘船\n", encoding="utf-8")
        os.utime(path, (soon, soon))
        binarize([Corpus(tsv=str(path))], bpe, CONFIG, tmp_path / "ids")
        path.write_text("two ship\t一艘船\n", encoding="utf-8")
        os.utime(path, (soon, soon))
        data = binarize([Corpus(tsv=str(path))], bpe, CONFIG, tmp_path / "ids")
        assert texts(data, bpe) == [("two ship", "一艘船")]

    def test_another_tokenizer_or_setting_is_another_corpus(
        self, tmp_path: Path, corpus: Corpus, bpe: SentencePieceTokenizer, unigram: SentencePieceTokenizer
    ) -> None:
        prints = {binarize([corpus], bpe, CONFIG, tmp_path / "ids").fingerprint}
        data = binarize([corpus], unigram, CONFIG, tmp_path / "ids")
        assert unigram.decode(data.src(0)) == "The old translator sat by the harbour and counted the ships. 0"
        prints.add(data.fingerprint)
        prints.add(binarize([corpus], unigram, replace(CONFIG, max_length=300), tmp_path / "ids").fingerprint)
        prints.add(binarize([corpus], unigram, replace(CONFIG, invalid_utf8="replace"), tmp_path / "ids").fingerprint)
        assert len(prints) == 4

    def test_damaged_files_are_made_again(self, tmp_path: Path, corpus: Corpus, bpe: SentencePieceTokenizer) -> None:
        good = binarize([corpus], bpe, CONFIG, tmp_path / "ids").tgt_ids.tolist()
        (tmp_path / "ids" / "tgt.ids").write_bytes(b"\x01")
        said: list[str] = []
        assert binarize([corpus], bpe, CONFIG, tmp_path / "ids", warn=said.append).tgt_ids.tolist() == good
        assert "is damaged; it is made again" in said[0]
        (tmp_path / "ids" / "index.json").write_bytes(b"\xff{")
        assert binarize([corpus], bpe, CONFIG, tmp_path / "ids").tgt_ids.tolist() == good

    def test_a_read_only_folder_is_good_enough(
        self, tmp_path: Path, corpus: Corpus, bpe: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        binarize([corpus], bpe, CONFIG, tmp_path / "ids")
        os.utime(str(corpus.tsv), (1, 1))  # so that it would like to write down the new time

        def refuse(*_: object) -> None:
            raise DataError("read-only")

        monkeypatch.setattr(module, "write_atomically", refuse)
        assert binarize([corpus], bpe, CONFIG, tmp_path / "ids").n == 120


class TestFaults:
    def test_missing_files_are_named_together(self, tmp_path: Path, bpe: SentencePieceTokenizer) -> None:
        corpora = [Corpus(tsv=str(tmp_path / "a.tsv")), Corpus(src=str(tmp_path / "b.en"), tgt=str(tmp_path / "b.de"))]
        with pytest.raises(DataError) as caught:
            binarize(corpora, bpe, CONFIG, tmp_path / "ids")
        assert len(caught.value.problems) == 3

    def test_a_pipe_is_refused(self, tmp_path: Path, bpe: SentencePieceTokenizer) -> None:
        os.mkfifo(tmp_path / "pipe.tsv")
        with pytest.raises(DataError, match="is not a regular file: a corpus is read more than once"):
            binarize([Corpus(tsv=str(tmp_path / "pipe.tsv"))], bpe, CONFIG, tmp_path / "ids")

    def test_bad_rows_leave_nothing_behind(self, tmp_path: Path, corpus: Corpus, bpe: SentencePieceTokenizer) -> None:
        path = tmp_path / "bad.tsv"
        path.write_bytes(b"good\t\xe5\xa5\xbd\nno tab here\n\xc3\x28\tx\n")
        with pytest.raises(DataError) as caught:
            binarize([corpus, Corpus(tsv=str(path))], bpe, CONFIG, tmp_path / "ids")
        assert len(caught.value.problems) == 2
        assert [file.name for file in (tmp_path / "ids").iterdir()] == [".lock"]
        lenient = replace(CONFIG, bad_rows="skip", invalid_utf8="replace")
        data = binarize([corpus, Corpus(tsv=str(path))], bpe, lenient, tmp_path / "ids")
        assert data.counts["bad_row"] == 1
        assert texts(data, bpe)[-1] == ("�(", "x")

    def test_nothing_left_is_said_with_its_causes(self, tmp_path: Path, bpe: SentencePieceTokenizer) -> None:
        path = tmp_path / "c.tsv"
        path.write_text("\tx\ny\t\nlong words here\tz\n", encoding="utf-8")
        with pytest.raises(DataError, match=r"no pair of .*c\.tsv is left.*2 one side blank, 1 too long"):
            binarize([Corpus(tsv=str(path))], bpe, replace(CONFIG, max_length=2), tmp_path / "ids")

    def test_a_full_disk_is_one_sentence(
        self, tmp_path: Path, corpus: Corpus, bpe: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(module.os, "fsync", full)
        with pytest.raises(DataError, match=r"ids cannot be written: No space left on device"):
            binarize([corpus], bpe, CONFIG, tmp_path / "ids")


class TestResume:
    @pytest.mark.parametrize("stop_after", [1, 4, 7, 9])
    def test_it_goes_on_where_it_was_saved(
        self,
        tmp_path: Path,
        corpus: Corpus,
        bpe: SentencePieceTokenizer,
        monkeypatch: pytest.MonkeyPatch,
        stop_after: int,
    ) -> None:
        second = Corpus(tsv=corpus.tsv)
        config = replace(CONFIG, max_length=60)
        whole = binarize([corpus, second], bpe, config, tmp_path / "whole")
        monkeypatch.setattr(module, "_CHUNK", 25)
        monkeypatch.setattr(module, "_SAVE_EVERY", 0.0)
        add = module._Writer.add
        calls = []

        def die(self, sides, max_length) -> None:
            if len(calls) == stop_after:
                self._files["src.ids"].write(b"half a chunk")  # written, never saved
                raise KeyboardInterrupt
            calls.append(len(sides[0]))
            add(self, sides, max_length)

        monkeypatch.setattr(module._Writer, "add", die)
        with pytest.raises(KeyboardInterrupt):
            binarize([corpus, second], bpe, config, tmp_path / "ids")
        monkeypatch.setattr(module._Writer, "add", add)
        said: list[str] = []
        data = binarize([corpus, second], bpe, config, tmp_path / "ids", said.append)
        assert f"going on after {sum(calls)} pairs" in said[0]
        for name in ("src_ids", "src_offsets", "src_lengths", "tgt_ids", "tgt_offsets", "tgt_lengths"):
            assert np.array_equal(getattr(data, name), getattr(whole, name))
        assert (data.bounds, data.counts, data.fingerprint) == (whole.bounds, whole.counts, whole.fingerprint)
        assert not (tmp_path / "ids" / "progress.json").exists()

    @pytest.mark.slow
    def test_killed_for_real(self, tmp_path: Path, lines: list[str], bpe: SentencePieceTokenizer) -> None:
        path = tmp_path / "big.tsv"
        with path.open("w", encoding="utf-8") as file:
            for number in range(60_000):
                file.write(f"{lines[number % 240]} {number}\t{lines[(number + 1) % 240]}\n")
        bpe.save(tmp_path / "tokenizer")
        program = (
            "import sys; from dragoman.tokens import binarize as m; from dragoman.tokens.tokenizer import *\n"
            "from dragoman.text.corpus import *; m._CHUNK = 1000; m._SAVE_EVERY = 0.0\n"
            "t, c, out = sys.argv[1:]\n"
            "d = m.binarize([Corpus(tsv=c)], load_tokenizer(t), DataConfig(), out)\n"
            "import hashlib; print(d.n, hashlib.sha256(d.src_ids.tobytes() + d.tgt_offsets.tobytes()).hexdigest())\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "tokenizer"), str(path)]
        whole = subprocess.run([*command, str(tmp_path / "a")], capture_output=True, text=True, check=True).stdout
        kills = 0
        while kills < 6:
            process = subprocess.Popen([*command, str(tmp_path / "b")], stdout=subprocess.DEVNULL)
            progress = tmp_path / "b" / "progress.json"
            before = progress.read_bytes() if progress.exists() else b""
            while process.poll() is None and (not progress.exists() or progress.read_bytes() == before):
                time.sleep(0.01)
            if process.poll() is not None:
                break
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        assert kills > 2
        assert subprocess.run([*command, str(tmp_path / "b")], capture_output=True, text=True).stdout == whole


def test_two_processes_make_it_once(tmp_path: Path, corpus: Corpus, bpe: SentencePieceTokenizer) -> None:
    bpe.save(tmp_path / "tokenizer")
    program = (
        "import sys; from dragoman.tokens.binarize import *; from dragoman.tokens.tokenizer import *\n"
        "from dragoman.text.corpus import *\n"
        "t, c, out = sys.argv[1:]\n"
        "print(binarize([Corpus(tsv=c)], load_tokenizer(t), DataConfig(), out, lambda m: print(m, end='|')).n)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "tokenizer"), str(corpus.tsv), str(tmp_path / "ids")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate()[0] for process in running]
    assert [text.rstrip()[-3:] for text in said] == ["120"] * 3
    assert sum("binarised before" in text for text in said) == 2


def test_a_vocabulary_over_65536_takes_wider_ids(
    tmp_path: Path, corpus: Corpus, bpe: SentencePieceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SentencePieceTokenizer, "__len__", lambda self: 70_000)
    data = binarize([corpus], bpe, CONFIG, tmp_path / "ids")
    assert data.src_ids.dtype == np.uint32
    assert bpe.decode(data.src(0)) == "The old translator sat by the harbour and counted the ships. 0"


def test_pairs_from_lists() -> None:
    data = PairedIds.from_lists([[5, 6], [7], []], [[8], [], [9, 9, 9]])
    assert [data.src(row).tolist() for row in range(3)] == [[5, 6], [7], []]
    assert [data.tgt(row).tolist() for row in range(3)] == [[8], [], [9, 9, 9]]
    assert (data.n, len(data), data.bounds) == (3, 3, (0, 3))
    assert PairedIds.from_lists([], []).n == 0
    with pytest.raises(ValueError, match="1 sources and 2 targets"):
        PairedIds.from_lists([[1]], [[1], [2]])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, lines: list[str]) -> None:
    """Anonymous memory of a process that binarises: 20 thousand pairs against 400 thousand (docs: 0.5M against 5M)."""
    tokenizer = train_tokenizer(lines, TokenizerConfig(vocab_size=600), tmp_path / "tokenizer")
    program = (
        "import sys, json; from dragoman.tokens.binarize import *; from dragoman.tokens.tokenizer import *\n"
        "from dragoman.text.corpus import *; from dragoman.batches.stream import Stream\n"
        "t, c, out = sys.argv[1:]\n"
        "d = binarize([Corpus(tsv=c)], load_tokenizer(t), DataConfig(), out)\n"
        "s = Stream(d.src_lengths, d.tgt_lengths, 4096, 1); next(s.iterate())\n"
        "anon = [l for l in open('/proc/self/status') if l.startswith('RssAnon')][0].split()[1]\n"
        "print(json.dumps([d.n, int(anon) / 1024]))\n"
    )
    assert len(tokenizer) == 600
    found = {}
    for pairs in (20_000, 400_000):
        path = tmp_path / f"{pairs}.tsv"
        with path.open("w", encoding="utf-8") as file:
            for number in range(pairs):
                file.write(f"{lines[number % 240]} {number}\t{lines[(number + 1) % 240]}\n")
        command = [sys.executable, "-c", program, str(tmp_path / "tokenizer"), str(path), str(tmp_path / str(pairs))]
        n, anon = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        assert n == pairs
        found[pairs] = anon
    assert found[400_000] - found[20_000] < 100


def age(corpus: Corpus) -> None:
    """Makes the files an hour old: the time of a fresh one is not trusted."""
    for path in corpus.files:
        os.utime(path, (time.time() - 3600, time.time() - 3600))


def inodes(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir() if path.suffix}
