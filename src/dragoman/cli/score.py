"""`dragoman score`: how likely a model finds given translations."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dragoman.cli.threads import Threads, use_threads

if TYPE_CHECKING:
    from dragoman.text.corpus import Pair

CHUNK = 2048
"""Pairs that are scored together."""


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of the model.")],
    tsv: Annotated[str, typer.Option(metavar="FILE", help="Pairs: source TAB target on each line; - is stdin.")],
    alpha: Annotated[float | None, typer.Option(help="Strength of the length penalty; else the model's own.")] = None,
    penalty: Annotated[
        Literal["paper", "none", "power", "average"] | None,
        typer.Option(help="Length penalty: ((5 + n) / 6)^alpha, 1, n^alpha or n."),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Targets are the model's pieces, as in the JSON, spaces between them.")
    ] = False,
    ensemble: Annotated[
        list[Path] | None, typer.Option(metavar="MODEL", help="Average with this model; again for more.")
    ] = None,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens scored at once: memory.")] = None,
    precision: Annotated[
        Literal["float32", "bfloat16", "int8"], typer.Option(help="Number format of the model.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Threads = None,
    invalid_utf8: Annotated[
        Literal["error", "replace"], typer.Option(help="Bytes that are not UTF-8: stop, or read U+FFFD.")
    ] = "error",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a pair.")] = False,
) -> None:
    """Score, log-probability and length of each pair, as TSV.

    The log-probability is that of the target's tokens and EOS given the source; score divides it by the length penalty.
    """
    from dragoman.text.corpus import Corpus, check_corpora, read_pairs

    corpus = Corpus(tsv="/dev/stdin" if tsv == "-" else tsv)
    check_corpora([corpus])  # a missing file is told before a model is loaded

    from dragoman.translator import Target, load

    use_threads(threads)
    translator = load(model, device, precision, ensemble=ensemble or ())
    options = {"penalty": penalty, "batch_tokens": batch_tokens}
    for chunk in chunks(read_pairs(corpus, invalid_utf8=invalid_utf8)):
        pairs: list[tuple[str, Target]] = [(pair.src, pair.tgt.split(" ") if tokens else pair.tgt) for pair in chunk]
        scored = translator.score(pairs, alpha, numbers=[pair.line for pair in chunk], **options)
        for pair, found in zip(chunk, scored, strict=True):
            if as_json:
                told = {"line": pair.line, "source": pair.src, **found.as_dict()}
                sys.stdout.write(json.dumps(told, ensure_ascii=False) + "\n")
            else:
                sys.stdout.write(f"{found.score:.6f}\t{found.log_prob:.6f}\t{found.length}\n")


def chunks(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """The pairs in lists of at most CHUNK."""
    waiting = iter(pairs)
    while chunk := list(itertools.islice(waiting, CHUNK)):
        yield chunk
