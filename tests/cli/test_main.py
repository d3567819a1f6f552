"""The command line itself, as a process: exit codes, plain sentences, nearest names, encodings, closed pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dragoman.cli.main import VERBS, describe, exit_code, missing_extra, nearest

# A verb for each way in which a verb can end, called through the same table as the real ones.
PROBE = """
import sys, time
from typing import Annotated, Optional
import typer
from dragoman.errors import ConfigError, UsageError

def fault(two: bool = False):
    raise ConfigError(["first thing", "second thing"] if two else "one thing")

def usage():
    raise UsageError("no such pair of options")

def system(path: str):
    open(path).read()

def bug():
    raise ZeroDivisionError("ours")

def wait():
    print("ready", flush=True)
    time.sleep(60)

def lines(count: int):
    for i in range(count):
        print(f"line {i} 你好")

def echo(text: Annotated[str, typer.Argument()], beam_size: Annotated[int, typer.Option(min=1)] = 4,
         normalise: bool = True):
    print(text, beam_size)
    print(text, file=sys.stderr)

def code():
    return 7

def memory():
    raise MemoryError
"""
DRIVER = """
import sys
from dragoman.cli import main
for verb in "fault usage system bug wait lines echo code memory".split():
    main.VERBS[verb] = (f"probe:{verb}", "")
main.main()
"""


@pytest.fixture
def probe(tmp_path: Path):
    """Runs one of the probe's verbs; keyword arguments go to the environment."""
    (tmp_path / "probe.py").write_text(PROBE, encoding="utf-8")

    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-c", DRIVER, *arguments]

    def run(*arguments: str, stdout: int = subprocess.PIPE, **environment: str):
        env = {**os.environ, "PYTHONPATH": str(tmp_path), **environment}
        return subprocess.run(
            command(*arguments), stdout=stdout, stderr=subprocess.PIPE, env=env, check=False, timeout=60
        )

    run.command = command
    run.env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return run


def test_help_lists_every_verb_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom dragoman.cli.main import exit_code\nassert exit_code(['--help']) == 0\n"
        "heavy = {'torch', 'numpy', 'typer', 'rich', 'pydantic', 'sentencepiece'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    for verb, (_, what) in VERBS.items():
        assert f"  {verb} " in done.stdout
        assert what in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_does_not_load_torch(verb: str) -> None:
    code = (
        "import sys\nfrom dragoman.cli.main import exit_code\ncode = exit_code(sys.argv[1:])\n"
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *verb.split(), "--help"], capture_output=True, text=True, check=True
    )
    assert done.stderr == "0 False\n"
    assert done.stdout.lower().startswith(f"usage: dragoman {verb}")
    assert "--help" in done.stdout


def test_dragoman_alone_prints_its_help(dragoman) -> None:
    alone, asked = dragoman(), dragoman("--help")
    assert alone.returncode == asked.returncode == 0
    assert alone.stdout == asked.stdout
    assert alone.stdout.startswith(b"usage: dragoman VERB")
    assert alone.stderr == b""


def test_a_group_prints_its_verbs(dragoman) -> None:
    done = dragoman("data")
    assert done.returncode == 0
    assert b"data list" in done.stdout
    assert b"translate " not in done.stdout.split(b"verbs:")[1].split(b"\n\n")[0]


def test_version(dragoman) -> None:
    import dragoman as package

    assert dragoman("--version").stdout == f"dragoman {package.__version__}\n".encode()


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["trian"], "did you mean train?"),
        (["data", "gte"], "did you mean data get?"),
        (["--verson"], "did you mean --version?"),
    ],
)
def test_a_misspelt_verb_is_a_usage_error_with_the_nearest_name(dragoman, arguments: list[str], near: str) -> None:
    done = dragoman(*arguments)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"error: no such")
    assert near in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["echo", "x", "--beam-sise", "3"], "no such option: --beam-sise; did you mean --beam-size?"),
        (["echo", "x", "--no-normalize"], "no such option: --no-normalize; did you mean --no-normalise?"),
        (["echo", "x", "--beam-size", "many"], "--beam-size"),
        (["echo", "x", "--beam-size", "0"], "--beam-size"),
        (["echo", "x", "--beam-size"], "--beam-size"),
        (["echo"], "missing argument"),
        (["echo", "x", "y"], "unexpected extra argument"),
        (["usage"], "no such pair of options"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(probe, arguments: list[str], sentence: str) -> None:
    done = probe(*arguments)
    message = done.stderr.decode()
    assert done.returncode == 2
    assert done.stdout == b""
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert sentence in message


def test_a_fault_of_the_user_is_one_sentence_and_several_are_a_list(probe) -> None:
    one, two = probe("fault"), probe("fault", "--two")
    assert (one.returncode, one.stderr) == (1, b"error: one thing\n")
    assert (two.returncode, two.stderr) == (1, b"error: 2 problems:\n  - first thing\n  - second thing\n")


def test_what_the_system_refuses_is_a_sentence_with_the_file(probe, tmp_path: Path) -> None:
    done = probe("system", str(tmp_path / "none.txt"))
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == f"error: {tmp_path / 'none.txt'}: No such file or directory\n"


def test_our_own_mistakes_keep_their_traceback(probe) -> None:
    done = probe("bug")
    assert done.returncode == 1
    assert b"Traceback" in done.stderr
    assert b"ZeroDivisionError: ours" in done.stderr


def test_a_verb_may_give_its_exit_code(probe) -> None:
    assert probe("code").returncode == 7


def test_no_memory_is_a_sentence(probe) -> None:
    done = probe("memory")
    assert (done.returncode, done.stderr) == (1, b"error: there is not enough memory; smaller batches need less\n")


def test_ctrl_c_exits_130_without_a_traceback(probe) -> None:
    with subprocess.Popen(
        probe.command("wait"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=probe.env
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr == b"interrupted\n"


@pytest.mark.parametrize("count", ["5", "200000"])
def test_a_reader_that_leaves_is_nobodys_fault(probe, count: str) -> None:
    with subprocess.Popen(
        probe.command("lines", count), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=probe.env
    ) as process:
        if count != "5":
            assert process.stdout.readline().decode() == "line 0 你好\n"
        process.stdout.close()
        stderr = process.stderr.read()
        process.wait(timeout=30)
    assert process.returncode == 0
    assert stderr == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_sentence(probe) -> None:
    with Path("/dev/full").open("wb") as full:
        done = probe("lines", "3", stdout=full.fileno())
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: no space left on the device")
    assert done.stderr.count(b"\n") == 1


def test_a_closed_stdout_is_a_sentence_and_only_where_something_is_written(probe) -> None:
    def closed(*arguments: str) -> tuple[int, bytes]:
        script = ["sh", "-c", 'exec "$@" >&-', "sh", *probe.command(*arguments)]
        done = subprocess.run(script, stderr=subprocess.PIPE, env=probe.env, check=False, timeout=60)
        return done.returncode, done.stderr

    for arguments in (["lines", "3"], ["--version"], ["--help"], ["echo", "--help"]):
        code, talk = closed(*arguments)
        assert code == 1
        assert talk.startswith(b"error: there is no standard output")
        assert talk.count(b"\n") == 1
    assert closed("code") == (7, b"")


@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "latin-1"},
    ],
)
def test_text_is_utf8_whatever_the_locale(probe, environment: dict[str, str]) -> None:
    done = probe("echo", "Grüße，你好", **environment)
    assert done.returncode == 0
    assert done.stdout == "Grüße，你好 4\n".encode()
    assert done.stderr == "Grüße，你好\n".encode()


def test_the_facade_is_light() -> None:
    code = "import sys, dragoman\nprint('torch' in sys.modules, 'numpy' in sys.modules, dir(dragoman))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False ['Translator', '__version__', 'load']\n"


def test_the_facade_knows_no_other_name() -> None:
    import dragoman as package

    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        package.lode  # noqa: B018


def test_in_process_the_exit_code_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--version"]) == 0
    assert exit_code(["no-such-verb"]) == 2
    assert "no such verb: no-such-verb" in capsys.readouterr().err


def test_a_missing_package_names_the_extra_that_brings_it() -> None:
    def missing(name: str) -> str | None:
        return missing_extra(ModuleNotFoundError(name, name=name))

    assert missing("uvicorn.config") == (
        "this needs the package uvicorn, which is not installed: pip install 'dragoman[serve]'"
    )
    assert missing("huggingface_hub") == (
        "this needs the package huggingface-hub, which is not installed: pip install 'dragoman[export]'"
    )
    assert "pip install 'dragoman'" in (missing("sentencepiece") or "")
    assert missing("dragoman.nowhere") is None
    assert missing("somebody_elses") is None


def test_sentences_for_the_system() -> None:
    assert describe(PermissionError(13, "Permission denied", "a.txt")) == "a.txt: Permission denied"
    assert describe(OSError(2, "No such file or directory", "a", None, "b")) == "a -> b: No such file or directory"
    assert describe(OSError(28, "No space left on device", "a")).startswith("no space left on the device for a")
    assert describe(OSError("odd")) == "the system refused: odd"


def test_nearest_says_nothing_where_nothing_is_near() -> None:
    assert nearest("zzz", ["train", "translate"]) == ""
    assert nearest("transalte", ["train", "translate"]) == "; did you mean translate?"
