"""`dragoman import`: a Hugging Face model becomes a model folder of ours."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def command(
    source: Annotated[
        str, typer.Argument(metavar="DIR", help="A Hugging Face folder, or a hub name such as owner/name.")
    ],
    out: Annotated[str, typer.Option("--out", help="The model folder to write.")],
    src_lang: Annotated[
        str, typer.Option("--src-lang", help="Source language, where the folder does not say it.")
    ] = "",
    tgt_lang: Annotated[
        str, typer.Option("--tgt-lang", help="Target language, where the folder does not say it.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace what --out holds.")] = False,
) -> None:
    """Read a Hugging Face model (MarianMT, safetensors) and write a dragoman model folder with the same answers."""
    from dragoman.exchange.huggingface import import_folder

    import_folder(source, out, force=force, src_lang=src_lang, tgt_lang=tgt_lang)
    print(f"imported {source} as {out}", file=sys.stderr)
