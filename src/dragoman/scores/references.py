"""References come in two shapes that are easily taken for each other; a wrong one scores 0 or 100 in silence.

*Streams*, sacreBLEU's shape: one list per reference, each with one entry for every line. *Per line*: one list per line
with all of its references, not always equally many. The scores take streams (or one plain list of strings where every
line has one reference); `streams_of` makes streams of the other shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from dragoman.errors import DataError

Streams = list[list[str | None]]
References = Sequence[str] | Sequence[Sequence[str | None]]

SHOWN = 20
"""So many faults of one input are spelt out; the rest is counted."""


def streams_of(per_line: Sequence[Sequence[str | None]], name: str = "the references") -> Streams:
    """All references of each line -> one stream per reference, short lines filled with None, which sacreBLEU skips.

    A line without any reference and an entry that is not text are errors; None among a line's references is dropped.
    """
    problems = []
    lines: list[list[str]] = []
    for number, refs in enumerate(per_line, start=1):
        if isinstance(refs, str) or not isinstance(refs, Sequence):
            problems.append(f"{name}: line {number} must be a list of references, not {_kind(refs)}")
            continue
        strange = [ref for ref in refs if ref is not None and not isinstance(ref, str)]
        if strange:
            problems.append(f"{name}: line {number} has a reference that is not text but {_kind(strange[0])}")
            continue
        kept = [ref for ref in refs if ref is not None]
        if not kept:
            problems.append(f"{name}: line {number} has no reference")
        lines.append(kept)
    raise_all(problems)
    most = max((len(refs) for refs in lines), default=0)
    return [[refs[i] if i < len(refs) else None for refs in lines] for i in range(most)]


def check(hypotheses: Sequence[str], references: References) -> Streams:
    """Hypotheses and references of one corpus -> the streams that sacreBLEU takes.

    Raises DataError with both counts where their lengths differ, and for empty, missing or misplaced text.
    """
    problems = []
    if isinstance(hypotheses, str):
        raise DataError("the hypotheses are one string; a list of strings is needed, one for each line")
    if isinstance(references, str):
        raise DataError("the references are one string; a list of strings is needed, one for each line")
    flat = bool(references) and all(isinstance(ref, str) for ref in references)
    given: list[Sequence[str | None]] = [references] if flat else list(references)  # type: ignore[list-item]
    if not hypotheses:
        problems.append("there is nothing to score: no hypotheses")
    if not given:
        problems.append(f"there are {len(hypotheses)} hypotheses and no references")
    problems += [
        f"hypothesis {number} is not text but {_kind(line)}"
        for number, line in enumerate(hypotheses, start=1)
        if not isinstance(line, str)
    ]
    for number, stream in enumerate(given, start=1):
        which = "the references" if len(given) == 1 else f"reference {number} of {len(given)}"
        if isinstance(stream, str) or not isinstance(stream, Sequence):
            problems.append(f"{which} must be a list of strings, not {_kind(stream)}")
        elif len(stream) != len(hypotheses):
            problems.append(
                f"{len(hypotheses)} hypotheses but {len(stream)} lines in {which}{_hint(hypotheses, given)}"
            )
            if not flat and len(given) == len(hypotheses):
                break  # the same mistake on every line
        else:
            problems += [
                f"{which}: line {line} is not text but {_kind(ref)}"
                for line, ref in enumerate(stream, start=1)
                if ref is not None and not isinstance(ref, str)
            ]
    raise_all(problems)
    for number, refs in enumerate(zip(*given, strict=True), start=1):
        if all(ref is None for ref in refs):
            problems.append(f"line {number} has no reference")
    raise_all(problems)
    return [list(stream) for stream in given]


def raise_all(problems: list[str]) -> None:
    """One DataError with the first faults and, where there are more, their number."""
    if len(problems) > SHOWN:
        problems = [*problems[:SHOWN], f"and {len(problems) - SHOWN} more, {len(problems)} in all"]
    if problems:
        raise DataError(problems)


def _hint(hypotheses: Sequence[str], given: Sequence[object]) -> str:
    if len(given) > 1 and len(given) == len(hypotheses):
        return "; if each inner list holds the references of one line, turn them with streams_of()"
    return "; they must be parallel"


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}.get(
        type(value), "a number" if isinstance(value, int | float) else type(value).__name__
    )
