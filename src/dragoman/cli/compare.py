"""`dragoman compare`: our engine and another on the same weights: agreement, BLEU and speed."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

import typer

from dragoman.cli.threads import MOST_THREADS


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder.")],
    tsv: Annotated[str, typer.Option("--tsv", help="Test set: source TAB reference.")],
    engine: Annotated[
        list[str], typer.Option("--with", help="huggingface, ctranslate2 or onnx; may be given several times.")
    ],
    precision: Annotated[
        Literal["float32", "float16", "bfloat16", "int8"],
        typer.Option("--precision", help="Of the other engine's weights; ours stay float32."),
    ] = "float32",
    beam_size: Annotated[int | None, typer.Option(min=1, help="Hypotheses kept at each step.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Strength of the length penalty.")] = None,
    penalty: Annotated[
        Literal["paper", "none", "power", "average"] | None,
        typer.Option(help="Length penalty; `power` and `none` are those that every engine has."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--lines", min=1, help="Only so many lines of the test set.")] = None,
    threads: Annotated[
        int, typer.Option(min=0, max=MOST_THREADS, help="Processor threads for each engine; 0: all.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each engine.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No talk on stderr.")] = False,
) -> None:
    """Export MODEL, run both engines on a test set, and print how far they agree, the BLEU and the speed of each."""
    from dragoman.exchange.compare import compare
    from dragoman.exchange.formats import check_format

    names = [name.strip() for item in engine for name in item.split(",")]
    for name in names:
        check_format(name)
    for name in names:
        found = compare(
            model,
            name,
            tsv,
            precision=precision,
            beam_size=beam_size,
            alpha=alpha,
            penalty=penalty,
            limit=limit,
            threads=threads,
            log=(lambda line: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True)),
        )
        print(json.dumps(found.as_json(), ensure_ascii=False) if as_json else found.as_text(), flush=True)
