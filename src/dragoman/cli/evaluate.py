"""`dragoman evaluate`: translate a test set and score it, or score text that one has."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dragoman.cli.threads import Threads, use_threads
from dragoman.errors import DataError, UsageError

if TYPE_CHECKING:
    from dragoman.scores import Comparison, LineScore, Score
    from dragoman.scores.testset import TestSet
    from dragoman.translator import Translator

NAMES = {"bleu": "BLEU", "chrf": "chrF2", "ter": "TER"}
SHOWN = 10
"""Line numbers that are listed for a fault of the outputs."""


def command(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of the model to evaluate.")] = None,
    tsv: Annotated[str | None, typer.Option(metavar="FILE", help="Test set: source TAB reference.")] = None,
    src: Annotated[str | None, typer.Option(metavar="FILE", help="Sources, one a line.")] = None,
    ref: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="References, one a line; again for more of them.")
    ] = None,
    refs_json: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON list: for each line the list of all its references.")
    ] = None,
    hyp: Annotated[
        str | None, typer.Option(metavar="FILE", help="Score these translations (- is stdin) instead of a MODEL's.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="OTHER", help="Compare with a model folder or a file of hypotheses: paired bootstrap."),
    ] = None,
    tgt_lang: Annotated[
        str | None,
        typer.Option(
            metavar="CODE", help="Target language, which picks the tokenizer; else the model's, or by script."
        ),
    ] = None,
    per_line: Annotated[bool, typer.Option("--per-line", help="BLEU and chrF of every line as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Save the hypotheses here.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --out.")] = False,
    beam_size: Annotated[int | None, typer.Option(min=1, help="Hypotheses kept at each step.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Strength of the length penalty.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens translated at once in each thread.")] = None,
    precision: Annotated[
        Literal["float32", "bfloat16", "int8"], typer.Option(help="Of the model's weights.")
    ] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Threads = None,
    invalid_utf8: Annotated[
        Literal["error", "replace"], typer.Option(help="Bytes that are not UTF-8: stop, or read each as U+FFFD.")
    ] = "error",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No talk on stderr.")] = False,
) -> None:
    """Score a MODEL on a test set: BLEU, chrF and TER with sacreBLEU's signatures, and perplexity.

    The test set is --tsv FILE, or --src FILE with --ref FILE (repeated for more references) or --refs-json FILE.
    With --hyp FILE no model is needed, and no sources.
    """
    refs = ref or []
    _check_usage(model, tsv, src, refs, refs_json, hyp, against, out)
    if out is not None and out.exists() and not force:
        raise DataError(f"{out} is there already; --force overwrites it")

    from dragoman.scores.testset import read_hypotheses, read_test_set

    test = read_test_set(tsv, src, refs, refs_json, invalid_utf8)
    talk = _Talk(quiet)
    options: dict[str, Any] = {"beam_size": beam_size, "alpha": alpha, "batch_tokens": batch_tokens}
    options = {name: value for name, value in options.items() if value is not None}
    if model is not None or (against is not None and not _is_text(against)):
        _prepare(threads, quiet)

    def system(name: str, is_text: bool) -> System:
        if is_text:
            return System(name, read_hypotheses(name, test, invalid_utf8), None, None)
        from dragoman.translator import load

        return _translate(name, load(name, device=device, precision=precision), test, options, talk)

    ours = system(hyp if hyp is not None else model or "", hyp is not None)
    if out is not None:
        _save(out, ours.hypotheses)
    other = None if against is None else system(against, _is_text(against))
    language = _language(tgt_lang, ours, other, test, talk)
    report = _Report(ours, other, test, language)
    report.talk_of_faults(talk)
    if per_line:
        write = report.lines_as_json if as_json else report.lines_as_tsv
        write(sys.stdout)
    if as_json:
        sys.stdout.write(json.dumps(report.as_json(), ensure_ascii=False) + "\n")
    else:
        # Beside the rows of --per-line the summary is talk: stdout stays a table that a spreadsheet reads.
        print(report.as_text(), file=sys.stderr if per_line else sys.stdout)


@dataclass(frozen=True)
class System:
    """What is scored: a model's translations, or those of a file."""

    name: str
    hypotheses: list[str]
    perplexity: float | None
    """Of the first references, per target token; None for a file, which gives no probabilities."""
    tgt_lang: str | None


class _Talk:
    """Sentences on stderr, unless --quiet."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet

    def __call__(self, sentence: str) -> None:
        if not self.quiet:
            print(sentence, file=sys.stderr, flush=True)


class _Report:
    """The scores of one run, and the ways to show them."""

    def __init__(self, ours: System, other: System | None, test: TestSet, language: str | None) -> None:
        from dragoman.scores import bleu, chrf, paired_bootstrap, ter, tokenizer_for

        self.ours, self.other, self.test, self.language = ours, other, test, language
        self.remark = tokenizer_for(language)[1]
        self.scores: dict[str, Score] = {
            name: metric(ours.hypotheses, test.references, language)
            for name, metric in (("bleu", bleu), ("chrf", chrf), ("ter", ter))
        }
        self.comparison: dict[str, Comparison] = (
            {} if other is None else paired_bootstrap(ours.hypotheses, other.hypotheses, test.references, language)
        )

    def faults(self, system: System) -> tuple[list[int], list[int]]:
        """Line numbers of the empty outputs and of those that loop."""
        from dragoman.scores import empty_outputs, looping_outputs

        sources = self.test.sources
        return empty_outputs(system.hypotheses, sources), looping_outputs(system.hypotheses, sources)

    def talk_of_faults(self, talk: _Talk) -> None:
        """On stderr: outputs that are empty, loop or look tokenised, and a tokenizer of second choice."""
        for system in filter(None, (self.ours, self.other)):
            empty, loops = self.faults(system)
            total = len(system.hypotheses)
            if empty:
                talk(f"{system.name}: {len(empty)} of {total} outputs are empty ({_listed(empty)})")
            if loops:
                talk(f"{system.name}: {len(loops)} of {total} outputs repeat themselves ({_listed(loops)})")
            spaced = sum(line.endswith(" .") for line in system.hypotheses)
            if spaced >= 20 and 2 * spaced > total:
                talk(f"{system.name}: {spaced} outputs end in ' .': BLEU is for detokenised text")
        if self.remark is not None:
            talk(self.remark)

    def as_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        empty, loops = self.faults(self.ours)
        report: dict[str, Any] = {
            name: {"score": score.score, "signature": score.signature} for name, score in self.scores.items()
        }
        report |= {"perplexity": _finite(self.ours.perplexity), "n": len(self.test)}
        report |= {"empty": len(empty), "loops": len(loops)}
        if self.other is not None:
            empty, loops = self.faults(self.other)
            report["against"] = {
                "name": self.other.name,
                **{
                    name: {
                        "score": compared.baseline,
                        "p_value": compared.p_value,
                        "difference": compared.score - compared.baseline,
                        "signature": compared.signature,
                    }
                    for name, compared in self.comparison.items()
                },
                "perplexity": _finite(self.other.perplexity),
                "empty": len(empty),
                "loops": len(loops),
            }
        return report

    def as_text(self) -> str:
        """The summary for a person."""
        lines = []
        for name, score in self.scores.items():
            lines.append(f"{NAMES[name]:<10} {score.score:7.2f}  {score.signature}")
            if name == "bleu" and score.detail:
                lines.append(f"{'':<10} {'':>7}  {score.detail}")
        if self.ours.perplexity is not None:
            lines.append(f"perplexity {self.ours.perplexity:7.2f}  per target token, end of sentence included")
        empty, loops = self.faults(self.ours)
        lines.append(f"{'lines':<10} {len(self.test):7d}  {len(empty)} empty, {len(loops)} looping outputs")
        if self.other is not None:
            signature = self.comparison["bleu"].signature
            bootstrap = "|".join(part for part in signature.split("|") if part.startswith(("bs:", "seed:")))
            lines += ["", f"against {self.other.name} (paired bootstrap, {bootstrap}; ± is the 95 % interval)"]
            lines.append(f"{'':<10} {'this':>16} {'other':>16} {'difference':>11} {'p':>8}")
            for name, compared in self.comparison.items():
                this, that = (
                    f"{value:.2f} ± {half:.2f}"
                    for value, half in (
                        (compared.score, compared.interval),
                        (compared.baseline, compared.baseline_interval),
                    )
                )
                lines.append(
                    f"{NAMES[name]:<10} {this:>16} {that:>16} {compared.score - compared.baseline:>+11.2f} "
                    f"{compared.p_value:>8.4f}"
                )
            if self.other.perplexity is not None and self.ours.perplexity is not None:
                lines.append(f"perplexity {self.ours.perplexity:>16.2f} {self.other.perplexity:>16.2f}")
        return "\n".join(lines)

    def line_scores(self) -> list[LineScore]:
        from dragoman.scores import line_scores

        return line_scores(self.ours.hypotheses, self.test.references, self.language)

    def lines_as_tsv(self, stream: Any) -> None:
        """line, BLEU, chrF, hypothesis, first reference; TAB and backslash in text are escaped."""
        for i, score in enumerate(self.line_scores()):
            texts = (_escaped(text) for text in (self.ours.hypotheses[i], self.test.first[i]))
            stream.write("\t".join((str(i + 1), f"{score.bleu:.2f}", f"{score.chrf:.2f}", *texts)) + "\n")

    def lines_as_json(self, stream: Any) -> None:
        for i, score in enumerate(self.line_scores()):
            row: dict[str, Any] = {"line": i + 1, "bleu": score.bleu, "chrf": score.chrf}
            if self.test.sources is not None:
                row["source"] = self.test.sources[i]
            row |= {"hypothesis": self.ours.hypotheses[i], "references": self.test.all_of(i)}
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def _check_usage(
    model: str | None,
    tsv: str | None,
    src: str | None,
    refs: list[str],
    refs_json: str | None,
    hyp: str | None,
    against: str | None,
    out: Path | None,
) -> None:
    problems = []
    if (model is None) == (hyp is None):
        problems.append("give either a MODEL or --hyp FILE" + ("" if model is None else ", not both"))
    if tsv is not None and (src is not None or refs):
        problems.append("--tsv has sources and references; it does not go with --src and --ref")
    if refs and refs_json is not None:
        problems.append("give the references by --ref or by --refs-json, not by both")
    if tsv is None and not refs and refs_json is None:
        problems.append("there are no references: give --tsv FILE, --ref FILE or --refs-json FILE")
    sources_needed = [
        name for name in (model, against) if name is not None and not (name is against and _is_text(name))
    ]
    if sources_needed and tsv is None and src is None:
        problems.append(f"{sources_needed[0]} has to translate something: give --src FILE or --tsv FILE")
    if against is not None and against != "-" and not Path(against).exists():
        problems.append(f"--against {against}: there is no such model folder or file")
    if hyp == "-" and against == "-":
        problems.append("--hyp and --against cannot both be stdin")
    if hyp is not None and out is not None:
        problems.append("--out saves a model's hypotheses; those of --hyp are in a file already")
    if problems:
        raise UsageError(problems)


def _is_text(name: str) -> bool:
    """Whether --against names a file of hypotheses; a folder is a model."""
    return name == "-" or Path(name).is_file()


def _prepare(threads: int | None, quiet: bool) -> None:
    """Settings of the process: processor threads, and whether the translator's warnings are shown."""
    if quiet:
        logging.getLogger("dragoman").setLevel(logging.ERROR)
    use_threads(threads)


def _translate(name: str, translator: Translator, test: TestSet, options: dict[str, Any], talk: _Talk) -> System:
    sources = test.sources or []
    talk(f"{name}: translating {len(sources):,} lines")
    begun = time.monotonic()
    hypotheses = [translation.text for translation in translator.translate(sources, **options)]
    talk(f"{name}: {len(sources):,} lines in {time.monotonic() - begun:.1f} s")
    perplexity, left_out = _perplexity(translator, sources, test.first)
    if left_out:
        talk(f"{name}: perplexity is without {left_out} lines that have a blank side")
    return System(name, hypotheses, perplexity, translator.config.data.tgt_lang or None)


def _perplexity(translator: Translator, sources: Sequence[str], targets: Sequence[str]) -> tuple[float | None, int]:
    """exp of the unsmoothed negative log-likelihood per target token, EOS included; how many lines it leaves out."""
    from dragoman.text.normalise import is_blank

    both = zip(sources, targets, strict=True)
    pairs = [(src, tgt) for src, tgt in both if not (is_blank(src) or is_blank(tgt))]
    left_out = len(sources) - len(pairs)
    if not pairs:
        return None, left_out
    scored = translator.score(pairs)
    log_prob, tokens = sum(pair.log_prob for pair in scored), sum(pair.length for pair in scored)
    nll = -log_prob / tokens
    return math.exp(nll) if nll < 700 else math.inf, left_out


def _language(tgt_lang: str | None, ours: System, other: System | None, test: TestSet, talk: _Talk) -> str | None:
    """--tgt-lang, else what the model says, else what the script of the references shows."""
    known = tgt_lang or ours.tgt_lang or (other.tgt_lang if other is not None else None)
    if known is not None:
        return known
    from dragoman.scores import guess_language

    guess = guess_language(test.first)
    if guess is not None:
        talk(f"the references are taken for {guess} by their script; --tgt-lang CODE says otherwise")
    return guess


def _save(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(line + "\n" for line in lines)


def _listed(numbers: list[int]) -> str:
    more = ", …" if len(numbers) > SHOWN else ""
    return f"line{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:SHOWN]))}{more}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\t", "\\t")


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
