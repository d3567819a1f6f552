"""What tests of several rooms need."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dragoman.tokens.marian import MarianTokenizer

ROOT = Path(__file__).resolve().parent.parent

RunDragoman = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of corpora and reference numbers beside the repository; where it is not, the test is skipped."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the folder `shared` beside the repository")
    return folder


@pytest.fixture
def dragoman() -> RunDragoman:
    """`dragoman("score", folder, stdin=b"...")`: the command line in a process of its own, bytes in and bytes out."""

    def run(*arguments: object, stdin: bytes = b"", timeout: float = 300, **environment: str):
        return subprocess.run(
            [sys.executable, "-m", "dragoman", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            timeout=timeout,
            env={**os.environ, **environment},
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def marian_tokenizer() -> MarianTokenizer:
    """Two small SentencePiece models over one vocabulary, in which `>>deu<<` has the id 2."""
    import sentencepiece

    from dragoman.tokens.marian import MarianTokenizer

    def spm(line: str) -> bytes:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line] * 5), model_writer=model, vocab_size=26, model_type="bpe", minloglevel=2
        )
        return model.getvalue()

    source, target = spm("the cat sat on the mat"), spm("die katze saß auf der matte")
    pieces = ["</s>", "<unk>", ">>deu<<"]
    for data in (source, target):
        processor = sentencepiece.SentencePieceProcessor(model_proto=data)
        pieces += [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    pieces = [*dict.fromkeys(pieces), "<pad>"]
    last = len(pieces) - 1
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    return MarianTokenizer(
        source, target, vocabulary, pad_id=last, unk_id=1, bos_id=last, eos_id=0, banned_ids=[last, 2]
    )
