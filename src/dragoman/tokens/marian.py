"""Marian's tokenizer: one SentencePiece model for each side, and one vocabulary that gives both their ids.

SentencePiece's own ids are not used: a piece is looked up in `vocab.json`, where special tokens stand wherever the
model wants them (often `</s>` 0, `<unk>` 1 and `<pad>` last). Models of many target languages are told the language
by a first word such as `>>fra<<`, which is one entry of the vocabulary and never goes through SentencePiece.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import sentencepiece

from dragoman.errors import DataError, ModelError
from dragoman.tokens.files import write_atomically
from dragoman.tokens.tokenizer import FACTS_FILE, FORMAT_VERSION, Tokenizer

SOURCE, TARGET, VOCABULARY = "source.spm", "target.spm", "vocab.json"

# Cc but TAB: a line feed in a piece would make two lines of one.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_LANGUAGE = re.compile(r"(>>[^<>]+<<) *")
_THREADED_FROM = 64


class MarianTokenizer(Tokenizer):
    """Two SentencePiece models over one vocabulary. Safe to use from many threads at once.

    The models bring their own normalisation (mostly SentencePiece's NFKC with additions), so ours adds to it only what
    holds for every text: no control characters, no `▁`, single spaces.
    """

    kind = "marian"
    normalization = "identity"

    def __init__(
        self,
        source: bytes,
        target: bytes,
        vocabulary: Mapping[str, int],
        *,
        pad_id: int,
        unk_id: int,
        bos_id: int,
        eos_id: int,
        banned_ids: Iterable[int] = (),
    ) -> None:
        """`source` and `target` are contents of `.spm` files. Raises ModelError with everything that does not fit."""
        self.files = {SOURCE: source, TARGET: target}
        self.vocabulary = dict(vocabulary)
        self.pad_id, self.unk_id, self.bos_id, self.eos_id = pad_id, unk_id, bos_id, eos_id
        self._banned = tuple(sorted({*banned_ids, pad_id, bos_id} - {eos_id}))
        problems = []
        processors = []
        for name, data in self.files.items():
            try:
                processors.append(read_processor(data))
            except ModelError as error:
                problems += [f"{name}: {problem}" for problem in error.problems]
        problems += vocabulary_problems(self.vocabulary)
        special = {"pad": pad_id, "unk": unk_id, "start": bos_id, "end": eos_id}
        problems += [
            f"the {name} token has the id {index}, outside a vocabulary of {len(self.vocabulary)}"
            for name, index in special.items()
            if not 0 <= index < len(self.vocabulary)
        ]
        if problems:
            raise ModelError(problems)
        self._source, self._target = processors
        self._pieces = sorted(self.vocabulary, key=self.vocabulary.__getitem__)
        self._never_text = {pad_id, bos_id, eos_id}

    def __len__(self) -> int:
        return len(self._pieces)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode(self._source, texts)

    def encode_target_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode(self._target, texts)

    def _encode(self, processor: Any, texts: Sequence[str]) -> list[list[int]]:
        languages = []
        plain = []
        for text in map(self.normalise, texts):
            code = self._language_code(text)
            languages.append([] if code is None else [self.vocabulary[code[1]]])
            plain.append(text if code is None else text[code.end(1) :])
        try:
            threads = 1 if len(plain) < _THREADED_FROM else -1
            pieces = processor.encode(plain, out_type=str, num_threads=threads)
        except (RuntimeError, UnicodeEncodeError):
            raise DataError("the text is not valid Unicode: it holds half of a surrogate pair") from None
        return [first + [self._id(piece) for piece in line] for first, line in zip(languages, pieces, strict=True)]

    def split_language_code(self, text: str) -> tuple[str, str]:
        """As the contract says: `>>fra<< hello` gives `>>fra<< ` and `hello`, normalised."""
        text = self.normalise(text)
        code = self._language_code(text)
        return ("", text) if code is None else (code[0], text[code.end() :])

    def _language_code(self, text: str) -> re.Match[str] | None:
        """The code that a normalised text begins with; one that the vocabulary lacks is text like any other."""
        code = _LANGUAGE.match(text)
        return code if code is not None and code[1] in self.vocabulary else None

    def _id(self, piece: str) -> int:
        """As `piece_to_id`, for a piece that came out of a text, which must not name a control token."""
        index = self.vocabulary.get(piece, self.unk_id)
        return self.unk_id if index in self._never_text else index

    def decode(self, ids: Iterable[int]) -> str:
        """Special tokens give nothing, `<unk>` included: the hub's tokenizer shows none of them either."""
        hidden = {*self._never_text, self.unk_id}
        pieces = [self.id_to_piece(index) for index in ids if int(index) not in hidden]
        text: str = self._target.decode_pieces(pieces)
        return _CONTROL.sub("", text.replace("▁", " ")).strip(" ")

    def id_to_piece(self, index: int) -> str:
        if not 0 <= int(index) < len(self._pieces):
            raise IndexError(f"the id {int(index)} is outside a vocabulary of {len(self._pieces)}")
        return self._pieces[int(index)]

    def piece_to_id(self, piece: str) -> int:
        return self.vocabulary.get(piece, self.unk_id)

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Pad, the start token, and what the model's own configuration calls bad words."""
        return self._banned

    @cached_property
    def _sha256(self) -> dict[str, str]:
        files = {**self.files, VOCABULARY: _dump(self.vocabulary)}
        return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}

    @property
    def fingerprint(self) -> str:
        ids = f"{self.pad_id},{self.unk_id},{self.bos_id},{self.eos_id}"
        return ":".join([self.kind, ids, *self._sha256.values()])

    def save(self, folder: str | os.PathLike[str]) -> None:
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, data in {**self.files, VOCABULARY: _dump(self.vocabulary)}.items():
            write_atomically(target / name, data)
        facts = {
            "format_version": FORMAT_VERSION,
            "kind": self.kind,
            "vocab_size": len(self),
            "pad_id": self.pad_id,
            "unk_id": self.unk_id,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "banned_ids": list(self._banned),
            "sha256": self._sha256,
        }
        # The facts go last: a folder that has them has the rest.
        write_atomically(target / FACTS_FILE, json.dumps(facts, ensure_ascii=False, indent=2).encode() + b"\n")


def load(folder: Path, facts: dict[str, Any]) -> MarianTokenizer:
    """What `MarianTokenizer.save` wrote. Raises ModelError with everything that is missing or damaged."""
    version = facts.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ModelError(
            f"{folder / FACTS_FILE} has format_version {version!r}, and this version of dragoman reads up to "
            f"{FORMAT_VERSION}: a newer dragoman wrote it"
        )
    problems = []
    data: dict[str, bytes] = {}
    sums = facts.get("sha256")
    for name in (SOURCE, TARGET, VOCABULARY):
        try:
            data[name] = (folder / name).read_bytes()
        except OSError as error:
            problems.append(f"{folder / name} cannot be read: {error.strerror}")
            continue
        expected = sums.get(name) if isinstance(sums, dict) else None
        if hashlib.sha256(data[name]).hexdigest() != expected:
            problems.append(f"{folder / name} is damaged or was exchanged: its SHA-256 is not that of {FACTS_FILE}")
    names = ("pad_id", "unk_id", "bos_id", "eos_id")
    problems += [f"{folder / FACTS_FILE} has no {name}" for name in names if not isinstance(facts.get(name), int)]
    if problems:
        raise ModelError(problems)
    banned = [index for index in facts.get("banned_ids", []) if isinstance(index, int)]
    return MarianTokenizer(
        data[SOURCE],
        data[TARGET],
        json.loads(data[VOCABULARY]),
        pad_id=facts["pad_id"],
        unk_id=facts["unk_id"],
        bos_id=facts["bos_id"],
        eos_id=facts["eos_id"],
        banned_ids=banned,
    )


def vocabulary_problems(vocabulary: Mapping[str, Any]) -> list[str]:
    """What is wrong with a table of pieces and ids: every id from 0 on must stand there once."""
    ids = list(vocabulary.values())
    if not ids or not all(isinstance(index, int) for index in ids):
        return [f"{VOCABULARY} must map pieces to whole numbers"]
    missing = sorted(set(range(len(ids))) - set(ids))
    if missing:
        shown = ", ".join(map(str, missing[:5])) + (" and others" if len(missing) > 5 else "")
        return [f"{VOCABULARY} has {len(ids)} pieces, but no piece has the id {shown}"]
    return []


def read_processor(data: bytes) -> Any:
    """SentencePiece's own object. Raises ModelError where the bytes are no model."""
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
    except (RuntimeError, ValueError, OSError, TypeError):
        raise ModelError("not a SentencePiece model, or a damaged one") from None
    if processor.get_piece_size() == 0:
        raise ModelError("an empty SentencePiece model")
    return processor


def _dump(vocabulary: Mapping[str, int]) -> bytes:
    return json.dumps(dict(vocabulary), ensure_ascii=False).encode() + b"\n"
