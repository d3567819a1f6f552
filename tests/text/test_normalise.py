from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.text.normalise import Form, is_blank, normalise


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\u0000b\u001bc\u0085d\u009fe", "abcde"),  # category Cc goes
        ("a\tb", "a\tb"),  # but TAB
        ("a\rb\nc", "abc"),  # never ends a line, never cuts one
        ("▁a▁▁b", "a b"),
        ("  a   b ", "a b"),
        ("\u00a0a\u00a0\u00a0b", "\u00a0a\u00a0\u00a0b"),  # only U+0020 runs are shortened
        ("e\u0301", "é"),
        ("e\u0001\u0301", "é"),  # the control between them does not keep them apart
        ("，？（）", "，？（）"),  # full-width punctuation stays
        ("👨\u200d👩\u200d👧 ❤\ufe0f", "👨\u200d👩\u200d👧 ❤\ufe0f"),  # format characters stay
        ("a\u2028b\u2029c\x0cd", "a\u2028b\u2029cd"),  # Zl and Zp are not Cc, a form feed is
        ("", ""),
    ],
)
def test_normalise_nfc(text: str, expected: str) -> None:
    assert normalise(text) == expected


def test_forms_differ_in_the_form_alone() -> None:
    text = "ｆｕｌｌ，　ﬁ e\u0301\u0007"
    assert normalise(text, "nfc") == "ｆｕｌｌ，　ﬁ é"
    assert normalise(text, "nfkc") == "full, fi é"
    assert normalise(text, "identity") == "ｆｕｌｌ，　ﬁ e\u0301"


def test_an_unknown_form_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="nfc, nfkc, identity"):
        normalise("a", "nfd")  # type: ignore[arg-type]


@given(st.text(), st.sampled_from(["nfc", "nfkc", "identity"]))
def test_normalise_is_idempotent_and_keeps_its_promises(text: str, form: Form) -> None:
    once = normalise(text, form)
    assert normalise(once, form) == once
    assert not any(unicodedata.category(c) == "Cc" and c != "\t" for c in once)
    assert "  " not in once
    assert "▁" not in once
    assert once == once.strip(" ")


@pytest.mark.parametrize("text", ["", "   ", "\t", "\u3000\u00a0", "\x00\x1f", "▁▁", "\u2028", " \r"])
def test_blank(text: str) -> None:
    assert is_blank(text)


@pytest.mark.parametrize("text", ["a", " . ", "\u200d", "，"])
def test_not_blank(text: str) -> None:
    assert not is_blank(text)
