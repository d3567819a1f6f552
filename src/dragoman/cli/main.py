"""`dragoman VERB`: find the verb, run it, and turn what went wrong into one plain sentence and an exit code.

A verb's file is imported only when that verb is called, and it imports PyTorch only inside `command`, so that every
`--help` answers at once. Exit codes: 0; 1, the user's input or environment is at fault; 2, the command line is; 130,
Ctrl-C. What is our own mistake keeps its traceback.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TextIO, cast

from dragoman.errors import DragomanError, UsageError

# verb -> (module:function, what it does). A verb of two words belongs to a group, the first of them.
VERBS: dict[str, tuple[str, str]] = {
    "data list": ("dragoman.cli.data:list_command", "list the public corpora that `data get` knows"),
    "data get": ("dragoman.cli.data:get_command", "download a public corpus, check it and split it without leaks"),
    "train": ("dragoman.cli.train:command", "train a model as a TOML file says"),
    "translate": ("dragoman.cli.translate:command", "translate stdin or a file, line by line, to stdout"),
    "score": ("dragoman.cli.score:command", "log-probability of given translations"),
    "evaluate": ("dragoman.cli.evaluate:command", "BLEU, chrF, TER and perplexity on a test set"),
    "average": ("dragoman.cli.average:command", "average checkpoints or models into one model"),
    "inspect": ("dragoman.cli.inspect:command", "look inside a model: parameters, curves, attention"),
    "export": ("dragoman.cli.export:command", "write a model for CTranslate2, Hugging Face or ONNX"),
    "import": ("dragoman.cli.import_:command", "read a Hugging Face model folder"),
    "compare": ("dragoman.cli.compare:command", "compare with other engines on the same weights"),
}

HELP = """usage: dragoman VERB [ARGUMENTS] [OPTIONS]

Neural machine translation by the Transformer of "Attention Is All You Need".

{heading}:
{verbs}

dragoman VERB --help shows what a verb takes; dragoman --version shows the version.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit. `arguments`: without the program's name, by default those of the process."""
    if arguments is None:
        use_utf8()
        arguments = sys.argv[1:]
    if sys.stdout is None:
        sys.stdout = cast(TextIO, NoOutput())
    sys.exit(exit_code(arguments))


class NoOutput(io.TextIOBase):
    """What stands for stdout where that was closed (`>&-`): a run that writes elsewhere has no need of it."""

    def write(self, text: str, /) -> int:
        raise DragomanError("there is no standard output: it is closed; send it to a file, or name one (--out)")


def exit_code(arguments: Sequence[str]) -> int:
    """Run one command line; give its exit code, after writing to stderr what went wrong."""
    try:
        code = dispatch(list(arguments))
        flush()
        return code
    except DragomanError as error:
        complain(error)
        return close_stdout(error.exit_code)
    except KeyboardInterrupt:
        say("interrupted")
        return close_stdout(130)
    except BrokenPipeError:
        # `| head -1` has what it wanted: nobody's fault, and nothing to say.
        return close_stdout(0)
    except OSError as error:
        complain(describe(error))
        return close_stdout(1)
    except ModuleNotFoundError as error:
        advice = missing_extra(error)
        if advice is None:
            raise
        complain(advice)
        return close_stdout(1)
    except MemoryError as error:
        complain(str(error) or "there is not enough memory; smaller batches need less")
        return close_stdout(1)
    except RuntimeError as error:
        # torch.OutOfMemoryError is a RuntimeError; its name is asked for, so that torch need not be loaded here.
        if type(error).__name__ != "OutOfMemoryError" and "can't allocate memory" not in str(error):
            raise
        advice = "smaller batches need less; in training, more accumulation at the same batch_tokens changes no result"
        complain(f"the memory is not enough: {advice} ({str(error).splitlines()[0]})")
        return close_stdout(1)


def dispatch(arguments: list[str]) -> int:
    """Find the verb that `arguments` begin with and run it."""
    if not arguments or arguments[0] in ("--help", "-h"):
        sys.stdout.write(overview(VERBS))
        return 0
    first, rest = arguments[0], arguments[1:]
    if first == "--version":
        from dragoman import __version__

        sys.stdout.write(f"dragoman {__version__}\n")
        return 0
    if first.startswith("-"):
        raise UsageError(f"no such option: {first}{nearest(first, ['--help', '--version'])}")
    group = {verb: entry for verb, entry in VERBS.items() if verb.startswith(f"{first} ")}
    if group:
        if not rest or rest[0] in ("--help", "-h"):
            sys.stdout.write(overview(group))
            return 0
        first, rest = f"{first} {rest[0]}", rest[1:]
    if first not in VERBS:
        known = list(group or dict.fromkeys(verb.split()[0] for verb in VERBS))
        raise UsageError(f"no such verb: {first}{nearest(first, known)} (dragoman --help lists the verbs)")
    module, function = VERBS[first][0].split(":")
    return run(getattr(importlib.import_module(module), function), f"dragoman {first}", rest)


def run(command: Callable[..., Any], name: str, arguments: list[str]) -> int:
    """Parse `arguments` by the annotations of `command` and call it; an integer that it returns is the exit code."""
    import typer

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 110})(command)
    parser = typer.main.get_command(app)
    # The base class of all of the parser's own errors; typer gives it no public name.
    usage_error: type[Exception] = typer.BadParameter.__mro__[2]
    try:
        # Not `parser.main`: that one has its own opinion on Ctrl-C and on closed pipes.
        with parser.make_context(name, arguments) as context:
            result = parser.invoke(context)
    except typer.Exit as error:
        return error.exit_code
    except typer.Abort:
        return 130
    except usage_error as error:
        raise UsageError(explain(error, parser, name)) from None
    return result if isinstance(result, int) else 0


def explain(error: Any, parser: Any, name: str) -> str:
    """One sentence for a usage error of the parser, with the nearest option where the option does not exist."""
    option = getattr(error, "option_name", None)
    if option and hasattr(error, "possibilities"):
        options = [word for parameter in parser.params for word in (*parameter.opts, *parameter.secondary_opts)]
        dashed = [word for word in options if word.startswith("-")] + ["--help"]
        message = f"no such option: {option}{nearest(option, dashed)}"
    else:
        message = " ".join(error.format_message().split()).rstrip(".")
        message = message[:1].lower() + message[1:]
    return f"{message} ({name} --help shows what it takes)"


def overview(verbs: dict[str, tuple[str, str]]) -> str:
    """The help text with a line for each of `verbs`."""
    width = max(map(len, verbs)) + 2
    lines = [f"  {verb:{width}}{what}" for verb, (_, what) in verbs.items()]
    return HELP.format(heading="verbs", verbs="\n".join(lines))


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing where no known word is near."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def use_utf8() -> None:
    """Make text UTF-8 and lines end in LF, whatever the locale says.

    stdin, stdout and stderr can be told. Arguments and file names were decoded before we were asked: under a locale
    with another encoding the interpreter starts once more, in its UTF-8 mode.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A file name need not be text; it is shown with its odd bytes escaped rather than not at all.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", newline="\n")


def flush() -> None:
    """Send what stdout still holds, so that a full disk or a closed pipe is noticed while it can be reported."""
    if sys.stdout is not None:
        sys.stdout.flush()


def close_stdout(code: int) -> int:
    """Flush stdout or, where that cannot be done, drop what it holds: the interpreter would complain at exit."""
    try:
        flush()
    except (OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.close(nothing)
    return code


def complain(problem: DragomanError | str) -> None:
    """Say what went wrong."""
    say(f"error: {problem}")


def say(line: str) -> None:
    """Write a line to stderr, if anybody still reads it."""
    if sys.stderr is None:  # `print` would take stdout for it
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def describe(error: OSError) -> str:
    """One plain sentence for what the operating system said."""
    reason = (error.strerror or str(error)).rstrip(".")
    if error.errno == errno.ENOSPC:
        where = f" for {error.filename}" if error.filename is not None else ""
        return f"no space left on the device{where}: free some and run the command again"
    if error.filename is None:
        return f"the system refused: {reason}"
    if error.filename2 is not None:
        return f"{error.filename} -> {error.filename2}: {reason}"
    return f"{error.filename}: {reason}"


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Which extra brings the package that is missing; None where it is no package of ours to explain."""
    from importlib import metadata

    package = (error.name or "").split(".")[0]
    try:
        requirements = metadata.requires("dragoman") or []
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        # such as `huggingface-hub>=0.28; extra == "export"`
        parts = re.fullmatch(r"""([\w.-]+)([^;]*)(?:;.*extra == ["'](\w+)["'].*)?""", requirement)
        if parts and re.sub(r"[-.]", "_", parts[1]).lower() == package.lower() != "dragoman":
            target = f"dragoman[{parts[3]}]" if parts[3] else "dragoman"
            return f"this needs the package {parts[1]}, which is not installed: pip install '{target}'"
    return None
