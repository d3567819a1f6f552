"""`dragoman export`: a model for CTranslate2, Hugging Face transformers or ONNX Runtime."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder.")],
    to: Annotated[str, typer.Option("--to", help="huggingface, ctranslate2 or onnx; several with commas between.")],
    out: Annotated[
        str, typer.Option("--out", help="The folder to write; with several formats, one folder in it each.")
    ],
    precision: Annotated[
        Literal["float32", "float16", "bfloat16", "int8"],
        typer.Option("--precision", "--quantization", help="How the weights are kept (int8: ctranslate2 and onnx)."),
    ] = "float32",
    force: Annotated[bool, typer.Option("--force", help="Replace what --out holds.")] = False,
) -> None:
    """Write a model in another engine's format, with its tokenizer and its defaults, ready to be moved anywhere."""
    from dragoman.exchange.formats import check_format, export_model

    formats = [name.strip() for name in to.split(",")]
    for name in formats:
        check_format(name)
    typed = shlex.join(["dragoman", *sys.argv[1:]])
    for name in formats:
        target = Path(out) / name if len(formats) > 1 else Path(out)
        export_model(model, name, target, precision=precision, force=force, command=typed)
        print(f"exported {model} to {target} ({name}, {precision})", file=sys.stderr)
