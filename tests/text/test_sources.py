from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from dragoman.errors import DataError, UsageError
from dragoman.text import download
from dragoman.text.catalogue import Address, Part, Published
from dragoman.text.sources import find, get, make

from .conftest import Site


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)


TRAIN_EN = "A dog.\nTwo  dogs.\nA CAT!\nthree\tcats\n\nfour\n"
TRAIN_DE = "Ein Hund.\nZwei Hunde.\nKatze\ndrei Katzen\n\n vier \n"
DEV = [("Five.", "Fünf."), ("a dog", "Einer.")]
TEST = [("A cat.", "Eine Katze."), ("Six &amp; seven.", "Sechs &amp; sieben.")]


def sgm(lines: list[str]) -> str:
    segments = "".join(f'<seg id="{i}">{line}</seg>\n' for i, line in enumerate(lines, 1))
    return f'<srcset setid="t" srclang="any">\n<doc docid="d">\n<hl>\n{segments}</hl>\n</doc>\n</srcset>\n'


def tgz(files: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return packed.getvalue()


@pytest.fixture
def entry(site: Site) -> Published:
    """A corpus in miniature with all that real ones have: plain files, an archive, markup, a second address."""
    site.files["/train.en.gz"] = gzip.compress(TRAIN_EN.encode())
    site.files["/train.de.gz"] = gzip.compress(TRAIN_DE.encode())
    site.files["/sets.tgz"] = tgz(
        {
            "sets/dev.en": "".join(f"{en}\n" for en, _ in DEV),
            "sets/dev.de": "".join(f"{de}\n" for _, de in DEV),
            "sets/test-src.en.sgm": sgm([en for en, _ in TEST]),
            "sets/test-ref.de.sgm": sgm([de for _, de in TEST]),
        }
    )

    def archive(member: str) -> tuple[Address, ...]:
        return (Address(f"{site.url}/gone.tgz", member), Address(f"{site.url}/sets.tgz", member))

    return Published(
        "tiny-en-de",
        "en",
        "de",
        "a tiny corpus",
        "CC0",
        "https://example.org",
        (
            Part("train", (Address(f"{site.url}/train.en.gz"),), (Address(f"{site.url}/train.de.gz"),)),
            Part("dev", archive("sets/dev.en"), archive("sets/dev.de")),
            Part("test", archive("sets/test-src.en.sgm"), archive("sets/test-ref.de.sgm")),
        ),
    )


def test_a_corpus_with_splits_of_its_own(entry: Published, tmp_path: Path) -> None:
    said: list[str] = []
    result = make(entry, tmp_path / "out", log=said.append)
    out = tmp_path / "out"
    # As published; its markup is off, its entities are left as sacreBLEU leaves them.
    assert (out / "test.tsv").read_text("utf-8") == "A cat.\tEine Katze.\nSix &amp; seven.\tSechs &amp; sieben.\n"
    assert json.loads((out / "test.refs.json").read_text("utf-8")) == [["Eine Katze."], ["Sechs &amp; sieben."]]
    assert (out / "dev.tsv").read_text("utf-8") == "Five.\tFünf.\na dog\tEiner.\n"
    # "A dog." stands in dev, "A CAT!" in test; a TAB inside is a space; blank pairs are left out.
    train = gzip.decompress((out / "train.tsv.gz").read_bytes()).decode()
    assert train == "Two  dogs.\tZwei Hunde.\nthree cats\tdrei Katzen\nfour\tvier\n"
    assert result.pairs == {"test": 2, "dev": 2, "train": 3}
    assert result.left_out == {"train: in a set tested on": 2, "train: both sides blank": 1}
    assert any("gone.tgz" in line and "taking the next address" in line for line in said)
    assert not (out / ".download").exists()
    assert "CC0" in (out / "ATTRIBUTION.txt").read_text("utf-8")


def test_a_second_call_has_nothing_to_do(entry: Published, site: Site, tmp_path: Path) -> None:
    first = make(entry, tmp_path / "out")
    site.requests.clear()
    second = make(entry, tmp_path / "out")
    assert first.made
    assert not second.made
    assert site.requests == []
    assert second.pairs == first.pairs


def test_the_same_source_gives_the_same_bytes(entry: Published, tmp_path: Path) -> None:
    one, two = make(entry, tmp_path / "one"), make(entry, tmp_path / "two")
    assert one.files == two.files
    assert (tmp_path / "one" / "checksums.json").read_bytes() == (tmp_path / "two" / "checksums.json").read_bytes()


def test_a_missing_file_is_made_again_a_changed_one_only_by_force(entry: Published, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(entry, out)
    good = (out / "dev.tsv").read_bytes()
    (out / "dev.tsv").unlink()
    assert make(entry, out).made
    assert (out / "dev.tsv").read_bytes() == good
    (out / "dev.tsv").write_bytes(b"mine\tnow\n")
    with pytest.raises(DataError, match=r"dev\.tsv: not as it was written.*--force"):
        make(entry, out)
    assert (out / "dev.tsv").read_bytes() == b"mine\tnow\n"
    make(entry, out, force=True)
    assert (out / "dev.tsv").read_bytes() == good


def test_a_source_that_changed_since_the_first_download_is_told(entry: Published, site: Site, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(entry, out)
    site.files["/train.en.gz"] = gzip.compress(TRAIN_EN.replace("four", "for").encode())
    (out / "train.tsv.gz").unlink()
    with pytest.raises(
        DataError, match=r"train\.en\.gz has changed since the first download.*--force takes the new one"
    ):
        make(entry, out)
    assert make(entry, out, force=True).made
    assert b"for\tvier" in gzip.decompress((out / "train.tsv.gz").read_bytes())


def test_what_is_not_ours_is_not_written_over(entry: Published, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "train.tsv.gz").write_bytes(b"precious")
    with pytest.raises(DataError, match=r"has train\.tsv\.gz already.*--force"):
        make(entry, out)
    assert (out / "train.tsv.gz").read_bytes() == b"precious"
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file, and a folder is wanted"):
        make(entry, tmp_path / "file")


def test_another_corpus_in_the_folder_is_named(entry: Published, tmp_path: Path) -> None:
    make(entry, tmp_path / "out")
    with pytest.raises(DataError, match="holds the corpus tiny-en-de"):
        make(replace(entry, name="other-en-de"), tmp_path / "out")


def test_every_address_that_failed_is_told_and_nothing_is_left(entry: Published, site: Site, tmp_path: Path) -> None:
    del site.files["/sets.tgz"]
    with pytest.raises(DataError) as caught:
        make(entry, tmp_path / "out")
    assert [("gone.tgz" in told, "sets.tgz" in told) for told in caught.value.problems] == [
        (True, False),
        (False, True),
    ]
    assert not (tmp_path / "out").exists()


def test_a_call_that_was_cut_goes_on_with_what_is_there(entry: Published, site: Site, tmp_path: Path) -> None:
    train = site.files.pop("/train.de.gz")
    with pytest.raises(DataError, match=r"train\.de\.gz: the server answers 404"):
        make(entry, tmp_path / "out")
    site.files["/train.de.gz"] = train
    site.requests.clear()
    make(entry, tmp_path / "out")
    assert "/sets.tgz" not in [path for path, _, _ in site.requests]  # it was there from the first call


def test_the_text_itself_can_be_checked(entry: Published, tmp_path: Path) -> None:
    train, dev, test = entry.parts
    wrong = replace(train, src=(replace(train.src[0], text_sha256="0" * 64),))
    with pytest.raises(DataError, match="not the text that was expected"):
        make(replace(entry, parts=(wrong, dev, test)), tmp_path / "out")


def test_texts_that_are_not_parallel_are_named(entry: Published, site: Site, tmp_path: Path) -> None:
    site.files["/train.de.gz"] = gzip.compress(b"Eins.\n")
    with pytest.raises(DataError, match="are not parallel: one ends after 1 lines"):
        make(entry, tmp_path / "out")


def test_talks_with_their_markup(site: Site, tmp_path: Path) -> None:
    def talk(lang: str, lines: list[str]) -> str:
        tags = "<url>http://x</url>\n<keywords>talks</keywords>\n<speaker>S</speaker>\n<talkid>1</talkid>\n"
        return tags + f"<title>T {lang}</title>\n<description>D</description>\n" + "".join(f" {x} \n" for x in lines)

    def xml(lines: list[str]) -> str:
        return (
            '<?xml version="1.0"?>\n<mteval>\n' + "".join(f'<seg id="1"> {x} </seg>\n' for x in lines) + "</mteval>\n"
        )

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("p/train.tags.en-de.en", talk("en", ["One.", "Two <b>."]))
        archive.writestr("p/train.tags.en-de.de", talk("de", ["Eins.", "Zwei <b>."]))
        for lang, words in {"en": "Rock", "de": "Fels"}.items():
            archive.writestr(f"p/dev.en-de.{lang}.xml", xml([f"{words} dev"]))
            archive.writestr(f"p/tst.en-de.{lang}.xml", xml([f"{words} &amp; Roll"]))
    site.files["/p.zip"] = packed.getvalue()

    def both(split: str, member: str) -> Part:
        return Part(
            split,
            (Address(f"{site.url}/p.zip", f"p/{member.format('en')}"),),
            (Address(f"{site.url}/p.zip", f"p/{member.format('de')}"),),
        )

    parts = (both("train", "train.tags.en-de.{}"), both("dev", "dev.en-de.{}.xml"), both("test", "tst.en-de.{}.xml"))
    make(Published("t-en-de", "en", "de", "talks", "CC", "https://example.org", parts), tmp_path / "out")
    train = gzip.decompress((tmp_path / "out" / "train.tsv.gz").read_bytes())
    assert train == b"One.\tEins.\nTwo <b>.\tZwei <b>.\n"
    assert (tmp_path / "out" / "test.tsv").read_bytes() == b"Rock & Roll\tFels & Roll\n"
    assert len([path for path, _, _ in site.requests if path == "/p.zip"]) == 1


def test_an_unknown_name_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean multi30k-en-de"):
        get("multi30-en-de", tmp_path / "out")
    assert find("wmt14-en-de").name == "wmt14-en-de"
