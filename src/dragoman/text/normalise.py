"""Unicode and spacing: what a line becomes before it is cut into tokens.

What is lossy here, and all that is lossy: control characters other than TAB go, `▁` is read as a space (SentencePiece
marks word starts with it, so text must not hold it), runs of spaces become one, spaces at the ends go, and the
Unicode form is the one asked for. Format characters stay, so emoji joined by U+200D keep their shape.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Literal

from dragoman.errors import DataError

Form = Literal["nfc", "nfkc", "identity"]

# Category Cc is U+0000-U+001F and U+007F-U+009F for good (a stability promise of Unicode); TAB is spared.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_SPACES = re.compile("  +")


def normalise(text: str, form: Form = "nfc") -> str:
    """The text as the tokenizer sees it; applying it twice changes nothing more.

    `identity` leaves the Unicode form as typed, and differs from `nfc` in nothing else.
    """
    # Controls first: one that stands between a letter and its accent must not keep the two from composing.
    text = _CONTROL.sub("", text).replace("▁", " ")
    if form == "nfc":
        text = unicodedata.normalize("NFC", text)
    elif form == "nfkc":
        text = unicodedata.normalize("NFKC", text)
    elif form != "identity":
        raise ValueError(f"unknown form {form!r}: one of nfc, nfkc, identity")
    if "  " in text:  # after the form, for NFKC turns other spaces into U+0020
        text = _SPACES.sub(" ", text)
    return text.strip(" ")


def is_blank(text: str) -> bool:
    """True where nothing is left to translate: only white space, control characters or `▁`."""
    return not text or not normalise(text, "identity").strip()


def one_line(text: str) -> str:
    """A text from a program may hold several lines; their ends are read as spaces, not dropped with other controls."""
    return text.replace("\r\n", " ").replace("\n", " ")


def refuse_surrogates(texts: Sequence[str], what: str = "", numbers: Sequence[int] | None = None) -> None:
    """Raise DataError for text that is not valid Unicode, naming line and character of each.

    `numbers`: those of the lines, by default from 1 on; `what` stands before "line".
    """
    wrong = []
    for number, text in zip(numbers or range(1, len(texts) + 1), texts, strict=True):
        if not isinstance(text, str):
            raise DataError(f"{what}line {number} is {type(text).__name__}, not text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            wrong.append(
                f"{what}line {number}, character {error.start + 1}: U+{ord(text[error.start]):04X} is half of a "
                "surrogate pair: the text is not valid Unicode"
            )
    if wrong:
        raise DataError(wrong)
