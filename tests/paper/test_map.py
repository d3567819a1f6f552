"""docs/paper.md names symbols and tests: each must exist, so that the map cannot rot."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
ROWS = [line.split("|") for line in PAGE.splitlines() if line.startswith("| §")]
SYMBOLS = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[3])})
TESTS = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[4])})


def test_the_page_has_its_rows() -> None:
    sections = " ".join(row[1] for row in ROWS)
    assert all(
        section in sections for section in ("§3.1", "§3.2.1", "§3.2.2", "§3.3", "§3.4", "§3.5", "§5.3", "§5.4", "§6.1")
    )


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_symbol_exists(symbol: str) -> None:
    parts = symbol.split(".")
    last_module = max(i for i in range(1, len(parts) + 1) if _is_module("dragoman." + ".".join(parts[:i])))
    found: object = importlib.import_module("dragoman." + ".".join(parts[:last_module]))
    for part in parts[last_module:]:
        found = getattr(found, part)
    assert found is not None


@pytest.mark.parametrize("test", TESTS)
def test_test_exists(test: str) -> None:
    file, _, name = test.partition("::")
    functions = {
        node.name
        for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert (name in functions) if name else any(function.startswith("test_") for function in functions)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
