"""The same weights in our engine and in another: the same texts? the same numbers? how good, how fast?"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dragoman import __version__
from dragoman.checkpoints.store import Loaded, load_model
from dragoman.errors import DataError
from dragoman.exchange.engines import ENGINES, Engine
from dragoman.exchange.formats import check_format, export_model
from dragoman.exchange.layout import Precision
from dragoman.scores.metrics import bleu
from dragoman.text.corpus import Corpus, read_pairs
from dragoman.text.normalise import is_blank
from dragoman.translator import Translator, load

WARM_UP = 8
"""Lines translated before the clock starts."""


@dataclass(frozen=True)
class Side:
    """One engine on the whole set."""

    bleu: float
    seconds: float
    sentences_per_second: float


@dataclass(frozen=True)
class Search:
    """Both engines with one search."""

    beam_size: int
    """1 is greedy search."""
    equal: float
    """Share of lines whose texts are the same, 0 to 1."""
    dragoman: Side
    other: Side
    different: list[int]
    """Numbers of the first lines whose texts differ."""


@dataclass(frozen=True)
class Comparison:
    """What `dragoman compare` reports."""

    engine: str
    version: str
    dragoman_version: str
    precision: str
    """Of the other engine's weights; ours are float32."""
    n: int
    left_out: int
    """Lines that are blank or longer than the model takes whole."""
    max_logit_difference: float
    """Over every token that may be generated, along the other engine's greedy outputs."""
    logit_lines: int
    """How many lines that was measured on."""
    signature: str
    searches: list[Search]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        """A table to read."""
        lines = [
            f"{self.version} ({self.precision}) beside dragoman {self.dragoman_version} (float32), {self.n} lines"
            + (f", {self.left_out} left out" if self.left_out else ""),
            f"largest logit difference   {self.max_logit_difference:.2e}   (greedy, {self.logit_lines} lines)",
            "",
            f"{'search':12}{'equal texts':>14}{'BLEU ours':>12}{'theirs':>9}{'lines/s ours':>15}{'theirs':>9}",
        ]
        for search in self.searches:
            name = "greedy" if search.beam_size == 1 else f"beam {search.beam_size}"
            lines.append(
                f"{name:12}{search.equal:14.1%}{search.dragoman.bleu:12.2f}{search.other.bleu:9.2f}"
                f"{search.dragoman.sentences_per_second:15.1f}{search.other.sentences_per_second:9.1f}"
            )
        differing = [(s.beam_size, s.different) for s in self.searches if s.different]
        lines += [
            f"first lines that differ with beam {beam}: {', '.join(map(str, numbers))}" for beam, numbers in differing
        ]
        return "\n".join([*lines, f"BLEU: {self.signature}"])


def compare(
    folder: str | Path,
    engine: str,
    tsv: str,
    *,
    precision: Precision = "float32",
    beam_size: int | None = None,
    alpha: float | None = None,
    penalty: str | None = None,
    limit: int | None = None,
    logit_lines: int = 50,
    threads: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Export `folder` to a temporary place, run both engines on the sources of `tsv`, and report.

    Greedy search and beam search are compared; what is not given is the model's own default. Raises DataError for an
    empty test set, ModelError for a model that the engine cannot take.
    """
    check_format(engine)
    loaded = load_model(folder)
    numbers, sources, references, left_out = _lines(tsv, loaded, limit)
    threads = threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    translator = load(folder)
    given = {"beam_size": beam_size, "alpha": alpha, "penalty": penalty}
    options = {key: value for key, value in given.items() if value is not None}
    language = loaded.config.data.tgt_lang or None
    with tempfile.TemporaryDirectory(prefix="dragoman-compare-") as place:
        log(f"exporting to {engine} ({precision})")
        export_model(folder, engine, Path(place) / engine, precision=precision)
        other = ENGINES[engine](Path(place) / engine, threads, loaded.tokenizer)
        log("comparing logits")
        difference = logit_difference(loaded, other, sources[:logit_lines])
        searches = []
        for settings in ({**options, "greedy": True}, {**options, "greedy": False}):
            search = translator.options(**settings)
            if not search.greedy and search.beam_size == 1:
                continue
            log("translating, " + ("greedy" if search.greedy else f"beam {search.beam_size}"))
            ours, our_seconds = _timed(partial(_texts, translator, settings), sources)
            theirs, their_seconds = _timed(partial(other.translate, options=search), sources)
            different = [n for n, a, b in zip(numbers, ours, theirs, strict=True) if a != b]
            searches.append(
                Search(
                    beam_size=1 if search.greedy else search.beam_size,
                    equal=1 - len(different) / len(ours),
                    dragoman=_side(ours, references, language, our_seconds),
                    other=_side(theirs, references, language, their_seconds),
                    different=different[:10],
                )
            )
        return Comparison(
            engine=engine,
            version=other.version,
            dragoman_version=__version__,
            precision=precision,
            n=len(sources),
            left_out=left_out,
            max_logit_difference=difference,
            logit_lines=min(logit_lines, len(sources)),
            signature=bleu(ours, references, language).signature,
            searches=searches,
        )


def logit_difference(loaded: Loaded, other: Engine, sources: Sequence[str]) -> float:
    """The largest absolute difference along the other engine's greedy outputs, over all tokens but the banned ones."""
    tokenizer = loaded.tokenizer
    allowed = torch.ones(len(tokenizer), dtype=torch.bool)
    allowed[list(tokenizer.banned_ids)] = False
    worst = 0.0
    for source in tokenizer.encode_batch(list(sources)):
        ids, theirs = other.greedy_logits(source, len(source) + 51)
        src = torch.tensor([[*source, tokenizer.eos_id]])
        tgt_in = torch.tensor([[tokenizer.bos_id, *ids[:-1]]])
        with torch.inference_mode():
            ours = loaded.model(src, tgt_in)[0]
        difference = float((ours[: len(theirs)] - theirs)[:, allowed].abs().max())
        if math.isnan(difference):
            return math.nan
        worst = max(worst, difference)
    return worst


def _lines(tsv: str, loaded: Loaded, limit: int | None) -> tuple[list[int], list[str], list[str], int]:
    """Numbers, sources and references of the lines that every engine can take whole, and how many others there are."""
    pairs = list(read_pairs(Corpus(tsv=tsv)))[:limit]
    most = loaded.config.data.max_length - 1
    lengths = [len(ids) for ids in loaded.tokenizer.encode_batch([pair.src for pair in pairs])]
    kept = [
        (number, pair.src, pair.tgt)
        for number, (pair, length) in enumerate(zip(pairs, lengths, strict=True), 1)
        if length <= most and not is_blank(pair.src)
    ]
    if not kept:
        raise DataError(f"{tsv} has no line to compare on")
    return [k[0] for k in kept], [k[1] for k in kept], [k[2] for k in kept], len(pairs) - len(kept)


def _texts(translator: Translator, settings: dict[str, Any], sources: list[str]) -> list[str]:
    return [translation.text for translation in translator.translate(list(sources), **settings)]


def _side(texts: list[str], references: list[str], language: str | None, seconds: float) -> Side:
    return Side(bleu(texts, references, language).score, seconds, len(texts) / seconds)


def _timed(translate: Callable[[list[str]], list[str]], sources: list[str]) -> tuple[list[str], float]:
    """The texts, and the seconds that they took after a warm-up."""
    translate(sources[:WARM_UP])
    start = time.perf_counter()
    texts = translate(sources)
    return texts, time.perf_counter() - start
