"""The formats that `export` knows, and the one way in which a folder of any of them is written."""

from __future__ import annotations

import importlib
from pathlib import Path

from dragoman.checkpoints.atomic import write_folder
from dragoman.checkpoints.store import load_model
from dragoman.errors import ModelError, UsageError
from dragoman.exchange.layout import Export, Precision

# format -> (module, the packages that it needs)
FORMATS = {
    "huggingface": ("dragoman.exchange.to_huggingface", ("tokenizers",)),
    "ctranslate2": ("dragoman.exchange.to_ctranslate2", ("ctranslate2",)),
    "onnx": ("dragoman.exchange.to_onnx", ("onnx", "onnxscript", "onnxruntime")),
}


def check_format(name: str) -> None:
    """Raises UsageError for a format that this version does not know, ModelError where its packages are missing."""
    if name not in FORMATS:
        raise UsageError(f"the format {name!r} is not known to this version: it can be {', '.join(FORMATS)}")
    missing = [package for package in FORMATS[name][1] if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(
            f"{name} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install 'dragoman[export]'"
        )


def export_model(
    folder: str | Path,
    to: str,
    out: str | Path,
    *,
    precision: Precision = "float32",
    force: bool = False,
    command: str = "",
) -> None:
    """Write the model of `folder` to `out` in the format `to`, all of it or nothing."""
    check_format(to)
    out = Path(out)
    if out.exists() and not force:
        raise ModelError(f"{out} exists already: choose another --out, or give --force to replace it")
    if out.exists() and out.resolve() == Path(folder).resolve():
        raise ModelError(f"{out} is the model itself: choose another --out")
    export = Export(Path(folder), load_model(folder), precision, command or f"dragoman export {folder} --to {to}")
    write = importlib.import_module(FORMATS[to][0]).write
    write_folder(out, lambda target: write(export, target))
