"""`dragoman translate`: one line in, one line out, in order."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from dragoman.cli.threads import Threads, use_threads
from dragoman.errors import DataError

if TYPE_CHECKING:
    from dragoman.translator import Translation


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of the model.")],
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="Lines to translate, .gz, .xz or .zst too; else stdin.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write here, all or nothing, not to stdout.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --out.")] = False,
    beam_size: Annotated[int | None, typer.Option(min=1, help="Hypotheses kept at each step.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Strength of the length penalty.")] = None,
    penalty: Annotated[
        Literal["paper", "none", "power", "average"] | None,
        typer.Option(help="Length penalty: ((5 + n) / 6)^alpha, 1, n^alpha or n."),
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="The likeliest token at each step, no beam.")] = False,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens at random, no beam.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Sampling: logits are divided by it.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sampling: only the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sampling: the fewest tokens that reach p.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Sampling: least share of the likeliest's probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Sampling: fixes the draws of every line.")] = None,
    n_best: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="N hypotheses a line, as TSV: line, rank, score, text.")
    ] = None,
    max_extra: Annotated[
        int | None, typer.Option(min=0, help="At most source tokens with EOS and so many more are generated.")
    ] = None,
    min_length: Annotated[int | None, typer.Option(min=0, help="Fewest target tokens, EOS included.")] = None,
    no_repeat_ngram: Annotated[int | None, typer.Option(min=0, help="No run of so many tokens comes twice.")] = None,
    prefix: Annotated[str | None, typer.Option(metavar="TEXT", help="What every translation begins with.")] = None,
    ban: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Never generate the tokens of this; again for more.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX", help="What this matches comes through unchanged; again for more."),
    ] = None,
    ensemble: Annotated[
        list[Path] | None, typer.Option(metavar="MODEL", help="Average with this model; again for more.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="A faster model that proposes; for --greedy and --sample.")
    ] = None,
    alignment: Annotated[
        bool, typer.Option("--alignment", help="Source-target token pairs, after a TAB or in the JSON.")
    ] = False,
    long_input: Annotated[
        Literal["error", "truncate", "split"] | None, typer.Option(help="Lines longer than data.max_length tokens.")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens searched at once in each thread: memory.")
    ] = None,
    precision: Annotated[
        Literal["float32", "bfloat16", "int8"], typer.Option(help="Number format of the model.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Threads = None,
    invalid_utf8: Annotated[
        Literal["error", "replace"], typer.Option(help="Bytes that are not UTF-8: stop, or read U+FFFD.")
    ] = "error",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    unbuffered: Annotated[bool, typer.Option("--unbuffered", help="Answer each line before reading the next.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No warnings on stderr.")] = False,
) -> None:
    """Translate FILE or stdin to stdout.

    What is not given is taken from the model's [decoding]. A line is answered as soon as nothing more is waiting to be
    read, so a program may write a line, read the answer and go on.
    """
    if out is not None and out.is_file() and not force:
        raise DataError(f"{out} is there already; --force overwrites it")

    from dragoman.text.lines import check_text

    if file not in (None, "-"):
        check_text(file)  # a missing file is told before a model is loaded

    from dragoman.translator import load

    use_threads(threads)
    show_warnings(quiet)
    translator = load(model, device, precision, ensemble=ensemble or (), draft=draft)
    options: dict[str, Any] = {
        "beam_size": beam_size,
        "alpha": alpha,
        "penalty": penalty,
        "greedy": greedy or None,
        "sample": sample or None,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "n_best": n_best,
        "max_extra": max_extra,
        "min_length": min_length,
        "no_repeat_ngram": no_repeat_ngram,
        "prefix": prefix,
        "ban": ban or None,
        "keep": keep or None,
        "alignment": alignment or None,
        "long_input": long_input,
        "batch_tokens": batch_tokens,
    }
    chosen = translator.options(**options)
    in_tsv = n_best is not None or chosen.n_best > 1
    form = json_line if as_json else tsv_lines if in_tsv else aligned_line if chosen.alignment else plain_line
    lines, idle = read(file, invalid_utf8)
    if unbuffered:
        idle = always
    with written_to(out) as sink:
        for translation in translator.stream(lines, idle=idle, **options):
            sink.write(form(translation))
            if idle is not None:
                sink.flush()


def read(
    file: str | None, invalid_utf8: Literal["error", "replace"]
) -> tuple[Iterable[str], Callable[[], bool] | None]:
    """The lines of a file or of stdin, and for stdin how to tell that nobody has written any more."""
    if file not in (None, "-"):
        from dragoman.text.corpus import read_lines

        return read_lines(file, invalid_utf8), None

    from dragoman.text.stdin import StandardInput

    source = StandardInput()
    return source.lines(invalid_utf8), source.is_idle


def always() -> bool:
    """Never wait for a second line."""
    return True


@contextlib.contextmanager
def written_to(out: Path | None) -> Iterator[TextIO]:
    """stdout, or a file that is there when all of it is written and not before."""
    if out is None or str(out) == "-":
        yield sys.stdout
    elif out.exists() and not out.is_file():  # a pipe or a device is written as it is
        with out.open("w", encoding="utf-8", newline="\n") as sink:
            yield sink
    else:
        from dragoman.checkpoints.atomic import replacing

        target = Path(os.path.realpath(out))  # of a link, as /dev/stdout is one: it stays
        with replacing(target) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as sink:
            yield sink


def show_warnings(quiet: bool) -> None:
    """Send the package's warnings to stderr as plain sentences, or nowhere."""
    handler: logging.Handler = logging.NullHandler() if quiet else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    log = logging.getLogger("dragoman")
    log.handlers = [handler]
    log.propagate = False


def escaped(text: str) -> str:
    """A field of TSV output: TAB as \\t, a backslash doubled."""
    return text.replace("\\", "\\\\").replace("\t", "\\t")


def plain_line(translation: Translation) -> str:
    return f"{translation.text}\n"


def aligned_line(translation: Translation) -> str:
    """text TAB pairs such as `0-0 2-1`, source token first."""
    pairs = pairs_of(translation.alignment or [])
    return f"{escaped(translation.text)}\t{pairs}\n" if translation.hypotheses else "\n"


def pairs_of(alignment: Iterable[tuple[int, int]]) -> str:
    return " ".join(f"{source}-{target}" for source, target in alignment)


def tsv_lines(translation: Translation) -> str:
    """line TAB rank TAB score TAB text, and TAB alignment where that was asked for; a blank line has one such row,
    without a score and a text."""
    if not translation.hypotheses:
        return f"{translation.line}\t1\t\t\n"
    return "".join(
        f"{translation.line}\t{rank}\t{hypothesis.score:.6f}\t{escaped(hypothesis.text)}"
        + ("" if hypothesis.alignment is None else f"\t{pairs_of(hypothesis.alignment)}")
        + "\n"
        for rank, hypothesis in enumerate(translation.hypotheses, 1)
    )


def json_line(translation: Translation) -> str:
    return json.dumps(translation.as_dict(), ensure_ascii=False) + "\n"
