"""`dragoman data list` and `dragoman data get NAME`: public corpora, as files that a recipe reads."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dragoman.text.catalogue import Address, Entry


def list_command(
    json_: Annotated[bool, typer.Option("--json", help="One object a line, with every address.")] = False,
) -> None:
    """List the public corpora that `data get` knows: where from, how large, under which licence."""
    from dragoman.text.catalogue import CATALOGUE

    if json_:
        for entry in CATALOGUE:
            sys.stdout.write(json.dumps(_described(entry), ensure_ascii=False) + "\n")
        return
    rows = [("NAME", "PAIR", "DOWNLOAD", "LICENCE", "FROM", "WHAT")]
    for entry in CATALOGUE:
        pair = f"{entry.src_lang}-{entry.tgt_lang}"
        rows.append((entry.name, pair, _size(entry), entry.licence, entry.source, entry.about))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")


def get_command(
    name: Annotated[str, typer.Argument(help="A name that `dragoman data list` shows.")],
    out: Annotated[Path | None, typer.Option("--out", help="The folder to write; by default data/NAME.")] = None,
    mirror: Annotated[
        bool, typer.Option("--mirror", help="Go to the second address at once, where there is one.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write over what is there, from a source that may have changed.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Report one JSON object on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no talk on stderr.")] = False,
) -> None:
    """Download a public corpus, check it, and split it without leaks. Goes on where an earlier call was cut off; where
    all is there already, nothing is done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from dragoman.text.sources import get

    console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True, markup=False)
    started = time.monotonic()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bars:

        def progress(url: str, done: int, total: int | None) -> None:
            if url not in tasks:
                tasks[url] = bars.add_task(url.rsplit("/", 1)[1])
                if not console.is_terminal:  # a log, where a bar would be a smear
                    console.print(f"downloading {url}" + (f" ({total / 1e6:,.1f} MB)" if total else ""))
            bars.update(tasks[url], completed=done, total=total)

        result = get(name, out or Path("data") / name, force=force, mirror=mirror, progress=progress, log=console.print)
    if result.made:
        left = ", ".join(f"{n:,} {cause}" for cause, n in result.left_out.items())
        console.print(f"{result.name} is in {result.folder} after {time.monotonic() - started:.0f} s")
        if left:
            console.print(f"pairs in no split: {left}")
    else:
        console.print(f"{result.name} is in {result.folder} already, and intact: nothing to do")
    if json_:
        report: dict[str, Any] = {
            "name": result.name,
            "out": str(result.folder),
            "made": result.made,
            "pairs": result.pairs,
            "left_out": result.left_out,
            "files": result.files,
        }
        sys.stdout.write(json.dumps(report, ensure_ascii=False) + "\n")
        return
    for split in sorted(result.pairs, key=lambda split: (split != "train", split)):
        file = result.folder / ("train.tsv.gz" if split == "train" else f"{split}.tsv")
        sys.stdout.write(f"{file}\t{result.pairs[split]}\n")


def _described(entry: Entry) -> dict[str, Any]:
    """What `--json` says of a corpus; sizes and SHA-256 are null where they are not known beforehand."""
    from dragoman.text.catalogue import Tatoeba

    if isinstance(entry, Tatoeba):
        files = [_address(address, "all") for address in entry.addresses]
        mirror = entry.mirror and {
            "package": entry.mirror.requirement,
            "member": entry.mirror.member,
            "bytes": entry.mirror.size,
            "sha256": entry.mirror.sha256,
        }
    else:
        files = [
            _address(address, part.split) for part in entry.parts for side in (part.src, part.tgt) for address in side
        ]
        mirror = None
    return {
        "name": entry.name,
        "src_lang": entry.src_lang,
        "tgt_lang": entry.tgt_lang,
        "about": entry.about,
        "licence": entry.licence,
        "homepage": entry.homepage,
        "files": files,
        "mirror": mirror,
    }


def _address(address: Address, split: str) -> dict[str, Any]:
    return {
        "split": split,
        "url": address.url,
        "member": address.member,
        "bytes": address.size,
        "sha256": address.sha256,
        "text_sha256": address.text_sha256,
        "md5": address.md5,
    }


def _size(entry: Entry) -> str:
    """What a download takes, as far as it is known beforehand."""
    from dragoman.text.catalogue import Tatoeba

    if isinstance(entry, Tatoeba):
        return f"{entry.mirror.size / 1e6:,.0f} MB (mirror)" if entry.mirror else "not known"
    sizes = [address.size for address in entry.addresses]
    return f"{sum(size for size in sizes if size) / 1e6:,.0f} MB" if all(sizes) else "not known"
