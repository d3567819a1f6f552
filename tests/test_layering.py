"""The map of the house, held: who may import whom, read from the source and never run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src" / "dragoman"
FILES = sorted(SRC.rglob("*.py"))

# The order in which the data travels: a station uses those before it, never those after.
STATIONS = [
    "errors",
    "config",
    "text",
    "tokens",
    "batches",
    "model",
    "training",
    "checkpoints",
    "decoding",
    "scores",
    "translator",
    "trainer",
    "inspection",
    "lab",
    "exchange",
    "serve",
    "run",
    "cli",
]
# The façade and `python -m dragoman` stand outside the order.
OUTSIDE = {"__init__", "__main__"}
# `run` joins the configs of the stations and is for `cli` alone, but for those that make a model folder of a run or a
# model of a folder, also of a foreign one: the config.toml of a model is a run, whole, and they must know that type.
READERS_OF_RUN = {"cli", "checkpoints/store.py", "translator.py", "trainer.py", "exchange/huggingface.py"}
# Nobody else's package is imported by a verb before it is called, but what parses the command line.
LIGHT = {"typer", "dragoman"}


def name_of(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def station_of(path: Path) -> str:
    return path.relative_to(SRC).with_suffix("").parts[0]


def imports(path: Path, *, at_import_time: bool = False) -> Iterator[str]:
    """The dotted names that a file imports: `from a.b import c` gives `a.b.c`.

    at_import_time: only those that run when the file is imported, not those inside functions or under TYPE_CHECKING.
    """
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if at_import_time:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                waiting.extend(node.orelse)
                continue
        waiting.extend(ast.iter_child_nodes(node))


def ours(path: Path, *, at_import_time: bool = False) -> Iterator[str]:
    """The stations of this project that a file imports from: `dragoman.text.corpus.Pair` gives `text`."""
    for name in imports(path, at_import_time=at_import_time):
        parts = name.split(".")
        if parts[0] == "dragoman" and len(parts) > 1:
            yield parts[1]


def test_every_file_stands_in_a_station() -> None:
    assert FILES
    strangers = {name_of(path) for path in FILES if station_of(path) not in {*STATIONS, *OUTSIDE}}
    assert not strangers


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_up_the_list_only(path: Path) -> None:
    if station_of(path) in OUTSIDE:
        return
    here = STATIONS.index(station_of(path))
    below = {
        station
        for station in ours(path)
        if station in STATIONS[here + 1 :] and not (station == "run" and name_of(path) in READERS_OF_RUN)
    }
    assert not below, f"{name_of(path)} imports what comes after it: {sorted(below)}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_imports_run_but_cli_and_the_readers_of_a_model_folder(path: Path) -> None:
    if station_of(path) not in READERS_OF_RUN and name_of(path) not in {*READERS_OF_RUN, "run.py"}:
        assert "run" not in set(ours(path))


def test_transformer_imports_torch_and_the_standard_library() -> None:
    roots = {name.split(".")[0] for name in imports(SRC / "model" / "transformer.py")}
    assert roots <= {"torch", *sys.stdlib_module_names}


def test_the_model_takes_tensors_not_batches() -> None:
    for path in (SRC / "model").rglob("*.py"):
        assert "batches" not in set(ours(path)), name_of(path)


def test_the_loop_neither_decodes_nor_saves() -> None:
    assert {"decoding", "checkpoints"}.isdisjoint(ours(SRC / "training" / "loop.py"))


def test_scores_take_strings() -> None:
    for path in (SRC / "scores").rglob("*.py"):
        names = set(imports(path))
        assert {name.split(".")[0] for name in names}.isdisjoint({"torch"}), name_of(path)
        assert {"tokens", "batches", "model", "decoding"}.isdisjoint(ours(path)), name_of(path)


def test_config_knows_no_station() -> None:
    assert set(ours(SRC / "config.py")) <= {"errors"}


@pytest.mark.parametrize("path", sorted((SRC / "cli").glob("*.py")), ids=name_of)
def test_a_verb_imports_nothing_heavy_before_it_is_called(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path, at_import_time=True)}
    assert roots <= {*LIGHT, *sys.stdlib_module_names}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_is_long_and_none_is_a_drawer_of_oddments(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500
    assert path.stem not in {"utils", "util", "helpers", "misc", "common"}


def test_the_model_is_one_page() -> None:
    assert len((SRC / "model" / "transformer.py").read_text(encoding="utf-8").splitlines()) <= 450  # "about 400"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_says_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{name_of(path)} has no docstring"
