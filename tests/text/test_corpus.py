from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from dragoman.errors import ConfigError, DataError
from dragoman.text.corpus import CleanConfig, Corpus, Counts, DataConfig, Pair, check_corpora, read_pairs


def write(path: Path, data: bytes | str) -> str:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def test_a_pair_of_files_line_for_line(tmp_path: Path) -> None:
    src = write(tmp_path / "a", "one\ntwo\u2028still two\nthree\n")  # case B1
    tgt = write(tmp_path / "b", "eins\nzwei\ndrei\n")
    counts = Counts()
    pairs = list(read_pairs(Corpus(src=src, tgt=tgt), counts=counts))
    assert pairs == [Pair("one", "eins", 1), Pair("two\u2028still two", "zwei", 2), Pair("three", "drei", 3)]
    assert counts["read"] == 3


def test_odd_line_ends_give_the_same_pairs(tmp_path: Path) -> None:  # case B3
    clean = Corpus(src=write(tmp_path / "a", "x\ny\n"), tgt=write(tmp_path / "b", "1\n2\n"))
    odd = Corpus(src=write(tmp_path / "c", b"\xef\xbb\xbfx\r\ny"), tgt=write(tmp_path / "d", b"\xef\xbb\xbf1\r\n2\r\n"))
    assert list(read_pairs(odd)) == list(read_pairs(clean))
    table = Corpus(tsv=write(tmp_path / "e.tsv", b"\xef\xbb\xbfx\t1\r\ny\t2"))
    assert list(read_pairs(table)) == list(read_pairs(clean))


def test_text_is_given_as_it_stands(tmp_path: Path) -> None:
    corpus = Corpus(tsv=write(tmp_path / "a.tsv", "  e\u0301 ▁ \t\x00,\u3000\n\t\n"))
    assert list(read_pairs(corpus)) == [Pair("  e\u0301 ▁ ", "\x00,\u3000", 1), Pair("", "", 2)]


def test_a_tab_in_a_file_of_a_pair_is_text(tmp_path: Path) -> None:
    corpus = Corpus(src=write(tmp_path / "a", "x\ty\n"), tgt=write(tmp_path / "b", "z\n"))
    assert list(read_pairs(corpus)) == [Pair("x\ty", "z", 1)]


def test_unequal_files_are_refused_before_any_pair(tmp_path: Path) -> None:  # case B5
    src = write(
        tmp_path / "a.en", "The cat sat.\nHello!\nHow are you doing today, my friend?\nYes.\nI want coffee please.\n"
    )
    tgt = write(tmp_path / "a.de", "Die Katze saß.\nHallo!\nJa.\nIch möchte bitte Kaffee.\n")
    with pytest.raises(DataError) as caught:
        read_pairs(Corpus(src=src, tgt=tgt))  # at the call
    told = str(caught.value)
    assert f"{src} has 5 lines, {tgt} has 4; they must be parallel" in told
    assert 'line 3 ("How are you doing today, my friend?" / "Ja.")' in told


def test_all_missing_and_unequal_files_are_named_at_once(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", "1\n2\n"), write(tmp_path / "b", "1\n")
    with pytest.raises(DataError) as caught:
        check_corpora([Corpus(src="nowhere.en", tgt="nowhere.de"), Corpus(tsv="gone.tsv"), Corpus(src=a, tgt=b)])
    told = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    for name in ("nowhere.en", "nowhere.de", "gone.tsv", "has 2 lines"):
        assert name in told


def test_pipes_can_be_read_and_are_checked_on_the_way(tmp_path: Path) -> None:
    def pipe(name: str, data: bytes) -> str:
        os.mkfifo(tmp_path / name)
        threading.Thread(target=(tmp_path / name).write_bytes, args=(data,), daemon=True).start()
        return str(tmp_path / name)

    pairs = read_pairs(Corpus(src=pipe("a", b"1\n2\n"), tgt=pipe("b", b"3\n4\n")))
    assert [pair[:2] for pair in pairs] == [("1", "3"), ("2", "4")]
    with pytest.raises(DataError, match=r"d ends after line 1, and .*c goes on"):
        list(read_pairs(Corpus(src=pipe("c", b"1\n2\n"), tgt=pipe("d", b"3\n"))))
    assert list(read_pairs(Corpus(tsv=pipe("e", b"1\t2\n")))) == [Pair("1", "2", 1)]


def test_bad_rows_are_all_named(tmp_path: Path) -> None:
    tsv = write(tmp_path / "a.tsv", "a\tb\nonly one\nc\td\te\n\nf\tg\n")
    with pytest.raises(DataError) as caught:
        list(read_pairs(Corpus(tsv=tsv)))
    problems = caught.value.problems
    assert [problem.split(",")[1].split(":")[0] for problem in problems] == [" line 2", " line 3", " line 4"]
    assert "1 column," in problems[0]
    assert "3 columns," in problems[1]
    assert "an empty line" in problems[2]
    assert 'bad_rows = "skip"' in problems[0]


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    tsv = write(tmp_path / "a.tsv", "a\tb\nonly one\nc\td\te\nf\tg\n")
    counts = Counts()
    assert [pair.line for pair in read_pairs(Corpus(tsv=tsv), bad_rows="skip", counts=counts)] == [1, 4]
    assert counts == Counts({"read": 4, "bad_row": 2})


def test_faults_of_both_sides_are_collected(tmp_path: Path) -> None:  # case B7
    src = write(tmp_path / "a", b"1\n2\n3\n4\n5\n6\n\xc3\x28\n8\n")
    tgt = write(tmp_path / "b", b"1\n\xff\n3\n4\n5\n6\n7\n8\n")
    with pytest.raises(DataError) as caught:
        list(read_pairs(Corpus(src=src, tgt=tgt)))
    told = "\n".join(caught.value.problems)
    assert f"{src}, line 7, byte 12 (from 0): 0xC3" in told
    assert f"{tgt}, line 2, byte 2 (from 0): 0xFF" in told
    replaced = list(read_pairs(Corpus(src=src, tgt=tgt), invalid_utf8="replace"))
    assert replaced[6].src == "\ufffd("
    assert len(replaced) == 8


def test_bad_rows_and_bad_bytes_are_told_together(tmp_path: Path) -> None:
    tsv = write(tmp_path / "a.tsv", b"a\tb\nno tab\n\xff\tc\n")
    with pytest.raises(DataError) as caught:
        list(read_pairs(Corpus(tsv=tsv)))
    assert len(caught.value.problems) == 2


def test_reading_is_fast(tmp_path: Path) -> None:
    write(tmp_path / "a.tsv", "A sentence of ten words, as they are in books.\tEin Satz aus zehn Wörtern.\n" * 400_000)
    started = time.process_time()
    assert sum(1 for _ in read_pairs(Corpus(tsv=str(tmp_path / "a.tsv")))) == 400_000
    assert (time.process_time() - started) < 12  # 2 million a minute at the least


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "needs tsv"),
        ({"src": "a"}, "needs tsv, or both"),
        ({"tsv": "a", "src": "b", "tgt": "c"}, "cannot have both"),
        ({"tsv": "a", "weight": 0.0}, "above 0"),
        ({"tsv": "a", "weight": float("inf")}, "above 0"),
        ({"tsv": "a", "weight": float("nan")}, "above 0"),
    ],
)
def test_a_corpus_is_one_thing(fields: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Corpus(**fields)  # type: ignore[arg-type]


def test_data_config_collects_its_faults() -> None:
    with pytest.raises(ConfigError) as caught:
        DataConfig(train="a", max_length=0, bad_rows="drop", invalid_utf8="x")  # type: ignore[arg-type]
    assert len(caught.value.problems) == 3


def test_clean_config_collects_its_faults() -> None:
    with pytest.raises(ConfigError) as caught:
        CleanConfig(min_chars=9, max_chars=3, max_ratio=0.5)
    assert len(caught.value.problems) == 2


def test_train_and_dev_as_corpora() -> None:
    config = DataConfig(train=("a.tsv", Corpus(src="b", tgt="c", weight=2.0)), dev="d.tsv")
    assert [corpus.name for corpus in config.train_corpora] == ["a.tsv", "b + c"]
    assert config.dev_corpus == Corpus(tsv="d.tsv")
    assert DataConfig(train="a.tsv").train_corpora == (Corpus(tsv="a.tsv"),)
    assert DataConfig(train="a.tsv").dev_corpus is None
    with pytest.raises(ConfigError, match=r"data\.train is missing"):
        _ = DataConfig().train_corpora


def test_counts_describe_themselves() -> None:
    counts = Counts({"read": 25590, "kept": 25583, "one_side_blank": 5, "duplicate": 2, "ratio": 0})
    assert counts.describe() == "25,583 pairs of 25,590 kept; left out: 5 one side blank, 2 duplicate"
