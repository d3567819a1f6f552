"""Which tokenizer a language asks for, and the guess where nobody names the language."""

from __future__ import annotations

import pytest

from dragoman.scores.languages import base_language, guess_language, needs_asian_support, tokenizer_for


@pytest.mark.parametrize("code", ["zh", "ZH", "zh-CN", "zh_Hans_CN", "zho", "cmn_Hans", "yue", "Chinese"])
def test_ways_to_write_chinese(code: str) -> None:
    assert base_language(code) == "zh"
    assert tokenizer_for(code) == ("zh", None)
    assert needs_asian_support(code)


@pytest.mark.parametrize("code", ["de", "en-GB", "fr_FR", "cs", "", None, "zhx"])
def test_all_others_take_13a(code: str | None) -> None:
    assert tokenizer_for(code) == ("13a", None)
    assert not needs_asian_support(code)


def test_japanese_and_korean_are_known_by_other_codes() -> None:
    assert base_language("jpn") == base_language("ja-JP") == "ja"
    assert base_language("kor") == "ko"
    assert needs_asian_support("jpn")
    assert not needs_asian_support("ko")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("我能看看那个吗？", "zh"),
        ("Tom 不喜歡被當作小孩。", "zh"),
        ("猫が好きです。", "ja"),
        ("カタカナ", "ja"),
        ("나는 학생입니다.", "ko"),
        ("Ein Hund läuft.", None),
        ("Привет, мир", None),
        ("123 ... !", None),
        ("", None),
    ],
)
def test_the_script_tells_the_language(text: str, language: str | None) -> None:
    assert guess_language([text]) == language
