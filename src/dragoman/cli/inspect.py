"""`dragoman inspect`: look inside a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dragoman.errors import DataError, UsageError


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of the model.")],
    text: Annotated[str | None, typer.Option(metavar="S", help="A source sentence to look at.")] = None,
    target: Annotated[
        str | None, typer.Option(metavar="S", help="Its target; without it, the model's own translation.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="FILE.html: one self-contained page; FILE.json: the numbers."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as one JSON object.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No talk on stderr.")] = False,
) -> None:
    """Look inside a MODEL: parameters, positions, curves, and with --text what each head looks at.

    Without --out a summary goes to stdout. With --out FILE.html there is one page, to open in a browser: the parameter
    table, positions, learning rate, loss and BLEU; with --text also the attention of every layer and head, the
    alignment and the log-probability of each target token.
    """
    problems = []
    if text is not None and out is None:
        problems.append("--text needs --out FILE.html (or FILE.json): pictures do not go to a terminal")
    if target is not None and text is None:
        problems.append("--target goes with --text, the source that it translates")
    if out is not None and as_json:
        problems.append("--json prints the summary; for a file use --out FILE.json")
    if out is not None and out.suffix.lower() not in (".html", ".htm", ".json"):
        problems.append(f"--out {out}: the name must end in .html or .json")
    if problems:
        raise UsageError(problems)
    if out is not None and out.exists() and not force:
        raise DataError(f"{out} is there already; --force overwrites it")

    import json

    from dragoman.checkpoints.store import load_model
    from dragoman.inspection.report import inspect_model
    from dragoman.translator import Translator

    loaded = load_model(model, device)  # as it is stored, not as some precision or engine would have it
    translator = Translator(loaded.model, loaded.tokenizer, loaded.config, device=device)
    report = inspect_model(translator, model, text, target)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        content = report.as_json() if out.suffix.lower() == ".json" else report.as_html()
        out.write_text(content, encoding="utf-8", newline="\n")
        if not quiet:
            print(f"{out}: written", file=sys.stderr)
    elif as_json:
        summary = report.as_dict()
        # The summary: what is large is for --out FILE.json.
        for key in ("train", "dev"):
            summary["training"].pop(key)
        summary.pop("positions")
        print(json.dumps(summary, ensure_ascii=False))
    else:
        print(report.as_text())
