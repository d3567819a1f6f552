"""The README keeps its word: its commands and its code run as they stand, on a tiny corpus, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import pytest

from dragoman.cli.main import VERBS

ROOT = Path(__file__).resolve().parents[2]
README, CHINESE = (ROOT / name for name in ("README.md", "README.zh-CN.md"))


def blocks(language: str, page: Path = README) -> list[str]:
    """The fenced blocks of a page that are marked with `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def sentences() -> list[tuple[str, str]]:
    """Some English and Chinese sentences with regularity enough to be a language."""
    people = [("I", "我"), ("You", "你"), ("We", "我们"), ("They", "他们")]
    actions = [("see", "看见"), ("want", "想要"), ("buy", "买"), ("like", "喜欢")]
    things = [("the book", "那本书"), ("the house", "那座房子"), ("an apple", "一个苹果"), ("tea", "茶")]
    return [
        (f"{person} {action} {thing}.", f"{ren}{zuo}{dongxi}。")
        for (person, ren), (action, zuo), (thing, dongxi) in product(people, actions, things)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the README speaks of, and the model that its command trains of them."""
    folder = tmp_path_factory.mktemp("readme")
    pairs = sentences()
    tsv = [f"{src}\t{tgt}\n" for src, tgt in pairs]
    (folder / "train.tsv").write_text("".join(tsv[8:]), encoding="utf-8")
    (folder / "test.tsv").write_text("".join(tsv[:4]), encoding="utf-8")
    (folder / "dev.en").write_text("".join(f"{src}\n" for src, _ in pairs[4:8]), encoding="utf-8")
    (folder / "dev.zh").write_text("".join(f"{tgt}\n" for _, tgt in pairs[4:8]), encoding="utf-8")
    (folder / "input.txt").write_text("I like tea.\n\nThey see the house.\n", encoding="utf-8")
    [recipe] = blocks("toml")
    # The one thing that is changed: how long it trains.
    short = re.sub(r"^max_steps = [\d_]+$", "max_steps = 3", recipe, flags=re.MULTILINE)
    assert short != recipe
    (folder / "en-zh.toml").write_text(short, encoding="utf-8")
    [train] = [line for line in commands() if line.startswith("dragoman train")]
    shell(train, folder)
    return folder


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line]


def shell(command: str, folder: Path) -> str:
    """Run a command line as a reader would; what it wrote to stdout. Its failure fails the test with its stderr."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_every_command_runs(folder: Path) -> None:
    assert {path.name for path in (folder / "runs" / "en-zh").iterdir()} >= {
        "config.toml",
        "weights.safetensors",
        "metrics.jsonl",
    }
    for command in commands():
        if command.startswith("dragoman train"):
            continue
        output = shell(command, folder)
        if command.startswith("echo"):
            assert output.count("\n") == 1
        elif command.startswith("dragoman translate"):
            assert output == ""
            lines = (folder / "output.txt").read_text(encoding="utf-8").split("\n")
            assert len(lines) == 4
            assert lines[1] == lines[3] == ""
        elif command.startswith("dragoman evaluate"):
            assert "BLEU" in output
            assert "tok:zh" in output
        elif command.startswith("dragoman inspect"):
            page = (folder / "report.html").read_text(encoding="utf-8")
            assert "How are you?" in page
        else:
            pytest.fail(f"what does {command!r} have to show?")


@pytest.mark.slow
def test_the_python_of_the_readme_runs(folder: Path) -> None:
    first, second = blocks("python")
    # Two sentences, so two lines, each a translation and its score.
    printed = subprocess.run(
        [sys.executable, "-c", first], cwd=folder, capture_output=True, encoding="utf-8", check=True
    ).stdout.splitlines()
    assert len(printed) == 2
    assert all(float(line.rpartition(" ")[2]) < 0 for line in printed)

    shape = "print(tuple(logits.shape), sum(p.numel() for p in model.parameters()))"
    printed = subprocess.run(
        [sys.executable, "-c", f"{second}\n{shape}"], cwd=folder, capture_output=True, encoding="utf-8", check=True
    ).stdout.splitlines()
    assert printed == ["(2, 7, 37000) 63082496"]


def test_the_recipe_of_the_readme_is_toml_that_a_run_takes(tmp_path: Path) -> None:
    from dragoman.run import load_run

    [recipe] = blocks("toml")
    tomllib.loads(recipe)
    (tmp_path / "en-zh.toml").write_text(recipe, encoding="utf-8")
    run = load_run(tmp_path / "en-zh.toml")
    assert run.preset == "tiny"
    assert run.training.max_steps == 5_000
    assert str(run.data.train) == str(tmp_path / "train.tsv")


def test_the_table_names_every_verb_and_no_other() -> None:
    for page in (README, CHINESE):
        rows = re.findall(r"^\| (`[^|]*`) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
        named = {verb for row in rows for verb in re.findall(r"`([^`]*)`", row)}
        assert named == set(VERBS)


def test_the_files_that_the_pages_point_at_are_there() -> None:
    for page in (README, CHINESE, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} points at {target}"


def test_the_map_names_what_is_there() -> None:
    for page in (README, CHINESE):
        [tree] = re.findall(
            r"^```\n(src/dragoman/\n.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        inside = re.findall(r"^  (\S+)|\s{2,}(trainer\.py|presets/)", tree, re.MULTILINE)
        for name in {word for pair in inside for word in pair if word}:
            assert (ROOT / "src" / "dragoman" / name).exists(), name
        for name in re.findall(r"^(\S+/)\s", tree, re.MULTILINE):
            assert (ROOT / name).exists(), name


def test_both_pages_show_the_same_code() -> None:
    def code(page: Path) -> list[str]:
        lines = [
            line
            for tag in ("python", "sh", "toml", "console")
            for block in blocks(tag, page)
            for line in block.splitlines()
        ]
        bare = (re.sub(r"\s*(^|\s)#.*$", "", line) for line in lines)
        return [line for line in bare if line]

    assert code(README) == code(CHINESE)
