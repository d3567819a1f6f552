"""Text in, text out: long lines split, tokens, search, text again, and the order restored.

A `Translator` holds a model, its tokenizer and the run's config. It changes none of them, so threads can share it.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from dragoman import config as toml
from dragoman.decoding.engine import Job, Rules, decode, unroll
from dragoman.decoding.length import score as score_of
from dragoman.decoding.options import SAMPLING, DecodingConfig
from dragoman.decoding.precision import Prepared
from dragoman.decoding.translation import Hypothesis, Translation
from dragoman.errors import ConfigError, DataError
from dragoman.text.corpus import DataConfig
from dragoman.text.keep import cut, glue, is_lost
from dragoman.text.normalise import is_blank, one_line, refuse_surrogates
from dragoman.text.split import join, split

if TYPE_CHECKING:
    from dragoman.decoding.search import Hypothesis as TokenHypothesis
    from dragoman.tokens.tokenizer import Tokenizer

__all__ = ["Defaults", "Hypothesis", "Translation", "Translator", "load"]

log = logging.getLogger("dragoman")

Precision = Literal["float32", "bfloat16", "int8"]

CHUNK = 4096
"""Most lines that `stream` holds at once; it starts with a few, so that the first answers come soon."""
FIRST_CHUNK = 64
CHUNK_CHARACTERS = 4_000_000


Target = str | Sequence[str] | Hypothesis | Translation
"""A text, or the pieces of one, or something translated: the latter two are scored token for token as they stand."""


class Settings(Protocol):
    """The part of a run's config that translating needs."""

    @property
    def data(self) -> DataConfig: ...

    @property
    def decoding(self) -> DecodingConfig: ...


@dataclass(frozen=True)
class Defaults:
    """The config of a translator that was given none."""

    data: DataConfig = field(default_factory=DataConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)


@dataclass(frozen=True)
class _Plan:
    """How one line is translated: the pieces in order."""

    jobs: list[Job] = field(default_factory=list)
    truncated: bool = False


class Translator:
    """A model that takes text and gives text."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        config: Any = None,
        *,
        draft: Any = None,
        device: Any = None,
        precision: Precision = "float32",
    ) -> None:
        """model: a `Decodable`; config: a RunConfig, or anything with `data` and `decoding`.

        draft: a faster model over the same vocabulary, for speculative decoding; precision: what is decoded in, while
        the model stays as it is.
        """
        self.model = model
        self._search_form = Prepared(model, precision)
        self.tokenizer = tokenizer
        self.config: Any = Defaults() if config is None else config
        self.draft = draft
        self._draft_form = None if draft is None else Prepared(draft, precision)
        self.device = device if device is not None else _device_of(model)

    @overload
    def translate(self, texts: str, **options: Any) -> Translation: ...
    @overload
    def translate(self, texts: Iterable[str], **options: Any) -> list[Translation]: ...
    def translate(self, texts: str | Iterable[str], **options: Any) -> Translation | list[Translation]:
        """A text gives a Translation, several give a list in the same order.

        `options` are the fields of DecodingConfig, over the defaults of the config. Raises ConfigError for wrong
        options and DataError for texts that cannot be translated, with every fault.
        """
        chosen = self._search_options(**options)
        if isinstance(texts, str):
            return self._translate([texts], chosen, 1)[0]
        return self._translate(list(texts), chosen, 1)

    def stream(
        self, lines: Iterable[str], *, idle: Callable[[], bool] | None = None, **options: Any
    ) -> Iterator[Translation]:
        """The translations of lines that need not all fit into memory, in order, as soon as each chunk is done.

        `idle`, asked after each line, says that no further line is at hand: what there is gets translated at once.
        """
        chosen = self._search_options(**options)
        first, size, held = 1, FIRST_CHUNK, 0
        chunk: list[str] = []
        for line in lines:
            chunk.append(line)
            held += len(line)
            if len(chunk) >= size or held >= CHUNK_CHARACTERS or (idle is not None and idle()):
                yield from self._translate(chunk, chosen, first)
                first += len(chunk)
                size = min(2 * size, CHUNK)
                chunk, held = [], 0
        yield from self._translate(chunk, chosen, first)

    def stream_text(self, text: str, **options: Any) -> Iterator[str]:
        """Greedy translation as it grows: after each token the text so far, the last being the whole.

        The same text as `translate(text, greedy=True)` gives. A line in several pieces shows one after the other.
        """
        has_beam = options.get("beam_size") not in (None, 1)
        if has_beam or self.draft is not None or not (chosen := self.options(**{"greedy": True, **options})).greedy:
            raise ConfigError("only plain greedy search gives partial output: a beam may still change its mind")
        if chosen.keep:
            raise ConfigError("keep repairs whole lines: it does not go with partial output")
        plan = self._plan([text], chosen, [1])[0]
        before: list[str] = []
        for job in plan.jobs:
            ids: list[int] = []
            for ids in unroll(self._search_form.form(), job, chosen, self._rules(chosen), device=self.device):
                yield join([*before, self.tokenizer.decode(ids)])
            before.append(self.tokenizer.decode(ids))

    def score(
        self,
        pairs: Iterable[tuple[str, Target]],
        alpha: float | None = None,
        *,
        numbers: Sequence[int] | None = None,
        **options: Any,
    ) -> list[Hypothesis]:
        """How likely the model finds given translations, by teacher forcing: the numbers that `translate` reports.

        A text is tokenized, which may cut it otherwise than the model did when it wrote it; pieces, a Hypothesis or a
        Translation are scored token for token. A pair is scored whole, however long. `numbers`: those of the pairs'
        lines, by which errors name them; by default from 1 on.
        """
        if alpha is not None:
            options["alpha"] = alpha
        chosen = self.options(**options)
        tokenizer = self.tokenizer
        listed = list(pairs)
        numbers = numbers or range(1, len(listed) + 1)
        texts = [(n, target) for n, (_, target) in zip(numbers, listed, strict=True) if isinstance(target, str)]
        refuse_surrogates([source for source, _ in listed], "", numbers)
        refuse_surrogates([text for _, text in texts], "target ", [n for n, _ in texts])
        sources = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch([one_line(s) for s, _ in listed])]
        targets = self._target_ids([target for _, target in listed], numbers)

        from dragoman.decoding.force import token_log_probs

        found = token_log_probs(
            self.model if self._search_form.precision == "float32" else self._search_form.form(),
            sources,
            targets,
            tokenizer.bos_id,
            tokenizer.pad_id,
            batch_tokens=chosen.batch_tokens,
            device=self.device,
        )
        return [
            self._hypothesis(ids, float(sum(log_probs)), log_probs, ids[-1:] == [tokenizer.eos_id], chosen)
            for ids, log_probs in zip(targets, found, strict=True)
        ]

    def options(self, **options: Any) -> DecodingConfig:
        """The config's [decoding] with `options` over it; None leaves one as it is. Raises ConfigError."""
        known = [f.name for f in dataclasses.fields(DecodingConfig)]
        wrong = []
        for name in options.keys() - set(known):
            near = difflib.get_close_matches(name, known, n=1)
            wrong.append(f"no such option: {name}" + (f"; did you mean {near[0]}?" if near else ""))
        if wrong:
            raise ConfigError(sorted(wrong))
        given = {name: value for name, value in options.items() if value is not None}
        for name in ("ban", "keep"):
            if isinstance(given.get(name), str):
                given[name] = (given[name],)
        # Asking for one way of searching takes back the config's choice of another.
        if given.get("greedy"):
            given = {"sample": False, "n_best": 1, **given}
        elif given.get("sample") or "beam_size" in given:
            given = {"greedy": False, "sample": False, **given}
        tree = {name: getattr(self.config.decoding, name) for name in known}
        chosen = toml.build(DecodingConfig, {**tree, **given})
        idle = [name for name, plain in SAMPLING.items() if not chosen.sample and given.get(name, plain) != plain]
        if idle:
            raise ConfigError([f"{name} belongs to sampling: ask for sample as well" for name in idle])
        if given.get("beam_size", 1) > 1 and (chosen.greedy or chosen.sample):
            way = "greedy search" if chosen.greedy else "sampling"
            raise ConfigError(f"beam_size belongs to beam search, and {way} has no beam: choose one")
        return chosen

    def _search_options(self, **options: Any) -> DecodingConfig:
        """As `options`, for a search."""
        chosen = self.options(**options)
        if self.draft is not None and not (chosen.greedy or chosen.sample):
            raise ConfigError("a draft model takes part in greedy search and in sampling: ask for greedy or sample")
        return chosen

    def _searcher(self) -> Any:
        """What searches: where a draft proposes, float32 is checked by whole passes of the model itself."""
        if self._draft_form is not None and self._search_form.precision == "float32":
            return self.model
        return self._search_form.form()

    # The way of a chunk of lines: plan, decode, put together.

    def _translate(self, lines: list[str], options: DecodingConfig, first_line: int) -> list[Translation]:
        if not lines:
            return []
        results = self._answers(lines, options, range(first_line, first_line + len(lines)))
        if options.keep:
            results = self._kept(results, options)
        for result in results:
            if result.hypotheses and not result.text.strip():
                log.warning("line %d: the translation of a line that is not blank is empty", result.line)
        return results

    def _answers(self, lines: list[str], options: DecodingConfig, numbers: Sequence[int]) -> list[Translation]:
        """The translations of lines with these numbers, as the model gives them."""
        plans = self._plan(lines, options, numbers)
        jobs = [job for plan in plans for job in plan.jobs]
        draft = None if self._draft_form is None else self._draft_form.form()
        found = iter(
            decode(self._searcher(), jobs, options, self._rules(options), device=self.device, draft=draft)
            if jobs
            else []
        )
        pieces = [[next(found) for _ in plan.jobs] for plan in plans]
        results = [
            Translation(number, line, self._join(of_line, options), plan.truncated, max(1, len(plan.jobs)))
            for number, line, plan, of_line in zip(numbers, lines, plans, pieces, strict=True)
        ]
        return self._aligned(results, plans, pieces, options) if options.alignment else results

    def _kept(self, translations: list[Translation], options: DecodingConfig) -> list[Translation]:
        """The same, but where what `keep` matches was lost or changed: there the rest is translated around it."""
        cuts: dict[int, list[str]] = {}
        texts: list[str] = []
        for i, translation in enumerate(translations):
            line = self.tokenizer.normalise(one_line(translation.source))
            code, line = self.tokenizer.split_language_code(line)
            parts = cut(line, options.keep)
            if is_lost(parts, translation.text):
                cuts[i] = parts
                texts += [part if is_blank(part) else code + part for part in parts[::2]]
        if not cuts:
            return translations
        plain = dataclasses.replace(options, keep=(), min_length=0)
        numbers = [translations[i].line for i, parts in cuts.items() for _ in parts[::2]]
        found = iter(self._answers(texts, plain, numbers))
        results = list(translations)
        for i, parts in cuts.items():
            translated = [next(found) for _ in parts[::2]]
            whole = [each.hypotheses[0] for each in translated if each.hypotheses]
            text = glue(parts, [each.text for each in translated])
            results[i] = dataclasses.replace(
                translations[i],
                hypotheses=[dataclasses.replace(self._sum(whole, options), text=text)],
                truncated=any(each.truncated for each in translated),
                pieces=max(1, len(whole)),
            )
        return results

    def _plan(self, lines: list[str], options: DecodingConfig, numbers: Sequence[int]) -> list[_Plan]:
        """The jobs of each line: none for a blank one, several for one that is split."""
        refuse_surrogates(lines, numbers=numbers)
        limit = self.config.data.max_length
        tokenizer = self.tokenizer
        plans = [_Plan() for _ in lines]
        filled = [i for i, line in enumerate(lines) if not is_blank(line)]
        texts = {i: one_line(lines[i]) for i in filled}
        encoded = dict(zip(filled, tokenizer.encode_batch([texts[i] for i in filled]), strict=True))
        prefix = tuple(tokenizer.encode_target(options.prefix)) if options.prefix else ()
        if tokenizer.unk_id in prefix:
            raise DataError(f"the prefix {options.prefix!r} holds what the model's vocabulary has no pieces for")
        wrong: list[str] = []
        for i in filled:
            number, sources, truncated = numbers[i], [encoded[i]], False
            if not sources[0]:
                log.warning("line %d: nothing in it is known to the tokenizer, so its translation is empty", number)
                continue
            if len(sources[0]) > limit:
                told = f"line {number} has {len(sources[0]):,} tokens, more than the {limit:,} of data.max_length"
                if options.long_input == "error":
                    wrong.append(f"{told}: shorten it, or let it be split or truncated (long_input)")
                    continue
                if options.long_input == "truncate":
                    log.warning("%s: the end of it is left out", told)
                    sources, truncated = [sources[0][:limit]], True
                else:
                    sources = self._in_pieces(texts[i], limit)
            jobs = []
            for k, ids in enumerate(sources):
                cap = max(1, len(ids) + 1 + options.max_extra)
                jobs.append(Job([*ids, tokenizer.eos_id], cap, prefix if k == 0 else ()))
                what = f"line {number}" if len(sources) == 1 else f"part {k + 1} of line {number}"
                told = f"{cap:,}, which is the cap of {what}: its {len(ids) + 1:,} source tokens with EOS"
                told += f" + max_extra {options.max_extra:,}"
                if options.min_length > cap:
                    wrong.append(f"min_length {options.min_length:,} is above {told}")
                if len(jobs[-1].prefix) > cap:
                    wrong.append(f"the prefix has {len(prefix):,} tokens, more than {told}")
            plans[i] = _Plan(jobs, truncated)
        if wrong:
            raise DataError(wrong)
        return plans

    def _in_pieces(self, text: str, limit: int) -> list[list[int]]:
        """The tokens of a text of more than `limit`, piece by piece, each with the text's language code before it."""
        code, text = self.tokenizer.split_language_code(text)
        n = self._count([code])[0] if code else 0
        pieces = split(text, max(1, limit - n), self._count, self.config.data.src_lang)
        return [ids for ids in self.tokenizer.encode_batch([code + piece for piece in pieces]) if len(ids) > n]

    def _count(self, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in self.tokenizer.encode_batch(texts)]

    def _rules(self, options: DecodingConfig) -> Rules:
        tokenizer = self.tokenizer
        sequences = [tuple(ids) for ids in tokenizer.encode_target_batch(list(options.ban))] if options.ban else []
        return Rules(
            tokenizer.pad_id,
            tokenizer.bos_id,
            tokenizer.eos_id,
            tuple({*tokenizer.banned_ids, tokenizer.unk_id}),
            tuple(filter(None, sequences)),
        )

    def _join(self, pieces: list[list[TokenHypothesis]], options: DecodingConfig) -> list[Hypothesis]:
        """The hypotheses of a line from those of its pieces: the first with the first, the second with the second."""
        texts = [
            [
                self._hypothesis(found.ids, found.log_prob, found.token_log_probs, found.finished, options)
                for found in hypotheses
            ]
            for hypotheses in pieces
        ]
        if len(texts) <= 1:
            return texts[0] if texts else []
        return [self._sum(parts, options) for parts in zip(*texts, strict=False)]

    def _sum(self, parts: Sequence[Hypothesis], options: DecodingConfig) -> Hypothesis:
        """Parts of a line as one: log-probabilities and lengths are sums, the score follows by the rule."""
        log_prob = sum(part.log_prob for part in parts)
        length = sum(part.length for part in parts)
        return Hypothesis(
            join([part.text for part in parts]),
            score_of(log_prob, length, options.alpha, options.penalty),
            log_prob,
            length,
            all(part.finished for part in parts),
            [token for part in parts for token in part.tokens],
            [each for part in parts for each in part.token_log_probs],
        )

    def _hypothesis(
        self, ids: list[int], log_prob: float, log_probs: list[float], finished: bool, options: DecodingConfig
    ) -> Hypothesis:
        text = self.tokenizer.decode(ids[:-1] if finished else ids)
        pieces = [self.tokenizer.id_to_piece(index) for index in ids]
        score = score_of(log_prob, len(ids), options.alpha, options.penalty)
        return Hypothesis(text, score, log_prob, len(ids), finished, pieces, log_probs)

    def _target_ids(self, targets: list[Target], numbers: Sequence[int]) -> list[list[int]]:
        """Tokens of given translations, EOS at the end of all but those that say they are unfinished."""
        tokenizer = self.tokenizer
        texts = [one_line(target) for target in targets if isinstance(target, str)]
        encoded = iter(tokenizer.encode_target_batch(texts) if texts else [])
        ids = []
        for number, target in zip(numbers, targets, strict=True):
            if isinstance(target, str):
                ids.append([*next(encoded), tokenizer.eos_id])
            else:
                tokens = target.tokens if isinstance(target, Hypothesis | Translation) else target
                ids.append([tokenizer.piece_to_id(token) for token in tokens])
                unknown = [t for t, index in zip(tokens, ids[-1], strict=True) if tokenizer.id_to_piece(index) != t]
                if unknown:
                    raise DataError(f"target line {number}: {unknown[0]!r} is no piece of the model's vocabulary")
        return ids

    def _aligned(
        self,
        translations: list[Translation],
        plans: list[_Plan],
        found: list[list[list[TokenHypothesis]]],
        options: DecodingConfig,
    ) -> list[Translation]:
        """The same translations with the alignment of each hypothesis, pieces counted through."""
        from dragoman.decoding.align import alignments

        tokenizer = self.tokenizer
        sources, targets, places = [], [], []
        for i, (translation, plan) in enumerate(zip(translations, plans, strict=True)):
            for k in range(len(translation.hypotheses)):
                from_source = from_target = 0
                for job, hypotheses in zip(plan.jobs, found[i], strict=True):
                    piece = hypotheses[k]
                    sources.append(job.src)
                    targets.append(piece.ids[:-1] if piece.finished else piece.ids)
                    places.append((i, k, from_source, from_target))
                    from_source += len(job.src)
                    from_target += len(piece.ids)
        model = getattr(self.model, "models", (self.model,))[0]  # of an ensemble, the first
        aligned = alignments(
            model,
            sources,
            targets,
            tokenizer.bos_id,
            tokenizer.pad_id,
            batch_tokens=options.batch_tokens,
            device=self.device,
        )
        pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for (i, k, s0, t0), of_piece in zip(places, aligned, strict=True):
            pairs.setdefault((i, k), []).extend((s0 + s, t0 + t) for s, t in of_piece)
        results = []
        for i, (translation, plan) in enumerate(zip(translations, plans, strict=True)):
            told = [
                dataclasses.replace(hypothesis, alignment=pairs.get((i, k), []))
                for k, hypothesis in enumerate(translation.hypotheses)
            ]
            tokens = [tokenizer.id_to_piece(index) for job in plan.jobs for index in job.src]
            results.append(dataclasses.replace(translation, hypotheses=told, source_tokens=tokens))
        return results


def load(
    folder: str | Path,
    device: str = "cpu",
    precision: Precision = "float32",
    *,
    ensemble: Sequence[str | Path] = (),
    draft: str | Path | None = None,
) -> Translator:
    """The translator of a model folder.

    `ensemble`: folders of more models, whose probabilities are averaged with its own; `draft`: the folder of a faster
    model that proposes tokens for it to check. All must have its tokenizer. Raises ModelError.
    """
    from dragoman.checkpoints.store import load_model
    from dragoman.decoding.ensemble import Ensemble, check_members
    from dragoman.model.devices import check_device

    check_device(device)
    folders = [folder, *ensemble, *([] if draft is None else [draft])]
    loaded = [load_model(each, device) for each in folders]
    check_members([str(each) for each in folders], [one.tokenizer for one in loaded])
    models = [one.model for one in loaded]
    proposer = None if draft is None else models.pop()
    model = models[0] if len(models) == 1 else Ensemble(models)
    return Translator(model, loaded[0].tokenizer, loaded[0].config, draft=proposer, device=device, precision=precision)


def _device_of(model: Any) -> Any:
    """Where the parameters are; the CPU for a model that shows none."""
    parameters = getattr(model, "parameters", None)
    first = next(parameters(), None) if callable(parameters) else None
    return "cpu" if first is None else first.device
