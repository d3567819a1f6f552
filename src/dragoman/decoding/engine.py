"""From sentences in tokens to hypotheses in tokens: sorted by length, searched in batches, given back in order.

Nothing here knows text. What bounds memory is `batch_tokens`: rows (sentences times beams or samples) times the longest
source of a batch. What a batch holds changes no result: each sentence has its own cap, rules, seed and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dragoman.decoding.beam import BeamSearch
from dragoman.decoding.constraints import Constraints
from dragoman.decoding.continuous import ContinuousDecoder
from dragoman.decoding.force import cut, mask_of, padded
from dragoman.decoding.greedy import Choice, Likeliest, PathSearch
from dragoman.decoding.options import MOST_ROWS, DecodingConfig
from dragoman.decoding.sampling import Draw, Filter, path_seed
from dragoman.decoding.search import Hypothesis, Search, evaluating, run
from dragoman.decoding.speculative import Speculation


@dataclass(frozen=True)
class Job:
    """One sentence to translate."""

    src: list[int]
    """Its tokens, EOS at the end."""
    cap: int
    """The most target tokens, EOS included."""
    prefix: tuple[int, ...] = ()
    """The target tokens that every hypothesis begins with."""


@dataclass(frozen=True)
class Rules:
    """What holds for all sentences of a call: the special ids of their tokenizer, and what is never generated."""

    pad_id: int
    bos_id: int
    """What the decoder reads first."""
    eos_id: int
    banned: tuple[int, ...]
    banned_sequences: tuple[tuple[int, ...], ...] = ()


def decode(
    model: Any,
    jobs: Sequence[Job],
    options: DecodingConfig,
    rules: Rules,
    *,
    device: torch.device | str | None = None,
    draft: Any = None,
) -> list[list[Hypothesis]]:
    """The hypotheses of each job, best first (samples: in the order of their draws), in the order of the jobs.

    `draft` is a faster model over the same vocabulary, which proposes what `model` then accepts or not: the answers
    stay those of `model`. It takes part in greedy search and in sampling.
    """
    if draft is not None:
        return [_speculated(model, draft, job, options, rules, device) for job in jobs]
    copies = options.n_best if options.sample else 1
    width = copies if options.sample or options.greedy else options.beam_size
    if isinstance(model, ContinuousDecoder):

        def make_search(numbers: list[int]) -> tuple[Search, Tensor | None]:
            return _search_of(jobs, numbers, options, rules, None)

        found = model.run(jobs, make_search, width, options.batch_tokens, copies)
    else:
        found = {}
        lengths, most = [len(job.src) for job in jobs], max(1, MOST_ROWS // width)
        for batch in cut(lengths, max(1, options.batch_tokens // width), most):
            sources = [jobs[i].src for i in batch]
            search, rows = _search_of(jobs, batch, options, rules, device)
            src, src_mask = padded(sources, rules.pad_id, device), mask_of(sources, device)
            found |= run(model, src, src_mask, search, rows)
    if not options.sample:
        return [found[i] for i in range(len(jobs))]
    return [[found[i * copies + sample][0] for sample in range(copies)] for i in range(len(jobs))]


def unroll(
    model: Any, job: Job, options: DecodingConfig, rules: Rules, *, device: torch.device | str | None = None
) -> Iterator[list[int]]:
    """Greedy search of one job, giving the tokens so far after each step; the last list is the whole hypothesis."""
    src, src_mask = padded([job.src], rules.pad_id, device), mask_of([job.src], device)
    caps, constraints = _rules_of([job], options, rules, device)
    search = PathSearch([0], caps, constraints, Likeliest(), bos_id=rules.bos_id)
    with torch.no_grad(), evaluating(model):
        state = model.start(src, src_mask)
        while True:
            logits, state = model.step(search.tokens, state)
            advance = search.advance(logits)
            if advance.done:
                yield advance.done[0][1][0].ids
                return
            yield search.path_tokens[0, : int(search.lengths[0])].tolist()


def _search_of(
    jobs: Sequence[Job],
    numbers: Sequence[int],
    options: DecodingConfig,
    rules: Rules,
    device: torch.device | str | None,
) -> tuple[Search, Tensor | None]:
    """The search of the jobs with these numbers, and [R] the place in `numbers` of each row, where that differs.

    Its keys are the jobs' numbers; where each job has several samples, sample s of job i has the key i * samples + s.
    """
    chosen = [jobs[i] for i in numbers]
    if not options.greedy and not options.sample:
        caps, constraints = _rules_of(chosen, options, rules, device)
        beams = BeamSearch(
            numbers,
            caps,
            constraints,
            beam_size=options.beam_size,
            bos_id=rules.bos_id,
            alpha=options.alpha,
            penalty=options.penalty,
            n_best=options.n_best,
        )
        return beams, None
    copies = options.n_best if options.sample else 1
    choice: Choice = Likeliest()
    rows: Tensor | None = None
    if options.sample:
        seeds = [path_seed(options.seed, job.src, sample) for job in chosen for sample in range(copies)]
        choice = Draw(torch.tensor(seeds, dtype=torch.long, device=device), filter_of(options))
        rows = torch.arange(len(chosen), device=device).repeat_interleave(copies) if copies > 1 else None
    caps, constraints = _rules_of([job for job in chosen for _ in range(copies)], options, rules, device)
    paths = PathSearch(
        [i * copies + sample for i in numbers for sample in range(copies)],
        caps,
        constraints,
        choice,
        bos_id=rules.bos_id,
        alpha=options.alpha,
        penalty=options.penalty,
    )
    return paths, rows


def filter_of(options: DecodingConfig) -> Filter:
    """Which part of the distribution sampling draws from."""
    return Filter(options.temperature, options.top_k, options.top_p, options.min_p)


def _rules_of(
    jobs: Sequence[Job], options: DecodingConfig, rules: Rules, device: torch.device | str | None
) -> tuple[Tensor, Constraints]:
    """Caps [R] and constraints of R jobs."""
    caps = torch.tensor([job.cap for job in jobs], dtype=torch.long, device=device)
    constraints = Constraints.of(
        rules.eos_id,
        len(jobs),
        banned=rules.banned,
        banned_sequences=rules.banned_sequences,
        min_length=options.min_length,
        prefixes=[job.prefix for job in jobs],
        no_repeat_ngram=options.no_repeat_ngram,
        device=device,
    )
    return caps, constraints


def _speculated(
    model: Any, draft: Any, job: Job, options: DecodingConfig, rules: Rules, device: torch.device | str | None
) -> list[Hypothesis]:
    """One job by speculative decoding, in as many samples as are asked for."""
    src, src_mask = padded([job.src], rules.pad_id, device), mask_of([job.src], device)
    _, constraints = _rules_of([job], options, rules, device)
    found = []
    with torch.no_grad(), evaluating(model), evaluating(draft):
        for sample in range(options.n_best if options.sample else 1):
            speculation = Speculation(model, draft, src, src_mask, constraints, bos_id=rules.bos_id)
            if options.sample:
                seed = path_seed(options.seed, job.src, sample)
                ids, log_probs = speculation.sample(job.cap, filter_of(options), seed)
            else:
                ids, log_probs = speculation.greedy(job.cap)
            found.append(Hypothesis.of(ids, log_probs, rules.eos_id, options.alpha, options.penalty))
    return found
