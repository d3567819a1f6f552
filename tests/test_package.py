"""What a wheel carries and asks for."""

from __future__ import annotations

import ast
import fnmatch
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import dragoman

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_has_one_home(pyproject: dict[str, Any]) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", dragoman.__version__)
    assert "version" not in pyproject["project"]
    assert dragoman.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_data_file_is_packed(pyproject: dict[str, Any]) -> None:
    patterns = pyproject["tool"]["setuptools"]["package-data"]["dragoman"]
    package = ROOT / "src" / "dragoman"
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}]
    assert files
    for path in files:
        name = path.relative_to(package).as_posix()
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), f"{name} would be missing from the wheel"


def test_every_folder_is_a_package() -> None:
    package = ROOT / "src" / "dragoman"
    for folder in {path.parent for path in package.rglob("*.py")}:
        assert (folder / "__init__.py").exists(), folder


def test_few_dependencies_and_each_is_argued(pyproject: dict[str, Any]) -> None:
    core = pyproject["project"]["dependencies"]
    extras = pyproject["project"]["optional-dependencies"]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").lower()
    assert len(core) <= 12
    assert set(extras) >= {"serve", "export", "lab", "dev"}
    for requirement in [*core, *(each for extra in extras.values() for each in extra)]:
        name = re.match(r"[\w.-]+", requirement)
        assert name
        assert name[0] in text, f"{requirement} is not argued in CONTRIBUTING.md"


def test_every_import_is_declared(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    requirements = [
        *project["dependencies"],
        *(each for some in project["optional-dependencies"].values() for each in some),
    ]
    declared = {re.split(r"[^\w.-]", each)[0].replace("-", "_") for each in requirements}
    # transformers depends on tokenizers, fastapi on starlette: which versions go together is theirs to say.
    declared |= {"tokenizers", "starlette"}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                root = name.split(".")[0]
                assert root in declared | {"dragoman"} | sys.stdlib_module_names, f"{path.name} imports {name}"


def test_the_licence_is_the_one_that_is_named(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
